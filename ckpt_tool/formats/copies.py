"""Detects a rank's file that was copied over another's: equal bytes under two names that mean different tensor parts.

The one idea: which part of the checkpoint a file should hold follows from its name or from an index; what it does hold
follows from its bytes. Ranks that hold the same boxes of the same tensors may have equal files. Ranks that hold
different boxes never have, unless both consist of constants (biases at zero, moments before the first step). So no
format has to record which rank wrote a file:

    mp_rank_00/distrib_optim.pt == mp_rank_01/distrib_optim.pt, and both hold a share of decoder.final_layernorm.weight:
    E1630

How copies are found: candidates have equal CRC-32 and size of a stored record where the container has CRCs (nothing is
read), else equal bytes in the middle of files of equal size. Then both ends are compared, and the start of every array
that belongs to different tensor parts in the two files.

What is no evidence: plain extras (ranks with one seed have equal RNG states); constants; two files of one tensor each
that may be tied weights (all states of the two names are equal), unless the paths contain the names and the names
differ only in numbers; and the weight, master weight and average of one name.

Cost: under a microsecond a chunk; a read of PROBE bytes for a file without CRCs that has another's size. What it does
not do: find a file of which only some arrays were copied, or one that comes from another save (formats compare their
counters).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.inner_path import base_of
from ckpt_tool.core.tensor import (
    EMA,
    EXTRAS,
    MASTER,
    MODEL,
    STEP,
    Chunk,
    ChunkColumns,
    LogicalTensor,
    StoredArray,
    TensorKey,
    lacks_crc,
)
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.storage.source import Tree

if TYPE_CHECKING:
    from ckpt_tool.formats.copied_columns import Copied, Stands

COPIED = "E1630"
PROBE = 4096  # bytes of an array, or in the middle of a file
ENDS = 1 << 16  # bytes at both ends of a file: they contain the headers, and the directory of a zip with all its CRCs
LEAST = 16  # bytes of an array: less is no evidence
SHOWN = 50
_WEIGHTS = frozenset((MODEL, MASTER, EMA))
_NUMBER = re.compile(r"\d+")


class _FilePart(NamedTuple):
    """What a file holds at one offset: the box of tensor `key` that begins at index `start`."""

    key: TensorKey
    start: tuple[int, ...]
    # offset, nbytes: of the container's record that contains it, or of its array where there are no records
    offset: int
    nbytes: int
    crc: int  # of the record, -1 without one


_Parts = dict[tuple[str, int], _FilePart]  # by ("" or the suffix of a view into the file, byte offset)


def look_for_copies(tree: Tree, catalog: Catalog, *, lenient: bool) -> list[Note]:
    """Search for equal files that should hold different tensor parts. With `lenient` they are returned as notes, else
    InconsistentCheckpoint E1630 lists them."""
    if len(catalog.files) < 2:
        return []
    # Tables of safetensors give only tensors stored in parts here: for all others the files contain the names, so a
    # copied file is noticed by these.
    parted = getattr(catalog.tensors, "parted", None)
    every = catalog.tensors.values() if parted is None else parted()
    tensors = [tensor for tensor in every if tensor.key.state != EXTRAS]
    pairs = list(_pairs(tree, tensors))
    parts = _parts_of(tensors, {path for pair in pairs for path in pair})
    whole = {tensor.key: tensor for tensor in tensors} if pairs else {}
    found = []
    for path, other in pairs:
        at = _contradiction(tree, whole, parts, path, other)
        if at:
            found.append((path, other, *at))
    if not found:
        return []
    lines = [_line(*one) for one in found]
    if lenient:
        return [Note("N-copied-file", line, path) for line, (path, *_) in zip(lines, found, strict=True)]
    raise InconsistentCheckpoint(
        lines[0],
        code=COPIED,
        path=tree.display(found[0][0]),
        key=str(found[0][2].key),
        faults=lines[1:SHOWN],
        hint="one was copied over the other: fetch both from where the job wrote them; if they are equal on "
        "purpose, --lenient",
    )


def _line(path: str, other: str, mine: _FilePart, theirs: _FilePart) -> str:
    if mine.key != theirs.key:
        parts_meant = f"{theirs.key}, the other {mine.key}"
    else:
        parts_meant = f"{mine.key} from {list(theirs.start)} on, the other from {list(mine.start)} on"
    return f"{other} and {path} have the same bytes, but one should hold {parts_meant}"


# -- which files are equal ---------------------------------------------------------------------------------------------


def _pairs(tree: Tree, tensors: Sequence[LogicalTensor]) -> Iterator[tuple[str, str]]:
    """Pairs of files whose compared bytes are equal although they should hold different parts. Each file is paired with
    one other of its group."""
    copied = _copied(tensors)
    groups = [*_by_crc(tree, copied)] if copied.again else []
    for group in (*groups, *(_by_size(tree, tensors) if copied.plain else ())):
        for alike in _split(group, lambda path: _middle(tree, path)):
            for equal in _split(alike, lambda path: _ends(tree, path)):
                first = next(iter(equal))
                other = next(path for path, stands in equal.items() if stands != equal[first])
                yield from (
                    (path, first if stands != equal[first] else other)
                    for path, stands in equal.items()
                    if path != first
                )


def _split(group: dict[str, int], look: Callable[[str], int]) -> Iterator[dict[str, int]]:
    """The files grouped by `look`, without the groups whose files should all hold the same part."""
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for path, stands in group.items():
        found[look(path)][path] = stands
    yield from (alike for alike in found.values() if len(set(alike.values())) > 1)


def _middle(tree: Tree, path: str) -> int:
    size = tree.size(path)
    return hash((size, tree.read(path, size // 2, min(size - size // 2, PROBE))))


def _ends(tree: Tree, path: str) -> int:
    size = tree.size(path)
    ends = min(size, ENDS)
    return hash((tree.read(path, 0, ends), tree.read(path, size - ends, ends)))


def _copied(tensors: Sequence[LogicalTensor]) -> _Copied | Copied:
    """Records that occur in several files: with NumPy if any tensor's chunks are columns, else chunk by chunk."""
    if not any(isinstance(tensor.chunks, ChunkColumns) for tensor in tensors):
        return _Copied(tensors)
    from ckpt_tool.formats.copied_columns import Copied

    return Copied(tensors)


