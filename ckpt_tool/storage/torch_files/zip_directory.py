"""The directory of a torch zip: end records, central entries, local headers, checked against each other.

Layout as torch 2.13 writes it (miniz, `caffe2/serialize/inline_container.cc`), all little-endian, everything stored:

    local header   50 4b 03 04, version, flags 0x0808, method 0, time, date, crc 0, sizes 0, name length, extra length,
                   name, extra: [zip64 sizes] then id "FB" and padding, so that data starts at a multiple of 64
    data           the record
    descriptor     50 4b 07 08, crc, size, size: 32-bit, or 64-bit when the size or the header's offset needs it
    ...            the next member, without a gap
    central        50 4b 01 02, ..., crc, sizes, name, extra [zip64], offset of the local header: one per member
    zip64 end      50 4b 06 06, 44, ... (torch always writes it), its locator 50 4b 06 07, the end record 50 4b 05 06

The idea: an archive has one meaning only. Members are back to back from the first byte to the central directory, names
are plain, unique and below one folder, both headers of a member agree, nothing is compressed, nothing precedes or
follows. What a lenient reader would resolve by a rule of its own (the last of two members wins, a comment hides a
second end record) is refused: exit 4 where two readers could see different things, 3 where the file is just broken.

Cost: one pread for the end, one for the directory, one for each gap between storages: descriptors and headers, never a
storage's byte. Small records (data.pkl, version, ...) in the gaps are read with them and kept.
Source: PKWARE APPNOTE 6.3.10 sections 4.3-4.5.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from ckpt_tool.errors import CkptError, CorruptFile, UnsafeInput
from ckpt_tool.storage.pickles.pickle_reader import shown
from ckpt_tool.storage.source import Tree

MEMBER_LIMIT = 1_000_000
DIRECTORY_LIMIT = 128 << 20  # bytes
SMALL = 65536  # bytes; records up to this size between headers are read together with these
HEAD = b"PK\x03\x04"  # of a local header, and so of a zip
END = struct.Struct("<4s4H2IH")
LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQ2H2I4Q")
CENTRAL = struct.Struct("<4s6H3I5H2I")
LOCAL = struct.Struct("<4s5H3I2H")
TAIL = END.size + LOCATOR.size + END64.size  # 98 bytes
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-+=@ ,()\[\]{}~#%&!$'^]+(/[A-Za-z0-9_.\-+=@ ,()\[\]{}~#%&!$'^]+)*\Z")
_METHODS = {8: "deflated", 9: "deflated", 12: "bzip2-compressed", 14: "LZMA-compressed", 93: "zstd-compressed"}


class ZipMember(NamedTuple):
    """One member."""

    name: str
    flags: int
    crc32: int
    nbytes: int
    header: int  # bytes from the archive's start to its local header
    raw_name: bytes
    data: int = -1  # to its first byte


class ZipArchive:
    """A byte range of a file that is a zip, and the faults it can have.

    start: bytes from the start of the file; length: bytes. Offsets below are from `start` unless said otherwise.
    """

    __slots__ = ("_ahead", "_first", "_tail", "length", "path", "start", "tree")

    def __init__(self, tree: Tree, path: str, start: int, length: int) -> None:
        self.tree = tree
        self.path = path
        self.start = start
        self.length = length
        # What was read and is kept, each (offset, bytes): the first headers, those read last, the end.
        self._first = self._ahead = self._tail = (0, b"")

    def read(self, offset: int, nbytes: int, ahead: int = 0) -> bytes:
        """Bytes of the archive: from what is at hand, else by one pread of `nbytes` and up to `ahead` more."""
        for at, piece in (self._ahead, self._tail, self._first):
            if at <= offset and offset + nbytes <= at + len(piece):
                return piece[offset - at : offset - at + nbytes]
        if offset + nbytes + ahead > self.length:
            raise self.corrupt(f"{nbytes} bytes wanted at {offset} of {self.length}", "E0341", min(offset, self.length))
        piece = self.tree.read(self.path, self.start + offset, nbytes + ahead)
        self._ahead = (offset, piece)
        if offset == 0:
            self._first = self._ahead
        return piece[:nbytes]

    def read_end(self, nbytes: int) -> bytes:
        """The last `nbytes` bytes (fewer when the archive is shorter), kept."""
        nbytes = min(nbytes, self.length)
        offset = self.length - nbytes
        self._tail = (offset, self.tree.read(self.path, self.start + offset, nbytes))
        return self._tail[1]

    def corrupt(self, message: str, code: str, offset: int, *, place: str | None = None, hint: str = "") -> CkptError:
        """The error for damage at byte `offset` of the archive. place: the member."""
        return CorruptFile(
            message,
            code=code,
            path=self.tree.display(self.path),
            offset=self.start + offset,
            place=shown(place) if place else None,
            hint=hint or "the file is damaged: fetch or save it again",
        )

    def unsafe(self, message: str, code: str, offset: int, *, place: str | None = None, hint: str = "") -> CkptError:
        """The error for a zip that was made to deceive, at byte `offset` of the archive. place: the member."""
        return UnsafeInput(
            message,
            code=code,
            path=self.tree.display(self.path),
            offset=self.start + offset,
            place=shown(place) if place else None,
            hint=hint or "two readers could see two different files in it; save it again with torch.save",
        )


def members(archive: ZipArchive, tail: int = 0) -> list[ZipMember]:
    """Every member in the order of the file, all checks done. tail: how many bytes to read at the end at first.

    Raises CorruptFile E0340-E0348 and UnsafeInput E0430-E0437.
    """
    directory, size, count = _end(archive, max(tail, TAIL))
    if archive.length - directory > max(tail, TAIL):
        archive.read_end(archive.length - directory)
    entries = _central(archive, archive.read(directory, size), directory, count)
    entries.sort(key=lambda member: member.header)
    return _local(archive, entries, directory)


# -- the end ----------------------------------------------------------------------------------------------------------


def _end(archive: ZipArchive, tail: int) -> tuple[int, int, int]:
    """Offset and size (bytes) of the central directory and the number of members."""
    length = archive.length
    if length < END.size:
        raise _no_end(archive)

    piece = archive.read_end(tail)
    signature, disk, first, here, count, size, offset, comment = END.unpack_from(piece, len(piece) - END.size)
    # A comment could hide a second end record, which another reader would prefer.
    if signature != b"PK\x05\x06" or comment:
        raise _no_end(archive)
    if disk or first or here != count:
        raise archive.corrupt("the zip is split over several disks", "E0342", length - END.size)

    stop = length - END.size
    # 42 bytes: the zip64 locator (20) and the end record (22).
    if length >= TAIL and piece[-42:-38] == b"PK\x06\x07":
        stop = length - TAIL
        count, size, offset = _end64(archive, piece, count, size, offset)
    elif count == 0xFFFF or 0xFFFFFFFF in (size, offset):
        raise archive.corrupt("the end record points to a zip64 record that is not there", "E0342", stop)

    if offset + size > stop or size < count * CENTRAL.size:
        raise archive.corrupt(
            f"{count} members in a directory of {size} bytes at {offset}, but the archive has {stop} bytes "
            "before its end"
            " record",
            "E0341",
            stop,
            hint="the file is cut short or damaged: compare its size with the source",
        )

    # Bytes before the zip or after the directory could be a second file to another reader.
    if offset + size < stop:
        raise archive.unsafe(
            f"{stop - offset - size} bytes precede the zip or follow its directory",
            "E0436",
            0,
        )

    if count > MEMBER_LIMIT or size > DIRECTORY_LIMIT:
        raise archive.corrupt(f"{count} members, want at most {MEMBER_LIMIT}", "E0348", stop)
    return offset, size, count


def _end64(archive: ZipArchive, piece: bytes, *small: int) -> tuple[int, int, int]:
    """Count, size and offset from the zip64 end record, which must be directly before its locator and agree with the
    32-bit end record."""
    where = archive.length - TAIL
    _, disk, at, disks = LOCATOR.unpack_from(piece, len(piece) - 42)
    signature, size, _, needs, d1, d2, here, count, nbytes, offset = END64.unpack_from(piece, len(piece) - TAIL)
    if signature != b"PK\x06\x06" or size != 44 or at != where or disk or d1 or d2 or disks > 1 or here != count:
        raise archive.corrupt("the zip64 end record contradicts its locator", "E0342", where)
    wide = (count, nbytes, offset)
    for low, high, most in zip(small, wide, (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF), strict=True):
        if low not in (high, most):
            raise archive.corrupt(f"the zip64 end record says {high} where the end record says {low}", "E0342", where)
    return wide


def _no_end(archive: ZipArchive) -> CkptError:
    """Why the file does not end as a zip does: it is something else, is cut short, or carries a comment."""
    length = archive.length
    head = archive.read(0, min(64, length))
    other = _other(head)
    if other:
        return archive.corrupt(f"this is {other[0]}, not a torch zip", "E0340", 0, hint=other[1])
    window = archive.read_end(65557 + TAIL)
    found = window.rfind(b"PK\x05\x06")
    if found >= 0 and found + END.size <= len(window):
        at = length - len(window) + found
        return archive.unsafe(f"{length - at - END.size} bytes follow the zip's end record", "E0437", at)
    last = window.rfind(HEAD)
    begun = ""
    if last >= 0 and last + LOCAL.size <= len(window):
        name_size = LOCAL.unpack_from(window, last)[9]
        name = shown(window[last + 30 : last + 30 + name_size].decode("utf-8", "replace"))
        begun = f"; the last member that begins in its last {len(window)} bytes is {name}"
    return archive.corrupt(
        f"no central directory at the end of {length} bytes{begun}",
        "E0340",
        length,
        hint="the file is cut short: compare its size with the source, fetch it again",
    )


def _other(head: bytes) -> tuple[str, str] | None:
    """(what a file is, what to do) from its first bytes when it is no zip at all; None if unknown or a zip."""
    if not head:
        return "an empty file", "fetch or save it again"
    if head.startswith(b"PK"):
        return None
    # A safetensors header: its length as u64, then JSON.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 27:
        return "a safetensors file", "give it the ending .safetensors"

    from ckpt_tool.storage.magic import advice, what_is

    name = what_is(head)
    return (name, advice(head) or "") if name else None


# -- the central directory --------------------------------------------------------------------------------------------


def _central(archive: ZipArchive, raw: bytes, directory: int, count: int) -> list[ZipMember]:
    """The members according to the central directory."""
    found: list[ZipMember] = []
    seen: set[bytes] = set()
    at = 0

    for _ in range(count):
        if at + CENTRAL.size > len(raw):
            raise archive.corrupt("the central directory ends inside an entry", "E0341", directory + at)
        fields = CENTRAL.unpack_from(raw, at)
        signature, made_by, _, flags, method, _, _, crc, packed, nbytes, n, e, c, disk, _, mode, header = fields
        if signature != b"PK\x01\x02" or at + CENTRAL.size + n + e + c > len(raw):
            raise archive.corrupt(
                "the central directory has no entry where the next one should begin", "E0341", directory + at
            )
        name = raw[at + CENTRAL.size : at + CENTRAL.size + n]
        if e:
            extra = raw[at + CENTRAL.size + n : at + CENTRAL.size + n + e]
            nbytes, packed, header, disk = _zip64(archive, extra, (nbytes, packed, header, disk), directory + at)
        # Attributes are Unix modes only if made on Unix (3).
        text = _plain(archive, name, flags, mode if made_by >> 8 == 3 else 0, directory + at)
        # 0x2041: encrypted, strongly encrypted, encrypted directory.
        if method or flags & 0x2041 or disk:
            raise _unreadable(archive, text, method, flags, directory + at)
        if packed != nbytes:
            raise archive.corrupt(f"{packed} stored bytes of {nbytes}", "E0341", directory + at, place=text)
        if name in seen:
            raise archive.unsafe(f"two members are called {text}", "E0430", directory + at, place=text)
        seen.add(name)
        found.append(ZipMember(text, flags, crc, nbytes, header, name))
        at += CENTRAL.size + n + e + c

    if at != len(raw):
        raise archive.unsafe(f"{len(raw) - at} bytes after the directory's {count} entries", "E0437", directory + at)
    return found


def _zip64(archive: ZipArchive, extra: bytes, fields: tuple[int, ...], where: int) -> tuple[int, ...]:
    """Size, packed size, header offset and disk with their 64-bit forms from the extra field, where they overflowed."""
    at = 0
    wide = list(fields)
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        body = extra[at + 4 : at + 4 + size]
        if len(body) < size:
            break
        if kind == 1:
            for i, (value, most, width) in enumerate(
                zip(fields, (*[0xFFFFFFFF] * 3, 0xFFFF), (8, 8, 8, 4), strict=True)
            ):
                if value == most:
                    if len(body) < width:
                        raise archive.corrupt("a zip64 field is cut short", "E0342", where)
                    wide[i] = int.from_bytes(body[:width], "little")
                    body = body[width:]
            return tuple(wide)
        at += 4 + size
    if 0xFFFFFFFF in fields[:3]:
        raise archive.corrupt("a 64-bit size without its zip64 field", "E0342", where)
    return fields


def _plain(archive: ZipArchive, raw: bytes, flags: int, mode: int, where: int) -> str:
    """The member's name as text, refused unless it is a plain relative path to a regular file or a folder."""
    try:
        name = raw.decode("utf-8" if flags & 0x800 else "ascii")
    except UnicodeDecodeError as e:
        raise archive.corrupt(f"a member's name is neither ASCII nor UTF-8: {e.reason}", "E0341", where) from e
    reason = ""
    parts = name.split("/")
    if not _PLAIN_NAME.match(name) or "." in parts or ".." in parts:
        parts = name.removesuffix("/").split("/")
        if name.startswith("/"):
            reason = "is absolute"
        elif "\\" in name or any(ord(c) < 32 for c in name):
            reason = "holds a backslash or a control character"
        elif any(part in ("", ".", "..") for part in parts):
            reason = "holds an empty, '.' or '..' component"
        elif ":" in parts[0]:
            reason = "names a drive"
    if (mode >> 16) & 0o170000 == 0o120000:
        reason = "is a symbolic link"
    if reason:
        raise archive.unsafe(
            f"the member name {shown(name)!r} {reason}", "E0434", where, hint="no torch file has such a member"
        )
    return name


