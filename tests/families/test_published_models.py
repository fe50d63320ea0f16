"""Published models: the config that each one's page states, and the tensors that transformers' class has under it, on
no device.

Every tensor has a rule, in the shape that the real one has, and family and dialect are told from the config and the
names as saved. Numbers of layers are the real ones where that is quick.
"""

from __future__ import annotations

import os
from math import prod
from typing import Any

import pytest

from ckpt_tool.families.registry import find
from ckpt_tool.families.rewrite import mapping, sizes_of
from ckpt_tool.families.table import instances


def decoder(h: int, f: int, i: int, heads: int, kv: int, v: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": h,
        "intermediate_size": f,
        "num_hidden_layers": i,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": v,
        "pad_token_id": None,
        **more,
    }


GLM = {"head_dim": 128, "pad_token_id": None, "attention_bias": True}
TIED = {"tie_word_embeddings": True}
LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}
# name: (family, class, model_type, config)
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "Llama-2-7b": ("llama", "LlamaForCausalLM", "llama", decoder(4096, 11008, 32, 32, 32, 32000)),
    "Llama-3.2-1B": ("llama", "LlamaForCausalLM", "llama", decoder(2048, 8192, 16, 32, 8, 128256, head_dim=64, **TIED)),
    "Llama-3.2-3B": (
        "llama",
        "LlamaForCausalLM",
        "llama",
        decoder(3072, 8192, 28, 24, 8, 128256, head_dim=128, **TIED),
    ),
    "Mistral-7B-v0.3": ("llama", "MistralForCausalLM", "mistral", decoder(4096, 14336, 32, 32, 8, 32768)),
    "Mistral-Nemo": ("llama", "MistralForCausalLM", "mistral", decoder(5120, 14336, 40, 32, 8, 131072, head_dim=128)),
    "Qwen2.5-0.5B": ("qwen2", "Qwen2ForCausalLM", "qwen2", decoder(896, 4864, 24, 14, 2, 151936, **TIED)),
    "Qwen2.5-7B": ("qwen2", "Qwen2ForCausalLM", "qwen2", decoder(3584, 18944, 28, 28, 4, 152064)),
    "Qwen3-0.6B": ("qwen3", "Qwen3ForCausalLM", "qwen3", decoder(1024, 3072, 28, 16, 8, 151936, head_dim=128, **TIED)),
    "Mixtral-8x7B": (
        "mixtral",
        "MixtralForCausalLM",
        "mixtral",
        decoder(4096, 14336, 32, 32, 8, 32000, num_local_experts=8),
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v3",
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        decoder(  # 27 layers
            2048, 10944, 4, 16, 16, 102400, **LATENT, q_lora_rank=None, n_routed_experts=64, moe_intermediate_size=1408
        ),
    ),
    "DeepSeek-V2": (
        "deepseek_v3",
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        decoder(  # 60 layers
            5120,
            12288,
            3,
            128,
            128,
            102400,
            **LATENT,
            q_lora_rank=1536,
            n_routed_experts=160,
            moe_intermediate_size=1536,
        ),
    ),
    "GLM-4-9B-0414": ("glm4", "Glm4ForCausalLM", "glm4", decoder(4096, 13696, 40, 32, 2, 151552, **GLM)),
    "GLM-4-32B-0414": (
        "glm4",
        "Glm4ForCausalLM",
        "glm4",
        decoder(6144, 23040, 61, 48, 2, 151552, head_dim=128, attention_bias=False),
    ),
    "glm-4-9b-chat-hf": ("glm4", "GlmForCausalLM", "glm", decoder(4096, 13696, 40, 32, 2, 151552, **GLM)),
    "gpt-oss-20b": (
        "gpt_oss",
        "GptOssForCausalLM",
        "gpt_oss",
        decoder(2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32, attention_bias=True),
    ),
    "gemma-2b": ("gemma", "GemmaForCausalLM", "gemma", decoder(2048, 16384, 18, 8, 1, 256000, head_dim=256)),
    "gemma-2-2b": ("gemma2", "Gemma2ForCausalLM", "gemma2", decoder(2304, 9216, 26, 8, 4, 256000, head_dim=256)),
    "gemma-2-27b": ("gemma2", "Gemma2ForCausalLM", "gemma2", decoder(4608, 36864, 46, 32, 16, 256000, head_dim=128)),
    "gemma-3-1b-it": (
        "gemma3",
        "Gemma3ForCausalLM",
        "gemma3_text",
        decoder(1152, 6912, 26, 4, 1, 262144, head_dim=256),
    ),
    "Phi-3-mini-4k": ("phi3", "Phi3ForCausalLM", "phi3", decoder(3072, 8192, 32, 32, 32, 32064)),
    "Phi-4-mini": ("phi3", "Phi3ForCausalLM", "phi3", decoder(3072, 8192, 32, 24, 8, 200064, **TIED)),
    "phi-4": ("phi3", "Phi3ForCausalLM", "phi3", decoder(5120, 17920, 40, 40, 10, 100352)),
    "gpt2": (
        "gpt2",
        "GPT2LMHeadModel",
        "gpt2",
        {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
    ),
    "gpt2-xl": (
        "gpt2",
        "GPT2LMHeadModel",
        "gpt2",
        {"n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024, "vocab_size": 50257},
    ),
    "falcon-7b": (
        "falcon",
        "FalconForCausalLM",
        "falcon",
        {
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "multi_query": True,
            "vocab_size": 65024,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "bias": False,
        },
    ),
    "falcon-40b": (
        "falcon",
        "FalconForCausalLM",
        "falcon",
        {
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "vocab_size": 65024,
            "new_decoder_architecture": True,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
        },
    ),
    "falcon-11B": (
        "falcon",
        "FalconForCausalLM",
        "falcon",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_kv_heads": 8,
            "vocab_size": 65024,
            "new_decoder_architecture": True,
            "ffn_hidden_size": 16384,
            "num_ln_in_parallel_attn": 1,
            "parallel_attn": True,
            "multi_query": True,
            "bias": False,
        },
    ),
    "falcon-rw-1b": (
        "falcon",
        "FalconForCausalLM",
        "falcon",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "multi_query": False,
            "vocab_size": 50304,
            "new_decoder_architecture": False,
            "parallel_attn": False,
            "bias": True,
            "alibi": True,
        },
    ),
    "bloom-560m": (
        "bloom",
        "BloomForCausalLM",
        "bloom",
        {"n_layer": 24, "n_head": 16, "hidden_size": 1024, "vocab_size": 250880},
    ),
}


