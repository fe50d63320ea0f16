"""Progress: what a long run shows a person while it goes, as a Protocol given to the executor.

A command never prints. It calls these five, from any thread; `report.progress` draws them (a bar, lines, JSON) and
`SILENT` swallows them:

    progress.plan(document)                 # before the first byte moves: the same keys that `--json` shows
    progress.start(total_bytes, "writing")
    progress.advance(nbytes)                # any thread, as often as wanted: costs well under a microsecond
    progress.note("tied lm_head written once")
    progress.finish()

`start` may be called again after `finish` for a second phase (write, then verify). One that also has a method
`at(file)` is called with the file that is being worked on (`working_on`): it is no part of the Protocol, so that a
caller's own progress need not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

MODES = ("auto", "tty", "plain", "json", "none")  # of `--progress`


class Progress(Protocol):
    """Where a command reports to. Thread-safe; never raises, whatever becomes of the screen."""

    def plan(self, document: Mapping[str, Any]) -> None:
        """Show what is about to happen: a writer's document as far as it is known (`plan`, `source`, `target`, ...)."""
        ...

    def start(self, total_bytes: int, what: str) -> None:
        """A phase begins that will move `total_bytes` bytes (0: unknown). what: a participle, "writing"."""
        ...

    def advance(self, nbytes: int) -> None:
        """`nbytes` more bytes are done."""
        ...

    def note(self, message: str, *, detail: bool = False) -> None:
        """One line that a person should know and that is no error. detail: who asks for more should (`-v`)."""
        ...

    def finish(self) -> None:
        """The phase is over, done or not. Harmless without a `start`."""
        ...


class Silent:
    """The progress of a caller who wants none: the Python face, `-q`, tests."""

    def plan(self, document: Mapping[str, Any]) -> None:
        pass

    def start(self, total_bytes: int, what: str) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def note(self, message: str, *, detail: bool = False) -> None:
        pass

    def finish(self) -> None:
        pass


SILENT: Progress = Silent()


def working_on(progress: Progress | None, file: str) -> None:
    """Report the file that is being read or written now to a progress that has `at`. As cheap as `advance`."""
    tell: Callable[[str], None] | None = getattr(progress, "at", None)
    if tell is not None:
        tell(file)


_listener = SILENT


@contextmanager
def listening(progress: Progress) -> Iterator[None]:
    """While it lasts, `aside` is a note of this progress. For the rim, around one command."""
    global _listener
    before = _listener
    _listener = progress
    try:
        yield
    finally:
        _listener = before


def aside(message: str) -> None:
    """A note from where no progress is at hand: a store that makes everyone wait, far below any command."""
    _listener.note(message)


class Checking:
    """A progress for which `check` looks at every plan before it is shown: what it raises ends the run there."""

    def __init__(self, progress: Progress, check: Callable[[Mapping[str, Any]], None]) -> None:
        self._progress = progress
        self._check = check
        self.start = progress.start
        self.advance = progress.advance
        self.note = progress.note
        self.finish = progress.finish
        self.at = partial(working_on, progress)

    def plan(self, document: Mapping[str, Any]) -> None:
        self._check(document)
        self._progress.plan(document)
