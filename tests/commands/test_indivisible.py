"""Degrees that do not divide: data ranks share as DTensor does, and a report of copies names the option that shares."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tool.cli import run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    names = [f"model.layers.{i}.mlp.{part}_proj.weight" for i in range(2) for part in ("up", "down")]
    save_file({name: np.full((400, 500), i, np.float32) for i, name in enumerate(names)}, path)
    return path


def files(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(folder.glob("*.distcp"))]


def test_three_data_ranks_have_a_third_each(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(source), str(tmp_path / "out"), "--to", "dcp", "--dp", "3"]) == 0
    sizes = files(tmp_path / "out")
    assert len(sizes) == 3 and max(sizes) < 1.02 * min(sizes)
    assert "cut by dp into uneven parts" in capfd.readouterr().out


def test_copies_name_the_option_that_cuts(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["convert", str(source), str(tmp_path / "out"), "--to", "dcp", "--tp", "3"]
    assert run(words) == 0
    assert len(files(tmp_path / "out")) == 1  # every rank reads all of it
    option = re.search(r"replicated; (--on-indivisible \S+) would cut by tp into uneven parts", capfd.readouterr().out)
    assert option
    assert run([*words, "--force", *option[1].split()]) == 0
    sizes = files(tmp_path / "out")
    assert len(sizes) == 3 and max(sizes) < 1.02 * min(sizes)
