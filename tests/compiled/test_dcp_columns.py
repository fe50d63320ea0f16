"""A DCP save, Megatron's too, whose boxes stay columns gives the catalog, notes and errors of the road by objects.

Needs torch, which makes the saves, and the compiled loops (`tests/loops.py`)."""

from __future__ import annotations

import io
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loops import choice_of

from ckpt_tool.compiled import VARIABLE, rows, twins
from ckpt_tool.compiled.loading import Opened
from ckpt_tool.core import tensor as core
from ckpt_tool.core.catalog import Catalog, faults_of
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import ChunkColumns, plainly_tile
from ckpt_tool.errors import CkptError
from ckpt_tool.formats import copies
from ckpt_tool.formats.copies import look_for_copies
from ckpt_tool.formats.dcp_container.dcp_columns import Arrays, DcpColumns, Pieces, PieceTable
from ckpt_tool.formats.registry import by_name
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.source import Tree

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

FIXTURES = Path(__file__).parents[2] / "fixtures"
RANKS = 6
Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape


@pytest.fixture(scope="module", autouse=True)
def shelves(loops: Opened) -> Iterator[None]:
    """The process has the readers of rows and of twins."""
    with pytest.MonkeyPatch.context() as patch:
        for module, shelf in ((rows, rows.RowsShelf()), (twins, twins.TwinsShelf())):
            shelf.decide(choice_of(loops, "baseline"))
            assert shelf.library is not None, "it would never be used"
            patch.setattr(module, "_shelf", shelf)
        yield


def cut(shape: tuple[int, ...], grid: tuple[int, ...]) -> list[Box]:
    """The boxes of a grid, the last ones short or empty."""
    boxes: list[Box] = [((), ())]
    for n, parts in zip(shape, grid, strict=True):
        size = ceil_div(n, parts)
        sides = [(min(i * size, n), min((i + 1) * size, n) - min(i * size, n)) for i in range(parts)]
        boxes = [((*offset, at), (*extent, n)) for offset, extent in boxes for at, n in sides]
    return boxes


# name -> (shape, its boxes, seed of the values, None for zeros)
State = dict[str, tuple[tuple[int, ...], list[Box], int | None]]
STATE: State = {
    "model.rows": ((12, 3), cut((12, 3), (RANKS, 1)), 1),
    "model.more": ((12, 3), cut((12, 3), (RANKS, 1)), 2),
    "model.grid": ((6, 4), cut((6, 4), (3, 2)), 3),
    "model.norm": ((24,), cut((24,), (RANKS,)), 4),
    "model.short": ((10, 2), cut((10, 2), (4, 1)), 5),  # 3 3 3 1
    "model.empty": ((4, 2), cut((4, 2), (RANKS, 1)), 6),  # two ranks have nothing
    "model.one": ((), [((), ())], 7),
    "optim.state.rows.exp_avg": ((12, 3), cut((12, 3), (RANKS, 1)), None),
    "optim.state.more.exp_avg": ((12, 3), cut((12, 3), (RANKS, 1)), None),
}


_FC1, _FC2 = ((12, 3), cut((12, 3), (RANKS, 1))), ((6, 4), cut((6, 4), (3, 2)))
_FSDP = "optimizer.state.module.module.module.decoder.layers.0.mlp."
_ONE = ((), [((), ())])
FSDP: State = {
    "model.module.decoder.layers.0.mlp.linear_fc1.weight_w": (*_FC1, 1),
    "model.module.decoder.layers.0.mlp.linear_fc2.weight": (*_FC2, 2),
    "model.module.decoder.layers.0.mlp.linear_fc1.weight_v": (*_FC1, 3),
    f"{_FSDP}linear_fc1.weight_w.exp_avg": (*_FC1, None),
    f"{_FSDP}linear_fc1.weight_v.exp_avg": (*_FC1, 4),
    f"{_FSDP}linear_fc2.weight.exp_avg": (*_FC2, None),
    **{f"{_FSDP}linear_{name}.step": (*_ONE, 5) for name in ("fc1.weight_w", "fc1.weight_v", "fc2.weight")},
}
_STACKED = ((2, 12, 3), cut((2, 12, 3), (2, 3, 1)))
_SINGLE = "decoder.layers.mlp.experts.experts"
TORCH_DIST: State = {
    "decoder.layers.mlp.linear_fc2.weight": (*_STACKED, 1),
    "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": (*_STACKED, None),
    "decoder.layers.self_attention.linear_proj.weight": ((4, 6, 3), cut((4, 6, 3), (2, 3, 1)), 2),  # two layers a box
    "decoder.layers.input_layernorm.weight": ((2, 6), cut((2, 6), (2, 3)), 3),
    "decoder.final_layernorm.weight": ((24,), cut((24,), (RANKS,)), 4),
    f"{_SINGLE}.linear_fc1.weight": ((2, 3, 4, 5), cut((2, 3, 4, 5), (2, 3, 1, 1)), 5),  # layers, experts
    **{f"decoder.layers.1.mlp.experts.experts.7.linear_fc1.weight_{half}": (*_FC1, 6) for half in "wv"},
}
OTHERS = {"megatron-fsdp": FSDP, "megatron-dist": TORCH_DIST}


