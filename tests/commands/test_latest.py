"""`ckpt latest`: of any format's run the newest step that is whole; a half-written one never, wherever it was cut."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

import ckpt_tool as ckpt
from ckpt_tool.cli import run
from ckpt_tool.errors import CkptError, UnknownFormat, UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.sound import findings_at
from ckpt_tool.sources.steps import run_at, step_of

FIXTURES = Path(__file__).parents[2] / "fixtures"
# kind -> (the checkpoint, names of two steps, a file of the step without which, or cut short, it is not whole)
RUNS = {
    "transformers": ("safetensors/hf_llama_sharded", ("checkpoint-90", "checkpoint-100"), "model-00002-of"),
    "trainer": ("safetensors/trainer_qwen3", ("checkpoint-90", "checkpoint-100"), "optimizer.pt"),
    "megatron": (
        "megatron/moe_tp2ep2etp1/iter_0000002",
        ("iter_0000090", "iter_0000100"),
        "mp_rank_01_001/model_optim_rng.pt",
    ),
    "torch_dist": ("megatron-dist/llama_tp2", ("iter_0000009", "iter_0000010"), "metadata.json"),
    "deepspeed": ("deepspeed/z1_bf16_dp4", ("global_step9", "global_step10"), "bf16_zero_pp_rank_3"),
    "torchtitan": ("dcp/titan", ("step-9", "step-10"), "__1_0.distcp"),
    "dcp": ("dcp/fsdp2_dp4", ("step_9", "step_10"), ".metadata"),
    "accelerate": ("dcp/accelerate_fsdp2", ("checkpoint_9", "checkpoint_10"), "optimizer_0/.metadata"),
    "lightning": ("torch/training.pt", ("epoch=0-step=9.ckpt", "epoch=1-step=10.ckpt"), ""),
    "speculators": ("safetensors/llama_one_file", ("9", "10"), "model.safetensors"),
    "paddle": ("paddle/llama_bf16_io_ema_sd2v1", ("checkpoint-9", "checkpoint-10"), ".pdopt"),
    "sharded": ("sharded/fsdp2_tp2_dp2", ("step_9", "step_10"), "model.tp01_dp01.safetensors"),
}


def laid(folder: Path, kind: str) -> tuple[Path, Path, str]:
    """(the older step, the newer, the part of it that counts): a run of two steps."""
    source, names, part = RUNS[kind]
    copy = shutil.copytree if (FIXTURES / source).is_dir() else shutil.copy2
    folder.mkdir(exist_ok=True)
    for name in names:
        copy(FIXTURES / source, folder / name)
    return folder / names[0], folder / names[1], part


def the_file(step: Path, part: str) -> Path:
    return next(path for path in sorted(step.rglob("*")) if part in path.as_posix()) if part else step


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", RUNS)
def test_the_newest_is_taken_and_a_broken_one_is_not(kind: str, tmp_path: Path, capfd: Any) -> None:
    older, newer, part = laid(tmp_path / "run", kind)
    assert run(["latest", str(tmp_path / "run")]) == 0
    assert capfd.readouterr() == (f"{newer}\n", "")
    file = the_file(newer, part)
    whole = file.read_bytes()
    for keep in (len(whole) // 2, len(whole) - 1, 0):
        file.write_bytes(whole[:keep])
        document = ckpt.latest(tmp_path / "run")
        assert document["path"] == str(older), keep
        assert document["passed_over"][0]["path"] == str(newer) and document["passed_over"][0]["why"]
    if part:
        file.unlink()
    assert run(["latest", str(tmp_path / "run")]) == 0
    out, err = capfd.readouterr()
    assert out == f"{older}\n" and f"passed over {newer.name}: " in err


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("folder", ["checkpoint", "checkpoints"])
def test_steps_one_folder_down_are_the_runs(folder: str, kind: str, tmp_path: Path) -> None:
    """For what opens a checkpoint as for `ckpt latest`, which has the same rule."""
    run = tmp_path / "run"
    other = "checkpoint" if folder == "checkpoints" else "checkpoints"
    (run / other).mkdir(parents=True)
    older, newer, _ = laid(run / folder, kind)
    (run / "log.txt").write_text("")
    assert ckpt.latest(run)["path"] == str(newer)
    with pytest.raises(UnknownFormat, match=r"holds 2 checkpoints and no pointer file") as several:
        ckpt.open(run)
    assert several.value.code == "E0392" and str(newer) in several.value.hint and str(older) in several.value.hint
    shutil.rmtree(newer) if newer.is_dir() else newer.unlink()
    assert ckpt.latest(run)["path"] == str(older)
    assert ckpt.open(run).catalog.tensors.keys() == ckpt.open(older).catalog.tensors.keys()
    laid(run / other, "dcp")
    for verb in (ckpt.latest, ckpt.open):  # no answer would let a job begin anew
        with pytest.raises(UnknownFormat, match="in 2 folders"):
            verb(run)


def test_none_is_exit_1_with_nothing_on_stdout(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "logs").mkdir()
    assert run(["latest", str(tmp_path)]) == 1
    out, err = capfd.readouterr()
    assert not out and "passed over checkpoint-5: it is no checkpoint" in err and "none of 1 steps" in err
    assert run(["latest", str(tmp_path), "--json", "-q"]) == 1
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert (document["schema_version"], document["path"], document["step"], err) == (1, None, None, "")
    assert run(["latest", str(tmp_path / "logs")]) == 1
    assert "nothing in it has the name of a step" in capfd.readouterr().err
    assert run(["latest", str(tmp_path / "nothing")]) == 7


@pytest.mark.parametrize(
    ("pointer", "text", "said"),
    [
        ("latest", "global_step30", "latest names global_step30, which is not there"),
        ("latest", "global_step9", "latest names global_step9, and global_step10 is newer"),
        ("latest", "../global_step9", "latest names no step"),
        ("latest", "", "latest names no step"),
        ("latest", "\n\x00\x01", "latest names no step"),
        ("latest_checkpointed_iteration.txt", "", "latest_checkpointed_iteration.txt names no step"),
        ("latest_checkpointed_iteration.txt", "30", "names iter_0000030, which is not there"),
    ],
)
def test_pointer_files_are_held_against_what_is_there(pointer: str, text: str, said: str, tmp_path: Path) -> None:
    _, newer, part = laid(tmp_path, "deepspeed")
    (tmp_path / pointer).write_text(text)
    document = ckpt.latest(tmp_path)
    assert document["path"] == str(newer)
    assert [note for note in document["notes"] if said in note] == document["notes"] and document["notes"]
    (tmp_path / pointer).write_text("global_step10")
    the_file(newer, part).unlink()
    assert ckpt.latest(tmp_path)["notes"] == [f"{pointer} names global_step10, which is not complete"]


def test_what_a_pointer_names_is_a_step_whatever_it_is_called(tmp_path: Path) -> None:
    older, _, _ = laid(tmp_path, "megatron")
    older.rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert ckpt.latest(tmp_path)["path"] == str(tmp_path / "release")


TRAINER = ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json")


def trainer(folder: Path, steps: tuple[int, ...]) -> list[Path]:
    """What transformers' Trainer leaves at each step, in the order in which it writes."""
    found = []
    for step in steps:
        shutil.copytree(FIXTURES / "safetensors/llama_one_file", folder / f"checkpoint-{step}")
        found.append(folder / f"checkpoint-{step}")
        for name in TRAINER[:-1]:
            shutil.copy2(FIXTURES / "torch/training.pt", found[-1] / name)
        (found[-1] / TRAINER[-1]).write_text(json.dumps({"global_step": step, "log_history": [{"loss": float("nan")}]}))
    return found


