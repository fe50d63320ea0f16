"""Qwen3.5, dense, the language model alone, as transformers saves its text class. Released files are those of `qwen3_5`.

transformers 5.23, models/qwen3_5; Megatron-Bridge 0.6.2, models/qwen/qwen35_bridge.py.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, DELTA_NET, Family
from ckpt_tool.families.model_class import DECODER_FORMS, QWEN_DELTA, QWEN_DELTA_DEFAULTS, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="qwen3_5_text",
    classes=(
        ModelClass(
            "qwen3_5_text", "Qwen3_5ForCausalLM", (*DECODER_FORMS, "delta_net", "ahead"),
            keys={"num_nextn_predict_layers": "mtp_num_hidden_layers"},
            megatron=QWEN_DELTA,
            unsayable={"attention_bias": False},
            defaults={**QWEN_DELTA_DEFAULTS, "partial_rotary_factor": 0.25, "num_key_value_heads": 4},
        ),
    ),
    axes={**DECODER, **DELTA_NET},
    hub=hub.QWEN35 + hub.MLP + hub.ahead(hub.MLP),
    centred=True,
    dialects={"megatron": megatron.QWEN35 + megatron.MLP + megatron.ahead(megatron.MLP)},
    tiny={"full_attention_interval": 2, "linear_conv_kernel_dim": 3, "linear_key_head_dim": 5, "linear_value_head_dim": 7,
          "linear_num_key_heads": 2, "linear_num_value_heads": 6},
)  # fmt: skip
