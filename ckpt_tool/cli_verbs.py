"""The verbs as typer sees them: each turns its options into a Job, a command that is ready to run.

Parsing ends here and nothing has been read yet; `cli.run` runs the job, shows its document and gives the exit code.
A verb's command is imported when the job runs, so `--help` and usage errors cost no format, NumPy or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tool.cli_job import Document, Job, inspect_job, show_from, write_job, written
from ckpt_tool.cli_options import (
    APPLY,
    CLEAN,
    DIFF,
    GUIDE,
    INSPECT,
    KERNELS,
    KEYS,
    LAYOUT,
    MERGE,
    PLAN,
    READING,
    RUN,
    TO,
    TRAVEL,
    VALIDATION,
    VERIFICATION,
    Destination,
    Given,
    Source,
    takes,
)
from ckpt_tool.commands import values
from ckpt_tool.commands.options import (
    DEVICES,
    DIALECTS,
    MergeOptions,
    Reading,
    ReadingOptions,
    Taken,
    Writing,
    WritingOptions,
    both_from,
    merging_from,
    reading_from,
    writing_from,
)
from ckpt_tool.core.progress import Progress
from ckpt_tool.errors import UsageError, near_misses
from ckpt_tool.guide import LANGUAGES

if TYPE_CHECKING:
    from ckpt_tool.report.page import Page


def _only(given: Given, known: Mapping[str, Any]) -> Document:
    return {name: value for name, value in given.items() if name in known}


def _reading(given: Given) -> Reading:
    return reading_from(_only(given, ReadingOptions.__annotations__))


def _writing(given: Given) -> Writing:
    return writing_from(_only(given, WritingOptions.__annotations__))


def _both(given: Given) -> tuple[Reading, Writing]:
    known = {**ReadingOptions.__annotations__, **WritingOptions.__annotations__}
    return both_from(_only(given, known))


@takes(INSPECT, READING)
def inspect(src: Source, given: Given) -> Job:
    """What is in a checkpoint, read from headers alone. Nothing in it is ever run."""
    show, taken = show_from(given), Taken(given)
    match, states = taken.take("match", values.patterns, ()), taken.take("state", values.words, ())
    depth = taken.take("depth", values.count, None)
    taken.settle()
    reading = _reading(_without(given, "state"))

    wanted = {name: bool(given[name]) for name in ("placement", "security", "stats")}
    return inspect_job(src, show, reading, depth=depth, match=match, states=states, **wanted)


def _without(given: Given, *names: str) -> Given:
    return {name: value for name, value in given.items() if name not in names}


@takes(LAYOUT, TRAVEL, KEYS, READING, RUN, PLAN)
def reshard(src: Source, dst: Destination, given: Given) -> Job:
    """The same checkpoint for other parallel degrees: model, optimizer, experts, scalars and extras together."""
    show, (reading, writing) = show_from(given), _both(given)
    return write_job("reshard", src, dst, show, reading, writing)


@takes(TO, LAYOUT, TRAVEL, KEYS, READING, RUN, PLAN)
def convert(src: Source, dst: Destination, given: Given) -> Job:
    """Another format and, where the names differ, another dialect; degrees too, so one hop is always enough."""
    show, (reading, writing) = show_from(given), _both(given)
    if writing.to is None:
        raise UsageError(
            "convert needs --to FORMAT",
            code="E0282",
            place="ckpt convert",
            hint="ckpt convert --help lists the formats; for other degrees alone there is ckpt reshard",
        )
    return write_job("convert", src, dst, show, reading, writing)


@takes(TO, LAYOUT, TRAVEL, KEYS, READING, RUN, PLAN, MERGE)
def merge(
    paths: Annotated[
        list[str], typer.Argument(metavar="SRC... DST", help="The sources, then the output.", show_default=False)
    ],
    given: Given,
) -> Job:
    """Join shards, strip keys, fold LoRA adapters, merge models."""
    *sources, dst = paths
    show = show_from(given)
    renamed = {"merge_config" if name == "config" else name: value for name, value in given.items()}
    options: Document = merging_from(_only(renamed, MergeOptions.__annotations__))
    reading, writing = _both(_without(given, "config"))
    _check_sources(sources, dst, options)

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.merge import merge as command

        return command(sources, dst, reading, writing, progress, **options)

    outputs = (dst, writing.plan_file)
    return Job(
        "merge",
        show,
        run,
        written,
        writes=True,
        plans=not (writing.dry_run or writing.plan_file),
        sources=tuple(sources),
        outputs=outputs,
    )


def _check_sources(sources: list[str], dst: str, options: Mapping[str, Any]) -> None:
    if not sources and options["config"] is None:
        raise UsageError(
            f"merge needs a source before the output {dst}",
            code="E0282",
            place="ckpt merge",
            hint="ckpt merge SRC... DST; with --config the sources stand in the file",
        )
    if sources and options["config"] is not None:
        raise UsageError(
            f"--config names the sources, but {sources[0]} is given too",
            code="E1442",
            place="ckpt merge",
            hint="with --config give the output alone",
        )


@takes(DIFF, READING)
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another, in any format and layout.", show_default=False)],
    given: Given,
) -> Job:
    """Are two checkpoints equal in value, in whatever formats and layouts they lie? Exit 1 when they are not."""
    show, taken = show_from(given), Taken(given)
    options: Document = {
        "rtol": taken.take("rtol", values.tolerance, 0.0),
        "atol": taken.take("atol", values.tolerance, 0.0),
        "map_file": taken.take("map_file", values.text, None),
        "dialect": taken.take("dialect", values.one_of(DIALECTS), None),
        "states": taken.take("state", values.words, ()),
        "device": taken.take("device", values.one_of(DEVICES), "cpu"),
    }
    taken.settle()
    reading = _reading(given)

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.diff import diff as command

        return command(a, b, reading, progress=progress, **options)

    def page(document: Document, uncut: bool) -> Page:
        from ckpt_tool.report.comparison import comparison

        return comparison(document, everything=uncut)

    return Job("diff", show, run, page, sound=lambda document: bool(document["equal"]), sources=(a, b))


@takes(VERIFICATION, READING)
def verify(src: Source, given: Given) -> Job:
    """Is it complete and sound? Headers, extents, cover, replicas, checksums, finite values. Exit 1 when it is not."""
    show, taken = show_from(given), Taken(given)
    mode = taken.take("mode", values.one_of(("quick", "full")), "full")
    device = taken.take("device", values.one_of(DEVICES), "cpu")
    taken.settle()
    reading = _reading(given)

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.verify import verify as command

        return command(src, reading, mode=mode, device=device, progress=progress)

    def page(document: Document, uncut: bool) -> Page:
        from ckpt_tool.report.comparison import verification

        return verification(document, everything=uncut)

    return Job("verify", show, run, page, sound=lambda document: bool(document["ok"]), sources=(src,))


@takes(APPLY, RUN)
def apply(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A file that --plan saved.", show_default=False)],
    given: Given,
) -> Job:
    """Run a saved plan, or one share of it: on as many machines as there are."""
    show, taken = show_from(given), Taken(given)
    part = taken.take("part", values.share, None)
    taken.settle()
    writing = _writing(given)

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.apply import apply as command

        return command(plan, part, writing, progress)

    return Job("apply", show, run, written, writes=True, plans=not (writing.dry_run or writing.plan_file))


@takes()
def doctor(given: Given) -> Job:
    """What this machine offers: versions, disk, file system, GPU, nvcc, extras; and a self-test."""
    return Job("doctor", show_from(given), _doctor, _listing("ckpt doctor"), sound=_self_test)


def _doctor(progress: Progress) -> Document:
    from ckpt_tool.commands.doctor import doctor as command

    return command()


def _self_test(document: Document) -> bool:
    return bool(document["self_test"] == "ok")


@takes(GUIDE)
def help(
    topic: Annotated[
        str, typer.Argument(metavar="[TOPIC]", help="A page; without it they are listed.", show_default=False)
    ] = "",
    *,
    given: Given,
) -> Job:
    """The guide: pages on formats, pretrained weights, merging, Paddle, and so on."""
    show, taken = show_from(given), Taken(given)
    language = taken.take("lang", values.one_of(LANGUAGES), None)
    taken.settle()

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.help import help_on

        return help_on(topic or None, language)

    def page(document: Document, uncut: bool) -> Page:
        from ckpt_tool.report.guide import page_of

        return page_of(document)

    return Job("help", show, run, page, pages=True)


@takes(CLEAN)
def clean(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Where outputs were to appear.", show_default=False)],
    given: Given,
) -> Job:
    """What interrupted runs left in a folder: list it, or remove it."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.clean import clean as command

        return command(folder, remove=bool(given["remove"]))

    return Job("clean", show_from(given), run, _listing("ckpt clean"))


