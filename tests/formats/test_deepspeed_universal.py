"""DeepSpeed's universal checkpoints both ways: odd folders made with torch.save, our output read by torch and, where a
Python with DeepSpeed is named in CKPT_DEEPSPEED_PYTHON, resumed by DeepSpeed itself at other stages and ranks.

The fixtures' values are compared with the live engines' in `test_conformance.py`.
"""

from __future__ import annotations

import os
import shutil
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peer_process import last_words
from safetensors.torch import load_file, save_file
from targets import FIXTURES, ramp

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.progress import Silent
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source

CASES = FIXTURES / "deepspeed-universal"
Z1 = CASES / "z1_bf16_dp2"
SHAPES = {"a.weight": (3, 4), "b.weight": (5,), "vocab.weight": (7, 2)}


def catalog_of(path: Path) -> Catalog:
    return open_source(str(path), Reading()).catalog


def to(source: Path, target: Path, fmt: str = "deepspeed-universal", **more: Any) -> dict[str, Any]:
    return convert(str(source), str(target), Reading(), Writing(to=fmt, verify="full", **more), Silent())


def equal(a: Path, b: Path) -> bool:
    found = diff(str(a), str(b), Reading(), progress=Silent())
    assert found["equal"], found["differences"][:4]
    return bool(found["equal"])


def made(folder: Path, *, flat: bool = False, facts: Any = None, steps: Any = None, **top: Any) -> Path:
    """A small universal folder by torch.save. facts: parameter -> what stands beside `param`."""
    for number, (name, shape) in enumerate(SHAPES.items()):
        (folder / "zero" / name).mkdir(parents=True)
        for offset, state in enumerate(("fp32", "exp_avg", "exp_avg_sq")):
            value = ramp(shape, start=100 * number + 1000 * offset)
            beside = (facts or {}).get(name, {"cat_dim": 0})
            torch.save(value.reshape(-1) if flat else {**beside, "param": value}, folder / f"zero/{name}/{state}.pt")
        if not flat:
            torch.save((steps or {}).get(name, torch.tensor(3.0)), folder / f"zero/{name}/step.pt")
    groups = [{"lr": 0.1, "params": [0]}]
    state: dict[str, Any] = {"param_groups": groups, "ds_version": "0.19.8", "clip_grad": 1.0}
    if flat:
        state["optimizer_state_dict"] = {"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": groups}
        state["fp32_flat_groups"] = [torch.zeros(11)]
    torch.save(state, folder / "zero/optimizer_state.pt")
    shapes = OrderedDict({name: torch.Size(shape) for name, shape in SHAPES.items()})
    module = {
        "module": OrderedDict({name: ramp(shape).bfloat16() for name, shape in SHAPES.items()}),
        "param_shapes": [shapes],
        "buffer_names": [],
        "shared_params": {},
        "global_steps": 3,
        "skipped_steps": 0,
        "lr_scheduler": {"last_epoch": 3},
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        "note": "mine",
        **top,
    }
    torch.save(module, folder / ("zero_pp_rank_0_mp_rank_00_model_states.pt" if flat else "mp_rank_00_model_states.pt"))
    return folder


def refusal(folder: Path) -> CkptError:
    with pytest.raises(CkptError) as raised:
        catalog_of(folder).check()
    assert raised.value.exit_code == 3 and raised.value.hint
    return raised.value


# -- reading -----------------------------------------------------------------------------------------------------------


