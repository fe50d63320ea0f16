"""Quantised weights as floats: codes times scales, all in fp32, each operation rounded to nearest.

    w = code * scale                        FP8, INT8, MXFP4: transformers' `Fp8Dequantize`, DeepSeek's `weight_dequant`
    w = (code - zero_point) * scale         packed integers of compressed-tensors
    w = code * (scale / global_scale)       NVFP4 of compressed-tensors; ModelOpt's `scale * scale_2`, without a -0;
                                            torchao's `scale * per_tensor_scale`

`weights` says what is stored where. The product is rounded once more, to the dtype that is written. So are the peers'
in fp32; compressed-tensors computes in the dtype of the scales, which comes to the same wherever that is bf16 or fp32:
a code of 8 bits times a bf16 is exact in fp32. (fp16 scales of a bf16 model: there it rounds twice, this once.) MXFP4
of gpt-oss is made as (..., rows, columns) and shown turned, as transformers' `convert_moe_packed_tensors` returns it.
Cost: 3 ns an element for FP8, 4 for FP4. Memory: a block of the executor and as much again.

Quantised optimizer states of Paddle as the floats that they stand for (`weight_schemes.paddle_states` says what is
stored).

    w [exp_avg@int8] I8 (4, 8), w [exp_avg@scales] F32 (8,)   ->   w [exp_avg] F32 (4, 8)

Arithmetic of PaddleFormers, all in fp32, each operation rounded to nearest:

    O1   q / 127 * scale                          r = q / 255 * (max - min) + min           m2 = (1 / r - 1e-8)^2
    O2   (q >> 4) * scale / 7                     r = (q & 15) / 15 * (max - min) + min     the same

First moments equal Paddle's bit for bit. Second moments do where Paddle's division rounds to nearest: its CPU kernel is
off by one unit in the last place for some 0.3% of the quotients (paddlepaddle 3.3.1, 1.0 / x against NumPy and
paddle.reciprocal).

Cost: 2 ns an element, memory of a few blocks. What it does not do: quantise.
Source: PaddleFormers 1.2.0 `quantization/checkpoint_quantization_utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.core.box import contiguous_strides, whole
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import Chunk, LogicalTensor, Path, TensorKey
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint
from ckpt_tool.quantised.codes import (
    FP4,
    FP4_MODELOPT,
    Floats,
    Numbers,
    Rectangle,
    ScaleGrid,
    as_floats,
    halves,
    of_bytes,
    rectangles,
    scale,
    unpacked,
)
from ckpt_tool.run.compute import looked_up
from ckpt_tool.run.computed import Input, Read, Recipe
from ckpt_tool.storage.source import Tree
from ckpt_tool.weight_schemes import paddle_states as quant
from ckpt_tool.weight_schemes.weights import (
    BYTES,
    MATRIX,
    OF_127,
    STREAM,
    TABLED,
    TILED,
    TRITS,
    WORDS,
    Quantised,
    TensorKind,
)

SHAPE = "E1462"


@dataclass(frozen=True, eq=False)
class Weight(Recipe):
    """One weight."""

    # codes, packed: how its values are stored in input 0, and as which dtype
    codes: str
    packed: DType
    bits: int
    scales: ScaleGrid
    zero: ScaleGrid | None = None  # of packed integers
    packed_zero: int = 0  # words a column of zero points, where those are packed along the rows
    # (input, its dtype, divides?) of one number for the whole tensor that the scales are multiplied by, or divided
    factor: tuple[int, DType, bool] | None = None
    fours: tuple[float, ...] = FP4  # what a code of four bits stands for

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
        rows = where.high - where.low
        count = where.right - where.left
        columns = self.shape[-1] if self.shape else 1
        first = where.low * columns + where.left
        last = (where.high - 1) * columns + where.right
        if self.codes == BYTES:
            return looked_up(of_bytes(self.packed), read(0, first, last).view(np.uint8)).reshape(rows, count)
        if self.codes == WORDS:
            wide = -(-columns * self.bits // 32)
            low = where.left * self.bits // 32 if rows == 1 else 0
            high = -(-where.right * self.bits // 32) if rows == 1 else wide
            words = read(0, where.low * wide + low, (where.high - 1) * wide + high).view(np.uint8).reshape(rows, -1)
            return unpacked(words, self.bits, where.left * self.bits - 32 * low, count)
        low = first // 2
        pairs = halves(self.fours, read(0, low, ceil_div(last, 2)).view(np.uint8))
        return pairs[first - 2 * low : last - 2 * low].reshape(rows, count)

    def _zeros(self, read: Read, where: Rectangle, grid: ScaleGrid) -> tuple[Floats, Numbers]:
        """Zero points as `ScaleGrid.over` gives scales; packed ones are along the rows, each column a stream of its
        own."""
        if not self.packed_zero:
            zeros, taken = grid.over(read, where)
            if grid.dtype.is_float and (zeros != np.rint(zeros)).any():
                raise _fault(grid.name, "zero points that are no integers")
            return zeros, taken
        rows = np.arange(where.low, where.high)
        bits = self.bits
        columns = grid.columns
        here = rows % grid.rows
        found: list[Floats] = []
        for matrix in np.unique(rows // grid.rows):
            inside = here[rows // grid.rows == matrix]
            low = int(inside[0]) * bits // 32
            high = -(-(int(inside[-1]) + 1) * bits // 32)
            base = int(matrix) * self.packed_zero
            words = read(grid.input, (base + low) * columns, (base + high) * columns).reshape(high - low, columns)
            stream = np.ascontiguousarray(words.T).view(np.uint8)
            found.append(unpacked(stream, bits, int(inside[0]) * bits - 32 * low, len(inside)).T)
        width = grid.block[1]
        zeros = np.repeat(np.concatenate(found), width, axis=1)[:, where.left : where.right]
        return zeros, np.arange(len(rows))


def recipe(
    weight: Quantised, key: TensorKey, of: Mapping[str, Input], numbers: Callable[[Input], Sequence[int]]
) -> Recipe:
    """How the floats of a weight are made, of shape `weight.shape`.

    key: of the floats. of: name -> the tensor, of every name of the weight. numbers: reads a small tensor of integers
    (`X_shape`, bitsandbytes' states). Raises InconsistentCheckpoint E1462 for parts whose shapes or dtypes do not
    belong together.
    """
    if weight.codes == MATRIX:
        from ckpt_tool.quantised.matrix import matrix

        return matrix(weight, key, of)
    if weight.codes == STREAM:
        from ckpt_tool.quantised.groups import of_groups

        return of_groups(weight, key, of)
    if weight.codes == TRITS:
        from ckpt_tool.quantised.trits import trits

        return trits(weight, key, of)
    if weight.codes in (TABLED, OF_127):
        from ckpt_tool.quantised.tabled import bytes_127, tabled

        return (tabled if weight.codes == TABLED else bytes_127)(weight, key, of, numbers)
    lead = of[weight.lead]
    dtype = of[weight.lead].tensor.dtype
    inputs = [lead]
    shape = weight.shape

    def input_of(role: str) -> int:
        inputs.append(of[weight.parts[role]])
        return len(inputs) - 1

    bits = weight.bits
    block = weight.block
    if weight.codes == WORDS:
        shape, bits, block = _stated(weight, of, tuple(numbers(of[weight.parts["shape"]])))
    scales = _grid(input_of("scale"), of[weight.parts["scale"]].tensor, shape, block, weight)
    zero = None
    packed_zero = 0
    if "zero_point" in weight.parts and weight.codes in (WORDS, BYTES):
        tensor = of[weight.parts["zero_point"]].tensor
        zero, packed_zero = _zero(input_of("zero_point"), tensor, shape, bits, scales, weight)
    factor = None
    for role, divides in (("global_scale", True), ("scale_2", False), ("per_tensor_scale", False)):
        if role in weight.parts:
            tensor = of[weight.parts[role]].tensor
            if tensor.numel != 1:
                raise _fault(weight.parts[role], f"{tensor.numel} numbers where one serves the whole tensor")
            factor = (input_of(role), tensor.dtype, divides)
    text = f"dequantised {weight.codes} {bits} {block} {dtype.name} {shape}"
    fours = FP4_MODELOPT if "scale_2" in weight.parts else FP4
    return Weight(key, shape, tuple(inputs), text, weight.codes, dtype, bits, scales, zero, packed_zero, factor, fours)


def _stated(
    weight: Quantised, of: Mapping[str, Input], stated: tuple[int, ...]
) -> tuple[tuple[int, ...], int, tuple[int, int]]:
    """(shape, bits, block) of packed integers: `X_shape` says how many codes a row has; as many bits as fill its
    words."""
    words = of[weight.lead].tensor.shape
    grid = of[weight.parts["scale"]].tensor.shape
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
    number: int, tensor: LogicalTensor, shape: tuple[int, ...], bits: int, scales: ScaleGrid, weight: Quantised
) -> tuple[ScaleGrid, int]:
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
) -> ScaleGrid:
    """The scales `tensor` over a weight of `shape`."""
    rows, columns = shape[-2:] if len(shape) > 1 else (1, prod(shape))
    if len(shape) == 1 and tensor.numel > 1:
        raise _fault(tensor.key.name, f"{tensor.numel} scales for a vector")
    matrices = prod(shape[:-2])
    across = ceil_div(columns, block[1])
    down = ceil_div(rows, block[0])
    if weight.order == TILED:
        return ScaleGrid(number, tensor.dtype, rows, down, across, block, tensor.key.name, tiles=True)
    own = tensor.numel == matrices * down * across  # each matrix has scales of its own, or one serves all
    if not own and not tensor.numel == down * across == 1:
        raise _fault(tensor.key.name, f"scales of shape {list(tensor.shape)} for {weight.lead} of {list(shape)}")
    return ScaleGrid(number, tensor.dtype, rows, down if own else 0, across, block, tensor.key.name)


def turned(made: LogicalTensor) -> LogicalTensor:
    """Floats of shape (..., rows, columns), one array, seen as (..., columns, rows)."""
    array = made.chunks[0].array
    steps = contiguous_strides(made.shape)
    shape = (*made.shape[:-2], made.shape[-1], made.shape[-2])
    array = array._replace(shape=shape, strides=(*steps[:-2], steps[-1], steps[-2]))
    return made._replace(shape=shape, chunks=(Chunk(whole(shape), array, whole(shape)),))


def _fault(name: str, what: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(
        f"{name}: {what}", code=SHAPE, key=name, hint="do all files belong to one checkpoint? fetch it again"
    )


def kinds(tensors: Sequence[LogicalTensor]) -> dict[str, TensorKind]:
    """Tensors as `weight_schemes.weights.find` takes them."""
    return {tensor.key.name: TensorKind(tensor.dtype, tensor.shape) for tensor in tensors}


# -- optimizer states of Paddle ----------------------------------------------------------------------------------------


EPSILON = np.float32(1e-8)
SCALES = "E1362"
LACKING = "E1363"


class States(NamedTuple):
    """recipes: of the floats. used: keys of the tensors that they are made of. paths: where each hangs in the source's
    nested state, of those that do."""

    recipes: tuple[Recipe, ...]
    used: frozenset[TensorKey]
    paths: Mapping[TensorKey, Path] = MappingProxyType({})


def states(tensors: Iterable[LogicalTensor], source: Tree) -> States:
    """The states of all parameters among `tensors`, of `source`, that are quantised.

    Raises Incomplete E1363 for quantised states without their scales, InconsistentCheckpoint E1362 for scales of
    another shape than their tensor asks for.
    """
    by_name: dict[str, dict[str, LogicalTensor]] = {}
    for tensor in tensors:
        if tensor.key.state in quant.STATES:
            by_name.setdefault(tensor.key.name, {})[tensor.key.state] = tensor
    recipes: list[Recipe] = []
    used: set[TensorKey] = set()
    for name, found in by_name.items():
        rules = quant.recipes_of(list(found))
        done = {state for rule in rules for state in (rule.stored, *rule.scales)}
        if done != set(found):
            lone = min(set(found) - done)
            raise Incomplete(
                "a quantised state without all of its parts",
                code=LACKING,
                key=f"{name} [{lone}]",
                hint="fetch the whole checkpoint, or take all states of the optimizer along",
            )
        used |= {found[state].key for state in done}
        for rule in rules:
            stored = found[rule.stored]
            scales = [found[state] for state in rule.scales]
            _check(stored, scales)
            inputs = tuple(Input(each, source) for each in (stored, *scales))
            recipes.append(Moment(TensorKey(name, rule.made), stored.shape, inputs, f"dequantised {rule.stored}"))
    return States(tuple(recipes), frozenset(used))


def _check(stored: LogicalTensor, scales: Iterable[LogicalTensor]) -> None:
    rows = prod(stored.shape[:-1])
    columns = stored.shape[-1] if stored.shape else 1
    if stored.key.state == quant.PACKED:
        fits: tuple[tuple[int, ...], ...] = ((rows // quant.GROUP, columns),) if rows % quant.GROUP == 0 else ()
    else:
        fits = ((columns,), ()) if len(stored.shape) > 1 else ((), (1,), (columns,))
    for each in scales:
        if each.shape not in fits or each.dtype.name != "F32":
            raise InconsistentCheckpoint(
                f"{each.dtype.name} scales of shape {list(each.shape)} for a tensor of shape {list(stored.shape)}",
                code=SCALES,
                key=str(each.key),
                path=each.chunks[0].array.path if each.chunks else None,
                hint="the files come from two saves: fetch all files of one",
            )


# -- arithmetic --------------------------------------------------------------------------------------------------------


def first_moment(q: np.ndarray[Any, np.dtype[np.int8]], scale: Floats) -> Floats:
    """O1, q / 127 * scale. q: int8, any shape; scale: fp32 over its last axis, or one."""
    return q.astype(np.float32) / np.float32(127) * scale


def second_moment(q: np.ndarray[Any, np.dtype[np.uint8]], low: Floats, high: Floats, *, levels: int = 255) -> Floats:
    """(1 / r - 1e-8)^2 with r = q / levels * (high - low) + low. low, high: fp32, of q's shape or over its last
    axis."""
    ratio = q.astype(np.float32) / np.float32(levels) * (high - low) + low
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        root = np.float32(1) / ratio - EPSILON
        return root * root


def packed_first(packed: np.ndarray[Any, np.dtype[np.int8]], scale: Floats) -> Floats:
    """O2, the high four bits, signed: h * scale / 7. scale: fp32 of the shape of `packed`."""
    return (packed >> 4).astype(np.float32) * scale / np.float32(7)


def packed_second(packed: np.ndarray[Any, np.dtype[np.int8]], low: Floats, high: Floats) -> Floats:
    """O2, the low four bits: as `second_moment` with 15 levels."""
    return second_moment((packed & 15).view(np.uint8), low, high, levels=15)


@dataclass(frozen=True, eq=False)
class Moment(Recipe):
    """A moment. Inputs: the codes, then their scales: one, or (minima, maxima)."""

    def values(self, read: Read, start: int, stop: int) -> Floats:
        columns = self.shape[-1] if self.shape else 1
        parts = []
        for low, high, left, right in rectangles(start, stop, columns):
            codes = read(0, low * columns + left, (high - 1) * columns + right).view(np.uint8)
            made = self._made(read, codes.reshape(high - low, right - left), low, left)
            parts.append(made.reshape(-1))
        return np.concatenate(parts)

    def _made(self, read: Read, codes: np.ndarray[Any, np.dtype[np.uint8]], low: int, left: int) -> Floats:
        """A rectangle whose first element is (low, left)."""
        packed = self.inputs[0].tensor.key.state == quant.PACKED
        rows = len(codes)
        right = left + codes.shape[1]
        scales = []
        for number, each in enumerate(self.inputs[1:], 1):
            columns = each.tensor.shape[-1] if each.tensor.shape else 1
            if packed:
                first = low // quant.GROUP
                last = ceil_div(low + rows, quant.GROUP)
                wide = read(number, first * columns, last * columns).reshape(last - first, columns)
                wide = np.repeat(wide, quant.GROUP, axis=0)[low - first * quant.GROUP :][:rows]
            else:
                wide = read(number, 0, columns).reshape(1, columns)
            scales.append(wide[:, left:right] if columns > 1 else wide)
        if packed:
            signed = codes.view(np.int8)
            return packed_first(signed, scales[0]) if len(scales) == 1 else packed_second(signed, scales[0], scales[1])
        if len(scales) == 1:
            return first_moment(codes.view(np.int8), scales[0])
        return second_moment(codes, scales[0], scales[1])
