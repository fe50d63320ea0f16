"""Bloom: query_key_value holds q, k and v head by head; a norm follows the embedding. `hf-bare`: as bigscience's files have it.

Neither Megatron-Core nor PaddleFormers 1.2.0 has it (ALiBi, the norm of the embedding): no such dialect.
"""

from ckpt_tool.families.base import Family, Variant
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="bloom",
    classes=(
        ModelClass(
            "bloom", "BloomForCausalLM",
            keys={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        ),
    ),
    axes={
        "i": "n_layer? or num_hidden_layers", "v": "vocab_size", "h": "n_embed? or hidden_size", "f": "4 * h",
        "a": "n_head? or num_attention_heads", "d": "h // a",
    },
    hub="""
        [transformer.word_embeddings|lm_head].weight : v h
        lm_head.weight ~ transformer.word_embeddings.weight if tie_word_embeddings? != false
        transformer.[word_embeddings_layernorm|ln_f].<weight|bias> : h
        transformer.h.{i}.[input_layernorm|post_attention_layernorm].<weight|bias> : h
        transformer.h.{i}.self_attention.query_key_value.<weight|bias> : (a (1 + 1 + 1) d) h, (a (1 + 1 + 1) d)
        transformer.h.{i}.self_attention.dense.<weight|bias> : h (a d), h
        transformer.h.{i}.mlp.dense_h_to_4h.<weight|bias> : f h, f
        transformer.h.{i}.mlp.dense_4h_to_h.<weight|bias> : h f, h
    """,
    dialects={"hf-bare": Variant("hf", root="")},
)  # fmt: skip
