"""Rank files that contradict each other, made of real checkpoints: a file in another's place, of another step, edited.

Nothing of a pickle is run: `pickles.load` gives its value as data, `dumps` writes it back, `zipfile` packs it.
"""

from __future__ import annotations

import re
import shutil
import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

from ckpt_tool.core.tensor import EXTRAS, STEP
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import open_source
from ckpt_tool.storage.pickles.inline_arrays import INLINE
from ckpt_tool.storage.pickles.pickle_writer import dumps
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.torch_files.torchzip import TorchZip

_KEYS = b"iteration|global_steps|global_samples|last_epoch|_step_count|step|num_steps|consumed_samples|consumed_train_samples|epoch"  # noqa: E501
_COUNTER = re.compile(rb"(?s)(" + _KEYS + rb")(q.|r....|\x94)?K(.)")  # a key, its memo, a small number
_SIZES = {"F32": "<f", "I64": "<q"}


def places(root: Path) -> Iterator[tuple[str, str]]:
    """(from, to): files, and folders of files, whose paths differ in their numbers alone."""
    alike: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        alike[re.sub(r"\d+", "#", name), path.is_dir()].append(name)
    for names in alike.values():
        yield from permutations(names, 2)


def put(root: Path, one: str, other: str) -> bool:
    """Copy file or folder `one` over `other`; False where they were equal."""
    if (root / one).is_dir():
        shutil.rmtree(root / other)
        shutil.copytree(root / one, root / other)
        return True
    same = (root / one).read_bytes() == (root / other).read_bytes()
    shutil.copyfile(root / one, root / other)
    return not same


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the value of a torch file in place, records as they were. change: gets the value, may change or replace
    it."""
    opened = TorchZip.open(Tree(path), path.name)
    value = opened.pickled().value
    changed = change(value)
    data = dumps(value if changed is None else changed)
    _repack(path, path.read_bytes(), lambda name, record: data if name == "data.pkl" else record)


def _repack(path: Path, raw: bytes, change: Callable[[str, bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as source:
        members = source.infolist()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        for member in members:
            name, extra = struct.unpack_from("<HH", raw, member.header_offset + 26)
            at = member.header_offset + 30 + name + extra
            record = bytes(raw[at : at + member.file_size])
            out.writestr(zipfile.ZipInfo(member.filename), change(member.filename.partition("/")[2], record))


class Stale(NamedTuple):
    """What was changed of a file. counters: numbers that say its step: plain ones, and scalars of optimizer states."""

    values: int
    plain: int
    scalars: int


def scalars_of(root: Path) -> dict[str, int]:
    """File -> how many step counters of parameters (not of experts) it holds as tensors."""
    out: dict[str, int] = defaultdict(int)
    for key, tensor in open_source(str(root), Reading()).catalog.tensors.items():
        if (key.state == STEP or "_pow_acc" in key.state) and "expert" not in key.name:
            for path in {chunk.array.path for chunk in tensor.chunks}:
                out[path] += 1
    return out


def of_another_step(root: Path, file: str) -> Stale:
    """Rewrite `file` as an earlier save would have left it: all values changed in their last bits, all counters
    raised."""
    catalog = open_source(str(root), Reading()).catalog
    path = root / file
    spans = dict[int, tuple[int, str]]()
    crcs = set[tuple[int, int, int]]()
    assert not any(chunk.array.path == file + INLINE for t in catalog.tensors.values() for chunk in t.chunks)
    for tensor in catalog.tensors.values():
        for chunk in tensor.chunks if tensor.key.state != EXTRAS else ():
            array = chunk.array
            if array.path == file and array.dtype.is_float:
                spans[array.offset] = max(spans.get(array.offset, (0, "")), (array.numel, array.dtype.name))
                crcs |= {array.crc} if array.crc else set()
    raw = bytearray(path.read_bytes())
    scalars = 0
    plain = 0
    for offset, (numel, dtype) in spans.items():
        if numel == 1 and dtype in _SIZES:
            (value,) = struct.unpack_from(_SIZES[dtype], raw, offset)
            struct.pack_into(_SIZES[dtype], raw, offset, value + 1 if value == int(value) else value * 0.9)
            scalars += 1
            continue
        width = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}.get(dtype, 1)
        for at in range(offset, offset + numel * width, width):
            raw[at] ^= 1
    if raw[:2] == b"PK" and not file.endswith(".distcp"):
        plain = _restep_zip(path, bytes(raw))
    else:
        for record in crcs:
            _fix_crc(raw, *record)
        data, plain = _COUNTER.subn(_raised, bytes(raw)) if raw[:1] == b"\x80" else (bytes(raw), 0)
        path.write_bytes(data)
    return Stale(len(spans) - scalars, plain, scalars)


def _restep_zip(path: Path, raw: bytes) -> int:
    count = 0

    def change(name: str, record: bytes) -> bytes:
        nonlocal count
        if name == "data.pkl":
            record, found = _COUNTER.subn(_raised, record)
            count += found
        elif name.startswith("data/") and len(record) == 4:  # a step that hangs in a flat group
            (value,) = struct.unpack("<f", record)
            if 0 < value < 1000 and value == int(value):
                count += 1
                return struct.pack("<f", value + 1)
        return record

    _repack(path, raw, change)
    return count


def _raised(match: re.Match[bytes]) -> bytes:
    return match[1] + (match[2] or b"") + b"K" + bytes([(match[3][0] + 1) & 255])


def _fix_crc(raw: bytearray, offset: int, nbytes: int, crc: int) -> None:
    """Put the record's new CRC wherever its old one stood."""
    old = crc.to_bytes(4, "little")
    new = zlib.crc32(raw[offset : offset + nbytes]).to_bytes(4, "little")
    at = raw.find(old)
    while at >= 0:
        if not offset <= at < offset + nbytes:
            raw[at : at + 4] = new
        at = raw.find(old, at + 1)
