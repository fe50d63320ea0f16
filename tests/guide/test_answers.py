"""Ten questions that people ask most: the guide's command is typed, and the real library judges what comes of it.

Each command is that of the page: a recipe that changes is judged as it is then.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recipe_pages import commands_of, read_recipes
from sources import FIXTURES, RECIPES, ROOT, Sources

from ckpt_tool.cli import run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from torch.distributed.checkpoint import FileSystemReader, load  # noqa: E402

COMMANDS = {recipe.heading: recipe.command for recipe in read_recipes("recipes")}


@pytest.fixture
def answer(sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Types the command below a heading, and gives what it printed."""

    def follow(heading: str, code: int = 0) -> str:
        monkeypatch.chdir(tmp_path)
        sources.put(RECIPES[heading], tmp_path)
        printed = io.StringIO()
        for line in commands_of(COMMANDS[heading]):
            with contextlib.redirect_stdout(printed):
                assert run(shlex.split(line.replace("BUCKET", "bucket"))[1:]) == code
        return printed.getvalue()

    return follow


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def transformers_load(folder: Path) -> dict[str, Any]:
    """The weights as transformers loads them; nothing may be missing or left over."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return dict(model.state_dict())


def dcp_load(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """What `torch.distributed.checkpoint` loads into tensors of these shapes, below the key `model`."""
    into = {"model": {name: torch.full_like(value, 7) for name, value in like.items()}}
    load(into, checkpoint_id=folder, no_dist=True)
    return into["model"]


def test_fsdp2_is_loaded_by_transformers(answer, sources, tmp_path):
    answer("How do I load an FSDP2 checkpoint in transformers?")
    assert same(transformers_load(tmp_path / "OUT"), load_file(sources.hub / "model.safetensors"))


def test_the_optimizer_is_stripped(answer, sources, tmp_path):
    answer("How do I strip the optimizer?")
    truth = load_file(sources.hub / "model.safetensors")
    assert same(dcp_load(tmp_path / "OUT", truth), truth)
    names = FileSystemReader(tmp_path / "OUT").read_metadata().state_dict_metadata
    assert not [name for name in names if "exp_avg" in name]
    assert [name for name in FileSystemReader(sources.fsdp2).read_metadata().state_dict_metadata if "exp_avg" in name]


def test_megatron_is_resharded_with_its_optimizer(answer, sources, tmp_path):
    """Rank files are compared with slices of the trained model, cut and stacked here as Megatron does it."""
    answer("How do I reshard Megatron TP8 PP4 to TP4 PP2 with the optimizer?")
    step = tmp_path / "OUT" / "iter_0000001"
    ranks = sorted(path.name for path in step.iterdir())
    assert ranks == [f"mp_rank_{tp:02}_{pp:03}" for tp in range(4) for pp in range(2)]
    assert len(list(sources.megatron_tp8_pp4.glob("iter_*/mp_rank_*"))) == 32

    training = torch.load(sources.training, weights_only=True)
    moments = {name: state["exp_avg"] for name, state in training["optimizer"]["state"].items()}
    for tp, stage in ((0, 0), (3, 1), (2, 0)):
        content = torch.load(step / f"mp_rank_{tp:02}_{stage:03}" / "model_optim_rng.pt", weights_only=False)
        expected = _megatron_rank(training["model"], tp, stage)
        found = {name: value for name, value in content["model"].items() if torch.is_tensor(value)}
        assert same(found, expected)

        expected_moments = _megatron_rank(moments, tp, stage)
        optimizer = content["optimizer"]
        states = optimizer.get("optimizer", optimizer)["state"]
        found_moments = sorted(value["exp_avg"].double().sum().item() for value in states.values())
        assert found_moments == sorted(value.double().sum().item() for value in expected_moments.values())


def _megatron_rank(model: dict[str, Any], tp: int, stage: int) -> dict[str, Any]:
    """What tensor rank `tp` of 4 holds in stage `stage` of 2: two layers each, eight heads of eight."""
    rank: dict[str, Any] = {}
    if stage == 0:
        rank["embedding.word_embeddings.weight"] = model["model.embed_tokens.weight"].chunk(4)[tp]
    else:
        rank["decoder.final_layernorm.weight"] = model["model.norm.weight"]
        rank["output_layer.weight"] = model["lm_head.weight"].chunk(4)[tp]
    for layer in range(2):
        hub = f"model.layers.{2 * stage + layer}."
        own = f"decoder.layers.{layer}."
        heads = [model[f"{hub}self_attn.{part}_proj.weight"].reshape(8, 8, 64) for part in "qkv"]
        rank[f"{own}self_attention.linear_qkv.weight"] = torch.cat(heads, 1).reshape(-1, 64).chunk(4)[tp]
        rank[f"{own}self_attention.linear_proj.weight"] = model[f"{hub}self_attn.o_proj.weight"].chunk(4, 1)[tp]
        halves = [model[f"{hub}mlp.{part}_proj.weight"].chunk(4)[tp] for part in ("gate", "up")]
        rank[f"{own}mlp.linear_fc1.weight"] = torch.cat(halves)
        rank[f"{own}mlp.linear_fc2.weight"] = model[f"{hub}mlp.down_proj.weight"].chunk(4, 1)[tp]
        rank[f"{own}input_layernorm.weight"] = model[f"{hub}input_layernorm.weight"]
        rank[f"{own}pre_mlp_layernorm.weight"] = model[f"{hub}post_attention_layernorm.weight"]
    return rank


def test_qwen3_moe_becomes_megatron_with_eight_expert_ranks(answer, sources, tmp_path):
    """torch's own reader of `torch_dist` finds every expert in its place."""
    answer("How do I convert Qwen3-MoE to Megatron with EP8?")
    (step,) = (path.parent for path in (tmp_path / "OUT").rglob(".metadata"))
    metadata = FileSystemReader(step).read_metadata().state_dict_metadata
    hub = load_file(sources.qwen3_moe / "model.safetensors")

    def fused(layer: int, expert: int) -> Any:
        own = f"model.layers.{layer}.mlp.experts.{expert}."
        return torch.cat([hub[f"{own}gate_proj.weight"], hub[f"{own}up_proj.weight"]])

    name = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    assert list(metadata[name].size) == [2, 8, 32, 64]
    into = {name: torch.zeros(2, 8, 32, 64)}
    load(into, checkpoint_id=step, no_dist=True)
    assert all(
        torch.equal(into[name][layer, expert], fused(layer, expert)) for layer in range(2) for expert in range(8)
    )
    assert len({tuple(chunk.offsets[:2]) for chunk in metadata[name].chunks}) == 16  # a layer and an expert each


