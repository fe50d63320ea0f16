"""Recipes of quantised weights: codes and scales made of floats while these are read (`nearest` has the arithmetic).

    Codes(key, ...)    F8_E4M3 (300, 256)        Scales(key, ...)   F32 (3, 2)        Numbers(key, ...)  I64 (2,)

Scales of rows or of parts of rows want the values of their own block alone: any range of the line is made of the blocks
that it touches. Blocks of several rows want a band of rows: its scales, and its values where they are few, stay with
the thread that made them, because the next range most often lies in the same band. What the codes found of a block
is noted (`Sizes`), so that the scales, which lie behind them in the output, read the floats of the others alone.
Memory: `_TILE` elements, at 48 bytes each, and a band of at most `_BAND` bytes, a thread; of a turned matrix a panel
of `_PANEL` bytes and as much again while it is turned; `_NOTED` bytes of sizes for all threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.quantised.codes import Array, Floats, Rectangle, not_finite, rectangles
from ckpt_tool.quantised.figures import GRAIN, Figures
from ckpt_tool.quantised.nearest import (
    Bytes,
    Error,
    ValuePlace,
    Values,
    codes_of,
    divisors_of,
    largest,
    packed,
    scales_of,
    whole_of,
)
from ckpt_tool.run.compute import cast, numpy_type
from ckpt_tool.run.computed import ExactRecipe, Read
from ckpt_tool.weight_schemes.schemes import Scheme
from ckpt_tool.weight_schemes.weights import TURNED

_TILE = 1 << 18  # elements that are worked on at once
_BAND = 8 << 20  # bytes of a band that are kept
_PANEL = 16 << 20  # bytes of a turned matrix that are turned at once
_NOTED = 8 << 20  # bytes of sizes that are noted: of 2^31 elements in blocks of 128 x 128, of 2^26 in groups of 32


class ThreadCache(threading.local):
    """What a thread had last, because it asks for it next, most often: of one tensor at a time. band: (tensor, number),
    what its values are divided by, they themselves. panel: (tensor, matrix, first row), its line."""

    band: tuple[tuple[TensorKey, int], Floats, Values | None] | None = None
    panel: tuple[tuple[TensorKey, int, int], Array] | None = None


class Sizes:
    """The largest magnitudes of blocks that somebody has found already, of the weights that came last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[TensorKey, Floats] = {}  # NaN: not found yet

    def note(self, key: TensorKey, first: int, found: Floats, total: int) -> None:
        """Of blocks [first, first + len(found)) of `total` of the weight `key`."""
        if 4 * total > _NOTED:
            return
        with self._lock:
            if key not in self._of:
                held = sum(sizes.nbytes for sizes in self._of.values())
                while held + 4 * total > _NOTED:
                    held -= self._of.pop(next(iter(self._of))).nbytes
                self._of[key] = np.full(total, np.nan, np.float32)
            self._of[key][first : first + len(found)] = found

    def found(self, key: TensorKey, first: int, last: int) -> Floats | None:
        """Of blocks [first, last), None where one is not known."""
        with self._lock:
            sizes = self._of.get(key)
            some = None if sizes is None else sizes[first:last].copy()
        return None if some is None or np.isnan(some).any() else some


