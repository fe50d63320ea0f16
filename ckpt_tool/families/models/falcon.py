"""Falcon: query_key_value groups the heads [q ... q k v] by KV head, in each of its architectures.

7B (multi_query) is one group, 40B and 180B (new_decoder_architecture) `num_kv_heads` groups, the RW models (neither, as Bloom)
a group a head. That is Megatron's order too. PaddleFormers 1.2.0 has none. Megatron: NeMo 1's layer
(nlp/models/language_modeling/megatron/falcon), as Megatron-Core has no parallel attention.
"""

from ckpt_tool.families.base import Family
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="falcon",
    classes=(
        ModelClass(
            "falcon", "FalconForCausalLM", ("sizes", "rope", "tied", "falcon"),
            keys={"intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads",
                  "rms_norm_eps": "layer_norm_epsilon"},
            megatron={"normalization": "LayerNorm", "swiglu": False, "position_embedding_type": "rope",
                      "bias_gelu_fusion": False, "attention_dropout": 0.0},
            unsayable={"activation": "gelu"},
            defaults={"layer_norm_epsilon": 1e-05, "rope_theta": 10000.0, "initializer_range": 0.02,
                      "tie_word_embeddings": True, "max_position_embeddings": 2048, "multi_query": True,
                      "parallel_attn": True, "bias": False, "alibi": False, "new_decoder_architecture": False},
        ),
    ),
    axes={
        "i": "num_hidden_layers", "v": "vocab_size", "h": "hidden_size", "f": "ffn_hidden_size? or 4 * h",
        "g": "new_decoder_architecture? and (num_kv_heads? or num_attention_heads)"
             " or (multi_query? != false and 1 or num_attention_heads)",
        "r": "num_attention_heads // g", "d": "h // num_attention_heads",
    },
    hub="""
        [transformer.word_embeddings|lm_head].weight : v h
        lm_head.weight ~ transformer.word_embeddings.weight if tie_word_embeddings? != false
        transformer.ln_f.<weight|bias> : h
        transformer.h.{i}.[input_layernorm|post_attention_layernorm|ln_attn|ln_mlp].<weight|bias> : h
        transformer.h.{i}.self_attention.query_key_value.<weight|bias> : (g (r + 1 + 1) d) h, (g (r + 1 + 1) d)
        transformer.h.{i}.self_attention.dense.<weight|bias> : h (g r d), h
        transformer.h.{i}.mlp.dense_h_to_4h.<weight|bias> : f h, f
        transformer.h.{i}.mlp.dense_4h_to_h.<weight|bias> : h f, h
    """,
    dialects={
        "megatron": """
            embedding.word_embeddings.weight : v h = transformer.word_embeddings.weight : v h
            output_layer.weight : v h = lm_head.weight : v h if tie_word_embeddings? == false
            decoder.final_layernorm.<weight|bias> : h = transformer.ln_f.<weight|bias> : h
            decoder.layers.{i}.input_layernorm.<weight|bias> : h = transformer.h.{i}.ln_attn.<weight|bias> : h
                if new_decoder_architecture? and num_ln_in_parallel_attn? != 1
            decoder.layers.{i}.input_layernorm.<weight|bias> : h = transformer.h.{i}.input_layernorm.<weight|bias> : h
                if not new_decoder_architecture? or num_ln_in_parallel_attn? == 1
            decoder.layers.{i}.pre_mlp_layernorm.<weight|bias> : h = transformer.h.{i}.ln_mlp.<weight|bias> : h
            decoder.layers.{i}.post_self_attn_layernorm.<weight|bias> : h
                = transformer.h.{i}.post_attention_layernorm.<weight|bias> : h
            decoder.layers.{i}.self_attention.linear_qkv.<weight|bias> : (g (r + 1 + 1) d) h, (g (r + 1 + 1) d)
                = transformer.h.{i}.self_attention.query_key_value.<weight|bias> : (g (r + 1 + 1) d) h, (g (r + 1 + 1) d)
            decoder.layers.{i}.self_attention.linear_proj.<weight|bias> : h (g r d), h
                = transformer.h.{i}.self_attention.dense.<weight|bias> : h (g r d), h
            decoder.layers.{i}.mlp.linear_fc1.<weight|bias> : f h, f
                = transformer.h.{i}.mlp.dense_h_to_4h.<weight|bias> : f h, f
            decoder.layers.{i}.mlp.linear_fc2.<weight|bias> : h f, h
                = transformer.h.{i}.mlp.dense_4h_to_h.<weight|bias> : h f, h
        """,
    },
    tiny={"new_decoder_architecture": True},
)  # fmt: skip
