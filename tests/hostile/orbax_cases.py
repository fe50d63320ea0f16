"""Hostile Orbax folders: OCDBT's manifest and nodes, zarr's headers, chunks and indexes, `_METADATA`.

`CASES` lists `(row, make(folder) -> path, exit code or {verb: code}, words of the message)`. The sound folder that they
edit holds `params.w`, F32 (4, 2), in two chunks. Nodes and manifests are put together here, field by field.
"""

from __future__ import annotations

import json
import struct

import zstandard

from ckpt_tool.storage.arrays.crc32c import crc32c

BIG = 1 << 62
MANIFEST = 0x0CDB3A2A
NODE = 0x0CDB20DE
DATA = "d/" + "a" * 32
NODES = "d/" + "b" * 32
VALUES = struct.pack("<8f", *range(8))


def varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out) + bytes([number])


def column(*numbers):
    return b"".join(map(varint, numbers))


def framed(magic, body, *, version=0, compression=0, length=None, crc=None):
    raw = struct.pack(">I", magic) + struct.pack("<Q", len(body) + 18 if length is None else length)
    raw += bytes([version, compression]) + body
    return raw + struct.pack("<I", crc32c(raw) if crc is None else crc)


def table(*paths, count=None):
    raw = [path.encode() for path in paths]
    head = varint(len(raw) if count is None else count) + column(*[0] * max(len(raw) - 1, 0))
    return head + column(*map(len, raw)) + column(*[0] * len(raw)) + b"".join(raw)


def leaf(rows, *paths, count=None):
    """rows: (key, bytes) or (key, (file, offset, length)). Keys are not shortened."""
    keys = [key.encode() for key, _ in rows]
    outer = [value for _, value in rows if isinstance(value, tuple)]
    body = b"\0" + table(*(paths or (DATA,))) + varint(len(rows) if count is None else count)
    body += column(*[0] * (len(rows) - 1)) + column(*map(len, keys)) + b"".join(keys)
    body += column(*(value[2] if isinstance(value, tuple) else len(value) for _, value in rows))
    body += bytes(isinstance(value, tuple) for _, value in rows)
    body += column(*(value[0] for value in outer)) + column(*(value[1] for value in outer))
    return body + b"".join(value for _, value in rows if not isinstance(value, tuple))


def inner(children, height=1):
    """children: (key, offset, length) in the file of the nodes."""
    keys = [key.encode() for key, _, _ in children]
    body = bytes([height]) + table(NODES) + varint(len(children)) + column(*[0] * (len(children) - 1))
    body += column(*map(len, keys)) + column(*[0] * len(children)) + b"".join(keys) + column(*[0] * len(children))
    body += column(*(offset for _, offset, _ in children)) + column(*(length for _, _, length in children))
    return body + column(*[1] * (3 * len(children)))


def manifest(length, *, offset=0, height=0, kind=0, path=NODES, count=None):
    body = bytes(16) + column(kind, 1024, 100_000_000) + b"\x04" + varint(0) + table(path, count=count)
    body += column(1, 1) + bytes([height]) + column(0, offset, length, 3, length, 32)
    return body + bytes(8) + varint(0)


def zarray(**changes):
    header = {
        "zarr_format": 2, "shape": [4, 2], "chunks": [2, 2], "dtype": "<f4", "compressor": None, "fill_value": None,
        "order": "C", "filters": None, "dimension_separator": ".",
    }  # fmt: skip
    return json.dumps(header | changes).encode()


def rows(header=None, first=(0, 0, 16), second=(0, 16, 16)):
    found = [("params.w/.zarray", header or zarray()), ("params.w/0.0", first), ("params.w/1.0", second)]
    return [row for row in found if row[1] is not None]


LEAVES = {"('params', 'w')": (("params", 2), ("w", 2))}


