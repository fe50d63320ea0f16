"""The largest-mesh-dim fallback: the worked examples, torch's own chunks, and the properties of every layout."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.core.box import Box
from ckpt_tool.core.fallback import POLICIES, Choice, choose
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.layout import Placement, block, held, place
from ckpt_tool.core.mesh import DIMS, Mesh
from ckpt_tool.errors import UsageError

# n, granule, mesh dims, then the dims that cut it under: largest-dim, prefix, best-subset
EXAMPLES = [
    (4096, 1, "dp2 tp4", "dp tp", "dp tp", "dp tp"),
    (12, 1, "dp2 tp4", "tp", "dp", "tp"),
    (10, 1, "dp2 tp4", "dp", "dp", "dp"),
    (6, 1, "dp3 tp4", "dp", "dp", "dp"),
    (9, 1, "dp2 tp4", "", "", ""),
    (8, 1, "dp4 tp4", "dp", "dp", "dp"),
    (24, 1, "dp2 tp4 ep5", "tp", "dp tp", "dp tp"),
    (12, 1, "dp2 tp4 ep3", "tp", "dp", "tp ep"),
    (5, 1, "dp2 tp5", "tp", "", "tp"),
    (32001, 1, "dp2 tp8", "", "", ""),
    (1280, 128, "dp4 tp2", "tp", "", "tp"),
    (0, 1, "dp2 tp4", "dp tp", "dp tp", "dp tp"),
    (1, 1, "dp2 tp4", "", "", ""),
    (6, 1, "dp1 tp6", "tp", "tp", "tp"),
]


def dims_of(text: str) -> list[tuple[str, int]]:
    return [(word[:2], int(word[2:])) for word in text.split()]


@pytest.mark.parametrize(("n", "granule", "mesh", "largest", "prefix", "best"), EXAMPLES)
def test_worked_examples(n: int, granule: int, mesh: str, largest: str, prefix: str, best: str) -> None:
    dims = dims_of(mesh)
    for policy, want in (("largest-dim", largest), ("prefix", prefix), ("best-subset", best)):
        choice = choose(n, dims, granule=granule, policy=policy)
        assert choice.used == tuple(want.split()), policy
        assert choice.requested == tuple(name for name, _ in dims)
        live = [name for name, size in dims if size > 1]
        assert choice.reason == ("even" if list(choice.used) == live else "fallback" if choice.used else "replicated")


@pytest.mark.parametrize(
    ("n", "granule", "mesh", "boxes"),
    [
        (4096, 1, "dp2 tp4", [(k * 512, 512) for k in range(8)]),
        (12, 1, "dp2 tp4", [(0, 3), (3, 3), (6, 3), (9, 3)]),
        (10, 1, "dp2 tp4", [(0, 5), (5, 5)]),
        (9, 1, "dp2 tp4", [(0, 9)]),
        (1280, 128, "dp4 tp2", [(0, 640), (640, 640)]),
        (0, 1, "dp2 tp4", [(0, 0)] * 8),
        (6, 1, "dp1 tp6", [(k, 1) for k in range(6)]),
    ],
)
def test_worked_examples_as_boxes(n: int, granule: int, mesh: str, boxes: list[tuple[int, int]]) -> None:
    sizes = Mesh.of(**dict(dims_of(mesh)))
    placement = place((n,), [(0, [name for name, _ in dims_of(mesh)])], sizes, granule=granule)
    writers = [h for h in held((n,), placement, sizes) if h.replica == 0]
    assert sorted((h.box.offset[0], h.box.shape[0]) for h in writers) == boxes
    assert len(list(held((n,), placement, sizes))) == sizes.size


def test_a_better_alternative_is_named_where_there_is_one() -> None:
    assert choose(24, dims_of("dp2 tp4 ep5")).better == ("dp", "tp")
    assert choose(12, dims_of("dp2 tp4 ep3")).better == ("tp", "ep")
    assert choose(10, dims_of("dp2 tp4")).better == ()
    assert choose(4096, dims_of("dp2 tp4")).better == ()


def test_ties_go_to_the_first_listed_and_order_is_kept() -> None:
    assert choose(8, dims_of("tp4 dp4")).used == ("tp",)
    assert choose(8, dims_of("dp4 tp4")).used == ("dp",)
    assert choose(64, dims_of("tp4 dp2")).used == ("tp", "dp")
    sizes = Mesh.of(tp=2, dp=2)
    coords = list(sizes.ranks())
    minor = {
        coords[h.rank]["dp"]: h.box.offset[0]
        for h in held((4,), place((4,), [(0, ["tp", "dp"])], sizes), sizes)
        if coords[h.rank]["tp"] == 0
    }
    assert minor == {0: 0, 1: 1}, "the first listed dim is the major one"


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: choose(8, [("tp", 2), ("tp", 4)]), "E0212"),
        (lambda: place((8, 8), [(0, ["tp"]), (1, ["tp"])], Mesh.of(tp=2)), "E0212"),
        (lambda: place((8,), [(0, ["pp"])], Mesh.of(pp=2), at=[("pp", 1)]), "E0212"),
        (lambda: choose(10, [("tp", 2)], granule=4), "E0213"),
        (lambda: choose(10, [("tp", 2)], granule=0), "E0213"),
        (lambda: choose(10, [("tp", 4)], policy="error"), "E0214"),
        (lambda: choose(10, [("tp", 4)], policy="largest"), "E0215"),
        (lambda: choose(8, [("tp", 4)], policy="largest"), "E0215"),
        (lambda: place((8,), [(1, ["tp"])], Mesh.of(tp=2)), "E0216"),
        (lambda: place((8,), [(-1, ["tp"])], Mesh.of(tp=2)), "E0216"),
        (lambda: place((8,), [], Mesh.of(pp=2), at=[("pp", 2)]), "E0209"),
        (lambda: place((8,), [], Mesh.of(tp=2), at=[("pp", 1)]), "E0209"),
    ],
)
def test_refuses(call: object, code: str) -> None:
    with pytest.raises(UsageError) as error:
        call()  # type: ignore[operator]
    assert error.value.code == code


def test_the_error_policy_tells_degrees_that_divide() -> None:
    with pytest.raises(UsageError) as error:
        choose(12, dims_of("tp5"), policy="error")
    assert "3, 4, 6" in str(error.value.hint)
    assert choose(12, dims_of("tp4"), policy="error").used == ("tp",)


def test_scalars_are_replicated() -> None:
    mesh = Mesh.of(tp=2, dp=2)
    placement = place((), [(0, ["tp"])], mesh)
    assert placement == Placement()
    assert [h.replica for h in held((), placement, mesh)] == [
        0,
        2,
        1,
        3,
    ]  # tp is the fastest rank, but dims count replicas in the mesh's order


@settings(deadline=None)
@given(n=st.integers(0, 40), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3), granule=st.integers(1, 3))
def test_uneven_cuts_are_torchs_chunks_dim_by_dim(n: int, sizes: list[int], granule: int) -> None:
    """DTensor cuts by `torch.chunk` over the first mesh dim, then each chunk over the next."""
    torch = pytest.importorskip("torch")
    names = ["dp", "tp", "ep"][: len(sizes)]
    mesh = Mesh.of(**dict(zip(names, sizes, strict=True)))
    placement = place((n * granule,), [(0, names)], mesh, granule=granule, policy="dtensor")
    coords = list(mesh.ranks())
    for each in held((n * granule,), placement, mesh):
        part = torch.arange(n)
        for name in names:
            if mesh[name] > 1:
                chunks = torch.chunk(part, mesh[name]) if part.numel() else ()
                index = coords[each.rank][name]
                part = chunks[index] if index < len(chunks) else part[:0]
        assert each.box.shape == (part.numel() * granule,)
        if part.numel():
            assert each.box.offset == (int(part[0]) * granule,)
        assert each.shape == each.box.shape


def test_a_known_uneven_cut_of_two_mesh_dims() -> None:
    """10 over dp2 x tp4, as torch 2.13's DTensor holds it."""
    mesh = Mesh.of(dp=2, tp=4)
    placement = place((10,), [(0, ["dp", "tp"])], mesh, policy="dtensor")
    coords = list(mesh.ranks())
    sizes = {
        (coords[h.rank]["dp"], coords[h.rank]["tp"]): (h.box.offset[0], h.box.shape[0])
        for h in held((10,), placement, mesh)
    }
    assert [sizes[0, t][1] for t in range(4)] == [sizes[1, t][1] for t in range(4)] == [2, 2, 1, 0]
    assert [sizes[0, t][0] for t in range(3)] == [0, 2, 4]
    assert [sizes[1, t][0] for t in range(3)] == [5, 7, 9]


