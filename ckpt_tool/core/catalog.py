"""Catalog: the contents of a checkpoint, read from headers alone, and the checks that it is complete.

A catalog of 92,000 tensors must open in a fraction of a second, so `tensors` may be any Mapping: readers of plain
formats use a lazy one that makes a `LogicalTensor` on access (`systems.hub.safetensors.format`), and `rows()` lists
names, shapes and sizes without making any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from os.path import commonprefix
from typing import Any, NamedTuple

from ckpt_tool.core.box import first_hole, first_overlap
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.missing import is_collecting, report_missing
from ckpt_tool.core.tensor import Chunk, LogicalTensor, TensorKey, plainly_tile
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint

PEERS = 4096  # tensors that are compared, at most, to find out which file should hold a missing part


class CatalogRow(NamedTuple):
    """One tensor as `inspect` lists it."""

    name: str
    state: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int  # of the values, replicas not counted


class Note(NamedTuple):
    """A line for the report: something that the reader saw and the user should know. Never an error."""

    code: str
    message: str
    path: str | None = None
    key: str | None = None
    fault: CkptError | None = None  # the error because of which a file was left out, if any: `ckpt verify` reports it


class Unread(NamedTuple):
    """A tensor that exists but can't be read: an object of an unknown class holds it, or its parts are incomplete."""

    key: TensorKey
    shown: str  # its dtype and shape, for people
    kind: str = ""  # the full name of the object's class
    lines: tuple[str, ...] = ()  # the lines of `Catalog.unsafe` about it, from each file that holds a part
    fault: CkptError | None = None  # raised if the tensor is asked for; None if reading it would need unsafe code


@dataclass(frozen=True, slots=True)
class Catalog:
    """A checkpoint as plain values: its tensors, everything else that it contains, and what the reader noticed."""

    format: str
    tensors: Mapping[TensorKey, LogicalTensor]  # in the source's own order
    # plain nested values (see `core.extras`) as the source nests them
    extras: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mesh = Mesh()  # the degrees that the source states or its boxes show; empty when it says nothing
    files: tuple[str, ...] = ()  # every file that the checkpoint consists of, relative to the root, with `/`
    # small files next to it (config.json, tokenizer) that a conversion copies as they are
    sidefiles: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    # globals of tier 3 (see `pickles.pickle_reader`), as `module.name at FILE, opcode N`; `inspect` shows them, every
    # other verb refuses
    unsafe: tuple[str, ...] = ()
    # what a format has to remember in order to write the same layout again (key prefixes, item style)
    hints: Hints = Hints()
    # layout-free digests that the source recorded for its tensors
    digests: Mapping[TensorKey, str] = field(default_factory=dict)
    # index files, which say what box is in which file, if the format has them: a box they leave out is in no file
    indexes: tuple[str, ...] = ()
    # Tensors that can't be read. `inspect` lists them, and a user who drops their states can convert the rest. For
    # unreadable tensors that a format does not list here, there are only lines in `unsafe`.
    unread: tuple[Unread, ...] = ()
    # An optimizer's step count, if it has one for all parameters; the extras contain it at the tensor's path.
    count: LogicalTensor | None = None

    def rows(self) -> Iterator[CatalogRow]:
        """Every tensor as a row, without making its chunks if the table can do so."""
        quick = getattr(self.tensors, "rows", None)
        if quick is not None:
            yield from quick()
            return
        for tensor in self.tensors.values():
            yield CatalogRow(tensor.key.name, tensor.key.state, tensor.dtype, tensor.shape, tensor.nbytes)

    def states(self) -> tuple[str, ...]:
        """The states in the order of their first tensor."""
        if hasattr(self.tensors, "rows"):
            return tuple(dict.fromkeys(row.state for row in self.rows()))
        return tuple(dict.fromkeys([key.state for key in self.tensors]))

    def check(self) -> None:
        """Raise an error with all faults unless every tensor's boxes tile it."""
        # A table knows which of its tensors are stored in pieces; all others are single arrays and need no check.
        list_parted = getattr(self.tensors, "parted", None)
        faults = list(faults_of(self.tensors.values() if list_parted is None else [*list_parted()], self.indexes))
        if faults and is_collecting() and all(isinstance(fault, Incomplete) for fault in faults):
            self._report_holes(faults)
        elif faults:
            first_fault = faults[0]
            raise type(first_fault)(
                first_fault.message
                if len(faults) == 1
                else f"{len(faults)} tensors are not whole; the first: {first_fault.message}",
                code=first_fault.code,
                path=first_fault.path,
                key=first_fault.key,
                hint=first_fault.hint,
                faults=[
                    f"{fault.key}: {fault.message}{f' ({fault.path})' if fault.path else ''}" for fault in faults[1:]
                ],
            )

    def _report_holes(self, faults: Sequence[CkptError]) -> None:
        """Report each tensor with elements that are in no file, and how many bytes of it are missing."""
        faults_by_key = {str(fault.key): fault for fault in faults}
        for key, tensor in self.tensors.items():
            fault = faults_by_key.get(str(key))
            if fault is None:
                continue
            stored = sum(chunk.box.numel for chunk in tensor.chunks if chunk.replica == 0)
            report_missing(fault, tensors={key: tensor.dtype.nbytes(max(0, prod(tensor.shape) - stored))})