@takes()
def explain(
    code: Annotated[
        str, typer.Argument(metavar="[CODE]", help="As an error shows it: E0301. Without it, all.", show_default=False)
    ] = "",
    *,
    given: Given,
) -> Job:
    """What an error code means, why it comes, what to do."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.explain import explain as command

        return command(code)

    def page(document: Document, uncut: bool) -> Page:
        from ckpt_tool.report.explanation import explanation

        return explanation(document)

    return Job("explain", show_from(given), run, page)


def _listing(title: str) -> Callable[[Document, bool], Page]:
    def page(document: Document, uncut: bool) -> Page:
        from ckpt_tool.report.listing import listing

        return listing(document, title)

    return page


@takes(VALIDATION)
def validate(given: Given) -> Job:
    """Train, save sharded, kill, reshard, resume, and compare with the run that was never interrupted. Needs torch."""
    show, taken = show_from(given), Taken(given)
    from ckpt_tool.commands.validate import BACKENDS, MATRICES, MODES, Validating

    wanted = Validating(
        source=taken.take("from_layout", values.text, None),
        target=taken.take("to_layout", values.text, None),
        fmt=taken.take("format", values.text, None),
        matrix=taken.take("matrix", values.one_of(MATRICES), None),
        mode=taken.take("mode", values.one_of(MODES), "canonical"),
        backend=taken.take("backend", values.one_of(BACKENDS), "gloo"),
        device=taken.take("device", values.one_of(DEVICES), "cpu"),
        steps=taken.take("steps", values.count, 3),
        seed=taken.take("seed", values.count, 1234),
        controls=not given["no_controls"],
        keep=taken.take("keep", values.output, None),
    )
    taken.settle()

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.validate import validate as command

        return command(wanted, progress=progress)

    def page(document: Document, uncut: bool) -> Page:
        from ckpt_tool.report.validation import validation

        return validation(document, everything=uncut)

    return Job("validate", show, run, page, sound=lambda document: bool(document["ok"]), outputs=(wanted.keep,))


@takes(KERNELS)
def kernels(
    action: Annotated[str, typer.Argument(metavar="build|info|check|bench", help="What to do.", show_default=False)],
    given: Given,
) -> Job:
    """The CUDA reshard kernels: compile them, say what there is, hold them against NumPy (exit 1 where they differ),
    measure."""
    show, taken = show_from(given), Taken(given)
    arch, out = taken.take("arch", values.text, None), taken.take("out", values.output, None)
    cases, seed = taken.take("cases", values.count, None), taken.take("seed", values.between(0, 2**63 - 1), 0)
    only = taken.take("kernel", values.words, ())
    taken.settle()
    verb = _kernels_action(action, given)

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands import kernels as commands

        if verb == "build":
            return commands.build(arch, out=out, force=bool(given["force"]))
        if verb == "check":
            return commands.check(cases=cases or commands.CASES, seed=seed, only=only)
        return commands.bench(quick=bool(given["quick"])) if verb == "bench" else commands.info()

    return Job(
        "kernels",
        show,
        run,
        _listing(f"ckpt kernels {verb}"),
        sound=lambda document: bool(document.get("ok", True)),
        outputs=(out,),
    )


def _kernels_action(word: str, given: Given) -> str:
    """One of the four. Raises UsageError for another, and for an option that belongs to another one."""
    belongs = {"build": ("arch", "out", "force"), "info": (), "check": ("cases", "seed", "kernel"), "bench": ("quick",)}
    if word not in belongs:
        raise UsageError(
            f"ckpt kernels has no {word!r}",
            code="E0283",
            place="ckpt kernels",
            hint=near_misses(word, belongs) or f"there are {', '.join(belongs)}",
        )
    for action, names in belongs.items():
        for name in names:
            if action != word and given[name]:
                raise UsageError(
                    f"--{name} belongs to ckpt kernels {action}", code="E0284", place=f"ckpt kernels {word}"
                )
    return word
