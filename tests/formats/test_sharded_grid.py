"""The short road for very many ranks promises what the long road writes: the same files, to the byte.

The oracle is the plain road, which lays out box by box; `test_sharded.py` holds that against NumPy and safetensors.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.layout import Layout, Placement
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.target import Target, TargetArray, Wanted, WantedTensor
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.plan.placing import Wishes, lay_out
from ckpt_tool.systems.ckpt.sharded import target as sharded_target

NAMES = st.sampled_from(
    [f"model.layers.{i}.{part}.weight" for i in (0, 1, 10) for part in ("q_proj", "o_proj", "norm", "experts.0.w1")]
    + [f"model.layers.{i}.experts.{e}.w2.weight" for i in (0, 1) for e in (1, 2, 3)]
    + ["embed_tokens.weight", "lm_head.weight", "a b", "scale"]
)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 6, 8, 16]), max_size=3).map(tuple)
STATES = st.lists(st.sampled_from(["model", "exp_avg", "master", "step"]), min_size=1, max_size=3, unique=True)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Wanted, Layout]:
    shapes = draw(st.dictionaries(NAMES, SHAPES, min_size=1, max_size=8))
    tensors = []
    for state in draw(STATES):
        dtype = draw(st.sampled_from(["BF16", "F32", None]))
        for name, shape in shapes.items():
            path = ("optim", name, state) if state == "exp_avg" else ()
            kind = DTYPES[dtype or draw(st.sampled_from(["BF16", "F32", "U8"]))]
            tensors.append(WantedTensor(TensorKey(name, state), () if state == "step" else shape, kind, path))
    if draw(st.booleans()):
        tensors.sort(key=lambda item: item.key.name)  # states taking turns, as some readers give them
    mesh = Mesh.of(tp=draw(st.sampled_from([1, 2, 4])), dp=draw(st.sampled_from([1, 2, 3, 12])))
    policy = draw(st.sampled_from(["largest-dim", "dtensor", "pad"]))
    layout, _ = lay_out(tensors, Wishes(mesh, draw(st.integers(0, 3)), policy))
    if draw(st.booleans()):
        placements = [
            p._replace(at=(("pp", len(t.key.name) % 2),)) for t, p in zip(tensors, layout.placements, strict=True)
        ]
        layout = Layout(Mesh.of(**mesh.to_json(), pp=2), tuple(placements), "by hand")
    sidefiles = (("config.json", 7),) if draw(st.booleans()) else ()
    return Wanted(tuple(tensors), {"iteration": 7}, Hints({"k": "v"}), "dcp", sidefiles), layout


def both(wanted: Wanted, layout: Layout) -> tuple[Target, Target]:
    with pytest.MonkeyPatch.context() as patch:
        long = sharded_target.sharded_target(wanted, layout)
        patch.setattr(sharded_target, "MANY", -1)
        return long, sharded_target.sharded_target(wanted, layout)


@given(cases())
def test_both_roads_make_the_same_files(case: tuple[Wanted, Layout]) -> None:
    long, short = both(*case)
    assert short.places is not None and long.places is None
    for a, b in zip(long.files, short.files, strict=True):
        assert (a.path, a.size, a.copy_of) == (b.path, b.size, b.copy_of)
        assert tuple(a.literals) == tuple(b.literals)
        assert tuple(a.arrays) == tuple(b.arrays) and tuple(a.patches) == tuple(b.patches)


@given(cases())
def test_a_tensor_is_found_where_the_files_have_it(case: tuple[Wanted, Layout]) -> None:
    long, short = both(*case)
    assert short.places is not None
    wanted: dict[int, list[tuple[int, TargetArray]]] = {}
    for number, file in enumerate(long.files):
        for array in file.arrays:
            wanted.setdefault(array.tensor, []).append((number, array))
    groups: dict[int, list[Box]] = {}
    for tensor in range(len(case[0].tensors)):
        found = short.places.of(tensor)
        assert list(found) == wanted.get(tensor, [])
        boxes = groups.setdefault(short.places.group(tensor), list(short.places.boxes(short.places.group(tensor))))
        assert sorted(map(repr, boxes)) == sorted(repr(array.box) for _, array in found)


def test_the_identity_hangs_on_what_decides_the_heads() -> None:
    one = WantedTensor(TensorKey("w"), (4, 4), DTYPES["F32"])
    layout = Layout(Mesh.of(tp=2), (Placement(((0, ("tp",)),)),))
    other = Layout(Mesh.of(tp=2), (Placement(((1, ("tp",)),)),))
    cases = [
        (Wanted((one,)), layout),
        (Wanted((one,)), other),
        (Wanted((one,), {"iteration": 1}), layout),
        (Wanted((one._replace(dtype=DTYPES["BF16"]),)), layout),
        (Wanted((one._replace(path=("x",)),)), layout),
        (Wanted((one._replace(key=TensorKey("v")),)), layout),
    ]
    found = [short.places.identity() for case in cases if (short := both(*case)[1]).places is not None]
    assert len(set(found)) == len(cases)
    assert found == [short.places.identity() for case in cases if (short := both(*case)[1]).places is not None]


def test_odd_names_take_the_long_road() -> None:
    layout = Layout(Mesh.of(tp=2), (Placement(),))
    for name in ("ü", 'a"b', "a\\b", "a\nb"):
        _, short = both(Wanted((WantedTensor(TensorKey(name), (2,), DTYPES["F32"]),)), layout)
        assert short.places is None
