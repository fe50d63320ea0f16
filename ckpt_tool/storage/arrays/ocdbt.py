"""OCDBT, TensorStore's database in a folder: which bytes of which file are the value of a key.

    manifest.ocdbt -> a B-tree in d/5a01... ->  params.w/.zarray   140 bytes in the tree itself
                                                params.w/0.0       4096 bytes at 0 of ocdbt.process_0/d/91fe...

Specification (tensorstore 0.1.86 `kvstore/ocdbt/index.rst`, `format/*.cc`):

* Manifest and nodes: magic (u32, big-endian), length of all (u64, little-endian), version 0, compression (0, or 1:
  zstd), the body, CRC-32C of all before it (u32, little-endian). Numbers below are varints (LEB128) unless a width is
  given.
* Manifest body: uuid (16 bytes), kind (0: this file has the versions), bytes of a value that is stored in a node, of a
node,
  log2 of the versions' arity (u8), compression (1 is followed by its level, i32). Then a table of files and the newest
  versions, **a column a field**: count; generation, height of the root (u8), file, offset, length of the root, keys,
  bytes of the tree, bytes of values, time (u64). The newest is the last. Older ones are in nodes that are not read
  here.
* Table of files: count; lengths of the prefix shared with the path before (but the first), of the rest, of the base;
  the rests. A path is relative to the bases of the nodes that lead to it.
* Node: height (u8), table of files, count, keys (shared prefix, rest, and in inner nodes how much of the key all keys
  below begin with), then of a leaf: lengths, kinds (0: here, 1: in a file), files and offsets of the second, the first
  themselves; of an inner node: file, offset, length, keys, bytes of the tree, bytes of values of each child.

Read: every node, once; a value in a node that is compressed is a part of a view (`storage.views`). Cost: 3 us a key.
What it does not do: older versions, separate manifests (kind 1), which Orbax does not write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from os.path import commonprefix
from typing import NamedTuple

from ckpt_tool.core.inner_path import unfit
from ckpt_tool.core.missing import is_collecting, report_missing
from ckpt_tool.errors import CorruptFile, InputError, UnsafeInput
from ckpt_tool.storage.arrays.crc32c import crc32c
from ckpt_tool.storage.arrays.zstd_frames import Frame
from ckpt_tool.storage.source import Tree, missing_file
from ckpt_tool.storage.views import Compressed

MANIFEST = "manifest.ocdbt"
DAMAGED = "E2751"
UNKNOWN_KIND = "E2752"
_MANIFEST = 0x0CDB3A2A
_NODE = 0x0CDB20DE
_NOWHERE = (1 << 64) - 1  # the root of an empty tree
# bytes, decompressed; Orbax asks for nodes of 100 MB
MOST_MANIFEST = 16 << 20
MOST_NODE = 256 << 20
MOST_KEYS = 8_000_000
MOST_NODES = 100_000
MOST_KEY = 65_535
_AGAIN = "the file is damaged or cut short: fetch the checkpoint again"


class Value(NamedTuple):
    """Bytes [offset, offset + nbytes) of `path`, a file or a view."""

    path: str
    offset: int
    nbytes: int


class _Child(NamedTuple):
    """A node: its place in a file, the folder of the files that it names, and the prefix of its keys."""

    path: str
    base: str
    offset: int
    nbytes: int
    height: int
    prefix: bytes


class _Body:
    """The body of the manifest or of a node, read forwards. view: (path of a file or view, offset) of its bytes."""

    def __init__(self, shown: str, place: int, body: bytes, view: tuple[str, int]) -> None:
        self.shown = shown
        self.place = place
        self.body = body
        self.at = 0
        self.view = view

    def fault(self, message: str) -> CorruptFile:
        """The error for damage in this node."""
        return CorruptFile(message, code=DAMAGED, path=self.shown, offset=self.place, hint=_AGAIN)

    def raw(self, nbytes: int, what: str) -> bytes:
        """The next `nbytes` bytes. what: the field, for the error."""
        if nbytes > len(self.body) - self.at:
            raise self.fault(f"{what}: {nbytes} bytes, but {len(self.body) - self.at} are left of the node")
        self.at += nbytes
        return self.body[self.at - nbytes : self.at]

    def numbers(self, count: int, what: str) -> list[int]:
        """A column of varints."""
        # A varint takes at least one byte: a false count must not cost memory or time.
        if count > len(self.body) - self.at:
            raise self.fault(f"{count} numbers ({what}), but {len(self.body) - self.at} bytes are left of the node")

        body = self.body
        at = self.at
        out = list[int]()

        try:
            for _ in range(count):
                byte = body[at]
                at += 1
                value = byte & 127
                shift = 0
                while byte > 127:
                    byte = body[at]
                    at += 1
                    shift += 7
                    if shift > 63:
                        break
                    value |= (byte & 127) << shift
                if shift > 63 or value > _NOWHERE:
                    raise self.fault(f"{what}: a number has more than 64 bits")
                out.append(value)
        except IndexError:
            raise self.fault(f"{what}: the node ends inside a number") from None

        self.at = at
        return out

    def number(self, what: str) -> int:
        """The next varint."""
        return self.numbers(1, what)[0]

    def files(self, base: str) -> list[tuple[str, str]]:
        """The table of files: (path, the folder that the node there counts from). base: the folder of this one."""
        count = self.number("files")
        shared = [0, *self.numbers(count - 1, "paths")] if count else []
        rests = self.numbers(count, "paths")
        bases = self.numbers(count, "paths")
        out = list[tuple[str, str]]()
        last = b""
        for prefix, rest, own in zip(shared, rests, bases, strict=True):
            # Each path is stored without the prefix that it shares with the one before.
            path = last[:prefix] + self.raw(rest, "a path")
            if prefix > len(last) or own > len(path) or len(path) > MOST_KEY:
                raise self.fault("an entry of the table of files has an impossible prefix or length")
            last = path
            out.append((self._safe(base, path), base + path[:own].decode("utf-8", "surrogateescape")))
        return out

    def _safe(self, base: str, path: bytes) -> str:
        whole = base + path.decode("utf-8", "surrogateescape")
        if why := unfit(whole):
            raise UnsafeInput(
                f"the file name {whole[:200]!r} {why}; only plain names inside the checkpoint's folder are opened",
                code="E0410",
                path=self.shown,
                offset=self.place,
                hint="a checkpoint that points outside its own folder is not opened; get it from its author again",
            )
        return whole

    def keys(self, count: int, *, inner: bool) -> tuple[list[bytes], list[int]]:
        """Returns (keys, for each the length of the prefix that all keys below it share)."""
        shared = [0, *self.numbers(count - 1, "keys")]
        rests = self.numbers(count, "keys")
        common = self.numbers(count, "keys") if inner else []
        out = list[bytes]()
        last = b""
        for number, (prefix, rest) in enumerate(zip(shared, rests, strict=True)):
            key = last[:prefix] + self.raw(rest, "a key")
            # Ascending keys are unique, and every key belongs to exactly one node.
            if prefix > len(last) or len(key) > MOST_KEY or (number and key <= last):
                raise self.fault("the keys of a node do not ascend")
            if inner and common[number] > len(key):
                raise self.fault("a key of a node is shorter than the prefix of all keys below it")
            out.append(key)
            last = key
        return out, common

    def end(self) -> None:
        """Raise unless all bytes have been read."""
        if self.at != len(self.body):
            raise self.fault(f"{len(self.body) - self.at} bytes follow the last field")


def read_keys(tree: Tree, folder: str = "") -> dict[str, Value]:
    """Returns key -> place of its value, sorted by key. folder: that of the manifest below the tree, "" or with a
    slash.

    Raises CorruptFile E2751 for a manifest or node that is none, InputError E2752 for a manifest of another kind,
    UnsafeInput E0410 for files elsewhere, and what reading raises.
    """
    path = folder + MANIFEST
    size = tree.size_within(path, limit=MOST_MANIFEST)
    body = _opened(tree, path, 0, size, _MANIFEST, MOST_MANIFEST)
    root = _root(body, folder)
    found: dict[str, Value] = {}
    todo = [root] if root else []
    nodes = 0
    while todo:
        child = todo.pop()
        nodes += 1
        if nodes > MOST_NODES or len(found) > MOST_KEYS:
            raise body.fault(f"more than {MOST_NODES} nodes or {MOST_KEYS} keys")
        if is_collecting() and child.path not in tree.listing():  # the keys below it are unknown, the others are not
            report_missing(missing_file(child.path, tree.display(child.path)), files=[child.path])
            continue
        below = _node(tree, child, found)
        # Reversed, because the stack is taken from its end: keys are found in ascending order.
        todo += reversed(below)
    return found


def _root(body: _Body, folder: str) -> _Child | None:
    """The root of the newest version, None for an empty tree."""
    body.raw(16, "uuid")
    kind = body.number("kind")
    if kind:
        raise InputError(
            f"the manifest has kind {kind}: its versions are stored in other files",
            code=UNKNOWN_KIND,
            path=body.shown,
            hint="restore it with Orbax and save it again",
        )
    body.numbers(2, "limits")
    body.raw(1, "arity")
    if body.number("compression"):
        body.raw(4, "level")
    files = body.files(folder)
    count = body.number("versions")
    body.numbers(count, "generations")
    heights = body.raw(count, "heights")
    # The newest version is the last row.
    file, offset, nbytes = (body.numbers(count, "roots") for _ in range(3))
    if not count or nbytes[-1] == _NOWHERE or offset[-1] == _NOWHERE:
        return None
    path, base = _file(body, files, file[-1])
    return _Child(path, base, offset[-1], nbytes[-1], heights[-1], b"")


def _file(body: _Body, files: Sequence[tuple[str, str]], number: int) -> tuple[str, str]:
    if number >= len(files):
        raise body.fault(f"file {number} of a table of {len(files)}")
    return files[number]


def _node(tree: Tree, child: _Child, found: dict[str, Value]) -> list[_Child]:
    """Read a node: adds the keys of a leaf to `found`, returns the children of an inner node."""
    body = _opened(tree, child.path, child.offset, child.nbytes, _NODE, MOST_NODE)
    (height,) = body.raw(1, "height")
    if height != child.height:
        raise body.fault(f"a node of height {height}, want {child.height}")

    files = body.files(child.base)
    count = body.number("entries")
    if not count:
        raise body.fault("a node without entries")

    keys, common = body.keys(count, inner=height > 0)
    if height:
        file, offset, nbytes = (body.numbers(count, "children") for _ in range(3))
        body.numbers(3 * count, "statistics")
        body.end()
        rows = zip(keys, common, file, offset, nbytes, strict=True)
        return [
            _Child(*_file(body, files, at), start, size, height - 1, child.prefix + key[:shared])
            for key, shared, at, start, size in rows
        ]

    sizes = body.numbers(count, "values")
    kinds = body.raw(count, "values")
    if any(kind > 1 for kind in kinds):
        raise body.fault("a value that is neither in the node nor in a file")

    outer = sum(kinds)
    places = zip(body.numbers(outer, "values"), body.numbers(outer, "values"), strict=True)
    for key, size, kind in zip(keys, sizes, kinds, strict=True):
        name = (child.prefix + key).decode("utf-8", "surrogateescape")
        if name in found:
            raise body.fault(f"the key {name[:200]!r} appears twice")
        if kind:
            number, start = next(places)
            value = Value(_file(body, files, number)[0], start, size)
        else:
            path, first = body.view
            value = Value(path, first + body.at, size)
            body.raw(size, "a value")
        found[name] = value

    body.end()
    return []


def _opened(tree: Tree, path: str, offset: int, nbytes: int, magic: int, most: int) -> _Body:
    """The body of a manifest or node, its CRC-32C verified, decompressed. most: bytes that it may have."""
    shown = tree.display(path)

    def fault(message: str) -> CorruptFile:
        return CorruptFile(message, code=DAMAGED, path=shown, offset=offset, hint=_AGAIN)

    # 18 bytes: magic (4), length (8), version and compression (1 each), CRC (4).
    if not 18 <= nbytes <= most:
        raise fault(f"a manifest or node of {nbytes} bytes, want 18 to {most}")
    raw = tree.read(path, offset, nbytes)
    if int.from_bytes(raw[:4], "big") != magic or int.from_bytes(raw[4:12], "little") != nbytes:
        raise fault(f"it begins with {raw[:12].hex()}, want {magic:08x} and its length, {nbytes}")
    stored = int.from_bytes(raw[-4:], "little")
    have = crc32c(memoryview(raw)[:-4])
    if stored != have:
        raise fault(f"the stored CRC-32C is {stored:08x}, the bytes give {have:08x}")
    if raw[12] != 0 or raw[13] > 1:
        raise fault(f"version {raw[12]}, compression {raw[13]}; want 0, and 0 or 1")
    if not raw[13]:
        return _Body(shown, offset, raw[14:-4], (path, offset + 14))
    frame = Frame(lambda a, b: raw[14 + a : 14 + b], nbytes - 18, fault, window=most)
    whole = _whole(frame, most, fault)
    view = Compressed(path, offset + 14, nbytes - 18, len(whole)).view
    return _Body(shown, offset, whole, (view, 0))


def _whole(frame: Frame, most: int, fault: Callable[[str], CorruptFile]) -> bytes:
    out = bytearray()
    room = memoryview(bytearray(256 << 10))
    while got := frame.some(room):
        out += room[:got]
        if len(out) > most:
            raise fault(f"it decompresses to more than {most} bytes")
    frame.end()
    return bytes(out)


# -- writing -----------------------------------------------------------------------------------------------------------


class OcdbtNode(NamedTuple):
    """A value to write."""

    key: bytes  # UTF-8
    # data: the bytes of a value that is stored in the tree. None for a value in a file: then its file number, offset
    # and length in bytes.
    data: bytes | None
    file: int = 0
    offset: int = 0
    nbytes: int = 0


_LEAF_KEYS = 100_000  # keys of a leaf, at most
# The settings that Orbax uses: bytes of a value up to which it is stored in a node, bytes of a node, log2 of the arity.
_INLINE = 1024
_NODE_BYTES = 100_000_000
_ARITY = 4


def encode(files: Sequence[str], values: Sequence[OcdbtNode], uuid: bytes, node_file: str) -> tuple[bytes, bytes]:
    """(the manifest, the file `node_file` of the tree), nothing compressed. files: those of the values. uuid: 16
    bytes. Time 0: the same values give the same bytes."""
    rows = sorted(values, key=lambda value: value.key)
    out = bytearray()
    level = list[_Written]()
    for start in range(0, len(rows), _LEAF_KEYS):
        part = rows[start : start + _LEAF_KEYS]
        node = _leaf(files, part)
        outer = sum(row.nbytes for row in part if row.data is None)
        level.append(_Written(part[0].key, len(out), len(node), len(part), len(node), outer))
        out += node
    root = level[0] if level else None
    height = 0
    if len(level) > 1:
        node = _inner(node_file, level)
        height = 1
        keys = sum(each.keys for each in level)
        tree = sum(each.tree for each in level)
        outer = sum(each.outer for each in level)
        root = _Written(b"", len(out), len(node), keys, tree + len(node), outer)
        out += node
    return _manifest(uuid, node_file, root, height), bytes(out)


class _Written(NamedTuple):
    """A written node: its first key, offset and length, and the number of keys and bytes below it."""

    first: bytes
    offset: int
    nbytes: int
    keys: int
    tree: int
    outer: int


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _column(numbers: Iterable[int]) -> bytes:
    return b"".join(map(_varint, numbers))


def _framed(magic: int, body: bytes) -> bytes:
    raw = magic.to_bytes(4, "big") + (len(body) + 18).to_bytes(8, "little") + b"\0\0" + body
    return raw + crc32c(raw).to_bytes(4, "little")


def _table(files: Sequence[str]) -> bytes:
    """A table of files, each with its whole path and no base."""
    names = [name.encode() for name in files]
    count = len(names)
    return (
        _varint(count)
        + _column([0] * max(count - 1, 0))
        + _column(map(len, names))
        + _column([0] * count)
        + b"".join(names)
    )


def _keys(keys: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
    """(length of what each key but the first shares with the one before, the rest of each)."""
    shared = [len(commonprefix((a, b))) for a, b in pairwise(keys)]
    return shared, [key[n:] for n, key in zip((0, *shared), keys, strict=True)]


def _leaf(files: Sequence[str], rows: Sequence[OcdbtNode]) -> bytes:
    shared, rests = _keys([row.key for row in rows])
    outer = [row for row in rows if row.data is None]
    used = sorted({row.file for row in outer})
    numbers = {file: number for number, file in enumerate(used)}
    body = b"\0" + _table([files[file] for file in used]) + _varint(len(rows))
    body += _column(shared) + _column(map(len, rests)) + b"".join(rests)
    body += _column(row.nbytes if row.data is None else len(row.data) for row in rows)
    body += bytes(row.data is None for row in rows)
    body += _column(numbers[row.file] for row in outer) + _column(row.offset for row in outer)
    return _framed(_NODE, body + b"".join(row.data for row in rows if row.data is not None))


def _inner(node_file: str, level: Sequence[_Written]) -> bytes:
    shared, rests = _keys([each.first for each in level])
    body = b"\1" + _table([node_file]) + _varint(len(level))
    body += _column(shared) + _column(map(len, rests)) + _column([0] * len(level)) + b"".join(rests)
    body += _column([0] * len(level))
    for name in ("offset", "nbytes", "keys", "tree", "outer"):
        body += _column(getattr(each, name) for each in level)
    return _framed(_NODE, body)


def _manifest(uuid: bytes, node_file: str, root: _Written | None, height: int) -> bytes:
    body = uuid + _varint(0) + _varint(_INLINE) + _varint(_NODE_BYTES) + bytes([_ARITY]) + _varint(0)
    body += _table([node_file] if root else []) + _varint(1) + _varint(1) + bytes([height])
    if root is None:
        body += _varint(0) + _varint(_NOWHERE) + _varint(_NOWHERE) + _column([0, 0, 0])
    else:
        body += _column([0, root.offset, root.nbytes, root.keys, root.tree, root.outer])
    return _framed(_MANIFEST, body + bytes(8) + _varint(0))
