"""Qwen3-MoE. Paddle: PaddleFormers 1.2.0, transformers/qwen3_moe (without paddlefleet and sonic_moe)."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, FUSED_EXPERTS, PADDLE_FUSED, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, EXPERT_DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.hub import mlx_names as mlx
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.llamacpp import names as gguf
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="qwen3_moe",
    classes=(
        ModelClass(
            "qwen3_moe", "Qwen3MoeForCausalLM", (*DECODER_FORMS, "experts", "sparse_layers", "softmax"),
            megatron={**GATED, "qk_layernorm": True},
            unsayable={"attention_bias": False, "use_sliding_window": False},
            defaults={**DEFAULTS, **EXPERT_DEFAULTS, "max_position_embeddings": 32768, "num_experts": 128,
                      "num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        ),
    ),
    axes={
        **DECODER, "m": "moe_intermediate_size",
        "e": "num_experts? or n_routed_experts? or num_local_experts",
    },
    hub=hub.SPARSE + hub.QKV_BIAS + hub.PROJ_BIAS + hub.QK_NORMS,
    dialects={
        "megatron": megatron.SPARSE + megatron.QKV_BIAS + megatron.PROJ_BIAS + megatron.QK_NORMS,
        "gguf": gguf.SPARSE + gguf.QKV_BIAS + gguf.PROJ_BIAS + gguf.QK_NORMS,
        "hf-fused": Variant("hf", over=FUSED_EXPERTS),
        "mlx": Variant("hf", over=mlx.EXPERTS),
        "paddle": Variant(apart=True, of=PADDLE_FUSED + """
            model.layers.{i}.<input|post_attention>_layernorm.weight : h
            model.layers.{i}.self_attn.<q|k>_norm.weight : d
            model.layers.{i}.self_attn.o_proj.bias : h
            model.layers.{i}.mlp.gate.weight : h e = : e h
            model.layers.{i}.mlp.experts.{e}.up_gate_proj.weight : h ((1 + 1) m) = ..<gate|up>_proj.weight : m h
            model.layers.{i}.mlp.experts.{e}.down_proj.weight : m h = : h m
        """),
        "paddle-hf": Variant("paddle", like_hub=True),
        **maxtext.both(maxtext.MODEL, maxtext.NORMS + maxtext.ATTENTION + maxtext.SOME_QKV_BIAS + maxtext.QK_NORMS + maxtext.EXPERTS),
    },
    tiny={"num_experts": 3, "moe_intermediate_size": 5, "mlp_only_layers": [0]},
)  # fmt: skip
