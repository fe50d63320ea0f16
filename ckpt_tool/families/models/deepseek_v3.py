"""DeepSeek V2 and V3 with MTP layers; Kimi K2, whose code, published with its files, is DeepSeek's.

Paddle: PaddleFormers 1.2.0, transformers/deepseek_v3: nothing is fused. Megatron-Bridge 0.6.2, models/deepseek and kimi.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import FUSED_EXPERTS, LATENT, NLP_HEAD, Family, Variant
from ckpt_tool.families.model_class import DEFAULTS, GATED, LATENT_FORMS, SIGMOID, ModelClass
from ckpt_tool.systems.hub import mlx_names as mlx
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.llamacpp import names as gguf
from ckpt_tool.systems.megatron import names as megatron

_RANKS = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_V3 = {**GATED, **SIGMOID, "qk_layernorm": True, "moe_router_pre_softmax": True}
_DEFAULTS = {**DEFAULTS, "max_position_embeddings": 4096, "first_k_dense_replace": 3, "n_group": 8,
             "topk_group": 4, "num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
             "moe_intermediate_size": 2048, "routed_scaling_factor": 2.5, **_RANKS, "norm_topk_prob": True}  # fmt: skip

FAMILY = Family(
    name="deepseek_v3",
    classes=(
        ModelClass(
            "deepseek_v3", "DeepseekV3ForCausalLM", LATENT_FORMS, keys={"num_experts": "n_routed_experts"}, megatron=_V3,
            paddle={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
            unsayable={"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True},
            defaults=_DEFAULTS,
        ),
        ModelClass(
            "kimi_k2", "DeepseekV3ForCausalLM", LATENT_FORMS, keys={"num_experts": "n_routed_experts"}, megatron=_V3,
            unsayable={"attention_bias": False, "norm_topk_prob": True},
            defaults=_DEFAULTS, also=("KimiK2ForCausalLM",), like="DeepseekV3ForCausalLM",
        ),
        ModelClass(
            "deepseek_v2", "DeepseekV2ForCausalLM",
            ("sizes", "latent", "rope", "tied", "silu", "dropout", "experts", "first_dense", "limited",
             "shared_experts"),
            keys={"num_experts": "n_routed_experts"},
            megatron={**GATED, "qk_layernorm": True, "moe_router_pre_softmax": True},
            unsayable={"attention_bias": False, "mlp_bias": False, "norm_topk_prob": False},
            defaults={**DEFAULTS, "max_position_embeddings": 2048, "first_k_dense_replace": 0, "num_experts": 64,
                      "n_shared_experts": 2, "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0,
                      "topk_method": "greedy", "norm_topk_prob": False, **_RANKS},
        ),
    ),
    axes={**LATENT, **gguf.LATENT_AXES, **maxtext.DEEPSEEK_AXES, **mlx.LATENT_AXES},
    hub=hub.DEEPSEEK + hub.INV_FREQ + """
        model.layers.{i}.eh_proj.bias : h
    """,
    dialects={
        "megatron": Variant(of=megatron.LATENT, ahead=True),
        "gguf": Variant(of=gguf.DEEPSEEK, short=True),
        "hf-fused": Variant("hf", over=FUSED_EXPERTS),
        "mlx": Variant("hf", over=mlx.LATENT + mlx.EXPERTS, short=True),
        "paddle": """
            [model.embed_tokens|lm_head].weight : v h
            model.norm.weight : h
            model.layers.{i}.<input|post_attention>_layernorm.weight : h
            model.layers.{i}.self_attn.q_proj.weight : h a = : a h
            model.layers.{i}.self_attn.<q_a_proj|q_b_proj|q_a_layernorm>.weight : h q, q a, q = : q h, a q, q
            model.layers.{i}.self_attn.<kv_a_proj_with_mqa|kv_b_proj|kv_a_layernorm|o_proj>.weight : h b, l c, l, u h = : b h, c l, l, h u
            model.layers.{i}.self_attn.q_a_proj.bias : q
            model.layers.{i}.self_attn.<kv_a_proj_with_mqa|o_proj>.bias : b, h
            model.layers.{i}.self_attn.rotary_emb.inv_freq : n = _ : n
            model.layers.{i}.mlp.<gate|up|down>_proj.weight : h f, h f, f h = : f h, f h, h f
            model.layers.{i}.mlp.gate.weight : h e = : e h
            model.layers.{i}.mlp.gate.e_score_correction_bias : e
            model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : h m, h m, m h = : m h, m h, h m
            model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.weight : h s, h s, s h = : s h, s h, h s
            model.layers.{i}.<enorm|hnorm|shared_head.norm>.weight : h
            model.layers.{i}.<embed_tokens|shared_head.head>.weight : v h
            model.layers.{i}.eh_proj.<weight|bias> : w h, h = : h w, h
        """,
        "paddle-nlp": Variant("paddle", root="deepseek_v3.", over=NLP_HEAD),
        **maxtext.deepseek(),
    },
    tiny={"n_routed_experts": 4, "moe_intermediate_size": 5, "n_shared_experts": 2, "first_k_dense_replace": 1,
          "q_lora_rank": 7, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
          "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
)  # fmt: skip
