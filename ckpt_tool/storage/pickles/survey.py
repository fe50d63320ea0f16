"""Every pickle in a tree and every name in it, file by file, whatever the format and however broken the rest is.

A file is looked at by its first bytes, never by its name alone: torch zips (and the zips back to back in a `.distcp`),
the torch stream before 1.6, bare pickles, tar archives of such files, NumPy files of objects. No reader of a format
takes part: a folder whose `.metadata` is cut short is surveyed like any other.

    survey(tree)  ->  Surveyed("model.pt", "archive/data.pkl", (GlobalUse(posix.system, ...),))

Cost: headers, directories and pickles; of storages nothing. What can't be looked into (a compressed pickle, a zip
without a directory beyond its first members) is reported in `unseen`: not looked at is not the same as harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.errors import CkptError
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.pickle_names import mentioned
from ckpt_tool.storage.pickles.pickle_values import GlobalUse
from ckpt_tool.storage.safetensors_files.safetensors_file import looks_like_header
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.torch_files.torch_stream import is_stream, is_tar
from ckpt_tool.storage.torch_files.zip_directory import CENTRAL, DIRECTORY_LIMIT, END, END64, LOCAL, LOCATOR

HEAD = 512  # bytes
STREAMS = 1000  # pickles back to back in one file
MEMBERS = 1_000_000
_COMMENT = 65_535
_OPENINGS = b"(}]c"  # what a pickle without a PROTO opcode begins with
_PICKLES = (
    ".pkl",
    ".pickle",
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".pdparams",
    ".pdopt",
    ".pd",
    ".pdema",
    ".metadata",
    ".distcp",
)


class Surveyed(NamedTuple):
    """A pickle."""

    path: str  # of its file
    member: str  # where in the file, "" for the file itself
    uses: tuple[GlobalUse, ...] = ()  # its globals
    unseen: str = ""  # why it was not looked into, "" where it was


def survey(tree: Tree, paths: Iterable[str] | None = None) -> Iterator[Surveyed]:
    """The pickles of `paths` (all files). A file that can't be read is reported as unseen. Never raises."""
    for path in tree.listing() if paths is None else paths:
        if tree.listing().get(path, -1) <= 0:
            continue
        try:
            yield from _range(tree, path, 0, tree.size(path), "")
        except CkptError as e:
            yield Surveyed(path, "", unseen=e.message)


def unsafe_names(tree: Tree, paths: Iterable[str]) -> list[str]:
    """`posix.system at FILE, opcode 12` for every name that would be code to run, as messages show it."""
    return [line for found in survey(tree, paths) for line in unsafe_lines(tree, found)]


def unsafe_lines(tree: Tree, found: Surveyed) -> list[str]:
    """The unsafe names of one pickle."""
    shown = tree.display(found.path)
    return [f"{pickles.shown(str(use))} at {shown}, opcode {use.position}" for use in found.uses if use.tier == 3]


def _range(tree: Tree, path: str, start: int, end: int, within: str) -> Iterator[Surveyed]:
    """The pickles in bytes [start, end) of a file. within: the archive's member that the range is."""
    head = tree.read(path, start, min(HEAD, end - start))
    tail = tree.read(path, max(start, end - END.size - _COMMENT), min(end - start, END.size + _COMMENT))
    zipped = b"PK\x05\x06" in tail  # whatever comes first: a file may be made to be two things
    if looks_like_header(head, end - start):
        pass
    elif is_stream(head) or head[:1] == b"\x80":
        yield from _streams(tree, path, start, end, within)
    elif is_tar(head) and not within:
        yield from _tar(tree, path, start, end)
    elif head[:6] == b"\x93NUMPY":
        if b"'O'" in head or b"|O" in head:
            size = 2 if head[6] == 1 else 4  # bytes of the header's length
            at = start + 8 + size + int.from_bytes(head[8 : 8 + size], "little")
            yield from _streams(tree, path, min(at, end), end, within)
    elif head[:4] == b"PK\x03\x04":
        if not zipped:
            yield from _members(tree, path, start, end, within)
    elif head[:1] in _OPENINGS:
        done = mentioned(tree, path, start, end)
        if done.uses and (done.end is not None or path.endswith(_PICKLES)):
            yield Surveyed(path, within, done.uses)
    if zipped:
        yield from _zips(tree, path, start, end, within)


def _streams(tree: Tree, path: str, start: int, end: int, within: str) -> Iterator[Surveyed]:
    """Pickles back to back, until something else follows."""
    at = start
    uses = dict[tuple[str, str], GlobalUse]()
    streams = 0
    unseen = ""
    while at < end and streams < STREAMS and (at == start or tree.read(path, at, 1)[:1] == b"\x80"):
        done = mentioned(tree, path, at, end)
        if done.lost is not None:
            unseen = f"broken at byte {done.lost}: nothing after it was looked at"
        for use in done.uses:
            kept = uses.setdefault((use.module, use.name), use)
            if use.tier > kept.tier:
                uses[use.module, use.name] = use
        streams += 1
        if done.end is None or done.end <= at:
            break
        at = done.end
    yield Surveyed(path, within, tuple(uses.values()), unseen)


