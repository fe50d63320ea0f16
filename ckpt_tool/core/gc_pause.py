"""Python's garbage collector, set aside while many small values are made that all live."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Reading and planning make a million small objects that hold no cycles; the collector would walk them again and
    again, which halves their speed."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
