"""Quantised optimizer states of Paddle as the floats that they encode (`weight_schemes.paddle_states` describes what is
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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import LogicalTensor, Path, TensorKey
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint
from ckpt_tool.quantised.codecs.code_bits import Floats
from ckpt_tool.quantised.codecs.rectangles import Rectangle, compute_line, read_rectangle
from ckpt_tool.run.computed import Input, Read, Recipe
from ckpt_tool.storage.source import Tree
from ckpt_tool.weight_schemes import paddle_states as quant

EPSILON = np.float32(1e-8)
SCALES = "E1362"
LACKING = "E1363"


class States(NamedTuple):
    """Quantised optimizer states of a checkpoint."""

    recipes: tuple[Recipe, ...]  # of the floats
    used: frozenset[TensorKey]  # the tensors that the floats are computed from
    paths: Mapping[TensorKey, Path] = MappingProxyType({})  # where each was in the source's nested state, if it was


def find_paddle_states(tensors: Iterable[LogicalTensor], source: Tree) -> States:
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
        """As `Recipe.values`, rectangle by rectangle."""
        columns = self.shape[-1] if self.shape else 1
        return compute_line(lambda rectangle: self._decode(read, rectangle), start, stop, columns)

    def _decode(self, read: Read, rectangle: Rectangle) -> Floats:
        """The moments of a rectangle."""
        columns = self.shape[-1] if self.shape else 1
        codes = read_rectangle(read, 0, rectangle, columns).view(np.uint8)
        scales = [self._read_scales(read, number, rectangle) for number in range(1, len(self.inputs))]
        is_packed = self.inputs[0].tensor.key.state == quant.PACKED
        if len(scales) == 1:
            decode_first = packed_first if is_packed else first_moment
            return decode_first(codes.view(np.int8), scales[0])
        low, high = scales
        return packed_second(codes.view(np.int8), low, high) if is_packed else second_moment(codes, low, high)

    def _read_scales(self, read: Read, number: int, rectangle: Rectangle) -> Floats:
        """The scales of a rectangle in input `number`: a row of them, or of packed codes one for each row."""
        tensor = self.inputs[number].tensor
        columns = tensor.shape[-1] if tensor.shape else 1
        left = rectangle.left if columns > 1 else 0
        right = rectangle.right if columns > 1 else 1
        if self.inputs[0].tensor.key.state != quant.PACKED:
            return read(number, left, right).reshape(1, -1)

        first_group = rectangle.low // quant.GROUP
        last_group = ceil_div(rectangle.high, quant.GROUP)
        groups = read_rectangle(read, number, Rectangle(first_group, last_group, left, right), columns)
        skip = rectangle.low - first_group * quant.GROUP
        return np.repeat(groups, quant.GROUP, axis=0)[skip : skip + rectangle.rows]
