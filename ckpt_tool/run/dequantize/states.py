"""Quantised optimizer states of Paddle as the floats that they stand for (`formats.paddle.quant` says what is stored).

    w [exp_avg@int8] I8 (4, 8), w [exp_avg@scales] F32 (8,)   ->   w [exp_avg] F32 (4, 8)

Arithmetic of PaddleFormers, all in fp32, each operation rounded to nearest:

    O1   q / 127 * scale                          r = q / 255 * (max - min) + min           m2 = (1 / r - 1e-8)^2
    O2   (q >> 4) * scale / 7                     r = (q & 15) / 15 * (max - min) + min     the same

First moments equal Paddle's bit for bit. Second moments do where Paddle's division rounds to nearest: its CPU kernel is off
by one unit in the last place for some 0.3% of the quotients (paddlepaddle 3.3.1, 1.0 / x against NumPy and paddle.reciprocal).

Cost: 2 ns an element, memory of a few blocks. What it does not do: quantise.
Source: PaddleFormers 1.2.0 `quantization/checkpoint_quantization_utils.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint
from ckpt_tool.formats.paddle import quant
from ckpt_tool.run.computed import Input, Read, Recipe
from ckpt_tool.run.dequantize.codes import Floats
from ckpt_tool.run.dequantize.scales import rectangles
from ckpt_tool.storage.source import Tree

EPSILON = np.float32(1e-8)
SCALES, LACKING = "E1362", "E1363"


class States(NamedTuple):
    """recipes: of the floats. used: keys of the tensors that they are made of."""

    recipes: tuple[Recipe, ...]
    used: frozenset[TensorKey]


def states(tensors: Iterable[LogicalTensor], source: Tree) -> States:
    """The states of all parameters among `tensors`, which lie in `source`, that are quantised.

    Raises Incomplete E1363 for quantised states without their scales, InconsistentCheckpoint E1362 for scales of another
    shape than their tensor asks for.
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
                "a quantised state without all of its parts", code=LACKING, key=f"{name} [{lone}]",
                hint="fetch the whole checkpoint, or take all states of the optimizer along",
            )  # fmt: skip
        used |= {found[state].key for state in done}
        for rule in rules:
            stored, scales = found[rule.stored], [found[state] for state in rule.scales]
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
    for scale in scales:
        if scale.shape not in fits or scale.dtype.name != "F32":
            raise InconsistentCheckpoint(
                f"{scale.dtype.name} scales of shape {list(scale.shape)} for a tensor of shape {list(stored.shape)}",
                code=SCALES, key=str(scale.key), path=scale.chunks[0].array.path if scale.chunks else None,
                hint="the files come from two saves: fetch one whole",
            )  # fmt: skip


# -- arithmetic -----------------------------------------------------------------------------------------------------------


def first_moment(q: np.ndarray[Any, np.dtype[np.int8]], scale: Floats) -> Floats:
    """O1, q / 127 * scale. q: int8, any shape; scale: fp32 over its last axis, or one."""
    return q.astype(np.float32) / np.float32(127) * scale


def second_moment(q: np.ndarray[Any, np.dtype[np.uint8]], low: Floats, high: Floats, *, levels: int = 255) -> Floats:
    """(1 / r - 1e-8)^2 with r = q / levels * (high - low) + low. low, high: fp32, of q's shape or over its last axis."""
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
        rows, right = len(codes), left + codes.shape[1]
        scales = []
        for number, each in enumerate(self.inputs[1:], 1):
            columns = each.tensor.shape[-1] if each.tensor.shape else 1
            if packed:
                first, last = low // quant.GROUP, -(-(low + rows) // quant.GROUP)
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
