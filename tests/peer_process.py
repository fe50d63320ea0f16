"""A program of a real system, within a limit: with it end its ranks and the compilers that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_GRACE = 10  # seconds between SIGINT, at which torch lets go of the lock of a build, and SIGKILL


def last_words(
    command: Sequence[object], limit: float, *, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """What the program printed, when it ended well. Fails, with its last lines, when it did not, or not within `limit`
    seconds; nothing that it started is left."""
    started = subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, **(environment or {})},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = started.communicate(timeout=limit)
        late = False
    except subprocess.TimeoutExpired:
        out = _stopped(started)
        late = True
    except BaseException:
        _stopped(started)
        raise
    lines = "\n".join(out.splitlines()[-25:])
    assert not late, f"no end within {limit:g} s; its last lines:\n{lines}"
    assert started.returncode == 0, lines
    return out


def _stopped(started: subprocess.Popen[str]) -> str:
    """End the program's whole group. Returns what it printed."""
    for sent in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return started.communicate(timeout=_GRACE)[0]
    return ""
