"""How far quantised weights are from what they were: figures that come of the work itself, a weight at a time.

    {"name": "m.weight", "max_abs_error": 0.00122, "relative_norm": 0.0267}
    relative_norm = |w - dequantised| / |w|, Euclidean; 0 where all of w is zero

A grain is 2^18 elements of a weight's line. Whoever quantises notes each grain that he had whole; a grain that is noted
twice counts once, and one that no thread had whole, or that an interrupted run had done, is quantised again at the end
(`missing`). So the figures are those of all elements, whatever the threads; they are given with six digits, below which
the order of the sums shows. Memory: 24 bytes a grain while a weight is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import sqrt

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.quantised.nearest_codes import Error

GRAIN = 1 << 18  # elements


class Figures:
    """Those of one weight. lead: the tensor that holds its codes. For many threads."""

    def __init__(self, name: str, lead: str, numel: int) -> None:
        self.name = name
        self.lead = lead
        self.numel = numel
        self._grains: dict[int, Error] = {}
        self._total: Error | None = None
        self._lock = threading.Lock()

    def note(self, start: int, stop: int, error: Error) -> None:
        """The error of elements [start, stop), which lie in one grain."""
        if start % GRAIN or stop != min(start + GRAIN, self.numel):
            return
        with self._lock:
            if self._total is None:
                self._grains[start // GRAIN] = error
                if len(self._grains) == ceil_div(self.numel, GRAIN):
                    self._total = sum((self._grains[n] for n in sorted(self._grains)), Error())
                    self._grains.clear()

    def missing(self) -> Iterator[tuple[int, int]]:
        """The grains that are not noted yet."""
        if self._total is None:
            for number in range(ceil_div(self.numel, GRAIN)):
                if number not in self._grains:
                    yield number * GRAIN, min((number + 1) * GRAIN, self.numel)

    def document(self) -> dict[str, object]:
        """The entry of the report, once nothing is missing."""
        total = self._total or Error()
        ratio = sqrt(total.squares / total.of) if total.of else 0.0
        return {"name": self.name, "max_abs_error": _digits(total.most), "relative_norm": _digits(ratio)}


def _digits(value: float) -> float:
    return float(f"{value:.6g}")
