"""Do the fp32 master weights round to the 16-bit model? `run/rounding.py` on a device.

The master fills the first line and is cast to the second, the model fills the first, and the two are held against each other.
NaNs count as equal: where pairs of them differ in their bits the CPU looks at the window. A fault of the input leaves all to the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.device import comparisons
from ckpt_tool.device.casting import cast_there
from ckpt_tool.device.descriptors import Strided
from ckpt_tool.device.loading import Window, batches, compare_replicas, fill, of_device, windows
from ckpt_tool.device.memory import Device
from ckpt_tool.device.scan import gathered
from ckpt_tool.device.station import Station, Stations
from ckpt_tool.errors import InputError, StorageError
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.blocks import Reader
from ckpt_tool.run.rounding import Drift, drift_at, drifted, drifts, pairs_of
from ckpt_tool.run.scan import Queue, readable, share_out
from ckpt_tool.storage.source import Tree


def drifts_there(
    catalog: Catalog, tree: Tree, device: Device, *, skip: frozenset[str], threads: int, memory: int
) -> list[Drift]:
    """What `run.rounding.drifts` gives, in the order of the catalog."""
    pairs = pairs_of(catalog, skip)
    models, masters = readable([a for a, _ in pairs], tree), readable([b for _, b in pairs], tree)
    twins = {move.key: model for move, model in zip(masters.moves, models.moves, strict=True)}
    casts = tuple(
        move._replace(dtype_out=model.dtype, item_out=model.item)
        for move, model in zip(masters.moves, models.moves, strict=True)
    )
    found: dict[TensorKey, list[int]] = {}
    lock = threading.Lock()
    try:
        with Stations(device, threads=threads, memory=memory, work=sum(move.nbytes for move in casts)) as stations:

            def read(reader: Reader, queue: Queue) -> None:
                model_reader = Reader(models.files, 16, {})
                try:
                    with stations.station() as station:
                        for some in gathered(casts, queue, station.line):
                            for window, count, first in _looked_at(
                                station, (reader, model_reader), some, twins, queue.stopped
                            ):
                                with lock:
                                    known = found.setdefault(twins[window.move.key].key, [0, first])
                                    known[0] += count
                                    known[1] = min(known[1], first)
                finally:
                    model_reader.close()

            share_out(masters, read, threads=stations.sizes.threads, waits=True, on_fault=lambda fault: None)
    except (InputError, StorageError) as fault:
        if of_device(fault):
            raise
        return drifts(catalog, tree, skip=skip)
    return [drift_at(move.key, move.shape, *found[move.key]) for move in models.moves if move.key in found]


def _looked_at(
    station: Station,
    readers: tuple[Reader, Reader],
    moves: Sequence[Move],
    twins: dict[TensorKey, Move],
    stopped: Callable[[], bool],
) -> Iterator[tuple[Window, int, int]]:
    """(window, elements that differ, the first of them) of the windows where any do."""
    masters, models = readers
    every = (window for move in moves for window in windows(move, 0, move.numel, move.numel, station.line))
    for batch in batches(every, station.line):
        fill(station, masters, batch, station.first, stopped=stopped)
        compare_replicas(station, masters, batch, stopped=stopped)
        cast_there(station, batch)
        other = [window._replace(move=twins[window.move.key]) for window in batch]
        fill(station, models, other, station.first, stopped=stopped)
        boxes = [Strided(station.first + w.at, station.second + w.at, (), (), (), w.nbytes) for w in other]
        found = comparisons.compare(station.device, boxes, [w.move.dtype for w in other], stream=station.stream)
        for window, model, difference in zip(batch, other, found, strict=True):
            if difference.elements and not difference.nans:
                yield window, difference.elements, window.start + difference.first
            elif difference.elements > difference.nans:
                where = _by_cpu(masters, window, station, model)
                yield window, len(where), window.start + where[0]


def _by_cpu(masters: Reader, window: Window, station: Station, model: Window) -> list[int]:
    """The elements of a window that drifted, counted from its start."""
    block = bytearray(window.nbytes)
    masters.fill(window.move, memoryview(block), window.start, window.end, count=False)
    values = station.bytes_at(station.first + model.at, model.nbytes)
    where = drifted(values, np.frombuffer(block, np.uint8), model.move.dtype, window.move.dtype)
    return [int(k) for k in where]
