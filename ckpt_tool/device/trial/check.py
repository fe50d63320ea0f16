"""`ckpt kernels check`: does this device do what the kernels say? Random work with a poisoned output, held against NumPy.

Each trial makes random bytes and a random list (any alignment, any run, boxes of nothing among them), fills the output and all
around it with a pattern, lets the kernel work, and compares the whole output, gaps included, with what the CPU makes of the same
list: strided assignments, xxhash, `run.compute.cast`, `run.compare`. The seed decides everything: a finding is found again.

    trials(device, cases=200, seed=0)
    [Outcome(kernel="box_copy", cases=200, nbytes=31457280, seconds=1.9, findings=()), ...]

Cost: a second or two a kernel. It does not look for races among blocks: compute-sanitizer does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from ckpt_tool.device.memory import Device
from ckpt_tool.device.trial import boxes as trial_boxes
from ckpt_tool.device.trial import values as trial_values
from ckpt_tool.errors import StorageError

Trial = Callable[[Device, np.random.Generator], tuple[int, str]]  # bytes of work, what is wrong ("" for nothing)

TRIALS: dict[str, Trial] = {
    "box_copy": trial_boxes.box_copy,
    "box_transpose": trial_boxes.box_transpose,
    "box_cast": trial_values.box_cast,
    "box_dequantise": trial_values.box_dequantise,
    "digest": trial_values.digest,
    "compare": trial_values.compare,
    "adamw_ema": trial_values.adamw_ema,
    "ema_swap": trial_values.ema_swap,
}
MOST_FINDINGS = 5  # a kernel: after so many it is broken enough


class Outcome(NamedTuple):
    """What the trials of one kernel came to."""

    kernel: str
    cases: int
    nbytes: int
    seconds: float
    findings: tuple[str, ...]


def trials(device: Device, *, cases: int, seed: int, only: Iterable[str] = ()) -> list[Outcome]:
    """Run the trials of all kernels, or of those in `only`. A call that fails is a finding, not an error."""
    wanted = set(only) or set(TRIALS)
    return [_outcome(device, name, cases, seed) for name in TRIALS if name in wanted]


def _outcome(device: Device, name: str, cases: int, seed: int) -> Outcome:
    began, nbytes, findings, done = time.monotonic(), 0, [], 0
    for case in range(cases):
        rng = np.random.default_rng([seed, case, *name.encode()])
        done += 1
        try:
            moved, wrong = TRIALS[name](device, rng)
        except StorageError as e:  # the device is lost with the first: nothing after it says anything
            findings.append(f"case {case} of seed {seed}: {e.message}")
            break
        nbytes += moved
        if wrong:
            findings.append(f"case {case} of seed {seed}: {wrong}")
        if len(findings) >= MOST_FINDINGS:
            break
    return Outcome(name, done, nbytes, round(time.monotonic() - began, 3), tuple(findings))
