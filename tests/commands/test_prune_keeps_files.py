"""`ckpt prune` removes what a checkpoint and its trainer wrote, and no step that holds anything else.

Every fixture of every format is a step here, alone and with a file that a person keeps at several depths; and so is
what the trainers write, by their own names.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_tool as ckpt
from ckpt_tool.cli import run
from ckpt_tool.conversion.accounted import find_other_files
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.trainer_files import written_by_trainers

FIXTURES = Path(__file__).parents[2] / "fixtures"
ONE = FIXTURES / "safetensors/llama_one_file"
OLD = time.time() - 10**6


def age(path: Path) -> None:
    for file in (path, *path.rglob("*")):
        os.utime(file, (OLD, OLD), follow_symlinks=False)


def lay_run(folder: Path, step: Path) -> Path:
    """A run whose oldest step is a copy of the given one; the newest is sound."""
    shutil.rmtree(folder, ignore_errors=True)
    older = folder / "checkpoint-1"
    if step.is_dir():
        shutil.copytree(step, older)
    else:
        older.mkdir(parents=True)
        shutil.copy(step, older)
    shutil.copytree(ONE, folder / "checkpoint-3")
    age(folder)
    return older


def prune(folder: Path, **options: Any) -> list[str]:
    """The reasons for which the older step is there, [] where it is gone."""
    between = folder / "checkpoint-2"  # so that what the oldest has of a training state is not asked of the newest
    shutil.copytree(ONE, between)
    age(folder)
    document = ckpt.prune(folder, keep_last=1, **options)
    (reasons,) = [row["reasons"] for row in document["keep"] if row["step"] == 1] or [[]]
    assert bool(reasons) == (folder / "checkpoint-1").exists()
    return reasons


def write(path: Path, data: bytes = b"mine") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def steps_of(name: str) -> list[Path]:
    """The checkpoints of a format's fixtures, the smallest first."""
    found = [path for path in (FIXTURES / name).iterdir() if ".truth." not in path.name and path.suffix != ".md"]
    return sorted(found, key=lambda path: (sum(each.stat().st_size for each in (path, *path.rglob("*"))), path.name))


# What a person keeps: in the step, in a folder of its own, in the checkpoint's deepest folder, deep below.
KEPT = ("notes.txt", "eval_results.json", "plots/loss.png", ".git/config", "{inner}/notes.md", "a/b/c/d/e/f/deep.txt")
# Names that are like those of a trainer, a tokenizer or a format.
ALIKE = (
    "tokenizer_notes.txt",
    "optimizer_notes.pt",
    "rng_state_of_mine.pth",
    "trainer_state.json.bak",
    "my.model",
    "model-best.safetensors",
    "saved_signal_mine",
    "modeling_mine.py",
)


def folders_in(step: Path) -> list[str]:
    return sorted(path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_dir())


def names_of_a_person(inner: list[str]) -> list[str]:
    """inner: the folders of the step."""
    return [name.format(inner=inner[-1] if inner else ".") for name in (*KEPT, *ALIKE)]


@pytest.mark.parametrize("name", registry.NAMES)
def test_every_fixture_goes_alone_and_stays_with_a_persons_file(tmp_path: Path, name: str) -> None:
    """All that a person may keep is found at once, as prune finds it; each alone keeps the step in the test below."""
    for number, checkpoint in enumerate(steps_of(name)):
        folder = tmp_path / "run"
        lay_run(folder, checkpoint)
        reasons = prune(folder)
        assert not reasons, (checkpoint.name, reasons)
        if number >= 2:
            continue

        older = lay_run(folder, checkpoint)
        inner = folders_in(older)
        kept = [f"{at}/notes.txt" for at in (".", *inner)] + names_of_a_person(inner)
        for name_of_file in kept:
            write(older / name_of_file)
        found = set(find_other_files(str(older), Reading()))
        assert found >= {os.path.normpath(name_of_file) for name_of_file in kept}, checkpoint.name
        (reason,) = prune(folder)
        assert f"{len(found)} files that are no part of a checkpoint" in reason, (checkpoint.name, reason)
        assert not prune(folder, with_other_files=True)


@pytest.mark.slow  # fourteen runs of prune for each of two fixtures of each format
@pytest.mark.parametrize("name", registry.NAMES)
def test_each_file_of_a_person_alone_keeps_the_step(tmp_path: Path, name: str) -> None:
    for checkpoint in steps_of(name)[:2]:
        folder = tmp_path / "run"
        older = lay_run(folder, checkpoint)
        for kept in names_of_a_person(folders_in(older)):
            path = older / kept
            there = path.parent.is_dir()
            write(path)
            (reason,) = prune(folder)
            relative = path.relative_to(older).as_posix()
            assert relative in reason and "no part of a checkpoint" in reason, (checkpoint.name, reason)
            path.unlink()
            if not there:
                shutil.rmtree(older / kept.split("/")[0])


