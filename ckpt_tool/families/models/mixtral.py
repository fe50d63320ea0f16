"""Mixtral. Paddle: PaddleNLP 3.0.0b4, transformers/mixtral/modeling.py; PaddleFormers has none."""

from ckpt_tool.families import hub_names as hub
from ckpt_tool.families.base import DECODER, FUSED_MIXTRAL_EXPERTS, NLP_HEAD, Family, Variant
from ckpt_tool.families.model_class import DECODER_FORMS, DEFAULTS, GATED, ModelClass
from ckpt_tool.systems.hub import mlx_names as mlx
from ckpt_tool.systems.jax import maxtext_names as maxtext
from ckpt_tool.systems.llamacpp import names as gguf
from ckpt_tool.systems.megatron import names as megatron
from ckpt_tool.systems.meta import names as meta

FAMILY = Family(
    name="mixtral",
    classes=(
        ModelClass(
            "mixtral", "MixtralForCausalLM", (*DECODER_FORMS, "experts", "all_sparse", "window"),
            keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
            megatron=GATED,
            defaults={**DEFAULTS, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "max_position_embeddings": 131072,
                      "num_experts": 8, "num_key_value_heads": 8, "num_experts_per_tok": 2,
                      "router_aux_loss_coef": 0.001},
        ),
    ),
    axes={
        **DECODER, "e": "num_local_experts", "c": "d // 2",
    },
    hub=hub.MODEL + hub.NORMS + hub.ATTENTION + hub.INV_FREQ + hub.MIXTRAL_EXPERTS,
    dialects={
        "megatron": megatron.MODEL + megatron.NORMS + megatron.ATTENTION + megatron.MIXTRAL_EXPERTS,
        "meta": meta.MODEL + meta.EXPERTS,
        "gguf": gguf.MODEL + gguf.NORMS + gguf.ROTARY + gguf.MIXTRAL_EXPERTS,
        "hf-fused": Variant("hf", over=FUSED_MIXTRAL_EXPERTS),
        "mlx": Variant("hf", over=mlx.MIXTRAL_EXPERTS),
        "paddle": Variant(of="""
            [model.embed_tokens|lm_head].weight : v h
            model.norm.weight : h
            model.layers.{i}.<input|post_attention>_layernorm.weight : h
            model.layers.{i}.self_attn.<q|k|v>_proj.weight : h (g r d), h (g d), h (g d) = : (g r d) h, (g d) h, (g d) h
            model.layers.{i}.self_attn.o_proj.weight : (g r d) h = : h (g r d)
            model.layers.{i}.self_attn.rotary_emb.inv_freq : n = _ : n
            model.layers.{i}.block_sparse_moe.gate.weight : h e = : e h
            model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3>.weight : h f = : f h
            model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight : f h = : h f
        """, root="mixtral.", over=NLP_HEAD),
        **maxtext.both(maxtext.MODEL, maxtext.NORMS + maxtext.MIXTRAL),
    },
    tiny={"num_local_experts": 3},
)  # fmt: skip
