"""Degrees that Megatron refuses are refused for every family: its arguments say how many query groups there are.

Megatron-Core 0.19.2, `transformer_config.py`: the groups must be a multiple of the tensor-parallel ranks, or divide
them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_models import config_of, hub_shapes

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import UsageError
from ckpt_tool.families.config.translation import megatron_args
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

safetensors = pytest.importorskip("safetensors.numpy")
pytest.importorskip("transformers", minversion="5")
THREE = {  # sizes that three ranks can share, all but the query groups
    "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 12,
    "dense_intermediate_size": 12,
    "shared_intermediate_size": 6,
    "intermediate_size_mlp": 12,
    "moe_latent_size": 12,
    "moe_shared_expert_intermediate_size": 12,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "mamba_num_heads": 6,
    "n_groups": 3,
    "mamba_n_heads": 6,
    "mamba_d_ssm": 36,
    "mamba_n_groups": 3,
    "vocab_size_per_layer_input": 24,
}
OWN = {"ernie4_5_vl_moe": {"moe_intermediate_size": [6, 6]}}
LEFT_OUT = ("qwen4_exp",)  # whose tables of n-grams three ranks cannot share either


def small(family: str) -> dict[str, Any]:
    return config_of(family, **{**THREE, **OWN.get(family, {})})


GROUPED = [
    family.name
    for family in FAMILIES
    if "megatron" in family.dialects
    and family.name not in LEFT_OUT
    and megatron_args(small(family.name)).config.get("num_query_groups") == 2
]


def job(folder: Path, config: dict[str, Any], shapes: dict[str, Any], tp: int) -> dict[str, Any]:
    hub = folder / "hub"
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    hub.mkdir()
    safetensors.save_file(arrays, hub / "model.safetensors", {"format": "pt"})
    (hub / "config.json").write_text(json.dumps(config))
    writing = Writing(to="megatron-dist", degrees={"tp": tp}, dry_run=True)
    return convert(str(hub), str(folder / "out"), Reading(), writing, Silent())


def test_every_family_of_two_groups_is_here() -> None:
    assert {"qwen3_next", "qwen3_5_moe", "olmoe", "nemotron_h", "gemma4", "llama4", "mimo_v2_flash"} <= set(GROUPED)


@pytest.mark.parametrize("family", GROUPED)
def test_query_groups_that_ranks_cannot_share(family: str, tmp_path: Path) -> None:
    config = small(family)
    with pytest.raises(UsageError, match="2 query groups do not divide by 3") as caught:
        job(tmp_path, config, hub_shapes(family, config), 3)
    assert caught.value.code == "E0273"


@pytest.mark.parametrize("family", ["hy_v3", "qwen3_next", "mimo_v2_flash"])
def test_more_ranks_than_groups(family: str, tmp_path: Path) -> None:
    """Megatron-Core repeats the groups' keys and values; Megatron-Bridge's attention of MiMo-V2-Flash does not."""
    sizes = {"num_attention_heads": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    delta = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 8}
    config = config_of(family, **sizes, **delta, v_head_dim=4)
    shapes = hub_shapes(family, config)
    if family == "mimo_v2_flash":
        with pytest.raises(UsageError, match="2 query groups do not divide by 4"):
            job(tmp_path, config, shapes, 4)
    else:
        assert any("ranks share the 2 query groups" in note for note in job(tmp_path, config, shapes, 4)["notes"])
