"""The checks that a catalog is whole: random tilings pass, every kind of damage is told, all at once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import pytest

from ckpt_tool.core import catalog as catalog_module
from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.catalog import Catalog, CatalogRow, faults_of, mark_replicas
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import Chunk, LogicalTensor, StoredArray, TensorKey, plainly_tile, simple_tensor
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint

F32 = DTYPES["F32"]


def chunk(box: Box, path: str = "f", replica: int = 0) -> Chunk:
    return Chunk(box, StoredArray(path, 0, F32, box.shape), whole(box.shape), replica)


def tensor(name: str, shape: tuple[int, ...], boxes: list[Box], state: str = "model") -> LogicalTensor:
    return LogicalTensor(
        TensorKey(name, state), shape, F32, tuple(chunk(box, f"file{i}") for i, box in enumerate(boxes))
    )


def catalog(*tensors: LogicalTensor) -> Catalog:
    return Catalog("test", {each.key: each for each in tensors})


def tiling(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    boxes = [whole(shape)]
    for _ in range(rng.randint(0, 6)):
        box = boxes.pop(rng.randrange(len(boxes)))
        dims = [d for d, n in enumerate(box.shape) if n > 1]
        if not dims:
            boxes.append(box)
            break
        dim = rng.choice(dims)
        at = rng.randint(1, box.shape[dim] - 1)
        first = tuple(at if d == dim else n for d, n in enumerate(box.shape))
        second = tuple(n - at if d == dim else n for d, n in enumerate(box.shape))
        boxes += [Box(box.offset, first), Box(tuple(o + at * (d == dim) for d, o in enumerate(box.offset)), second)]
    rng.shuffle(boxes)
    return boxes


@pytest.mark.parametrize("seed", range(60))
def test_tilings_pass_and_damaged_ones_do_not(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 3)))
    boxes = tiling(rng, shape)
    catalog(tensor("w", shape, boxes)).check()
    lost = boxes.pop(rng.randrange(len(boxes)))
    with pytest.raises(Incomplete) as gap:
        catalog(tensor("w", shape, boxes)).check()
    assert gap.value.code == "E0309"
    assert f"{lost.numel} of " in gap.value.message
    twice = [*boxes, lost, rng.choice([*boxes, lost])]
    with pytest.raises(InconsistentCheckpoint) as overlap:
        catalog(tensor("w", shape, twice)).check()
    assert overlap.value.code == "E0308"


@pytest.mark.parametrize(
    "box",
    [
        Box((0, 4), (2, 3)),
        Box((-1, 0), (2, 6)),
        Box((0,), (2,)),
        Box((0, 0), (2, 7)),
        Box((2, 0), (1, 1)),
        Box((0, 0), (-1, 2)),
    ],
)
def test_boxes_that_leave_the_tensor(box: Box) -> None:
    bad = LogicalTensor(
        TensorKey("w"), (2, 6), F32, (chunk(whole((2, 6))), Chunk(box, StoredArray("f", 0, F32, ()), box))
    )
    with pytest.raises(InconsistentCheckpoint) as error:
        catalog(bad).check()
    assert error.value.code == "E0307"
    assert error.value.path == "f"


def test_the_only_box_may_leave_the_tensor_too() -> None:
    with pytest.raises(InconsistentCheckpoint) as error:
        catalog(tensor("w", (2, 6), [Box((1, 0), (2, 6))])).check()
    assert error.value.code == "E0307"


def test_all_faults_at_once_with_file_and_tensor() -> None:
    good = tensor("good", (2, 2), [whole((2, 2))])
    short = tensor("short", (4, 2), [Box((0, 0), (1, 2))], state="exp_avg")
    clash = tensor("clash", (4,), [Box((0,), (3,)), Box((2,), (2,))])
    with pytest.raises(Incomplete) as error:
        catalog(good, short, clash).check()
    assert "2 tensors are not whole" in error.value.message
    assert error.value.key == "short [exp_avg]"
    assert error.value.path is None, "nothing tells whose part it is: file0 is sound"
    (second,) = error.value.faults
    assert second.startswith("clash: boxes at [0] (file0) and [2] (file1) overlap")
    kinds: list[CkptError] = list(faults_of([good, short, clash]))
    assert [type(kind) for kind in kinds] == [Incomplete, InconsistentCheckpoint]


def test_a_gap_is_laid_to_the_file_that_holds_that_part_of_others() -> None:
    """Two ranks; `b` of rank 1 has gone, whose shape no other tensor has: its part of the others tells."""
    halves = {"a": (8, 4), "b": (6, 2), "c": (4, 4), "f": (2, 6)}
    cut = {name: [Box((0, 0), (n // 2, m)), Box((n // 2, 0), (n // 2, m))] for name, (n, m) in halves.items()}
    tensors = [tensor(name, shape, cut[name]) for name, shape in halves.items()]
    columns = tensor("d", (6, 4), [Box((0, 0), (6, 2)), Box((0, 2), (6, 2))])
    lone = LogicalTensor(TensorKey("e"), (6, 2), F32, (chunk(whole((6, 2)), "elsewhere"),))
    broken = LogicalTensor(TensorKey("b"), (6, 2), F32, tensors[1].chunks[:1])
    with pytest.raises(Incomplete) as error:
        catalog(lone, columns, tensors[0], broken, *tensors[2:]).check()
    assert error.value.path == "file1" and error.value.key == "b"
    assert "6 of 12 elements" in error.value.message and "[3, 0] of shape [3, 2]" in error.value.message
    assert "that part is in file1" in error.value.message


def test_an_index_that_leaves_elements_out_is_named() -> None:
    short = LogicalTensor(TensorKey("b"), (4,), F32, (chunk(Box((0,), (2,)), "optimizer/0"),))
    for tensors in ((short,), (short, tensor("c", (4,), [Box((0,), (2,)), Box((2,), (2,))]))):
        found = Catalog("dcp", {each.key: each for each in tensors}, indexes=("model/.metadata", "optimizer/.metadata"))
        with pytest.raises(Incomplete) as error:
            found.check()
        assert (
            error.value.path == "optimizer/.metadata" and "which optimizer/.metadata leaves out" in error.value.message
        )


def test_empty_and_scalar_tensors() -> None:
    catalog(
        tensor("empty", (0, 3), []),
        tensor("empty2", (0, 3), [whole((0, 3))]),
        tensor("scalar", (), [whole(())]),
        tensor("empty shards", (4,), [Box((0,), (4,)), Box((4,), (0,)), Box((4,), (0,))]),
    ).check()
    with pytest.raises(Incomplete):
        catalog(tensor("no chunk", (), [])).check()


def test_replicas_are_numbered_and_count_once() -> None:
    box = Box((0,), (2,))
    other = Box((2,), (2,))
    marked = mark_replicas([chunk(box, "a"), chunk(other, "a"), chunk(box, "b"), chunk(box, "c"), chunk(other, "b")])
    assert [(each.array.path, each.replica) for each in marked] == [("a", 0), ("a", 0), ("b", 1), ("c", 2), ("b", 1)]
    assert mark_replicas(marked) == marked
    catalog(LogicalTensor(TensorKey("w"), (4,), F32, marked)).check()


def test_rows_and_states_in_source_order() -> None:
    array = StoredArray("f", 0, DTYPES["BF16"], (2, 3))
    both = [simple_tensor(TensorKey("w", state), array) for state in ("exp_avg", "model", "exp_avg")]
    cat = Catalog("test", {each.key: each for each in both})
    assert list(cat.rows()) == [
        CatalogRow("w", "exp_avg", DTYPES["BF16"], (2, 3), 12),
        CatalogRow("w", "model", DTYPES["BF16"], (2, 3), 12),
    ]
    assert cat.states() == ("exp_avg", "model")


class Lazy(Mapping[TensorKey, LogicalTensor]):
    """A table that makes no tensor to list its rows."""

    def __getitem__(self, key: TensorKey) -> LogicalTensor:
        raise AssertionError("a row needs no tensor")

    def __iter__(self) -> Iterator[TensorKey]:
        raise AssertionError("a row needs no tensor")

    def __len__(self) -> int:
        return 1

    def rows(self) -> Iterator[CatalogRow]:
        yield CatalogRow("w", "model", F32, (1,), 4)


def test_a_lazy_table_lists_rows_without_making_tensors() -> None:
    cat = Catalog("test", Lazy())
    assert [row.name for row in cat.rows()] == ["w"]
    assert cat.states() == ("model",)


def test_a_grid_of_thousands_of_ranks_is_checked_quickly() -> None:
    boxes = [Box((4 * i, 8 * j), (4, 8)) for i in range(64) for j in range(64)]
    random.Random(1).shuffle(boxes)
    catalog(tensor("w", (256, 512), boxes)).check()


@pytest.mark.parametrize("seed", range(40))
def test_bands_are_judged_as_all_other_boxes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands along dim 0 that tile a tensor, and what is left of them after a box was moved, cut, left out or copied."""
    rng = random.Random(seed)
    dims = rng.randrange(1, 4)
    width = tuple(rng.randrange(3) for _ in range(dims - 1))
    heights = [rng.randrange(1, 4) for _ in range(5)]
    boxes = [Box((sum(heights[:i]), *(0,) * (dims - 1)), (n, *width)) for i, n in enumerate(heights)]
    shape = (sum(heights), *width)
    assert plainly_tile(tensor("w", shape, boxes).chunks, shape)
    for _ in range(40):
        some = list(boxes)
        at = rng.randrange(5)
        d = rng.randrange(dims)
        offset = list(some[at].offset)
        extent = list(some[at].shape)
        offset[d], extent[d] = offset[d] + rng.choice([0, 0, 1, -1]), extent[d] + rng.choice([0, 0, 1, -1])
        some[at] = Box(tuple(offset), tuple(extent))
        change = rng.randrange(5)
        some = {0: some[:at] + some[at + 1 :], 1: [*some, some[at]], 2: some[::-1], 3: some[:at]}.get(change, some)
        chunks = mark_replicas(chunk(box, f"{i}.pt") for i, box in enumerate(some))
        judged = LogicalTensor(TensorKey("w"), shape, F32, chunks)
        found = [(fault.code, fault.message) for fault in faults_of([judged])]
        with monkeypatch.context() as patch:
            patch.setattr(catalog_module, "plainly_tile", lambda chunks, shape: False)
            assert found == [(fault.code, fault.message) for fault in faults_of([judged])]
