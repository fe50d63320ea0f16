"""Progress: cheap, safe from any thread, quiet when nobody watches, and never the end of a run."""

from __future__ import annotations

import io
import json
import threading
import time

import pytest

from ckpt_tool.core.progress import MODES, Silent
from ckpt_tool.report import progress as module
from ckpt_tool.report.plain import Look
from ckpt_tool.report.progress import Bar, JsonLines, Lines, progress_of

PLAN = {"schema_version": 1, "plan": {"bytes_read": 10, "bytes_written": 20, "files": 1, "copies": 2}}


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def test_auto_looks_who_is_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(progress_of("auto", Tty()), Bar)
    assert type(progress_of("auto", io.StringIO())) is Lines
    assert isinstance(progress_of("auto", io.StringIO(), json_result=True), Silent), "stderr holds errors alone"
    assert isinstance(progress_of("auto", Tty(), json_result=True), Bar)
    assert isinstance(progress_of("none", Tty()), Silent)
    assert isinstance(progress_of("plain", None), Silent)
    assert isinstance(progress_of("json", io.StringIO(), json_result=True), JsonLines)
    monkeypatch.setenv("TERM", "dumb")
    assert type(progress_of("auto", Tty())) is Lines


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_takes_the_whole_protocol(mode: str) -> None:
    stream = io.StringIO()
    progress = progress_of(mode, stream)
    progress.finish()
    progress.plan(PLAN)
    for total in (100, 0):
        progress.start(total, "writing")
        progress.advance(60)
        progress.note("half\x1b[31m way")
        progress.advance(60)  # more than announced
        progress.finish()
    progress.finish()
    assert "\x1b[31m" not in stream.getvalue()


def test_lines_tell_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Lines(stream, Look())
    progress.start(10_000_000_000, "writing")
    for _ in range(10):
        now[0] += 1.0
        progress.advance(500_000_000)
    progress.finish()
    assert stream.getvalue().splitlines() == [
        "writing: 25%, 2.50 GB of 10.0 GB, 500 MB/s, 15 s left",
        "writing: 50%, 5.00 GB of 10.0 GB, 500 MB/s, 10 s left",
        "writing: 5.00 GB in 10 s",
    ]


def test_a_short_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for make in (lambda s: Lines(s, Look()), lambda s: Bar(s, Look(width=80))):
        stream = io.StringIO()
        progress = make(stream)
        progress.start(10, "writing")
        progress.advance(10)
        progress.finish()
        assert stream.getvalue() == ""


def test_json_lines_are_json() -> None:
    stream = io.StringIO()
    progress = JsonLines(stream)
    progress.plan(PLAN)
    progress.start(10, "writing")
    progress.note("x\n\x1b")
    progress.finish()
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["plan", "start", "note", "finish"]
    assert all(event["schema_version"] == 1 for event in events)
    assert events[0]["plan"]["copies"] == 2 and events[1]["total_bytes"] == 10 and events[2]["message"] == "x\n\x1b"


def test_the_bar_draws_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BAR_PATIENCE", 0.0)
    monkeypatch.setattr(Bar, "interval", 0.0)
    stream = Tty()
    progress = Bar(stream, Look(width=80))
    progress.start(10**9, "writing")
    for _ in range(5):
        progress.advance(10**8)
        time.sleep(0.05)
    progress.note("a [bold]note[/bold]")
    progress.finish()
    shown = stream.getvalue()
    assert "writing" in shown and "note: a [bold]note[/bold]" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor comes back"


class Gone(io.StringIO):
    """A terminal that was closed."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("mode", ["tty", "plain", "json"])
def test_a_screen_that_goes_away_does_not_end_the_run(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BAR_PATIENCE", 0.0)
    for kind in (Bar, Lines, JsonLines):
        monkeypatch.setattr(kind, "interval", 0.0)
    progress = progress_of(mode, Gone())
    progress.plan(PLAN)
    progress.start(100, "writing")
    for _ in range(10):
        progress.advance(10)
    progress.note("x")
    progress.finish()


def test_advance_is_exact_from_many_threads_and_cheap() -> None:
    stream = io.StringIO()
    progress = JsonLines(stream)
    progress.start(8 * 20_000, "writing")
    threads = [threading.Thread(target=lambda: [progress.advance(1) for _ in range(20_000)]) for _ in range(8)]
    began = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.process_time() - began
    progress.finish()
    assert json.loads(stream.getvalue().splitlines()[-1])["bytes"] == 160_000
    assert spent / 160_000 < 20e-6  # about 0.5 us alone
