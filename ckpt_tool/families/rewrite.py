"""Maps a checkpoint's tensors from one dialect of a family to another.

    mapping(ERNIE, "hf", "paddle", {"...gate_proj.weight": (48, 32), "...up_proj.weight": (48, 32)}, {"hidden_size":
    32})
      -> Made("...up_gate_proj.weight", (32, 96), pieces=(from gate_proj, from up_proj))

The source's rules give pieces source -> hub for the tensors that exist; the target's rules give pieces hub -> target
for the hub tensors that these fill; `algebra.compose` joins both without building a hub tensor. All faults of a pass
are reported together. Cost: some 45 us a tensor both ways. What it does not do: see `families.base`.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from ckpt_tool.algebra.compose import compose
from ckpt_tool.algebra.equation import Equation
from ckpt_tool.algebra.expression import Extent
from ckpt_tool.algebra.mapped import Made, Mapped
from ckpt_tool.algebra.piece import PAD, Piece, Side
from ckpt_tool.algebra.term import Term
from ckpt_tool.core.bounds import check_count
from ckpt_tool.core.box import contiguous_strides
from ckpt_tool.core.buffers import is_derived
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.families.base import HUB, Config, Family, Shape
from ckpt_tool.families.quantised import followers, is_halved
from ckpt_tool.families.sizes import check_known, compute_sizes, fits, infer_sizes, shape_of
from ckpt_tool.families.table import Instances, Spot, Table, form_of, instances

_BLOCKS = ("_blocks", "_scales")  # MXFP4
_HALVED = "codes of a quantised weight, two a byte, which no rule can arrange otherwise"
_ALONE = "a part of a quantised weight whose layout changes, which scales can't follow"
_ALONE_THERE = "leave the others out with --remove-keys, or keep the source's names with --dialect keep"
_ONE = "keep one of them, --remove-keys"
_WAY = "dequantise on the way with --dequantize, or keep the source's names with --dialect keep"


class RewriteFault(NamedTuple):
    """A reason why the tensors can't be mapped, collected so that all of a pass are reported at once."""

    code: str
    name: str  # the tensor
    what: str
    hint: str


class HalfRule(NamedTuple):
    """A rule for which tensors of one side exist."""

    rule: Equation
    axes: tuple[str, ...]  # the indices in the names of that side
    rows: set[tuple[int, ...]]  # the numbers seen, by those axes
    example: str  # a name that the rule matches, for messages
    # the sizes of axes that apply only to these rows (`Family.own`)
    own: Mapping[str, int] = MappingProxyType({})

    @property
    def patterns(self) -> set[str]:
        """Axes that are a dim of a tensor on either side: they always have their full size, whatever names exist."""
        return {axis for term in (*self.rule.left, *self.rule.right) for axis in term.pattern.axes}

    @property
    def needed(self) -> list[str]:
        """Axes whose size must be known."""
        patterns = self.patterns
        return [axis for axis in self.rule.axes if (axis in patterns or axis not in self.axes) and axis not in self.own]

    def grids(self, sizes: Mapping[str, Extent]) -> Iterator[dict[str, Extent]]:
        """The rule's sizes for each grid of its rows, as few grids as the numbers seen allow.

        Layers with the same experts are one grid, so names of any numbers cost no more than there are of them.
        """
        patterns = self.patterns
        columns = [column for column, axis in enumerate(self.axes) if axis not in patterns]
        if not columns:
            yield {**sizes, **self.own}
            return

        # {number on the first axis (a layer): the numbers on the others (its experts)}
        tails_of: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        for row in self.rows:
            first, *others = (row[column] for column in columns)
            tails_of[first].add(tuple(others))

        # {numbers on the others: the layers that have exactly these}
        layers_of: dict[frozenset[tuple[int, ...]], list[int]] = defaultdict(list)
        for layer, tails in tails_of.items():
            layers_of[frozenset(tails)].append(layer)

        names = [self.axes[column] for column in columns]
        for shared_tails, layers in layers_of.items():
            tail_numbers = (tuple(sorted(set(numbers))) for numbers in zip(*shared_tails, strict=True))
            numbers_of = dict(zip(names, (tuple(sorted(layers)), *tail_numbers), strict=True))
            yield {**sizes, **self.own, **numbers_of}

    def split(
        self,
        own: Mapping[str, Extent | None],
        terms: Sequence[Term],
        shapes: Mapping[str, Shape],
        sizes: Mapping[str, Extent],
    ) -> Iterator[HalfRule]:
        """The same rule, split into groups of rows on which the axes of `Family.own` have one size each.

        Args:
            own: the family's own axes, with the size that holds where no shape shows another; None where there is none.
            terms: the side of the rule whose tensors show the sizes.
        """
        own_axes = self.patterns & own.keys()
        if not own_axes:
            yield self
            return

        rows_by_sizes: dict[tuple[tuple[str, int], ...], set[tuple[int, ...]]] = defaultdict(set)
        for row in self.rows:
            index_of = dict(zip(self.axes, row, strict=True))
            seen = []
            for term in terms:
                if term.name:
                    name = term.name.at([index_of[axis] for axis in term.name.axes], sizes)
                    if name in shapes:
                        seen.append((term.pattern, shapes[name]))
            row_sizes = {**own, **infer_sizes(seen, sizes)}
            known_sizes = []
            for axis in sorted(own_axes):
                size = row_sizes.get(axis)
                if isinstance(size, int):
                    known_sizes.append((axis, size))
            rows_by_sizes[tuple(known_sizes)].add(row)

        for known, rows in rows_by_sizes.items():
            yield self._replace(rows=rows, own=dict(known))


