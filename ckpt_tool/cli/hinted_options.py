"""Names the verb next to each option in a hint that the running verb does not have.

A hint is written where the error is detected, often in a reader that several verbs use: `--dequantize` is an option of
`convert` but not of `diff`. An option that the running verb lacks is therefore shown with a verb that has it:

    ckpt diff:  make floats of it with --dequantize  ->  make floats of it with --dequantize (of ckpt convert)

Options of a command that the hint spells out (`ckpt convert SRC OUT --dequantize`) stay as they are, and so do options
of other programs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
_VERB = re.compile(r"\bckpt ([a-z]+)")
_VALUE = re.compile(
    r"[ =](?:[A-Z][A-Z0-9_]*(?:=[A-Z]+)?|'[^']*'|\S+=\S+|model|master|optimizer|ema|extras)(?=[\s,;.)]|$)"
)
_CLAUSE_ENDS = re.compile(r"[;:]\s|\.\s|,\s(?:or|and)\s|\n")
PREFERRED = ("convert", "reshard", "merge", "inspect", "verify", "diff")  # the first of these that has the option


def name_verbs(hint: str, verb: str, options: Mapping[str, Set[str]]) -> str:
    """The hint with ` (of ckpt VERB)` after each option that the running `verb` lacks. options: those of each verb."""
    parts = []
    start = 0
    named = set[str]()  # an option that appears several times gets its verb only once
    for match in _OPTION.finditer(hint):
        option = match[0]
        owner = _find_owner(option, options)
        is_missing = option not in options.get(verb, frozenset()) and owner is not None
        if is_missing and option not in named and not _belongs_to_a_verb(hint, match.start(), option, options):
            named.add(option)
            end = _end_of_value(hint, match.end())
            parts += [hint[start:end], f" (of ckpt {owner})"]
            start = end
    return "".join([*parts, hint[start:]])


def _find_owner(option: str, options: Mapping[str, Set[str]]) -> str | None:
    """A verb that has the option, None if no verb has it: then it is an option of another program."""
    owners = [verb for verb, names in options.items() if option in names]
    return next((verb for verb in PREFERRED if verb in owners), owners[0] if owners else None)


def _belongs_to_a_verb(hint: str, at: int, option: str, options: Mapping[str, Set[str]]) -> bool:
    """Is the option part of a command that the hint spells out? True if a verb that has it is named earlier in the
    same clause."""
    start = max((end.end() for end in _CLAUSE_ENDS.finditer(hint, 0, at)), default=0)
    return any(option in options.get(verb, frozenset()) for verb in _VERB.findall(hint[start:at]))


def _end_of_value(hint: str, end: int) -> int:
    """The end of an option with its value (`--rename OLD=NEW`, `--state model`). A word counts as the value if it is in
    capitals, in quotes, has an `=`, or is a state."""
    value = _VALUE.match(hint, end)
    return value.end() if value else end