@pytest.mark.parametrize("name", registry.NAMES)
def test_names_almost_like_a_broken_steps_own_are_a_persons(tmp_path: Path, name: str) -> None:
    """Where a step can't be read, the names that its format gives count, and none that only begin or end so."""
    folders = [path for path in sorted((FIXTURES / name).iterdir()) if path.is_dir()]
    for fixture in folders[:: max(1, len(folders) // 4)]:
        step = tmp_path / fixture.name
        shutil.copytree(fixture, step)
        own = [path for path in sorted(step.rglob("*")) if path.is_file()]
        kept = set[str]()
        for file in own[:: max(1, len(own) // 10)]:
            stem, dot, suffix = file.name.partition(".")
            for almost in (f"{stem}-best{dot}{suffix}", f"{file.name}~", f"my_{file.name}"):
                file.with_name(almost).write_bytes(b"mine")
                kept.add(file.with_name(almost).relative_to(step).as_posix())
        assert kept <= set(find_other_files(str(step), Reading())), kept - set(find_other_files(str(step), Reading()))


def test_the_reason_names_the_first_files_and_their_number(tmp_path: Path, capfd: Any) -> None:
    older = lay_run(tmp_path, ONE)
    for number in range(8):
        write(older / f"plot{number}.png")
    age(tmp_path)
    args = ["prune", str(tmp_path), "--keep-last", "1"]
    assert run([*args, "--json"]) == 0
    (row,) = [row for row in json.loads(capfd.readouterr().out)["keep"] if row["step"] == 1]
    names = "plot0.png, plot1.png, plot2.png, plot3.png, plot4.png and 3 more"
    text = f"8 files that are no part of a checkpoint: {names} (--with-other-files removes the step with them)"
    assert row["reasons"] == [text]
    assert run(args) == 0
    assert "8 files that are no part of" in capfd.readouterr().out
    assert older.is_dir()
    assert run([*args, "--with-other-files"]) == 0
    assert not older.exists()


def keep_a_checkpoint(step: Path) -> None:
    shutil.copytree(ONE, step / "best")


def keep_a_checkpoint_named_as_a_step(step: Path) -> None:
    shutil.copytree(ONE, step / "checkpoint-7")


def keep_a_repository(step: Path) -> None:
    write(step / ".git/HEAD", b"ref: refs/heads/main\n")
    write(step / ".git/objects/0a/1f")


def keep_a_link(step: Path) -> None:
    (step / "data").symlink_to(step.parent.parent / "elsewhere")


def keep_names_like_ours(step: Path) -> None:
    write(step / ".notes.ckpt-partial/chapter.tex")
    write(step / ".ckpt-journal-mine")


def keep_an_odd_name(step: Path) -> None:
    write(step / os.fsdecode(b"caf\xe9 \n.txt"))


@pytest.mark.parametrize(
    "keep",
    [
        keep_a_checkpoint,
        keep_a_checkpoint_named_as_a_step,
        keep_a_repository,
        keep_a_link,
        keep_names_like_ours,
        keep_an_odd_name,
    ],
)
@pytest.mark.parametrize("broken", [False, True])
def test_what_a_person_keeps_in_a_step_stays(tmp_path: Path, keep: Callable[[Path], None], broken: bool) -> None:
    """In a broken step too: what is left of it is known by the names that its format gives."""
    older = lay_run(tmp_path / "run", ONE)
    if broken:
        os.truncate(older / "model.safetensors", 1000)
    keep(older)
    assert prune(tmp_path / "run")


def test_broken_steps_without_a_persons_files_go(tmp_path: Path) -> None:
    for checkpoint in (ONE, FIXTURES / "dcp/titan", FIXTURES / "safetensors/trainer_qwen3"):
        older = lay_run(tmp_path / "run", checkpoint)
        weights = max((path for path in older.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        os.truncate(weights, 10)
        assert not prune(tmp_path / "run"), checkpoint


def test_a_file_that_is_put_in_meanwhile_keeps_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its age says."""
    from ckpt_tool.commands import prune as command

    older = lay_run(tmp_path, ONE)
    real = command._remove

    def put_in_first(*args: Any) -> Any:
        write(older / "notes.txt")
        age(tmp_path)
        return real(*args)

    monkeypatch.setattr(command, "_remove", put_in_first)
    document = ckpt.prune(tmp_path, keep_last=1)
    assert [row["removed"] for row in document["remove"]] == [False]
    assert (older / "notes.txt").read_bytes() == b"mine"


# -- what trainers write -----------------------------------------------------------------------------------------------

# A step by its trainer: the checkpoint in it ("" for the step's own folder), and what the trainer puts next to it.
TRAINERS = {
    "transformers' Trainer": (
        {"": "safetensors/llama_one_file"},
        "optimizer.pt scheduler.pt scaler.pt rng_state.pth rng_state_0.pth rng_state_11.pth trainer_state.json"
        " training_args.bin tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json"
        " merges.txt chat_template.jinja preprocessor_config.json generation_config.json README.md",
    ),
    "the Trainer with PEFT": (
        {"": "peft/on_llama"},
        "optimizer.pt scheduler.pt rng_state.pth trainer_state.json training_args.bin README.md tokenizer.model",
    ),
    "the Trainer with DeepSpeed": (
        {"": "safetensors/llama_one_file", "global_step10": "deepspeed/z1_fp16_dp2"},
        "latest zero_to_fp32.py scheduler.pt rng_state_0.pth rng_state_1.pth trainer_state.json training_args.bin",
    ),
    "DeepSpeed": ({"global_step10": "deepspeed/z1_fp16_dp2"}, "latest zero_to_fp32.py"),
    "accelerate": (
        {"": "safetensors/llama_one_file"},
        "random_states_0.pkl random_states_1.pkl optimizer.bin optimizer_1.bin scheduler.bin sampler.bin sampler_1.bin"
        " dl_state_dict.bin custom_checkpoint_0.pkl scaler.pt",
    ),
    "Lightning's FSDP": ({"": "dcp/titan"}, "meta.pt"),
    "Megatron-Bridge": (
        {"": "megatron-dist/llama_tp2/iter_*"},
        "run_config.yaml train_state.pt tokenizer/tokenizer.json tokenizer/vocab.txt tokenizer/tokenizer_config.json"
        " train_dataloader_dprank000.pt",
    ),
    "NeMo 2": ({"": "nemo2/llama_tp2"}, "context/nemo_tokenizer/tokenizer.json context/nemo_tokenizer/vocab.txt"),
    "veRL": (
        {"actor": "torch/ranks_tp2_dp2"},
        "data.pt actor/fsdp_config.json actor/huggingface/config.json actor/huggingface/tokenizer.json"
        " actor/lora_train_meta.json",
    ),
    "veRL with an engine": ({"": "torch/ranks_tp2_dp2"}, "data_0.pt data_1.pt fsdp_config.json huggingface/vocab.json"),
    "torchtune": ({"": "trainers/torchtune_full/epoch_*"}, "original_repo_id.json tokenizer.model"),
    "torchtitan": ({"": "dcp/titan"}, ""),
    "OLMo-core": ({"": "trainers/olmo_core/step2"}, "config.json data_paths.txt train/rank1.pt"),
    "prime-rl": ({"": "trainers/prime_rl/checkpoints/step_2"}, "trainer/dataloader/rank_1.pt"),
    "VeOmni": ({"": "trainers/veomni/global_step_2"}, "extra_state/extra_state_rank_1.pt"),
    "Paddle's Trainer": (
        {"": "paddle-unified/*"},
        "training_args.bin trainer_state.json rng_state_0.pth saved_signal_0 scheduler.pdparams scaler.pdparams",
    ),
    "MaxText": ({"": "orbax/*"}, ""),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_trainers_write_goes_with_the_step(tmp_path: Path, trainer: str) -> None:
    parts, beside = TRAINERS[trainer]
    made = tmp_path / "made"
    for inner, pattern in parts.items():
        found = [path for path in sorted(FIXTURES.glob(pattern)) if path.is_dir()]
        shutil.copytree(found[0], made / inner, dirs_exist_ok=True)
    for name in beside.split():
        if not (made / name).exists():
            text = b"global_step10" if name == "latest" else b"{}"
            write(made / name, text)
    older = lay_run(tmp_path / "run", made)
    reasons = prune(tmp_path / "run")
    assert not reasons

    lay_run(tmp_path / "run", made)
    inner = sorted(path.relative_to(older).as_posix() for path in older.rglob("*") if path.is_dir())
    for kept in ("notes.txt", "eval_results.json", "plots/loss.png", "args.yaml", *(f"{at}/notes.txt" for at in inner)):
        there = (older / kept).parent.is_dir()
        write(older / kept)
        assert f": {kept} (" in "".join(prune(tmp_path / "run")), kept
        (older / kept).unlink()
        if not there:
            (older / kept).parent.rmdir()


def test_a_trainers_names_count_only_where_it_was() -> None:
    assert list(written_by_trainers(["data.pt", "args.json", "latest_train_state.pt", "predict.jsonl"])) == []
    assert list(written_by_trainers(["training_args.bin", "args.json"])) == ["training_args.bin", "args.json"]


def test_the_products_own_outputs_go(tmp_path: Path) -> None:
    """What `ckpt` itself writes into a step is known by its reader; signatures and attestations by what they say."""
    made = tmp_path / "made"
    ckpt.convert(ONE, made, to="sharded", fsync=False, attest=made / "attestation.json")
    lay_run(tmp_path / "run", made)
    assert not prune(tmp_path / "run")
    for signed in ("files", "shards"):
        older = lay_run(tmp_path / "run", FIXTURES / "signing" / signed)
        (older / "tokenizer.txt").unlink()  # names that no tokenizer has
        shutil.rmtree(older / "tokenizer")
        assert (older / "model.sig").is_file()
        reasons = prune(tmp_path / "run")
        assert not reasons, (signed, reasons)
