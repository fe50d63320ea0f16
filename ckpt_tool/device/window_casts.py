"""Casts of windows on the device, from the first line of a station to the second: one launch a pair of dtypes."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tool.core.dtype import DType
from ckpt_tool.device import casts, kernels
from ckpt_tool.device.descriptors import Strided
from ckpt_tool.device.station import Station
from ckpt_tool.device.windows import Window
from ckpt_tool.run.compute import can_cast


def can_cast_there(source: DType, target: DType) -> bool:
    """Do the kernels know this cast?"""
    return can_cast(source, target) and source.name in casts.KINDS and target.name in casts.KINDS


def cast_there(station: Station, batch: Sequence[Window]) -> list[int]:
    """Cast the windows whose dtype changes. Returns of each how many values were beyond the target's range, of those
    that it writes."""
    lost_counts = [0] * len(batch)
    kinds: dict[tuple[str, str], list[int]] = {}
    for k, window in enumerate(batch):
        if window.move.dtype != window.move.dtype_out:
            kinds.setdefault((window.move.dtype.name, window.move.dtype_out.name), []).append(k)
    for numbers in kinds.values():
        move = batch[numbers[0]].move
        boxes: list[Strided] = []
        records: list[int] = []
        for record, k in enumerate(numbers):
            boxes += _line(station, batch[k], batch[k].start, batch[k].stop)
            records += [record] * (len(boxes) - len(records))
        for k in numbers:  # what completes a leaf is another item's to count
            boxes += _line(station, batch[k], batch[k].stop, batch[k].end)
            records += [len(numbers)] * (len(boxes) - len(records))
        packed = casts.pack_casts(boxes, move.dtype, move.dtype_out, records)
        counts = kernels.box_cast(station.device, packed, stream=station.stream)
        for record, k in enumerate(numbers):
            lost_counts[k] = counts[record] if record < len(counts) else 0
    return lost_counts


def _line(station: Station, window: Window, start: int, stop: int) -> list[Strided]:
    move = window.move
    skip = start - window.start
    return casts.line(
        station.first + window.at + skip * move.item, station.second + window.at + skip * move.item_out, stop - start
    )
