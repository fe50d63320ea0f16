"""Llama 1 to 3, Mistral and the text of Ministral 3. Paddle: PaddleFormers 1.2.0 and PaddleNLP 3.0.0b4, transformers/llama/modeling.py."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, NLP_HEAD, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.llamacpp import names as gguf
from ckpt_tool.systems.megatron import names as megatron
from ckpt_tool.systems.meta import names as meta
from ckpt_tool.systems.trainers import names as trainers

FAMILY = Family(
    name="llama",
    classes=(
        ModelClass(
            "llama", "LlamaForCausalLM", (*DECODER_FORMS, "biases"),
            megatron=GATED,
            defaults={**DEFAULTS, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
        ),
        ModelClass(
            "mistral", "MistralForCausalLM", (*DECODER_FORMS, "window"),
            megatron=GATED,
            defaults={**DEFAULTS, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        ),
        ModelClass(
            "ministral3", "Ministral3ForCausalLM", (*DECODER_FORMS, "window"),
            megatron=GATED,
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "max_position_embeddings": 262144, "head_dim": 128,
                      "num_key_value_heads": 8, "sliding_window": None,
                      "rope_scaling": {"rope_type": "yarn", "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                       "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16384}},
        ),
    ),
    axes={**DECODER, "c": "d // 2"},
    hub=hub.DENSE + hub.BIASES + hub.INV_FREQ,
    dialects={
        "megatron": megatron.DENSE + megatron.BIASES,
        "meta": meta.MODEL + meta.MLP,
        "torchtune": trainers.TUNE + trainers.TUNE_ROTARY,
        "olmo-core": trainers.OLMO_MODEL + trainers.OLMO_LLAMA_NORMS + trainers.OLMO_MLP,
        "gguf": gguf.MODEL + gguf.ROPE_FREQS + gguf.NORMS + gguf.ROTARY + gguf.ROTARY_BIAS + gguf.PROJ_BIAS + gguf.MLP + gguf.MLP_BIASES,
        "paddle": """
            [model.embed_tokens|lm_head].weight : v h
            model.norm.weight : h
            model.layers.{i}.<input|post_attention>_layernorm.weight : h
            model.layers.{i}.self_attn.<q|k|v>_proj.weight : h (g r d), h (g d), h (g d) = : (g r d) h, (g d) h, (g d) h
            model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
            model.layers.{i}.self_attn.o_proj.weight : (g r d) h = : h (g r d)
            model.layers.{i}.self_attn.rotary_emb.inv_freq : n = _ : n
            model.layers.{i}.mlp.<gate|up|down>_proj.weight : h f, h f, f h = : f h, f h, h f
            model.layers.{i}.mlp.<gate|up>_proj.bias : f
            model.layers.{i}.<self_attn.o_proj|mlp.down_proj>.bias : h
            # fuse_attention_qkv, fuse_attention_ffn
            model.layers.{i}.self_attn.qkv_proj.weight : h (g (r + 1 + 1) d)
                = ..<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
            model.layers.{i}.mlp.gate_up_fused_proj.weight : h ((1 + 1) f) = ..<gate|up>_proj.weight : f h
        """,
        "paddle-nlp": Variant("paddle", root="llama.", over=NLP_HEAD),
        **maxtext.both(maxtext.MODEL, maxtext.NORMS + maxtext.LLAMA + maxtext.MLP),
    },
)  # fmt: skip
