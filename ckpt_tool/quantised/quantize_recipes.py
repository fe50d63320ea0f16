"""Recipes of quantised weights: codes and scales, computed from floats while these are read (`nearest_codes` has the
arithmetic).

    Codes(key, ...)    F8_E4M3 (300, 256)        Scales(key, ...)   F32 (3, 2)        Numbers(key, ...)  I64 (2,)

Where a block is a row or a part of one, its scale needs the values of that block alone: any range of the line is made
of the blocks that it touches. Where a block has several rows, a whole band of rows is read: its scales (and its values,
if they are few) are cached by the thread that made them, because the next range is most often in the same band. The
largest magnitudes that `Codes` finds are noted (`KnownMaxima`), so that `Scales`, which come after the codes in the
output, read only the floats of blocks that were not noted.

Memory a thread: `_TILE` elements at 48 bytes each, and a band of at most `_BAND` bytes; for a transposed matrix a panel
of `_PANEL` bytes and as much again while it is transposed. For all threads: `_NOTED` bytes of maxima.
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
from ckpt_tool.quantised.codecs.code_bits import Array, Bytes, Floats
from ckpt_tool.quantised.codecs.rectangles import Rectangle, rectangles
from ckpt_tool.quantised.codecs.scale_grid import not_finite_error
from ckpt_tool.quantised.error_stats import GRAIN, Figures
from ckpt_tool.quantised.nearest_codes import (
    Error,
    ValuePlace,
    Values,
    codes_of,
    divisors_of,
    largest,
    pack_codes,
    scales_of,
    whole_of,
)
from ckpt_tool.run.compute import cast, numpy_type
from ckpt_tool.run.computed import ExactRecipe, Read
from ckpt_tool.weight_schemes.quantised_weights import TURNED
from ckpt_tool.weight_schemes.written_schemes import Scheme

_TILE = 1 << 18  # elements that are worked on at once
_BAND = 8 << 20  # bytes: the values of a band are cached up to this
_PANEL = 16 << 20  # bytes of a transposed matrix that are transposed at once
_NOTED = 8 << 20  # bytes of noted maxima: of 2^31 elements in blocks of 128 x 128, of 2^26 in groups of 32


class ThreadCache(threading.local):
    """What a thread read last, of one tensor at a time: its next range is most often next to the last one."""

    # (tensor, number of the band), what its values are divided by, and the values where they are few
    band: tuple[tuple[TensorKey, int], Floats, Values | None] | None = None

    # (tensor, matrix, first row), and the panel's elements as one line
    panel: tuple[tuple[TensorKey, int, int], Array] | None = None


class KnownMaxima:
    """The largest magnitudes of blocks that a thread has computed already, for the weights that came last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_tensor: dict[TensorKey, Floats] = {}  # NaN: not computed yet

    def note(self, key: TensorKey, first: int, maxima: Floats, total: int) -> None:
        """Note those of blocks [first, first + len(maxima)); the weight `key` has `total` blocks."""
        if 4 * total > _NOTED:
            return

        with self._lock:
            if key not in self._by_tensor:
                # Make room: the weights that were noted first are dropped first.
                noted_bytes = sum(noted.nbytes for noted in self._by_tensor.values())
                while noted_bytes + 4 * total > _NOTED:
                    noted_bytes -= self._by_tensor.pop(next(iter(self._by_tensor))).nbytes
                self._by_tensor[key] = np.full(total, np.nan, np.float32)

            self._by_tensor[key][first : first + len(maxima)] = maxima

    def recall(self, key: TensorKey, first: int, last: int) -> Floats | None:
        """Those of blocks [first, last); None unless all of them are noted."""
        with self._lock:
            noted = self._by_tensor.get(key)
            if noted is None:
                return None
            maxima = noted[first:last].copy()
        return None if np.isnan(maxima).any() else maxima


