"""Reads transposed sources: strips of the stored rows are transposed into a panel, in the line's order, ahead of the
walk.

In a matrix that is stored transposed, consecutive elements of the line are one stored row apart in the file. Read block
by block, each block would touch every stored row for a few bytes. So a panel is filled with some MiB of the line at a
time: one strip is read from each stored row, as long as the panel is high, and strips are transposed in groups while
they are in L2:

    stored (3, 8), the line wants (8, 3)         panel of 4 rows of the line       strips read, 4 elements each
    a0 a1 a2 a3 a4 a5 a6 a7                      a0 b0 c0                          a0 a1 a2 a3
    b0 b1 b2 b3 b4 b5 b6 b7                      a1 b1 c1                          b0 b1 b2 b3
    c0 c1 c2 c3 c4 c5 c6 c7                      a2 b2 c2   a3 b3 c3               c0 c1 c2 c3

Blocks are then slices of the panel, hashed and written without another copy. Every region goes through
`plan.copy.clip`, so any number of transposed blocks side by side (fused gate and up, grouped qkv, TP shards), stacked
experts, and plain regions among them are one case. Replicas are gathered into a second panel and compared.

Every strip is read once; if a row of the line is divided between two units, both read that row. Strips are 16 KiB long,
which determines the height of a panel; a panel holds the whole matrix if that fits: strips that follow each other in
the file are read many to a call. If the bound (`PANEL`, or what `--memory` leaves) is lower, strips are shorter and
need more calls. ns a byte, one core, page cache, strips of 512 bytes to 8 KiB: 1.0, 0.5, 0.25, 0.16, 0.12. Calls that
short hold Python's lock half of the time, so two threads gain little from each other: another reason for high panels
(2 GB, 2 threads: 1.20 s with strips of up to 4 KiB, 0.91 s with 16). Gaps of up to 2 KiB are read and thrown away,
which costs less than a call; with 8 KiB it took half as long again. Bytes that checksums need are read again at the end
(`run/finish.py`), since a record's strips are not read in the order of the file.

A group is transposed by compiled code if it is available, else by NumPy, in tiles that were
chosen by measurement: multiples of a copy of the same bytes, 16 MiB in strips of 4 KiB, one core of a Xeon (2 MiB of
L2), items of 1, 2, 4, 8 bytes:

    one NumPy assignment, no groups          52    26    13    6.6
    groups of 512 KiB, one assignment       4.1   2.2   1.3   0.8
    tiles of 32 x 32                        9.9   5.7   2.9   1.7
    tiles of 128 x 128                      4.5   2.4   1.3   0.8
    all rows x 64 columns (this module)     4.0   2.2   1.2   0.85
    transposed as items of twice the width, then split by casts and shifts: 4.1   3.0   2.4   -
    torch, out.copy_(group.t())             5.3   3.1   1.9   1.3

Transposing whole panels instead of groups, with blocks taken straight from the strips, took 1.2 to 1.5 times as long
for read, transpose, hash and write together: the strips come from L3 then. Panels without huge pages took 1.2 times as
long, since a column is on as many pages as it has rows. A mapped source took 1.3 times the CPU of pread, and a file
that is cut short would kill the process. Batched reads (libaio) take 0.7 of the time for strips of 4 KiB and two
threads, but are no part of Python. The whole job took 1.9 times as long as `cp` of the same 2 GB on two quiet cores,
start included (CPU 3.3 times; before there were panels: 15 and 14).

NumPy's tiles take 2 to 3.3 times as long as C (bf16, runs alternating, one core of an EPYC with 512 KiB of L2, panels
in memory), and blocks of whole cache lines on both sides, with the next ones prefetched, took another quarter off.
Groups are whole cache lines of the panel (90 strips took half as long again as 96). Lower panels, which would stay in
L3, lose in calls what the transposition gains: CPU seconds of 2 GB with groups of 512 KiB and panels of 32, 16, 8, 4
MiB 3.6, 3.5, 3.8, 5.0; with panels of 32 MiB and groups of 1 MiB 3.0, of 256 KiB 4.7.

`run/transposed_outputs.py` is the counterpart for outputs; units end at row bounds of either side
(`plan.schedule.segments`).

Sources with zero or negative strides and 1-d ones are not handled here but by `BlockReader`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, repeat
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.plan.copy import Region, clip, hull, is_transposed, row_of
from ckpt_tool.plan.plan import Move

if TYPE_CHECKING:
    from ckpt_tool.run.compute import Array
    from ckpt_tool.storage.source import Tree

PANEL = 32 << 20  # bytes: all panels of one thread together, at most
STRIP = 16 << 10  # bytes: longer strips gain nothing
# bytes: strips shorter than SHORT are merged with the next one if the gap between them is at most NEAR
SHORT = 2 << 10
NEAR = 2 << 10
GROUP = 1 << 20  # bytes of strips that are transposed together: they stay in L2
EVEN = 32  # strips per group, or a multiple: 64 bytes of bf16, one cache line of the panel
COLUMNS = 64  # width of a tile: one NumPy call transposes so many strips
BRIDGE = 2 << 10  # bytes: strips closer than this are read in one call
# bytes: the same for files in a store, where a request takes long, and the longest request
FAR_BRIDGE = 1 << 20
FAR_READ = 8 << 20
_VECTORS = 1024  # buffers of one preadv: IOV_MAX of Linux
_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Dim(NamedTuple):
    """One dim of a transposed region."""

    extent: int
    stride: int  # bytes in the file from one index to the next
    step: int  # bytes in the panel from one index to the next


class Source(Protocol):
    """What is used of a `BlockReader`. Files are given by number."""

    def fd(self, file: int) -> int:
        """A descriptor of the file, valid until the next call."""
        ...

    def remote(self, file: int) -> Tree | None:
        """The tree to read through if the file has no descriptor, else None."""
        ...

    def path(self, file: int) -> str:
        """The file's path below its tree."""
        ...

    def pread(self, file: int, offset: int, view: memoryview, *, count: bool = True) -> None:
        """Fill `view`, or raise an error that names the file and the byte."""
        ...


