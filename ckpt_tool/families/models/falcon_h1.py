"""Falcon-H1: attention and a Mamba-2 mixer side by side in every layer, then an MLP; what scales them is in the config
(`ssm_multipliers`, ...). transformers 5.23, models/falcon_h1.

Megatron: Megatron-Bridge 0.6.2, models/falcon_h1/falconh1_bridge.py: one norm before both, in_proj (z | x | B | C | dt) and
conv1d (x | B | C) are the hub's at TP 1. It maps no biases but the convolution's, which the released models have alone.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="falcon_h1",
    classes=(
        ModelClass(
            "falcon_h1", "FalconH1ForCausalLM", (*DECODER_FORMS, "falcon_h1"),
            megatron=GATED,
            unsayable={"attention_bias": False, "mlp_bias": False, "projectors_bias": False, "mamba_proj_bias": False},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "max_position_embeddings": 8192, "num_key_value_heads": 8,
                      "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256,
                      "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True,
                      "mamba_norm_before_gate": True, "mamba_rms_norm": False},
        ),
    ),
    axes={
        **DECODER, "n": "mamba_n_heads", "u": "mamba_d_ssm? or (mamba_expand? or 2) * h",
        "t": "mamba_n_groups? or 1", "y": "mamba_d_state", "k": "mamba_d_conv? or 4",
    },
    hub=hub.EMBEDDING + hub.ATTENTION + hub.QKV_BIAS + hub.PROJ_BIAS + """
        model.final_layernorm.weight : h
        model.layers.{i}.<input|pre_ff>_layernorm.weight : h
        model.layers.{i}.mamba.<A_log|D|dt_bias> : n
        model.layers.{i}.mamba.<in_proj|norm|out_proj>.weight : (u + u + t y + t y + n) h, u, h u
        model.layers.{i}.mamba.<in_proj|out_proj>.bias : (u + u + t y + t y + n), h
        model.layers.{i}.mamba.conv1d.<weight|bias> : (u + t y + t y) 1 k, (u + t y + t y)
        model.layers.{i}.feed_forward.<gate|up|down>_proj.weight : f h, f h, h f
        model.layers.{i}.feed_forward.<gate|up|down>_proj.bias : f, f, h
    """,
    dialects={
        "megatron": megatron.EMBEDDING + megatron.ATTENTION + """
            decoder.final_norm.weight : h = model.final_layernorm.weight : h
            decoder.layers.{i}.<norm|pre_mlp_layernorm>.weight : h = model.layers.{i}.<input|pre_ff>_layernorm.weight : h
            decoder.layers.{i}.mamba_mixer.<A_log|D|dt_bias> : n = model.layers.{i}.mamba.<A_log|D|dt_bias> : n
            decoder.layers.{i}.mamba_mixer.<in_proj|norm|out_proj>.weight : (u + u + t y + t y + n) h, u, h u
                = model.layers.{i}.mamba.<in_proj|norm|out_proj>.weight : (u + u + t y + t y + n) h, u, h u
            decoder.layers.{i}.mamba_mixer.<conv1d_weight|conv1d_bias> : (u + t y + t y) 1 k, (u + t y + t y)
                = model.layers.{i}.mamba.conv1d.<weight|bias> : (u + t y + t y) 1 k, (u + t y + t y)
            decoder.layers.{i}.mlp.linear_fc1.weight : ((1 + 1) f) h = model.layers.{i}.feed_forward.<gate|up>_proj.weight : f h
            decoder.layers.{i}.mlp.linear_fc2.weight : h f = model.layers.{i}.feed_forward.down_proj.weight : h f
        """,
    },
    tiny={"mamba_n_heads": 4, "mamba_d_head": 6, "mamba_d_ssm": 24, "mamba_n_groups": 2, "mamba_d_state": 5,
          "mamba_rms_norm": True},
)  # fmt: skip