@given(n=st.integers(1, 60), tp=st.integers(1, 8), granule=st.sampled_from([1, 1, 4]))
def test_padded_blocks_are_all_of_one_size(n: int, tp: int, granule: int) -> None:
    mesh = Mesh.of(tp=tp)
    shape = (n * granule, 3)
    placement = place(shape, [(0, ["tp"])], mesh, granule=granule, policy="pad")
    rows = list(held(shape, placement, mesh))
    assert len({h.shape for h in rows}) == 1
    assert rows[0].shape[0] == ceil_div(n, tp) * granule
    assert sum(h.box.shape[0] for h in rows) == n * granule
    assert all(h.box.shape[0] <= h.shape[0] and h.box.shape[0] % granule == 0 for h in rows)


# Properties of every policy.

MESHES = st.dictionaries(st.sampled_from([d for d in DIMS if d != "vpp"]), st.integers(1, 4), max_size=4).filter(
    lambda sizes: prod(sizes.values()) <= 64
)
WISHES = st.tuples(MESHES, st.lists(st.integers(0, 13), min_size=1, max_size=3), st.randoms(use_true_random=False))


def wished(sizes: dict[str, int], shape: list[int], rng: object) -> list[tuple[int, list[str]]]:
    """Some of the mesh's dims over some of the tensor's, in any order."""
    names = list(sizes)
    rng.shuffle(names)  # type: ignore[attr-defined]
    dims = rng.sample(range(len(shape)), rng.randint(1, len(shape)))  # type: ignore[attr-defined]
    out: dict[int, list[str]] = {dim: [] for dim in dims}
    for name in names:
        if rng.random() < 0.8:  # type: ignore[attr-defined]
            out[rng.choice(dims)].append(name)  # type: ignore[attr-defined]
    return list(out.items())


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "error"])
@given(case=WISHES)
def test_shards_cover_the_tensor_and_replicas_are_whole_copies(policy: str, case: tuple) -> None:
    sizes, shape, rng = case
    mesh = Mesh.of(**sizes)
    placement = place(shape, wished(sizes, shape, rng), mesh, policy=policy)
    everyone = list(held(shape, placement, mesh))
    assert len(everyone) == mesh.size
    count = np.zeros(shape, int)
    for each in everyone:
        assert each.box.inside(shape)
        if each.replica == 0:
            count[tuple(slice(o, o + n) for o, n in zip(each.box.offset, each.box.shape, strict=True))] += 1
    assert (count == 1).all(), "the writers' boxes tile the tensor"
    copies = Counter(each.replica for each in everyone)
    assert len(set(copies.values())) == 1, "each replica is a whole copy"
    assert sorted(copies) == list(range(len(copies)))
    # replicated bytes: what all ranks hold, less the tensor, is the other copies
    assert sum(each.box.numel for each in everyone) == prod(shape) * len(copies)