class Strips:
    """The buffers of one thread. They grow on demand and are reused. most: bytes of all panels together."""

    def __init__(self, most: int = PANEL) -> None:
        self.most = most
        self._panels = memoryview(b"")
        self._strips = memoryview(bytearray(0))
        self._slots: tuple[int, int, list[memoryview]] = (0, 0, [])
        self._waste = memoryview(b"")

    def panels(self, count: int) -> list[memoryview]:
        """The buffer for panels, split into `count` equal parts. Invalidates the panels of an earlier call."""
        if not self._panels:
            import numpy as np

            self._panels = np.empty(max(self.most, 256), "u1").data  # with huge pages: a column touches many
        room = len(self._panels) // count // 64 * 64
        return [self._panels[i * room : (i + 1) * room] for i in range(count)]

    def slots(self, pitch: int, length: int, count: int) -> tuple[memoryview, list[memoryview]]:
        """Room for `count` strips of `length` bytes, `pitch` bytes apart. Returns (the buffer, a view of each
        strip)."""
        if len(self._strips) < count * pitch:
            self._strips = memoryview(bytearray(max(count * pitch, GROUP)))
            self._slots = (0, 0, [])
        if self._slots[:2] != (pitch, length) or len(self._slots[2]) < count:
            slots = [self._strips[at : at + length] for at in range(0, count * pitch, pitch)]
            self._slots = (pitch, length, slots)
        return self._strips, self._slots[2][:count]

    def waste(self, nbytes: int) -> memoryview:
        """Room for bytes between strips that are read and thrown away."""
        if len(self._waste) < nbytes:
            self._waste = memoryview(bytearray(nbytes))
        return self._waste[:nbytes]


