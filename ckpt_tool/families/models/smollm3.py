"""SmolLM3: Llama of which every fourth layer has no rotary positions. transformers 5.23, models/smollm3.

No project maps it to Megatron: its layers are Megatron-Core's standard modules (`no_rope_freq` says which turn), and the
dialect is what those are called.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="smollm3",
    classes=(
        ModelClass(
            "smollm3", "SmolLM3ForCausalLM", (*DECODER_FORMS, "biases", "no_rope"),
            megatron=GATED,
            unsayable={"use_sliding_window": False},
            defaults={**DEFAULTS, "rope_theta": 2000000.0, "max_position_embeddings": 32768, "num_key_value_heads": 4,
                      "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
                      "no_rope_layer_interval": 4},
        ),
    ),
    axes=DECODER,
    hub=hub.TIED + hub.NORMS + hub.ATTENTION + hub.MLP + hub.BIASES,
    dialects={"megatron": megatron.TIED + megatron.NORMS + megatron.ATTENTION + megatron.MLP + megatron.BIASES},
    tiny={"pad_token_id": None},
)  # fmt: skip
