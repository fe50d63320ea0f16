"""Quantised weights as floats: codes times scales, all in fp32, each operation rounded to nearest.

    w = code * scale                        FP8, INT8, MXFP4: transformers' `Fp8Dequantize`, DeepSeek's `weight_dequant`
    w = (code - zero_point) * scale         packed integers of compressed-tensors
    w = code * (scale / global_scale)       NVFP4 of compressed-tensors; ModelOpt's `scale * scale_2`, without a -0;
                                            torchao's `scale * per_tensor_scale`

`quantised_weights` says what is stored where. The product is rounded once more, to the dtype that is written. So are
the peers' in fp32; compressed-tensors computes in the dtype of the scales, which gives the same wherever that is bf16
or fp32: a code of 8 bits times a bf16 is exact in fp32. (With fp16 scales of a bf16 model it rounds twice, and this
once.) MXFP4 of gpt-oss is computed as (..., rows, columns) and shown transposed, as transformers'
`convert_moe_packed_tensors` returns it. Cost: 3 ns an element for FP8, 4 for FP4. Memory: a block of the executor and
as much again.

Quantised optimizer states of Paddle as the floats that they stand for (`weight_schemes.paddle_states` says what is
stored).

    w [exp_avg@int8] I8 (4, 8), w [exp_avg@scales] F32 (8,)   ->   w [exp_avg] F32 (4, 8)

Arithmetic of PaddleFormers, all in fp32, each operation rounded to nearest:

    O1   q / 127 * scale                          r = q / 255 * (max - min) + min           m2 = (1 / r - 1e-8)^2
    O2   (q >> 4) * scale / 7                     r = (q & 15) / 15 * (max - min) + min     the same

First moments equal Paddle's bit for bit. Second moments do where Paddle's division rounds to nearest: its CPU kernel is
off by one unit in the last place for some 0.3% of the quotients (paddlepaddle 3.3.1, 1.0 / x against NumPy and
paddle.reciprocal).

Cost: 2 ns an element, memory of a few blocks.
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
    list_byte_values,
    rectangles,
    scale,
    unpack_codes,
)
from ckpt_tool.run.compute import looked_up
from ckpt_tool.run.computed import Input, Read, Recipe
from ckpt_tool.storage.source import Tree
from ckpt_tool.weight_schemes import paddle_states as quant
from ckpt_tool.weight_schemes.quantised_weights import (
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
    """One weight: codes times scales, less zero points where there are some."""

    codes: str  # how its values are stored in input 0
    packed: DType  # the dtype of input 0
    bits: int
    scales: ScaleGrid
    zero: ScaleGrid | None = None  # the zero points of packed integers
    packed_zero: int = 0  # words a column of zero points, where those are packed along the rows
    # (input, its dtype, divides?) of one number for the whole tensor that the scales are multiplied by, or divided
    factor: tuple[int, DType, bool] | None = None
    fours: tuple[float, ...] = FP4  # what a code of four bits stands for

    def values(self, read: Read, start: int, stop: int) -> Floats:
        columns = self.shape[-1] if self.shape else 1
        parts = [self._decode_rectangle(read, rectangle).reshape(-1) for rectangle in rectangles(start, stop, columns)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _decode_rectangle(self, read: Read, rectangle: Rectangle) -> Floats:
        """The floats of a rectangle of one row, or of whole rows."""
        values = self._decode_codes(read, rectangle)
        if self.zero is not None:
            scale(values, *self._decode_zeros(read, rectangle, self.zero), np.subtract)
        scales, scale_rows = self.scales.read_scales(read, rectangle)
        if self.factor is not None:
            number, dtype, divides = self.factor
            factor = as_floats(read(number, 0, 1), dtype, self.key.name)[0]
            with np.errstate(all="ignore"):
                scales = scales / factor if divides else scales * factor
        with np.errstate(all="ignore"):  # what overflows is infinite, as it is for the peers
            scale(values, scales, scale_rows)
        return values

    def _decode_codes(self, read: Read, rectangle: Rectangle) -> Floats:
        """The codes of a rectangle as floats."""
        rows = rectangle.high - rectangle.low
        count = rectangle.right - rectangle.left
        columns = self.shape[-1] if self.shape else 1
        first = rectangle.low * columns + rectangle.left
        last = (rectangle.high - 1) * columns + rectangle.right
        if self.codes == BYTES:
            return looked_up(list_byte_values(self.packed), read(0, first, last).view(np.uint8)).reshape(rows, count)
        if self.codes == WORDS:
            # Rows begin with a word of their own; of a single row only the words of the rectangle are read.
            words_per_row = ceil_div(columns * self.bits, 32)
            low = rectangle.left * self.bits // 32 if rows == 1 else 0
            high = ceil_div(rectangle.right * self.bits, 32) if rows == 1 else words_per_row
            words = (
                read(0, rectangle.low * words_per_row + low, (rectangle.high - 1) * words_per_row + high)
                .view(np.uint8)
                .reshape(rows, -1)
            )
            return unpack_codes(words, self.bits, rectangle.left * self.bits - 32 * low, count)

        # Two codes a byte.
        low = first // 2
        pairs = halves(self.fours, read(0, low, ceil_div(last, 2)).view(np.uint8))
        return pairs[first - 2 * low : last - 2 * low].reshape(rows, count)

    def _decode_zeros(self, read: Read, rectangle: Rectangle, grid: ScaleGrid) -> tuple[Floats, Numbers]:
        """Zero points as `ScaleGrid.read_scales` gives scales. Packed ones are packed along the rows: each column is a
        stream of its own."""
        if not self.packed_zero:
            zeros, scale_rows = grid.read_scales(read, rectangle)
            if grid.dtype.is_float and (zeros != np.rint(zeros)).any():
                raise _fault(grid.name, "zero points that are no integers")
            return zeros, scale_rows

        rows = np.arange(rectangle.low, rectangle.high)
        bits = self.bits
        columns = grid.columns
        row_in_matrix = rows % grid.rows
        parts: list[Floats] = []
        for matrix in np.unique(rows // grid.rows):
            matrix_rows = row_in_matrix[rows // grid.rows == matrix]
            first = int(matrix_rows[0])
            low = first * bits // 32
            high = ceil_div((int(matrix_rows[-1]) + 1) * bits, 32)
            base = int(matrix) * self.packed_zero
            words = read(grid.input, (base + low) * columns, (base + high) * columns).reshape(high - low, columns)
            stream = np.ascontiguousarray(words.T).view(np.uint8)
            parts.append(unpack_codes(stream, bits, first * bits - 32 * low, len(matrix_rows)).T)

        width = grid.block[1]
        zeros = np.repeat(np.concatenate(parts), width, axis=1)[:, rectangle.left : rectangle.right]
        return zeros, np.arange(len(rows))


def recipe(
    weight: Quantised, key: TensorKey, of: Mapping[str, Input], numbers: Callable[[Input], Sequence[int]]
) -> Recipe:
    """How the floats of a weight are computed, of shape `weight.shape`.

    key: of the floats. of: name -> the tensor, of every name of the weight. numbers: reads a small tensor of integers
    (`X_shape`, bitsandbytes' states). Raises InconsistentCheckpoint E1462 for parts whose shapes or dtypes do not
    belong together.
    """
    if weight.codes == MATRIX:
        from ckpt_tool.quantised.codecs.gptq import matrix

        return matrix(weight, key, of)
    if weight.codes == STREAM:
        from ckpt_tool.quantised.codecs.mlx_groups import make_group_recipe

        return make_group_recipe(weight, key, of)
    if weight.codes == TRITS:
        from ckpt_tool.quantised.codecs.bitnet import trits

        return trits(weight, key, of)
    if weight.codes in (TABLED, OF_127):
        from ckpt_tool.quantised.codecs.bitsandbytes import make_bytes_127_recipe, make_tabled_recipe

        return (make_tabled_recipe if weight.codes == TABLED else make_bytes_127_recipe)(weight, key, of, numbers)

    lead = of[weight.lead]
    dtype = of[weight.lead].tensor.dtype
    inputs = [lead]
    shape = weight.shape

    def input_of(role: str) -> int:
        inputs.append(of[weight.parts[role]])
        return len(inputs) - 1

    # Packed integers state their shape in a tensor, and their bits and groups follow from it.
    bits = weight.bits
    block = weight.block
    if weight.codes == WORDS:
        shape, bits, block = _read_stated_shape(weight, of, tuple(numbers(of[weight.parts["shape"]])))

    scales = _make_grid(input_of("scale"), of[weight.parts["scale"]].tensor, shape, block, weight)
    zero = None
    packed_zero = 0
    if "zero_point" in weight.parts and weight.codes in (WORDS, BYTES):
        tensor = of[weight.parts["zero_point"]].tensor
        zero, packed_zero = _make_zero_grid(input_of("zero_point"), tensor, shape, bits, scales, weight)

    # One number for the whole tensor, by which scales are divided or multiplied.
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


def _read_stated_shape(
    weight: Quantised, of: Mapping[str, Input], stated: tuple[int, ...]
) -> tuple[tuple[int, ...], int, tuple[int, int]]:
    """(shape, bits, block) of packed integers: `X_shape` gives the codes of a row, and the bits are those that fill the
    row's words."""
    words = of[weight.lead].tensor.shape
    grid = of[weight.parts["scale"]].tensor.shape
    rows = words[:-1]
    if len(stated) < 2 or stated[-1] < 1 or prod(stated[:-1]) != prod(rows):
        raise _fault(weight.parts["shape"], f"it says {list(stated)}, the packed words are {list(words)}")
    columns = stated[-1]
    fits = [bits for bits in range(1, 9) if ceil_div(columns * bits, 32) == words[-1]]
    bits = 0  # several numbers of bits fill the words, or none does
    if weight.bits in fits:
        bits = weight.bits
    elif len(fits) == 1:
        bits = fits[0]
    if not bits or columns % grid[-1] or "g_idx" in weight.parts:
        what = f"{list(words)} words and {list(grid)} scales for {columns} codes a row"
        raise _fault(weight.lead, what if "g_idx" not in weight.parts else "codes in the order of activations (g_idx)")
    return (*rows, columns), bits, (1, columns // grid[-1])


def _make_zero_grid(
    number: int, tensor: LogicalTensor, shape: tuple[int, ...], bits: int, scales: ScaleGrid, weight: Quantised
) -> tuple[ScaleGrid, int]:
    """(zero points as a grid like that of the scales, words a column where they are packed along the rows)."""
    packed = ceil_div(scales.rows * bits, 32)
    name = tensor.key.name
    if tensor.dtype.name == "I32" and tensor.shape == (*shape[:-2], packed, scales.columns) and scales.block[0] == 1:
        return replace(scales, input=number, dtype=tensor.dtype, name=name), packed
    if tensor.dtype.bits < 8:
        raise _fault(name, f"zero points of {tensor.dtype.name}")
    return _make_grid(number, tensor, shape, scales.block, weight), 0


def _make_grid(
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

    # Each matrix has scales of its own, or one scale serves all.
    has_scales_per_matrix = tensor.numel == matrices * down * across
    if not has_scales_per_matrix and not tensor.numel == down * across == 1:
        raise _fault(tensor.key.name, f"scales of shape {list(tensor.shape)} for {weight.lead} of {list(shape)}")
    return ScaleGrid(number, tensor.dtype, rows, down if has_scales_per_matrix else 0, across, block, tensor.key.name)


def transpose_view(made: LogicalTensor) -> LogicalTensor:
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
    """Tensors as `weight_schemes.quantised_weights.find` takes them."""
    return {tensor.key.name: TensorKind(tensor.dtype, tensor.shape) for tensor in tensors}


# -- optimizer states of Paddle ----------------------------------------------------------------------------------------


EPSILON = np.float32(1e-8)
SCALES = "E1362"
LACKING = "E1363"


class States(NamedTuple):
    """Quantised optimizer states of a checkpoint."""

    recipes: tuple[Recipe, ...]  # of the floats
    used: frozenset[TensorKey]  # the tensors that the floats are computed from
    paths: Mapping[TensorKey, Path] = MappingProxyType({})  # where each was in the source's nested state, if it was


def states(tensors: Iterable[LogicalTensor], source: Tree) -> States:
    """The states of all parameters among `tensors`, of `source`, that are quantised.

    Raises Incomplete E1363 for quantised states without their scales, InconsistentCheckpoint E1362 for scales of
    another shape than their tensor asks for.
    """

    # The parts of one parameter's states are stored under its name.
    by_name: dict[str, dict[str, LogicalTensor]] = {}
    for tensor in tensors:
        if tensor.key.state in quant.STATES:
            by_name.setdefault(tensor.key.name, {})[tensor.key.state] = tensor

    recipes: list[Recipe] = []
    used: set[TensorKey] = set()
    for name, parts in by_name.items():
        rules = quant.recipes_of(list(parts))
        complete = {state for rule in rules for state in (rule.stored, *rule.scales)}
        if complete != set(parts):
            incomplete = min(set(parts) - complete)
            raise Incomplete(
                "a quantised state without all of its parts",
                code=LACKING,
                key=f"{name} [{incomplete}]",
                hint="fetch the whole checkpoint, or take all states of the optimizer along",
            )
        used |= {parts[state].key for state in complete}
        for rule in rules:
            stored = parts[rule.stored]
            scales = [parts[state] for state in rule.scales]
            _check_scales(stored, scales)
            inputs = tuple(Input(part, source) for part in (stored, *scales))
            recipes.append(Moment(TensorKey(name, rule.made), stored.shape, inputs, f"dequantised {rule.stored}"))

    return States(tuple(recipes), frozenset(used))


def _check_scales(stored: LogicalTensor, scales: Iterable[LogicalTensor]) -> None:
    rows = prod(stored.shape[:-1])
    columns = stored.shape[-1] if stored.shape else 1
    if stored.key.state == quant.PACKED:
        fits: tuple[tuple[int, ...], ...] = ((rows // quant.GROUP, columns),) if rows % quant.GROUP == 0 else ()
    else:
        fits = ((columns,), ()) if len(stored.shape) > 1 else ((), (1,), (columns,))
    for item in scales:
        if item.shape not in fits or item.dtype.name != "F32":
            raise InconsistentCheckpoint(
                f"{item.dtype.name} scales of shape {list(item.shape)} for a tensor of shape {list(stored.shape)}",
                code=SCALES,
                key=str(item.key),
                path=item.chunks[0].array.path if item.chunks else None,
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
    """A moment of an optimizer. Inputs: the codes, then their scales: one, or (minima, maxima)."""

    def values(self, read: Read, start: int, stop: int) -> Floats:
        columns = self.shape[-1] if self.shape else 1
        parts = []
        for low, high, left, right in rectangles(start, stop, columns):
            codes = read(0, low * columns + left, (high - 1) * columns + right).view(np.uint8)
            moments = self._decode_rectangle(read, codes.reshape(high - low, right - left), low, left)
            parts.append(moments.reshape(-1))
        return np.concatenate(parts)

    def _decode_rectangle(self, read: Read, codes: np.ndarray[Any, np.dtype[np.uint8]], low: int, left: int) -> Floats:
        """A rectangle whose first element is (low, left)."""
        packed = self.inputs[0].tensor.key.state == quant.PACKED
        rows = len(codes)
        right = left + codes.shape[1]
        scales = []
        for number, scale_input in enumerate(self.inputs[1:], 1):
            columns = scale_input.tensor.shape[-1] if scale_input.tensor.shape else 1
            row: np.ndarray[Any, np.dtype[Any]]
            if packed:
                first = low // quant.GROUP
                last = ceil_div(low + rows, quant.GROUP)
                row = read(number, first * columns, last * columns).reshape(last - first, columns)
                row = np.repeat(row, quant.GROUP, axis=0)[low - first * quant.GROUP :][:rows]
            else:
                row = read(number, 0, columns).reshape(1, columns)
            scales.append(row[:, left:right] if columns > 1 else row)

        if packed:
            signed = codes.view(np.int8)
            return packed_first(signed, scales[0]) if len(scales) == 1 else packed_second(signed, scales[0], scales[1])
        if len(scales) == 1:
            return first_moment(codes.view(np.int8), scales[0])
        return second_moment(codes, scales[0], scales[1])
