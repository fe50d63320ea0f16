"""Which layers look through a window, and which see all: what systems say of it, read.

    window_attn_skip_freq = 6, 12 layers        every sixth sees all (Megatron-LM)
    window_attn_skip_freq = [1, 0, 1, 0]        one by one (Megatron-LM; true and false in Megatron-Bridge)
    interleaved_attn_pattern = [5, 1]           of each six the last (Megatron-Bridge's Gemma 3 and 4 with experts)
    layer_types = ["sliding_attention", ...]    the hub's

Sources: megatron-core 0.19.2 `transformer/utils.py` (`is_layer_window_attention`); megatron-bridge 0.6.2
`models/gemma/gemma3_provider.py` (`_is_local_attn_layer`), `models/gemma/gemma4_bridge.py`; transformers 5.23
`configuration_utils.py` (`layer_type_validation`). Cost: none. What it does not do: how wide the window is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.bounds import LEAST

# of `layer_types`
WINDOWED = "sliding_attention"
WHOLE = "full_attention"


def window_pattern(freq: Any, layers: int) -> list[bool]:
    """Which layers look through the window, as `is_layer_window_attention` reads the argument."""
    if isinstance(freq, list):
        return [bool(is_windowed) for is_windowed in freq]
    layers = min(layers, LEAST)
    return [freq is None or bool((i + 1) % freq) for i in range(layers)] if freq != 0 else [True] * layers


def stated_windows(args: Mapping[str, Any]) -> list[bool]:
    """The same of all that arguments, or a provider's fields, say; [] where they say nothing of it.

    >>> stated_windows({"num_layers": 4, "interleaved_attn_pattern": [1, 1]})
    [True, False, True, False]
    """
    layers, freq, turns = (args.get(key) for key in ("num_layers", "window_attn_skip_freq", "interleaved_attn_pattern"))
    if isinstance(turns, list | tuple) and len(turns) == 2 and all(type(n) is int and 0 <= n < LEAST for n in turns):
        freq = sum(turns)
    if isinstance(freq, list):
        return window_pattern([window not in (0, False, WHOLE) for window in freq], 0)
    return window_pattern(freq, layers) if type(layers) is int and layers > 0 and type(freq) is int and freq > 0 else []


def hub_windows(config: Mapping[str, Any]) -> list[bool]:
    """The same of a config.json, of its language model's part where it has one; [] where it says nothing of it.

    >>> hub_windows({"text_config": {"layer_types": ["sliding_attention", "full_attention"]}})
    [True, False]
    """
    part = config.get("text_config")
    kinds = (part if isinstance(part, Mapping) else config).get("layer_types")
    return [kind == WINDOWED for kind in kinds] if isinstance(kinds, list) else []
