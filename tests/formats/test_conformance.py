"""What every format must do, run over the registry and the fixtures: a new format brings data, not tests.

Truth files (`fixtures/FORMAT/CASE.truth.safetensors`, keys `STATE/NAME`) were taken from live runs of the real system,
so the oracle shares nothing with our readers.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.progress import Silent
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import Fitting
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Comparison
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.run.scan import digests_of
from ckpt_tool.sources.opening import open_source
from ckpt_tool.storage.source import Tree

FIXTURES = Path(__file__).parents[2] / "fixtures"


def _cases():
    for name in registry.NAMES:
        for path in sorted((FIXTURES / name).glob("*")):
            if ".truth." not in path.name and path.suffix not in (".md", ".json"):
                yield pytest.param(name, path, id=f"{name}-{path.name}")


CASES = list(_cases())
each_case = pytest.mark.parametrize(("name", "path"), CASES)


def raw(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def stem(path):
    return path.parent / (path.name.split(".")[0] if path.is_file() else path.name)


def test_every_format_has_a_fixture():
    assert set(registry.NAMES) == {param.values[0] for param in CASES}


@pytest.mark.parametrize("name", registry.NAMES)
def test_the_module_states_its_specification_and_source(name):
    text = sys.modules[type(registry.by_name(name)).__module__].__doc__ or ""
    assert len(text) > 600 and re.search(r"(?i)specification|source", text), "the docstring is the specification"
    assert re.search(r"\d+\.\d+|DESIGN", text), "it names the version that each fact was taken from"


@each_case
def test_only_it_detects(name, path):
    tree = Tree(path)
    assert registry.detect(tree)[0].name == name
    assert tree.bytes_read <= 64 << 10, "detection reads names and at most 64 KiB"


@each_case
def test_boxes_tile_and_rows_tell_the_same(name, path):
    catalog = open_source(str(path), Reading()).catalog
    catalog.check()
    assert {(row.name, row.state, row.shape, row.dtype) for row in catalog.rows()} == {
        (t.key.name, t.key.state, t.shape, t.dtype) for t in catalog.tensors.values()
    }


@pytest.mark.parametrize("name", registry.NAMES)
def test_reads_headers_only(name, tmp_path):
    values = {f"layers.{i}.w1.weight": np.arange(1 << 20, dtype="f4").reshape(1024, -1) for i in range(4)}
    source = tmp_path / "model.safetensors"
    if registry.by_name(name).holds.adapter:  # which is written from one
        source = tmp_path / "adapter"
        source.mkdir()
        (source / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file(values, source / "adapter_model.safetensors" if source.is_dir() else source)
    convert(
        str(source),
        str(tmp_path / "out"),
        Reading(),
        Writing(to=name, dialect="keep"),
        Silent(),
    )
    opened = open_source(str(tmp_path / "out"), Reading())
    opened.catalog.check()
    assert sum(row.nbytes for row in opened.catalog.rows()) >= 16 << 20
    assert opened.tree.bytes_read <= 256 << 10, "a reader touched tensor bytes"


@each_case
def test_values_equal_the_live_run(name, path):
    truth = stem(path).with_name(stem(path).name + ".truth.safetensors")
    if not truth.exists():
        pytest.skip(f"no truth file {truth.name}: its values are compared in another test")
    opened = open_source(str(path), Reading())
    catalog = OpenCatalog(opened.tree, opened.catalog)
    with safe_open(truth, "pt") as f:
        want = {tuple(key.split("/", 1)) for key in f.keys()}
        have = {(key.state, key.name) for key in opened.catalog.tensors}
        assert have == want
        for state, key in sorted(want):
            import torch

            tensor = f.get_tensor(f"{state}/{key}")
            lazy = catalog.state(state)[key]
            assert lazy.shape == tuple(tensor.shape)
            theirs = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            assert raw(lazy.numpy()) == theirs, f"{state}/{key}"


@pytest.mark.share(32)
@pytest.mark.parametrize("other", registry.NAMES)
@each_case
def test_there_and_back_through_every_format(name, path, other, tmp_path):
    through = tmp_path / "through"
    back = tmp_path / "back"
    done = _convert(path, through, other)
    if not done:
        return
    same = diff(str(path), str(through), Reading(), progress=Silent())
    left = {d["state"] for d in same["differences"]}
    holds_all = registry.by_name(other).holds.all_states
    kinds = {d["kind"] for d in same["differences"]}
    if (
        isinstance(registry.by_name(other), Fitting) and holds_all
    ):  # it keeps some states with other tensors, and names the states
        said = {entry["state"] for entry in done["dropped"]}
        made = {"missing_left", "missing_right", "dtype"}  # dtype: main weights are the model here, the master there
        assert left <= said and kinds <= made, (other, same["differences"][:3])
        tied = other.startswith("paddle")  # whose jobs keep the states of a tied pair under other names
        main = "dtype" in kinds and "megatron" in other and left <= {"model", "master"}
        assert tied or main or left <= {"step"} or "master" in {d.key.state for d in _tensors(path)}
    else:
        assert same["equal"] or (not holds_all and kinds == {"missing_right"}), (other, same["differences"][:3])
    returned = _convert(through, back, name) if same["equal"] else None
    if returned:
        states = ("model",) if not registry.by_name(name).holds.all_states else ()
        again = diff(str(path), str(back), Reading(), Comparison(states=states), progress=Silent())
        made = {
            d["state"] for d in again["differences"] if d["kind"] == "missing_left"
        }  # what only `back` has, and said
        fits = isinstance(registry.by_name(name), Fitting) and len(made) == len(
            {d["state"] for d in again["differences"]}
        )
        assert again["equal"] or (fits and made <= {entry["state"] for entry in returned["dropped"]}), (
            other,
            again["differences"][:3],
        )
    assert "model" not in left or holds_all is False or isinstance(registry.by_name(other), Fitting)


def _tensors(path):
    return open_source(str(path), Reading()).catalog.tensors.values()


def _convert(source, target, to):
    """The report of a conversion; None where the format says in words that it can't hold this checkpoint."""
    try:
        return convert(str(source), str(target), Reading(), Writing(to=to, verify="full", dialect="keep"), Silent())
    except CkptError as e:
        assert (
            e.exit_code == 2 and e.code in ("E0249", "E0258", "E2001", "E0259", "E0286", "E1433")
        ) or e.code == "E1600", (
            to,
            e,
        )
        return None