class _Hub(NamedTuple):
    """The hub tensors that the source's tensors fill."""

    pieces: list[Piece]  # source -> hub
    made: dict[str, list[str]]  # {hub tensor: the source tensors it is made of}
    used: set[str]  # source tensors that a rule knows
    dropped: list[str]  # source tensors that the hub does not have
    shapes: dict[str, Shape]  # of every hub tensor that the rules name


class _Target(NamedTuple):
    """The target tensors that the hub's tensors fill."""

    pieces: list[Piece]  # hub -> target
    shapes: dict[str, Shape]  # of every complete target tensor
    dropped: list[str]  # hub tensors that the target does not have
    like: dict[str, str]  # {target tensor of only zeros: a source tensor of the same rule and layer, for its dtype}


def mapping(family: Family, source: str, target: str, shapes: Mapping[str, Shape], config: Config | None) -> Mapped:
    """Map the tensors of dialect `source` to those of dialect `target`.

    Args:
        shapes: {parameter: shape} of all that there is; names that no rule knows are not in the result.
        config: the model's config.json, None or {} where there is none.
    Raises UsageError E1231 (no such dialect), E0223-E0224 (a rule's condition asks for what the config lacks);
    InputError E1376 (sizes unknown); InconsistentCheckpoint E1650, and all at once: E1370 (a shape against the config),
    E1371 (a tensor half there), E1374 (no rule in the target dialect), E1375 (one tensor twice), E1377 (a quantised
    tensor that would move).
    """
    config = family.facts(config or {})
    source_table = family.table(source)
    target_table = family.table(target)

    # Which rule knows each tensor, and what sizes follow from the config and the shapes.
    named, unknown = instances(source_table.left, shapes)
    sizes, reasons = sizes_of(family, source_table, named, shapes, config)
    configured_sizes = compute_sizes(family.axes, config)[0]
    own_sizes = dict.fromkeys(family.own) | {axis: n for axis, n in configured_sizes.items() if axis in family.own}

    # An axis of the family's own (Mamba heads, say) may differ by layer: such a rule is split.
    source_rules: list[HalfRule] = []
    for matched in _match_rules(source_table, named, {**config, **sizes}):
        source_rules += matched.split(own_sizes, matched.rule.left, shapes, sizes)
    _check_counts((source_table, target_table), sizes, shapes)
    check_known(_collect_needed_axes(source_rules), sizes, reasons, family.name)

    # Source to hub. Faults are collected, so that the user sees all of a pass at once.
    faults: list[RewriteFault] = []
    hub = _map_to_hub(family, source_rules, sizes, config, shapes, faults)
    if not all(fault.hint for fault in faults):  # a shape that does not fit
        hint = _suggest_dialect(family, source, shapes, config)
        faults = [fault._replace(hint=fault.hint or hint) for fault in faults]

    # Hub to target.
    chosen, tied = _choose_rules(family, target_table, hub, sizes, config, faults)
    target_rules: list[tuple[HalfRule, set[str]]] = []
    for matched, hub_names in chosen:
        for part in matched.split(own_sizes, matched.rule.right, hub.shapes, sizes):
            target_rules.append((part, hub_names))
    check_known(_collect_needed_axes(part for part, _ in target_rules), sizes, reasons, family.name)
    result = _map_from_hub(target_rules, sizes, config, hub, source_table, faults)
    _refuse(faults)

    # Both at once. A tied tensor has no place of its own in the target.
    pieces = [piece for piece in hub.pieces if piece.dst.name not in tied]
    made = _group_by_target(compose(pieces, result.pieces), result, shapes)
    dropped = [*hub.dropped]
    for hub_name in (*tied, *result.dropped):
        dropped += hub.made[hub_name]
    if source != target:
        made, derived = _add_tensors_without_rule(unknown, (source_table, target_table), made, result, shapes)
        dropped += derived

    aliases = _find_aliases(family, target_table, result, sizes, config)
    return Mapped(made, dropped=tuple(dict.fromkeys(dropped)), aliases=aliases)


