"""Compose: pieces A -> B and B -> C as pieces A -> C, without ever building B.

Two pieces that share tensor B meet where the destination side of one and the source side of the other hold the same
elements. Over a chain of strides that divide one another both are boxes of digits, and boxes meet digit by digit:

    megatron qkv -> k      k rows 0..7 from groups of 20 rows
    k -> paddle qkv        k rows 0..7 to columns 12..15 and 32..35
    compose                qkv rows 12..15 and 32..35 to columns 12..15 and 32..35

Cost: about 30 us for an overlap of a new shape, 3 us for a shape seen before (layers and experts repeat), 1 us for the
same shape some rows further in the same tensor (`_Rows`: a layer's experts); pieces whose ranges do not touch are never
compared. What it does not do: ask whether a map of values is exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter

from ckpt_tool.algebra.element_map import joined
from ckpt_tool.algebra.piece import PAD, Piece, Side, SideName, aligned, compact, narrow
from ckpt_tool.errors import InconsistentCheckpoint, UnmappedTensor, near_misses


def compose(first: Iterable[Piece], second: Iterable[Piece]) -> list[Piece]:
    """Pieces from the sources of `first` to the destinations of `second`, through the tensors that they share.

    What `first` drops and what `second` makes from nothing stays so; what `first` makes from nothing reaches the
    destination as padding. The same elements may be taken to several places. Raises UnmappedTensor (E0304) for a shared
    tensor that only one of them knows, InconsistentCheckpoint (E0358) where they don't hold the same elements of it:
    nothing is lost in silence.
    """
    first = list(first)
    second = list(second)
    makers = _by_tensor(first, "dst")
    takers = _by_tensor(second, "src")
    _check_partners(makers, takers)
    meetings = _Meetings()
    out = [piece for piece in first if piece.dst.name == PAD]
    faults = []

    for name, group in makers.items():
        others = takers[name]
        if len(group) == len(others) == 1 and group[0].ext == others[0].ext and group[0].dst == others[0].src:
            # one and the same place, most often: nothing to look for, and nothing to count
            ext, src, _, maps = group[0]
            dst = others[0].dst
            more = others[0].maps
            if src.name != PAD or dst.name != PAD:
                out.append(Piece(ext, src, dst, joined(maps, more) if maps or more else ()))
            continue
        once = {(piece.ext, piece.src): piece for piece in others}  # a taker that appears twice makes copies
        near = _Nearby(others, "src") if len(others) > 1 else None
        rows = _Rows.of(group, near) if near else None
        moved = 0
        for a in group if rows is None else ():
            for b in near.touching(a.span("dst")) if near else others:
                for piece in meetings(a, b):
                    moved += piece.numel if once[b.ext, b.src] is b else 0
                    if piece.src.name != PAD or piece.dst.name != PAD:
                        out.append(piece)
        for b, piece in rows.meetings(group, meetings) if rows else ():
            moved += piece.numel if len(once) == len(others) or once[b.ext, b.src] is b else 0
            if piece.src.name != PAD or piece.dst.name != PAD:
                out.append(piece)
        made = sum(piece.numel for piece in group)
        taken = sum(piece.numel for piece in once.values())
        if not made == taken == moved:
            faults.append(f"{name}: {made} elements are made, {taken} are taken, {moved} are both")

    if faults:
        raise InconsistentCheckpoint(
            f"two rules disagree about {faults[0]}",
            code="E0358",
            faults=faults[1:],
            hint="do the sizes of the two dialects agree?",
        )

    return out + [piece for piece in second if piece.src.name == PAD]


_SPAN = itemgetter(0, 1, 2)


class _Nearby:
    """The pieces of one tensor on one side, sorted by their first element, to be found by range."""

    def __init__(self, pieces: Iterable[Piece], side: SideName) -> None:
        reaches: dict[tuple[Sequence[int], Sequence[int]], int] = {}  # layers and experts repeat
        spans: list[tuple[int, int, int, Piece]] = []
        for i, piece in enumerate(pieces):
            at = piece.src if side == "src" else piece.dst
            reach = reaches.get((piece.ext, at.strides))
            if reach is None:
                reach = reaches[piece.ext, at.strides] = piece.span(side)[1] - at.offset
            spans.append((at.offset, at.offset + reach, i, piece))
        spans.sort(key=_SPAN)
        self.pieces = [piece for _, _, _, piece in spans]
        self.starts = [start for start, _, _, _ in spans]
        self.stops = [stop for _, stop, _, _ in spans]
        self.furthest = list(accumulate(self.stops, max))  # the largest stop so far

    def touching(self, span: tuple[int, int]) -> Iterator[Piece]:
        """Pieces whose range touches [start, stop)."""
        start, stop = span
        for i in range(bisect_left(self.starts, stop) - 1, -1, -1):
            if self.furthest[i] <= start:
                return
            if self.stops[i] > start:
                yield self.pieces[i]


class _Rows:
    """Takers of a tensor whose rows are filled one by one, such as the stacked experts of a layer. Each taker is within
    one row, so takers at the same place in other rows overlap the same pieces, shifted by as many rows.

    starts: row and class of each of `pieces`; pieces of one class differ by a shift of full rows only."""

    def __init__(self, pieces: Sequence[Piece], step: int) -> None:
        self.pieces = pieces
        self.step = step
        numbers: dict[object, int] = {}
        self.starts = []
        for ext, src, dst, maps in pieces:
            row, at = divmod(src.offset, step)
            kind = ext, at, src.strides, dst.strides, maps, dst.name == PAD
            self.starts.append((row, numbers.setdefault(kind, len(numbers))))

    @staticmethod
    def of(makers: Sequence[Piece], takers: _Nearby) -> _Rows | None:
        """None where there are no such rows: where makers have others, or either side crosses them."""
        step, count = max(zip(makers[0].dst.strides, makers[0].ext, strict=True), default=(0, 0))
        first = makers[0].dst.offset // step if step else 0
        if count < 2 or len(takers.pieces) < 2 * len(makers):
            return None
        for a in makers:
            (start, stop), axes = a.span("dst"), sorted(zip(a.dst.strides, a.ext, strict=True))
            if axes[-1] != (step, count) or start // step != first or stop - (count - 1) * step > (first + 1) * step:
                return None
        spans = zip(takers.starts, takers.stops, strict=True)
        inside = all(first <= start // step == (stop - 1) // step < first + count for start, stop in spans)
        return _Rows(takers.pieces, step) if inside else None

    def meetings(self, makers: Sequence[Piece], meetings: _Meetings) -> Iterator[tuple[Piece, Piece]]:
        """(taker, meeting) of all makers and takers, the takers from behind as `_Nearby` finds them."""
        for a in makers:
            along = a.src.strides[a.dst.strides.index(self.step)]
            known: dict[int, tuple[int, int, tuple[Piece, ...]]] = {}
            for b, (row, kind) in zip(self.pieces[::-1], self.starts[::-1], strict=True):
                found = known.get(kind)
                if found is None:
                    found = known[kind] = row, b.dst.offset, tuple(meetings(a, b))
                first, at, met = found
                for ext, src, dst, maps in met:
                    here = Side(src.name, src.offset + (row - first) * along, src.strides)
                    yield b, Piece(ext, here, Side(b.dst.name, dst.offset + b.dst.offset - at, dst.strides), maps)


def _by_tensor(pieces: Iterable[Piece], side: SideName) -> dict[str, list[Piece]]:
    """Pieces by the tensor on that side; padding and empty pieces are left out."""
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        name = piece.src.name if side == "src" else piece.dst.name
        if name != PAD and 0 not in piece.ext:
            groups.setdefault(name, []).append(piece)
    return groups


def _check_partners(makers: Mapping[str, object], takers: Mapping[str, object]) -> None:
    faults = _alone("made, but nothing takes it", makers, takers) + _alone(
        "taken, but nothing makes it", takers, makers
    )
    if faults:
        raise UnmappedTensor(
            f"{len(faults)} tensors have no partner, the first: {faults[0]}",
            code="E0304",
            faults=faults[1:],
            hint="both dialects must name the same tensors of the hub: add a rule, or drop them by name",
        )


def _alone(what: str, names: Iterable[str], known: Mapping[str, object]) -> list[str]:
    """A line for each of `names` that is not `known`; the nearest known names for the first few, as they cost time."""
    alone = [name for name in names if name not in known]
    return [f"{name}: {what}; {near_misses(name, known) if i < 3 else ''}".rstrip("; ") for i, name in enumerate(alone)]


Digits = list[tuple[int, int, int]]  # (first value, count, stride on the other side) of each digit


def meet(a: Piece, b: Piece) -> Iterator[Piece]:
    """From `a.src` to `b.dst` through the elements that `a.dst` and `b.src`, sides of one tensor, share."""
    chain = _chain((*a.ext, *b.ext), (*a.dst.strides, *b.src.strides))
    backwards = _boxes(a.swap(), chain)
    for b_offset, b_digits in _boxes(b, chain):
        for a_offset, a_digits in backwards:
            src = a_offset
            dst = b_offset
            axes: list[tuple[int, int, int]] = []
            for (i, n, s), (j, m, d) in zip(a_digits, b_digits, strict=True):
                start = max(i, j)
                stop = min(i + n, j + m)
                if start >= stop:
                    break
                src = src + (start - i) * s
                dst = dst + (start - j) * d
                if stop - start > 1:
                    axes.append((stop - start, s, d))
            else:
                ext, s_strides, d_strides = zip(*axes, strict=True) if axes else ((), (), ())
                maps = joined(a.maps, b.maps) if a.maps or b.maps else ()
                yield Piece(ext, Side(a.src.name, src, s_strides), Side(b.dst.name, dst, d_strides), maps)


def _chain(ext: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Strides that divide one another, falling. Those of long axes are taken first; axes of the others are unrolled."""
    chain: list[int] = []
    for n, stride in sorted(zip(ext, strides, strict=True), reverse=True):
        if n > 1 and stride not in chain and all(stride % t == 0 or t % stride == 0 for t in chain):
            chain.append(stride)
    return sorted(chain, reverse=True)


