"""The fast path of the command line: plain lines are parsed here, without loading typer.

    ckpt inspect runs/7                                   plain
    ckpt reshard runs/7 out --tp 2 -q --no-fsync          plain
    ckpt reshard runs/7 out --tp two                      not plain: typer reports the error

A line is plain if its verb is one that scripts run in loops and everything in it is an argument or an option of the
verb, spelled in full. Everything else (help, an unknown option, a value that is missing, invalid or begins with a dash)
is left to typer, so that help and error messages have one source. Both read the same declarations (`Verb.options`).

It saves 130 of 800 million instructions (callgrind) and 2 of 26 MB of a `convert --dry-run` of a small file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ckpt_tool.cli.verbs import VERBS, VerbJob
from ckpt_tool.errors import UsageError

PLAIN = ("inspect", "reshard", "convert")


def plain_job(line: Sequence[str]) -> VerbJob | None:
    """The job of a plain command line, None for any other line."""
    if not line or line[0] not in PLAIN or "_CKPT_COMPLETE" in os.environ:
        return None

    verb = VERBS[line[0]]
    words = iter(line[1:])
    options = {name: option for option in verb.options().values() for name in option.names}
    paths: list[str] = []
    given: dict[str, Any] = {}

    for word in words:
        if not word.startswith("-"):
            paths.append(word)
            continue
        name, joined, value = word.partition("=")
        option = options.get(name)
        if option is None or option.kind == "pair" or (joined and not option.metavar):
            return None
        if option.metavar and not joined:
            value = next(words, "")
        if option.metavar and (not value or value.startswith("-")):
            return None
        if option.kind == "value":
            if given.setdefault(option.keyword, value) != value:
                return None  # two different values: the full parser refuses them (`cli.repeated`)
        elif option.kind == "values":
            given.setdefault(option.keyword, []).append(value)
        elif option.kind == "count":
            given[option.keyword] = given.get(option.keyword, 0) + 1
        else:
            is_on = option.kind == "flag" or name != option.names[-1]
            if given.setdefault(option.keyword, is_on) != is_on:
                return None

    if len(paths) != len(verb.arguments) or not all(paths):
        return None

    try:
        return verb.job(paths, given)
    except UsageError:
        return None