def _add_tensors_without_rule(
    unknown: Sequence[str],
    tables: tuple[Table, Table],
    made: tuple[Made, ...],
    result: _Target,
    shapes: Mapping[str, Shape],
) -> tuple[tuple[Made, ...], list[str]]:
    """Add the tensors that are mapped without a rule: those of towers, and scales and codes of quantised weights.

    Args:
        unknown: the source tensors that no rule knows.
        tables: the source's and the target's.
    Returns all target tensors, in the order of their sources, and the buffers that a loader derives from the config.
    """
    source_table, target_table = tables
    towers = _map_towers(unknown, source_table, target_table, shapes)
    faults = []
    for tensor in towers:
        if tensor.name in result.shapes:
            what = f"{tensor.name} is made of others too"
            faults.append(RewriteFault("E1375", tensor.pieces[0].src.name, what, _ONE))
    _refuse(faults)
    if towers:
        made = _sort_by_source((*made, *towers), shapes)

    following, stranded = followers(unknown, source_table, made, shapes)
    in_towers = {tensor.pieces[0].src.name for tensor in towers}
    derived = [name for name in unknown if is_derived(name) and name not in in_towers]
    _refuse([RewriteFault("E1377", name, _ALONE, _WAY) for name in stranded])
    return (*made, *following), derived


def _find_aliases(
    family: Family, target_table: Table, result: _Target, sizes: Mapping[str, Extent], config: Config
) -> tuple[tuple[str, str], ...]:
    """(alias, tensor) of the target for each tied pair of the hub of which only one was made."""
    aliases = []
    for alias in family.table(HUB).aliases:
        for hub_alias, hub_name in alias.pairs(sizes, config).items():
            alias_names = _names_in_dialect(target_table, hub_alias, config)
            names = _names_in_dialect(target_table, hub_name, config)
            if len(alias_names) != 1 or len(names) != 1:
                continue  # one tensor of the hub, several of the target: no single name is the alias
            if alias_names[0] not in result.shapes and names[0] in result.shapes:
                aliases.append((alias_names[0], names[0]))
    return tuple(aliases)


