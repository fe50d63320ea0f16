"""Quantisation errors: how far quantised weights are from the originals, measured while they are quantised.

    {"name": "m.weight", "max_abs_error": 0.00122, "relative_norm": 0.0267}
    relative_norm = |w - dequantised| / |w|, Euclidean; 0 where all of w is zero

Errors are summed over grains, runs of 2^18 elements of a flattened weight. A thread reports each grain that it
quantised completely; a grain that is reported twice counts once. A grain that no thread had completely, or that an
interrupted run had done, is quantised again at the end (`missing`). So the figures cover all elements for any number of
threads; they have six digits, since further digits depend on the order of the sums. Memory: 24 bytes a grain while a
weight is being quantised.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import sqrt

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.quantised.nearest_codes import Error

GRAIN = 1 << 18  # elements


class Figures:
    """The errors of one weight. lead: the tensor that holds its codes. Safe to use from many threads."""

    def __init__(self, name: str, lead: str, numel: int) -> None:
        self.name = name
        self.lead = lead
        self.numel = numel
        self._grains: dict[int, Error] = {}
        self._total: Error | None = None
        self._lock = threading.Lock()

    def note(self, start: int, stop: int, error: Error) -> None:
        """Add the error of elements [start, stop), all in one grain; it is ignored unless they are all of the grain."""
        if start % GRAIN or stop != min(start + GRAIN, self.numel):
            return
        with self._lock:
            if self._total is None:
                self._grains[start // GRAIN] = error
                if len(self._grains) == ceil_div(self.numel, GRAIN):
                    self._total = sum((self._grains[n] for n in sorted(self._grains)), Error())
                    self._grains.clear()

    def missing(self) -> Iterator[tuple[int, int]]:
        """The ranges of elements whose error has not been added yet."""
        if self._total is None:
            for number in range(ceil_div(self.numel, GRAIN)):
                if number not in self._grains:
                    yield number * GRAIN, min((number + 1) * GRAIN, self.numel)

    def document(self) -> dict[str, object]:
        """The weight's entry in the report. Complete only if nothing is `missing`."""
        total = self._total or Error()
        ratio = sqrt(total.squares / total.of) if total.of else 0.0
        return {"name": self.name, "max_abs_error": _digits(total.most), "relative_norm": _digits(ratio)}


def _digits(value: float) -> float:
    return float(f"{value:.6g}")
