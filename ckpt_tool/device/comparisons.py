"""Compare the two sides of boxes on a device, and count what in them is not finite.

    compare(device, [Strided(a, b, (), (), (), 4096)], [DTYPES["F32"]])[0]
          # DeviceDifference(elements=3, first=17, ulp=1, ...)

One launch for any number of boxes, of any mix of types. The numbers are those of `run/compare.py` and `run/stats.py`:
the same kernel (kernels/compare.cu) counts for `diff`, for replicas and for `verify`. A box has one record, so what is
counted by blocks is requested by blocks. Complex values have no such distance here (`comparable`): as BYTES they are
equal or not.

Cost: one read of both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.device import kernels
from ckpt_tool.device.descriptors import PackedDescriptors, Strided, fill_list, magics, number_tiles
from ckpt_tool.device.library import Device
from ckpt_tool.errors import InternalError

TILE = 32768  # bytes, as in compare.cu
ONE_SIDE = 1  # `flags`
UNITS = 4  # `vlog` of addresses and strides that are multiples of 16
BYTES = 19
KINDS = {  # ck_kind (kernels/ck.h)
    "F64": 0,
    "F32": 1,
    "BF16": 2,
    "F16": 3,
    "F8_E4M3": 4,
    "F8_E5M2": 5,
    "F8_E8M0": 6,
    "F8_E4M3FNUZ": 7,
    "F8_E5M2FNUZ": 8,
    "I8": 9,
    "BOOL": 11,
    "U8": 12,
    "I16": 13,
    "U16": 14,
    "I32": 15,
    "U32": 16,
    "I64": 17,
    "U64": 18,
    **{name: BYTES for name, dtype in DTYPES.items() if dtype.bits < 8},
}

RECORD = np.dtype(
    [(name, "<u8") for name in ("elements", "first", "ulp", "gap", "finite", "nans", "bad_left", "bad_right")]
)
_NONE = (1 << 64) - 1


class DeviceDifference(NamedTuple):
    """What differs in a box."""

    elements: int  # how many have other bits
    first: int  # the number of the first that differs, row by row; -1 where none does
    ulp: int  # the greatest distance in units in the last place
    # the greatest absolute difference among the `finite` elements whose difference is finite; 0.0 where there is none
    gap: float
    finite: int
    nans: int  # elements that differ though both are NaN
    # bad_left, bad_right: elements of each side that are NaN or infinite, or BOOL bytes other than 0 and 1, whether
    # they differ or not. Types below a byte are compared as bytes, without distances
    bad_left: int
    bad_right: int

    @property
    def max_abs(self) -> float:
        """The gap as `run/compare.py` has it of one block: infinite where elements differ and no difference is
        finite."""
        return float("inf") if self.elements and not self.finite else self.gap


def comparable(dtype: DType) -> bool:
    """Are distances between such values measured on the device? All but complex ones are."""
    return dtype.name in KINDS


def pack_pairs(boxes: Sequence[Strided], dtypes: Sequence[DType], *, one_side: bool = False) -> PackedDescriptors:
    """The list for the compare kernel; the record of a box has the box's number. one_side: there is only the source.

    Raises InternalError E1570 where a box has too many tiles, E1578 where a run is no whole number of elements.
    """
    packed = fill_list([box if 0 not in box.extents else Strided(0, 0, (), (), (), 0) for box in boxes])
    if not boxes:
        return PackedDescriptors(packed, 0, 0)

    run = packed["run"]
    items = np.array([max(1, dtype.bits // 8) for dtype in dtypes], np.uint64)
    kinds = np.array([KINDS.get(dtype.name, BYTES) for dtype in dtypes], np.uint8)
    uneven = np.flatnonzero(run % items)
    if uneven.size:
        raise InternalError(
            f"a run of {run[uneven[0]]} bytes of {dtypes[uneven[0]].name}: no whole elements", code="E1578"
        )

    sides = [packed["src"], *packed["sstr"].T.view(np.uint64)]
    if not one_side:
        sides += [packed["dst"], *packed["dstr"].T.view(np.uint64)]
    aligned = np.bitwise_or.reduce(sides) % np.uint64(16) == 0
    packed["vlog"] = np.where(aligned, UNITS, 0)
    packed["op"] = kinds
    packed["flags"] = ONE_SIDE if one_side else 0
    packed["aux"] = np.arange(len(boxes))
    rows = packed["rows"].astype(np.uint64)
    tile = np.uint64(TILE)
    cut = run > tile
    begun = (run + np.uint64(15)) // np.uint64(16)
    per_row = np.where(cut, (run + tile - np.uint64(1)) // tile, 1)
    per_tile = np.where(cut, 1, np.minimum(rows, np.maximum(1, tile // np.maximum(run, 1))))
    if int(per_row.max()) >= 1 << 32:
        raise InternalError(f"a box has {per_row.max()} tiles a row, want fewer than 2^32", code="E1570")

    packed["tiles_per_row"], packed["rows_per_tile"] = per_row, np.maximum(per_tile, 1)
    packed["divr"] = magics(np.maximum(1, np.where(cut, per_row, np.where(aligned, run // np.uint64(16), begun))))
    boxes_per_tile = np.maximum(per_tile, 1).astype(np.int64)
    whole_tiles = (rows.astype(np.int64) + boxes_per_tile - 1) // boxes_per_tile
    tiles = np.where(cut, rows * per_row, whole_tiles)
    tiles = np.where((run == 0) | (rows == 0), 0, tiles).astype(np.uint64)
    return PackedDescriptors(packed, number_tiles(packed, tiles), int((rows * run).sum()))


def compare(
    device: Device, boxes: Sequence[Strided], dtypes: Sequence[DType], *, stream: int = 0
) -> list[DeviceDifference]:
    """How the target of each box differs from its source, values of `dtypes`. Runs and strides in bytes."""
    records = _run_compare(device, pack_pairs(boxes, dtypes), len(boxes), stream)
    gaps = records["gap"].copy().view(np.float64)
    return [
        DeviceDifference(
            elements, -1 if first_element == _NONE else first_element, ulp, float(gap), finite, nans, left_bits, right
        )
        for (elements, first_element, ulp, _, finite, nans, left_bits, right), gap in zip(
            records.tolist(), gaps, strict=True
        )
    ]


def unequal(device: Device, boxes: Sequence[Strided], *, stream: int = 0) -> list[int]:
    """The numbers of the boxes whose two sides differ in any byte."""
    records = _run_compare(device, pack_pairs(boxes, [DTYPES["F4"]] * len(boxes)), len(boxes), stream)
    return [int(number) for number in np.flatnonzero(records["elements"])]


def count_bad(device: Device, boxes: Sequence[Strided], dtypes: Sequence[DType], *, stream: int = 0) -> list[int]:
    """Of each box (its source): values that are NaN or infinite, BOOL bytes other than 0 and 1; 0 for other types."""
    records = _run_compare(device, pack_pairs(boxes, dtypes, one_side=True), len(boxes), stream)
    return [int(count) for count in records["bad_left"]]


def _run_compare(device: Device, pairs: PackedDescriptors, count: int, stream: int) -> npt.NDArray[np.void]:
    begun = np.zeros(count, RECORD)
    begun["first"] = _NONE
    if not pairs.tiles:
        return begun
    with device.upload(begun, stream) as records:
        kernels.compare(device, pairs, records.address, stream=stream)
        return device.download(records.address, begun.nbytes, stream).view(RECORD)