def _check_counts(tables: Iterable[Table], sizes: Mapping[str, Extent], shapes: Mapping[str, Shape]) -> None:
    """Raise InconsistentCheckpoint E1650 for a count in the config that the tensors themselves do not support.

    If experts are in one tensor on one side and in a tensor each on the other, a name is generated for each of them: a
    malicious count that no shape and no number of tensors supports would generate names without end.
    """
    longest = max((extent for shape in shapes.values() for extent in shape), default=0)

    counted: dict[str, None] = {}
    for rule in (rule for table in tables for rule in table.rules):
        terms = (*rule.left, *rule.right)
        along = {axis for term in terms for axis in term.pattern.axes}
        counted |= dict.fromkeys(axis for term in terms for axis in term.axes if axis in along)

    for axis in counted:
        size = sizes.get(axis)
        if isinstance(size, int):
            check_count(size, max(longest, len(shapes)), f"of `{axis}` by the config")


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
    """(sizes of all axes that follow from the config or a shape, reasons why the others do not)."""
    sizes, reasons = compute_sizes(family.axes, config)
    seen = []
    for group in named:
        if len(group.spots) != 1:
            continue  # two rules match the name: a condition decides between them, so neither gives a reliable size
        for term in table.rules[group.spots[0].rule].left:
            if term.name and term.name.form == group.form:
                seen.append((term.pattern, tuple(shapes[group.form % group.values[0]])))
    return {axis: size for axis, size in infer_sizes(seen, sizes).items() if axis not in family.own}, reasons


class Unfitting(NamedTuple):
    """A tensor whose shape fits none of the rules for its name."""

    name: str
    shape: Shape
    pattern: str  # of the first rule for the name
    wanted: tuple[int | None, ...]  # the shape by that pattern, None for an extent that is not known


def unfitting(
    family: Family, dialect: str, shapes: Mapping[str, Shape], config: Config, *, every: bool = False
) -> Iterator[Unfitting]:
    """The tensors whose shapes are impossible in that dialect: one of each kind, or all of them if `every`."""
    table = family.table(dialect)
    named, _ = instances(table.left, shapes)
    sizes, _ = sizes_of(family, table, named, shapes, config)
    for group in named:
        terms = []
        for spot in group.spots:
            terms += [term for term in table.rules[spot.rule].left if term.name and term.name.form == group.form]

        for numbers in group.values if every else group.values[:1]:
            name = group.form % numbers
            if all(fits(term.pattern, shapes[name], sizes) is False for term in terms):
                yield Unfitting(name, shapes[name], terms[0].pattern.text, shape_of(terms[0].pattern, sizes))


def count_misfits(family: Family, dialect: str, shapes: Mapping[str, Shape], config: Config) -> int:
    """The number of kinds of tensors whose shapes are impossible in that dialect."""
    return sum(1 for _ in unfitting(family, dialect, shapes, config))


def _suggest_dialect(family: Family, source: str, shapes: Mapping[str, Shape], config: Config) -> str:
    """The hint for shapes that do not fit: another dialect of the family that they fit, if there is one."""
    fitting = []
    for dialect in family.known_dialects:
        if dialect == source or count_misfits(family, dialect, shapes, config):
            continue
        _, unknown = instances(family.table(dialect).left, shapes)
        if not unknown:
            fitting.append(dialect)

    if fitting:
        return f"the shapes are those of dialect {' or '.join(fitting)}: pass --family {family.name}:{fitting[0]}"
    return f"does the config belong to this checkpoint, and is it a {family.name} model?"


# Source to hub.


def _match_rules(table: Table, named: Iterable[Instances], config: Config) -> list[HalfRule]:
    """The rules for whose left side tensors exist, at least in part, in the table's order."""
    matched: dict[int, HalfRule] = {}
    for group in named:
        _check_numbers(group, config)
        for spot in group.spots:
            example = group.form % group.values[0]
            half_rule = matched.setdefault(spot.rule, HalfRule(table.rules[spot.rule], spot.axes, set(), example))
            half_rule.rows.update(_reorder_rows(spot.values(group.values, config), spot.axes, half_rule.axes))
    return [matched[number] for number in sorted(matched)]


def _check_numbers(group: Instances, config: Config) -> None:
    """Raise InconsistentCheckpoint (E1374) for a name whose numbers match no rule."""
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


def _reorder_rows(
    rows: Iterable[tuple[int, ...]], axes: Sequence[str], wanted_axes: Sequence[str]
) -> Iterable[tuple[int, ...]]:
    """Rows of `axes` as rows of `wanted_axes`, the same axes in another order."""
    if axes == wanted_axes:
        return rows
    order = [axes.index(axis) for axis in wanted_axes]

    # The row is taken apart by one call in C: a model of many experts has a million of them.
    reorder = itemgetter(*order)
    return map(reorder, rows) if len(order) > 1 else ((reorder(row),) for row in rows)


