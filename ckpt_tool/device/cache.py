"""The folder of compiled kernels: private, and checked again before anything in it is loaded.

    $CKPT_CACHE or ~/.cache/ckpt / kernels /            0700
        3f9c...41/libck.so                               what is loaded
        3f9c...41/about.json                             its SHA-256 and what it was built from
        3f9c...41.lock                                   held while one process builds

A library is code, so an entry of the cache is used only if this user owns the folders and the file, no other user may
write them, none of them is a link, and the bytes have the hash that the build recorded. Any other entry is never
loaded: it is built again, in the same place if this user owns it, else in a new private folder for this process alone.
The open file that was checked is the one that is loaded, so a swap in between changes nothing.

Cost: one hash of some MB a process. The hash finds damage; against this user's own account nothing here protects.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_tool.errors import StorageError, wrap_os_error

LIBRARY = "libck.so"
ABOUT = "about.json"
HOMELESS = Path("/dev/null/ckpt/kernels")  # below a file there can be no folder
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ABOUT_LIMIT = 1 << 20  # bytes
_TOLD = {
    "kind": str,
    "architectures": list,
    "sources": str,
    "compiler": list,
    "flags": list,
    "sha256": str,
    "bytes": int,
}


class Kept(NamedTuple):
    """A library that may be loaded."""

    path: Path
    opened: int  # its open file, to be loaded through
    about: dict[str, Any]  # what the build wrote down

    def through(self) -> Path:
        """The name by which exactly the checked file is loaded. The file stays open as long as the process: the loader
        knows libraries by name, and a number that is used again would give it the wrong one."""
        name = Path(f"/proc/self/fd/{self.opened}")
        return name if name.exists() else self.path


class Refused(Exception):
    """What is in the cache may not be loaded; says why."""


def folder() -> Path:
    """Where compiled kernels are kept: $CKPT_CACHE, or the user's cache folder. It need not exist, and for
    a user who has no such folder (no HOME and no entry in the list of users, as in many containers) it never does."""
    root = os.environ.get("CKPT_CACHE")
    if root:
        return Path(root).absolute() / "kernels"
    caches = os.environ.get("XDG_CACHE_HOME")
    if not caches:
        try:
            caches = os.fspath(Path.home() / ".cache")
        except RuntimeError:
            return HOMELESS
    return Path(caches).absolute() / "ckpt" / "kernels"


def look_up(place: Path, key: str) -> Kept | None:
    """The library of that key, None where there is none. Raises Refused."""
    if place == HOMELESS:
        return None
    with contextlib.ExitStack() as opened:
        try:
            outer = _open_checked(opened, None, place, directory=True)
            inner = _open_checked(opened, outer, key, directory=True)
            about = _about(_open_checked(opened, inner, ABOUT))
            library = _open_checked(opened, inner, LIBRARY)
        except FileNotFoundError:
            return None
        if sha256_of(library) != about.get("sha256"):
            raise Refused(f"{place / key / LIBRARY} is not what was built: its SHA-256 differs from {ABOUT}")
        return Kept(place / key / LIBRARY, os.dup(library), about)


def every(place: Path) -> Iterator[tuple[str, Kept | str]]:
    """All entries, newest first: key and library, or why it is refused."""
    times: dict[str, float] = {}
    with contextlib.suppress(OSError):  # no such folder
        for entry in os.scandir(place):
            with contextlib.suppress(OSError):  # cleared by its builder at this moment
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    times[entry.name] = entry.stat(follow_symlinks=False).st_mtime
    for name in sorted(times, key=lambda name: -times[name]):
        try:
            kept = look_up(place, name)
        except Refused as e:
            yield name, str(e)
        else:
            if kept is not None:
                yield name, kept


def _open_checked(
    opened: contextlib.ExitStack, parent: int | None, name: str | Path, *, directory: bool = False
) -> int:
    """Open without following a link, and see that it is ours alone. Raises Refused, FileNotFoundError."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_DIRECTORY if directory else 0)
        number = os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise Refused(
            f"{name} is a link or no {'folder' if directory else 'file'}, or can't be read: {e.strerror}"
        ) from e
    opened.callback(os.close, number)
    about = os.fstat(number)
    if about.st_uid != os.geteuid():
        raise Refused(f"{name} belongs to user {about.st_uid}, not to this one ({os.geteuid()})")
    if about.st_mode & _OTHERS_WRITE:
        raise Refused(f"{name} may be written by others (mode {stat.S_IMODE(about.st_mode):04o})")
    if not directory and not stat.S_ISREG(about.st_mode):
        raise Refused(f"{name} is no regular file")
    return number


