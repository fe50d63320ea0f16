"""What damage does, over the registry and the fixtures: a file lost, cut, emptied, overwritten or two files of a save
mixed is an error of ours that names a place, or the values are all the same. Never a part of them in silence.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

FIXTURES = Path(__file__).parents[2] / "fixtures"
FILES = 6  # of each fixture: the first, the last, some between


def _cases():
    for name in registry.NAMES:
        for path in sorted((FIXTURES / name).glob("*")):
            if ".truth." not in path.name and path.suffix not in (".md", ".json"):
                yield pytest.param(path, id=f"{name}-{path.name}")


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _shorten(path: Path) -> None:
    os.truncate(path, max(0, path.stat().st_size - 1))


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _overwrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    noise = random.Random(7).randbytes(96)
    data[: len(noise)] = noise[: len(data)]
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "delete": os.unlink,
    "cut": _cut,
    "shorten": _shorten,
    "empty": _empty,
    "overwrite": _overwrite,
}


def some(files: list[Path]) -> list[Path]:
    """At most FILES, spread over the list."""
    if len(files) <= FILES:
        return files
    return [files[i * (len(files) - 1) // (FILES - 1)] for i in range(FILES)]


@pytest.mark.share(24)
@pytest.mark.parametrize("how", list(DAMAGES))
@pytest.mark.parametrize("path", list(_cases()))
def test_no_damage_is_a_silent_loss(path: Path, how: str, tmp_path: Path) -> None:
    if how == "delete" and path.is_file():
        pytest.skip("a checkpoint of one file: without it there is no source")
    source = tmp_path / path.name
    shutil.copytree(path, source) if path.is_dir() else shutil.copyfile(path, source)
    files = some(sorted(p for p in source.rglob("*") if p.is_file())) if source.is_dir() else [source]
    for number, file in enumerate(files):
        kept = file.read_bytes()
        if not kept:
            continue
        DAMAGES[how](file)
        out = tmp_path / f"out{number}"
        where = f"{file.relative_to(tmp_path)} {how}"
        try:
            report = convert(str(source), str(out), Reading(), Writing(to="sharded"), Silent())
        except CkptError as fault:
            assert fault.exit_code in (3, 4) or (fault.exit_code == 2 and how == "delete"), (where, fault)
            assert fault.message and (fault.path or fault.key), f"{where}: the error names no place: {fault}"
            assert not out.exists(), where
        else:
            same = diff(str(path), str(out), Reading(), progress=Silent())
            told = any("wrote no file" in note for note in report["notes"])  # DCP's safetensors state no shapes
            told |= any("and no optimizer" in note for note in report["notes"])  # the model is whole without it
            assert same["equal"] or told, f"{where}: values went in silence: {same['differences'][:3]}"
            shutil.rmtree(out)
        assert not list(tmp_path.glob(".*ckpt-partial*")), f"{where}: something was left"
        file.write_bytes(kept)
