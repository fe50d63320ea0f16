"""The options of the command line, one row each, in groups that verbs take whole.

`takes` names a verb's groups and `flat` makes the one flat signature that typer reads; the function itself gets its
options as one mapping:

    @takes(INSPECT, READING)
    def inspect(src: Source, given: Given) -> Job: ...

Names are those of `commands.options` (the Python keywords), which also parses the values: here they stay text, so
that a wrong value reads the same from a shell and from Python. The title of a group is its section in the help.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from ckpt_tool.commands.options import (
    DEVICES,
    DIALECTS,
    FORMATS,
    METHODS,
    POLICIES,
    SHARDINGS,
    SPECS,
    TIED_HEAD,
    VERIFY,
)
from ckpt_tool.core.progress import MODES
from ckpt_tool.guide import LANGUAGES

Given = Mapping[str, Any]
Row = tuple[str, Any, Any, dict[str, Any]]  # keyword, type, default, what typer.Option takes
Group = tuple[inspect.Parameter, ...]
F = TypeVar("F", bound=Callable[..., Any])

Source = Annotated[str, typer.Argument(metavar="SRC", help="A file, a folder or a URL.", show_default=False)]
Destination = Annotated[
    str, typer.Argument(metavar="DST", help="The output: a new file or folder.", show_default=False)
]


def text(name: str, metavar: str, help: str, *, option: str = "", choices: Sequence[str] = (), also: str = "") -> Row:
    """An option with a value. option: its spelling where it is not the keyword's. also: a second spelling."""
    names = [option or "--" + name.replace("_", "-"), *([also] if also else [])]
    return name, str | None, None, {"names": names, "metavar": metavar, "help": help, "choices": choices}


def texts(name: str, metavar: str, help: str) -> Row:
    """An option that may be repeated."""
    return name, list[str] | None, None, {"names": ["--" + name.replace("_", "-")], "metavar": metavar, "help": help}


def flag(name: str, help: str, *, names: Sequence[str] = (), default: bool = False) -> Row:
    """An option without a value."""
    return name, bool, default, {"names": names or ["--" + name.replace("_", "-")], "help": help}


def choice(name: str, help: str) -> Row:
    """A flag that may be on, off or left alone: `--name`, `--no-name`."""
    spelled = name.replace("_", "-")
    return name, bool | None, None, {"names": [f"--{spelled}/--no-{spelled}"], "help": help}


def group(title: str, *rows: Row) -> Group:
    """Rows as parameters under one heading of the help."""
    return tuple(_parameter(title, *row) for row in rows)


