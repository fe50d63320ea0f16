"""Which bytes of a checkpoint's files are covered by a checksum, and whether records that no tensor was read from are
intact.

Readers report the zips that they found in a file (`Tree.met`): the whole of a `model.pt`, the items of a `.distcp`.
Files that no reader opened (a `scheduler.pt` that is copied as it is) are examined here. Every member of a zip is a
record: storages that no tensor uses, `data.pkl`, `version`. The bytes between records (names, dates, padding) have no
checksum, nor has a record whose CRC is stored as 0, nor any file of another kind:

    looked = look(tree, ["model.pt", "config.json"], read={("model.pt", 704)})
    looked.damaged        # [CorruptFile E0351, archive/data/7]
    looked.uncovered      # {"model.pt": 1206, "config.json": 651}

Cost: the directories once more, and one read of the records that are not in `read`; files are shared out over threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ckpt_tool.errors import CkptError, SourceChanged
from ckpt_tool.run.checksum import crc32
from ckpt_tool.run.scan import each_of
from ckpt_tool.storage.pickles.pickle_reader import shown
from ckpt_tool.storage.records import FileExtent, damaged
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.torch_files.zip_directory import HEAD, ZipArchive, members

_TOGETHER = 4 << 20  # bytes of one read: small records including the gaps between them, large ones in pieces
_PICKLE = b"/data.pkl"  # the first member of a torch zip


class CoveredRange(NamedTuple):
    """A record of a file: its first byte, its size in bytes, its CRC-32, the member that it is."""

    offset: int
    nbytes: int
    crc: int
    member: str


class Looked(NamedTuple):
    """damaged: faults, file by file. uncovered: bytes without a checksum, by file; files without any are left out.
    members: the names of those records that were asked for by (file, offset)."""

    damaged: list[CkptError]
    uncovered: dict[str, int]
    members: dict[tuple[str, int], str]


def look(
    tree: Tree, files: Sequence[str], read: Collection[tuple[str, int]], named: Collection[tuple[str, int]] = ()
) -> Looked:
    """Check the records of `files` but those in `read`, as (file, offset), which were checked already. named: the
    records whose members are wanted. Raises SourceChanged."""
    found: dict[int, tuple[list[CkptError], int]] = {}
    known: dict[tuple[str, int], str] = {}

    def one(number: int) -> None:
        path = files[number]
        faults = list[CkptError]()
        records = list[CoveredRange]()
        try:
            for extent in extents(tree, path):
                records += stored(tree, path, extent)
            for fault in damaged_records(tree, path, [r for r in records if (path, r.offset) not in read]):
                faults.append(fault)
        except SourceChanged:
            raise
        except CkptError as e:
            faults.append(e)
        found[number] = faults, max(0, tree.size(path) - sum(record.nbytes for record in records))
        for record in records:
            place = (path, record.offset)
            if place in named:
                known[place] = record.member

    each_of(len(files), one)
    every = [found[number] for number in range(len(files))]
    uncovered = {path: left for path, (_, left) in zip(files, every, strict=True) if left}
    return Looked([fault for faults, _ in every for fault in faults], uncovered, known)


def extents(tree: Tree, path: str) -> list[FileExtent]:
    """The zips in a file: those that its reader found, or the whole file if it is a zip that no reader opened."""
    met = tree.met.zips(path)
    size = tree.size(path)
    if met or size < len(HEAD) or tree.head(path, len(HEAD)) != HEAD:
        return met
    whole = FileExtent(0, size)
    if _PICKLE in tree.head(path, 512):
        return [whole]
    try:  # a zip of another kind, such as an .npz: perhaps one whose members can be read in place
        members(ZipArchive(tree, path, 0, size))
    except CkptError:
        return []
    return [whole]


def stored(tree: Tree, path: str, extent: FileExtent) -> list[CoveredRange]:
    """The records of a zip that have a checksum, in their order. Raises what is wrong with its directory."""
    archive = ZipArchive(tree, path, extent.start, extent.nbytes)
    return [
        CoveredRange(extent.start + each.data, each.nbytes, each.crc32, shown(each.name))
        for each in members(archive)
        if each.nbytes and each.crc32
    ]


def damaged_records(tree: Tree, path: str, records: Sequence[CoveredRange]) -> Iterator[CkptError]:
    """A fault for every record whose bytes have another CRC-32."""
    for some in _together(records):
        start = some[0].offset
        stop = some[-1].offset + some[-1].nbytes
        if len(some) > 1 or stop - start <= _TOGETHER:
            data = memoryview(tree.read(path, start, stop - start))
            have = [crc32(data[each.offset - start :][: each.nbytes]) for each in some]
        else:
            have = [0]
            for at in range(start, stop, _TOGETHER):
                have[0] = crc32(tree.read(path, at, min(_TOGETHER, stop - at)), have[0])
        for each, crc in zip(some, have, strict=True):
            if crc != each.crc:
                yield damaged(tree.display(path), (each.offset, each.nbytes, each.crc), crc, each.member)


def _together(records: Sequence[CoveredRange]) -> Iterator[list[CoveredRange]]:
    """Records that one read takes: neighbours with little between them, or one large one."""
    some: list[CoveredRange] = []
    for each in records:
        if some:
            stop = some[-1].offset + some[-1].nbytes
            if each.offset - stop > 4096 or each.offset + each.nbytes - some[0].offset > _TOGETHER:
                yield some
                some = []
        some.append(each)
    if some:
        yield some
