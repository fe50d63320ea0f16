"""The verbs of the command line: the arguments and options of each, and the function that makes a VerbJob of them.

    @verb("what is in a checkpoint", SRC, takes=lambda: (Inspection, Reading), examples=("ckpt inspect runs/7",))
    def inspect(show: Show, src: str, wanted: Inspection, reading: Reading) -> Job: ...

Options are declared in groups (`options`, `merging.options`); a verb names the groups that it takes. This module is
independent of the parser: typer (`cli.parser`) and the fast path for plain command lines (`cli.plain`) make the same
VerbJob. When a verb's function is called, its options are valid and nothing has been read yet. Each job imports its
command inside `run` and its report inside `page`, so that help and usage errors load no checkpoint format.

A verb's docstring is the text at the top of its `--help`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ckpt_tool.core.progress import Progress
from ckpt_tool.errors import CkptError, UsageError, near_misses
from ckpt_tool.option_kinds.statement import (
    KEYS,
    LAYOUT,
    PLAN,
    TO,
    TRAVEL,
    Option,
    Section,
    options_of,
    values_of,
    words_given,
)

if TYPE_CHECKING:
    from ckpt_tool.deltas.options import Making
    from ckpt_tool.merging.options import MergeOptions
    from ckpt_tool.options.reading import Inspection, Reading, Show
    from ckpt_tool.options.verbs import (
        Auditing,
        Cleaning,
        Comparison,
        HelpPage,
        Kernels,
        Looking,
        Retention,
        Search,
        Share,
        Validating,
        Verification,
    )
    from ckpt_tool.options.writing import Writing
    from ckpt_tool.report.page import Page as Shown

Document = dict[str, Any]


class VerbJob(NamedTuple):
    """A verb with its parsed arguments and options, ready to run."""

    verb: str
    show: Show
    run: Callable[[Progress], Document]  # reads and writes; returns the document that --json prints
    page: Callable[[Document, bool], Shown]  # the document as a page for people; True shows long lists in full
    # False for a document with findings: the exit code is 1
    sound: Callable[[Document], bool] = lambda document: True
    writes: bool = False  # makes an output; -q then prints nothing on success
    plans: bool = False  # prints its plan before it writes
    # The paths that it reads and writes. A report (--report) must not be saved inside them.
    sources: tuple[str, ...] = ()
    outputs: tuple[str | None, ...] = ()
    pages: bool = False  # long text, shown through a pager on a terminal
    # the one line for scripts that is printed in place of the page; "" prints nothing
    line: Callable[[Document], str] | None = None
    # an error in the source despite which a result could be shown: raised after the result was printed, for the exit
    # code
    fault: Callable[[Document], CkptError | None] = lambda document: None


class Argument(NamedTuple):
    """A positional argument of a verb."""

    metavar: str
    help: str
    kind: Literal["one", "many", "optional"] = "one"  # `many` takes one or more words, `optional` none or one


class Verb(NamedTuple):
    """The declaration of one verb: its help texts, arguments and options, and the function that makes its job."""

    name: str
    summary: str  # its line in the list of verbs
    about: str  # the text at the top of its help
    arguments: tuple[Argument, ...]
    takes: Callable[[], tuple[type, ...]]  # returns its option groups; a function, so that they are imported on demand
    but: tuple[Section, ...]  # sections of those groups that are no options of this verb
    examples: tuple[str, ...]
    everyday: tuple[str, ...]  # keywords of shared options that its short help (-h) shows too
    ready: Callable[..., VerbJob]

    def options(self) -> dict[str, Option]:
        """The options of the verb by keyword, with those of `Show` (--json, -v, ...) that every verb has."""
        from ckpt_tool.options.reading import Show

        return {name: one for name, one in options_of(*self.takes(), Show).items() if one.section not in self.but}

    def option_names(self) -> frozenset[str]:
        """All spellings of all its options, such as `--quiet` and `-q`."""
        return frozenset(name for option in self.options().values() for name in option.names)

    def job(self, arguments: Sequence[Any], given: Mapping[str, Any]) -> VerbJob:
        """The job for these arguments and options.

        Args:
            given: option values by keyword, as text.

        Raises:
            UsageError: it lists all invalid options at once.
        """
        from ckpt_tool.options.reading import Show

        show, *groups = self.groups(given, Show, arguments=arguments)
        return self.ready(show, *arguments, *groups)

    def groups(self, given: Mapping[str, Any], *more: type, arguments: Sequence[Any] = ()) -> list[Any]:
        """An instance of each option group in `more`, then of each of the verb's own.

        A group with a field `command` gets the words of the command line, which --attest records.

        Raises:
            UsageError: it lists all invalid options at once.
        """
        found: list[Any] = values_of(given, *more, *self.takes())
        paths = (path for each in arguments for path in ([each] if isinstance(each, str) else each or ()))
        words = (self.name, *paths, *words_given(given, options_of(*self.takes())))
        return [replace(group, command=words) if hasattr(group, "command") else group for group in found]


VERBS: dict[str, Verb] = {}
F = Callable[..., VerbJob]
SRC = Argument("SRC", "A file, a folder or a URL.")
DST = Argument("DST", "The output (OUT in the guide): a new file or folder, or a place in a store (s3://, az://).")


def verb(
    summary: str,
    *arguments: Argument,
    takes: Callable[[], tuple[type, ...]] = tuple,
    but: tuple[Section, ...] = (),
    examples: tuple[str, ...],
    everyday: tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Decorator: register a function as the verb of the same name (see `Verb` for the parameters)."""

    def add(function: F) -> F:
        """Register `function`, whose docstring becomes the text of `ckpt VERB --help`."""
        name = function.__name__
        VERBS[name] = Verb(name, summary, function.__doc__ or "", arguments, takes, but, examples, everyday, function)
        return function

    return add


