"""RNG states of Megatron's ranks: their names in a catalog's extras, and their tensors in files.

    (stage 0, tensor rank 1) of (2, 2)  ->  extras["rng_state"]["mp_rank_01_000"] = [{"torch_rng_state": bytes, ...}]

In the extras every format of Megatron names a rank's states as a legacy checkpoint names its folder, and holds them as
bytes; files have uint8 tensors of 5,056 elements. Source: NVIDIA/Megatron-LM `training/checkpointing.py`
(`get_rng_state`). What it does not do: give a rank's state to another rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.target import WantedTensor
from ckpt_tool.core.tensor import EMA, EXTRAS, MODEL

_RNG_BYTES = ("torch_rng_state", "cuda_rng_state", "rng_tracker_states")
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_dp(\d{3,}))?")
Value = Callable[[Sequence[int], DType, bytes], Any]  # makes a tensor from shape, dtype and bytes


def can_resume(tensors: Iterable[WantedTensor]) -> bool:
    """Return whether the tensors include states of an optimizer, so that a job can resume from them."""
    return any(tensor.key.state not in (MODEL, EMA, EXTRAS) for tensor in tensors)


def note_of_missing(why: str) -> str:
    """Return the note for an output without RNG states; Megatron looks for them unless started with --no-load-rng."""
    return f"RNG states are not written: {why}; start Megatron with --no-load-rng, it draws new ones"


OTHER_RANKS = "they belong to ranks of another layout"
NO_STATES = "the source has none"


def rank_name(at: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Return the name of a rank's RNG state: the name of its folder in a legacy checkpoint.

    Args:
        at: (pp, tp) -> `mp_rank_01_000`; (pp, tp, data rank), as core 0.16 with EP > 1 has it, appends `_dp002`.
        shape: the numbers of ranks in the same order; without pipeline stages the name has no stage.
    """
    if len(at) not in (2, 3):
        return ".".join(map(str, at))
    stage = f"_{at[0]:03d}" if shape[0] > 1 else ""
    return f"mp_rank_{at[1]:02d}{stage}" + "".join(f"_dp{n:03d}" for n in at[2:])


def by_rank(states: Any, degrees: Mapping[str, int]) -> tuple[tuple[int, ...], dict[tuple[int, ...], Any]]:
    """Return (numbers of ranks, RNG states by rank), the inverse of `rank_name`.

    A rank is (stage, tensor rank) or, if a name shows it, (stage, tensor rank, data rank). ((0,), {}) if a name does
    not fit these degrees.
    """
    pp = degrees["pp"]
    tp = degrees["tp"]
    data = degrees["dp"] * degrees["cp"]
    out: dict[tuple[int, ...], Any] = {}
    by_data = False
    for name, value in states.items() if isinstance(states, dict) else ():
        found = _RANK.fullmatch(str(name))
        # A name has a stage exactly if there are several: otherwise it belongs to another layout.
        if found is None or (found[2] is None) != (pp == 1):
            return (0,), {}
        by_data |= found[3] is not None
        data_rank = (int(found[3]),) if found[3] else ()
        rank = (int(found[2] or 0), int(found[1]), *data_rank)
        out[rank] = value
    return ((pp, tp, data) if by_data else (pp, tp)), out


def tensors_of_rng(value: Any, make: Value, *, inside: bool = False) -> Any:
    """Return an RNG state with its bytes as uint8 tensors again, made by `make`.

    inside: whether `value` is part of an entry whose bytes are known to be tensors; other bytes stay bytes.
    """
    if isinstance(value, Mapping):
        return {key: tensors_of_rng(v, make, inside=inside or key in _RNG_BYTES) for key, v in value.items()}
    if isinstance(value, list | tuple):
        parts = [tensors_of_rng(item, make, inside=inside) for item in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return make((len(value),), DTYPES["U8"], value) if inside and isinstance(value, bytes) else value
