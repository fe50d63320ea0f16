"""StarCoder2: LayerNorms, biases everywhere, an MLP of GELU without a gate. transformers 5.23, models/starcoder2.

No project maps it to Megatron: its layers are Megatron-Core's standard modules, and the dialect is what those are called.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="starcoder2",
    classes=(
        ModelClass(
            "starcoder2", "Starcoder2ForCausalLM",
            ("sizes", "heads", "rope", "tied", "dropout", "gelu", "use_bias", "window"),
            keys={"rms_norm_eps": "norm_epsilon", "activation_function": "hidden_act"},
            megatron={"normalization": "LayerNorm", "swiglu": False, "position_embedding_type": "rope"},
            defaults={"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "initializer_range": 0.018042,
                      "tie_word_embeddings": True, "max_position_embeddings": 4096, "num_key_value_heads": 2,
                      "activation_function": "gelu_pytorch_tanh", "use_bias": True},
        ),
    ),
    axes=DECODER,
    hub=hub.TIED + hub.NORMS + hub.NORM_BIASES + hub.ATTENTION + hub.QKV_BIAS + hub.PROJ_BIAS + """
        model.layers.{i}.mlp.c_fc.<weight|bias> : f h, f
        model.layers.{i}.mlp.c_proj.<weight|bias> : h f, h
    """,
    dialects={
        "megatron": megatron.TIED + megatron.NORMS + megatron.NORM_BIASES + megatron.ATTENTION + megatron.QKV_BIAS
            + megatron.PROJ_BIAS + """
            decoder.layers.{i}.mlp.linear_fc1.<weight|bias> : f h, f = model.layers.{i}.mlp.c_fc.<weight|bias> : f h, f
            decoder.layers.{i}.mlp.linear_fc2.<weight|bias> : h f, h = model.layers.{i}.mlp.c_proj.<weight|bias> : h f, h
        """,
    },
)  # fmt: skip
