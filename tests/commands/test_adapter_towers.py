"""A LoRA on several towers of a model that sees, whose base is named as it was published: against PEFT's own merge."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import pytest
import torch
from adapter_models import load

from ckpt_tool.adapters.fold import fold
from ckpt_tool.adapters.targets import match
from ckpt_tool.adapters.towers import Towers, changed_prefix, without_wrapping
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.progress import Silent
from ckpt_tool.core.tensor import StoredArray, TensorKey, simple_tensor
from ckpt_tool.formats.adapters.settings import settings_of
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

TEXT = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
SEEN = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_SEEN = {
    "depth": 1,
    "hidden_size": 16,
    "embed_dim": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
TOKENS = {"image_token_id": 40, "video_token_id": 41, "vision_start_token_id": 42, "vision_end_token_id": 43}


def made(kind: str) -> torch.nn.Module:
    import transformers as hf

    torch.manual_seed(3)
    siglip = {**SEEN, "image_size": 8, "patch_size": 4}
    if kind == "gemma3":
        config = hf.Gemma3Config(
            text_config={**TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
            vision_config={"model_type": "siglip_vision_model", **siglip},
            mm_tokens_per_image=1,
            image_token_index=40,
            tie_word_embeddings=False,
        )
        return hf.Gemma3ForConditionalGeneration(config)
    if kind == "qwen2_vl":
        seen = {**QWEN_SEEN, "hidden_size": 16, "mlp_ratio": 2}
        config = hf.Qwen2VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=seen, **TOKENS)
        return hf.Qwen2VLForConditionalGeneration(config)
    if kind == "qwen2_5_vl":
        seen = {
            **QWEN_SEEN,
            "intermediate_size": 24,
            "out_hidden_size": 16,
            "window_size": 16,
            "fullatt_block_indexes": [0],
        }
        config = hf.Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": ROPE}, vision_config=seen, **TOKENS)
        return hf.Qwen2_5_VLForConditionalGeneration(config)
    if kind == "mistral3":
        config = hf.Mistral3Config(
            text_config={"model_type": "mistral", **TEXT},
            vision_config={"model_type": "pixtral", **siglip, "head_dim": 8},
            image_token_index=40,
        )
        return hf.Mistral3ForConditionalGeneration(config)
    if kind == "internvl":
        config = hf.InternVLConfig(
            text_config={"model_type": "qwen2", **TEXT},
            vision_config={"model_type": "internvl_vision", **SEEN, "image_size": [8, 8], "patch_size": [4, 4]},
            image_token_id=40,
            downsample_ratio=0.5,
            tie_word_embeddings=False,
        )
        return hf.InternVLForConditionalGeneration(config)
    if kind == "llava":
        config = hf.LlavaConfig(
            text_config={"model_type": "llama", **TEXT},
            vision_config={"model_type": "clip_vision_model", **siglip, "projection_dim": 16},
            image_token_index=40,
        )
        return hf.LlavaForConditionalGeneration(config)
    config = hf.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config={
            **QWEN_SEEN,
            "intermediate_size": 24,
            "out_hidden_size": 16,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **TOKENS,
    )
    return hf.Qwen3VLForConditionalGeneration(config)


# kind -> the modules that are adapted: some of each tower, and what joins them
KINDS = {
    "gemma3": ["q_proj", "up_proj", "fc1", "lm_head"],
    "qwen2_vl": ["q_proj", "down_proj", "qkv", "fc1", "mlp.0"],
    "qwen2_5_vl": ["v_proj", "gate_proj", "qkv", "mlp.2"],
    "mistral3": ["q_proj", "up_proj", "linear_1"],
    "internvl": ["q_proj", "down_proj", "fc1", "linear_1"],
    "llava": ["k_proj", "up_proj", "fc2", "linear_2"],
    "qwen3_vl": ["q_proj", "qkv", "linear_fc1"],
}


@pytest.mark.skipif(find_spec("peft") is None or find_spec("transformers") is None, reason="without PEFT")
@pytest.mark.parametrize("kind", KINDS)
def test_equals_pefts_own_merge(kind, tmp_path):
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = made(kind).float()
        with torch.no_grad():
            for value in model.parameters():
                value.normal_(std=0.1)
        model.save_pretrained(tmp_path / "base")
        saved = ["embed_tokens"] if kind == "internvl" else None
        adapted = get_peft_model(
            model, LoraConfig(r=2, lora_alpha=6, target_modules=KINDS[kind], modules_to_save=saved)
        )
        with torch.no_grad():
            for value in adapted.parameters():
                if value.requires_grad:
                    value.normal_(std=0.3)
        adapted.save_pretrained(tmp_path / "adapter")
        adapted.merge_and_unload().save_pretrained(tmp_path / "theirs")

    sources = [str(tmp_path / "base"), str(tmp_path / "adapter")]
    fold(sources, str(tmp_path / "out"), Reading(), Writing(verify="full"), Silent())
    ours = load(tmp_path / "out")
    theirs = load(tmp_path / "theirs")
    before = load(tmp_path / "base")
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]
    changed = [name for name in ours if not torch.equal(ours[name], before[name])]
    assert any("vis" in name for name in changed) and any("vis" not in name for name in changed)


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("model.language_model.layers.0.mlp.up_proj", "layers.0.mlp.up_proj"),
        ("thinker.model.layers.3.self_attn.q_proj", "layers.3.self_attn.q_proj"),
        ("thinker.visual.blocks.0.attn.qkv", "visual.blocks.0.attn.qkv"),
        ("talker.model.layers.0.mlp.up_proj", "talker.layers.0.mlp.up_proj"),
        ("lm_head", "lm_head"),
        ("model.layers.0.model.x", "layers.0.model.x"),
    ],
)
def test_steps_that_only_wrap(name, rest):
    assert without_wrapping(name) == rest


def test_two_modules_that_may_be_meant_are_none():
    towers = Towers(
        ["vision_model.transformer.layers.0.q", "language_model.model.layers.0.q", "model.visual.layers.0.q"]
    )
    assert towers.find("model.layers.0.q") is None
    assert towers.find("visual.layers.0.q") == "model.visual.layers.0.q"
    assert changed_prefix("model.visual.a.b", "visual.a.b") == ("model.", "")


def test_a_tower_that_the_base_lacks_is_told():
    def tensor(name, *shape):
        return simple_tensor(TensorKey(name), StoredArray("file", 0, DTYPES["F32"], shape))

    base = {"model.layers.0.q_proj.weight": tensor("model.layers.0.q_proj.weight", 4, 4)}
    adapter = [
        tensor(f"base_model.model.model.{tower}.layers.0.q_proj.lora_{part}.weight", *shape)
        for tower in ("language_model", "visual")
        for part, shape in (("A", (2, 4)), ("B", (4, 2)))
    ]
    found = match(adapter, base, settings_of({"peft_type": "LORA", "r": 2}, "c"), {})
    assert set(found.changes) == set(base)
    assert len(found.faults) == 1 and "visual" in found.faults[0]
