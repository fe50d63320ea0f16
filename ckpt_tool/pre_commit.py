"""`ckpt audit` as a hook of pre-commit: audits each checkpoint that has a file among the changed files.

    python -I -m ckpt_tool.pre_commit models/a/config.json models/a/model.safetensors models/b.safetensors
        ckpt audit models/a     ckpt audit models/b.safetensors

A file in the same folder as a config.json, an index or numbered files belongs to that folder; any other is a checkpoint
of its own. A folder without weights is skipped: its config.json belongs to something else. Options precede the files.

The repository that is checked is not trusted: the hook runs isolated (`-I`), so that it does not import a json.py from
there, and a file whose name begins with a dash is treated as a file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ckpt_tool.cli import run
from ckpt_tool.formats.base import WEIGHT_SUFFIXES


def checkpoints_of(files: Sequence[str]) -> list[str]:
    """The folders with weights, and files that are checkpoints of their own, in the order of first mention."""
    found: dict[str, None] = {}
    for file in files:
        folder = os.path.dirname(file) or "."
        names = os.listdir(folder) if os.path.isdir(folder) else []
        weights = [name for name in names if name.endswith(WEIGHT_SUFFIXES)]
        if "config.json" in names or any(name.endswith(".index.json") for name in names):
            if weights or any(name.endswith(".index.json") for name in names):
                found[folder] = None
        elif file.endswith(WEIGHT_SUFFIXES):
            found[file] = None
    return list(found)


def main(line: Sequence[str]) -> int:
    """Audit each checkpoint and return the worst exit code, 0 if no changed file belongs to a checkpoint."""
    options = [word for word in line if word.startswith("-") and not os.path.lexists(word)]
    files = [word for word in line if word not in options]
    return max((run(["audit", *options, "--", path]) for path in checkpoints_of(files)), default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