def save(
    folder: Path,
    change: Callable[[Any, dict[str, Any]], None] = lambda metadata, tensors: None,
    state: State = STATE,
) -> Path:
    """The state as torch lays it out, rank by rank, and its `.metadata` after `change`."""
    folder.mkdir()
    stored: dict[Any, Any] = {}
    for rank in range(RANKS):
        with open(folder / f"__{rank}_0.distcp", "wb") as file:
            for name, (_, boxes, seed) in state.items():
                if rank < len(boxes) and prod(boxes[rank][1]):
                    offset, shape = boxes[rank]
                    made = io.BytesIO()
                    generator = torch.Generator().manual_seed(1000 * (seed or 0) + rank)
                    torch.save(torch.randn(shape, generator=generator) if seed else torch.zeros(shape), made)
                    index = MetadataIndex(name, torch.Size(offset), rank)
                    stored[index] = _StorageInfo(f"__{rank}_0.distcp", file.tell(), len(made.getvalue()))
                    file.write(made.getvalue())
    tensors = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=torch.float32),
            torch.Size(shape),
            [ChunkStorageMetadata(torch.Size(offset), torch.Size(extent)) for offset, extent in boxes],
        )
        for name, (shape, boxes, _) in state.items()
    }
    metadata = Metadata(tensors, {name: tuple(name.split(".")) for name in state}, stored)
    change(metadata, tensors)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    if state is TORCH_DIST:
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        torch.save({"iteration": 1}, folder / "common.pt")
    return folder


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What a folder gives, the same by both roads: (the catalog by columns, its notes), or an error's facts."""

    def read(folder: Path, road: str, lenient: bool, name: str) -> Any:
        monkeypatch.setenv(VARIABLE, road)
        tree = Tree(folder)
        try:
            catalog = by_name(name).read(tree)
            return catalog, look_for_copies(tree, catalog, lenient=lenient)
        except CkptError as e:
            return e.code, e.exit_code, e.message, e.path, e.offset, e.key, e.place, e.faults, e.hint

    def run(folder: Path, *, lenient: bool = False, name: str = "dcp") -> Any:
        columns = read(folder, "baseline", lenient, name)
        objects = read(folder, "off", lenient, name)
        if isinstance(objects[0], Catalog):
            assert [*columns[0].tensors] == [*objects[0].tensors]
            assert not any(isinstance(t.chunks, ChunkColumns) for t in objects[0].tensors.values())
        assert columns == objects
        return columns

    return run


def test_a_save(both: Any, tmp_path: Path) -> None:
    catalog, notes = both(save(tmp_path / "save"))
    assert catalog.mesh.to_json() == {"tp": 2, "dp": 3} and not notes
    assert all(isinstance(tensor.chunks, ChunkColumns) for tensor in catalog.tensors.values())


@pytest.mark.parametrize("name", OTHERS)
def test_a_save_of_megatrons(both: Any, tmp_path: Path, name: str) -> None:
    """Layers and experts that share a tensor, halves of one, boxes of two layers, which are taken by objects."""
    folder = save(tmp_path / "save", state=OTHERS[name])
    catalog, _ = both(folder, name=name)
    objects = {str(key) for key, tensor in catalog.tensors.items() if not isinstance(tensor.chunks, ChunkColumns)}
    assert (
        objects
        == {
            "megatron-fsdp": {"decoder.layers.0.mlp.linear_fc1.weight [step]"},
            "megatron-dist": {f"decoder.layers.{i}.self_attention.linear_proj.weight" for i in range(4)},
        }[name]
    )


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("change", "code"), [("box", "E0309"), ("offset", "E0437")])
def test_what_contradicts_itself_of_megatrons(both: Any, tmp_path: Path, name: str, change: str, code: str) -> None:
    first = next(iter(OTHERS[name]))

    def damaged(metadata: Any, tensors: Any) -> None:
        if change == "box":
            del tensors[first].chunks[3]
        else:
            index, other = [key for key in metadata.storage_data if key.fqn == first][2:4]
            metadata.storage_data[index].offset = metadata.storage_data[other].offset + 1

    folder = save(tmp_path / "save", damaged, OTHERS[name])
    assert both(folder, name=name)[0] == code


