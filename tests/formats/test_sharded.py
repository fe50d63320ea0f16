"""The `sharded` format: our target written with NumPy slices, read by the safetensors library; our reader on both."""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.layout import Layout, Placement, place
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.target import Target, Wanted, WantedTensor
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import (
    CkptError,
    CorruptFile,
    Incomplete,
    InconsistentCheckpoint,
    UnknownFormat,
    UnsafeInput,
    UsageError,
)
from ckpt_tool.formats import registry
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.ckpt.sharded.format import FORMAT
from ckpt_tool.systems.ckpt.sharded.index import INDEX, boxes_hash, file_name, save_id

Arrays = dict[TensorKey, np.ndarray]

_NUMPY = {"F32": "float32", "F64": "float64", "I64": "int64", "U8": "uint8", "BF16": "uint16", "F8_E4M3": "uint8"}


def arange(shape: tuple[int, ...], dtype: str = "F32", start: int = 1) -> np.ndarray:
    return np.arange(start, start + int(np.prod(shape))).astype(_NUMPY[dtype]).reshape(shape)


def wanted_of(arrays: Arrays, dtypes: Mapping[TensorKey, str] | None = None, **more: Any) -> Wanted:
    dtypes = dtypes or {}
    tensors = tuple(
        WantedTensor(key, array.shape, DTYPES[dtypes.get(key, "F32")], more.get("paths", {}).get(key, ()))
        for key, array in arrays.items()
    )
    more.pop("paths", None)
    return Wanted(tensors, **more)


