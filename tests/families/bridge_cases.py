"""The models of which `bridge_golden.py` makes golden files: a tiny config each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

Shapes = dict[str, tuple[int, ...]]
Again = Callable[..., Shapes]  # names and shapes of the same class with other sizes


@dataclass(frozen=True)
class Case:
    """config: arguments of transformers' config class. more: adds hub tensors that transformers does not build. stated:
    what config.json says beside. posing: what it says to the bridge alone. provider: attributes of Megatron's. before:
    called before the bridge is. swift: mcore-bridge of ms-swift instead of Megatron-Bridge."""

    name: str
    model_type: str
    architecture: str
    config: Mapping[str, Any]
    more: Callable[[Shapes, Again], Shapes] | None = None
    stated: Mapping[str, Any] = field(default_factory=dict)
    provider: Mapping[str, Any] = field(default_factory=dict)
    posing: Mapping[str, Any] = field(default_factory=dict)
    before: Callable[[], None] | None = None
    tp2: bool = True
    expert_tp: int = 1
    swift: bool = False
    versions: str = "megatron-bridge 0.6.2, megatron-core 0.19.2, transformers 5.23.0"


SIZES = {"num_hidden_layers": 3, "vocab_size": 26, "hidden_size": 12, "intermediate_size": 10,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": False}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3, "linear_value_head_dim": 5,
         "linear_conv_kernel_dim": 3}  # fmt: skip
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def qwen_mtp(prefix: str, last: int) -> Callable[[Shapes, Again], Shapes]:
    """`mtp.*` of Qwen's releases: a layer as the last of the decoder's, and what joins it."""

    def more(shapes: Shapes, _: Again) -> Shapes:
        there = f"{prefix}layers.{last}."
        layer = {f"mtp.layers.0.{k.removeprefix(there)}": v for k, v in shapes.items() if k.startswith(there)}
        h = shapes[f"{prefix}norm.weight"][0]
        norms = {f"mtp.{n}.weight": (h,) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
        return {**shapes, **layer, **norms, "mtp.fc.weight": (h, 2 * h)}

    return more


def ahead(shapes: Shapes, again: Again) -> Shapes:
    """The layer behind the last, as the releases of DeepSeek, GLM and Hunyuan have it, with copies of embedding and
    head."""
    layers = 1 + max(int(name.split(".")[2]) for name in shapes if name.startswith("model.layers."))
    there, (v, h) = f"model.layers.{layers}.", shapes["model.embed_tokens.weight"]
    layer = {name: shape for name, shape in again(num_hidden_layers=layers + 1).items() if name.startswith(there)}
    norms = {f"{there}{name}.weight": (h,) for name in ("enorm", "hnorm", "shared_head.norm")}
    copies = {f"{there}{name}.weight": (v, h) for name in ("embed_tokens", "shared_head.head")}
    return {**shapes, **layer, **norms, **copies, f"{there}eh_proj.weight": (h, 2 * h)}


def hunyuan(shapes: Shapes, again: Again) -> Shapes:
    """Its last norm has another name, and there are no copies."""
    made = ahead(shapes, again)
    kept = {name: shape for name, shape in made.items() if not name.endswith(("3.embed_tokens.weight", "head.weight"))}
    return {name.replace("shared_head.norm", "final_layernorm"): shape for name, shape in kept.items()} | {
        "lm_head.weight": shapes["lm_head.weight"]
    }


def mimo(shapes: Shapes, _: Again) -> Shapes:
    """`model.mtp.layers.0`: sliding attention, a dense MLP."""
    there = "model.mtp.layers.0."
    h = shapes["model.norm.weight"][0]
    layer = {name.replace("model.layers.1.", there): shape for name, shape in shapes.items()
             if name.startswith("model.layers.1.self_attn.")}  # fmt: skip
    layer |= {name.replace("model.layers.0.", there): shape for name, shape in shapes.items()
              if name.startswith("model.layers.0.mlp.")}  # fmt: skip
    norms = ("enorm", "hnorm", "final_layernorm", "input_layernorm", "pre_mlp_layernorm")
    return {
        **shapes,
        **layer,
        **{f"{there}{name}.weight": (h,) for name in norms},
        f"{there}eh_proj.weight": (h, 2 * h),
    }


def mimo_7b(shapes: Shapes, _: Again) -> Shapes:
    """Two `model.mtp_layers`, each as the last of the decoder's, and what joins it."""
    h = shapes["model.norm.weight"][0]
    made = dict(shapes)
    for layer in range(2):
        there = f"model.mtp_layers.{layer}."
        made |= {k.replace("model.layers.2.", there): v for k, v in shapes.items() if k.startswith("model.layers.2.")}
        made |= {f"{there}{name}_layernorm.weight": (h,) for name in ("token", "hidden", "final")}
        made[f"{there}input_proj.weight"] = (h, 2 * h)
    return made