def _collect_needed_axes(half_rules: Iterable[HalfRule]) -> dict[str, str]:
    """{axis whose size must be known: the name of a tensor that asks for it}."""
    needed: dict[str, str] = {}
    for half_rule in half_rules:
        for axis in half_rule.needed:
            needed.setdefault(axis, half_rule.example)
    return needed


def _map_to_hub(
    family: Family,
    source_rules: Sequence[HalfRule],
    sizes: Mapping[str, Extent],
    config: Config,
    shapes: Mapping[str, Shape],
    faults: list[RewriteFault],
) -> _Hub:
    """The pieces of the hub's tensors that the source fills completely; `faults` receives those of this pass."""
    hub = _Hub([], defaultdict(list), set(), [], {})
    kept: list[Piece] = []
    zeros: list[Piece] = []  # elements of the hub's that the source has no place for

    for half_rule in source_rules:
        faults += _find_excess_numbers(half_rule, family.axes, sizes)
        for grid_sizes in half_rule.grids(sizes):
            source_shapes, hub_shapes = half_rule.rule.shapes(grid_sizes, config)
            hub.shapes.update(hub_shapes)
            faults += _find_shape_faults(half_rule, source_shapes, grid_sizes, shapes)
            pieces = half_rule.rule.pieces(grid_sizes, config)
            kept += _keep_present_pieces(pieces, shapes, hub, zeros)
    faults += _find_excluded_names(source_rules, shapes, {**config, **sizes}, hub)

    # Padding counts only for tensors that have a source at all.
    kept += [piece for piece in zeros if piece.dst.name in hub.made]
    complete = _find_complete(kept, hub, faults)
    hub.pieces.extend(piece for piece in kept if piece.dst.name in complete)
    for name in [name for name in hub.made if name not in complete]:
        del hub.made[name]

    # A tensor of which a part is kept is not dropped.
    partly_kept = {piece.src.name for piece in kept}
    hub.dropped[:] = [name for name in dict.fromkeys(hub.dropped) if name not in partly_kept]
    return hub


def _keep_present_pieces(
    pieces: Iterable[Piece], shapes: Mapping[str, Shape], hub: _Hub, zeros: list[Piece]
) -> Iterator[Piece]:
    """The pieces of one rule that come from tensors of the source; `hub` and `zeros` receive the rest."""
    filled: set[Side] = set()
    for piece in pieces:
        name = piece.src.name
        hub_name = piece.dst.name
        if name == PAD:
            zeros.append(piece)
        if name not in shapes:
            continue

        hub.used.add(name)
        if hub_name != PAD and piece.dst in filled:
            continue  # a term that appears twice: the second is a copy
        filled.add(piece.dst)

        if hub_name == PAD:
            hub.dropped.append(name)
            continue
        if name not in hub.made[hub_name]:
            hub.made[hub_name].append(name)
        yield piece


def _find_complete(kept: Iterable[Piece], hub: _Hub, faults: list[RewriteFault]) -> set[str]:
    """The hub tensors each of whose elements is filled once; the others go to `faults`."""
    filled: dict[str, int] = defaultdict(int)
    for piece in kept:
        filled[piece.dst.name] += piece.numel

    complete = set()
    for name, count in filled.items():
        numel = prod(hub.shapes[name])
        if count == numel:
            complete.add(name)
            continue
        is_too_many = count > numel
        what = f"{', '.join(hub.made[name])} {'all hold' if is_too_many else 'hold only a part of'} the hub's {name}"
        faults.append(RewriteFault("E1375" if is_too_many else "E1371", hub.made[name][0], what, _ONE))
    return complete


def _find_shape_faults(
    half_rule: HalfRule, expected: Mapping[str, Shape], sizes: Mapping[str, Extent], shapes: Mapping[str, Shape]
) -> Iterator[RewriteFault]:
    """Tensors whose shape is not what the rule gives with these sizes."""
    for name, shape in expected.items():
        if name not in shapes or tuple(shapes[name]) == shape:
            continue
        if is_halved(name, shape, shapes):
            yield RewriteFault("E1377", name, f"{_HALVED}, of shape {list(shapes[name])}", _WAY)
            continue
        axes = " ".join(f"{axis}={sizes[axis]}" for axis in half_rule.needed if isinstance(sizes[axis], int))
        term = next(term for term in half_rule.rule.left if term.name and term.name.form == form_of(name)[0])
        what = f"shape {list(shapes[name])}, `{term.pattern.text}` wants {list(shape)} ({axes})"
        yield RewriteFault("E1370", name, what, "")


