"""GPT-2: weights (inputs, outputs), c_attn is [q | k | v], learned positions, biases, a tied head.

`hf-bare` is the model without a head, as openai-community's files have it; the causal masks that old ones hold
(`attn.bias`, `attn.masked_bias`) are no parameters and are dropped by name. PaddleFormers 1.2.0 has none. Megatron:
plain Megatron-Core (LayerNorm, learned_absolute, no gated MLP).
"""

from ckpt_tool.families.base import Family, Variant
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="gpt2",
    classes=(
        ModelClass(
            "gpt2", "GPT2LMHeadModel", ("sizes", "gelu", "tied"),
            keys={"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
                  "intermediate_size": "n_inner", "rms_norm_eps": "layer_norm_epsilon",
                  "max_position_embeddings": "n_positions"},
            megatron={"normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True, "attention_dropout": 0.0,
                      "position_embedding_type": "learned_absolute"},
            unsayable={"scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False},
            defaults={"n_inner": None, "layer_norm_epsilon": 1e-05, "n_positions": 1024, "initializer_range": 0.02,
                      "tie_word_embeddings": True, "activation_function": "gelu_new"},
        ),
    ),
    axes={
        "i": "n_layer? or num_hidden_layers", "v": "vocab_size", "h": "n_embd? or hidden_size", "f": "n_inner? or 4 * h",
        "a": "n_head? or num_attention_heads", "d": "h // a", "p": "n_positions? or max_position_embeddings",
    },
    hub="""
        [transformer.wte|lm_head].weight : v h
        lm_head.weight ~ transformer.wte.weight if tie_word_embeddings? != false
        transformer.wpe.weight : p h
        transformer.ln_f.<weight|bias> : h
        transformer.h.{i}.[ln_1|ln_2].<weight|bias> : h
        transformer.h.{i}.attn.c_attn.<weight|bias> : h ((1 + 1 + 1) a d), ((1 + 1 + 1) a d)
        transformer.h.{i}.attn.c_proj.<weight|bias> : (a d) h, h
        transformer.h.{i}.mlp.c_fc.<weight|bias> : h f, f
        transformer.h.{i}.mlp.c_proj.<weight|bias> : f h, h
        transformer.h.{i}.attn.bias : 1 1 n m = _ : 1 1 n m
        transformer.h.{i}.attn.masked_bias : = _ :
    """,
    dialects={
        "megatron": """
            embedding.word_embeddings.weight : v h = transformer.wte.weight : v h
            embedding.position_embeddings.weight : p h = transformer.wpe.weight : p h
            output_layer.weight : v h = lm_head.weight : v h if tie_word_embeddings? == false
            decoder.final_layernorm.<weight|bias> : h = transformer.ln_f.<weight|bias> : h
            decoder.layers.{i}.input_layernorm.<weight|bias> : h = transformer.h.{i}.ln_1.<weight|bias> : h
            decoder.layers.{i}.pre_mlp_layernorm.<weight|bias> : h = transformer.h.{i}.ln_2.<weight|bias> : h
            decoder.layers.{i}.self_attention.linear_qkv.<weight|bias> : (a (1 + 1 + 1) d) h, (a (1 + 1 + 1) d)
                = transformer.h.{i}.attn.c_attn.<weight|bias> : h ((1 + 1 + 1) a d), ((1 + 1 + 1) a d)
            decoder.layers.{i}.self_attention.linear_proj.<weight|bias> : h (a d), h
                = transformer.h.{i}.attn.c_proj.<weight|bias> : (a d) h, h
            decoder.layers.{i}.mlp.linear_fc1.<weight|bias> : f h, f = transformer.h.{i}.mlp.c_fc.<weight|bias> : h f, f
            decoder.layers.{i}.mlp.linear_fc2.<weight|bias> : h f, h = transformer.h.{i}.mlp.c_proj.<weight|bias> : f h, h
        """,
        "hf-bare": Variant("hf", root=""),
    },
    tiny={"n_positions": 12},
)  # fmt: skip
