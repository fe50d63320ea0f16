"""From the stored pieces of a torch_dist checkpoint to the chunks of logical tensors.

The one idea: whatever the writer did to a tensor, a piece is still a box of the tensor that the key means; once that
box is known, leading positions (layer, expert) are taken off it and the rest is a chunk.

    (L, 2f, h) piece at (3, 24, 0) of (1, 24, h)     -> layer 3, rows 24-47
    fully_sharded_model_space, core 0.6-0.15: a tensor (X, Y) whose ranks hold (x, y) is stored as (X/x, Y/y, x*y), and
    data ranks hold slices of the last dim: (128, 32) over 2 ranks is (2, 1, 2048), the piece at (1, 0, 1000) of 1048
    elements
    begins at element 1000 of the lower half                                     -> rows 95.25-127, at most 2n - 1 boxes

The true shape of such a tensor stands in `.metadata`, attribute `mcore_data` (`nd_reformulated_orig_global_shape`);
one-dimensional tensors have it since core 0.11, before that they lay as they are. Source: NVIDIA/Megatron-LM core 0.14
`dist_checkpointing/strategies/torch.py` (`sharded_tensor_to_torch_sharded_tensor`, `mcore_data`), removed from core
0.16 (pull request 2126: current Megatron cannot load them).

Cost: about 5 us a chunk. What it does not do: find bytes (`containers.dcp_items`), know names (`megatron_dist.keys`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from ckpt_tool.core.box import Box, contiguous_strides, flat_boxes
from ckpt_tool.core.tensor import Chunk, StoredArray
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.formats.containers.dcp_metadata import CONTRADICTION, Piece, TensorEntry

At = tuple[int, ...]


def chunks_of(entry: TensorEntry, arrays: Iterable[StoredArray], true_shape: At | None) -> list[Chunk]:
    """The pieces of `entry` as chunks of the tensor that its key means (leading dims included).

    arrays: the pieces' bytes, in the same order. true_shape: of a tensor whose stored form is the flattened one. Raises
    InconsistentCheckpoint (E0389) when the two shapes do not go together.
    """
    if true_shape is None:
        return entry.chunks(arrays)
    cell = _cell(entry, true_shape)
    return [
        chunk for piece, array in zip(entry.pieces, arrays, strict=True) for chunk in _flattened(piece, array, cell)
    ]


def _cell(entry: TensorEntry, true_shape: At) -> At:
    """The local shape that each grid cell of the stored, flattened tensor holds."""
    grid, numel = entry.shape[:-1], entry.shape[-1] if entry.shape else 0
    fits = len(grid) == len(true_shape) and all(n and not size % n for size, n in zip(true_shape, grid, strict=True))
    cell = tuple(size // n for size, n in zip(true_shape, grid, strict=True)) if fits else ()
    if not fits or prod(cell) != numel:
        raise InconsistentCheckpoint(
            f"stored as {list(entry.shape)}, which is no flattened form of {list(true_shape)}",
            code=CONTRADICTION,
            key=entry.fqn,
            hint="the metadata contradicts itself: get the checkpoint again",
        )
    return cell


def _flattened(piece: Piece, array: StoredArray, cell: At) -> Iterator[Chunk]:
    start, count = piece.offset[-1], piece.shape[-1]
    if prod(piece.shape[:-1]) != 1:
        raise InconsistentCheckpoint(
            f"a piece of shape {list(piece.shape)} covers several cells of the grid",
            code=CONTRADICTION,
            path=piece.file,
            offset=piece.at,
            hint="no version of Megatron writes this: get the checkpoint again",
        )
    line = array.view(0, (count,), _line_stride(array))
    corner = tuple(i * n for i, n in zip(piece.offset[:-1], cell, strict=True))
    done = 0
    for box in flat_boxes(cell, start, start + count):
        yield Chunk(box.translate(corner), line, Box((done,), (box.numel,)))
        done += box.numel


def _line_stride(array: StoredArray) -> At | None:
    return None if array.strides is None else array.strides[-1:]


def apart(chunk: Chunk, leads: int) -> Iterator[tuple[At, Chunk]]:
    """The chunk without its `leads` first dims: (position, chunk) for every position that it covers."""
    box = chunk.box
    if not leads:
        yield (), chunk
        return
    inner = Box(box.offset[leads:], box.shape[leads:])
    flat = chunk.within.shape != box.shape
    for index in product(*(range(n) for n in box.shape[:leads])):
        at = tuple(o + i for o, i in zip(box.offset[:leads], index, strict=True))
        if flat:
            steps = contiguous_strides(box.shape)[:leads]
            start = chunk.within.offset[0] + sum(i * step for i, step in zip(index, steps, strict=True))
            yield at, Chunk(inner, chunk.array, Box((start,), (inner.numel,)))
        else:
            yield at, _row(chunk, inner, index)


def _row(chunk: Chunk, inner: Box, index: At) -> Chunk:
    """The chunk's box at position `index` (relative to the box) of its leading dims."""
    array, leads = chunk.array, len(index)
    strides = array.strides or contiguous_strides(array.shape)
    lead = zip(chunk.within.offset[:leads], index, strides[:leads], strict=True)
    skipped = sum((offset + i) * stride for offset, i, stride in lead)
    row = array.view(skipped, array.shape[leads:], None if array.strides is None else array.strides[leads:])
    return Chunk(inner, row, Box(chunk.within.offset[leads:], chunk.within.shape[leads:]))


def moved(chunk: Chunk, rows: int) -> Chunk:
    """The chunk `rows` rows further down its tensor."""
    offset = chunk.box.offset
    return Chunk(Box((offset[0] + rows, *offset[1:]), chunk.box.shape), chunk.array, chunk.within, chunk.replica)