def _find_excluded_names(
    source_rules: Sequence[HalfRule], shapes: Mapping[str, Shape], config: Config, hub: _Hub
) -> Iterator[RewriteFault]:
    """Tensors that rules know only under conditions that do not hold: no rule gives the meaning of their elements."""
    if not any(half_rule.rule.condition for half_rule in source_rules):
        return

    seen = set()
    for half_rule in source_rules:
        condition = half_rule.rule.condition.text if half_rule.rule.condition else "nothing"
        for name in (term.name for term in half_rule.rule.left if term.name):
            for row in sorted(half_rule.rows):
                index_of = dict(zip(half_rule.axes, row, strict=True))
                full_name = name.at([index_of[axis] for axis in name.axes], config)
                if full_name not in shapes or full_name in hub.used or full_name in seen:
                    continue
                if 0 in shapes[full_name]:
                    continue  # without elements there is nothing to place
                seen.add(full_name)
                what = f"the family has it only if {condition}, and the config says otherwise"
                yield RewriteFault("E1370", full_name, what, "does the config belong to this checkpoint?")


def _find_excess_numbers(
    half_rule: HalfRule, axes: Mapping[str, str], sizes: Mapping[str, Extent]
) -> Iterator[RewriteFault]:
    """Faults for numbers in names that exceed the size of the axis in the config, or in the family itself."""
    for axis, numbers in zip(half_rule.axes, zip(*half_rule.rows, strict=True), strict=True):
        size = sizes.get(axis)
        if isinstance(size, int) and max(numbers) >= size:
            is_family_size = axes.get(axis, "").isdigit()
            holder = "family has" if is_family_size else "config says"
            hint = _ALONE_THERE if is_family_size else "does the config belong to this checkpoint?"
            what = f"a name with {axis}={max(numbers)}, the {holder} {size} of them"
            yield RewriteFault("E1370", half_rule.example, what, hint)


# Hub to target.


# (spot of a rule, function from a name's numbers to the rule's indices, function: does its condition hold for them?)
_RuleReader = tuple[Spot, Callable[[tuple[int, ...]], tuple[int, ...] | None], Callable[[tuple[int, ...]], bool]]


def _choose_rules(
    family: Family, table: Table, hub: _Hub, sizes: Mapping[str, Extent], config: Config, faults: list[RewriteFault]
) -> tuple[list[tuple[HalfRule, set[str]]], set[str]]:
    """Each hub tensor's rule in the target, the first that holds.

    Returns (rules and the hub tensors that they take, hub tensors that are another's alias and have no rule of their
    own); `faults` receives tensors without a rule.
    """
    named, orphans = instances(table.right, hub.made)
    facts = ChainMap({axis: size for axis, size in sizes.items() if isinstance(size, int)}, dict(config))

    rules: dict[int, tuple[HalfRule, set[str]]] = {}
    for group in named:
        readers: list[_RuleReader] = []
        for spot in group.spots:
            condition_holds = table.rules[spot.rule].choice(spot.axes, facts)
            readers.append((spot, spot.reader({**config, **sizes}), condition_holds))

        for numbers in group.values:
            name = group.form % numbers
            fitting = _find_fitting(readers, numbers, facts)
            if not fitting:
                orphans.append(name)
                continue
            spot, indices = fitting[0]
            half_rule, names = rules.setdefault(
                spot.rule, (HalfRule(table.rules[spot.rule], spot.axes, set(), name), set())
            )
            half_rule.rows.update(_reorder_rows((indices,), spot.axes, half_rule.axes))
            names.add(name)

    tied = _find_tied(family, orphans, hub, sizes, config)
    faults += [_describe_orphan(name, hub) for name in orphans if name not in tied]
    return [rules[number] for number in sorted(rules)], tied


