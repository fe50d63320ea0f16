"""Folders of deltas (slime's, ours) that lie, through the verbs that read: none takes them for a model, and `inspect`
reads their headers. What is in their frames is `patch`'s: `tests/deltas/test_deltas.py`.

`CASES` as in `index_cases`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SPEC = importlib.util.spec_from_file_location("delta_judge", Path(__file__).parents[1] / "deltas" / "judge.py")
assert _SPEC is not None and _SPEC.loader is not None
judge = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = judge
_SPEC.loader.exec_module(judge)

CASES: list[tuple[str, Callable[[Path], Path], int | dict[str, int], tuple[str, ...]]] = []


def row(name: str, want: int | dict[str, int], *words: str, **changes: Any) -> None:
    """changes: of the metadata; `index`: of the index; `digest`: what the file states for the tensor."""
    index, digest = changes.pop("index", {}), changes.pop("digest", "0" * 32)

    def make(folder: Path) -> Path:
        delta: Path = judge.delta(folder / "delta", {"w": b"frame"}, {"w": digest}, **changes)
        path = delta / judge.INDEX
        path.write_text(json.dumps(json.loads(path.read_text()) | index))
        return delta

    CASES.append((f"delta-{name}", make, want, words))


SHOWN = {"*": 3, "inspect": 0}
row("sound", SHOWN)
row("encoding", 3, delta_encoding=["xor"])
row("version", 3, version=-1)
row("digits", 3, version="9" * 5000)
row("digest", 3, digest="no hex")
row("unchanged", 3, index={"unchanged": ["w"]})
row(
    "archive",
    3,
    index={"archive": {"format": "dcp", "files": {"a": [1 << 60, [[1 << 60, "w"], [1, "v"]]]}, "whole": []}},
)
row("nested", 3, index={"archive": {"format": "dcp", "files": {"a": [5, [[5]]]}, "whole": []}})
