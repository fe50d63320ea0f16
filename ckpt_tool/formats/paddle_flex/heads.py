"""Heads that nobody states: how flex ranks part keys and values without a config.

Paddle cuts k_proj and v_proj where tensor ranks divide the number of key and value heads, and keeps them whole otherwise. A
flex checkpoint records the boxes of every shard and its loader goes by those alone, so either way is right; only files of
ranks (`paddle`) need to know. Without a config they are cut where their width divides, and a note says so.
Source: PaddlePaddle 3.3.1 `distributed/flex_checkpoint/dcp/load_state_dict.py` (read items are matched by boxes).
"""

from __future__ import annotations

from dataclasses import replace

from ckpt_tool.core.target import Wanted
from ckpt_tool.formats.paddle.degrees import config_of
from ckpt_tool.formats.paddle.rules import text_config

_STATED = ("num_key_value_heads", "multi_query_group_num", "num_attention_heads", "n_head")
_KEYS = (".k_proj.weight", ".v_proj.weight", ".kv_b_proj.weight")


def with_heads(wanted: Wanted) -> tuple[Wanted, tuple[str, ...]]:
    """`wanted` with a number of key and value heads that its tensor ranks can take, and the note that says so."""
    tp = (wanted.options.get("degrees") or {}).get("tp", 1)
    config = config_of(wanted)
    facts = text_config(config)
    widths = {row.shape[-1] for row in wanted.tensors if row.key.name.endswith(_KEYS) and row.shape}
    if tp == 1 or not widths or any(type(facts.get(key)) is int for key in _STATED):
        return wanted, ()
    parted = all(width % tp == 0 for width in widths)
    options = {**wanted.options, "config": {**config, "num_key_value_heads": tp if parted else 1}}
    how = f"cut for --tp {tp}" if parted else "whole on every rank"
    note = f"keys and values are {how}: no config says how many heads they have, and Paddle's loader goes by the recorded boxes"
    return replace(wanted, options=options), (note,)
