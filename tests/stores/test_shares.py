"""Plans that several workers carry out into a store: the same objects, one commit, whoever comes, goes or dies."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from s3_server import S3
from test_writing import FIXTURES, GOLDEN, INPUTS, OUT, files, objects, pending

from ckpt_tool.cli import run
from ckpt_tool.plan import schedule
from ckpt_tool.run import executor, shares
from ckpt_tool.storage import multipart, store


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 4 KiB, units of 16 KiB, shares of 12 KiB: a fixture has dozens, and none ends where another does."""
    monkeypatch.setattr(multipart, "LEAST", 4096)
    monkeypatch.setattr(store, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(store, "UNANSWERED", 1.0)
    monkeypatch.setattr(executor, "units", lambda moves: schedule.units(moves, size=1 << 14))
    monkeypatch.setattr(executor, "_PAUSE", 0.02)
    monkeypatch.setattr(shares, "SHARE", 12 << 10)
    monkeypatch.setattr(shares, "CELL", 2 << 10)


@pytest.mark.share(120)
@pytest.mark.parametrize("name", GOLDEN)
def test_parts_make_the_files_of_a_local_output(
    s3: S3, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In three parts, the last first: byte for byte, for every format and whatever its holes."""
    words = shlex.split(GOLDEN[name])
    inputs = tmp_path / "inputs"
    shutil.copytree(INPUTS, inputs)
    hub = inputs / "hub"
    shutil.copytree(FIXTURES / "convert/llama/hf", hub)
    for beside in (INPUTS / "beside").glob("*"):
        shutil.copy(beside, hub)
    for path in inputs.glob("*"):
        if path.is_file():
            text = path.read_text().replace("{fixtures}", str(FIXTURES)).replace("{inputs}", str(inputs))
            path.write_text(text)

    def filled(out: str) -> list[str]:
        return [
            word.replace("{fixtures}", str(FIXTURES)).replace("{inputs}", str(inputs)).replace("{out}", out)
            for word in words
        ]

    plan = str(tmp_path / "plan.json")
    if run([*filled(OUT), "--plan", plan, "-q"]):
        assert any(code in capsys.readouterr().err for code in ("E0256", "E0240", "a saved plan")), GOLDEN[name]
        pytest.skip("it has no plan that can be saved")
    assert run([*filled(str(tmp_path / "out")), "-q"]) == 0
    capsys.readouterr()
    lossy = ["--allow-lossy"] if "--allow-lossy" in words else []
    for number in (3, 1, 2):
        assert run(["apply", plan, "--part", f"{number}/3", "--json", *lossy]) == 0, capsys.readouterr().err
        document = json.loads(capsys.readouterr().out)
    assert document["committed"]
    (made,) = (path for path in tmp_path.iterdir() if path.name.startswith("out"))
    assert objects(s3, made.name) == files(made)
    assert not pending(s3) and not s3.content(f".{made.name}.ckpt-partial")
