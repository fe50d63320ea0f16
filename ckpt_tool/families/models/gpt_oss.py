"""gpt-oss: a layer's experts in one tensor (inputs, outputs), gate and up row by row, biases everywhere, a sink a head.

The published files hold the experts in MXFP4, `_blocks` and `_scales` (e, outputs, inputs / 32): they are known here, and no
other dialect has them, so they want --dequantize first. Paddle: PaddleFormers 1.2.0, transformers/gpt_oss, turns the attention
alone. Megatron: Megatron-Bridge, models/gpt_oss/gpt_oss_bridge.py, with softmax_type learnable.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import DEFAULTS, ModelClass
from ckpt_tool.systems.hub import mlx_names as mlx
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.llamacpp import names as gguf
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="gpt_oss",
    classes=(
        ModelClass(
            "gpt_oss", "GptOssForCausalLM",
            ("sizes", "heads", "rope", "tied", "experts", "all_sparse", "clamp", "every_second"),
            keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
            megatron={"normalization": "RMSNorm", "swiglu": False, "quick_geglu": True, "add_bias_linear": True,
                      "glu_linear_offset": 1.0, "softmax_type": "learnable", "position_embedding_type": "rope",
                      "moe_router_pre_softmax": False, "attention_dropout": 0.0},
            unsayable={"attention_bias": True, "swiglu_alpha": 1.702},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "rope_theta": 150000.0, "max_position_embeddings": 131072,
                      "head_dim": 64, "num_key_value_heads": 8, "num_experts": 128, "num_experts_per_tok": 4,
                      "router_aux_loss_coef": 0.001, "sliding_window": 128, "swiglu_limit": 7.0,
                      "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}},
        ),
    ),
    axes={**DECODER, "e": "num_local_experts? or num_experts", "m": "intermediate_size", **maxtext.IN_PAIRS},
    hub=hub.MODEL + hub.NORMS + hub.QKV_BIAS + """
        model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
        model.layers.{i}.self_attn.<o_proj.weight|o_proj.bias|sinks> : h (g r d), h, (g r)
        model.layers.{i}.mlp.router.<weight|bias> : e h, e
        model.layers.{i}.mlp.experts.<gate_up_proj|gate_up_proj_bias> : e h (m (1 + 1)), e (m (1 + 1))
        model.layers.{i}.mlp.experts.<down_proj|down_proj_bias> : e m h, e h
        model.layers.{i}.mlp.experts.gate_up_proj_<blocks|scales> : e (m 2) b 16, e (m 2) b
        model.layers.{i}.mlp.experts.down_proj_<blocks|scales> : e h c 16, e h c
    """,
    dialects={
        "megatron": megatron.MODEL + megatron.NORMS + megatron.ATTENTION + megatron.QKV_BIAS + megatron.PROJ_BIAS + """
            decoder.layers.{i}.self_attention.core_attention.softmax_offset : (g r)
                = model.layers.{i}.self_attn.sinks : (g r)
            decoder.layers.{i}.mlp.router.<weight|bias> : e h, e = model.layers.{i}.mlp.router.<weight|bias> : e h, e
            decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.<weight|bias> : ((1 + 1) m) h, ((1 + 1) m)
                = model.layers.{i}.mlp.experts.<gate_up_proj|gate_up_proj_bias> : e h (m (1 + 1)), e (m (1 + 1))
            decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.<weight|bias> : h m, h
                = model.layers.{i}.mlp.experts.<down_proj|down_proj_bias> : e m h, e h
        """,
        "paddle": """
            [model.embed_tokens|lm_head].weight : v h
            model.norm.weight : h
            model.layers.{i}.<input|post_attention>_layernorm.weight : h
            model.layers.{i}.self_attn.<q|k|v>_proj.weight : h (g r d), h (g d), h (g d) = : (g r d) h, (g d) h, (g d) h
            model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
            model.layers.{i}.self_attn.<o_proj.weight|o_proj.bias|sinks> : (g r d) h, h, (g r) = : h (g r d), h, (g r)
            model.layers.{i}.mlp.router.<weight|bias> : e h, e
            model.layers.{i}.mlp.experts.<gate_up_proj|gate_up_proj_bias> : e h (m (1 + 1)), e (m (1 + 1))
            model.layers.{i}.mlp.experts.<down_proj|down_proj_bias> : e m h, e h
        """,
        "gguf": gguf.GPT_OSS,
        "mlx": Variant("hf", over=mlx.GPT_OSS_EXPERTS),
        **maxtext.gpt_oss(),
    },
    tiny={"num_local_experts": 3, "num_experts_per_tok": 2, "attention_bias": True},
)  # fmt: skip
