"""Flex metadata whose halves contradict each other, over every metadata file of the fixtures: a block that only one
half lists, a hole, an overlap, a block outside. Each is told with the key, all faults at once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.commands.inspect import inspect
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.pickle_values import PickledRecord
from ckpt_tool.storage.pickles.pickle_writer import dumps

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "paddle-flex"
CASES = [
    pytest.param(case, str(file.relative_to(case)), id=f"{case.name}-{file.parent.name}")
    for case in sorted(FIXTURES.glob("*"))
    if case.is_dir()
    for file in sorted(case.rglob("*.metadata"))[-1:] + sorted(case.rglob("*.metadata"))[:-1]
    if not (case.name == "twice" and file.name == "0.metadata")  # an older save, which is not read
]

Rows = dict[str, list[PickledRecord]]
Stored = dict[PickledRecord, str]


def _moved(row: PickledRecord, by: int = 1) -> PickledRecord:
    """The row further along the first axis."""
    assert row.state is not None
    offset = row.state["global_offset"]
    return PickledRecord(row.name, row.args, {**row.state, "global_offset": (offset[0] + by, *offset[1:])})


def _blocks(rows: Rows) -> list[str]:
    """Keys of tensors with a place to be moved to, those in several blocks first."""
    fits = [key for key, found in rows.items() if found[0].get("local_shape", tuple)[:1] > (1,)]
    return sorted(fits, key=lambda key: -len(rows[key]))


def _of(stored: Stored, key: str) -> list[PickledRecord]:
    return [index for index in stored if index.get("tensor_key") == key]


def stated_elsewhere(rows: Rows, stored: Stored, key: str) -> None:
    rows[key][0] = _moved(rows[key][0])


def stored_elsewhere(rows: Rows, stored: Stored, key: str) -> None:
    index = _of(stored, key)[0]
    stored[_moved(index)] = stored.pop(index)


def overlap(rows: Rows, stored: Stored, key: str) -> None:
    rows[key].append(_moved(rows[key][0]))


def outside(rows: Rows, stored: Stored, key: str) -> None:
    rows[key].append(_moved(rows[key][0], 1 << 20))


def not_stated(rows: Rows, stored: Stored, key: str) -> None:
    """The first block; a key in one block gets another in its place."""
    gone = rows[key].pop(0)
    rows[key] = rows[key] or [_moved(gone, 1 << 20)]


def hole(rows: Rows, stored: Stored, key: str) -> None:
    """A block that is stated and lies nowhere."""
    first = _of(stored, key)[0]
    for index in _of(stored, key):
        if index.get("global_offset") == first.get("global_offset"):  # with its replicas
            file = stored.pop(index)
    if not _of(stored, key):
        stored[_moved(first, 1 << 20)] = file


FAULTS: dict[str, Callable[[Rows, Stored, str], None]] = {
    "stated elsewhere": stated_elsewhere,
    "stored elsewhere": stored_elsewhere,
    "overlap": overlap,
    "outside": outside,
    "not stated": not_stated,
    "hole": hole,
}


def changed(source: Path, name: str, change: Callable[[Rows, Stored], None]) -> None:
    path = source / name
    value: Any = pickles.load(path.read_bytes(), path=name).value
    change(value.state["state_dict_metadata"], value.state["storage_metadata"])
    path.write_bytes(dumps(value, protocol=4))


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize(("case", "name"), CASES)
def test_both_halves_list_the_same_blocks(case: Path, name: str, what: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(case, source)
    keys: list[str] = []

    def change(rows: Rows, stored: Stored) -> None:
        keys.extend(_blocks(rows)[:2])
        for key in keys:
            FAULTS[what](rows, stored, key)

    changed(source, name, change)
    if not keys:
        pytest.skip("it lists numbers alone")
    with pytest.raises(CkptError) as caught:
        inspect(str(source), Reading())
    fault = caught.value
    assert fault.code == "E1332" and fault.exit_code == 3 and name in (fault.path or "")
    lines = [fault.message, *fault.faults]
    assert all(any(line.startswith(f"{key}: ") for line in lines) for key in keys), "all faults are told at once"


@pytest.mark.parametrize(("case", "name"), CASES)
def test_metadata_written_back_is_read(case: Path, name: str, tmp_path: Path) -> None:
    """What the other test changes is what it finds."""
    source = tmp_path / "source"
    shutil.copytree(case, source)
    changed(source, name, lambda rows, stored: None)
    assert inspect(str(source), Reading())["total"]["tensors"]
