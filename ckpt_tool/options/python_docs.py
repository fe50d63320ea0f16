"""The options as a Python function's docstring and signature have them.

    >>> python_help("Cast values: --dtype bf16. Repeatable.", options)
    'Cast values: dtype="bf16". A list gives several.'

The command line states each option once (`option_kinds.statement`); here its help is put in the words of a call.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from ckpt_tool.option_kinds.statement import Option, groups_within, options_of

WIDTH = 116  # a docstring is indented by four
_MENTION = re.compile(r"--([a-z][a-z0-9-]*)((?: (?!--)(?:'[^']*'|[^\s:;,.]+(?:[.,:/][^\s:;,.]+)*))*)")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?(e-?[0-9]+)?")
_NO_VALUE = ("to", "and", "or", "PATTERN", "FILE")  # a word after an option's name that is no value of it


def defaults_of(*groups: type) -> dict[str, Any]:
    """Keyword -> what it is where it is not given: a number, text, True or False; None where the command decides."""
    defaults: dict[str, Any] = {}
    for group in (inner for stated_group in groups for inner in groups_within(stated_group)):
        for each in fields(group):
            for stated in each.metadata["options"]:
                option = stated.of(each.name)
                is_shared = option.entry or option.constant is not None
                default = option.default if is_shared and option.kind == "flag" else None
                if not is_shared and isinstance(each.default, bool | int | float | str):
                    default = each.default
                defaults[option.keyword] = default
    return defaults


def describe_options(options: Mapping[str, Option], indent: str) -> str:
    """A line `name: what it does` for each option, wrapped."""
    lines: list[str] = []
    for name, option in options.items():
        text = f"{name}: {python_help(option.help, options)}"
        lines += textwrap.wrap(
            text,
            WIDTH,
            initial_indent=indent,
            subsequent_indent=f"{indent}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def python_help(text: str, options: Mapping[str, Option]) -> str:
    """An option's help as Python has it: `tp=8` in place of `--tp 8`."""
    by_name = {name: option for option in options.values() for name in option.names}

    def write_keyword(match: re.Match[str]) -> str:
        option = by_name.get(f"--{match[1]}")
        keyword = option.keyword if option is not None else match[1].replace("-", "_")
        words = re.findall(r"'[^']*'|\S+", match[2])
        takes = 0 if option is not None and option.kind in ("flag", "switch") else 1
        if option is not None and option.kind == "pair":
            takes = 2
        values = words[:takes]
        if not values or values[0] in _NO_VALUE:
            return f"{keyword}{match[2]}"

        shown = [_literal(value) for value in values]
        value = shown[0] if len(shown) == 1 else f"({', '.join(shown)})"
        return " ".join([f"{keyword}={value}", *words[takes:]])

    text = _MENTION.sub(write_keyword, text)
    text = re.sub(r"(\w+)=(\S+) \1=(\S+?)(?=\.?(\s|$))", r"\1=[\2, \3]", text)  # an option that is given twice
    return text.replace("Repeatable.", "A list gives several.").replace("for ckpt apply", "for `ckpt.apply`")


def _literal(word: str) -> str:
    """A word of a command line as Python writes it."""
    text = word.strip("'")
    return text if _NUMBER.fullmatch(text) else f'"{text}"'


def options_for(groups: Iterable[type], left_out: Iterable[str]) -> dict[str, Option]:
    """Keyword -> option of some groups, without those that a function does not take."""
    without = frozenset(left_out)
    return {name: option for name, option in options_of(*groups).items() if name not in without}
