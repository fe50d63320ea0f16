"""ERNIE 4.5 VL's config: transformers builds from ours what PaddleFormers saved; there and back; odd patterns are
told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt_tool.families.config.ernie_vision import flatten_config, is_flat, is_nested, nest_config
from ckpt_tool.systems.paddle.config import from_paddle, paddle_config

SAVED = Path(__file__).parents[2] / "fixtures" / "families" / "ernie4_5_vl_moe"
# What baidu's ERNIE-4.5-VL-28B-A3B config.json states, as far as sizes go
PUBLISHED = {
    "model_type": "ernie4_5_moe_vl",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "vocab_size": 103424,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "moe_num_experts": [64, 64],
    "moe_k": 6,
    "moe_intermediate_size": [1536, 512],
    "moe_num_shared_experts": 2,
    "moe_layer_interval": 1,
    "freq_allocation": 20,
    "moe_layer_start_index": [1, 1],
    "moe_layer_end_index": [28, 28],
    "im_patch_id": 100295,
    "spatial_conv_size": 2,
    "temporal_conv_size": 2,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 1280,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
    },
}


def test_the_published_model_is_the_default_of_transformers() -> None:
    """transformers' classes have that very model as their defaults: another road to what we say of it."""
    transformers = pytest.importorskip("transformers", minversion="5")
    config = nest_config(PUBLISHED)
    want = transformers.Ernie4_5_VLMoeConfig().to_dict()
    ours = transformers.AutoConfig.for_model(**config).to_dict()
    for part in ("text_config", "vision_config"):
        differ = {key for key, value in want[part].items() if ours[part].get(key) != value}
        assert differ <= {"bos_token_id", "eos_token_id", "pad_token_id", "rope_parameters", "head_dim"}, (part, differ)
    assert ours["text_config"]["rope_parameters"]["mrope_section"] == [22, 22, 20]
    assert ours["image_token_id"] == want["image_token_id"]


@pytest.mark.parametrize(
    "config", [PUBLISHED, json.loads((SAVED / "config.json").read_text())], ids=["published", "saved"]
)
def test_there_and_back(config: dict[str, object]) -> None:
    assert is_flat(config) and not is_nested(config)
    back, notes = flatten_config(nest_config(config))
    assert not notes and is_nested(nest_config(config))
    assert nest_config(back) == nest_config(
        {**config, "dtype": back.get("torch_dtype")} if "torch_dtype" in back else config
    )
    for key in (
        "moe_num_experts",
        "moe_intermediate_size",
        "moe_layer_start_index",
        "moe_layer_interval",
        "spatial_conv_size",
    ):
        assert back[key] == config[key]
    assert back["vision_config"]["mlp_ratio"] == config["vision_config"]["mlp_ratio"]  # type: ignore[index]
    assert from_paddle(config).config == nest_config(config) and paddle_config(nest_config(config)).config == back


@pytest.mark.parametrize(
    ("kinds", "grid"),
    [
        ("dsss", (1, 3, 1)),
        ("dsds", (1, 3, 2)),
        ("ssss", (0, 3, 1)),
        ("dssd", (1, 2, 1)),
        ("dddd", None),
        ("sdss", "odd"),
    ],
)
def test_which_layers_have_experts(kinds: str, grid: object) -> None:
    config = nest_config({**PUBLISHED, "num_hidden_layers": 4})
    config["text_config"]["mlp_layer_types"] = ["sparse" if kind == "s" else "dense" for kind in kinds]
    back, notes = flatten_config(config)
    assert bool(notes) == (grid == "odd")
    if isinstance(grid, tuple):
        assert (back["moe_layer_start_index"][0], back["moe_layer_end_index"][0], back["moe_layer_interval"]) == grid
        assert nest_config(back)["text_config"]["mlp_layer_types"] == config["text_config"]["mlp_layer_types"]
