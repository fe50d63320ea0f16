"""How a source is read, what is listed of it, and how any result is shown: all that `ckpt inspect` loads."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tool.core.progress import MODES
from ckpt_tool.formats.entry import entries
from ckpt_tool.options.statement import OPTIONS, READING, REPORTING
from ckpt_tool.options.values import count, output, patterns, positive, text, words

FORMATS = tuple(entries())
CALLED = {word: entry.name for entry in entries().values() for word in entry.called}  # what people type -> a format


@dataclass(frozen=True, slots=True)
class Reading:
    """How a source is read. None and False: not given."""

    from_format: str | None = READING.choice(
        "Take SRC for this format, don't detect.", FORMATS, "FORMAT", names=("--from",), meant=CALLED
    )
    follow_symlinks: bool = READING.flag(
        "Follow links that leave SRC; those inside it, and a Hugging Face cache's, always are."
    )
    lenient: bool = READING.flag("Warn where a strict reader refuses and no value depends on it.")
    require_checksums: bool = READING.flag("Refuse records that carry no checksum.")
    prefer: str | None = READING.option(
        "Which of two sets of files in one folder: a format, an index, a file next to an index, `files` (without their "
        "index), a variant (fp16).",
        text,
        "WHICH",
    )
    replica_policy: str | None = READING.choice(
        "Replicas that differ: an error, or take the first. Default error.", ("error", "first")
    )
    family: str | None = READING.option("The model family, where the files don't say.", text, "NAME")
    config: str | None = READING.option("A config.json, where the files hold none.", text, "FILE")
    lora_alpha: float | None = READING.option("The alpha of an adapter whose files don't say it.", positive, "ALPHA")


@dataclass(frozen=True)
class Inspection:
    """`ckpt inspect`. match, states: narrow what is listed. depth: levels of the tree, None for what is best seen."""

    match: tuple[str, ...] = OPTIONS.option(
        "Only these tensors: a glob, re:EXPRESSION or @FILE. Repeatable.",
        patterns,
        "PATTERN",
        kind="values",
        default=(),
    )
    states: tuple[str, ...] = OPTIONS.option(
        "Only this state. Repeatable.", words, "S", kind="values", keyword="state", default=()
    )
    depth: int | None = OPTIONS.option("Levels of the tree of names. Default: what is best seen.", count, "N")
    placement: bool = OPTIONS.flag("Who holds what: chunks, files, ranks.")
    security: bool = OPTIONS.flag("Every global that a pickle names.")
    stats: bool = OPTIONS.flag("Read the values: min, max, mean, std, zeros, NaN, Inf.")


@dataclass(frozen=True, slots=True)
class Show:
    """How a result is shown. verbose: 0, 1 (lists uncut), 2 (tracebacks)."""

    json: bool = REPORTING.flag("One JSON document on stdout; errors as JSON on stderr.")
    progress: str = REPORTING.choice(f"{', '.join(MODES)}.", MODES, "MODE", default="auto")
    quiet: bool = REPORTING.flag("No plan, no progress, no notes.", names=("--quiet", "-q"))
    verbose: int = REPORTING.counter("Lists uncut; -vv adds the traceback of an error.", names=("--verbose", "-v"))
    report: str | None = REPORTING.option("The result as one self-contained page.", output, "FILE.html")
    color: str = REPORTING.choice("Colour; NO_COLOR turns it off too.", ("auto", "always", "never"), default="auto")
