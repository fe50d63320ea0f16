"""The torch .pt container (torch >= 1.6): a zip of stored records with a pickle that refers to them.

The idea: a record is bytes at an offset, so a tensor of a `.pt` file (or of an item in a DCP `.distcp`, which is a
whole zip at some offset) is a `StoredArray` like any other; opening reads the directory and the pickle, never a
storage.

    zip = TorchZip.open(tree, "model.pt")
    done = zip.pickled()                       # value: {"w": TensorRef(StorageRef("0", ...), shape=(2, 3), ...)}
    zip.array(done.value["w"])                 # StoredArray("model.pt", offset=704, F32, (2, 3), crc=(704, 24, ...))

Records (torch 2.13 `serialization.py` `_save`, `inline_container.cc`), below one root folder whose name is the file's
stem or `archive`: `data.pkl`; `.format_version` "1", `.storage_alignment` "64" and `byteorder` "little" | "big" (newer
versions only); `data/KEY` raw storages; `version` "3\\n"; `.data/serialization_id`. `constants.pkl` or `code/` make it
a TorchScript archive, which holds code and is refused. The layout of the zip itself: `zip_directory`; writing:
`zip_plan`.

Checked: all that `zip_directory` checks, the CRC of the records read here, one root, the byte order, and that each
storage that the pickle names is a record of the right length. CRCs of storages are not checked here (that would read
them): `array` hands them on for whoever reads the bytes. Torch itself never checks them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpt_tool.core.tensor import StoredArray
from ckpt_tool.errors import CkptError, CorruptFile, Incomplete, UnsafeInput
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.inline_arrays import array_in, place_arrays
from ckpt_tool.storage.pickles.pickle_values import ArrayRef, Pickled, StorageRef, TensorRef
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.torch_files.zip_directory import ZipArchive, ZipMember, members
from ckpt_tool.storage.torch_files.zip_plan import ZipPlan, plan_zip

__all__ = ["TorchZip", "ZipPlan", "ZipRecord", "plan_zip"]

PICKLE_LIMIT = 1 << 30  # bytes of data.pkl
SCRIPT = ("constants.pkl", "code/", "bytecode.pkl")


class ZipRecord(NamedTuple):
    """One stored member."""

    offset: int  # absolute bytes in the file to its first byte; nbytes
    nbytes: int
    crc32: int | None  # None when the writer did not compute one (a stored 0)


@dataclass(frozen=True, slots=True)
class TorchZip:
    """An opened torch zip: `records` by name below the root folder (`data.pkl`, `data/0`, `version`)."""

    # tree, path: the file that contains it
    tree: Tree
    path: str
    # start, length: the byte range of the file that is the zip (a DCP item is a range of a `.distcp`)
    start: int
    length: int
    root: str  # the archive's top folder
    records: dict[str, ZipRecord]
    byteorder: str  # "little"
    head: int  # bytes before the first storage's data
    tail: int  # bytes after the last storage's data
    _archive: ZipArchive = field(repr=False, compare=False)

    @staticmethod
    def open(tree: Tree, path: str, start: int = 0, length: int | None = None, *, tail: int = 0) -> TorchZip:
        """Parse and check the directory. Reads no storage bytes.

        tail: a guess of the bytes after the last storage. If it is right, opening a zip of one storage takes two
        preads.
            For an item of a DCP file with one tensor of `n` bytes: `length - before.head - n`, `before` being the
            previous item.
        Raises CorruptFile E0340-E0348 (exit 3), UnsafeInput E0430-E0438 (exit 4).
        """
        size = tree.size(path)
        nbytes = size - start if length is None else length
        if start < 0 or nbytes < 0 or start + nbytes > size:
            raise CorruptFile(
                f"a zip of {nbytes} bytes at {start}, but the file has {size}",
                code="E0340",
                path=tree.display(path),
                offset=min(max(start, 0), size),
                hint="the file is cut short: compare its size with the source",
            )

        archive = ZipArchive(tree, path, start, nbytes)
        found = members(archive, tail)
        root = _root(archive, found)
        cut = len(root) + 1
        records = {
            m.name[cut:]: ZipRecord(start + m.data, m.nbytes, m.crc32 if m.crc32 or not m.nbytes else None)
            for m in found
            if not m.name.endswith("/")
        }
        storages = [m for m in found if m.name.startswith("data/", cut)]
        head, behind = (storages[0].data, storages[-1].data + storages[-1].nbytes) if storages else (nbytes, 0)
        opened = TorchZip(tree, path, start, nbytes, root, records, "little", head, nbytes - behind, archive)
        opened._check_byteorder()
        tree.met.zip(path, start, nbytes)
        return opened

    def pickled(self, *, opcodes: int = pickles.OPCODE_LIMIT) -> Pickled:
        """The content of `data.pkl`, read without executing anything. Its CRC is verified, and every storage that it
        names must exist with the right length."""
        record = self.records["data.pkl"]
        if record.nbytes > PICKLE_LIMIT:
            raise self._corrupt(f"data.pkl has {record.nbytes} bytes, want at most {PICKLE_LIMIT}", "E0348", "data.pkl")
        place = pickles.shown(f"{self.root}/data.pkl")
        path = self.tree.display(self.path)
        done = pickles.load(self.read("data.pkl"), path=path, member=place, origin=record.offset, opcodes=opcodes)
        for ref in done.storages:
            self._check_storage(ref)
        place_arrays(done)
        return done

    def read(self, name: str) -> bytes:
        """A complete record, its CRC verified. For small records; storages are read through `array`."""
        record = self.records[name]
        data = self._archive.read(record.offset - self.start, record.nbytes)
        have = zlib.crc32(data)
        if record.crc32 is not None and have != record.crc32:
            raise self._corrupt(f"CRC-32 is {have:08x}, the zip says {record.crc32:08x}", "E0347", name)
        return data

    def array(self, tensor: TensorRef | ArrayRef) -> StoredArray:
        """The place of the tensor's bytes in the file: absolute offset, strides (None if contiguous), the record's CRC.
        A tensor that was saved as a NumPy array is in a view of the pickle."""
        if isinstance(tensor, ArrayRef):
            pickle = self.records["data.pkl"]
            return array_in(self.path, pickle.offset, pickle.nbytes, tensor)
        record = self._check_storage(tensor.storage)
        crc = None if record.crc32 is None or not record.nbytes else (record.offset, record.nbytes, record.crc32)
        offset = record.offset + tensor.dtype.nbytes(tensor.offset)
        strides = None if tensor.contiguous else tensor.stride
        return StoredArray(self.path, offset, tensor.dtype, tensor.shape, strides, crc)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_storage(self, ref: StorageRef) -> ZipRecord:
        record = self.records.get(f"data/{ref.key}")
        if record is None:
            raise Incomplete(
                f"the pickle names storage {ref.key}, but the zip has no record data/{ref.key}",
                code="E0345",
                path=self.tree.display(self.path),
                place=pickles.shown(f"{self.root}/data/{ref.key}"),
                hint="the archive was repacked without it: save the file again",
            )
        if record.nbytes != ref.nbytes:
            raise self._corrupt(
                f"the pickle says {ref.nbytes} bytes ({ref.numel} in a {ref.kind}), the record has {record.nbytes}",
                "E0344",
                f"data/{ref.key}",
            )
        return record

    def _check_byteorder(self) -> None:
        if "byteorder" not in self.records:
            return  # torch before 2.1 wrote none, and wrote on little-endian machines
        if self.records["byteorder"].nbytes > 16:
            raise self._corrupt("want little or big in 6 bytes", "E0346", "byteorder")
        order = self.read("byteorder")
        if order != b"little":
            big = order == b"big"
            raise self._corrupt(
                "the tensors are big-endian, which is not supported"
                if big
                else f"byte order {order[:16]!r}, want little",
                "E0346",
                "byteorder",
                "load and save it again with torch on a little-endian machine" if big else None,
            )

    def _corrupt(self, message: str, code: str, name: str, hint: str | None = None) -> CkptError:
        return CorruptFile(
            message,
            code=code,
            path=self.tree.display(self.path),
            offset=self.records[name].offset,
            place=pickles.shown(f"{self.root}/{name}"),
            hint=hint or "the file is damaged: fetch or save it again",
        )


def _root(archive: ZipArchive, found: list[ZipMember]) -> str:
    """The one top folder. Raises on two of them, on none with a data.pkl, on TorchScript."""
    roots = {m.name.partition("/")[0] for m in found}
    path = archive.tree.display(archive.path)
    if len(roots) > 1:
        raise UnsafeInput(
            f"the zip has {len(roots)} top folders, want one: {', '.join(map(pickles.shown, sorted(roots)[:4]))}",
            code="E0435",
            path=path,
            offset=archive.start,
            hint="torch takes one of them, another reader another; save it again with torch.save",
        )

    root = roots.pop() if roots else ""
    names = {m.name[len(root) + 1 :] for m in found}
    for name in names:
        if name in SCRIPT or name.startswith("code/"):
            raise UnsafeInput(
                f"this is a TorchScript archive (it has {pickles.shown(name)}): a program, not a checkpoint",
                code="E0438",
                path=path,
                offset=archive.start,
                hint="save the module's state_dict() instead",
            )

    if "data.pkl" not in names:
        raise CorruptFile(
            f"a zip without data.pkl: {', '.join(map(pickles.shown, sorted(names)[:4])) or 'it is empty'}",
            code="E0343",
            path=path,
            offset=archive.start,
            hint="no torch checkpoint; a .nemo, .npz or .keras file is another format",
        )

    return root
