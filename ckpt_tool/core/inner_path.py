"""Inner paths: names of files below one folder, and the one rule that says which text may be one.

Text that comes out of a checkpoint or a plan (a shard's name, a tensor's name that becomes a folder's) is data. It is a
path only if it can lead nowhere but below the folder, on every file system that a checkpoint travels to:

    zero/model.layers.0.weight/fp32.pt      ("zero", "model.layers.0.weight", "fp32.pt")
    zero/../../victim/fp32.pt               refused: holds an empty, '.' or '..' component

Readers ask by `storage.source.safe_relative` (and `leaves` of what a listing found), plans by `check_outputs`, staging
by `inner_path` whenever it opens a file. The names of an unfinished run's own files are stated here too, because no
output may bear them: `is_leaving` and `is_journal` are the only ones that say which names are ours.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator

from ckpt_tool.errors import UnsafeInput

FOLDERS = 31  # above a file, below the root
COMPONENT = 255  # bytes of one name: NAME_MAX of Linux's file systems
LONGEST = 2000  # bytes of a path below the root: with the root, PATH_MAX of Linux is 4096
JOURNAL = ".ckpt-journal"  # what the journals in a staging folder are called, or begin with
FILES = f"{JOURNAL}-files"  # lists the files that are staged, or that are being removed
STAGED = ".ckpt-partial"  # what a staging folder's name ends with
REMOVED = ".ckpt-removed"  # what the name of something ends with that is being deleted
REPLACED = ".ckpt-replaced"  # and of an old output while a new one takes its name
VIEW = "//"  # parts a real file's path from what it is viewed as (`storage.views`)
STORES = ("s3", "s3a", "az", "azure")  # schemes of the stores that outputs go to: there keys are the paths
SHOWN = 20  # faults
_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9_.+-]{0,200}[A-Za-z0-9_+-])?"
_PLAIN = re.compile(
    rf"(?:{_WORD}/){{0,{FOLDERS}}}{_WORD}", re.ASCII
)  # nearly all: what it takes, all rules below let pass
_ODD = re.compile(r"[\\\x00-\x1f\x7f]")

# The whole form of each name that we make: a user's `notes.ckpt-partial` or `.ckpt-journal.txt` is no such name.
_STAGED_NAME = re.compile(rf"\..+{re.escape(STAGED)}", re.DOTALL)
_REMOVED_NAME = re.compile(rf"\..+\.[0-9a-f]{{8}}{re.escape(REMOVED)}", re.DOTALL)
_SET_ASIDE_NAME = re.compile(rf"\..+\.[0-9a-f]{{8}}{re.escape(REPLACED)}", re.DOTALL)
_JOURNAL_NAME = re.compile(
    rf"{re.escape(JOURNAL)}(?:-[1-9][0-9]{{0,8}}-of-[1-9][0-9]{{0,8}}|-by-[A-Za-z0-9_-]+|-claims|-files)?"
)


def is_leaving(name: str) -> bool:
    """Is it a name that a run of ours gives to what it writes in, deletes or replaces? An interrupted run leaves it.

    >>> is_leaving(".out.ckpt-partial"), is_leaving(".step-9.3f9c21aa.ckpt-removed"), is_leaving("out.ckpt-partial")
    (True, True, False)
    """
    return is_staging(name) or is_removed(name) or is_set_aside(name)


def is_removed(name: str) -> bool:
    """Is it the name of something that is being deleted?"""
    return _REMOVED_NAME.fullmatch(name) is not None


def is_set_aside(name: str) -> bool:
    """Is it the name of an old output while a new one takes its name?"""
    return _SET_ASIDE_NAME.fullmatch(name) is not None


def is_staging(name: str) -> bool:
    """Is it the name of a folder in which an output grows?"""
    return _STAGED_NAME.fullmatch(name) is not None


def is_journal(name: str) -> bool:
    """Is it the name of a journal in a staging folder, or of the folder of its claims?

    >>> is_journal(".ckpt-journal-2-of-8"), is_journal(".ckpt-journal.txt")
    (True, False)
    """
    return _JOURNAL_NAME.fullmatch(name) is not None


def is_view(path: str) -> bool:
    """Does the path name a view (`storage.views`) and no file?"""
    return VIEW in path


def base_of(path: str) -> str:
    """The real file of a path that may be a view's.

    >>> base_of("d/3f2a//zstd@0+900=5000"), base_of("d/3f2a")
    ('d/3f2a', 'd/3f2a')
    """
    return path.partition(VIEW)[0]


def unfit(path: str) -> str:
    """Why `path` is no plain relative path of safe components, as the rest of a sentence; "" where it is one."""
    folded = path.casefold()
    if len(path) <= LONGEST and _PLAIN.fullmatch(path) and ".ckpt-" not in folded:
        return ""

    parts = path.split("/")
    if not path:
        return "is empty"
    if path.startswith("/"):
        return "is absolute"
    if _ODD.search(path):
        return "holds a backslash or a control character"
    if not _encodable(path):
        return "is no text"
    if "://" in path or path.startswith("file:"):
        return "is a URL"
    if path[1:2] == ":":
        return "names a drive"
    if "" in parts or "." in parts or ".." in parts:
        return "holds an empty, '.' or '..' component"
    if any(part.endswith((" ", ".")) for part in parts):
        return "has a component that ends in a space or a dot"

    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in parts]
    if len(parts) > FOLDERS + 1 or max(sizes) > COMPONENT or sum(sizes) > LONGEST:
        return "is too long or too deep"
    if any(is_leaving(part) or is_journal(part) for part in folded.split("/")):
        return "holds a name of an unfinished run's own files"
    return ""


def leaves(path: str) -> bool:
    """May a relative path of real files, whose names may be odd, lead out of its folder (or be no path at all)?"""
    return path.startswith("/") or "\0" in path or ".." in path.split("/") or not _encodable(path)


def _shorten(path: str) -> str:
    return repr(path if len(path) <= 200 else f"{path[:100]}...{path[-97:]}")


def _encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # a lone surrogate out of a JSON escape
        return False
    return True


def inner_path(path: str) -> tuple[str, ...]:
    """The components of a path below the output's folder. Raises UnsafeInput E1600 for what may lead elsewhere."""
    reason = unfit(path)
    if reason:
        raise UnsafeInput(
            f"the output path {_shorten(path)} {reason}",
            code="E1600",
            hint="only plain names below the output's own folder are written",
        )
    return tuple(path.split("/"))