def turned_experts(shapes: Shapes, _: Again) -> Shapes:
    """(experts, inputs, outputs), as the released files have them and transformers' saves do not."""
    return {name: (e[0], e[2], e[1]) if ".experts." in name else e for name, e in shapes.items()}


def packed_experts(shapes: Shapes, again: Again) -> Shapes:
    """Experts in two tensors, as the released Qwen3.5 has them, MTP's too."""
    return packed(qwen_mtp("model.language_model.", 3)(shapes, again))


def packed(made: Shapes, _: Again | None = None) -> Shapes:
    """Experts in two tensors a layer."""
    experts = [name for name in made if ".experts.0.down_proj" in name]
    packed = {name: shape for name, shape in made.items() if ".experts." not in name}
    for name in experts:
        front, (h, m) = name.partition("0.down_proj")[0], made[name]
        count = sum(each.startswith(front) and each.endswith("down_proj.weight") for each in made)
        packed |= {f"{front}gate_up_proj": (count, 2 * m, h), f"{front}down_proj": (count, h, m)}
    return packed


def qwen4(shapes: Shapes, _: Again) -> Shapes:
    """Packed experts, and `mtp.*`: a layer as the last of the decoder's, what joins it, and a mixer of its own."""
    root = "model.language_model."
    wide = shapes["model.language_model.hyper_connection_mixer.hc_norm.weight"]
    mixer = {
        f"mtp.{k.removeprefix(root)}": v for k, v in shapes.items() if k.startswith(f"{root}hyper_connection_mixer")
    }
    inner = {f"mtp.layers.0.{k.split('.', 4)[4]}": v for k, v in shapes.items() if k.startswith(f"{root}layers.3.")}
    h = shapes[f"{root}embed_tokens.weight"][1]
    joined = {"pre_fc_norm_embedding": (h,), "pre_fc_norm_hidden": wide, "fc_embedding": (h, h), "fc_hidden": (h, h)}
    return packed({**shapes, **inner, **mixer, **{f"mtp.{name}.weight": shape for name, shape in joined.items()}})


def deepseek_v4(shapes: Shapes, _: Again) -> Shapes:
    """The released names, which transformers does not save, and `mtp.0`: a layer as the first of the decoder's, which
    sees through a window, but with experts chosen by their bias, and what joins it."""
    renamed = (("model.embed_tokens.", "embed."), ("lm_head.", "head."), ("model.hc_head.hc_", "hc_head_"),
               (".attn.norm.", ".attn.kv_norm."), ("model.", ""))  # fmt: skip
    made: Shapes = {}
    for name, shape in shapes.items():
        for old, new in renamed:
            name = name.replace(old, new)
        made[name] = shape
    h = made["norm.weight"][0]
    layer = {name.replace("layers.0.", "mtp.0."): shape for name, shape in made.items() if name.startswith("layers.0.")}
    bias = {"mtp.0.ffn.gate.bias": layer.pop("mtp.0.ffn.gate.tid2eid")[:0] + made["layers.1.ffn.gate.bias"]}
    joined = {f"mtp.0.{name}.weight": (h,) for name in ("enorm", "hnorm", "norm")}
    joined |= {f"mtp.0.{name}.weight": (h, h) for name in ("e_proj", "h_proj")}
    heads = {f"mtp.0.{name}": shape for name, shape in made.items() if name.startswith("hc_head_")}
    return {**made, **layer, **bias, **joined, **heads}


def kimi() -> None:
    """Its config class lies with its files; it is DeepSeek's."""
    import transformers

    named = type("KimiK2Config", (transformers.DeepseekV3Config,), {"model_type": "kimi_k2"})
    transformers.AutoConfig.register("kimi_k2", named)


def mimo_class() -> None:
    """Its config class lies with its files; it is Qwen2's."""
    import transformers

    named = type("MiMoConfig", (transformers.Qwen2Config,), {"model_type": "mimo"})
    transformers.AutoConfig.register("mimo", named, exist_ok=True)


def bailing() -> None:
    """The model's code lies with its files; the bridge has a copy of it."""
    import transformers
    from megatron.bridge.models.bailing.bailing_moe2_bridge import BailingMoeV2ForCausalLM

    transformers.BailingMoeV2ForCausalLM = BailingMoeV2ForCausalLM


