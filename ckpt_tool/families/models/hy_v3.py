"""Hy3 (Tencent): a dense layer, then experts with a bias and shared ones; MTP as layer N.

transformers 5.23, models/hy_v3 and conversion_mapping.py: in memory the experts are fused and the router, its bias and the
shared experts have other names (`hf-5`). Megatron: Megatron-Bridge 0.6.2, models/hy_v3/hy_v3_bridge.py, whose table names
the tensors of the layer of MTP too.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, FUSED_EXPERTS, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, SIGMOID, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="hy_v3",
    classes=(
        ModelClass(
            "hy_v3", "HYV3ForCausalLM",
            (*DECODER_FORMS, "experts", "first_dense", "mlp_kinds", "scaled", "shared_experts", "ahead"),
            keys={"n_shared_experts": "num_shared_experts", "routed_scaling_factor": "router_scaling_factor"},
            megatron={**GATED, **SIGMOID, "qk_layernorm": True, "moe_router_pre_softmax": False},
            unsayable={"attention_bias": False, "mlp_bias": False, "moe_router_use_sigmoid": True, "qk_norm": True,
                       "route_norm": True},
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "rope_theta": 11158840.0, "max_position_embeddings": 131072,
                      "initializer_range": 0.006, "head_dim": 128, "num_key_value_heads": 8, "num_experts": 192,
                      "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1536,
                      "routed_scaling_factor": 2.826, "first_k_dense_replace": 1},
        ),
    ),
    axes={
        **DECODER, "i": "num_hidden_layers + (num_nextn_predict_layers? or 1)", "w": "2 * h",
        "e": "num_experts? or num_local_experts", "m": "moe_intermediate_size", "s": "m * (num_shared_experts? or 1)",
    },
    hub=hub.DENSE + hub.BIASES + hub.QK_NORMS + hub.EXPERTS + """
        model.layers.{i}.mlp.router.gate.weight : e h
        model.layers.{i}.mlp.expert_bias : e
        model.layers.{i}.mlp.shared_mlp.<gate|up|down>_proj.weight : s h, s h, h s
        model.layers.{i}.mlp.shared_mlp.<gate|up|down>_proj.bias : s, s, h
        model.layers.{i}.<enorm|hnorm|final_layernorm>.weight : h
        model.layers.{i}.eh_proj.weight : h w
    """,
    dialects={
        "megatron": Variant(ahead=True, of=megatron.DENSE + megatron.BIASES + megatron.QK_NORMS + megatron.EXPERTS + """
            decoder.layers.{i}.mlp.router.weight : e h = model.layers.{i}.mlp.router.gate.weight : e h
            decoder.layers.{i}.mlp.router.expert_bias : e = model.layers.{i}.mlp.expert_bias : e
            decoder.layers.{i}.mlp.shared_experts.linear_fc1.weight : ((1 + 1) s) h
                = model.layers.{i}.mlp.shared_mlp.<gate|up>_proj.weight : s h
            decoder.layers.{i}.mlp.shared_experts.linear_fc2.weight : h s
                = model.layers.{i}.mlp.shared_mlp.down_proj.weight : h s
            decoder.layers.{i}.mlp.shared_experts.linear_fc1.bias : ((1 + 1) s)
                = model.layers.{i}.mlp.shared_mlp.<gate|up>_proj.bias : s
            decoder.layers.{i}.mlp.shared_experts.linear_fc2.bias : h = model.layers.{i}.mlp.shared_mlp.down_proj.bias : h
            mtp.layers.{i}.<enorm|hnorm|eh_proj|final_layernorm>.weight : h, h, h w, h
                = model.layers.{i}.<enorm|hnorm|eh_proj|final_layernorm>.weight : h, h, h w, h
        """),
        "hf-5": Variant("hf", over=FUSED_EXPERTS + """
            model.layers.{i}.mlp.gate.weight : e h = model.layers.{i}.mlp.router.gate.weight : e h
            model.layers.{i}.mlp.e_score_correction_bias : e = model.layers.{i}.mlp.expert_bias : e
            model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.weight : s h, s h, h s
                = model.layers.{i}.mlp.shared_mlp.<gate|up|down>_proj.weight : s h, s h, h s
            model.layers.{i}.mlp.shared_experts.<gate|up|down>_proj.bias : s, s, h
                = model.layers.{i}.mlp.shared_mlp.<gate|up|down>_proj.bias : s, s, h
        """),
    },
    tiny={"num_experts": 4, "moe_intermediate_size": 5, "num_shared_experts": 2, "num_experts_per_tok": 2},
)  # fmt: skip
