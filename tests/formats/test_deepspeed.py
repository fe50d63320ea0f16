"""DeepSpeed both ways: what we write is compared with DeepSpeed's own files through torch.load, key by key, and with
flat lines made by torch of the live run's truth; broken saves are refused by name.

DeepSpeed's classes are stood in for by empty ones (`fixtures/make/deepspeed_truth.py`), so no test needs DeepSpeed;
that its engine resumes is in tests/acceptance.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from targets import FIXTURES

from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.hints import Degrees
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, InputError, UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.opening import open_source

HERE = FIXTURES / "deepspeed"
CASES = sorted(path.name for path in HERE.iterdir() if path.is_dir())
STATES = {"single_partition_of_fp32_groups": "master"}


@pytest.fixture(scope="module", autouse=True)
def _stand_ins() -> Iterator[None]:
    spec = importlib.util.spec_from_file_location("deepspeed_truth", FIXTURES / "make" / "deepspeed_truth.py")
    assert spec and spec.loader
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    before = set(sys.modules)
    if importlib.util.find_spec("deepspeed") is None:
        maker.stand_in()
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "deepspeed":  # or other tests would take it for the real one
            del sys.modules[name]


def load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def write(case: Path, out: Path, *, zero: int | None = None, to: str | None = None, **degrees: int) -> dict[str, Any]:
    """Reshard (or convert) and return the report."""
    writing = Writing(to=to, zero=zero, degrees=degrees, verify="full")
    return (convert if to else reshard)(str(case), str(out), Reading(), writing, Silent())


def tag(out: Path) -> Path:
    return out / (out / "latest").read_text()


def equal(a: Path, b: Path) -> bool:
    return bool(diff(str(a), str(b), Reading(), progress=Silent())["equal"])


# -- what DeepSpeed itself wrote ---------------------------------------------------------------------------------------


def differences(a: Any, b: Any, at: str, *, values: bool) -> list[str]:
    """Where two loaded files differ: types, keys and their order, shapes, dtypes, gradients, and `values`."""
    if torch.is_tensor(a) and torch.is_tensor(b):
        head = (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        return [] if head and (not values or torch.equal(a, b)) else [at]
    if type(a) is not type(b):
        return [f"{at}: {type(a)} {type(b)}"]
    if isinstance(a, dict):
        found = [] if list(a) == list(b) else [f"{at}: {list(a)} {list(b)}"]
        return found + [x for key in a if key in b for x in differences(a[key], b[key], f"{at}.{key}", values=values)]
    if isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        pairs = list(zip(a, b, strict=False))
        found = [x for i, (p, q) in enumerate(pairs) for x in differences(p, q, f"{at}.{i}", values=values)]
        return found if len(a) == len(b) else [f"{at}: length"]
    if hasattr(a, "__dict__") and not isinstance(a, int | torch.Size):
        return differences(dict(a.__dict__), dict(b.__dict__), at, values=values)
    return [] if a == b else [f"{at}: {a} {b}"]


@pytest.mark.parametrize("case", CASES)
def test_writing_it_again_gives_deepspeeds_own_files(case: str, tmp_path: Path) -> None:
    write(HERE / case, tmp_path / "out")
    mine = tag(tmp_path / "out")
    theirs = HERE / case
    assert {path.name for path in mine.iterdir()} == {path.name for path in theirs.iterdir()}
    for path in sorted(theirs.iterdir()):
        last = case.startswith("z3") and "rank_3_" in path.name  # the padding of its shares is not zero in DeepSpeed's
        found = differences(load(path), load(mine / path.name), path.name, values=not last)
        if "round_robin" in case:  # DeepSpeed states the places of the order before dealing: not those of its own bytes
            found = [line for line in found if "param_slice_mappings" not in line]
        found = [line for line in found if "param_names" not in line]  # the names that torch itself adds since 2.6
        assert not found, (path.name, found[:5])


# -- other degrees, against lines made by torch ------------------------------------------------------------------------


def truth_of(case: str) -> dict[str, torch.Tensor]:
    return load_file(HERE / f"{case}.truth.safetensors")


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_partitions_are_those_of_torch(stage: int, ranks: int, tmp_path: Path) -> None:
    write(HERE / "z1_bf16_dp4", tmp_path / "out", zero=stage, dp=ranks)
    truth = truth_of("z1_bf16_dp4")
    folder = tag(tmp_path / "out")
    shapes = load(folder / "mp_rank_00_model_states.pt")["param_shapes"][0]
    for state in ("master", "exp_avg", "exp_avg_sq"):
        line = torch.cat([truth[f"{state}/{name}"].flatten() for name in shapes])
        total = line.numel()
        want = torch.nn.functional.pad(line, (0, -total % (2 * ranks))).chunk(ranks)
        for rank in range(ranks):
            saved = load(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
            spare = saved["group_paddings"][0]
            assert spare == max(0, (rank + 1) * want[0].numel() - total) and saved["partition_count"] == [ranks]
            if state == "master":
                assert torch.equal(
                    saved["single_partition_of_fp32_groups"][0], want[rank][: want[rank].numel() - spare]
                )
            else:
                assert torch.equal(saved["base_optimizer_state"]["state"][0][state], want[rank])
            assert saved["base_optimizer_state"]["state"][0]["step"] == 3.0
            places = {name: (at.start, at.numel) for name, at in saved["param_slice_mappings"][0].items()}
            assert sum(numel for _, numel in places.values()) == want[rank].numel() - spare


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shares_of_stage_3_are_those_of_torch(ranks: int, tmp_path: Path) -> None:
    write(HERE / "z3_bf16_dp4", tmp_path / "out", dp=ranks)
    truth = truth_of("z3_bf16_dp4")
    folder = tag(tmp_path / "out")
    for rank in range(ranks):
        module = load(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        saved = load(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]

        def mine(tensor: torch.Tensor, rank: int = rank) -> torch.Tensor:
            return torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % ranks)).chunk(ranks)[rank]

        for group, shapes in enumerate(module["param_shapes"]):
            want = {s: torch.cat([mine(truth[f"{s}/{n}"]) for n in shapes]) for s in ("master", "exp_avg")}
            assert torch.equal(saved["fp32_flat_groups"][group], want["master"])
            assert torch.equal(saved["optimizer_state_dict"]["state"][group]["exp_avg"], want["exp_avg"])
        for name, fragment in module["frozen_param_fragments"].items():
            assert torch.equal(fragment, mine(truth[f"model/{name}"]))
        assert module["dp_world_size"] == saved["partition_count"] == ranks
        assert module["shared_params"] == ({"head.weight": "embed.weight"} if rank == 0 else {})


@pytest.mark.parametrize(("ranks", "ep"), [(2, 1), (2, 2), (4, 4), (8, 4)])
def test_experts_of_each_rank(ranks: int, ep: int, tmp_path: Path) -> None:
    write(HERE / "moe_z2_ep2_dp4", tmp_path / "out", dp=ranks, ep=ep)
    truth = truth_of("moe_z2_ep2_dp4")
    folder = tag(tmp_path / "out")
    module = load(folder / "mp_rank_00_model_states.pt")
    each = 4 // ep
    for rank in range(ranks):
        saved = load(folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
        names = []
        for name in module["param_shapes"][1]:
            head = name.rsplit(".", 3)[0]
            number = name.rsplit(".", 3)[1]
            tail = name.rsplit(".", 2)[1:]
            names.append(".".join([head, str(rank % ep * each + int(number)), *tail]))
        line = torch.cat([truth[f"exp_avg/{name}"].flatten() for name in names])
        copies = ranks // ep
        want = torch.nn.functional.pad(line, (0, -line.numel() % (2 * copies))).chunk(copies)[rank // ep]
        assert torch.equal(saved["base_optimizer_state"]["state"][1]["exp_avg"], want)
        assert saved["partition_count"] == [ranks, copies]
        assert saved["base_optimizer_state"]["param_groups"][1]["name"] == f"ep_size_{ep}"
    for number in range(4):
        expert = load(folder / f"layer_1_expert_{number}_mp_rank_00_model_states.pt")
        assert all(torch.equal(tensor, truth[f"model/{name}"]) for name, tensor in expert.items())


ROUNDS: dict[str, list[tuple[int | None, dict[str, int]]]] = {
    "z1_bf16_dp4": [(None, {"dp": 1}), (2, {"dp": 3}), (3, {"dp": 5}), (3, {"dp": 2})],
    "z3_bf16_dp4": [(None, {"dp": 1}), (1, {"dp": 3}), (2, {"dp": 5}), (None, {"dp": 7})],
    "pipe_pp2_dp2_z1": [(None, {"dp": 1}), (None, {"dp": 3}), (None, {"dp": 5}), (None, {"dp": 8})],
    "moe_z2_ep2_dp4": [
        (1, {"dp": 2, "ep": 1}),
        (2, {"dp": 4, "ep": 4}),
        (1, {"dp": 6, "ep": 2}),
        (2, {"dp": 8, "ep": 4}),
    ],
    "z2_align_dp4": [(1, {"dp": 3}), (3, {"dp": 2})],
    "z2_round_robin_dp4": [(2, {"dp": 3}), (3, {"dp": 5})],
    "z3_sub_groups_dp4": [(3, {"dp": 3}), (1, {"dp": 2})],
    "z1_fp16_dp2": [(3, {"dp": 3})],
    "z0_bf16_dp2": [(None, {"dp": 3})],
    "moe_z0_ep2_dp2": [(None, {"dp": 1, "ep": 1}), (None, {"dp": 4, "ep": 4})],
}


@pytest.mark.share(3)
@pytest.mark.parametrize(("case", "zero", "degrees"), [(c, z, d) for c, rounds in ROUNDS.items() for z, d in rounds])
def test_there_and_back(case: str, zero: int | None, degrees: dict[str, int], tmp_path: Path) -> None:
    write(HERE / case, tmp_path / "there", zero=zero, **degrees)
    was = open_source(str(HERE / case), Reading()).catalog
    home = {name: size for name, size in was.hints.get(Degrees).stated().items() if name in ("dp", "ep")}
    write(tmp_path / "there", tmp_path / "back", zero=was.extras["deepspeed"]["zero_stage"], **home)
    assert equal(HERE / case, tmp_path / "back")
    again = open_source(str(tmp_path / "back"), Reading()).catalog
    config = was.extras["ds_config"]
    assert {**again.extras, "ds_config": config} == {**was.extras, "ds_config": config}


def test_through_dcp_nothing_is_lost(tmp_path: Path) -> None:
    for case in ("z1_bf16_dp4", "z3_bf16_dp4", "moe_z2_ep2_dp4", "pipe_pp2_dp2_z1"):
        write(HERE / case, tmp_path / f"{case}.dcp", to="dcp", dp=2)
        degrees = open_source(str(HERE / case), Reading()).catalog.hints.get(Degrees).stated()
        home = {name: degrees[name] for name in ("dp", "ep", "pp")}
        write(tmp_path / f"{case}.dcp", tmp_path / case, to="deepspeed", **home)
        for path in sorted((HERE / case).iterdir()):
            last = case.startswith("z3") and "rank_3_" in path.name
            assert not differences(load(path), load(tag(tmp_path / case) / path.name), path.name, values=not last)


def test_one_stage_holds_the_tied_module_once(tmp_path: Path) -> None:
    write(HERE / "pipe_pp2_dp2_z1", tmp_path / "one", pp=1)
    assert equal(HERE / "pipe_pp2_dp2_z1", tmp_path / "one")
    names = list(load(tag(tmp_path / "one") / "mp_rank_00_model_states.pt")["param_shapes"][0])
    assert names[0] == "tied_modules.embed.weight" and len(names) == len(set(names)) == 18
    assert [int(name.split(".")[0]) for name in names[1:]] == sorted(int(name.split(".")[0]) for name in names[1:])


# -- stages and foreign sources ----------------------------------------------------------------------------------------


def test_stage_1_of_a_stage_3_has_the_rounded_master_as_its_module(tmp_path: Path) -> None:
    report = write(HERE / "z3_bf16_dp4", tmp_path / "out", zero=1)
    module = load(tag(tmp_path / "out") / "mp_rank_00_model_states.pt")["module"]
    truth = truth_of("z3_bf16_dp4")
    for name in ("embed.weight", "layers.1.up.bias"):
        assert torch.equal(module[name], truth[f"master/{name}"].bfloat16())
    assert torch.equal(module["head.weight"], module["embed.weight"])
    assert torch.equal(module["frozen.bias"], truth["model/frozen.bias"])
    assert any("rounded" in entry["reason"] for entry in report["dropped"])


def test_fp32_weights_of_a_foreign_source_are_their_own_master(tmp_path: Path) -> None:
    report = write(FIXTURES / "dcp" / "fsdp2_dp4", tmp_path / "out", to="deepspeed", zero=2, dp=2)
    assert {entry["state"] for entry in report["dropped"]} == {"master", "step"}
    folder = tag(tmp_path / "out")
    saved = load(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    module = load(folder / "mp_rank_00_model_states.pt")
    assert len(saved["base_optimizer_state"]["param_groups"]) == 2 == len(module["param_shapes"])
    name, shape = next(iter(module["param_shapes"][0].items()))
    first = saved["single_partition_of_fp32_groups"][0][: shape.numel()]
    assert torch.equal(first, module["module"][name].flatten()[: first.numel()])
    assert saved["base_optimizer_state"]["state"][0]["step"].ndim == 0


def test_steps_that_differ_are_not_folded(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0), "b": torch.arange(3.0)}
    moments = {
        name: {"exp_avg": t + 1, "exp_avg_sq": t + 2, "step": torch.tensor(float(i))}
        for i, (name, t) in enumerate(state.items())
    }
    groups = [{"lr": 0.1, "params": ["w", "b"]}]
    torch.save({"model": state, "optim": {"state": moments, "param_groups": groups}}, tmp_path / "x.pt")
    with pytest.raises(CkptError) as e:
        write(tmp_path / "x.pt", tmp_path / "out", to="deepspeed", zero=1)
    assert e.value.exit_code == 3 and not (tmp_path / "out").exists()


def test_moments_without_an_exact_master_stay_as_they_are_or_are_refused(tmp_path: Path) -> None:
    case = FIXTURES / "dcp" / "fsdp2_dp3_bf16"
    write(case, tmp_path / "out", to="deepspeed")
    assert load(tag(tmp_path / "out") / "mp_rank_00_model_states.pt")["optimizer"]["state"]
    with pytest.raises(UsageError, match="no fp32 master"):
        write(case, tmp_path / "other", to="deepspeed", zero=1)


@pytest.mark.parametrize(
    ("sizes", "ep", "words"),
    [
        ({0: 4, 1: 4, 3: 4}, 1, "experts.3.w has no counterpart"),
        ({0: 4, 1: 4, 2: 4, 4: 4}, 2, "experts.3.w has no counterpart"),
        ({0: 4, 1: 4, 2: 5, 3: 4}, 2, "experts.2.w has another shape"),
        ({0: 4, 1: 4, 2: 5, 3: 4}, 1, ""),
    ],
)
def test_experts_that_are_not_alike_are_not_written(sizes: dict[int, int], ep: int, words: str, tmp_path: Path) -> None:
    """The module file lists the parameters of one expert rank for all: what others have otherwise would be lost."""
    names = {e: f"moe.deepspeed_moe.experts.deepspeed_experts.{e}.w" for e in sizes}
    state = {names[e]: torch.arange(float(size)) for e, size in sizes.items()}
    moments = {name: {"exp_avg": t + 1, "exp_avg_sq": t + 2} for name, t in state.items()}
    torch.save({"model": state, "optim": {"state": moments, "param_groups": [{"params": [*state]}]}}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match=words) if words else nullcontext() as e:
        write(tmp_path / "x.pt", tmp_path / "out", to="deepspeed", zero=1, dp=2, ep=ep)
    assert (tmp_path / "out").exists() is (e is None)


# -- refused by name ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "zero", "degrees", "words"),
    [
        ("moe_z2_ep2_dp4", None, {"ep": 3, "dp": 3}, "experts of moe"),
        ("moe_z2_ep2_dp4", None, {"ep": 4, "dp": 2}, "data ranks"),
        ("moe_z2_ep2_dp4", 3, {}, "no ZeRO 3"),
        ("z1_bf16_dp4", None, {"tp": 2}, "--tp 2"),
        ("z1_bf16_dp4", None, {"pp": 2}, "no pipeline"),
        ("z1_bf16_dp4", None, {"ep": 2}, "no parameter is an expert"),
        ("z1_bf16_dp4", 0, {}, "without ZeRO"),
        ("pipe_pp2_dp2_z1", None, {"pp": 3}, "partition_method"),
        ("pipe_pp2_dp2_z1", 2, {}, "pipelines"),
    ],
)
def test_degrees_that_it_cannot_take(
    case: str, zero: int | None, degrees: dict[str, int], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words) as e:
        write(HERE / case, tmp_path / "out", zero=zero, **degrees)
    assert e.value.hint and not (tmp_path / "out").exists()


def broken(case: str, tmp_path: Path) -> Path:
    shutil.copytree(HERE / case, tmp_path / case)
    return tmp_path / case


def read(case: Path) -> Any:
    catalog = open_source(str(case), Reading()).catalog
    catalog.check()
    return catalog


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("z1_bf16_dp4", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("z1_bf16_dp4", "mp_rank_00_model_states.pt"),
        ("z3_bf16_dp4", "zero_pp_rank_2_mp_rank_00_model_states.pt"),
        ("z3_bf16_dp4", "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"),
        ("pipe_pp2_dp2_z1", "mp_rank_01_model_states.pt"),
        ("pipe_pp2_dp2_z1", "layer_02-model_states.pt"),
        ("moe_z2_ep2_dp4", "layer_1_expert_2_mp_rank_00_model_states.pt"),
        ("moe_z0_ep2_dp2", "expp_rank_0_mp_rank_00_optim_states.pt"),
        ("moe_z0_ep2_dp2", "expp_rank_1_mp_rank_00_optim_states.pt"),
    ],
)
def test_a_missing_file_is_named(case: str, name: str, tmp_path: Path) -> None:
    folder = broken(case, tmp_path)
    (folder / name).unlink()
    with pytest.raises(Incomplete) as e:
        read(folder)
    assert name in e.value.message and e.value.exit_code == 3


def test_a_rank_of_another_step(tmp_path: Path) -> None:
    folder = broken("z1_bf16_dp4", tmp_path)
    path = folder / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    state = load(path)
    state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1
    torch.save(state, path)
    with pytest.raises(InconsistentCheckpoint, match="step 4.0") as e:
        read(folder)
    assert str(e.value.path).endswith(path.name)


def test_a_rank_of_another_run(tmp_path: Path) -> None:
    folder = broken("z1_bf16_dp4", tmp_path)
    write(HERE / "z1_bf16_dp4", tmp_path / "other", dp=5)
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(tag(tmp_path / "other") / name, folder / name)
    with pytest.raises(InconsistentCheckpoint) as e:
        read(folder)
    assert str(e.value.path).endswith(name)


def test_a_stale_rank_of_a_larger_save(tmp_path: Path) -> None:
    folder = broken("z1_bf16_dp4", tmp_path)
    name = "bf16_zero_pp_rank_4_mp_rank_00_optim_states.pt"
    shutil.copy(folder / name.replace("4", "3", 1), folder / name)
    with pytest.raises(InconsistentCheckpoint, match=name):
        read(folder)


def test_moments_of_another_shape(tmp_path: Path) -> None:
    folder = broken("z3_bf16_dp4", tmp_path)
    path = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = load(path)
    inner = state["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]
    inner["exp_avg"] = inner["exp_avg"][:100].clone()
    torch.save(state, path)
    with pytest.raises(InconsistentCheckpoint, match="exp_avg of flat group 0"):
        read(folder)


def test_a_tie_that_holds_two_values(tmp_path: Path) -> None:
    folder = broken("z1_bf16_dp4", tmp_path)
    path = folder / "mp_rank_00_model_states.pt"
    state = load(path)
    state["module"]["head.weight"] = state["module"]["head.weight"].clone() + 1
    torch.save(state, path)
    with pytest.raises(CkptError) as e:
        write(folder, tmp_path / "out", dp=2)
    assert e.value.exit_code == 3 and not (tmp_path / "out").exists()


def damaged(case: str, tmp_path: Path, change: Any) -> Path:
    folder = broken(case, tmp_path)
    path = folder / "mp_rank_00_model_states.pt"
    state = load(path)
    change(state)
    torch.save(state, path)
    return folder


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("z1_bf16_dp4", lambda s: s["module"].pop("layers.1.up.bias"), "not in the module"),
        ("z1_bf16_dp4", lambda s: s.update(mp_world_size=torch.zeros(2)), "where DeepSpeed keeps none"),
        ("z1_bf16_dp4", lambda s: s.update(dp_world_size=1 << 23), "files are missing|more ranks"),
        ("z1_bf16_dp4", lambda s: s["param_shapes"][0].pop("layers.1.up.bias"), "param_slice_mappings"),
        (
            "z1_bf16_dp4",
            lambda s: s["param_shapes"][0].update({"embed.weight": torch.Size([37, 11])}),
            "param_slice_map",
        ),
        ("z1_bf16_dp4", lambda s: s["param_shapes"][0].update({"embed.weight": "wide"}), "no names to shapes"),
        ("moe_z2_ep2_dp4", lambda s: s.update(num_experts=[4, 6]), "experts have no file"),
        ("z0_bf16_dp2", lambda s: s["optimizer"]["fp32_groups"][0].pop(), "fp32 weight"),
        ("z0_bf16_dp2", lambda s: s["optimizer"].update(fp32_groups_flat=[torch.zeros(9)]), "fused"),
        ("z1_bf16_dp4", lambda s: s.update(ds_autoep_layers=[{"num_experts": 4}]), "AutoEP"),
    ],
)
def test_a_module_file_that_contradicts_itself(case: str, change: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CkptError, match=words) as e:
        read(damaged(case, tmp_path, change))
    assert e.value.exit_code == 3 and e.value.hint


def test_an_elastic_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    folder = broken("z1_bf16_dp4", tmp_path)
    path = folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = load(path)
    base = state["optimizer_state_dict"]["base_optimizer_state"]
    state["optimizer_state_dict"]["base_optimizer_state"] = list(base["state"].values())
    torch.save(state, path)
    with pytest.raises(InputError, match="elastic"):
        read(folder)


def test_states_on_nvme_are_refused_by_name(tmp_path: Path) -> None:
    folder = broken("z3_bf16_dp4", tmp_path)
    path = folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = load(path)
    state["optimizer_state_dict"]["fp32_flat_groups"] = []
    torch.save(state, path)
    with pytest.raises(InputError, match="NVMe"):
        read(folder)


def test_random_states_of_other_ranks_are_set_aside(tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state |= {"torch_rng_state": torch.arange(8, dtype=torch.uint8), "rng": {"python": [1, 2]}}
        state["ema"] = {"embed.weight": torch.ones(37, 10)}

    folder = damaged("z1_bf16_dp4", tmp_path, change)
    report = write(folder, tmp_path / "out", dp=2)
    module = load(tag(tmp_path / "out") / "mp_rank_00_model_states.pt")
    assert set(module["ckpt_unused"]) == {"torch_rng_state", "rng"} and "torch_rng_state" not in module
    assert any("ckpt_unused" in note for note in report["notes"]) and "ema" in module
    write(folder, tmp_path / "same", dp=4)
    assert "torch_rng_state" in load(tag(tmp_path / "same") / "mp_rank_00_model_states.pt")
    assert open_source(str(folder), Reading()).catalog.states()[-1] in ("ema", "extras")


def test_layers_of_tensor_parallel_ranks_are_refused_by_name(tmp_path: Path) -> None:
    folder = broken("pipe_pp2_dp2_z1", tmp_path)
    (folder / "layer_00-model_states.pt").rename(folder / "layer_00-model_00-model_states.pt")
    with pytest.raises(InputError, match="tensor parallel"):
        read(folder)


def test_a_removed_weight_is_not_made_again_from_its_master(tmp_path: Path) -> None:
    """`--model-only` at ZeRO 1 would leave a master whose weight DeepSpeed needs."""
    writing = Writing(remove_keys=("layers.0.up.weight",), model_only=True)
    with pytest.raises(UsageError, match="can't leave the module alone"):
        reshard(str(HERE / "z1_bf16_dp4"), str(tmp_path / "out"), Reading(), writing, Silent())
    assert not (tmp_path / "out").exists()


def test_factors_of_an_optimizer_have_no_place(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16))
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    writing = Writing(to="deepspeed")
    with pytest.raises(UsageError, match="row_var.* does not have its parameter's shape") as caught:
        convert(str(tmp_path / "in.pt"), str(tmp_path / "out"), Reading(), writing, Silent())
    assert caught.value.code == "E0286" and "--drop row_var,col_var" in caught.value.hint
    convert(
        str(tmp_path / "in.pt"),
        str(tmp_path / "out"),
        Reading(),
        Writing(to="deepspeed", drop=("row_var", "col_var")),
        Silent(),
    )
