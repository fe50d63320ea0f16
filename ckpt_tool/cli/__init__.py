"""The entry point: parse the command line, run the command, print its report, return the exit code.

This is the only place that catches unexpected exceptions. `run` never raises, and shows a traceback only with -vv.
Results go to stdout, everything else to stderr; with --json each of the two is one JSON document. The first signal
becomes an exception in the main thread, a second one ends the process immediately. What a killed run leaves behind is
what the same command resumes from.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from ckpt_tool.cli.plain import plain_job
from ckpt_tool.core.progress import SILENT, Checking, listening
from ckpt_tool.core.report_data import ReportData, collect_report_data
from ckpt_tool.errors import CkptError, InputError, InternalError, Interrupted, StorageError, wrap_os_error

if TYPE_CHECKING:
    from ckpt_tool.cli.verbs import VerbJob
    from ckpt_tool.options.reading import Show

PIPE_CLOSED = 141  # 128 + SIGPIPE: the exit code that a shell reports for a process killed by this signal


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP as an exception, raised where Ctrl-C would raise KeyboardInterrupt."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    The signal handlers of the process are restored afterwards. The error handling of stdout and stderr is not: both
    keep writing characters that their encoding lacks as backslash escapes.
    """
    _prepare_streams()
    before = _catch_signals()
    try:
        return _run_line(arguments)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_line(given: Sequence[str]) -> int:
    # From here on arguments are free of the secrets in URLs, so that no report or error can print them. The code that
    # opens a store asks for the secrets again (`core.urls`).
    arguments = list(given)
    if any(":" in argument or "%" in argument for argument in given):
        from ckpt_tool.core.urls import hide_in_argument

        arguments = [hide_in_argument(argument) for argument in given]
    job: VerbJob | None = None
    try:
        if not arguments and "_CKPT_COMPLETE" not in os.environ:
            from ckpt_tool.cli.parser import help_text

            _say(sys.stderr, help_text())
            return 2
        job = plain_job(arguments)
        if job is None:
            from ckpt_tool.cli.parser import parse

            parsed = parse(arguments)
            if isinstance(parsed, int):
                return parsed
            job = parsed
        return _run(job, arguments)
    except KeyboardInterrupt as stop:
        return _interrupted(stop, job, arguments)
    except BrokenPipeError:
        return PIPE_CLOSED
    except Exception as fault:
        error = _as_ours(fault)
        _tell(error, arguments, job, trace=fault)
        return error.exit_code


def _run(job: VerbJob, arguments: Sequence[str]) -> int:
    show = job.show
    if show.report:
        from ckpt_tool.report import html

        _check_report(show.report, job, {})
        html.check_target(show.report)
    once = _Shown(show)
    mode = "none" if show.quiet else show.progress
    progress = SILENT
    if mode != "none":
        from ckpt_tool.report.progress import progress_of

        announce = None if show.json else once.plan
        if not job.plans:
            announce = _nothing
        progress = progress_of(
            mode, sys.stderr, color=show.color, json_result=show.json, everything=show.verbose > 0, announce=announce
        )
    # The check above knows the paths on the command line. The sources of `apply` and of a merge config are known only
    # once there is a plan, so the check is repeated then.
    if show.report:
        progress = Checking(progress, partial(_check_report, show.report, job))
    try:
        with listening(progress), collect_report_data(bool(show.report)) as seen:
            document = job.run(progress)
    finally:
        progress.finish()  # also after an error: the bar must be erased before anything else is printed
    sound = job.sound(document)
    if show.json:
        _result(as_json(document))
    elif job.pages and all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout)):
        from pydoc import pager  # the standard library's: PAGER, less, or a plain print

        pager(_as_text(job, document, show, shown=False))
    elif job.line is not None:
        line = job.line(document)
        _result([f"{line}\n"] if line else [])
    elif not (show.quiet and job.writes):
        _result([_as_text(job, document, show, shown=once.done)])
    if show.report:
        _save_report(job, arguments, document, seen, show.report)
    fault = job.fault(document)
    if fault is not None:
        raise fault
    return 0 if sound else 1


