"""An error on a screen: three lines, what was found and wanted, where, and what to do.

    error[E0311]: header length is 9000 bytes, but the file has 12 after its first 8
      at: model.safetensors, byte 0
      hint: the download may be cut short: compare the file size with the source

Further faults of the same pass follow the first line, one each; a terminal's width breaks lines, not paths.
Under `--json` it is one JSON object instead. Names
are escaped here: an error may quote the file that caused it.
"""

from __future__ import annotations

import json
import traceback

from ckpt_tool.core.plurals import agree
from ckpt_tool.core.urls import hide_in_document, hide_in_message
from ckpt_tool.errors import CkptError
from ckpt_tool.report.page import Style
from ckpt_tool.report.plain import Look, wrap_line
from ckpt_tool.report.text import cells, count, show_text

FAULTS_SHOWN = 5  # further faults without -v
MESSAGE_LIMIT = 2000
# What helps where the error itself has no better idea, by exit code.
_HINTS = {
    2: "ckpt --help lists the verbs, ckpt VERB --help the options",
    3: "ckpt inspect shows what can be read of it",
    4: "ckpt inspect --security shows what the files ask for; nothing was run",
    5: "choose another output, or pass --force to replace it in one step",
    6: "run the command again when nothing writes to the source any more",
    7: "check the disk, its space and its permissions; the same command resumes",
    70: "please report this with the output of the same command and -vv",
    130: "the same command resumes",
    143: "the same command resumes",
}


def as_text(error: CkptError, look: Look, *, everything: bool = False, trace: BaseException | None = None) -> str:
    """The error as lines. everything: all faults, not the first few. trace: print this exception's traceback too."""
    hint = hint_of(error)
    lines = _line("", f"error[{error.code}]:", "bad", agree(error.message), look, "strong")
    listed = error.faults if everything else error.faults[:FAULTS_SHOWN]
    lines += [line for fault in listed for line in _line("  ", "also:", "plain", agree(fault), look)]
    if len(error.faults) > len(listed):
        lines.append(f"  also: {count(len(error.faults) - len(listed))} more; -v lists all")
    if error.where():
        lines.append(f"  {look.paint('at:', 'dim')} {show_text(hide_in_message(error.where()), MESSAGE_LIMIT)}")
    if hint:
        lines += _line("  ", "hint:", "name", hint, look)
    text = "\n".join(lines) + "\n"
    if trace is not None:
        raw = hide_in_message("".join(traceback.format_exception(trace)))
        text = "".join(f"{show_text(line, MESSAGE_LIMIT)}\n" for line in raw.splitlines()) + text
    return text


def _line(indent: str, label: str, style: Style, text: str, look: Look, text_style: Style = "plain") -> list[str]:
    """A label and what it says; on a terminal broken between words, below the label's end."""
    start = indent + label + " "
    safe_text = show_text(hide_in_message(text), MESSAGE_LIMIT)  # whole, before a URL is broken into lines
    first_line, *other_lines = wrap_line(safe_text, look, text_style, first=" " * cells(start), rest="    ")
    return [indent + look.paint(label, style) + first_line[len(start) - 1 :], *other_lines]


def as_json(error: CkptError) -> str:
    """The error as one line of JSON, ASCII only."""
    document = error.to_json()
    fields = {
        "message": agree(error.message),
        "hint": hint_of(error),
        "faults": [agree(fault) for fault in error.faults],
    }
    document["error"] = {**document["error"], **fields}  # type: ignore[dict-item]
    return json.dumps(hide_in_document(document)) + "\n"  # libraries of stores put URLs into their messages


def hint_of(error: CkptError) -> str:
    """What to do: the error's own idea, or what helps with its kind."""
    return agree(error.hint or "") or _HINTS.get(error.exit_code, "")
