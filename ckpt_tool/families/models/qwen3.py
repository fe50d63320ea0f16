"""Qwen3, dense. Paddle: PaddleFormers 1.2.0, transformers/qwen3 (without paddlefleet). The layer of multi-token prediction that a
job may add: Megatron-Bridge 0.6.2, models/qwen/qwen3_bridge.py, with Qwen3-Next's names on the hub."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, PADDLE_FUSED, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.llamacpp import names as gguf
from ckpt_tool.systems.megatron import names as megatron
from ckpt_tool.systems.trainers import names as trainers

_LAYER = hub.NORMS + hub.ATTENTION + hub.QKV_BIAS + hub.PROJ_BIAS + hub.QK_NORMS + hub.MLP
_MEGATRON = (
    megatron.NORMS + megatron.ATTENTION + megatron.QKV_BIAS + megatron.PROJ_BIAS + megatron.QK_NORMS + megatron.MLP
)

FAMILY = Family(
    name="qwen3",
    classes=(
        ModelClass(
            "qwen3", "Qwen3ForCausalLM", (*DECODER_FORMS, "window"),
            megatron={**GATED, "qk_layernorm": True},
            unsayable={"attention_bias": False},
            defaults={**DEFAULTS, "max_position_embeddings": 32768, "head_dim": 128, "use_sliding_window": False,
                      "max_window_layers": 28},
        ),
    ),
    axes={**DECODER, "t": "1", "w": "2 * h"},
    hub=hub.MODEL + _LAYER + hub.QWEN_AHEAD + hub.ahead(_LAYER),
    dialects={
        "megatron": megatron.MODEL + _MEGATRON + megatron.QWEN_AHEAD + megatron.ahead(_MEGATRON),
        "gguf": gguf.DENSE + gguf.QKV_BIAS + gguf.PROJ_BIAS + gguf.QK_NORMS,
        "torchtune": trainers.TUNE + trainers.TUNE_HALVES + trainers.TUNE_QK_NORMS,
        "paddle": Variant(apart=True, of=PADDLE_FUSED + """
            model.layers.{i}.<input|post_attention>_layernorm.weight : h
            model.layers.{i}.self_attn.<q|k>_norm.weight : d
            model.layers.{i}.self_attn.o_proj.bias : h
        """),
        "paddle-hf": Variant("paddle", like_hub=True),
        **maxtext.both(maxtext.MODEL, maxtext.NORMS + maxtext.ATTENTION + maxtext.SOME_QKV_BIAS + maxtext.QK_NORMS + maxtext.MLP),
    },
)  # fmt: skip
