"""Parts of a model that no module of Megatron holds: they travel under their own names, and the report names them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckpt_tool as ckpt
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.families.registry import by_name

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))

from family_models import config_of, counted, hub_shapes

APART = {
    "kimi_k3": ("vision_tower", "mm_projector"),
    "qwen2_5_omni": ("talker", "token2wav"),
    "qwen3_omni_moe": ("talker", "code2wav"),
}


def test_they_are_stated() -> None:
    assert {family.name: tuple(part[:-1] for part in family.apart) for family in FAMILIES if family.apart} == APART


@pytest.mark.parametrize("family", APART)
def test_they_are_named_and_kept_both_ways(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    arrays = {name: array.astype(np.float32) for name, array in counted(hub_shapes(family, config)).items()}
    (tmp_path / "hub").mkdir()
    save_file(arrays, tmp_path / "hub" / "model.safetensors")
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    lines = []
    for part in APART[family]:
        count = sum(name.startswith(f"{part}.") for name in arrays)
        lines.append(f"{count} tensors of {part} have no place in Megatron: kept under their own names")
        assert count > 2
    for source, out, to in (("hub", "there", "megatron-dist"), ("there", "back", "safetensors")):
        notes = ckpt.convert(str(tmp_path / source), str(tmp_path / out), to=to)["notes"]
        assert set(lines) <= set(notes) and not any("in no rule of" in note for note in notes)
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == arrays.keys()
    own = [name for name in arrays if name.startswith(by_name(family).apart)]
    assert own and all(np.array_equal(found[name], arrays[name]) for name in own)
