"""RNG states of Megatron's ranks: under which names extras have them, and as which tensors files do.

    (stage 0, tensor rank 1) of (2, 2)  ->  extras["rng_state"]["mp_rank_01_000"] = [{"torch_rng_state": bytes, ...}]

Every format of Megatron's gives them under the name of the legacy checkpoint's folder, the states as bytes; files have
uint8 tensors of 5,056 elements. Source: NVIDIA/Megatron-LM `training/checkpointing.py` (`get_rng_state`). What it does
not do: give a rank's state to another.
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
Value = Callable[[Sequence[int], DType, bytes], Any]  # makes a tensor of known bytes


def can_resume(tensors: Iterable[WantedTensor]) -> bool:
    """Are there states of an optimizer, so that a job may go on with them?"""
    return any(tensor.key.state not in (MODEL, EMA, EXTRAS) for tensor in tensors)


def note_of_missing(why: str) -> str:
    """The note for an output without RNG states, which Megatron looks for unless it is started otherwise."""
    return f"RNG states are not written: {why}; start Megatron with --no-load-rng, it draws new ones"


OTHER_RANKS = "they belong to ranks of another layout"
NO_STATES = "the source has none"


def rank_name(at: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """The rank of an RNG state as a legacy checkpoint names its folder: (pp, tp) of (PP, TP) -> `mp_rank_01_000`; where
    a third number is the data rank (core 0.16 with EP > 1), with `_dp002` at its end."""
    if len(at) not in (2, 3):
        return ".".join(map(str, at))
    stage = f"_{at[0]:03d}" if shape[0] > 1 else ""
    return f"mp_rank_{at[1]:02d}{stage}" + "".join(f"_dp{n:03d}" for n in at[2:])


def by_rank(states: Any, degrees: Mapping[str, int]) -> tuple[tuple[int, ...], dict[tuple[int, ...], Any]]:
    """(shape, RNG states by stage, tensor rank and, where the names show it, data rank), from names of rank folders."""
    pp = degrees["pp"]
    tp = degrees["tp"]
    data = degrees["dp"] * degrees["cp"]
    out: dict[tuple[int, ...], Any] = {}
    by_data = False
    for name, value in states.items() if isinstance(states, dict) else ():
        found = _RANK.fullmatch(str(name))
        if found is None or (found[2] is None) != (pp == 1):
            return (0,), {}
        by_data |= found[3] is not None
        data_rank = (int(found[3]),) if found[3] else ()
        rank = (int(found[2] or 0), int(found[1]), *data_rank)
        out[rank] = value
    return ((pp, tp, data) if by_data else (pp, tp)), out


def tensors_of_rng(value: Any, make: Value, *, inside: bool = False) -> Any:
    """An RNG state with its bytes as the uint8 tensors that they were, made by `make`. inside: is `value` a part of one
    that is known to be such bytes?"""
    if isinstance(value, Mapping):
        return {key: tensors_of_rng(v, make, inside=inside or key in _RNG_BYTES) for key, v in value.items()}
    if isinstance(value, list | tuple):
        parts = [tensors_of_rng(item, make, inside=inside) for item in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return make((len(value),), DTYPES["U8"], value) if inside and isinstance(value, bytes) else value
