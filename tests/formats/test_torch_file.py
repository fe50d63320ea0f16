"""torch files both ways: fixtures by torch.save read as their truth says; what we write is loaded by torch.load."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from targets import FIXTURES, along_rows, bits, gather, ramp, rewanted, values_of, wanted_of, write
from torch import nn

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.extras import Opaque
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError, UsageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.torch.torch_save.format import FORMAT

CASES = sorted(
    path.name.removesuffix(".truth.safetensors") for path in (FIXTURES / "torch").glob("*.truth.safetensors")
)


def path_of(case: str) -> Path:
    path = FIXTURES / "torch" / case
    return path if path.is_dir() else path.with_suffix(".pt")


def read(path: Path, **options: Any) -> tuple[Tree, Catalog]:
    tree = Tree(path)
    assert FORMAT.detect(tree) is not None
    return tree, FORMAT.read(tree, ReadOptions(**options))


def rewritten(path: Path, out: Path, **rest: Any) -> Catalog:
    """Read `path`, lay it out again below `out`."""
    tree, catalog = read(path)
    wanted = rewanted(catalog, **rest)
    write(FORMAT.target(wanted, along_rows(wanted)), out, values_of(tree, catalog))
    return catalog


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and np.array_equal(bits(got), bits(want))


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_fixtures_hold_what_the_run_held(case: str) -> None:
    tree, catalog = read(path_of(case))
    truth = load_file(FIXTURES / "torch" / f"{case}.truth.safetensors")
    assert {f"{key.state}/{key.name}" for key in catalog.tensors} == set(truth)
    for key, tensor in catalog.tensors.items():
        np.testing.assert_array_equal(gather(tree, tensor), bits(truth[f"{key.state}/{key.name}"]), err_msg=str(key))
    said = json.loads((FIXTURES / "torch" / f"{case}.truth.json").read_text())["extras"]
    said.pop("ids", None)
    have = plain(catalog.extras)
    for key, value in said.items():
        assert have[key] == value
    assert not catalog.unsafe
    catalog.check()


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return "inf" if value == float("inf") else value


def test_names_of_numbered_parameters_equal_the_runs_own() -> None:
    for case in ("training", "training_groups", "training_named", "tutorial", "legacy"):
        _, catalog = read(path_of(case))
        ids = json.loads((FIXTURES / "torch" / f"{case}.truth.json").read_text())["extras"]["ids"]
        (recorded,) = (dict(names) for _, names in catalog.hints.plain["roots"]["ids"])
        assert recorded == ids


def test_shared_and_repeated_bytes_are_noted() -> None:
    _, catalog = read(path_of("structures"))
    notes = {note.code: note.message for note in catalog.notes}
    assert "tied.a = tied.b" in notes["N-tied"] and "expanded" in notes["N-expanded"]


def test_extension_and_stem_do_not_count(tmp_path: Path) -> None:
    for name in ("weights", "weights.safetensors", "x.json"):
        torch.save({"a.b": ramp((3,))}, tmp_path / name)
        assert set(read(tmp_path / name)[1].tensors) == {TensorKey("a.b")}


def test_a_bare_tensor_and_a_list_are_states_too(tmp_path: Path) -> None:
    torch.save(ramp((2, 2)), tmp_path / "one.pt")
    torch.save([ramp((2,)), 5, {"w": ramp((3,))}], tmp_path / "list.pt")
    assert [str(key) for key in read(tmp_path / "one.pt")[1].tensors] == ["value"]
    _, catalog = read(tmp_path / "list.pt")
    assert [tensor.path for tensor in catalog.tensors.values()] == [("value", 0), ("value", 2, "w")]
    rewritten(tmp_path / "list.pt", tmp_path, single="again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=True)["value"]
    assert torch.equal(again[0], ramp((2,))) and again[1] == 5 and torch.equal(again[2]["w"], ramp((3,)))


class Foreign:
    """Stands for a user's class."""


