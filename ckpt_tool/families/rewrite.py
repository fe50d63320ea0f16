"""Rewrite: a checkpoint's tensors from one dialect of a family into another.

    mapping(ERNIE, "hf", "paddle", {"...gate_proj.weight": (48, 32), "...up_proj.weight": (48, 32)}, {"hidden_size":
    32})
      -> Made("...up_gate_proj.weight", (32, 96), pieces=(from gate_proj, from up_proj))

Source rules give pieces source -> hub for what is there; target rules take pieces hub -> target of hub tensors that
were made; `algebra.compose` joins them without a hub tensor ever being built. All faults of a pass come at once. Cost:
some 45 us a tensor both ways. What it does not do: see `families.base`.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from ckpt_tool.algebra.compose import compose
from ckpt_tool.algebra.equation import Equation
from ckpt_tool.algebra.expression import Extent
from ckpt_tool.algebra.mapped import Made, Mapped
from ckpt_tool.algebra.piece import PAD, Piece, Side
from ckpt_tool.algebra.term import Term
from ckpt_tool.core.bounds import bounded
from ckpt_tool.core.box import contiguous_strides
from ckpt_tool.core.buffers import is_derived
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.families.base import HUB, Config, Family, Shape
from ckpt_tool.families.quantised import followers, is_halved
from ckpt_tool.families.sizes import check_known, configured, fits, settled, shape_of
from ckpt_tool.families.table import Instances, Spot, Table, form_of, instances

_BLOCKS = ("_blocks", "_scales")  # MXFP4
_HALVED = "codes of a quantised weight, two a byte, which no rule can arrange otherwise"
_ALONE = "a part of a quantised weight whose layout changes, which scales can't follow"
_ALONE_THERE = "leave the others out with --remove-keys, or keep the source's names with --dialect keep"
_ONE = "keep one of them, --remove-keys"
_WAY = "dequantise on the way with --dequantize, or keep the source's names with --dialect keep"


class RewriteFault(NamedTuple):
    code: str
    name: str
    what: str
    hint: str


class HalfRule(NamedTuple):
    """A rule of which one side is there."""

    rule: Equation
    # axes, rows: the indices in the names of that side, and the numbers seen
    axes: tuple[str, ...]
    rows: set[tuple[int, ...]]
    example: str  # a name that asks for it
    # the sizes of axes that these rows alone have (`Family.own`)
    own: Mapping[str, int] = MappingProxyType({})

    @property
    def patterns(self) -> set[str]:
        """Axes that run along a tensor on either side: those have their whole size, whatever names there are."""
        return {axis for term in (*self.rule.left, *self.rule.right) for axis in term.pattern.axes}

    @property
    def needed(self) -> list[str]:
        """Axes whose size must be known."""
        patterns = self.patterns
        return [axis for axis in self.rule.axes if (axis in patterns or axis not in self.axes) and axis not in self.own]

    def each(self, sizes: Mapping[str, Extent]) -> Iterator[dict[str, Extent]]:
        """The rule's sizes for rows that make a grid, as few grids as the numbers seen allow: layers with the same
        experts are one. Names of any numbers cost no more than there are of them."""
        patterns = self.patterns
        free = [k for k, axis in enumerate(self.axes) if axis not in patterns]
        rows = {tuple(row[k] for k in free) for row in self.rows}
        grids: dict[frozenset[tuple[int, ...]], list[int]] = defaultdict(list)
        behind: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        for row in rows if free else ():
            behind[row[0]].add(row[1:])
        for first, tails in behind.items():
            grids[frozenset(tails)].append(first)
        for rest, firsts in grids.items():
            others = (tuple(sorted(set(numbers))) for numbers in zip(*rest, strict=True))
            named = (self.axes[k] for k in free)
            yield {**sizes, **self.own, **dict(zip(named, (tuple(sorted(firsts)), *others), strict=True))}
        if not free:
            yield {**sizes, **self.own}

    def parted(
        self,
        own: Mapping[str, Extent | None],
        terms: Sequence[Term],
        shapes: Mapping[str, Shape],
        sizes: Mapping[str, Extent],
    ) -> Iterator[HalfRule]:
        """The same for rows that have axes of `own` of one size each, as the shapes of `terms` say, else as `own` does."""
        mine = self.patterns & own.keys()
        if not mine:
            yield self
            return
        groups: dict[tuple[tuple[str, int], ...], set[tuple[int, ...]]] = defaultdict(set)
        for row in self.rows:
            at = dict(zip(self.axes, row, strict=True))
            names = [(term, term.name.at([at[axis] for axis in term.name.axes], sizes)) for term in terms if term.name]
            seen = [(term.pattern, shapes[name]) for term, name in names if name in shapes]
            found = {**own, **settled(seen, sizes)}
            groups[tuple((axis, n) for axis in sorted(mine) if isinstance(n := found.get(axis), int))].add(row)
        for each, rows in groups.items():
            yield self._replace(rows=rows, own=dict(each))


class _Hub(NamedTuple):
    """What the source makes of the hub's tensors."""

    pieces: list[Piece]
    made: dict[str, list[str]]  # {hub tensor: the source tensors it is made of}
    used: set[str]  # source tensors that a rule knows
    dropped: list[str]
    shapes: dict[str, Shape]  # of every hub tensor that the rules speak of


