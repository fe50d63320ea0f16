"""Adapters that verl saved of Megatron models, a file a rank: held against Megatron-Bridge's own export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import ckpt_tool as ckpt
from ckpt_tool.api import convert, merge
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.errors import Incomplete, InputError, UnknownFormat, UsageError
from ckpt_tool.options.reading import Reading

FIXTURES = Path(__file__).parents[2] / "fixtures"
HERE = FIXTURES / "verl"
SAFE = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
CASES = {"lora_tp2pp2": 6, "canonical_tp2": 8, "dora_tp2": 8, "moe_ep2": 8, "moe_apart_ep2": 8}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_the_bridge_exports(case: str, tmp_path: Path) -> None:
    convert(str(HERE / case), str(tmp_path / "peft"), to="peft", lora_alpha=CASES[case])
    made = load_file(tmp_path / "peft" / SAFE)
    want = load_file(HERE / f"{case}.hf" / SAFE)
    magnitudes = {name for name in made if name.endswith("lora_magnitude_vector")}
    assert same({name: made[name] for name in made.keys() - magnitudes}, want)
    assert bool(magnitudes) == (case == "dora_tp2")
    mine, theirs = (json.loads((folder / CONFIG).read_text()) for folder in (tmp_path / "peft", HERE / f"{case}.hf"))
    assert {key for key in mine | theirs if mine.get(key) != theirs.get(key)} == {"base_model_name_or_path"}
    config = str(HERE / case / "huggingface")
    convert(str(HERE / case), str(tmp_path / "there"), to="megatron-dist", tp=2, lora_alpha=CASES[case])
    convert(str(tmp_path / "there"), str(tmp_path / "again"), to="peft", config=config)
    assert same(load_file(tmp_path / "again" / SAFE), made)


def test_magnitudes_are_those_of_the_ranks(tmp_path: Path) -> None:
    """The bridge exports none: two ranks have a query group each, of two heads of 8 rows, k and v; and half of gate and
    up."""
    convert(str(HERE / "dora_tp2"), str(tmp_path / "peft"), to="peft", lora_alpha=8)
    made = load_file(tmp_path / "peft" / SAFE)
    folder = HERE / "dora_tp2/adapter_checkpoint"
    ranks = [torch.load(folder / f"mp_rank_0{rank}_adapter.pt")["adapter_state_dict"] for rank in (0, 1)]
    layer = "base_model.model.model.layers.1."
    name = "lora_magnitude_vector"
    qkv = [rank["decoder.layers.1.self_attention.linear_qkv.adapter.weight_magnitude"].numpy() for rank in ranks]
    np.testing.assert_array_equal(made[f"{layer}self_attn.q_proj.{name}"], np.concatenate([part[:16] for part in qkv]))
    np.testing.assert_array_equal(made[f"{layer}self_attn.v_proj.{name}"], np.concatenate([part[24:] for part in qkv]))
    fc1 = [rank["decoder.layers.1.mlp.linear_fc1.adapter.weight_magnitude"].numpy() for rank in ranks]
    np.testing.assert_array_equal(made[f"{layer}mlp.gate_proj.{name}"], np.concatenate([part[:12] for part in fc1]))
    np.testing.assert_array_equal(made[f"{layer}mlp.up_proj.{name}"], np.concatenate([part[12:] for part in fc1]))


def step(tmp_path: Path, case: str = "lora_tp2pp2") -> Path:
    """A run of verl's with one step, its actor beside the optimizer that Megatron saved."""
    actor = tmp_path / "run/global_step_7/actor"
    shutil.copytree(HERE / case, actor)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("7")
    shutil.copytree(FIXTURES / "nemo2/llama_tp2/weights", actor / "dist_ckpt")
    return actor


def test_a_run_opens_at_its_adapter_and_names_the_optimizer_beside(tmp_path: Path) -> None:
    actor = step(tmp_path)
    document = inspect(str(tmp_path / "run"), Reading())
    assert (document["format"], document["mesh"]["tp"], document["mesh"]["pp"]) == ("megatron", 2, 2)
    assert document["total"]["tensors"] == 16
    convert(str(tmp_path / "run"), str(tmp_path / "peft"), to="peft", lora_alpha=6)
    assert same(load_file(tmp_path / "peft" / SAFE), load_file(HERE / "lora_tp2pp2.hf" / SAFE))
    report = convert(str(actor), str(tmp_path / "dist"), to="megatron-dist", lora_alpha=6)
    assert any("not read: the optimizer of the adapter's run" in note for note in report["notes"])
    assert inspect(str(actor), Reading(from_format="megatron-dist"))["states"].keys() >= {"exp_avg"}


