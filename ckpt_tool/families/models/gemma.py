"""Gemma, the first: Llama's names, norms that multiply by 1 + weight, a tied head. PaddleFormers 1.2.0 has none.

Megatron: plain layers with --apply-layernorm-1p (Megatron-Bridge, models/gemma/gemma_bridge.py); see gemma2 on the norms.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import GEMMA, ModelClass
from ckpt_tool.systems.jax import gemma_names as gemma_library
from ckpt_tool.systems.llamacpp import names as gguf
from ckpt_tool.systems.megatron import names as megatron
from ckpt_tool.systems.trainers import names as trainers

FAMILY = Family(
    name="gemma",
    classes=(
        ModelClass(
            "gemma", "GemmaForCausalLM", ("sizes", "heads", "rope", "tied", "gated_gelu"),
            keys={"hidden_activation": "hidden_act"},
            megatron=GEMMA,
            unsayable={"attention_bias": False},
            defaults={"rms_norm_eps": 1e-06, "rope_theta": 10000.0, "tie_word_embeddings": True,
                      "initializer_range": 0.02, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
                      "head_dim": 256, "num_key_value_heads": 16},
        ),
    ),
    axes={**DECODER, "c": "d // 2"}, centred=True,
    hub=hub.TIED + hub.NORMS + hub.ATTENTION + hub.MLP + hub.QKV_BIAS + hub.PROJ_BIAS + hub.INV_FREQ,
    dialects={
        "megatron": megatron.TIED + megatron.NORMS + megatron.ATTENTION + megatron.QKV_BIAS + megatron.PROJ_BIAS + megatron.MLP,
        "gguf": gguf.GEMMA,
        "torchtune": trainers.TUNE + trainers.TUNE_ROTARY,
        "gemma": gemma_library.GEMMA,
    },
)  # fmt: skip
