"""Hostile torch zips, table C of the threat list row by row, made byte by byte (no torch, not with our writer).

`CASES` lists `(row, make(folder) -> path, exit code, words of the message)`; the exit code may be a dict by verb, `"*"`
for the others. `archive` builds a sound file that the rows then spoil.
"""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
import zlib

FLOATS = struct.pack("<6f", *range(6))


# -- pickles, opcode by opcode ----------------------------------------------------------------------------------------


def text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def plain(value):
    """The opcodes of a plain value, without PROTO and STOP."""
    return pickle.dumps(value, protocol=2)[2:-1].replace(b"q\x00", b"")


def name(module, qualname):
    return b"c" + f"{module}\n{qualname}\n".encode()


def storage(key="0", numel=6, kind="FloatStorage", location="cpu"):
    parts = text("storage") + name("torch", kind) + text(key) + text(location) + plain(numel)
    return b"(" + parts + b"tQ"


def numbers(values):
    return b"(" + b"".join(b"J" + struct.pack("<i", v) if v < 1 << 31 else plain(v) for v in values) + b"t"


def tensor(key="0", numel=6, shape=(2, 3), stride=(3, 1), offset=0, ref=None, **more):
    args = (ref or storage(key, numel, **more)) + plain(offset) + numbers(shape) + numbers(stride) + b"\x89"
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + args + name("collections", "OrderedDict") + b")RtR"


def state(**values):
    """A whole data.pkl: a dict of values given as opcodes."""
    return b"\x80\x02}(" + b"".join(text(key) + value for key, value in values.items()) + b"u."


GOOD = state(w=tensor())


# -- archives ---------------------------------------------------------------------------------------------------------


def archive(members=None, *, root="model", method=zipfile.ZIP_STORED):
    """A zip of (name below the root, bytes), by CPython's zipfile."""
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", method) as zipped:
        warnings.simplefilter("ignore")  # of duplicate names, which are the point
        for member, data in members or sound():
            info = zipfile.ZipInfo(f"{root}/{member}" if root else member)
            info.compress_type = method
            zipped.writestr(info, data)
    return out.getvalue()


def sound(data_pkl=GOOD, data=FLOATS, byteorder=b"little"):
    found = [("data.pkl", data_pkl), ("byteorder", byteorder), ("data/0", data), ("version", b"3\n")]
    return [member for member in found if member[1] is not None]


def central(raw, member):
    """Offset of a member's entry in the central directory."""
    start = struct.unpack_from("<I", raw, len(raw) - 6)[0]
    return raw.index(b"PK\x01\x02", raw.rindex(member.encode(), start) - 46)


def local(raw, member):
    """Offset of a member's local header."""
    return struct.unpack_from("<I", raw, central(raw, member) + 42)[0]


def patched(raw, at, value, code="<H"):
    out = bytearray(raw)
    struct.pack_into(code, out, at, value)
    return bytes(out)


def both(raw, member, field, value, code="<H"):
    """Patch a field of both headers; `field`: its offset in the local one, which lies 2 later in the central one."""
    raw = patched(raw, local(raw, member) + field, value, code)
    return patched(raw, central(raw, member) + field + 2, value, code)


class Pipe(io.RawIOBase):
    """A stream that zipfile can't seek in, so that it writes data descriptors, as torch does."""

    def __init__(self):
        self.data = bytearray()

    def writable(self):
        return True

    def write(self, data):
        self.data += data
        return len(data)


def described():
    """A zip with data descriptors."""
    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w") as zipped:
        for member, data in sound():
            zipped.writestr(zipfile.ZipInfo("model/" + member), data)
    return bytes(pipe.data)


def descriptor(field, value):
    """The descriptor of data/0 with one of its words changed: 4 its CRC, 8 and 12 its sizes."""
    raw = described()
    return patched(raw, raw.index(FLOATS) + len(FLOATS) + field, value, "<I")