def test_foreign_classes_are_shown_and_refused_where_tensors_hang_on_them(tmp_path: Path) -> None:
    holder = Foreign()
    holder.__dict__["t"] = ramp((2,))
    torch.save({"model": {"w": ramp((2,))}, "x": holder}, tmp_path / "a.pt")
    _, catalog = read(tmp_path / "a.pt")
    assert any("Foreign" in line for line in catalog.unsafe)
    assert TensorKey("w") in catalog.tensors


# -- folders -----------------------------------------------------------------------------------------------------------


def hugging_face(folder: Path, *parts: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for number, part in enumerate(parts, 1):
        name = f"pytorch_model-{number:05d}-of-{len(parts):05d}.bin"
        torch.save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_an_index_is_held_against_its_files(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "m", {"a.w": ramp((2,))}, {"b.w": ramp((3,))})
    (folder / "config.json").write_text("{}")
    _, catalog = read(folder)
    assert [str(key) for key in catalog.tensors] == ["a.w", "b.w"] and catalog.sidefiles == ("config.json",)
    assert catalog.files[0] == "pytorch_model.bin.index.json" and len(catalog.files) == 3
    assert set(read(folder / "pytorch_model.bin.index.json")[1].tensors) == set(catalog.tensors)

    torch.save({"b.w": ramp((3,)), "c.w": ramp((1,))}, folder / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(CkptError, match=r"not in the index; the first: c\.w") as raised:
        FORMAT.read(Tree(folder))
    assert raised.value.exit_code == 3
    assert set(read(folder, lenient=True)[1].tensors) == {TensorKey("a.w"), TensorKey("b.w")}

    torch.save({"c.w": ramp((1,))}, folder / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(CkptError, match=r"not in pytorch_model-00002-of-00002\.bin; the first: b\.w"):
        FORMAT.read(Tree(folder))

    for file in folder.glob("*.bin"):
        file.unlink()
    with pytest.raises(CkptError, match="2 of 2 files are missing") as raised:
        FORMAT.read(Tree(folder))
    assert "00001" in raised.value.message and "00002" in raised.value.message


def test_an_index_that_points_outside_is_refused(tmp_path: Path) -> None:
    torch.save({"a.w": ramp((2,))}, tmp_path / "secret.bin")
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a.w": "../secret.bin"}}')
    with pytest.raises(CkptError, match=r"\.\./secret\.bin") as raised:
        FORMAT.read(Tree(folder))
    assert raised.value.exit_code == 4


def test_numbered_files_without_an_index(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "m", {"a.w": ramp((2,))}, {"b.w": ramp((3,))})
    (folder / "pytorch_model.bin.index.json").unlink()
    assert len(read(folder)[1].tensors) == 2
    (folder / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(CkptError, match="1 of 2 files are missing"):
        FORMAT.read(Tree(folder))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = hugging_face(tmp_path / "m", {"a.w": ramp((2,))}, {"a.w": ramp((2,))})
    (folder / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(CkptError, match="is in") as raised:
        FORMAT.read(Tree(folder))
    assert raised.value.code == "E0383"


def test_which_folders_are_ours(tmp_path: Path) -> None:
    def folder(name: str, **files: Any) -> Tree:
        (tmp_path / name).mkdir()
        for file, value in files.items():
            torch.save(value, tmp_path / name / file.replace("__", "."))
        return Tree(tmp_path / name)

    state = {"a.w": ramp((2,))}
    assert FORMAT.detect(folder("only", run__pt=state)) is not None
    assert FORMAT.detect(folder("two", a__pt=state, b__pt=state)) is None
    assert FORMAT.detect(folder("trainer", pytorch_model__bin=state, optimizer__pt={}, scheduler__pt={})) is not None
    assert FORMAT.detect(folder("args", training_args__bin={"lr": 1})) is None
    tree = folder("both", pytorch_model__bin=state)
    save_file({"a.w": ramp((2,))}, tmp_path / "both" / "model.safetensors")
    assert registry.detect(Tree(tree.root))[0].name == "safetensors", "as transformers takes them"
    assert FORMAT.detect(Tree(FIXTURES / "dcp" / "fsdp2_dp4")) is None
    assert FORMAT.detect(Tree(FIXTURES)) is None


def test_what_lies_beside_the_model_is_named(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin"):
        torch.save({"a.w": ramp((2,))}, tmp_path / name)
    _, catalog = read(tmp_path)
    assert any("optimizer.pt" in note.message and "training_args.bin" in note.message for note in catalog.notes)
    assert catalog.files == ("pytorch_model.bin",)


def test_checksums_can_be_required() -> None:
    assert read(path_of("weights"), require_checksums=True)[1].tensors
    with pytest.raises(CkptError, match="no checksum"):
        FORMAT.read(Tree(path_of("legacy")), ReadOptions(require_checksums=True))


# -- writing -----------------------------------------------------------------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in leaves(item, (*path, key)).items()}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):  # Lightning's `optimizer_states`
        return {k: v for n, item in enumerate(value) for k, v in leaves(item, (*path, n)).items()}
    return {path: value}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in ("hf_bin", "foreign_objects") and "ranks" not in case]
)
@pytest.mark.parametrize("mmap", [False, True])
def test_a_state_comes_back_as_it_was(case: str, mmap: bool, tmp_path: Path) -> None:
    """Against the original, loaded by torch: same nesting, same kinds, same values; tensors bit for bit."""
    rewritten(path_of(case), tmp_path, single="out.pt")
    got = leaves(torch.load(tmp_path / "out.pt", weights_only=True, mmap=mmap))
    want = leaves(torch.load(path_of(case), weights_only=case != "protocol5"))
    assert set(got) == set(want)
    for path, value in want.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(got[path], value), path
            assert got[path].is_contiguous()
        else:
            assert got[path] == value and type(got[path]) is type(value), path


def test_module_versions_are_kept(tmp_path: Path) -> None:
    rewritten(path_of("weights"), tmp_path, single="out.pt")
    got, want = (torch.load(path, weights_only=True) for path in (tmp_path / "out.pt", path_of("weights")))
    assert type(got) is OrderedDict and got._metadata == want._metadata


def test_a_real_model_and_optimizer_load_it_and_take_the_same_step(tmp_path: Path) -> None:
    def job() -> tuple[nn.Module, torch.optim.AdamW]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.AdamW) -> None:
        optimizer.zero_grad()
        model(torch.arange(20.0).reshape(4, 5)).square().sum().backward()
        optimizer.step()

    model, optimizer = job()
    step(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    catalog = rewritten(tmp_path / "a.pt", tmp_path, single="b.pt")
    assert TensorKey("1.weight", "exp_avg") in catalog.tensors, "BatchNorm's buffers are told from its parameters"
    step(model, optimizer)
    again, other = job()
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    again.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    step(again, other)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_numbers_of_a_dcp_source_become_integers_again(tmp_path: Path) -> None:
    """DCP spells every key as text; torch.optim wants integers."""
    from ckpt_tool.systems.torch.dcp.format import FORMAT as DCP

    tree, catalog = read(path_of("training"))
    wanted = rewanted(catalog)
    as_text = tuple(
        each._replace(path=tuple(map(str, each.path))) for each in wanted.tensors
    )  # as a DCP job saves them
    wanted = replace(wanted, tensors=as_text)
    write(DCP.target(wanted, along_rows(wanted)), tmp_path / "dcp", values_of(tree, catalog))
    middle = Tree(tmp_path / "dcp")
    between = DCP.read(middle)
    wanted = rewanted(between, single="b.pt")
    write(FORMAT.target(wanted, along_rows(wanted)), tmp_path, values_of(middle, between))
    got = leaves(torch.load(tmp_path / "b.pt", weights_only=True))
    assert set(got) == set(leaves(torch.load(path_of("training"), weights_only=True)))


TENSORS = {
    TensorKey("a.w"): ramp((4, 3)),
    TensorKey("a.b"): ramp((3,), torch.bfloat16),
    TensorKey("b.w"): ramp((5, 3), torch.float8_e5m2),
    TensorKey("none"): ramp((0, 2)),
    TensorKey("scalar"): torch.tensor(1.5),
}


def test_a_model_alone_goes_into_hugging_faces_layout(tmp_path: Path) -> None:
    wanted = wanted_of(TENSORS, shard_size=60)
    target = FORMAT.target(wanted, along_rows(wanted))
    assert [file.path for file in target.files] == [
        *(f"pytorch_model-{n:05d}-of-00002.bin" for n in (1, 2)),
        "pytorch_model.bin.index.json",
    ]
    write(target, tmp_path, [bits(t) for t in TENSORS.values()])
    index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    for name, file in index["weight_map"].items():
        assert same_bits(torch.load(tmp_path / file, weights_only=True)[name], TENSORS[TensorKey(name)])
    whole = FORMAT.target(wanted_of(TENSORS), along_rows(wanted))
    assert [file.path for file in whole.files] == ["pytorch_model.bin"]


def test_more_than_a_model_is_one_file(tmp_path: Path) -> None:
    tensors = {
        **TENSORS,
        TensorKey("a.w", "exp_avg"): ramp((4, 3), start=50),
        TensorKey("a.w", "ema"): ramp((4, 3), start=90),
    }
    wanted = wanted_of(tensors, extras={"epoch": 3, "optim": {"param_groups": [{"lr": 0.5}]}})
    target = FORMAT.target(wanted, along_rows(wanted))
    assert [file.path for file in target.files] == ["checkpoint.pt"] and target.single is None
    write(target, tmp_path, [bits(t) for t in tensors.values()])
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert same_bits(state["optim"]["state"]["a.w"]["exp_avg"], tensors[TensorKey("a.w", "exp_avg")])
    assert same_bits(state["ema"]["a.w"], tensors[TensorKey("a.w", "ema")]) and state["epoch"] == 3
    assert state["optim"]["param_groups"] == [{"lr": 0.5}]


def test_a_single_file_of_a_model_alone_is_a_plain_state_dict(tmp_path: Path) -> None:
    wanted = wanted_of(TENSORS, single="m.pt")
    target = FORMAT.target(wanted, along_rows(wanted))
    assert target.single == "m.pt"
    write(target, tmp_path, [bits(t) for t in TENSORS.values()])
    assert set(torch.load(tmp_path / "m.pt", weights_only=True)) == {key.name for key in TENSORS}


def test_bytes_do_not_depend_on_the_name_of_the_file() -> None:
    a, b = (FORMAT.target(w, along_rows(w)).files[0] for w in (wanted_of(TENSORS, single=f"{n}.pt") for n in "ab"))
    assert (a.size, a.literals, a.arrays, a.patches) == (b.size, b.literals, b.arrays, b.patches)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    wanted = wanted_of(
        TENSORS, extras={"a": [1, Opaque("some.Class")], "b": Opaque("other.Class"), "c": 3}, single="m.pt"
    )
    target = FORMAT.target(wanted, along_rows(wanted))
    assert "a.1: some.Class" in target.notes[0] and "b: other.Class" in target.notes[0]
    write(target, tmp_path, [bits(t) for t in TENSORS.values()])
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    assert state["a"] == [1, None] and state["c"] == 3 and "b" not in state
    twice = wanted_of(
        {TensorKey("x"): ramp((1,)), TensorKey("y", "extras"): ramp((1,))},
        {TensorKey("x"): ("x",), TensorKey("y", "extras"): ("x", "y")},
        hints={"roots": {}},
    )
    with pytest.raises(UsageError, match="both belong at x"):
        FORMAT.target(twice, along_rows(twice))