class _Target(NamedTuple):
    """pieces: target -> hub turned round. shapes: of every whole target tensor."""

    pieces: list[Piece]
    shapes: dict[str, Shape]
    dropped: list[str]  # hub tensors that the target does not have
    like: dict[str, str]  # {target tensor of zeros alone: a source of one that its rule makes of the same layer}


def mapping(family: Family, source: str, target: str, shapes: Mapping[str, Shape], config: Config | None) -> Mapped:
    """What the tensors of dialect `source` are in dialect `target`.

    Args:
        shapes: {parameter: shape} of all that there is; names that no rule knows are not in the result.
        config: the model's config.json, None or {} where there is none.
    Raises UsageError E1231 (no such dialect), E0223-E0224 (a rule's condition asks for what the config lacks);
    InputError E1376 (sizes unknown); InconsistentCheckpoint E1650, and all at once: E1370 (a shape against the config),
    E1371 (a tensor half there), E1374 (no rule in the target dialect), E1375 (one tensor twice), E1377 (a quantised
    tensor that would move).
    """
    config = family.facts(config or {})
    here = family.table(source)
    there = family.table(target)
    named, unknown = instances(here.left, shapes)
    sizes, reasons = sizes_of(family, here, named, shapes, config)
    own = dict.fromkeys(family.own) | {a: n for a, n in configured(family.axes, config)[0].items() if a in family.own}
    found = [
        part
        for each in _found(here, named, {**config, **sizes})
        for part in each.parted(own, each.rule.left, shapes, sizes)
    ]
    _check_counts((here, there), sizes, shapes)
    check_known(_needed(found), sizes, reasons, family.name)
    faults: list[RewriteFault] = []
    hub = _to_hub(family, found, sizes, config, shapes, faults)
    if any(fault.code == "E1370" for fault in faults):
        faults = [fault._replace(hint=fault.hint or _elsewhere(family, source, shapes, config)) for fault in faults]
    chosen, tied = _chosen(family, there, hub, sizes, config, faults)
    wanted = [(part, names) for each, names in chosen for part in each.parted(own, each.rule.right, hub.shapes, sizes)]
    check_known(_needed(found for found, _ in wanted), sizes, reasons, family.name)
    result = _from_hub(wanted, sizes, config, hub, here, faults)
    _refuse(faults)
    gone = [name for hub_name in (*tied, *result.dropped) for name in hub.made[hub_name]]
    pieces = [piece for piece in hub.pieces if piece.dst.name not in tied]
    made = _mapped(compose(pieces, result.pieces), result, shapes)
    derived: list[str] = []
    if source != target:
        towers = _towers(unknown, here, there, shapes)
        twice = [each for each in towers if each.name in result.shapes]
        _refuse(
            [
                RewriteFault("E1375", each.pieces[0].src.name, f"{each.name} is made of others too", _ONE)
                for each in twice
            ]
        )
        made = _by_source((*made, *towers), shapes) if towers else made
        beside, lost = followers(unknown, here, made, shapes)
        made = (*made, *beside)
        in_towers = {each.pieces[0].src.name for each in towers}
        derived = [name for name in unknown if is_derived(name) and name not in in_towers]
        _refuse([RewriteFault("E1377", name, _ALONE, _WAY) for name in lost])
    pairs = [pair for alias in family.table(HUB).aliases for pair in alias.pairs(sizes, config).items()]
    named_there = [(_named_in(there, name, config), _named_in(there, of, config)) for name, of in pairs]
    aliases = [
        (names[0], of[0])
        for names, of in named_there
        if len(names) == len(of) == 1 and names[0] not in result.shapes and of[0] in result.shapes
    ]
    return Mapped(made, dropped=tuple(dict.fromkeys([*hub.dropped, *gone, *derived])), aliases=tuple(aliases))


