"""Small models of every family: a config each, odd sizes on purpose, and their tensors in the hub's naming.

`hub_shapes` is spelled out by hand from the architectures, another road than the tables; `test_hub_names` compares it
with the real classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM"),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    "ernie4_5_vl_moe": ("ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration"),
    "glm4_moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "falcon": ("falcon", "FalconForCausalLM"),
    "bloom": ("bloom", "BloomForCausalLM"),
}
MOE = {
    "qwen2_moe": {"num_experts": 3, "moe_intermediate_size": 5, "shared_expert_intermediate_size": 9, "mlp_only_layers": [0]},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 5, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 3},
    "deepseek_v3": {"n_routed_experts": 4, "moe_intermediate_size": 5, "n_shared_experts": 2, "first_k_dense_replace": 1,
                    "q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
                    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 3, "moe_intermediate_size": 5, "moe_num_shared_experts": 2,
                     "moe_layer_start_index": 1},
    "glm4_moe": {"n_routed_experts": 4, "moe_intermediate_size": 5, "n_shared_experts": 2, "first_k_dense_replace": 1,
                 "use_qk_norm": True, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe": {"moe_num_experts": [3, 3], "moe_intermediate_size": [5, 7], "moe_num_shared_experts": 2},
}  # fmt: skip
PLAIN: dict[str, dict[str, Any]] = {
    "glm4": {"pad_token_id": None}, "phi3": {"pad_token_id": None}, "gpt2": {"n_positions": 12},
    "falcon": {"new_decoder_architecture": True},
    "ernie4_5_vl_moe": {"vision_config": {"depth": 2, "hidden_size": 8, "intermediate_size": 11, "num_heads": 2, "patch_size": 2},
                        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [0, 0, 2]}},
}  # fmt: skip
BIASED = {"qwen2", "qwen2_moe", "glm4_moe", "glm4", "gpt_oss"}  # q, k and v have biases in the models that people use
LIVE = ("gpt_oss",)  # experts lie in the file as in memory
# What a config of before Llama calls things; their heads are as wide as the model
OLD = {
    "gpt2": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd",
             "intermediate_size": "n_inner", "num_key_value_heads": "", "head_dim": ""},
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "intermediate_size": "",
              "num_key_value_heads": "", "head_dim": ""},
    "falcon": {"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size", "head_dim": ""},
}  # fmt: skip


def config_of(family: str, **change: Any) -> dict[str, Any]:
    """A config.json: 2 layers (the first dense), 6 heads in 2 groups of 4, hidden 18."""
    kind, architecture = CLASSES[family]
    config = {
        "model_type": kind, "architectures": [architecture], "num_hidden_layers": 2, "vocab_size": 22, "hidden_size": 18,
        "intermediate_size": 10, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4,
        "tie_word_embeddings": False, **MOE.get(family, {}), **PLAIN.get(family, {}),
        **change,
    }  # fmt: skip
    if family in BIASED:
        config |= {"attention_bias": True, "qkv_bias": True}
    if family == "deepseek_v3":
        config |= {"num_key_value_heads": config["num_attention_heads"]}
    if family in OLD:
        config["hidden_size"] = config["num_attention_heads"] * config["head_dim"]
        config = {OLD[family].get(key, key): value for key, value in config.items()}
        config.pop("", None)
    return config


def class_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers' config class is made with: ERNIE's flat config.json is two there."""
    told = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    if "vision_config" not in told:
        return told
    vision, tied = told.pop("vision_config"), told["tie_word_embeddings"]
    layers = ["dense"] + ["sparse"] * (told["num_hidden_layers"] - 1)
    text = {**told, "moe_num_experts": told["moe_num_experts"][0], "mlp_layer_types": layers}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


