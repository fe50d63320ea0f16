"""How a long run reports its progress on stderr: a bar, lines, JSON lines, or nothing.

`auto` draws the bar on a terminal and a line every few seconds elsewhere. Workers call `advance` for every copy, so
it only adds under a lock and looks at the clock; drawing happens at most a few times a second. A screen that goes
away (closed stderr, a broken pipe) ends the reporting, never the run.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from ckpt_tool.core.progress import Progress, Silent
from ckpt_tool.report.plain import Look, is_terminal, look_of, render
from ckpt_tool.report.text import duration, show_text, size

PLAIN_INTERVAL = 5.0  # seconds between two lines
JSON_INTERVAL = 1.0
BAR_INTERVAL = 0.1
NUMBERS = 34  # columns that bytes, rate and time left take
BAR_PATIENCE = 0.3  # seconds before there is a bar: short runs don't flicker and don't load rich


def progress_of(
    mode: str,
    stream: TextIO | None,
    *,
    color: str = "auto",
    json_result: bool = False,
    everything: bool = False,
    announce: Callable[[Mapping[str, Any]], None] | None = None,
) -> Progress:
    """The progress that `--progress mode` means on this stream.

    json_result: the run prints JSON; then `auto` says nothing unless a person is watching. everything: notes and
    plans uncut (`-v`). announce: what shows a plan to a person, who is there to read it before the run; without it the
    stream shows it.
    """
    if mode == "auto":
        watched = is_terminal(stream) and os.environ.get("TERM", "") not in ("", "dumb")
        mode = "none" if json_result else "plain"
        if watched:
            mode = "tty"
    if mode == "none" or stream is None:
        return Silent()
    if mode == "json":
        return JsonLines(stream)
    kind = Bar if mode == "tty" else PlainProgress
    return kind(stream, look_of(stream, color), everything=everything, announce=announce)


class _Meter:
    """The common part of all reporters: byte count, clock, and a stream that may be closed by its reader."""

    interval = PLAIN_INTERVAL

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._lock = threading.RLock()
        self._done = 0
        self._total = 0
        self._what = self._file = ""
        self._began = self._drawn = 0.0
        self._running = False

    def start(self, total_bytes: int, what: str) -> None:
        """Begin a phase of `total_bytes`. what: its name as shown, such as "verifying"."""
        with self._lock:
            self._done = 0
            self._total = max(total_bytes, 0)
            self._what = what
            self._file = ""
            self._began = self._drawn = time.monotonic()
            self._running = True
            self._show_start()

    def at(self, file: str) -> None:
        """The file that is being read or written now: of several threads, of the one that began last."""
        self._file = file

    def advance(self, nbytes: int) -> None:
        """Count bytes as done; progress is shown at most once per `interval`. Threads may call this concurrently."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._drawn >= self.interval and self._running:
                self._drawn = now
                self._show_progress(now - self._began)

    def finish(self) -> None:
        """End the phase. A second call does nothing."""
        with self._lock:
            if self._running:
                self._running = False
                self._show_end(time.monotonic() - self._began)

    def _say(self, text: str) -> None:
        """Write a text at once; after an error nothing more is written, since the reader is gone."""
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None

    def _show_start(self) -> None:
        pass

    def _show_progress(self, elapsed: float) -> None:
        pass

    def _show_end(self, elapsed: float) -> None:
        pass