def _check_counts(tables: Iterable[Table], sizes: Mapping[str, Extent], shapes: Mapping[str, Shape]) -> None:
    """Raise InconsistentCheckpoint E1650 for a count of what is in one tensor on this side and in a tensor each on
    the other (experts), that no shape and no number of tensors shows: names are written out for each."""
    longest = max((extent for shape in shapes.values() for extent in shape), default=0)
    counted: dict[str, None] = {}
    for rule in (rule for table in tables for rule in table.rules):
        terms = (*rule.left, *rule.right)
        along = {axis for term in terms for axis in term.pattern.axes}
        counted |= dict.fromkeys(axis for term in terms for axis in term.axes if axis in along)
    for axis in counted:
        size = sizes.get(axis)
        if isinstance(size, int):
            bounded(size, max(longest, len(shapes)), f"of `{axis}` by the config")


def _refuse(faults: Sequence[RewriteFault]) -> None:
    if faults:
        raise InconsistentCheckpoint(
            f"{faults[0].name}: {faults[0].what}",
            code=faults[0].code,
            key=faults[0].name,
            hint=faults[0].hint,
            faults=[f"{fault.name}: {fault.what}" for fault in faults[1:]],
        )


def sizes_of(
    family: Family, table: Table, named: Sequence[Instances], shapes: Mapping[str, Shape], config: Config
) -> tuple[dict[str, Extent], dict[str, str]]:
    """(sizes, reasons): every axis that the config or a shape settles; why not, for the others."""
    sizes, reasons = configured(family.axes, config)
    seen = []
    for group in named:
        for spot in group.spots if len(group.spots) == 1 else ():  # two rules of a name: a condition chooses
            for term in table.rules[spot.rule].left:
                if term.name and term.name.form == group.form:
                    seen.append((term.pattern, tuple(shapes[group.form % group.values[0]])))
    return {axis: size for axis, size in settled(seen, sizes).items() if axis not in family.own}, reasons


class Unfitting(NamedTuple):
    """A tensor whose shape no rule of its name can have."""

    name: str
    shape: Shape
    pattern: str
    wanted: tuple[int | None, ...]  # what one of them says, None where that is open


def unfitting(
    family: Family, dialect: str, shapes: Mapping[str, Shape], config: Config, *, every: bool = False
) -> Iterator[Unfitting]:
    """One of each kind of tensors that can't have their shapes in that dialect; all of them where `every` is asked
    for."""
    table = family.table(dialect)
    named, _ = instances(table.left, shapes)
    sizes, _ = sizes_of(family, table, named, shapes, config)
    for group in named:
        terms = [
            term
            for spot in group.spots
            for term in table.rules[spot.rule].left
            if term.name and term.name.form == group.form
        ]
        for name in (group.form % numbers for numbers in (group.values if every else group.values[:1])):
            if all(fits(term.pattern, shapes[name], sizes) is False for term in terms):
                yield Unfitting(name, shapes[name], terms[0].pattern.text, shape_of(terms[0].pattern, sizes))


def misfits(family: Family, dialect: str, shapes: Mapping[str, Shape], config: Config) -> int:
    """How many kinds of tensors can't have their shapes in that dialect."""
    return sum(1 for _ in unfitting(family, dialect, shapes, config))


def _elsewhere(family: Family, source: str, shapes: Mapping[str, Shape], config: Config) -> str:
    others = [
        other
        for other in family.known_dialects
        if other != source
        and not misfits(family, other, shapes, config)
        and len(instances(family.table(other).left, shapes)[1]) == 0
    ]
    if others:
        return f"the shapes are those of dialect {' or '.join(others)}: pass --family {family.name}:{others[0]}"
    return f"does the config belong to this checkpoint, and is it a {family.name} model?"


# Source to hub.


def _found(table: Table, named: Iterable[Instances], config: Config) -> list[HalfRule]:
    """The rules whose left side is there, at least in part, in the table's order."""
    found: dict[int, HalfRule] = {}
    for group in named:
        _check_numbers(group, config)
        for spot in group.spots:
            example = group.form % group.values[0]
            rule = found.setdefault(spot.rule, HalfRule(table.rules[spot.rule], spot.axes, set(), example))
            rule.rows.update(_in_order(spot.values(group.values, config), spot.axes, rule.axes))
    return [found[number] for number in sorted(found)]


