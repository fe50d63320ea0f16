"""A plan as a file's document, and a file's document as a plan.

A plan file is data from a stranger. Its seal, a hash of all the rest, shows that it is as it was made: an edit is found
before anything else is looked at. The seal is no secret, so what follows trusts nothing either: each value has its type
and its bounds (here), and all of it has to be consistent (`plan.checking`). No check can reveal that a valid plan was
made for another purpose: it can read the sources that it names and write the output that it names, as any command can.

    sealed({"plan_version": 2, ...})        {..., "seal": "5d1f..."}
    check_seal(document, "p.json")          E1601 where they disagree

Cost: some 6 us a region.
"""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.target import PATCH_BYTES, Patch, TargetFile
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import SourceChanged
from ckpt_tool.plan.checking import check
from ckpt_tool.plan.copy import Region
from ckpt_tool.plan.plan import PLAN_VERSION, Extent, Move, Plan, Record, SourceFile

NUMBER = 1 << 62  # of any number in a plan that is reckoned with, exclusive: sums of two stay in 63 bits
IDENTITY = 1 << 64  # of those that say which file it was: inodes of some networks' file systems use all bits
RANK = 64  # dims
_SEAL = "seal"
_OPTIONS: Mapping[str, type] = {"verify": str, "max_shard_size": int, "unlisted": list}


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its seal."""
    return {**document, _SEAL: _seal_of(document)}


def check_seal(document: Any, path: str) -> None:
    """Raise SourceChanged E1601 unless the document of plan file `path` is as `sealed` made it."""
    if not isinstance(document, dict) or document.get("plan_version") != PLAN_VERSION:
        return  # no plan of this version: `read_plan` says so
    if document.get(_SEAL) != _seal_of({key: value for key, value in document.items() if key != _SEAL}):
        raise SourceChanged(
            "the plan file is not as it was made: its seal is that of other content",
            code="E1601",
            path=path,
            hint="plans are made by --plan and not edited: make it again with the options that are wanted",
        )


def _seal_of(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_plan(document: Any, path: str) -> Plan:
    """The plan in `document`, read from file `path`, checked whole. Raises SourceChanged E0610, UnsafeInput E1600."""
    try:
        plan = _plan(document)
    except (KeyError, TypeError, ValueError, IndexError) as e:
        words = f"{type(e).__name__}: {e}" if isinstance(e, KeyError | IndexError) else str(e)
        raise _unreadable(words, path) from e
    faults = check(plan, path)
    if faults:
        raise _unreadable(faults[0], path, faults[1:])
    return plan


def _unreadable(words: str, path: str, faults: Sequence[str] = ()) -> SourceChanged:
    return SourceChanged(
        f"the plan file is not a valid plan: {words}",
        code="E0610",
        path=path,
        hint="make it again with --plan",
        faults=faults,
    )


def _plan(document: Any) -> Plan:
    version = _mapping(document).get("plan_version")
    if version != PLAN_VERSION:
        raise ValueError(f"plan version {version!r:.40}, want {PLAN_VERSION}")
    files = [_mapping(file) for file in _rows(document["outputs"])]
    return Plan(
        tuple(SourceFile(_path(root), _path(at), _identity(seen)) for root, at, seen in _rows(document["sources"])),
        tuple(Record(*_numbers(record, 4)) for record in _rows(document["records"])),
        tuple(map(_file, files)),
        tuple(tuple(Extent(*_numbers(row, 3, low=-1)) for row in _rows(file["arrays"])) for file in files),
        tuple(map(_move, _rows(document["moves"]))),
        _text(document["format"]),
        None if document["single"] is None else _text(document["single"]),
        _path(document["destination"]),
        _options(_mapping(document["options"])),
        dict(_mapping(document["report"])),
    )


def _file(file: Mapping[str, Any]) -> TargetFile:
    copied = file["copy_of"]
    return TargetFile(
        _text(file["path"]),
        _number(file["size"]),
        tuple((_number(at), b64decode(_text(data), validate=True)) for at, data in _rows(file["literals"])),
        (),
        tuple(_patch(*row) for row in _rows(file["patches"])),
        None if copied is None else _text(copied),
    )


def _patch(offset: Any, kind: Any, of: Any, span: Any = None) -> Patch:
    if _text(kind) not in PATCH_BYTES:
        raise ValueError(f"expected a kind of patch, got {kind!r:.40}")
    (where,) = _numbers([of], 1, low=-1)
    pair = None if span is None else _numbers(span, 2)
    return Patch(_number(offset), kind, where, None if pair is None else (pair[0], pair[1]))


def _move(row: Sequence[Any]) -> Move:
    key, shape, dtype, dtype_out, numel, item, item_out, sources, targets, *order = row
    name, state = map(_text, _rows(key))
    return Move(
        TensorKey(name, state),
        _numbers(shape),
        _dtype(dtype),
        _dtype(dtype_out),
        _number(numel),
        _number(item),
        _number(item_out),
        tuple(map(_region, _rows(sources))),
        tuple(map(_region, _rows(targets))),
        *(_numbers(each, len(shape)) for each in order),
    )


def _region(row: Sequence[Any]) -> Region:
    file, offset, at, extents, strides, steps, replica = row
    file, offset, at, replica = _numbers((file, offset, at, replica))
    out = Region(file, offset, at, _numbers(extents), _numbers(strides), _numbers(steps), replica)
    if not len(out.extents) == len(out.strides) == len(out.steps):
        raise ValueError("a region's extents, strides and steps disagree")
    return out


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    for name, kind in _OPTIONS.items():
        if name in options and type(options[name]) is not kind:
            raise ValueError(f"option {name}: expected {kind.__name__}, got {options[name]!r:.40}")
    for row in options.get("unlisted", ()):
        _name, _state = map(_text, _rows(row))
    return dict(options)


# -- values ------------------------------------------------------------------------------------------------------------


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected an object, got {value!r:.40}")
    return value


def _rows(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list, got {value!r:.40}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a string, got {value!r:.40}")
    return value


def _path(value: Any) -> str:
    text = _text(value)
    try:
        raw = os.fsencode(text)
    except UnicodeEncodeError:
        raw = b""
    if not raw or b"\0" in raw:
        raise ValueError(f"expected a path, got {text!r:.80}")
    return text


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < NUMBER:
        raise ValueError(f"expected a number of 0 to {NUMBER}, got {value!r:.40}")
    return value


def _identity(values: Any) -> tuple[int, ...]:
    """A file's identity (`storage.source.Identity`, or a store's as hashes): compared, and nothing else."""
    return _numbers(values, 5, low=-NUMBER, below=IDENTITY)  # times before 1970 are below 0


def _numbers(values: Any, count: int | None = None, *, low: int = 0, below: int = NUMBER) -> tuple[int, ...]:
    """Integers of `low` up to `below`, `count` of them where that is known, RANK at most."""
    numbers = tuple(_rows(values))
    if not set(map(type, numbers)) <= {int}:
        raise ValueError(f"expected whole numbers, got {values!r:.80}")
    if numbers and not (low <= min(numbers) and max(numbers) < below):
        raise ValueError(f"expected numbers of {low} to {below}, got {values!r:.80}")
    if len(numbers) != count if count is not None else len(numbers) > RANK:
        raise ValueError(f"expected {count if count is not None else f'at most {RANK}'} numbers, got {len(numbers)}")
    return numbers


def _dtype(value: Any) -> DType:
    dtype = DTYPES.get(_text(value))
    if dtype is None:
        raise ValueError(f"expected a dtype, got {value!r:.40}")
    return dtype
