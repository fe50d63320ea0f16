"""Kimi K3 as it is released: `A_log` with zeros behind the heads', modules that are Megatron-Bridge's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from writings import writing_of

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.progress import Silent
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Comparison

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))

from family_models import config_of, counted, hub_shapes

# 96 and 128 in the released model
HEADS = 4
WIDTH = 6
A_LOG = "language_model.model.layers.0.self_attn.A_log"
# What has an extra state in Megatron-Bridge's modules: linears and norms that are Transformer Engine's
LINEARS = """
    self_attention.q_proj self_attention.k_proj self_attention.v_proj self_attention.f_a_proj self_attention.f_b_proj
    self_attention.b_proj self_attention.g_proj self_attention.o_proj self_attention.q_a_proj self_attention.q_b_proj
    self_attention.kv_a_proj_with_mqa self_attention.kv_b_proj mlp.linear_fc1 mlp.linear_fc2 mlp.fc1_latent_proj
    mlp.fc2_latent_proj mlp.shared_experts.linear_fc1 mlp.shared_experts.linear_fc2 mlp.experts.experts.linear_fc1
    mlp.experts.experts.linear_fc2 input_layernorm pre_mlp_layernorm
""".split()


def released(folder: Path, padding: np.ndarray) -> dict[str, np.ndarray]:
    config = config_of("kimi_k3")
    config["text_config"] |= {"moe_intermediate_size": 6}  # two ranks share it
    config["text_config"]["linear_attn_config"] |= {"num_heads": HEADS, "head_dim": WIDTH}
    arrays = {name: array.astype(np.float32) for name, array in counted(hub_shapes("kimi_k3", config)).items()}
    arrays |= {name: np.concatenate([a, padding]) for name, a in arrays.items() if name.endswith("A_log")}
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return arrays


def run(source: Path, out: Path, **writing: Any) -> dict[str, Any]:
    return convert(str(source), str(out), Reading(), writing_of(**{"fsync": False, **writing}), Silent())


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_it_comes_back_with_its_padding(to: str, tmp_path: Path) -> None:
    arrays = released(tmp_path / "hub", np.zeros(WIDTH - HEADS, np.float32))
    assert arrays[A_LOG].shape == (WIDTH,)
    report = run(tmp_path / "hub", tmp_path / "there", to=to, degrees={"tp": 2, "pp": 3})
    assert any(f"2 of 6 elements of {A_LOG} are left out, and of 1 more like it" in note for note in report["notes"])
    run(tmp_path / "there", tmp_path / "back", to="safetensors")
    assert diff(str(tmp_path / "hub"), str(tmp_path / "back"), Reading(), Comparison(), progress=Silent())["equal"]


def test_keys_of_torch_dist_are_those_of_bridge_s_modules(tmp_path: Path) -> None:
    """No norm is fused into a linear, and the modules that are Transformer Engine's have extra states."""
    pytest.importorskip("torch")
    from torch.distributed.checkpoint import FileSystemReader

    released(tmp_path / "hub", np.zeros(WIDTH - HEADS, np.float32))
    run(tmp_path / "hub", tmp_path / "out", to="megatron-dist", spec="te")
    keys = FileSystemReader(tmp_path / "out" / "release").read_metadata().state_dict_metadata
    states = {key.partition("._extra_state")[0] for key in keys if "._extra_state" in key and "layers" in key}
    assert {name.split(".", 3)[3] for name in states} == set(LINEARS)
    assert not [key for key in keys if "layer_norm" in key]
    assert {f"decoder.layers.{i}.pre_mlp_layernorm.weight" for i in range(3)} <= keys.keys()
    assert {f"decoder.layers.2.output_attn_res_{what}.weight" for what in ("norm", "proj")} <= keys.keys()
