"""Qwen2 and Qwen2.5. Paddle: PaddleFormers 1.2.0, transformers/qwen2; PaddleNLP fuses nothing."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, NLP_HEAD, PADDLE_FUSED, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.llamacpp import names as gguf
from ckpt_tool.systems.megatron import names as megatron
from ckpt_tool.systems.trainers import names as trainers

FAMILY = Family(
    name="qwen2",
    classes=(
        ModelClass(
            "qwen2", "Qwen2ForCausalLM", (*DECODER_FORMS, "window"),
            megatron={**GATED, "add_qkv_bias": True},
            defaults={**DEFAULTS, "max_position_embeddings": 32768, "use_sliding_window": False,
                      "max_window_layers": 28},
        ),
    ),
    axes=DECODER,
    hub=hub.DENSE + hub.QKV_BIAS + hub.INV_FREQ,
    dialects={
        "megatron": megatron.DENSE + megatron.QKV_BIAS,
        "gguf": gguf.DENSE + gguf.QKV_BIAS,
        "torchtune": trainers.TUNE + trainers.TUNE_HALVES,
        "paddle": Variant(apart=True, of=PADDLE_FUSED + """
            model.layers.{i}.<input|post_attention>_layernorm.weight : h
            model.layers.{i}.self_attn.rotary_emb.inv_freq : n = _ : n
            model.layers.{i}.mlp.gate_up_fused_proj.weight : h ((1 + 1) f) = ..<gate|up>_proj.weight : f h  # PaddleNLP
        """),
        "paddle-hf": Variant("paddle", like_hub=True),
        "paddle-nlp": Variant("paddle", root="qwen2.", over=NLP_HEAD),
        **maxtext.both(maxtext.MODEL, maxtext.NORMS + maxtext.ATTENTION + maxtext.QKV_BIAS + maxtext.MLP),
    },
    tiny={"attention_bias": True},
)  # fmt: skip