def _find_fitting(
    readers: Iterable[_RuleReader], numbers: tuple[int, ...], facts: Config
) -> list[tuple[Spot, tuple[int, ...]]]:
    """The rules that a name with these numbers belongs to, in the table's order, with the indices in the name."""
    fitting = []
    for spot, read, condition_holds in readers:
        indices = read(numbers)
        if indices is not None and condition_holds(indices) and _are_within_sizes(spot, indices, facts):
            fitting.append((spot, indices))
    return fitting


def _find_tied(
    family: Family, orphans: Iterable[str], hub: _Hub, sizes: Mapping[str, Extent], config: Config
) -> set[str]:
    """The orphans that are an alias of a tensor that was made."""
    original_of: dict[str, str] = {}
    for alias in family.table(HUB).aliases:
        original_of |= alias.pairs(sizes, config)
    return {name for name in orphans if original_of.get(name) in hub.made}


def _describe_orphan(hub_name: str, hub: _Hub) -> RewriteFault:
    way = "dequantise it with --dequantize" if hub_name.endswith(_BLOCKS) else "leave it out with --remove-keys"
    hint = f"{way}, or keep the source's names with --dialect keep"
    return RewriteFault("E1374", hub.made[hub_name][0], "the target dialect has no rule for it", hint)


def _are_within_sizes(spot: Spot, indices: Sequence[int], sizes: Config) -> bool:
    """Is each index below its axis's size? Where rules number parts of one line of layers, this decides whose it is."""
    return all(index < sizes.get(axis, index + 1) for axis, index in zip(spot.axes, indices, strict=True))


def _map_from_hub(
    target_rules: Sequence[tuple[HalfRule, set[str]]],
    sizes: Mapping[str, Extent],
    config: Config,
    hub: _Hub,
    source_table: Table,
    faults: list[RewriteFault],
) -> _Target:
    """The pieces of the target's tensors that are complete; `faults` receives those that lack a hub tensor."""
    result = _Target([], {}, [], {})
    for half_rule, hub_names in target_rules:
        for grid_sizes in half_rule.grids(sizes):
            kept, missing = _group_pieces(half_rule.rule, hub_names, grid_sizes, config, result)
            target_shapes = half_rule.rule.left_shapes(grid_sizes, config)

            # A tensor of zeros alone is only written where the rule fills another one of the same layer.
            zeros_only = {name for name, pieces in kept.items() if {piece.src.name for piece in pieces} <= {PAD}}
            layer_sources = _find_layer_sources(kept) if zeros_only else {}

            for name, pieces in kept.items():
                if name in zeros_only:
                    layer = form_of(name)[1]
                    if missing.get(name) or layer not in layer_sources:
                        continue
                    result.like[name] = hub.made[layer_sources[layer]][0]
                if missing.get(name):
                    missing_names = []
                    for hub_name in missing[name]:
                        missing_names += _names_in_dialect(source_table, hub_name, {**config, **sizes})
                    faults.append(_describe_incomplete(name, pieces, missing_names, hub))
                    continue
                result.pieces.extend(pieces)
                result.shapes[name] = target_shapes[name]
    return result


def _find_layer_sources(kept: Mapping[str, Iterable[Piece]]) -> dict[tuple[int, ...], str]:
    """{numbers in the names of target tensors: a hub tensor that fills one of them}."""
    sources = {}
    for name, pieces in kept.items():
        for piece in pieces:
            if piece.src.name != PAD:
                sources[form_of(name)[1]] = piece.src.name
    return sources


def _describe_incomplete(name: str, pieces: Iterable[Piece], missing: Sequence[str], hub: _Hub) -> RewriteFault:
    """The fault of a target tensor `name`. pieces: those that are there. missing: the source tensors that are not."""
    lacking = f"{', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}"
    what = f"{name} is made of it too, and {lacking} is missing"
    present = next(source for piece in pieces if piece.src.name != PAD for source in hub.made[piece.src.name])
    return RewriteFault("E1371", present, what, "is a shard or a file of the checkpoint missing?")


