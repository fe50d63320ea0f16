"""Gemma 4, text only: layers with a window and with full attention have different heads; per-layer embeddings (E2B, E4B) or
experts in addition to the MLP (26B-A4B); full layers may use their keys as values. Names are the same in files and in memory.

Megatron: Megatron-Bridge 0.6.2, models/gemma/gemma4_bridge.py. Tensors that are stored twice there are read once.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import Family
from ckpt_tool.families.model_class import GEMMA4, GEMMA4_DEFAULTS, GEMMA4_FORMS, ModelClass
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="gemma4_text",
    classes=(
        ModelClass(
            "gemma4_text", "Gemma4ForCausalLM",
            GEMMA4_FORMS,
            megatron=GEMMA4,
            unsayable={"attention_bias": False, "use_bidirectional_attention": None},
            defaults={**GEMMA4_DEFAULTS, "max_position_embeddings": 131072, "sliding_window": 512, "enable_moe_block": False,
                      "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256},
            also=("Gemma4TextModel",),
        ),
    ),
    axes={**hub.GEMMA4_AXES, **maxtext.IN_SIXES},
    kinds=hub.GEMMA4_KINDS,
    hub=hub.GEMMA4,
    dialects={"megatron": megatron.GEMMA4, **maxtext.gemma4()},
    tiny={"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8, "num_global_key_value_heads": 1,
          "attention_k_eq_v": True, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 128,
          "num_kv_shared_layers": 0, "pad_token_id": 0},
)  # fmt: skip