def described(leaves=LEAVES, kind="np.ndarray", **changes):
    tree = {
        name: {
            "key_metadata": [{"key": key, "key_type": key_type} for key, key_type in keys],
            "value_metadata": {"value_type": kind, "skip_deserialize": False},
        }
        for name, keys in leaves.items()
    }
    more = {"use_ocdbt": True, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    return json.dumps({"tree_metadata": tree, **more} | changes)


def item(node=None, *, top=None, metadata=None, values=VALUES, nodes=None, **frame):
    """A folder. node: the body of the leaf; frame: how it is framed. nodes: the file of the nodes, whole."""

    def make(folder):
        body = framed(NODE, node if node is not None else leaf(rows()), **frame)
        (folder / "d").mkdir()
        (folder / NODES).write_bytes(body if nodes is None else nodes)
        (folder / DATA).write_bytes(values)
        (folder / "manifest.ocdbt").write_bytes(top if top is not None else framed(MANIFEST, manifest(len(body))))
        (folder / "_METADATA").write_text(metadata or described())
        return folder

    return make


def chunked(header, first, **changes):
    """An item with one chunk, whose bytes are `first`."""
    found = rows(zarray(shape=[2, 2], **header), (0, 0, len(first)), None)
    return item(leaf(found), values=first, **changes)


def sharded(index, *, data=VALUES[:16], crc=None, **changes):
    """zarr 3: one shard of one chunk, with this index. changes: of what the codec of shards is told."""
    header = {
        "zarr_format": 3, "node_type": "array", "shape": [2, 2], "data_type": "float32", "fill_value": 0,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 2]}},
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{"name": "sharding_indexed", "configuration": {
            "chunk_shape": [2, 2], "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        }}],
    }  # fmt: skip
    header["codecs"][0]["configuration"] |= changes
    raw = struct.pack("<QQ", *index)
    value = data + raw + struct.pack("<I", crc32c(raw) if crc is None else crc)
    found = [("params.w/c/0/0", (0, 0, len(value))), ("params.w/zarr.json", json.dumps(header).encode())]
    return item(leaf(found), values=value, metadata=described(use_zarr3=True))


def dag(folder):
    """Sixty nodes above one another, each with the one below it twice: 2^60 ways to one leaf."""
    nodes = b""
    offset = 0
    length = 0
    for height in range(60):
        body = leaf(rows()) if not height else inner([("a", offset, length), ("b", offset, length)], height)
        made = framed(NODE, body)
        offset = len(nodes)
        length = len(made)
        nodes = nodes + made
    top = framed(MANIFEST, manifest(length, offset=offset, height=59))
    return item(top=top, nodes=nodes)(folder)


def unfinished(folder):
    below = folder / "7.orbax-checkpoint-tmp"
    below.mkdir()
    item()(below)
    return folder


def own(node_length=None, **changes):
    """A manifest of the sound leaf, changed."""
    length = len(framed(NODE, leaf(rows()))) if node_length is None else node_length
    return framed(MANIFEST, manifest(length, **changes))


def beside_or_below(other):
    """A second leaf, at a path whose names are `other`."""
    scalar = [
        (".".join(other) + end, value) for end, value in (("/.zarray", zarray(shape=[], chunks=[])), ("/0", (0, 4, 4)))
    ]
    more = {"b": tuple((name, 2) for name in other)}
    return item(leaf(sorted(rows() + scalar)), metadata=described(LEAVES | more))


LATE = {"inspect": 0, "*": 3}  # where chunks lie shows when they are wanted,
LATER = {"inspect": 0, "verify": 1, "*": 3}  # and what they hold when they are read
GOOD = own()
FRAME = zstandard.ZstdCompressor().compress
BOMB = zstandard.ZstdCompressor(level=1).compress(bytes(300 << 20))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress
ZSTD = {"compressor": {"id": "zstd", "level": 1}}

CASES = [
    ("X1 cut in the manifest", item(top=GOOD[:40]), 3, "want 0cdb3a2a and its length"),
    ("X2 magic of the manifest", item(top=b"\0" + GOOD[1:]), 3, "want 0cdb3a2a"),
    ("X3 checksum of the manifest", item(top=GOOD[:-1] + bytes([GOOD[-1] ^ 1])), 3, "CRC-32C"),
    ("X4 an empty manifest", item(top=b""), 3, "0 bytes"),
    ("X5 a manifest of numbered files", item(top=own(kind=1)), 3, "kind 1"),
    ("X6 files beyond the manifest", item(top=own(count=1 << 40)), 3, "numbers"),
    ("X7 a root above the folder", item(top=own(path="../" + NODES)), 4, "only plain names"),
    ("X8 a root at an absolute path", item(top=own(path="/etc/passwd")), 4, "only plain names"),
    ("X9 a root beyond its file", item(top=own(offset=1 << 40)), 3, "but the file has"),
    ("X10 a root of any length", item(top=own(node_length=BIG)), 3, "want 18 to"),
    ("X11 a root of another height", item(top=own(height=3)), 3, "height 0, want 3"),
    ("X12 version of a node", item(version=9), 3, "version 9"),
    ("X13 compression of a node", item(compression=9), 3, "compression 9"),
    ("X14 length of a node", item(length=7), 3, "its length"),
    ("X15 checksum of a node", item(crc=1), 3, "CRC-32C"),
    ("X16 a node that is no frame", item(leaf(rows()), compression=1), 3, "no zstd frame"),
    ("X17 a node that swells", item(BOMB, compression=1), 3, "decompresses to more than"),
    ("X18 entries beyond the node", item(leaf(rows(), count=1 << 50)), 3, "left of the node"),
    ("X19 a node without entries", item(leaf(rows(), count=0)), 3, "without entries"),
    ("X20 a number without end", item(b"\0" + b"\xff" * 5000), 3, "more than 64 bits"),
    ("X21 a cut node", item(leaf(rows())[:-20]), 3, "left of the node"),
    ("X22 keys that do not ascend", item(leaf(rows()[::-1])), 3, "do not ascend"),
    ("X23 a file that no table has", item(leaf(rows(first=(7, 0, 16)))), 3, "file 7 of a table"),
    ("X24 values above the folder", item(leaf(rows(), "../../secret")), 4, "only plain names"),
    ("X25 values beyond the file", item(leaf(rows(second=(0, 1 << 40, 16)))), LATE, "but the file has 32"),
    ("X26 values in no file", item(leaf(rows(), "d/" + "c" * 32)), LATE, "is missing"),
    ("X27 nodes in a circle", dag, 3, "appears twice"),
    ("X28 metadata that is no JSON", item(metadata="{"), 3, "_METADATA"),
    ("X29 metadata without a tree", item(metadata="{}"), 3, "no tree_metadata"),
    ("X30 metadata as deep as can be", item(metadata="[" * 100_000), 3, "_METADATA"),
    ("X31 a key of no type", item(metadata=described({"a": (("params", 9),)})), 3, "of type 9"),
    ("X32 a place that is no number", item(metadata=described({"a": (("x", 1),)})), 3, "of type 1"),
    ("X33 a leaf without keys", item(metadata=described({"a": ()})), 3, "names no leaf"),
    ("X34 two leaves of one name", item(metadata=described(LEAVES | {"b": (("params.w", 2),)})), 3, "two leaves"),
    ("X35 a leaf without an array", item(metadata=described({"a": (("params", 2), ("x", 2))})), 3, "no header"),
    ("X36 a text that is not there", item(metadata=described(kind="string")), 3, "_strings.json"),
    ("X37 a header that is no JSON", item(leaf(rows(b"{"))), 3, "the text ends"),
    ("X38 a negative shape", item(leaf(rows(zarray(shape=[-1, 2])))), 3, "want a list of sizes"),
    ("X39 chunks of nothing", item(leaf(rows(zarray(chunks=[0, 2])))), 3, "want a list of sizes"),
    ("X40 chunks of another rank", item(leaf(rows(zarray(chunks=[2])))), 3, "in chunks of"),
    ("X41 chunks without number", item(leaf(rows(zarray(shape=[1 << 40, 2], chunks=[1, 1])))), 3, "chunks of [1, 1]"),
    ("X42 a shape that overflows", item(leaf(rows(zarray(shape=[1 << 47] * 2, chunks=[1 << 46] * 2)))), 3, "a shape"),
    ("X43 a dtype of records", item(leaf(rows(zarray(dtype=[["a", "<f4"]])))), 3, "not read"),
    ("X44 numbers of the other order", item(leaf(rows(zarray(dtype=">f4")))), 3, "not read"),
    ("X45 blosc", item(leaf(rows(zarray(compressor={"id": "blosc"})))), 3, "blosc"),
    ("X46 a chunk that is lost", item(leaf(rows(second=None))), 3, "1 of its 2 chunks"),
    ("X47 a chunk of another size", item(leaf(rows(second=(0, 16, 12)))), LATE, "12 bytes, want 16"),
    ("X48 a chunk that is no frame", chunked(ZSTD, VALUES[:16]), LATER, "no zstd frame"),
    ("X49 a chunk that ends early", chunked(ZSTD, UNSIZED(VALUES[:12])), LATER, "4 bytes early"),
    ("X50 a chunk that holds more", chunked(ZSTD, UNSIZED(VALUES)), LATER, "more than"),
    ("X51 a chunk that swells", chunked(ZSTD, BOMB), LATER, "want 16"),
    ("X52 a chunk that is no gzip", chunked({"compressor": {"id": "gzip"}}, VALUES[:16]), LATER, "do not decompress"),
    ("X53 a chunk in a shard's nowhere", sharded((BIG, 16)), LATE, "of a shard"),
    ("X54 a shard's checksum", sharded((0, 16), crc=7), LATE, "CRC-32C"),
    ("X55 a chunk of nothing", chunked({}, b""), LATE, "want 16"),
    ("X56 a save that did not finish", unfinished, 3, "did not finish"),
    ("X58 codecs that are no list", sharded((0, 16), index_codecs=33), 3, "index_codecs is no list"),
    ("X59 a chunk that no frame holds", chunked(ZSTD | {"chunks": [1 << 30, 9]}, FRAME(bytes(16))), LATE,
     "can't be a compressed chunk"),
    ("X60 a leaf below a leaf", beside_or_below(("params", "w", "x")), 3, "others are below it"),
    ("X61 a leaf above a leaf", beside_or_below(("params",)), 3, "others are below it"),
    ("X57 a path without end", item(metadata=described({"a": (("x", 2),) * 100_000})), 3, "names no leaf"),
]  # fmt: skip
