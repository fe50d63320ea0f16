"""What `sharded` lays out by classes of tensors is what a layout box by box gives: the same files, to the byte.

The oracle (`Expected`) goes through the boxes one by one and states texts and offsets of its own, from the
specification in `sharded.format`; `test_sharded.py` compares files with NumPy and safetensors.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.layout import Held, Layout, Placement, held
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.target import Target, TargetArray, Wanted, WantedTensor
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.plan.placing import Wishes, lay_out
from ckpt_tool.systems.ckpt.sharded import target as sharded_target
from ckpt_tool.systems.ckpt.sharded.index import file_name

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
    odd = draw(st.lists(st.sampled_from(["\u00fc", 'a"b', "a\\b", "a\nb", "\u65e5\u672c"]), max_size=2))
    shapes |= dict.fromkeys(odd, (4, 2))
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


def compact(value: object, **how: bool) -> str:
    return json.dumps(value, separators=(",", ":"), **how)


class Expected(NamedTuple):
    """A file of tensors as it should be."""

    path: str
    size: int
    head: bytes
    arrays: list[TargetArray]


def expected_files(wanted: Wanted, layout: Layout) -> list[Expected]:
    """The files of tensors, box by box."""
    mesh = layout.mesh
    coords = list(mesh.ranks())
    parts: dict[tuple[str, str, int], list[tuple[int, Held]]] = {}  # by path, state, rank
    for number, (item, placement) in enumerate(zip(wanted.tensors, layout.placements, strict=True)):
        for part in held(item.shape, placement, mesh):
            if 0 not in part.shape or 0 in item.shape:
                path = file_name(item.key.state, mesh, coords[part.rank])
                parts.setdefault((path, item.key.state, part.rank), []).append((number, part))

    texts = {key: compact(boxes_of(wanted, rows), sort_keys=True) for key, rows in parts.items()}
    hashes = {}
    for key, rows in parts.items():
        arrays = sorted([wanted.tensors[n].key.name, wanted.tensors[n].dtype.name, [*p.shape]] for n, p in rows)
        hashes[key[0]] = blake2b((texts[key] + compact(arrays)).encode(), digest_size=16).hexdigest()
    save = compact([mesh.to_json(), {"iteration": 7}, hashes], sort_keys=True)

    files = []
    for (path, state, rank), rows in sorted(parts.items()):
        metadata = {
            "format": "pt",
            "ckpt_format": "sharded",
            "ckpt_version": "1",
            "state": state,
            "save": blake2b(save.encode(), digest_size=16).hexdigest(),
            "mesh": compact(mesh.to_json(), sort_keys=True),
            "rank": compact(coords[rank], sort_keys=True),
            "boxes": texts[path, state, rank],
        }
        head: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
        begins = {}
        end = 0
        widest_first = [(-wanted.tensors[n].dtype.bits, wanted.tensors[n].key.name, n, part) for n, part in rows]
        for _, name, number, part in sorted(widest_first):
            begins[number] = end
            end += wanted.tensors[number].dtype.nbytes(prod(part.shape))
            dtype = wanted.tensors[number].dtype.name
            head[name] = {"dtype": dtype, "shape": part.shape, "data_offsets": (begins[number], end)}
        text = compact(head, ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        placed = [
            TargetArray(n, part.box, start + begins[n], part.shape if part.shape != part.box.shape else None)
            for n, part in rows
        ]
        files.append(Expected(path, start + end, len(text).to_bytes(8, "little") + text, placed))
    return files


def boxes_of(wanted: Wanted, rows: list[tuple[int, Held]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """What `boxes` in the metadata of a file says."""
    boxes = {}
    for number, part in rows:
        box = {"offset": part.box.offset, "shape": wanted.tensors[number].shape}
        boxes[wanted.tensors[number].key.name] = box if part.shape == part.box.shape else {**box, "box": part.box.shape}
    return boxes


def target_of(wanted: Wanted, layout: Layout, *, large: bool) -> Target:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_target, "MANY", -1 if large else 1 << 60)
        target = sharded_target.sharded_target(wanted, layout)
    assert target.places is not None and target.places.listable != large
    return target


@given(cases(), st.booleans())
def test_the_files_are_those_that_are_laid_out_box_by_box(case: tuple[Wanted, Layout], large: bool) -> None:
    target = target_of(*case, large=large)
    files = expected_files(*case)
    assert [file.path for file in target.files] == [
        *(file.path for file in files),
        *(path for path, _ in case[0].sidefiles),
        "ckpt.index.json",
    ]
    for file, expected in zip(target.files, files, strict=False):
        assert (file.size, tuple(file.literals)) == (expected.size, ((0, expected.head),))
        assert list(file.arrays) == expected.arrays and not file.patches

    index = target.files[-1]
    ((at, text),) = index.literals
    assert at == 0 and len(text) == index.size
    named = {(t.key.state, t.key.name): number for number, t in enumerate(case[0].tensors)}
    assert sorted(patch.of for patch in index.patches) == sorted(named.values())
    for patch in index.patches:
        tensor = case[0].tensors[patch.of]
        before = f'{compact(tensor.key.name)}:{{"digest":"'.encode()
        assert text[: patch.offset].endswith(before) and text[patch.offset :].startswith(b"0" * 32 + b'","dtype"')
    document = json.loads(text)
    assert [(f["path"], f["size"]) for f in document["files"]] == [(f.path, f.size) for f in files]


@given(cases())
def test_a_tensor_is_found_where_the_files_have_it(case: tuple[Wanted, Layout]) -> None:
    target = target_of(*case, large=True)
    assert target.places is not None
    wanted: dict[int, list[tuple[int, TargetArray]]] = {}
    for number, file in enumerate(expected_files(*case)):
        for array in file.arrays:
            wanted.setdefault(array.tensor, []).append((number, array))
    groups: dict[int, list[Box]] = {}
    for tensor in range(len(case[0].tensors)):
        found = target.places.of(tensor)
        assert list(found) == wanted.get(tensor, [])
        group = target.places.group(tensor)
        boxes = groups.setdefault(group, list(target.places.boxes(group)))
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
    identities = [places.identity() for case in cases if (places := target_of(*case, large=True).places)]
    assert len(set(identities)) == len(cases)
    assert identities == [places.identity() for case in cases if (places := target_of(*case, large=True).places)]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", ["__metadata__", "x" * 5000, "\u00fc" * 3000, "a\ud800"])
def test_what_no_head_can_hold_is_refused_before_any_is_looked_at(name: str, large: bool) -> None:
    tensor = WantedTensor(TensorKey(name), (2,), DTYPES["F32"])
    with pytest.raises(UsageError) as refused:
        target_of(Wanted((tensor,)), Layout(Mesh.of(tp=2), (Placement(),)), large=large)
    assert refused.value.code == "E0200" and refused.value.key == name[:200]


def test_a_dry_run_makes_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_target, "build_header", lambda *given: pytest.fail("a head was made"))
    tensor = WantedTensor(TensorKey("w"), (4, 2), DTYPES["F32"])
    target = target_of(Wanted((tensor,)), Layout(Mesh.of(tp=2), (Placement(((0, ("tp",)),)),)), large=False)
    assert [file.size > 0 for file in target.files] == [True] * 3