class _Copied:
    """Records that occur in several files.

    again: their ids, size << 32 | CRC. plain: are there arrays without a CRC?
    """

    def __init__(self, tensors: Sequence[LogicalTensor]) -> None:
        first: dict[int, str] = {}
        self._tensors = tensors
        self.again: set[int] = set()
        self.plain = False
        for tensor in tensors:
            for chunk in tensor.chunks:
                crc = chunk.array.crc
                path = chunk.array.path
                if crc is None:
                    self.plain = True
                    continue
                record = crc[1] << 32 | crc[2]
                if first.setdefault(record, path) != path:
                    self.again.add(record)

    def stands(self, hash_of: Callable[[TensorKey, Chunk, int], int]) -> tuple[Stands, dict[int, StoredArray]]:
        """(record -> file -> a hash of the tensor parts in the record, record -> one of its arrays).

        hash_of: the hash of a chunk, given its tensor's key and the offset at which its record begins.
        """
        stands: Stands = {record: {} for record in self.again}
        sample: dict[int, StoredArray] = {}
        for tensor in self._tensors:
            for chunk in tensor.chunks:
                crc = chunk.array.crc
                if crc is None:
                    continue
                record = crc[1] << 32 | crc[2]
                if record in self.again:
                    sample.setdefault(record, chunk.array)
                    # XOR, because the order in which a record's chunks are met must not matter.
                    mine = stands[record]
                    mine[chunk.array.path] = mine.get(chunk.array.path, 0) ^ hash_of(tensor.key, chunk, crc[0])
        return stands, sample


def _by_crc(tree: Tree, copied: _Copied | Copied) -> Iterator[dict[str, int]]:
    """Groups of files that share a non-constant record but should hold different parts in it.

    A group maps each path to a hash of the parts that it should hold.
    """
    stands, sample = copied.stands(_hash)
    reported: set[frozenset[str]] = set()
    for record, files in stands.items():
        if len(set(files.values())) > 1 and frozenset(files) not in reported:
            offset, length, _ = sample[record].crc or (0, 0, 0)
            # Equal constants prove nothing: moments are zero on all ranks before the first step.
            if _changes(tree.read(sample[record].path, offset, min(length, PROBE))):
                reported.add(frozenset(files))
                yield files


