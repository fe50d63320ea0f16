"""What modules of Transformer Engine store in addition to their weights (`_extra_state`): nothing, a recipe, or FP8
scales.

    None, an empty uint8 tensor      no FP8, or a recipe without a state of its own (blocks, current scaling)
    pickle of a recipe and settings  a job makes them again from its arguments
    pickle with scale_fwd, ...       delayed scaling: scales and amax histories, which are stored nowhere else

The one idea: distinguish them by the words in the bytes, as Megatron does; nothing is unpickled. Since Transformer
Engine 2 the bytes are a uint8 tensor, before that an `io.BytesIO`.

torch_dist has one object a module (and expert), that of tensor rank 0. Its position is the layer's, so it is valid for
every layout and is copied under its key. Legacy files have one a rank: they are copied if the same ranks are written.

Source: NVIDIA/TransformerEngine d0067d0 `pytorch/module/base.py` (`get_extra_state`, `set_extra_state`),
NVIDIA/Megatron-LM d98e8a64 `training/checkpointing.py` (`_fp8_extra_state_is_persistent`), `core/transformer/utils.py`
(`make_sharded_object_for_checkpoint`: replicated over tensor and data ranks).
"""

from __future__ import annotations

from typing import Any

from ckpt_tool.core.extras import Opaque

NAME = "_extra_state"
EXTRA_STATES = "extra_states"  # key in a catalog's extras for the extra states that hold scales
LEFT = "extra states with FP8 scales and amax histories are left out, such as"
WITHOUT = "extra states hold no FP8 scales (a recipe at most): a job makes them again"
_BYTES_IO = "_io.BytesIO"
_MARKERS = (b"amax_history_fwd", b"scale_fwd", b"scale_bwd")


def is_extra_state(name: str) -> bool:
    """Return whether the name is that of a module's extra state."""
    return name == NAME or name.endswith(f".{NAME}")


def is_empty(value: Any) -> bool:
    """Return whether an extra state is empty. value: as in a catalog's extras, a uint8 tensor as bytes."""
    return value is None or value == b""


def holds_scales(value: Any) -> bool:
    """Return whether an extra state holds FP8 scales, which can't be made from the job's arguments.

    A value of an unknown type counts as one that does, so that it is never dropped silently.
    """
    raw = value.state[0] if _is_stream(value) else value
    return any(marker in raw for marker in _MARKERS) if isinstance(raw, bytes) else not is_empty(value)


def _is_stream(value: Any) -> bool:
    return (
        isinstance(value, Opaque) and value.name == _BYTES_IO and isinstance(value.state, tuple) and bool(value.state)
    )
