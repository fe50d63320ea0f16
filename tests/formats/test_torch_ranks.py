"""Per-rank DTensor files: laid over each other as torch itself would put them together, or refused naming the rank.

The fixtures' values are compared with their truth in `test_torch_file.py` and `test_conformance.py`; here the oracle of
the boxes is torch's own chunking of an `arange`, tensor parallel ranks first.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from targets import FIXTURES
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.hints import Degrees
from ckpt_tool.core.progress import Silent
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError, InputError
from ckpt_tool.formats.state_dict.dtensor_spec import (
    DTensorCut,
    DTensorPlacement,
    RankMesh,
    boxes,
    read_mesh,
    read_placed,
)
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source
from ckpt_tool.storage.pickles.pickle_values import PickledRecord, StorageRef, TensorRef

RANKS = FIXTURES / "torch" / "ranks_fsdp2_dp4"
TENSOR = "torch.distributed.tensor."


# -- geometry ----------------------------------------------------------------------------------------------------------


def row_major(*shape: int) -> RankMesh:
    return RankMesh(shape, tuple(range(int(np.prod(shape)))))


def filled(shape: tuple[int, ...], placed: DTensorPlacement, parts: dict[tuple[int, ...], np.ndarray]) -> np.ndarray:
    """The whole tensor from every rank's part, -1 where none has put anything."""
    out = np.full(shape, -1)
    for at, part in parts.items():
        local, found = boxes(shape, placed, at)
        assert local == part.shape, at
        for box, within in found:
            where, taken = (
                tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape, strict=True)) for b in (box, within)
            )
            out[where] = part[taken]
    return out


def chunk(value: torch.Tensor, parts: int, index: int, dim: int = 0) -> torch.Tensor:
    pieces = value.chunk(parts, dim)
    return pieces[index] if index < len(pieces) else value.narrow(dim, 0, 0)


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5))
def test_a_line_over_n_ranks_is_cut_as_torch_chunks_it(rows: int, ranks: int, columns: int) -> None:
    value = torch.arange(rows * columns).reshape(rows, columns)
    placed = DTensorPlacement(row_major(ranks), (DTensorCut(0),), (0,))
    parts = {(i,): chunk(value, ranks, i).numpy() for i in range(ranks)}
    assert np.array_equal(filled((rows, columns), placed, parts), value.numpy())


@given(st.integers(0, 50), st.integers(1, 5), st.integers(1, 5))
def test_a_strided_shard_is_cut_by_tensor_parallel_ranks_first(rows: int, dp: int, tp: int) -> None:
    """FSDP2 over tensor parallel ranks: each cuts its own slice, and the placements say so with a split factor."""
    value = torch.arange(rows * 3).reshape(rows, 3)
    strided = PickledRecord(TENSOR + "_StridedShard", state={"dim": 0, "split_factor": tp})
    spec = PickledRecord(
        "DTensorSpec", state={"placements": (strided, PickledRecord(TENSOR + "Shard", state={"dim": 0}))}
    )
    placed = read_placed(spec, row_major(dp, tp), 2)
    assert placed.order == ((1, 0) if tp > 1 else (0, 1))
    if tp > 1:
        parts = {(d, t): chunk(chunk(value, tp, t), dp, d).numpy() for d in range(dp) for t in range(tp)}
        assert np.array_equal(filled((rows, 3), placed, parts), value.numpy())


@given(st.integers(1, 40), st.integers(2, 4), st.integers(2, 5))
def test_a_split_factor_that_no_mesh_dim_explains_is_carried_out_as_it_stands(
    rows: int, ranks: int, factor: int
) -> None:
    value = torch.arange(rows)
    placed = DTensorPlacement(row_major(ranks), (DTensorCut(0, factor),), ())
    pieces = [chunk(value, factor, i) for i in range(factor)]
    parts = {(r,): torch.cat([chunk(piece, ranks, r) for piece in pieces]).numpy() for r in range(ranks)}
    assert np.array_equal(filled((rows,), placed, parts), value.numpy())


