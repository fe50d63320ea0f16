"""`ckpt diff` of tensors in two dtypes: they differ, and the report says how far their numbers are apart.

the bf16 tensor and its copy in fp32                         not equal, "equal as numbers"
the bf16 tensor and the fp32 tensor that it was rounded from not equal, a relative L2 of rounding
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tool as ckpt
from ckpt_tool import cli

WIDE = torch.linspace(-3, 3, 64 * 32).reshape(64, 32) ** 3
NARROW = WIDE.bfloat16()


def save(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return str(path)


@pytest.fixture
def sides(tmp_path: Path) -> tuple[str, str]:
    left = {"layers.0.a": NARROW, "layers.1.b": NARROW, "c": WIDE, "d": torch.arange(6)}
    right = {"layers.0.a": NARROW.float(), "layers.1.b": WIDE, "c": WIDE, "d": torch.arange(6, dtype=torch.int32)}
    return save(tmp_path / "a.safetensors", left), save(tmp_path / "b.safetensors", right)


def test_entries_say_how_far_the_numbers_are_apart(sides: tuple[str, str]) -> None:
    document: Any = ckpt.diff(*sides)
    entries = {entry["name"]: entry for entry in document["differences"]}
    assert not document["equal"] and set(entries) == {"layers.0.a", "layers.1.b", "d"}
    assert all(entry["kind"] == "dtype" for entry in entries.values())
    assert entries["layers.0.a"]["values_equal"] and "rel_l2" not in entries["layers.0.a"]
    assert entries["d"]["values_equal"] and (entries["d"]["left"], entries["d"]["right"]) == ("I64", "I32")

    rounded = entries["layers.1.b"]
    gap = WIDE.double() - NARROW.double()
    assert not rounded["values_equal"] and rounded["max_abs"] == gap.abs().max().item()
    assert rounded["rel_l2"] == pytest.approx((gap.norm() / NARROW.double().norm()).item())


@pytest.mark.parametrize("words", [[], ["-v"]])
def test_the_page_says_it(words: list[str], sides: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["diff", *sides, *words]) == 1
    rows = capsys.readouterr().out.splitlines()
    copied = next(row for row in rows if "layers.0.a" in row or "layers.*.a" in row)
    rounded = next(row for row in rows if "layers.1.b" in row)
    assert "BF16 / F32" in copied and "equal" in copied
    assert "BF16 / F32" in rounded and "relative L2 1." in rounded and "e-03" in rounded


def test_codes_are_not_computed_with(tmp_path: Path) -> None:
    """Elements of half a byte have no numbers here: the dtypes alone are reported."""
    from ckpt_tool.commands.diff import _is_of_numbers
    from ckpt_tool.core.dtype import DTYPES
    from ckpt_tool.core.tensor import LogicalTensor, TensorKey

    tensors = {name: LogicalTensor(TensorKey("w"), (4,), DTYPES[name], ()) for name in ("F4", "BF16", "BOOL")}
    assert {name: _is_of_numbers(tensor) for name, tensor in tensors.items()} == {
        "F4": False,
        "BF16": True,
        "BOOL": True,
    }