class Transposed:
    """The sources of one move, put in order panel by panel. For one thread, one move at a time.

    differ: called with the part of a replica that is not equal to the first copy; raises.
    """

    def __init__(self, move: Move, source: Source, strips: Strips, differ: Callable[[Region], None]) -> None:
        self._source = source
        self._strips = strips
        self._differ = differ
        self._item = move.item
        self._regions = [(*hull(region), region) for region in move.sources]
        both = (*move.sources, *move.outputs) if move.dtype == move.dtype_out else move.sources
        self._row, self._height = rows_of(both)
        self._panels = strips.panels(panels_of(move))
        self._numel = move.numel
        self._low = self._high = 0  # elements that the panel holds
        self._panel = memoryview(b"")

    def view(self, start: int, stop: int, until: int) -> memoryview | None:
        """Elements [start, stop) as a slice of the panel, None if they span two panels. Valid until the next call.

        until: the element up to which the caller will ask; nothing after it is read.
        """
        if not self._low <= start < self._high:
            self._load(start, until)
        if stop > self._high:
            return None
        return self._panel[(start - self._low) * self._item : (stop - self._low) * self._item]

    def fill(self, data: memoryview, start: int, stop: int, until: int) -> None:
        """Copy elements [start, stop) into `data`."""
        at = start
        while at < stop:
            if not self._low <= at < self._high:
                self._load(at, until)
            end = min(stop, self._high)
            part = self._panel[(at - self._low) * self._item : (end - self._low) * self._item]
            data[(at - start) * self._item : (end - start) * self._item] = part
            at = end

    def reach(self, start: int, until: int) -> int:
        """Load the panel that holds element `start`. Returns the element at which that panel ends (exclusive)."""
        if not self._low <= start < self._high:
            self._load(start, until)
        return self._high

    def held(self) -> tuple[memoryview, int]:
        """(the panel, its first element)."""
        return self._panel, self._low

    # -- a panel ----------------------------------------------------------------------------------------------------

    def _load(self, start: int, until: int) -> None:
        """Fill the panel from the row of element `start` on: whole rows, as many as there is room for."""
        item = self._item
        row = self._row
        room = len(self._panels[0])
        self._low = self._high = 0  # the panel is invalid if reading fails

        # A single row may be longer than the panel: then a piece of the row.
        if row * item > room:
            low = start
            high = min(start + max(1, room // item), until)
        else:
            first = start // row
            last = ceil_div(until, row)
            rows = even_rows(last - first, room // (row * item), self._height, item)
            low = first * row
            high = min((first + rows) * row, self._numel)

        panel = self._panel = self._panels[0]
        copies = []
        for begin, end, region in self._regions:
            if begin >= high or end <= low:
                continue
            if region.replica:
                copies.append(region)
                continue
            for part in clip(region, low, high):
                self._gather(part, panel, low)

        for region in copies:
            other = self._panels[1]
            for part in clip(region, low, high):
                self._gather(part, other, low)
                self._compare(part, panel, other, low)

        self._low = low
        self._high = high

    def _compare(self, part: Region, panel: memoryview, other: memoryview, low: int) -> None:
        import numpy as np

        item = self._item
        shape = (part.extents, f"V{item}" if item == 16 else _TYPES[item])
        steps = tuple(step * item for step in part.steps)
        at = (part.at - low) * item
        mine: Array = np.ndarray(*shape, panel, at, steps)
        theirs: Array = np.ndarray(*shape, other, at, steps)
        if not np.array_equal(mine, theirs):
            self._differ(part)

    def _gather(self, part: Region, panel: memoryview, low: int) -> None:
        """Read all of a region into the panel, whose first element is `low`."""
        item = self._item
        at = (part.at - low) * self._item
        dims = [
            Dim(n, stride, step * item) for n, stride, step in zip(part.extents, part.strides, part.steps, strict=True)
        ]
        if not dims or (len(dims) == 1 and dims[0].stride == item == dims[0].step):
            self._source.pread(part.file, part.offset, panel[at : at + part.numel * item], count=False)
            return
        inner, outer = strip_of(dims, item)
        for offset, to, few in cut_strip(inner, STRIP if outer else GROUP):
            span = item + sum((n - 1) * stride for n, stride, _ in few)
            pitch = ceil_div(span, 64) * 64
            pitch += 64 * (pitch % 1024 == 0)  # rows 4096 bytes apart fall into the same few cache sets
            for shift, target, many in cut_group(outer, group_of(pitch)):
                self._turn(part.file, part.offset + offset + shift, panel, at + to + target, many, few, span, pitch)

    def _turn(
        self,
        file: int,
        offset: int,
        panel: memoryview,
        at: int,
        outer: Sequence[Dim],
        inner: Sequence[Dim],
        span: int,
        pitch: int,
    ) -> None:
        """Read a group of strips, one for each index of `outer`, and transpose them into the panel from byte `at` on.

        Args:
            offset: the byte of the first strip in the file.
            inner: the dims of one strip.
            span: bytes of a strip in the file.
            pitch: bytes from one strip to the next in the buffer.
        """
        import numpy as np

        order = sorted(outer, key=lambda dim: -dim.stride)  # file order, so that reads go forwards
        offsets, packed = offsets_of(order, offset, pitch)
        strips, slots = self._strips.slots(pitch, span, len(offsets))
        read(self._source, self._strips, file, offsets, slots)
        dims = [*order, *inner]
        kind = _TYPES[self._item]
        extents = tuple(dim.extent for dim in dims)
        source: Array = np.ndarray(extents, kind, strips, 0, (*packed, *(dim.stride for dim in inner)))
        target: Array = np.ndarray(extents, kind, panel, at, tuple(dim.step for dim in dims))
        lay(source, target, min(range(len(dims)), key=lambda d: dims[d].step))


def lay(source: Array, target: Array, axis: int) -> None:
    """Copies `source` to `target`, views of the same shape: target[...] = source.

    By compiled code if it is available, else by NumPy in tiles of COLUMNS along `axis`, the dim along which `target`
    has its smallest stride.
    """
    from ckpt_tool.compiled.library import ready

    library = ready(source.nbytes)
    if library is not None and library.turned(source, target):
        return
    many = source.shape[axis]
    width = COLUMNS if source.strides[axis] > source.itemsize else many
    for column in range(0, many, width):
        few = (*(slice(None),) * axis, slice(column, column + width))
        target[few] = source[few]


# -- geometry -------------------------------------------------------------------------------------------------------


def rows_of(regions: Sequence[Region]) -> tuple[int, int]:
    """(elements of the line in one row of a panel, the largest number of rows), over the transposed ones of
    `regions`."""
    turned = [region for region in regions if is_transposed(region)]
    return max(map(row_of, turned)), max(region.extents[region.steps.index(row_of(region))] for region in turned)


def panels_of(move: Move) -> int:
    """The number of panels that a move needs: one for transposed sources, one for replicas, and one for transposed
    outputs unless they can share that of the sources."""
    read = any(map(is_transposed, move.sources))
    own = any(map(is_transposed, move.outputs)) and not (read and move.dtype == move.dtype_out)
    return read * (1 + any(region.replica for region in move.sources)) + own


def even_rows(total: int, room: int, height: int, item: int) -> int:
    """Rows of the next panel: panels of a move get equal heights, and hold whole matrices if possible.

    Args:
        total: rows still to come.
        room: rows that fit into a panel.
        height: rows of one matrix.
        item: bytes of an element.
    """
    most = max(1, min(STRIP // item, room))
    if most >= height:
        most -= most % height
    rows = ceil_div(total, ceil_div(total, most))
    return min(ceil_div(rows, height) * height, most) if most >= height else rows


def offsets_of(order: Sequence[Dim], offset: int, pitch: int) -> tuple[Sequence[int], list[int]]:
    """Returns (the file offset of each strip, the stride in bytes of each dim of `order` in a buffer with strips
    `pitch` bytes apart)."""
    offsets: Sequence[int] = (offset,)
    packed = list[int]()
    for n, stride, _ in order:
        steps = range(0, n * stride, stride)
        if len(offsets) > 1:
            offsets = [base + step for base in offsets for step in steps]
        else:
            offsets = range(offset, offset + n * stride, stride)
        packed = [n * by for by in packed] + [pitch]
    return offsets, packed


def strip_of(dims: Sequence[Dim], item: int) -> tuple[list[Dim], list[Dim]]:
    """(the dims that make up a strip, smallest stride first; the others, largest step first).

    A strip grows by the next dim while that makes it contiguous, or while it is shorter than SHORT and the gap is no
    longer than the strip or NEAR: a longer read is cheaper than several calls.
    """
    inner = list[Dim]()
    span = item
    left = sorted(dims, key=lambda dim: dim.stride)
    while left and (not inner or left[0].stride < span or (span < SHORT and left[0].stride <= span + max(span, NEAR))):
        dim = left.pop(0)
        inner.append(dim)
        span += (dim.extent - 1) * dim.stride
    return inner, sorted(left, key=lambda dim: -dim.step)


def cut_strip(inner: Sequence[Dim], most: int) -> Iterator[tuple[int, int, list[Dim]]]:
    """Cuts long strips into parts of about `most` bytes; a strip of up to twice that stays in one piece.

    Yields (byte in the strip, byte in the panel, the part's dims).
    """
    *rest, last = inner
    below = sum((dim.extent - 1) * dim.stride for dim in rest)
    if below + last.extent * last.stride <= 2 * most:
        yield 0, 0, [*inner]
        return
    count = max(1, most // last.stride)
    for i in range(0, last.extent, count):
        yield i * last.stride, i * last.step, [*rest, last._replace(extent=min(count, last.extent - i))]


def group_of(pitch: int) -> int:
    """How many strips are transposed together: about GROUP bytes, and whole cache lines of the panel."""
    most = max(1, GROUP // pitch)
    return most if most < EVEN else (most + EVEN // 2) // EVEN * EVEN


def cut_group(outer: Sequence[Dim], most: int) -> Iterator[tuple[int, int, list[Dim]]]:
    """Splits strips into groups of at most `most`. Yields (byte in the file, byte in the panel, dims) of each group.

    The last dim, the columns, is cut first but not below the width of a tile; then the dims before it, in order.
    """
    total = prod(dim.extent for dim in outer)
    if total <= most:
        yield 0, 0, [*outer]
        return
    columns = outer[-1].extent
    first = next((d for d, dim in enumerate(outer[:-1]) if dim.extent > 1), len(outer) - 1)
    d = len(outer) - 1 if total // columns * COLUMNS <= most else first
    dim = outer[d]
    count = max(1, most // (total // dim.extent))
    for i in range(0, dim.extent, count):
        part = dim._replace(extent=min(count, dim.extent - i))
        for shift, to, dims in cut_group([*outer[:d], part, *outer[d + 1 :]], most):
            yield i * dim.stride + shift, i * dim.step + to, dims


# -- reading ----------------------------------------------------------------------------------------------------------


def read(source: Source, strips: Strips, file: int, offsets: Sequence[int], slots: Sequence[memoryview]) -> None:
    """Read the strip at each offset into its slot. All strips have the same length."""
    length = len(slots[0])
    tree = source.remote(file)
    if tree is not None:
        _read_far(tree, source.path(file), offsets, slots)
        return
    if isinstance(offsets, range):
        gaps = [offsets.step - length] * (len(offsets) - 1)
    else:
        gaps = [b - a - length for a, b in pairwise(offsets)]
    try:
        if gaps and 0 <= min(gaps) and max(gaps) <= BRIDGE:
            done = _read_bridged(source.fd(file), strips, offsets, slots, gaps)
        else:
            done = sum(map(os.preadv, repeat(source.fd(file)), zip(slots, strict=True), offsets))
    except OSError:
        done = -1
    if done != length * len(offsets):  # again one at a time, which raises the error that names the byte
        for offset, slot in zip(offsets, slots, strict=True):
            source.pread(file, offset, slot, count=False)


def _read_bridged(
    fd: int, strips: Strips, offsets: Sequence[int], slots: Sequence[memoryview], gaps: Sequence[int]
) -> int:
    """Reads strips that are close together with few calls; the gaps are read too and thrown away.

    Returns the bytes of strips that were read, without gaps.
    """
    every = _VECTORS // 2 if any(gaps) else _VECTORS
    waste = {gap: strips.waste(gap) for gap in sorted(set(gaps), reverse=True)}
    done = 0
    for at in range(0, len(offsets), every):
        few = list(slots[at : at + every])
        between = gaps[at : at + len(few) - 1]
        if any(between):
            vectors = [few[0]] * (2 * len(few) - 1)
            vectors[::2], vectors[1::2] = few, [waste[gap] for gap in between]
        else:
            vectors = few
        done += os.preadv(fd, vectors, offsets[at]) - sum(between)
    return done


def _read_far(tree: Tree, path: str, offsets: Sequence[int], slots: Sequence[memoryview]) -> None:
    """Reads strips from a store: a request costs a round trip, so one request covers all strips near each other."""
    length = len(slots[0])
    i = 0
    while i < len(offsets):
        end = i + 1
        while (
            end < len(offsets)
            and 0 <= offsets[end] - offsets[end - 1] <= length + FAR_BRIDGE
            and offsets[end] + length - offsets[i] <= FAR_READ
        ):
            end += 1
        data = memoryview(tree.view(path, offsets[i], offsets[end - 1] + length - offsets[i]))
        for offset, slot in zip(offsets[i:end], slots[i:end], strict=True):
            slot[:] = data[offset - offsets[i] : offset - offsets[i] + length]
        i = end
