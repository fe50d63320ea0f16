"""`--experts`: which of the hub's layouts of a layer's experts is written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckpt_tool as ckpt
from ckpt_tool.errors import UsageError
from ckpt_tool.families.experts import expert_layouts
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.families.registry import by_name

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))

from family_models import EXPERTS, config_of, counted, hub_shapes, saved_shapes

_ONE = re.compile(r"experts\.\d")
CONVERT = Path(__file__).parents[2] / "fixtures" / "convert"
MIXTRAL = str(CONVERT / "mixtral" / "hf")
LLAMA = str(CONVERT / "llama" / "hf")


def released(folder: Path, family: str) -> None:
    """A small model as its released files are."""
    config = config_of(family)
    config |= {key: 2 for key in ("num_experts_per_tok", "moe_k") if key not in config.get("text_config", config)}
    arrays = {name: array.astype(np.float32) for name, array in counted(hub_shapes(family, config)).items()}
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def test_experts_are_stacked_and_taken_apart(tmp_path: Path) -> None:
    megatron, fused, split = (str(tmp_path / name) for name in ("megatron", "fused", "split"))
    ckpt.convert(MIXTRAL, megatron, to="megatron-dist", ep=2)
    ckpt.convert(megatron, fused, to="safetensors", experts="fused")
    ckpt.convert(fused, split, to="safetensors", experts="split")
    before = load_file(f"{MIXTRAL}/model.safetensors")
    stacked = load_file(f"{fused}/model.safetensors")
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


def test_a_family_without_experts_or_without_the_layout(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="llama has no experts") as caught:
        ckpt.convert(LLAMA, str(tmp_path / "out"), to="safetensors", experts="split")
    assert caught.value.code == "E2304"
    released(tmp_path / "hub", "kimi_k3")
    with pytest.raises(UsageError, match="no files of kimi_k3 have its experts so") as caught:
        ckpt.convert(str(tmp_path / "hub"), str(tmp_path / "out"), to="safetensors", experts="fused")
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
    assert expert_layouts(by_name("phimoe")) == {"split": "hf", "fused": "hf-5"}
    assert expert_layouts(by_name("qwen3_5_moe")) == {"fused": "hf-packed", "split": "hf-split"}  # MTP's too
    assert expert_layouts(by_name("kimi_k3")) == {"split": "hf"}
    for family in FAMILIES:
        there = expert_layouts(family)
        assert {dialect.removeprefix("hf-") for dialect in {"hf-fused", "hf-split"} & family.dialects.keys()} <= {
            *there
        }


@pytest.mark.share(3)
@pytest.mark.parametrize("family", [name for name in EXPERTS if len(expert_layouts(by_name(name))) > 1])
def test_every_family_with_two_layouts_writes_either(family: str, tmp_path: Path) -> None:
    """From the released files to the other layout and home: the same bytes, and between no name of the released one."""
    released(tmp_path / "hub", family)
    first, other = expert_layouts(by_name(family))
    ckpt.convert(str(tmp_path / "hub"), str(tmp_path / "there"), to="safetensors", experts=other)
    ckpt.convert(str(tmp_path / "there"), str(tmp_path / "home"), to="safetensors", experts=first)
    numbered = {folder: {name for name in load_file(tmp_path / folder / "model.safetensors") if _ONE.search(name)}
                for folder in ("hub", "there", "home")}  # fmt: skip
    assert bool(numbered["hub"]) == (first == "split") and bool(numbered["there"]) == (other == "split")
    if family != "qwen3_5_moe":  # fused are MTP's too, where the first release has them one by one
        assert numbered["home"] == numbered["hub"]
        assert ckpt.diff(str(tmp_path / "hub"), str(tmp_path / "home"))["equal"]


@pytest.mark.parametrize(("family", "layout"), [("qwen3_vl_moe", "fused"), ("kimi_k25", "split")])
def test_what_transformers_saves_otherwise_stays_and_becomes_as_released_when_asked(
    family: str, layout: str, tmp_path: Path
) -> None:
    """transformers 5.23 saves another layout than the released files have, in both with the experts as released."""
    config = config_of(family)
    arrays = {name: array.astype(np.float32) for name, array in counted(saved_shapes(config)).items()}
    (tmp_path / "saved").mkdir()
    save_file(arrays, tmp_path / "saved" / "model.safetensors")
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    ckpt.convert(str(tmp_path / "saved"), str(tmp_path / "same"), to="safetensors")
    assert ckpt.diff(str(tmp_path / "saved"), str(tmp_path / "same"))["equal"]
    ckpt.convert(str(tmp_path / "saved"), str(tmp_path / "out"), to="safetensors", experts=layout)
    found = {name: array.shape for name, array in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert found == hub_shapes(family, config) != {name: array.shape for name, array in arrays.items()}
