"""OLMo 2: norms after the two modules, and over all heads of q and k at once. transformers 5.23, models/olmo2.

No project maps it to Megatron or Paddle (Megatron-Core's q_layernorm is over one head): the hub dialect alone.
"""

from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="olmo2",
    classes=(ModelClass("olmo2", "Olmo2ForCausalLM"),),
    axes=DECODER,  # i layers, v vocabulary, h hidden, f feed-forward, g groups, r heads a group, d head: keys of config.json
    hub="""
        [model.embed_tokens|lm_head].weight : v h
        lm_head.weight ~ model.embed_tokens.weight if tie_word_embeddings?
        model.norm.weight : h
        model.layers.{i}.<post_attention|post_feedforward>_layernorm.weight : h
        model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
        model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
        model.layers.{i}.self_attn.<q|k>_norm.weight : (g r d), (g d)
        model.layers.{i}.self_attn.o_proj.<weight|bias> : h (g r d), h
        model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
    """,
)  # fmt: skip
