"""torch_dist checkpoints of Megatron, read: keys, boxes, objects, and what a broken one says.

The judges: the live run's truth (conformance), `torch.distributed.checkpoint.load` of the raw keys, and NumPy for the
flattened form of core 0.6 to 0.15, which no Megatron of today can write.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from targets import FIXTURES, bits, gather, ramp, wanted_of, write

from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.commands.verify import verify
from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.flat_line import FlatLine
from ckpt_tool.core.hints import Degrees, Hints
from ckpt_tool.core.layout import Layout
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.progress import Silent
from ckpt_tool.core.target import LayoutWish
from ckpt_tool.core.tensor import Chunk, StoredArray, TensorKey
from ckpt_tool.errors import CkptError, InconsistentCheckpoint, UsageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.dcp_container.dcp_metadata import DcpTensorEntry
from ckpt_tool.formats.dcp_container.dcp_pieces import DcpPiece
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.args import MegatronFacts
from ckpt_tool.systems.megatron.hints import DistHints
from ckpt_tool.systems.megatron.job import JobRanks, MegatronJob, MegatronRank, transpose_chunk
from ckpt_tool.systems.megatron.stages import from_counts
from ckpt_tool.systems.megatron.torch_dist import folder as megatron_dist_folder
from ckpt_tool.systems.megatron.torch_dist import state as megatron_dist_state
from ckpt_tool.systems.megatron.torch_dist.format import FORMAT
from ckpt_tool.systems.megatron.torch_dist.keys import name_of, parse, parse_object
from ckpt_tool.systems.megatron.torch_dist.read import apart, chunks_of

HALVES = Hints.of(DistHints(("singletons", "halves"), {}, common_file=True, integrity=False))

HOME = FIXTURES / "megatron-dist"


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder whole, under its stored key, by torch alone."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        metadata = dcp.FileSystemReader(folder).read_metadata()
    except ModuleNotFoundError:
        pytest.skip("torch runs this pickle, which names classes of Megatron's")
    flat = {
        name: torch.full(info.size, 7, dtype=info.properties.dtype)
        for name, info in metadata.state_dict_metadata.items()
        if isinstance(info, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(flat, checkpoint_id=folder, no_dist=True)
    return flat


def iteration(case: Path) -> Path:
    return next(case.glob("iter_*"))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A copy of a fixture's iteration, to break."""
    return Path(shutil.copytree(iteration(HOME / "llama_tp2"), tmp_path / "iter_0000001"))


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fqn", "at", "state", "name"),
    [
        ("embedding.word_embeddings.weight", (), "model", "embedding.word_embeddings.weight"),
        (
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
            (2,),
            "model",
            "decoder.layers.2.input_layernorm.weight",
        ),
        ("decoder.layers.7.mlp.linear_fc1.layer_norm_bias", (), "model", "decoder.layers.7.pre_mlp_layernorm.bias"),
        ("decoder.layers.7.pre_mlp_layernorm.weight", (), "model", "decoder.layers.7.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.mlp.experts.experts.linear_fc2.weight",
            (1, 5),
            "model",
            "decoder.layers.1.mlp.experts.local_experts.5.linear_fc2.weight",
        ),
        (
            "decoder.layers.3.mlp.experts.experts.linear_fc1.weight",
            (5,),
            "model",
            "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight",
        ),
        (
            "decoder.layers.3.mlp.experts.experts.6.linear_fc1.weight_v",
            (),
            "model",
            "decoder.layers.3.mlp.experts.local_experts.6.linear_fc1.weight",
        ),
        (
            "optimizer.state.fp32_param.decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight",
            (),
            "master",
            "decoder.layers.0.self_attention.kv_layernorm.weight",
        ),
        ("optimizer.state.param.output_layer.weight", (), "master", "output_layer.weight"),
        (
            "chained_1.optimizer.state.exp_avg_sq.decoder.layers.mlp.experts.experts.linear_fc1.weight",
            (0, 0),
            "exp_avg_sq",
            "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight",
        ),
        (
            "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight",
            (),
            "model",
            "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight",
        ),
        ("module.decoder.final_layernorm.weight", (), "model", "decoder.final_layernorm.weight"),
        (
            "decoder.layers.mlp.shared_experts.linear_fc1.weight",
            (1,),
            "model",
            "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
        ),
    ],
)
def test_a_key_and_a_position_give_the_name(fqn: str, at: tuple[int, ...], state: str, name: str) -> None:
    key = parse(fqn)
    assert (key.state, key.leads, name_of(key, at)) == (state, len(at), name)


