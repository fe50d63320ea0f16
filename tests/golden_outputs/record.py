"""What commands over the fixtures wrote and said, as digests: `golden.json` holds them, `test_golden_outputs.py`
compares.

    python tests/golden_outputs/record.py                 run everything, print what changed, rewrite golden.json
    python tests/golden_outputs/record.py --check         print what changed, write nothing (exit 1 if anything did)
    python tests/golden_outputs/record.py 'deepspeed*'    only the cases whose names fit one of the globs
    python tests/golden_outputs/record.py --keep FOLDER   leave the outputs there: run so with PYTHONPATH set to two
                                                          checkouts, two versions can be compared by `diff -r`

A case is a row of golden.json: `command`, and what came of it. To add one, write its name and command there and run
this. `{fixtures}` is the repository's fixtures/; `{inputs}` the files of inputs/ with these words replaced
(`{inputs}/hub` is fixtures/convert/llama/hf with the side files of inputs/beside); `{out}` the output, which may carry
a suffix; `{made:NAME}` the output of another case. Recorded are the exit code; `tree`, over the relative paths,
permissions and bytes of every file and folder of the output; and `report`, a digest for each key of the JSON document,
elapsed_s aside, so that a changed report is told from changed bytes.

Everything is run twice, from two working folders, under two names, and nothing is recorded that differs between them.
It does not depend on the order of the cases, nor on the processor: the digests were the same with
NPY_DISABLE_CPU_FEATURES and OPENBLAS_CORETYPE set to those of an old one.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FIXTURES = ROOT / "fixtures"
GOLDEN = HERE / "golden.json"
VOLATILE = {"elapsed_s"}
UNORDERED = {"findings"}  # verify lists what threads find as they find it
MADE = re.compile(r"\{made:([^}]+)\}")


def cases() -> dict[str, dict[str, Any]]:
    """Every row of golden.json by its name."""
    rows: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
    return rows


def tree_digest(path: Path) -> str:
    """Over relative paths, permissions and bytes of a folder, or of one file."""
    whole = hashlib.blake2b(digest_size=16)
    below = sorted(path.rglob("*"), key=lambda inner: inner.relative_to(path).as_posix())
    for inner in [path, *below]:
        info = inner.lstat()
        data = os.readlink(inner).encode() if inner.is_symlink() else inner.read_bytes() if inner.is_file() else b""
        head = (inner.relative_to(path).as_posix(), stat.S_IFMT(info.st_mode), stat.S_IMODE(info.st_mode), len(data))
        whole.update(repr(head).encode() + b"\n" + data)
    return whole.hexdigest()


def report_digest(document: Mapping[str, Any]) -> dict[str, str]:
    """A digest for each key."""
    texts = {key: json.dumps(value, sort_keys=True) for key, value in document.items() if key not in VOLATILE}
    texts |= {
        key: repr(sorted(json.dumps(each, sort_keys=True) for each in document.get(key, [])))
        for key in UNORDERED & texts.keys()
    }
    return {key: hashlib.blake2b(text.encode(), digest_size=4).hexdigest() for key, text in sorted(texts.items())}


@contextlib.contextmanager
def surroundings(folder: Path) -> Iterator[None]:
    """The working folder and the umask of a run."""
    before = Path.cwd()
    mask = os.umask(0o022)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        os.umask(mask)


class Room:
    """A folder in which cases are run; outputs that other cases read are made once."""

    def __init__(self, root: Path, rows: Mapping[str, Mapping[str, Any]], stem: str = "the-output") -> None:
        self.root = root
        self.rows = rows
        self.stem = stem
        self.inputs = root / "inputs"
        self.inputs.mkdir(parents=True)
        for path in sorted(path for path in (HERE / "inputs").iterdir() if path.is_file()):
            (self.inputs / path.name).write_text(self._filled(path.read_text()))
        for part in (FIXTURES / "convert" / "llama" / "hf", HERE / "inputs" / "beside"):
            shutil.copytree(part, self.inputs / "hub", dirs_exist_ok=True)

    def _filled(self, text: str) -> str:
        return text.replace("{fixtures}", str(FIXTURES)).replace("{inputs}", str(self.inputs))

    def output(self, name: str) -> Path:
        """Where the output of a case lies. Raises KeyError for a name that is no case."""
        word = next(word for word in shlex.split(self.rows[name]["command"]) if "{out}" in word)
        return self.root / re.sub(r"\W+", "-", name) / word.replace("{out}", self.stem)

    def run(self, name: str) -> dict[str, Any]:
        """One case: `exit`, `report` and, where it wrote, `tree`; `error`, the code and the message, where it
        failed."""
        command = self.rows[name]["command"]
        for other in MADE.findall(command):
            if not self.output(other).exists():
                self.run(other)
        line = MADE.sub(lambda found: shlex.quote(str(self.output(found[1]))), command)
        words = [str(self.output(name)) if "{out}" in word else self._filled(word) for word in shlex.split(line)]
        writes = "{out}" in command
        if writes:
            shutil.rmtree(self.output(name).parent, ignore_errors=True)
            self.output(name).parent.mkdir()
            words += ["--threads", "2", "--no-fsync"]
        code, said, complaint = self._command([*words, "--json", "--progress", "none"])
        if complaint:
            return {"exit": code, "error": complaint}
        for path, word in ((FIXTURES, "{fixtures}"), (self.inputs, "{inputs}"), (self.root, "{root}")):
            said = said.replace(json.dumps(str(path))[1:-1], word)
        said = said.replace(self.stem, "{out}")
        found: dict[str, Any] = {"exit": code, "report": report_digest(json.loads(said))}
        return {**found, "tree": tree_digest(self.output(name))} if writes else found

    def _command(self, words: list[str]) -> tuple[int, str, str]:
        """(exit code, stdout, the error's code and message)."""
        from ckpt_tool import cli

        out = io.StringIO()
        err = io.StringIO()
        with surroundings(self.root), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.run(words)
        if out.getvalue():
            return code, out.getvalue(), ""
        error = json.loads(err.getvalue().splitlines()[-1])["error"]
        return code, "", f"{error['code']}: {error['message']}"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed in a case, in words; [] where nothing did."""
    if "exit" not in before:
        return ["new"]
    found = [f"exit code {now['exit']}, was {before['exit']}"] if now["exit"] != before["exit"] else []
    found += [now.get("error", "no error")] if now.get("error") != before.get("error") else []
    found += ["bytes, paths or permissions of the output"] if now.get("tree") != before.get("tree") else []
    here = now.get("report", {})
    there = before.get("report", {})
    keys = [key for key in sorted(here.keys() | there.keys()) if here.get(key) != there.get(key)]
    return found + ([f"the report's {', '.join(keys)}"] if keys and "error" not in now else [])


def fixture_rows() -> dict[str, dict[str, Any]]:
    """`inspect` and `verify` of every fixture of a format."""
    from ckpt_tool.formats import registry

    rows = {}
    for name in registry.NAMES:
        for path in sorted((FIXTURES / name).glob("*")):
            if ".truth." not in path.name and path.suffix not in (".md", ".json"):
                place = path.relative_to(FIXTURES).as_posix()
                rows[f"inspect {place}"] = {"command": f"inspect {{fixtures}}/{place} --placement"}
                rows[f"verify {place}"] = {"command": f"verify {{fixtures}}/{place}"}
    return rows


def record(wanted: list[str], keep: Path | None, check: bool) -> int:
    """Run the cases, print what changed, rewrite golden.json. Returns the exit code."""
    rows = {**fixture_rows(), **cases()}
    names = [name for name in rows if not wanted or any(fnmatch.fnmatch(name, glob) for glob in wanted)]
    changed = unsteady = 0
    with tempfile.TemporaryDirectory() as scratch:
        first = Room(keep.resolve() if keep else Path(scratch, "first"), rows)
        second = Room(Path(scratch, "another place, of another name"), rows, "named-otherwise")
        for name in names:
            now = first.run(name)
            again = differences(now, second.run(name))
            if again:
                unsteady += 1
                print(f"{name}\n    not the same twice: {'; '.join(again)}")
                continue
            found = differences(rows[name], now)
            if found:
                changed += 1
                print(f"{name}\n    {rows[name]['command']}\n    {'; '.join(found)}")
                rows[name] = {"command": rows[name]["command"], **now}
    print(f"{len(names)} cases, {changed} changed, {unsteady} not the same twice")
    if not check and changed:
        write(rows)
    return 1 if unsteady or (check and changed) else 0


def write(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """golden.json, a line a case."""
    from ckpt_tool import __version__

    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", "ckpt_tool"], cwd=ROOT, capture_output=True, text=True
    )
    said = f"ckpt {__version__}, ckpt_tool/ as of commit {commit.stdout.strip() or 'unknown'}"
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items())]
    GOLDEN.write_text(
        f'{{"recorded_from": {json.dumps(said)},\n"cases": {{\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="GLOB")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.keep and given.keep.exists():
        parser.error(f"{given.keep} is there already")
    sys.exit(record(given.names, given.keep, given.check))