def _unreadable(archive: ZipArchive, name: str, method: int, flags: int, where: int) -> CkptError:
    if flags & 0x2041:
        return archive.corrupt("the member is encrypted", "E0342", where, place=name, hint="decrypt the archive first")
    if method in _METHODS and name.partition("/")[2].startswith("code/"):
        return archive.unsafe(
            "this is a TorchScript archive (it has the source of a program): no checkpoint",
            "E0438",
            where,
            place=name,
            hint="load it with torch.jit.load, and save the state_dict() of the module",
        )
    if method in _METHODS:
        return archive.unsafe(
            f"the member is {_METHODS[method]}; torch stores members as they are",
            "E0433",
            where,
            place=name,
            hint="unpacked it could be of any size; save it again with torch.save",
        )
    if method:
        return archive.corrupt(f"unknown compression method {method}", "E0342", where, place=name)
    return archive.corrupt("the member is on another disk", "E0342", where, place=name)


# -- local headers ----------------------------------------------------------------------------------------------------


def _local(archive: ZipArchive, entries: list[ZipMember], directory: int) -> list[ZipMember]:
    """The members with their data offsets; local headers agree with the directory and all bytes are accounted for."""
    if entries and entries[0].header:
        raise archive.unsafe(f"{entries[0].header} bytes precede the first member", "E0436", 0)

    # The bytes from one storage's end to the end of the next one's header are read with one pread; records between them
    # (data.pkl, version, ...) are small and read too.
    stops = [m.header + LOCAL.size + len(m.raw_name) for m in entries if "/data/" in m.name or m.nbytes > SMALL]
    stops = [stop for stop in stops if stop < directory] + [directory]

    nearest = 0
    end = 0  # of the previous member's data, before its descriptor
    found: list[ZipMember] = []

    for member in (*entries, None):
        header = directory if member is None else member.header
        gap = header - end
        if gap < 0:
            raise archive.unsafe(f"{shown(found[-1].name)} overlaps what follows it", "E0432", header)
        # 24 bytes: the longest data descriptor (zip64, with a signature).
        if gap > 24:
            raise archive.unsafe(f"{gap} bytes belong to no member", "E0437", end)
        stop = header if member is None else header + LOCAL.size + len(member.raw_name)
        if stop > directory:
            raise archive.corrupt("a local header runs into the directory", "E0341", header)
        while stops[nearest] < stop:
            nearest += 1
        piece = archive.read(end, stop - end, min(stops[nearest] - stop, 4 * SMALL))
        if found:
            _descriptor(archive, found[-1], piece[:gap], end)
        if member is not None:
            member = member._replace(data=header + _local_size(archive, member, piece[gap:]))
            end = member.data + member.nbytes
            if end > directory:
                raise archive.corrupt(
                    f"the member's {member.nbytes} bytes run into the directory", "E0341", header, place=member.name
                )
            found.append(member)

    return found