def test_keys_of_objects() -> None:
    assert parse_object("rng_state/shard_0.1_2.2") == ("rng_state", (0, 1), (2, 2))
    assert parse_object("rng_state") is None and parse_object("a/shard_0.1_2") is None


# -- the flattened form ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 2),
)
def test_flattened_slices_are_put_where_they_belong(dims: list[tuple[int, int]], ranks: int, leads: int) -> None:
    """Against NumPy: cells of the grid flattened, cut in ranks, each slice an array of its own."""
    grid = tuple(g for g, _ in dims)
    cell = tuple(c for _, c in dims)
    shape = tuple(g * c for g, c in dims)
    numel = int(np.prod(cell))
    leads = min(leads, len(shape))
    want = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    pieces = []
    data = []
    arrays = []
    for index in np.ndindex(*grid):
        flat = want[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, cell, strict=True))].ravel()
        for part in np.array_split(np.arange(numel), ranks):
            if len(part):
                pieces.append(DcpPiece((*index, int(part[0])), (*(1,) * len(grid), len(part)), str(len(data)), 0, 0))
                arrays.append(StoredArray(str(len(data)), 0, DTYPES["I64"], pieces[-1].shape))
                data.append(flat[part])
    entry = DcpTensorEntry("w", ("w",), DTYPES["I64"], (*grid, numel), pieces)
    got = np.full(shape, -1)
    for chunk in chunks_of(entry, arrays, shape):
        for at, inner in apart(chunk, leads):
            start, strides = inner.region()
            for step in np.ndindex(*inner.box.shape):
                place = start + sum(i * s for i, s in zip(step, strides, strict=True))
                spot = (*at, *(o + i for o, i in zip(inner.box.offset, step, strict=True)))
                assert got[spot] == -1
                got[spot] = data[int(inner.array.path)][inner.array.offset // 8 + place]
    np.testing.assert_array_equal(got, want)


def test_rows_of_a_stacked_piece() -> None:
    """A piece of two layers gives two arrays, each where its layer lies."""
    array = StoredArray("f", 100, DTYPES["F32"], (2, 3, 4))
    found = list(apart(Chunk(Box((4, 0, 0), (2, 3, 4)), array, Box((0, 0, 0), (2, 3, 4))), 1))
    assert [at for at, _ in found] == [(4,), (5,)]
    assert [chunk.array.offset for _, chunk in found] == [100, 100 + 3 * 4 * 4]
    assert {chunk.box for _, chunk in found} == {Box((0, 0), (3, 4))}


# -- whole checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", sorted(path.name for path in HOME.glob("*") if path.is_dir()))
def test_layers_are_the_rows_that_torch_loads(case: str) -> None:
    """Every raw key that torch loads, position by position."""
    folder = iteration(HOME / case)
    catalog = FORMAT.read(Tree(folder))
    seen = set()
    parts: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for fqn, whole in loaded(folder).items():
        if ".distributed." in fqn:
            continue
        key = parse(fqn)
        for at in np.ndindex(*whole.shape[: key.leads]):
            name = (name_of(key, at), key.state)
            seen.add(name)
            parts.setdefault(name, dict.fromkeys(key.parts or ("",)))[key.part] = whole[at]  # type: ignore[index, arg-type]
    for name, found in parts.items():
        tensor = torch.cat(tuple(found.values())) if len(found) > 1 else found[""]
        np.testing.assert_array_equal(gather(Tree(folder), catalog.tensors[name]), bits(tensor), err_msg=str(name))  # type: ignore[index]
    assert {tuple(key) for key in catalog.tensors if key.state != "step"} >= seen and seen


def test_degrees_and_extras_come_from_the_common_state() -> None:
    catalog = FORMAT.read(Tree(HOME / "llama_tp2"))
    assert catalog.hints.get(Degrees) == Degrees(tp=2, pp=1, vpp=1, ep=1, etp=2, dp=1, cp=1)
    assert catalog.extras["iteration"] == 1 and catalog.extras["args"].name == "argparse.Namespace"
    assert not catalog.unsafe


def test_dcp_leaves_it_alone_and_a_bare_dcp_is_not_ours() -> None:
    assert registry.detect(Tree(HOME / "moe_ep2_flat"))[0].name == "megatron-dist"
    assert registry.detect(Tree(FIXTURES / "dcp" / "fsdp2_dp4"))[0].name == "dcp"


# -- broken ones -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code", "word"),
    [
        ("metadata.json", "E0385", "metadata.json"),
        (".metadata", "E0385", ".metadata"),
        ("common.pt", "E0301", "common.pt"),
        ("__1_0.distcp", "E0301", "__1_0.distcp"),
    ],
)
def test_a_lost_file_is_named(llama: Path, name: str, code: str, word: str) -> None:
    (llama / name).unlink()
    with pytest.raises(CkptError) as e:
        FORMAT.read(Tree(llama))
    assert e.value.code == code and word in e.value.message and e.value.exit_code == 3