class _Shown:
    """Prints the plan of a run on stdout before the first byte is written, as the first part of the result.

    `done` is True once it was printed; the final report then omits the plan.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self.done = False

    def plan(self, document: Mapping[str, Any]) -> None:
        """Print the plan in `document`."""
        from ckpt_tool.report.plain import look_of, render
        from ckpt_tool.report.writing import before

        self.done = True
        text = render(before(document, everything=self._show.verbose > 0), look_of(sys.stdout, self._show.color))
        try:
            _result([f"{text}\n"])
        except (OSError, StorageError):  # a closed pipe or a full disk: reported when the final result is printed
            return


def _nothing(document: Mapping[str, Any]) -> None:
    """Print no plan in advance: with `--dry-run` and `--plan` the plan is the result and is printed at the end."""


def _as_text(job: VerbJob, document: dict[str, Any], show: Show, *, shown: bool) -> str:
    """The result as text for people. shown: the plan of this run was already printed, so it is omitted here."""
    from ckpt_tool.report.plain import look_of, render

    if shown:
        from ckpt_tool.report.writing import after

        return render(after(document, everything=show.verbose > 0, shown=True), look_of(sys.stdout, show.color))
    page = job.page(document, show.verbose > 0)
    last = page.verdict()
    return render(last if show.quiet and last.blocks else page, look_of(sys.stdout, show.color))


def as_json(document: Mapping[str, Any]) -> Iterator[str]:
    """The document as one line of JSON, in pieces: those of a `Listing` are generated lazily.

    The text is ASCII only. A NaN or an infinity, which JSON lacks, is written as a string: "nan", "inf", "-inf".
    """
    from ckpt_tool.core.listing import Listing

    values = [(_dumps(key), value if isinstance(value, Listing) else _dumps(value)) for key, value in document.items()]
    mark = "{"
    for key, value in values:
        yield f"{mark}{key}: "
        yield from value.json() if isinstance(value, Listing) else (value,)
        mark = ", "
    yield "{}\n" if mark == "{" else "}\n"


def _dumps(value: Any) -> str:
    import json

    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def _check_report(path: str, job: VerbJob, document: Mapping[str, Any]) -> None:
    """Raise if the report would be inside a source or an output of the command line or of the plan `document`."""
    from ckpt_tool.storage.output.destination import check_beside

    source = document.get("source") or {}
    target = document.get("target") or {}
    read = source.get("paths") or [source.get("path")]
    check_beside(path, "--report", (*job.sources, *filter(None, read)), (*job.outputs, target.get("path")))


def _save_report(job: VerbJob, arguments: Sequence[str], document: dict[str, Any], seen: ReportData, path: str) -> None:
    """Save the HTML report. Its head shows the command (without the secrets of URLs), the time and the version."""
    import shlex
    import time

    from ckpt_tool import __version__
    from ckpt_tool.report import html
    from ckpt_tool.report.picture import picture

    html.save(
        job.page(document, True),
        path,
        title=f"ckpt {job.verb}",
        facts=(
            ("command", shlex.join(["ckpt", *arguments])),
            ("date", time.strftime("%Y-%m-%d %H:%M:%S %z")),
            ("made by", f"ckpt {__version__}"),
        ),
        data=picture(job.verb, document, seen),
    )


def _result(pieces: Iterable[str]) -> None:
    """Write the result to stdout. Raises StorageError if it can't be written completely, as behind `> file` on a full
    disk: the exit code must not claim success then."""
    if sys.stdout is None:
        return
    try:
        _write_whole(sys.stdout, pieces)
    except BrokenPipeError:
        raise
    except OSError as e:
        raise wrap_os_error(e, "standard output", "writing the result") from e


def _write_whole(stream: TextIO, pieces: Iterable[str]) -> None:
    """Write every byte, also where the operating system accepts only a part of it.

    With PYTHONUNBUFFERED a partial write silently drops the rest, and a non-blocking stdout (as some parent processes
    leave it) raises BlockingIOError in the middle.
    """
    binary = getattr(stream, "buffer", None)
    if binary is None:
        stream.writelines(pieces)
        stream.flush()
        return
    stream.flush()
    for text in pieces:
        data = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
        while data:
            try:
                taken = binary.write(data)
            except BlockingIOError as e:
                taken = e.characters_written
            data = data[taken or 0 :]
            if not taken:
                select.select([], [binary], [])  # waits until the pipe or terminal accepts more
    binary.flush()


def _say(stream: Any, text: str) -> None:
    """Write a message; a closed or missing stream is ignored, since there is no other place to report it."""
    try:
        if stream is not None:
            stream.write(text)
            stream.flush()
    except (OSError, ValueError):
        pass


def _prepare_streams() -> None:
    """Make stdout and stderr write characters that their encoding lacks as backslash escapes.

    Otherwise a tensor name or path in another script would raise UnicodeEncodeError on an ASCII terminal.
    """
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _catch_signals() -> dict[int, Any]:
    """Install handlers for SIGINT, SIGTERM and SIGHUP; returns the previous handlers by signal number.

    The first signal raises in the main thread, so that the command ends through its normal clean-up; a second one ends
    the process immediately. An ignored signal (SIGHUP under nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    caught: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        """Raise the exception of the signal; for the second signal, exit with 128 + its number (SIGHUP: 143)."""
        if caught:
            os._exit(130 if number == signal.SIGINT else 143)
        caught.append(number)
        raise (KeyboardInterrupt if number == signal.SIGINT else Terminated)(number)

    before = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    return before


def _interrupted(stop: KeyboardInterrupt, job: VerbJob | None, arguments: Sequence[str]) -> int:
    number = int(signal.SIGTERM) if isinstance(stop, Terminated) else int(signal.SIGINT)
    hint = "the same command resumes" if job is not None and job.writes else "nothing was written"
    error = Interrupted(f"interrupted by {signal.Signals(number).name}", signal=number, hint=hint)
    error.place = f"ckpt {job.verb}" if job is not None else "ckpt"
    _tell(error, arguments, job, trace=stop)
    return error.exit_code


def _is_folder_gone() -> bool:
    """Was the current working directory deleted after this process was started?"""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _as_ours(fault: Exception) -> CkptError:
    """Any exception as a CkptError. Unexpected ones become InternalError E7000 (exit code 70), a bug to report."""
    if isinstance(fault, CkptError):
        return fault
    if isinstance(fault, MemoryError):
        return StorageError("out of memory", code="E2503", hint="pass a smaller --memory or fewer --threads")
    if isinstance(fault, OSError):
        if _is_folder_gone():
            return StorageError(
                "the current folder does not exist any more, so that no relative path leads anywhere",
                code="E3063",
                path=os.environ.get("PWD"),
                hint="cd to a folder that exists, or pass absolute paths",
            )
        named = fault.filename if isinstance(fault.filename, str | bytes) else ""  # it may be a descriptor, an int
        return wrap_os_error(fault, os.fsdecode(named), "the operation")
    place = _last_frame(fault)
    return InternalError(
        f"a bug of ours: {type(fault).__name__}: {fault}",
        code="E7000",
        place=place,
        hint="please report it with the output of the same command and -vv; nothing was committed",
    )


def _last_frame(fault: BaseException) -> str:
    """The innermost frame of the traceback that is in this package, as `ckpt_tool/plan/plan.py, line 12`."""
    place = ""
    trace = fault.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if f"{os.sep}ckpt_tool{os.sep}" in name:
            place = f"ckpt_tool{os.sep}{name.rpartition(f'{os.sep}ckpt_tool{os.sep}')[2]}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _tell(error: CkptError, arguments: Sequence[str], job: VerbJob | None, *, trace: BaseException) -> None:
    """Write the error to stderr, as text or as JSON.

    An InputError without a path gets the path of the source, if the command has exactly one.
    """
    from ckpt_tool.report.errors import as_json as error_json
    from ckpt_tool.report.errors import as_text
    from ckpt_tool.report.plain import look_of

    if isinstance(error, InputError) and not error.where() and job is not None and len(job.sources) == 1:
        error.path = job.sources[0]
    if job is not None and error.hint and "--" in error.hint:
        from ckpt_tool.cli.hinted_options import name_verbs
        from ckpt_tool.cli.verbs import VERBS

        options = {name: verb.option_names() for name, verb in VERBS.items()}
        error.hint = name_verbs(error.hint, job.verb, options)
    typed = list(arguments)[: list(arguments).index("--")] if "--" in arguments else list(arguments)
    if job is not None:
        as_document = job.show.json
        verbose = job.show.verbose
        color = job.show.color
    else:  # the command line could not be parsed, so look for the literal spellings of these options
        as_document = "--json" in typed
        verbose = 2 if "-vv" in typed else typed.count("-v") + typed.count("--verbose")
        color = next((c for c in ("always", "never") if f"--color={c}" in typed), "auto")
    if as_document:
        _say(sys.stderr, error_json(error))
        return
    look = look_of(sys.stderr, color)
    _say(sys.stderr, as_text(error, look, everything=verbose > 0, trace=trace if verbose > 1 else None))