def faults_of(tensors: Iterable[LogicalTensor], indexes: Sequence[str] = ()) -> Iterator[CkptError]:
    """A fault for every tensor whose chunks leave the tensor, leave a gap or overlap. `tensors` is iterated twice.

    A gap is attributed to the file that should fill it: the index that leaves it out, if the format has one
    (`indexes`), else the file that holds the same part of similar tensors.
    """
    gaps: dict[str, LogicalTensor] = {}
    faults: list[CkptError] = []
    for tensor in tensors:
        fault = _fault_of(tensor)
        if fault is not None:
            faults.append(fault)
            if isinstance(fault, Incomplete):
                gaps[str(tensor.key)] = tensor
    if gaps:
        sound = [tensor for tensor in tensors if str(tensor.key) not in gaps and len(tensor.chunks) > 1][:PEERS]
        faults = [_add_location(each, gaps[each.key], sound, indexes) if each.key in gaps else each for each in faults]
    yield from faults


def _add_location(
    fault: CkptError, tensor: LogicalTensor, sound: Sequence[LogicalTensor], indexes: Sequence[str]
) -> CkptError:
    """The fault, with the file that should hold the missing part added to its path and message."""
    primary = [chunk for chunk in tensor.chunks if chunk.replica == 0]
    hole = first_hole(tensor.shape, [chunk.box for chunk in primary])
    if hole is None:
        return fault
    message = f"{fault.message}: the first is the box at {list(hole.offset)} of shape {list(hole.shape)}"
    own = {chunk.array.file for chunk in tensor.chunks}
    path = None
    if indexes:
        near = min(own, default="")
        path = max(indexes, key=lambda index: len(commonprefix((index, near))))
        message += f", which {path} leaves out"
    elif (suspects := _holders(tensor, sound)) is not None:
        files, peer, sure = suspects
        path = files[0] if sure else None
        message += f"; of {peer} that part is in {', '.join(files[:4])}"
    elif own:
        message += f"; what is there is in {', '.join(sorted(own)[:4])}"
    return Incomplete(message, code=fault.code, path=path, key=fault.key, hint=fault.hint)


def _holders(tensor: LogicalTensor, sound: Sequence[LogicalTensor]) -> tuple[list[str], TensorKey, bool] | None:
    """(files, a tensor, is it certain?): the files that should hold what this tensor lacks, and a complete tensor that
    is distributed in the same way and shows it.

    Parts are compared by proportion, so (6, 2) cut in halves is distributed like (8, 4); all parts have to be in the
    same files, because flat slices of ZeRO look similar without being so. It is certain if several tensors agree and
    none disagrees.
    """
    own_parts = set(_parts(tensor))
    keys_of: dict[tuple[str, ...], list[TensorKey]] = {}
    for peer in sound if own_parts else ():
        peer_parts = _parts(peer)
        files = {peer_parts[part] for part in peer_parts.keys() - own_parts}
        if own_parts < peer_parts.keys() and files.isdisjoint(file for file, *_ in own_parts):
            keys_of.setdefault(tuple(sorted(files)), []).append(peer.key)
    if not keys_of:
        return None
    files_, peers = max(keys_of.items(), key=lambda item: len(item[1]))
    return list(files_), peers[0], len(keys_of) == 1 and len(peers) > 2


def _parts(tensor: LogicalTensor) -> dict[tuple[Any, ...], str]:
    """(file, begin and end of the chunk along each dim, as reduced fractions of the tensor's size) -> file."""
    parts = {}
    for chunk in tensor.chunks:
        if chunk.box.numel:
            sides = zip(chunk.box.offset, chunk.box.end, tensor.shape, strict=True)
            shares = [(bound // gcd(bound, n), n // gcd(bound, n)) for low, high, n in sides for bound in (low, high)]
            part = (chunk.array.file, *shares)
            parts[part] = chunk.array.file
    return parts


def _fault_of(tensor: LogicalTensor) -> CkptError | None:
    """The fault of a tensor whose chunks do not tile it, None if they do."""
    chunks = tensor.chunks
    alone = len(chunks) == 1 and chunks[0].box.shape == tensor.shape and not any(chunks[0].box.offset)
    if alone or plainly_tile(chunks, tensor.shape):
        return None

    name = str(tensor.key)
    for chunk in chunks:
        if not chunk.box.inside(tensor.shape):
            return InconsistentCheckpoint(
                f"a box at {list(chunk.box.offset)} of shape {list(chunk.box.shape)} leaves the tensor of shape "
                f"{list(tensor.shape)}",
                code="E0307",
                path=chunk.array.file,
                key=name,
                hint="the metadata contradicts itself: this save can't be trusted",
            )

    primary = [chunk for chunk in chunks if chunk.replica == 0]
    overlap = first_overlap([chunk.box for chunk in primary])
    if overlap is not None:
        a, b = (primary[i] for i in overlap)
        return InconsistentCheckpoint(
            f"boxes at {list(a.box.offset)} ({a.array.file}) and {list(b.box.offset)} ({b.array.file}) overlap",
            code="E0308",
            path=b.array.file,
            key=name,
            hint="two files claim the same elements: was a newer save written over an older one?",
        )

    have = sum(chunk.box.numel for chunk in primary)
    want = prod(tensor.shape)
    if have != want:
        return Incomplete(
            f"{want - have} of {want} elements are in no file (shape {list(tensor.shape)}, {len(primary)} boxes)",
            code="E0309",
            key=name,
            hint="a rank's file is missing or the save was cut short",
        )

    return None


def mark_replicas(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Number chunks that hold the same box: the first is 0, the writer; the others are compared when read."""
    first_of: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    marked = []
    for chunk in chunks:
        place = (chunk.box.offset, chunk.box.shape)
        number = first_of.get(place, 0)
        first_of[place] = number + 1
        marked.append(chunk if number == chunk.replica else Chunk(chunk.box, chunk.array, chunk.within, number))
    return tuple(marked)
