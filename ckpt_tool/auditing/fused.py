"""Suspicions that the parts of a fused weight are in another order than the family's, by the sizes of their rows.

    qkv_proj.weight : (g r d + g d + g d) h    all queries, then all keys, then all values; or group by group?
    gate_up_proj.weight : ((1 + 1) f) h        all gates, then all ups; or one by one, or stripes of tensor ranks?

The arrangement that the family states is compared with others that exporters have produced by mistake: interleaved
group by group, row by row, and in stripes of 2, 4 or 8 tensor ranks. A suspicion is named where another one explains
the rows' sizes far better (`run.row_norms`) in every layer, or where one layer has gate and up the other way round than
all others. Parts that do not differ show nothing. What it does not do: find two parts of one size that are swapped in
every layer; nothing in the file shows it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt_tool.algebra.pattern import Pattern
from ckpt_tool.auditing.findings import ORDER, FoundFault
from ckpt_tool.auditing.subject import Subject
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError
from ckpt_tool.families.rewrite import sizes_of
from ckpt_tool.families.table import form_of, instances

# of the variance: explained by the other arrangement at least, by the stated one at most
_CLEAR = 0.7
_WEAK = 0.15
_MORE = 0.3  # than a plain slope over the rows explains
# at least, that say so
_LAYERS = 2
_ROWS = 64
_SURE = 3.0  # standard deviations between gate and up
_OTHERS = 4  # layers that agree, of which one does not
_RANKS = (2, 4, 8)
_ROW_LIMIT = 1 << 20
_FUSED = re.compile(r"\+")


class Fused(NamedTuple):
    """A fused weight: the part of each row, as the family states it, and the same in other arrangements by name."""

    name: str
    stated: Sequence[int]
    others: Mapping[str, Sequence[int]]


def findings(subject: Subject) -> Iterator[FoundFault]:
    """Fused weights whose parts seem to be in another order. Reads those weights once."""
    from ckpt_tool.run.row_norms import apart, explained, row_norms, sloped

    suspected: dict[tuple[str, str], list[str]] = defaultdict(list)
    swapped: dict[str, dict[str, float]] = defaultdict(dict)
    counts: dict[str, int] = defaultdict(int)
    for fused in fused_weights(subject):
        norms = row_norms(subject.opened.catalog, subject.opened.tree, TensorKey(fused.name, subject.state))
        form = form_of(fused.name)[0]
        share = explained(norms, fused.stated)
        counts[form] += 1
        best = max(fused.others, key=lambda each: explained(norms, fused.others[each]), default=None)
        if best is not None:
            other_distance = explained(norms, fused.others[best])
            if other_distance >= max(_CLEAR, sloped(norms) + _MORE) and share <= _WEAK:
                suspected[form, best].append(fused.name)
        if max(fused.stated) == 1:
            swapped[form][fused.name] = apart(norms, fused.stated)
    for (form, best), names in suspected.items():
        if len(names) >= _LAYERS and len(names) == counts[form]:
            message = f"the rows of {names[0]} (and {len(names) - 1} more) look as if its parts were stored {best}"
            yield FoundFault(ORDER, message, names[0])
    for distances in swapped.values():
        yield from _find_swapped(distances)


def _find_swapped(distances: Mapping[str, float]) -> Iterator[FoundFault]:
    """One layer whose parts differ as clearly as all others' do, the other way round."""
    for sign in (1, -1):
        usual = [name for name, distance in distances.items() if sign * distance >= _SURE]
        outliers = [name for name, distance in distances.items() if -sign * distance >= _SURE]
        if len(outliers) == 1 and len(usual) >= _OTHERS and len(usual) + 1 == len(distances):
            yield FoundFault(
                ORDER,
                f"the two parts of {outliers[0]} look swapped: in all other layers the larger is the other",
                outliers[0],
            )


def fused_weights(subject: Subject) -> Iterator[Fused]:
    """Matrices that the family's rules make of several parts along dim 0."""
    if subject.found is None:
        return

    family, dialect = subject.found
    table = family.table(dialect)
    shapes = subject.shapes
    named, _ = instances(table.left, shapes)
    sizes, _ = sizes_of(family, table, named, shapes, family.facts(subject.config))

    for group in named:
        patterns = {
            term.pattern.text: term.pattern
            for spot in group.spots
            for term in table.rules[spot.rule].left
            if term.name and term.name.form == group.form
        }
        if len(patterns) != 1 or not _FUSED.search(next(iter(patterns))):
            continue
        pattern = next(iter(patterns.values()))
        for numbers in group.values:
            name = group.form % numbers
            kind = subject.kinds[name]
            if (
                len(kind.shape) == 2
                and kind.dtype.is_float
                and kind.dtype.bits >= 16
                and _ROWS <= kind.shape[0] <= _ROW_LIMIT
            ):
                if (labels := _labels(pattern, sizes, kind.shape)) is not None:
                    yield Fused(name, labels, _arrangements(labels))


def _labels(pattern: Pattern, sizes: Mapping[str, object], shape: tuple[int, ...]) -> list[int] | None:
    """The part of each row, None where the sum is not along dim 0, or no size fits."""
    rows, columns = shape
    labels = [-1] * rows
    try:
        parts = pattern.parts(sizes)  # type: ignore[arg-type]
        axes = {axis: sizes[axis] for part in parts for axis in part.strides}
    except (CkptError, KeyError):
        return None
    for number, part in enumerate(parts):
        places = [part.offset]
        for axis, stride in part.strides.items():
            extent = axes[axis]
            if type(extent) is not int:
                return None
            if stride >= columns:
                places = [place + k * stride for place in places for k in range(extent)]
        for place in places:
            if place % columns or place // columns >= rows:
                return None
            labels[place // columns] = number
    return labels if -1 not in labels and len(parts) > 1 else None


def _arrangements(stated: Sequence[int]) -> dict[str, list[int]]:
    """The parts of the rows, of the same sizes, laid out otherwise."""
    sizes = [stated.count(part) for part in range(max(stated) + 1)]
    arrangements = {"one after another": [part for part, size in enumerate(sizes) for _ in range(size)]}
    for stripes in (*_RANKS, min(sizes)):
        if all(size % stripes == 0 for size in sizes) and stripes > 1:
            stripe = [part for part, size in enumerate(sizes) for _ in range(size // stripes)]
            description = "row by row" if stripes == min(sizes) == max(sizes) else f"in {stripes} stripes"
            arrangements[description] = stripe * stripes
    return {description: labels for description, labels in arrangements.items() if labels != list(stated)}
