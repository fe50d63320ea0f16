"""Replicas that differ: an error of every verb that reads values, unless the first is asked for in words."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.commands.verify import verify
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.run import executor, replicas
from ckpt_tool.run.blocks import BlockReader
from ckpt_tool.sources.opening import open_source
from ckpt_tool.storage.output.staging import Staging

FIXTURES = Path(__file__).parents[2] / "fixtures"
RANKS = FIXTURES / "paddle" / "llama_bf16_legacy_tp2"
FIRST = Reading(replica_policy="first")


@pytest.fixture
def drifted(tmp_path: Path) -> Path:
    """The second tensor rank's copy of a norm's moment is another."""
    folder = tmp_path / "drifted"
    shutil.copytree(RANKS, folder)
    tensors = open_source(str(RANKS), Reading()).catalog.tensors
    copy = next(
        chunk for key, tensor in tensors.items() if key.state == "exp_avg" for chunk in tensor.chunks if chunk.replica
    )
    with (folder / copy.array.path).open("r+b") as file:
        file.seek(copy.array.offset)
        byte = file.read(1)[0]
        file.seek(copy.array.offset)
        file.write(bytes([byte ^ 1]))
    return folder


def test_they_are_an_error(drifted: Path, tmp_path: Path) -> None:
    with pytest.raises(InconsistentCheckpoint, match="replicas differ"):
        diff(str(RANKS), str(drifted), Reading(), progress=Silent())
    with pytest.raises(InconsistentCheckpoint, match="replicas differ"):
        convert(str(drifted), str(tmp_path / "out"), Reading(), Writing(to="sharded", dialect="keep"), Silent())
    assert not (tmp_path / "out").exists()


def test_the_first_may_be_taken(drifted: Path, tmp_path: Path) -> None:
    assert diff(str(RANKS), str(drifted), FIRST, progress=Silent())["equal"]
    convert(str(drifted), str(tmp_path / "out"), FIRST, Writing(to="sharded", dialect="keep"), Silent())
    assert diff(str(RANKS), str(tmp_path / "out"), Reading(), progress=Silent())["equal"]


# -- all of them, and how far ------------------------------------------------------------------------------------------

SOURCES = {  # of each format that keeps replicas without checksums, which would tell before they are compared
    "sharded": "llama_tp4_pp2",
    "paddle": "llama_bf16_legacy_tp2",
    "paddle-flex": "replicas",
}
FLOATS = {"F32": ("<f4", "<u4"), "F16": ("<f2", "<u2"), "BF16": (None, "<u2"), "F64": ("<f8", "<u8")}


def value(raw: bytes, kind: str) -> float:
    """The oracle's float: bf16 is the upper half of an fp32."""
    raw = b"\0\0" + raw if kind == "BF16" else raw
    return float(np.frombuffer(raw, FLOATS[kind][0] or "<f4")[0])


def drift(folder: Path, name: str, most: int = 6) -> dict[str, tuple[int, float, str]]:
    """Another value in the last element of some replicas: tensor -> (ulps, distance, file)."""
    opened = open_source(str(folder), Reading(from_format=name))
    told: dict[str, tuple[int, float, str]] = {}
    taken: set[tuple[str, int]] = set()
    for key, tensor in opened.catalog.tensors.items():
        copies = [chunk for chunk in tensor.chunks if chunk.replica and chunk.array.crc is None]
        if not copies or tensor.dtype.name not in FLOATS or len(told) == most:
            continue
        array = copies[-1].array
        size = tensor.dtype.bits // 8
        if (
            array.strides
            or copies[-1].within.shape != array.shape
            or not array.numel
            or (array.path, array.offset) in taken
        ):
            continue
        taken.add((array.path, array.offset))
        at = array.offset + (array.numel - 1) * size
        path = opened.tree.root / array.path
        with path.open("r+b") as file:
            file.seek(at)
            old = file.read(size)
            ulps = len(told) + 1
            number = int.from_bytes(old, "little")
            new = (number + (ulps if number % 2**8 < 128 else -ulps)).to_bytes(size, "little")
            file.seek(at)
            file.write(new)
        gap = abs(value(old, tensor.dtype.name) - value(new, tensor.dtype.name))
        told[str(key)] = (ulps, gap, array.path)
    return told