def write(target: Target, arrays: Arrays, folder: Path) -> Path:
    """The target's files, by NumPy slices: no code of the executor."""
    values = list(arrays.values())
    for file in target.files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        data = bytearray(file.size)
        if file.copy_of is not None:
            data[:] = b"s" * file.size
        for offset, text in file.literals:
            data[offset : offset + len(text)] = text
        for array in file.arrays:
            box = values[array.tensor][
                tuple(slice(o, o + n) for o, n in zip(array.box.offset, array.box.shape, strict=True))
            ]
            stored = np.zeros(array.shape if array.shape is not None else box.shape, box.dtype)
            stored[tuple(slice(0, n) for n in box.shape)] = box
            data[array.offset : array.offset + stored.nbytes] = stored.tobytes()
        for patch in file.patches:
            assert patch.kind == "digest"
            assert data[patch.offset : patch.offset + 32] == b"0" * 32
            data[patch.offset : patch.offset + 32] = b"%032x" % (patch.of + 1)
        path.write_bytes(data)
    return folder


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The values, as unsigned integers where NumPy has no such type."""
    same = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    return tensor.view(same.get(tensor.dtype, tensor.dtype)).numpy()


def read_by_library(folder: Path) -> dict[tuple[str, str], np.ndarray]:
    """Every logical tensor, put together from the files' own metadata: neither the index nor our reader."""
    whole: dict[tuple[str, str], np.ndarray] = {}
    seen: dict[tuple[str, str], np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata()
            assert metadata["format"] == "pt"
            for name, box in json.loads(metadata["boxes"]).items():
                array = bits(f.get_tensor(name))
                key = (metadata["state"], name)
                if key not in whole:
                    whole[key] = np.zeros(box["shape"], array.dtype)
                    seen[key] = np.zeros(box["shape"], bool)
                extents = box.get("box", array.shape)
                here = tuple(slice(o, o + n) for o, n in zip(box["offset"], extents, strict=True))
                inside = tuple(slice(0, n) for n in extents)
                assert not seen[key][here].any() or np.array_equal(whole[key][here], array[inside])
                whole[key][here] = array[inside]
                seen[key][here] = True
                rest = array.copy()
                rest[inside] = 0
                assert not rest.any(), "padding must be zeros"
    assert all(mask.all() for mask in seen.values())
    return whole


def read_by_us(folder: Path) -> tuple[Catalog, dict[tuple[str, str], np.ndarray]]:
    catalog = FORMAT.read(Tree(folder))
    catalog.check()
    out = {}
    for key, tensor in catalog.tensors.items():
        kind = _NUMPY[tensor.dtype.name]
        whole = np.zeros(tensor.shape, kind)
        for chunk in tensor.chunks:
            array = chunk.array
            stored = np.fromfile(folder / array.path, kind, array.numel, offset=array.offset).reshape(array.shape)
            part = stored[tuple(slice(o, o + n) for o, n in zip(chunk.within.offset, chunk.within.shape, strict=True))]
            where = tuple(slice(o, o + n) for o, n in zip(chunk.box.offset, chunk.box.shape, strict=True))
            if chunk.replica:
                np.testing.assert_array_equal(whole[where], part)
            whole[where] = part
        out[key.state, key.name] = whole
    return catalog, out


def check_equal(have: Mapping[tuple[str, str], np.ndarray], arrays: Arrays) -> None:
    assert set(have) == {(key.state, key.name) for key in arrays}
    for key, array in arrays.items():
        np.testing.assert_array_equal(have[key.state, key.name], array, err_msg=str(key))


# -- one checkpoint by hand ---------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """tp 2 x dp 2: `w` cut by tp, its moment cut by dp too, `norm` replicated, an rng state, two extras."""
    arrays, wanted, layout = tiny_parts()
    return write(FORMAT.target(wanted, layout), arrays, tmp_path / "out")


def tiny_parts() -> tuple[Arrays, Wanted, Layout]:
    arrays = {
        TensorKey("w"): arange((4, 6)),
        TensorKey("norm"): arange((3,), start=100),
        TensorKey("w", "exp_avg"): arange((4, 6), start=200),
        TensorKey("rng", "extras"): arange((5,), start=300),
    }
    mesh = Mesh.of(tp=2, dp=2)
    cut = place((4, 6), [(0, ("tp",))], mesh)
    zero = place((4, 6), [(0, ("tp",)), (1, ("dp",))], mesh)
    layout = Layout(mesh, (cut, Placement(), zero, Placement(at=(("tp", 0), ("dp", 1)))), "by hand")
    wanted = wanted_of(
        arrays,
        extras={"iteration": 7, "betas": (0.9, 0.95)},
        hints=Hints({"prefix": "model."}),
        source_format="dcp",
        sidefiles=(("config.json", 11),),
        paths={TensorKey("w", "exp_avg"): ("optim", "state", 0, "exp_avg")},
    )
    return arrays, wanted, layout


def test_the_files_and_their_contents_are_those_of_the_specification(tiny: Path) -> None:
    assert sorted(os.listdir(tiny)) == [
        "ckpt.index.json",
        "config.json",
        "exp_avg.tp00_dp00.safetensors",
        "exp_avg.tp00_dp01.safetensors",
        "exp_avg.tp01_dp00.safetensors",
        "exp_avg.tp01_dp01.safetensors",
        "extras.tp00_dp01.safetensors",
        "model.tp00_dp00.safetensors",
        "model.tp00_dp01.safetensors",
        "model.tp01_dp00.safetensors",
        "model.tp01_dp01.safetensors",
    ]
    moment = safetensors.numpy.load_file(tiny / "exp_avg.tp01_dp00.safetensors")
    np.testing.assert_array_equal(moment["w"], arange((4, 6), start=200)[2:, :3])
    model = safetensors.numpy.load_file(tiny / "model.tp01_dp01.safetensors")
    np.testing.assert_array_equal(model["w"], arange((4, 6))[2:])
    np.testing.assert_array_equal(model["norm"], [100, 101, 102])
    with safe_open(tiny / "exp_avg.tp01_dp00.safetensors", "np") as f:
        metadata = f.metadata()
    assert json.loads(metadata["mesh"]) == {"tp": 2, "dp": 2}
    assert json.loads(metadata["rank"]) == {"tp": 1, "dp": 0}
    assert json.loads(metadata["boxes"]) == {"w": {"offset": [2, 0], "shape": [4, 6]}}
    assert metadata["format"] == "pt" and metadata["state"] == "exp_avg"


def test_the_index_says_everything(tiny: Path) -> None:
    index = json.loads((tiny / INDEX).read_text("ascii"))
    assert index["ckpt_format"] == "sharded" and index["schema_version"] == 1 and index["ckpt_version"] == 1
    assert index["mesh"] == {"tp": 2, "dp": 2}
    assert {file["path"]: file["size"] for file in index["files"]} == {
        path.name: path.stat().st_size for path in tiny.glob("*.safetensors")
    }
    entry = index["tensors"]["exp_avg"]["w"]
    assert (entry["dtype"], entry["shape"], entry["path"]) == ("F32", [4, 6], ["optim", "state", 0, "exp_avg"])
    assert index["placements"][entry["placement"]] == {"shard": [[0, ["tp"]], [1, ["dp"]]]}
    rng = index["placements"][index["tensors"]["extras"]["rng"]["placement"]]
    assert rng == {"shard": [], "at": {"tp": 0, "dp": 1}}
    assert index["source"] == {"format": "dcp", "hints": {"prefix": "model."}}
    assert index["extras"] == {"iteration": 7, "betas": {"$tuple": [0.9, 0.95]}}
    assert index["sidefiles"] == ["config.json"]
    with safe_open(tiny / "model.tp00_dp00.safetensors", "np") as f:
        assert f.metadata()["save"] == index["save"]


def test_the_index_is_canonical_and_the_digest_holes_are_where_it_says(tiny: Path) -> None:
    text = (tiny / INDEX).read_text("ascii")
    document = json.loads(text)
    assert text.replace("\n", "") == json.dumps(document, sort_keys=True, separators=(",", ":"))
    # `write` put the tensor's number + 1 into each hole
    assert document["tensors"]["model"]["w"]["digest"] == f"{1:032x}"
    assert document["tensors"]["model"]["norm"]["digest"] == f"{2:032x}"
    assert document["tensors"]["exp_avg"]["w"]["digest"] == f"{3:032x}"
    assert document["tensors"]["extras"]["rng"]["digest"] == f"{4:032x}"


def test_reading_gives_back_what_was_wanted(tiny: Path) -> None:
    arrays, wanted, _ = tiny_parts()
    check_equal(read_by_library(tiny), arrays)
    tree = Tree(tiny)
    evidence = FORMAT.detect(tree)
    assert evidence is not None and INDEX in evidence.why
    assert tree.bytes_read <= 65536
    catalog, values = read_by_us(tiny)
    check_equal(values, arrays)
    assert catalog.mesh == Mesh.of(tp=2, dp=2)
    assert catalog.extras == wanted.extras
    assert catalog.hints.plain == {"prefix": "model.", "source_format": "dcp"}
    assert catalog.sidefiles == ("config.json",) and catalog.notes == ()
    assert catalog.tensors[TensorKey("w", "exp_avg")].path == ("optim", "state", 0, "exp_avg")
    assert catalog.digests[TensorKey("w", "exp_avg")] == f"{3:032x}"
    assert [chunk.replica for chunk in catalog.tensors[TensorKey("norm")].chunks] == [0, 1, 2, 3]
    assert len(catalog.tensors[TensorKey("w", "exp_avg")].chunks) == 4
    assert set(catalog.files) == {path.name for path in tiny.iterdir()} - {"config.json"}


@pytest.mark.parametrize("hole", [b"0" * 32, b"-" * 32])
def test_an_uncomputed_digest_is_none(tmp_path: Path, hole: bytes) -> None:
    arrays, wanted, layout = tiny_parts()
    target = FORMAT.target(wanted, layout)
    for file in target.files:
        data = bytearray(file.size)
        for offset, text in file.literals:
            data[offset : offset + len(text)] = text
        for patch in file.patches:
            data[patch.offset : patch.offset + 32] = hole
        (tmp_path / file.path).write_bytes(data)
    assert FORMAT.read(Tree(tmp_path)).digests == {}


def contents(target: Target) -> list[tuple[Any, ...]]:
    """(path, size, literals, arrays, patches) of each file."""
    return [(f.path, f.size, *map(tuple, (f.literals, f.arrays, f.patches))) for f in target.files]


def test_a_reshard_of_a_reshard_keeps_the_first_source(tiny: Path) -> None:
    catalog, _ = read_by_us(tiny)
    _, wanted, layout = tiny_parts()
    again = Wanted(wanted.tensors, catalog.extras, catalog.hints, "sharded", wanted.sidefiles)
    assert contents(FORMAT.target(again, layout)) == contents(FORMAT.target(wanted, layout))


def test_the_order_of_the_wanted_tensors_does_not_show(tiny: Path) -> None:
    arrays, wanted, layout = tiny_parts()
    turned = Wanted(wanted.tensors[::-1], wanted.extras, wanted.hints, wanted.source_format, wanted.sidefiles)
    turned_layout = Layout(layout.mesh, layout.placements[::-1], layout.source)
    ours, theirs = (contents(FORMAT.target(*of)) for of in ((wanted, layout), (turned, turned_layout)))
    assert [file[:3] for file in ours] == [file[:3] for file in theirs]


def test_headers_alone_are_read(tmp_path: Path) -> None:
    arrays = {TensorKey(f"w{i}"): arange((400, 100)) for i in range(8)}
    mesh = Mesh.of(tp=2)
    layout = Layout(mesh, tuple(place((400, 100), [(0, ("tp",))], mesh) for _ in arrays))
    write(FORMAT.target(wanted_of(arrays), layout), arrays, tmp_path)
    tree = Tree(tmp_path)
    FORMAT.read(tree)
    stored = sum(tree.listing().values())
    assert tree.bytes_read <= 2 * (128 << 10) + 8192 < stored - 900_000


# -- any checkpoint -----------------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=("Cs",)), min_size=0, max_size=12).filter(
    lambda n: n != "__metadata__"
)


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[Arrays, Wanted, Layout]:
    mesh = Mesh.of(**{dim: draw(st.integers(1, 3)) for dim in draw(st.sets(st.sampled_from(["tp", "pp", "ep", "dp"])))})
    arrays: Arrays = {}
    dtypes: dict[TensorKey, str] = {}
    placements = []
    for i, name in enumerate(draw(st.lists(names, max_size=5, unique=True))):
        for state in draw(st.sets(st.sampled_from(["model", "exp_avg", "extras", "odd.state/ü"]), min_size=1)):
            key = TensorKey(name, state)
            shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
            dtypes[key] = draw(st.sampled_from(sorted(_NUMPY)))
            arrays[key] = arange(shape, dtypes[key], start=i * 1000)
            dims = list(draw(st.permutations([dim for dim, _ in mesh.dims])))
            at = tuple((dim, draw(st.integers(0, mesh[dim] - 1))) for dim in dims if draw(st.integers(0, 4)) == 0)
            free = [dim for dim in dims if dim not in dict(at)]
            wishes: dict[int, list[str]] = {}
            for dim in free:
                if shape and draw(st.booleans()):
                    wishes.setdefault(draw(st.integers(0, len(shape) - 1)), []).append(dim)
            policy = draw(st.sampled_from(["largest-dim", "pad", "dtensor", "replicate"]))
            placements.append(place(shape, [(d, tuple(n)) for d, n in wishes.items()], mesh, at=at, policy=policy))
    return arrays, wanted_of(arrays, dtypes, extras={"n": 1}), Layout(mesh, tuple(placements))