class GlobalScale:
    """nvfp4: what the scales of a tensor are multiplied by, found once and shared by its recipes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: Floats | None = None

    def found(self, largest: Callable[[], Floats]) -> Floats:
        with self._lock:
            if self._found is None:
                self._found = whole_of(largest())
            return self._found


@dataclass(frozen=True, eq=False)
class _OfFloats(ExactRecipe):
    """A tensor that is made of the floats of its one input."""

    scheme: Scheme
    as_dtype: DType
    floats: DType  # what they are rounded to first
    scales: DType  # the dtype of the scales
    whole: GlobalScale | None  # what these are multiplied by, where there is such
    # kept, noted: shared by all recipes of a run
    kept: ThreadCache
    noted: Sizes

    @property
    def dtype(self) -> DType:
        return self.as_dtype

    @property
    def memory(self) -> int:
        return 48 * _TILE + (2 * _PANEL if self.scheme.codes == TURNED else _BAND)

    @cached_property
    def matrix(self) -> tuple[int, ...]:
        """The shape of the values as they are coded."""
        return self.scheme.matrix(self.inputs[0].tensor.shape)

    @cached_property
    def columns(self) -> int:
        return self.matrix[-1]

    @cached_property
    def width(self) -> int:
        """Columns of a block."""
        return self.scheme.group(self.columns)

    @cached_property
    def height(self) -> int:
        """Rows of a block."""
        return self.scheme.block[0]

    def read_values(self, read: Read, start: int, stop: int) -> Values:
        """Elements [start, stop) of the line, rounded as they are to be first."""
        line = self._line(read, start, stop)
        tensor = self.inputs[0].tensor
        if self.floats == tensor.dtype:
            return Values(line, tensor.dtype)
        rounded, _ = cast(line.view(np.uint8).data, tensor.dtype, self.floats)
        return Values(np.frombuffer(rounded, numpy_type(self.floats)), self.floats)

    def _line(self, read: Read, start: int, stop: int) -> Array:
        """The same as they are stored; of a turned matrix out of panels, rows of it that are turned together."""
        if self.scheme.codes != TURNED:
            return read(0, start, stop)
        parts, (*_, rows, columns) = list[Array](), self.matrix
        each = min(max(_PANEL * 8 // self.inputs[0].tensor.dtype.bits // columns, 1), rows)
        while start < stop:
            matrix, row = divmod(start // columns, rows)
            first = row // each * each
            last = min(first + each, rows)
            base = (matrix * rows + first) * columns
            panel = self._panel(read, matrix, first, last)
            parts.append(panel[start - base : min(stop - base, len(panel))])
            start += len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _panel(self, read: Read, matrix: int, first: int, last: int) -> Array:
        """Rows [first, last) of a turned matrix: columns of the stored one."""
        place = (self.key, matrix, first)
        kept = self.kept.panel
        if kept is None or kept[0] != place:
            rows, columns = self.matrix[-2:]
            base = matrix * rows * columns
            if last - first == rows:
                wide = read(0, base, base + rows * columns)
            else:
                ends = range(base, base + rows * columns, rows)
                wide = np.concatenate([read(0, at + first, at + last) for at in ends])
            turned = np.ascontiguousarray(wide.reshape(columns, last - first).T).reshape(-1)
            kept = self.kept.panel = (place, turned)
        return kept[1]

    def sizes(self, values: Values, start: int) -> Floats:
        """The largest magnitudes of the blocks of a line of whole blocks, which begins with element `start`."""
        found = self.checked(largest(values, self.width, self.width), values, start).reshape(-1)
        self.noted.note(self.inputs[0].tensor.key, start // self.width, found, self.blocks)
        return found

    def checked(self, sizes: Floats, values: Values, start: int) -> Floats:
        """`sizes`. Raises InconsistentCheckpoint E2720 where one is no number: values begin with element `start`."""
        if np.isfinite(sizes).all():
            return sizes
        at = start + int(np.flatnonzero(~np.isfinite(values.wide))[0])
        index = [*self.scheme.matrix(tuple(int(i) for i in np.unravel_index(at, self.matrix)))]
        raise not_finite(str(self.inputs[0].tensor.key), index, "--quantize-skip leaves this one as it is")

    def band_sizes(self, read: Read, band: int) -> tuple[Floats, Values | None]:
        """(the largest magnitudes of the blocks of a band, its values where they are few)."""
        columns, (start, stop) = self.columns, self.band(band)
        few = (stop - start) * self.floats.bits // 8 <= _BAND
        step = stop - start if few else max(_TILE // columns, 1) * columns
        parts = list[Floats]()
        values = None
        for at in range(start, stop, step):
            values = self.read_values(read, at, min(at + step, stop))
            parts.append(self.checked(largest(values, columns, self.width, of_all=True), values, at)[0])
        found = parts[0] if len(parts) == 1 else np.maximum.reduce(parts)
        self.noted.note(self.inputs[0].tensor.key, band * len(found), found, self.blocks)
        return found, values if few else None

    @cached_property
    def blocks(self) -> int:
        """Of the whole tensor."""
        *before, rows, columns = self.matrix
        return prod(before) * ceil_div(rows, self.height) * ceil_div(columns, self.width)

    def band(self, number: int) -> tuple[int, int]:
        """The elements of a band."""
        rows = self.matrix[-2]
        each = ceil_div(rows, self.height)
        matrix, here = divmod(number, each)
        low = matrix * rows + here * self.height
        return low * self.columns, min(low + self.height, (matrix + 1) * rows) * self.columns

    def divisors(self, read: Read, sizes: Floats) -> Floats:
        """What values are divided by."""
        whole = self.factor(read)
        scales = scales_of(sizes, self.scheme, self.scales, whole)
        return divisors_of(scales, self.scales, str(self.key), whole)

    def factor(self, read: Read) -> Floats | None:
        """What all scales of the tensor are multiplied by, where there is such."""
        return self.whole.found(lambda: self._largest(read)) if self.whole else None

    def _largest(self, read: Read) -> Floats:
        """The largest magnitude of the whole tensor."""
        numel = self.inputs[0].tensor.numel
        step = max(_TILE // self.width, 1) * self.width
        tiles = ((at, min(at + step, numel)) for at in range(0, numel, step))
        sizes = [self.sizes(self.read_values(read, *tile), tile[0]).max(keepdims=True) for tile in tiles]
        found: Floats = np.maximum.reduce(sizes)
        return found


@dataclass(frozen=True, eq=False)
class Scales(_OfFloats):
    """The scales of all blocks."""

    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        item = self.as_dtype.bits // 8
        first = offset // item
        last = ceil_div(offset + nbytes, item)
        sizes = np.concatenate([*self._sizes(read, first, last)])
        scales = scales_of(sizes, self.scheme, self.scales, self.factor(read))
        made = np.ascontiguousarray(scales).view(np.uint8)
        return made[offset - first * item :][:nbytes].data

    def _sizes(self, read: Read, first: int, last: int) -> Iterator[Floats]:
        """The largest magnitudes of blocks [first, last), in their order."""
        step = self.shape[-1] if self.height > 1 else max(_TILE // self.width, 1)
        while first < last:
            end = min((first // step + 1) * step, last)
            found = self.noted.found(self.inputs[0].tensor.key, first, end)
            if found is None and self.height > 1:
                band = first // step
                found = self.band_sizes(read, band)[0][first - band * step : end - band * step]
            elif found is None:
                start = first * self.width
                found = self.sizes(self.read_values(read, start, end * self.width), start)
            yield found
            first = end


@dataclass(frozen=True, eq=False)
class Codes(_OfFloats):
    """The codes of all values."""

    figures: Figures  # where the errors are noted

    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        per_byte = 8 // self.scheme.bits
        step = per_byte * (self.as_dtype.bits // 8)  # elements of an item
        start = offset * per_byte // step * step
        stop = -(-(offset + nbytes) * per_byte // step) * step
        codes = np.empty(stop - start, np.uint8)
        self._make(read, start, codes)
        return packed(codes, self.scheme)[offset - start // per_byte :][:nbytes].data

    def fill(self, read: Read, offset: int, out: memoryview) -> None:
        if self.scheme.bits == 8:
            self._make(read, offset, np.frombuffer(out, np.uint8))
        else:
            super().fill(read, offset, out)

    def _make(self, read: Read, start: int, out: Bytes) -> None:
        """The codes of elements [start, start + len(out)), a byte each; their error is noted where a grain is whole."""
        for low, high in self._pieces(start, start + len(out)):
            part = out[low - start : high - start]
            error = (self._of_bands if self.height > 1 else self._of_groups)(read, low, high, part)
            self.figures.note(low, high, error)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Parts of a range that end where grains do."""
        while start < stop:
            end = min((start // GRAIN + 1) * GRAIN, stop)
            yield start, end
            start = end

    def _of_groups(self, read: Read, start: int, stop: int, out: Bytes) -> Error:
        """Blocks are parts of the line: it is seen as rows of one block each."""
        width = self.width
        error = Error()
        low = start // width
        high = ceil_div(stop, width)
        values = self.read_values(read, low * width, high * width)
        divisors = self.divisors(read, self.sizes(values, low * width)).reshape(-1, 1)
        for where in rectangles(start - low * width, stop - low * width, width):
            place = ValuePlace(where.right - where.left, where.left, width)
            first = where.low * width + where.left
            last = (where.high - 1) * width + where.right
            some = divisors[where.low : where.high]
            at = low * width - start
            error += codes_of(values.part(first, last), place, some, self.scheme, out[at + first : at + last])
        return error

    def _of_bands(self, read: Read, start: int, stop: int, out: Bytes) -> Error:
        """Blocks are of several rows: rectangle by rectangle of each band."""
        error = Error()
        rows = self.matrix[-2]
        begin = start
        each = ceil_div(rows, self.height)
        while start < stop:
            matrix, row = divmod(start // self.columns, rows)
            band = matrix * each + row // self.height
            end = min(self.band(band)[1], stop)
            for where in rectangles(start, end, self.columns):
                first = where.low * self.columns + where.left
                last = (where.high - 1) * self.columns + where.right
                error += self._rectangle(read, band, where, out[first - begin : last - begin])
            start = end
        return error

    def _rectangle(self, read: Read, band: int, where: Rectangle, out: Bytes) -> Error:
        """The codes of a rectangle of a band."""
        divisors, values = self._band(read, band)
        first = where.low * self.columns + where.left
        last = first + len(out)
        base = self.band(band)[0]
        values = values.part(first - base, last - base) if values else self.read_values(read, first, last)
        left = where.left // self.width
        place = ValuePlace(where.right - where.left, where.left - left * self.width, self.width)
        return codes_of(values, place, divisors[None, left : ceil_div(where.right, self.width)], self.scheme, out)

    def _band(self, read: Read, number: int) -> tuple[Floats, Values | None]:
        """(what the values of its blocks are divided by, those values where they are few)."""
        place = (self.key, number)
        kept = self.kept.band
        if kept is None or kept[0] != place:
            sizes, values = self.band_sizes(read, number)
            kept = self.kept.band = (place, self.divisors(read, sizes), values)
        return kept[1:]


@dataclass(frozen=True, eq=False)
class Numbers(_OfFloats):
    """What is stated of a whole weight: the shape of one whose codes are packed, the factor of its scales."""

    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        factor = self.factor(read)
        stated = self.inputs[0].tensor.shape if factor is None else factor
        made = np.array(stated, numpy_type(self.as_dtype)).view(np.uint8)
        return made[offset : offset + nbytes].data
