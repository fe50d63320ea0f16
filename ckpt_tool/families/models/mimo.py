"""MiMo 7B, whose code lies beside its files: Qwen2, and layers of multi-token prediction under names of their own.

Megatron-Bridge 0.6.2, models/mimo/mimo_bridge.py. It turns the halves of `input_proj` round (Megatron's eh_proj has the
embedding's half first), which no rule can say yet: a checkpoint with those layers is refused for Megatron.
"""

from ckpt_tool.families import hub, megatron
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass

FAMILY = Family(
    name="mimo",
    classes=(
        ModelClass(
            "mimo", "MiMoForCausalLM", (*DECODER_FORMS, "window", "ahead"),
            megatron={**GATED, "add_qkv_bias": True},
            defaults={**DEFAULTS, "max_position_embeddings": 32768, "use_sliding_window": False, "max_window_layers": 28},
            like="Qwen2ForCausalLM",
        ),
    ),
    axes={**DECODER, "t": "num_nextn_predict_layers? or 1", "w": "2 * h"},
    hub=hub.DENSE + hub.QKV_BIAS + """
        model.mtp_layers.{t}.<input_layernorm|post_attention_layernorm|token_layernorm|hidden_layernorm|final_layernorm>.weight : h
        model.mtp_layers.{t}.input_proj.weight : h w
        model.mtp_layers.{t}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
        model.mtp_layers.{t}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
        model.mtp_layers.{t}.self_attn.o_proj.weight : h (g r d)
        model.mtp_layers.{t}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
    """,
    dialects={"megatron": megatron.DENSE + megatron.QKV_BIAS},
)  # fmt: skip