@pytest.fixture(params=SOURCES)
def apart(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, dict[str, tuple[int, float, str]]]:
    folder = tmp_path / "source"
    shutil.copytree(FIXTURES / request.param / SOURCES[request.param], folder)
    told = drift(folder, request.param)
    assert told
    return request.param, folder, told


def lines_of(error: InconsistentCheckpoint, told: dict[str, tuple[int, float, str]]) -> None:
    """Every tensor is named once, with its file and how far it is apart."""
    lines = [error.message.partition("; ")[2], *error.faults]
    assert error.code == "E2701" and len(lines) == len(told), lines
    for key, (ulps, gap, path) in told.items():
        (line,) = (line for line in lines if line.startswith(f"{key}: "))
        assert "1 of " in line and Path(path).name in line and line.endswith(f"max ulp {ulps}, max abs {gap:.3g}"), (
            line,
            gap,
        )


@pytest.mark.parametrize("how", ["before", "met in the run", "full"])
def test_all_of_them_are_named_and_nothing_is_written(
    how: str,
    apart: tuple[str, Path, dict[str, tuple[int, float, str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, folder, told = apart
    begun = []
    monkeypatch.setattr(executor, "Staging", lambda *args, **more: begun.append(1) or Staging(*args, **more))
    if how != "before":
        monkeypatch.setattr(replicas, "SMALL", 0)
    writing = Writing(to="sharded", dialect="keep", verify="full" if how == "full" else "quick", fsync=False)
    with pytest.raises(InconsistentCheckpoint, match="replicas differ") as caught:
        convert(str(folder), str(tmp_path / "out"), Reading(from_format=name), writing, Silent())
    lines_of(caught.value, told)
    assert bool(begun) == (how == "met in the run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"], "nothing is left behind"


def test_verify_and_diff_say_the_same(apart: tuple[str, Path, dict[str, tuple[int, float, str]]]) -> None:
    name, folder, told = apart
    with pytest.raises(InconsistentCheckpoint) as caught:
        diff(str(folder), str(FIXTURES / name / SOURCES[name]), Reading(from_format=name), progress=Silent())
    lines_of(caught.value, told)
    findings = [
        each
        for each in verify(str(folder), Reading(from_format=name), progress=Silent())["findings"]
        if each["code"] == "E2701"
    ]
    assert {finding["tensor"] for finding in findings} == set(told)
    for finding in findings:
        ulps, gap, _ = told[finding["tensor"]]
        assert finding["message"].endswith(f"max ulp {ulps}, max abs {gap:.3g}")


def test_large_replicas_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is more than SMALL is compared while it is copied; less is read twice, and what has no replica never is."""
    read: list[int] = []
    pread = BlockReader.pread
    monkeypatch.setattr(
        BlockReader, "pread", lambda self, *args, **more: (read.append(len(args[2])), pread(self, *args, **more))[1]
    )

    def nbytes(small: int, number: int, name: str = "paddle/llama_bf16_legacy_tp2") -> int:
        monkeypatch.setattr(replicas, "SMALL", small)
        read.clear()
        writing = Writing(to="sharded", dialect="keep", fsync=False, verify="off")
        convert(str(FIXTURES / name), str(tmp_path / f"o{number}"), Reading(), writing, Silent())
        return sum(read)

    tensors = open_source(str(RANKS), Reading()).catalog.tensors.values()
    shared = sum(
        chunk.box.numel * tensor.dtype.bits // 8
        for tensor in tensors
        if any(chunk.replica for chunk in tensor.chunks)
        for chunk in tensor.chunks
    )
    once = nbytes(shared - 1, 1)
    assert nbytes(shared, 2) == once + shared
    assert nbytes(1 << 40, 3, "safetensors/llama_one_file") == nbytes(0, 4, "safetensors/llama_one_file")


def test_many_are_shortened(tmp_path: Path) -> None:
    rows = [replicas.Apart(f"w{i}", "f", 1, 2, (0,), 1, 0.5) for i in range(1000)]
    error = replicas.error_of(rows, 2000)
    assert "in 1,000 of 2,000 tensors" in error.message and len(error.faults) == replicas.SHOWN
    assert error.faults[-1] == "and 900 more tensors"