@pytest.mark.share(12)
@each_case
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp": 3}, {"tp": 3, "dp": 2}], ids=str)
def test_digests_do_not_depend_on_the_mesh(name, path, degrees, tmp_path):
    fmt = registry.by_name("sharded")
    opened = open_source(str(path), Reading())
    want = digests_of(opened.catalog, opened.tree)
    if any(t.dtype.name in fmt.holds.dtypes for t in opened.catalog.tensors.values()):
        pytest.skip("holds a dtype that safetensors has no name for")
    convert(str(path), str(tmp_path / "out"), Reading(), Writing(to="sharded", degrees=degrees), Silent())
    back = open_source(str(tmp_path / "out"), Reading())
    have = digests_of(back.catalog, back.tree)
    assert have == dict(back.catalog.digests)
    steps = {key for key in have if key.state == "step" and key not in want}  # of an optimizer's one count
    assert {key: each for key, each in have.items() if key not in steps} == want
    assert not steps or opened.catalog.count is not None


def test_a_key_that_is_missing_is_told_with_near_misses():
    param = next(p for p in CASES if p.values[0] == "safetensors")
    opened = open_source(str(param.values[1]), Reading())
    with pytest.raises(KeyError, match="did you mean"):
        OpenCatalog(opened.tree, opened.catalog)["model.layers.0.mlp.down_proj.wieght"]
    assert TensorKey("x") not in opened.catalog.tensors
