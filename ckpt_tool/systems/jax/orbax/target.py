"""Writing Orbax: a tree in an OCDBT database with uncompressed chunks, so that the position of every byte is known
before anything is written.

    _METADATA, manifest.ocdbt, d/5a01... (values), d/91fe... (the B-tree, with the arrays' headers)

Chunks: at most `CHUNK` bytes, cut along the first dims, so that a process reads what it needs of a large array; any
sharding may be restored. The last ones are padded, as zarr wants it. Value types are `np.ndarray`, which every call of
Orbax's restores without a `_sharding`; a caller that asks for a sharding gets jax.Arrays. The version of zarr is the
source's, else 2. A source that is a step with items, JSON items among them, is written as one; else the folder is the
item.

Paths of leaves: `systems.jax.orbax.leaves`. Source: see `format`; `fixtures/README.md` lists what was tried with Orbax.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.target import Target, TargetArray, TargetFile, Wanted, whole_file
from ckpt_tool.storage.arrays.ocdbt import MANIFEST, OcdbtNode, encode
from ckpt_tool.systems.jax.orbax.items import (
    DICT,
    EMPTY,
    JSON_ITEM,
    METADATA,
    METRICS_ITEM,
    SEQUENCE,
    STEP_METADATA,
    STRINGS,
)
from ckpt_tool.systems.jax.orbax.leaves import LeafRow, PlainLeaf, laid_out
from ckpt_tool.systems.jax.orbax.read import CUSTOM, METRICS

CHUNK = 64 << 20  # bytes
_HANDLERS = "orbax.checkpoint._src.handlers."
_TREE_HANDLER = f"{_HANDLERS}pytree_checkpoint_handler.PyTreeCheckpointHandler"
_JSON_HANDLER = f"{_HANDLERS}json_checkpoint_handler.JsonCheckpointHandler"


def orbax_target(wanted: Wanted) -> Target:
    """The plan of the output folder. Raises UsageError E2757 for a leaf at the path of another leaf's branch."""
    laid = laid_out(wanted)
    files: list[TargetFile] = []
    for item, rows in laid.items.items():
        files += _Tree(wanted, f"{item}/" if item else "", rows, zarr3=laid.hint.zarr3).files(
            (laid.hint.custom or {}).get(item)
        )
    for name, value in laid.json.items():
        inner = name if name == METRICS_ITEM else JSON_ITEM
        files.append(whole_file(f"{name}/{inner}", json.dumps(value).encode()))
    handlers: Any = {**dict.fromkeys(laid.items, _TREE_HANDLER), **dict.fromkeys(laid.json, _JSON_HANDLER)}
    step = {
        "item_handlers": _TREE_HANDLER if "" in laid.items else handlers,
        METRICS: laid.step.get(METRICS, {}),
        "performance_metrics": {},
        "init_timestamp_nsecs": None,
        "commit_timestamp_nsecs": None,
        CUSTOM: laid.step.get(CUSTOM, {}),
    }
    files.append(whole_file(STEP_METADATA, json.dumps(step).encode()))
    copies = list(wanted.side_file_copies())
    return Target("orbax", (*files, *copies), notes=laid.notes, by_size=True)


class _Placed(NamedTuple):
    """A chunk with its place in a file."""

    tensor: int  # index of the wanted tensor
    box: Box  # the elements that it holds
    full: tuple[int, ...]  # its shape with padding: chunks of a grid have one shape
    offset: int  # in bytes of its file


