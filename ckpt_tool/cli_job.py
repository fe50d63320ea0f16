"""What a command line comes to: a Job, and how its result is shown. No parser is needed here.

`ckpt inspect SRC` with nothing else is what people type most and wait for, plain `reshard` and `convert` lines are what
scripts run in loops; they become Jobs without loading typer (30 ms of CPU and 6 MB). Every other line goes through
`cli_parser`, and gives the same Job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.progress import MODES, Progress

if TYPE_CHECKING:
    from ckpt_tool.commands.options import Writing
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
    writes. sources, outputs: what it reads and makes, where no report may be put. pages: long text, which a terminal
    shows through a pager.
    """

    verb: str
    show: Show
    run: Callable[[Progress], Document]
    page: Callable[[Document, bool], Page]
    sound: Callable[[Document], bool] = lambda document: True
    writes: bool = False
    plans: bool = False
    sources: tuple[str, ...] = ()
    outputs: tuple[str | None, ...] = ()
    pages: bool = False


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


def show_from(given: Mapping[str, Any]) -> Show:
    """`Show` from the options of reporting. Raises UsageError."""
    from ckpt_tool.commands import values
    from ckpt_tool.commands.options import Taken

    taken = Taken(given)
    show = Show(
        json=bool(given.get("json")),
        progress=taken.take("progress", values.one_of(MODES), "auto"),
        quiet=bool(given.get("quiet")),
        verbose=int(given.get("verbose") or 0),
        report=taken.take("report", values.output, None),
        color=taken.take("color", values.one_of(("auto", "always", "never")), "auto"),
    )
    taken.settle()
    return show


def write_job(verb: str, src: str, dst: str, show: Show, reading: Reading, writing: Writing) -> Job:
    """`ckpt reshard` or `ckpt convert`."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands import convert

        command = convert.reshard if verb == "reshard" else convert.convert
        return command(src, dst, reading, writing, progress)

    return Job(
        verb,
        show,
        run,
        written,
        writes=True,
        plans=not (writing.dry_run or writing.plan_file),
        sources=(src,),
        outputs=(dst, writing.plan_file),
    )


def written(document: Document, uncut: bool) -> Page:
    """The page of a writer's document."""
    from ckpt_tool.report.writing import after

    return after(document, everything=uncut)


def plain_job(arguments: Sequence[str]) -> Job | None:
    """The job of a line that needs no parser, None for all others."""
    if "_CKPT_COMPLETE" in os.environ:
        return None
    match list(arguments):
        case ["inspect", src] if src and not src.startswith("-"):
            return inspect_job(src, Show())
        case ["reshard" | "convert" as verb, *words]:
            from ckpt_tool.cli_plain import plain_write

            return plain_write(verb, words)
    return None
