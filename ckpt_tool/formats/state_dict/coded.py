"""Joins optimizer states that torchao quantised, in the pieces of a distributed checkpoint, into full tensors.

    exp_avg (128, 64) as rows 0-63 and 64-127, each an OptimState8bit with blocks of 256
      ->  exp_avg@codes U8 (128, 64) in two boxes, exp_avg@scale F32 (32,) in two boxes, exp_avg@qmap F32 (256,) twice

Blocks follow each piece's own row-major order. So if pieces are ranges of rows, their concatenated scales are those of
the full tensor; pieces along other dims cannot be joined. Tables of values are replicas, compared when they are read.
Source: torchao 0.18.0 `optim/adam.py` (`_new_buffer`: codes of a DTensor's local part). `pickles.coded_states` defines
the content of a piece. What it does not do: pieces of which some are plain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.catalog import Note, mark_replicas
from ckpt_tool.core.tensor import Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import InputError
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.storage.pickles.coded_states import CODES, PARTS, QMAP, SCALE

MIXED = "E1379"
Piece = tuple[Box, Mapping[str, StoredArray]]


def joined(pieces: Sequence[Piece], shape: tuple[int, ...], fqn: str) -> dict[str, LogicalTensor]:
    """The parts of a state of `shape`, with empty keys, from those of its pieces (boxes in elements, the parts stored).
    Raises InputError E1379 where the pieces have no parts in common, or scales that are no line."""
    if len({tuple(parts) for _, parts in pieces}) > 1:
        raise _mixed("some of its pieces are kept as codes and others not", fqn)

    row = prod(shape[1:])
    steps = {box.numel // parts[SCALE].shape[0] for box, parts in pieces if CODES in parts}
    if not all(CODES in parts for _, parts in pieces) or len(steps) > 1:
        raise _mixed("its pieces are kept as codes of other blocks", fqn)

    (step,) = steps
    made: dict[str, list[Chunk]] = {}
    for box, parts in pieces:
        start = box.offset[0] * row if shape else 0
        if box.shape[1:] != shape[1:] or start % step:
            raise _mixed(f"it is cut along other dims than rows: {list(box.shape)} of {list(shape)}", fqn)
        codes = parts[CODES]
        half = shape[-1:] != codes.shape[-1:] and box.shape != codes.shape  # two codes a byte
        offset = (*box.offset[:-1], box.offset[-1] // 2) if half else box.offset
        boxes = {CODES: offset, SCALE: (start // step,), QMAP: (0,)}
        for name, array in parts.items():
            made.setdefault(name, []).append(Chunk(Box(boxes[name], array.shape), array, whole(array.shape)))

    out = {}
    for name, chunks in made.items():
        own = chunks[0].array.shape
        if name != QMAP:
            own = (sum(chunk.box.shape[0] for chunk in chunks), *own[1:])
        out[name] = LogicalTensor(TensorKey(""), own, chunks[0].array.dtype, mark_replicas(chunks))

    return out


def part_of(state: str) -> tuple[str, str] | None:
    """(state, part) where a state's name is that of a part of a coded one.

    >>> part_of("exp_avg@scale"), part_of("exp_avg@scales"), part_of("exp_avg")
    (('exp_avg', 'scale'), None, None)
    """
    name, _, part = state.rpartition("@")
    return (name, part) if name and part in PARTS else None


def shape_of_codes(codes: tuple[int, ...], qmap: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of a state from that of its codes and of its table: of 16 values two codes are in a byte.

    >>> shape_of_codes((128, 32), (16,)), shape_of_codes((128, 32), (256,)), shape_of_codes((128, 32), None)
    ((128, 64), (128, 32), (128, 32))
    """
    return (*codes[:-1], 2 * codes[-1]) if qmap == (16,) else codes


def coded_notes(tensors: Iterable[LogicalTensor]) -> list[Note]:
    """The line for the report on states that are kept as codes among `tensors`, where there are any."""
    where = [dotted(tensor.path).rpartition("@")[0] for tensor in tensors if tensor.key.state.endswith(f"@{CODES}")]
    return [coded_note(where)] if where else []


def coded_note(where: Sequence[str]) -> Note:
    """The line for a reader's report."""
    return Note(
        "N-coded-states",
        f"{len(where)} optimizer states are torchao's codes, such as {where[0]}: shown as STATE@codes, STATE@scale and"
        " STATE@qmap; --dequantize writes them as F32",
    )


def _mixed(what: str, fqn: str) -> InputError:
    return InputError(
        f"an optimizer state of torchao, and {what}",
        code=MIXED,
        key=fqn,
        hint="save it gathered (full_state_dict=True), or the states in fp32; --drop optimizer leaves it out",
    )
