"""A tar archive as a tree: its members are read in place, nothing is unpacked.

    model.nemo                       ./model_config.yaml   bytes [512, 2,560) of the file
                                     ./model_weights/.metadata, ./model_weights/__0_0.distcp, ...

What NeMo calls `.nemo` is such an archive: known by `model_config.yaml` or `model_weights` among its members, not by
its name. A member is a range of one file, so an archive behind a URL is read by ranges too. `tarfile` reads the headers
(GNU and PAX names); members that are not regular files, are sparse or have the name of another member are refused, and
names must be safe relative paths (`safe_relative`).

Source: NVIDIA-NeMo/NeMo 2.5.0rc0 `core/connectors/save_restore_connector.py` (`_make_nemo_file_from_folder`: `w:`, no
compression; older ones are gzipped, which no range can be read of: refused with what to do). Cost: a read a member.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from typing import NamedTuple

from ckpt_tool.core.inner_path import base_of, is_view
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.errors import CorruptFile, StorageError, UnsafeInput
from ckpt_tool.storage.records import past_the_end
from ckpt_tool.storage.source import FILE_LIMIT, Identity, Tree, missing_file, safe_relative
from ckpt_tool.storage.stores.seekable import Seekable
from ckpt_tool.storage.torch_files.torch_stream import is_tar
from ckpt_tool.storage.views import behind

DAMAGED = "E2795"
ODD = "E2796"
_HEAD = 512  # bytes
_HEADER_LIMIT = 1 << 20  # bytes of one read of a header: names have some hundred
_PADDING = 1 << 16  # bytes after the last member, at most: the end mark, and zeros up to a full record
_OF_NEMO = ("model_config.yaml", "model_weights")


class TarMember(NamedTuple):
    """The place of a member in the archive, in bytes."""

    start: int
    size: int


class _Headers(Seekable):
    """The archive's bytes for `tarfile`, which seeks from header to header."""

    def __init__(self, tree: Tree, path: str) -> None:
        super().__init__(tree.size(path))
        self._tree = tree
        self._path = path

    def read(self, size: int = -1) -> bytes:
        count = max(0, self._size - self._at) if size < 0 else min(size, max(0, self._size - self._at))
        # `tarfile` reads as many bytes as a header states: a damaged one must not take all memory.
        if count > _HEADER_LIMIT:
            raise tarfile.ReadError(f"a header of {count} bytes")
        data = self._tree.read(self._path, self._at, count) if count else b""
        self._at += count
        return data


class ArchiveTree(Tree):
    """The members of an archive as a folder. Thread-safe. `local` is False: members have no descriptors."""

    local = False

    def __init__(self, archive: Tree, members: dict[str, TarMember], shown: str) -> None:
        """archive: the tree of that one file. members: by path, all of them or those below a folder."""
        self._archive = archive
        self._file = archive.single or ""
        self._members = members
        self.shown = shown
        self.single = None
        self.root = archive.root
        self.packed_in = archive.root / self._file if archive.local else None
        self._listing: dict[str, int] | None = None
        self._links = False
        self._lock = archive._lock
        self.odd_links = {}

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        """Those of the archive."""
        return self._archive.bytes_read

    def check_unchanged(self, *, pointers: bool = True) -> None:
        """As `Tree.check_unchanged`, for the archive."""
        self._archive.check_unchanged(pointers=pointers)

    def listing(self) -> dict[str, int]:
        """Path -> size in bytes of every member."""
        if self._listing is None:
            found = {path: member.size for path, member in self._members.items()}
            self._check_case(found)
            self._listing = dict(sorted(found.items()))
        return self._listing

    def below(self, folder: str) -> Tree:
        """The members below a folder of the archive, as a tree."""
        front = f"{folder}/"
        inside = {path[len(front) :]: each for path, each in self._members.items() if path.startswith(front)}
        return ArchiveTree(self._archive, inside, self.display(folder))

    def _member(self, path: str) -> TarMember:
        found = self._members.get(path)
        if found is None:
            raise missing_file(path, self.display(path))
        return found

    def open(self, path: str) -> int:
        """Never gives a descriptor. Raises Incomplete for a missing member, StorageError E0710 else."""
        self._member(path)
        raise StorageError(
            "a member of an archive has no descriptor",
            code="E0710",
            path=self.display(path),
            hint="unpack the archive: tar -xf FILE -C FOLDER",
        )

    def fd(self, path: str) -> int:
        """Raises as `open`."""
        return self.open(path)

    def identity(self, path: str) -> Identity:
        """The archive's, with the member's size."""
        member = self._member(base_of(path))
        return self._archive.identity(self._file)._replace(size=member.size)

    def identity_by_name(self, path: str) -> Identity:
        """The archive's as it is now, with the member's size."""
        member = self._member(base_of(path))
        return self._archive.identity_by_name(self._file)._replace(size=member.size)

    def size(self, path: str) -> int:
        """The size in bytes of a member or a view."""
        return self.views.size(path) if is_view(path) else self._member(path).size

    def expect(self, ranges: Iterable[tuple[str, int, int]], *, then: bool = False) -> None:
        found = (behind(*wanted) if is_view(wanted[0]) else wanted for wanted in ranges)
        places = ((self._member(path).start + at, nbytes) for path, at, nbytes in found)
        self._archive.expect(((self._file, at, nbytes) for at, nbytes in places), then=then)

    def view(self, path: str, offset: int, nbytes: int) -> bytes | memoryview:
        """As `read`, without a copy if the archive's tree can avoid one."""
        if is_view(path):
            return self.views.read(path, offset, nbytes)
        member = self._member(path)
        if offset < 0 or nbytes < 0 or offset + nbytes > member.size:
            raise past_the_end(self.display(path), offset, nbytes, member.size)
        return self._archive.view(self._file, member.start + offset, nbytes)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Exactly `nbytes` bytes from `offset` of the member. Raises CorruptFile when it ends before."""
        return bytes(self.view(path, offset, nbytes))

    def close(self) -> None:
        """Close the archive's descriptors."""
        self._archive.close()


