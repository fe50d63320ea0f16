"""The files of one index of a unified checkpoint, held against it.

The one idea: the index is the authority on what belongs together, so every header that it names is read, and what is
missing, foreign or there twice is told at once. Two things are no fault: the scales of a quantised optimizer, which no index
names, and the first moments of stage O2, which it names though they are packed into the second.

    index: w/moment1_0 -> optimizer-00001-of-00002, header there has it   ->   rows["w/moment1_0"] == (header, 3)

Source: PaddleFormers 1.2.0 `trainer/unified_checkpoint/unified_checkpoint.py` (`unified_optimizer_into_shards` makes the
index before `quant_unified_optimizer` changes the keys). Cost: two preads a file, 1 us a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.faults import for_each
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint
from ckpt_tool.formats.paddle import quant
from ckpt_tool.formats.paddle_unified.index import PaddleIndex
from ckpt_tool.storage.safetensors_file import Header, read_header
from ckpt_tool.storage.source import Tree

MISSING_FILES, NOT_IN_FILE, NOT_IN_INDEX, TWICE = "E0380", "E0381", "E0382", "E0383"


class Part(NamedTuple):
    """What one index names. rows: tensor -> (header, row), in the index's order, scales of a quantised optimizer last.
    again: the same tensors in other files: slices of sharding v2, else a fault."""

    listed: PaddleIndex
    headers: list[Header]
    rows: dict[str, tuple[Header, int]]
    again: dict[str, list[tuple[Header, int]]]
    notes: list[Note]


def read_part(tree: Tree, index: PaddleIndex, *, lenient: bool) -> Part:
    """The headers of every file that `index` names, held against it.

    Raises Incomplete (E0380 files, E0381 tensors), InconsistentCheckpoint (E0383 a tensor in two files, E0382 one that the
    index does not name).
    """
    named = index.files()
    _refuse_missing(tree, index, named)
    headers = for_each(named, lambda file: read_header(tree, file, lenient=lenient))
    rows: dict[str, tuple[Header, int]] = {}
    more: dict[str, tuple[Header, int]] = {}
    again: dict[str, list[tuple[Header, int]]] = {}
    strangers: dict[str, list[str]] = {}
    absent, notes = list[tuple[str, str]](), list[Note]()
    for header in headers:
        where = {name: row for row, name in enumerate(header.names)}
        for name in named[header.path]:
            if name in where:
                rows[name] = (header, where.pop(name))
            else:
                absent.append((name, header.path))
        scales = {name: row for name, row in where.items() if name.endswith(quant.SUFFIXES)}
        more |= {name: (header, row) for name, row in scales.items()}
        for name, row in where.items():
            if name in (index.weight_map or {}):
                again.setdefault(name, []).append((header, row))
        strangers[header.path] = [name for name in where if name not in scales and name not in again]
    _refuse_absent(tree, index, absent, rows, more)
    for file, unknown in strangers.items():
        notes += _strangers(tree, file, unknown, lenient=lenient)
    order = index.weight_map or {}
    rows = {name: rows[name] for name in order if name in rows} | more
    notes += _total(index, rows, again)
    notes += [Note("W-header", warning, header.path) for header in headers for warning in header.warnings]
    return Part(index, headers, rows, again, notes)


def _refuse_missing(tree: Tree, index: PaddleIndex, named: Mapping[str, Sequence[str]]) -> None:
    listing = tree.listing()
    missing = [file for file in named if file not in listing]
    if missing:
        lost = sum(len(named[file]) for file in missing)
        raise Incomplete(
            f"{len(missing)} of {len(named)} files are missing: {', '.join(missing[:20])}; they hold {lost} of"
            f" {len(index.weight_map or ())} tensors",
            code=MISSING_FILES, path=tree.display(index.path), faults=(f"missing: {file}" for file in missing[1:100]),
            hint="fetch the missing files into this folder; of a job on several machines, from all of them",
        )  # fmt: skip


def _strangers(tree: Tree, path: str, names: Sequence[str], *, lenient: bool) -> list[Note]:
    """Tensors of a file that its index does not know: an error, or a note with --lenient."""
    if not names:
        return []
    message = f"{len(names)} tensors lie in the index's files, but not in the index; the first: {names[0][:200]}"
    if lenient:
        return [Note("W-extra-tensors", f"{message}; not read", path, names[0])]
    raise InconsistentCheckpoint(
        message, code=NOT_IN_INDEX, path=tree.display(path), key=names[0][:200],
        hint="index and files come from two saves: fetch both again", faults=[each[:200] for each in names[1:50]],
    )  # fmt: skip


def refuse_twice(tree: Tree, part: Part) -> None:
    """Raise InconsistentCheckpoint E0383 for a tensor that lies in two files."""
    for name, found in part.again.items():
        other = found[0][0].path
        raise InconsistentCheckpoint(
            f"tensor {name[:200]} lies in {part.rows[name][0].path} and in {other}", code=TWICE, path=tree.display(other),
            key=name[:200], hint="index and files come from two saves: fetch both again",
            faults=[each[:200] for each in list(part.again)[1:50]],
        )  # fmt: skip


def _refuse_absent(
    tree: Tree,
    index: PaddleIndex,
    absent: list[tuple[str, str]],
    rows: Mapping[str, object],
    more: Mapping[str, object],
) -> None:
    """Tensors that the index names and no file holds, but for the first moments that O2 packs into the second."""
    lost = [
        (name, path)
        for name, path in absent
        if not (
            index.stage == "O2"
            and name.endswith("/moment1_0")
            and (name + quant.SYMMETRIC in more or name + quant.SYMMETRIC in rows)
            and name.removesuffix("1_0") + "2_0" in rows
        )
    ]
    if lost:
        name, path = lost[0]
        raise Incomplete(
            f"{len(lost)} of {len(index.weight_map or ())} tensors of the index are not in their files; the first:"
            f" {name[:200]} not in {path}",
            code=NOT_IN_FILE, path=tree.display(path), key=name[:200],
            faults=(f"{name[:200]} not in {path}" for name, path in lost[1:100]),
            hint="index and files come from two saves: fetch both again",
        )  # fmt: skip


def _total(
    index: PaddleIndex, rows: Mapping[str, tuple[Header, int]], again: Mapping[str, Sequence[tuple[Header, int]]]
) -> list[Note]:
    """A note where the index states another size than its tensors have. A quantised optimizer's is of before."""
    if index.total_size is None or index.stage:
        return []
    actual = sum(header.kinds[row].nbytes for header, row in rows.values())
    actual += sum(header.kinds[row].nbytes for found in again.values() for header, row in found)
    bools = sum(prod(h.kinds[r].shape) for h, r in rows.values() if h.kinds[r].dtype.name == "BOOL")
    if index.total_size in (actual, actual - bools + bools // 8):
        return []
    message = f"the index states total_size {index.total_size}, the tensors have {actual} bytes"
    return [Note("W-total-size", message, index.path)]
