"""The parameters of a Paddle model, told from tensors of all states: shapes, dtypes, stages, experts, the tied pair.

    w [model] BF16 (8, 4), w [master], w [exp_avg], w [beta1_pow_acc] (1,)     Parameter("w", (8, 4), BF16, trained=True, ...)

The one idea: the wanted tensors are all there is to go by, so whatever the layout needs to know of a parameter is decided here.
Cost: a pass over the tensors. What it does not do: parts of ranks (`paddle.layout`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import bounded
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.target import WantedTensor
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL
from ckpt_tool.formats.paddle.rules import is_expert, text_config
from ckpt_tool.formats.paddle.stages import Items, Stages

_SCALARS = ("beta1_pow_acc", "beta2_pow_acc", "step")
Rows = Mapping[str, Mapping[str, WantedTensor]]  # name -> state -> tensor


class Parameter(NamedTuple):
    """A parameter or buffer of the model. dtype: what it is computed with. trained: has the optimizer a state of it? expert:
    the expert rank (or tensor rank, `Laid.by_tensor`) that alone has this routed expert, None where all have it. stages: all that
    hold it. alias: the tied parameter whose states are this one's too, None for others."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    trained: bool
    expert: int | None
    stages: tuple[int, ...]
    alias: str | None = None


def rows_of(tensors: Sequence[WantedTensor]) -> dict[str, dict[str, WantedTensor]]:
    """name -> state -> tensor, extras aside."""
    out: dict[str, dict[str, WantedTensor]] = {}
    for tensor in tensors:
        if tensor.key.state != EXTRAS:
            out.setdefault(tensor.key.name, {})[tensor.key.state] = tensor
    return out


def experts_in(names: Sequence[str]) -> int:
    """The number of experts that every layer with experts can be parted by: their greatest common number; 0 without any."""
    counts = _expert_counts(names).values()
    return gcd(*counts) if counts else 0


def expert_of(name: str) -> tuple[str, int | None]:
    """(what stands before the number, the expert's global number) of a routed expert's tensor; ("", None) of others."""
    if not is_expert(name):
        return "", None
    front, _, rest = name.rpartition("experts.")
    word = rest.partition(".")[0]
    return front, int(word) if word.isdecimal() and len(word) < 10 else None


def parameters_of(
    names: Sequence[str],
    rows: Rows,
    stages: Stages,
    config: Mapping[str, Any],
    statics: Mapping[str, str],
    holders: int,
) -> dict[str, Parameter]:
    """The parameters, in the order of `names`. statics: the source's own names. holders: ranks that experts are spread over."""
    pair = tied_pair(names, rows, stages.items, config, statics)
    local = {front: -(-count // holders) for front, count in _expert_counts(names).items()}
    trains = any(state not in (MODEL, EMA) for states in rows.values() for state in states)
    out = {}
    for name in names:
        states = rows[name]
        front, number = expert_of(name)
        expert = number // local[front] if number is not None and holders > 1 else None
        trained = not trains or any(state not in (MODEL, EMA) for state in states)
        alias = None
        if pair and name in pair:
            other = pair[1 - pair.index(name)]
            trained = trained or any(state not in (MODEL, EMA) for state in rows[other])
            alias = pair[0] if name == pair[1] else None
        out[name] = Parameter(
            name, _shape(states), _dtype(states), trained, expert, (stages.of(name),), alias
        )  # fmt: skip
    return out


def _expert_counts(names: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        front, number = expert_of(name)
        if number is not None:
            counts[front] = max(counts.get(front, 0), number + 1)
    return {front: bounded(count, len(names), "experts by the tensors' names") for front, count in counts.items()}


def tied_pair(
    names: Sequence[str], rows: Rows, items: Items, config: Mapping[str, Any], statics: Mapping[str, str]
) -> tuple[str, str] | None:
    """(embedding, head) when they are one tensor: the config says so, or they share a static name, or a training state lists
    only one of the two."""
    first = [
        name
        for name in names
        if items.at(name) == 0 and name.endswith(("embed_tokens.weight", "word_embeddings.weight"))
    ]
    last = [name for name in names if name.endswith("lm_head.weight")]
    if len(first) != 1 or len(last) != 1 or _shape(rows[first[0]]) != _shape(rows[last[0]]):
        return None
    pair = first[0], last[0]
    said = text_config(config).get("tie_word_embeddings")
    if isinstance(said, bool):
        return pair if said else None
    mine = [{state for state in rows[name] if state not in (MODEL, EMA)} for name in pair]
    same = pair[0] in statics and statics.get(pair[0]) == statics.get(pair[1])
    return pair if same or bool(mine[0]) != bool(mine[1]) else None


def _shape(states: Mapping[str, WantedTensor]) -> tuple[int, ...]:
    """The parameter's own shape: scalars of the optimizer aside."""
    for state in (MODEL, MASTER, EMA):
        if state in states:
            return states[state].shape
    return next((t.shape for state, t in states.items() if state not in _SCALARS), next(iter(states.values())).shape)


def _dtype(states: Mapping[str, WantedTensor]) -> DType:
    """What the parameter is computed with; where only a master is there, bf16: Paddle leaves out no other."""
    if MODEL in states:
        return states[MODEL].dtype
    return DTYPES["BF16"] if MASTER in states else DTYPES["F32"]
