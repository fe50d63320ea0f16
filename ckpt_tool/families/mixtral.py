"""Mixtral. Paddle: PaddleNLP 3.0.0b4, transformers/mixtral/modeling.py; PaddleFormers has none."""

from ckpt_tool.families import megatron, meta
from ckpt_tool.families.base import DECODER, NLP_HEAD, Family, Variant

FAMILY = Family(
    name="mixtral", model_types=("mixtral",), architectures=("MixtralForCausalLM", "MixtralModel"),
    axes={
        **DECODER, "e": "num_local_experts", "c": "d // 2",
    },
    hub="""
        [model.embed_tokens|lm_head].weight : v h
        lm_head.weight ~ model.embed_tokens.weight if tie_word_embeddings?
        model.norm.weight : h
        model.layers.{i}.<input|post_attention>_layernorm.weight : h
        model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
        model.layers.{i}.self_attn.o_proj.weight : h (g r d)
        model.layers.{i}.self_attn.rotary_emb.inv_freq : n = _ : n
        model.layers.{i}.block_sparse_moe.gate.weight : e h
        model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3>.weight : f h
        model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight : h f
    """,
    dialects={
        "megatron": megatron.MODEL + megatron.NORMS + megatron.ATTENTION + """
            decoder.layers.{i}.mlp.router.weight : e h = model.layers.{i}.block_sparse_moe.gate.weight : e h
            decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight : ((1 + 1) f) h
                = model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3>.weight : f h
            decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight : h f
                = model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight : h f
        """,
        "meta": meta.MODEL + meta.EXPERTS,
        "hf-fused": Variant("hf", over="""
            model.layers.{i}.mlp.gate.weight : e h = model.layers.{i}.block_sparse_moe.gate.weight : e h
            model.layers.{i}.mlp.experts.gate_up_proj : e ((1 + 1) f) h
                = model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3>.weight : f h
            model.layers.{i}.mlp.experts.down_proj : e h f
                = model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight : h f
        """),
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
    },
)  # fmt: skip
