"""Computed tensors against NumPy: any range, any layout of the inputs, more than one thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import InternalError, SourceChanged
from ckpt_tool.options.reading import Reading
from ckpt_tool.run.computed import ComputedTree, Input, Recipe
from ckpt_tool.sources.opening import open_source


@dataclass(frozen=True, eq=False)
class Mixed(Recipe):
    """a + weight * b"""

    weight: float

    def values(self, read: Any, start: int, stop: int) -> Any:
        a = read(0, start, stop).astype(np.float32)
        b = read(1, start, stop).astype(np.float32)
        return a + np.float32(self.weight) * b


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[Path, np.ndarray[Any, Any], Any]:
    a = np.arange(60, dtype=np.float32).reshape(6, 10)
    b = np.arange(60, 120).astype(np.float16).reshape(6, 10)
    inputs = []
    for name, array in (("a", a), ("b", b)):
        safetensors.numpy.save_file({"w": array}, tmp_path / f"{name}.safetensors")
        opened = open_source(str(tmp_path / f"{name}.safetensors"), Reading())
        inputs.append(Input(opened.catalog.tensors[TensorKey("w")], opened.tree))

    def tree(weight: float) -> ComputedTree:
        return ComputedTree("mixed", [Mixed(TensorKey("w"), (6, 10), tuple(inputs), f"mixed {weight}", weight)])

    return tmp_path, a + np.float32(0.5) * b.astype(np.float32), tree


def test_every_range_of_bytes_is_that_of_the_line(mixed: Any) -> None:
    _, want, make = mixed
    tree = make(0.5)
    line = want.tobytes()
    for offset in range(0, 240, 7):
        for nbytes in (0, 1, 5, 16, 240 - offset):
            n = min(nbytes, 240 - offset)
            assert tree.read("model/w", offset, n) == line[offset : offset + n]
    with pytest.raises(InternalError):
        tree.read("model/w", 239, 2)
    tree.close()


def test_threads_read_at_once(mixed: Any) -> None:
    _, want, make = mixed
    tree = make(0.5)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda k: tree.read("model/w", 4 * k, 4), range(60)))
    assert b"".join(parts) == want.tobytes()
    tree.close()


def test_the_identity_is_that_of_the_parameters_and_the_files(mixed: Any) -> None:
    folder, _, make = mixed
    assert make(0.5).identity("model/w") == make(0.5).identity("model/w") == make(0.5).identity_by_name("model/w")
    assert make(0.5).identity("model/w") != make(0.25).identity("model/w")
    before = make(0.5).identity("model/w")
    tree = make(0.5)
    data = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").unlink()
    (folder / "b.safetensors").write_bytes(data)
    assert tree.identity_by_name("model/w") != before
    with pytest.raises(SourceChanged):
        tree.read("model/w", 0, 240)
        tree.identity("model/w")