def _group_pieces(
    rule: Equation, names: set[str], sizes: Mapping[str, Extent], config: Config, result: _Target
) -> tuple[dict[str, list[Piece]], dict[str, list[str]]]:
    """({target tensor: pieces from those of `names`}, {target tensor: hub tensors that it lacks}).

    What the rule drops goes to `result` at once.
    """
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


def _names_in_dialect(table: Table, hub_name: str, config: Config) -> list[str]:
    """The names in a dialect of the tensors that make up a hub tensor, by the first rule that applies to it.

    If both sides of the rule have the same number of tensors, it is the name at the same position, else all names.
    """
    form, numbers = form_of(hub_name)
    for spot in table.right.get(form, ()):
        indices = spot.reader(config)(numbers)
        rule = table.rules[spot.rule]
        if indices is None or not _are_within_sizes(spot, indices, config):
            continue
        index_of = dict(zip(spot.axes, indices, strict=True))
        if rule.condition and rule.condition.names & index_of.keys():
            if not rule.condition.value(ChainMap(index_of, dict(config))):
                continue

        terms = rule.left
        if len(terms) == len(rule.right):
            forms = [term.name and term.name.form for term in rule.right]
            terms = (terms[forms.index(form)],)
        dialect_names: list[str] = []
        for term in terms:
            if term.name:
                numbers_of_name = [index_of.get(axis, 0) for axis in term.name.axes]
                dialect_names.append(term.name.at(numbers_of_name, config))
        return dialect_names
    return [hub_name]


def _map_towers(
    unknown: Iterable[str], source_table: Table, target_table: Table, shapes: Mapping[str, Shape]
) -> list[Made]:
    """The tensors that are in a tower of both dialects, copied as they are."""
    copies = []
    for name in unknown:
        hub_name = source_table.in_tower(name)
        target_name = hub_name and target_table.from_tower(hub_name)
        if target_name:
            shape = tuple(shapes[name])
            strides = contiguous_strides(shape)
            piece = Piece(shape, Side(name, 0, strides), Side(target_name, 0, strides))
            copies.append(Made(target_name, shape, (piece,)))
    return copies


def _sort_by_source(made: Iterable[Made], shapes: Mapping[str, Shape]) -> tuple[Made, ...]:
    """The made tensors in the order of their first source."""
    position = {name: number for number, name in enumerate(shapes)}
    last = len(position)
    return tuple(sorted(made, key=lambda tensor: min(position.get(piece.src.name, last) for piece in tensor.pieces)))


_Axes = tuple[Shape, Shape, Shape]  # extents, strides in the source, strides in the target


def _group_by_target(pieces: Iterable[Piece], target: _Target, shapes: Mapping[str, Shape]) -> tuple[Made, ...]:
    """The made tensors in the order of their first source."""
    position = {name: number for number, name in enumerate(shapes)}
    last = len(shapes)

    # {made tensor: position of its first source}
    first_source = {name: position[source] for name, source in target.like.items()}
    pieces_of: dict[str, list[Piece]] = {name: [] for name in target.shapes}
    merged_axes: dict[_Axes, _Axes] = {}
    for piece in pieces:
        name = piece.dst.name
        if name == PAD:
            continue
        pieces_of[name].append(_merge_axes(piece, merged_axes))
        source = position.get(piece.src.name, last)
        if source < first_source.get(name, last):
            first_source[name] = source

    order = sorted(pieces_of, key=lambda name: first_source.get(name, last))
    like = target.like
    return tuple(Made(name, target.shapes[name], tuple(pieces_of[name]), like=like.get(name, "")) for name in order)


def _merge_axes(piece: Piece, merged_axes: dict[_Axes, _Axes]) -> Piece:
    """The piece with as few axes as it can have. merged_axes: a cache, as the pieces of all layers are alike."""
    ext, src, dst, maps = piece
    axes = ext, src.strides, dst.strides
    merged = merged_axes.get(axes)
    if merged is None:
        shorter = Piece(ext, src, dst).merged()
        merged = merged_axes[axes] = shorter.ext, shorter.src.strides, shorter.dst.strides
    if merged == axes:
        return piece
    ext, src_strides, dst_strides = merged
    return Piece(ext, Side(src.name, src.offset, src_strides), Side(dst.name, dst.offset, dst_strides), maps)