def test_a_lora_is_merged_into_dcp(answer, sources, tmp_path):
    from peft import PeftModel

    answer("How do I merge a LoRA adapter into a DCP checkpoint?")
    base = transformers.AutoModelForCausalLM.from_pretrained(sources.hub)
    merged = PeftModel.from_pretrained(base, sources.adapter).merge_and_unload().state_dict()
    assert same(dcp_load(tmp_path / "OUT", dict(merged)), dict(merged))


def test_the_corrupt_rank_is_named(answer):
    printed = answer("How do I find out which rank is corrupt?", code=1)
    assert "mp_rank_01_000" in printed
    assert not [name for name in ("mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_001") if f"{name}/" in printed]


def test_an_upload_is_what_a_client_of_s3_downloads(answer, sources, tmp_path, bucket):
    answer("How do I upload to S3?")
    names = [each["Key"] for each in bucket.list_objects_v2(Bucket="bucket", Prefix="OUT/")["Contents"]]
    (tmp_path / "down").mkdir()
    for name in names:
        bucket.download_file("bucket", name, str(tmp_path / "down" / Path(name).name))
    assert same(transformers_load(tmp_path / "down"), load_file(sources.hub / "model.safetensors"))


def test_the_job_file_is_one_that_slurm_can_run(answer, sources, tmp_path):
    """A worker is started as Slurm would start a task of the array, in another folder."""
    answer("How do I run a conversion on Slurm?")
    job = tmp_path / "job.sbatch"
    directives = [line for line in job.read_text().splitlines() if line.startswith("#SBATCH")]
    assert any("--array" in line for line in directives)

    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ckpt").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ckpt_tool "$@"\n')
    (programs / "ckpt").chmod(0o755)
    task = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_TASK_MIN": "0"}
    environment = {**os.environ, **task, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", job.name], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert same(transformers_load(tmp_path / "OUT"), load_file(sources.hub / "model.safetensors"))


def test_a_paddle_unified_checkpoint_is_loaded_by_transformers(answer, tmp_path):
    answer("How do I convert a Paddle unified checkpoint to Hugging Face?")
    loaded = transformers_load(tmp_path / "OUT")
    paddle = load_file(FIXTURES / "paddle-unified" / "ernie_nm_tp2.truth.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(loaded[name], paddle[f"model/{name}"].T)


def test_a_gguf_of_megatron_has_the_weights_of_the_model(answer, sources, tmp_path):
    gguf = pytest.importorskip("gguf")
    answer("How do I make a GGUF from a Megatron checkpoint?")
    reader = gguf.GGUFReader(tmp_path / "OUT.gguf")
    hub = load_file(sources.hub / "model.safetensors")
    assert len(reader.tensors) == len(hub)
    assert bytes(reader.fields["general.architecture"].parts[-1]).decode() == "llama"
    pairs = {"blk.2.ffn_down": "layers.2.mlp.down_proj", "blk.0.attn_v": "layers.0.self_attn.v_proj"}
    for tensor in reader.tensors:
        name = pairs.get(tensor.name.removesuffix(".weight"))
        if name is not None:
            values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
            original = hub[f"model.{name}.weight"]
            assert (values - original).abs().max() <= original.abs().max() / 127


def test_ten_answers_are_judged():
    judged = [name for name in globals() if name.startswith("test_") and name != "test_ten_answers_are_judged"]
    assert len(judged) == 10
