"""Scan: the digests of a checkpoint's tensors, read through its catalog, tensors shared out over threads.

    digests_of(catalog, tree)[TensorKey("lm_head.weight")]   # 32 hex digits, the same in every layout

Replicas are compared while they are read; checksummed records are checked. Cost: one read of the values.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.inner_path import base_of
from ckpt_tool.core.progress import Progress, working_on
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.errors import CkptError, InputError, StorageError
from ckpt_tool.plan.copy import source_region
from ckpt_tool.plan.plan import Move, Record, SourceFile
from ckpt_tool.run.blocks import BlockReader, Sources
from ckpt_tool.run.compute import Bytes
from ckpt_tool.run.digest import LeafStream, root
from ckpt_tool.run.prefetch import Prefetch
from ckpt_tool.run.records import CheckedRecords, raise_all
from ckpt_tool.run.threads import Workers
from ckpt_tool.run.walk import STRIDED_BLOCK
from ckpt_tool.storage.source import Tree


class Readable(NamedTuple):
    """A catalog's tensors prepared for reading block by block."""

    moves: tuple[Move, ...]  # one for each tensor, without outputs
    files: Sources  # the files in which the tensors are stored
    records: tuple[Record, ...]  # the checksummed records of those files that contain the tensors


# Tensors whose line is not row-major -> the order of the dims in the line.
Orders = Mapping[TensorKey, tuple[int, ...]]