def unpacked(tree: Tree) -> Tree:
    """The tree of the members if `tree` is a single file that is a NeMo archive; any other tree unchanged.

    Raises CorruptFile E2795 (an archive that ends early or has damaged headers), UnsafeInput E2796 and
    E0410 (members that are no plain files, names that lead elsewhere)."""
    if tree.single is None or tree.size(tree.single) < 2 * _HEAD or not is_tar(tree.head(tree.single, _HEAD)):
        return tree
    members = _members(tree, tree.single)
    if not any(path.split("/")[0].startswith(_OF_NEMO) for path in members):
        return tree
    return ArchiveTree(tree, members, tree.shown)


def _members(tree: Tree, file: str) -> dict[str, TarMember]:
    out: dict[str, TarMember] = {}
    size = tree.size(file)
    shown = tree.display(file)

    try:
        with tarfile.open(fileobj=_Headers(tree, file), mode="r:", errorlevel=2) as archive:
            for info in archive:
                if info.isdir():
                    continue
                path = info.name.removeprefix("./")
                safe_relative(path, named_in=shown, place=f"member {info.name[:80]}")
                # Sparse members are not one range of the file; of two with one name, readers pick different ones.
                if not info.isreg() or info.issparse() or path in out:
                    raise _odd(path, info, shown, twice=path in out)
                if info.size < 0 or info.offset_data + info.size > size or len(out) >= FILE_LIMIT:
                    raise tarfile.ReadError(f"member {path[:80]} of {info.size} bytes at {info.offset_data}")
                out[path] = TarMember(info.offset_data, info.size)
        end = max((each.start + ceil_div(each.size, _HEAD) * _HEAD for each in out.values()), default=0)
        # `tarfile` takes an archive that is cut at a header for complete.
        if not end + _HEAD <= size <= end + _PADDING:
            raise tarfile.ReadError(
                f"its last member ends at {end} of {size} bytes, without the mark of an archive's end after it"
            )
    except (tarfile.TarError, ValueError, OverflowError) as e:
        raise CorruptFile(
            f"the archive is damaged or cut short: {str(e)[:200]}",
            code=DAMAGED,
            path=shown,
            hint="compare its size with the original, and fetch it again",
        ) from e

    return out


def _odd(path: str, info: tarfile.TarInfo, shown: str, *, twice: bool) -> UnsafeInput:
    what = "is a link" if info.islnk() or info.issym() else "is no plain file"
    if twice:
        what = "appears in it twice"
    return UnsafeInput(
        f"the archive's member {path[:200]} {what}",
        code=ODD,
        path=shown,
        hint="unpack it where it can do no harm, look at it, and pass the folder",
    )
