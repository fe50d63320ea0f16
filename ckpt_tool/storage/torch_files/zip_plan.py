"""The whole layout of a torch zip before any tensor byte exists: offsets, literal bytes, CRC holes.

The idea: everything in the archive but the storages is known from the pickle and the storages' sizes, so the file's
size and every byte around the storages are computed at once; a storage's CRC-32, which is stored after it and again in
the directory, is left as two holes of 4 bytes that the executor fills when the values have moved.

    plan = plan_zip("model", pickle, [("0", 24)])
    plan.size, plan.offsets, plan.crcs         # 1577, (704,), ((732, 1206),)

Byte for byte the layout of torch 2.13's own writer (`zip_directory` describes it; miniz and `getPadding` of
`caffe2/serialize/inline_container.cc`), data descriptors included: `.format_version` 1 promises it, and torch computes
storage offsets from it without reading (`calculate_storage_offsets`, `map_location="meta"`). Zip64 sizes appear where
torch writes them. Fixed where torch's vary: dates are zero there too, `.data/serialization_id` is a hash of the pickle
and the sizes, so equal input gives equal bytes. What it does not do: TorchScript, compression, alignments but 64.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from ckpt_tool.errors import UsageError
from ckpt_tool.storage.torch_files.zip_directory import CENTRAL, END, END64, LOCAL, LOCATOR

ALIGNMENT = 64  # bytes
_WIDE = 0xFFFFFFFF
_FLAGS = 0x0800  # names are UTF-8
_DESCRIPTOR = 0x0008  # CRC and sizes follow the data


class ZipPlan(NamedTuple):
    """The whole layout of a torch zip before any tensor byte exists."""

    size: int  # bytes
    literals: tuple[tuple[int, bytes], ...]  # (offset, bytes), everything but the storages, holes zero
    offsets: tuple[int, ...]  # where the bytes of each given storage go, in bytes
    # for each given storage the offsets (bytes) of its CRC-32 holes, 4 bytes little-endian each; () for an empty one,
    # whose CRC is 0. All offsets count from `base` bytes before the zip.
    crcs: tuple[tuple[int, ...], ...]


class _ZipEntry(NamedTuple):
    """What the directory will say of a member."""

    name: bytes
    nbytes: int
    header: int
    crc: int | None  # None for a storage
    descriptor: int  # offset of the descriptor, -1 for an empty member


def plan_zip(root: str, pickle: bytes, storages: Sequence[tuple[str, int]], *, base: int = 0) -> ZipPlan:
    """Compute the layout of a torch zip.

    Args:
        root: its top folder: the file's stem, or `archive` for an item of a DCP file.
        pickle: the bytes of data.pkl. storages: (key, nbytes) in order.
        base: added to every offset of the plan (the item's place inside a `.distcp`); `size` stays the zip's own.
    Raises UsageError E2501 for a root or key that is no plain name.
    """
    for name in (root, *(key for key, _ in storages)):
        if not name or "/" in name or "\\" in name or "\0" in name or name in (".", ".."):
            raise UsageError(f"{name!r} is no plain name of a record", code="E2501", hint="choose another output name")
    writer = _ZipWriter(root)
    writer.literal("data.pkl", pickle)
    writer.literal(".format_version", b"1")
    writer.literal(".storage_alignment", str(ALIGNMENT).encode())
    writer.literal("byteorder", b"little")
    offsets = tuple(writer.hole(f"data/{key}", nbytes) for key, nbytes in storages)
    writer.literal("version", b"3\n")
    writer.literal(".data/serialization_id", _serialization_id(pickle, storages))
    crcs = writer.finish(len(storages))
    literals = tuple((base + at, bytes(piece)) for at, piece in writer.pieces if piece)
    crc_holes: list[tuple[int, ...]] = []
    for holes in crcs:
        crc_holes.append(tuple(base + hole for hole in holes))
    return ZipPlan(
        writer.at,
        literals,
        tuple(base + offset for offset in offsets),
        tuple(crc_holes),
    )


def _serialization_id(pickle: bytes, storages: Sequence[tuple[str, int]]) -> bytes:
    """40 decimal digits, as torch writes; torch hashes names and CRCs, this hashes what is known before the values."""
    import hashlib  # OpenSSL behind it takes longer to load than most checkpoints to inspect

    digest = hashlib.sha256(pickle + repr([tuple(item) for item in storages]).encode()).digest()
    return str(int.from_bytes(digest[:17], "big") % 10**40).zfill(40).encode()


class _ZipWriter:
    """Arranges members one after the other. `at`: bytes so far; `pieces`: (offset, bytes) of everything but
    storages."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.at = 0
        self.pieces: list[tuple[int, bytearray]] = [(0, bytearray())]
        self.entries: list[_ZipEntry] = []

    def _put(self, data: bytes) -> None:
        self.pieces[-1][1].extend(data)
        self.at += len(data)

    def _header(self, name: bytes, nbytes: int) -> None:
        """Write a local header, padded so that the data after it begins at a multiple of 64."""
        start = self.at
        wide = b""
        if nbytes >= _WIDE:
            wide += struct.pack("<QQ", nbytes, nbytes)
        if start >= _WIDE:
            wide += struct.pack("<Q", start)
        if wide:
            wide = struct.pack("<HH", 1, len(wide)) + wide
        bare = start + LOCAL.size + len(name) + len(wide) + 4
        # torch pads with an extra field of kind "FB", filled with "Z".
        padding = -bare % ALIGNMENT
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        flags = _FLAGS | (_DESCRIPTOR if nbytes else 0)
        self._put(LOCAL.pack(b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra)

    def _descriptor(self, header: int, nbytes: int, crc: int) -> int:
        """Write the data descriptor that follows a member's data. Returns its offset, -1 for an empty member."""
        if not nbytes:
            return -1
        where = self.at
        wide = nbytes >= _WIDE or header >= _WIDE
        self._put(b"PK\x07\x08" + struct.pack("<IQQ" if wide else "<III", crc, nbytes, nbytes))
        return where

    def literal(self, name: str, data: bytes) -> None:
        """Add a member whose bytes are known."""
        raw = f"{self.root}/{name}".encode()
        header = self.at
        crc = zlib.crc32(data)
        self._header(raw, len(data))
        self._put(data)
        self.entries.append(_ZipEntry(raw, len(data), header, crc, self._descriptor(header, len(data), crc)))

    def hole(self, name: str, nbytes: int) -> int:
        """Add a member whose bytes are written later. Returns their offset."""
        raw = f"{self.root}/{name}".encode()
        header = self.at
        self._header(raw, nbytes)
        offset = self.at
        self.at += nbytes
        self.pieces.append((self.at, bytearray()))
        descriptor = self._descriptor(header, nbytes, 0)
        self.entries.append(_ZipEntry(raw, nbytes, header, None if nbytes else 0, descriptor))
        return offset

    def finish(self, nstorages: int) -> list[tuple[int, ...]]:
        """Write the directory and the end records. Returns the offsets of the CRC holes of each storage, in order."""
        directory = self.at
        holes: list[tuple[int, ...]] = []
        for entry in self.entries:
            wide = struct.pack("<QQ", entry.nbytes, entry.nbytes) if entry.nbytes >= _WIDE else b""
            if entry.header >= _WIDE:
                wide += struct.pack("<Q", entry.header)
            extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
            size = min(entry.nbytes, _WIDE)
            header = min(entry.header, _WIDE)
            if entry.crc is None:
                # The CRC follows 4 bytes of signature in the descriptor, and 16 bytes of other fields in the directory.
                holes.append((entry.descriptor + 4, self.at + 16))
            # An empty storage has no descriptor, and its CRC is 0: no holes.
            elif entry.name[len(self.root.encode()) + 1 :].startswith(b"data/"):
                holes.append(())
            flags = _FLAGS | (_DESCRIPTOR if entry.nbytes else 0)
            lengths = (len(entry.name), len(extra), 0, 0, 0, 0)
            fixed = (b"PK\x01\x02", 0, 0, flags, 0, 0, 0, entry.crc or 0, size, size, *lengths, header)
            self._put(CENTRAL.pack(*fixed) + entry.name + extra)

        count = len(self.entries)
        nbytes = self.at - directory
        end = self.at
        self._put(END64.pack(b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, nbytes, directory))
        self._put(LOCATOR.pack(b"PK\x06\x07", 0, end, 1))
        few = min(count, 0xFFFF)
        self._put(END.pack(b"PK\x05\x06", 0, 0, few, few, min(nbytes, _WIDE), min(directory, _WIDE), 0))
        return holes
