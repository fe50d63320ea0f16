"""The library of compiled loops: found, opened and its path chosen once a process.

    choice = chosen()
    choice.path         # "avx512", "avx2", "baseline", or "numpy" where no library is used
    choice.reason       # why, in words: `ckpt doctor` and -v show it

The library is located next to this file. A wheel brings it (`hatch_build.py`); in a clone
`python -m ckpt_tool.compiled.build` makes it. Where it is missing, is older than the sources next to it, or cannot be
loaded, NumPy does the work and the bytes are the same. Of the paths in it the best that the processor can run is taken;
CKPT_COMPILED names another one (tests, support) or none (`off`).

Cost: 1 ms; in a clone 2 ms more, for the hash of the sources.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import NamedTuple

from ckpt_tool import compiled
from ckpt_tool.errors import UsageError, near_misses

FOLDER = Path(__file__).resolve().parent
PATHS = ("avx512", "avx2", "baseline")
SETTINGS = (*PATHS, "off")
NUMPY = "numpy"
REASON_FILE = "no_library.txt"  # in a wheel that was built without a compiler: what was missing
BUILD_COMMAND = "python -m ckpt_tool.compiled.build"


class Opened(NamedTuple):
    """The library, or why there is none."""

    library: ctypes.CDLL | None
    paths: tuple[str, ...]  # those that this processor can run, best first
    compiler: str
    refusal: str  # "" where there is a library


class Choice(NamedTuple):
    """What this process uses."""

    path: str
    reason: str
    library: ctypes.CDLL | None  # None: NumPy


def chosen() -> Choice:
    """The path that CKPT_COMPILED names, or the best one. Raises UsageError: E3040 for a setting that is unknown, E3041
    for a path that this copy or this processor does not have."""
    return _choose(os.environ.get(compiled.VARIABLE, ""))


@functools.cache
def _choose(setting: str) -> Choice:
    if setting not in ("", *SETTINGS):
        raise UsageError(
            f"{compiled.VARIABLE}={setting} is unknown: want {', '.join(SETTINGS)}",
            code="E3040",
            place=compiled.VARIABLE,
            hint=near_misses(setting, SETTINGS)
            or "leave it unset: the best loops that this processor can run are used",
        )
    if setting == "off":
        return Choice(NUMPY, f"{compiled.VARIABLE}=off", None)

    opened = opened_library(FOLDER)
    if not setting and opened.refusal:
        return Choice(NUMPY, opened.refusal, None)
    if not setting:
        return Choice(opened.paths[0], "the best that this processor can run", opened.library)
    if setting not in opened.paths:
        raise UsageError(
            f"{compiled.VARIABLE}={setting} can't be used: "
            + (opened.refusal or f"here are {', '.join(opened.paths)}, by this processor and this library"),
            code="E3041",
            place=compiled.VARIABLE,
            hint="leave it unset; ckpt doctor says what there is",
        )
    return Choice(setting, f"{compiled.VARIABLE}={setting}", opened.library)


@functools.cache
def opened_library(folder: Path) -> Opened:
    """The library of a folder, loaded. Refused if it is missing, built from other sources, or can't be loaded."""
    path = folder / "libckpt_loops.so"
    refusal = _refusal_of(path)
    if refusal:
        return Opened(None, (), "", refusal)

    try:
        library = ctypes.CDLL(str(path))
        for name in ("ck_paths", "ck_compiler"):
            getattr(library, name).restype = ctypes.c_char_p
        paths = tuple(library.ck_paths().decode().split())
        compiler = library.ck_compiler().decode()
    except OSError as e:
        return Opened(None, (), "", f"the library can't be loaded: {e}")
    except AttributeError as e:
        return Opened(None, (), "", f"{path} is not the library of this version: {e}")

    refusal = "" if paths else "this processor lacks SSE4.2, which the least of the compiled loops need"
    return Opened(library if paths else None, paths, compiler, refusal)


def _refusal_of(path: Path) -> str:
    """Why this library is not to be loaded, "" where it is."""
    is_clone = (path.parent / "build.py").exists()
    if not path.exists():
        if is_clone:
            return f"the library is not built in this source tree: {BUILD_COMMAND} builds it"
        try:
            reason = (path.parent / REASON_FILE).read_text(encoding="utf-8").strip()
        except OSError:
            reason = "no library is installed"
        return f"this copy was built without compiled loops: {reason}"
    if is_clone:
        from ckpt_tool.compiled.sources import is_current

        if not is_current(path):
            return f"the library is older than its sources: {BUILD_COMMAND} builds it again"
    return ""