def test_a_trainer_killed_at_any_file_leaves_no_step_that_is_taken(tmp_path: Path) -> None:
    *_, older, newer = trainer(tmp_path, (100, 200, 300))
    assert ckpt.latest(tmp_path)["path"] == str(newer)
    shutil.copytree(newer, tmp_path / "whole")
    order = ("config.json", "model.safetensors", *TRAINER)
    for at, name in enumerate(order):
        for share in (0, 2, 3):  # of this file; those behind it were never begun
            shutil.rmtree(newer)
            shutil.copytree(tmp_path / "whole", newer)
            for later in order[at + 1 :]:
                (newer / later).unlink()
            whole = (newer / name).read_bytes()
            (newer / name).write_bytes(whole[: len(whole) * share // 3])
            if (name, share) != (order[-1], 3):
                assert ckpt.latest(tmp_path)["path"] == str(older), (name, share)
            else:
                assert ckpt.latest(tmp_path)["path"] == str(newer)


def test_fewer_ranks_than_before_and_what_was_added_later_are_no_faults(tmp_path: Path) -> None:
    first, second, newer = trainer(tmp_path, (100, 200, 300))
    (newer / "rng_state_1.pth").unlink()
    for step in (first, second):
        (step / "eval_results.json").write_text("{}")
        (step / "merged").mkdir()
    assert ckpt.latest(tmp_path)["path"] == str(newer)


def test_a_step_of_several_checkpoints_is_whole_when_each_is(tmp_path: Path) -> None:
    """DeepSpeed's folder inside a Trainer's, beside the model; veRL's actor and critic."""
    for step in (100, 200):
        inside = tmp_path / f"trainer/checkpoint-{step}"
        shutil.copytree(FIXTURES / "safetensors/llama_one_file", inside)
        shutil.copytree(FIXTURES / "deepspeed/z1_bf16_dp4", inside / f"global_step{step}")
        (inside / "latest").write_text(f"global_step{step}")
        for part in ("actor", "critic"):
            shutil.copytree(FIXTURES / "torch/ranks_fsdp2_dp4", tmp_path / f"verl/global_step_{step}" / part)
        shutil.copy2(FIXTURES / "torch/weights.pt", tmp_path / f"verl/global_step_{step}/data.pt")
    for name, step, gone in (
        ("trainer", "checkpoint-{}", "global_step200/mp_rank_00_model_states.pt"),
        ("trainer", "checkpoint-{}", "model.safetensors"),
        ("verl", "global_step_{}", "critic/model_world_size_4_rank_2.pt"),
        ("verl", "global_step_{}", "critic/optim_world_size_4_rank_0.pt"),
        ("verl", "global_step_{}", "data.pt"),
    ):
        file = tmp_path / name / step.format(200) / gone
        assert ckpt.latest(tmp_path / name)["path"] == str(tmp_path / name / step.format(200))
        kept = file.read_bytes()
        file.unlink()
        assert ckpt.latest(tmp_path / name)["path"] == str(tmp_path / name / step.format(100)), gone
        file.write_bytes(kept)
    shutil.rmtree(tmp_path / "verl/global_step_200/critic")
    assert ckpt.latest(tmp_path / "verl")["path"] == str(tmp_path / "verl/global_step_100")


def test_a_marker_of_nemo_says_that_a_step_is_not_written(tmp_path: Path) -> None:
    for step in (9, 19):
        shutil.copytree(FIXTURES / "megatron-dist/llama_tp2", tmp_path / f"gpt--val_loss=2.10-step={step}-last")
    assert ckpt.latest(tmp_path)["step"] == 19
    (tmp_path / "gpt--val_loss=2.10-step=19-last-unfinished").touch()
    assert ckpt.latest(tmp_path)["step"] == 9


@pytest.mark.parametrize("link", [False, True])
def test_names_that_are_no_steps(link: bool, tmp_path: Path) -> None:
    older, newer, _ = laid(tmp_path, "transformers")
    for name in ("tmp-checkpoint-900", "checkpoint-900.tmp", "best-checkpoint", ".checkpoint-900.ckpt-partial"):
        shutil.copytree(newer, tmp_path / name)
    if link:
        (tmp_path / "last").symlink_to(older.name)
        (tmp_path / "checkpoint-800").symlink_to(older.name)
    assert ckpt.latest(tmp_path)["path"] == str(tmp_path / "checkpoint-800" if link else newer)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (("iter_0000100", "iter_0000020", "iter_1000000"), (1, 0, 2)),
        (("epoch=1-step=5", "epoch=0-step=9", "epoch=2-step=9-v1"), (0, 1, 2)),
        (("global_step5_universal", "global_step5", "global_step40"), (0, 1, 2)),
        (("100", "99", "checkpoint-100"), (1, 0, 2)),
        (("gpt--val_loss=1.2-step=30-consumed_samples=60.0", "gpt--val_loss=0.9-step=4-consumed_samples=8.0"), (1, 0)),
    ],
)
def test_the_order_of_steps(names: tuple[str, ...], order: tuple[int, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    assert [step.name for step in run_at(str(tmp_path)).steps] == [names[i] for i in order]


def test_steps_and_epochs_have_no_order(tmp_path: Path) -> None:
    for name in ("epoch_3", "step-100"):
        (tmp_path / name).mkdir()
    with pytest.raises(UsageError) as caught:
        ckpt.latest(tmp_path)
    assert caught.value.code == "E1670"
    assert step_of("9" * 19) is None and step_of("9" * 19, numbers=True) is None


def test_a_run_behind_a_url(tmp_path: Path) -> None:
    _, newer, part = laid(tmp_path / "run", "torchtitan")
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path / "run"), "/latest-run", recursive=True)
    try:
        assert ckpt.latest("memory://latest-run")["path"] == "memory://latest-run/step-10"
        store.rm(f"/latest-run/{newer.name}/.metadata")
        assert ckpt.latest("memory://latest-run/")["path"] == "memory://latest-run/step-9"
    finally:
        store.rm("/latest-run", recursive=True)