def _about(opened: int) -> dict[str, Any]:
    raw = os.pread(opened, _ABOUT_LIMIT, 0)
    try:
        about = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise Refused(f"{ABOUT} is no JSON") from e
    if not isinstance(about, dict) or any(not isinstance(about.get(key), kind) for key, kind in _TOLD.items()):
        raise Refused(f"{ABOUT} does not say what a build writes there")
    if not all(isinstance(number, int) for number in about["architectures"]):
        raise Refused(f"{ABOUT} does not say what a build writes there")
    return about


def sha256_of(opened: int) -> str:
    """The SHA-256 of an open file, from its start."""
    digest = hashlib.sha256()
    offset = 0
    while piece := os.pread(opened, 1 << 20, offset):
        digest.update(piece)
        offset += len(piece)
    return digest.hexdigest()


# -- building into it --------------------------------------------------------------------------------------------------


def place_to_build() -> tuple[Path, str]:
    """A folder that is ours alone, and why it is not the usual one ("" where it is)."""
    usual = folder()
    try:
        if usual == HOMELESS:
            raise Refused("this user has no home folder, and CKPT_CACHE names none")
        usual.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            _open_checked(opened, None, usual, directory=True)
        if os.access(usual, os.W_OK | os.X_OK):
            return usual, ""
        reason = f"{usual} can't be written"
    except Refused as e:
        reason = str(e)
    except OSError as e:
        reason = f"{usual} can't be made: {e.strerror}"
    try:
        private = Path(tempfile.mkdtemp(prefix="ckpt-kernels-"))
    except OSError as e:
        raise wrap_os_error(e, tempfile.gettempdir(), "making a folder for the compiled kernels") from e
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return private, f"{reason}; built in a private folder for this run alone"


def keep(place: Path, key: str, about: dict[str, Any], compile_to: Callable[[Path], None]) -> Kept:
    """Build the library of `key` under `place`: whole under its name, or not at all. Replaces what is there.

    Raises what `compile_to` raises, and StorageError where the folder can't be written."""
    home = place / key
    try:
        _clear(home)
        home.mkdir(mode=0o700)
        partial = home / f".{LIBRARY}.{os.getpid()}"
        compile_to(partial)
        partial.chmod(0o700)
        with open(partial, "rb") as library:
            about = {**about, "sha256": sha256_of(library.fileno()), "bytes": partial.stat().st_size}
        about_file = home / f".{ABOUT}.{os.getpid()}"
        about_file.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        about_file.chmod(0o600)
        os.replace(about_file, home / ABOUT)
        os.replace(partial, home / LIBRARY)
    except OSError as e:
        raise wrap_os_error(e, home, "keeping the compiled kernels") from e

    try:
        existing = look_up(place, key)
    except Refused as e:
        raise StorageError(
            f"the kernels were built, but may not be loaded: {e}",
            code="E1559",
            path=home,
            hint="set CKPT_CACHE to a folder of your own",
        ) from e

    if existing is None:
        raise StorageError(
            "the kernels vanished while they were built",
            code="E1559",
            path=home,
            hint="set CKPT_CACHE to a folder of your own",
        )

    return existing


def _clear(home: Path) -> None:
    """Remove what is under the name, a link or a file too."""
    if home.is_dir() and not home.is_symlink():
        shutil.rmtree(home)
    else:
        home.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(place: Path, key: str, seconds: float) -> Iterator[None]:
    """One builder of a key at a time. The lock goes with the process, however that ends. Raises StorageError E1559 when
    another one still holds it after that long."""
    path = place / f"{key}.lock"
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise wrap_os_error(e, path, "locking the compiled kernels") from e
    try:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StorageError(
                        f"another process has been building the kernels for {seconds:g} s",
                        code="E1559",
                        path=path,
                        hint="wait for it, or end it: the lock goes with it; CKPT_CACHE names another folder",
                    ) from None
                time.sleep(0.1)
        yield
    finally:
        os.close(number)
