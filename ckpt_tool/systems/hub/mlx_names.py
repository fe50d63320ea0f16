"""MLX: names of tensors in which mlx-lm differs from the hub, as rules for the families' tables.

    dialects={"mlx": Variant("hf", over=mlx.EXPERTS)}      # Qwen3-MoE: all else is as on the hub

mlx-lm stacks a layer's experts, one tensor for each projection, splits kv_b of latent attention into two tensors, that
of the keys transposed (as llama.cpp does), and transposes kernels of convolutions. Models of the types in
`AS_ON_THE_HUB` keep the hub's names and values. Any other model that MLX saved, of a family without these rules, is
refused: names alone do not show a transposed kernel, or norms to which 1 was added. Read only: mlx-lm loads the hub's
files as they are, and converts them itself.

Source: mlx-lm 0.32.2 `models/*.py` (`sanitize`, and the modules' names).
"""

from __future__ import annotations

# Types of models whose `sanitize` only leaves tensors out (rotary frequencies, a tied head, layers of MTP).
AS_ON_THE_HUB = frozenset(
    """
    llama mistral ministral3 qwen2 qwen3 gemma gemma2 gemma3_text cohere cohere2 ernie4_5 exaone4 glm glm4 granite
    mimo nemotron olmo2 olmo3 phi3 seed_oss smollm3 starcoder2
    """.split()
)
# Parts of names that only MLX has: experts of a layer in one tensor, the halves of kv_b
WORDS = (".switch_mlp.", ".embed_q.", ".unembed_out.")
# Kernels of convolutions over one channel each, which the hub stores (channels, 1, width), MLX (channels, width, 1)
KERNELS = ("conv1d.weight", ".conv.conv.weight")
# Models for which no rules can exist: type of model -> what mlx-lm does to its values
NOT_UNDONE = {
    "falcon_h1": "mlx-lm multiplies the model's multipliers into its weights and rounds them, and no conversion can undo"
    " that bit for bit",
}
EXPERTS = """
    model.layers.{i}.mlp.switch_mlp.<gate|up|down>_proj.weight : e m h, e m h, e h m
        = model.layers.{i}.mlp.experts.{e}.<gate|up|down>_proj.weight : m h, m h, h m
"""
# The dots models: mlx-lm names the stacked experts `experts`
DOTS_EXPERTS = EXPERTS.replace("switch_mlp", "experts")
MIXTRAL_EXPERTS = """
    model.layers.{i}.block_sparse_moe.switch_mlp.<gate|up|down>_proj.weight : e f h, e f h, e h f
        = model.layers.{i}.block_sparse_moe.experts.{e}.<w1|w3|w2>.weight : f h, f h, h f
"""
LATENT = """
    model.layers.{i}.self_attn.embed_q.weight : heads l nope ; model.layers.{i}.self_attn.unembed_out.weight : heads vd l
        = model.layers.{i}.self_attn.kv_b_proj.weight : (heads (nope + vd)) l
"""
# The config's keys that give the sizes of the axes above
LATENT_AXES = {"heads": "num_attention_heads", "nope": "qk_nope_head_dim", "vd": "v_head_dim"}
# The hub interleaves gate and up in one tensor, and stores it transposed
GPT_OSS_EXPERTS = """
    model.layers.{i}.mlp.experts.gate_proj.weight : e m h ; model.layers.{i}.mlp.experts.up_proj.weight : e m h
        = model.layers.{i}.mlp.experts.gate_up_proj : e h (m (1 + 1))
    model.layers.{i}.mlp.experts.gate_proj.bias : e m ; model.layers.{i}.mlp.experts.up_proj.bias : e m
        = model.layers.{i}.mlp.experts.gate_up_proj_bias : e (m (1 + 1))
    model.layers.{i}.mlp.experts.down_proj.<weight|bias> : e h m, e h
        = model.layers.{i}.mlp.experts.<down_proj|down_proj_bias> : e m h, e h
"""
NEMOTRON_EXPERTS = """
    backbone.layers.{i}.mixer.switch_mlp.<fc1|fc2>.weight : e m l, e l m
        = backbone.layers.{i}.mixer.experts.{e}.<up|down>_proj.weight : m l, l m
    backbone.layers.{i}.mixer.conv1d.<weight|bias> : (n p + t y + t y) k 1, (n p + t y + t y)
        = backbone.layers.{i}.mixer.conv1d.<weight|bias> : (n p + t y + t y) 1 k, (n p + t y + t y)
"""
# Norms that the hub centres at zero are centred at one, except that of the delta net; kernels are transposed
QWEN3_NEXT = (
    EXPERTS
    + """
    model.norm.weight : h = model.norm.weight : h * add(1)
    model.layers.{i}.<input|post_attention>_layernorm.weight : h
        = model.layers.{i}.<input|post_attention>_layernorm.weight : h * add(1)
    model.layers.{i}.self_attn.<q|k>_norm.weight : d = model.layers.{i}.self_attn.<q|k>_norm.weight : d * add(1)
    model.layers.{i}.linear_attn.conv1d.weight : (n k + n k + n p u) c 1
        = model.layers.{i}.linear_attn.conv1d.weight : (n k + n k + n p u) 1 c
"""
)
