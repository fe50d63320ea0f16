"""Nemotron-3, Nemotron-4 and Minitron: LayerNorms that multiply by 1 + weight, an MLP of squared ReLU without a gate.
transformers 5.23, models/nemotron.

Megatron: Megatron-Bridge 0.6.2, models/nemotron/nemotron_bridge.py, norms as they are stored (layernorm_zero_centered_gamma);
biases, which no released model has, are mapped to those of Megatron's layers.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="nemotron",
    classes=(
        ModelClass(
            "nemotron", "NemotronForCausalLM", ("sizes", "heads", "rope", "tied", "dropout", "biases"),
            keys={"rms_norm_eps": "norm_eps"},
            megatron={"normalization": "LayerNorm", "layernorm_zero_centered_gamma": True, "swiglu": False,
                      "squared_relu": True, "position_embedding_type": "rope"},
            unsayable={"hidden_act": "relu2"},
            defaults={"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                      "initializer_range": 0.0134, "tie_word_embeddings": False, "max_position_embeddings": 4096,
                      "hidden_act": "relu2", "attention_bias": False, "mlp_bias": False},
        ),
    ),
    axes=DECODER,
    centred=True,
    hub=hub.MODEL + hub.NORMS + hub.NORM_BIASES + hub.ATTENTION + hub.QKV_BIAS + hub.PROJ_BIAS + """
        model.layers.{i}.mlp.up_proj.<weight|bias> : f h, f
        model.layers.{i}.mlp.down_proj.<weight|bias> : h f, h
    """,
    dialects={
        "megatron": megatron.MODEL + megatron.NORMS + megatron.NORM_BIASES + megatron.ATTENTION + megatron.QKV_BIAS
            + megatron.PROJ_BIAS + """
            decoder.layers.{i}.mlp.linear_fc1.<weight|bias> : f h, f = model.layers.{i}.mlp.up_proj.<weight|bias> : f h, f
            decoder.layers.{i}.mlp.linear_fc2.<weight|bias> : h f, h = model.layers.{i}.mlp.down_proj.<weight|bias> : h f, h
        """,
    },
)  # fmt: skip
