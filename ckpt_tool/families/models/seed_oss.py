"""Seed-OSS: Llama with biases at q, k and v. transformers 5.23, models/seed_oss.

No project maps it to Megatron: its layers are Megatron-Core's standard modules, and the dialect is what those are called.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="seed_oss",
    classes=(
        ModelClass(  # Megatron's arguments equal Qwen2's: --family decides which of the two a job has
            "seed_oss", "SeedOssForCausalLM", (*DECODER_FORMS, "qkv_bias"),
            keys={"qkv_bias": "attention_bias"},
            megatron=GATED,
            unsayable={"attention_out_bias": False, "mlp_bias": False},
            defaults={**DEFAULTS, "max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128,
                      "qkv_bias": True, "attention_dropout": 0.1},
        ),
    ),
    axes=DECODER,
    hub=hub.DENSE + hub.BIASES,
    dialects={"megatron": megatron.DENSE + megatron.BIASES},
    tiny={"attention_bias": True},
)  # fmt: skip
