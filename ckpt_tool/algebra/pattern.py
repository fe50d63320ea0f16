"""Pattern: how named axes make up the dims of a tensor, einops notation plus `+` for parts laid end to end.

    v h                      a matrix: dims v and h
    (g (r + 1 + 1) d) h      dim 0 counts g groups; in each, r + 1 + 1 heads; in each, d rows      Megatron's fused QKV
    (t (1 + 1) u) h          two halves interleaved in t stripes                                   a TP-striped SwiGLU
    h (n 2 j)                a number larger than 1 is an axis of that size, named by its digits
    h ((1 + 1 @ 2 1) f)      two halves, stored in reverse order

`( )` nests row-major, the left axis slowest; `1` is the unnamed unit; `+` is used inside parentheses and binds looser
than a sequence: `(a b + c)` puts `a b` before `c`, `(a b + c @ 2 1)` puts it after `c`: the numbers after `@` are the
places of the summands. The empty pattern is a scalar.

A pattern with sums is several **parts**, one for each choice of a summand, as they are written: the QKV above has the
parts `g r d h`, `g d h`, `g d h`. A part is a dense grid of axes: an offset and a stride for each axis, in elements
of the tensor's row-major space.

    >>> pattern("(g (r + 1 + 1) d) h").parts({"g": 2, "r": 3, "d": 4, "h": 10})[1]
    Part(offset=120, strides={'g': 200, 'd': 10, 'h': 1})

Cost: linear in the text and the number of parts. What it does not do: name tensors or match two patterns
(`algebra.equation`), move anything (`algebra.piece`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import index
from typing import NamedTuple

from ckpt_tool.core.box import contiguous_strides
from ckpt_tool.errors import UsageError, near_misses

MAX_CHARS = 400
MAX_DEPTH = 20
MAX_PARTS = 4096
Sizes = Mapping[str, int | Sequence[int]]  # an axis: its extent, or the indices that its name takes in order

_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|[0-9]+|[()+@])")


class Part(NamedTuple):
    """One summand of a pattern."""

    # offset, strides: in elements of the tensor's row-major space
    offset: int
    strides: dict[str, int]


class Band(NamedTuple):
    """Where an axis runs along a tensor dim: index k covers elements [start + k * granule, start + (k+1) * granule)."""

    dim: int
    start: int
    granule: int


@dataclass(frozen=True, slots=True)
class _PatternNode:
    """kind `axis` (name), `group` (items, row-major) or `sum` (items, end to end)."""

    kind: str
    name: str = ""
    items: tuple[_PatternNode, ...] = ()
    order: tuple[int, ...] = ()  # the items' places in a sum, from 0; () as they are written

    def size(self, sizes: Sizes) -> int:
        """The number of elements, by the sizes of the axes."""
        if self.kind == "axis":
            return size_of(self.name, sizes)
        extents = [item.size(sizes) for item in self.items]
        return prod(extents) if self.kind == "group" else sum(extents)

    def starts(self, extents: Sequence[int]) -> list[int]:
        """Where each item of a sum begins, in units of this node's steps."""
        if not self.order:
            return [0, *accumulate(extents[:-1])]
        return [sum(n for n, place in zip(extents, self.order, strict=True) if place < own) for own in self.order]

    def kinds(self) -> list[tuple[str, ...]]:
        """The axes of each part, in order, without sizes."""
        if self.kind == "axis":
            return [()] if self.name == "1" else [(self.name,)]
        if self.kind == "sum":
            return [kind for item in self.items for kind in item.kinds()]
        found: list[tuple[str, ...]] = [()]
        for item in self.items:
            found = [a + b for a in found for b in item.kinds()]
            if len(found) > MAX_PARTS:
                raise UsageError(f"a pattern of more than {MAX_PARTS} parts", code="E0233")
        return found

    def parts(self, stride: int, sizes: Sizes) -> list[Part]:
        """The parts of this node when a step of it is `stride` elements."""
        if self.kind == "axis":
            return [Part(0, {} if self.name == "1" else {self.name: stride})]
        extents = [item.size(sizes) for item in self.items]
        if self.kind == "sum":
            return [
                Part(start * stride + part.offset, part.strides)
                for start, item in zip(self.starts(extents), self.items, strict=True)
                for part in item.parts(stride, sizes)
            ]
        found = [Part(0, {})]
        for item, step in zip(self.items, contiguous_strides(extents), strict=True):
            inner = item.parts(stride * step, sizes)
            found = [Part(a.offset + b.offset, {**a.strides, **b.strides}) for a in found for b in inner]
        return found

    def bands(self, axis: str, sizes: Sizes) -> Iterator[tuple[int, int]]:
        """(start, granule) of each run of `axis`, in units of this node's steps."""
        if self.kind == "axis":
            if self.name == axis:
                yield 0, 1
            return
        extents = [item.size(sizes) for item in self.items]
        if self.kind == "sum":
            for start, item in zip(self.starts(extents), self.items, strict=True):
                yield from ((start + inner, granule) for inner, granule in item.bands(axis, sizes))
            return
        for place, item in enumerate(self.items):
            after = prod(extents[place + 1 :])
            for inner, granule in item.bands(axis, sizes):
                for outer in range(prod(extents[:place])):
                    yield (outer * extents[place] + inner) * after, granule * after


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern, one node for each tensor dim."""

    text: str
    dims: tuple[_PatternNode, ...]
    axes: tuple[str, ...]  # every named axis, in order of first sight, literals included
    kinds: tuple[tuple[str, ...], ...]  # the axes of each part

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The tensor's shape. Raises UsageError (E0230 an axis without a size, E0231 a bad one)."""
        return tuple(dim.size(sizes) for dim in self.dims)

    def parts(self, sizes: Sizes) -> list[Part]:
        """The parts in row-major order, as many as `kinds`. Errors as `shape`."""
        return _PatternNode("group", items=self.dims).parts(1, sizes)

    def bands(self, axis: str, sizes: Sizes) -> list[Band]:
        """Where `axis` runs along the tensor's dims: how to cut a fused tensor along a named axis.

        `((1 + 1) f) h` gives `f` two bands of granule 1 (gate rows, up rows); `(g (r + 1 + 1) d) h` gives `g` one
        band of granule (r + 2) * d. In order of dim and start; [] when the pattern has no such axis.
        """
        return [Band(dim, *band) for dim, node in enumerate(self.dims) for band in sorted(node.bands(axis, sizes))]