def put(raw, filename="model.pt"):
    def make(folder):
        path = folder / filename
        path.write_bytes(raw() if callable(raw) else raw)
        return path

    return make


def truncated():
    raw = archive()
    return raw[: len(raw) - 120]


def flipped():
    raw = archive()
    at = raw.index(FLOATS) + 9
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


def without_crcs():
    raw = archive()
    for member, _ in sound():
        raw = both(raw, "model/" + member, 14, 0, "<I")
    return raw


def duplicate(member="data/0", data=bytes(24)):
    return archive([*sound(), (member, data)])


def local_name():
    raw = archive()
    at = local(raw, "model/data/0") + 30
    return raw[:at] + b"model/data/1" + raw[at + 12 :]


def overlapping(quoted):
    """data/0 and data/1 over the same bytes; quoted: the second header lies inside the first one's data."""
    inner = archive([("data/1", FLOATS)])[: 30 + 12 + 24]
    if quoted:
        raw = archive(sound(data=inner + bytes(30)))
        where = raw.index(b"PK\x03\x04", local(raw, "model/data/0") + 4)
    else:
        raw = archive([*sound(), ("data/1", FLOATS)])
        where = local(raw, "model/data/0")
        return patched(raw, central(raw, "model/data/1") + 42, where, "<I")
    start = struct.unpack_from("<I", raw, len(raw) - 6)[0]
    end = len(raw) - 22
    entry = bytearray(raw[central(raw, "model/data/0") : central(raw, "model/version")])
    entry[46:58] = b"model/data/1"
    struct.pack_into("<III", entry, 16, zlib.crc32(FLOATS), 24, 24)
    struct.pack_into("<I", entry, 42, where)
    directory = raw[start:end] + bytes(entry)
    return raw[:start] + directory + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 5, 5, len(directory), start, 0)


def bomb():
    return archive(sound(data=bytes(10 << 20)), method=zipfile.ZIP_DEFLATED)


def claimed_4_gb():
    raw = archive(sound(data=bytes(1 << 20)), method=zipfile.ZIP_DEFLATED)
    return patched(raw, central(raw, "model/data/0") + 24, 0xF0000000, "<I")


def renamed(new):
    """data/0 under another full name."""
    members = [(f"model/{member}", data) for member, data in sound() if member != "data/0"]
    return archive([*members, (new, FLOATS)], root="")


def symlink():
    raw = archive()
    raw = patched(raw, central(raw, "model/data/0") + 4, 3 << 8 | 20)
    return patched(raw, central(raw, "model/data/0") + 38, 0o120777 << 16, "<I")


def zip64_liar():
    """A zip64 end record that states one member less than the end record does."""
    raw = archive()
    count, _, size, start = struct.unpack_from("<2H2I", raw, len(raw) - 14)
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count - 1, count - 1, size, start)
    return raw[:-22] + end64 + struct.pack("<4sIQI", b"PK\6\7", 0, len(raw) - 22, 1) + raw[-22:]


def commented(comment):
    raw = archive()
    return raw[:-2] + struct.pack("<H", len(comment)) + comment


def many():
    """An end record that states a million members and one in a directory that could hold them, of holes."""
    return archive()[:-22] + bytes(1000) + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65535, 65535, 0xFFFFFFFF, 0, 0)


def bad_crc():
    raw = archive()
    return both(raw, "model/data.pkl", 14, 0x12345678, "<I")


def legacy(tail=b"", numel=6):
    """The stream of torch before 1.6, one float tensor."""
    ref = b"(" + text("storage") + name("torch", "FloatStorage") + text("7") + text("cpu") + plain(6) + b"NtQ"
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    parts = [pickle.dumps(value, protocol=2) for value in (0x1950A86A20F9469CFC6C, 1001, system)]
    return (
        b"".join([*parts, state(w=tensor(ref=ref)), pickle.dumps(["7"], protocol=2), struct.pack("<q", numel)]) + tail
    )


