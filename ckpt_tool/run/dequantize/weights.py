"""Quantised weights as floats: codes times scales, all in fp32, each operation rounded to nearest.

    w = code * scale                                  FP8, INT8, MXFP4: transformers' `Fp8Dequantize`, DeepSeek's `weight_dequant`
    w = (code - zero_point) * scale                   packed integers of compressed-tensors
    w = code * (scale / global_scale)                 NVFP4 of compressed-tensors; ModelOpt's `scale * scale_2`

`core.quantised` says what lies where. The product is rounded once more, to the dtype that is written. So are the peers' in
fp32; compressed-tensors computes in the dtype of the scales, which comes to the same wherever that is bf16 or fp32: a code of
8 bits times a bf16 is exact in fp32. (fp16 scales of a bf16 model: there it rounds twice, this once.)
MXFP4 of gpt-oss is made as (..., rows, columns) and shown turned, as transformers' `convert_moe_packed_tensors` returns it.
Cost: 3 ns an element for FP8, 4 for FP4. Memory: a block of the executor and as much again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ckpt_tool.core.box import contiguous_strides, whole
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.quantised import BYTES, WORDS, Kind, Quantised
from ckpt_tool.core.tensor import Chunk, LogicalTensor, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.run.compute import looked_up
from ckpt_tool.run.computed import Input, Read, Recipe
from ckpt_tool.run.dequantize.codes import FP4, Floats, halves, of_bytes, unpacked
from ckpt_tool.run.dequantize.scales import Grid, Numbers, Rectangle, as_floats, rectangles, scale

SHAPE = "E1462"


@dataclass(frozen=True, eq=False)
class Weight(Recipe):
    """One weight. codes: how its values lie in input 0. zero: of packed integers. factor: (input, its dtype, divides?) of
    one number for the whole tensor that the scales are multiplied by, or divided."""

    codes: str
    dtype: DType
    bits: int
    scales: Grid
    zero: Grid | None = None
    packed_zero: int = 0  # words a column of zero points, where those are packed along the rows
    factor: tuple[int, DType, bool] | None = None

    def values(self, read: Read, start: int, stop: int) -> Floats:
        columns = self.shape[-1] if self.shape else 1
        parts = [self._within(read, where).reshape(-1) for where in rectangles(start, stop, columns)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _within(self, read: Read, where: Rectangle) -> Floats:
        values = self._decoded(read, where)
        if self.zero is not None:
            scale(values, *self._zeros(read, where, self.zero), np.subtract)
        scales, taken = self.scales.over(read, where)
        if self.factor is not None:
            number, dtype, divides = self.factor
            factor = as_floats(read(number, 0, 1), dtype, self.key.name)[0]
            with np.errstate(all="ignore"):
                scales = scales / factor if divides else scales * factor
        with np.errstate(all="ignore"):  # what overflows is infinite, as it is for the peers
            scale(values, scales, taken)
        return values

    def _decoded(self, read: Read, where: Rectangle) -> Floats:
        """The codes of a rectangle as floats."""
        rows, count, columns = where.high - where.low, where.right - where.left, self.shape[-1] if self.shape else 1
        first, last = where.low * columns + where.left, (where.high - 1) * columns + where.right
        if self.codes == BYTES:
            return looked_up(of_bytes(self.dtype), read(0, first, last).view(np.uint8)).reshape(rows, count)
        if self.codes == WORDS:
            wide = -(-columns * self.bits // 32)
            low = where.left * self.bits // 32 if rows == 1 else 0
            high = -(-where.right * self.bits // 32) if rows == 1 else wide
            words = read(0, where.low * wide + low, (where.high - 1) * wide + high).view(np.uint8).reshape(rows, -1)
            return unpacked(words, self.bits, where.left * self.bits - 32 * low, count)
        low = first // 2
        pairs = halves(FP4, read(0, low, -(-last // 2)).view(np.uint8))
        return pairs[first - 2 * low : last - 2 * low].reshape(rows, count)

    def _zeros(self, read: Read, where: Rectangle, grid: Grid) -> tuple[Floats, Numbers]:
        """Zero points as `Grid.over` gives scales; packed ones lie along the rows, each column a stream of its own."""
        if not self.packed_zero:
            return grid.over(read, where)
        rows = np.arange(where.low, where.high)
        bits, columns, here = self.bits, grid.columns, rows % grid.rows
        found: list[Floats] = []
        for matrix in np.unique(rows // grid.rows):
            inside = here[rows // grid.rows == matrix]
            low, high = int(inside[0]) * bits // 32, -(-(int(inside[-1]) + 1) * bits // 32)
            base = int(matrix) * self.packed_zero
            words = read(grid.input, (base + low) * columns, (base + high) * columns).reshape(high - low, columns)
            stream = np.ascontiguousarray(words.T).view(np.uint8)
            found.append(unpacked(stream, bits, int(inside[0]) * bits - 32 * low, len(inside)).T)
        width = grid.block[1]
        zeros = np.repeat(np.concatenate(found), width, axis=1)[:, where.left : where.right]
        return zeros, np.arange(len(rows))


def recipe(
    weight: Quantised, key: TensorKey, of: Mapping[str, Input], numbers: Callable[[Input], Sequence[int]]
) -> Weight:
    """How the floats of a weight are made, of shape `weight.shape`.

    key: of the floats. of: name -> the tensor, of every name of the weight. numbers: reads a small tensor of integers
    (`X_shape`). Raises InconsistentCheckpoint E1462 for parts whose shapes or dtypes do not belong together.
    """
    lead, dtype = of[weight.lead], of[weight.lead].tensor.dtype
    inputs, shape = [lead], weight.shape

    def input_of(role: str) -> int:
        inputs.append(of[weight.parts[role]])
        return len(inputs) - 1

    bits, block = weight.bits, weight.block
    if weight.codes == WORDS:
        shape, bits, block = _stated(weight, of, tuple(numbers(of[weight.parts["shape"]])))
    scales = _grid(input_of("scale"), of[weight.parts["scale"]].tensor, shape, block, weight)
    zero, packed_zero = None, 0
    if "zero_point" in weight.parts and weight.codes in (WORDS, BYTES):
        tensor = of[weight.parts["zero_point"]].tensor
        zero, packed_zero = _zero(input_of("zero_point"), tensor, shape, bits, scales, weight)
    factor = None
    for role, divides in (("global_scale", True), ("scale_2", False)):
        if role in weight.parts:
            tensor = of[weight.parts[role]].tensor
            if tensor.numel != 1:
                raise _fault(weight.parts[role], f"{tensor.numel} numbers where one serves the whole tensor")
            factor = (input_of(role), tensor.dtype, divides)
    text = f"dequantised {weight.codes} {bits} {block} {dtype.name} {shape}"
    return Weight(key, shape, tuple(inputs), text, weight.codes, dtype, bits, scales, zero, packed_zero, factor)


def _stated(
    weight: Quantised, of: Mapping[str, Input], stated: tuple[int, ...]
) -> tuple[tuple[int, ...], int, tuple[int, int]]:
    """(shape, bits, block) of packed integers: `X_shape` says how many codes a row has; as many bits as fill its words."""
    words, grid = of[weight.lead].tensor.shape, of[weight.parts["scale"]].tensor.shape
    rows = words[:-1]
    if len(stated) < 2 or stated[-1] < 1 or prod(stated[:-1]) != prod(rows):
        raise _fault(weight.parts["shape"], f"it says {list(stated)}, the packed words are {list(words)}")
    columns = stated[-1]
    fits = [bits for bits in range(1, 9) if -(-columns * bits // 32) == words[-1]]
    bits = weight.bits if weight.bits in fits else fits[0] if len(fits) == 1 else 0
    if not bits or columns % grid[-1] or "g_idx" in weight.parts:
        what = f"{list(words)} words and {list(grid)} scales for {columns} codes a row"
        raise _fault(weight.lead, what if "g_idx" not in weight.parts else "codes in the order of activations (g_idx)")
    return (*rows, columns), bits, (1, columns // grid[-1])


def _zero(
    number: int, tensor: LogicalTensor, shape: tuple[int, ...], bits: int, scales: Grid, weight: Quantised
) -> tuple[Grid, int]:
    """(zero points as a grid like that of the scales, words a column where they are packed along the rows)."""
    packed = -(-scales.rows * bits // 32)
    name = tensor.key.name
    if tensor.dtype.name == "I32" and tensor.shape == (*shape[:-2], packed, scales.columns) and scales.block[0] == 1:
        return replace(scales, input=number, dtype=tensor.dtype, name=name), packed
    if tensor.dtype.bits < 8:
        raise _fault(name, f"zero points of {tensor.dtype.name}")
    return _grid(number, tensor, shape, scales.block, weight), 0


def _grid(
    number: int, tensor: LogicalTensor, shape: tuple[int, ...], block: tuple[int, int], weight: Quantised
) -> Grid:
    """The scales `tensor` over a weight of `shape`."""
    rows, columns = shape[-2:] if len(shape) > 1 else (1, prod(shape))
    if len(shape) == 1 and tensor.numel > 1:
        raise _fault(tensor.key.name, f"{tensor.numel} scales for a vector")
    matrices = prod(shape[:-2])
    across, down = -(-columns // block[1]), -(-rows // block[0])
    own = tensor.numel == matrices * down * across  # each matrix has scales of its own, or one serves all
    if not own and not tensor.numel == down * across == 1:
        raise _fault(tensor.key.name, f"scales of shape {list(tensor.shape)} for {weight.lead} of {list(shape)}")
    return Grid(number, tensor.dtype, rows, down if own else 0, across, block, tensor.key.name)


def turned(made: LogicalTensor) -> LogicalTensor:
    """Floats of shape (..., rows, columns), one array, seen as (..., columns, rows)."""
    array, steps = made.chunks[0].array, contiguous_strides(made.shape)
    shape = (*made.shape[:-2], made.shape[-1], made.shape[-2])
    array = replace(array, shape=shape, strides=(*steps[:-2], steps[-1], steps[-2]))
    return replace(made, shape=shape, chunks=(Chunk(whole(shape), array, whole(shape)),))


def _fault(name: str, what: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(
        f"{name}: {what}", code=SHAPE, key=name, hint="do all files belong to one checkpoint? fetch it again"
    )


def kinds(tensors: Sequence[LogicalTensor]) -> dict[str, Kind]:
    """Tensors as `core.quantised.find` takes them."""
    return {tensor.key.name: Kind(tensor.dtype, tensor.shape) for tensor in tensors}
