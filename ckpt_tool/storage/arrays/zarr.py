"""Arrays of zarr, versions 2 and 3: which bytes of which file hold which box.

    w/.zarray {"shape": [10, 8], "chunks": [4, 8], "dtype": "<f4", "compressor": {"id": "zstd"}, ...}
    w/0.0, w/1.0, w/2.0  ->  F32 (10, 8): rows 0-3 in w/0.0, 4-7 in w/1.0, 8-9 in w/2.0, whose last two rows are padding

Chunks that are not compressed are read in place, row by row or in another order of the dims; compressed ones are given
as views (`storage.views`). Headers alone are read, and the indexes of shards when their chunks are wanted.

Specification: zarr v2 (`.zarray`, chunks `1.0` or `1/0`), zarr v3 (`zarr.json`, chunks `c/1/0`, codecs transpose,
bytes, zstd, gzip; sharding_indexed: a chunk is a file of inner chunks, with an index of their offsets and lengths, u64
each, at its end or start and a CRC-32C of it), as tensorstore 0.1.86 `driver/zarr`, `driver/zarr3` and `kvstore/
zarr3_sharding_indexed` have them; its dtypes of ml_dtypes bear their names. Cost: 4 us a chunk. What it does not do:
blosc, bz2, filters, structured dtypes, big-endian numbers, types of less than a byte, shards within shards, checksums
of chunks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple, NoReturn, Protocol

from ckpt_tool.core.box import Box, contiguous_strides
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.inner_path import is_view
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.missing import is_collecting, report_missing
from ckpt_tool.core.tensor import Chunk, StoredArray
from ckpt_tool.errors import CkptError, CorruptFile, Incomplete, InputError
from ckpt_tool.storage.arrays.crc32c import crc32c
from ckpt_tool.storage.arrays.ocdbt import Value
from ckpt_tool.storage.source import Tree, missing_file
from ckpt_tool.storage.texts import strict_json
from ckpt_tool.storage.views import CODECS, LARGEST_RATIO, Compressed, fill_view

DAMAGED = "E2753"
UNSUPPORTED = "E2754"
HOLE = "E0309"
HEADER_LIMIT = 1 << 20  # bytes
MOST_CHUNKS = 4_000_000  # of an array
MOST_DIMS = 64
HEADERS = (".zarray", "zarr.json")  # the last part of the key of an array's header, by version
_EMPTY = ((1 << 64) - 1, (1 << 64) - 1)  # what the index of a shard says of a chunk that is not stored
_AGAIN = "fetch the checkpoint again"
_V2 = {
    "b1": "BOOL",
    "i1": "I8",
    "u1": "U8",
    "i2": "I16",
    "u2": "U16",
    "i4": "I32",
    "u4": "U32",
    "i8": "I64",
    "u8": "U64",
    "f2": "F16",
    "f4": "F32",
    "f8": "F64",
    "c8": "C64",
    "c16": "C128",
}
_BY_NAME = {dtype.torch: dtype for dtype in DTYPES.values() if dtype.torch}
_STRUCT = {"BOOL": "?", "F16": "<e", "F32": "<f", "F64": "<d"} | {
    f"{'U' if unsigned else 'I'}{8 * size}": "<" + (letter.upper() if unsigned else letter)
    for size, letter in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))
    for unsigned in (False, True)
}

_CAST = "restore it with Orbax, cast it to a dtype of whole bytes (jnp.int4 to jnp.int8), and save it again"
_PARTS = {"C64": "F32", "C128": "F64"}


class ZarrStore(Protocol):
    """Keys and the places of their values."""

    def get(self, key: str) -> Value | None:
        """The place of the key's value, None if the store has no such key."""
        ...


class ZarrFiles:
    """The files below a folder of a tree as a store. folder: "" or with a slash."""

    def __init__(self, tree: Tree, folder: str) -> None:
        self._listing = tree.listing()
        self._folder = folder

    def get(self, key: str) -> Value | None:
        """The file of that name, None if there is none."""
        size = self._listing.get(self._folder + key, -1)
        return None if size < 0 else Value(self._folder + key, 0, size)


