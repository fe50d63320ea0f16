"""Symbolic links inside a checkpoint: which of them are followed, and why others are not.

    iter_5/model.safetensors -> ../shared/model.safetensors  followed if the user gave the folder above both
    snapshots/REV/config.json -> ../../blobs/1f2e            followed: a Hugging Face cache stores files this way
    mp_rank_01 -> /mnt/other/mp_rank_01                     "a link that leaves the folder": only with --follow-symlinks

To follow a link, its path is resolved, and the result is opened from the allowed folder above it, component by
component without following links: a link that is swapped in between is refused. Cost: one `realpath` per link.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

from ckpt_tool.errors import is_failure, wrap_os_error
from ckpt_tool.storage.descriptors import close_read
from ckpt_tool.storage.output.open_below import folder_beneath

CACHE_DEPTH = 6  # folders between a file of a snapshot and `snapshots`
LEAVES = "leaves the folder"
NOWHERE = "leads nowhere"
CIRCLE = "leads in a circle"
NO_FILE = "leads to no regular file"
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Bounds(NamedTuple):
    """The folders into which links may lead."""

    within: str  # the folder that the user gave, resolved
    blobs: str | None  # `blobs/` of the Hugging Face cache that contains that folder, None if it is in no cache

    @classmethod
    def of(cls, root: Path) -> Bounds:
        """The bounds of a tree at `root`. `blobs` itself must be a folder: were it a link, it could lead anywhere."""
        real = root.resolve()
        for snapshots in real.parents[:CACHE_DEPTH]:
            blobs = snapshots.parent / "blobs"
            if snapshots.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink():
                return cls(str(real), str(blobs))
        return cls(str(real), None)

    def inside(self, path: str | os.PathLike[str]) -> tuple[str, str] | None:
        """Returns (allowed folder, path below it) of the target of the link at `path`, which need not exist; None if
        the target is outside. Raises StorageError."""
        try:
            real = real_path(path)
        except OSError as e:
            raise wrap_os_error(e, path, "looking where it leads") from e
        for bound in (self.within, self.blobs):
            if bound is not None and real.startswith(os.path.join(bound, "")):
                return bound, os.path.relpath(real, bound)
        return None

    def holds(self, folder: str) -> bool:
        """Is this resolved folder inside the one that the user gave?"""
        return folder.startswith(os.path.join(self.within, ""))

    def why_not(self, path: str | os.PathLike[str]) -> str | None:
        """The reason why the link at `path` is not followed, None if it is. Raises StorageError."""
        try:
            os.stat(path)
        except OSError as e:
            if is_failure(e):
                raise wrap_os_error(e, path, "looking where it leads") from e
            if e.errno == errno.ELOOP:
                return CIRCLE
            return NOWHERE if self.inside(path) else LEAVES
        if self.inside(path) is not None:
            return None
        real = os.path.realpath(path)
        return CIRCLE if os.path.join(self.within, "").startswith(os.path.join(real, "")) else LEAVES


def real_path(path: str | os.PathLike[str]) -> str:
    """The resolved path, also of a link whose target does not exist.

    Raises OSError for failures of the system: `os.path.realpath` would then treat a link as a plain name, and callers
    would conclude that nothing refers to the link's target.
    """
    try:
        return os.path.realpath(path, strict=True)
    except OSError as e:
        if is_failure(e):
            raise
        return os.path.realpath(path)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Is an entry of a folder a folder itself, or a link to one? A link that leads in a circle is none. Raises
    OSError."""
    try:
        return entry.is_dir()
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
        return False


def open_below(folder: str | os.PathLike[str], path: str) -> int:
    """A descriptor of `path`, relative to `folder`, for reading; no link on the way is followed, and none at its
    end."""
    if "/" not in path:
        return os.open(os.path.join(folder, path), _FILE)
    *parents, name = path.split("/")
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with folder_beneath(top, parents) as at:
            return os.open(name, _FILE, dir_fd=at)
    finally:
        close_read(top)