@settings(max_examples=150, deadline=None)
@given(checkpoints())
def test_any_checkpoint_survives_the_library_and_our_reader(tmp_path_factory: Any, checkpoint: Any) -> None:
    arrays, wanted, layout = checkpoint
    target = FORMAT.target(wanted, layout)
    folder = write(target, arrays, tmp_path_factory.mktemp("any"))
    check_equal(read_by_library(folder), arrays)
    catalog, values = read_by_us(folder)
    check_equal(values, arrays)
    assert catalog.mesh == layout.mesh
    for file in target.files:  # literals and arrays are disjoint, inside, and cover the file
        spans = sorted([(at, at + len(text)) for at, text in file.literals])
        assert all(0 <= a <= b <= file.size for a, b in spans)


@given(st.text(max_size=20))
def test_state_names_become_file_names_reversibly(state: str) -> None:
    name = file_name(state, Mesh.of(tp=2), {"tp": 1})
    assert name.endswith(".tp01.safetensors")
    stem = name.removesuffix(".tp01.safetensors")
    assert re.fullmatch(r"[A-Za-z0-9_%-]*", stem, re.ASCII)
    assert urllib.parse.unquote(stem, errors="surrogatepass") == state


def test_torch_opens_our_bf16(tmp_path: Path) -> None:
    values = torch.arange(24).reshape(4, 6).to(torch.bfloat16)
    key = TensorKey("w")
    arrays = {key: values.view(torch.uint16).numpy()}
    mesh = Mesh.of(tp=2)
    layout = Layout(mesh, (place((4, 6), [(1, ("tp",))], mesh),))
    write(FORMAT.target(wanted_of(arrays, {key: "BF16"}), layout), arrays, tmp_path)
    from safetensors.torch import load_file

    parts = [load_file(tmp_path / f"model.tp0{i}.safetensors")["w"] for i in range(2)]
    assert torch.equal(torch.cat(parts, 1), values)