def _boxes(piece: Piece, chain: Sequence[int]) -> list[tuple[int, Digits]]:
    """The source side as boxes of digits over `chain`, each with the offset of its destination. Last: the remainder."""
    parts = [piece]
    for j, stride in enumerate(piece.src.strides):
        if stride not in chain:
            parts = [narrow(part, j, k, k + 1) for part in parts for k in range(part.ext[j])]
    for step in chain:
        parts = [inner for part in parts for inner in aligned(part, step)]
    out = []
    for part in map(compact, parts):
        axes = {s: (n, d) for n, s, d in zip(part.ext, part.src.strides, part.dst.strides, strict=True)}
        rest = part.src.offset
        digits = []
        for step in chain:
            digits.append((rest // step, *axes.get(step, (1, 0))))
            rest %= step
        out.append((part.dst.offset, [*digits, (rest, 1, 0)]))
    return out


class _Meetings:
    """Meetings by shape: the layers of a model are one meeting, shifted."""

    def __init__(self) -> None:
        self.known: dict[object, tuple[Piece, ...]] = {}

    def __call__(self, a: Piece, b: Piece) -> Iterator[Piece]:
        if a.ext == b.ext and a.dst.offset == b.src.offset and a.dst.strides == b.src.strides:
            yield Piece(a.ext, a.src, b.dst, joined(a.maps, b.maps) if a.maps or b.maps else ())
            return
        top = max(*a.dst.strides, *b.src.strides, 1, 1)  # a shift by whole steps keeps what is aligned aligned
        shift = min(a.dst.offset, b.src.offset) // top * top
        there = Side("", a.dst.offset - shift, a.dst.strides)
        here = Side("", b.src.offset - shift, b.src.strides)
        key = (a.ext, a.src.strides, there, a.maps, b.ext, here, b.dst.strides, b.maps)
        met = self.known.get(key)
        if met is None:
            plain_a = Piece(a.ext, Side("", 0, a.src.strides), there, a.maps)
            plain_b = Piece(b.ext, here, Side("", 0, b.dst.strides), b.maps)
            met = self.known[key] = tuple(meet(plain_a, plain_b))
        for ext, src, dst, maps in met:
            yield Piece(
                ext,
                Side(a.src.name, a.src.offset + src.offset, src.strides),
                Side(b.dst.name, b.dst.offset + dst.offset, dst.strides),
                maps,
            )
