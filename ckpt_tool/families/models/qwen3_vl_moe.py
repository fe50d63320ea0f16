"""Qwen3-VL with experts. A released layer's are in two tensors (inputs, outputs), [gate | up]; `hf-5` is what transformers 5
has in memory and saves: (outputs, inputs). The shapes decide: one of the two tensors fits only one way, whatever the sizes.
`hf-split`: experts one by one.

Megatron: Megatron-Bridge 0.6.2, models/qwen_vl/qwen3_vl_bridge.py. `megatron-swift`: mcore-bridge 1.6.5, which keeps the hub's tower.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families import vision
from ckpt_tool.families.base import DECODER, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.megatron import names as megatron

FAMILY = Family(
    name="qwen3_vl_moe",
    classes=(
        ModelClass("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
        ModelClass(
            "qwen3_vl_moe_text", "Qwen3VLMoeTextModel", (*DECODER_FORMS, "experts", "sparse_layers"),
            megatron={**GATED, "qk_layernorm": True, "position_embedding_type": "mrope", "moe_router_pre_softmax": False},
            unsayable={"attention_bias": False},
            defaults={**DEFAULTS, "decoder_sparse_step": 1, "rope_theta": 500000.0, "max_position_embeddings": 128000,
                      "head_dim": 128, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
                      "moe_intermediate_size": 1408, "router_aux_loss_coef": 0.001},
            part=True,
        ),
    ),
    axes={**DECODER, **vision.AXES, "m": "moe_intermediate_size", "e": "num_local_experts? or num_experts"},
    language="text_config",
    saved="hf-5",
    hub=hub.inside(hub.DENSE + hub.QKV_BIAS + hub.PROJ_BIAS + hub.QK_NORMS + hub.ROUTER) + vision.QWEN3 + vision.DEEPSTACK + """
        model.language_model.layers.{i}.mlp.experts.gate_up_proj : e h ((1 + 1) m)
        model.language_model.layers.{i}.mlp.experts.down_proj : e m h
    """,
    dialects={
        "megatron": megatron.inside(megatron.DENSE + megatron.QKV_BIAS + megatron.PROJ_BIAS + megatron.QK_NORMS + megatron.ROUTER)
                    + vision.MEGATRON_QWEN3 + vision.MEGATRON_DEEPSTACK + """
            language_model.decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight : ((1 + 1) m) h
                = model.language_model.layers.{i}.mlp.experts.gate_up_proj : e h ((1 + 1) m)
            language_model.decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight : h m
                = model.language_model.layers.{i}.mlp.experts.down_proj : e m h
        """,
        "megatron-swift": Variant("megatron", over=vision.SWIFT_QWEN3 + vision.SWIFT_DEEPSTACK),
        "hf-5": Variant("hf", over="""
            model.language_model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) m) h = : e h ((1 + 1) m)
            model.language_model.layers.{i}.mlp.experts.down_proj : e h m = : e m h
        """),
        "hf-split": Variant("hf", over="""
            model.language_model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : m h
                = model.language_model.layers.{i}.mlp.experts.gate_up_proj : e h ((1 + 1) m)
            model.language_model.layers.{i}.mlp.experts.{e}.down_proj.weight : h m
                = model.language_model.layers.{i}.mlp.experts.down_proj : e m h
        """),
    },
    tiny={"text_config": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "mlp_only_layers": [0],
                          "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [2, 1, 1]}},
          "vision_config": {"depth": 2, "hidden_size": 12, "intermediate_size": 8, "num_heads": 2, "patch_size": 2,
                            "out_hidden_size": 18, "num_position_embeddings": 4, "deepstack_visual_indexes": [0, 1]}},
)  # fmt: skip