def test_padding_is_recorded_and_left_out_of_the_values(tmp_path: Path) -> None:
    arrays = {TensorKey("v"): arange((5, 2))}
    mesh = Mesh.of(tp=4)
    layout = Layout(mesh, (place((5, 2), [(0, ("tp",))], mesh, policy="pad"),))
    write(FORMAT.target(wanted_of(arrays), layout), arrays, tmp_path)
    with safe_open(tmp_path / "model.tp02.safetensors", "np") as f:
        assert json.loads(f.metadata()["boxes"]) == {"v": {"offset": [4, 0], "shape": [5, 2], "box": [1, 2]}}
        np.testing.assert_array_equal(f.get_tensor("v"), [[9, 10], [0, 0]])
    catalog, values = read_by_us(tmp_path)
    check_equal(values, arrays)
    assert [chunk.box.shape for chunk in catalog.tensors[TensorKey("v")].chunks] == [(2, 2), (2, 2), (1, 2)]
    assert json.loads((tmp_path / INDEX).read_text())["fallbacks"] == [
        {"better": [], "reason": "padded", "requested": ["tp"], "used": ["tp"], "tensors": {"model": ["v"]}}
    ]


def test_granules_of_padded_dims_are_recorded(tmp_path: Path) -> None:
    arrays = {TensorKey("v"): arange((10, 2))}
    mesh = Mesh.of(tp=2)
    layout = Layout(mesh, (place((10, 2), [(0, ("tp",))], mesh, granule=2, policy="pad"),))
    write(FORMAT.target(wanted_of(arrays), layout), arrays, tmp_path)
    (placement,) = json.loads((tmp_path / INDEX).read_text())["placements"]
    assert placement == {"shard": [[0, ["tp"]]], "padded": [0], "granules": [[0, 2]]}
    check_equal(read_by_us(tmp_path)[1], arrays)


