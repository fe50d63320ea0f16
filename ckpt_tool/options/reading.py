"""The options for reading a source, for listing its contents and for showing a result: all that `ckpt inspect` has."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tool.core.progress import MODES
from ckpt_tool.formats.entry import entries
from ckpt_tool.option_kinds.statement import OPTIONS, READING, REPORTING
from ckpt_tool.option_kinds.values import count, output, patterns, positive, text, words

FORMATS = tuple(entries())
# Other words that people type for a format -> its name.
CALLED = {word: entry.name for entry in entries().values() for word in entry.called}


@dataclass(frozen=True, slots=True)
class Reading:
    """How a source is read. None and False: not given."""

    from_format: str | None = READING.choice(
        "Read SRC as this format instead of detecting it: --from dcp.",
        FORMATS,
        "FORMAT",
        names=("--from",),
        meant=CALLED,
    )
    follow_symlinks: bool = READING.flag(
        "Follow links that lead out of SRC. Links inside it, and those of a Hugging Face cache, are always followed."
    )
    lenient: bool = READING.flag("Warn instead of refusing where no value depends on it.")
    require_checksums: bool = READING.flag("Refuse records that have no checksum.")
    prefer: str | None = READING.option(
        "Choose between two sets of files in one folder, by format, index, file next to an index, `files` (without "
        "their index) or variant: --prefer fp16; or between two models in one file, by their level: --prefer teacher.",
        text,
        "WHICH",
    )
    replica_policy: str | None = READING.choice(
        "Choose what happens where replicas differ: an error (the default), or the first is taken.", ("error", "first")
    )
    family: str | None = READING.option("Name the model family where the files don't: --family llama.", text, "NAME")
    config: str | None = READING.option(
        "Take the model's config.json from this file, or from this folder with its tokenizer: --config hf.",
        text,
        "FILE",
    )
    lora_alpha: float | None = READING.option(
        "Give the alpha of an adapter whose files don't state it: --lora-alpha 32.", positive, "ALPHA"
    )


@dataclass(frozen=True)
class Inspection:
    """`ckpt inspect`."""

    # match, states: narrow what is listed
    match: tuple[str, ...] = OPTIONS.option(
        "List only these tensors: '*.q_proj.*', re:EXPRESSION or @FILE. Repeatable.",
        patterns,
        "PATTERN",
        kind="values",
        default=(),
    )
    states: tuple[str, ...] = OPTIONS.option(
        "List only this state: --state model. Repeatable.", words, "S", kind="values", keyword="state", default=()
    )
    # Levels of the tree; None for as many as are easy to read.
    depth: int | None = OPTIONS.option(
        "Show this many levels of the tree of names: --depth 2. Default: as many as are easy to read.", count, "N"
    )
    placement: bool = OPTIONS.flag("Show who holds what: chunks, files, ranks.")
    security: bool = OPTIONS.flag("List every global that a pickle names.")
    stats: bool = OPTIONS.flag("Read the values too: min, max, mean, std, zeros, NaN, Inf.")
    anonymous: bool = OPTIONS.flag(
        "Hash the words of names that few models have; leave out paths, values, extras and notes: for a bug report."
    )


@dataclass(frozen=True, slots=True)
class Show:
    """How a result is shown. verbose: 0, 1 (lists uncut), 2 (tracebacks)."""

    json: bool = REPORTING.flag("Print one JSON document on stdout, and errors as JSON on stderr.")
    progress: str = REPORTING.choice(f"Show progress as {', '.join(MODES)}.", MODES, "MODE", default="auto")
    quiet: bool = REPORTING.flag("Leave out the plan, progress and notes.", names=("--quiet", "-q"))
    verbose: int = REPORTING.counter(
        "Show lists in full; -vv adds the traceback of an error.", names=("--verbose", "-v")
    )
    report: str | None = REPORTING.option(
        "Save the result as one page for a browser: --report out.html.", output, "FILE.html"
    )
    color: str = REPORTING.choice(
        "Choose colours; NO_COLOR turns them off too.", ("auto", "always", "never"), default="auto"
    )