def test_zarr_is_refused_by_name(llama: Path) -> None:
    (llama / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(CkptError, match="zarr") as e:
        FORMAT.read(Tree(llama))
    assert e.value.code == "E0303"


def manifest(folder: Path) -> dict[str, Any]:
    """As core 0.19 writes it: every file directly in the folder but itself."""
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}
    return {"algorithm": "sha256", "files": files}


def test_integrity_that_holds(llama: Path) -> None:
    (llama / "integrity.json").write_text(json.dumps(manifest(llama), indent=2))
    assert FORMAT.read(Tree(llama)).tensors


@pytest.mark.parametrize("how", ["changed", "missing", "traversal", "form", "algorithm"])
def test_integrity_that_does_not(llama: Path, how: str) -> None:
    said = manifest(llama)
    if how == "changed":
        said["files"]["common.pt"] = "0" * 64
    elif how == "missing":
        said["files"]["__9_0.distcp"] = "0" * 64
    elif how == "traversal":
        said["files"]["../common.pt"] = "0" * 64
    elif how == "form":
        said["files"]["common.pt"] = 7
    else:
        said["algorithm"] = "md5"
    (llama / "integrity.json").write_text(json.dumps(said))
    with pytest.raises(CkptError) as e:
        FORMAT.read(Tree(llama))
    assert (e.value.exit_code, e.value.code) == (
        (4, "E0410") if how == "traversal" else (3, "E0301" if how == "missing" else "E2005")
    )


