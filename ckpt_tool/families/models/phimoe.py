"""Phi-3.5-MoE: LayerNorms, a bias at the head. transformers 5.23, models/phimoe; `hf-5` are its names in memory
(conversion_mapping.py).

No project maps it to Megatron, whose routers have no sparse mixer and whose head no bias: the hub dialects alone.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import ModelClass
from ckpt_tool.systems.hub import mlx_names as mlx

FAMILY = Family(
    name="phimoe",
    classes=(ModelClass("phimoe", "PhimoeForCausalLM"),),
    axes={**DECODER, "e": "num_local_experts"},
    hub=hub.MODEL + hub.NORMS + hub.NORM_BIASES + hub.ATTENTION + hub.QKV_BIAS + hub.PROJ_BIAS + """
        lm_head.bias : v
        model.layers.{i}.block_sparse_moe.gate.weight : e h
        model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3>.weight : f h
        model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight : h f
    """,
    dialects={
        "hf-5": Variant("hf", over="""
            model.layers.{i}.mlp.router.weight : e h = model.layers.{i}.block_sparse_moe.gate.weight : e h
            model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) f) h
                = model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3>.weight : f h
            model.layers.{i}.mlp.experts.down_proj : e h f
                = model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight : h f
        """),
        "mlx": Variant("hf", over=mlx.MIXTRAL_EXPERTS),
    },
    tiny={"num_local_experts": 3, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
)  # fmt: skip
