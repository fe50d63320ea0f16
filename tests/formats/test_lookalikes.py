"""What resembles a checkpoint that is read: recognised, refused by name with what to do, and overridden by `--from`."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ckpt_tool.cli import run
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import open_source

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
KNOWN = FIXTURES / "lookalikes"
Maker = Callable[[Path], None]


def weights(folder: Path, name: str = "model.safetensors", key: str = "w") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: np.arange(6, dtype=np.float32).reshape(2, 3)}, folder / name)


def fixture(name: str) -> Maker:
    return lambda folder: shutil.copytree(KNOWN / name, folder, dirs_exist_ok=True) and None


def holding(name: str, data: bytes) -> Maker:
    return lambda folder: (folder / name).write_bytes(data) and None


def pipeline(folder: Path) -> None:
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    for part in ("unet", "vae"):
        weights(folder / part, "diffusion_pytorch_model.safetensors")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")


def modules(folder: Path) -> None:
    listed = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    weights(folder)
    weights(folder / "2_Dense", "pytorch_model.bin", key="linear.weight")


def verl(folder: Path) -> None:
    """`global_step_N` of veRL: nothing but the data loader's state at its root, two models below."""
    torch.save({"_num_yielded": 3}, folder / "data.pt")
    for role in ("actor", "critic"):
        shutil.copytree(FIXTURES / "torch/ranks_tp2_dp2", folder / role)


def loader(folder: Path) -> None:
    """A job's own record beside a folder with a checkpoint."""
    torch.save({"_num_yielded": 3}, folder / "data.pt")
    shutil.copytree(FIXTURES / "torch/ranks_tp2_dp2", folder / "policy")


def nemo_ranks(folder: Path) -> None:
    """What NeMo 1 packs of a job whose ranks saved apart, unpacked."""
    (folder / "model_config.yaml").write_text("mcore_gpt: false\n")
    for rank in (0, 1):
        (folder / f"tp_rank_0{rank}_pp_rank_000").mkdir()
        torch.save({"model.w": torch.zeros(2)}, folder / f"tp_rank_0{rank}_pp_rank_000/model_weights.ckpt")


