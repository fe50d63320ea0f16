"""The packed list carried out by NumPy: what the kernels are held against, and what stands in where there is no GPU.

It reads the very records that a kernel reads, but takes another road: each box is one assignment of one strided view to
another, with no tiles, widths or threads. Addresses are of this process: an array's is `array.ctypes.data`.

    target, source = np.zeros(6, np.uint8), np.arange(6, dtype=np.uint8)
    copy_boxes(pack([Strided(source.ctypes.data, target.ctypes.data, (), (), (), 6)]))
"""

from __future__ import annotations

from ctypes import c_uint8

import numpy as np
import numpy.typing as npt

from ckpt_tool.device.descriptors import Launch, PackedDescriptors
from ckpt_tool.errors import InternalError

WORDS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "V16"}


def view(
    address: int, extents: tuple[int, ...], strides: tuple[int, ...], dtype: npt.DTypeLike
) -> npt.NDArray[np.generic]:
    """Memory of this process at `address` as an array; strides in bytes. No extent is 0."""
    kind = np.dtype(dtype)
    reach = [(n - 1) * stride for n, stride in zip(extents, strides, strict=True)]
    before = -sum(r for r in reach if r < 0)
    nbytes = before + sum(r for r in reach if r > 0) + kind.itemsize
    memory = (c_uint8 * nbytes).from_address(address - before)
    return np.ndarray(extents, kind, memoryview(memory), before, strides)


def copy_boxes(boxes: PackedDescriptors) -> None:
    """What box_copy does."""
    for box in boxes.packed:
        width = 1 << int(box["vlog"])
        extents = (*(int(n) for n in box["ext"]), int(box["run"]) // width)
        to = view(int(box["dst"]), extents, (*(int(n) for n in box["dstr"]), width), WORDS[width])
        to[...] = view(int(box["src"]), extents, (*(int(n) for n in box["sstr"]), width), WORDS[width])


def transpose_boxes(boxes: PackedDescriptors) -> None:
    """What box_transpose does."""
    for box in boxes.packed:
        extents = tuple(int(n) for n in box["ext"])
        word = WORDS[int(box["run"])]
        to = view(int(box["dst"]), extents, tuple(int(n) for n in box["dstr"]), word)
        to[...] = view(int(box["src"]), extents, tuple(int(n) for n in box["sstr"]), word)


def carry_out(launch: Launch) -> None:
    """What a launch does. Raises InternalError for a kernel that only a device runs."""
    ways = {"box_copy": copy_boxes, "box_transpose": transpose_boxes}
    if launch.kernel not in ways:
        raise InternalError(f"{launch.kernel} has no stand-in for a list alone")
    ways[launch.kernel](launch.boxes)
