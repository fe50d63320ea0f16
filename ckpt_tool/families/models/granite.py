"""Granite 3 and 4, dense: Llama's tensors; what scales them is in the config (`embedding_multiplier`, `logits_scaling`,
`residual_multiplier`, `attention_multiplier`). transformers 5.23, models/granite.

No project maps it to Megatron, whose decoder has no such factors: the hub dialect alone.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="granite",
    classes=(ModelClass("granite", "GraniteForCausalLM"),),
    axes=DECODER,
    hub=hub.DENSE + hub.BIASES,
)  # fmt: skip
