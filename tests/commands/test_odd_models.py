"""A tensor without a rule and a rule without a tensor, in a change of names: told at once, before a byte is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import ckpt_tool as ckpt
from ckpt_tool.errors import InputError

LLAMA = Path(__file__).parents[2] / "fixtures" / "convert" / "llama" / "hf"


def changed(folder: Path, *, gone: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> str:
    folder.mkdir()
    shutil.copy(LLAMA / "config.json", folder)
    tensors = safetensors.numpy.load_file(LLAMA / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if name not in gone}
    kept |= {name: np.ones(3, np.float32) for name in more}
    safetensors.numpy.save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("to", ["megatron-dist", "megatron", "paddle", "meta"])
def test_all_that_is_lacking_is_told_at_once(tmp_path: Path, to: str) -> None:
    gone = (
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "model.embed_tokens.weight",
    )
    with pytest.raises(InputError) as caught:
        ckpt.convert(changed(tmp_path / "in", gone=gone), str(tmp_path / "out"), to=to)
    told = f"{caught.value.message} {caught.value.faults}"
    assert (caught.value.code, caught.value.exit_code) == ("E1484", 3) and all(name in told for name in gone)
    assert not (tmp_path / "out").exists()


def test_names_in_a_layer_that_no_rule_knows(tmp_path: Path) -> None:
    more = ("model.layers.0.self_attn.q_projj.weight", "model.layers.1.adapter.w")
    source = changed(tmp_path / "in", more=(*more, "value_head.weight"))
    with pytest.raises(InputError) as caught:
        ckpt.convert(source, str(tmp_path / "out"), to="megatron-dist")
    assert (caught.value.code, caught.value.exit_code) == ("E1485", 3) and "value_head" not in str(caught.value.faults)
    assert all(name in f"{caught.value.message} {caught.value.faults}" for name in more)
    assert "did you mean model.layers.0.self_attn.q_proj.weight" in (caught.value.hint or "")
    report = ckpt.convert(source, str(tmp_path / "lenient"), to="megatron-dist", lenient=True)
    assert {*more, "value_head.weight"} < set(ckpt.open(str(tmp_path / "lenient")))
    assert any("3 tensors are in no rule" in note for note in report["notes"])
    without = ["*.q_projj.*", "*.adapter.*"]
    with pytest.raises(InputError) as caught:
        ckpt.convert(source, str(tmp_path / "less"), to="megatron-dist", remove_keys=without)
    assert (caught.value.code, caught.value.exit_code) == ("E3010", 3)
    report = ckpt.convert(source, str(tmp_path / "less"), to="megatron-dist", remove_keys=[*without, "value_head.*"])
    assert len(report["removed"]) == 3


def test_a_part_that_patterns_ask_for_converts(tmp_path: Path) -> None:
    ckpt.convert(str(LLAMA), str(tmp_path / "out"), to="megatron-dist", keep_keys=["model.layers.1.*"])
    assert all(name.startswith("decoder.layers.1.") for name in ckpt.open(str(tmp_path / "out")))
