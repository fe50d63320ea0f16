"""What a person may keep in or beside a checkpoint, made of a seed: names almost like its own, links, trees.

    keep_something(step, Random(7), own=["model.safetensors"])   -> "model.safetensors~", with some bytes

Each thing is one that no writer makes, so no verb may remove it. Names that trainers do write in such a folder are not
made: `rng_state_3.pth` is a rank's, whoever put it there.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from random import Random

from odd_folders import OURS, RESEMBLING, add_files

EMPTY = "empty folder"
PLAIN = ("notes.txt", "train.py", "loss.csv", "todo", "résumé.md", "a b.json", "-rf", "weights.bak", ".env", "plot.png")
MARKED = (".bak", "~", ".orig", ".old", ".1", " (copy)", ".md5", ".part", ".swp")
BEFORE = ("my_", "old-", ".", "_", "copy of ", "#")
INSERTED = ("-best", ".v2", " 2", "-mine", ".notes")
KINDS = ("like", "like", "like", "plain", "link", "hard link", EMPTY, "tree", "pipe", "ours", "nested")
INNER = ("old", "backup 1", ".trash", "x/y/z", "0_old", "2024-01-01")


def name_like(rng: Random, own: list[str]) -> str:
    """A path almost like one of the checkpoint's own."""
    path = rng.choice(own)
    folder, name = os.path.split(path)
    stem, dot, suffix = name.partition(".")
    choice = rng.randrange(6)
    if choice == 0:
        name += rng.choice(MARKED)
    elif choice == 1:
        name = rng.choice(BEFORE) + name
    elif choice == 2:
        name = stem + rng.choice(INSERTED) + dot + suffix
    elif choice == 3:
        name = f"{stem}{dot}{suffix[:-1]}" if len(suffix) > 1 else f"{name}{name}"
    elif choice == 4:
        folder = os.path.join(folder, rng.choice(INNER))
    else:
        folder = os.path.join(rng.choice(INNER), folder)
    return os.path.join(folder, name)


def bytes_of(rng: Random, own: list[Path]) -> bytes:
    """Nothing, noise, a text, or what a file of the checkpoint has."""
    choice = rng.randrange(5)
    if choice == 0:
        return b""
    if choice == 1 and own:
        return rng.choice(own).read_bytes()[: 1 << 16]
    if choice == 2:
        return b'{"mine": true}\n'
    return rng.randbytes(rng.choice((1, 8, 700)))


def keep_something(root: Path, rng: Random, own: list[str], checkpoint: Path, elsewhere: Path) -> str:
    """Put one thing into a folder that holds the files `own`; what it is. checkpoint: another that a person may keep
    there. elsewhere: a folder for what links lead to."""
    kind = rng.choice(KINDS)
    if kind == "tree":
        add_files(root, rng.randrange(10**6), count=rng.choice((1, 3, 12)))
        return kind
    if kind == "nested":
        shutil.copytree(checkpoint, root / f"{rng.choice(INNER)}/run-{rng.randrange(99)}")
        return kind

    while True:
        if kind == "ours":
            name = f"{rng.choice((*OURS, *RESEMBLING))}/chapter{rng.randrange(9)}.tex"
        elif kind == "plain":
            name = rng.choice(PLAIN)
        else:
            name = name_like(rng, own)
        path = root / name
        blocked = any(part.exists() and not part.is_dir() for part in path.parents)
        if not blocked and not os.path.lexists(path):
            break

    path.parent.mkdir(parents=True, exist_ok=True)
    files = [root / each for each in own if (root / each).is_file()]
    if kind == "link":
        path.symlink_to(rng.choice((elsewhere, Path("nowhere"), *files[:1])))
    elif kind == "hard link":
        target = elsewhere / f"kept{rng.randrange(10**9)}"
        target.write_bytes(bytes_of(rng, files))
        os.link(target, path)
    elif kind == EMPTY:
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(bytes_of(rng, files))
    return f"{kind}: {re.sub('[^ -~]', '?', name)}"