def hub_shapes(family: str, config: Mapping[str, Any], *, mtp: bool = False) -> dict[str, tuple[int, ...]]:
    """{name: shape} as the hub has them; with `mtp`, one layer of multi-token prediction."""
    if family in OLD:
        return _old_shapes(family, config)
    h, v = config["hidden_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,), "lm_head.weight": (v, h)}
    for i in range(config["num_hidden_layers"]):
        shapes |= _layer(family, config, f"model.layers.{i}", dense=i == 0 and family not in ("mixtral", "gpt_oss"))
    if family == "ernie4_5_vl_moe":
        shapes |= _eyes(config)
    elif mtp and family == "ernie4_5_moe":
        shapes |= _layer(family, config, "model.mtp_block.0", dense=True)
        shapes |= {f"model.mtp_{kind}_norm.0.weight": (h,) for kind in ("emb", "hidden")}
        shapes["model.mtp_linear_proj.0.weight"] = (h, 2 * h)
    elif mtp:
        there = f"model.layers.{config['num_hidden_layers']}"
        shapes |= _layer(family, config, there, dense=False)
        shapes |= {f"{there}.{name}.weight": (h,) for name in ("enorm", "hnorm", "shared_head.norm")}
        shapes |= {f"{there}.{name}.weight": (v, h) for name in ("embed_tokens", "shared_head.head")}
        shapes[f"{there}.eh_proj.weight"] = (h, 2 * h)
    return shapes


def _layer(family: str, config: Mapping[str, Any], at: str, *, dense: bool) -> dict[str, tuple[int, ...]]:
    h, f = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {f"{at}.{n}_layernorm.weight": (h,) for n in ("input", "post_attention")}
    shapes |= {f"{at}.self_attn.{name}": shape for name, shape in _attention(family, config).items()}
    more = {"glm4": ("post_self_attn", "post_mlp"), "gemma2": ("pre_feedforward", "post_feedforward")}
    shapes |= {f"{at}.{n}_layernorm.weight": (h,) for n in more.get(family.replace("gemma3", "gemma2"), ())}
    experts = family in MOE and not dense
    if family in ("glm4", "phi3"):
        return shapes | {f"{at}.mlp.gate_up_proj.weight": (2 * f, h), f"{at}.mlp.down_proj.weight": (h, f)}

    def mlp(place: str, width: int) -> dict[str, tuple[int, ...]]:
        up = {f"{at}.{place}.{part}_proj.weight": (width, h) for part in ("gate", "up")}
        return up | {f"{at}.{place}.down_proj.weight": (h, width)}

    if not experts:
        return shapes | mlp("mlp", f)
    if family == "ernie4_5_vl_moe":
        text, vision = config["moe_num_experts"]
        m, n = config["moe_intermediate_size"]
        for k in range(text + vision):
            shapes |= mlp(f"mlp.experts.{k}", m if k < text else n)
        shapes |= mlp("mlp.shared_experts", m * config["moe_num_shared_experts"])
        shapes |= {f"{at}.mlp.gate.weight": (h, text), f"{at}.mlp.gate.weight_1": (h, vision)}
        return shapes | {f"{at}.mlp.moe_statics.e_score_correction_bias": (2, text)}
    m = config.get("moe_intermediate_size", f)
    e = next(
        config[k] for k in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") if k in config
    )
    if family == "gpt_oss":
        there = f"{at}.mlp.experts"
        shapes |= {f"{at}.mlp.router.weight": (e, h), f"{at}.mlp.router.bias": (e,)}
        shapes |= {f"{there}.gate_up_proj": (e, h, 2 * f), f"{there}.gate_up_proj_bias": (e, 2 * f)}
        return shapes | {f"{there}.down_proj": (e, f, h), f"{there}.down_proj_bias": (e, h)}
    if family == "mixtral":
        shapes[f"{at}.block_sparse_moe.gate.weight"] = (e, h)
        for k in range(e):
            there = f"{at}.block_sparse_moe.experts.{k}"
            shapes |= {f"{there}.w1.weight": (f, h), f"{there}.w3.weight": (f, h), f"{there}.w2.weight": (h, f)}
        return shapes
    shapes[f"{at}.mlp.gate.weight"] = (e, h)
    for k in range(e):
        shapes |= mlp(f"mlp.experts.{k}", m)
    if family == "qwen2_moe":
        shapes |= mlp("mlp.shared_expert", config["shared_expert_intermediate_size"])
        shapes[f"{at}.mlp.shared_expert_gate.weight"] = (1, h)
    elif family == "ernie4_5_moe":
        shapes |= mlp("mlp.shared_experts", m * config["moe_num_shared_experts"])
        shapes[f"{at}.mlp.moe_statics.e_score_correction_bias"] = (1, e)
    elif family in ("deepseek_v3", "glm4_moe"):
        shapes |= mlp("mlp.shared_experts", m * config["n_shared_experts"])
        shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (e,)
    return shapes


def _eyes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tower of ERNIE 4.5 VL, and the resampler: windows of 2 x 2 patches, then of 2 frames."""
    h, seen = config["hidden_size"], config["vision_config"]
    y, z, p = seen["hidden_size"], seen["intermediate_size"], 3 * seen["patch_size"] ** 2
    linear = {"patch_embed.proj": (y, p)}
    for b in range(seen["depth"]):
        linear |= {f"blocks.{b}.{name}": shape for name, shape in (
            ("attn.qkv", (3 * y, y)), ("attn.proj", (y, y)), ("mlp.fc1", (z, y)), ("mlp.fc2", (y, z)))}  # fmt: skip
    root = "model.vision_model."
    shapes: dict[str, tuple[int, ...]] = {f"{root}{name}.weight": shape for name, shape in linear.items()}
    shapes |= {f"{root}{name}.bias": shape[:1] for name, shape in linear.items() if name != "patch_embed.proj"}
    norms = ["ln", *(f"blocks.{b}.norm{n}" for b in range(seen["depth"]) for n in (1, 2))]
    shapes |= {f"{root}{name}.{leaf}": (y,) for name in norms for leaf in ("weight", "bias")}
    root, window = "model.resampler_model.", 4 * y
    for name, inputs in (("spatial", window), ("temporal", 2 * window)):
        shapes |= {f"{root}{name}_linear.0.weight": (window, inputs), f"{root}{name}_linear.2.weight": (window, window),
                   f"{root}{name}_linear.3.weight": (window,)}  # fmt: skip
        shapes |= {f"{root}{name}_linear.{k}.bias": (window,) for k in (0, 2, 3)}
    return shapes | {f"{root}mlp.weight": (h, window), f"{root}mlp.bias": (h,), f"{root}after_norm.weight": (h,)}


def _attention(family: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    h, heads = config["hidden_size"], config["num_attention_heads"]
    if family == "deepseek_v3":
        q, k, nope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_nope_head_dim"]
        rope, v = config["qk_rope_head_dim"], config["v_head_dim"]
        return {
            "q_a_proj.weight": (q, h), "q_a_layernorm.weight": (q,), "q_b_proj.weight": (heads * (nope + rope), q),
            "kv_a_proj_with_mqa.weight": (k + rope, h), "kv_a_layernorm.weight": (k,),
            "kv_b_proj.weight": (heads * (nope + v), k), "o_proj.weight": (h, heads * v),
        }  # fmt: skip
    d, kv = config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    if family == "phi3":
        return {"qkv_proj.weight": (heads * d + 2 * kv, h), "o_proj.weight": (h, heads * d)}
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (heads * d, h), "k_proj.weight": (kv, h), "v_proj.weight": (kv, h), "o_proj.weight": (h, heads * d)
    }  # fmt: skip
    if family in BIASED:
        shapes |= {"q_proj.bias": (heads * d,), "k_proj.bias": (kv,), "v_proj.bias": (kv,)}
    if family in ("qwen3", "qwen3_moe", "glm4_moe", "gemma3"):
        shapes |= {"q_norm.weight": (d,), "k_norm.weight": (d,)}
    if family == "gpt_oss":
        shapes |= {"o_proj.bias": (h,), "sinks": (heads,)}
    return shapes


def _old_shapes(family: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """GPT-2, Falcon, Bloom: the root `transformer.`, biases beside weights."""
    v, h = config["vocab_size"], config["n_embd" if family == "gpt2" else "hidden_size"]
    linear: dict[str, tuple[int, int]]  # {module: (inputs, outputs)}
    if family == "gpt2":
        f = config["n_inner"]
        linear = {"attn.c_attn": (h, 3 * h), "attn.c_proj": (h, h), "mlp.c_fc": (h, f), "mlp.c_proj": (f, h)}
        outer, norms, layers = {"wte": (v, h), "wpe": (config["n_positions"], h)}, ("ln_1", "ln_2"), config["n_layer"]
    else:
        heads, f, layers = config.get("n_head"), 4 * h, config.get("n_layer")
        outer, norms, rows = {"word_embeddings": (v, h)}, ("input_layernorm", "post_attention_layernorm"), 3 * h
        if family == "falcon":
            heads, f, layers = config["num_attention_heads"], config["ffn_hidden_size"], config["num_hidden_layers"]
            new = config["new_decoder_architecture"]
            groups = config["num_kv_heads"] if new else 1 if config["multi_query"] else heads
            rows = h + 2 * groups * (h // heads)
            if new and config.get("num_ln_in_parallel_attn") != 1:
                norms = ("ln_attn", "ln_mlp")
            elif new or config["parallel_attn"]:
                norms = ("input_layernorm",)
        linear = {
            "self_attention.query_key_value": (h, rows), "self_attention.dense": (h, h),
            "mlp.dense_h_to_4h": (h, f), "mlp.dense_4h_to_h": (f, h),
        }  # fmt: skip
    root, shapes = "transformer", {"lm_head.weight": (v, h)}
    shapes |= {f"{root}.{name}.weight": shape for name, shape in outer.items()}
    plain = [f"{root}.ln_f", *(f"{root}.h.{i}.{norm}" for i in range(layers) for norm in norms)]
    plain += [f"{root}.word_embeddings_layernorm"] if family == "bloom" else []
    shapes |= {f"{module}.{leaf}": (h,) for module in plain for leaf in ("weight", "bias")}
    for i in range(layers):
        for module, (inputs, outputs) in linear.items():
            whole = (inputs, outputs) if family == "gpt2" else (outputs, inputs)
            shapes[f"{root}.h.{i}.{module}.weight"] = whole
            if family != "falcon" or config.get("bias"):
                shapes[f"{root}.h.{i}.{module}.bias"] = (outputs,)
    return shapes


def counted(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Arrays of those shapes in which no two elements are alike."""
    arrays, start = {}, 0
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        arrays[name] = np.arange(start, start + n, dtype=np.int64).reshape(shape)
        start += n
    return arrays