def test_fallbacks_are_grouped_by_case(tmp_path: Path) -> None:
    mesh = Mesh.of(dp=2, tp=4)
    keys = [TensorKey("a"), TensorKey("b"), TensorKey("a", "master"), TensorKey("even")]
    arrays = {key: arange((12,)) for key in keys[:3]} | {keys[3]: arange((16,))}
    layout = Layout(mesh, tuple(place(array.shape, [(0, ("dp", "tp"))], mesh) for array in arrays.values()))
    write(FORMAT.target(wanted_of(arrays), layout), arrays, tmp_path)
    assert json.loads((tmp_path / INDEX).read_text())["fallbacks"] == [
        {
            "requested": ["dp", "tp"],
            "used": ["tp"],
            "reason": "fallback",
            "better": [],
            "tensors": {"master": ["a"], "model": ["a", "b"]},
        }
    ]
    check_equal(read_by_us(tmp_path)[1], arrays)


def test_a_rank_without_anything_of_a_state_has_no_file(tmp_path: Path) -> None:
    arrays = {TensorKey("w"): arange((2,)), TensorKey("short"): arange((1, 3))}
    mesh = Mesh.of(pp=2, tp=2)
    layout = Layout(mesh, (Placement(at=(("pp", 1),)), place((1, 3), [(0, ("tp",))], mesh, policy="dtensor")))
    write(FORMAT.target(wanted_of(arrays), layout), arrays, tmp_path)
    held = {path.name: sorted(safetensors.numpy.load_file(path)) for path in tmp_path.glob("*.safetensors")}
    assert held == {
        "model.tp00_pp00.safetensors": ["short"],
        "model.tp00_pp01.safetensors": ["short", "w"],
        "model.tp01_pp01.safetensors": ["w"],
    }


def test_no_tensors_at_all(tmp_path: Path) -> None:
    write(FORMAT.target(wanted_of({}, extras={"iteration": 3}), Layout(Mesh(), ())), {}, tmp_path)
    catalog, values = read_by_us(tmp_path)
    assert values == {} and catalog.extras == {"iteration": 3}


def test_extras_of_every_kind_come_back(tmp_path: Path) -> None:
    extras = {
        "$odd": 1,
        5: "int key",
        "big": 1 << 80,
        "inf": float("inf"),
        "raw": b"\0\xff",
        "t": (1, [2, {"x": None}]),
        "dtype": Symbol("torch.bfloat16"),
        "args": Opaque("argparse.Namespace", (), {"lr": 0.1}),
        "ü\n": "日本",
    }
    write(FORMAT.target(wanted_of({}, extras=extras, hints=Hints({"k": (1, 2)})), Layout(Mesh(), ())), {}, tmp_path)
    catalog = FORMAT.read(Tree(tmp_path))
    assert catalog.extras == extras
    assert catalog.hints.plain["k"] == (1, 2)


# -- what can't be written ----------------------------------------------------------------------------------------


def refused(wanted: Wanted, code: str) -> UsageError:
    with pytest.raises(UsageError) as info:
        FORMAT.target(wanted, Layout(Mesh(), (Placement(),) * len(wanted.tensors)))
    assert info.value.code == code and info.value.exit_code == 2
    return info.value


def test_c128_is_refused_with_every_tensor_named() -> None:
    tensors = tuple(WantedTensor(TensorKey(name, "ema"), (2,), DTYPES["C128"]) for name in ("a", "b"))
    error = refused(Wanted(tensors), "E0258")
    assert error.key == "a [ema]" and "b [ema]" in error.faults[0]


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"], ids=ascii)
def test_a_name_that_safetensors_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as info:
        FORMAT.target(wanted_of({TensorKey(name): arange((1,))}), Layout(Mesh(), (Placement(),)))
    assert info.value.key == name


def test_extras_that_are_no_text_are_refused() -> None:
    refused(wanted_of({}, extras={"name": "\udcff"}), "E0245")


@pytest.mark.parametrize("side", ["ckpt.index.json", "CKPT.index.json", "model.safetensors", "Model.safetensors"])
def test_a_side_file_may_not_bear_one_of_our_names(side: str) -> None:
    refused(wanted_of({TensorKey("w"): arange((1,))}, sidefiles=((side, 3),)), "E0246")


