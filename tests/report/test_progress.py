"""Progress: cheap, safe from any thread, quiet when nobody watches, and never the end of a run."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from pathlib import Path

import pytest

import ckpt_tool as ckpt
from ckpt_tool.core.progress import MODES, Checking, Silent, working_on
from ckpt_tool.report import progress as module
from ckpt_tool.report.plain import Look
from ckpt_tool.report.progress import Bar, JsonLines, PlainProgress, progress_of

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
    assert type(progress_of("auto", io.StringIO())) is PlainProgress
    assert isinstance(progress_of("auto", io.StringIO(), json_result=True), Silent), "stderr holds errors alone"
    assert isinstance(progress_of("auto", Tty(), json_result=True), Bar)
    assert isinstance(progress_of("none", Tty()), Silent)
    assert isinstance(progress_of("plain", None), Silent)
    assert isinstance(progress_of("json", io.StringIO(), json_result=True), JsonLines)
    monkeypatch.setenv("TERM", "dumb")
    assert type(progress_of("auto", Tty())) is PlainProgress


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
    progress = PlainProgress(stream, Look())
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


def test_lines_name_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = Checking(PlainProgress(stream, Look()), lambda document: None)  # as under --report
    progress.start(10_000_000, "writing")
    working_on(progress, "iter_5/mp\x1b[31m_rank_00.pt")
    now[0] += 5.0
    progress.advance(5_000_000)
    progress.finish()
    progress.start(0, "hashing")
    now[0] += 5.0
    progress.advance(1_000_000)
    first = stream.getvalue().splitlines()[0]
    assert first.startswith("writing: 50%, 5.00 MB of 10.0 MB, 1.00 MB/s, 5.0 s left, iter_5/mp")
    assert stream.getvalue().splitlines()[-1] == "hashing: 1.00 MB, 200 kB/s", "the next phase has no file yet"
    assert "\x1b" not in stream.getvalue()
    working_on(Silent(), "a file")  # a caller's own progress need not care


@pytest.mark.parametrize("width", [120, 80, 50, 40])
def test_the_bar_is_one_line_with_all_that_there_is_room_for(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BAR_PATIENCE", 0.0)
    monkeypatch.setattr(Bar, "interval", 0.0)
    stream = Tty()
    progress = Bar(stream, Look(width=width))
    progress.start(10**9, "verifying what was written")
    progress.at("model-00002-of-00005.safetensors")
    for _ in range(5):
        progress.advance(10**8)
        time.sleep(0.12)
    progress.finish()
    frames = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame) for frame in re.split(r"[\r\n]+", stream.getvalue())]
    drawn = [frame for frame in frames if frame.startswith("ver")]
    assert drawn and max(map(len, drawn)) <= width
    assert re.search(r"0\.\d/1\.0 GB", drawn[-1]), drawn[-1]
    assert ("model-0" in drawn[-1]) == (width >= 80), drawn[-1]
    assert (len(drawn[-1].rstrip()) > 40) == (width > 40)


def test_every_phase_of_a_run_has_its_name(tmp_path: Path) -> None:
    class Recording(Silent):
        def __init__(self) -> None:
            self.phases: list[str] = []
            self.files: dict[str, None] = {}

        def start(self, total_bytes: int, what: str) -> None:
            self.phases.append(what)

        def at(self, file: str) -> None:
            self.files[file] = None

    progress = Recording()
    fixture = Path(__file__).resolve().parents[2] / "fixtures" / "dcp" / "tp2_dp2"
    options = {"to": "safetensors", "verify": "full", "progress": progress}
    ckpt.convert(fixture, tmp_path / "out", **options)
    assert progress.phases == ["writing", "verifying what was written", "waiting for the disk"]
    assert "model.safetensors" in progress.files
    progress.phases.clear()
    ckpt.verify(tmp_path / "out", progress=progress)
    ckpt.diff(fixture, tmp_path / "out", progress=progress, state=["model"])
    assert progress.phases == ["verifying", "comparing"]


def test_a_short_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for make in (lambda s: PlainProgress(s, Look()), lambda s: Bar(s, Look(width=80))):
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
    for kind in (Bar, PlainProgress, JsonLines):
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