def saved(architecture: str, kind: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the class saves them: tied names once, experts undone."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = getattr(transformers, architecture)(transformers.AutoConfig.for_model(kind, **config))
    shapes = {name: tuple(t.shape) for name, t in revert_weight_conversion(model, model.state_dict()).items()}
    if model.config.get_text_config().tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


@pytest.mark.share(3)
@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_of_a_published_model_has_a_rule_in_its_shape(model: str) -> None:
    name, architecture, kind, config = MODELS[model]
    shapes = saved(architecture, kind, config)
    config = {**config, "model_type": kind, "architectures": [architecture]}
    found = find(config, shapes)
    assert (found.family.name, found.dialect) == (name, "hf")
    table = found.family.table("hf")
    named, unknown = instances(table.left, shapes)
    assert not unknown
    sizes, _ = sizes_of(found.family, table, named, shapes, config)
    told: dict[str, tuple[int, ...]] = {}
    for rule in table.rules:
        told |= rule.shapes({**dict.fromkeys(rule.axes, 1), **sizes}, config)[0]
    assert {each: told[each] for each in shapes} == shapes
    for dialect in {"megatron", "paddle"} & found.family.dialects.keys():
        there = mapping(found.family, "hf", dialect, shapes, config)
        assert sum(prod(made.shape) for made in there.made) == sum(map(prod, shapes.values()))
        back = mapping(found.family, dialect, "hf", {made.name: made.shape for made in there.made}, config)
        assert {made.name: made.shape for made in back.made} == shapes


@pytest.mark.parametrize("model", ["DeepSeek-V2-Lite", "Mixtral-8x7B"])
def test_experts_fused_in_memory_are_the_published_ones(model: str) -> None:
    """transformers 5 holds a layer's experts in two tensors; DeepSeek-V2 is of DeepSeek-V3's family."""
    name, architecture, kind, config = MODELS[model]
    transformers = pytest.importorskip("transformers", minversion="5")
    torch = pytest.importorskip("torch")

    few = {**config, "num_hidden_layers": 3}
    with torch.device("meta"):
        live = getattr(transformers, architecture)(transformers.AutoConfig.for_model(kind, **few)).state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in live.items()}
    told = {**few, "model_type": kind}
    found = find(told, shapes)
    assert (found.family.name, found.dialect) == (name, "hf-fused")
    made = mapping(found.family, "hf-fused", "hf", shapes, told).made
    assert {each.name: each.shape for each in made} == saved(architecture, kind, few)


