"""Checks that the fp32 master weights round to the 16-bit model, block by block, wherever they are stored.

    w [master] 1.00390625 (F32) rounds to 1.0 in BF16, w holds 1.0078125  ->  1 element differs, the first at [0]

A trainer that resumes takes the master weights and rounds them again, so a model that is no rounding of its master will
be another one after the first step. Rounding is to nearest, ties to even (IEEE 754; torch `_to_copy`). NaNs count as
equal. Cost: one read of both. What it does not do: decide which of the two is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import MASTER, MODEL, LogicalTensor, TensorKey
from ckpt_tool.plan.plan import Move
from ckpt_tool.run.blocks import BlockReader
from ckpt_tool.run.compute import Bytes, cast, numpy_type
from ckpt_tool.run.scan import Visit, readable, walk
from ckpt_tool.run.walk import STRIDED_BLOCK
from ckpt_tool.storage.source import Tree


class Drift(NamedTuple):
    """A parameter whose model is no rounding of its master."""

    key: TensorKey
    elements: int  # how many differ
    first: tuple[int, ...]  # index of the first


def drifts(catalog: Catalog, tree: Tree, *, skip: frozenset[str] = frozenset()) -> list[Drift]:
    """Every parameter of 16-bit floats with an fp32 master of its shape that does not round to it.

    skip: tensors, as `str(key)`, that could not be read.
    """
    pairs = pairs_of(catalog, skip)
    mine = readable([a for a, _ in pairs], tree)
    theirs = readable([b for _, b in pairs], tree)
    masters = {move.key.name: move for move in theirs.moves}
    found: dict[TensorKey, list[int]] = {}

    def visit(move: Move) -> Visit:
        """The function that sees the blocks of one model tensor."""
        master = masters[move.key.name]
        reader = BlockReader(theirs.files, 16, {})
        buffer: Bytes = np.empty(STRIDED_BLOCK * (master.item // move.item), np.uint8)

        def see(move: Move, at: int, data: Bytes) -> None:
            """Compare a block of the model with the same elements of its master."""
            n = len(data) // move.item
            part = buffer[: n * master.item]
            reader.fill(master, part.data, at, at + n)
            where = drifted(data, part, move.dtype, master.dtype)
            if where.size:
                known = found.setdefault(move.key, [0, at + int(where[0])])
                known[0] += int(where.size)
            if at + n >= move.numel:
                reader.close()

        return see

    walk(mine, visit, on_fault=lambda fault: None)
    shapes = {tensor.key: tensor.shape for tensor, _ in pairs}
    return [
        drift_at(key, shape, *found[key]) for key, shape in shapes.items() if key in found
    ]  # whatever thread was first


def drift_at(key: TensorKey, shape: Sequence[int], elements: int, first: int) -> Drift:
    """The `Drift` of a tensor. first: the first differing element, counted along the row-major line."""
    return Drift(key, elements, tuple(int(i) for i in np.unravel_index(first, shape)))


def pairs_of(catalog: Catalog, skip: frozenset[str]) -> list[tuple[LogicalTensor, LogicalTensor]]:
    """(model, master) of every parameter that is checked: 16-bit floats with an fp32 master of the same shape."""
    out = []
    for key in [key for key in catalog.tensors if key.state == MASTER]:
        twin = TensorKey(key.name, MODEL)
        if twin in catalog.tensors and not {str(key), str(twin)} & skip:
            model = catalog.tensors[twin]
            master = catalog.tensors[key]
            if model.dtype.name in ("BF16", "F16") and master.dtype.name == "F32" and model.shape == master.shape:
                out.append((model, master))
    return out


def drifted(model: Bytes, master: Bytes, kind: DType, wide: DType) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Positions where the master's rounding is not the model's value."""
    rounded = np.frombuffer(cast(master.data, wide, kind)[0], "u2")
    have = model.view("u2")
    # Bits first: only elements that differ are widened, to see whether both are NaN.
    unequal = np.flatnonzero(rounded != have)
    if not unequal.size:
        return unequal
    a, b = (bits[unequal].view(numpy_type(kind)).astype(np.float32) for bits in (rounded, have))
    positions: np.ndarray[Any, np.dtype[np.intp]] = unequal[~(np.isnan(a) & np.isnan(b))]
    return positions
