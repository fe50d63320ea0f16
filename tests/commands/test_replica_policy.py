"""Replicas that differ: an error of every verb that reads values, unless the first is asked for in words."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.commands.options import Reading, Writing
from ckpt_tool.commands.source import open_source
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import InconsistentCheckpoint

RANKS = Path(__file__).parents[2] / "fixtures" / "paddle" / "llama_bf16_legacy_tp2"
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