def test_extras_are_those_of_the_run() -> None:
    catalog = catalog_of(Z1)
    extras = catalog.extras
    assert extras["note"] == "tiny" and extras["consumed_samples"] == 24 and extras["global_steps"] == 2
    assert extras["lr_scheduler"]["last_epoch"] == 2
    (group,) = extras["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(0.01 / 3) and "embed.weight" in group["params"]
    assert extras["optimizer"]["scalars"] == [{"step": 2.0}]
    assert extras["deepspeed"]["zero_stage"] == 1 and extras["deepspeed"]["shared"] == {
        "lm_head.weight": "embed.weight"
    }
    assert any("frozen.weight" in note.message and "lm_head.weight" in note.message for note in catalog.notes)
    three = catalog_of(CASES / "z3_bf16_dp2").extras
    assert three["optimizer"]["scalars"] == [{"step": 2.0}, {"step": 2.0}] and three["deepspeed"]["zero_stage"] == 3
    assert len(three["optimizer"]["param_groups"][1]["params"]) < len(three["optimizer"]["param_groups"][0]["params"])


def test_flat_tensors_take_their_shapes_from_the_module_file(tmp_path: Path) -> None:
    opened = open_source(str(made(tmp_path, flat=True)), Reading())
    lazy = OpenCatalog(opened.tree, opened.catalog).state("exp_avg")["a.weight"]
    assert np.array_equal(lazy.numpy(), ramp((3, 4), start=1000).numpy())
    assert not any(key.state == "step" for key in opened.catalog.tensors)
    assert opened.catalog.extras["optimizer"]["scalars"] == [{"step": 4.0}]


def test_a_number_for_a_step_is_a_step(tmp_path: Path) -> None:
    catalog = catalog_of(made(tmp_path, steps=dict.fromkeys(SHAPES, 5)))
    assert (
        catalog.extras["optimizer"]["scalars"] == [{"step": 5}] and TensorKey("a.weight", "step") not in catalog.tensors
    )


def test_cuts_of_tensor_parallel_ranks_come_back(tmp_path: Path) -> None:
    """cat_dim, sub-parameters, vocabulary and experts are data: they travel in the extras, by way of sharded too."""
    facts = {
        "a.weight": {"cat_dim": 1},
        "b.weight": {"param_n_sub_params": 2, "cat_dim": 0},
        "vocab.weight": {"cat_dim": 0, "vocab_tensor": True, "is_expert_param": True, "ep_num_experts": 7},
    }
    source = made(tmp_path / "a", facts=facts)
    to(source, tmp_path / "s", "sharded", degrees={"tp": 2})
    to(tmp_path / "s", tmp_path / "b")
    assert equal(source, tmp_path / "b")
    for name, beside in facts.items():
        got = torch.load(tmp_path / f"b/global_step3_universal/zero/{name}/exp_avg.pt", weights_only=False)
        assert {key: got[key] for key in beside} == beside
        assert torch.equal(got["param"], torch.load(source / f"zero/{name}/exp_avg.pt")["param"])


def test_sub_parameters_of_uneven_shapes_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`SubparamShape`, a class of DeepSpeed's: read as data, written by name; a stand-in shows what an unpickler
    gets."""

    class SubparamShape:
        def __init__(self, patterns: Any, shape: Any, partition_dim: int) -> None:
            self.patterns = patterns
            self.shape = shape
            self.partition_dim = partition_dim

    module = types.ModuleType("deepspeed.checkpoint.universal_checkpoint")
    SubparamShape.__module__ = module.__name__
    SubparamShape.__qualname__ = "SubparamShape"
    module.SubparamShape = SubparamShape  # type: ignore[attr-defined]
    for name in ("deepspeed", "deepspeed.checkpoint"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source = made(tmp_path / "a", facts={"a.weight": {"sub_param_shape": SubparamShape(["a.*"], ((2, 1), 4), 0)}})
    to(source, tmp_path / "s", "sharded")
    to(tmp_path / "s", tmp_path / "b")
    got = torch.load(tmp_path / "b/global_step3_universal/zero/a.weight/fp32.pt", weights_only=False)["sub_param_shape"]
    assert type(got) is SubparamShape and vars(got) == {"patterns": ["a.*"], "shape": ((2, 1), 4), "partition_dim": 0}


def test_an_alias_with_other_values_is_refused(tmp_path: Path) -> None:
    module = OrderedDict({name: ramp(shape).bfloat16() for name, shape in SHAPES.items()})
    module["head.weight"] = module["vocab.weight"].clone()
    top = {"module": module, "shared_params": {"head.weight": "vocab.weight"}}
    to(made(tmp_path / "a", **top), tmp_path / "out_a", "sharded")
    module["head.weight"][3, 1] += 1
    with pytest.raises(CkptError) as raised:
        to(made(tmp_path / "b", **top), tmp_path / "out_b", "sharded")
    assert raised.value.exit_code == 3 and raised.value.key == "head.weight" and not (tmp_path / "out_b").exists()


def test_slices_of_tensor_parallel_modules_are_left_and_named(tmp_path: Path) -> None:
    folder = made(tmp_path, mp_world_size=2)
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
    catalog = catalog_of(folder)
    assert "model" not in catalog.states() and any("tensor parallel" in note.message for note in catalog.notes)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    def without(name: str, *paths: str) -> CkptError:
        folder = made(tmp_path / name)
        for path in paths:
            shutil.rmtree(folder / path) if (folder / path).is_dir() else (folder / path).unlink()
        return refusal(folder)

    assert without("a", "zero/b.weight").key == "b.weight"
    assert "fp32.pt" in without("b", "zero/b.weight/fp32.pt").message
    assert "exp_avg.pt" in without("c", "zero/a.weight/exp_avg.pt").message
    assert "step.pt" in without("c2", "zero/a.weight/step.pt").message
    assert "optimizer_state.pt" in without("d", "zero/optimizer_state.pt").message
    assert "model_states" in without("e", "mp_rank_00_model_states.pt").message
    z3 = tmp_path / "z3"
    shutil.copytree(CASES / "z3_bf16_dp2", z3)
    (z3 / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert "zero_pp_rank_1_mp_rank_00" in refusal(z3).message


def test_what_contradicts_is_named(tmp_path: Path) -> None:
    error = refusal(made(tmp_path / "a", steps={"b.weight": torch.tensor(4.0)}))
    assert error.code == "E0359" and error.key == "b.weight" and "4.0" in error.message and "3.0" in error.message
    folder = made(tmp_path / "b")
    torch.save({"param": torch.zeros(3, 5)}, folder / "zero/a.weight/exp_avg.pt")
    error = refusal(folder)
    assert error.code == "E0359" and "[3, 5]" in error.message and "exp_avg" in str(error.key)
    torch.save({"param": [1, 2]}, folder / "zero/a.weight/exp_avg.pt")
    assert refusal(folder).code == "E0355"


def test_a_file_that_our_own_output_lost_is_named(tmp_path: Path) -> None:
    to(FIXTURES / "dcp" / "fsdp2_dp4", tmp_path / "out")
    next((tmp_path / "out").rglob("lm_head.weight/step.pt")).unlink()
    error = refusal(tmp_path / "out")
    assert error.code == "E0302" and error.key == "lm_head.weight" and "step.pt" in error.message
    to(Z1, tmp_path / "two")
    next((tmp_path / "two").rglob("mp_rank_00_model_states.pt")).unlink()  # the one for ZeRO 3 has no weights
    next((tmp_path / "two").rglob("zero_pp_rank_0_mp_rank_00_model_states.pt"))
    assert "mp_rank_00_model_states.pt" in refusal(tmp_path / "two").message


# -- pointers ----------------------------------------------------------------------------------------------------------


def test_a_root_with_both_pointers_gives_the_native_one_unless_asked(tmp_path: Path) -> None:
    made(tmp_path / "global_step3_universal")
    (tmp_path / "latest_universal").write_text("global_step3_universal")
    opened = open_source(str(tmp_path), Reading())
    assert opened.catalog.format == "deepspeed-universal" and "latest_universal" in opened.resolved
    native = tmp_path / "global_step3"
    native.mkdir()
    torch.save({"w": torch.zeros(2)}, native / "x.pt")
    (tmp_path / "latest").write_text("global_step3")
    opened = open_source(str(tmp_path), Reading())
    assert opened.catalog.format == "torch" and "--from deepspeed-universal" in opened.resolved
    asked = open_source(str(tmp_path), Reading(from_format="deepspeed-universal"))
    assert asked.catalog.format == "deepspeed-universal"


def test_a_trainers_folder_with_deepspeeds_inside_is_followed(tmp_path: Path) -> None:
    made(tmp_path / "checkpoint-500" / "global_step500_universal")
    (tmp_path / "checkpoint-500" / "latest_universal").write_text("global_step500_universal")
    opened = open_source(str(tmp_path), Reading())
    assert opened.catalog.format == "deepspeed-universal"
    assert "checkpoint-500" in opened.resolved and "global_step500_universal" in opened.resolved


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("case", sorted(path.name for path in CASES.iterdir() if path.is_dir()))
def test_there_and_back(case: str, tmp_path: Path) -> None:
    to(CASES / case, tmp_path / "a")
    assert equal(CASES / case, tmp_path / "a")
    assert catalog_of(tmp_path / "a").extras == catalog_of(CASES / case).extras
    for n, degrees in enumerate(({"dp": 3}, {"tp": 2}, {"tp": 3, "dp": 2}, {"pp": 1, "dp": 5})):
        to(tmp_path / "a", tmp_path / f"s{n}", "sharded", degrees=degrees)
        to(tmp_path / f"s{n}", tmp_path / f"u{n}")
        assert equal(CASES / case, tmp_path / f"u{n}")
    assert catalog_of(tmp_path / "u0").extras == catalog_of(CASES / case).extras


def test_torch_reads_what_deepspeed_will(tmp_path: Path) -> None:
    to(Z1, tmp_path / "out")
    assert (tmp_path / "out/latest_universal").read_text() == "global_step2_universal"
    root = tmp_path / "out/global_step2_universal"
    truth = load_file(CASES / "z1_bf16_dp2.truth.safetensors")
    for key, want in truth.items():
        state, name = key.split("/", 1)
        if state != "model":
            got = torch.load(root / f"zero/{name}/{'fp32' if state == 'master' else state}.pt", weights_only=True)
            assert torch.equal(got if state == "step" else got["param"], want), key
            assert state == "step" or got["cat_dim"] == 0
    module = torch.load(root / "mp_rank_00_model_states.pt", weights_only=False)
    assert set(module["module"]) == {key[6:] for key in truth if key.startswith("model/")}
    assert module["note"] == "tiny" and module["global_steps"] == 2 and module["mp_world_size"] == 1
    shapes = module["param_shapes"][0]
    assert shapes["embed.weight"] == torch.Size((33, 10)) and isinstance(shapes["embed.weight"], torch.Size)
    small = torch.load(root / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    assert not small["module"] and small["global_steps"] == 2


def test_a_foreign_source_keeps_everything(tmp_path: Path) -> None:
    """An FSDP2 checkpoint: no master, a step a parameter, groups by names, nested extras."""
    source = FIXTURES / "dcp" / "fsdp2_dp4"
    document = to(source, tmp_path / "out")
    assert any("cat_dim" in note for note in document["notes"])
    assert equal(source, tmp_path / "out")
    catalog = catalog_of(tmp_path / "out")
    before = catalog_of(source)
    assert catalog.extras == before.extras and "master" not in catalog.states()
    (root,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    state = torch.load(root / "zero/optimizer_state.pt", weights_only=False)
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.0]
    assert state["param_groups"][1]["params"] == [1] and state["optimizer_state_dict"]["state"][0]["step"] == 2
    weights = torch.load(root / "zero/embed.weight/fp32.pt", weights_only=True)["param"]
    assert torch.equal(weights, load_file(f"{source}.truth.safetensors")["model/embed.weight"])


def test_groups_of_chained_optimizers_are_all_kept(tmp_path: Path) -> None:
    """Megatron's optimizer of a model with experts is a list of optimizers, each with its groups; the step is
    theirs."""
    weights = {"w": ramp((4, 2)), "e": ramp((3,))}
    chain = [{"optimizer": {"param_groups": [{"lr": lr, "step": 7}]}} for lr in (0.1, 0.2)]
    state = {"model": weights, "optimizer": chain, "optim": {"state": {n: {"exp_avg": v} for n, v in weights.items()}}}
    torch.save(state, tmp_path / "in.pt")
    to(tmp_path / "in.pt", tmp_path / "out")
    (root,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    said = torch.load(root / "zero/optimizer_state.pt", weights_only=False)
    assert [group["lr"] for group in said["param_groups"]] == [0.1, 0.2]
    assert torch.load(root / "zero/e/step.pt") == 7.0
    assert equal(tmp_path / "in.pt", tmp_path / "out") and catalog_of(tmp_path / "out").extras["optimizer"] == chain


def test_parameters_that_no_group_lists_are_named(tmp_path: Path) -> None:
    """They can only be listed in some group: the job that resumes goes by its own groups, one by one."""
    weights = {"w": ramp((4, 2)), "e": ramp((3,))}
    groups = [{"lr": 0.1, "params": ["w"]}, {"lr": 0.2, "params": []}]
    optim = {"state": {n: {"exp_avg": v} for n, v in weights.items()}, "param_groups": groups}
    torch.save({"model": weights, "optim": optim}, tmp_path / "in.pt")
    notes = to(tmp_path / "in.pt", tmp_path / "out")["notes"]
    assert any("1 parameter is in no param_groups of the source, such as e" in note for note in notes)


def test_states_that_deepspeed_would_take_for_its_own_lie_beside(tmp_path: Path) -> None:
    source = FIXTURES / "torch" / "ema.pt"
    to(source, tmp_path / "out")
    assert equal(source, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("ema.pt"))


@pytest.mark.parametrize("name", ["../up", "/root", "a//b", ".", "optimizer_state.pt"])
def test_names_that_no_folder_can_have_are_refused_before_a_byte_is_written(name: str, tmp_path: Path) -> None:
    save_file({name: torch.zeros(2)}, tmp_path / "in.safetensors")
    with pytest.raises(CkptError) as raised:
        to(tmp_path / "in.safetensors", tmp_path / "out")
    assert (raised.value.exit_code, raised.value.code) == (4, "E1600") and not (tmp_path / "out").exists()
    assert raised.value.key is not None and raised.value.key.startswith(name)


def test_moments_without_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CkptError) as raised:
        to(Z1, tmp_path / "out", states=("optimizer",))
    assert raised.value.exit_code == 2 and raised.value.code == "E0291"


# -- DeepSpeed itself --------------------------------------------------------------------------------------------------

PEER = os.environ.get("CKPT_DEEPSPEED_PYTHON", "")
needs_deepspeed = pytest.mark.skipif(not PEER, reason="CKPT_DEEPSPEED_PYTHON names no Python with DeepSpeed")
within = pytest.mark.timeout(800)  # of three jobs, each with a limit of its own


def deepspeed(*words: str) -> None:
    maker = FIXTURES / "make" / "deepspeed_universal.py"
    last_words([PEER, maker, *words], 250, cwd=maker.parent)


@pytest.mark.peers
@within
@needs_deepspeed
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (1, 3), (2, 1), (3, 2)])
def test_deepspeed_resumes_at_other_stages_and_ranks(stage: int, ranks: int, tmp_path: Path) -> None:
    """By way of sharded files of other degrees, so that no byte lies where DeepSpeed put it. The next step is that of a
    resume from DeepSpeed's own universal checkpoint, bit for bit."""
    to(Z1, tmp_path / "s", "sharded", degrees={"tp": 3, "dp": 2})
    to(tmp_path / "s", tmp_path / "u")
    words = ("--stage", str(stage), "--ranks", str(ranks))
    deepspeed("--resume", str(tmp_path / "u"), str(tmp_path / "o.pt"), *words)
    got = torch.load(tmp_path / "o.pt")
    truth = load_file(CASES / "z1_bf16_dp2.truth.safetensors")
    assert len(got["before"]) == 12
    for key, value in got["before"].items():
        assert torch.equal(value, truth[key]), key
    assert got["counters"]["global_steps"] == 2 and got["counters"]["lr"] == [pytest.approx(0.01 / 3)]
    if stage < 3:  # DeepSpeed loads its own of stage 1 at stage 3 no more: it lacks that stage's module files
        shutil.copytree(Z1, tmp_path / "own" / "global_step2_universal")
        (tmp_path / "own" / "latest_universal").write_text("global_step2_universal")
        deepspeed("--resume", str(tmp_path / "own"), str(tmp_path / "own.pt"), *words)
        own = torch.load(tmp_path / "own.pt")["after"]
        assert all(torch.equal(value, own[key]) for key, value in got["after"].items())
    if ranks == 2:  # the same sums in the same order; DeepSpeed's own resume differs in the last bit of the weights
        deepspeed("--uninterrupted", "z1_bf16_dp2", str(tmp_path / "all.pt"), "--ranks", "2")
        whole = torch.load(tmp_path / "all.pt")
        for key, value in got["after"].items():
            torch.testing.assert_close(value, whole[key], rtol=0, atol=1e-7 if key.startswith("master") else 0, msg=key)


@pytest.mark.peers
@within
@needs_deepspeed
@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (3, 2)])
def test_deepspeed_resumes_from_a_plain_training_state(stage: int, ranks: int, tmp_path: Path) -> None:
    """A single `torch.save` of model, AdamW with native numbers, three steps; DeepSpeed has never seen it."""
    source = FIXTURES / "torch" / "training.pt"
    to(source, tmp_path / "u")
    words = ("--stage", str(stage), "--ranks", str(ranks), "--fp32", "--plain", "--steps", "0")
    deepspeed("--resume", str(tmp_path / "u"), str(tmp_path / "o.pt"), *words)
    got = torch.load(tmp_path / "o.pt")["before"]
    truth = load_file(FIXTURES / "torch" / "training.truth.safetensors")
    assert len(got) == 3 * sum(key.startswith("exp_avg/") for key in truth)
    for key, value in got.items():
        assert torch.equal(value, truth[key.replace("master/", "model/")]), key
