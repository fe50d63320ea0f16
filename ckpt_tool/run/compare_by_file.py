"""Which files hold the values that differ: pairs of tensors compared once more, part by part.

A part is the intersection of one stored chunk of the first checkpoint and one of the second, so a difference in it
belongs to exactly one file of each side:

    differing_files(pairs, left, right)["first", "mp_rank_01/model.pt"]    FileDifference(elements=12, ...)

Cost: one more read of the tensors that differ. Copies of a box (replicas) are not looked at: they are compared with
each other before. What it does not do: name ranks (`report.holdings`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckpt_tool.core.box import Box
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.run.compare import compare
from ckpt_tool.run.lazy import part_within
from ckpt_tool.storage.source import Tree

Pair = tuple[LogicalTensor, LogicalTensor]
Side = Literal["first", "second"]


@dataclass(slots=True)
class FileDifference:
    """What differs in one file."""

    tensors: set[TensorKey] = field(default_factory=set)  # those with a difference in it
    elements: int = 0
    max_abs: float = 0.0  # the greatest absolute difference


def differing_files(
    pairs: Sequence[Pair], left: Tree, right: Tree, *, rtol: float = 0.0, atol: float = 0.0
) -> dict[tuple[Side, str], FileDifference]:
    """The files of both sides that hold values which differ. pairs: tensors of equal shape that are known to differ."""
    parts: list[Pair] = []
    files: list[tuple[str, str]] = []
    for mine, theirs in pairs:
        for part, where in _common_parts(mine, theirs):
            parts.append(part)
            files.append(where)

    found: dict[tuple[Side, str], FileDifference] = {}
    differences = compare(parts, left, right, rtol=rtol, atol=atol)
    for (mine, _), (first, second), difference in zip(parts, files, differences, strict=True):
        if difference is None:
            continue
        holders: tuple[tuple[Side, str], ...] = (("first", first), ("second", second))
        for holder in holders:
            entry = found.setdefault(holder, FileDifference())
            entry.tensors.add(mine.key)
            entry.elements += difference["elements"]
            entry.max_abs = max(entry.max_abs, difference["max_abs"])
    return found


def _common_parts(mine: LogicalTensor, theirs: LogicalTensor) -> Iterator[tuple[Pair, tuple[str, str]]]:
    """What each chunk of one has in common with each of the other, and the two files."""
    if mine.dtype.bits < 8 or theirs.dtype.bits < 8:  # such elements are no bytes that could be cut
        yield (mine, theirs), (_files_of(mine), _files_of(theirs))
        return

    for one in mine.chunks:
        for other in theirs.chunks:
            if one.replica or other.replica:
                continue
            shared = one.box & other.box
            if shared is None:
                continue
            pair = (_within(mine, shared), _within(theirs, shared))
            yield pair, (one.array.file, other.array.file)


def _files_of(tensor: LogicalTensor) -> str:
    return ", ".join(dict.fromkeys(chunk.array.file for chunk in tensor.chunks))


def _within(tensor: LogicalTensor, box: Box) -> LogicalTensor:
    """The part of a tensor in a box, as a tensor of its own."""
    parts = [part_within(chunk, box) for chunk in tensor.chunks if not chunk.replica]
    return tensor._replace(shape=box.shape, chunks=tuple(part for part in parts if part is not None))
