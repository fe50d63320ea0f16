"""Random checkpoints over random meshes: A -> B -> A is bit-identical, for every pair of formats.

A is written by torch or safetensors, and what comes back is read by them. Values are ramps (their own index), names
are awkward on purpose, shapes include 0-d, empty and odd ones. `safetensors` holds the model alone.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from peers import Tensors, assert_same, by_state, load_dcp, load_sharded
from safetensors.torch import load_file, save_file

import ckpt_tool
from ckpt_tool.errors import UsageError

FORMATS = ("safetensors", "torch", "dcp", "sharded")
PAIRS = [(a, b) for a in FORMATS for b in FORMATS]
DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int8", "uint8", "int64", "bool", "uint16")

# Words that a reader may take for a state: names are made of them too.
STATE_WORDS = ("state", "ema", "exp_avg", "optim", "step", "module", "master", "param_groups", "rng")
words = st.sampled_from(
    ("w", "0", "1", "layers", "b.c", "weight", "exp", "model", "é", "x y", "a-b", "_", "state_x", *STATE_WORDS)
)
# `ema.w` next to `w` is its average, and not a weight of the model: that is tried elsewhere.
names = st.lists(words, min_size=1, max_size=4).map(".".join).filter(lambda name: not name.startswith("ema."))
shapes = st.lists(st.sampled_from((0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13)), max_size=3).map(tuple)


class Drawn(NamedTuple):
    """What a checkpoint holds: tensors under STATE/NAME, and the optimizer's groups."""

    tensors: Tensors
    groups: list[dict[str, Any]]


def ramp(shape: tuple[int, ...], dtype: str, start: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    count = (torch.arange(int(torch.tensor(shape).prod()) if shape else 1) + start) % (2 if dtype == "bool" else 120)
    return (count.float() if kind.is_floating_point else count).to(kind).reshape(shape)


@st.composite
def checkpoints(draw: st.DrawFn) -> Drawn:
    chosen = draw(st.lists(st.tuples(names, shapes, st.sampled_from(DTYPES)), max_size=5, unique_by=lambda row: row[0]))
    tensors: Tensors = {}
    trained = []
    for number, (name, shape, dtype) in enumerate(chosen or [("w", (3, 5), "float32")]):
        tensors[f"model/{name}"] = ramp(shape, dtype, number)
        if draw(st.booleans()):
            trained.append(name)
            tensors[f"step/{name}"] = torch.tensor(float(number + 1))
            for offset, state in enumerate(("exp_avg", "exp_avg_sq")):
                tensors[f"{state}/{name}"] = ramp(shape, "float32", 10 * number + offset)
    return Drawn(tensors, [{"lr": 0.125, "betas": (0.9, 0.95), "params": trained}])


def nested(drawn: Drawn, root: str) -> dict[str, Any]:
    out: dict[str, Any] = {"model": {}, root: {"state": {}, "param_groups": drawn.groups}}
    for key, tensor in drawn.tensors.items():
        state, name = key.split("/", 1)
        if state == "model":
            out["model"][name] = tensor
        else:
            out[root]["state"].setdefault(name, {})[state] = tensor
    return out


def write(format_: str, drawn: Drawn, folder: Path) -> Path:
    """The checkpoint as the real library writes it."""
    if format_ == "safetensors":
        folder.mkdir()
        tensors = {k.removeprefix("model/"): v for k, v in drawn.tensors.items() if k.startswith("model/")}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    if format_ == "dcp":
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(nested(drawn, "optim"), checkpoint_id=folder, no_dist=True)
        return folder
    file = folder.with_suffix(".pt")
    torch.save(nested(drawn, "optimizer"), file)
    if format_ == "torch":
        return file
    ckpt_tool.convert(file, folder, to="sharded")  # only ckpt writes its own layout
    return folder


def read(format_: str, path: Path) -> tuple[Tensors, Any]:
    """What the real library finds: tensors, and the groups where the format holds them."""
    if format_ == "safetensors":
        return {f"model/{k}": v for f in sorted(path.glob("*.safetensors")) for k, v in load_file(f).items()}, None
    if format_ == "sharded":
        if not (path / "model.safetensors").exists():  # cut over ranks
            joined = path.with_name("joined")
            ckpt_tool.convert(path, joined, to="sharded")
            return load_sharded(joined), None
        return load_sharded(path), None
    loaded: Mapping[str, Any]
    if format_ == "dcp":
        loaded = load_dcp(path)
    else:
        loaded = torch.load(path, weights_only=True)
    if all(isinstance(value, torch.Tensor) for value in loaded.values()):
        return {f"model/{name}": value for name, value in loaded.items()}, None
    optimizer = loaded.get("optim", loaded.get("optimizer", {}))
    return by_state(loaded), optimizer.get("param_groups")


MESHES = {
    "safetensors": st.fixed_dictionaries({"max_shard_size": st.sampled_from(("1KB", "100B", "5GB"))}),
    "torch": st.just({}),
    "dcp": st.fixed_dictionaries({"dp": st.integers(1, 4)}),
    "sharded": st.fixed_dictionaries(
        {"tp": st.integers(1, 4), "pp": st.integers(1, 2), "dp": st.integers(1, 3)},
        optional={"on_indivisible": st.sampled_from(("largest-dim", "dtensor", "pad", "replicate", "best-subset"))},
    ),
}


def there_and_back(first: str, second: str, drawn: Drawn, out: Mapping[str, Any], back: Mapping[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = write(first, drawn, folder / "a")
        middle = folder / ("b.pt" if second == "torch" else "b")
        end = folder / ("c.pt" if first == "torch" else "c")
        try:
            ckpt_tool.convert(source, middle, to=second, **out)
            ckpt_tool.convert(middle, end, to=first, **back)
        except UsageError as refused:
            assume("pipeline stages" not in refused.message)  # a name drew a layer number, and 2 stages want 2 layers
            raise
        got, groups = read(first, end)
    weights_alone = "safetensors" in (first, second)
    assert_same(got, {k: v for k, v in drawn.tensors.items() if not weights_alone or k.startswith("model/")})
    if groups is not None and not weights_alone:
        assert [{**group, "betas": tuple(group["betas"])} for group in groups] == drawn.groups


@pytest.mark.share(3)
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda pair: pair)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_there_and_back(first: str, second: str, data: st.DataObject) -> None:
    there_and_back(
        first, second, data.draw(checkpoints()), data.draw(MESHES[second], "there"), data.draw(MESHES[first], "back")
    )


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda pair: pair)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_there_and_back_at_length(first: str, second: str, data: st.DataObject) -> None:
    there_and_back(
        first, second, data.draw(checkpoints()), data.draw(MESHES[second], "there"), data.draw(MESHES[first], "back")
    )
