"""Towers that Megatron has layers of its own for, as texts that the tables of models that see are put together of. A
tower that a system keeps under its own names is one line of a family's table instead, `visual.**`.

    hub=hub.inside(...) + vision.QWEN3 + vision.DEEPSTACK
    dialects={"megatron": megatron.inside(...) + vision.MEGATRON_QWEN3 + vision.MEGATRON_DEEPSTACK}
    axes={**DECODER, **vision.AXES}

The hub's `attn.qkv` is [q | k | v], Megatron's `linear_qkv` goes head by head. Norms have the local spec's names, as all
of dialect `megatron`, though the layers are always Transformer Engine's. Axes: vn blocks, vh the tower's width, va heads,
vd a head's width, vf its MLP, vo positions, vc channels, vt frames, vp and vq a patch; vm what a merger joins, vw the
same again (a square), vl the language model's width, vj mergers of the deep stack.

Sources: transformers 5.23 `models/qwen3_vl/modeling_qwen3_vl.py`; Megatron-Bridge 0.6.2 `models/qwen_vl/qwen3_vl_bridge.py`,
`models/qwen_vl/qwen35_vl_bridge.py`, `models/conversion/param_mapping.py` (`ConcatenatedQKVMapping`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

AXES: Mapping[str, str] = {
    "vn": "vision_config.depth",
    "vh": "vision_config.hidden_size",
    "va": "vision_config.num_heads",
    "vd": "vision_config.hidden_size // vision_config.num_heads",
    "vf": "vision_config.intermediate_size",
}
QWEN3 = """
    model.visual.patch_embed.proj.<weight|bias> : vh vc vt vp vq, vh
    model.visual.pos_embed.weight : vo vh
    model.visual.blocks.{vn}.[norm1|norm2].<weight|bias> : vh
    model.visual.blocks.{vn}.attn.qkv.<weight|bias> : ((1 + 1 + 1) va vd) vh, ((1 + 1 + 1) va vd)
    model.visual.blocks.{vn}.attn.proj.<weight|bias> : vh (va vd), vh
    model.visual.blocks.{vn}.mlp.<linear_fc1|linear_fc2>.weight : vf vh, vh vf
    model.visual.blocks.{vn}.mlp.<linear_fc1|linear_fc2>.bias : vf, vh
    model.visual.merger.norm.<weight|bias> : vh
    model.visual.merger.<linear_fc1|linear_fc2>.weight : vm vw, vl vm
    model.visual.merger.<linear_fc1|linear_fc2>.bias : vm, vl
"""
DEEPSTACK = """
    model.visual.deepstack_merger_list.{vj}.norm.<weight|bias> : vm
    model.visual.deepstack_merger_list.{vj}.<linear_fc1|linear_fc2>.weight : vm vw, vl vm
    model.visual.deepstack_merger_list.{vj}.<linear_fc1|linear_fc2>.bias : vm, vl
"""
MEGATRON_QWEN3 = """
    vision_model.patch_embed.proj.<weight|bias> : vh vc vt vp vq, vh
        = model.visual.patch_embed.proj.<weight|bias> : vh vc vt vp vq, vh
    vision_model.pos_embed.weight : vo vh = model.visual.pos_embed.weight : vo vh
    vision_model.decoder.layers.{vn}.input_layernorm.<weight|bias> : vh = model.visual.blocks.{vn}.norm1.<weight|bias> : vh
    vision_model.decoder.layers.{vn}.pre_mlp_layernorm.<weight|bias> : vh = model.visual.blocks.{vn}.norm2.<weight|bias> : vh
    vision_model.decoder.layers.{vn}.self_attention.linear_qkv.weight : (va (1 + 1 + 1) vd) vh
        = model.visual.blocks.{vn}.attn.qkv.weight : ((1 + 1 + 1) va vd) vh
    vision_model.decoder.layers.{vn}.self_attention.linear_qkv.bias : (va (1 + 1 + 1) vd)
        = model.visual.blocks.{vn}.attn.qkv.bias : ((1 + 1 + 1) va vd)
    vision_model.decoder.layers.{vn}.self_attention.linear_proj.<weight|bias> : vh (va vd), vh
        = model.visual.blocks.{vn}.attn.proj.<weight|bias> : vh (va vd), vh
    vision_model.decoder.layers.{vn}.mlp.<linear_fc1|linear_fc2>.weight : vf vh, vh vf
        = model.visual.blocks.{vn}.mlp.<linear_fc1|linear_fc2>.weight : vf vh, vh vf
    vision_model.decoder.layers.{vn}.mlp.<linear_fc1|linear_fc2>.bias : vf, vh
        = model.visual.blocks.{vn}.mlp.<linear_fc1|linear_fc2>.bias : vf, vh
    vision_model.merger.patch_norm.<weight|bias> : vh = model.visual.merger.norm.<weight|bias> : vh
    vision_model.merger.<linear_fc1|linear_fc2>.weight : vm vw, vl vm
        = model.visual.merger.<linear_fc1|linear_fc2>.weight : vm vw, vl vm
    vision_model.merger.<linear_fc1|linear_fc2>.bias : vm, vl = model.visual.merger.<linear_fc1|linear_fc2>.bias : vm, vl
"""
MEGATRON_DEEPSTACK = """
    vision_model.decoder.deepstack_merger_list.{vj}.patch_norm.<weight|bias> : vm
        = model.visual.deepstack_merger_list.{vj}.norm.<weight|bias> : vm
    vision_model.decoder.deepstack_merger_list.{vj}.<linear_fc1|linear_fc2>.weight : vm vw, vl vm
        = model.visual.deepstack_merger_list.{vj}.<linear_fc1|linear_fc2>.weight : vm vw, vl vm
    vision_model.decoder.deepstack_merger_list.{vj}.<linear_fc1|linear_fc2>.bias : vm, vl
        = model.visual.deepstack_merger_list.{vj}.<linear_fc1|linear_fc2>.bias : vm, vl
"""
# mcore-bridge 1.6.5 keeps the hub's own module in its `visual` (model/mm_gpts/qwen3_vl.py)
_KEPT = r"model\.visual\.(\S+)( : .*)", r"visual.visual.\1\2 = model.visual.\1\2"
SWIFT_QWEN3, SWIFT_DEEPSTACK = re.sub(*_KEPT, QWEN3), re.sub(*_KEPT, DEEPSTACK)
