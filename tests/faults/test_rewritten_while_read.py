"""A file that is rewritten in place while it is read: every verb that says something of values ends with E0604 (6).

A job that saves into the folder, a download that goes on, a copy over it: the descriptor stays the same, so the bytes
of two states would be mixed, and no read fails.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ckpt_tool.auditing import values
from ckpt_tool.cli import run
from ckpt_tool.commands import diff, inspect, verify

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCES = {
    "safetensors": "gguf-made/gemma3",
    "dcp": "dcp/tp2_dp2",
    "gguf": "gguf/llama3.gguf",
    "orbax": "orbax/files_zarr2",
    "torch": "torch/training.pt",
}
# verb -> (its options, where it begins to read values)
VERBS = {
    "verify": (["verify", "SRC"], verify, "_read_all"),
    "diff, left": (["diff", "SRC", "COPY"], diff, "_compared"),
    "diff, right": (["diff", "COPY", "SRC"], diff, "_compared"),
    "audit": (["audit", "SRC", "--values"], values, "findings"),
    "inspect": (["inspect", "SRC", "--stats"], inspect, "_add_statistics"),
}


def largest_file(source: Path) -> Path:
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def rewrite(path: Path, how: str) -> None:
    raw = path.read_bytes()
    if how == "in place":
        with path.open("r+b") as file:
            file.seek(len(raw) // 2)
            file.write(bytes(8))
        os.utime(path, ns=(1, 1))  # whatever the clock of the file system resolves
    elif how == "cut":
        os.truncate(path, len(raw) // 2)
    elif how == "another file":
        other = path.with_name("other")
        other.write_bytes(raw)
        os.replace(other, path)
    else:
        path.unlink()


@pytest.mark.share(4)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["in place", "cut", "another file", "removed"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", SOURCES)
def test_what_changes_while_it_is_read_is_said(
    name: str, verb: str, how: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    given = FIXTURES / SOURCES[name]
    source = tmp_path / "a" / given.name
    copy = tmp_path / "b" / given.name
    for target in (source, copy):
        target.parent.mkdir()
        if given.is_dir():
            shutil.copytree(given, target)
        else:
            shutil.copy(given, target)

    line, module, function = VERBS[verb]
    read_values = getattr(module, function)

    def reading(*arguments: object, **options: object) -> object:
        if when == "before":
            rewrite(largest_file(source), how)
        found = read_values(*arguments, **options)
        if when == "after":
            rewrite(largest_file(source), how)
        return found

    monkeypatch.setattr(module, function, reading)
    words = [{"SRC": str(source), "COPY": str(copy)}.get(word, word) for word in line]
    code = run([*words, "--json"])
    streams = capfd.readouterr()
    assert code == 6, (code, streams.err, streams.out[-500:])
    assert json.loads(streams.err.splitlines()[-1])["error"]["code"] in ("E0603", "E0604")
