"""`--experts`: which of the hub's layouts of a layer's experts is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckpt_tool as ckpt
from ckpt_tool.errors import UsageError
from ckpt_tool.families.experts import expert_layouts
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.families.registry import by_name

CONVERT = Path(__file__).parents[2] / "fixtures" / "convert"
MIXTRAL, LLAMA = str(CONVERT / "mixtral" / "hf"), str(CONVERT / "llama" / "hf")


def test_experts_are_stacked_and_taken_apart(tmp_path: Path) -> None:
    megatron, fused, split = (str(tmp_path / name) for name in ("megatron", "fused", "split"))
    ckpt.convert(MIXTRAL, megatron, to="megatron-dist", ep=2)
    ckpt.convert(megatron, fused, to="safetensors", experts="fused")
    ckpt.convert(fused, split, to="safetensors", experts="split")
    before, stacked = load_file(f"{MIXTRAL}/model.safetensors"), load_file(f"{fused}/model.safetensors")
    for layer in range(2):
        there = f"model.layers.{layer}.block_sparse_moe.experts"
        w1, w2, w3 = ([before[f"{there}.{e}.{name}.weight"] for e in range(4)] for name in ("w1", "w2", "w3"))
        both = [np.concatenate(pair) for pair in zip(w1, w3, strict=True)]
        np.testing.assert_array_equal(stacked[f"model.layers.{layer}.mlp.experts.gate_up_proj"], np.stack(both))
        np.testing.assert_array_equal(stacked[f"model.layers.{layer}.mlp.experts.down_proj"], np.stack(w2))
    assert not any(re.search(r"experts\.\d", name) for name in stacked)
    assert ckpt.diff(MIXTRAL, split)["equal"]


def test_without_the_option_a_hub_checkpoint_stays_and_others_become_as_released(tmp_path: Path) -> None:
    fused, same, megatron, back = (str(tmp_path / name) for name in ("fused", "same", "megatron", "back"))
    ckpt.convert(MIXTRAL, fused, to="safetensors", experts="fused")
    ckpt.convert(fused, same, to="safetensors")
    assert ckpt.diff(fused, same)["equal"]
    ckpt.convert(fused, megatron, to="megatron")
    ckpt.convert(megatron, back, to="safetensors")
    assert ckpt.diff(MIXTRAL, back)["equal"]


def test_a_format_that_keeps_names_takes_it_beside_the_dialect(tmp_path: Path) -> None:
    ckpt.convert(MIXTRAL, str(tmp_path / "dcp"), to="dcp", dialect="hf", experts="fused")
    assert "model.layers.0.mlp.experts.gate_up_proj" in ckpt.open(str(tmp_path / "dcp"))


FAULTS = {
    "megatron-dist has megatron's names": {"to": "megatron-dist"},
    "dcp keeps names": {"to": "dcp"},
    "--dialect megatron has megatron's names": {"to": "safetensors", "dialect": "megatron"},
    "--dialect keep keeps names": {"to": "safetensors", "dialect": "keep"},
    "--aoa says how names change": {"to": "safetensors", "aoa": "statements.txt"},
}


@pytest.mark.parametrize("says", FAULTS)
def test_other_names_have_nothing_to_choose(says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--experts fused has no effect: {says}") as caught:
        ckpt.convert(MIXTRAL, str(tmp_path / "out"), experts="fused", **FAULTS[says])
    assert caught.value.code == "E1284" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", [ckpt.reshard, lambda source, *rest, **more: ckpt.merge([source], *rest, **more)])
def test_verbs_that_keep_names_refuse_it(verb, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--experts split has no effect") as caught:
        verb(MIXTRAL, str(tmp_path / "out"), experts="split")
    assert caught.value.code == "E1284"


def test_a_family_without_experts_or_without_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="llama has no experts") as caught:
        ckpt.convert(LLAMA, str(tmp_path / "out"), to="safetensors", experts="split")
    assert caught.value.code == "E2304"
    monkeypatch.setattr("ckpt_tool.families.experts.LAYOUTS", {})
    with pytest.raises(UsageError, match="no files of mixtral have its experts so") as caught:
        ckpt.convert(MIXTRAL, str(tmp_path / "out"), to="safetensors", experts="fused")
    assert caught.value.code == "E2304" and caught.value.hint == "there is --experts split"


def test_the_command_line_takes_two_words(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "ckpt_tool", "convert", MIXTRAL, str(tmp_path / "out"), "--to", "safetensors"]
    done = subprocess.run([*line, "--experts", "both"], capture_output=True, text=True)
    assert done.returncode == 2 and "want one of split, fused" in done.stderr
    done = subprocess.run([*line, "--experts", "fused", "--dry-run"], capture_output=True, text=True)
    assert done.returncode == 0 and "the family mixtral, hf to hf-fused" in done.stdout


def test_layouts_are_those_of_the_tables() -> None:
    assert expert_layouts(by_name("qwen3_moe")) == {"split": "hf", "fused": "hf-fused"}
    assert expert_layouts(by_name("gpt_oss")) == {"fused": "hf"}
    assert expert_layouts(by_name("qwen3")) == {}
    assert expert_layouts(by_name("qwen3_vl_moe")) == {"fused": "hf", "split": "hf-split"}
    for family in FAMILIES:
        there = expert_layouts(family)
        for dialect in {"hf-fused", "hf-split"} & family.dialects.keys():
            assert dialect in there.values(), f"{family.name}: {dialect} is no layout of experts that --experts finds"