class _ShardedChunks(NamedTuple):
    """Each chunk is a file of inner chunks of this shape."""

    shape: tuple[int, ...]
    front: bool  # is the index at the start of the file, before the inner chunks?
    checked: bool  # has the index a checksum?


class ZarrLayout(NamedTuple):
    """How an array is cut and stored."""

    dtype: DType
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    order: tuple[int, ...]  # the dims of a chunk as stored, the slowest first
    codec: str  # the compression, "" for none
    separator: str  # between the indices in a chunk's key
    prefix: str  # of a chunk's key: "c" for the default keys of zarr v3, else ""
    fill: bytes  # the bytes of an element that is not stored
    shards: _ShardedChunks | None = None

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each dim."""
        return tuple(ceil_div(extent, step) for extent, step in zip(self.shape, self.chunk, strict=True))

    def key(self, index: Sequence[int]) -> str:
        """The key of a chunk, below the array's."""
        numbers = self.separator.join(map(str, index))
        return f"{self.prefix}{self.separator}{numbers}" if self.prefix and index else self.prefix or numbers or "0"


class Array(NamedTuple):
    """One array."""

    name: str  # its key in the store
    layout: ZarrLayout
    tree: Tree
    store: ZarrStore
    header: Value  # the place of its header
    holes: bool  # is a chunk that is not there lost, or are its elements the fill value?

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims."""
        return self.layout.shape

    @property
    def dtype(self) -> DType:
        """The dtype of the elements."""
        return self.layout.dtype

    def chunks(self) -> Iterator[Chunk]:
        """Every chunk that is stored, and the fill value for others; with `missing` they tile the array. Raises
        CorruptFile E2753, E0311; Incomplete E0309, E0313."""
        layout = self.layout
        for index in product(*map(range, layout.grid)):
            offset = tuple(i * step for i, step in zip(index, layout.chunk, strict=True))
            value = self.store.get(f"{self.name}/{layout.key(index)}")
            if value is not None and self._is_missing(value):
                continue
            if layout.shards is not None and value is not None:
                yield from self._inner(value, offset, layout.shards)
            elif (chunk := self._chunk(value, offset, layout.chunk)) is not None:
                yield chunk

    def _is_missing(self, value: Value) -> bool:
        """Is the file of a value missing? Checked, and reported, only while missing files are collected
        (`is_collecting`); otherwise reading raises."""
        if not is_collecting() or is_view(value.path) or value.path in self.tree.listing():
            return False
        fault = missing_file(value.path, self.tree.display(value.path))
        report_missing(fault, files=[value.path])
        return True

    def chunk_keys(self) -> Iterator[str]:
        """The keys of all chunks that its header asks for, below the array's own."""
        return (self.layout.key(index) for index in product(*map(range, self.layout.grid)))

    def missing_keys(self) -> list[str]:
        """The keys of the chunks that are not stored."""
        return [key for key in self.chunk_keys() if self.store.get(f"{self.name}/{key}") is None]

    def filled_keys(self) -> list[str]:
        """The keys of the chunks that are read as the fill value, those within shards by their places there. Reads the
        indexes of the shards. Raises as `chunks`."""
        if self.holes:
            return []
        filled = self.missing_keys()
        shards = self.layout.shards
        if shards is None:
            return filled

        grid = tuple(whole // part for whole, part in zip(self.layout.chunk, shards.shape, strict=True))
        for key in self.chunk_keys():
            value = self.store.get(f"{self.name}/{key}")
            if value is None or self._is_missing(value):
                continue
            entries = self._index(value, prod(grid), shards)
            for place, entry in zip(product(*map(range, grid)), entries, strict=True):
                if entry == _EMPTY:
                    filled.append(f"{list(place)} of {key}")
        return filled

    def missing(self) -> CkptError | None:
        """The error (E0309) if chunks are lost, None if not. Looks at keys alone, not into shards."""
        lost = self.missing_keys() if self.holes else []
        if not lost:
            return None
        return self._lost(lost, prod(self.layout.grid), self.header.path)

    def _lost(self, lost: Sequence[str], count: int, path: str) -> Incomplete:
        return Incomplete(
            f"{len(lost)} of its {count} chunks are not there: {', '.join(lost[:4])}",
            code=HOLE,
            path=self.tree.display(path),
            key=self.name[:200],
            hint="a process's part of the save is missing, or the save was cut short",
        )

    def _inner(self, value: Value, offset: tuple[int, ...], shards: _ShardedChunks) -> Iterator[Chunk]:
        grid = tuple(whole // part for whole, part in zip(self.layout.chunk, shards.shape, strict=True))
        entries = self._index(value, prod(grid), shards)
        for index, (at, nbytes) in zip(product(*map(range, grid)), entries, strict=True):
            start = tuple(o + i * step for o, i, step in zip(offset, index, shards.shape, strict=True))
            inner = None
            if (at, nbytes) == _EMPTY:
                if self.holes:
                    raise self._lost([f"{list(index)} of the shard at {list(offset)}"], prod(grid), value.path)
            else:
                if at + nbytes > value.nbytes:
                    raise self._fault(f"{nbytes} bytes at {at} of a shard of {value.nbytes}", value)
                inner = Value(value.path, value.offset + at, nbytes)
            if (chunk := self._chunk(inner, start, shards.shape)) is not None:
                yield chunk

    def _index(self, value: Value, count: int, shards: _ShardedChunks) -> list[tuple[int, int]]:
        """(offset, length) in bytes of each inner chunk of a shard."""
        # Offset and length of each inner chunk, as u64.
        nbytes = 16 * count
        size = nbytes + 4 * shards.checked
        if size > value.nbytes:
            raise self._fault(f"a shard of {value.nbytes} bytes has no index of {count} chunks", value)
        at = 0 if shards.front else value.nbytes - size
        self._within(Value(value.path, value.offset + at, size))
        raw = self.tree.read(value.path, value.offset + at, size)
        if shards.checked and crc32c(raw[:nbytes]) != int.from_bytes(raw[nbytes:], "little"):
            raise self._fault("the index of a shard does not give the CRC-32C that is stored", value)
        return list(struct.iter_unpack("<QQ", raw[:nbytes]))

    def _chunk(self, value: Value | None, offset: tuple[int, ...], full: tuple[int, ...]) -> Chunk | None:
        """The chunk of shape `full` at `offset`; None for one that is padding alone, or lost."""
        layout = self.layout
        shape = tuple(min(step, extent - o) for step, extent, o in zip(full, layout.shape, offset, strict=True))
        if any(extent <= 0 for extent in shape) or (value is None and self.holes):
            return None

        box = Box(offset, shape)
        within = Box((0,) * len(shape), shape)
        if value is None:
            path = fill_view(self.header.path, layout.fill)
            # Strides of zero: one stored element is every element of the chunk.
            return Chunk(box, StoredArray(path, 0, layout.dtype, full, (0,) * len(full)), within)

        nbytes = layout.dtype.nbytes(prod(full))
        self._within(value)
        path = value.path
        at = value.offset
        # Impossible sizes are refused before anything is decompressed.
        if layout.codec and nbytes > LARGEST_RATIO * value.nbytes:
            raise self._fault(f"{value.nbytes} bytes can't be a compressed chunk of {nbytes} bytes", value)

        if layout.codec:
            path = Compressed(value.path, value.offset, value.nbytes, nbytes, layout.codec).view
            at = 0
        elif value.nbytes != nbytes:
            raise self._fault(f"a chunk of {value.nbytes} bytes, want {nbytes}", value)

        strides = None
        if layout.order != tuple(range(len(full))):
            steps = contiguous_strides([full[dim] for dim in layout.order])
            strides = tuple(steps[layout.order.index(dim)] for dim in range(len(full)))

        return Chunk(box, StoredArray(path, at, layout.dtype, full, strides), within)

    def _within(self, value: Value) -> None:
        if is_view(value.path):  # the node that contains it has been read and checked
            return
        size = self.tree.listing().get(value.path, -1)
        if size < 0:
            raise Incomplete(
                f"{value.path} is missing",
                code="E0313",
                path=self.tree.display(value.path),
                key=self.name[:200],
                hint="fetch the file, or pass the folder that holds it",
            )
        if value.offset + value.nbytes > size:
            message = f"want {value.nbytes} bytes at {value.offset}, but the file has {size}"
            hint = "the file is cut short: compare its size with the source"
            shown = self.tree.display(value.path)
            raise CorruptFile(message, code="E0311", path=shown, offset=size, key=self.name[:200], hint=hint)

    def _fault(self, message: str, value: Value) -> CorruptFile:
        shown = self.tree.display(value.path)
        return CorruptFile(message, code=DAMAGED, path=shown, offset=value.offset, key=self.name[:200], hint=_AGAIN)


def read_array(tree: Tree, store: ZarrStore, name: str, *, version: int, holes: bool) -> Array:
    """The array `name` of a store, from its header.

    Raises Incomplete E0301 where there is no header, CorruptFile E2753 for one that is none, InputError E2754 for what
    is not read, and what `strict_json.parse` raises.
    """
    header = store.get(f"{name}/{HEADERS[version - 2]}")
    if header is None:
        raise Incomplete(
            "the array has no header",
            code="E0301",
            path=tree.display(),
            key=name[:200],
            hint="its files are missing, or the save was cut short",
        )
    shown = tree.display(header.path)
    if header.nbytes > HEADER_LIMIT:
        message = f"a header of {header.nbytes} bytes, want at most {HEADER_LIMIT}"
        raise CorruptFile(message, code=DAMAGED, path=shown, key=name[:200], hint=_AGAIN)
    raw = strict_json.parse(tree.read(*header), path=shown, offset=header.offset)
    reading = _Header(raw, shown, name)
    return Array(name, reading.v3() if version == 3 else reading.v2(), tree, store, header, holes)


class _Header:
    """A header on its way to a layout."""

    def __init__(self, raw: Any, shown: str, name: str) -> None:
        self.raw = raw
        self.shown = shown
        self.name = name
        if not isinstance(raw, dict):
            self.damaged("the header is no JSON object")

    def damaged(self, message: str) -> NoReturn:
        """Raise the error for a header that violates the specification."""
        raise CorruptFile(message, code=DAMAGED, path=self.shown, key=self.name[:200], hint=_AGAIN)

    def refused(self, message: str, way: str = "restore it with Orbax and save it again") -> NoReturn:
        """Raise the error for a valid header that asks for something unsupported. way: what the user can do."""
        raise InputError(
            f"{message}, which is not read", code=UNSUPPORTED, path=self.shown, key=self.name[:200], hint=way
        )

    def sizes(self, value: Any, what: str, least: int) -> tuple[int, ...]:
        """A list of sizes from the header, each at least `least`. what: the field, for the error."""
        fits = isinstance(value, list) and len(value) <= MOST_DIMS
        if not fits or any(type(n) is not int or not least <= n < 1 << 48 for n in value):
            self.damaged(f"{what} is {str(value)[:80]}, want a list of sizes")
        return tuple(value)

    def v2(self) -> ZarrLayout:
        """The layout that a `.zarray` header describes."""
        raw = self.raw
        if raw.get("zarr_format") != 2:
            self.damaged(f"zarr_format is {str(raw.get('zarr_format'))[:40]}, want 2")
        spelled = raw.get("dtype")
        dtype = _BY_NAME.get(spelled) if isinstance(spelled, str) else None
        if dtype is None and isinstance(spelled, str) and spelled[:1] in ("<", "|"):
            dtype = DTYPES.get(_V2.get(spelled[1:], ""))
        if dtype is None:
            self.refused(f"a dtype {str(spelled)[:80]!r}", _CAST)
        if raw.get("filters"):
            self.refused(f"filters {str(raw['filters'])[:80]}")

        shape = self.sizes(raw.get("shape"), "shape", 0)
        chunk = self.sizes(raw.get("chunks"), "chunks", 1)
        order = tuple(range(len(shape)))
        if raw.get("order", "C") not in ("C", "F"):
            self.damaged(f"order is {str(raw['order'])[:40]}, want C or F")
        if raw.get("order") == "F":
            order = order[::-1]

        separator = raw.get("dimension_separator", ".")
        if separator not in (".", "/"):
            self.damaged(f"dimension_separator is {str(separator)[:40]}, want . or /")
        codec = ""
        if (compressor := raw.get("compressor")) is not None:
            name = compressor.get("id") if isinstance(compressor, dict) else compressor
            codec = "gzip" if name == "zlib" else self.codec(name)  # one decoder reads both headers

        return self.checked(
            ZarrLayout(dtype, shape, chunk, order, codec, separator, "", self.fill(raw.get("fill_value"), dtype))
        )

    def codec(self, name: Any) -> str:
        """The name of a compression, if it is one that is read."""
        if name not in CODECS:
            self.refused(f"the compression {str(name)[:80]!r}")
        return str(name)

    def v3(self) -> ZarrLayout:
        """The layout that a `zarr.json` header describes."""
        raw = self.raw
        if raw.get("zarr_format") != 3 or raw.get("node_type", "array") != "array":
            self.damaged("it is no header of a zarr array of version 3")
        spelled = raw.get("data_type")
        dtype = _BY_NAME.get(spelled) if isinstance(spelled, str) else None
        if dtype is None:
            self.refused(f"a data_type {str(spelled)[:80]!r}", _CAST)
        if raw.get("storage_transformers"):
            self.refused("storage_transformers")
        grid = self.named(raw.get("chunk_grid"))
        encoding, how = self.named(raw.get("chunk_key_encoding"))
        if grid[0] != "regular" or encoding not in ("default", "v2"):
            self.refused(f"a chunk_grid {grid[0][:40]!r} with keys {encoding[:40]!r}")
        shape = self.sizes(raw.get("shape"), "shape", 0)
        chunk = self.sizes(grid[1].get("chunk_shape"), "chunk_shape", 1)
        separator = how.get("separator", "/" if encoding == "default" else ".")
        if separator not in (".", "/"):
            self.damaged(f"separator is {str(separator)[:40]}, want . or /")
        order, codec, shards = self.codecs(raw.get("codecs"), chunk)
        prefix = "c" if encoding == "default" else ""
        fill = self.fill(raw.get("fill_value"), dtype)
        return self.checked(ZarrLayout(dtype, shape, chunk, order, codec, separator, prefix, fill, shards))

    def named(self, value: Any) -> tuple[str, Mapping[str, Any]]:
        """(name, configuration) of an extension point."""
        name = value.get("name") if isinstance(value, dict) else value
        config = value.get("configuration", {}) if isinstance(value, dict) else {}
        if not isinstance(name, str) or not isinstance(config, dict):
            self.damaged(f"{str(value)[:80]} is no name with a configuration")
        return name, config

    def codecs(
        self, value: Any, chunk: tuple[int, ...], *, inner: bool = False
    ) -> tuple[tuple[int, ...], str, _ShardedChunks | None]:
        """(order, compression, shards) of a list of codecs."""
        if not isinstance(value, list):
            self.damaged("codecs is no list")
        order = tuple(range(len(chunk)))
        codec = ""
        shards = None
        ended = False
        for name, config in map(self.named, value):
            if name == "transpose" and not ended:
                order = tuple(order[dim] for dim in self.permutation(config.get("order"), len(chunk)))
            elif name == "bytes" and not ended and config.get("endian", "little") == "little":
                ended = True
            elif name == "sharding_indexed" and not ended and not inner and len(value) == 1:
                order, codec, shards = self.sharded(config, chunk)
                ended = True
            elif name in CODECS and ended and shards is None and not codec:
                codec = name
            else:
                self.refused(f"the codec {name[:40]!r} {str(dict(config))[:80]} there")
        if not ended:
            self.damaged("no codec makes bytes of its elements")
        return order, codec, shards

    def permutation(self, value: Any, rank: int) -> tuple[int, ...]:
        """The order of `rank` dims: a list that contains each dim once, or "C" or "F"."""
        if value in ("C", "F"):
            return tuple(range(rank)) if value == "C" else tuple(range(rank))[::-1]
        if not isinstance(value, list) or any(type(n) is not int for n in value) or sorted(value) != [*range(rank)]:
            self.damaged(f"the order {str(value)[:80]} is none of {rank} dims")
        return tuple(value)

    def sharded(self, config: Mapping[str, Any], chunk: tuple[int, ...]) -> tuple[tuple[int, ...], str, _ShardedChunks]:
        """(order, compression, shards) of the inner chunks, from the configuration of `sharding_indexed`."""
        shape = self.sizes(config.get("chunk_shape"), "the chunk_shape of a shard", 1)
        if len(shape) != len(chunk) or any(whole % part for whole, part in zip(chunk, shape, strict=True)):
            self.damaged(f"shards of {list(chunk)} are no whole number of chunks of {list(shape)}")
        if prod(whole // part for whole, part in zip(chunk, shape, strict=True)) > MOST_CHUNKS:
            self.damaged(f"shards of {list(chunk)} in chunks of {list(shape)}")
        order, codec, _ = self.codecs(config.get("codecs"), shape, inner=True)
        given = config.get("index_codecs")
        if not isinstance(given, list):
            self.damaged("index_codecs is no list")
        index = [self.named(each) for each in given]
        names = [name for name, _ in index]
        if names not in (["bytes"], ["bytes", "crc32c"]) or index[0][1].get("endian", "little") != "little":
            self.refused(f"an index of shards by the codecs {', '.join(names)[:80]}")
        where = config.get("index_location", "end")
        if where not in ("start", "end"):
            self.damaged(f"index_location is {str(where)[:40]}, want start or end")
        return order, codec, _ShardedChunks(shape, where == "start", len(names) == 2)

    def checked(self, layout: ZarrLayout) -> ZarrLayout:
        """The layout, if its dims agree and its sizes are within limits."""
        if len(layout.shape) != len(layout.chunk):
            self.damaged(f"a shape {list(layout.shape)} in chunks of {list(layout.chunk)}")
        inner = layout.shards.shape if layout.shards else layout.chunk
        # Bounds the memory: a damaged header must not make us list 10^15 chunks.
        cells = prod(ceil_div(extent, step) for extent, step in zip(layout.shape, inner, strict=True))
        if cells > MOST_CHUNKS or prod(layout.shape) >= 1 << 56 or prod(layout.chunk) >= 1 << 48:
            self.damaged(f"{cells} chunks of {list(inner)} for a shape {list(layout.shape)}")
        return layout

    def fill(self, value: Any, dtype: DType) -> bytes:
        """The bytes of the fill value, in the spellings of both versions."""
        size = dtype.bits // 8
        if value is None or (type(value) in (int, bool) and not value) or (value == 0.0 and str(value) == "0.0"):
            return bytes(size)
        if isinstance(value, str) and value[:2] == "0x" and len(value) == 2 + 2 * size:
            try:
                return int(value, 16).to_bytes(size, "little")
            except ValueError:
                self.damaged(f"the fill_value {value!r}")
        if isinstance(value, list) and len(value) == 2 and dtype.name in _PARTS:  # real and imaginary part
            part = DTYPES[_PARTS[dtype.name]]
            return b"".join(self.fill(each, part) for each in value if not isinstance(each, list))
        special = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
        number = float(special[value]) if isinstance(value, str) and value in special else value
        try:
            return struct.pack(_STRUCT[dtype.name], number)
        except (KeyError, struct.error, OverflowError):
            self.refused(f"a fill_value {str(value)[:40]} of {dtype.name}")
