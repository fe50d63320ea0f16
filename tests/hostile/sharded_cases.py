"""Saves of our own format `sharded` that were edited. `CASES` as in `index_cases`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "fixtures/sharded/llama_tp4_pp2"


def shape_of_objects(folder: Path) -> Path:
    """An object stands for a size in the index."""
    made = folder / "model"
    shutil.copytree(SOURCE, made)
    index = json.loads((made / "ckpt.index.json").read_text())
    index["tensors"]["model"]["model.layers.1.self_attn.q_proj.weight"]["shape"][1] = {"a": 8}
    (made / "ckpt.index.json").write_text(json.dumps(index))
    return made


CASES: list[tuple[str, Callable[[Path], Path], int, tuple[str, ...]]] = [("S1", shape_of_objects, 3, ("/shape/1",))]
