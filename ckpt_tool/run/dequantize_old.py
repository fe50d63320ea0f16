"""Quantised optimizer states as the floats that they stand for, made while they are read.

The one idea: a dequantised tensor is an array in a file that does not exist, whose bytes are computed when they are asked
for, so the plan, the executor and the digests see one more source and nothing else. `view` gives that source:

    w [exp_avg@int8] I8 (4, 8), w [exp_avg@scales] F32 (8,)   ->   w [exp_avg] F32 (4, 8) in "exp_avg/w" of the view

Arithmetic of PaddleFormers (`formats.paddle.quant` says what is stored), all in fp32, each operation rounded to nearest:

    O1   q / 127 * scale                          r = q / 255 * (max - min) + min           m2 = (1 / r - 1e-8)^2
    O2   (q >> 4) * scale / 7                     r = (q & 15) / 15 * (max - min) + min     the same

First moments equal Paddle's bit for bit. Second moments do where Paddle's division rounds to nearest: its CPU kernel is off
by one unit in the last place for some 0.3% of the quotients (paddlepaddle 3.3.1, 1.0 / x against NumPy and paddle.reciprocal).

Cost: 2 ns an element, memory of a few blocks; scales of O1 are read once. What it does not do: quantise.
Source: PaddleFormers 1.2.0 `quantization/checkpoint_quantization_utils.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import LogicalTensor, StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, InternalError
from ckpt_tool.formats.paddle import quant
from ckpt_tool.storage.source import Identity, Tree

EPSILON = np.float32(1e-8)
SCALES, LACKING = "E1362", "E1363"
Floats = np.ndarray[Any, np.dtype[np.float32]]


class Recipe(NamedTuple):
    """One tensor to be made. stored, scales: whole tensors, each in one array of the source."""

    made: LogicalTensor
    stored: LogicalTensor
    scales: tuple[LogicalTensor, ...]


class View(NamedTuple):
    """tensors: the dequantised ones, in `tree`. used: keys of the tensors that they are made of."""

    tensors: tuple[LogicalTensor, ...]
    used: frozenset[TensorKey]
    tree: Tree


def view(tensors: Iterable[LogicalTensor], source: Tree) -> View:
    """The dequantised states of all parameters among `tensors`, which lie in `source`; nothing where none is quantised.

    Raises Incomplete E1363 for quantised states without their scales, InconsistentCheckpoint E1362 for scales of another
    shape than their tensor asks for.
    """
    by_name: dict[str, dict[str, LogicalTensor]] = {}
    for tensor in tensors:
        if tensor.key.state in quant.STATES:
            by_name.setdefault(tensor.key.name, {})[tensor.key.state] = tensor
    recipes: dict[str, Recipe] = {}
    used: set[TensorKey] = set()
    for name, states in by_name.items():
        found = quant.recipes_of(list(states))
        done = {state for recipe in found for state in (recipe.stored, *recipe.scales)}
        if done != set(states):
            lone = min(set(states) - done)
            raise Incomplete(
                "a quantised state without all of its parts", code=LACKING, key=f"{name} [{lone}]",
                hint="fetch the whole checkpoint, or take all states of the optimizer along",
            )  # fmt: skip
        used |= {states[state].key for state in done}
        for recipe in found:
            stored, scales = states[recipe.stored], tuple(states[state] for state in recipe.scales)
            _check(stored, scales)
            path = f"{recipe.made}/{name}"
            array = StoredArray(path, 0, DTYPES["F32"], stored.shape)
            recipes[path] = Recipe(simple_tensor(TensorKey(name, recipe.made), array), stored, scales)
    return View(tuple(recipe.made for recipe in recipes.values()), frozenset(used), DequantisedTree(source, recipes))


def _check(stored: LogicalTensor, scales: Iterable[LogicalTensor]) -> None:
    rows = prod(stored.shape[:-1])
    columns = stored.shape[-1] if stored.shape else 1
    if stored.key.state == quant.PACKED:
        fits: tuple[tuple[int, ...], ...] = ((rows // quant.GROUP, columns),) if rows % quant.GROUP == 0 else ()
    else:
        fits = ((columns,), ()) if len(stored.shape) > 1 else ((), (1,), (columns,))
    for scale in scales:
        if scale.shape not in fits or scale.dtype.name != "F32" or len(scale.chunks) != 1 or len(stored.chunks) != 1:
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


# -- the view -------------------------------------------------------------------------------------------------------------


class DequantisedTree(Tree):
    """A source whose files are made of others'. Its root is no folder: everything is read through `read`."""

    local = False

    def __init__(self, source: Tree, recipes: Mapping[str, Recipe]) -> None:
        self._source, self._recipes = source, recipes
        self.shown = f"{source.shown} (dequantised)"
        self.root, self.single = source.root, None
        self.bytes_read = 0
        self._scales: dict[str, tuple[Floats, ...]] = {}
        self._guard = threading.Lock()

    def listing(self) -> dict[str, int]:
        return {path: recipe.made.nbytes for path, recipe in self._recipes.items()}

    def display(self, path: str = "") -> str:
        recipe = self._recipes.get(path)
        return self._source.display(recipe.stored.chunks[0].array.path) if recipe else self.shown

    def size(self, path: str) -> int:
        return self._recipes[path].made.nbytes

    def identity(self, path: str) -> Identity:
        """That of the file of the quantised tensor."""
        return self._source.identity(self._recipes[path].stored.chunks[0].array.path)

    def identity_by_name(self, path: str) -> Identity:
        return self._source.identity_by_name(self._recipes[path].stored.chunks[0].array.path)

    def open(self, path: str) -> int:
        raise InternalError(f"{path} is computed: it has no descriptor")

    def fd(self, path: str) -> int:
        return self.open(path)

    def close(self) -> None:
        self._source.close()

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Bytes of the dequantised tensor's row-major fp32 line."""
        recipe = self._recipes[path]
        if offset < 0 or nbytes < 0 or offset + nbytes > recipe.made.nbytes:
            raise InternalError(f"{path}: bytes {offset} to {offset + nbytes} of {recipe.made.nbytes}")
        if not nbytes:
            return b""
        start, stop = offset // 4, -(-(offset + nbytes) // 4)
        columns = recipe.stored.shape[-1] if recipe.stored.shape else 1
        low, high = start // columns, -(-stop // columns)
        stored = recipe.stored.chunks[0].array
        data = self._source.read(stored.path, stored.offset + low * columns, (high - low) * columns)
        rows = np.frombuffer(data, np.uint8).reshape(high - low, columns)
        values = self._made(path, recipe, rows, low, high).astype("<f4", copy=False).reshape(-1)
        line = values[start - low * columns : stop - low * columns].tobytes()
        return line[offset - 4 * start : offset - 4 * start + nbytes]

    def _made(
        self, path: str, recipe: Recipe, rows: np.ndarray[Any, np.dtype[np.uint8]], low: int, high: int
    ) -> Floats:
        """Rows [low, high) of the tensor, seen as (rows, columns)."""
        state, made = recipe.stored.key.state, recipe.made.key.state
        if state == quant.PACKED:
            group, end = low // quant.GROUP, -(-high // quant.GROUP)
            wide = [np.repeat(self._rows(scale, group, end), quant.GROUP, axis=0) for scale in recipe.scales]
            scales = [each[low - group * quant.GROUP : high - group * quant.GROUP] for each in wide]
            packed = rows.view(np.int8)
            return packed_first(packed, scales[0]) if made == "exp_avg" else packed_second(packed, scales[0], scales[1])
        whole = self._whole(path, recipe)
        return (
            first_moment(rows.view(np.int8), whole[0]) if len(whole) == 1 else second_moment(rows, whole[0], whole[1])
        )

    def _whole(self, path: str, recipe: Recipe) -> tuple[Floats, ...]:
        """The scales of an O1 tensor."""
        with self._guard:
            known = self._scales.get(path)
        if known is None:
            known = tuple(self._rows(scale, 0, 1) for scale in recipe.scales)
            with self._guard:
                if len(self._scales) > 64:
                    self._scales.clear()
                self._scales[path] = known
        return known

    def _rows(self, scale: LogicalTensor, low: int, high: int) -> Floats:
        """Rows [low, high) of a tensor of scales, its last axis the columns."""
        array, columns = scale.chunks[0].array, scale.shape[-1] if scale.shape else 1
        data = self._source.read(array.path, array.offset + 4 * low * columns, 4 * (high - low) * columns)
        return np.frombuffer(data, "<f4").reshape(high - low, columns)
