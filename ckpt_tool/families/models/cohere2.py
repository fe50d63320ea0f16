"""Command R, R+ (`cohere`), R7B and A (`cohere2`): one norm, then attention and MLP side by side; R+ has norms a head of q
and k. transformers 5.23, models/cohere, models/cohere2.

No project maps them to Megatron, which has no layer whose two modules run side by side: the hub dialect alone.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="cohere2",
    classes=(ModelClass("cohere2", "Cohere2ForCausalLM"), ModelClass("cohere", "CohereForCausalLM")),
    axes={**DECODER, "d": "h // num_attention_heads"},
    hub=hub.TIED + hub.ATTENTION + hub.QKV_BIAS + hub.PROJ_BIAS + hub.MLP + """
        model.layers.{i}.input_layernorm.weight : h
        model.layers.{i}.self_attn.<q|k>_norm.weight : (g r) d, g d
    """,
    tiny={"pad_token_id": None},
)  # fmt: skip