@pytest.mark.parametrize("name", ["dcp", *OTHERS])
def test_columns_answer_as_their_chunks(both: Any, tmp_path: Path, name: str) -> None:
    folder = save(tmp_path / "save", state=OTHERS.get(name, STATE))
    catalog, _ = both(folder, name=name)
    for tensor in catalog.tensors.values():
        chunks = tensor.chunks
        made = tuple(tensor.chunks)
        if not isinstance(chunks, ChunkColumns):
            continue
        assert len(chunks) == len(made) and chunks[-1] == made[-1] and chunks[1:3] == made[1:3]
        assert chunks == made and made == chunks and hash(chunks) == hash(made) and repr(chunks) == repr(made)
        assert chunks != made[1:]
        assert core.starts_of(chunks, len(tensor.shape)) == core.starts_of(made, len(tensor.shape))
        assert plainly_tile(chunks, tensor.shape) == (len(tensor.shape) > 0)  # `one` is looked at
        assert not core.lacks_crc(chunks)
        rows = chunks.records()
        crcs = [chunk.array.crc or (0, -1, 0) for chunk in made]
        assert [*zip(rows.nbytes.tolist(), rows.crcs.tolist(), strict=True)] == [crc[1:] for crc in crcs]


@pytest.mark.parametrize("seed", range(12))
def test_what_plainly_tiles_has_no_fault(seed: int) -> None:
    """Boxes of a grid, and what is left of them after one was moved, cut or left out."""
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 5) * 2 for _ in range(rng.randrange(1, 4)))
    boxes = [box for box in cut(shape, tuple(rng.randrange(1, 4) for _ in shape)) if prod(box[1])]
    judged = set()
    for change in range(60):
        some = [(list(offset), list(extent)) for offset, extent in boxes]
        at = rng.randrange(len(some))
        d = rng.randrange(len(shape))
        if change % 3 == 1 and len(some) > 1:
            del some[at]
        elif change % 3 == 2:
            some[at][rng.randrange(2)][d] += rng.choice((1, -1))
        if any(o < 0 or e < 0 or o + e > n for off, ext in some for o, e, n in zip(off, ext, shape, strict=True)):
            continue  # refused before
        if len({tuple(offset) for offset, _ in some}) < len(some):
            continue  # read by objects
        offsets, extents = (np.array([box[i] for box in some], np.int64) for i in (0, 1))
        table = PieceTable(*(np.zeros(len(some), np.int64) for _ in range(3)), np.full(len(some), -1))
        array = core.StoredArray("f", 0, DTYPES["F32"], ())
        pieces = Pieces(offsets, extents, np.zeros((len(some), 3), np.int64), {0: "f"})
        chunks = DcpColumns(pieces, Arrays(table, ["f"], [], dict.fromkeys(range(len(some)), array)))
        tensor = core.LogicalTensor(core.TensorKey("w"), shape, DTYPES["F32"], tuple(chunks))
        judged.add(plain := plainly_tile(chunks, shape))
        assert not plain or not [*faults_of([tensor])]
        assert plain or change % 3, "what was not changed is a grid"
    assert True in judged and (False in judged or len(boxes) == 1)


def test_copies_are_seen_alike(both: Any, tmp_path: Path) -> None:
    """Zeros are met again and are no fault; a file over another's is one."""
    catalog, _ = both(save(tmp_path / "save"))
    tensors = [*catalog.tensors.values()]
    whole = [tensor._replace(chunks=tuple(tensor.chunks)) for tensor in tensors]
    columns = copies._copied(tensors)
    objects = copies._copied(whole)
    assert type(columns) is not type(objects) and columns.again and not columns.plain
    assert [*columns.again] == [*objects.again] and columns.plain == objects.plain
    (mine, samples), (theirs, other_samples) = (each.stands(copies._hash) for each in (columns, objects))
    assert samples == other_samples and [*mine] == [*theirs]
    for record, files in mine.items():
        assert [*files] == [*theirs[record]]
        assert len({*zip(files.values(), theirs[record].values(), strict=True)}) == len({*files.values()})
    shutil.copy(tmp_path / "save" / "__1_0.distcp", tmp_path / "save" / "__2_0.distcp")
    assert both(tmp_path / "save")[0] == "E1630"
    assert both(tmp_path / "save", lenient=True)[1]


def shuffled(metadata: Any, tensors: Any) -> None:
    """Items in another order than boxes, as an older torch gathers them."""
    rng = random.Random(1)
    items = [*metadata.storage_data.items()]
    rng.shuffle(items)
    metadata.storage_data = dict(items)
    rng.shuffle(tensors["model.rows"].chunks)