SEES = {  # gemma-3-4b-it: what a config leaves out is the class's default
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "model_type": "gemma3_text",
    },
}


@pytest.mark.parametrize(("dialect", "root"), [("hf-vl", "language_model.model."), ("hf-vl5", "model.language_model.")])
def test_the_language_part_of_a_model_that_sees(dialect: str, root: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    torch = pytest.importorskip("torch")
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        config = transformers.AutoConfig.for_model("gemma3", **SEES)
        model = transformers.Gemma3ForConditionalGeneration(config)
    state = model.state_dict() if dialect == "hf-vl5" else revert_weight_conversion(model, model.state_dict())
    shapes = {name: tuple(t.shape) for name, t in state.items()}
    head = "language_model.lm_head.weight" if dialect == "hf-vl" else "lm_head.weight"
    told = {**SEES, "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    assert find(told, shapes).family.name == "gemma3_vl"  # the whole
    found = find(told, shapes, family="gemma3")
    assert (found.family.name, found.dialect) == ("gemma3", dialect)
    mapped = mapping(found.family, dialect, "hf", shapes, told)
    language = {name for name in shapes if name.startswith(root) or name == head}
    assert len(mapped.made) == len(language) == 34 * 13 + 3
    assert {name.split(".")[0] for name in shapes.keys() - language} <= {
        "model",
        "vision_tower",
        "multi_modal_projector",
    }
    made = {each.name: each.shape for each in mapped.made if each.name != "lm_head.weight"}
    text = {key: value for key, value in SEES["text_config"].items() if key != "model_type"}
    assert made == saved("Gemma3ForCausalLM", "gemma3_text", text)


def test_the_whole_of_a_model_that_sees() -> None:
    """As released, where the tower's names have one level more than transformers 5 saves."""
    transformers = pytest.importorskip("transformers", minversion="5")
    torch = pytest.importorskip("torch")
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        config = transformers.AutoConfig.for_model("gemma3", tie_word_embeddings=True, **SEES)
        model = transformers.Gemma3ForConditionalGeneration(config)
    state = revert_weight_conversion(model, model.state_dict())
    told = {**SEES, "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    saves = {name: tuple(tensor.shape) for name, tensor in state.items() if "lm_head" not in name}
    shapes = {name.replace("vision_tower.", "vision_tower.vision_model."): shape for name, shape in saves.items()}
    assert find(told, saves).dialect == "hf-saved" and find(told, shapes).dialect == "hf"
    family = find(told, shapes).family
    there = {each.name: each.shape for each in mapping(family, "hf", "megatron", shapes, told).made}
    assert there["language_model.decoder.layers.33.self_attention.linear_qkv.weight"] == ((8 + 4 + 4) * 256, 2560)
    assert there["multi_modal_projector.proj.weight"] == (2560, 768)
    assert all(not name.startswith("vision_tower.vision_model.") for name in there)
    assert {each.name: each.shape for each in mapping(family, "megatron", "hf", there, told).made} == shapes
    assert {each.name: each.shape for each in mapping(family, "hf-saved", "hf", saves, told).made} == shapes