def _by_size(tree: Tree, tensors: Sequence[LogicalTensor]) -> Iterator[dict[str, int]]:
    """Groups of files of equal size without CRCs that should hold different parts: path -> a hash of the parts."""
    stands: dict[str, int] = {}
    for tensor in tensors:
        for chunk in tensor.chunks if lacks_crc(tensor.chunks) else ():
            if chunk.array.crc is None and chunk.box.numel:
                stands[chunk.array.path] = stands.get(chunk.array.path, 0) ^ _hash(tensor.key, chunk, 0)
    sizes: dict[int, dict[str, int]] = defaultdict(dict)
    if len(stands) > 1:
        listed = tree.listing()
        for path, value in stands.items():
            base = base_of(path)
            files = sizes[listed.get(base, -1)]
            files[base] = files.get(base, 0) ^ value
    yield from (files for size, files in sizes.items() if size > 0 and len(set(files.values())) > 1)


def _hash(key: TensorKey, chunk: Chunk, base: int) -> int:
    return hash((chunk.array.offset - base, chunk.within.offset, chunk.box.offset, key))


# -- which parts they should hold --------------------------------------------------------------------------------------


def _parts_of(tensors: Sequence[LogicalTensor], paths: Set[str]) -> dict[str, _Parts]:
    """The tensor parts that each of the files should hold, by offset. Empty chunks are left out."""
    out: dict[str, _Parts] = {path: {} for path in paths}
    for tensor in tensors if paths else ():
        for chunk in tensor.chunks:
            array = chunk.array
            base = base_of(chunk.array.path)
            if base in paths and chunk.box.numel:
                record = array.crc or (array.offset, array.dtype.nbytes(_extent(array)), -1)
                at = array.offset + array.dtype.nbytes(chunk.region()[0])
                out[base][array.path[len(base) :], at] = _FilePart(tensor.key, chunk.box.offset, *record)
    return out


def _contradiction(
    tree: Tree, whole: Mapping[TensorKey, LogicalTensor], parts: Mapping[str, _Parts], path: str, other: str
) -> tuple[_FilePart, _FilePart] | None:
    """Two parts that should differ but have equal bytes at one offset of both files. None if any bytes that were
    compared differ, or if equality is no evidence."""
    mine = parts[path]
    theirs = parts[other]
    apart = [(at, part) for at, part in mine.items() if at not in theirs or part[:2] != theirs[at][:2]]
    several = len({part.key.name for _, part in apart}) > 1
    found = None
    for (view, _), a, b in ((at, part, theirs[at]) for at, part in apart if at in theirs):
        named = _alike(a.key.name, b.key.name) and a.key.name in path and b.key.name in other
        if not (several or named) and _may_be_equal(tree, whole, a.key, b.key):
            continue
        nbytes = min(a.nbytes, b.nbytes, PROBE)
        data = tree.read(path + view, a.offset, nbytes)
        same = tree.read(other + view, b.offset, nbytes)
        if data != same or a.crc != b.crc:
            return None
        if found is None and _changes(data):
            found = a, b
    return found


def _may_be_equal(tree: Tree, whole: Mapping[TensorKey, LogicalTensor], a: TensorKey, b: TensorKey) -> bool:
    """May two tensors be equal without a fault? That holds for weight, master weight and average of one name, and for
    tied tensors, which are equal in every state."""
    if a == b:
        return False
    if a.state != b.state:
        return a.state in _WEIGHTS and b.state in _WEIGHTS
    for state in {key.state for key in whole if key.name == a.name} - {a.state, STEP}:
        one = whole[TensorKey(a.name, state)]
        other = whole.get(TensorKey(b.name, state))
        if other is None or _front(tree, one) != _front(tree, other):
            return False
    return True


def _front(tree: Tree, tensor: LogicalTensor) -> tuple[tuple[int, ...], bytes]:
    """A fingerprint of a tensor: its shape and the first PROBE bytes of its first chunk."""
    array = tensor.chunks[0].array
    return tensor.shape, tree.read(array.path, array.offset, min(array.dtype.nbytes(_extent(array)), PROBE))


def _extent(array: StoredArray) -> int:
    """The number of elements that an array spans in its file, from the first to the last, including stride gaps."""
    if array.strides is None:
        return array.numel
    return 1 + sum((extent - 1) * stride for extent, stride in zip(array.shape, array.strides, strict=True))


def _alike(a: str, b: str) -> bool:
    """Do two names differ only in numbers, as those of two layers do? Then they are not two names of a tied tensor."""
    return _NUMBER.sub("0", a) == _NUMBER.sub("0", b)


def _changes(data: bytes) -> bool:
    """Are the bytes more than one constant repeated? An element has 1, 2, 4 or 8 bytes, so a shift by 8 shows it."""
    return len(data) >= LEAST and data[8:] != data[:-8]
