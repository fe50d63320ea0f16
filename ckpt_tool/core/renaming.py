"""Rules that rename tensors: what `--rename` is given, and the names that come of it.

    module.*=*                                  takes a prefix off
    *.attention.wq.*=*.self_attn.q_proj.*       each * of the left side is the same text on the right
    re:^h\\.(\\d+)\\.=layers.\\1.                  Python's re.sub on the whole name

A rule splits at its first `=` that no backslash precedes. Rules are tried in the order given, and the first one that
matches a name renames it. A `*` matches as much as it can, dots included.

Cost: that of `core.patterns`, so a file of ten thousand plain rules is ten thousand look-ups. What it does not do: know
the states of a name (all of them follow it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import translate
from typing import NamedTuple

from ckpt_tool.core.patterns import LENGTH, Names

REGULAR = "re:"
_UNESCAPED_EQUALS = re.compile(r"(?<!\\)=")


class BadRule(ValueError):
    """A rule that can't be read. hint: what to write instead."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class RenamingRule(NamedTuple):
    """One rule."""

    text: str  # as the user wrote it
    pattern: str  # which names it matches, as `core.patterns` reads it
    replace: Callable[[str], str]  # gives the new name of one that matches


class Renamed(NamedTuple):
    """What rules make of names."""

    names: Mapping[str, str]  # old name -> new name, of the names that a rule matches
    unmatched: Sequence[str]  # rules that match no name at all
    shadowed: Sequence[str]  # rules that match some, each of which an earlier rule renames


def read_rule(text: str) -> RenamingRule:
    """A rule from `OLD=NEW` or `re:EXPRESSION=REPLACEMENT`. Raises BadRule."""
    if len(text) > LENGTH:
        raise BadRule(f"a rule of {len(text)} characters, want at most {LENGTH}", "write several rules, or @FILE")

    equals = _UNESCAPED_EQUALS.search(text)
    if equals is None:
        raise BadRule(f"{text!r} has no =", "a rule is OLD=NEW, such as 'module.*=*'")

    old_pattern = text[: equals.start()].replace(r"\=", "=")
    new_pattern = text[equals.end() :].replace(r"\=", "=")
    if old_pattern.startswith(REGULAR):
        return _read_regular(text, old_pattern.removeprefix(REGULAR), new_pattern)
    return _read_glob(text, old_pattern, new_pattern)


def _read_regular(text: str, expression: str, replacement: str) -> RenamingRule:
    try:
        compiled = re.compile(expression)
        # Where nothing matches, re.sub does not look at the replacement: an alternative that always matches makes it.
        re.compile(f"(?:{expression})|").sub(replacement, "")
    except (re.error, IndexError, RecursionError, OverflowError) as fault:
        raise BadRule(
            f"{text!r} is not a regular expression with its replacement: {fault}",
            r"write groups as ( ) and take them back as \1; an = inside the expression is written \=",
        ) from fault

    return RenamingRule(text, REGULAR + expression, lambda name: compiled.sub(replacement, name))


def _read_glob(text: str, old: str, new: str) -> RenamingRule:
    if not old or not new:
        side = "after" if old else "before"
        raise BadRule(f"{text!r} has nothing {side} its =", "a rule is OLD=NEW, such as 'module.*=*'")
    if "?" in new or "[" in new:
        raise BadRule(f"{text!r}: the new name may have * and no other wildcard", "use re:EXPRESSION=REPLACEMENT")

    stars = old.count("*")
    taken_back = new.count("*")
    if taken_back > stars:
        raise BadRule(
            f"{text!r}: the new name has {taken_back} *, the old one {stars}",
            "each * of the new name takes back what one * of the old name matched, in order",
        )

    literals = new.split("*")
    expression = _captures(old)

    def fill_in(match: re.Match[str]) -> str:
        parts = [literals[0]]
        for number, literal in enumerate(literals[1:], start=1):
            parts += [match[number], literal]
        return "".join(parts)

    return RenamingRule(text, old, lambda name: expression.sub(fill_in, name, count=1))


def _captures(glob: str) -> re.Pattern[str]:
    """The glob as an expression with a group for each `*`."""
    opening = "(?s:"
    closing = translate("").removeprefix(opening)  # `)\Z`, from Python 3.14 on `)\z`

    parts = [translate(part).removeprefix(opening).removesuffix(closing) for part in glob.split("*")]
    return re.compile(r"\A(?s:" + "(.*)".join(parts) + r")\Z")


def rename(names: Iterable[str], rules: Sequence[RenamingRule]) -> Renamed:
    """Each name under the first rule that matches it."""
    matcher_names = Names(names)
    renamed: dict[str, str] = {}
    unmatched: list[str] = []
    shadowed: list[str] = []

    for rule in rules:
        matching = list(matcher_names.matching(rule.pattern))
        unclaimed = [name for name in matching if name not in renamed]
        for name in unclaimed:
            renamed[name] = rule.replace(name)
        if not matching:
            unmatched.append(rule.text)
        elif not unclaimed:
            shadowed.append(rule.text)

    return Renamed(renamed, unmatched, shadowed)
