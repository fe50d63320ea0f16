"""What a command line comes to: a Job, and how its result is shown. No parser is needed here.

`ckpt inspect SRC` with nothing else is what people type most and wait for; it becomes a Job without loading typer
(45 ms and 6 MB). Every other line goes through `cli_parser`, and gives the same Job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.progress import Progress

if TYPE_CHECKING:
    from ckpt_tool.commands.reading import Reading
    from ckpt_tool.report.page import Page

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Show:
    """How a result is shown. verbose: 0, 1 (lists uncut), 2 (tracebacks)."""

    json: bool = False
    progress: str = "auto"
    quiet: bool = False
    verbose: int = 0
    report: str | None = None
    color: str = "auto"


@dataclass(frozen=True, slots=True)
class Job:
    """A verb, ready to run.

    run: reads and writes, returns the document. page: the document for people, uncut with True. sound: is there nothing
    to find fault with (exit 1 otherwise)? writes: makes an output (silent under -q). plans: shows its plan before it
    writes. sources: where no report may be put.
    """

    verb: str
    show: Show
    run: Callable[[Progress], Document]
    page: Callable[[Document, bool], Page]
    sound: Callable[[Document], bool] = lambda document: True
    writes: bool = False
    plans: bool = False
    sources: tuple[str, ...] = ()


def inspect_job(
    src: str, show: Show, reading: Reading | None = None, *, depth: int | None = None, **wanted: Any
) -> Job:
    """`ckpt inspect`. wanted: options of `commands.inspect.inspect`."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.inspect import inspect as command
        from ckpt_tool.commands.reading import Reading

        return command(src, reading or Reading(), columns=not show.json, **wanted)

    def page(document: Document, uncut: bool) -> Page:
        from ckpt_tool.report.inspection import inspection

        return inspection(document, depth=depth, everything=uncut)

    return Job("inspect", show, run, page, sources=(src,))


def plain_job(arguments: Sequence[str]) -> Job | None:
    """The job of a line that needs no parser, None for all others."""
    match list(arguments):
        case ["inspect", src] if src and not src.startswith("-") and "_CKPT_COMPLETE" not in os.environ:
            return inspect_job(src, Show())
    return None
