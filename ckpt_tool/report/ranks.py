"""Ranks as a grid of characters: what each holds, one dim of the mesh across, the others down. `inspect --placement`.

             tp 0         tp 1
         +------------+------------+
    pp 0 |    1.21 GB |    1.21 GB |
         | 34 tensors | 34 tensors |
         +------------+------------+
    pp 1 |     980 MB |     980 MB |
         | 30 tensors | 30 tensors |
         +------------+------------+

Across is the dim whose ranks come next to each other (`core.mesh`: tp first), or the only one there is. Where the
window is too narrow, a grid is drawn below the other; where there are very many rows, neighbours that hold the same are
one row. Ranks that are counted by other dims (DeepSpeed's model files by tp and pp, its optimizer's by dp too) have a
grid of their own: a file of all data ranks is no single one's. What `report.holdings` counts is what is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.mesh import DIMS
from ckpt_tool.report.holdings import Given, Holder, holdings, rank_name
from ckpt_tool.report.page import Ranks
from ckpt_tool.report.text import plural, size

ROWS = 16  # of a grid that are drawn one by one
_FASTEST = ("rank", "tp", "cp", "ep", "etp", "dp", "pp", "vpp")


def grids(tensors: Sequence[Mapping[str, Any]], mesh: Mapping[str, int]) -> Iterator[Ranks]:
    """A grid for each set of dims by which files of ranks are counted; none where no file is a rank's.

    tensors: of a document with chunks.
    """
    coords = {chunk["file"]: chunk["rank"] for tensor in tensors for chunk in tensor.get("chunks") or ()}
    if not any(coords.values()):
        return

    def given(tensor: Mapping[str, Any]) -> Given:
        chunks = tensor.get("chunks") or ()
        parts = [(chunk["file"], Box(tuple(chunk["offset"]), tuple(chunk["shape"]))) for chunk in chunks]
        return Given(tensor["state"], DTYPES[tensor["dtype"]], tuple(tensor["shape"]), lambda: parts)

    rank_holdings = holdings(map(given, tensors), mesh, lambda path: coords.get(path) or None)
    by_dims: dict[tuple[str, ...], list[Holder]] = {}
    for holder in rank_holdings.holders:
        if holder.coords:
            by_dims.setdefault(tuple(sorted(holder.coords, key=_place)), []).append(holder)
    for dims, holders in by_dims.items():
        yield _grid(dims, holders)


def _place(dim: str) -> tuple[int, str]:
    return (_FASTEST.index(dim) if dim in _FASTEST else len(_FASTEST), dim)


def _grid(dims: Sequence[str], holders: Sequence[Holder]) -> Ranks:
    """dims: fastest first."""
    degrees: dict[str, int] = {}
    for dim in dims:
        degrees[dim] = len({holder.coords[dim] for holder in holders})
    across = next((dim for dim in dims if degrees[dim] > 1), dims[0])
    down = [dim for dim in reversed(dims) if dim != across and degrees[dim] > 1]
    columns = sorted({holder.coords[across] for holder in holders})
    rows: dict[tuple[int, ...], dict[int, tuple[str, ...]]] = {}
    for holder in holders:
        tensors = sum(number for number, _ in holder.states.values())
        position = tuple(holder.coords[dim] for dim in down)
        rows.setdefault(position, {})[holder.coords[across]] = (size(holder.nbytes), plural(tensors, "tensor"))
    names = {position: rank_name(dict(zip(down, position, strict=True))) for position in sorted(rows)}
    all_rows = []
    for position in sorted(rows):
        cells = tuple(rows[position].get(column) for column in columns)
        all_rows.append(((names[position],), cells))
    mesh_text = " x ".join(f"{dim} {degrees[dim]}" for dim in sorted(dims, key=_find_dim_order) if degrees[dim] > 1)
    title = f"what each rank holds ({mesh_text or rank_name(holders[0].coords)})"
    return Ranks(title, tuple(f"{across} {column}" for column in columns), tuple(_fold_rows(all_rows)))


def _find_dim_order(dim: str) -> int:
    return DIMS.index(dim) if dim in DIMS else -1


Row = tuple[tuple[str, ...], tuple[tuple[str, ...] | None, ...]]


def _fold_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Rows as they are; of very many, those that follow each other and hold the same as one, from the first to the
    last."""
    if len(rows) <= ROWS:
        yield from rows
        return
    begin = 0
    while begin < len(rows):
        end = begin
        while end + 1 < len(rows) and rows[end + 1][1] == rows[begin][1]:
            end += 1
        yield ((rows[begin][0] + (f"to {rows[end][0][0]}",)) if end > begin else rows[begin][0]), rows[begin][1]
        begin = end + 1
