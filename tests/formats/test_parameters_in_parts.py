"""A tuple, a list or a dict of tensors under the name of one parameter: an error that names it, in every format that
nests states. What a module or a trainer keeps besides its parameters stays what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tool as ckpt
from ckpt_tool.errors import InputError


def tensor(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


PARTS: dict[str, Any] = {
    "tuple": (tensor(3, 4), tensor(3)),
    "list": [tensor(3, 4)],
    "dict": {"codes": tensor(3, 4), "scales": tensor(3)},
    "with None": (tensor(3, 4), None),
    "numbered": {0: tensor(3, 4)},
    "deep": {"codes": [tensor(3, 4), tensor(4)]},
}


def state_with(value: Any, name: str = "fc.weight") -> dict[str, Any]:
    return {"a.weight": tensor(4, 3), "a.bias": tensor(4), name: value}


def save(state: dict[str, Any], kind: str, folder: Path) -> str:
    folder.mkdir()
    if kind == "dcp":
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        return str(folder)
    torch.save(state, folder / "state.pt")
    return str(folder / "state.pt")


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("root", ["bare", "model", "state_dict"])
@pytest.mark.parametrize("parts", PARTS)
def test_it_is_an_error_that_names_the_place(parts: str, root: str, kind: str, tmp_path: Path) -> None:
    inner = state_with(PARTS[parts])
    source = save(inner if root == "bare" else {root: inner, "epoch": 3}, kind, tmp_path / "in")
    for to in ("safetensors", "torch"):
        with pytest.raises(InputError) as caught:
            ckpt.convert(source, str(tmp_path / to), to=to)
        assert (caught.value.code, caught.value.exit_code) == ("E3011", 3)
        assert "fc.weight" in caught.value.message and source in str(caught.value.path)
        assert not (tmp_path / to).exists()
    assert [row["code"] for row in ckpt.audit(source)["findings"]][:1] == ["E3011"]

    ckpt.convert(source, str(tmp_path / "less"), to="safetensors", remove_keys=["fc.weight*"])
    assert set(ckpt.open(str(tmp_path / "less"))) == {"a.weight", "a.bias"}


@pytest.mark.parametrize("name", ["fc.qweight", "fc._packed_params._packed_params", "fc.parametrizations.w"])
def test_any_dotted_name_of_a_flat_state_is_a_parameter(name: str, tmp_path: Path) -> None:
    source = save(state_with(PARTS["tuple"], name), "torch", tmp_path / "in")
    with pytest.raises(InputError, match=name) as caught:
        ckpt.convert(source, str(tmp_path / "out"), to="safetensors")
    assert caught.value.code == "E3011"


@pytest.mark.parametrize(
    "state, names",
    [
        ({"model": {"layers": [{"w": tensor(2)}, {"w": tensor(3)}]}}, {"layers.0.w", "layers.1.w"}),
        ({"model": {"a.0": {"weight": tensor(2)}, "b": {"weight": tensor(3)}}}, {"a.0.weight", "b.weight"}),
        ({"encoder": {"w": tensor(2)}, "decoder": {"w": tensor(3)}}, {"encoder.w", "decoder.w"}),
        (state_with({"scale": tensor(2)}, "a._extra_state"), {"a.weight", "a.bias"}),
        ({**state_with(tensor(2)), "rng_states": [tensor(3)]}, {"a.weight", "a.bias", "fc.weight"}),
        ({**state_with(tensor(2)), "callbacks": {"best": tensor(1)}}, {"a.weight", "a.bias", "fc.weight"}),
    ],
    ids=["modules in a list", "modules by name", "a tree", "a module's own state", "random states", "a trainer's"],
)  # fmt: skip
def test_trees_and_values_beside_the_model_are_read_as_before(
    state: dict[str, Any], names: set[str], tmp_path: Path
) -> None:
    ckpt.convert(save(state, "torch", tmp_path / "in"), str(tmp_path / "out"), to="safetensors")
    assert set(ckpt.open(str(tmp_path / "out"))) == names
