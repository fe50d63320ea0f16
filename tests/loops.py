"""The library of compiled loops for tests: that of an installed copy, or built next to the sources of this tree."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

import pytest

from ckpt_tool.compiled import loading


def opened_loops() -> loading.Opened:
    """The library, built where it is missing or older than its sources; one of several processes builds it. Skips where
    it can't be had."""
    if (loading.FOLDER / "build.py").exists():
        from ckpt_tool.compiled import build, sources

        target = sources.FOLDER / sources.LIBRARY
        lock = Path(tempfile.gettempdir(), f"ckpt-loops-{sources.source_digest()[:16]}.lock")
        with open(lock, "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if not sources.is_current(target):
                try:
                    build.build(target)
                except build.NotBuilt as e:
                    pytest.skip(f"the compiled loops can't be built: {e}")
        forget()
    opened = loading.opened_library(loading.FOLDER)
    if opened.library is None:
        pytest.skip(f"no compiled loops: {opened.refusal}")
    return opened


def choice_of(opened: loading.Opened, path: str) -> loading.Choice:
    """That path of the library; skips where this processor can't run it."""
    if path not in opened.paths:
        pytest.skip(f"this processor, or the library, has no {path}: only {', '.join(opened.paths)}")
    return loading.Choice(path, "a test wants it", opened.library)


def forget() -> None:
    """What was found is looked for again."""
    loading.opened_library.cache_clear()
    loading._choose.cache_clear()