def size_of(axis: str, sizes: Sizes) -> int:
    """The extent of an axis. Raises UsageError: E0230 unknown, E0231 negative or no whole number."""
    if axis.isdigit():
        return int(axis)
    if axis not in sizes:
        raise UsageError(
            f"axis {axis!r} has no size", code="E0230", hint=near_misses(axis, sizes) or "state it among the axes"
        )
    size = sizes[axis]
    if isinstance(size, Sequence) and not isinstance(size, str):
        if len(set(size)) != len(size):
            raise UsageError(f"axis {axis!r} takes an index twice: {list(size)[:20]}", code="E0231")
        return len(size)
    if isinstance(size, bool) or not hasattr(size, "__index__") or size < 0:
        raise UsageError(f"axis {axis!r} has size {size!r}, want a whole number >= 0", code="E0231")
    return index(size)


def indices_of(axis: str, sizes: Sizes) -> Sequence[int]:
    """What `{axis}` in a name counts through. Raises UsageError as `size_of`."""
    count = size_of(axis, sizes)
    size = sizes[axis]
    return size if isinstance(size, Sequence) else range(count)


@lru_cache(maxsize=4096)
def pattern(text: str) -> Pattern:
    """Parse `text`. Raises UsageError: E0220 with the column, E0227 an axis twice in one part, E0233 too large."""
    parser = _Parser(text)
    dims = parser.sequence(0)
    if parser.peek() in ("+", "@"):
        raise parser.fault(f"`{parser.peek()}` is inside parentheses: `(a + b) c`")
    if parser.peek():
        raise parser.fault(f"`{parser.peek()}` closes nothing")
    shown = " ".join(text.split())
    kinds = tuple(_PatternNode("group", items=dims).kinds())
    for kind in kinds:
        twice = sorted({axis for axis in kind if kind.count(axis) > 1})
        if twice:
            raise UsageError(
                f"axis {twice[0]!r} appears twice in the part `{' '.join(kind)}` of `{shown}`",
                code="E0227",
                hint="each axis counts once: name the second one differently",
            )
    return Pattern(shown, dims, tuple(dict.fromkeys(axis for kind in kinds for axis in kind)), kinds)


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.tokens: list[tuple[str, int]] = []
        end = len(text.rstrip())
        here = 0
        if end > MAX_CHARS:
            raise UsageError(f"a pattern of {end} characters, at most {MAX_CHARS} are read", code="E0233")
        while here < end:
            match = _TOKEN.match(text, here)
            if match is None:
                self.tokens.append((text[here:].strip()[0], here))
                self.at = len(self.tokens) - 1
                raise self.fault(f"`{self.peek()}` has no meaning in a pattern")
            self.tokens.append((match[1], match.start(1)))
            here = match.end()
        self.tokens.append(("", end))

    def fault(self, message: str) -> UsageError:
        """The error E0220 at the current token."""
        place = f"column {self.tokens[self.at][1] + 1}"
        return UsageError(f"{message}, in the pattern `{self.text.strip()}`", code="E0220", place=place)

    def peek(self) -> str:
        """The current token, which is not consumed."""
        return self.tokens[self.at][0]

    def sequence(self, depth: int) -> tuple[_PatternNode, ...]:
        """Items side by side, up to `+`, `)` or the end."""
        items = []
        while self.peek() not in ("", "+", ")", "@"):
            token = self.peek()
            if token == "(":
                items.append(self.group(depth + 1))
                continue
            if token.isdigit() and (int(token) == 0 or token[0] == "0"):
                raise self.fault(f"`{token}` is no extent")
            items.append(_PatternNode("axis", token))
            self.at += 1
        return tuple(items)

    def group(self, depth: int) -> _PatternNode:
        """`( sequence + sequence ... )`; `()` is a unit."""
        if depth > MAX_DEPTH:
            raise UsageError(f"a pattern of more than {MAX_DEPTH} levels", code="E0233")
        self.at += 1
        summands = [self.sequence(depth)]
        while self.peek() == "+":
            self.at += 1
            summands.append(self.sequence(depth))
        order = self.order(len(summands)) if self.peek() == "@" else ()
        if self.peek() != ")":
            raise self.fault("a `(` is not closed")
        self.at += 1
        if len(summands) == 1:
            return _PatternNode("group", items=summands[0])
        if not all(summands):
            raise self.fault("`+` wants something on both sides")
        items = tuple(s[0] if len(s) == 1 else _PatternNode("group", items=s) for s in summands)
        return _PatternNode("sum", items=items, order=order)

    def order(self, count: int) -> tuple[int, ...]:
        """`@ 2 1`: the place of each summand."""
        self.at += 1
        places = []
        while self.peek().isdigit():
            places.append(int(self.peek()) - 1)
            self.at += 1
        if sorted(places) != list(range(count)) or count < 2:
            raise self.fault(f"`@` wants the places of {count} summands, each of 1 to {count} once")
        return tuple(places)