class GlobalScale:
    """nvfp4: what the scales of a tensor are multiplied by, computed once and shared by its recipes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scale: Floats | None = None

    def get(self, largest: Callable[[], Floats]) -> Floats:
        """The scale. largest: finds the largest magnitude of the tensor, called the first time only."""
        with self._lock:
            if self._scale is None:
                self._scale = whole_of(largest())
            return self._scale


@dataclass(frozen=True, eq=False)
class _QuantisedPart(ExactRecipe):
    """A tensor that is computed from the floats of its one input: codes, scales or numbers of one quantised weight."""

    scheme: Scheme
    as_dtype: DType
    floats: DType  # what the floats are rounded to before anything else
    scales: DType  # the dtype of the scales
    global_scale: GlobalScale | None  # what the scales are multiplied by, in schemes that have such a factor

    # Shared by all recipes of a run.
    thread_cache: ThreadCache
    known_maxima: KnownMaxima

    @property
    def dtype(self) -> DType:
        """The dtype of the tensor that is computed."""
        return self.as_dtype

    @property
    def memory(self) -> int:
        """Bytes that a thread needs, see the module."""
        return 48 * _TILE + (2 * _PANEL if self.scheme.codes == TURNED else _BAND)

    @cached_property
    def matrix(self) -> tuple[int, ...]:
        """The shape of the values as the scheme encodes them: transposed, for some schemes."""
        return self.scheme.matrix(self.inputs[0].tensor.shape)

    @cached_property
    def columns(self) -> int:
        """Columns of the matrix as the scheme encodes it."""
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
        line = self._read_line(read, start, stop)
        tensor = self.inputs[0].tensor
        if self.floats == tensor.dtype:
            return Values(line, tensor.dtype)
        rounded, _ = cast(line.view(np.uint8).data, tensor.dtype, self.floats)
        return Values(np.frombuffer(rounded, numpy_type(self.floats)), self.floats)

    def _read_line(self, read: Read, start: int, stop: int) -> Array:
        """Elements [start, stop) of the line as they are stored; of a transposed matrix, from panels of its rows."""
        if self.scheme.codes != TURNED:
            return read(0, start, stop)

        rows, columns = self.matrix[-2:]
        rows_at_once = min(max(_PANEL * 8 // self.inputs[0].tensor.dtype.bits // columns, 1), rows)
        parts: list[Array] = []
        while start < stop:
            # The panel that holds element `start`, and how much of it is wanted.
            matrix, row = divmod(start // columns, rows)
            first_row = row // rows_at_once * rows_at_once
            last_row = min(first_row + rows_at_once, rows)
            panel_start = (matrix * rows + first_row) * columns
            panel = self._load_panel(read, matrix, first_row, last_row)
            parts.append(panel[start - panel_start : min(stop - panel_start, len(panel))])
            start += len(parts[-1])

        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _load_panel(self, read: Read, matrix: int, first: int, last: int) -> Array:
        """Rows [first, last) of a transposed matrix: columns of the stored one."""
        place = (self.key, matrix, first)
        cached = self.thread_cache.panel
        if cached is not None and cached[0] == place:
            return cached[1]

        rows, columns = self.matrix[-2:]
        base = matrix * rows * columns
        if last - first == rows:
            stored = read(0, base, base + rows * columns)
        else:
            stored_rows = range(base, base + rows * columns, rows)
            stored = np.concatenate([read(0, at + first, at + last) for at in stored_rows])
        panel: Array = np.ascontiguousarray(stored.reshape(columns, last - first).T).reshape(-1)
        self.thread_cache.panel = (place, panel)
        return panel

    def find_maxima(self, values: Values, start: int) -> Floats:
        """The largest magnitudes of the blocks of a line of whole blocks, which begins with element `start`."""
        maxima = self.check_finite(largest(values, self.width, self.width), values, start).reshape(-1)
        self.known_maxima.note(self.inputs[0].tensor.key, start // self.width, maxima, self.blocks)
        return maxima

    def check_finite(self, maxima: Floats, values: Values, start: int) -> Floats:
        """Return `maxima`, those of `values`, which begin with element `start`.

        Raises InconsistentCheckpoint E2720 if one is NaN or infinite, naming the first such value.
        """
        if np.isfinite(maxima).all():
            return maxima

        at = start + int(np.flatnonzero(~np.isfinite(values.wide))[0])
        index = [*self.scheme.matrix(tuple(int(i) for i in np.unravel_index(at, self.matrix)))]
        raise not_finite_error(str(self.inputs[0].tensor.key), index, "--quantize-skip leaves this one as it is")

    def find_band_maxima(self, read: Read, band: int) -> tuple[Floats, Values | None]:
        """(the largest magnitudes of the blocks of a band, its values where they are few)."""
        columns = self.columns
        start, stop = self.locate_band(band)
        is_small = (stop - start) * self.floats.bits // 8 <= _BAND
        step = stop - start if is_small else max(_TILE // columns, 1) * columns

        # A large band is read tile by tile, and only its maxima stay in memory.
        parts: list[Floats] = []
        values = None
        for at in range(start, stop, step):
            values = self.read_values(read, at, min(at + step, stop))
            parts.append(self.check_finite(largest(values, columns, self.width, of_all=True), values, at)[0])

        maxima = parts[0] if len(parts) == 1 else np.maximum.reduce(parts)
        self.known_maxima.note(self.inputs[0].tensor.key, band * len(maxima), maxima, self.blocks)
        return maxima, values if is_small else None

    @cached_property
    def blocks(self) -> int:
        """The number of blocks of the whole tensor."""
        *before, rows, columns = self.matrix
        return prod(before) * ceil_div(rows, self.height) * ceil_div(columns, self.width)

    def locate_band(self, number: int) -> tuple[int, int]:
        """The elements [start, stop) of a band: bands are numbered through all matrices of the tensor."""
        rows = self.matrix[-2]
        bands_per_matrix = ceil_div(rows, self.height)
        matrix, band = divmod(number, bands_per_matrix)
        low = matrix * rows + band * self.height
        return low * self.columns, min(low + self.height, (matrix + 1) * rows) * self.columns

    def compute_divisors(self, read: Read, maxima: Floats) -> Floats:
        """What the values of blocks with these largest magnitudes are divided by."""
        factor = self.find_global_scale(read)
        scales = scales_of(maxima, self.scheme, self.scales, factor)
        return divisors_of(scales, self.scales, str(self.key), factor)

    def find_global_scale(self, read: Read) -> Floats | None:
        """What all scales of the tensor are multiplied by, None in schemes without such a factor."""
        return self.global_scale.get(lambda: self._find_tensor_maximum(read)) if self.global_scale else None

    def _find_tensor_maximum(self, read: Read) -> Floats:
        """The largest magnitude of the whole tensor."""
        numel = self.inputs[0].tensor.numel
        step = max(_TILE // self.width, 1) * self.width
        tile_maxima: list[Floats] = []
        for start in range(0, numel, step):
            values = self.read_values(read, start, min(start + step, numel))
            tile_maxima.append(self.find_maxima(values, start).max(keepdims=True))
        maximum: Floats = np.maximum.reduce(tile_maxima)
        return maximum


@dataclass(frozen=True, eq=False)
class Scales(_QuantisedPart):
    """The scales of all blocks."""

    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        """As `ExactRecipe.line`: scales, from the largest magnitudes of their blocks."""
        item = self.as_dtype.bits // 8
        first = offset // item
        last = ceil_div(offset + nbytes, item)
        maxima = np.concatenate([*self._list_maxima(read, first, last)])
        scales = scales_of(maxima, self.scheme, self.scales, self.find_global_scale(read))
        stored = np.ascontiguousarray(scales).view(np.uint8)
        return stored[offset - first * item :][:nbytes].data

    def _list_maxima(self, read: Read, first: int, last: int) -> Iterator[Floats]:
        """The largest magnitudes of blocks [first, last), in their order."""
        is_banded = self.height > 1
        step = self.shape[-1] if is_banded else max(_TILE // self.width, 1)
        while first < last:
            end = min((first // step + 1) * step, last)
            maxima = self.known_maxima.recall(self.inputs[0].tensor.key, first, end)

            # Not noted by the codes (another process wrote them, or there were too many): read the floats again.
            if maxima is None and is_banded:
                band = first // step
                maxima = self.find_band_maxima(read, band)[0][first - band * step : end - band * step]
            elif maxima is None:
                start = first * self.width
                maxima = self.find_maxima(self.read_values(read, start, end * self.width), start)
            yield maxima
            first = end


@dataclass(frozen=True, eq=False)
class Codes(_QuantisedPart):
    """The codes of all values."""

    figures: Figures  # where the errors are noted

    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        """As `ExactRecipe.line`: codes, packed as the scheme stores them."""
        # Several codes share an item (eight in an I32), so a range is widened to whole items and cut again.
        per_byte = 8 // self.scheme.bits
        codes_per_item = per_byte * (self.as_dtype.bits // 8)
        start = offset * per_byte // codes_per_item * codes_per_item
        stop = ceil_div((offset + nbytes) * per_byte, codes_per_item) * codes_per_item
        codes = np.empty(stop - start, np.uint8)
        self._encode(read, start, codes)
        return pack_codes(codes, self.scheme)[offset - start // per_byte :][:nbytes].data

    def fill(self, read: Read, offset: int, out: memoryview) -> None:
        """As `Recipe.fill`; codes of eight bits are written without a copy."""
        if self.scheme.bits == 8:
            self._encode(read, offset, np.frombuffer(out, np.uint8))
        else:
            super().fill(read, offset, out)

    def _encode(self, read: Read, start: int, out: Bytes) -> None:
        """Write the codes of elements [start, start + len(out)), a byte each.

        Their error is noted grain by grain, so that a grain that is asked for twice counts once.
        """
        encode = self._encode_bands if self.height > 1 else self._encode_groups
        for low, high in self._split_at_grains(start, start + len(out)):
            error = encode(read, low, high, out[low - start : high - start])
            self.figures.note(low, high, error)

    def _split_at_grains(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Parts of a range that end where grains do."""
        while start < stop:
            end = min((start // GRAIN + 1) * GRAIN, stop)
            yield start, end
            start = end

    def _encode_groups(self, read: Read, start: int, stop: int, out: Bytes) -> Error:
        """Encode elements [start, stop) where blocks are parts of the line: it is seen as rows of one block each."""
        width = self.width
        first_block = start // width
        last_block = ceil_div(stop, width)
        base = first_block * width
        values = self.read_values(read, base, last_block * width)
        divisors = self.compute_divisors(read, self.find_maxima(values, base)).reshape(-1, 1)

        error = Error()
        for rectangle in rectangles(start - base, stop - base, width):
            place = ValuePlace(rectangle.right - rectangle.left, rectangle.left, width)
            first = rectangle.low * width + rectangle.left
            last = (rectangle.high - 1) * width + rectangle.right
            row_divisors = divisors[rectangle.low : rectangle.high]
            codes = out[base - start + first : base - start + last]
            error += codes_of(values.part(first, last), place, row_divisors, self.scheme, codes)
        return error

    def _encode_bands(self, read: Read, start: int, stop: int, out: Bytes) -> Error:
        """Encode elements [start, stop) where blocks have several rows: rectangle by rectangle of each band."""
        error = Error()
        rows = self.matrix[-2]
        bands_per_matrix = ceil_div(rows, self.height)
        begin = start
        while start < stop:
            matrix, row = divmod(start // self.columns, rows)
            band = matrix * bands_per_matrix + row // self.height
            end = min(self.locate_band(band)[1], stop)

            for rectangle in rectangles(start, end, self.columns):
                first = rectangle.low * self.columns + rectangle.left
                last = (rectangle.high - 1) * self.columns + rectangle.right
                error += self._encode_rectangle(read, band, rectangle, out[first - begin : last - begin])
            start = end
        return error

    def _encode_rectangle(self, read: Read, band: int, rectangle: Rectangle, out: Bytes) -> Error:
        """Encode a rectangle within a band."""
        divisors, band_values = self._load_band(read, band)
        first = rectangle.low * self.columns + rectangle.left
        last = first + len(out)
        if band_values is None:
            values = self.read_values(read, first, last)
        else:
            base = self.locate_band(band)[0]
            values = band_values.part(first - base, last - base)

        # The rectangle may begin within a block.
        first_block = rectangle.left // self.width
        last_block = ceil_div(rectangle.right, self.width)
        skip = rectangle.left - first_block * self.width
        place = ValuePlace(rectangle.right - rectangle.left, skip, self.width)
        return codes_of(values, place, divisors[None, first_block:last_block], self.scheme, out)

    def _load_band(self, read: Read, number: int) -> tuple[Floats, Values | None]:
        """(what the values of its blocks are divided by, those values where they are few)."""
        place = (self.key, number)
        cached = self.thread_cache.band
        if cached is None or cached[0] != place:
            maxima, values = self.find_band_maxima(read, number)
            cached = (place, self.compute_divisors(read, maxima), values)
            self.thread_cache.band = cached
        return cached[1:]


@dataclass(frozen=True, eq=False)
class Numbers(_QuantisedPart):
    """What is stored about a whole weight: its shape where codes are packed, or the factor of its scales."""

    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        """As `ExactRecipe.line`: the numbers, little-endian."""
        factor = self.find_global_scale(read)
        numbers = self.inputs[0].tensor.shape if factor is None else factor
        stored = np.array(numbers, numpy_type(self.as_dtype)).view(np.uint8)
        return stored[offset : offset + nbytes].data
