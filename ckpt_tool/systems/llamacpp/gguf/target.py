"""Writing GGUF: one file, or a split into files of at most `--max-shard-size`, with the layout of gguf-py.

    magic, version 3, counts | pairs | tensors | zeros up to a multiple of 32 | each tensor, padded to one

The metadata pairs are given as bytes (`Pairs`): type and value of each, as stored in the file. Without any, for names
that no family knows, there is no architecture and llama.cpp loads nothing: a note reports it. Source: gguf 0.19.0
`gguf_writer.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ckpt_tool.core.box import whole
from ckpt_tool.core.hints import Hint
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.target import Target, TargetArray, TargetFile, Wanted, WantedTensor
from ckpt_tool.errors import UsageError
from ckpt_tool.systems.llamacpp.gguf.files import SPLIT_KEYS, SUFFIX, split_name
from ckpt_tool.systems.llamacpp.gguf.header import ARCHITECTURE, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING
from ckpt_tool.weight_schemes.ggml_types import kind_of

VERSION = 3
STEM = "model"
TOO_MANY_DIMS = "E1709"
# `GGML_MAX_DIMS`; `GGML_MAX_NAME` (64) less the final zero byte
MOST_DIMS = 4
MOST_NAME = 63
_NUMBERS = {name: (number, letter) for number, (name, letter) in SCALARS.items()}


@dataclass(frozen=True, slots=True)
class Pairs(Hint):
    """The metadata to write."""

    KEY: ClassVar[str] = "gguf-pairs"
    raw: Mapping[str, Any]  # key -> the bytes of its type and value


def pair(kind: str, value: Any) -> bytes:
    """A metadata value encoded as in a file: its type, then the value. A list becomes an array of that type.

    >>> pair("UINT32", 7).hex(), pair("STRING", "a").hex()
    ('0400000007000000', '08000000010000000000000061')
    """
    if isinstance(value, list | tuple):
        number = STRING if kind == "STRING" else _NUMBERS[kind][0]
        head = struct.pack("<IIQ", 9, number, len(value))
        if kind == "STRING":
            return head + b"".join(_text(each) for each in value)
        return head + struct.pack(f"<{len(value)}{_NUMBERS[kind][1]}", *value)
    if kind == "STRING":
        return struct.pack("<I", STRING) + _text(value)
    number, letter = _NUMBERS[kind]
    return struct.pack("<I", number) + struct.pack("<" + letter, value)


def _text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def gguf_target(wanted: Wanted) -> Target:
    """The plan of the output files. Raises UsageError E1709 for tensors of more dims than ggml has."""
    deep = [tensor.key.name for tensor in wanted.tensors if len(tensor.shape) > MOST_DIMS]
    if deep:
        raise UsageError(
            f"{deep[0]} has more than the {MOST_DIMS} dims that GGUF has",
            code=TOO_MANY_DIMS,
            key=deep[0],
            faults=deep[1:50],
            hint="leave them out with --remove-keys, or choose another format",
        )

    hint = wanted.hints.get(Pairs)
    pairs = dict(hint.raw) if hint is not None else {}
    groups = _groups(wanted.tensors, wanted.shard_size) if wanted.single is None else [range(len(wanted.tensors))]
    count = len(groups)
    files = []

    for number, group in enumerate(groups):
        own = dict(pairs) if number == 0 else {}  # the first file of a split alone has the model's metadata
        if count > 1:
            # Every file of a split states its number, their count, and the tensors of all files together.
            values = zip(SPLIT_KEYS, ("UINT16", "UINT16", "INT32"), (number, count, len(wanted.tensors)), strict=True)
            own |= {key: pair(kind, value) for key, kind, value in values}
        name = wanted.single or (STEM + SUFFIX if count == 1 else split_name(STEM, number, count))
        files.append(_file(name, own, wanted.tensors, group))

    copies = list(wanted.side_file_copies())
    notes = []
    if ARCHITECTURE not in pairs:
        notes.append("no architecture is written, and llama.cpp loads no model without: the names are not its own")

    long = [tensor.key.name for tensor in wanted.tensors if len(tensor.key.name.encode()) > MOST_NAME]
    if long:
        notes.append(f"{len(long)} names have more than the {MOST_NAME} bytes that llama.cpp takes, such as {long[0]}")
    return Target("gguf", (*files, *copies), single=wanted.single, notes=tuple(notes), by_size=wanted.single is None)


def _groups(tensors: Sequence[WantedTensor], limit: int) -> list[range]:
    """The tensors of each file, as ranges of indexes.

    A file is closed before the tensor that would make it longer than `limit` bytes; a larger tensor has its own file.
    """
    starts = [0]
    size = 0
    for number, tensor in enumerate(tensors):
        if size and size + tensor.nbytes > limit:
            starts.append(number)
            size = 0
        size += tensor.nbytes
    return [range(a, b) for a, b in zip(starts, (*starts[1:], len(tensors)), strict=True)]


def _pad(nbytes: int) -> int:
    return ceil_div(nbytes, DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _file(name: str, pairs: Mapping[str, bytes], tensors: Sequence[WantedTensor], numbers: Sequence[int]) -> TargetFile:
    """The plan of one file. numbers: the indexes of its tensors in `tensors`."""
    head = [MAGIC, struct.pack("<IQQ", VERSION, len(numbers), len(pairs))]
    head += [_text(key) + raw for key, raw in pairs.items()]
    at = 0
    places = []
    for number in numbers:
        tensor = tensors[number]
        kind = kind_of(tensor.dtype)
        dims = tensor.dtype.elements(tensor.shape)[::-1]  # GGUF lists the fastest dim first
        head.append(_text(tensor.key.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind.number, at))
        places.append((number, at))
        at += _pad(tensor.nbytes)
    literal = b"".join(head)
    data = _pad(len(literal))
    arrays = [TargetArray(number, whole(tensors[number].shape), data + offset) for number, offset in places]
    return TargetFile(name, data + at, ((0, literal),), arrays)
