"""Staging's locks, seen by several holders at once. Its life under faults is tested in tests/faults."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.core.inner_path import JOURNAL
from ckpt_tool.errors import OutputExists
from ckpt_tool.storage.output.destination import staging_path
from ckpt_tool.storage.output.staging import Staging


def test_a_part_waits_while_another_looks_whether_it_is_the_last(tmp_path: Path) -> None:
    """Two parts of a plan: the second starts in the moment in which the first holds the folder alone."""
    out = tmp_path / "out"
    with Staging(out, "plan", ["f"], part=(1, 2)) as first:
        first.close_part()
        began = time.monotonic()
        timer = threading.Timer(0.2, lambda: fcntl.flock(first._folder_fd, fcntl.LOCK_UN))
        timer.start()
        with Staging(out, "plan", ["f"], part=(2, 2)) as second:
            assert time.monotonic() - began > 0.15
            assert len(second.close_part() or ()) == 2
        timer.join()


def test_a_part_does_not_wait_for_a_whole_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Staging(out, "plan", ["f"]):
        assert os.path.exists(staging_path(out) / JOURNAL)
        with pytest.raises(OutputExists) as caught:
            Staging(out, "plan", ["f"], part=(1, 2))
        assert caught.value.code == "E0503"


def test_a_part_that_begins_while_another_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part has made the folder, and writes its journal in the moment in which the second looks what lies
    there."""
    out = tmp_path / "out"
    walk = os.fwalk
    staged = staging_path(out)

    def begin_late(*args: Any, **options: Any) -> Iterator[Any]:
        monkeypatch.setattr(os, "fwalk", walk)
        (staged / f"{JOURNAL}-1-of-2").write_text("")
        return walk(*args, **options)

    staged.mkdir(0o700)
    monkeypatch.setattr(os, "fwalk", begin_late)
    with Staging(out, "plan", ["f"], part=(2, 2)) as second:
        journals = second.close_part()
        assert journals is not None and journals[0] == []
