"""What `--force` replaces: the files that may go, each as it was when its reader accounted for it, and nothing else.

    out/                    ReplacedOutput({"model.safetensors": ..., "config.json": ...})
      model.safetensors
      config.json
      notes.txt             appeared later: `check` raises E2830, and `remove` leaves it

The one idea: nothing is ever removed as "all that is in a folder". A list says what may go, by name, inode, size and
time, and a file that is not on it, or is not the same any more, stays, and so do the folders on the way to it. Links
are never followed. Cost: one lstat a file. What it does not do: decide what is on the list (`conversion.accounted`).
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_tool.errors import OutputExists, wrap_os_error
from ckpt_tool.storage.descriptors import close_read
from ckpt_tool.storage.output.open_below import folder_beneath

SHOWN = 5  # names in a message
NAMED = 10_000  # names in a document
NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)  # why a folder stays that holds something
RECORD = "replaced"  # the name of its record, next to an output in a store
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Stamp(NamedTuple):
    """What was at a name. The time of the last change of the inode is left out: a mark on a file alters it."""

    kind: int  # the file type bits of the mode
    dev: int
    ino: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, info: os.stat_result) -> Stamp:
        return cls(stat.S_IFMT(info.st_mode), info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)

    @classmethod
    def of_object(cls, nbytes: int, etag: str) -> Stamp:
        """An object of a store, which is another one when its ETag is."""
        return cls(stat.S_IFREG, 0, int.from_bytes(blake2b(etag.encode(), digest_size=7).digest(), "big"), nbytes, 0)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.kind)


class ReplacedOutput(NamedTuple):
    """What may be removed."""

    files: Mapping[str, Stamp]  # path below the output -> what was there; "" is an output that is one file

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(seen.size for seen in self.files.values())

    def document(self) -> dict[str, Any]:
        """What a writer's document says of it: how many files, their bytes, and which. {} for nothing."""
        if not self.files:
            return {}
        names = [path or "." for path in self.files]
        return {"replaces": {"files": len(names), "bytes": self.nbytes, "names": names[:NAMED]}}

    def to_json(self) -> bytes:
        """As a record that another process reads (`from_json`)."""
        return json.dumps({path: list(seen) for path, seen in self.files.items()}).encode()

    @classmethod
    def from_json(cls, data: bytes | None) -> ReplacedOutput | None:
        """The value of a record, None where there is none, or none that is whole."""
        try:
            rows = json.loads(data or b"")
            return cls({str(path): Stamp(*map(int, row)) for path, row in rows.items()})
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None

    def check(self, output: Path) -> None:
        """Raise OutputExists E2830 unless exactly these files are at the output, as they were."""
        there = entries_below(output)
        changed = [path for path, seen in there.items() if self.files.get(path) != seen]
        gone = [path for path in self.files if path not in there]
        if changed or gone:
            raise OutputExists(
                f"{output} changed while this run was writing: {some_of([*changed, *gone])}",
                code="E2830",
                path=output,
                hint="see what writes there; the same command goes on from what is staged",
            )

    def remove(self, output: Path, last: str) -> bool:
        """Remove these files where they are still the same, and the folders that are empty then. Is all gone?

        last: the list of what may go. It goes last, and stays with whatever else is there: a folder of ours without
        a list seems to be all ours. What can't be removed stays, and nothing is raised: the caller says that it is
        still there.
        """
        alone = self.files.get("")
        try:
            info = os.lstat(output)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        if not stat.S_ISDIR(info.st_mode):
            if alone is None or alone != Stamp.of(info):
                return False
            with suppress(OSError):
                os.unlink(output)
            return not os.path.lexists(output)
        with suppress(OSError):
            folder = os.open(output, _FOLDER)
            try:
                remove_listed(folder, self.files)
                if set(os.listdir(folder)) <= {last}:
                    remove_listed(folder, {last: None})
            finally:
                close_read(folder)
        with suppress(OSError):
            os.rmdir(output)
        return not os.path.lexists(output)


def entries_below(output: Path) -> dict[str, Stamp]:
    """Everything at a path that is no folder, links as links, and every empty folder (its path ends in `/`).

    {} where nothing is there; a file or a link itself is "", an empty folder too. Raises StorageError.
    """
    found: dict[str, Stamp] = {}
    try:
        info = os.lstat(output)
    except FileNotFoundError:
        return found
    except OSError as e:
        raise wrap_os_error(e, output, "looking at what would be replaced") from e
    if not stat.S_ISDIR(info.st_mode):
        return {"": Stamp.of(info)}
    try:
        _list_folder(output, "", found)
    except OSError as e:
        raise wrap_os_error(e, output, "looking at what would be replaced") from e
    return found


def _list_folder(folder: Path, prefix: str, found: dict[str, Stamp]) -> None:
    """Add what is in a folder, links not followed. Raises OSError."""
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        path = prefix + entry.name
        info = entry.stat(follow_symlinks=False)
        if not stat.S_ISDIR(info.st_mode):
            found[path] = Stamp.of(info)
            continue
        before = len(found)
        _list_folder(folder / entry.name, path + "/", found)
        # An empty folder is an entry of its own; others are implied by their files.
        if len(found) == before:
            found[path + "/"] = Stamp.of(info)


def remove_listed(folder: int, files: Mapping[str, Stamp | None]) -> None:
    """Remove files below an open folder, then the folders on the way to them that are empty. A file that is not what
    was seen stays (None: whatever file it is). Raises OSError for what can't be removed.
    """
    above: set[str] = set()
    for path, seen in files.items():
        *parents, name = path.split("/")
        above.update("/".join(parents[:depth]) for depth in range(1, len(parents) + 1))
        with suppress(FileNotFoundError), folder_beneath(folder, parents) as at:
            info = os.lstat(name, dir_fd=at)
            if not stat.S_ISDIR(info.st_mode) and seen in (None, Stamp.of(info)):
                os.unlink(name, dir_fd=at)

    # The inner folders first. One that still holds something stays.
    for path in sorted(above, key=lambda path: -path.count("/")):
        *parents, name = path.split("/")
        try:
            with folder_beneath(folder, parents) as at:
                os.rmdir(name, dir_fd=at)
        except OSError as e:
            if e.errno not in (*NOT_EMPTY, errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # gone, or no folder
                raise


def some_of(paths: Iterable[str]) -> str:
    """The first names, and how many there are more.

    >>> some_of(["a", "b"]), some_of("abcdefgh")
    ('a, b', 'a, b, c, d, e and 3 more')
    """
    names = list(paths)
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"