class PlainProgress(_Meter):
    """Plain lines: for logs, pipes and terminals that can't redraw."""

    def __init__(
        self,
        stream: TextIO,
        look: Look,
        *,
        everything: bool = False,
        announce: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        super().__init__(stream)
        self._look = look
        self._everything = everything
        self._announce = announce or self._show_plan

    def plan(self, document: Mapping[str, Any]) -> None:
        self._announce(document)

    def _show_plan(self, document: Mapping[str, Any]) -> None:
        from ckpt_tool.report.writing import before

        page = before(document, everything=self._everything)
        with self._lock:
            self._say(render(page, self._look))

    def note(self, message: str, *, detail: bool = False) -> None:
        if detail and not self._everything:
            return
        with self._lock:
            self._say(f"{self._look.paint('note:', 'dim')} {show_text(message, 2000)}\n")

    def _show_progress(self, elapsed: float) -> None:
        speed = self._done / elapsed if elapsed > 0 else 0.0
        file = f", {show_text(self._file, 200)}" if self._file else ""
        if not self._total:
            self._say(f"{self._what}: {size(self._done)}, {size(speed)}/s{file}\n")
            return
        time_left = duration((self._total - self._done) / speed) if speed and self._done <= self._total else "?"
        percent = min(100 * self._done // self._total, 100)
        progress = f"{percent}%, {size(self._done)} of {size(self._total)}"
        self._say(f"{self._what}: {progress}, {size(speed)}/s, {time_left} left{file}\n")

    def _show_end(self, elapsed: float) -> None:
        if elapsed >= self.interval:
            self._say(f"{self._what}: {size(self._done)} in {duration(elapsed)}\n")


class Bar(PlainProgress):
    """The bar of a terminal: bytes, speed, time left, the file, on one line. rich draws it and is loaded only for a run
    that takes a while."""

    interval = BAR_INTERVAL

    _draw: Callable[[int, str], None] | None = None
    _stop: Callable[[], None] | None = None
    _print: Callable[[str], None] | None = None

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.table import Column

        console = Console(
            file=self._stream,
            force_terminal=True,
            no_color=not self._look.colour,
            highlight=False,
            markup=False,
            width=self._look.width,
        )
        width = self._look.width or 80
        wide = width >= 70
        columns = [
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            *([BarColumn(bar_width=12 if width < 100 else 30)] if wide else []),
        ]
        columns += [DownloadColumn(), TransferSpeedColumn()]
        columns += [TimeRemainingColumn(compact=True)] if self._total else [TimeElapsedColumn()]
        if wide:  # what is left of the line, the end of a name cut off
            room = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            columns.append(TextColumn("{task.fields[file]}", style="dim", markup=False, table_column=room))
        bar = Progress(
            *columns,
            console=console,
            transient=True,
            expand=wide,
            refresh_per_second=8,
            speed_estimate_period=10,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        label = self._what if wide else self._what[: max(width - NUMBERS, 4)].rstrip()
        task = bar.add_task(label, total=self._total or None, file="")
        self._draw = lambda done, file: bar.update(task, completed=done, file=show_text(file, 200))
        self._stop = bar.stop
        self._print = lambda text: console.print(text, end="", soft_wrap=True)
        self._guard_drawing(bar.start)

    def _guard_drawing(self, call: Callable[[], None]) -> None:
        """Draw; when the terminal is gone, go on without."""
        try:
            call()
        except (OSError, ValueError):
            self._stream = None
            self._draw = self._stop = self._print = None

    def _show_progress(self, elapsed: float) -> None:
        if self._draw is None and self._stream is not None and elapsed >= BAR_PATIENCE:
            self._show()
        draw = self._draw
        if draw is not None:
            self._guard_drawing(lambda: draw(self._done, self._file))

    def _show_end(self, elapsed: float) -> None:
        """Take the bar away; the verdict that follows says how long it took."""
        if self._stop is not None:
            self._guard_drawing(self._stop)
        self._draw = self._stop = self._print = None

    def _say(self, text: str) -> None:
        printer = self._print
        if printer is None:
            super()._say(text)
        else:  # above the running bar
            from rich.text import Text

            self._guard_drawing(lambda: printer(Text.from_ansi(text)))  # type: ignore[arg-type]


class JsonLines(_Meter):
    """One JSON object a line, for programs that watch a run."""

    interval = JSON_INTERVAL

    def plan(self, document: Mapping[str, Any]) -> None:
        self._event("plan", **{key: value for key, value in document.items() if key != "schema_version"})

    def note(self, message: str, *, detail: bool = False) -> None:
        self._event("note", message=message)

    def _event(self, event: str, **fields: Any) -> None:
        with self._lock:
            self._say(json.dumps({"schema_version": 1, "event": event, **fields}) + "\n")

    def _show_start(self) -> None:
        self._event("start", what=self._what, total_bytes=self._total)

    def _show_progress(self, elapsed: float) -> None:
        file = {"file": self._file} if self._file else {}
        fields = {"bytes": self._done, "total_bytes": self._total, "elapsed_s": round(elapsed, 3), **file}
        self._event("progress", what=self._what, **fields)

    def _show_end(self, elapsed: float) -> None:
        self._event("finish", what=self._what, bytes=self._done, total_bytes=self._total, elapsed_s=round(elapsed, 3))
