"""Checks of the places where a run writes, before a byte is written, and the hidden name under which an output grows.

An output is a local path or a place in a store (`place_of`); a URL is never taken for a path. It must not equal,
contain or be inside a source (`check_destination`, `check_apart`), and a file that an option writes in addition
(`--plan`, `--report`) must not be inside a source or an output (`check_beside`). Nothing here writes, except
`sweep_leavings`, which removes the remains of a finished run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from ckpt_tool.core.inner_path import STAGED, STORES
from ckpt_tool.core.urls import has_hidden_secrets
from ckpt_tool.errors import OutputExists, StorageError, UsageError, is_absence, wrap_os_error
from ckpt_tool.storage.opening import scheme_of, short_url
from ckpt_tool.storage.output.replaced import Stamp
from ckpt_tool.storage.source import Tree


def url_fault(path: str) -> tuple[str, str] | None:
    """(what is wrong with `path` as a place to write to, what to do instead), None for a path of this machine."""
    scheme = scheme_of(path)
    url = short_url(path) if scheme is None else None
    if url is not None:
        return (
            f"{path} is a URL in which a slash is missing",
            f"write {url}, as text and not as a Path; a folder is ./{path}",
        )
    if scheme is None:
        return None
    if scheme in ("file", "local"):
        return f"{path} is a URL, and outputs are named by paths", f"write it as a path: {path.partition('://')[2]}"
    if scheme in STORES:
        return f"{path} is a URL, and this is a file of this machine", "write it to a local path"
    return (
        f"{path} is a URL, and of stores only those of Azure and with S3's protocol are written to",
        "write to s3:// or az:// (Google Cloud Storage too has S3's protocol: HMAC keys and "
        "AWS_ENDPOINT_URL=https://storage.googleapis.com), or to a local path and upload that with rclone copy",
    )


class RemotePlace:
    """A place in a store, as far as an output's plan asks for its path."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._path = PurePosixPath(self.url.partition("://")[2])
        self.name = self._path.name
        self.stem = self._path.stem
        self.suffix = self._path.suffix

    def is_dir(self) -> bool:
        """What is there is looked at when it is written to."""
        return False

    def absolute(self) -> RemotePlace:
        return self

    def __str__(self) -> str:
        return self.url


Place = Path | RemotePlace


def place_of(path: str) -> Place:
    """The place of an output, given as a path or URL. Raises UsageError E1610 for a URL that can't be written to."""
    if has_hidden_secrets(path):
        raise UsageError(
            "the URL of an output has credentials or a signature in it, which are not read from there",
            code="E1610",
            path=path,
            hint="write the plain URL, and put the credentials into the store's own variables",
        )
    return RemotePlace(path) if scheme_of(path) in STORES and "://" in path else local_path(path)


def local_path(path: str) -> Path:
    """`path` as the place of an output. Raises UsageError E1610 for a URL: as a path it would be a folder `s3:`."""
    fault = url_fault(path)
    if fault is not None:
        raise UsageError(fault[0], code="E1610", hint=fault[1])
    return Path(path)


def staging_path(destination: Path) -> Path:
    """The hidden sibling in which `destination` grows."""
    return destination.parent / f".{destination.name}{STAGED}"


def exists(destination: Path) -> OutputExists:
    """The error (E0501) for a destination that exists and may not be replaced."""
    return OutputExists(
        f"{destination} exists",
        code="E0501",
        path=destination,
        hint="choose a new name, or --force to replace it in one step",
    )


def check_destination(destination: Path, sources: Iterable[Path], *, force: bool) -> None:
    """Refuse an output that exists (unless `force`), equals, contains or is inside a source, or has no writable parent.

    Compared by device and inode, so links, bind mounts and case-folding file systems don't fool it. Writes nothing.
    """
    parent = destination.parent
    try:
        parent_info = parent.stat()
    except OSError as e:
        if not is_absence(e):
            raise wrap_os_error(e, parent, "looking at the output's folder") from e
        raise StorageError(
            f"the folder {parent} does not exist",
            code="E0704",
            path=destination,
            hint=f"make it first: mkdir -p {parent}",
        ) from e

    if not stat.S_ISDIR(parent_info.st_mode):
        raise StorageError(f"{parent} is not a folder", code="E0704", path=destination)

    ours = _identity(destination)
    above = {_identity(folder) for folder in (parent, *parent.resolve().parents)}
    for source in sources:
        theirs = _identity(source)
        inside = {_identity(folder) for folder in source.resolve().parents}
        if theirs == ours or theirs in above or ours in inside:
            raise OutputExists(
                f"the output {destination} equals, holds or is inside the source {source}",
                code="E0502",
                path=destination,
                hint="choose another output: sources are never changed",
            )

    if ours is not None and not force:
        raise exists(destination)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(f"no permission to write into {parent}", code="E0705", path=destination)