def listed_twice(metadata: Any, tensors: Any) -> None:
    tensors["model.rows"].chunks.append(tensors["model.rows"].chunks[2])


def without_item(metadata: Any, tensors: Any) -> None:
    del metadata.storage_data[MetadataIndex("model.more", torch.Size((4, 0)))]


def without_box(metadata: Any, tensors: Any) -> None:
    del tensors["model.grid"].chunks[3]


def moved(metadata: Any, tensors: Any) -> None:
    tensors["model.rows"].chunks[3].offsets = torch.Size((5, 0))
    index = MetadataIndex("model.rows", torch.Size((6, 0)))
    metadata.storage_data[MetadataIndex("model.rows", torch.Size((5, 0)))] = metadata.storage_data.pop(index)


def outside(metadata: Any, tensors: Any) -> None:
    tensors["model.norm"].chunks[5].offsets = torch.Size((21,))


def of_other_dims(metadata: Any, tensors: Any) -> None:
    tensors["model.norm"].chunks[4] = ChunkStorageMetadata(torch.Size((16, 0)), torch.Size((4, 1)))


def of_another_shape(metadata: Any, tensors: Any) -> None:
    for chunk in tensors["model.rows"].chunks:
        chunk.sizes = torch.Size((1, 3))


def swapped(metadata: Any, tensors: Any) -> None:
    """Items of two kinds change places: each is then no twin of its kind, and not what the metadata says."""
    a = MetadataIndex("model.rows", torch.Size((4, 0)))
    b = MetadataIndex("model.norm", torch.Size((8,)))
    items = metadata.storage_data
    items[a], items[b] = items[b], items[a]


def beyond(metadata: Any, tensors: Any) -> None:
    info = metadata.storage_data[MetadataIndex("model.more", torch.Size((10, 0)))]
    info.offset = 1 << 40


def beyond_any_number(metadata: Any, tensors: Any) -> None:
    metadata.storage_data[MetadataIndex("model.more", torch.Size((10, 0)))].offset = 1 << 70


def under_a_number(metadata: Any, tensors: Any) -> None:
    metadata.state_dict_metadata[7] = tensors["model.rows"]


def out_of_the_folder(metadata: Any, tensors: Any) -> None:
    metadata.storage_data[MetadataIndex("model.more", torch.Size((10, 0)))].relative_path = "../__5_0.distcp"


READ = (shuffled, listed_twice)
REFUSED = (
    *((without_item, "E0309"), (without_box, "E0309"), (moved, "E0308"), (outside, "E0389")),
    *((of_other_dims, "E0389"), (of_another_shape, "E0394"), (swapped, "E0394")),
    *((beyond, "E0340"), (beyond_any_number, "E0340"), (under_a_number, "E0309"), (out_of_the_folder, "E0410")),
)


@pytest.mark.parametrize("change", READ)
def test_other_forms(both: Any, tmp_path: Path, change: Any) -> None:
    assert isinstance(both(save(tmp_path / "save", change))[0], Catalog)


@pytest.mark.parametrize(("change", "code"), REFUSED)
def test_what_contradicts_itself(both: Any, tmp_path: Path, change: Any, code: str) -> None:
    assert both(save(tmp_path / "save", change))[0] == code


@pytest.mark.parametrize("seed", range(6))
def test_damaged_files(both: Any, tmp_path: Path, seed: int) -> None:
    """Bytes changed anywhere in the files, and a file that is cut short."""
    rng = random.Random(seed)
    folder = save(tmp_path / "save")
    for round_ in range(6):
        file = folder / f"__{rng.randrange(RANKS)}_0.distcp"
        raw = file.read_bytes()
        bad = bytearray(raw)
        for _ in range(3):
            bad[rng.randrange(len(bad))] ^= 1 + rng.randrange(255)
        file.write_bytes(bad[: len(raw) // 2] if round_ == 5 else bad)
        both(folder)
        file.write_bytes(raw)


SAVES = sorted(path.name for path in (FIXTURES / "dcp").iterdir() if (path / ".metadata").is_file())


@pytest.mark.parametrize("case", SAVES)
def test_saves_of_trainers_keep_their_columns(both: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """With the rows of their objects (settings of parameter groups), and `.metadata` is read once."""
    read = pickles.load_file
    met = []

    def counted(tree: Tree, path: str, **how: Any) -> Any:
        met.append((path, how.get("rows") is not None))
        return read(tree, path, **how)

    monkeypatch.setattr(pickles, "load_file", counted)
    both(FIXTURES / "dcp" / case)
    metadata = [row for row in met if row[0] == ".metadata"]
    assert metadata == [(".metadata", True), (".metadata", False)]  # by columns, by objects
