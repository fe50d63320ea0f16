"""The folder of compiled kernels: what was tampered with, damaged or laid there by someone else is never loaded."""

from __future__ import annotations

import json
import os
import pwd
import stat
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ckpt_tool.device import cache
from ckpt_tool.errors import StorageError

ABOUT = {"kind": "host", "architectures": [], "sources": "s", "compiler": ["c"], "flags": []}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPT_CACHE", str(tmp_path / "cache"))
    found, why = cache.place_to_build()
    assert (found, why) == (tmp_path / "cache" / "kernels", "")
    return found


def keep(place: Path, content: bytes = b"code", key: str = "k") -> cache.Kept:
    return cache.keep(place, key, ABOUT, lambda path: void(path.write_bytes(content)))


def void(_: object) -> None:
    return None


def test_kept_and_found_again(place: Path) -> None:
    keep(place)
    found = cache.look_up(place, "k")
    assert found is not None and found.about["bytes"] == 4 and found.path.read_bytes() == b"code"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700 == stat.S_IMODE((place / "k").stat().st_mode)
    assert sorted(path.name for path in (place / "k").iterdir()) == ["about.json", "libck.so"]
    assert cache.look_up(place, "other") is None
    assert [(key, isinstance(kept, cache.Kept)) for key, kept in cache.every(place)] == [("k", True)]


def test_the_folder_is_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CKPT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/h")
    assert cache.folder() == Path("/h/.cache/ckpt/kernels")
    monkeypatch.setenv("CKPT_CACHE", "/c")
    assert cache.folder() == Path("/c/kernels")


def _others_may_write(place: Path) -> None:
    (place / "k").chmod(0o777)


def _others_may_write_the_file(place: Path) -> None:
    (place / "k" / "libck.so").chmod(0o722)


def _others_may_write_all(place: Path) -> None:
    place.chmod(0o770)


def _a_bit_turns(place: Path) -> None:
    with open(place / "k" / "libck.so", "r+b") as file:
        file.write(b"C")


def _the_file_is_a_link(place: Path) -> None:
    library = place / "k" / "libck.so"
    library.rename(place / "elsewhere.so")
    library.symlink_to(place / "elsewhere.so")


def _the_folder_is_a_link(place: Path) -> None:
    (place / "k").rename(place / "moved")
    (place / "k").symlink_to(place / "moved")


def _the_file_is_a_pipe(place: Path) -> None:
    (place / "k" / "libck.so").unlink()
    os.mkfifo(place / "k" / "libck.so", 0o600)


def _the_hash_is_another(place: Path) -> None:
    about = place / "k" / "about.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "sha256": "0" * 64}))


def _the_notes_are_cut(place: Path) -> None:
    about = place / "k" / "about.json"
    about.write_text(about.read_text()[:40])


def _the_notes_say_less(place: Path) -> None:
    (place / "k" / "about.json").write_text("{}")


POISONED = (
    _others_may_write,
    _others_may_write_the_file,
    _others_may_write_all,
    _a_bit_turns,
    _the_file_is_a_link,
    _the_folder_is_a_link,
    _the_file_is_a_pipe,
    _the_hash_is_another,
    _the_notes_are_cut,
    _the_notes_say_less,
)


@pytest.mark.parametrize("poison", POISONED)
def test_a_poisoned_cache_is_refused(place: Path, poison) -> None:
    keep(place)
    poison(place)
    with pytest.raises(cache.Refused):
        cache.look_up(place, "k")


@pytest.mark.parametrize("poison", [poison for poison in POISONED if poison is not _others_may_write_all])
def test_and_built_anew_in_its_place(place: Path, poison) -> None:
    keep(place)
    poison(place)
    keep(place, b"new code")
    found = cache.look_up(place, "k")
    assert found is not None and found.path.read_bytes() == b"new code" and not found.path.is_symlink()


def test_files_of_another_user_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(place)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(cache.Refused, match="belongs to user"):
        cache.look_up(place, "k")


def test_a_place_that_is_not_ours_is_left_for_a_private_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.chmod(0o777)
    private, why = cache.place_to_build()
    assert private != place and "may be written by others" in why
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    keep(private)
    assert cache.look_up(private, "k") is not None


def test_a_cache_that_can_t_be_made_is_left_for_a_private_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CKPT_CACHE", str(tmp_path / "file"))
    private, why = cache.place_to_build()
    assert "can't be made" in why and private.is_dir()


def test_what_was_checked_is_what_is_loaded(place: Path) -> None:
    """A swap between the check and the load changes nothing: the open file is loaded."""
    found = keep(place)
    (place / "k" / "libck.so").unlink()
    (place / "k" / "libck.so").write_bytes(b"evil")
    assert found.through().read_bytes() == b"code"


def test_a_build_that_fails_leaves_nothing_to_load(place: Path) -> None:
    def half(path: Path) -> None:
        path.write_bytes(b"ha")
        raise StorageError("the compiler died", code="E1555")

    with pytest.raises(StorageError, match="died"):
        cache.keep(place, "k", ABOUT, half)
    assert cache.look_up(place, "k") is None
    keep(place)
    assert [path.name for path in (place / "k").glob(".*")] == []


def test_one_builder_at_a_time(place: Path) -> None:
    with cache.lock(place, "k", 5):
        with pytest.raises(StorageError, match="another process") as caught, cache.lock(place, "k", 0.05):
            pass
        assert caught.value.code == "E1559" and caught.value.path == str(place / "k.lock")
        with cache.lock(place, "another key", 0.05):
            pass
        late = threading.Thread(target=lambda: cache.lock(place, "k", 10).__enter__())
        late.start()
    late.join(10)
    assert not late.is_alive()


def test_the_lock_is_no_link(place: Path, tmp_path: Path) -> None:
    (place / "k.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StorageError), cache.lock(place, "k", 1):
        pass
    assert not (tmp_path / "victim").exists()


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
