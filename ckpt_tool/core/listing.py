"""Listing: a checkpoint's tensors as `inspect` shows them, without making a row for each.

Of 92,000 tensors, a user is shown a tree of forty lines and a few sums. A reader that keeps columns (names in one piece
of memory, a kind shared by many tensors) provides them as blocks; sums are computed from the kinds, the tree from names
and kinds:

    listing.tally()    {("model", (BF16, (4096, 4096), 33554432)): 64, ...}
    list(listing)      [{"name": ..., "state": "model", "dtype": "BF16", "shape": [...], "bytes": ...}, ...]
    listing.json()     the same as text for --json, in pieces

Cost: 20 ns a tensor for the sums, 2 us for its row, 0.5 us for its text. Holds nothing but the reader's own columns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, overload

from ckpt_tool.core.dtype import DType

Kind = tuple[DType, tuple[int, ...], int]  # dtype, shape, bytes of one such tensor
ROWS = 4096  # of one piece of JSON: 0.5 MB


class RowBlock(NamedTuple):
    """Tensors of one state, as columns in the source's order."""

    state: str
    names: Callable[[], Sequence[bytes]]  # returns the names, in UTF-8
    kinds: Sequence[Kind]  # dtype, shape and bytes of each tensor; equal kinds are often one object


class Listing(Sequence[dict[str, Any]]):
    """The rows of `inspect --json`, each made on access."""

    def __init__(self, blocks: Iterable[RowBlock]) -> None:
        self.blocks = tuple(blocks)

    def __len__(self) -> int:
        return sum(len(block.kinds) for block in self.blocks)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for state, names, kinds in self.blocks:
            for name, kind in zip(names(), kinds, strict=True):
                yield _row(name.decode("utf-8"), state, kind)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return list(self)[index]
        if index < 0:
            index += len(self)
        for row in islice(self, index, None) if index >= 0 else ():
            return row
        raise IndexError(index)

    def json(self) -> Iterator[str]:
        """The text of `json.dumps(list(self))` in pieces."""
        mark = "["
        for (state, names, kinds), distinct in zip(self.blocks, self.distinct, strict=True):
            tails = {id(kind): json.dumps(_row("", state, kind)).removeprefix('{"name": ""') for kind, _ in distinct}
            column = names()
            for begin in range(0, len(column), ROWS):
                decoded = [name.decode("utf-8") for name in column[begin : begin + ROWS]]
                quoted = json.dumps(decoded, separators=("\n", ":"))[1:-1].split("\n")  # JSON text has no line feed
                lines = map(tails.__getitem__, map(id, kinds[begin : begin + ROWS]))
                yield mark + ", ".join([f'{{"name": {name}{tail}' for name, tail in zip(quoted, lines, strict=True)])
                mark = ", "
        yield "[]" if mark == "[" else "]"

    def tally(self) -> dict[tuple[str, Kind], int]:
        """The number of tensors for each state and kind, in the order of their first occurrence."""
        counts: dict[tuple[str, Kind], int] = {}
        for (state, _, _), kinds in zip(self.blocks, self.distinct, strict=True):
            for kind, count in kinds:
                counts[state, kind] = counts.get((state, kind), 0) + count
        return counts

    @cached_property
    def distinct(self) -> tuple[tuple[tuple[Kind, int], ...], ...]:
        """For each block: (kind, number of its tensors), one entry for each object, compared by identity."""
        return tuple(
            tuple((objects[number], count) for number, count in Counter(map(id, block.kinds)).items())
            for block in self.blocks
            for objects in (dict(zip(map(id, block.kinds), block.kinds, strict=True)),)
        )


def _row(name: str, state: str, kind: Kind) -> dict[str, Any]:
    """A tensor as `inspect --json` lists it."""
    dtype, shape, nbytes = kind
    return {"name": name, "state": state, "dtype": dtype.name, "shape": list(shape), "bytes": nbytes}
