"""One function a kernel: lists go to the device, the kernel runs, errors are raised. Work of nothing launches nothing.

blocks, threads: 0 for the kernel's own choice. Calls return when the work is queued; `device.sync(stream)` waits for
    it.
"""

from __future__ import annotations

import numpy as np

from ckpt_tool.device.casts import Casts, CodeList, Counted
from ckpt_tool.device.descriptors import Descriptors, Launch
from ckpt_tool.device.library import Device
from ckpt_tool.device.quantising import FloatList


def box_copy(device: Device, boxes: Descriptors, *, blocks: int = 0, threads: int = 0, stream: int = 0) -> None:
    """Move the bytes of all boxes from source to target."""
    if not boxes.tiles:
        return
    with device.upload(boxes.packed, stream) as packed:
        device.library.call("box_copy", packed.address, len(boxes.packed), boxes.tiles, blocks, threads, stream)
        device.sync(stream)  # the list is freed on leaving


def box_transpose(device: Device, boxes: Descriptors, *, blocks: int = 0, threads: int = 0, stream: int = 0) -> None:
    """Swap rows and columns of all boxes (`transposes.pack_turned`)."""
    if not boxes.tiles:
        return
    with device.upload(boxes.packed, stream) as packed:
        device.library.call("box_transpose", packed.address, len(boxes.packed), boxes.tiles, blocks, threads, stream)
        device.sync(stream)


def launch(device: Device, what: Launch, *, blocks: int = 0, threads: int = 0, stream: int = 0) -> None:
    """Run what `launches.launches` made of a list of copies."""
    run = {"box_copy": box_copy, "box_transpose": box_transpose}[what.kernel]
    run(device, what.boxes, blocks=blocks, threads=threads, stream=stream)


def box_cast(device: Device, casts: Casts, *, blocks: int = 0, threads: int = 0, stream: int = 0) -> list[int]:
    """Cast all boxes (`casts.pack_casts`) and wait. Returns, by record, how many values were beyond the target's
    range."""
    counts = np.zeros((casts.records, 2), np.uint64)
    listed, tiles = casts.boxes.packed, casts.boxes.tiles
    if tiles:
        with device.upload(listed, stream) as packed, device.upload(counts, stream) as counted:
            device.library.call(
                "box_cast",
                packed.address,
                len(listed),
                tiles,
                casts.source,
                casts.target,
                counted.address,
                blocks,
                threads,
                stream,
            )
            counts = device.download(counted.address, counts.nbytes, stream).view(np.uint64).reshape(counts.shape)
    return [int(n) for n in counts[:, 0]]


def box_dequantise(
    device: Device, codes: CodeList, *, blocks: int = 0, threads: int = 0, stream: int = 0
) -> list[Counted]:
    """Make floats of all codes (`casts.pack_codes`) and wait. Returns what was counted, by box of the caller."""
    counts = np.zeros((len(codes.scales), 2), np.uint64)
    listed, tiles = codes.boxes.packed, codes.boxes.tiles
    out = np.zeros((codes.given, 2), np.uint64)
    if tiles:
        with (
            device.upload(listed, stream) as packed,
            device.upload(codes.scales, stream) as scales,
            device.upload(counts, stream) as counted,
        ):
            device.library.call(
                "box_dequantise",
                packed.address,
                len(listed),
                tiles,
                codes.source,
                codes.target,
                scales.address,
                counted.address,
                blocks,
                threads,
                stream,
            )
            counts = device.download(counted.address, counts.nbytes, stream).view(np.uint64).reshape(counts.shape)
        np.add.at(out, np.array(codes.records), counts)
    return [Counted(int(lost), int(nans)) for lost, nans in out]


def box_quantise(device: Device, floats: FloatList, *, blocks: int = 0, threads: int = 0, stream: int = 0) -> list[int]:
    """Make codes and scales of all floats (`quantising.pack_floats`) and wait. Returns, by box of the caller, how many
    of its blocks have what is no finite number: the CPU refuses those (E2720)."""
    counts = np.zeros(len(floats.table), np.uint64)
    listed, tiles = floats.boxes.packed, floats.boxes.tiles
    out = np.zeros(floats.given, np.uint64)
    if tiles:
        with (
            device.upload(listed, stream) as packed,
            device.upload(floats.table, stream) as table,
            device.upload(counts, stream) as counted,
        ):
            device.library.call(
                "box_quantise",
                packed.address,
                len(listed),
                tiles,
                floats.source,
                floats.scheme,
                table.address,
                counted.address,
                blocks,
                threads or floats.threads,
                stream,
            )
            counts = device.download(counted.address, counts.nbytes, stream).view(np.uint64)
        np.add.at(out, np.array(floats.records), counts)
    return [int(n) for n in out]


def digest(
    device: Device, lines: Descriptors, *, lanes: int = 0, blocks: int = 0, threads: int = 0, stream: int = 0
) -> None:
    """Hash the leaves of lines (`digests.pack_lines`). lanes: threads a leaf: 4, 8, 16 or 32."""
    if not lines.tiles:
        return
    with device.upload(lines.packed, stream) as packed:
        device.library.call("digest", packed.address, len(lines.packed), lines.tiles, lanes, blocks, threads, stream)
        device.sync(stream)


def compare(
    device: Device, pairs: Descriptors, records: int, *, blocks: int = 0, threads: int = 0, stream: int = 0
) -> None:
    """Hold both sides of each pair (`comparisons.pack_pairs`) against each other; records: the address of theirs."""
    if not pairs.tiles:
        return
    with device.upload(pairs.packed, stream) as packed:
        device.library.call("compare", packed.address, len(pairs.packed), pairs.tiles, records, blocks, threads, stream)
        device.sync(stream)
