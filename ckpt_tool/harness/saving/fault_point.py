"""Where a save can be made to die: a rank that reaches the named point kills itself, as a lost machine would.

    CKPT_HARNESS_KILL=files:0:8     rank 0 dies half through the files of step 8's checkpoint
    CKPT_HARNESS_KILL=snapshot:*:4  whichever rank first has copied its state of step 4

The one idea: SIGKILL, so nothing is flushed, closed or removed on the way out. Points, in the order of a save:
`snapshot` (the state is copied, nothing written), `spool` (half of the rank's own file), `rank-done` (before the rank's
marker), `files` (half of the format's files), `index` (before its last file), `complete` (before the final marker),
`rename` (before the checkpoint gets its name), `rotate` (before an old one is removed). Cost: one look at the
environment. What it does not do: faults in values (`harness.faults`).
"""

from __future__ import annotations

import os
import signal
from threading import local

VARIABLE = "CKPT_HARNESS_KILL"
POINTS = ("snapshot", "spool", "rank-done", "files", "index", "complete", "rename", "rotate")
_saving = local()


def saving(rank: int, step: int) -> None:
    """Say whose save the calling thread is at."""
    _saving.at = (str(rank), str(step))


def fault_point(point: str) -> None:
    """Die here if the environment says so."""
    requested = os.environ.get(VARIABLE, "").split(":")
    reached = getattr(_saving, "at", None)
    if (
        len(requested) == 3
        and reached
        and requested[0] == point
        and requested[1] in ("*", reached[0])
        and requested[2] in ("*", reached[1])
    ):
        os.kill(os.getpid(), signal.SIGKILL)