def _inspecting() -> tuple[type, ...]:
    from ckpt_tool.options.reading import Inspection, Reading

    return Inspection, Reading


def _both() -> tuple[type, ...]:
    from ckpt_tool.options.reading import Reading
    from ckpt_tool.options.writing import Writing

    return Reading, Writing


@verb(
    "what is in a checkpoint, from its headers alone",
    SRC,
    takes=_inspecting,
    examples=(
        "ckpt inspect runs/7",
        "ckpt inspect model.safetensors --match '*.q_proj.*' --stats",
        "ckpt inspect runs/7 --placement",
    ),
)
def inspect(show: Show, src: str, wanted: Inspection, reading: Reading) -> VerbJob:
    """What is in a checkpoint, read from headers alone. Nothing in it is ever run."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.inspect import inspect as command

        if wanted.anonymous and show.report is not None:
            from ckpt_tool.commands.anonymous import refuse_with

            refuse_with("--report", "the command line with its paths")
        return command(src, reading, wanted, columns=True, incomplete=True)

    def page(document: Document, uncut: bool) -> Shown:
        from ckpt_tool.report.inspection import inspection

        return inspection(document, depth=wanted.depth, everything=uncut)

    def fault(document: Document) -> CkptError | None:
        if "missing" not in document:
            return None
        from ckpt_tool.commands.incomplete import fault_of

        return fault_of(document)

    return VerbJob("inspect", show, run, page, sources=(src,), fault=fault)


def written(document: Document, uncut: bool) -> Shown:
    """The page for the document of a verb that writes a checkpoint."""
    from ckpt_tool.report.writing import after

    return after(document, everything=uncut)


def _writer(
    name: str, show: Show, run: Callable[[Progress], Document], writing: Writing, sources: Sequence[str], *outputs: str
) -> VerbJob:
    return VerbJob(
        name,
        show,
        run,
        written,
        writes=True,
        plans=not (writing.dry_run or writing.plan_file or writing.emit),
        sources=tuple(sources),
        outputs=(*outputs, writing.plan_file, writing.attest, writing.emit and writing.emit[1]),
    )


@verb(
    "the same checkpoint for other parallel degrees",
    SRC,
    DST,
    takes=_both,
    but=(TO,),
    examples=(
        "ckpt reshard runs/7/iter_0000100 out --tp 8 --pp 2",
        "ckpt reshard in out --drop optimizer",
        "ckpt reshard in out --dp 3 --zero 3 --dry-run",
    ),
)
def reshard(show: Show, src: str, dst: str, reading: Reading, writing: Writing) -> VerbJob:
    """The same checkpoint for other parallel degrees: model, optimizer, experts, scalars and extras together."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands import convert

        return convert.reshard(src, dst, reading, writing, progress)

    return _writer("reshard", show, run, writing, (src,), dst)


