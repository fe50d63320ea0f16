"""OLMo 2 and 3: norms after the two modules, and over all heads of q and k at once. transformers 5.23, models/olmo2, olmo3
(which only sees through windows in most layers).

No project maps them to Megatron or Paddle (Megatron-Core's q_layernorm is over one head).
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.trainers import names as trainers

FAMILY = Family(
    name="olmo2",
    classes=(ModelClass("olmo2", "Olmo2ForCausalLM"), ModelClass("olmo3", "Olmo3ForCausalLM")),
    axes={**DECODER, **maxtext.IN_FOURS},  # i layers, v vocabulary, h hidden, f feed-forward, g groups, r heads a group, d head: keys of config.json
    hub=hub.MODEL + hub.ATTENTION + hub.QKV_BIAS + hub.PROJ_BIAS + hub.WIDE_QK_NORMS + hub.MLP + """
        model.layers.{i}.<post_attention|post_feedforward>_layernorm.weight : h
    """,
    dialects={"olmo-core": trainers.OLMO_MODEL + trainers.OLMO_NORMS + trainers.OLMO_MLP, **maxtext.olmo3()},
)  # fmt: skip