# -- flat buckets: the rule against NumPy ------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(0, 3), st.booleans(), st.data())
def test_a_grouped_line_is_transposed_back(
    h: int, f: int, cut: int, rank: int, gated: bool, data: st.DataObject
) -> None:
    """GroupedMLP's weight1: (h, [gate; up]) of one expert in a line, cut at any elements."""
    ranks = rank + 1
    rows = f * (2 if gated else 1)
    want = np.arange(ranks * rows * h).reshape(ranks * rows, h)
    parts = (
        [want[r * f : (r + 1) * f] for r in range(ranks)]
        if not gated
        else [
            np.concatenate((want[r * f : (r + 1) * f], want[(ranks + r) * f : (ranks + r + 1) * f]))
            for r in range(ranks)
        ]
    )
    line = parts[rank].T.ravel()
    degrees = {"tp": ranks, "pp": 1, "vpp": 1, "ep": 1, "etp": ranks, "dp": 1, "cp": 1}
    job = MegatronJob(MegatronFacts(), degrees, from_counts([1], 1), 1, gated, False, container=names.GROUPED)
    expert = "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"
    (array,) = JobRanks(job, {expert: (want.shape, DTYPES["F32"])}).arrays(MegatronRank("", rank, 0, 0, rank))
    assert (array.local, array.shape) == ("decoder.layers.0.mlp.experts.weight1", (h, rows))
    flat = FlatLine(tuple(array.places(0)))
    cuts = sorted({0, line.size, *data.draw(st.lists(st.integers(0, line.size), max_size=cut))})
    got = np.full(want.shape, -1)
    for start, stop in zip(cuts, cuts[1:], strict=False):
        stored = StoredArray("f", 1000 + 4 * start, DTYPES["F32"], (stop - start,))
        for chunk in (transpose_chunk(chunk) for _, chunk in flat.chunks(stored, start)):
            base, strides = chunk.region()
            for step in np.ndindex(*chunk.box.shape):
                at = base + sum(i * s for i, s in zip(step, strides, strict=True))
                spot = tuple(o + i for o, i in zip(chunk.box.offset, step, strict=True))
                assert got[spot] == -1
                got[spot] = line[(chunk.array.offset - 1000) // 4 + at]
    held = np.isin(want, parts[rank])
    np.testing.assert_array_equal(got[held], want[held])
    assert (got[~held] == -1).all()


def test_a_large_file_is_hashed_by_verify(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_dist_folder, "HASHED", 1000)
    said = manifest(llama)
    said["files"]["__0_0.distcp"] = "0" * 64
    (llama / "integrity.json").write_text(json.dumps(said))
    catalog = FORMAT.read(Tree(llama))
    assert any("verify" in note.message for note in catalog.notes)
    report = verify(str(llama), Reading(), progress=Silent())
    assert [line["code"] for line in report["findings"]] == ["E2005"]


# -- written -----------------------------------------------------------------------------------------------------------


def reshaped(source: Path, target: Path, **degrees: int) -> Path:
    """`source` for other degrees; the iteration's folder."""
    reshard(str(source), str(target), Reading(), Writing(degrees=degrees), Silent())
    return iteration(target)


def test_integrity_is_written_as_megatron_does(llama: Path, tmp_path: Path) -> None:
    (llama / "integrity.json").write_text(json.dumps(manifest(llama), indent=2))
    out = reshaped(llama, tmp_path / "out", tp=1)
    said = json.loads((out / "integrity.json").read_text())
    (out / "integrity.json").unlink()
    assert said == manifest(out)


@pytest.mark.parametrize("degrees", [{"tp": 1}, {"pp": 3}, {"tp": 2, "pp": 3, "dp": 3}])
def test_torch_loads_the_same_tensors_under_the_same_keys(degrees: dict[str, int], tmp_path: Path) -> None:
    before = loaded(iteration(HOME / "llama_tp2"))
    out = reshaped(HOME / "llama_tp2", tmp_path / "out", **degrees)
    after = loaded(out)
    assert set(after) == set(before)
    for fqn, want in before.items():
        np.testing.assert_array_equal(bits(after[fqn]), bits(want), err_msg=fqn)
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert json.loads((out / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_gate_and_up_are_boxes_of_their_own(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    out = reshaped(HOME / "llama_tp2", tmp_path / "out", tp=2, pp=3)
    entry = dcp.FileSystemReader(out).read_metadata().state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"]
    rows = entry.size[1] // 4
    assert {tuple(c.sizes)[1] for c in entry.chunks} == {rows}
    assert {tuple(c.offsets)[1] for c in entry.chunks} == {i * rows for i in range(4)}


def test_the_arguments_say_the_new_degrees(tmp_path: Path) -> None:
    out = reshaped(HOME / "moe_ep2_flat", tmp_path / "out", tp=2, pp=2, ep=2, dp=2)
    catalog = FORMAT.read(Tree(out))
    args = catalog.extras["args"].state
    assert [args[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "expert_model", "data")] == [
        2
    ] * 4
    assert replace(catalog.hints.get(Degrees), etp=2) == Degrees(tp=2, pp=2, vpp=1, ep=2, etp=2, dp=2, cp=1)


@pytest.mark.parametrize(
    ("degrees", "code", "hint"),
    [
        ({"tp": 3}, "E0273", "2"),
        ({"pp": 5}, "E0272", "1, 2"),
        ({"ep": 3, "dp": 3}, "E0237", "2"),
    ],
)
def test_a_degree_that_the_model_can_not_take(degrees: dict[str, int], code: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as e:
        reshaped(HOME / "moe_ep2_flat", tmp_path / "out", **degrees)
    assert (e.value.code, e.value.exit_code) == (code, 2) and hint in (e.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        reshaped(HOME / "moe_ep2_flat", tmp_path / name, ep=2, dp=2)
    files = [sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*") if p.is_file()) for n in ("a", "b")]
    assert files[0] == files[1]
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files[0])


# -- edited metadata ---------------------------------------------------------------------------------------------------


def edited(folder: Path, change: Any) -> CkptError:
    """What reading says after `change(metadata)`."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CkptError) as e:
        FORMAT.read(Tree(folder))
    return e.value


FC2 = "decoder.layers.mlp.linear_fc2.weight"


def test_a_missing_shard_is_named(llama: Path) -> None:
    def drop(metadata: Any) -> None:
        gone = metadata.state_dict_metadata[FC2].chunks.pop(3)
        metadata.storage_data = {
            k: v for k, v in metadata.storage_data.items() if (k.fqn, k.offset) != (FC2, gone.offsets)
        }

    fault = edited(llama, drop)
    assert fault.code == "E0309" and fault.exit_code == 3
    assert re.fullmatch(r"decoder\.layers\.\d\.mlp\.linear_fc2\.weight", fault.key or "")


def test_a_box_without_bytes_is_named(llama: Path) -> None:
    def drop(metadata: Any) -> None:
        metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != FC2}

    fault = edited(llama, drop)
    assert fault.code == "E0309" and FC2 in fault.message


def test_overlapping_shards_are_named(llama: Path) -> None:
    def overlap(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata[FC2].chunks
        first, second = (c for c in chunks if c.offsets[0] == 0)
        for index in list(metadata.storage_data):
            if index.fqn == FC2 and index.offset == second.offsets:
                info = metadata.storage_data.pop(index)
                moved = torch.Size((*second.offsets[:2], second.offsets[2] - 1))
                metadata.storage_data[type(index)(FC2, moved)] = info
                second.offsets = moved

    fault = edited(llama, overlap)
    assert fault.code == "E0308" and fault.key == "decoder.layers.0.mlp.linear_fc2.weight"


def test_steps_that_differ_between_groups_are_told(llama: Path) -> None:
    groups = {-1: {n: {"optimizer": {"param_groups": [{"step": 2 + n}]}} for n in range(2)}}
    with pytest.raises(InconsistentCheckpoint) as e:
        megatron_dist_state._hyperparameters(Tree(llama), groups, megatron_dist_state.Objects())
    assert e.value.code == "E0379" and "[3] in dp group 1" in e.value.message


def test_flat_buckets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Arguments that tell another order: the chunks don't agree, and nothing is guessed."""
    folder = Path(shutil.copytree(iteration(HOME / "tied_pp2_flat"), tmp_path / "iter_0000002"))
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata.pop("decoder.final_layernorm.weight")
    path.write_bytes(pickle.dumps(metadata))
    unread = FORMAT.read(Tree(folder)).unread
    fault = unread[0].fault
    assert fault is not None and fault.code == "E2004" and fault.exit_code == 3
    assert "fully-reshardable" in (fault.hint or "") and {row.key.state for row in unread} >= {"master", "exp_avg"}
    with pytest.raises(InconsistentCheckpoint, match="do not fill"):
        convert(str(folder), str(tmp_path / "out"), Reading(), Writing(to="dcp"), Silent())


# -- the optimizers' hyperparameters between degrees -------------------------------------------------------------------


@pytest.mark.parametrize(("degrees", "count"), [({"ep": 2, "dp": 2}, 2), ({"ep": 1, "dp": 2}, 1)])
def test_experts_have_an_optimizer_of_their_own_where_they_are_parallel(
    degrees: dict[str, int], count: int, tmp_path: Path
) -> None:
    reshaped(HOME / "moe_ep2_flat", tmp_path / "one", ep=1, dp=1)
    out = reshaped(tmp_path / "one", tmp_path / "two", **degrees)
    said = FORMAT.read(Tree(out)).extras["optimizer"]
    several = [said[n] for n in sorted(said)] if 0 in said else [said]
    assert len(several) == count
    for number, one in enumerate(several):
        assert one["param_state_sharding_type"] == "fully_reshardable"
        assert {group["is_expert_parallel"] for group in one["optimizer"]["param_groups"]} == {number == 1}
        assert {group["step"] for group in one["optimizer"]["param_groups"]} == {2.0}


def test_singleton_shards_there_and_back(tmp_path: Path) -> None:
    """Gate and up of a dense and an expert's fc1 under keys of their own (`_w`, `_v`), one key an expert."""
    tensors = {
        TensorKey(f"decoder.layers.{i}.mlp.{name}.weight", state): ramp((8, 3), start=1000 * i + 100 * n + 10000 * s)
        for i in range(2)
        for n, name in enumerate(
            ("linear_fc1", "experts.local_experts.0.linear_fc1", "experts.local_experts.1.linear_fc1")
        )
        for s, state in enumerate(("model", "exp_avg"))
    }
    wanted = wanted_of(
        tensors,
        extras={"iteration": 3},
        hints=HALVES,
        source_format="megatron-dist",
        wish=LayoutWish(Degrees(tp=2, ep=2, dp=2)),
    )
    write(FORMAT.target(wanted, Layout(Mesh(), ())), tmp_path, [bits(tensor) for tensor in tensors.values()])
    raw = loaded(iteration(tmp_path))
    for (name, state), want in tensors.items():
        key = name.replace("experts.local_experts", "experts.experts")
        key = key if state == "model" else f"optimizer.state.{state}.{key}"
        for half, suffix in enumerate("wv"):
            np.testing.assert_array_equal(bits(raw[f"{key}_{suffix}"]), bits(want[4 * half : 4 * half + 4]))
    catalog = FORMAT.read(Tree(tmp_path))
    for tensor_key, want in tensors.items():
        np.testing.assert_array_equal(gather(Tree(tmp_path), catalog.tensors[tensor_key]), bits(want))
    assert set(catalog.tensors) == set(tensors)


def test_half_of_a_singleton_is_incomplete(tmp_path: Path) -> None:
    tensors = {TensorKey("decoder.layers.0.mlp.linear_fc1.weight"): ramp((8, 3))}
    wanted = wanted_of(tensors, hints=HALVES, source_format="megatron-dist")
    write(FORMAT.target(wanted, Layout(Mesh(), ())), tmp_path, [bits(tensor) for tensor in tensors.values()])

    def drop(metadata: Any) -> None:
        metadata.state_dict_metadata.pop("decoder.layers.0.mlp.linear_fc1.weight_v")

    fault = edited(tmp_path / "release", drop)
    assert fault.code == "E0309" and "up (_v)" in fault.message


def test_a_tensor_rank_holds_its_rows_of_both_halves() -> None:
    """The model's boxes gate 0, gate 1, up 0, up 1 (in any order): rank 1 of 2 had gate 1 and up 1, one behind the
    other."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    boxes = sorted((Box((row, 0), (2, 3)) for row in (4, 2, 0, 6)), key=lambda box: box.offset)
    degrees = {"tp": 2, "pp": 1, "vpp": 1, "ep": 1, "etp": 2, "dp": 1, "cp": 1}
    job = MegatronJob(MegatronFacts(), degrees, from_counts([1], 1), 0, False, False, boxes={name: boxes})
    ranks = JobRanks(job, {name: ((8, 3), DTYPES["F32"])})
    for rank in range(2):
        (array,) = ranks.arrays(MegatronRank("", rank, 0, 0, rank))
        assert array.shape == (4, 3)
        assert [(box.offset, start) for _, box, start, _ in array.parts()] == [
            ((2 * rank, 0), 0),
            ((4 + 2 * rank, 0), 6),
        ]


def test_a_folder_of_another_iteration_is_told(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(iteration(HOME / "llama_tp2"), tmp_path / "iter_0000007"))
    notes = [note.message for note in FORMAT.read(Tree(folder)).notes]
    assert any("iteration 1" in note and "iter_0000007" in note for note in notes)
    assert not [n for n in FORMAT.read(Tree(HOME / "llama_tp2")).notes if n.code == "N-iteration"]