def check_outputs(paths: Iterable[str], *, named_by: Callable[[str], str | None], path: str | None, hint: str) -> None:
    """Raise UnsafeInput E1600 with every output path that can't be written, alone or with the others.

    named_by: the tensor whose name the path was made of, None where it is none's. path: the file that states the paths.
    """
    faults = list(output_faults(paths))
    if faults:
        keys = [named_by(at) for at, _ in faults[:SHOWN]]
        texts = [f"{_shorten(at)} {reason}" for at, reason in faults]
        named = [text if key is None else f"{key[:200]}: {text}" for key, text in zip(keys, texts, strict=False)]
        raise UnsafeInput(
            f"the output path {texts[0]}", code="E1600", path=path, key=keys[0], hint=hint, faults=named[1:]
        )


def output_faults(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(path, why) for every output path that can't be written, alone or with the others: unfit, twice, different from
    another in case alone (some file systems take the two for one), a file where another has a folder."""
    first_spelling: dict[str, str] = {}
    for path in paths:
        reason = unfit(path)
        folded = path.casefold()
        earlier = first_spelling.get(folded)
        if earlier is None:
            first_spelling[folded] = path
        elif not reason:
            reason = "is written twice" if earlier == path else f"differs from {_shorten(earlier)} in case alone"
        if reason:
            yield path, reason
    folders: dict[str, str] = {}
    for folded, path in first_spelling.items():
        above = folded.rpartition("/")[0]
        while above and above not in folders:
            folders[above] = path
            above = above.rpartition("/")[0]
    for folded in sorted(folders.keys() & first_spelling.keys()):
        yield folders[folded], f"needs a folder of the same name as the file {_shorten(first_spelling[folded])}"