def test_states_that_differ_only_in_case_or_are_endless_are_refused() -> None:
    refused(wanted_of({TensorKey("w", "ema"): arange((1,)), TensorKey("w", "EMA"): arange((1,))}), "E0246")
    refused(wanted_of({TensorKey("w", "x" * 300): arange((1,))}), "E0246")


# -- what a reader refuses ----------------------------------------------------------------------------------------


def fault(folder: Path, kind: type[CkptError], code: str) -> CkptError:
    with pytest.raises(kind) as info:
        FORMAT.read(Tree(folder))
    assert info.value.code == code, info.value
    assert info.value.path is not None and info.value.hint
    return info.value


def test_without_its_index_a_save_is_unfinished(tiny: Path) -> None:
    (tiny / INDEX).unlink()
    evidence = FORMAT.detect(Tree(tiny))
    assert evidence is not None and "missing" in evidence.why
    assert registry.detect(Tree(tiny))[0].name == "sharded", "no other format may take the ranks' files for a model"
    error = fault(tiny, Incomplete, "E0385")
    assert "written last" in error.message and "not finished" in error.message and error.exit_code == 3


def test_missing_rank_files_are_all_named_at_once(tiny: Path) -> None:
    (tiny / "model.tp01_dp00.safetensors").unlink()
    (tiny / "exp_avg.tp00_dp01.safetensors").unlink()
    error = fault(tiny, Incomplete, "E0301")
    assert "2 of 9" in error.message
    assert any("model.tp01_dp00.safetensors" in line and "tp 1 dp 0" in line for line in error.faults)
    assert any("exp_avg.tp00_dp01.safetensors" in line and "tp 0 dp 1" in line for line in error.faults)


def test_every_cut_file_is_named_with_both_sizes(tiny: Path) -> None:
    for name in ("model.tp00_dp00.safetensors", "extras.tp00_dp01.safetensors"):
        os.truncate(tiny / name, 50)
    error = fault(tiny, CorruptFile, "E2605")
    assert "extras.tp00_dp01.safetensors has 50 bytes" in error.message
    assert any("model.tp00_dp00" in line for line in error.faults)


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The file with another header, of the same length if it fits."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    change(header)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(n)
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + n :])


def test_files_of_another_save_are_named(tiny: Path, tmp_path: Path) -> None:
    arrays, wanted, layout = tiny_parts()
    later = Wanted(
        wanted.tensors, {**wanted.extras, "iteration": 8}, wanted.hints, wanted.source_format, wanted.sidefiles
    )
    other = write(FORMAT.target(later, layout), arrays, tmp_path / "other")
    for name in ("model.tp01_dp00.safetensors", "exp_avg.tp01_dp01.safetensors"):
        (tiny / name).write_bytes((other / name).read_bytes())
    error = fault(tiny, InconsistentCheckpoint, "E0384")
    assert error.exit_code == 3 and "exp_avg.tp01_dp01.safetensors" in error.message
    assert any("model.tp01_dp00.safetensors" in line for line in error.faults)


def test_two_ranks_swapped_are_told(tiny: Path) -> None:
    a = tiny / "model.tp00_dp00.safetensors"
    b = tiny / "model.tp01_dp00.safetensors"
    one = a.read_bytes()
    two = b.read_bytes()
    a.write_bytes(two)
    b.write_bytes(one)
    error = fault(tiny, CorruptFile, "E0388")
    assert error.place == "/__metadata__/rank"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda m: m.pop("save"), "E0384"),
        (lambda m: m.update(state="ema"), "E0388"),
        (lambda m: m.update(mesh='{"tp":2}'), "E0388"),
        (lambda m: m.update(mesh='{"tp":2'), "E0320"),
        (lambda m: m.pop("rank"), "E0386"),
        (lambda m: m.pop("boxes"), "E0386"),
        (lambda m: m.update(boxes="[]"), "E0388"),
        (lambda m: m.update(boxes=m["boxes"].replace("[2,0]", "[1,0]")), "E0388"),
        (lambda m: m.update(boxes=m["boxes"].replace('"w"', '"x"')), "E0388"),
    ],
)
def test_a_header_that_the_index_does_not_know_is_refused(tiny: Path, change: Any, code: str) -> None:
    path = tiny / "model.tp01_dp00.safetensors"
    rewrite_header(path, lambda header: change(header["__metadata__"]))
    error = fault(tiny, CkptError, code)
    assert error.path == str(path) and error.exit_code == 3


def edit_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((folder / INDEX).read_text())
    change(document)
    (folder / INDEX).write_text(json.dumps(document))


