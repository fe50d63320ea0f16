"""GGUF's types of blocks: floats made of them (`--dequantize`), and they of floats (`--gguf-type`).

    blk.0.attn_q.weight Q4_K (64, 1): blocks of 144 bytes   ->  F32 (64, 256)
    blk.0.attn_q.weight BF16 (64, 256), --gguf-type q8_0    ->  Q8_0 (64, 8): blocks of 34 bytes

The arithmetic is the `gguf` package's, on tiles of whole blocks: no block needs another, so the bits are those of
`gguf.quants.dequantize` and `quantize` of a whole tensor; Q1_0 and Q2_0, of which llama.cpp alone makes floats, are as
there. Big-endian values are turned first, as gguf's own `gguf_convert_endian.py` does: the half-precision scales of a
block, of the types that it knows; plain numbers here.

Source: gguf 0.19.0 `quants.py`, `scripts/gguf_convert_endian.py`; llama.cpp of October 2026 `ggml/src/ggml-quants.c`
(`dequantize_row_q1_0`, `dequantize_row_q2_0`). Cost: 3 ns an element of Q8_0, 5 to 12 of the K's, 13 of Q4_0, 22 to 30
of most IQ types, 0.7 to 1.2 in compiled code (`compiled/blocks.c`, the same bits; not most IQ types); to quantise 8 ns
for Q8_0, 13 for Q4_0, 72 for MXFP4, 0.5 to 1.5 compiled; 80 ms to import. Memory: some `_TILE` elements, at 40 bytes
each, a thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt_tool.compiled.library import BLOCKS, FLOATS, KINDS, ready
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.installation import install_command
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.errors import UsageError
from ckpt_tool.quantised.codecs.code_bits import Array, Floats
from ckpt_tool.quantised.codecs.scale_grid import not_finite_error, widen_to_f32
from ckpt_tool.run.computed import ExactRecipe, Lend, Read, Recipe
from ckpt_tool.weight_schemes.ggml_types import NO_FLOATS, GgufType, is_big, kind_of

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
NO_LIBRARY = "E1710"
_TILE = 1 << 18  # elements that the library makes at once: its steps take some 40 bytes each
_FEW = 128  # blocks that go to the library with one that compiled code does not make
# Types with a half-precision scale and codes of very few bits: (bits of a code, the number that each code encodes).
_FEW_BITS: Mapping[str, tuple[int, tuple[int, ...]]] = {"Q1_0": (1, (-1, 1)), "Q2_0": (2, (-1, 0, 1, 2))}
# where a block has half-precision numbers, in bytes from its start
_HALVES: Mapping[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q6_K": (208,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
}


@dataclass(frozen=True, eq=False)
class FloatsOfBlocks(Recipe):
    """The floats that the blocks of its one input encode."""

    def values(self, read: Read, start: int, stop: int) -> Floats:
        """As `Recipe.values`, block by block."""
        out = np.empty(stop - start, np.float32)
        self._make(read, start, out)
        return out

    def fill(self, read: Read, offset: int, out: memoryview) -> None:
        """As `Recipe.fill`, without a copy if the range consists of complete floats."""
        if offset % 4 or len(out) % 4:
            super().fill(read, offset, out)
        else:
            self._make(read, offset // 4, np.frombuffer(out, np.float32))

    def compute_rounded(self, read: Read, lend: Lend, start: int, stop: int, out: tuple[Array, str]) -> bool:
        """As `Recipe.compute_rounded`, in compiled code; False if that does not know the types."""
        dtype = self.inputs[0].tensor.dtype
        target = out[0]
        kind = kind_of(dtype)
        library = ready(4 * (stop - start)) if kind.name in FLOATS and out[1] in KINDS else None
        if library is None:
            return False
        low = start // kind.elements
        high = ceil_div(stop, kind.elements)
        is_aligned = (high - low) * kind.elements == stop - start
        buffer = target if is_aligned else np.empty((high - low) * kind.elements, target.dtype)
        items = lend(0, low, high)[0].reshape(high - low, kind.nbytes)
        if not library.floats(_swap_endianness(kind, items) if is_big(dtype) else items, kind.name, buffer, out[1]):
            return False
        if not is_aligned:
            target[...] = buffer[start - low * kind.elements :][: stop - start]
        return True

    def _make(self, read: Read, start: int, out: Floats) -> None:
        """out: elements of the line from `start` on."""
        dtype = self.inputs[0].tensor.dtype
        stop = start + len(out)
        kind = kind_of(dtype)
        step = max(_TILE // kind.elements, 1)
        low = start // kind.elements
        high = ceil_div(stop, kind.elements)
        for first in range(low, high, step):
            last = min(first + step, high)
            at = first * kind.elements - start
            items = read(0, first, last).view(np.uint8).reshape(last - first, kind.nbytes)
            begin = max(-at, 0)
            end = min((last - first) * kind.elements, stop - start - at)
            _decode_items(
                kind, _swap_endianness(kind, items) if is_big(dtype) else items, begin, out[at + begin : at + end]
            )

    @property
    def memory(self) -> int:
        """Bytes that the gguf package needs while it decodes a tile."""
        return 40 * _TILE


@dataclass(frozen=True, eq=False)
class BlocksOfFloats(ExactRecipe):
    """The blocks that encode the values of its one input. `as_dtype` is the dtype of their type."""

    as_dtype: DType

    @property
    def dtype(self) -> DType:
        """The dtype of the blocks."""
        return self.as_dtype

    @property
    def memory(self) -> int:
        """Bytes that the gguf package needs while it encodes a tile."""
        return 40 * _TILE

    def line(self, read: Read, offset: int, nbytes: int) -> memoryview:
        """As `ExactRecipe.line`: complete blocks are encoded, and the range is cut out of them."""
        kind = kind_of(self.as_dtype)
        low = offset // kind.nbytes
        high = ceil_div(offset + nbytes, kind.nbytes)
        blocks = np.empty((high - low) * kind.nbytes, np.uint8).data
        self.fill(read, low * kind.nbytes, blocks)
        return blocks[offset - low * kind.nbytes :][:nbytes]

    def fill(self, read: Read, offset: int, out: memoryview) -> None:
        """As `Recipe.fill`, without a copy if the range consists of complete blocks."""
        kind = kind_of(self.as_dtype)
        if offset % kind.nbytes or len(out) % kind.nbytes:
            super().fill(read, offset, out)
            return
        low = offset // kind.nbytes
        blocks = np.frombuffer(out, np.uint8).reshape(-1, kind.nbytes)
        step = max(_TILE // kind.elements, 1)
        for at in range(0, len(blocks), step):
            tile = blocks[at : at + step]
            values = read(0, (low + at) * kind.elements, (low + at + len(tile)) * kind.elements)
            self._make(kind, values, low + at, tile)

    def _make(self, kind: GgufType, line: Array, block: int, out: Bytes) -> None:
        """out: (blocks, bytes of one), from number `block` on. What compiled code leaves to the library goes there with
        few neighbours. Raises InconsistentCheckpoint E2720 for a value that is no finite number."""
        dtype = self.inputs[0].tensor.dtype
        step = len(out)
        library = ready(line.nbytes) if dtype.name in KINDS and kind.name in BLOCKS else None
        if library is not None:
            if library.blocks((line, dtype.name), kind.name, out):
                return
            step = _FEW
        for first in range(0, len(out), step):
            tile = out[first : first + step]
            part = line[first * kind.elements : (first + step) * kind.elements]
            if library is None or not library.blocks((part, dtype.name), kind.name, tile):
                floats = widen_to_f32(part, dtype)
                finite = np.isfinite(floats)
                if not finite.all():
                    at = (block + first) * kind.elements + int(np.argmin(finite))
                    tensor = self.inputs[0].tensor
                    index = [int(i) for i in np.unravel_index(at, tensor.shape)]
                    raise not_finite_error(str(tensor.key), index, "--gguf-type bf16 keeps it")
                tile[...] = _encode_by_library(kind, floats).reshape(tile.shape)


def _decode_items(kind: GgufType, items: Bytes, skip: int, out: Floats) -> None:
    """out: the floats of items behind the first `skip`. items: (blocks, bytes of one), little-endian. The library takes
    sixteen rows at a time: one row is quickest."""
    if kind.elements == 1:
        if kind.name == "BF16":
            out[...] = (items.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(-1)
        else:
            letter = "f" if kind.name.startswith("F") else "i"
            out[...] = items.view(f"<{letter}{kind.nbytes}").reshape(-1)
        return
    compiled = ready(4 * len(items) * kind.elements) if kind.name in FLOATS else None
    is_aligned = len(out) == len(items) * kind.elements
    values = out if is_aligned else np.empty(len(items) * kind.elements, np.float32)
    if compiled is None or not compiled.floats(items, kind.name, values, "F32"):
        values = _decode_few_bits(kind.name, items) if kind.name in _FEW_BITS else _decode_by_library(kind, items)
    if values is not out:
        out[...] = values[skip : skip + len(out)]


def _decode_by_library(kind: GgufType, items: Bytes) -> Floats:
    quants = library()
    with np.errstate(all="ignore"):
        values: Floats = quants.dequantize(np.ascontiguousarray(items).reshape(1, -1), _find_library_type(kind))
    return values.reshape(-1)


def _decode_few_bits(name: str, items: Bytes) -> Floats:
    bits, numbers = _FEW_BITS[name]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (items[:, 2:, None] >> shifts & ((1 << bits) - 1)).reshape(len(items), -1)
    values: Floats = np.array(numbers, np.float32)[codes] * items[:, :2].view("<f2").astype(np.float32)
    return values.reshape(-1)


def _encode_by_library(kind: GgufType, values: Floats) -> Bytes:
    quants = library()
    with np.errstate(all="ignore"):
        blocks: Bytes = quants.quantize(values.reshape(1, -1), _find_library_type(kind))
    return blocks.reshape(-1)


def _swap_endianness(kind: GgufType, items: Bytes) -> Bytes:
    """Items of a big-endian file as a little-endian one has them."""
    if kind.elements == 1:
        return np.ascontiguousarray(items[:, ::-1])
    swapped = items.copy()
    for at in _HALVES[kind.name]:
        swapped[:, at : at + 2] = items[:, at : at + 2][:, ::-1]
    return swapped


def library() -> Any:
    """`gguf.quants`. Raises UsageError E1710."""
    try:
        import gguf.quants
    except ImportError as e:
        raise UsageError(
            "GGUF's quantised types want the gguf package, which is not installed",
            code=NO_LIBRARY,
            hint=install_command("gguf"),
        ) from e
    return gguf.quants


def _find_library_type(kind: GgufType) -> Any:
    import gguf

    return gguf.GGMLQuantizationType(kind.number)


def has_floats(dtype: DType) -> bool:
    """Are there floats for its items?"""
    kind = kind_of(dtype)
    return kind.name not in NO_FLOATS and (not is_big(dtype) or kind.elements == 1 or kind.name in _HALVES)
