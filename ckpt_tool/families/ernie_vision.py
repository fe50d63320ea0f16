"""ERNIE's eyes: the rules of tower and resampler, as texts that the table of ERNIE 4.5 VL is put together of.

    RESAMPLER, TOWER                hub and Paddle alike but for matrices, which Paddle has (inputs, outputs): *_TURNED
    TOWER_OUTSIDE                   the tower at the root, as baidu's -PT files have it
    KEPT, KEPT_IN_MEMORY            the hub's own modules in Megatron-Bridge 0.6.2, models/ernie_vl/ernie45_vl_bridge.py, and those of
                                    transformers 5 in memory: parts of the resampler's sequences have names there

Axes: y the tower's hidden size, u its fused query, key and value, z its MLP, p a patch; sa a window of patches, sb the same
again (a square), ta a window through time. `{k}` of the resampler counts the parts of a sequence: 0 and 2 are matrices, 1 an
activation, 3 a norm. Sources: transformers 5.23 `models/ernie4_5_vl_moe/modeling_ernie4_5_vl_moe.py`, `conversion_mapping.py`;
PaddleFormers 1.2.0 `transformers/ernie4_5_moe_vl/model/modeling_moe_vl.py` `_gen_aoa_config`.
"""

from __future__ import annotations

import re

_SEQUENCES = """
    model.resampler_model.[spatial|temporal]_linear.{k}.weight : sa if k == 3
    model.resampler_model.[spatial|temporal]_linear.{k}.bias : sa
    model.resampler_model.<mlp.bias|after_norm.weight> : h
"""
RESAMPLER = (
    _SEQUENCES
    + """
    model.resampler_model.spatial_linear.{k}.weight : sa sb if k < 3
    model.resampler_model.temporal_linear.{k}.weight : sa ta if k == 0
    model.resampler_model.temporal_linear.{k}.weight : sa sb if k == 2
    model.resampler_model.mlp.weight : h sa
"""
)
RESAMPLER_TURNED = (
    _SEQUENCES
    + """
    model.resampler_model.spatial_linear.{k}.weight : sb sa = : sa sb if k < 3
    model.resampler_model.temporal_linear.{k}.weight : ta sa = : sa ta if k == 0
    model.resampler_model.temporal_linear.{k}.weight : sb sa = : sa sb if k == 2
    model.resampler_model.mlp.weight : sa h = : h sa
"""
)
TOWER = """
    model.vision_model.patch_embed.proj.weight : y p
    model.vision_model.blocks.{b}.attn.<qkv|proj>.weight : u y, y w
    model.vision_model.blocks.{b}.mlp.<fc1|fc2>.weight : z y, y z
    model.vision_model.blocks.{b}.<attn.qkv|attn.proj|mlp.fc1|mlp.fc2>.bias : u, y, z, y
    model.vision_model.[ln|blocks.{b}.norm1|blocks.{b}.norm2].<weight|bias> : y
"""
_MATRICES = """
    vision_model.patch_embed.proj.weight : p y = model.vision_model.patch_embed.proj.weight : y p
    vision_model.blocks.{b}.attn.<qkv|proj>.weight : y u, w y = model.vision_model.blocks.{b}.attn.<qkv|proj>.weight : u y, y w
    vision_model.blocks.{b}.mlp.<fc1|fc2>.weight : y z, z y = model.vision_model.blocks.{b}.mlp.<fc1|fc2>.weight : z y, y z
"""
_VECTORS = """
    vision_model.blocks.{b}.<attn.qkv|attn.proj|mlp.fc1|mlp.fc2>.bias : u, y, z, y
        = model.vision_model.blocks.{b}.<attn.qkv|attn.proj|mlp.fc1|mlp.fc2>.bias : u, y, z, y
    vision_model.[ln|blocks.{b}.norm1|blocks.{b}.norm2].<weight|bias> : y
        = model.vision_model.[ln|blocks.{b}.norm1|blocks.{b}.norm2].<weight|bias> : y
"""
TOWER_TURNED = _MATRICES + _VECTORS
TOWER_OUTSIDE = (
    """
    vision_model.patch_embed.proj.weight : y p = model.vision_model.patch_embed.proj.weight : y p
    vision_model.blocks.{b}.attn.<qkv|proj>.weight : u y, y w = model.vision_model.blocks.{b}.attn.<qkv|proj>.weight : u y, y w
    vision_model.blocks.{b}.mlp.<fc1|fc2>.weight : z y, y z = model.vision_model.blocks.{b}.mlp.<fc1|fc2>.weight : z y, y z
"""
    + _VECTORS
)
KEPT = """
    resampler_model.[spatial|temporal]_linear.fc1.bias : sa = model.resampler_model.[spatial|temporal]_linear.{0}.bias : sa
    resampler_model.[spatial|temporal]_linear.fc2.<weight|bias> : sa sb, sa
        = model.resampler_model.[spatial|temporal]_linear.{2}.<weight|bias> : sa sb, sa
    resampler_model.[spatial|temporal]_linear.ln.<weight|bias> : sa
        = model.resampler_model.[spatial|temporal]_linear.{3}.<weight|bias> : sa
    resampler_model.spatial_linear.fc1.weight : sa sb = model.resampler_model.spatial_linear.{0}.weight : sa sb
    resampler_model.temporal_linear.fc1.weight : sa ta = model.resampler_model.temporal_linear.{0}.weight : sa ta
    resampler_model.<mlp.weight|mlp.bias|after_norm.weight> : h sa, h, h
        = model.resampler_model.<mlp.weight|mlp.bias|after_norm.weight> : h sa, h, h
""" + re.sub(r"(?m)^(\s*)vision_model\.", r"\1vision_tower.", TOWER_OUTSIDE)
KEPT_IN_MEMORY = re.sub(r"(?m)^(\s*)(vision_tower|resampler_model)\.", r"\1model.\2.", KEPT)
# ERNIE's releases named -Paddle: [Q | K | V], [gate | up], the root `ernie.`
FUSED = """
    ernie.layers.{i}.self_attn.qkv_proj.weight : h (g r d + g d + g d)
        = model.layers.{i}.self_attn.<q|k|v>_proj.weight : (g r d) h, (g d) h, (g d) h
    ernie.layers.{i}.mlp.up_gate_proj.weight : h ((1 + 1) f) = model.layers.{i}.mlp.<gate|up>_proj.weight : f h
    ernie.layers.{i}.mlp.shared_experts.up_gate_proj.weight : h ((1 + 1) s)
        = model.layers.{i}.mlp.shared_experts.<gate|up>_proj.weight : s h
    ernie.layers.{i}.mlp.experts.{e}.up_gate_proj.weight : h ((1 + 1) m)
        = model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : m h if e < x
    ernie.layers.{i}.mlp.experts.{e}.up_gate_proj.weight : h ((1 + 1) n)
        = model.layers.{i}.mlp.experts.{e}.<gate|up>_proj.weight : n h if e >= x
"""