def readable(tensors: Iterable[LogicalTensor], tree: Tree, orders: Orders = MappingProxyType({})) -> Readable:
    """The tensors as moves without outputs, with their files and records, for `walk`."""
    numbers: dict[str, int] = {}
    records: dict[Record, None] = {}
    moves = []
    for tensor in tensors:
        regions = []
        order = orders.get(tensor.key, ())
        for chunk in tensor.chunks:
            if chunk.box.numel:
                number = numbers.setdefault(chunk.array.path, len(numbers))
                regions.append(source_region(chunk, tensor.shape, number, order))
                if chunk.array.crc is not None:
                    records[Record(number, *chunk.array.crc)] = None
        # Types below 8 bits are read as bytes: their elements can't be addressed one by one.
        item = max(1, tensor.dtype.bits // 8)
        numel = tensor.nbytes if tensor.dtype.bits < 8 else tensor.numel
        kinds = (tensor.dtype, tensor.dtype)
        sides = (tuple(regions), ())
        moves.append(Move(tensor.key, tensor.shape, *kinds, numel, item, item, *sides, order))
    files = tuple(SourceFile(tree.shown, path, tuple(tree.identity(path))) for path in numbers)
    return Readable(tuple(moves), Sources(files, {tree.shown: tree}), tuple(records))


Visit = Callable[[Move, int, Bytes], None]  # (move, first element, its bytes): blocks of one tensor come in order


def walk(
    source: Readable,
    visit: Callable[[Move], Visit],
    *,
    threads: int | None = None,
    on_fault: Callable[[CkptError], None] | None = None,
    beside: CheckedRecords | None = None,
    progress: Progress | None = None,
    bytewise: bool = False,
) -> None:
    """Read every tensor, block by block, by a few threads; `visit(move)` gives the function that sees its blocks.

    Args:
        on_fault: called with faults of the input (replicas that differ, a wrong CRC), and the walk goes on; without it
            they are raised.
        beside: records of files that `visit` reads itself, to be checked at the end too.
        progress: shows the bytes read and the current file.
        bytewise: the function from `visit` is called with byte positions instead of elements, and with buffers exactly
            as a store has sent them, which may end inside an element: this saves a copy.
    """

    lock = threading.Lock()

    def read(reader: BlockReader, queue: Queue) -> None:
        """Read tensors from the queue until it is empty, on one thread."""
        block: Bytes = np.empty(STRIDED_BLOCK, np.uint8)

        def take() -> Move | None:
            """The next tensor, None at the end of the queue."""
            index = next(queue, None)
            return None if index is None else source.moves[index]

        def expect(move: Move, then: bool) -> None:
            """Have the tensor's bytes fetched ahead; one that fits into a block is read at once anyway."""
            if move.nbytes > STRIDED_BLOCK:
                reader.expect([(move, 0, move.numel)], then=then)

        def passed(nbytes: int) -> None:
            """Report that `nbytes` more bytes were read."""
            ahead.passed(nbytes)
            if progress is not None:
                progress.advance(nbytes)

        ahead = Prefetch(take, expect, lambda move: move.nbytes)
        for move in ahead:
            if progress is not None and move.sources:
                working_on(progress, base_of(source.files.path(move.sources[0].file)))
            # After a fault the rest of the tensor is skipped, so what was prefetched for it is not needed.
            if not _read_one(reader, move, visit(move), block, passed, on_fault, lock, bytewise=bytewise):
                ahead.again()

    share_out(source, read, threads=threads, on_fault=on_fault, beside=beside)


class Queue:
    """Numbers for several threads, until one of them fails."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = iter(numbers)
        self._lock = threading.Lock()
        self.errors = list[BaseException]()

    def __iter__(self) -> Queue:
        return self

    def stopped(self) -> bool:
        """Has one of the threads failed, or the run been interrupted?"""
        return bool(self.errors)

    def __next__(self) -> int:
        with self._lock:
            if self.errors:
                raise StopIteration
            return next(self._numbers)


def share_out(
    source: Readable,
    read: Callable[[BlockReader, Queue], None],
    *,
    threads: int | None = None,
    on_fault: Callable[[CkptError], None] | None = None,
    beside: CheckedRecords | None = None,
    waits: bool = False,
) -> None:
    """Run `read` on a few threads, each with its own reader and one queue of move numbers, sorted by position in the
    files.

    Args:
        on_fault: called with each fault that the checksums of the records show at the end; without it they are raised.
        beside: further records to be checked at the end.
        waits: after an interruption, wait until all threads have ended (they see `Queue.stopped`) before it is raised:
            needed when they write into memory of the caller.
    """
    # By position in the files, so that each file is read forwards.
    order = sorted(range(len(source.moves)), key=lambda i: _first_byte(source.moves[i]))
    queue = Queue(order)
    checked = CheckedRecords(source.files, source.records)

    def work() -> None:
        reader = checked.reader(32)
        try:
            read(reader, queue)
        except BaseException as e:  # handed to the caller's thread, which raises it
            queue.errors.append(e)
        finally:
            checked.done(reader)

    count = max(1, min(threads or min(os.cpu_count() or 1, 8), len(order)))
    Workers(work, count).run(queue.errors.append, waits=waits)
    if queue.errors:
        raise queue.errors[0]
    faults = chain.from_iterable(each.faults() for each in (checked, beside) if each is not None)
    if on_fault is None:
        raise_all(faults)
    else:
        for fault in faults:
            on_fault(fault)


def each_of(count: int, do: Callable[[int], None]) -> None:
    """Call `do(0)` to `do(count - 1)` on a few threads. Raises the first error of any of them."""
    queue = Queue(range(count))

    def work() -> None:
        try:
            for number in queue:
                do(number)
        except BaseException as e:  # handed to the caller's thread, which raises it
            queue.errors.append(e)

    Workers(work, max(1, min(os.cpu_count() or 1, 8, count))).run(queue.errors.append, waits=False)
    if queue.errors:
        raise queue.errors[0]


def _read_one(
    reader: BlockReader,
    move: Move,
    see: Visit,
    block: Bytes,
    passed: Callable[[int], None],
    on_fault: Callable[[CkptError], None] | None,
    lock: threading.Lock,
    *,
    bytewise: bool,
) -> bool:
    """Read one tensor block by block. Returns whether all of it could be read. passed: called with the bytes of each
    block."""
    step = STRIDED_BLOCK // move.item
    unit = move.item if bytewise else 1
    for at in range(0, move.numel, step):
        end = min(at + step, move.numel)
        nbytes = (end - at) * move.item
        try:
            lent = reader.lend_parts(move, at, end) if bytewise else None
            if lent is None:
                reader.fill(move, block[:nbytes].data, at, end)
        except (InputError, StorageError) as e:
            e.key = e.key or str(move.key)  # a chunk that does not decompress knows its file alone
            if on_fault is None:
                raise
            # `on_fault` is called by one thread at a time.
            with lock:
                on_fault(e)
            return False
        if lent is None:
            see(move, at * unit, block[:nbytes])
        else:
            first = at * unit
            for part in lent:
                see(move, first, np.frombuffer(part, np.uint8))
                first += len(part)
        passed(nbytes)
    return True


def _first_byte(move: Move) -> tuple[int, int]:
    return min(((region.file, region.offset) for region in move.sources), default=(0, 0))


def digests_of(
    catalog: Catalog,
    tree: Tree,
    *,
    keys: Sequence[TensorKey] | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    on_fault: Callable[[CkptError], None] | None = None,
    orders: Orders = MappingProxyType({}),
    also: Callable[[Move], Visit] | None = None,
) -> dict[TensorKey, str]:
    """The digest of every tensor of the catalog, or of `keys`.

    Args:
        on_fault: called with faults; tensors with a fault are then left out of the result. Without it faults are
        raised. orders: tensors whose digest is computed over a line with another order of dims, and the shape in that
        order. also: a visitor as for `walk`, called with the same blocks, so that statistics need no second read.
    """
    tensors = [catalog.tensors[key] for key in keys] if keys is not None else list(catalog.tensors.values())
    source = readable(tensors, tree, orders)
    streams: dict[TensorKey, LeafStream] = {}

    def visit(move: Move) -> Visit:
        stream = streams[move.key] = LeafStream(0, move.nbytes, move.nbytes)
        other = also(move) if also is not None else None

        def see(move: Move, at: int, data: Bytes) -> None:
            stream.feed(at if other is None else at * move.item, data.data)
            if other is not None:
                other(move, at, data)

        return see

    bad: list[CkptError] = []

    def note(fault: CkptError) -> None:
        bad.append(fault)
        if on_fault is not None:
            on_fault(fault)

    walk(source, visit, threads=threads, progress=progress, on_fault=note if on_fault else None, bytewise=also is None)
    # A digest of a tensor with a fault would be that of other values.
    broken = {fault.key for fault in bad if fault.key}
    out = {}
    for move in source.moves:
        stream = streams.get(move.key)
        if str(move.key) not in broken:
            out[move.key] = root(move.dtype.name, move.line_shape, stream.leaves if stream else b"")
    return out
