"""The pickle of `.metadata`, written from columns: no object is made for any of a save's 100,000 boxes.

The idea: the pickle has one shape, so it is spelled opcode by opcode; each text and name is written once and fetched
from the memo afterwards, each torch.Size once made is kept as bytes. Protocol 4, as torch writes it; what may be named
is fixed here, nothing comes from an input but keys, numbers and file names.

    writer = MetadataPickle()
    writer.tensor("model.w", DTYPES["F32"], (4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))])
    writer.obj("epoch")
    writer.close({"model.w": ("model", "w"), "epoch": ("epoch",)}, [("model.w", (0, 0), 0, "__0_0.distcp", 0, 1577),
    ...])

Fields and their order as torch 2.13 `distributed/checkpoint/metadata.py` and `filesystem.py` pickle them;
`TensorProperties` has the tuple of its `__getstate__` as state. Cost: 3 us a box. What it does not do: anything but
this metadata (`storage.pickle_writer` is the general one, and the test's yardstick).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import Path

VERSION = "1.0.0"
_META = "torch.distributed.checkpoint.metadata"
_STORE = "torch.distributed.checkpoint.filesystem"
_NEW, _EMPTY, _BUILD = b")\x81", b"}(", b"ub"  # NEWOBJ of (); a dict opened; the dict closed and given to BUILD
_NO_SIZE = b"N"

Sizes = tuple[int, ...]
Item = tuple[str, Sizes | None, int | None, str, int, int]  # fqn, box offset, its number, file, byte, length in bytes


class MetadataPickle:
    """One `.metadata` in the making: `tensor` and `obj` for each key in order, then `close`."""

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x04")
        self._memo: dict[object, int] = {}
        self._sizes: dict[Sizes, bytes] = {}
        self._out += self._name(_META, "Metadata") + _NEW + _EMPTY + self._text("state_dict_metadata") + _EMPTY

    def tensor(self, fqn: str, dtype: DType, shape: Sizes, boxes: Iterable[tuple[Sizes, Sizes]]) -> None:
        """A tensor of `shape` and its boxes: (offset, extents), in elements."""
        out = self._out
        out += self._text(fqn) + self._name(_META, "TensorStorageMetadata") + _NEW + _EMPTY
        out += self._text("properties") + self._name(_META, "TensorProperties") + _NEW + b"("
        out += self._name("torch", dtype.torch or "") + self._name("torch.serialization", "_get_layout")
        out += (
            self._text("torch.strided") + b"\x85R\x89" + self._name(_META, "_MEM_FORMAT_ENCODING") + b"K\0\x85R\x89tb"
        )
        out += self._text("size") + self._size(shape) + self._text("chunks") + b"]("
        for offset, extent in boxes:
            out += (
                self._name(_META, "ChunkStorageMetadata") + _NEW + _EMPTY + self._text("offsets") + self._size(offset)
            )
            out += self._text("sizes") + self._size(extent) + _BUILD
        out += b"e" + _BUILD

    def obj(self, fqn: str) -> None:
        """An object item."""
        self._out += self._text(fqn) + self._name(_META, "BytesStorageMetadata") + _NEW

    def close(self, paths: Mapping[str, Path] | None, items: Iterable[Item]) -> bytes:
        """The whole pickle. paths: planner_data, None for keys that do not nest. items: storage_data, in order."""
        out = self._out
        out += b"u" + self._text("planner_data") + (b"N" if paths is None else _EMPTY)
        for fqn, path in paths.items() if paths is not None else ():
            out += self._text(fqn) + b"("
            for step in path:
                out += self._text(step) if isinstance(step, str) else _integer(step)
            out += b"t"
        out += (b"" if paths is None else b"u") + self._text("storage_data") + _EMPTY
        for fqn, offset, number, file, at, length in items:
            out += self._name(_META, "MetadataIndex") + _NEW + _EMPTY + self._text("fqn") + self._text(fqn)
            out += self._text("index") + (b"N" if number is None else _integer(number))
            out += self._text("offset") + (_NO_SIZE if offset is None else self._size(offset)) + _BUILD
            out += self._name(_STORE, "_StorageInfo") + _NEW + _EMPTY + self._text("relative_path") + self._text(file)
            out += self._text("offset") + _integer(at) + self._text("length") + _integer(length) + _BUILD
        out += b"u" + self._text("storage_meta") + self._name(_META, "StorageMeta") + _NEW + _EMPTY
        for field in ("checkpoint_id", "save_id", "load_id"):
            out += self._text(field) + b"N"
        out += self._text("modules") + b"]" + _BUILD
        out += self._text("version") + self._text(VERSION) + _BUILD + b"."
        return bytes(out)

    # -- opcodes ----------------------------------------------------------------------------------------------------

    def _once(self, key: object, code: bytes) -> bytes:
        self._memo[key] = len(self._memo)
        return code + b"\x94"

    def _known(self, key: object) -> bytes | None:
        number = self._memo.get(key)
        if number is None:
            return None
        return b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)

    def _text(self, text: str) -> bytes:
        known = self._known(text)
        if known is not None:
            return known
        raw = text.encode("utf-8", "surrogatepass")
        head = b"\x8c%c" % len(raw) if len(raw) < 256 else b"X" + struct.pack("<I", len(raw))
        return self._once(text, head + raw)

    def _name(self, module: str, name: str) -> bytes:
        known = self._known((module, name))
        if known is not None:
            return known
        return self._once((module, name), self._text(module) + self._text(name) + b"\x93")

    def _size(self, size: Sizes) -> bytes:
        """A torch.Size: a call, kept as bytes once its name stands in the memo."""
        code = self._sizes.get(size)
        if code is None:
            known = self._known(("torch", "Size"))
            code = (known or self._name("torch", "Size")) + _tuple(size) + b"\x85R"
            if known is not None:
                self._sizes[size] = code
        return code


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K%c" % value
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(raw) + raw


def _tuple(size: Sizes) -> bytes:
    body = b"".join(map(_integer, size))
    if len(size) < 4:
        return body + (b")", b"\x85", b"\x86", b"\x87")[len(size)]
    return b"(" + body + b"t"