class _Tree:
    """Plans the files of one item. zarr3: write headers of zarr 3, else of zarr 2."""

    def __init__(self, wanted: Wanted, folder: str, rows: Sequence[LeafRow], *, zarr3: bool) -> None:
        self.wanted = wanted
        self.folder = folder
        self.rows = rows
        self.zarr3 = zarr3
        self.values: list[OcdbtNode] = []
        self.chunks: list[list[_Placed]] = []  # by file
        self.ends: list[int] = []  # bytes of each file

    def files(self, custom: Any) -> Iterator[TargetFile]:
        """The files with values, B-tree, manifest, texts and `_METADATA`. custom: the user's `custom_metadata`."""
        texts: dict[str, Any] = {}
        for row in self.rows:
            if isinstance(row.value, str):
                _nest(texts, row.stored.split("/"), row.value)
            elif isinstance(row.value, PlainLeaf):
                self._header(row, (), (), row.value.dtype)
                self.values.append(OcdbtNode(self._key(row, ()), row.value.raw))
            elif isinstance(row.value, int):
                self._array(row, row.value)

        # Names have the form of TensorStore's random ones, but are hashes: equal input gives equal files.
        told = blake2b(repr([value[:1] + value[2:] for value in self.values]).encode(), digest_size=16).digest()
        names = [
            f"d/{blake2b(told + bytes([n & 255, n >> 8]), digest_size=16).hexdigest()}" for n in range(len(self.ends))
        ]
        node_file = f"d/{blake2b(told + b'nodes', digest_size=16).hexdigest()}"

        for name, size, chunks in zip(names, self.ends, self.chunks, strict=True):
            arrays = [
                TargetArray(at.tensor, at.box, at.offset, None if at.full == at.box.shape else at.full) for at in chunks
            ]
            yield TargetFile(self.folder + name, size, arrays=arrays)

        manifest, nodes = encode(names, self.values, told, node_file)
        yield whole_file(self.folder + node_file, nodes)
        yield whole_file(self.folder + MANIFEST, manifest)
        if texts:
            yield whole_file(self.folder + STRINGS, json.dumps(texts).encode())

        yield whole_file(self.folder + METADATA, json.dumps(self._metadata(custom)).encode())

    def _metadata(self, custom: Any) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for row in self.rows:
            keys = [{"key": str(key), "key_type": SEQUENCE if isinstance(key, int) else DICT} for key in row.path]
            value: dict[str, Any] = {"value_type": row.kind, "skip_deserialize": row.kind in EMPTY}
            if isinstance(row.value, int):
                value["write_shape"] = list(
                    _cut(self.wanted.tensors[row.value].shape, self.wanted.tensors[row.value].dtype)
                )
            tree[str(tuple(map(str, row.path)))] = {"key_metadata": keys, "value_metadata": value}
        return {
            "tree_metadata": tree,
            "use_ocdbt": True,
            "use_zarr3": self.zarr3,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": custom,
        }

    def _key(self, row: LeafRow, index: Sequence[int]) -> bytes:
        if self.zarr3:
            last = "/".join(["c", *map(str, index)])
        else:
            last = ".".join(map(str, index)) or "0"
        return f"{row.stored}/{last}".encode("utf-8", "surrogateescape")

    def _array(self, row: LeafRow, number: int) -> None:
        tensor = self.wanted.tensors[number]
        full = _cut(tensor.shape, tensor.dtype)
        self._header(row, tensor.shape, full, tensor.dtype)
        nbytes = tensor.dtype.nbytes(prod(full))
        for index in product(*(range(ceil_div(n, step)) for n, step in zip(tensor.shape, full, strict=True))):
            # A file is closed before the chunk that would exceed the limit; a larger chunk has a file of its own.
            if not self.ends or (self.ends[-1] and self.ends[-1] + nbytes > self.wanted.shard_size):
                self.ends.append(0)
                self.chunks.append([])
            offset = tuple(i * step for i, step in zip(index, full, strict=True))
            # Chunks at the end hold fewer elements, but are stored with padding to the full shape.
            shape = tuple(min(step, n - o) for step, n, o in zip(full, tensor.shape, offset, strict=True))
            self.chunks[-1].append(_Placed(number, Box(offset, shape), full, self.ends[-1]))
            self.values.append(OcdbtNode(self._key(row, index), None, len(self.ends) - 1, self.ends[-1], nbytes))
            self.ends[-1] += nbytes

    def _header(self, row: LeafRow, shape: tuple[int, ...], full: tuple[int, ...], dtype: DType) -> None:
        if self.zarr3:
            header = _v3(shape, full, dtype)
        else:
            header = _v2(shape, full, dtype)
        name = f"{row.stored}/{'zarr.json' if self.zarr3 else '.zarray'}"
        raw = json.dumps(header, separators=(",", ":")).encode()
        self.values.append(OcdbtNode(name.encode("utf-8", "surrogateescape"), raw))


def _cut(shape: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    """The shape of a chunk: that of the array, with the first dims divided until it has at most `CHUNK` bytes."""
    full = [max(extent, 1) for extent in shape]
    for dim, extent in enumerate(full):
        parts = ceil_div(dtype.nbytes(prod(full)), CHUNK)
        if parts <= 1:
            break
        full[dim] = ceil_div(extent, min(parts, extent))
    return tuple(full)


def _v2(shape: Sequence[int], full: Sequence[int], dtype: DType) -> dict[str, Any]:
    return {
        "chunks": list(full),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": spelled(dtype),
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }


def spelled(dtype: DType) -> str:
    """The name of a dtype in a `.zarray`."""
    if not dtype.exact:
        return str(dtype.torch)
    kind = {"B": "b", "I": "i", "U": "u", "F": "f", "C": "c"}[dtype.name[0]]
    return f"{'|' if dtype.bits == 8 else '<'}{kind}{dtype.bits // 8}"


def _v3(shape: Sequence[int], full: Sequence[int], dtype: DType) -> dict[str, Any]:
    fill: Any = 0.0 if dtype.is_float else 0
    if dtype.name == "BOOL":
        fill = False
    elif dtype.name[0] == "C":  # a complex number is two
        fill = [0.0, 0.0]
    return {
        "attributes": {},
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(full)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "data_type": dtype.torch,
        "fill_value": fill,
        "node_type": "array",
        "shape": list(shape),
        "zarr_format": 3,
    }


def _nest(texts: dict[str, Any], steps: Sequence[str], value: str) -> None:
    for step in steps[:-1]:
        texts = texts.setdefault(step, {})
    texts[steps[-1]] = value
