"""`ckpt status`: what the journals of a growing output say, with live, dead and missing parts."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from ckpt_tool.cli import run
from ckpt_tool.conversion.plan_file import load_plan
from ckpt_tool.plan import schedule
from ckpt_tool.run import executor
from ckpt_tool.storage.output.destination import staging_path
from ckpt_tool.storage.output.staging import Staging

NBYTES = 4 * 2 * 50 * 40  # of all tensors


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of units of 4 KiB, so that each part has some."""
    monkeypatch.setattr(executor, "units", lambda moves: schedule.units(moves, size=1 << 12))
    tensors = {f"w{i}": np.arange(2000, dtype=np.float32).reshape(50, 40) + i for i in range(4)}
    safetensors.numpy.save_file({n: a.astype(np.float16) for n, a in tensors.items()}, tmp_path / "in.safetensors")
    path = str(tmp_path / "plan.json")
    line = ["convert", str(tmp_path / "in.safetensors"), str(tmp_path / "out"), "--to", "sharded", "--tp", "2", "-q"]
    assert run([*line, "--plan", path]) == 0
    return path


def seen(capfd: Any, *words: str) -> tuple[int, dict[str, Any]]:
    code = run(["status", *words, "--json"])
    return code, json.loads(capfd.readouterr().out or "{}")


def states(document: dict[str, Any]) -> dict[int, str]:
    return {part["part"][0]: part["state"] for part in document["parts"]}


def test_parts_that_live_that_are_dead_and_that_are_missing(plan: str, tmp_path: Path, capfd: Any) -> None:
    out = str(tmp_path / "out")
    plan_id = load_plan(plan).identifier()
    assert run(["apply", plan, "--part", "1/4", "-q"]) == 0
    with Staging(tmp_path / "out", plan_id, [], part=(3, 4)) as dead:
        dead.begin(1, 500)
    with Staging(tmp_path / "out", plan_id, [], part=(2, 4)) as live:
        live.begin(2, 1000)
        live.record({"unit": 7, "bytes": 400})
        for target in (plan, out):
            code, document = seen(capfd, target)
            assert code == 1, "a dead part"
            assert states(document) == {1: "done", 2: "running", 3: "dead"} and document["missing"] == [4]
        assert document["path"] == out and document["state"] == "growing"
        found = next(part for part in document["parts"] if part["part"] == [2, 4])
        assert (found["units"], found["of_units"], found["bytes"], found["of_bytes"]) == (1, 2, 400, 1000)
        assert found["process"].partition(" on ")[0].isdigit()
        (first,) = [part for part in document["parts"] if part["part"] == [1, 4]]
        assert first["bytes"] == first["of_bytes"] and document["bytes"] == first["bytes"] + 400
    code, document = seen(capfd, plan)
    assert states(document)[2] == "dead" and document["running"] == 0
    assert run(["status", plan]) == 1
    text = capfd.readouterr().out
    assert "not begun: 4" in text and "can be run again: 2-3" in text
    for number in (2, 3, 4):
        assert run(["apply", plan, "--part", f"{number}/4", "-q"]) == 0
    code, document = seen(capfd, plan)
    assert (code, document["state"], document["parts"]) == (0, "written", [])


def test_a_whole_plan_knows_all_bytes(plan: str, capfd: Any) -> None:
    assert run(["apply", plan, "--part", "2/3", "-q"]) == 0
    code, document = seen(capfd, plan)
    assert document["of_bytes"] == NBYTES and 0 < document["bytes"] < NBYTES and document["missing"] == [1, 3]
    assert code == 1, "nobody is at work"


def test_a_run_without_parts(plan: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at in the moment before its commit."""
    found: list[tuple[int, dict[str, Any]]] = []
    finish = executor.Executor._finish

    def look(self: Any, *given: Any) -> Any:
        found.append(seen(capfd, str(tmp_path / "out")))
        return finish(self, *given)

    monkeypatch.setattr(executor.Executor, "_finish", look)
    assert run(["apply", plan, "-q"]) == 0
    ((code, document),) = found
    assert code == 0 and [part["part"] for part in document["parts"]] == [None]
    assert document["bytes"] == document["of_bytes"] == NBYTES and document["running"] == 1


def test_watching_ends_with_the_run(plan: str, tmp_path: Path, capfd: Any) -> None:
    staging = Staging(tmp_path / "out", load_plan(plan).identifier(), [], part=(1, 2))
    staging.begin(1, 1000)
    timer = threading.Timer(0.5, lambda: staging.__exit__())
    timer.start()
    code, document = seen(capfd, plan, "--watch")
    timer.join()
    assert code == 1 and states(document) == {1: "dead"}


def test_nothing_there(tmp_path: Path, capfd: Any) -> None:
    assert run(["status", str(tmp_path / "out")]) == 7
    assert "no run has begun to write it" in capfd.readouterr().err
    staging_path(tmp_path / "out").mkdir()
    assert run(["status", str(tmp_path / "out")]) == 7