def seal(folder: Path) -> None:
    """Make the index and the headers agree on the save id again: what is left must be found by other checks."""
    document = json.loads((folder / INDEX).read_text())
    for file in document["files"]:
        if "/" not in file["path"] and (folder / file["path"]).exists():
            with safe_open(folder / file["path"], "np") as f:
                stored = f.metadata()["boxes"]
                rows = [(name, "F32", f.get_slice(name).get_shape()) for name in f.keys()]
            file.update(boxes=boxes_hash(stored, rows), size=(folder / file["path"]).stat().st_size)
    edit_index(folder, lambda d: d.update(files=document["files"]))
    boxes = {file["path"]: file["boxes"] for file in document["files"]}
    save = save_id(Mesh.of(**document["mesh"]), document["extras"], boxes)
    edit_index(folder, lambda d: d.update(save=save))
    for path in folder.glob("*.safetensors"):
        rewrite_header(path, lambda header: header["__metadata__"].update(save=save))


INDEX_FAULTS = [
    (lambda d: d.pop("mesh"), "E0386", "/mesh"),
    (lambda d: d.update(mesh={"tp": 0}), "E0386", "/mesh/tp"),
    (lambda d: d.update(mesh={"xp": 2}), "E0386", "/mesh"),
    (lambda d: d.update(mesh=[]), "E0386", "/mesh"),
    (lambda d: d.update(ckpt_version=True), "E0386", "/ckpt_version"),
    (lambda d: d.update(ckpt_version=2), "E2602", "/ckpt_version"),
    (lambda d: d.update(files={}), "E0386", "/files"),
    (lambda d: d["files"][0].update(size=-1), "E0386", "/files/0/size"),
    (lambda d: d["files"][0].update(size=1e3), "E0386", "/files/0/size"),
    (lambda d: d["files"][0].update(rank={"tp": 2}), "E0386", "/files/0/rank/tp"),
    (lambda d: d["files"][0].update(boxes="zz"), "E0386", "/files/0/boxes"),
    (lambda d: d["files"].append(d["files"][0]), "E0386", "/files/9/path"),
    (lambda d: d["files"][0].update(path="model.tp01_dp01.safetensors"), "E0388", "/save"),
    (lambda d: d["tensors"]["model"]["w"].update(dtype="F33"), "E0386", "/tensors/model/w/dtype"),
    (lambda d: d["tensors"]["model"]["w"].update(shape=[-1]), "E0386", "/tensors/model/w/shape/0"),
    (lambda d: d["tensors"]["model"]["w"].update(shape=[1 << 40, 1 << 40]), "E0386", "/tensors/model/w/shape"),
    (lambda d: d["tensors"]["model"]["w"].update(shape=[1] * 65), "E0386", "/tensors/model/w/shape"),
    (lambda d: d["tensors"]["model"]["w"].update(shape=[6, 4]), "E0388", "/__metadata__/boxes/w"),
    (lambda d: d["tensors"]["model"]["w"].update(digest="0" * 31), "E0386", "/tensors/model/w/digest"),
    (lambda d: d["tensors"]["model"]["w"].update(digest=None), "E0386", "/tensors/model/w/digest"),
    (lambda d: d["tensors"]["model"]["w"].update(placement=99), "E0386", "/tensors/model/w/placement"),
    (lambda d: d["tensors"]["model"]["w"].update(path={}), "E0386", "/tensors/model/w/path"),
    (lambda d: d["tensors"]["model"].pop("w"), "E0388", "/__metadata__/boxes/w"),
    (lambda d: d["tensors"]["model"].update({"a/b": d["tensors"]["model"]["w"]}), "E0388", "/tensors"),
    (lambda d: d["placements"][0].update(shard=[[0]]), "E0386", "/placements/0/shard/0"),
    (lambda d: d["placements"][0].update(shard=[[0, ["zz"]]]), "E0386", "/placements/0/shard/0/1"),
    (lambda d: d["extras"].update(iteration=9), "E0388", "/save"),
    (lambda d: d.update(sidefiles=[5]), "E0386", "/sidefiles/0"),
    (lambda d: d["source"].update(hints={"x": {"$nope": 1}}), "E0314", "/source/hints"),
    (lambda d: d["source"].update(hints=5), "E0386", "/source/hints"),
]


@pytest.mark.parametrize(
    ("change", "code", "place"), INDEX_FAULTS, ids=[f"{i}-{f[2]}" for i, f in enumerate(INDEX_FAULTS)]
)
def test_a_false_claim_of_the_index_is_refused_with_its_place(tiny: Path, change: Any, code: str, place: str) -> None:
    edit_index(tiny, change)
    error = fault(tiny, CkptError, code)
    assert error.place == place and error.exit_code == 3


