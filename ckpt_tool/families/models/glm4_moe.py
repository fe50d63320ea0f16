"""GLM-4.5 and 4.6 with MTP layers. Paddle: PaddleFormers 1.2.0, transformers/glm4_moe (without paddlefleet)."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, FUSED_EXPERTS, PADDLE_FUSED, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, SIGMOID, ModelClass
from ckpt_tool.systems.hub import mlx_names as mlx
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="glm4_moe",
    classes=(
        ModelClass(
            "glm4_moe", "Glm4MoeForCausalLM",
            (*DECODER_FORMS, "qkv_bias", "qk_norm", "experts", "first_dense", "groups", "shared_experts", "ahead"),
            keys={"num_experts": "n_routed_experts", "qkv_bias": "attention_bias"},
            megatron={**GATED, **SIGMOID, "moe_router_pre_softmax": False},
            unsayable={"norm_topk_prob": True},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "max_position_embeddings": 131072,
                      "partial_rotary_factor": 0.5, "qkv_bias": False, "use_qk_norm": False, "n_group": 1,
                      "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "num_experts": 128,
                      "num_key_value_heads": 8, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
                      "routed_scaling_factor": 1.0},
        ),
    ),
    axes={
        **DECODER, "i": "num_hidden_layers + (num_nextn_predict_layers? or 1)", "w": "2 * h",
        "e": "n_routed_experts", "m": "moe_intermediate_size", "s": "m * n_shared_experts",
    },
    hub=hub.SPARSE + hub.QKV_BIAS + hub.QK_NORMS + hub.EXPERT_BIAS + hub.SHARED_EXPERTS + hub.AHEAD,
    dialects={
        "megatron": Variant(of=megatron.GLM, ahead=True),
        "hf-fused": Variant("hf", over=FUSED_EXPERTS),
        "mlx": Variant("hf", over=mlx.EXPERTS),
        "paddle": Variant(
            apart=True, inner=("transformer_layer", "i >= num_hidden_layers", "self_attn", "mlp",
                   "input_layernorm", "post_attention_layernorm"),
            of=PADDLE_FUSED + """
            model.layers.{i}.<input|post_attention>_layernorm.weight : h
            model.layers.{i}.self_attn.<q|k>_norm.weight : d
            model.layers.{i}.mlp.gate.weight : e h
            model.layers.{i}.mlp.gate.e_score_correction_bias : e
            model.layers.{i}.mlp.experts.{e}.up_gate_proj.weight : h ((1 + 1) m) = ..<gate|up>_proj.weight : m h
            model.layers.{i}.mlp.experts.{e}.down_proj.weight : m h = : h m
            model.layers.{i}.mlp.shared_experts.up_gate_proj.weight : h ((1 + 1) s) = ..<gate|up>_proj.weight : s h
            model.layers.{i}.mlp.shared_experts.down_proj.weight : s h = : h s
            model.layers.{i}.<enorm|hnorm|norm>.weight : h = model.layers.{i}.<enorm|hnorm|shared_head.norm>.weight : h
            model.layers.{i}.<embed_tokens|shared_head.head>.weight : v h
            model.layers.{i}.eh_proj.weight : w h = : h w
        """),
        "paddle-hf": Variant("paddle", like_hub=True),
    },
    tiny={"n_routed_experts": 4, "moe_intermediate_size": 5, "n_shared_experts": 2, "first_k_dense_replace": 1,
          "use_qk_norm": True, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "attention_bias": True,
          "qkv_bias": True},
)  # fmt: skip
