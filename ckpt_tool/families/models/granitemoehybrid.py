"""Granite 4 hybrid, and Granite 3 MoE with and without shared experts: Mamba-2 or attention, then experts in two tensors a
layer and a shared MLP. transformers 5.23, models/granitemoehybrid, granitemoe, granitemoeshared; `hf-5` are its names in
memory (conversion_mapping.py).

No project maps them to Megatron: the hub dialects alone.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import ModelClass

FAMILY = Family(
    name="granitemoehybrid",
    classes=(
        ModelClass("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
        ModelClass("granitemoeshared", "GraniteMoeSharedForCausalLM"),
        ModelClass("granitemoe", "GraniteMoeForCausalLM"),
    ),
    axes={
        **DECODER, "e": "num_local_experts", "s": "shared_intermediate_size",
        "t": "mamba_n_heads", "y": "(mamba_expand? or 2) * h",  # Mamba's heads, its width, conv1d's, in_proj's
        "c": "y + 2 * (mamba_n_groups? or 1) * mamba_d_state", "j": "y + c + t", "k": "mamba_d_conv? or 4",
    },
    hub=hub.MODEL + hub.NORMS + hub.ATTENTION + hub.QKV_BIAS + hub.PROJ_BIAS + """
        model.layers.{i}.mamba.<A_log|D|dt_bias|norm.weight> : t, t, t, y
        model.layers.{i}.mamba.conv1d.<weight|bias> : c 1 k, c
        model.layers.{i}.mamba.in_proj.<weight|bias> : j h, j
        model.layers.{i}.mamba.out_proj.<weight|bias> : h y, h
        model.layers.{i}.shared_mlp.<input_linear|output_linear>.weight : ((1 + 1) s) h, h s
        model.layers.{i}.block_sparse_moe.<input_linear|output_linear>.weight : e ((1 + 1) f) h, e h f
        model.layers.{i}.block_sparse_moe.router.layer.weight : e h
    """,
    dialects={
        "hf-5": Variant("hf", over="""
            model.layers.{i}.block_sparse_moe.experts.<gate_up_proj|down_proj> : e ((1 + 1) f) h, e h f
                = model.layers.{i}.block_sparse_moe.<input_linear|output_linear>.weight : e ((1 + 1) f) h, e h f
            model.layers.{i}.block_sparse_moe.router.weight : e h = model.layers.{i}.block_sparse_moe.router.layer.weight : e h
        """),
    },
    tiny={"num_local_experts": 3, "num_experts_per_tok": 2, "shared_intermediate_size": 7, "mamba_n_heads": 2,
          "mamba_d_head": "auto", "mamba_d_state": 5, "mamba_n_groups": 2, "layer_types": ["mamba", "attention"]},
)  # fmt: skip
