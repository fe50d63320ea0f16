"""The `ckpt` fixture, and the paths from which acceptance tests import `peers.py` and the fixtures' makers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "fixtures" / "make")]

from peers import Runner  # noqa: E402


@pytest.fixture(scope="session")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    runner = Runner(tmp_path_factory.mktemp("command"))
    yield runner
    runner.close()