def test_two_dims_cut_two_ways_and_a_stated_order_is_taken() -> None:
    value = torch.arange(70).reshape(7, 10)
    placed = DTensorPlacement(row_major(2, 3), (DTensorCut(0), DTensorCut(1)), (0, 1))
    parts = {(i, j): chunk(chunk(value, 2, i), 3, j, 1).numpy() for i in range(2) for j in range(3)}
    assert np.array_equal(filled((7, 10), placed, parts), value.numpy())
    entry = PickledRecord("ShardOrderEntry", state={"tensor_dim": 0, "mesh_dims": (1, 0)})
    shards = tuple(PickledRecord(TENSOR + "Shard", state={"dim": 0}) for _ in range(2))
    spec = PickledRecord("DTensorSpec", state={"placements": shards, "shard_order": (entry,)})
    assert read_placed(spec, row_major(2, 3), 2).order == (1, 0)


def tensor_ref(shape: tuple[int, ...]) -> TensorRef:
    count = int(np.prod(shape))
    return TensorRef(
        StorageRef("0", DTYPES["I64"], count, 8 * count, "cpu", "LongStorage"), 0, shape, (1,), DTYPES["I64"]
    )


def test_split_factors_tell_the_order_of_three_mesh_dims() -> None:
    """torch's own example (`DTensorSpec._maybe_convert_StridedShard_to_shard_order`): mesh 4 x 3 x 2, the last cut
    first."""
    factors = (2, 2, 1)
    placements = tuple(
        PickledRecord(
            TENSOR + ("_StridedShard" if f > 1 else "Shard"),
            state={"dim": 0, "split_factor": f} if f > 1 else {"dim": 0},
        )
        for f in factors
    )
    placed = read_placed(PickledRecord("DTensorSpec", state={"placements": placements}), row_major(4, 3, 2), 1)
    assert placed.order == (2, 0, 1)
    value = torch.arange(53)
    parts = {
        (i, j, k): chunk(chunk(chunk(value, 2, k), 4, i), 3, j).numpy()
        for i in range(4)
        for j in range(3)
        for k in range(2)
    }
    assert np.array_equal(filled((53,), placed, parts), value.numpy())


def test_meshes_of_older_versions_and_slices() -> None:
    """`mesh` as a tensor (torch < 2.9); a layout of shape and stride; a slice of a larger mesh, one for each tp
    rank."""
    old = PickledRecord("DeviceMesh", state={"mesh": tensor_ref((2, 2)), "mesh_dim_names": ("dp", "tp")})
    assert read_mesh(old, lambda ref: [0, 2, 1, 3], 0) == RankMesh((2, 2), (0, 2, 1, 3), ("dp", "tp"))
    layout = PickledRecord("_MeshLayout", state={"shape": (2, 2), "stride": (2, 1)})
    flat = PickledRecord(
        "DeviceMesh", state={"_layout": layout, "_flatten_rank_map": (0, 1, 2, 3), "_mesh_dim_names": None}
    )
    assert read_mesh(flat, lambda ref: [], None) == RankMesh((2, 2), (0, 1, 2, 3))
    axis = PickledRecord("_FlatLayout", state={"shape": (2,), "stride": (2,)})
    layout = PickledRecord("_MeshLayout", state={"axes": (axis,)})
    part = PickledRecord(
        "DeviceMesh", state={"_layout": layout, "_flatten_rank_map": (4, 5, 6, 7), "_mesh_dim_names": ("dp",)}
    )
    assert read_mesh(part, lambda ref: [], 5).ranks == (5, 7)
    assert read_mesh(part, lambda ref: [], 6).coordinates(6) == (1,)
    with pytest.raises(InputError, match="rank 9"):
        read_mesh(part, lambda ref: [], 9)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {
            "_layout": PickledRecord("L", state={"shape": (1 << 19, 1 << 19), "stride": (1, 1)}),
            "_flatten_rank_map": (0,),
        },
        {"_layout": PickledRecord("L", state={"shape": (2,), "stride": (5,)}), "_flatten_rank_map": (0, 1)},
        {"_layout": PickledRecord("L", state={"shape": ("x",), "stride": (5,)}), "_flatten_rank_map": (0, 1)},
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(InputError) as raised:
        read_mesh(PickledRecord("DeviceMesh", state=state), lambda ref: [], 0)
    assert raised.value.code == "E0399"


def test_split_factors_that_would_make_millions_of_boxes_are_refused() -> None:
    placed = DTensorPlacement(row_major(2, 2, 2), (DTensorCut(0, 1 << 14), DTensorCut(1, 1 << 14), None), ())
    with pytest.raises(InputError, match="pieces"):
        boxes((1 << 30, 1 << 30), placed, (0, 0, 0))


