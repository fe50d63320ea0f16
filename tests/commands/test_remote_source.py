"""Sources behind URLs, through the verbs: the same bytes as from a local folder, and nothing read twice or for
nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import OutputExists, SourceChanged, UnsafeInput
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.opening import open_source

fsspec = pytest.importorskip("fsspec")
FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = [
    "dcp/tp2_dp2",
    "safetensors/hf_llama_sharded",
    "sharded/by_the_specification",
    "torch/training.pt",
    "orbax/dtypes_ocdbt_zarr3",
]


@pytest.fixture
def store() -> Iterator[Any]:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield memory
    memory.store.clear()


def upload(store: Any, source: Path) -> str:
    if source.is_file():
        store.pipe(f"/b/{source.name}", source.read_bytes())
        return f"memory://b/{source.name}"
    for path in source.rglob("*"):
        if path.is_file():
            store.pipe(f"/b/{path.relative_to(source)}", path.read_bytes())
    return "memory://b"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", CASES)
def test_a_store_and_a_folder_give_the_same_bytes(store: Any, tmp_path: Path, case: str) -> None:
    url = upload(store, FIXTURES / case)
    writing = Writing(to="sharded", degrees={"tp": 2}, threads=2)
    convert(url, str(tmp_path / "remote"), Reading(), writing, Silent())
    convert(str(FIXTURES / case), str(tmp_path / "local"), Reading(), writing, Silent())
    assert content(tmp_path / "remote") == content(tmp_path / "local")
    assert diff(url, str(FIXTURES / case), Reading(), progress=Silent())["equal"]


def test_inspect_of_a_store_fetches_headers_alone(store: Any, tmp_path: Path) -> None:
    weights = {f"layers.{i}.w1.weight": np.arange(1 << 18, dtype=np.float32).reshape(512, -1) for i in range(8)}
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    url = upload(store, tmp_path / "model.safetensors")
    document = inspect(url, Reading())
    assert document["total"]["tensors"] == 8
    opened = open_source(url, Reading())
    assert opened.tree.bytes_read <= 256 << 10 < 8 << 20


def test_a_conversion_fetches_each_byte_about_once(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {f"layers.{i}.w1.weight": np.arange(1 << 18, dtype=np.float32).reshape(512, -1) for i in range(8)}
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    url = upload(store, tmp_path / "model.safetensors")
    fetched: list[int] = []
    real = type(store).cat_file

    def counting(self: Any, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        data: bytes = real(self, path, start=start, end=end, **kwargs)
        fetched.append(len(data))
        return data

    monkeypatch.setattr(type(store), "cat_file", counting)
    convert(url, str(tmp_path / "out"), Reading(), Writing(to="sharded", degrees={"tp": 2}, threads=1), Silent())
    total = (tmp_path / "model.safetensors").stat().st_size
    assert sum(fetched) <= 1.5 * total, f"{sum(fetched)} bytes fetched of {total}"
    assert len(fetched) <= 40, f"{len(fetched)} requests for {total} bytes"


def test_a_store_that_changes_under_a_run_is_exit_6(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = upload(store, FIXTURES / "dcp" / "tp2_dp2")
    real = type(store).cat_file
    calls = [0]

    def changing(self: Any, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        calls[0] += 1
        data: bytes = real(self, path, start=start, end=end, **kwargs)
        if calls[0] == 5:
            store.pipe(path, store.store[path].getvalue())  # the same bytes, but another object by its time
        return data

    monkeypatch.setattr(type(store), "cat_file", changing)
    with pytest.raises(SourceChanged) as info:
        convert(url, str(tmp_path / "out"), Reading(), Writing(to="sharded"), Silent())
    assert str(info.value.path).startswith("memory://b/") and list(tmp_path.iterdir()) == []


def test_an_output_and_a_hostile_store(store: Any, tmp_path: Path) -> None:
    url = upload(store, FIXTURES / "dcp" / "tp2_dp2")
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputExists):
        convert(url, str(tmp_path / "out"), Reading(), Writing(to="sharded"), Silent())
    store.store["/b/../../../evil.json"] = store.store["/b/.metadata"]
    with pytest.raises(UnsafeInput):
        convert(url, str(tmp_path / "other"), Reading(), Writing(to="sharded"), Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
