"""Names of trainers that have models of their own: torchtune and OLMo-core, as texts that the families' tables are put
together of.

    dialects={"torchtune": trainers.TUNE + trainers.TUNE_ROTARY}      # Llama, Mistral: rotations as Meta's files have them
    dialects={"torchtune": trainers.TUNE + trainers.TUNE_HALVES}      # Qwen 2 and 3: as the hub has them

A norm of torchtune's has a `scale`. Meta's order of rotated rows: `families.meta`. A tied head has no tensor there.

Sources: torchtune 0.6.1 `models/convert_weights.py` (`tune_to_hf`), `models/qwen2/_convert_weights.py`,
`models/qwen3/_convert_weights.py`; ai2-olmo-core 2.4.0 `nn/hf/convert.py`, and `nn/attention` for biases, which the
converter leaves out. What it does not do: Gemma, Phi, Llama 4 of torchtune; Llama, Gemma and experts of OLMo-core.
"""

from __future__ import annotations

TUNE = """
    tok_embeddings.weight : v h = model.embed_tokens.weight : v h
    output.weight : v h = lm_head.weight : v h
    norm.scale : h = model.norm.weight : h
    layers.{i}.attn.v_proj.weight : (g d) h = model.layers.{i}.self_attn.v_proj.weight : (g d) h
    layers.{i}.attn.output_proj.weight : h (g r d) = model.layers.{i}.self_attn.o_proj.weight : h (g r d)
    layers.{i}.<sa_norm|mlp_norm>.scale : h = model.layers.{i}.<input|post_attention>_layernorm.weight : h
    layers.{i}.mlp.<w1|w3|w2>.weight : f h, f h, h f = model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
"""
TUNE_ROTARY = """
    layers.{i}.attn.q_proj.weight : (g r c 2) h = model.layers.{i}.self_attn.q_proj.weight : (g r 2 c) h
    layers.{i}.attn.k_proj.weight : (g c 2) h = model.layers.{i}.self_attn.k_proj.weight : (g 2 c) h
"""
TUNE_HALVES = """
    layers.{i}.attn.<q|k>_proj.weight : (g r d) h, (g d) h
        = model.layers.{i}.self_attn.<q|k>_proj.weight : (g r d) h, (g d) h
    layers.{i}.attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
        = model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
"""
TUNE_QK_NORMS = """
    layers.{i}.attn.<q|k>_norm.scale : d = model.layers.{i}.self_attn.<q|k>_norm.weight : d
"""
OLMO = """
    embeddings.weight : v h = model.embed_tokens.weight : v h
    lm_head.w_out.weight : v h = lm_head.weight : v h
    lm_head.norm.weight : h = model.norm.weight : h
    blocks.{i}.attention.<w_q|w_k|w_v>.weight : (g r d) h, (g d) h, (g d) h
        = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
    blocks.{i}.attention.<w_q|w_k|w_v>.bias : (g r d), (g d), (g d)
        = model.layers.{i}.self_attn.<q|k|v>_proj.bias : (g r d), (g d), (g d)
    blocks.{i}.attention.w_out.<weight|bias> : h (g r d), h = model.layers.{i}.self_attn.o_proj.<weight|bias> : h (g r d), h
    blocks.{i}.attention.<q|k>_norm.weight : (g r d), (g d)
        = model.layers.{i}.self_attn.<q|k>_norm.weight : (g r d), (g d)
    blocks.{i}.<attention|feed_forward>_norm.weight : h
        = model.layers.{i}.<post_attention|post_feedforward>_layernorm.weight : h
    blocks.{i}.feed_forward.<w1|w3|w2>.weight : f h, f h, h f
        = model.layers.{i}.mlp.<gate|up|down>_proj.weight : f h, f h, h f
"""