@verb(
    "another format, another dialect, other degrees",
    SRC,
    DST,
    takes=_both,
    examples=(
        "ckpt convert runs/7 out --to safetensors --dtype bf16",
        "ckpt convert hf out --to megatron-dist --tp 4 --pp 2",
        "ckpt convert ddp out --to safetensors --rename 'module.*=*'",
    ),
)
def convert(show: Show, src: str, dst: str, reading: Reading, writing: Writing) -> VerbJob:
    """Another format and, where the names differ, another dialect; degrees too, so one hop is always enough."""
    if writing.to is None:
        raise UsageError(
            "convert needs --to FORMAT",
            code="E0282",
            place="ckpt convert",
            hint="ckpt convert --help lists the formats; where the format stays (other degrees, --drop optimizer, "
            "--rename) there is ckpt reshard SRC DST",
        )

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands import convert

        return convert.convert(src, dst, reading, writing, progress)

    return _writer("convert", show, run, writing, (src,), dst)


def _merging() -> tuple[type, ...]:
    from ckpt_tool.merging.options import MergeOptions
    from ckpt_tool.options.reading import Reading
    from ckpt_tool.options.writing import Writing

    return Writing, Reading, MergeOptions  # both of the last two have --config; MergeOptions, the later one, wins


@verb(
    "join shards, strip keys, fold LoRA adapters, merge models",
    Argument("SRC... DST", "The sources, then the output.", "many"),
    takes=_merging,
    examples=(
        "ckpt merge shards one --remove-keys 'lm_head.*'",
        "ckpt merge base adapter out --method lora",
        "ckpt merge a b out --method slerp --t 0.3",
    ),
)
def merge(show: Show, paths: Sequence[str], writing: Writing, reading: Reading, options: MergeOptions) -> VerbJob:
    """Join shards, strip keys, fold LoRA adapters, merge models."""
    *sources, dst = paths
    if not sources and options.config is None:
        raise UsageError(
            f"merge needs a source before the output {dst}",
            code="E0282",
            place="ckpt merge",
            hint="ckpt merge SRC... DST; with --config the sources are in the file",
        )
    if sources and options.config is not None:
        raise UsageError(
            f"--config names the sources, but {sources[0]} is given too",
            code="E1442",
            place="ckpt merge",
            hint="with --config give the output alone",
        )

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.merge import merge as command

        return command(sources, dst, reading, writing, options, progress)

    return _writer("merge", show, run, writing, sources, dst)


def _making() -> tuple[type, ...]:
    from ckpt_tool.deltas.options import Making
    from ckpt_tool.options.reading import Reading

    return Making, Reading


@verb(
    "what changed between two checkpoints, as slime and SGLang have it",
    Argument("BASE", "The checkpoint as it was."),
    Argument("NEW", "As it is, in any format and layout."),
    DST,
    takes=_making,
    examples=(
        "ckpt delta hf runs/7/iter_0000100 weight_v000001",
        "ckpt delta step_100 step_200 archive/200 --dedup",
        "ckpt delta a b changes --encoding overwrite",
    ),
)
def delta(show: Show, src: str, new: str, dst: str, wanted: Making, reading: Reading) -> VerbJob:
    """What changed between two checkpoints, in any formats and layouts: a folder of compressed differences, as slime
    publishes them and SGLang reads them. With --dedup the files of a step of training, byte for byte."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.delta import delta as command

        return command(src, new, dst, reading, wanted, progress)

    def page(document: Document, uncut: bool) -> Shown:
        from ckpt_tool.report.delta import make_delta_page

        return make_delta_page(document, everything=uncut)

    return VerbJob("delta", show, run, page, writes=True, sources=(src, new), outputs=(dst,))


@verb(
    "a base and deltas as one checkpoint",
    Argument("BASE DELTA... DST", "The base, the deltas in their order, then the output.", "many"),
    takes=_both,
    examples=(
        "ckpt patch hf weight_v000001 weight_v000002 out",
        "ckpt patch step_100 archive/200 step_200",
        "ckpt patch hf weight_v000001 out --to megatron-dist --tp 4",
    ),
)
def patch(show: Show, paths: Sequence[str], reading: Reading, writing: Writing) -> VerbJob:
    """A base with a chain of deltas applied, in one pass. Nothing is written unless every tensor has the digest that
    the chain states."""
    if len(paths) < 3:
        raise UsageError(
            "patch needs a base, at least one delta, and an output",
            code="E0282",
            place="ckpt patch",
            hint="ckpt patch BASE DELTA... DST",
        )
    src, *deltas, dst = paths

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.patch import patch as command

        return command(src, deltas, dst, reading, writing, progress)

    return _writer("patch", show, run, writing, (src, *deltas), dst)


def _comparing() -> tuple[type, ...]:
    from ckpt_tool.options.reading import Reading
    from ckpt_tool.options.verbs import Comparison

    return Comparison, Reading


@verb(
    "are two checkpoints equal in value?",
    Argument("A", "A checkpoint."),
    Argument("B", "Another, in any format and layout."),
    takes=_comparing,
    examples=(
        "ckpt diff step_100 step_200",
        "ckpt diff hf megatron --dialect hf",
        "ckpt diff a b --atol 1e-6 --state model --rank",
    ),
    everyday=("verbose", "report"),
)
def diff(show: Show, a: str, b: str, wanted: Comparison, reading: Reading) -> VerbJob:
    """Are two checkpoints equal in value, in whatever formats and layouts they lie? Exit 1 when they are not."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.diff import diff as command

        return command(a, b, reading, wanted, progress=progress)

    def page(document: Document, uncut: bool) -> Shown:
        from ckpt_tool.report.comparison import comparison

        return comparison(document, everything=uncut)

    return VerbJob("diff", show, run, page, sound=lambda document: bool(document["equal"]), sources=(a, b))