def _check_numbers(group: Instances, config: Config) -> None:
    """Raise InconsistentCheckpoint (E1374) for a name whose numbers are those of no rule."""
    if not all(spot.shifted for spot in group.spots):
        return
    readers = [spot.reader(config) for spot in group.spots]
    for numbers in group.values:
        if all(read(numbers) is None for read in readers):
            name = group.form % numbers
            raise InconsistentCheckpoint(
                f"{name}: the family has no tensor of that number",
                code="E1374",
                key=name,
                hint="leave it out with --remove-keys, or keep the source's names with --dialect keep",
            )


def _in_order(
    values: Iterable[tuple[int, ...]], axes: Sequence[str], wanted: Sequence[str]
) -> Iterable[tuple[int, ...]]:
    """Rows of `axes` as rows of `wanted`, the same axes in another order."""
    if axes == wanted:
        return values
    order = [axes.index(axis) for axis in wanted]
    return (tuple(row[k] for k in order) for row in values)


def _needed(found: Iterable[HalfRule]) -> dict[str, str]:
    needed: dict[str, str] = {}
    for rule in found:
        for axis in rule.needed:
            needed.setdefault(axis, rule.example)
    return needed


def _to_hub(
    family: Family,
    found: Sequence[HalfRule],
    sizes: Mapping[str, Extent],
    config: Config,
    shapes: Mapping[str, Shape],
    faults: list[RewriteFault],
) -> _Hub:
    hub = _Hub([], defaultdict(list), set(), [], {})
    wanted = hub.shapes
    numel: dict[str, int] = defaultdict(int)
    kept: list[Piece] = []
    zeros: list[Piece] = []  # elements of the hub's that the source has no place for
    for each in found:
        faults += _beyond(each, family.axes, sizes)
        for here in each.each(sizes):
            left, right = each.rule.shapes(here, config)
            wanted.update(right)
            faults += _shape_faults(each, left, here, shapes)
            filled: set[Side] = set()
            for piece in each.rule.pieces(here, config):
                name = piece.src.name
                if name == PAD:
                    zeros.append(piece)
                if name not in shapes:
                    continue
                hub.used.add(name)
                if piece.dst.name != PAD and piece.dst in filled:  # a term that stands twice: the second is a copy
                    continue
                filled.add(piece.dst)
                if piece.dst.name == PAD:
                    hub.dropped.append(name)
                    continue
                numel[piece.dst.name] += piece.numel
                if name not in hub.made[piece.dst.name]:
                    hub.made[piece.dst.name].append(name)
                kept.append(piece)
    faults += _nowhere(found, shapes, {**config, **sizes}, hub)
    for piece in (piece for piece in zeros if piece.dst.name in hub.made):
        numel[piece.dst.name] += piece.numel
        kept.append(piece)
    for name, count in numel.items():
        if count != prod(wanted[name]):
            many = count > prod(wanted[name])
            what = f"{', '.join(hub.made[name])} {'all hold' if many else 'hold only a part of'} the hub's {name}"
            faults.append(RewriteFault("E1375" if many else "E1371", hub.made[name][0], what, _ONE))
    whole = {name for name, count in numel.items() if count == prod(wanted[name])}
    hub.pieces.extend(piece for piece in kept if piece.dst.name in whole)
    for name in [name for name in hub.made if name not in whole]:
        del hub.made[name]
    partly = {piece.src.name for piece in kept}
    hub.dropped[:] = [name for name in dict.fromkeys(hub.dropped) if name not in partly]
    return hub


def _shape_faults(
    found: HalfRule, listed: Mapping[str, Shape], sizes: Mapping[str, Extent], shapes: Mapping[str, Shape]
) -> Iterator[RewriteFault]:
    for name, shape in listed.items():
        if name in shapes and tuple(shapes[name]) != shape and is_halved(name, shape, shapes):
            yield RewriteFault("E1377", name, f"{_HALVED}, of shape {list(shapes[name])}", _WAY)
        elif name in shapes and tuple(shapes[name]) != shape:
            axes = " ".join(f"{axis}={sizes[axis]}" for axis in found.needed if isinstance(sizes[axis], int))
            term = next(term for term in found.rule.left if term.name and term.name.form == form_of(name)[0])
            what = f"shape {list(shapes[name])}, `{term.pattern.text}` wants {list(shape)} ({axes})"
            yield RewriteFault("E1370", name, what, "")