def _parameter(title: str, name: str, kind: Any, default: Any, about: dict[str, Any]) -> inspect.Parameter:
    about = dict(about)  # a row may stand in several groups
    choices = about.pop("choices", ())
    complete = (lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]) if choices else None
    option = typer.Option(
        *about.pop("names"), rich_help_panel=title, show_default=False, autocompletion=complete, **about
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


READING = group(
    "Reading",
    text("from_format", "FORMAT", "Take SRC for this format, don't detect.", option="--from", choices=FORMATS),
    flag("follow_symlinks", "Follow links that leave SRC; those inside it, and a Hugging Face cache's, always are."),
    flag("lenient", "Warn where a strict reader refuses and no value depends on it."),
    flag("allow_compressed", "Read deflated zip members, within bounds."),
    flag("require_checksums", "Refuse records that carry no checksum."),
    text("prefer", "WHICH", "Which of two sets of files in one folder: a format or the name of an index."),
    text(
        "replica_policy",
        "error|first",
        "Replicas that differ: an error, or take the first. Default error.",
        choices=("error", "first"),
    ),
    text("family", "NAME", "The model family, where the files don't tell."),
    text("config", "FILE", "A config.json, where the files hold none."),
)
LAYOUT = group(
    "Layout",
    text("tp", "N", "Tensor parallel degree."),
    text("pp", "N", "Pipeline parallel degree."),
    text("ep", "N", "Expert parallel degree."),
    text("etp", "N", "Tensor parallel degree of the experts."),
    text("dp", "N", "Data parallel degree."),
    text("cp", "N", "Context parallel degree."),
    text("vpp", "N", "Virtual pipeline stages a rank."),
    text("pp_split", "N,N,...", "Layers of each pipeline stage: 8,9,9,6."),
    text("zero", "0|1|2|3", "What data parallel ranks shard among themselves."),
    text(
        "sharding", "v1|v2", "Paddle: optimizer states by owner, or as slices. Default the source's.", choices=SHARDINGS
    ),
    text(
        "spec",
        "local|te",
        "Megatron: layers of its own modules or of Transformer Engine's. Default the source's, or local.",
        choices=SPECS,
    ),
    text("layout", "FILE", "A mesh and placement rules by glob, in TOML."),
    text(
        "on_indivisible",
        "POLICY",
        f"When a dim does not divide: {', '.join(POLICIES)}. Default largest-dim.",
        choices=POLICIES,
    ),
    flag("strict_shard", "The same as --on-indivisible error."),
)
TRAVEL = group(
    "What travels",
    text(
        "dialect",
        "NAME",
        f"Names and structure: {', '.join(DIALECTS)}. Default: the format's home dialect.",
        choices=DIALECTS,
    ),
    text("aoa", "FILE", "Paddle's any-to-any statements as the mapping of names and structure."),
    texts("state", "S,S,...", "model, master, optimizer, ema, extras, or all."),
    texts("drop", "S,S,...", "What may stay behind though it was asked for."),
    text("as_model", "ema|master", "Write this state as the model.", choices=("ema", "master")),
    texts("dtype", "[STATE=]DTYPE", "Cast: bf16, or optimizer=bf16. Repeatable."),
    flag("dequantize", "Write quantised weights and states as floats."),
    text("vocab_size", "N", "Rows of the vocabulary: padding beyond it is cut off, rows of zeros are added up to it."),
    text(
        "tied_head",
        "keep|tie|untie",
        "An output layer that is the embedding: written once or twice.",
        choices=TIED_HEAD,
    ),
    flag("allow_lossy", "Let a cast overflow or saturate, and count it."),
)
KEYS = group(
    "Keys",
    texts("remove_keys", "PATTERN", "Leave out: a glob, re:EXPRESSION or @FILE. Repeatable."),
    texts("keep_keys", "PATTERN", "Leave out all but these. Repeatable."),
    flag("model_only", "Leave the optimizer, master and EMA twins of removed keys alone."),
)
DEVICE = text("device", "cpu|cuda", "Where bytes are put in order, cast and hashed. Default cpu.", choices=DEVICES)
RUN = group(
    "Writing",
    flag("force", "Replace an existing output, whole and in one step."),
    flag(
        "resume", "Go on where an interrupted run stopped (the default).", names=["--resume/--no-resume"], default=True
    ),
    flag("fsync", "Wait for the disk before the commit (the default).", names=["--fsync/--no-fsync"], default=True),
    flag("dry_run", "Show the plan; write nothing."),
    text("memory", "SIZE", "Bound on working memory. Default 1GiB."),
    text("threads", "N", "Threads that move bytes."),
    text("verify", "off|quick|full", "Check the output. Default quick.", choices=VERIFY),
    text("ray", "ADDRESS|auto", "Run the plan on a Ray cluster."),
    DEVICE,
    text(
        "pinned", "LARGE[,SMALL]", "Pinned memory that --device cuda sets aside at once. Default: what the run needs."
    ),
)
PLAN = group(
    "Writing",
    text("max_shard_size", "SIZE", "Bytes a file of a sharded output. Default 5GB."),
    text("plan", "FILE", "Save the plan for ckpt apply; write nothing else."),
)
TO = group("Options", text("to", "FORMAT", f"One of {', '.join(FORMATS)}.", choices=FORMATS))
INSPECT = group(
    "Options",
    texts("match", "PATTERN", "Only these tensors: a glob, re:EXPRESSION or @FILE. Repeatable."),
    texts("state", "S", "Only this state. Repeatable."),
    text("depth", "N", "Levels of the tree of names. Default: what is best seen."),
    flag("placement", "Who holds what: chunks, files, ranks."),
    flag("security", "Every global that a pickle names."),
    flag("stats", "Read the values: min, max, mean, std, zeros, NaN, Inf."),
)
MERGE = group(
    "Options",
    text("method", "NAME", f"{', '.join(METHODS)}. Default union.", choices=METHODS),
    texts("weight", "W", "The weight of a source, in their order. Repeatable."),
    text("base", "SRC", "The model that the sources grew from."),
    texts("density", "D", "Share of a task vector that is kept: ties, dare, della, breadcrumbs. Repeatable."),
    text("t", "T", "Where slerp stops, from 0 to 1."),
    text("epsilon", "E", "della: how far the share goes up and down by rank. Default 0.15."),
    text("gamma", "G", "breadcrumbs: share of the largest that is left out. Default 0.01."),
    text("lambda_", "L", "Factor of the merged task vector. Default 1.", option="--lambda"),
    choice("normalize", "Divide by the weights that count, or don't. Default the method's."),
    text("decay", "D", "ema: share that the average keeps at each checkpoint."),
    text("last", "N", "The last N checkpoints of the folder SRC."),
    text("seed", "N", "Seed of dare and della. Default 0."),
    text("tokenizer", "base", "Merge though tokenizers differ; the base's is kept.", choices=("base",)),
    text("config", "FILE", "A mergekit config; it names the sources, only DST is given."),
    text(
        "on_conflict",
        "error|first|last",
        "When sources hold one tensor with different values. Default error.",
        choices=("error", "first", "last"),
    ),
)
DIFF = group(
    "Options",
    text("rtol", "X", "Relative tolerance. Default 0: bit for bit."),
    text("atol", "X", "Absolute tolerance. Default 0."),
    text("map_file", "FILE", "Rename tensors of the first before comparing.", option="--map"),
    text("dialect", "NAME", f"Compare both under these names: {', '.join(DIALECTS)}. Default keep.", choices=DIALECTS),
    texts("state", "S", "Only this state. Repeatable."),
    DEVICE,
)
VERIFICATION = group(
    "Options",
    text(
        "mode",
        "quick|full",
        "quick: headers, extents, cover. full: values and checksums too. Default full.",
        also="--verify",
        choices=VERIFY[1:],
    ),
    DEVICE,
)
APPLY = group("Options", text("part", "I/N", "Run share I of N, from 1/N to N/N."))
GUIDE = group("Options", text("lang", "en|zh", "Its language. Default: that of the locale.", choices=LANGUAGES))
CLEAN = group("Options", flag("remove", "Remove it. Without this it is only listed."))
VALIDATION = group(
    "Options",
    text("from_layout", "LAYOUT", "Train and save so: tp2,pp2,dp2,ep2; also vpp2, zero0 to zero3, split=2-1-1."),
    text("to_layout", "LAYOUT", "Reshard to this and go on. Without layouts a matrix of pairs is run."),
    text("format", "F", "What the job saves. Default sharded; in a matrix formats take turns."),
    text(
        "matrix",
        "NAME",
        "quick (default), full, or round-trip: A -> X -> A in every format.",
        choices=("quick", "full", "round-trip"),
    ),
    text(
        "mode",
        "canonical|native",
        "Sums in one order, held to the bit; or all-reduces, held to a tolerance.",
        choices=("canonical", "native"),
    ),
    text("device", "cpu|cuda", "Where the ranks train. Default cpu.", choices=("cpu", "cuda")),
    text("backend", "gloo|nccl|sim", "How the ranks talk. Default gloo.", choices=("gloo", "nccl", "sim")),
    text("steps", "N", "Steps before the save, and after the resume. Default 3."),
    text("seed", "N", "Of weights, data and dropout. Default 1234."),
    flag("no_controls", "Plant no faults."),
    text("keep", "FOLDER", "Leave every checkpoint there."),
)
KERNELS = group(
    "Options",
    text("arch", "N,N", "build: GPUs, as 90,100 (sm_90, sm_100), native or host. Default 80,90,100."),
    text("out", "FILE", "build: write the library to FILE, for CKPT_KERNELS=path:FILE elsewhere."),
    flag("force", "build: though it is built, and over FILE."),
    text("cases", "N", "check: random cases a kernel. Default 200."),
    text("seed", "N", "check: what the cases are made from. Default 0."),
    texts("kernel", "NAME", "check: only this kernel. Repeatable."),
    flag("quick", "bench: minutes less, with more spread."),
)
REPORTING = group(
    "Reporting",
    flag("json", "One JSON document on stdout; errors as JSON on stderr."),
    text("progress", "MODE", f"{', '.join(MODES)}.", choices=MODES),
    flag("quiet", "No plan, no progress, no notes.", names=["--quiet", "-q"]),
    (
        "verbose",
        int,
        0,
        {"names": ["--verbose", "-v"], "count": True, "help": "Lists uncut; -vv adds the traceback of an error."},
    ),
    text("report", "FILE.html", "The result as one self-contained page."),
    text("color", "auto|always|never", "Colour; NO_COLOR turns it off too.", choices=("auto", "always", "never")),
)


def takes(*groups: Group) -> Callable[[F], F]:
    """Name the groups of a verb's function; reporting comes with all. A later group's option replaces an earlier's."""

    def decorate(function: F) -> F:
        options = {option.name: option for group in (*groups, REPORTING) for option in group}
        function.options = tuple(options.values())  # type: ignore[attr-defined]
        return function

    return decorate


def flat(function: Any) -> Callable[..., Any]:
    """A verb's function as typer reads it: one parameter an option, handed on as the mapping `given`."""
    signature = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values() if p.name != "given"]
    options: Group = function.options

    def verb(**values: Any) -> Any:
        given = {option.name: values.pop(option.name) for option in options}
        return function(**values, given=given)

    verb.__name__, verb.__doc__ = function.__name__, function.__doc__
    verb.__annotations__ = {p.name: p.annotation for p in (*own, *options)}
    verb.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    return verb