@given(
    n=st.integers(0, 200), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), policy=st.sampled_from(POLICIES)
)
def test_choices_ask_for_no_names_and_ignore_dims_of_size_1(n: int, sizes: list[int], policy: str) -> None:
    def chosen(dims: list[tuple[str, int]]) -> Choice | str:
        try:
            return choose(n, dims, policy=policy)
        except UsageError as e:
            return e.code

    plain = [(f"a{k}", size) for k, size in enumerate(sizes)]
    renamed = [(f"z{len(sizes) - k}", size) for k, size in enumerate(sizes)]
    a = chosen(plain)
    b = chosen(renamed)
    if isinstance(a, str) or isinstance(b, str):
        assert a == b
        return
    back = dict(zip((name for name, _ in renamed), (name for name, _ in plain), strict=True))
    assert a == Choice(
        *(tuple(back[name] for name in names) for names in (b.requested, b.used)),
        b.reason,
        tuple(back[name] for name in b.better),
    )
    padded = [("x", 1), *plain, ("y", 1)]
    c = choose(n, padded, policy=policy)
    assert (c.used, c.reason, c.better) == (a.used, a.reason, a.better)
    assert not {"x", "y"} & {*c.used, *c.better}


@given(
    n=st.integers(0, 200), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), policy=st.sampled_from(POLICIES)
)
def test_a_choice_chosen_again_is_the_same(n: int, sizes: list[int], policy: str) -> None:
    dims = [(f"a{k}", size) for k, size in enumerate(sizes)]
    try:
        first = choose(n, dims, policy=policy)
    except UsageError:
        return
    again = choose(n, [(name, size) for name, size in dims if name in first.used], policy=policy)
    assert again.used == first.used
    if policy not in ("dtensor", "pad"):
        assert again.reason == "even"
        assert n % prod(size for name, size in dims if name in first.used) == 0


@given(n=st.integers(1, 200), sizes=st.lists(st.integers(2, 6), min_size=1, max_size=4))
def test_the_fallback_keeps_the_largest_dim_that_divides(n: int, sizes: list[int]) -> None:
    dims = [(f"a{k}", size) for k, size in enumerate(sizes)]
    choice = choose(n, dims)
    if n % prod(sizes):
        dividing = [size for size in sizes if n % size == 0]
        assert [dict(dims)[name] for name in choice.used] == ([max(dividing)] if dividing else [])
        if choice.used:
            assert choice.used[0] == next(name for name, size in dims if size == max(dividing))
    else:
        assert choice.used == tuple(name for name, _ in dims)


def test_a_tensor_at_a_stage_is_held_there_alone() -> None:
    mesh = Mesh.of(tp=2, pp=3, dp=2)
    placement = place((8, 4), [(0, ["tp"])], mesh, at=[("pp", 2)])
    rows = list(held((8, 4), placement, mesh))
    coords = list(mesh.ranks())
    assert {coords[h.rank]["pp"] for h in rows} == {2}
    assert [(coords[h.rank]["tp"], coords[h.rank]["dp"], h.replica, h.box) for h in rows] == [
        (tp, dp, dp, Box((4 * tp, 0), (4, 4))) for dp in range(2) for tp in range(2)
    ]
    first = place((8, 4), [], mesh, at=[("pp", 0)])
    assert {coords[h.rank]["pp"] for h in held((8, 4), first, mesh)} == {0}


def test_blocks_follow_the_ceil_rule() -> None:
    assert [block(10, 4, k) for k in range(4)] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert [block(5, 4, k) for k in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]
    assert [block(1280, 4, k, granule=128) for k in range(4)] == [(0, 384), (384, 384), (768, 384), (1152, 128)]
    assert block(0, 3, 2) == (0, 0)