def _verifying() -> tuple[type, ...]:
    from ckpt_tool.options.reading import Reading
    from ckpt_tool.options.verbs import Verification

    return Verification, Reading


@verb(
    "is a checkpoint complete and valid?",
    SRC,
    takes=_verifying,
    examples=("ckpt verify out", "ckpt verify out --mode quick --json", "ckpt verify out --key key.pub"),
)
def verify(show: Show, src: str, wanted: Verification, reading: Reading) -> VerbJob:
    """Is it complete and sound? Headers, extents, cover, replicas, checksums, finite values. Exit 1 when it is not."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.verify import verify as command

        return command(src, reading, wanted, progress=progress)

    def page(document: Document, uncut: bool) -> Shown:
        from ckpt_tool.report.comparison import verification

        return verification(document, everything=uncut)

    def fault(document: Document) -> CkptError | None:
        if "refused" not in document:
            return None
        from ckpt_tool.sources.damaged import refused

        return refused(document)

    return VerbJob("verify", show, run, page, sound=lambda document: bool(document["ok"]), sources=(src,), fault=fault)


def _auditing() -> tuple[type, ...]:
    from ckpt_tool.options.reading import Reading
    from ckpt_tool.options.verbs import Auditing

    return Auditing, Reading


@verb(
    "is a checkpoint complete and plausible for its own config?",
    SRC,
    takes=_auditing,
    examples=("ckpt audit out", "ckpt audit out --values", "ckpt audit out --sarif audit.sarif"),
)
def audit(show: Show, src: str, wanted: Auditing, reading: Reading) -> VerbJob:
    """Is it complete and plausible for its own config? Missing and surplus tensors, index, experts, vocabulary,
    quantisation; with --values copies, zeros, tied heads. Exit 1 when there are findings."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.audit import audit as command

        return command(src, reading, wanted, progress=progress)

    def page(document: Document, uncut: bool) -> Shown:
        from ckpt_tool.report.audit import audit as page_of

        return page_of(document, everything=uncut)

    outputs = (wanted.sarif, wanted.junit)
    return VerbJob(
        "audit", show, run, page, sound=lambda document: bool(document["ok"]), sources=(src,), outputs=outputs
    )


def _reading() -> tuple[type, ...]:
    from ckpt_tool.options.reading import Reading

    return (Reading,)


RUN = Argument("RUN", "The folder, or the URL, in which a training run keeps its steps.")


def _searching() -> tuple[type, ...]:
    from ckpt_tool.options.reading import Reading
    from ckpt_tool.options.verbs import Search

    return Search, Reading


@verb(
    "the newest complete step of a run",
    RUN,
    takes=_searching,
    examples=(
        "ckpt latest runs/7",
        "ckpt latest s3://bucket/runs/7 --json",
        'ckpt inspect "$(ckpt latest runs/7)"',
    ),
)
def latest(show: Show, run: str, wanted: Search, reading: Reading) -> VerbJob:
    """The newest step of a run that is whole, by names and headers: its path on stdout. Exit 1 when there is none, 7
    when a newer one can't be read."""

    def command(progress: Progress) -> Document:
        from ckpt_tool.commands.latest import latest as command

        return command(run, reading, wanted, progress=progress)

    return VerbJob(
        "latest",
        show,
        command,
        _listing("ckpt latest"),
        sound=lambda document: document["path"] is not None,
        sources=(run,),
        line=lambda document: document["path"] or "",
    )