# -- files -------------------------------------------------------------------------------------------------------------


def test_what_is_in_the_folder() -> None:
    catalog = open_source(str(RANKS), Reading()).catalog
    catalog.check()
    assert catalog.mesh.to_json() == {"dp": 4} and catalog.hints.get(Degrees) == Degrees(dp=4)
    tensor = catalog.tensors[TensorKey("layers.0.w1.weight", "exp_avg")]
    assert tensor.shape == (5, 10) and [c.box.shape[0] for c in tensor.chunks] == [2, 2, 1]  # rank 3 has none
    assert catalog.extras["extra_state"]["lr_scheduler"]["last_epoch"] == 0
    assert set(catalog.extras["extra_state"]["rng"]) == {f"rank_{r}" for r in range(4)}
    truth = json.loads(RANKS.with_name(RANKS.name + ".truth.json").read_text())["extras"]
    assert catalog.extras["optim"]["param_groups"][0]["params"] == truth["optim"]["param_groups"][0]["params"]
    assert any("rank's own" in note.message for note in catalog.notes)
    both = open_source(str(FIXTURES / "torch" / "ranks_tp2_dp2"), Reading()).catalog
    assert both.mesh.to_json() == {"tp": 2, "dp": 2}


@pytest.mark.share(3)
@pytest.mark.parametrize("case", ["ranks_fsdp2_dp4", "ranks_tp2_dp2", "ranks_hsdp_2x2"])
@pytest.mark.parametrize("degrees", [{"dp": 3}, {"tp": 2}, {"tp": 2, "dp": 2}, {"tp": 5, "dp": 2}])
def test_other_layouts_and_back_hold_the_same_bits(case: str, degrees: dict[str, int], tmp_path: Path) -> None:
    source = str(FIXTURES / "torch" / case)
    convert(source, str(tmp_path / "a"), Reading(), Writing(to="dcp", degrees=degrees), Silent())
    convert(str(tmp_path / "a"), str(tmp_path / "b"), Reading(), Writing(to="sharded", degrees=degrees), Silent())
    reshard(str(tmp_path / "b"), str(tmp_path / "c"), Reading(), Writing(degrees={"dp": 4, "tp": 1}), Silent())
    for name in "abc":
        found = diff(source, str(tmp_path / name), Reading(), progress=Silent())
        assert found["equal"] and found["compared"] > 20, (name, found["differences"][:3])


def test_reshard_writes_one_file_and_says_what_it_left(tmp_path: Path) -> None:
    reshard(str(RANKS), str(tmp_path / "out"), Reading(), Writing(), Silent())
    state = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert set(state) == {"model", "optim", "extra_state"}
    assert state["optim"]["state"][0]["exp_avg"].shape == (33, 10)


def edited(folder: Path, **changes: Any) -> Path:
    """A copy of the fixture with files' content changed: name (dots as __) -> a function of the loaded state."""
    shutil.copytree(RANKS, folder)
    for name, change in changes.items():
        path = folder / f"{name}.pt"
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)
    return folder


def refusal(folder: Path) -> CkptError:
    with pytest.raises(CkptError) as raised:
        open_source(str(folder), Reading()).catalog.check()
    assert raised.value.exit_code == 3 and raised.value.hint
    return raised.value


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    folder = edited(tmp_path / "a")
    (folder / "model_world_size_4_rank_1.pt").unlink()
    (folder / "optim_world_size_4_rank_3.pt").unlink()
    error = refusal(folder)
    assert error.code == "E0380" and "model" in error.message and "rank 1" in error.message
    assert any("optim" in fault and "rank 3" in fault for fault in error.faults)
    assert "rank 0, 1, 2" in refusal(RANKS / "model_world_size_4_rank_3.pt").message  # one file of four


def test_files_of_two_jobs_are_told_apart(tmp_path: Path) -> None:
    folder = edited(tmp_path / "a")
    shutil.copy(folder / "model_world_size_4_rank_0.pt", folder / "model_world_size_2_rank_0.pt")
    error = refusal(folder)
    assert (
        error.code == "E0384" and "2 and 4 ranks" in error.message and "model_world_size_2_rank_0.pt" in error.message
    )