def tar_of(name: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as packed:
        packed.addfile(tarfile.TarInfo(name))
    return out.getvalue()


def zip_of(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        packed.writestr(name, b"\x93NUMPY")
    return out.getvalue()


def tensorflow(folder: Path) -> None:
    for name in ("model-7.index", "model-7.data-00000-of-00001", "checkpoint"):
        (folder / name).write_bytes(bytes(100))


# name: (maker, code, words of the message, words of the hint)
CASES: dict[str, tuple[Maker, str, str, str]] = {
    "slime": (fixture("slime_delta"), "E1640", "changes since another version", "base"),
    "old-orbax": (fixture("orbax_0_2"), "E1640", "Orbax or T5X of 2023", "PyTreeCheckpointer"),
    "diffusers": (pipeline, "E1640", "diffusers pipeline", "unet, vae"),
    "sentence-transformers": (modules, "E1640", "2_Dense", "--from safetensors"),
    "verl": (verl, "E0392", "2 models", "actor"),
    "loader": (loader, "E1642", "no tensor", "policy"),
    "tensorflow": (tensorflow, "E0390", "TensorFlow", "safetensors"),
    "nemo-ranks": (nemo_ranks, "E1640", "a file a rank", "torch_dist"),
    "tar": (holding("model.archive", tar_of("weights.bin")), "E0390", "tar archive", "unpack"),
    "npz": (holding("weights.npz", zip_of("w.npy")), "E0390", "NumPy .npz", "safetensors"),
    "flax": (holding("flax_model.msgpack", b"\x82\xa5model" + bytes(64)), "E0390", "MessagePack", "safetensors"),
    "onnx": (holding("model.onnx", b"\x08\x07\x12\x07pytorch" + bytes(64)), "E0390", "ONNX", "inference format"),
    "keras": (holding("tf_model.h5", b"\x89HDF\r\n\x1a\n" + bytes(64)), "E0390", "HDF5", "safetensors"),
    "tflite": (holding("m.tflite", b"\x1c\0\0\0TFL3" + bytes(64)), "E0390", "TensorFlow Lite", "inference"),
    "lfs": (
        holding("pytorch_model.gguf", b"version https://git-lfs.github.com/spec/v1\n"),
        "E0390",
        "Git LFS",
        "lfs pull",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_named_and_refused_by_every_verb(name: str, tmp_path: Path, capfd) -> None:
    make, code, message, hint = CASES[name]
    source = tmp_path / "source"
    out = tmp_path / "out"
    source.mkdir()
    make(source)
    for verb in (
        *([["inspect", source]] if name != "slime" else []),  # of a delta it says what it is
        ["verify", source],
        ["reshard", source, out],
        ["convert", source, out, "--to", "dcp"],
        ["merge", source, out],
        ["diff", source, source],
    ):
        assert run([*map(str, verb), "--json"]) == 3, verb
        error = json.loads(capfd.readouterr().err.strip().splitlines()[-1])["error"]
        assert error["code"] == code and message in error["message"] and hint in error["hint"], error
        assert not out.exists()
    single = [path for path in source.iterdir() if path.is_file()]
    if code == "E0390" and len(single) == 1:
        with pytest.raises(CkptError) as e:
            open_source(str(single[0]), Reading())
        assert message in e.value.message and hint in e.value.hint


@pytest.mark.parametrize(
    ("name", "fmt", "tensors"), [("slime", "safetensors", 8), ("sentence-transformers", "safetensors", 1)]
)
def test_from_decides(name: str, fmt: str, tensors: int, tmp_path: Path) -> None:
    CASES[name][0](tmp_path)
    assert len(open_source(str(tmp_path), Reading(from_format=fmt)).catalog.tensors) == tensors


def test_a_torch_dist_below_the_folder_is_named(tmp_path: Path) -> None:
    """It is finished, and not where the user looked: the error says where it lies, and that place reads."""
    inner = tmp_path / "run" / "export" / "iter_0000001"
    shutil.copytree(FIXTURES / "megatron-dist/dp2_model_space", inner)
    (folder,) = {path.parent for path in inner.rglob("metadata.json")}
    with pytest.raises(CkptError) as e:
        open_source(str(tmp_path / "run"), Reading())
    assert (e.value.code, e.value.exit_code) == ("E1644", 3) and str(folder) in (e.value.hint or "")
    assert open_source(str(folder), Reading()).format.name == "megatron-dist"


def test_one_module_with_weights_is_a_model(tmp_path: Path) -> None:
    modules(tmp_path)
    shutil.rmtree(tmp_path / "2_Dense")
    assert open_source(str(tmp_path), Reading()).format.name == "safetensors"
    (tmp_path / "0_Transformer").mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "0_Transformer" / "model.safetensors")
    with pytest.raises(CkptError) as e:
        open_source(str(tmp_path), Reading())
    assert e.value.code == "E1640" and "0_Transformer" in e.value.hint and "--from" not in e.value.hint


def test_a_pipeline_beside_a_whole_file_is_two_checkpoints(tmp_path: Path) -> None:
    pipeline(tmp_path)
    weights(tmp_path, "sd_xl_base_1.0.safetensors")
    with pytest.raises(CkptError) as e:
        open_source(str(tmp_path), Reading())
    assert e.value.code == "E0391" and "safetensors" in e.value.message and "diffusers" in e.value.message
    assert e.value.hint == "say which with --from safetensors"


# -- a Hugging Face cache ----------------------------------------------------------------------------------------------


def cache(root: Path, *snapshots: str, **refs: str) -> Path:
    folder = root / "models--org--name"
    (folder / "blobs").mkdir(parents=True)
    weights(folder / "blobs", "0123abcd")
    for name, commit in refs.items():
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / name).write_text(commit)
    for commit in snapshots:
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "model.safetensors").symlink_to("../../blobs/0123abcd")
    return folder


@pytest.mark.parametrize(
    ("snapshots", "refs", "said"),
    [
        (("aa11", "bb22"), {"main": "bb22", "pr": "aa11"}, "refs/main names the snapshot bb22"),
        (("aa11",), {}, "aa11 is the only snapshot in the cache"),
    ],
)
def test_a_cache_is_followed_to_its_snapshot(
    snapshots: tuple[str, ...], refs: dict[str, str], said: str, tmp_path: Path
) -> None:
    opened = open_source(str(cache(tmp_path, *snapshots, **refs)), Reading())
    assert opened.resolved == said and opened.path.endswith(f"snapshots/{said.split()[4 if refs else 0]}")
    assert [key.name for key in opened.catalog.tensors] == ["w"]


@pytest.mark.parametrize(
    ("refs", "words"),
    [
        ({"main": "cc33"}, "cc33, which is not there"),
        ({}, "2 snapshots and no refs/main"),
        ({"v1": "aa11", "v2": "bb22"}, "2 snapshots and no refs/main"),
    ],
)
def test_a_cache_without_its_snapshot_names_those_there(refs: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(CkptError) as e:
        open_source(str(cache(tmp_path, "aa11", "bb22", **refs)), Reading())
    assert (e.value.code, e.value.exit_code) == ("E1641", 3) and words in e.value.message
    assert "snapshots/aa11, snapshots/bb22" in e.value.hint


@pytest.mark.parametrize("text", ["../../x", "/etc", "a\nb"])
def test_a_ref_out_of_the_cache_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(CkptError) as e:
        open_source(str(cache(tmp_path, "aa11", main=text)), Reading())
    assert (e.value.code, e.value.exit_code) == ("E0410", 4)


# -- pointer files -----------------------------------------------------------------------------------------------------


def trainer(folder: Path) -> Path:
    """A Trainer's checkpoint with DeepSpeed's beside the model."""
    weights(folder)
    shutil.copytree(FIXTURES / "deepspeed/z1_bf16_dp4", folder / "global_step500")
    (folder / "latest").write_text("global_step500")
    return folder


def test_a_model_beside_a_pointer_is_two_checkpoints(tmp_path: Path) -> None:
    folder = trainer(tmp_path / "checkpoint-500")
    for source in (folder, tmp_path):
        with pytest.raises(CkptError) as e:
            open_source(str(source), Reading())
        assert e.value.code == "E0391" and "safetensors" in e.value.message and "deepspeed" in e.value.message
        assert "--from safetensors" in e.value.hint and "global_step500" in e.value.hint
        assert open_source(str(source), Reading(from_format="safetensors")).path.endswith("checkpoint-500")
        assert open_source(str(source), Reading(from_format="deepspeed")).path.endswith("global_step500")


def test_side_files_beside_a_pointer_are_no_checkpoint(tmp_path: Path) -> None:
    folder = trainer(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"args": 1}, folder / "training_args.bin")
    torch.save({"w": torch.ones(2)}, folder / "notes.pt")
    assert open_source(str(folder), Reading()).format.name == "deepspeed"


def test_a_number_in_verls_pointer_is_its_own_folder(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "torch/ranks_tp2_dp2", tmp_path / "global_step_7")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert open_source(str(tmp_path), Reading()).path.endswith("global_step_7")


@pytest.mark.parametrize("system", ["fsdp", "megatron"])
def test_verl_s_run_opens_at_its_one_model(system: str, tmp_path: Path) -> None:
    """Megatron's `dist_ckpt/` has no arguments of a job: the config lies in `huggingface/` beside it."""
    actor = tmp_path / "run/global_step_7/actor"
    real = FIXTURES / "convert/llama"
    if system == "fsdp":
        shutil.copytree(FIXTURES / "torch/ranks_tp2_dp2", actor)
    else:
        shutil.copytree(real / "torch_dist/iter_0000001", actor / "dist_ckpt")
        torch.save({"lr_scheduler": {"num_steps": 3}}, actor / "dist_ckpt/common.pt")
        (actor / "huggingface").mkdir()
        shutil.copy(real / "hf/config.json", actor / "huggingface")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("7")
    torch.save({"_num_yielded": 3}, actor.with_name("data.pt"))
    opened = open_source(str(tmp_path / "run"), Reading())
    assert opened.path.endswith("global_step_7/actor") and "actor is the only model" in opened.resolved
    if system == "megatron":
        assert run(["convert", str(tmp_path / "run"), str(tmp_path / "hub"), "--to", "safetensors", "-q"]) == 0
        assert run(["diff", str(tmp_path / "hub"), str(real / "hf"), "-q"]) == 0
        assert (tmp_path / "hub/config.json").is_file()
    shutil.copytree(actor, actor.with_name("critic"))
    with pytest.raises(CkptError) as e:
        open_source(str(tmp_path / "run"), Reading())
    assert e.value.code == "E0392" and "global_step_7/critic" in e.value.hint


# -- an optimizer beside the model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["optimizer.bin", "optimizer_1.bin", "optimizer.pt", "optimizer.pdopt"])
@pytest.mark.parametrize("model", ["model.safetensors", "pytorch_model.bin"])
def test_moments_are_not_left_behind_in_silence(name: str, model: str, tmp_path: Path, capfd) -> None:
    source = tmp_path / "source"
    weights(source)
    if model != "model.safetensors":
        (source / "model.safetensors").unlink()
        torch.save({"w": torch.ones(2, 3)}, source / model)
    torch.save(
        {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}}, "param_groups": []}, source / name
    )
    left = name.endswith(".pdopt") and model != "model.safetensors"  # Paddle's own checkpoint then
    for verb in ("convert", "merge", "reshard"):
        to = [] if verb == "reshard" else ["--to", "dcp"]
        if verb == "reshard" and model == "model.safetensors":
            continue  # a hub's model stays one: there is no place for moments
        assert run([verb, str(source), str(tmp_path / verb), *to, "--json"]) == (3 if left else 2), verb
        error = json.loads(capfd.readouterr().err.strip().splitlines()[-1])["error"]
        assert left or (error["code"] == "E1643" and name in error["message"] and "--drop optimizer" in error["hint"])
        assert not (tmp_path / verb).exists()
    if left:
        return
    for number, more in enumerate((["--state", "model"], ["--drop", "optimizer"])):
        assert run(["convert", str(source), str(tmp_path / f"out{number}"), "--to", "dcp", *more]) == 0
    assert run(["convert", str(source), str(tmp_path / "hub"), "--to", "safetensors"]) == 0, (
        "no place for moments there"
    )


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_one_file_of_a_distributed_checkpoint_is_called_that(name: str, capfd) -> None:
    assert run(["inspect", str(FIXTURES / "dcp/fsdp2_dp4" / name)]) == 3
    error = capfd.readouterr().err
    assert "one file of a distributed checkpoint" in error and "pass the folder" in error


def test_the_folder_of_all_caches_names_its_models(tmp_path: Path) -> None:
    cache(tmp_path, "aa11", main="aa11")
    with pytest.raises(CkptError) as e:
        open_source(str(tmp_path), Reading())
    assert e.value.code == "E0390" and e.value.hint == "pass one of its models: models--org--name"
