"""Gemma 3, text: gemma2 and norms of q and k. `hf-vl` and `hf-vl5` are the language part of the models that see, as their files
and as transformers 5 in memory name it; what belongs to the tower keeps its names.

Paddle: PaddleFormers 1.2.0, transformers/gemma3_text. Norms and Megatron's layer: see gemma2; models/gemma/gemma3_bridge.py.
"""

from ckpt_tool.families import hub, megatron
from ckpt_tool.families.base import DECODER, PADDLE_FUSED, Family, Variant
from ckpt_tool.families.model_class import GEMMA, ModelClass

FAMILY = Family(
    name="gemma3",
    classes=(
        ModelClass(
            "gemma3_text", "Gemma3ForCausalLM", ("sizes", "heads", "rope", "tied", "gated_gelu", "every_sixth"),
            megatron={**GEMMA, "qk_layernorm": True},
            unsayable={"attention_bias": False},
            defaults={"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": True,
                      "initializer_range": 0.02, "hidden_activation": "gelu_pytorch_tanh",
                      "max_position_embeddings": 131072, "head_dim": 256, "num_attention_heads": 8,
                      "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256},
            also=("Gemma3TextModel",),
        ),
        ModelClass("gemma3", "Gemma3ForConditionalGeneration"),
    ),
    axes=DECODER,
    language="text_config",
    hub=hub.GEMMA + hub.QK_NORMS,
    centred=True,
    dialects={
        "megatron": megatron.GEMMA + megatron.QK_NORMS,
        "hf-vl": Variant("hf", root="language_model.model.", over="language_model.lm_head.weight : v h = lm_head.weight : v h\n"),
        "hf-vl5": Variant("hf", root="model.language_model."),
        "paddle": Variant(apart=True, of=PADDLE_FUSED + """
            model.layers.{i}.<input|post_attention|pre_feedforward|post_feedforward>_layernorm.weight : h
            model.layers.{i}.self_attn.<q|k>_norm.weight : d
            model.layers.{i}.self_attn.o_proj.bias : h
        """),
        "paddle-hf": Variant("paddle", like_hub=True),
    },
)  # fmt: skip