def check_not_read(destination: Path, replaced: Mapping[str, Stamp], trees: Iterable[Tree]) -> None:
    """Refuse to replace files that a source has too, through links or mounts (E0502): they would be gone there.

    Two names of one file (hard links) are no fault: the source's stays.
    """
    if not replaced:
        return
    inodes = {(seen.dev, seen.ino) for seen in replaced.values()}
    top = os.path.realpath(destination)
    for tree in trees:
        if not tree.local:
            continue
        for path in tree.listing():
            file = tree.root / path
            try:
                info = os.stat(file)
            except OSError as e:
                if is_absence(e):
                    continue
                raise wrap_os_error(e, file, "looking whether the output holds it") from e
            if (info.st_dev, info.st_ino) not in inodes:
                continue
            if info.st_nlink == 1 or f"{os.path.realpath(file)}/".startswith(f"{top}/"):
                raise OutputExists(
                    f"the output {destination} holds a file of a source: {file} leads to it",
                    code="E0502",
                    path=destination,
                    hint="choose another output: sources are never changed",
                )


def check_apart(place: RemotePlace, sources: Iterable[str]) -> None:
    """Refuse an output in a store that equals, contains or is inside a source (E0502). URLs are compared as text."""
    ours = f"{place.url}/"
    for source in sources:
        theirs = f"{source.rstrip('/')}/"
        if ours.startswith(theirs) or theirs.startswith(ours):
            raise OutputExists(
                f"the output {place} equals, holds or is inside the source {source}",
                code="E0502",
                path=place.url,
                hint="choose another output: sources are never changed",
            )


def check_beside(path: str, option: str, sources: Iterable[str], outputs: Iterable[str | None]) -> None:
    """Refuse (exit 5) a file that `option` writes if it is, or is inside, a source or an output of the same run.

    Compared by device and inode if both exist; an output that does not exist yet is compared by its resolved name. URLs
    among `sources` contain no local file.
    """
    real = Path(os.path.realpath(os.path.dirname(os.path.abspath(path))), os.path.basename(path))
    above = {_identity(place) for place in (real, *real.parents)} - {None}
    for kind, roots in (("source", sources), ("output", outputs)):
        for root in roots:
            if not root or scheme_of(root) is not None:
                continue
            resolved = Path(os.path.realpath(root))
            if _identity(resolved) in above or (kind == "output" and resolved in (real, *real.parents)):
                raise OutputExists(
                    f"the file of {option} would be or be inside the {kind} {root}",
                    code="E0510",
                    path=path,
                    hint="name a file elsewhere: neither a source nor an output gets other files",
                )


def refuse_link(destination: Path) -> None:
    """Raise OutputExists E1603 if the output's name is a symbolic link. Replacing the link would leave its target in
    place, and replacing the target would remove something under another name."""
    if destination.is_symlink():
        raise OutputExists(
            f"{destination} is a symbolic link to {os.readlink(destination)}, and --force replaces no links",
            code="E1603",
            path=destination,
            hint=f"name what it points to ({destination.resolve()}), or remove the link",
        )


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of what a path leads to, None if nothing exists there. Raises StorageError if that can't be
    determined: two such places must not be taken for the same."""
    try:
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            try:
                info = path.stat()
            except OSError as e:
                if not is_absence(e):
                    raise
                return (-1, -1)  # a dangling link exists
    except OSError as e:
        if not is_absence(e):
            raise wrap_os_error(e, path, "looking at it") from e
        return None
    return info.st_dev, info.st_ino


def check_space(parent: Path, nbytes: int, files: int, *, already: int = 0) -> None:
    """Raise StorageError E0706 if the file system has no room for `nbytes` more bytes or `files` more inodes."""
    info = os.statvfs(parent)
    free = info.f_bavail * info.f_frsize
    need = max(0, nbytes - already)
    # A reserve of 2 %, at most 1 GiB.
    if need + min(need // 50, 1 << 30) > free:
        raise StorageError(
            f"the output needs {need} bytes and {parent} has {free} free",
            code="E0706",
            path=parent,
            hint="free some space, choose another disk, or leave states out (--state model)",
        )
    if info.f_files and files + 2 > info.f_favail:
        raise StorageError(
            f"the output needs {files} files and {parent} has {info.f_favail} inodes free",
            code="E0706",
            path=parent,
            hint="raise --max-shard-size, or choose another disk",
        )


def sweep_leavings(destination: Path) -> None:
    """Remove the staging folder next to a finished output if it is empty (the run was killed between rename and
    clean-up), or contains nothing but a second name of the output file (killed between link and removal of the old
    name)."""
    path = staging_path(destination)
    try:
        info = os.lstat(path)
        if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid():
            _remove_second_name(path / destination.name, destination)
            os.rmdir(path)
    except OSError:
        return


def _remove_second_name(name: Path, file: Path) -> None:
    """Remove `name` if it is a second name of `file`. Raises OSError."""
    try:
        info = os.lstat(name)
    except FileNotFoundError:
        return
    if stat.S_ISREG(info.st_mode) and os.path.samestat(info, os.lstat(file)):
        os.unlink(name)