def test_a_step_that_asks_for_code_is_passed_over(tmp_path: Path) -> None:
    older, newer, _ = laid(tmp_path, "transformers")
    shutil.rmtree(newer)
    newer.mkdir()
    (newer / "pytorch_model.bin").write_bytes(b"\x80\x02cposix\nsystem\nq\x00X\x02\x00\x00\x00lsq\x01\x85q\x02Rq\x03.")
    document = ckpt.latest(tmp_path)
    assert document["path"] == str(older) and document["passed_over"][0]["why"]


CHECKPOINTS = sorted(
    path
    for kind in ("safetensors", "torch", "dcp", "megatron", "megatron-dist", "deepspeed", "paddle", "meta", "peft")
    for path in (FIXTURES / kind).iterdir()
    if ".truth." not in path.name and not path.name.endswith("_full.json")
)


@pytest.mark.share(16)
@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_real_checkpoint_is_sound(path: Path) -> None:
    try:
        assert findings_at(str(path), Reading())[0] == []
    except CkptError as e:
        assert e.code == "E0420"  # asks for code


def test_a_latest_that_leads_nowhere_is_named_and_the_newest_sound_step_taken(tmp_path: Path) -> None:
    """A link to a step that retention took away, and a pointer file that names one."""
    laid(tmp_path, "dcp")
    (tmp_path / "latest").symlink_to("step_200")
    found = ckpt.latest(tmp_path)
    assert found["step"] == 10 and found["notes"] == ["latest names step_200, which is not there"]
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("/gone/step_7/")
    assert ckpt.latest(tmp_path)["notes"] == ["latest names step_7, which is not there"]
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_text("step_200")
    assert ckpt.latest(tmp_path)["notes"] == ["latest names step_200, which is not there"]
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step_9")
    assert ckpt.latest(tmp_path)["step"] == 10


def test_weights_without_an_iteration_next_to_steps_are_named_with_them(tmp_path: Path) -> None:
    """Megatron's `release/` and `iter_*`, whose pointer file is lost: neither is taken, and they are not one save."""
    source = FIXTURES / RUNS["megatron"][0]
    for name in ("release", "iter_0000100"):
        shutil.copytree(source, tmp_path / name)
    for _ in range(2):
        with pytest.raises(UnknownFormat) as caught:
            ckpt.verify(tmp_path)
        assert caught.value.code == "E0392"
        assert "release" in str(caught.value.hint) and "iter_0000100" in str(caught.value.hint)
        shutil.copytree(source, tmp_path / "iter_0000200", dirs_exist_ok=True)
    assert ckpt.latest(tmp_path)["path"] == str(tmp_path / "iter_0000200")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert ckpt.verify(tmp_path)["path"] == str(tmp_path / "release")
