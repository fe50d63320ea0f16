"""The proof that pieces tile: every element of every tensor once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from ckpt_tool.algebra.compose import meet
from ckpt_tool.algebra.piece import PAD, Piece, SideName


def check_tiling(pieces: Iterable[Piece], shapes: Mapping[str, Sequence[int]], side: SideName) -> None:
    """Fail unless the pieces hold every element of every tensor of `shapes` once on that side."""
    held: dict[str, list[Piece]] = {}
    for piece in pieces:
        name = piece.src.name if side == "src" else piece.dst.name
        if name != PAD and piece.numel:
            held.setdefault(name, []).append(piece)
    faults = [f"{name}: no rule for it" for name, shape in shapes.items() if prod(shape) and name not in held]
    faults += [f"{name}: no such tensor" for name in held if name not in shapes]
    for name in held.keys() & shapes.keys():
        group = sorted(held[name], key=lambda piece: piece.span(side))
        faults += _faults_of(name, group, prod(shapes[name]), side)
    assert not faults, faults


def _faults_of(name: str, group: Sequence[Piece], numel: int, side: SideName) -> Iterator[str]:
    spans = [piece.span(side) for piece in group]
    if spans[0][0] < 0 or max(stop for _, stop in spans) > numel:
        yield f"{name}: elements {spans[0][0]} to {max(stop for _, stop in spans) - 1} of {numel}"
        return
    count = sum(piece.numel for piece in group)
    if count != numel:
        yield f"{name}: {count} of {numel} elements are moved"
    for piece in group:
        below = 1
        for stride, n in sorted(zip((piece.src if side == "src" else piece.dst).strides, piece.ext, strict=True)):
            if n > 1 and stride < below:
                yield f"{name}: a piece steps over itself"
                return
            below += (n - 1) * stride
    running: list[int] = []
    for i, piece in enumerate(group):
        running = [j for j in running if spans[j][1] > spans[i][0]]
        for j in running:
            a, b = (group[j], piece) if side == "dst" else (group[j].swap(), piece.swap())
            if next(meet(a, b.swap()), None) is not None:
                yield f"{name}: two pieces from element {spans[i][0]} on overlap"
                return
        running.append(i)
