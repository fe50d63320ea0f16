"""Files that are written beside an output replace an earlier one of their own kind, and nothing else.

`--report`, `--sarif`, `--junit`, `--attest`, `--plan` and `--emit`, each pointed at what a person would miss: the
private key, a source, notes, a link, another program's report, a folder.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.cli import run
from ckpt_tool.report import files
from ckpt_tool.signing import seal

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCE = FIXTURES / "safetensors" / "llama_one_file"
KEY = b"-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\n-----END PRIVATE KEY-----\n"
OTHERS = {
    "a key": KEY,
    "notes": b"notes",
    "an empty file": b"",
    "another program's attestation": json.dumps(
        {"_type": "https://in-toto.io/Statement/v1", "predicateType": "https://slsa.dev/provenance/v1", "predicate": {}}
    ).encode(),
    "another program's SARIF": b'{"$schema": "sarif", "runs": [{"tool": {"driver": {"name": "x"}}}]}',
    "another program's JUnit": b'<?xml version="1.0"?><testsuites><testsuite name="pytest" tests="1"/></testsuites>',
    "another page": b"<!doctype html>\n<p>mine</p>",
    "weights": (SOURCE / "model.safetensors").read_bytes(),
}


def lines(out: str, file: str, plan: str) -> dict[str, list[str]]:
    """A line for each option, with `--force` where the verb has it."""
    convert = ["convert", str(SOURCE), out, "--to", "sharded", "--force", "-q"]
    return {
        "--report": [*convert, "--report", file],
        "--attest": [*convert, "--attest", file],
        "--plan": [*convert, "--plan", file],
        "--emit": [*convert, "--plan", plan, "--emit", "slurm", file],
        "--sarif": ["audit", str(SOURCE), "--sarif", file, "-q"],
        "--junit": ["audit", str(SOURCE), "--junit", file, "-q"],
    }


OPTIONS = list(lines("", "", ""))


@pytest.mark.parametrize("what", list(OTHERS))
@pytest.mark.parametrize("option", OPTIONS)
def test_another_file_stays(tmp_path: Path, capfd: Any, option: str, what: str) -> None:
    file = tmp_path / "file"
    file.write_bytes(OTHERS[what])
    assert run(lines(str(tmp_path / "out"), str(file), str(tmp_path / "plan.json"))[option]) == 5
    assert file.read_bytes() == OTHERS[what]
    assert os.listdir(tmp_path) == ["file"], "nothing was written"


@pytest.mark.parametrize("option", ["--report", "--attest", "--sarif", "--junit"])
def test_a_file_that_comes_while_the_run_is_at_work_stays(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """In the moment between the last look and the rename."""
    file = tmp_path / "file"
    real = files.place_file

    def come_first(*words: Any, **more: Any) -> None:
        file.write_bytes(KEY)
        real(*words, **more)

    for module in (files, seal):
        monkeypatch.setattr(module, "place_file", come_first)
    assert run(lines(str(tmp_path / "out"), str(file), str(tmp_path / "plan.json"))[option]) == 5
    assert file.read_bytes() == KEY
    assert set(os.listdir(tmp_path)) <= {"file", "out", ".file.ckpt-partial"}  # the attestation that waits


@pytest.mark.parametrize("where", ["a key", "nowhere", "an earlier one"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_link_and_what_it_leads_to_stay(tmp_path: Path, capfd: Any, option: str, where: str) -> None:
    (tmp_path / "there").mkdir()
    target = tmp_path / "there" / "target"
    file = tmp_path / "file"
    if where == "a key":
        target.write_bytes(KEY)
    if where == "an earlier one":
        run(lines(str(tmp_path / "there" / "out"), str(target), str(tmp_path / "there" / "plan.json"))[option])
    before = target.read_bytes() if target.exists() else None
    file.symlink_to(target)
    assert run(lines(str(tmp_path / "out"), str(file), str(tmp_path / "plan.json"))[option]) == 5
    assert file.is_symlink() and (target.read_bytes() if target.exists() else None) == before
    assert sorted(os.listdir(tmp_path)) == ["file", "there"]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_folder_and_a_fifo_stay(tmp_path: Path, capfd: Any, option: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name in ("folder", "fifo"):
        assert run(lines(str(tmp_path / "out"), str(tmp_path / name), str(tmp_path / "plan.json"))[option]) == 5, name
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder"]


@pytest.mark.parametrize("option", ["--report", "--attest", "--sarif", "--junit"])
def test_an_earlier_one_is_replaced(tmp_path: Path, capfd: Any, option: str) -> None:
    line = lines(str(tmp_path / "out"), str(tmp_path / "file"), "")[option]
    assert run(line) in (0, 1)
    first = (tmp_path / "file").read_bytes()
    assert run(line) in (0, 1), capfd.readouterr().err
    assert first and (tmp_path / "file").read_bytes()


@pytest.mark.parametrize("option", OPTIONS)
def test_none_of_them_goes_into_a_source(tmp_path: Path, capfd: Any, option: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(SOURCE, source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    for name in ("new", "config.json", "model.safetensors"):
        line = lines(str(tmp_path / "out"), str(source / name), str(tmp_path / "plan.json"))[option]
        assert run([str(source) if word == str(SOURCE) else word for word in line]) == 5
        assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_two_options_do_not_share_a_file(tmp_path: Path, capfd: Any) -> None:
    file = str(tmp_path / "file")
    assert run(["audit", str(SOURCE), "--sarif", file, "--junit", file, "-q"]) == 2
    assert "E2831" in capfd.readouterr().err and os.listdir(tmp_path) == []


@pytest.mark.parametrize("fails", [False, True])
def test_where_an_attestation_waits_somebody_elses_file_stays(tmp_path: Path, capfd: Any, fails: bool) -> None:
    """It waits under a hidden name until the output is there; that name may be taken, by a link too."""
    waiting = tmp_path / ".a.json.ckpt-partial"
    target = tmp_path / "target"
    target.write_bytes(KEY)
    waiting.symlink_to(target)
    line = ["convert", str(SOURCE), str(tmp_path / "out"), "--to", "sharded", "--attest", str(tmp_path / "a.json")]
    assert run([*line, "-q"]) == 5
    waiting.unlink()
    waiting.write_bytes(b"notes")
    assert run([*line, "-q"]) == 5
    assert waiting.read_bytes() == b"notes" and target.read_bytes() == KEY
    assert not (tmp_path / "out").exists()
    waiting.write_bytes(b'{\n "_type": "https://in-toto.io')  # a run that was killed had begun to write it
    assert run([*line, "-q"]) == 0, capfd.readouterr().err
    assert not waiting.exists() and (tmp_path / "a.json").exists()
