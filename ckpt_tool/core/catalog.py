"""Catalog: what a checkpoint holds, read from headers alone, and the checks that it is whole.

A catalog of 92,000 tensors must open in a fraction of a second, so `tensors` is any Mapping: readers of plain
formats give a lazy one that makes a `LogicalTensor` when asked (`formats.hf.format`), and `rows()` lists
names, shapes and sizes without making any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import first_overlap
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.tensor import Chunk, LogicalTensor, TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint


class Row(NamedTuple):
    """One tensor as `inspect` lists it. nbytes: of the values, replicas not counted."""

    name: str
    state: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the report: something that the reader saw and the user should know. Never an error."""

    code: str
    message: str
    path: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Catalog:
    """A whole checkpoint as values.

    tensors: in the source's own order. extras: plain nested values (see `core.extras`) as the source nests them.
    mesh: the degrees that the source states or its boxes show; empty when it says nothing.
    files: every file that the checkpoint consists of, relative to the root, with `/`.
    sidefiles: small files beside it (config.json, tokenizer) that a conversion copies as they are.
    unsafe: globals of tier 3 (see `storage.pickles`), as `module.name at FILE, opcode N`; `inspect` shows them,
        every other verb refuses.
    hints: what a format wants to remember for writing itself again (key prefixes, item style); plain values.
    digests: layout-free digests that the source recorded for its tensors.
    """

    format: str
    tensors: Mapping[TensorKey, LogicalTensor]
    extras: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mesh = Mesh()
    files: tuple[str, ...] = ()
    sidefiles: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    unsafe: tuple[str, ...] = ()
    hints: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[TensorKey, str] = field(default_factory=dict)

    def rows(self) -> Iterator[Row]:
        """Every tensor as a row, without touching chunks where the table allows it."""
        quick = getattr(self.tensors, "rows", None)
        if quick is not None:
            yield from quick()
            return
        for tensor in self.tensors.values():
            yield Row(tensor.key.name, tensor.key.state, tensor.dtype, tensor.shape, tensor.nbytes)

    def states(self) -> tuple[str, ...]:
        """The states in order of first sight."""
        if hasattr(self.tensors, "rows"):
            return tuple(dict.fromkeys(row.state for row in self.rows()))
        return tuple(dict.fromkeys([key.state for key in self.tensors]))

    def check(self) -> None:
        """Raise unless every tensor's boxes tile it. All faults at once."""
        faults = list(faults_of(self.tensors.values()))
        if faults:
            first = faults[0]
            raise type(first)(
                first.message
                if len(faults) == 1
                else f"{len(faults)} tensors are not whole; the first: {first.message}",
                code=first.code,
                path=first.path,
                key=first.key,
                hint=first.hint,
                faults=[f"{fault.key}: {fault.message}" for fault in faults[1:]],
            )


def faults_of(tensors: Iterable[LogicalTensor]) -> Iterator[CkptError]:
    """Every tensor whose chunks leave the tensor, leave a gap or overlap."""
    for tensor in tensors:
        fault = _fault_of(tensor)
        if fault is not None:
            yield fault


def _fault_of(tensor: LogicalTensor) -> CkptError | None:
    name = str(tensor.key)
    chunks = tensor.chunks
    if len(chunks) == 1 and chunks[0].box.shape == tensor.shape and not any(chunks[0].box.offset):
        return None
    for chunk in chunks:
        if not chunk.box.inside(tensor.shape):
            return InconsistentCheckpoint(
                f"a box at {list(chunk.box.offset)} of shape {list(chunk.box.shape)} leaves the tensor of shape {list(tensor.shape)}",
                code="E0307",
                path=chunk.array.path,
                key=name,
                hint="the metadata contradicts itself: this save can't be trusted",
            )
    primary = [chunk for chunk in chunks if chunk.replica == 0]
    overlap = first_overlap([chunk.box for chunk in primary])
    if overlap is not None:
        a, b = (primary[i] for i in overlap)
        return InconsistentCheckpoint(
            f"boxes at {list(a.box.offset)} ({a.array.path}) and {list(b.box.offset)} ({b.array.path}) overlap",
            code="E0308",
            path=b.array.path,
            key=name,
            hint="two files claim the same elements: was a newer save written over an older one?",
        )
    have, want = sum(chunk.box.numel for chunk in primary), prod(tensor.shape)
    if have != want:
        return Incomplete(
            f"{want - have} of {want} elements are in no file (shape {list(tensor.shape)}, {len(primary)} boxes)",
            code="E0309",
            path=primary[0].array.path if primary else None,
            key=name,
            hint="a rank's file is missing or the save was cut short",
        )
    return None


def mark_replicas(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Number chunks that hold the same box: the first is 0, the writer; the others are compared when read."""
    seen: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    out = []
    for chunk in chunks:
        where = (chunk.box.offset, chunk.box.shape)
        number = seen.get(where, 0)
        seen[where] = number + 1
        out.append(chunk if number == chunk.replica else Chunk(chunk.box, chunk.array, chunk.within, number))
    return tuple(out)
