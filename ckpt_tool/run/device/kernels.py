"""One function a kernel: lists go to the device, the kernel runs, errors are raised. Work of nothing launches nothing.

blocks, threads: 0 for the kernel's own choice. Calls return when the work is queued; `device.sync(stream)` waits for it.
"""

from __future__ import annotations

from ckpt_tool.run.device.descriptors import Descriptors
from ckpt_tool.run.device.launches import Launch
from ckpt_tool.run.device.memory import Device


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


def digest(
    device: Device, lines: Descriptors, *, lanes: int = 0, blocks: int = 0, threads: int = 0, stream: int = 0
) -> None:
    """Hash the leaves of lines (`digests.pack_lines`). lanes: threads a leaf: 4, 8, 16 or 32."""
    if not lines.tiles:
        return
    with device.upload(lines.packed, stream) as packed:
        device.library.call("digest", packed.address, len(lines.packed), lines.tiles, lanes, blocks, threads, stream)
        device.sync(stream)
