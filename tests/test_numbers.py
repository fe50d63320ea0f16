"""No number of a file decides how long `ckpt` runs or how much it holds: every number of every config, argument, header and
index of the fixtures is set to what no file can hold, and every verb ends soon, in little memory, by the contract.

The cases come from the fixtures: one for each format, kind of file and field, so that a new fixture brings its own. Each runs
in a fork of its own with 1 GiB more address space than the test has, and 10 seconds a verb.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpt_tool.cli import run

FIXTURES = Path(__file__).parents[1] / "fixtures"
VALUES = (10**9, 2**63 - 1, 10**30, -1, 0, 1.5, "1")
SECONDS, MEMORY = 10, 1 << 30  # of a verb, above what the test itself holds
CONTRACT = {0, 1, 2, 3, 4, 5, 6, 7}
OTHERS = {
    "": ("paddle.safetensors",),
    "paddle.safetensors": ("hf.safetensors",),
}  # the same model in two dialects, in one folder
LARGEST = 2 << 20  # bytes of a fixture's folder


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"shared_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


edits = _load(Path(__file__).parent / "fuzz" / "edits.py")


class Case(NamedTuple):
    """A number of a file of a fixture. at: which one of the file's numbers."""

    folder: Path
    file: str
    field: str
    at: int

    def __str__(self) -> str:
        return f"{self.folder.relative_to(FIXTURES)}-{self.file}-{self.field or 'number'}-{self.at}"


def folders() -> list[Path]:
    """The checkpoints among the fixtures, the smallest of each format first."""
    found = [folder for folder in (*FIXTURES.glob("*/*"), *FIXTURES.glob("convert/*/*"))
             if folder.is_dir() and folder.parent.name not in ("make", "convert")]  # fmt: skip
    sized = {folder: sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in found}
    return sorted(
        (folder for folder in found if sized[folder] <= LARGEST), key=lambda each: (each.parent.name, sized[each])
    )


def _model(folder: Path) -> Path:
    """What the fields of a fixture are counted for: a family, whose config is its own, or a format."""
    return folder if folder.parent.name == "families" else folder.parent


def cases() -> Iterator[Case]:
    """One for each (format, kind of file, field): a second layer of the same fields tells nothing new."""
    seen = set()
    for folder in folders():
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            part = edits.part_of(file.read_bytes())
            for at, number in enumerate(edits.numbers(part) if part else ()):
                kind = _model(folder), file.suffix or file.name, number.field, type(number.value)
                if kind not in seen:
                    seen.add(kind)
                    yield Case(folder, file.relative_to(folder).as_posix(), number.field, at)


def verbs(source: Path, sound: Path, out: Path) -> list[list[str]]:
    """The lines that read all that a source says of itself; the conversions lay it out anew for ranks of other systems."""
    return [
        ["inspect", f"{source}"],
        ["verify", f"{source}"],
        ["diff", f"{source}", f"{sound}"],
        ["reshard", f"{source}", f"{out}-reshard", "--dry-run"],
        ["merge", f"{source}", f"{out}-merge"],
        *(["convert", f"{source}", f"{out}-{to}", "--to", to, *more] for to, *more in (
            ("safetensors",), ("sharded", "--tp", "2", "--dialect", "keep"), ("megatron-dist", "--tp", "1", "--dry-run"),
            ("paddle", "--tp", "2", "--dry-run", "--lenient"), ("deepspeed", "--dp", "2", "--zero", "1", "--dry-run"),
            ("megatron", "--tp", "2", "--dry-run", "--lenient"), ("meta", "--dry-run"), ("paddle-flex", "--dry-run"))),
    ]  # fmt: skip


def apart(lines: list[list[str]]) -> list[tuple[str, int, str]]:
    """(the line, its exit code or minus the signal that ended it, its messages) of each line, run in one fork."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            _in_fork(lines, write)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8", errors="replace") as pipe:
        done = [json.loads(line) for line in pipe.read().splitlines()]
    _, status = os.waitpid(pid, 0)
    found = [(" ".join(line), code, text) for line, (code, text) in zip(lines, done, strict=False)]
    if len(done) < len(lines):
        found.append((" ".join(lines[len(done)]), -os.WTERMSIG(status) if os.WIFSIGNALED(status) else 999, ""))
    return found


def _in_fork(lines: list[list[str]], write: int) -> None:
    """Run the lines; an alarm ends the process, which says that the line that follows the last result took too long."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    scratch = os.open("/dev/null", os.O_WRONLY)
    os.dup2(scratch, 1)
    told = os.memfd_create("stderr")
    os.dup2(told, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in lines:
        signal.alarm(SECONDS)
        code = run([*line, "--json", "-q"])
        signal.alarm(0)
        size = os.lseek(told, 0, os.SEEK_END)
        os.write(
            write,
            (
                json.dumps([code, os.pread(told, min(size, 2000), max(0, size - 2000)).decode("utf-8", "replace")])
                + "\n"
            ).encode(),
        )
        os.ftruncate(told, 0)
        os.lseek(told, 0, os.SEEK_SET)


def judge(case: Case, value: object, scratch: Path) -> list[str]:
    """What is wrong with how the verbs ended, for one value of one number."""
    source = scratch / "source" / case.folder.name
    shutil.rmtree(scratch / "source", ignore_errors=True)
    shutil.copytree(case.folder, source, ignore=shutil.ignore_patterns(*OTHERS.get(case.file, OTHERS[""])))
    file = source / case.file
    part = edits.part_of(file.read_bytes())
    file.write_bytes(part.file(edits.with_number(part, edits.numbers(part)[case.at], value)))
    out = scratch / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    wrong = []
    for line, code, text in apart(verbs(source, case.folder, out / "o")):
        if code == -signal.SIGALRM:
            wrong.append(f"{value!r}: more than {SECONDS} s: {line}")
        elif code not in CONTRACT or "E0704" in text or "Traceback" in text:
            wrong.append(f"{value!r}: {code}: {line}: {text[-600:]}")
    return wrong


CASES = list(cases())


@pytest.mark.share(40)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_number_that_no_file_can_hold_ends_soon_and_by_the_contract(case: Case, tmp_path: Path) -> None:
    wrong = [fault for value in VALUES for fault in judge(case, value, tmp_path)]
    assert not wrong, "\n".join(wrong)