def kimi_k3() -> None:
    """Its code lies with its files; the bridge's is younger than 0.6.2: `bridge_golden.py` says where it is found."""
    from importlib import import_module

    import transformers
    from remote_models import KimiK3Config, KimiK3ForConditionalGeneration

    transformers.AutoConfig.register("kimi_k3", KimiK3Config, exist_ok=True)
    transformers.KimiK3ForConditionalGeneration = KimiK3ForConditionalGeneration
    package = import_module("megatron.bridge.models.kimi")
    package.__path__.append(os.environ["KIMI_K3"])
    import_module(f"{package.__name__}.kimi_k3_bridge")


def glm4v() -> None:
    """The bridge reads what earlier transformers had in the config."""
    from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeTextConfig

    Glm4vMoeTextConfig.partial_rotary_factor = 0.5


def minimax() -> None:
    """One line of the bridge names a CUDA device."""
    from megatron.bridge.models.minimax_m2 import minimax_m2_bridge

    minimax_m2_bridge.torch = OnlyCpu()  # type: ignore[attr-defined]


class OnlyCpu:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: Any) -> torch.device:
        return torch.device("cpu")


MTP = {"num_nextn_predict_layers": 1}
QWEN_VISION = {"depth": 3, "hidden_size": 8, "intermediate_size": 6, "num_heads": 2, "in_channels": 3, "patch_size": 2,
               "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 12,
               "num_position_embeddings": 9}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5,
          "num_key_value_heads": 4}  # fmt: skip
GLM_EXPERTS = {"n_routed_experts": 4, "moe_intermediate_size": 8, "n_shared_experts": 2, "num_experts_per_tok": 2,
               "first_k_dense_replace": 1}  # fmt: skip
KIMI_K3 = {"num_experts_per_token": 2, "num_shared_experts": 2, "hidden_act": "situ", "routed_expert_hidden_size": 8,
           "latent_moe_use_norm": True, "first_k_dense_replace": 1, "moe_layer_freq": 1, "mla_use_nope": True,
           "mla_use_output_gate": True, "attn_res_block_size": 2, "rms_norm_eps": 1e-5, "use_grouped_topk": True,
           "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1,
           "linear_attn_config": {
               "kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 6, "head_dim": 4,
               "short_conv_kernel_size": 3, "use_full_rank_gate": True, "gate_lower_bound": -5.0}}  # fmt: skip
NO_OVERLAP = {"moe_token_dispatcher_type": "alltoall", "moe_flex_dispatcher_backend": None,
              "moe_shared_expert_overlap": False}  # fmt: skip


def without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2,
          "num_attention_heads": 2, "image_size": 8, "patch_size": 2,
          "vision_use_head": False}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]}}
NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
    "ssm_state_size": 3, "mamba_num_heads": 4, "mamba_head_dim": 5, "n_groups": 2, "conv_kernel": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 14, "moe_latent_size": 5,
    "mtp_layers_block_type": ["full_attention", "moe"],
}  # fmt: skip


def nemotron_mtp(shapes: Shapes, _: Again, blocks: int = 1) -> Shapes:
    """`mtp.layers`, blocks of two: one of attention, which joins, and one of experts, which ends."""
    h = shapes["backbone.norm_f.weight"][0]
    made = dict(shapes)
    for block in range(blocks):
        for inner, like in ((0, 2), (1, 3)):
            made |= {f"mtp.layers.{2 * block + inner}.{name.split('.', 3)[3]}": shape for name, shape in shapes.items()
                     if name.startswith(f"backbone.layers.{like}.")}  # fmt: skip
        made |= {f"mtp.layers.{2 * block}.{name}.weight": (h,) for name in ("enorm", "hnorm")}
        made[f"mtp.layers.{2 * block + 1}.final_layernorm.weight"] = (h,)
        made[f"mtp.layers.{2 * block}.eh_proj.weight"] = (h, 2 * h)
    return made


