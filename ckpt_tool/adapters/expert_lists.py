"""Adapters of experts that were modules in a list, onto a base that has all of them in one tensor.

    the adapter's modules    model.layers.0.mlp.experts.down_projs.0, .1, ...   (unsloth's gpt-oss in 4 bits)
    the base's tensor        model.layers.0.mlp.experts.down_proj (experts, inputs, outputs)

The pairs of all experts are seen as the one pair that PEFT has for a stacked tensor (`target_parameters`): A (e r, in)
with the experts one after another, B (out, r e) with the experts alternating. Nothing is copied: both are boxes of what
is stored. Cost: a box for each expert, and for each column of its B.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.tensor import Chunk, LogicalTensor

_IN_A_LIST = re.compile(r"(?P<module>.+)\.(?P<name>[^.]+)s\.(?P<expert>\d{1,6})")


class ExpertModule(NamedTuple):
    """A module of a list: the tensor that holds all of them, and its number."""

    tensor: str
    expert: int


def find_list(module: str, base: Mapping[str, LogicalTensor]) -> ExpertModule | None:
    """The stacked tensor that a module is an expert of, if the base has no such module but a stacked tensor with the
    singular of its name; else None."""
    match = _IN_A_LIST.fullmatch(module)
    if match is None or f"{module}.weight" in base:
        return None
    tensor = f"{match['module']}.{match['name']}"
    stacked = base.get(tensor)
    if stacked is None or len(stacked.shape) != 3:
        return None
    return ExpertModule(tensor, int(match["expert"]))


def stack_pairs(
    pairs: Mapping[int, tuple[LogicalTensor, LogicalTensor]], experts: int
) -> tuple[LogicalTensor, LogicalTensor] | str:
    """(A, B) of all experts as one, or why they can't be one. pairs: by the expert's number."""
    missing = [expert for expert in range(experts) if expert not in pairs]
    if missing or len(pairs) != experts:
        return f"{len(pairs)} experts have an adapter, and the base has {experts}"
    first_a, first_b = pairs[0]
    shapes = {(a.shape, b.shape) for a, b in pairs.values()}
    in_one_piece = all(len(tensor.chunks) == 1 for pair in pairs.values() for tensor in pair)
    if len(shapes) > 1 or len(first_a.shape) != 2 or len(first_b.shape) != 2 or not in_one_piece:
        return "the adapters of its experts differ in shape"

    rank, inputs = first_a.shape
    outputs = first_b.shape[0]
    chunks_of_a = []
    chunks_of_b = []
    for expert in range(experts):
        a, b = (tensor.chunks[0] for tensor in pairs[expert])
        chunks_of_a.append(Chunk(Box((expert * rank, 0), (rank, inputs)), a.array, a.within, a.replica))
        top, left = b.within.offset
        for column in range(rank):
            there = Box((0, column * experts + expert), (outputs, 1))
            within = Box((top, left + column), (outputs, 1))
            chunks_of_b.append(Chunk(there, b.array, within, b.replica))
    return (
        first_a._replace(shape=(experts * rank, inputs), chunks=tuple(chunks_of_a)),
        first_b._replace(shape=(outputs, rank * experts), chunks=tuple(chunks_of_b)),
    )