def _pruning() -> tuple[type, ...]:
    from ckpt_tool.options.reading import Reading
    from ckpt_tool.options.verbs import Retention

    return Retention, Reading


@verb(
    "remove steps of a run, never the last complete one",
    RUN,
    takes=_pruning,
    examples=(
        "ckpt prune runs/7 --keep-last 3 --dry-run",
        "ckpt prune runs/7 --keep-last 3",
        "ckpt prune runs/7 --keep-last 2 --keep-every 1000",
    ),
)
def prune(show: Show, run: str, wanted: Retention, reading: Reading) -> VerbJob:
    """Remove the steps that no rule keeps. Never the last sound one, what is being written, what a pointer file or a
    link leads to, or what is no checkpoint. Exit 1 when no step is sound: then nothing is removed."""

    def command(progress: Progress) -> Document:
        from ckpt_tool.commands.prune import prune as command

        return command(run, reading, wanted, progress=progress)

    def page(document: Document, uncut: bool) -> Shown:
        from ckpt_tool.report.pruning import pruning

        return pruning(document)

    return VerbJob(
        "prune",
        show,
        command,
        page,
        sound=lambda document: document["last_sound"] is not None,
        writes=True,
        sources=(run,),
    )


def _applying() -> tuple[type, ...]:
    from ckpt_tool.options.verbs import Share
    from ckpt_tool.options.writing import Writing

    return Share, Writing


@verb(
    "run a saved plan, or one share of it",
    Argument("PLAN", "A file that --plan saved."),
    takes=_applying,
    but=(TO, LAYOUT, TRAVEL, KEYS, PLAN),
    examples=(
        "ckpt convert in out --to dcp --plan p.json && ckpt apply p.json",
        "ckpt apply p.json --part 3/8",
        "ckpt apply p.json --claim",
    ),
)
def apply(show: Show, saved: str, wanted: Share, writing: Writing) -> VerbJob:
    """Run a saved plan, or one share of it: on as many machines as there are."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.apply import apply as command

        return command(saved, wanted, writing, progress)

    return _writer("apply", show, run, writing, ())


def _looking() -> tuple[type, ...]:
    from ckpt_tool.options.verbs import Looking

    return (Looking,)


@verb(
    "how far a run is that writes, part by part",
    Argument("PLAN|DST", "A plan that was saved, or the output that is being written."),
    takes=_looking,
    examples=("ckpt status out", "ckpt status plan.json --watch"),
)
def status(show: Show, target: str, wanted: Looking) -> VerbJob:
    """How far a run is, here or on other machines: each part, done, running or dead. Exit 1 when one is dead or none
    is at work."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.status import status as command

        return command(target, progress, watch=wanted.watch)

    def page(document: Document, uncut: bool) -> Shown:
        from ckpt_tool.report.status import status as page_of

        return page_of(document)

    def sound(document: Document) -> bool:
        parts = document["parts"]
        return not parts or (bool(document["running"]) and all(part["state"] != "dead" for part in parts))

    return VerbJob("status", show, run, page, sound=sound)


def _validating() -> tuple[type, ...]:
    from ckpt_tool.options.verbs import Validating

    return (Validating,)


