"""Few heaps for the many threads that talk to a store, which keep what they have for the next answer.

glibc gives each thread a heap of its own, up to eight a core, and each keeps what its thread has freed: answers of
4 MiB that come in sixteen threads stay in as many heaps. With two the same reading takes 122 MiB in place of 169, and
no more CPU (2026-11-25, 1 GiB). But a heap returns free memory at its end to the kernel, and the pages of every answer
are then mapped again, 100,000 in a GiB: 0.3 s of CPU. With 24 MiB kept there, 20,000. That setting alone would make
malloc map each answer by itself (0.7 s), so `M_MMAP_THRESHOLD` goes with it. Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
import os

_ARENA_MAX = -8
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_SETTINGS = (  # parameter, value, the variable by which a user says otherwise
    (_ARENA_MAX, 2, "MALLOC_ARENA_MAX"),
    (_TRIM_THRESHOLD, 24 << 20, "MALLOC_TRIM_THRESHOLD_"),
    (_MMAP_THRESHOLD, 32 << 20, "MALLOC_MMAP_THRESHOLD_"),
)


def few_arenas() -> None:
    """Have threads share two heaps from now on, that keep what is freed. Nothing where a variable of glibc's says
    otherwise, or where malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value, variable in _SETTINGS:
        if variable not in os.environ:
            mallopt(parameter, value)