def _local_size(archive: ZipArchive, member: ZipMember, head: bytes) -> int:
    """The size in bytes of the local header, which must agree with the directory."""
    signature, _, flags, method, _, _, crc, packed, nbytes, n, e = LOCAL.unpack_from(head)
    extra_size: int = e
    if signature != HEAD:
        raise archive.corrupt("no local header where the directory says", "E0341", member.header, place=member.name)
    same = head[LOCAL.size :] == member.raw_name and n == len(member.raw_name) and flags == member.flags and not method
    later = flags & 8 and not crc and not packed and not nbytes  # streamed: CRC and sizes are in the descriptor
    if not later and packed == nbytes == 0xFFFFFFFF:
        extra = archive.read(member.header + LOCAL.size + n, e)
        nbytes, packed = _zip64(archive, extra, (nbytes, packed, 0, 0), member.header)[:2]
    if not same or not (later or (crc == member.crc32 and packed == nbytes == member.nbytes)):
        raise archive.unsafe(
            "the local header and the central directory differ in name, size, method, flags or CRC",
            "E0431",
            member.header,
            place=member.name,
        )
    return LOCAL.size + len(member.raw_name) + extra_size


def _descriptor(archive: ZipArchive, member: ZipMember, raw: bytes, where: int) -> None:
    """Check the bytes after a member's data: none, or its descriptor if the flags announce one."""
    if not raw:
        return
    if member.flags & 8 and len(raw) in (12, 16, 20, 24):
        body = raw[4:] if len(raw) in (16, 24) else raw
        crc, packed, nbytes = struct.unpack("<III" if len(body) == 12 else "<IQQ", body)
        signed = len(body) == len(raw) or raw[:4] == b"PK\x07\x08"
        if signed and packed == nbytes == member.nbytes and crc == member.crc32:
            return
        raise archive.unsafe(
            "the data descriptor and the central directory differ in size or CRC", "E0431", where, place=member.name
        )
    raise archive.unsafe(f"{len(raw)} bytes after the member belong to no member", "E0437", where, place=member.name)
