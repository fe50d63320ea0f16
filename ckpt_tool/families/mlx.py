"""MLX: the names that mlx-lm gives to a model's tensors where they differ from the hub's, as texts of the families.

    dialects={"mlx": Variant("hf", over=mlx.EXPERTS)}      # Qwen3-MoE: all else is as on the hub

mlx-lm stacks a layer's experts, one tensor a projection, and has kv_b of latent attention as two, the keys' half turned
(the form of llama.cpp). Models without either have the hub's names and no dialect. Read alone: mlx-lm takes the hub's
files as they are, and brings them into this form itself.

Source: mlx-lm 0.32.2 `models/{qwen2_moe,qwen3_moe,mixtral,olmoe,phimoe,glm4_moe,dots1,deepseek_v3}.py` (`sanitize`).
"""

from __future__ import annotations

EXPERTS = """
    model.layers.{i}.mlp.switch_mlp.<gate|up|down>_proj.weight : e m h, e m h, e h m
        = model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : m h, m h, h m
"""
DOTS_EXPERTS = EXPERTS.replace("switch_mlp", "experts")
MIXTRAL_EXPERTS = """
    model.layers.{i}.block_sparse_moe.switch_mlp.<gate|up|down>_proj.weight : e f h, e f h, e h f
        = model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3|w2>.weight : f h, f h, h f
"""
LATENT = """
    model.layers.{i}.self_attn.embed_q.weight : k l y ; model.layers.{i}.self_attn.unembed_out.weight : k z l
        = model.layers.{i}.self_attn.kv_b_proj.weight : (k (y + z)) l
"""
