"""DeepSeek V3.2 and GLM-5: DeepSeek V3 with an indexer that chooses the keys which a query sees (DSA).

A layer may use another's choice and have no indexer (GLM-5.2). transformers 5.23, models/deepseek_v32 and glm_moe_dsa,
which leave MTP's layer unread; Megatron-Bridge 0.6.2, models/glm_moe_dsa/glm5_bridge.py, for both.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import FUSED_EXPERTS, LATENT, Family, Variant
from ckpt_tool.families.model_class import DEFAULTS, GATED, LATENT_FORMS, SIGMOID, ModelClass
from ckpt_tool.systems.hub import mlx_names as mlx
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.megatron import names as megatron

_DSA = {
    **GATED,
    **SIGMOID,
    "qk_layernorm": True,
    "moe_router_pre_softmax": True,
    "experimental_attention_variant": "dsa",
}

FAMILY = Family(
    name="deepseek_v32",
    classes=(
        ModelClass(
            "deepseek_v32", "DeepseekV32ForCausalLM", (*LATENT_FORMS, "indexer"), keys={"num_experts": "n_routed_experts"},
            megatron=_DSA, unsayable={"attention_bias": False, "norm_topk_prob": True},
            defaults={**DEFAULTS, "max_position_embeddings": 163840, "first_k_dense_replace": 3, "n_group": 8,
                      "topk_group": 4, "num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
                      "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
                      "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                      "v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
        ),
        ModelClass(  # whose indexer turns pairs, where DeepSeek's turns halves
            "glm_moe_dsa", "GlmMoeDsaForCausalLM", (*LATENT_FORMS, "indexer"), keys={"num_experts": "n_routed_experts"},
            megatron={**_DSA, "dsa_indexer_rope_interleaved": True},
            unsayable={"attention_bias": False, "norm_topk_prob": True},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "max_position_embeddings": 202752, "first_k_dense_replace": 3,
                      "n_group": 1, "topk_group": 1, "num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
                      "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
                      "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
                      "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048},
        ),
    ),
    axes={**LATENT, "x": "index_n_heads", "y": "index_head_dim", **maxtext.DEEPSEEK_AXES, **mlx.LATENT_AXES},
    hub=hub.DEEPSEEK + """
        model.layers.{i}.self_attn.indexer.<wq_b|wk|weights_proj>.weight : (x y) q, y h, x h
        model.layers.{i}.self_attn.indexer.k_norm.<weight|bias> : y
    """,
    dialects={
        "megatron": Variant(ahead=True, of=megatron.LATENT + """
            decoder.layers.{i}.self_attention.core_attention.indexer.<linear_wq_b|linear_wk|linear_weights_proj>.weight : (x y) q, y h, x h
                = model.layers.{i}.self_attn.indexer.<wq_b|wk|weights_proj>.weight : (x y) q, y h, x h
            decoder.layers.{i}.self_attention.core_attention.indexer.k_norm.<weight|bias> : y
                = model.layers.{i}.self_attn.indexer.k_norm.<weight|bias> : y
        """),
        "hf-fused": Variant("hf", over=FUSED_EXPERTS),
        "mlx": Variant("hf", over=mlx.LATENT + mlx.EXPERTS, short=True),
        **maxtext.deepseek(maxtext.INDEXER),
    },
    tiny={"n_routed_experts": 4, "moe_intermediate_size": 5, "n_shared_experts": 2, "first_k_dense_replace": 1,
          "q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
          "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "index_n_heads": 3, "index_head_dim": 8,
          "index_topk": 4},
)  # fmt: skip
