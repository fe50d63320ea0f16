"""Moves made later are the moves that would have been listed, and their sums are those of the list."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.layout import Layout, Placement, held
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.target import Target, Wanted, WantedTensor
from ckpt_tool.core.tensor import Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import InputError
from ckpt_tool.plan.copy import box_region, intersect, is_transposed
from ckpt_tool.plan.moves import LaterMoves, Stored, count_copies
from ckpt_tool.plan.placing import Wishes, lay_out
from ckpt_tool.plan.plan import Move, Plan
from ckpt_tool.plan.schedule import build_moves
from ckpt_tool.systems.ckpt.sharded import target as sharded_target
from ckpt_tool.systems.torch.dcp.target import dcp_target

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=0, max_size=3).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Stored], Wanted, Layout]:
    """Tensors cut over some source ranks (with replicas), wanted on others."""
    stored = []
    wanted = []
    source = Mesh.of(tp=draw(st.sampled_from([1, 2])), dp=draw(st.sampled_from([1, 2])))
    for state in ("model", "exp_avg"):
        for number, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=4))):
            key = TensorKey(f"layers.{number}.q_proj.weight", state)
            dtype = DTYPES["BF16"]
            cut = ((0, ("tp",)),) if shape and shape[0] % 2 == 0 else ()
            chunks = []
            for rank, each in enumerate(held(shape, Placement(cut), source)):
                array = StoredArray(f"{state}.{rank}", 100 * number, dtype, each.box.shape, crc=(0, 99, rank))
                chunks.append(Chunk(each.box, array, each.box._replace(offset=(0,) * len(shape)), each.replica))
            stored.append(Stored(0, LogicalTensor(key, shape, dtype, tuple(chunks))))
            wanted.append(WantedTensor(key, shape, DTYPES["F32"] if state == "model" else dtype))
    mesh = Mesh.of(tp=draw(st.sampled_from([1, 2, 4])), dp=draw(st.sampled_from([1, 3])))
    layout, _ = lay_out(wanted, Wishes(mesh, draw(st.integers(0, 3)), draw(st.sampled_from(["largest-dim", "pad"]))))
    return stored, Wanted(tuple(wanted)), layout


def plan_of(stored: list[Stored], wanted: Wanted, layout: Layout, *, large: bool) -> tuple[Plan, Target]:
    numbers: dict[tuple[int, str], int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_target, "MANY", -1 if large else 1 << 60)
        target = sharded_target.sharded_target(wanted, layout)
    assert target.places is not None and target.places.listable != large
    target = target if large else target._replace(places=None)
    number = lambda source, path: numbers.setdefault((source, path), len(numbers))  # noqa: E731
    moves, records, arrays = build_moves(stored, wanted, target, number)
    return Plan((), records, target.files, arrays, moves, "sharded", None, "out", {}, {}), target


@settings(max_examples=60)
@given(cases(), st.booleans())
def test_a_large_plan_is_the_small_one(case: tuple[list[Stored], Wanted, Layout], first: bool) -> None:
    (small, _), (large, _) = plan_of(*case, large=False), plan_of(*case, large=True)
    moves = small.moves
    later = large.moves
    assert isinstance(later, LaterMoves) and not isinstance(moves, LaterMoves)
    if first:
        moves = tuple(m._replace(sources=tuple(r for r in m.sources if r.replica == 0)) for m in moves)
        later = later.first_replicas()
        small, large = (dataclasses.replace(plan, moves=m) for plan, m in ((small, moves), (large, later)))
    assert list(later) == list(moves) and later[-1] == moves[-1] and later[1:] == list(moves[1:])
    assert later.copies == count_copies(moves) and large.bytes_read == small.bytes_read
    assert large.records == small.records and [list(a) for a in large.arrays] == [list(a) for a in small.arrays]
    by_state: dict[str, tuple[int, int]] = {}
    for move in moves:
        tensors, nbytes = by_state.get(move.key.state, (0, 0))
        by_state[move.key.state] = (tensors + 1, nbytes + move.numel * move.item_out)
    assert later.states == by_state
    assert large.to_json() == small.to_json()


@settings(max_examples=40)
@given(cases(), st.sampled_from([dcp_target, sharded_target.sharded_target]))
def test_what_a_dry_run_counts_is_what_a_run_lists(
    case: tuple[list[Stored], Wanted, Layout], make_target: Callable[[Wanted, Layout], Target]
) -> None:
    stored, wanted, layout = case
    target = make_target(wanted, layout)
    assert target.places is not None and target.places.listable
    numbers: dict[tuple[int, str], int] = {}
    number = lambda source, path: numbers.setdefault((source, path), len(numbers))  # noqa: E731
    later, *rest = build_moves(stored, wanted, target, number)
    counted = dict(numbers)
    numbers.clear()
    moves, *listed = build_moves(stored, wanted, target._replace(places=None), number)
    assert isinstance(later, LaterMoves) and list(later) == list(moves) and counted == numbers
    assert [rest[0], [list(arrays) for arrays in rest[1]]] == [listed[0], [list(arrays) for arrays in listed[1]]]
    assert later.copies == count_copies(moves)
    assert later.bytes_read == sum(region.numel * move.item for move in moves for region in move.sources)
    assert later.has_transposed == any(is_transposed(region) for move in moves for region in move.sources)


def test_a_count_refuses_what_a_list_would() -> None:
    """Elements of half a byte, cut inside one: whether or not anybody makes the move."""
    key = TensorKey("w")
    dtype = DTYPES["F4"]
    whole = StoredArray("f", 0, dtype, (2, 4))
    tensor = LogicalTensor(key, (2, 4), dtype, (Chunk(Box((0, 0), (2, 4)), whole, Box((0, 0), (2, 4))),))

    class Halves:
        listable = True
        groups = staticmethod(lambda: {0: (1, 0)})
        group = staticmethod(lambda tensor: 0)
        boxes = staticmethod(lambda group: [Box((0, 0), (2, 1)), Box((0, 1), (2, 3))])

    wanted = Wanted((WantedTensor(key, (2, 4), dtype),))
    with pytest.raises(InputError, match="inside a byte"):
        build_moves([Stored(0, tensor)], wanted, Target("x", (), places=Halves()), lambda source, path: 0)  # type: ignore[arg-type]


@given(cases())
def test_the_identifier_is_one_for_one_command_and_another_for_another(
    case: tuple[list[Stored], Wanted, Layout],
) -> None:
    stored, wanted, layout = case
    plan, again = (plan_of(*case, large=True)[0] for _ in range(2))
    assert plan.identifier() == again.identifier()
    tensor = stored[0].tensor
    moved = tensor.chunks[0].array._replace(offset=12345)
    chunks = (tensor.chunks[0]._replace(array=moved), *tensor.chunks[1:])
    other = [stored[0]._replace(tensor=tensor._replace(chunks=chunks)), *stored[1:]]
    changed = [
        plan_of(other, wanted, layout, large=True)[0],
        plan_of(stored, dataclasses.replace(wanted, extras={"iteration": 1}), layout, large=True)[0],
        dataclasses.replace(plan, destination="elsewhere"),
        dataclasses.replace(plan, options={"verify": "full"}),
    ]
    assert len({plan.identifier(), *(each.identifier() for each in changed)}) == 5


def test_copies_are_counted_as_intersections_are():
    rng = np.random.default_rng(11)
    for _ in range(60):
        shape = tuple(int(n) for n in rng.integers(1, 9, size=rng.integers(1, 4)))
        sides = []
        for _ in range(2):
            boxes = [Box((0,) * len(shape), shape)]
            for d, n in enumerate(shape):
                at = int(rng.integers(0, n))
                if at:
                    boxes = [
                        Box((*b.offset[:d], low, *b.offset[d + 1 :]), (*b.shape[:d], high - low, *b.shape[d + 1 :]))
                        for b in boxes
                        for low, high in ((0, at), (at, n))
                    ]
            sides.append(tuple(box_region(shape, box, 4, 0, 0) for box in boxes))
        kind = DTYPES["F32"]
        move = Move(TensorKey("w"), shape, kind, kind, int(np.prod(shape)), 4, 4, *sides)
        slow = sum(next(intersect(a, b), None) is not None for a in sides[0] for b in sides[1])
        assert count_copies([move]) == slow