def test_a_renamed_claim_is_refused_even_when_sealed(tiny: Path) -> None:
    edit_index(tiny, lambda d: d["files"][0].update(path="exp_avg.tp00_dp02.safetensors"))
    seal(tiny)
    assert fault(tiny, CorruptFile, "E0386").place == "/files/0/path"


@pytest.mark.parametrize(
    "box",
    [
        {"offset": [3, 0], "shape": [4, 6]},
        {"offset": [2, 0], "shape": [4, 6], "box": [2, 7]},
        {"offset": [0, 0], "shape": [4, 6], "box": [3, 3]},
        {"offset": [2], "shape": [4, 6]},
        {"offset": [2, 0], "shape": [4, 6], "box": [2]},
    ],
)
def test_a_box_that_leaves_its_tensor_or_array_is_refused_even_when_sealed(tiny: Path, box: dict[str, Any]) -> None:
    path = tiny / "exp_avg.tp01_dp00.safetensors"  # rows 2-3, columns 0-2
    rewrite_header(path, lambda header: header["__metadata__"].update(boxes=json.dumps({"w": box})))
    seal(tiny)
    error = fault(tiny, CorruptFile, "E0388")
    assert (error.path, error.place, error.key) == (str(path), "/__metadata__/boxes/w", "w [exp_avg]")


@pytest.mark.parametrize("path", ["/etc/passwd", "../tiny/model.safetensors", "a/../../x", "x\0y", "file:///x"])
@pytest.mark.parametrize("where", ["files", "sidefiles"])
def test_a_path_that_leaves_the_folder_is_refused_with_exit_4(tiny: Path, path: str, where: str) -> None:
    if where == "files":
        edit_index(tiny, lambda d: d["files"][0].update(path=path))
    else:
        edit_index(tiny, lambda d: d["sidefiles"].append(path))
    seal(tiny)
    error = fault(tiny, UnsafeInput, "E0410")
    assert error.exit_code == 4 and error.path == str(tiny / INDEX)


def test_a_link_in_place_of_a_rank_file_is_refused(tiny: Path) -> None:
    name = "model.tp00_dp00.safetensors"
    (tiny / name).rename(tiny.parent / "elsewhere")
    (tiny / name).symlink_to("../elsewhere")
    assert fault(tiny, UnsafeInput, "E0412").exit_code == 4


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"ckpt_format":"sharded","ckpt_format":"sharded"}', b"\xff", b"{}"]
)
def test_an_index_that_is_no_index_is_exit_3(tiny: Path, text: bytes) -> None:
    (tiny / INDEX).write_bytes(text)
    with pytest.raises(CkptError) as info:
        FORMAT.read(Tree(tiny))
    assert info.value.exit_code == 3 and info.value.path == str(tiny / INDEX)


def test_a_truncated_or_bit_flipped_index_never_crashes(tiny: Path) -> None:
    raw = (tiny / INDEX).read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(0, len(raw), 150):
        flipped = bytearray(raw)
        flipped[at] ^= 1 << rng.integers(0, 7)
        for text in (raw[:at], bytes(flipped)):
            (tiny / INDEX).write_bytes(text)
            try:
                FORMAT.read(Tree(tiny))
            except CkptError as e:
                assert e.exit_code in (3, 4)


def test_other_files_are_ignored_with_a_note(tiny: Path) -> None:
    (tiny / "ema.tp00_dp00.safetensors").write_bytes(b"half")
    (tiny / "config.json").unlink()
    (tiny / "tokenizer.json").write_bytes(b"{}")
    catalog = FORMAT.read(Tree(tiny))
    assert {(note.code, note.path) for note in catalog.notes} == {
        ("W-ignored", str(tiny / "ema.tp00_dp00.safetensors")),
        ("W-side-file-gone", str(tiny / "config.json")),
    }
    assert catalog.sidefiles == ("tokenizer.json",)


def test_other_formats_are_not_claimed(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": arange((3,))}, tmp_path / "model.safetensors")
    assert FORMAT.detect(Tree(tmp_path)) is None
    safetensors.numpy.save_file({"w": arange((3,))}, tmp_path / "model.tp00.safetensors")
    assert FORMAT.detect(Tree(tmp_path)) is None
    (tmp_path / INDEX).write_text("{}")
    assert FORMAT.detect(Tree(tmp_path)) is None
    (tmp_path / INDEX).unlink()
    os.mkfifo(tmp_path / INDEX)
    assert FORMAT.detect(Tree(tmp_path)) is None


def test_a_newer_version_says_so(tiny: Path) -> None:
    edit_index(tiny, lambda d: d.update(ckpt_version=7))
    assert "update" in str(fault(tiny, UnknownFormat, "E2602").hint)
