"""What the library of compiled loops is built from, and whether it still is: in a clone every run asks.

Imports little, as a run waits for it; `build.py` has the compiler. A wheel goes without both."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIBRARY = "libckpt_loops.so"
SOURCES = ("blocks.c", "floats.c", "rows.c", "twins.c", "paths.c")
HEADERS = ("arrays.h",)


def source_digest(folder: Path = FOLDER) -> str:
    """SHA-256 of the sources and of build.py, whose flags decide the result as well."""
    digest = hashlib.sha256()
    for name in (*SOURCES, *HEADERS, "build.py"):
        text = (folder / name).read_bytes()
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def is_current(library: Path, folder: Path = FOLDER) -> bool:
    """Was this library built from the sources as they are? It holds their digest."""
    try:
        return source_digest(folder).encode() in library.read_bytes()
    except OSError:
        return False
