"""Every fixture through `inspect`, `verify`, `convert`: each tensor, bit by bit, equals what the training run held.

The truth was written from live tensors (see fixtures/README.md); outputs are read by torch and safetensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import (
    Case,
    Runner,
    Tensors,
    assert_same,
    by_state,
    cases,
    leaves,
    load_dcp,
    load_dcp_safetensors,
    load_sharded,
    named,
)

# What torch itself can't read back into one process, and why.
NO_DCP_LOAD = {"dcp/no_collectives": "no global .metadata", "dcp/accelerate_fsdp2": "two DCP folders"}
ALL = cases("dcp", "torch", "safetensors")
SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "complex64": "C64",
}


def plain(name: str) -> str:
    """The name without the wrappers' parts, which outputs that keep the source's own paths still have."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def unwrapped(tensors: Tensors) -> Tensors:
    return {plain(key): value for key, value in tensors.items()}


@pytest.mark.parametrize("case", cases("dcp"))
def test_the_truth_is_what_torch_loads(case: Case) -> None:
    """The fixtures themselves: `torch.distributed.checkpoint.load` gives the truth."""
    if case.name in NO_DCP_LOAD:
        pytest.skip(NO_DCP_LOAD[case.name])
    if case.name.startswith("dcp/safetensors_"):
        nested: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optim": {}}
        for name, tensor in load_dcp_safetensors(case.path).items():
            root, rest = name.split(".", 1)
            nested[root][rest] = tensor
        got = by_state(nested)
    else:
        got = unwrapped(by_state(load_dcp(case.path)))
    assert_same(got, case.truth())


@pytest.mark.share(2)
@pytest.mark.parametrize("case", ALL + cases("sharded"))
def test_inspect_lists_what_the_run_held(case: Case, ckpt: Runner) -> None:
    said = ckpt("inspect", case.path)
    truth = case.truth()
    got = {
        f"{row['state']}/{row['name']}": (row["dtype"], tuple(row["shape"]), row["bytes"]) for row in said["tensors"]
    }
    want = {
        key: (SAFETENSORS_DTYPES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape), tensor.nbytes)
        for key, tensor in truth.items()
    }
    assert got == want
    assert said["format"] == case.format
    assert said["total"]["tensors"] == len(truth)
    assert said["total"]["bytes"] == sum(tensor.nbytes for tensor in truth.values())
    assert said["schema_version"] == 1


@pytest.mark.share(2)
@pytest.mark.parametrize("case", ALL)
def test_inspect_shows_the_extras(case: Case, ckpt: Runner) -> None:
    """Each plain value of the run stands in `extras` at the place where the checkpoint nested it."""
    want = case.extras()
    want.pop("ids", None)
    got = dict(leaves(ckpt("inspect", case.path)["extras"]))
    faults = [
        f"{path}: {got.get(path, 'missing')!r}, want {value!r}"
        for path, value in leaves(want)
        if got.get(path, "missing") != value and not shown_as_length(got.get(path), value)
    ]
    assert not faults, "\n".join(faults)


def shown_as_length(got: object, want: object) -> bool:
    """Bytes are shown as their length; the truth has them in hex."""
    return isinstance(got, str) and isinstance(want, str) and got == f"<{len(want) // 2} bytes>"


@pytest.mark.share(12)
@pytest.mark.parametrize("case", ALL + cases("sharded"))
def test_verify_finds_it_sound_and_sharded_holds_every_bit(case: Case, ckpt: Runner, tmp_path: Path) -> None:
    said = ckpt("verify", case.path)
    assert said["ok"] is True and [row for row in said["findings"] if not row["code"].startswith("W-")] == []
    truth = case.truth()
    assert {f"{state}/{name}" for state, digests in said["digests"].items() for name in digests} == set(truth)

    wrote = ckpt("convert", case.path, tmp_path / "out", "--to", "sharded")
    assert wrote["digest_checked"] is True and wrote["removed"] == [] and wrote["dropped"] == []
    assert_same(load_sharded(tmp_path / "out"), truth)
    again = ckpt("verify", tmp_path / "out")
    assert again["ok"] is True and again["digests"] == said["digests"], "digests depend on the layout"
    assert ckpt("inspect", tmp_path / "out")["extras"] == ckpt("inspect", case.path)["extras"], "extras changed"


# but Lightning's, whose optimizer has numbers alone (formats/test_beside_a_model.py has it)
NAMED = [case for case in cases("dcp", "torch") if case.id != "torch/lightning_average"]


@pytest.mark.share(2)
@pytest.mark.parametrize("case", NAMED)
def test_convert_to_torch_loads_with_weights_only(case: Case, ckpt: Runner, tmp_path: Path) -> None:
    ckpt("convert", case.path, tmp_path / "out.pt", "--to", "torch")
    loaded = torch.load(tmp_path / "out.pt", weights_only=case.name != "torch/foreign_objects", map_location="cpu")
    assert_same(unwrapped(named(by_state(loaded), case.extras().get("ids", {}))), case.truth())


@pytest.mark.share(2)
@pytest.mark.parametrize("case", NAMED)
def test_convert_to_dcp_loads_with_torch(case: Case, ckpt: Runner, tmp_path: Path) -> None:
    ckpt("convert", case.path, tmp_path / "out", "--to", "dcp", "--dp", "3")
    loaded = load_dcp(tmp_path / "out")
    assert_same(unwrapped(named(by_state(loaded), case.extras().get("ids", {}))), case.truth())
    assert_extras(loaded, case.extras())


@pytest.mark.parametrize("case", cases("dcp", "torch"))
def test_convert_to_safetensors_takes_the_model_and_says_what_stays(case: Case, ckpt: Runner, tmp_path: Path) -> None:
    wrote = ckpt("convert", case.path, tmp_path / "out", "--to", "safetensors", "--max-shard-size", "2KB")
    truth = case.truth()
    assert_same(load_model(tmp_path / "out"), {k: v for k, v in truth.items() if k.startswith("model/")})
    left = {key.split("/")[0] for key in truth} - {"model"}
    assert left <= {word for row in wrote["dropped"] for word in json.dumps(row).replace('"', " ").split()}


def load_model(folder: Path) -> dict[str, torch.Tensor]:
    """A Hugging Face folder through its index, as transformers reads it."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return {f"model/{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    said = json.loads(index.read_text())
    found = {}
    for name, file in said["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            found[f"model/{name}"] = opened.get_tensor(name)
    assert said["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def assert_extras(loaded: dict[str, Any], want: dict[str, Any]) -> None:
    """Each plain value of the run is in the loaded state dict, at its place and equal."""
    have = {tuple(map(str, path)): value for path, value in leaves(loaded)}
    for path, value in leaves({key: item for key, item in want.items() if key != "ids"}):
        got = have.get(tuple(map(str, path)), "missing")
        got = got.hex() if isinstance(got, bytes) else got
        assert json.loads(json.dumps(got, default=repr)) == value or str(got) == value, (path, got, value)
