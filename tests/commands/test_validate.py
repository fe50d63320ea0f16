"""`ckpt validate` as a command: what it prints, what it exits with, and what it refuses before a rank is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from ckpt_tool import cli
from ckpt_tool.errors import InternalError
from ckpt_tool.harness import evidence, matrix


def run(*arguments: str) -> int:
    return cli.run(["validate", "--progress", "none", *arguments])


PAIR = ("--from-layout", "tp2", "--to-layout", "dp2", "--steps", "1", "--no-controls")


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--from-layout", "tp3", "--to-layout", "dp2"], "E1501", "the nearest layout that it can take is tp4"),
        (["--from-layout", "tp2", "--to-layout", "pp2,dp3"], "E1501", "nearest"),
        (["--from-layout", "tp2", "--to-layout", "dp2", "--format", "deepspeed"], "E1535", "nearest"),
        (["--from-layout", "tp2", "--to-layout", "dp2", "--format", "sharedd"], "E1534", "sharded"),
        (["--from-layout", "two", "--to-layout", "dp2"], "E1500", "tpN"),
        (["--from-layout", "tp2", "--to-layout", "dp2", "--backend", "nccl"], "E1543", "--backend gloo"),
        (["--from-layout", "tp2"], "E1541", "both"),
        (["--from-layout", "tp2", "--to-layout", "dp2", "--matrix", "quick"], "E1541", "leave the layouts out"),
    ],
)
def test_what_cannot_be_had_exits_2(
    options: list[str], code: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*options) == 2
    err = capsys.readouterr().err
    assert f"error[{code}]" in err and said in err and "Traceback" not in err


def test_a_pair_as_json_and_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*PAIR, "--json", "--report", str(tmp_path / "page.html"), "--keep", str(tmp_path / "kept")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1 and document["ok"] and len(document["cases"]) == 1
    case = document["cases"][0]
    assert (case["from"], case["to"], case["format"], case["mode"]) == ("tp2", "dp2", "sharded", "canonical")
    assert case["curve"][-1]["equal"] and case["controls"] == [] and "2 layers" in case["model"]
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") >= 2 and "tp2" in page and "<script" not in page, "curves and layouts are drawn"
    assert (tmp_path / "kept" / "001" / "resharded").is_dir()
    assert run(*PAIR, "--keep", str(tmp_path / "kept")) == 5, "a folder that has something in it is left alone"


@pytest.mark.slow
def test_a_check_that_fails_exits_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The resumed run's losses, a little off: a difference that no curve would show."""
    runs = evidence.runs.run

    def other(job: Any, steps: int, **more: Any) -> Any:
        found = runs(job, steps, **more)
        return [step._replace(loss=step.loss * (1 + 1e-12)) for step in found] if more.get("start") else found

    monkeypatch.setattr(evidence.runs, "run", other)
    assert run(*PAIR) == 1
    out = capsys.readouterr().out
    assert "not proved" in out and "loss differs, 1.0e-12 relative at most" in out


def test_a_rank_that_dies_ends_the_pair_and_fails_in_a_matrix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dying(*_: Any, **__: Any) -> Any:
        raise InternalError("rank 3 was killed by SIGKILL", code="E1505", place="rank 3")

    monkeypatch.setattr(evidence, "gather", dying)
    assert run(*PAIR) == 70
    assert "error[E1505]" in capsys.readouterr().err
    assert run("--matrix", "quick", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["ok"] and len(document["cases"]) == len(matrix.QUICK)
    assert all("SIGKILL" in case["checks"][0]["text"] for case in document["cases"])