def tar():
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as packed:
        for member in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(member)
            info.size = 4
            packed.addfile(info, io.BytesIO(b"\x80\x02N."))
    return out.getvalue()


def view(**fields):
    return lambda: archive(sound(state(w=tensor(**fields))))


def zipped(**fields):
    return lambda: archive(sound(**fields))


READS_VALUES = {"inspect": 0, "verify": 1, "*": 3}

CASES = [
    ("C0-sound", put(archive), 0, ()),
    ("C1-truncated", put(truncated), 3, ("central directory", "model.pt")),
    ("C1-half", put(lambda: archive()[:150]), 3, ("central directory",)),
    ("C1-one-byte-short", put(lambda: archive()[:-1]), 3, ("model.pt",)),
    ("C2-bit-flip", put(flipped), READS_VALUES, ("crc",)),
    ("C3-no-crcs", put(without_crcs), 0, ()),
    ("C4-duplicate-storage", put(duplicate), 4, ("two members", "model/data/0")),
    ("C4-duplicate-pickle", put(lambda: duplicate("data.pkl", GOOD)), 4, ("two members", "data.pkl")),
    ("C5-local-name", put(local_name), 4, ("local header", "data/0")),
    ("C5-local-size", put(lambda: patched(archive(), local(archive(), "model/data/0") + 22, 20, "<I")), 4, ("local",)),
    ("C5-local-method", put(lambda: patched(archive(), local(archive(), "model/data/0") + 8, 8)), 4, ("local",)),
    ("C5-local-flags", put(lambda: patched(archive(), local(archive(), "model/data/0") + 6, 2)), 4, ("local",)),
    ("C5-local-crc", put(lambda: patched(archive(), local(archive(), "model/data/0") + 14, 7, "<I")), 4, ("local",)),
    (
        "C5-local-offset",
        put(lambda: patched(archive(), central(archive(), "model/data/0") + 42, 5, "<I")),
        {"*": 4},
        (),
    ),
    ("C5-described", put(described), 0, ()),
    ("C5-descriptor-crc", put(lambda: descriptor(4, 7)), 4, ("descriptor",)),
    ("C5-descriptor-size", put(lambda: descriptor(12, 20)), 4, ("descriptor",)),
    ("C5-descriptor-mark", put(lambda: descriptor(0, 20)), 4, ("descriptor",)),
    ("C6-same-bytes", put(lambda: overlapping(False)), 4, ()),
    ("C6-quoted", put(lambda: overlapping(True)), 4, ("overlap",)),
    ("C7-bomb", put(bomb), 4, ("deflate",)),
    ("C7-claims-4-gb", put(claimed_4_gb), 4, ("deflate",)),
    ("C8-encrypted", put(lambda: both(archive(), "model/data/0", 6, 1)), 3, ("encrypted",)),
    ("C8-unknown-method", put(lambda: both(archive(), "model/data/0", 8, 77)), 3, ("method 77",)),
    ("C8-multi-disk", put(lambda: patched(archive(), len(archive()) - 18, 1)), 3, ("disk",)),
    ("C8-member-disk", put(lambda: patched(archive(), central(archive(), "model/data/0") + 34, 3)), 3, ("disk",)),
    ("C8-zip64-liar", put(zip64_liar), 3, ("zip64",)),
    ("C8-zip64-missing", put(lambda: patched(archive(), len(archive()) - 6, 0xFFFFFFFF, "<I")), 3, ("zip64",)),
    ("C9-dotdot", put(lambda: renamed("model/../../evil")), 4, ("evil",)),
    ("C9-absolute", put(lambda: renamed("/etc/evil")), 4, ("absolute",)),
    ("C9-backslash", put(lambda: renamed("model\\data\\0")), 4, ("backslash",)),
    ("C9-drive", put(lambda: renamed("C:/evil")), 4, ("drive",)),
    ("C9-symlink", put(symlink), 4, ("symbolic link",)),
    ("C10-two-roots", put(lambda: renamed("other/data/0")), 4, ("top folders",)),
    ("C10-no-pickle", put(lambda: archive([("data/0", FLOATS)])), 3, ()),
    ("C10-empty-zip", put(lambda: b"PK\5\6" + bytes(18)), 3, ()),
    ("C11-record-short", put(zipped(data=FLOATS[:-4])), 3, ("24 bytes", "20")),
    ("C11-record-long", put(zipped(data=FLOATS + bytes(4))), 3, ("24 bytes", "28")),
    ("C11-record-missing", put(lambda: archive([m for m in sound() if m[0] != "data/0"])), 3, ("data/0",)),
    ("C12-beyond", put(view(shape=(2, 4), stride=(4, 1))), 3, ("storage",)),
    ("C12-offset", put(view(offset=1)), 3, ("storage",)),
    ("C12-negative-stride", put(view(stride=(-3, 1))), 3, ("stride",)),
    ("C12-huge-stride", put(view(stride=(1 << 62, 1))), 3, ()),
    ("C12-huge-size", put(view(shape=(1 << 40, 1 << 40), stride=(0, 0))), 3, ("range",)),
    ("C12-overlapping", put(view(shape=(2, 2), stride=(1, 1))), 3, ("overlap",)),
    ("C12-rank", put(view(shape=(1,) * 65, stride=(1,) * 65)), 3, ("64",)),
    ("C12-expanded", put(view(shape=(2, 3), stride=(0, 1))), 0, ()),
    ("C13-big", put(zipped(byteorder=b"big")), 3, ("big-endian",)),
    ("C13-garbage", put(zipped(byteorder=b"pdp-11")), 3, ("byte order",)),
    ("C13-missing", put(zipped(byteorder=None)), 0, ()),
    ("C14-prepended", put(lambda: b"MZ" + bytes(510) + archive()), 4, ()),
    ("C14-comment", put(lambda: commented(b"c" * 65535)), 4, ("follow",)),
    ("C14-comment-that-is-not", put(lambda: patched(archive(), len(archive()) - 2, 5)), 4, ()),
    ("C14-fake-end", put(lambda: commented(b"PK\5\6" + bytes(40))), 4, ()),
    ("C14-hidden-gap", put(lambda: _gap(b"hidden" * 10)), 4, ("bytes",)),
    ("C15-tar", put(tar), 3, ("tar",)),
    ("C15-legacy", put(lambda: legacy(FLOATS)), 0, ()),
    ("C15-legacy-truncated", put(lambda: legacy(FLOATS[:-1])), 3, ("storage 7",)),
    ("C15-legacy-other-size", put(lambda: legacy(FLOATS, 5)), 3, ("5 elements",)),
    ("C15-legacy-trailing", put(lambda: legacy(FLOATS + b"x")), 4, ("follow",)),
    ("C16-million", put(many), 3, ()),
    ("C17-bad-pickle-crc", put(bad_crc), 3, ("crc", "data.pkl")),
    ("C18-torchscript", put(lambda: archive([*sound(), ("constants.pkl", b"\x80\x02).")])), 4, ("torchscript",)),
    ("C18-torchscript-code", put(lambda: archive([*sound(), ("code/__torch__.py", b"pass")])), 4, ("torchscript",)),
    ("C19-lfs-pointer", put(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"), 3, ("git lfs",)),
    ("C19-html", put(b"<!DOCTYPE html><html><body>404</body></html>" + bytes(200)), 3, ("html",)),
    ("C19-gzip", put(b"\x1f\x8b\x08" + bytes(200)), 3, ("gzip",)),
    ("C19-empty", put(b""), 3, ()),
    ("C19-one-byte", put(b"P"), 3, ()),
]


def _gap(hidden):
    """Bytes between the last member and the directory that belong to none."""
    raw = archive()
    start = struct.unpack_from("<I", raw, len(raw) - 6)[0]
    return patched(raw[:start] + hidden + raw[start:], len(raw) + len(hidden) - 6, start + len(hidden), "<I")