def _nowhere(
    found: Sequence[HalfRule], shapes: Mapping[str, Shape], config: Config, hub: _Hub
) -> Iterator[RewriteFault]:
    """Names that rules know under conditions of which none holds: nothing would say what their elements are."""
    seen = set()
    for each in found if any(each.rule.condition for each in found) else ():
        for name in (term.name for term in each.rule.left if term.name):
            for row in sorted(each.rows):
                at = dict(zip(each.axes, row, strict=True))
                full = name.at([at[axis] for axis in name.axes], config)
                if full in shapes and 0 not in shapes[full] and full not in hub.used and full not in seen:
                    seen.add(full)
                    condition = each.rule.condition.text if each.rule.condition else "nothing"
                    what = f"the family has it only if {condition}, and the config says otherwise"
                    yield RewriteFault("E1370", full, what, "does the config belong to this checkpoint?")


def _beyond(found: HalfRule, axes: Mapping[str, str], sizes: Mapping[str, Extent]) -> Iterator[RewriteFault]:
    """Numbers in names that the config, or the family itself, has no room for."""
    for axis, numbers in zip(found.axes, zip(*found.rows, strict=True), strict=True):
        size = sizes.get(axis)
        if isinstance(size, int) and max(numbers) >= size:
            own = axes.get(axis, "").isdigit()
            what = f"a name with {axis}={max(numbers)}, the {'family has' if own else 'config says'} {size} of them"
            yield RewriteFault(
                "E1370", found.example, what, _ALONE_THERE if own else "does the config belong to this checkpoint?"
            )


# Hub to target.


def _chosen(
    family: Family, table: Table, hub: _Hub, sizes: Mapping[str, Extent], config: Config, faults: list[RewriteFault]
) -> tuple[list[tuple[HalfRule, set[str]]], set[str]]:
    """Each hub tensor's rule in the target, the first that holds: (rules and the hub tensors that they take, hub
    tensors that are another's alias and have no rule of their own)."""
    named, orphans = instances(table.right, hub.made)
    facts = ChainMap({axis: size for axis, size in sizes.items() if isinstance(size, int)}, dict(config))
    rules: dict[int, tuple[HalfRule, set[str]]] = {}
    for group in named:
        readers = [
            (spot, spot.reader({**config, **sizes}), table.rules[spot.rule].choice(spot.axes, facts))
            for spot in group.spots
        ]
        for numbers in group.values:
            name = group.form % numbers
            fitting = [
                (spot, values)
                for spot, read, holds in readers
                if (values := read(numbers)) is not None and holds(values) and _within(spot, values, facts)
            ]
            if not fitting:
                orphans.append(name)
                continue
            spot, values = fitting[0]
            rule = table.rules[spot.rule]
            found, names = rules.setdefault(spot.rule, (HalfRule(rule, spot.axes, set(), name), set()))
            found.rows.update(_in_order((values,), spot.axes, found.axes))
            names.add(name)
    aliases = {name: of for alias in family.table(HUB).aliases for name, of in alias.pairs(sizes, config).items()}
    tied = {name for name in orphans if aliases.get(name) in hub.made}
    for name in orphans:
        if name not in tied:
            way = "dequantise it with --dequantize" if name.endswith(_BLOCKS) else "leave it out with --remove-keys"
            what = "the target dialect has no rule for it"
            faults.append(
                RewriteFault("E1374", hub.made[name][0], what, f"{way}, or keep the source's names with --dialect keep")
            )
    return [rules[number] for number in sorted(rules)], tied


def _within(spot: Spot, values: Sequence[int], sizes: Config) -> bool:
    """Is each number below its axis's size? Where rules number parts of one line of layers, that says whose it is."""
    return all(value < sizes.get(axis, value + 1) for axis, value in zip(spot.axes, values, strict=True))


def _from_hub(
    wanted: Sequence[tuple[HalfRule, set[str]]],
    sizes: Mapping[str, Extent],
    config: Config,
    hub: _Hub,
    here: Table,
    faults: list[RewriteFault],
) -> _Target:
    result = _Target([], {}, [], {})
    for found, names in wanted:
        for local in found.each(sizes):
            kept, missing = _taken(found.rule, names, local, config, result)
            shapes = found.rule.left_shapes(local, config)
            empty = {name for name, pieces in kept.items() if all(piece.src.name == PAD for piece in pieces)}
            some = {
                form_of(name)[1]: piece.src.name
                for name, own in (kept if empty else {}).items()
                for piece in own
                if piece.src.name != PAD
            }
            for name, pieces in kept.items():
                if name in empty:
                    if missing.get(name) or form_of(name)[1] not in some:
                        continue
                    result.like[name] = hub.made[some[form_of(name)[1]]][0]
                if missing.get(name):
                    lost = [each for source in missing[name] for each in _named_in(here, source, {**config, **sizes})]
                    lacking = f"{', '.join(lost[:8])}{' ...' if len(lost) > 8 else ''}"
                    what = f"{name} is made of it too, and {lacking} is missing"
                    there = next(name for piece in pieces if piece.src.name != PAD for name in hub.made[piece.src.name])
                    faults.append(RewriteFault("E1371", there, what, "is a shard or a file of the checkpoint missing?"))
                    continue
                result.pieces.extend(pieces)
                result.shapes[name] = shapes[name]
    return result


