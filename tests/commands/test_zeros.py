"""Elements that one dialect has and the other has none for: zeros there, left out on the way back."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import ckpt_tool as ckpt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))

from family_models import config_of, counted, hub_shapes

BRIDGE = Path(__file__).parents[2] / "fixtures" / "bridge"


def test_layers_that_take_the_keys_of_others(tmp_path: Path) -> None:
    """Gemma 4: Megatron's projection has room for them."""
    hub, there, back = (str(tmp_path / name) for name in ("hub", "there", "back"))
    arrays = counted({name: tuple(n) for name, n in json.loads((BRIDGE / "gemma4.json").read_text())["hub"].items()})
    (tmp_path / "hub").mkdir()
    save_file({name: (1 + array).astype(np.float32) for name, array in arrays.items()}, f"{hub}/model.safetensors")
    shutil.copy(BRIDGE / "gemma4.config.json", f"{hub}/config.json")
    notes = ckpt.convert(hub, there, to="megatron", tp=2)["notes"]
    assert any("576 of 864 elements of decoder.layers.2.self_attention.linear_qkv.weight are zeros" in n for n in notes)
    assert not any("layers.0." in note for note in notes)
    qkv = ckpt.open(there)["decoder.layers.2.self_attention.linear_qkv.weight"].numpy()
    assert np.count_nonzero(qkv) == 864 - 576
    notes = ckpt.convert(there, back, to="safetensors")["notes"]
    assert any("576 of 864 elements" in note and "are left out" in note for note in notes)
    assert ckpt.diff(hub, back)["equal"]


def test_experts_that_only_pass_on(tmp_path: Path) -> None:
    """LongCat-Flash: transformers has rows for them in memory."""
    hub, there, back = (str(tmp_path / name) for name in ("hub", "there", "back"))
    config = config_of("longcat_flash")
    real = {**config, "zero_expert_num": 2}
    shapes = hub_shapes("longcat_flash", config)
    shapes |= {name: shape for name, shape in hub_shapes("longcat_flash", real).items() if ".router." in name}
    arrays = {name: (1 + array).astype(np.float32) for name, array in counted(shapes).items()}
    (tmp_path / "hub").mkdir()
    save_file(arrays, f"{hub}/model.safetensors", {"format": "pt"})
    (tmp_path / "hub" / "config.json").write_text(json.dumps(real))
    ckpt.convert(hub, there, to="safetensors", experts="fused")
    fused = load_file(f"{there}/model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"]
    assert len(fused) == 6 and not fused[4:].any() and fused[:4].all()
    ckpt.convert(there, back, to="safetensors", experts="split")
    assert ckpt.diff(hub, back)["equal"]