@verb(
    "train, save, kill, reshard, resume, compare",
    takes=_validating,
    examples=(
        "ckpt validate --report proof.html",
        "ckpt validate --from-layout tp2,pp2,dp2,ep2 --to-layout dp4,ep2",
    ),
)
def validate(show: Show, wanted: Validating) -> VerbJob:
    """Train, save sharded, kill, reshard, resume, and compare with the run that was never interrupted. Needs torch."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.validate import validate as command

        return command(wanted, progress=progress)

    def page(document: Document, uncut: bool) -> Shown:
        from ckpt_tool.report.validation import validation

        return validation(document, everything=uncut)

    return VerbJob("validate", show, run, page, sound=lambda document: bool(document["ok"]), outputs=(wanted.keep,))


def _of_kernels() -> tuple[type, ...]:
    from ckpt_tool.options.verbs import Kernels

    return (Kernels,)


@verb(
    "the CUDA reshard kernels: build, info, check, bench",
    Argument("build|info|check|bench", "What to do."),
    takes=_of_kernels,
    examples=("ckpt kernels info", "ckpt kernels build --arch native", "ckpt kernels check --cases 1000"),
)
def kernels(show: Show, action: str, wanted: Kernels) -> VerbJob:
    """The CUDA reshard kernels: compile them, say what there is, hold them against NumPy (exit 1 where they differ),
    measure."""
    _check_action(action, wanted)

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands import kernels as commands

        if action == "build":
            return commands.build(wanted.arch, out=wanted.out, force=wanted.force)
        if action == "check":
            return commands.check(cases=wanted.cases or commands.CASES, seed=wanted.seed or 0, only=wanted.only)
        return commands.bench(quick=wanted.quick) if action == "bench" else commands.info()

    page = _listing(f"ckpt kernels {action}")
    return VerbJob(
        "kernels", show, run, page, sound=lambda document: bool(document.get("ok", True)), outputs=(wanted.out,)
    )


def _check_action(word: str, wanted: Kernels) -> None:
    """Raise UsageError for a word that is none of the four actions, and for an option that belongs to another one."""
    actions = ("build", "info", "check", "bench")
    if word not in actions:
        raise UsageError(
            f"ckpt kernels has no {word!r}",
            code="E0283",
            place="ckpt kernels",
            hint=near_misses(word, actions) or f"there are {', '.join(actions)}",
        )
    for option in options_of(*_of_kernels()).values():
        action = option.help.partition(":")[0]
        value = getattr(wanted, option.field)
        if action != word and value is not False and value not in (None, ()):
            raise UsageError(
                f"{option.names[0]} belongs to ckpt kernels {action}", code="E0284", place=f"ckpt kernels {word}"
            )


@verb("what this machine offers, and a self-test", examples=("ckpt doctor",))
def doctor(show: Show) -> VerbJob:
    """What this machine offers: versions, disk, file system, GPU, nvcc, extras; and a self-test."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.doctor import doctor as command

        return command()

    return VerbJob("doctor", show, run, _listing("ckpt doctor"), sound=lambda document: document["self_test"] == "ok")


def _paging() -> tuple[type, ...]:
    from ckpt_tool.options.verbs import HelpPage

    return (HelpPage,)


@verb(
    "the pages of the guide",
    Argument("[TOPIC]", "A page; without it they are listed.", "optional"),
    takes=_paging,
    examples=("ckpt help", "ckpt help pretrained", "ckpt help paddle --lang zh"),
)
def help(show: Show, topic: str, wanted: HelpPage) -> VerbJob:
    """The guide: pages on formats, pretrained weights, merging, Paddle, and so on."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.help import help_on

        return help_on(topic or None, wanted.language)

    def page(document: Document, uncut: bool) -> Shown:
        from ckpt_tool.report.guide import page_of

        return page_of(document)

    return VerbJob("help", show, run, page, pages=True)


def _cleaning() -> tuple[type, ...]:
    from ckpt_tool.options.verbs import Cleaning

    return (Cleaning,)


@verb(
    "what interrupted runs left",
    Argument("FOLDER", "Where outputs were to appear: a folder, or a place in a store."),
    takes=_cleaning,
    examples=("ckpt clean .", "ckpt clean . --remove"),
)
def clean(show: Show, folder: str, wanted: Cleaning) -> VerbJob:
    """What interrupted runs left in a folder: list it, or remove it."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.clean import clean as command

        return command(folder, remove=wanted.remove)

    return VerbJob("clean", show, run, _listing("ckpt clean"))


@verb(
    "what a code of an error, a finding or a note means, why it comes, what to do",
    Argument("[CODE]", "As an error or a report shows it: E0301, A0101, W-header. Without it, all.", "optional"),
    examples=("ckpt explain E0301", "ckpt explain"),
)
def explain(show: Show, code: str) -> VerbJob:
    """What a code of an error, a finding or a note means, why it comes, what to do."""

    def run(progress: Progress) -> Document:
        from ckpt_tool.commands.explain import explain as command

        return command(code)

    def page(document: Document, uncut: bool) -> Shown:
        from ckpt_tool.report.explanation import explanation

        return explanation(document)

    return VerbJob("explain", show, run, page)


def _listing(title: str) -> Callable[[Document, bool], Shown]:
    def page(document: Document, uncut: bool) -> Shown:
        from ckpt_tool.report.listing import listing

        return listing(document, title)

    return page
