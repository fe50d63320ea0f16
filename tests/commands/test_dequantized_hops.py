"""Quantised weights to another system in one hop, and home again: names, cuts and layouts after the floats are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

FIXTURES = Path(__file__).parents[2] / "fixtures" / "quantized"


def hop(source: Path, out: Path, to: str, **writing: Any) -> dict[str, Any]:
    return convert(str(source), str(out), Reading(), Writing(to=to, fsync=False, **writing), Silent())


@pytest.mark.parametrize("to", ["megatron-dist", "megatron", "paddle-unified", "dcp"])
@pytest.mark.parametrize("case", ["fp8_block", "fp8_experts", "int4_group_asym", "nvfp4", "mxfp4_gpt_oss"])
def test_there_and_home(case: str, to: str, tmp_path: Path) -> None:
    degrees = {"tp": 2} if to.startswith("megatron") else {}
    if to == "dcp":
        degrees = {"tp": 2, "dp": 2}
    hop(FIXTURES / case, tmp_path / "floats", "safetensors", dequantize=True)
    hop(FIXTURES / case, tmp_path / "there", to, dequantize=True, degrees=degrees)
    reading = Reading(config=str(tmp_path / "floats" / "config.json"))
    home = Writing(to="safetensors", fsync=False)
    convert(str(tmp_path / "there"), str(tmp_path / "home"), reading, home, Silent())
    want, found = (load_file(tmp_path / each / "model.safetensors") for each in ("floats", "home"))
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", ["fp8_block", "fp8_experts", "int4_group", "mxfp4_gpt_oss"])
@pytest.mark.parametrize("to", ["megatron-dist", "paddle-unified"])
def test_codes_do_not_go_to_another_dialect(case: str, to: str, tmp_path: Path) -> None:
    with pytest.raises(CkptError) as found:
        hop(FIXTURES / case, tmp_path / "out", to)
    assert "--dequantize" in (found.value.hint or ""), found.value
    assert not (tmp_path / "out").exists()


UNDER_ITS_NAMES = ("deepspeed", "deepspeed-universal", "megatron", "megatron-dist", "paddle-unified", "meta")


@pytest.mark.parametrize(
    ("case", "to"),
    [
        *(("quantized/fp8_ct_ragged", to) for to in UNDER_ITS_NAMES),
        ("quantized/mlx_4bit", "deepspeed"),
        ("quantized-inputs/gptq_int4_act", "deepspeed"),
        ("quantized-layouts/bnb_gpt2", "deepspeed"),
    ],
)
def test_codes_are_read_by_the_config_next_to_the_pointer_file(case: str, to: str, tmp_path: Path) -> None:
    """`latest` leads to `global_step0`, and config.json is at the top: without it blocks are taken from shapes."""
    source = FIXTURES.parent / case
    hop(source, tmp_path / "there", to, dialect="keep")
    hop(source, tmp_path / "want", "safetensors", dequantize=True)
    hop(tmp_path / "there", tmp_path / "home", "safetensors", dequantize=True, dialect="keep")
    want, found = (load_file(tmp_path / each / "model.safetensors") for each in ("want", "home"))
    assert {name: tensor.shape for name, tensor in found.items()} == {name: t.shape for name, t in want.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())


def test_blocks_that_only_shapes_tell_have_a_line_in_the_report(tmp_path: Path) -> None:
    for case, is_assumed in (("fp8_block", True), ("fp8_channel", False), ("mxfp8", False)):
        source = FIXTURES / case / "model.safetensors"  # the file alone: no config is looked for next to it
        notes = hop(source, tmp_path / f"{case}.safetensors", "safetensors", dequantize=True)["notes"]
        assert any("no config says how many codes share a scale" in note for note in notes) == is_assumed, case