def test_ckpt_merge_folds_it_as_it_folds_the_export(tmp_path: Path) -> None:
    base = str(FIXTURES / "megatron-lora/llama")
    merge([base, str(HERE / "lora_tp2pp2")], str(tmp_path / "a"), method="lora", lora_alpha=6)
    merge([base, str(HERE / "lora_tp2pp2.hf")], str(tmp_path / "b"), method="lora")
    assert same(load_file(tmp_path / "a/model.safetensors"), load_file(tmp_path / "b/model.safetensors"))


def test_alpha_must_be_said_and_may_not_contradict_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing says the adapter's scaling") as caught:
        convert(str(HERE / "canonical_tp2"), str(tmp_path / "out"), to="peft")
    assert "--lora-alpha" in str(caught.value.hint)
    bridge = str(FIXTURES / "megatron-lora/llama_tp2")
    with pytest.raises(UsageError, match="says 6") as caught:
        convert(bridge, str(tmp_path / "out"), to="peft", config=str(FIXTURES / "megatron-lora/llama"), lora_alpha=8)
    assert caught.value.code == "E2791"
    with pytest.raises(UsageError, match="more than 0"):
        convert(bridge, str(tmp_path / "out"), to="peft", lora_alpha=0)


def test_names_alone_tell_tensor_ranks_and_no_more(tmp_path: Path) -> None:
    folder = HERE / "canonical_tp2/adapter_checkpoint"
    config = str(HERE / "canonical_tp2/huggingface")
    convert(str(folder), str(tmp_path / "peft"), to="peft", lora_alpha=8, config=config)
    assert same(load_file(tmp_path / "peft" / SAFE), load_file(HERE / "canonical_tp2.hf" / SAFE))
    with pytest.raises(InputError, match="nothing says whether the second number") as caught:
        inspect(str(HERE / "moe_ep2/adapter_checkpoint"), Reading())
    assert caught.value.code == "E3030"


def edited(case: str, to: Path, **config: Any) -> Path:
    shutil.copytree(HERE / case, to)
    file = to / "transformer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return to


def test_what_is_missing_or_of_another_job_is_named(tmp_path: Path) -> None:
    copy = edited("lora_tp2pp2", tmp_path / "gone")
    (copy / "adapter_checkpoint/mp_rank_01_001_adapter.pt").unlink()
    with pytest.raises(Incomplete, match="mp_rank_01_001"):
        inspect(str(copy), Reading())
    with pytest.raises(Incomplete, match="adapters of 2 layers, transformer_config.json says 4"):
        inspect(str(edited("lora_tp2pp2", tmp_path / "fewer", num_layers=4)), Reading())
    with pytest.raises(Incomplete, match="says 6 in all"):
        inspect(str(edited("moe_apart_ep2", tmp_path / "experts", num_moe_experts=6)), Reading())
    for number, said in enumerate(({"tensor_model_parallel_size": 1 << 19, "pipeline_model_parallel_size": 1 << 19},
                                   {"num_moe_experts": 1 << 19})):  # fmt: skip
        with pytest.raises(InputError, match="no job has"):
            inspect(str(edited("moe_ep2", tmp_path / f"many{number}", **said)), Reading())


def test_files_of_another_content_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for name, held in (
        ("state", {"w": torch.zeros(2)}),
        ("adapter_state_dict", {"decoder.layers.0.w": torch.zeros(2)}),
    ):
        torch.save({name: held}, folder / "mp_rank_00_adapter.pt")
        with pytest.raises(InputError) as caught:
            inspect(str(folder), Reading())
        assert caught.value.code == "E2790"
    (folder / "mp_rank_00_adapter.pt").write_bytes(b"")
    with pytest.raises((InputError, UnknownFormat)):
        inspect(str(folder), Reading())


def whole(name: str, parts: list[np.ndarray]) -> np.ndarray:
    """A tensor of the whole model, of two tensor ranks' parts: A of row-parallel weights is cut by columns, all others
    by rows; B of fc1 is [gate; up] on each."""
    if name.endswith(("linear_proj.adapter.linear_in.weight", "linear_fc2.adapter.linear_in.weight")):
        return np.concatenate(parts, 1)
    if name.endswith("linear_fc1.adapter.linear_out.weight"):
        halves = [np.split(part, 2) for part in parts]
        return np.concatenate([halves[0][0], halves[1][0], halves[0][1], halves[1][1]])
    return np.concatenate(parts)