def _taken(
    rule: Equation, names: set[str], sizes: Mapping[str, Extent], config: Config, result: _Target
) -> tuple[dict[str, list[Piece]], dict[str, list[str]]]:
    """({target tensor: pieces from those of `names`}, {target tensor: hub tensors that it lacks}); what the rule drops
    goes to `result` at once."""
    kept: dict[str, list[Piece]] = defaultdict(list)
    missing: dict[str, list[str]] = defaultdict(list)
    for piece in rule.swap().pieces(sizes, config):
        source = piece.src.name
        name = piece.dst.name
        if name == PAD:
            if source in names:
                result.dropped.append(source)
                result.pieces.append(piece)
        elif source == PAD or source in names:
            kept[name].append(piece)
        elif source not in missing[name]:
            missing[name].append(source)
    return kept, missing


def _named_in(table: Table, hub_name: str, config: Config) -> list[str]:
    """What a dialect calls the tensors that a hub tensor is made of, by its first rule: all names of the other side, or
    the one in its place where both sides have as many."""
    form, numbers = form_of(hub_name)
    for spot in table.right.get(form, ()):
        values = spot.reader(config)(numbers)
        rule = table.rules[spot.rule]
        if values is None or not _within(spot, values, config):
            continue
        at = dict(zip(spot.axes, values, strict=True))
        if rule.condition and rule.condition.names & at.keys() and not rule.condition.value(ChainMap(at, dict(config))):
            continue
        here, there = ([term.name for term in side if term.name] for side in (rule.left, rule.right))
        if len(here) == len(there):
            here = [here[[name.form for name in there].index(form)]]
        return [name.at([at.get(axis, 0) for axis in name.axes], config) for name in here]
    return [hub_name]


def _towers(unknown: Iterable[str], here: Table, there: Table, shapes: Mapping[str, Shape]) -> list[Made]:
    """What lies in a tower of both dialects, as it is."""
    found = []
    for name in unknown:
        hub_name = here.in_tower(name)
        new = hub_name and there.from_tower(hub_name)
        if new:
            shape = tuple(shapes[name])
            steps = contiguous_strides(shape)
            found.append(Made(new, shape, (Piece(shape, Side(name, 0, steps), Side(new, 0, steps)),)))
    return found


def _by_source(made: Iterable[Made], shapes: Mapping[str, Shape]) -> tuple[Made, ...]:
    place = {name: number for number, name in enumerate(shapes)}
    return tuple(sorted(made, key=lambda each: min(place.get(piece.src.name, len(place)) for piece in each.pieces)))


def _mapped(pieces: Iterable[Piece], target: _Target, shapes: Mapping[str, Shape]) -> tuple[Made, ...]:
    """The made tensors in the order of their first source."""
    made = target.shapes
    like = target.like
    parts: dict[str, list[Piece]] = {name: [] for name in made}
    place = {name: number for number, name in enumerate(shapes)}
    last = len(shapes)
    first = {name: place[of] for name, of in like.items()}
    flat: dict[tuple[Shape, Shape, Shape], tuple[Shape, Shape, Shape]] = {}
    for piece in pieces:
        ext, src, dst, maps = piece
        if dst.name == PAD:
            continue
        key = ext, src.strides, dst.strides
        found = flat.get(key)
        if found is None:
            few = Piece(ext, src, dst).merged()
            found = flat[key] = few.ext, few.src.strides, few.dst.strides
        if found != key:
            ext, steps, strides = found
            piece = Piece(ext, Side(src.name, src.offset, steps), Side(dst.name, dst.offset, strides), maps)
        name = dst.name
        parts[name].append(piece)
        at = place.get(src.name, last)
        if at < first.get(name, last):
            first[name] = at
    order = sorted(parts, key=lambda name: first.get(name, last))
    return tuple(Made(name, made[name], tuple(parts[name]), like=like.get(name, "")) for name in order)
