"""Compiled loops where the user has no folder to keep them in, or one that holds something else."""

from __future__ import annotations

import pwd
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ckpt_tool import compiled
from ckpt_tool.compiled import cache, library
from ckpt_tool.compiled.library import Library, Shelf


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME and without an entry in the list of users, as containers run with `--user 12345`."""

    def unknown(*_: Any) -> NoReturn:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "CKPT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)


def test_a_user_without_a_home_has_no_cache_and_builds_in_a_private_folder(homeless: None) -> None:
    assert cache.look_up(cache.folder(), "key") is None and list(cache.every(cache.folder())) == []
    place, why = cache.place_to_build()
    assert place.is_dir() and place.stat().st_mode & 0o077 == 0
    assert "no home folder" in why and "CKPT_CACHE" in why


@pytest.mark.parametrize("arguments", [["kernels", "info"], ["doctor", "-q"]])
def test_no_command_needs_a_home(arguments: list[str], homeless: None, capfd: Any) -> None:
    from ckpt_tool.cli import run

    assert run(arguments) == 0, capfd.readouterr().err


class Other(Shelf[Library]):
    """A shelf on which a library of another version lies."""

    source, worth = library.SOURCE, 0

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def load(self, path: Path) -> Library:
        return Library(self.path)

    def trial(self, library: Library) -> str:
        return ""


@pytest.mark.parametrize("source", ["int ck_linear(void) { return 0; }", "int nothing;"])
def test_a_library_that_lacks_functions_is_not_used_and_said(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    made = tmp_path / "libck.so"
    if subprocess.run(["cc", "-shared", "-x", "c", "-", "-o", str(made)], input=source.encode()).returncode:
        pytest.skip("no C compiler")
    kept = cache.Kept(made, -1, {})
    monkeypatch.setenv(compiled.VARIABLE, "on")
    monkeypatch.setattr(cache, "look_up", lambda place, key: kept)
    monkeypatch.setattr(library, "built", lambda source: kept)
    shelf = Other(made)
    assert shelf.ready(1, wait=True) is None
    assert any("not the library of this version" in note for note in compiled.notes)
    assert "Traceback" not in capfd.readouterr().err
