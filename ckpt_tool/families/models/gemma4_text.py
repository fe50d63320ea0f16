"""Gemma 4, the text alone: windowed layers and whole ones with heads of their own, per-layer embeddings (E2B, E4B) or experts
beside the MLP (26B-A4B); whole layers may take their keys for values. Released and in memory the same names.

Megatron: Megatron-Bridge 0.6.2, models/gemma/gemma4_bridge.py. On the way back what stands twice there is taken once.
"""

from ckpt_tool.families import hub, megatron
from ckpt_tool.families.base import Family
from ckpt_tool.families.model_class import GEMMA, ModelClass

FAMILY = Family(
    name="gemma4_text",
    classes=(
        ModelClass(
            "gemma4_text", "Gemma4ForCausalLM",
            ("sizes", "heads", "rope", "tied", "dropout", "gated_gelu", "every_sixth", "gemma4"),
            megatron={**GEMMA, "layernorm_zero_centered_gamma": False, "qk_layernorm": True},
            unsayable={"attention_bias": False, "use_bidirectional_attention": None},
            defaults={"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "partial_rotary_factor": 0.25,
                      "rope_scaling": {"rope_type": "proportional"}, "tie_word_embeddings": True, "initializer_range": 0.02,
                      "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "head_dim": 256,
                      "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 512, "attention_dropout": 0.0,
                      "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "attention_k_eq_v": False,
                      "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "enable_moe_block": False},
            also=("Gemma4TextModel",),
        ),
    ),
    axes=hub.GEMMA4_AXES,
    kinds=hub.GEMMA4_KINDS,
    hub=hub.GEMMA4,
    dialects={"megatron": megatron.GEMMA4},
    tiny={"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8, "num_global_key_value_heads": 1,
          "attention_k_eq_v": True, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 128,
          "num_kv_shared_layers": 0, "pad_token_id": 0},
)  # fmt: skip
