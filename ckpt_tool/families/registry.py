"""Lists the model families, and finds the family and dialect of a checkpoint.

    find(config, shapes)                                     FamilyMatch(LLAMA, "hf")
    find(config, shapes, stated="paddle")                     FamilyMatch(LLAMA, "paddle"): the format says whose names they are
    find(None, shapes, family="ernie4_5:paddle-contiguous")  the user says both

The family comes from the user, else from config.json (`model_type`, `architectures`), else from names that only one
family has. The dialect comes from the user, else from names, then from shapes: Llama has the same names in both worlds
and only transposed weights. What fits two is an error that says what to pass, never a guess. Cost: 2 us a name and
dialect. What it does not do: read config.json. To add a family: one file with a `FAMILY` in `families/models`, found
there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ckpt_tool.algebra.expression import expression
from ckpt_tool.errors import InputError, UsageError, near_misses
from ckpt_tool.families.base import HUB, Config, Family, Shape, Variant
from ckpt_tool.families.models import FAMILIES, NAMES, family_of_class, known_family, load
from ckpt_tool.families.rewrite import count_misfits
from ckpt_tool.families.table import Tower, form_of, instances
from ckpt_tool.formats.hub_folder.saved_by import MLX

_KEEP = "or keep the source's names with --dialect keep"
_LIST = f"`ckpt help families` lists the {len(NAMES)} that there are"
_ADD = "`ckpt help families` says how to add a family"
_SHOWN = 8  # families of a list in a message


class FamilyMatch(NamedTuple):
    """A model family and one of its dialects."""

    family: Family
    dialect: str


def by_name(name: str) -> Family:
    """The family of that name. Raises UsageError (E1230)."""
    if name in NAMES:
        return load(name)
    raise UsageError(f"--family: no family {name!r}", code="E1230", hint=near_misses(name, NAMES) or _LIST)


def find(
    config: Config | None,
    names: Mapping[str, Shape] | Iterable[str],
    *,
    stated: str | None = None,
    family: str | None = None,
) -> FamilyMatch:
    """Find the family and the dialect to which tensors belong.

    Args:
        config: the model's config.json, None if there is none.
        names: {parameter: shape}, or the names alone.
        stated: the dialect that the format states; `paddle` includes every `paddle-...`.
        family: the user's choice, `NAME` or `NAME:DIALECT`.
    Raises UsageError: E1230 (no such family), E1231 (no such dialect), E1232 and E1233 (several families, several
    dialects fit); InputError: E1372 (no family), E1373 (the names are of none of the family's dialects).
    """
    shapes = names if isinstance(names, Mapping) else None
    names = list(names)
    if family is not None:
        name, _, dialect = family.partition(":")
        chosen = by_name(name)
        if dialect:
            chosen.table(dialect)
            return FamilyMatch(chosen, dialect)
    else:
        found = configured_family(config or {}) or _find_by_names(config or {}, names)
        if found is None:
            raise _report_no_family(config or {}, shapes or names, stated)
        chosen = found
    return FamilyMatch(chosen, _choose_dialect(chosen, names, shapes, config or {}, stated))


def configured_family(config: Config) -> Family | None:
    """The family that a config names, None if it names no known one."""
    named = known_family(config.get("model_type"))
    return named or next(filter(None, map(family_of_class, stated_classes(config))), None)


def names_a_model(config: Config) -> bool:
    """Does a config name its model, known or not?"""
    return config.get("model_type") is not None or bool(stated_classes(config))


def stated_classes(config: Config) -> list[str]:
    """The classes in a config's `architectures`, without Paddle's suffix for pipeline models; [] if there are none."""
    classes = config.get("architectures")
    return [str(each).removesuffix("Pipe") for each in classes] if isinstance(classes, list) else []


def _report_no_family(config: Config, names: Mapping[str, Shape] | list[str], stated: str | None) -> InputError:
    """The error for a checkpoint whose config names no known family, or whose tensor names no family knows."""
    from ckpt_tool.families.nearest import nearest

    kind = config.get("model_type")
    classes = stated_classes(config)
    if kind is not None or classes:
        says = f"model_type {kind!r}" if kind is not None else f"architectures {classes}"
        what = f"config.json says {says}, for which there is no family"
    else:
        what = f"no family knows a name like {next(iter(names), '(there are none)')}"
        if error := _check_prefix("E1372", what, names, FAMILIES):
            return error
    near = nearest(FAMILIES, names, config, str(kind or ""), stated)
    if near is None:
        return InputError(what, code="E1372", hint=f"{_ADD}, {_KEEP}")
    return InputError(
        f"{what}; {near.headline}",
        code="E1372",
        hint="; ".join(filter(None, (near.advice, _ADD))) + f", {_KEEP}",
        faults=near.differences,
    )


def _check_prefix(code: str, what: str, names: Collection[str], families: Iterable[Family]) -> InputError | None:
    """The error for names that a family would know without their prefix, None if there is no such prefix."""
    from ckpt_tool.families.wrappers import advise_on_prefix, describe_prefix

    prefix = describe_prefix(names, families)
    if not prefix:
        return None
    return InputError(f"{what}; {prefix}", code=code, hint=f"{advise_on_prefix(prefix)}, {_KEEP}")


def _find_by_names(config: Config, names: list[str]) -> Family | None:
    """The only family that knows most of the names. None if no family knows any, or if the config names an unknown one.

    A family that knows no name inside a layer does not count: `norm.weight` occurs in DeepSeek V4 and in many others.
    """
    if names_a_model(config):
        return None
    known = {family: _count_known_names(family, names).values() for family in FAMILIES}
    most = max(each.much for dialects in known.values() for each in dialects)
    if not any(most):
        return None
    best = [family for family, dialects in known.items() if most in {each.much for each in dialects}]
    if not any(each.layered for family in best for each in known[family]):
        best = [family for family, dialects in known.items() if {each.much for each in dialects} - {(0, 0)}]
        if len(best) == 1:
            return None
    fitting = [family.name for family in best]
    if len(fitting) > 1:
        from ckpt_tool.families.nearest import nearest

        near = nearest(map(load, fitting), names, config)
        first = [near.family.name, *near.also] if near else []
        listed = list(dict.fromkeys((*first, *fitting)))
        more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
        raise UsageError(
            "without a config the names fit several families",
            code="E1232",
            faults=[f"the most of the names are known to {', '.join(listed[:_SHOWN])}{more}"],
            hint=f"give the model's config.json with --config FILE, or the family with --family NAME, {_KEEP}",
        )
    return load(fitting[0])


class _Known(NamedTuple):
    """How well a dialect's rules cover the names."""

    # number of names with a rule, total length of the tower prefixes of the others: longer prefixes are more specific
    much: tuple[int, int]
    layered: bool  # is one of these names in a layer?


def _count_known_names(family: Family, names: list[str]) -> dict[str, _Known]:
    """Dialect -> how well its rules cover the names."""
    found = {}
    for dialect in family.known_dialects:
        table = family.table(dialect)
        named, unknown = instances(table.left, names)
        towers: dict[str, Tower] = {}
        for name in unknown if table.towers else ():
            tower = table.tower_of(name)
            if tower:
                towers[name] = tower
        found[dialect] = _Known(
            (len(names) - len(unknown), sum(len(tower.left) for tower in towers.values())),
            any(group.values[0] for group in named) or any(form_of(name)[1] for name in towers),
        )
    return found


def _choose_dialect(
    family: Family, names: list[str], shapes: Mapping[str, Shape] | None, config: Config, stated: str | None
) -> str:
    whole = config
    config = family.facts(config)
    known = {dialect: each.much for dialect, each in _count_known_names(family, names).items()}
    if stated is not None:
        known = {dialect: n for dialect, n in known.items() if dialect == stated or dialect.startswith(f"{stated}-")}
        if not known:
            family.table(stated)  # raises, with what there is
    most = max(known.values())
    if not any(most):
        from ckpt_tool.families.nearest import nearest

        unknown = f"no {family.name} checkpoint has a tensor {names[0] if names else '(there are none)'}"
        if error := _check_prefix("E1373", unknown, names, [family]):
            raise error
        near = nearest(FAMILIES, shapes or names, whole, stated=stated)
        raise InputError(
            unknown + (f" in dialect {stated}" if stated else "") + (f"; {near.headline}" if near else ""),
            code="E1373",
            hint="is it the right family? " + "; ".join(filter(None, (near.advice if near else "", _LIST, _KEEP))),
            faults=near.differences if near else (),
        )
    fitting = [dialect for dialect, count in known.items() if count == most]
    if len(fitting) > 1 and shapes is not None:
        wrong = {dialect: count_misfits(family, dialect, shapes, config) for dialect in fitting}
        fitting = [dialect for dialect in fitting if wrong[dialect] == min(wrong.values())]
        if (
            min(wrong.values()) and len(fitting) > 1
        ):  # none of them: the shapes that do not fit are what is to be reported
            fitting = fitting[:1]
    if stated in fitting:
        return stated
    if HUB in fitting and MLX in fitting:  # a source from MLX shows that by its metadata, config or names
        fitting.remove(MLX)
    if len(fitting) > 1 and config:
        fitting = [dialect for dialect in fitting if _may_be_meant(family, dialect, config)] or fitting
    if len({_list_used_rules(family, dialect, names) for dialect in fitting}) > 1:
        ways = " or ".join(f"--family {family.name}:{dialect}" for dialect in fitting)
        raise UsageError(
            f"{'names and shapes fit' if shapes is not None else 'the names fit'} several dialects of {family.name},"
            f" which arrange the elements differently: {', '.join(fitting)}",
            code="E1233",
            hint=f"say which with {ways}",
        )
    return fitting[0]


def _may_be_meant(family: Family, dialect: str, config: Config) -> bool:
    """Does the config satisfy the dialect's condition (`Variant.when`), or has the dialect none?"""
    table = family.dialects.get(dialect)
    return not (isinstance(table, Variant) and table.when) or bool(expression(table.when).value(config))


def _list_used_rules(family: Family, dialect: str, names: list[str]) -> frozenset[str]:
    """The rules and towers that the names use. Two dialects with the same set do not differ for this checkpoint."""
    table = family.table(dialect)
    named, unknown = instances(table.left, names)
    hub_names = ((name, table.in_tower(name)) for name in unknown)
    towers = {f"{name} = {hub_name}" for name, hub_name in hub_names if hub_name}
    return frozenset({table.rules[spot.rule].text for group in named for spot in group.spots} | towers)
