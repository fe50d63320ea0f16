"""What a writer shows: the same page in the same order on stdout, whether it is run, tried or saved; stderr has
progress alone.

Seen where it is read: in a pipe and in a pseudo-terminal, wide and narrow, from the real process.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
HF = FIXTURES / "convert" / "llama" / "hf"
RANKS = FIXTURES / "paddle" / "llama_bf16_legacy_tp2"
# lines of every writer, with fallbacks, removed tensors, what stays behind, notes
LINES: dict[str, list[str]] = {
    "convert": [
        "convert",
        str(HF),
        "out",
        "--to",
        "sharded",
        "--dp",
        "5",
        "--tp",
        "3",
        "--remove-keys",
        "*.norm.weight",
    ],
    "convert training": ["convert", str(RANKS), "out", "--to", "safetensors"],
    "reshard": ["reshard", str(FIXTURES / "sharded" / "llama_tp4_pp2"), "out", "--tp", "3", "--dp", "3"],
    "merge": ["merge", str(HF), "out", "--remove-keys", "lm_head*"],
}

LAST = re.compile(r"^(wrote |dry run: |plan saved; )")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def environment(columns: int | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm", **({"COLUMNS": str(columns)} if columns else {})}


def piped(line: list[str], folder: Path, columns: int | None = None) -> tuple[str, str]:
    command = [sys.executable, "-m", "ckpt_tool", *line]
    done = subprocess.run(command, cwd=folder, env=environment(columns), capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def seen(line: list[str], folder: Path, columns: int) -> str:
    """What a terminal shows: both streams together."""
    here, there = pty.openpty()
    command = [sys.executable, "-m", "ckpt_tool", *line]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(columns), stdin=there, stdout=there, stderr=there, close_fds=True
    )
    os.close(there)
    data = b""
    while True:
        try:
            more = os.read(here, 65536)
        except OSError:  # EIO: the other end is closed
            break
        if not more:
            break
        data += more
    os.close(here)
    assert process.wait() == 0
    return screen(data.decode())


def screen(text: str) -> str:
    """What stays on a terminal: a bar that a slow machine has seen is drawn over."""
    rows = [""]
    at = 0
    column = 0
    for token in re.split(rf"({ESCAPES.pattern}|\r|\n)", text):
        if token == "\r":
            column = 0
        elif token == "\n":
            at += 1
            rows += [""] * (at == len(rows))
        elif not ESCAPES.fullmatch(token):
            rows[at] = rows[at][:column] + token + rows[at][column + len(token) :]
            column += len(token)
        elif token.endswith("A"):
            at = max(0, at - int(token[2:-1] or 1))
        elif token.endswith("K"):
            rows[at] = ""
    return "\n".join(rows)


def body(text: str) -> list[str]:
    """The lines before the last statement, which may be wrapped."""
    lines = text.splitlines()
    (end,) = (number for number, line in enumerate(lines) if LAST.match(line))
    assert all(line.startswith("  ") for line in lines[end + 1 :]), "nothing comes after it"
    return lines[:end]


def without_replaced(lines: list[str]) -> list[str]:
    """The lines but for what --force replaces: that is there only once there is an output."""
    starts = [number for number, line in enumerate(lines) if line.startswith("--force replaces")]
    if not starts:
        return lines
    end = lines.index("", starts[0])
    return lines[: starts[0]] + lines[end + 1 :]


@pytest.mark.share(3)
@pytest.mark.parametrize("columns", [None, 60])
@pytest.mark.parametrize("name", LINES)
def test_a_pipe_gets_the_same_page_from_every_kind_of_run(name: str, columns: int | None, tmp_path: Path) -> None:
    tried, said = piped([*LINES[name], "--dry-run"], tmp_path, columns)
    assert said == "" and any(line.startswith(("fallbacks", "removed", "left out")) for line in body(tried))
    saved, said = piped([*LINES[name], "--plan", "p.json"], tmp_path, columns)
    assert body(saved) == body(tried) and said == ""
    ran, said = piped(LINES[name], tmp_path, columns)
    assert body(ran) == body(tried) and said == ""
    applied, said = piped(["apply", "p.json", "--force"], tmp_path, columns)
    assert without_replaced(body(applied)) == body(tried) and said == ""
    if columns:
        long = [line for line in ran.splitlines() if len(line) > columns and max(map(len, line.split())) < columns - 8]
        assert not long


@pytest.mark.share(2)
@pytest.mark.parametrize("name", LINES)
def test_a_terminal_shows_it_once_and_in_the_same_order(name: str, tmp_path: Path) -> None:
    tried = seen([*LINES[name], "--dry-run"], tmp_path, 60)
    assert body(tried) == body(piped([*LINES[name], "--dry-run"], tmp_path, 60)[0])
    assert body(seen([*LINES[name], "--no-fsync"], tmp_path, 60)) == body(tried)


def test_quiet_and_json_keep_stdout_for_themselves(tmp_path: Path) -> None:
    assert piped([*LINES["convert"], "-q"], tmp_path) == ("", "")
    out, said = piped([*LINES["convert"], "--json", "--force"], tmp_path)
    assert out.startswith('{"schema_version": 1') and out.count("\n") == 1 and said == ""


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    """`| head -1`: the plan finds nobody, the output is made all the same."""
    command = [sys.executable, "-m", "ckpt_tool", *LINES["convert"]]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, cwd=tmp_path, env=environment(None), stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "") and (tmp_path / "out" / "ckpt.index.json").is_file()
