"""Phi-3, Phi-3.5 and Phi-4 (text): qkv_proj is [q; k; v] and gate_up_proj [gate; up] on the hub itself.

Paddle: PaddleFormers 1.2.0, transformers/phi3: the same, turned. Megatron-Bridge has none; plain Megatron-Core runs it.
"""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, Family
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.llamacpp import names as gguf
from ckpt_tool.systems.megatron import names as megatron
from ckpt_tool.systems.trainers import names as trainers

FAMILY = Family(
    name="phi3",
    classes=(
        ModelClass(  # Megatron's arguments equal Llama's: --family decides which of the two a job has
            "phi3", "Phi3ForCausalLM", (*DECODER_FORMS, "window"),
            megatron=GATED,
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "max_position_embeddings": 4096},
        ),
    ),
    axes=DECODER,
    hub=hub.MODEL + hub.NORMS + hub.FUSED_MLP + """
        model.layers.{i}.self_attn.qkv_proj.weight : (g r d + g d + g d) h
        model.layers.{i}.self_attn.o_proj.weight : h (g r d)
    """,
    dialects={
        "megatron": megatron.MODEL + megatron.NORMS + megatron.FUSED_MLP + """
            decoder.layers.{i}.self_attention.linear_qkv.weight : (g (r + 1 + 1) d) h
                = model.layers.{i}.self_attn.qkv_proj.weight : (g r d + g d + g d) h
            decoder.layers.{i}.self_attention.linear_proj.weight : h (g r d) = model.layers.{i}.self_attn.o_proj.weight : h (g r d)
        """,
        "gguf": gguf.MODEL + gguf.NORMS + gguf.FUSED_ATTENTION + gguf.FUSED_MLP,
        "torchtune": trainers.TUNE_PHI,
        "paddle": """
            [model.embed_tokens|lm_head].weight : v h
            model.norm.weight : h
            model.layers.{i}.<input|post_attention>_layernorm.weight : h
            model.layers.{i}.self_attn.qkv_proj.weight : h (g r d + g d + g d) = : (g r d + g d + g d) h
            model.layers.{i}.self_attn.o_proj.weight : (g r d) h = : h (g r d)
            model.layers.{i}.mlp.gate_up_proj.weight : h ((1 + 1) f) = : ((1 + 1) f) h
            model.layers.{i}.mlp.down_proj.weight : f h = : h f
        """,
    },
    tiny={"pad_token_id": None},
)  # fmt: skip