def test_the_optimizer_of_an_adapter_comes_along(tmp_path: Path) -> None:
    """Element by element what the live optimizer of each rank had, and the main weights round to the adapter."""
    case = HERE / "states_tp2pp2"
    convert(str(case), str(tmp_path / "dist"), to="megatron-dist", lora_alpha=8)
    ranks = [load_file(HERE / f"states_tp2pp2.rank{rank}.safetensors") for rank in range(4)]
    for path in (case, tmp_path / "dist"):
        opened = ckpt.open(str(path))
        states = {key.state for key in opened.catalog.tensors}
        assert states == {"model", "master", "exp_avg", "exp_avg_sq", "step"}
        for state in states - {"step", "model"}:
            assert opened.state(state).keys() == opened.state("model").keys()
            for stage in (0, 1):
                for key in (key for key in ranks[2 * stage] if key.startswith(f"{state}/")):
                    name = key.partition("/0.")[2]
                    mine = opened.state(state)[name.replace("layers.0.", f"layers.{stage}.")].numpy()
                    np.testing.assert_array_equal(mine, whole(name, [r[key] for r in ranks[2 * stage :][:2]]), key)
        for name, held in opened.state("model").items():
            assert torch.equal(torch.from_numpy(opened.state("master")[name].numpy()).bfloat16(), held.torch())


def test_an_optimizer_that_is_not_the_adapters_stays_behind(tmp_path: Path) -> None:
    actor = step(tmp_path)  # a whole model's beside the adapter
    (note,) = [note for note in inspect(str(actor), Reading())["notes"] if "not read" in note]
    assert "it has states of" in note
    other = tmp_path / "other"
    shutil.copytree(HERE / "canonical_tp2", other)
    shutil.copytree(HERE / "states_tp2pp2/dist_ckpt", other / "dist_ckpt")
    assert any("the optimizer of the adapter's run" in note for note in inspect(str(other), Reading())["notes"])
    assert inspect(str(other), Reading())["states"].keys() == {"model"}
    (other / "dist_ckpt/.metadata").write_bytes(b"")
    assert any("not read" in note for note in inspect(str(other), Reading())["notes"])


def test_chunks_that_verl_leaves_out_are_named_with_where_they_are(tmp_path: Path) -> None:
    """The two commands that the error leads to make what the bridge exports of all layers."""
    actor = HERE / "vpp2"
    with pytest.raises(Incomplete, match="the first of 2 model chunks of each stage alone") as caught:
        inspect(str(actor), Reading())
    assert "--from megatron-dist --keep-keys '*.adapter.*' --to megatron-dist" in str(caught.value.hint)
    convert(str(actor), str(tmp_path / "a"), from_format="megatron-dist", keep_keys=["*.adapter.*"], to="megatron-dist")
    config = str(actor / "huggingface")
    convert(str(tmp_path / "a"), str(tmp_path / "peft"), to="peft", lora_alpha=8, config=config)
    assert same(load_file(tmp_path / "peft" / SAFE), load_file(HERE / "vpp2.hf" / SAFE))
    assert inspect(str(tmp_path / "a"), Reading())["states"].keys() == {"model", "exp_avg", "exp_avg_sq", "step"}
    alone = shutil.copytree(actor, tmp_path / "alone", ignore=shutil.ignore_patterns("dist_ckpt"))
    with pytest.raises(Incomplete, match="in no file of it") as caught:
        inspect(str(alone), Reading())
    assert "export the adapter from the job" in str(caught.value.hint)


def test_stages_without_a_config_may_have_more_chunks(tmp_path: Path) -> None:
    """Three numbers say the stage, and not whether its first chunk is all of it."""
    folder = tmp_path / "adapter_checkpoint"
    folder.mkdir()
    for stage in (0, 1):
        own = HERE / f"vpp2/adapter_checkpoint/mp_rank_00_00{stage}_adapter.pt"
        shutil.copy(own, folder / f"mp_rank_00_00{stage}_000_adapter.pt")
    with pytest.raises(InputError, match="or whether the stages have more chunks") as caught:
        inspect(str(folder), Reading())
    assert caught.value.code == "E3030"