GEMMA4 = {**SIZES, "tie_word_embeddings": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2,
          "global_head_dim": 10, "sliding_window": 4, "num_hidden_layers": 4,
          "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
# The bridge reads the config's classes of transformers before 5.13 here, which say what the released config says
BEFORE = "megatron-bridge 0.6.2, megatron-core 0.19.2, transformers 5.12.1"

# core 0.19.2 has no `dsv4_hybrid`
AFTER = "megatron-bridge 0.6.2, megatron-core of Megatron-LM's dev d48bd6be (2026-08-21), transformers 5.23.0"
SWIFT = "mcore-bridge 1.6.5, megatron-core 0.19.2, transformers 5.23.0"
QWEN4: dict[str, Any] = {
    "text_config": {**without(SIZES, "intermediate_size"), **DELTA, **SPARSE, "num_hidden_layers": 4,
                    "shared_expert_intermediate_size": 14, "hc_count": 2, "hc_lowrank": 3, "ple_layer_ids": [1, 3],
                    "ple_embed_dim": 8, "heads_per_ngram": 2, "ngram_vocab_size_base": 7, "split_ngram_parts": 2,
                    "make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1,
                    "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2, "eos_token_id": 1},
    "vision_config": QWEN_VISION, "tie_word_embeddings": False,
}  # fmt: skip
# Its MTP has two projections, for which core 0.19.2 has no place
SWIFT_AFTER = "mcore-bridge 1.6.5, megatron-core of Megatron-LM's dev d48bd6be (2026-08-21), transformers 5.23.0"
SWIFT_BEFORE = "mcore-bridge 1.6.5, megatron-core 0.19.2, transformers 5.12.1"


CASES = [
    Case("llama", "llama", "LlamaForCausalLM", SIZES),
    Case("qwen2", "qwen2", "Qwen2ForCausalLM", {**without(SIZES, "head_dim"), "tie_word_embeddings": True}),
    Case("qwen3", "qwen3", "Qwen3ForCausalLM", SIZES),
    Case(
        "qwen3_mtp", "qwen3", "Qwen3ForCausalLM", SIZES, more=qwen_mtp("model.", 2), stated=MTP,
        provider={"mtp_num_layers": 1},
    ),
    Case("qwen3_moe", "qwen3_moe", "Qwen3MoeForCausalLM", {**SIZES, **SPARSE}),
    Case("gemma2", "gemma2", "Gemma2ForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    Case("gemma3", "gemma3_text", "Gemma3ForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    Case(
        "gpt_oss", "gpt_oss", "GptOssForCausalLM",
        {**SIZES, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    Case(
        "deepseek_v3", "deepseek_v3", "DeepseekV3ForCausalLM",
        {**without(SIZES, "head_dim"), **LATENT, **GLM_EXPERTS, "n_group": 1, "topk_group": 1}, more=ahead, stated=MTP,
        provider={**NO_OVERLAP, "mtp_num_layers": 1},
    ),
    Case(
        "glm4_moe", "glm4_moe", "Glm4MoeForCausalLM",
        {**SIZES, **GLM_EXPERTS, "n_shared_experts": 1, "use_qk_norm": True, "attention_bias": True},
        more=ahead, stated=MTP, provider=NO_OVERLAP,
    ),
    Case(
        "ernie4_5_moe", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
        {**SIZES, "moe_num_experts": 4, "moe_intermediate_size": 8, "moe_k": 2, "moe_num_shared_experts": 2,
         "moe_layer_start_index": 1},
    ),
    Case(
        "kimi_k2", "deepseek_v3", "DeepseekV3ForCausalLM",
        {**without(SIZES, "head_dim"), **LATENT, **GLM_EXPERTS, "n_group": 1, "topk_group": 1},
        stated={"model_type": "kimi_k2", "architectures": ["KimiK2ForCausalLM"], "scoring_func": "sigmoid",
                "num_nextn_predict_layers": 0},
        provider=NO_OVERLAP,
        before=kimi,
    ),
    Case(
        "deepseek_v32", "deepseek_v32", "DeepseekV32ForCausalLM",
        {**without(SIZES, "head_dim"), **LATENT, **GLM_EXPERTS, "n_group": 1, "topk_group": 1, "index_head_dim": 4,
         "index_n_heads": 3, "index_topk": 2},
        more=ahead, stated={**MTP, "indexer_rope_interleave": True}, provider={**NO_OVERLAP, "mtp_num_layers": 1},
        posing={"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"]},  # the bridge has it so alone
    ),
    Case(
        "deepseek_v4", "deepseek_v4", "DeepseekV4ForCausalLM",
        {**without(SIZES, "intermediate_size"), "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 6,
         "qk_rope_head_dim": 2, "q_lora_rank": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 8, "o_groups": 2, "o_lora_rank": 3, "index_n_heads": 2, "index_head_dim": 10,
         "hc_mult": 2, "num_hash_layers": 1, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
         "layer_types": ["sliding_attention", "heavily_compressed_attention", *2 * ["compressed_sparse_attention"]]},
        more=deepseek_v4, tp2=False, versions=AFTER,  # where its TP has to be one
        provider={**NO_OVERLAP, "apply_rope_fusion": False},
        posing={"rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}},
        stated={**MTP, "rope_theta": 10000.0, "compress_rope_theta": 160000.0},
    ),
    Case(
        "qwen3_next", "qwen3_next", "Qwen3NextForCausalLM",
        {**SIZES, **DELTA, **SPARSE, "num_hidden_layers": 4, "full_attention_interval": 4,
         "shared_expert_intermediate_size": 14},
        more=qwen_mtp("model.", 3), stated=MTP,
    ),
    Case(
        "qwen3_5", "qwen3_5", "Qwen3_5ForConditionalGeneration",
        {"text_config": {**SIZES, **DELTA, "num_hidden_layers": 4}, "vision_config": QWEN_VISION,
         "tie_word_embeddings": False},
        more=qwen_mtp("model.language_model.", 3), stated={"text_config": {"mtp_num_hidden_layers": 1}},
    ),
    Case(
        "qwen3_5_text", "qwen3_5_text", "Qwen3_5ForCausalLM",
        {**SIZES, **DELTA, "num_hidden_layers": 4, "tie_word_embeddings": True},
        more=qwen_mtp("model.", 3), stated={"mtp_num_hidden_layers": 1},
    ),
    Case(
        "qwen3_5_moe", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration",
        {"text_config": {**without(SIZES, "intermediate_size"), **DELTA, **SPARSE, "num_hidden_layers": 4,
                         "shared_expert_intermediate_size": 14},
         "vision_config": QWEN_VISION, "tie_word_embeddings": False},
        more=qwen_mtp("model.language_model.", 3), stated={"text_config": {"mtp_num_hidden_layers": 1}},
    ),
    Case(
        "qwen3_5_moe_released", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration",
        {"text_config": {**without(SIZES, "intermediate_size"), **DELTA, **SPARSE, "num_hidden_layers": 4,
                         "shared_expert_intermediate_size": 14},
         "vision_config": QWEN_VISION, "tie_word_embeddings": False},
        more=packed_experts, stated={"text_config": {"mtp_num_hidden_layers": 1}},
    ),
    Case(
        "minimax_m2", "minimax_m2", "MiniMaxM2ForCausalLM",
        {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}, before=minimax,
    ),
    Case(
        "glm4_moe_lite", "glm4_moe_lite", "Glm4MoeLiteForCausalLM",
        {**without(SIZES, "head_dim"), **LATENT, **GLM_EXPERTS}, more=ahead, stated=MTP, provider=NO_OVERLAP,
    ),
    Case(
        "glm_moe_dsa", "glm_moe_dsa", "GlmMoeDsaForCausalLM",
        {**without(SIZES, "head_dim"), **LATENT, **GLM_EXPERTS, "index_head_dim": 4, "index_n_heads": 3,
         "index_topk": 2},
        more=ahead, stated={**MTP, "indexer_rope_interleave": True}, provider={**NO_OVERLAP, "mtp_num_layers": 1},
    ),
    Case(
        "olmoe", "olmoe", "OlmoeForCausalLM",
        {**without(SIZES, "head_dim"), "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    ),
    Case(
        "exaone4", "exaone4", "Exaone4ForCausalLM",  # the bridge has no output layer: tied models alone
        {**SIZES, "sliding_window": 4, "sliding_window_pattern": 3, "tie_word_embeddings": True},
    ),
    Case(
        "exaone_moe", "exaone_moe", "ExaoneMoeForCausalLM",
        {**SIZES, **SPARSE, "num_shared_experts": 2, "first_k_dense_replace": 1, "sliding_window": 4},
        more=qwen_mtp("model.", 0), stated=MTP,
    ),
    Case("nemotron", "nemotron", "NemotronForCausalLM", SIZES),
    Case(
        "hy_v3", "hy_v3", "HYV3ForCausalLM",
        {**SIZES, **SPARSE, "num_shared_experts": 1, "first_k_dense_replace": 1},
        more=hunyuan, stated=MTP,
    ),
    Case(
        "bailing_moe_v2", "bailing_moe_v2", "BailingMoeV2ForCausalLM",
        {**SIZES, **SPARSE, "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
         "pad_token_id": 0, "num_nextn_predict_layers": 1},
        before=bailing,
    ),
    Case(
        "kimi_k3", "kimi_k3", "KimiK3ForConditionalGeneration",
        {"text_config": {**SIZES, **LATENT, **SPARSE, **KIMI_K3}, "vision_config": {
            "vt_hidden_size": 8, "vt_intermediate_size": 10, "vt_num_hidden_layers": 2, "qkv_hidden_size": 12,
            "patch_size": 2, "init_pos_emb_height": 4, "init_pos_emb_width": 4, "text_hidden_size": 12}},
        before=kimi_k3, versions="megatron-bridge 0.6.2 with the modules of Kimi K3 of 067f987 (2026-08-22), "
                                 "megatron-core 0.19.2, transformers 5.23.0",
    ),
    Case(
        "mimo", "qwen2", "Qwen2ForCausalLM", without(SIZES, "head_dim"), more=mimo_7b, before=mimo_class,
        stated={"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 2},
    ),
    Case(
        "mimo_v2_flash", "mimo_v2_flash", "MiMoV2FlashForCausalLM",
        {**SIZES, "head_dim": 6, "v_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 8, "sliding_window": 4,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        more=mimo, stated={  # as the released config says it
            "swa_rope_theta": 10000.0, "rope_theta": 5000000.0, "hybrid_layer_pattern": [0, 1, 0],
            "moe_layer_freq": [0, 1, 1], "sliding_window_size": 3, "layernorm_epsilon": 1e-05,
            "scoring_func": "sigmoid",
            "swa_num_key_value_heads": 4, "swa_head_dim": 6, "swa_v_head_dim": 4, "swa_num_attention_heads": 4},
    ),
    Case(
        "qwen3_vl", "qwen3_vl", "Qwen3VLForConditionalGeneration",
        {"text_config": SIZES, "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0, 1]},
         "tie_word_embeddings": False},
    ),
    Case(
        "qwen3_vl_moe", "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration",
        {"text_config": {**SIZES, **SPARSE}, "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0, 1]},
         "tie_word_embeddings": False},
    ),
    Case(
        "qwen3_vl_moe_released", "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration",
        {"text_config": {**SIZES, **SPARSE, "tie_word_embeddings": False},
         "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0, 1]}, "tie_word_embeddings": False},
        more=turned_experts,
    ),
    Case(
        "qwen2_5_vl", "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration",
        {"text_config": {**without(SIZES, "head_dim"), "hidden_size": 24, **MROPE},
         "vision_config": {**without(QWEN_VISION, "num_position_embeddings"), "out_hidden_size": 24, "window_size": 8,
                           "fullatt_block_indexes": [1]},
         "tie_word_embeddings": False},
    ),
    Case(
        "glm4v_moe", "glm4v_moe", "Glm4vMoeForConditionalGeneration",
        {"text_config": {**SIZES, **GLM_EXPERTS, "n_shared_experts": 1, "use_qk_norm": False, "attention_bias": True,
                         **MROPE},
         "vision_config": {**without(QWEN_VISION, "num_position_embeddings"), "image_size": 8},
         "tie_word_embeddings": False},
        before=glm4v,
    ),
    Case(
        "mistral3", "mistral3", "Mistral3ForConditionalGeneration",
        {"text_config": {"model_type": "ministral3", **SIZES},
         "vision_config": {"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2,
                           "num_attention_heads": 2, "num_channels": 3, "image_size": 8, "patch_size": 2},
         "tie_word_embeddings": False},
    ),
    Case(
        "nemotron_h", "nemotron_h", "NemotronHForCausalLM",
        {**without(SIZES, "num_hidden_layers"), **NEMOTRON_H}, more=nemotron_mtp, stated=MTP,
    ),
    Case(
        "nemotron_h_mtp2", "nemotron_h", "NemotronHForCausalLM",
        {**without(SIZES, "num_hidden_layers"), **NEMOTRON_H},
        more=lambda shapes, again: nemotron_mtp(shapes, again, 2),
        stated={"num_nextn_predict_layers": 2, "mtp_use_repeated_layer": False},
    ),
    Case(
        "falcon_h1", "falcon_h1", "FalconH1ForCausalLM",
        {**SIZES, "mamba_d_ssm": 24, "mamba_n_heads": 4, "mamba_d_head": 6, "mamba_n_groups": 2, "mamba_d_state": 3,
         "mamba_d_conv": 4, "mamba_norm_before_gate": False},
    ),
    Case(
        "falcon_h1_norm", "falcon_h1", "FalconH1ForCausalLM",
        {**SIZES, "mamba_d_ssm": 24, "mamba_n_heads": 4, "mamba_d_head": 6, "mamba_n_groups": 2, "mamba_d_state": 3,
         "mamba_d_conv": 4, "mamba_norm_before_gate": False, "mamba_rms_norm": True, "tie_word_embeddings": True},
    ),
    Case(
        "gemma4", "gemma4_text", "Gemma4ForCausalLM",
        {**GEMMA4, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 26, "num_kv_shared_layers": 2,
         "num_global_key_value_heads": 4},
        versions=BEFORE,
    ),
    Case(
        "gemma4_k_eq_v", "gemma4_text", "Gemma4ForCausalLM",
        {**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}, versions=BEFORE,
    ),
    Case(
        "gemma4_moe", "gemma4_text", "Gemma4ForCausalLM",
        {**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "enable_moe_block": True,
         "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
        versions=BEFORE,
    ),
    Case(
        "deepseek_v2", "deepseek_v2", "DeepseekV2ForCausalLM",
        {**without(SIZES, "head_dim"), **LATENT, **GLM_EXPERTS}, provider=NO_OVERLAP,
    ),
    Case("gemma", "gemma", "GemmaForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    Case("mistral", "mistral", "MistralForCausalLM", SIZES),
    Case(
        "gemma3_vl", "gemma3", "Gemma3ForConditionalGeneration",
        {"text_config": {**SIZES, "sliding_window": 4, "tie_word_embeddings": True}, "vision_config": SIGLIP,
         "mm_tokens_per_image": 4, "tie_word_embeddings": True},
    ),
    Case(
        "ernie4_5_vl_moe", "ernie4_5_vl_moe", "Ernie4_5_VLMoeForConditionalGeneration",
        {"text_config": {**SIZES, **MROPE, "tie_word_embeddings": True, "moe_num_experts": 4, "moe_k": 2,
                         "moe_intermediate_size": [8, 6], "moe_num_shared_experts": 2,
                         "mlp_layer_types": ["dense", "sparse", "sparse"]},
         "vision_config": {"depth": 2, "hidden_size": 8, "num_heads": 2, "patch_size": 2, "intermediate_size": 6},
         "tie_word_embeddings": True},
    ),
    Case("swift_glm4", "glm4", "Glm4ForCausalLM", {**SIZES, "pad_token_id": 0}, swift=True, versions=SWIFT),
    Case(
        "ernie4_5", "ernie4_5", "Ernie4_5ForCausalLM", {**SIZES, "tie_word_embeddings": True}, swift=True,
        versions=SWIFT,
    ),
    Case(
        "qwen2_moe", "qwen2_moe", "Qwen2MoeForCausalLM",
        {**without(SIZES, "head_dim"), **SPARSE, "shared_expert_intermediate_size": 14}, swift=True, versions=SWIFT,
    ),
    Case(
        "dots1", "dots1", "Dots1ForCausalLM", {**SIZES, **GLM_EXPERTS}, swift=True, versions=SWIFT,
    ),
    Case(
        "qwen2_vl", "qwen2_vl", "Qwen2VLForConditionalGeneration",
        {"text_config": {**without(SIZES, "head_dim"), "hidden_size": 24, **MROPE},
         "vision_config": {"depth": 3, "embed_dim": 8, "hidden_size": 24, "mlp_ratio": 2, "num_heads": 2,
                           "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2},
         "tie_word_embeddings": False},
        swift=True, versions=SWIFT,
    ),
    Case(
        "glm4v", "glm4v", "Glm4vForConditionalGeneration",
        {"text_config": {**without(SIZES, "head_dim"), "hidden_size": 24, **MROPE},
         "vision_config": {**without(QWEN_VISION, "num_position_embeddings"), "out_hidden_size": 24, "image_size": 8},
         "tie_word_embeddings": False},
        swift=True, versions=SWIFT,
    ),
    Case(
        "internvl", "internvl", "InternVLForConditionalGeneration",
        {"text_config": {"model_type": "qwen2", **without(SIZES, "head_dim"), "hidden_size": 24},
         "vision_config": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 6,
                           "image_size": [8, 8], "patch_size": [2, 2]},
         "tie_word_embeddings": False},
        swift=True, versions=SWIFT,
    ),
    Case(
        "llama4", "llama4", "Llama4ForConditionalGeneration",
        {"text_config": {**SIZES, "num_hidden_layers": 4, "intermediate_size_mlp": 14, "num_local_experts": 4,
                         "intermediate_size": 8, "interleave_moe_layer_step": 2},
         "vision_config": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
                           "vision_output_dim": 10, "image_size": 8, "patch_size": 2, "projector_input_dim": 10,
                           "projector_output_dim": 10},
         "tie_word_embeddings": False},
        swift=True, versions=SWIFT,
    ),
    Case(
        "swift_gemma4_ple", "gemma4", "Gemma4ForConditionalGeneration",
        {"text_config": {**GEMMA4, "num_global_key_value_heads": 4, "hidden_size_per_layer_input": 4,
                         "vocab_size_per_layer_input": 26, "num_kv_shared_layers": 2},
         "vision_config": {"hidden_size": 12, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
                           "num_key_value_heads": 2, "head_dim": 6, "patch_size": 2, "position_embedding_size": 9},
         "tie_word_embeddings": True},
        posing={"hidden_size": 12}, swift=True, versions=SWIFT_BEFORE,
    ),
    Case(
        "gemma4_vl", "gemma4", "Gemma4ForConditionalGeneration",
        {"text_config": {**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
         "vision_config": {"hidden_size": 12, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
                           "num_key_value_heads": 2, "head_dim": 6, "patch_size": 2, "position_embedding_size": 9},
         "tie_word_embeddings": True},
        versions=BEFORE,
    ),
    Case(
        "gemma4_vl_moe", "gemma4", "Gemma4ForConditionalGeneration",
        {"text_config": {**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
                         "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
         "vision_config": {"hidden_size": 12, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
                           "num_key_value_heads": 2, "head_dim": 6, "patch_size": 2, "position_embedding_size": 9},
         "tie_word_embeddings": True},
        versions=BEFORE,
    ),
    Case("qwen4_exp", "qwen4_exp", "Qwen4ExpForConditionalGeneration", QWEN4, more=packed, swift=True, versions=SWIFT),
    Case(
        # n-grams in layer 1 would be in the layer of MTP too
        "qwen4_exp_mtp", "qwen4_exp", "Qwen4ExpForConditionalGeneration",
        {**QWEN4, "text_config": {**QWEN4["text_config"], "ple_layer_ids": [2, 3]}}, more=qwen4, swift=True,
        versions=SWIFT_AFTER, provider={"mtp_num_layers": 1},
    ),
    Case(
        "gemma4_unified", "gemma4_unified", "Gemma4UnifiedForConditionalGeneration",
        {"text_config": {**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
         "vision_config": {"patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 12, "mm_posemb_size": 8,
                           "output_proj_dims": 12},
         "audio_config": {"audio_embed_dim": 10}, "tie_word_embeddings": True},
        posing={"hidden_size": 12, "text_config": {"enable_moe_block": False}},  # ms-swift says it of the whole
        swift=True, versions=SWIFT_BEFORE,
    ),
    Case(
        "qwen3_omni_moe", "qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration",
        {"thinker_config": {
            "text_config": {**SIZES, **SPARSE, **MROPE},
            "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0, 1]},
            "audio_config": {"d_model": 12, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 10,
                             "num_mel_bins": 8, "downsample_hidden_size": 8, "output_dim": 12,
                             "max_source_positions": 20}},
         "enable_audio_output": False},
    ),
    Case(
        "qwen2_5_omni", "qwen2_5_omni", "Qwen2_5OmniForConditionalGeneration",
        {"thinker_config": {
            "text_config": {**without(SIZES, "head_dim"), "hidden_size": 24, **MROPE},
            "vision_config": {**without(QWEN_VISION, "num_position_embeddings"), "out_hidden_size": 24,
                              "window_size": 8, "fullatt_block_indexes": [1]},
            "audio_config": {"d_model": 12, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 10,
                             "num_mel_bins": 8, "output_dim": 24, "max_source_positions": 20}},
         "enable_audio_output": False},
    ),
]  # fmt: skip
# Where mcore-bridge lays the same models otherwise: the dialect `megatron-swift`
OTHERWISE = (
    "qwen2_5_vl glm4v_moe qwen3_next qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe_released olmoe qwen3_omni_moe "
    "qwen2_5_omni gemma4_vl gemma4_vl_moe"
).split()

CASES += [
    replace(
        case,
        name=f"swift_{case.name}",
        swift=True,
        versions=SWIFT_BEFORE if case.versions == BEFORE else SWIFT,
        posing={"hidden_size": 12} if case.model_type == "gemma4" else {},  # ms-swift says it of the whole
        provider={"mtp_num_layers": 1} if "mtp" in str(case.more) else {},
    )
    for case in CASES
    if case.name in OTHERWISE
]
