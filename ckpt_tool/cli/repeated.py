"""Refuses an option that takes one value and was given two different ones.

    --to dcp --to safetensors     a usage error that shows both
    --to dcp --to dcp             harmless, as scripts that add options write it
    --match A --match B           both apply: the option is declared as repeatable
    -q -q                         harmless

Otherwise the last value would win silently. `--resume --no-resume` are two values too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpt_tool.errors import UsageError
from ckpt_tool.option_kinds.statement import Option
from ckpt_tool.option_kinds.values import BadValue

CODE = "E3020"


def refuse_two_values(words: Sequence[str], options: Mapping[str, Option], place: str) -> None:
    """Raise UsageError E3020 if an option that takes one value is given two that differ.

    Args:
        options: the verb's options by keyword.
        place: the verb, as the error shows it.
    """
    by_name = {name: option for option in options.values() for name in option.names}
    first_values: dict[str, tuple[str, ...]] = {}
    conflicts: list[str] = []
    for option, typed in _values_given(words, by_name):
        first = first_values.setdefault(option.keyword, typed)
        if not is_same_value(option, first, typed):
            both = f"{' '.join(first)} and {' '.join(typed)}"
            is_switch = option.kind == "switch"
            conflicts.append(f"{both} are given" if is_switch else f"{option.names[0]} is given two values: {both}")
    if not conflicts:
        return
    raise UsageError(conflicts[0], code=CODE, place=place, hint="give one of the two", faults=conflicts[1:])


def is_same_value(option: Option, one: tuple[str, ...], two: tuple[str, ...]) -> bool:
    """Do two values of one option mean the same? `5GB` and `5000MB` do."""
    if one == two:
        return True
    if option.kind != "value":
        return False
    try:
        return bool(option.parse(one[0]) == option.parse(two[0]))
    except BadValue:
        return False


def _values_given(words: Sequence[str], options: Mapping[str, Option]) -> Iterator[tuple[Option, tuple[str, ...]]]:
    """Yield (option, value as typed) for each option that takes one value, in order.

    The value of a switch is its spelling (`--resume` or `--no-resume`).
    """
    rest = iter(words)
    for word in rest:
        if word == "--":
            return
        name, joined, value = word.partition("=")
        option = options.get(name)
        if option is None or option.kind in ("flag", "count"):
            continue
        if option.kind == "switch":
            yield option, (name,)
            continue
        if joined:
            typed = [value]
        else:
            typed = [next(rest, "")]
        if option.kind == "pair":
            typed.append(next(rest, ""))
        if option.kind in ("value", "pair"):
            yield option, tuple(typed)
