"""Folders as people keep them inside a checkpoint: deep, hidden, named almost or exactly as ours, empty, linked.

    add_files(step, 7)      -> the paths that were made, relative to the step

Each tree is made of a number alone. Names that are exactly ours are made only when they are asked for.
"""

from __future__ import annotations

import random
from pathlib import Path

# Names of folders and files that resemble those of an interrupted run, and are a user's own.
RESEMBLING = (
    "weights.ckpt-partial",
    ".ckpt-partial",
    ".ckpt-journal.txt",
    ".ckpt-journal-of-mine",
    "old.ckpt-removed",
    ".old.12.ckpt-removed",
    ".git-like",
    ".hidden",
)
# Names that an interrupted run of ours leaves behind.
OURS = (".out.ckpt-partial", ".step-9.3f9c21aa.ckpt-removed")
PLAIN = ("logs", "src", "eval", "a b", "x.y")
DEEPEST = 28  # folders above a file


def add_files(root: Path, seed: int, *, count: int = 12) -> list[str]:
    """Make files in folders of such names; returns their paths below `root`."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        depth = rng.choice((0, 1, 2, 6, 7, 8, 12, DEEPEST))
        folders = [rng.choice(RESEMBLING + PLAIN) + str(number) * (level == 0) for level in range(depth)]
        name = rng.choice((*RESEMBLING, "notes.txt", "model.bin.bak", ".env")) + str(number)
        path = root.joinpath(*folders, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.choice((0, 1, 700))))
        made.append(path.relative_to(root).as_posix())
    return made
