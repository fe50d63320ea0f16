"""One function a kernel: lists go to the device, the kernel runs, errors are raised. Work of nothing launches nothing.

blocks, threads: 0 for the kernel's own choice. Calls return when the work is queued; `device.sync(stream)` waits for
    it.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import numpy.typing as npt

from ckpt_tool.device.casts import Casts, CodeList, Counted
from ckpt_tool.device.descriptors import Launch, PackedDescriptors
from ckpt_tool.device.library import Device
from ckpt_tool.device.quantising import FloatList


def box_copy(device: Device, boxes: PackedDescriptors, *, blocks: int = 0, threads: int = 0, stream: int = 0) -> None:
    """Move the bytes of all boxes from source to target."""
    if not boxes.tiles:
        return
    with device.upload(boxes.packed, stream) as packed:
        device.library.call("box_copy", packed.address, len(boxes.packed), boxes.tiles, blocks, threads, stream)
        device.sync(stream)  # the list is freed on leaving


def box_transpose(
    device: Device, boxes: PackedDescriptors, *, blocks: int = 0, threads: int = 0, stream: int = 0
) -> None:
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


def _counts(
    device: Device,
    kernel: str,
    boxes: PackedDescriptors,
    kinds: tuple[int, int],
    counts: npt.NDArray[np.uint64],
    *beside: npt.NDArray[np.void],
    blocks: int,
    threads: int,
    stream: int,
) -> npt.NDArray[np.uint64]:
    """Run a kernel that counts, and wait; `counts` as it leaves them. kinds: the two numbers that tell it what to make
    of what. beside: the tables that its boxes point into."""
    if not boxes.tiles:
        return counts
    with ExitStack() as uploads:
        packed, *tables, counted = (
            uploads.enter_context(device.upload(array, stream)).address for array in (boxes.packed, *beside, counts)
        )
        work = (packed, len(boxes.packed), boxes.tiles, *kinds, *tables, counted)
        device.library.call(kernel, *work, blocks, threads, stream)
        return device.download(counted, counts.nbytes, stream).view(np.uint64).reshape(counts.shape)


def box_cast(device: Device, casts: Casts, *, blocks: int = 0, threads: int = 0, stream: int = 0) -> list[int]:
    """Cast all boxes (`casts.pack_casts`) and wait. Returns, by record, how many values were beyond the target's
    range."""
    counts: npt.NDArray[np.uint64] = np.zeros((casts.records, 2), np.uint64)
    kinds = (casts.source, casts.target)
    counts = _counts(device, "box_cast", casts.boxes, kinds, counts, blocks=blocks, threads=threads, stream=stream)
    return [int(n) for n in counts[:, 0]]


def box_dequantise(
    device: Device, codes: CodeList, *, blocks: int = 0, threads: int = 0, stream: int = 0
) -> list[Counted]:
    """Make floats of all codes (`casts.pack_codes`) and wait. Returns what was counted, by box of the caller."""
    counts: npt.NDArray[np.uint64] = np.zeros((len(codes.scales), 2), np.uint64)
    kinds = (codes.source, codes.target)
    counts = _counts(
        device,
        "box_dequantise",
        codes.boxes,
        kinds,
        counts,
        codes.scales,
        blocks=blocks,
        threads=threads,
        stream=stream,
    )
    counters = np.zeros((codes.given, 2), np.uint64)
    np.add.at(counters, np.array(codes.records, np.intp), counts)
    return [Counted(int(lost_count), int(nans)) for lost_count, nans in counters]


def box_quantise(device: Device, floats: FloatList, *, blocks: int = 0, threads: int = 0, stream: int = 0) -> list[int]:
    """Make codes and scales of all floats (`quantising.pack_floats`) and wait. Returns, by box of the caller, how many
    of its blocks have what is no finite number: the CPU refuses those (E2720)."""
    counts: npt.NDArray[np.uint64] = np.zeros(len(floats.table), np.uint64)
    kinds = (floats.source, floats.scheme)
    threads = threads or floats.threads
    counts = _counts(
        device, "box_quantise", floats.boxes, kinds, counts, floats.table, blocks=blocks, threads=threads, stream=stream
    )
    counters = np.zeros(floats.given, np.uint64)
    np.add.at(counters, np.array(floats.records, np.intp), counts)
    return [int(n) for n in counters]


def digest(
    device: Device, lines: PackedDescriptors, *, lanes: int = 0, blocks: int = 0, threads: int = 0, stream: int = 0
) -> None:
    """Hash the leaves of lines (`digests.pack_lines`). lanes: threads a leaf: 4, 8, 16 or 32."""
    if not lines.tiles:
        return
    with device.upload(lines.packed, stream) as packed:
        device.library.call("digest", packed.address, len(lines.packed), lines.tiles, lanes, blocks, threads, stream)
        device.sync(stream)


def compare(
    device: Device, pairs: PackedDescriptors, records: int, *, blocks: int = 0, threads: int = 0, stream: int = 0
) -> None:
    """Hold both sides of each pair (`comparisons.pack_pairs`) against each other; records: the address of theirs."""
    if not pairs.tiles:
        return
    with device.upload(pairs.packed, stream) as packed:
        device.library.call("compare", packed.address, len(pairs.packed), pairs.tiles, records, blocks, threads, stream)
        device.sync(stream)
