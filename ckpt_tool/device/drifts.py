"""Do the fp32 master weights round to the 16-bit model? `run/rounding.py` on a device.

The master is read into the first line and cast to the second, then the model is read into the first, and the two are
compared. NaNs count as equal: if pairs of them differ in their bits, the CPU compares the window. After an error in
the input all is done by the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.device import comparisons
from ckpt_tool.device.descriptors import Strided
from ckpt_tool.device.library import Device
from ckpt_tool.device.station import Station, Stations
from ckpt_tool.device.verify import gather_moves
from ckpt_tool.device.window_casts import cast_there
from ckpt_tool.device.windows import Window, batches, compare_replicas, fill, is_device_fault, windows
from ckpt_tool.errors import InputError, StorageError
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.blocks import BlockReader
from ckpt_tool.run.rounding import Drift, drift_at, drifted, drifts, pairs_of
from ckpt_tool.run.scan import Queue, readable, share_out
from ckpt_tool.storage.source import Tree


def drifts_there(
    catalog: Catalog, tree: Tree, device: Device, *, skip: frozenset[str], threads: int, memory: int
) -> list[Drift]:
    """What `run.rounding.drifts` gives, in the order of the catalog."""
    pairs = pairs_of(catalog, skip)
    models = readable([a for a, _ in pairs], tree)
    masters = readable([b for _, b in pairs], tree)
    twins = {move.key: model for move, model in zip(masters.moves, models.moves, strict=True)}
    casts = tuple(
        move._replace(dtype_out=model.dtype, item_out=model.item)
        for move, model in zip(masters.moves, models.moves, strict=True)
    )
    found: dict[TensorKey, list[int]] = {}
    lock = threading.Lock()
    try:
        with Stations(device, threads=threads, memory=memory, work=sum(move.nbytes for move in casts)) as stations:

            def read(reader: BlockReader, queue: Queue) -> None:
                model_reader = BlockReader(models.files, 16, {})
                try:
                    with stations.station() as station:
                        for handful in gather_moves(casts, queue, station.line):
                            for window, count, first_drift in _looked_at(
                                station, (reader, model_reader), handful, twins, queue.stopped
                            ):
                                with lock:
                                    totals = found.setdefault(twins[window.move.key].key, [0, first_drift])
                                    totals[0] += count
                                    totals[1] = min(totals[1], first_drift)
                finally:
                    model_reader.close()

            share_out(masters, read, threads=stations.sizes.threads, waits=True, on_fault=lambda fault: None)
    except (InputError, StorageError) as fault:
        if is_device_fault(fault):
            raise
        return drifts(catalog, tree, skip=skip)
    return [drift_at(move.key, move.shape, *found[move.key]) for move in models.moves if move.key in found]


def _looked_at(
    station: Station,
    readers: tuple[BlockReader, BlockReader],
    moves: Sequence[Move],
    twins: dict[TensorKey, Move],
    stopped: Callable[[], bool],
) -> Iterator[tuple[Window, int, int]]:
    """(window, elements that differ, the first of them) of the windows where any do."""
    masters, models = readers
    all_windows = (window for move in moves for window in windows(move, 0, move.numel, move.numel, station.line))
    for batch in batches(all_windows, station.line):
        fill(station, masters, batch, station.first, stopped=stopped)
        compare_replicas(station, masters, batch, stopped=stopped)
        cast_there(station, batch)
        twin_windows = [window._replace(move=twins[window.move.key]) for window in batch]
        fill(station, models, twin_windows, station.first, stopped=stopped)
        boxes = [Strided(station.first + w.at, station.second + w.at, (), (), (), w.nbytes) for w in twin_windows]
        worsts = comparisons.compare(station.device, boxes, [w.move.dtype for w in twin_windows], stream=station.stream)
        for window, model, difference in zip(batch, twin_windows, worsts, strict=True):
            if difference.elements and not difference.nans:
                yield window, difference.elements, window.start + difference.first
            elif difference.elements > difference.nans:
                drifted_at = _find_drifts_by_cpu(masters, window, station, model)
                yield window, len(drifted_at), window.start + drifted_at[0]


def _find_drifts_by_cpu(masters: BlockReader, window: Window, station: Station, model: Window) -> list[int]:
    """The elements of a window that drifted, counted from its start."""
    block = bytearray(window.nbytes)
    masters.fill(window.move, memoryview(block), window.start, window.end, count=False)
    values = station.bytes_at(station.first + model.at, model.nbytes)
    positions = drifted(values, np.frombuffer(block, np.uint8), model.move.dtype, window.move.dtype)
    return [int(k) for k in positions]