def _zips(tree: Tree, path: str, start: int, end: int, within: str) -> Iterator[Surveyed]:
    """Yields the zip that ends at `end`, and those directly before it (the items of a `.distcp`)."""
    first = True
    while end > start:
        begin, entries = _directory(tree, path, start, end, comment=_COMMENT if first else 0)
        if begin is None:
            if tree.read(path, start, min(4, end - start)) == b"PK\x03\x04":
                yield from _members(tree, path, start, end, within)
            return
        for name, method, header in entries:
            if not name.endswith((".pkl", ".npy")):
                continue
            local = tree.read(path, header, LOCAL.size) if start <= header <= end - LOCAL.size else b""
            if local[:4] != b"PK\x03\x04":
                continue
            data = header + LOCAL.size + sum(LOCAL.unpack(local)[-2:])
            if method:
                yield Surveyed(path, pickles.shown(name), unseen="compressed")
            elif name.endswith(".pkl") and data < end:
                yield from _streams(tree, path, data, end, pickles.shown(name))
            elif data < end:
                yield from _range(tree, path, data, end, pickles.shown(name))
        first = False
        end = begin


def find_zips(tree: Tree, path: str) -> list[int]:
    """Where each of the zips begins that are stored back to back up to the end of a file, in their order; [] where none
    ends there. The first begins at 0 if the file holds nothing else."""
    begins: list[int] = []
    end = tree.size(path)
    while end > 0:
        begin, _ = _directory(tree, path, 0, end, comment=0)
        if begin is None:
            break
        begins.append(begin)
        end = begin
    return begins[::-1]


def _directory(
    tree: Tree, path: str, start: int, end: int, *, comment: int
) -> tuple[int | None, list[tuple[str, int, int]]]:
    """(where the zip that ends at `end` begins, its members as (name, method, offset of the header in the file));
    (None, []) where no directory can be followed."""
    back = min(end - start, END.size + comment)
    tail = tree.read(path, end - back, back)
    found = tail.rfind(b"PK\x05\x06")
    if found < 0 or found + END.size > len(tail):
        return None, []

    at = end - back + found
    _, _, _, _, count, nbytes, offset, _ = END.unpack_from(tail, found)
    directory = at - nbytes

    if at - start >= LOCATOR.size:
        locator = tree.read(path, at - LOCATOR.size, LOCATOR.size)
        place = at - LOCATOR.size - END64.size
        if locator[:4] == b"PK\x06\x07" and place >= start:
            record = tree.read(path, place, END64.size)
            if record[:4] == b"PK\x06\x06":
                *_, count, nbytes, offset = END64.unpack(record)
                directory = place - nbytes

    begin = directory - offset
    if not start <= begin <= directory <= at or count > MEMBERS or at - directory > DIRECTORY_LIMIT:
        return None, []

    raw = tree.read(path, directory, at - directory)
    entries = []
    where = 0
    while where + CENTRAL.size <= len(raw) and raw[where : where + 4] == b"PK\x01\x02":
        fields = CENTRAL.unpack_from(raw, where)
        names, extra, note = fields[10:13]
        header = fields[-1]
        name = raw[where + CENTRAL.size : where + CENTRAL.size + names].decode("utf-8", "replace")
        entries.append((name, fields[4], begin + header))
        where += CENTRAL.size + names + extra + note

    return (begin, entries) if entries or not count else (None, [])


def _members(tree: Tree, path: str, start: int, end: int, within: str) -> Iterator[Surveyed]:
    """A zip without its directory: from local header to local header as far as sizes are known. torch writes the pickle
    first."""
    at = start
    number = 0
    while at + LOCAL.size <= end and number < MEMBERS:
        head = LOCAL.unpack(tree.read(path, at, LOCAL.size))
        if head[0] != b"PK\x03\x04":
            break
        *_, method, _, _, _, nbytes, _, names, extra = head
        name = tree.read(path, at + LOCAL.size, min(names, end - at - LOCAL.size)).decode("utf-8", "replace")
        data = at + LOCAL.size + names + extra
        if data >= end:
            break

        if name.endswith(".pkl") and not method:
            yield from _streams(tree, path, data, end, pickles.shown(name))
            done = mentioned(tree, path, data, end)
            nbytes = nbytes or (done.end - data if done.end is not None else 0)
        elif name.endswith(".pkl"):
            yield Surveyed(path, pickles.shown(name), unseen="compressed")

        if not nbytes:
            yield Surveyed(
                path, within, unseen=f"the zip has no directory: nothing after {pickles.shown(name)} was looked at"
            )
            return

        gap = tree.read(path, data + nbytes, max(0, min(64, end - data - nbytes)))
        follows = gap.find(b"PK\x03\x04")
        if follows < 0:
            return

        at = data + nbytes + follows
        number = number + 1


def _tar(tree: Tree, path: str, start: int, end: int) -> Iterator[Surveyed]:
    """The members of a tar archive (a NeMo `.nemo`, torch before 0.1.10)."""
    at = start
    number = 0
    while at + 512 <= end and number < MEMBERS:
        block = tree.read(path, at, 512)
        name = block[:100].rstrip(b"\0").decode("utf-8", "replace")
        octal = block[124:136].strip(b" \0")
        if not name or not octal.isdigit():
            return
        nbytes = int(octal, 8)
        if 0 < nbytes <= end - at - 512:
            yield from _range(tree, path, at + 512, at + 512 + nbytes, pickles.shown(name))
        at = at + 512 + ceil_div(nbytes, 512) * 512
        number = number + 1
