"""Qwen1.5-MoE and Qwen2-MoE. Paddle: PaddleFormers 1.2.0, transformers/qwen2_moe; PaddleNLP fuses nothing."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, FUSED_EXPERTS, NLP_HEAD, PADDLE_FUSED, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, EXPERT_DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.hub import mlx_names as mlx
from ckpt_tool.systems.llamacpp import names as gguf
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="qwen2_moe",
    classes=(
        ModelClass(
            "qwen2_moe", "Qwen2MoeForCausalLM",
            (*DECODER_FORMS, "qkv_bias", "experts", "sparse_layers", "softmax", "shared_expert"),
            megatron={**GATED, "moe_shared_expert_gate": True},
            unsayable={"use_sliding_window": False},
            defaults={**DEFAULTS, **EXPERT_DEFAULTS, "max_position_embeddings": 32768, "qkv_bias": True,
                      "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                      "shared_expert_intermediate_size": 5632},
        ),
    ),
    axes={
        **DECODER, "e": "num_experts? or n_routed_experts",
        "m": "moe_intermediate_size", "s": "shared_expert_intermediate_size",
    },
    hub=hub.SPARSE + hub.QKV_BIAS + hub.SHARED_EXPERT,
    dialects={
        "megatron": megatron.SPARSE + megatron.QKV_BIAS + megatron.SHARED_EXPERT,
        "gguf": gguf.SPARSE + gguf.QKV_BIAS + gguf.SHARED_EXPERT,
        "hf-fused": Variant("hf", over=FUSED_EXPERTS),
        "mlx": Variant("hf", over=mlx.EXPERTS),
        "paddle": Variant(apart=True, of=PADDLE_FUSED + """
            model.layers.{i}.<input|post_attention>_layernorm.weight : h
            model.layers.{i}.mlp.gate.weight : h e = : e h
            model.layers.{i}.mlp.experts.{e}.up_gate_proj.weight : h ((1 + 1) m) = ..<gate|up>_proj.weight : m h
            model.layers.{i}.mlp.experts.{e}.down_proj.weight : m h = : h m
            model.layers.{i}.mlp.shared_expert.up_gate_proj.weight : h ((1 + 1) s) = ..<gate|up>_proj.weight : s h
            model.layers.{i}.mlp.shared_expert.down_proj.weight : s h = : h s
            model.layers.{i}.mlp.shared_expert_gate.weight : h 1 = : 1 h
        """),
        "paddle-hf": Variant("paddle", like_hub=True),
        "paddle-nlp": Variant("paddle", root="qwen2_moe.", over=NLP_HEAD),
    },
    tiny={"num_experts": 3, "moe_intermediate_size": 5, "shared_expert_intermediate_size": 9, "mlp_only_layers": [0],
          "qkv_bias": True},
)  # fmt: skip