def test_a_renamed_file_is_noticed(tmp_path: Path) -> None:
    folder = edited(tmp_path / "a")
    one = folder / "model_world_size_4_rank_0.pt"
    two = folder / "model_world_size_4_rank_1.pt"
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    error = refusal(folder)
    assert error.code == "E0354" and "rank 0" in error.message and "rank 1" in error.message


def test_ranks_that_disagree_are_named(tmp_path: Path) -> None:
    def scheduler(state: Any) -> None:
        state["lr_scheduler"]["last_epoch"] = 9

    def group(state: Any) -> None:
        state["param_groups"][1]["lr"] = 7.0

    def shape(state: Any) -> None:
        state["scale"] = torch.zeros(4)

    def lacks(state: Any) -> None:
        del state["embed.weight"]

    error = refusal(edited(tmp_path / "a", extra_state_world_size_4_rank_2=scheduler))
    assert (
        error.code == "E0354" and "rank 2" in error.message and "extra_state.lr_scheduler.last_epoch" in error.message
    )
    error = refusal(edited(tmp_path / "b", optim_world_size_4_rank_3=group))
    assert "rank 3" in error.message and "optim.param_groups.1.lr" in error.message
    error = refusal(edited(tmp_path / "c", model_world_size_4_rank_1=shape))
    assert "global shape" in error.message and "rank 1" in error.message and error.key == "model.scale"
    error = refusal(edited(tmp_path / "d", model_world_size_4_rank_3=lacks))
    assert error.code == "E0380" and "rank 3" in error.message and error.key == "model.embed.weight"


def test_a_step_that_differs_is_a_replica_that_differs(tmp_path: Path) -> None:
    def later(state: Any) -> None:
        state["state"][0]["step"] += 1

    folder = edited(tmp_path / "a", optim_world_size_4_rank_2=later)
    with pytest.raises(CkptError) as raised:
        convert(str(folder), str(tmp_path / "out"), Reading(), Writing(to="sharded"), Silent())
    assert raised.value.exit_code == 3 and "step" in str(raised.value.key) and not (tmp_path / "out").exists()


def test_flat_optimizer_states_are_refused(tmp_path: Path) -> None:
    def flat(state: Any) -> None:
        state["state"] = {0: {"exp_avg": torch.zeros(11), "exp_avg_sq": torch.zeros(11)}}

    names = {f"optim_world_size_4_rank_{r}": flat for r in range(4)}
    error = refusal(edited(tmp_path / "a", **names))
    assert error.code == "E0399" and "flat" in error.message


# -- what one process can make -----------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Any:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["model_world_size_1_rank_0.pt", "model_rank_0.pt", "saved.pt"])
def test_a_job_of_one_rank_is_read_whole(one_rank: Any, name: str, tmp_path: Path) -> None:
    torch.save({"w": distribute_tensor(torch.arange(8.0).reshape(4, 2), one_rank, [Shard(0)])}, tmp_path / name)
    for path in (tmp_path / name, tmp_path):
        opened = open_source(str(path), Reading())
        assert np.array_equal(OpenCatalog(opened.tree, opened.catalog)["w"].numpy(), np.arange(8.0).reshape(4, 2))


def test_a_mesh_that_knows_its_flattened_slice_is_read(tmp_path: Path) -> None:
    """Mesh and slice name each other: a pickle that holds itself, unless those fields are left out."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        flat = mesh["a", "b"]._flatten("ab")
        state = {"w": distribute_tensor(torch.arange(6.0), flat, [Shard(0)])}
        torch.save(state, tmp_path / "model_world_size_1_rank_0.pt")
    finally:
        torch.distributed.destroy_process_group()
    opened = open_source(str(tmp_path), Reading())
    assert np.array_equal(OpenCatalog(opened.tree, opened.catalog)["w"].numpy(), np.arange(6.0))


def test_partial_sums_are_refused_by_name(one_rank: Any, tmp_path: Path) -> None:
    torch.save(
        {"w": DTensor.from_local(torch.ones(4), one_rank, [Partial()])}, tmp_path / "model_world_size_1_rank_0.pt"
    )
    error = refusal(tmp_path)
    assert error.code == "E0399" and "Partial" in error.message and error.key == "w"
