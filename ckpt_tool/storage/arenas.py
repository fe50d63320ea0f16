"""Few heaps for the many threads that talk to a store.

glibc gives each thread a heap of its own, up to eight a core, and each keeps what its thread has freed: answers of
4 MiB that come in sixteen threads stay in as many heaps. With two the same reading takes 122 MiB in place of 169, and
no more CPU (2026-11-25, 1 GiB). Source: mallopt(3), M_ARENA_MAX.
"""

from __future__ import annotations

import ctypes
import os

_ARENA_MAX, _FEW = -8, 2


def few_arenas() -> None:
    """Have threads share two heaps from now on. Nothing where MALLOC_ARENA_MAX says how many, or where malloc is not
    glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_ARENA_MAX, _FEW)
