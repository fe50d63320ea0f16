"""A `.metadata` whose rows are taken as columns gives the listing that its objects give, or the same error.

Needs the compiled loops (`tests/loops.py`)."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loops import choice_of

from ckpt_tool.compiled import VARIABLE, rows
from ckpt_tool.compiled.loading import Opened
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.dcp_container import dcp_metadata
from ckpt_tool.formats.dcp_container.dcp_metadata import DcpTensorEntry, ObjectEntry, pickled, read_listing
from ckpt_tool.formats.dcp_container.dcp_pieces import DcpPiece
from ckpt_tool.storage.pickles import pickle_rows
from ckpt_tool.storage.source import Tree

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
SAVES = sorted(path.parent for path in FIXTURES.rglob("*.metadata") if path.is_file())


@pytest.fixture(scope="module", autouse=True)
def shelf(loops: Opened) -> Iterator[None]:
    """The process has the library."""
    with pytest.MonkeyPatch.context() as patch:
        shelf = rows.RowsShelf()
        shelf.decide(choice_of(loops, "baseline"))
        assert shelf.library is not None, "it would never be used"
        patch.setattr(rows, "_shelf", shelf)
        yield


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], tuple[Any, int]]:
    """What a folder's metadata gives, the same by both roads, and how many rows were taken as columns."""
    made: list[pickle_rows.Rows] = []
    ready = pickle_rows.rows_of

    def kept(nbytes: int, kinds: Any) -> pickle_rows.Rows | None:
        found = ready(nbytes, kinds)
        made.extend([] if found is None else [found])
        return found

    monkeypatch.setattr(dcp_metadata, "rows_of", kept)

    def read(folder: Path, road: str) -> Any:
        monkeypatch.setenv(VARIABLE, road)
        names = sorted(path.name for path in folder.glob("*.metadata"))
        try:
            return read_listing(Tree(folder), "", names)
        except CkptError as e:
            return e.code, e.exit_code, e.message, e.offset, e.key, e.place, e.faults

    def run(folder: Path) -> tuple[Any, int]:
        made.clear()
        columns = read(folder, "baseline")
        objects = read(folder, "off")
        assert columns == objects
        if isinstance(objects, dcp_metadata.DcpListing):
            assert [*columns.tensors] == [*objects.tensors] and [*columns.files] == [*objects.files]
        return objects, sum(each.taken for each in made)

    return run


def saved(folder: Path, raw: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(raw)
    return folder


def of_torch(ranks: int, layers: int = 1, change: Callable[[Any], None] = lambda metadata: None) -> bytes:
    """A `.metadata` of very many ranks, as torch pickles it."""
    pytest.importorskip("torch")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
    import dcp_shape

    items = []
    at = 0
    for name, shape in dcp_shape.parameters(layers):
        for road in (("model", name), ("optim", "state", name, "exp_avg")):
            items.append(dcp_shape.Item(".".join(road), road, (), shape, at, 1000 + shape[0]))
            at += 1000 + shape[0]
    metadata = dcp_shape._metadata(items, ranks)
    change(metadata)
    return pickle.dumps(metadata)


@pytest.mark.parametrize("folder", SAVES, ids=lambda path: str(path.relative_to(FIXTURES)))
def test_fixtures(both: Any, folder: Path) -> None:
    both(folder)


def test_a_save_of_many_ranks(both: Any, tmp_path: Path) -> None:
    listing, taken = both(saved(tmp_path / "save", of_torch(256, 2)))
    boxes = sum(len(entry.pieces) for entry in listing.tensors.values())
    assert boxes == 256 * 42 and taken > 1.98 * boxes  # a box is two rows


def older(metadata: Any) -> None:
    """The fields in the order of torch 2.3, and items that went through a stream."""
    for index, info in metadata.storage_data.items():
        state = dict(index.__dict__)
        index.__dict__.clear()
        index.__dict__.update(fqn=state["fqn"], offset=state["offset"], index=state["index"])
        info.__dict__["transform_descriptors"] = None


def shared(metadata: Any) -> None:
    """Offsets that box and item share, as a process alone has them."""
    boxes = {(fqn, box.offsets): box for fqn, entry in metadata.state_dict_metadata.items() for box in entry.chunks}
    for index in metadata.storage_data:
        index.__dict__["offset"] = boxes[index.fqn, index.offset].offsets


@pytest.mark.parametrize("change", [older, shared])
def test_other_forms(both: Any, tmp_path: Path, change: Any) -> None:
    listing, _ = both(saved(tmp_path / "save", of_torch(64, 1, change)))
    assert len(listing.tensors) == 24


@pytest.mark.parametrize("seed", range(8))
def test_what_we_write(both: Any, tmp_path: Path, seed: int) -> None:
    """Any number of dims, objects between, names of any letters, numbers beyond 32 and 64 bits."""
    rng = random.Random(seed)
    entries: list[DcpTensorEntry | ObjectEntry] = []
    for number in range(30):
        fqn = rng.choice(["w", "größe", "x" * 300, "a.b"]) + str(number)
        if number % 7 == 3:
            entries.append(ObjectEntry(fqn, (fqn,), "__0_0.distcp", rng.randrange(1 << 40), 7))
            continue
        dims = rng.randrange(11)
        rows_ = rng.randrange(1, 1 << rng.choice([4, 12, 20, 40]))
        ranks = rng.choice([1, 3, 40]) if dims else 1
        shape = (rows_ * ranks, *(rng.randrange(1, 300) for _ in range(dims - 1))) if dims else ()
        pieces = [
            DcpPiece(
                *((rows_ * rank, *(0,) * (dims - 1)) if dims else (), (rows_, *shape[1:]) if dims else ()),
                *(
                    f"__{rank}_0.distcp",
                    rng.randrange(1 << rng.choice([6, 15, 31, 33, 62, 70])),
                    rng.randrange(1 << 35),
                ),
            )
            for rank in range(ranks)
        ]
        entries.append(DcpTensorEntry(fqn, (fqn,), DTYPES["F32"], shape, pieces))
    _, taken = both(saved(tmp_path / "save", pickled(entries)))
    assert taken > 20


@pytest.mark.parametrize("seed", range(10))
def test_damage(both: Any, tmp_path: Path, seed: int) -> None:
    """A byte changed, left out or put in, an opcode that moves what lies on the stack most often."""
    rng = random.Random(seed)
    raw = (
        of_torch(6)
        if seed % 2
        else pickled(read_listing(Tree(saved(tmp_path / "of", of_torch(9))), "", [".metadata"]).tensors.values())
    )
    found = set()
    for _ in range(60):
        at = rng.randrange(len(raw))
        opcode = rng.choice([*b"0012\x94\x85(tuaesbh\x81R.N", rng.randrange(256)])
        if rng.random() < 0.5:  # behind a row
            at = raw.find(b"ub", at) + 2
        cut = rng.choice([0, 0, 1])
        result, _ = both(saved(tmp_path / "save", raw[:at] + rng.choice([b"", bytes([opcode])]) + raw[at + cut :]))
        found.add(result[0] if isinstance(result, tuple) else "read")
    assert len(found) > 2
