"""ERNIE 4.5, experts. Paddle: PaddleFormers 1.2.0, transformers/ernie4_5_moe; root `ernie.`: see ernie4_5."""

from ckpt_tool.families.base import CONTIGUOUS, DECODER, FUSED_EXPERTS, NLP_HEAD, OWN_KEYS, SHARED_KEYS, Family, Variant
from ckpt_tool.families.model_class import DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="ernie4_5_moe",
    classes=(
        ModelClass(
            "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
            ("sizes", "heads", "rope", "tied", "silu", "use_bias", "experts", "interval", "shared_experts", "ahead"),
            keys={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k",
                  "n_shared_experts": "moe_num_shared_experts"},
            megatron={**GATED, "rotary_interleaved": True, "moe_router_enable_expert_bias": True},
            paddle_defaults={"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "max_position_embeddings": 131072,
                      "num_key_value_heads": 4, "tie_word_embeddings": True, "use_bias": False, "num_experts": 64,
                      "num_experts_per_tok": 6, "n_shared_experts": 2, "moe_intermediate_size": 1536,
                      "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
                      "router_aux_loss_coef": 0.001},
            also=("Ernie4_5_MoEForCausalLM",),
        ),
    ),
    axes={
        **DECODER, "n": "num_nextn_predict_layers? or 1", "w": "2 * h", "e": "moe_num_experts",
        "m": "moe_intermediate_size", "s": "m * moe_num_shared_experts",
    },
    hub="""
        [model.embed_tokens|lm_head].weight : v h
        lm_head.weight ~ model.embed_tokens.weight if tie_word_embeddings?
        model.[norm|mtp_emb_norm.{n}|mtp_hidden_norm.{n}].weight : h
        model.mtp_linear_proj.{n}.<weight|bias> : h w, h
        model.[layers.{i}|mtp_block.{n}].<input|post_attention>_layernorm.weight : h
        model.[layers.{i}|mtp_block.{n}].self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
        model.[layers.{i}|mtp_block.{n}].self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
        model.[layers.{i}|mtp_block.{n}].self_attn.o_proj.weight : h (g r d)
        model.[layers.{i}|mtp_block.{n}].mlp.<gate|up|down>_proj.weight : f h, f h, h f
        model.[layers.{i}|mtp_block.{n}].<self_attn.o_proj|mlp.down_proj|mlp.gate_proj|mlp.up_proj>.bias : h, h, f, f
        model.layers.{i}.mlp.<gate.weight|moe_statics.e_score_correction_bias> : e h, 1 e
        model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : m h, m h, h m
        model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
        model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.bias : s, s, h
    """,
    dialects={
        "megatron": megatron.SPARSE + megatron.BIASES + megatron.SHARED_EXPERTS + megatron.SHARED_EXPERTS_BIASES + """
            decoder.layers.{i}.mlp.router.expert_bias : e = model.layers.{i}.mlp.moe_statics.e_score_correction_bias : 1 e
        """,
        "hf-fused": Variant("hf", over=FUSED_EXPERTS + """
            model.layers.{i}.mlp.gate.moe_statics.e_score_correction_bias : 1 e
                = model.layers.{i}.mlp.moe_statics.e_score_correction_bias : 1 e
        """),
        "paddle": Variant(apart=True, of="""
            [model.embed_tokens|lm_head].weight : v h
            model.[norm|mtp_emb_norm.{n}|mtp_hidden_norm.{n}].weight : h
            model.mtp_linear_proj.{n}.<weight|bias> : w h, h = : h w, h
            model.[layers.{i}|mtp_block.{n}].<input|post_attention>_layernorm.weight : h
            model.[layers.{i}|mtp_block.{n}].self_attn.qkv_proj.weight : h (g (r + 1 + 1) d)
                = ..<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
            model.[layers.{i}|mtp_block.{n}].self_attn.qkv_proj.bias : (g (r + 1 + 1) d)
                = ..<q|k|v>_proj.bias : (g r d), (g d), (g d)
            model.[layers.{i}|mtp_block.{n}].<self_attn.o_proj|mlp.down_proj>.weight : (g r d) h, f h = : h (g r d), h f
            model.[layers.{i}|mtp_block.{n}].mlp.up_gate_proj.weight : h ((1 + 1) f) = ..<gate|up>_proj.weight : f h
            model.[layers.{i}|mtp_block.{n}].mlp.up_gate_proj.bias : ((1 + 1) f) = ..<gate|up>_proj.bias : f
            model.[layers.{i}|mtp_block.{n}].<self_attn.o_proj|mlp.down_proj>.bias : h
            model.layers.{i}.mlp.<gate.weight|moe_statics.e_score_correction_bias> : h e, 1 e = : e h, 1 e
            model.layers.{i}.mlp.experts.{e}.up_gate_proj.weight : h ((1 + 1) m) = ..<gate|up>_proj.weight : m h
            model.layers.{i}.mlp.experts.{e}.down_proj.weight : m h = : h m
            model.layers.{i}.mlp.shared_experts.up_gate_proj.weight : h ((1 + 1) s) = ..<gate|up>_proj.weight : s h
            model.layers.{i}.mlp.shared_experts.up_gate_proj.bias : ((1 + 1) s) = ..<gate|up>_proj.bias : s
            model.layers.{i}.mlp.shared_experts.down_proj.<weight|bias> : s h, h = : h s, h
        """),
        "paddle-hf": Variant("paddle", like_hub=True),
        "paddle-grouped": Variant("paddle", root="ernie.", over=NLP_HEAD, when=OWN_KEYS),
        "paddle-contiguous": Variant("paddle", "ernie.", NLP_HEAD, swap=CONTIGUOUS, when=SHARED_KEYS),
    },
    tiny={"moe_num_experts": 3, "moe_intermediate_size": 5, "moe_num_shared_experts": 2, "moe_layer_start_index": 1},
)  # fmt: skip
