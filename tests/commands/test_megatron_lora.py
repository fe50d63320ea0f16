"""Adapters that Megatron-Bridge saved, to PEFT and back: held against its own export, and against PEFT's arithmetic."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.api import convert, diff, merge, reshard
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.errors import Incomplete, InputError, UsageError
from ckpt_tool.options.reading import Reading

HERE = Path(__file__).parents[2] / "fixtures/megatron-lora"
BASE = {"moe_ep2": "qwen3_moe", "moe_shared": "qwen3_moe"}
SAFE = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
SWIFT = {"swift_tp2": "llama", "swift_ep2": "qwen3_moe"}
CASES = ("llama_tp2", "canonical_tp2", "dora_tp2", "moe_ep2", "moe_shared")


def base_of(case: str) -> str:
    return str(HERE / BASE.get(case, "llama"))


def tensors(folder: Path) -> dict[str, Any]:
    return load_file(folder / SAFE)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)


def changed(case: str, to: Path, change: Any, **config: Any) -> Path:
    """The case's export with other tensors, or another config."""
    shutil.copytree(HERE / f"{case}.hf", to)
    held = tensors(to)
    change(held)
    save_file(held, to / SAFE, {"format": "pt"})
    said = json.loads((to / CONFIG).read_text()) | config
    (to / CONFIG).write_text(json.dumps(said))
    return to


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_the_bridge_exports(case: str, tmp_path: Path) -> None:
    report = convert(str(HERE / case), str(tmp_path / "peft"), to="peft", config=base_of(case))
    made = tensors(tmp_path / "peft")
    want = tensors(HERE / f"{case}.hf")
    magnitudes = {name for name in made if name.endswith("lora_magnitude_vector")}
    assert same({name: made[name] for name in made.keys() - magnitudes}, want)
    assert bool(magnitudes) == (case == "dora_tp2")
    mine, theirs = (json.loads((folder / CONFIG).read_text()) for folder in (tmp_path / "peft", HERE / f"{case}.hf"))
    differing = {key for key in mine | theirs if mine.get(key) != theirs.get(key)}
    assert differing == {"base_model_name_or_path"}
    assert mine["base_model_name_or_path"].startswith("/models/")  # the run's `hf_model_id`
    assert not (tmp_path / "peft/config.json").exists()
    assert any(note.startswith("names and structure: the family") for note in report["notes"])

    back = convert(
        str(tmp_path / "peft"), str(tmp_path / "there"), to="megatron-dist", config=base_of(case), tp=2, pp=2
    )
    apart = [note for note in back["notes"] if "canonical LoRA" in note]
    assert bool(apart) == (case == "canonical_tp2")
    reshard(str(tmp_path / "there"), str(tmp_path / "again"), tp=4 if case == "canonical_tp2" else 1, pp=1)
    convert(str(tmp_path / "again"), str(tmp_path / "home"), to="peft", config=base_of(case))
    assert same(tensors(tmp_path / "home"), made)
    assert json.loads((tmp_path / "home" / CONFIG).read_text()) == mine


@pytest.mark.parametrize("case", SWIFT)
def test_it_is_what_ms_swift_exports(case: str, tmp_path: Path) -> None:
    """B of a gated fc1 lies rank by rank there."""
    config = str(HERE / SWIFT[case])
    convert(str(HERE / case), str(tmp_path / "peft"), to="peft", config=config)
    made = tensors(tmp_path / "peft")
    assert same(made, tensors(HERE / f"{case}.hf"))
    said = json.loads((tmp_path / "peft" / CONFIG).read_text())
    assert (said["r"], said["lora_alpha"], said["lora_dropout"]) == (4, 6, 0.05)
    there = tmp_path / "there"
    convert(str(tmp_path / "peft"), str(there), to="megatron-dist", dialect="megatron-swift", tp=2, config=config)
    convert(str(there), str(tmp_path / "bridge"), to="megatron-dist", dialect="megatron", config=config)
    convert(str(tmp_path / "bridge"), str(tmp_path / "home"), to="peft", config=config)
    assert same(tensors(tmp_path / "home"), made)


def test_magnitudes_are_those_of_the_ranks(tmp_path: Path) -> None:
    """Each rank's gate and up lie one below the other in the file; the whole tensor is [gate; up]."""
    convert(str(HERE / "dora_tp2"), str(tmp_path / "peft"), to="peft", config=base_of("dora_tp2"))
    ranks = [load_file(HERE / f"dora_tp2.rank{rank}.safetensors") for rank in (0, 1)]
    made = tensors(tmp_path / "peft")
    for layer in (0, 1):
        fc1 = [rank[f"decoder.layers.{layer}.mlp.linear_fc1.adapter.weight_magnitude"].reshape(2, -1) for rank in ranks]
        for half, name in enumerate(("gate", "up")):
            own = made[f"base_model.model.model.layers.{layer}.mlp.{name}_proj.lora_magnitude_vector"]
            np.testing.assert_array_equal(own, np.concatenate([each[half] for each in fc1]))
        qkv = np.concatenate(
            [rank[f"decoder.layers.{layer}.self_attention.linear_qkv.adapter.weight_magnitude"] for rank in ranks]
        ).reshape(2, 4, 8)  # a group has two heads of queries, one of keys and one of values, of 8
        for name, heads in (("q", slice(0, 2)), ("k", slice(2, 3)), ("v", slice(3, 4))):
            own = made[f"base_model.model.model.layers.{layer}.self_attn.{name}_proj.lora_magnitude_vector"]
            np.testing.assert_array_equal(own, qkv[:, heads].ravel())


@pytest.mark.parametrize(
    ("case", "asked"), [("llama_tp2", {"family": "llama"}), ("canonical_tp2", {}), ("moe_ep2", {})]
)
def test_the_runs_config_has_the_base(case: str, asked: dict[str, str], tmp_path: Path) -> None:
    convert(str(HERE / case), str(tmp_path / "peft"), to="peft", **asked)
    assert same(tensors(tmp_path / "peft"), tensors(HERE / f"{case}.hf"))


def test_inspect_says_what_the_run_says() -> None:
    found = inspect(str(HERE / "moe_ep2"), Reading())
    assert found["mesh"]["ep"] == 2
    assert "a LoRA of Megatron-Bridge: rank 4, alpha 8 by run_config.yaml" in found["notes"]


def test_a_megatron_base_takes_a_megatron_adapter(tmp_path: Path) -> None:
    convert(base_of("llama_tp2"), str(tmp_path / "base"), to="megatron-dist", tp=2)
    for case in ("llama_tp2", "canonical_tp2"):
        merge([str(tmp_path / "base"), str(HERE / case)], str(tmp_path / case), method="lora")
        convert(str(tmp_path / case), str(tmp_path / f"{case}.hf"), to="safetensors")
        folders = (tmp_path / f"{case}.hf", Path(base_of(case)))
        held, base = (load_file(folder / "model.safetensors") for folder in folders)
        adapter = tensors(HERE / f"{case}.hf")
        config = json.loads((HERE / f"{case}.hf" / CONFIG).read_text())
        for name, weight in base.items():
            at = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{at}.lora_A.weight" in adapter:
                scaled = adapter[f"{at}.lora_B.weight"] @ adapter[f"{at}.lora_A.weight"] * (config["lora_alpha"] / 4)
                np.testing.assert_allclose(held[name], weight + scaled, rtol=0, atol=1e-6)
            else:
                np.testing.assert_array_equal(held[name], weight)


@pytest.mark.parametrize("kept", ["qv", "k"])
def test_projections_without_an_adapter_get_one_that_adds_nothing(kept: str, tmp_path: Path) -> None:
    def change(held: dict[str, Any]) -> None:
        for name in [name for name in held if not any(f".{each}_proj." in name for each in kept)]:
            del held[name]

    source = changed("llama_tp2", tmp_path / "adapter", change, target_modules=[f"{each}_proj" for each in kept])
    report = convert(str(source), str(tmp_path / "run"), to="megatron-dist", tp=2, config=base_of("llama_tp2"))
    assert any("one that adds nothing" in note for note in report["notes"])
    convert(str(tmp_path / "run"), str(tmp_path / "back"), to="peft", config=base_of("llama_tp2"))
    made = tensors(tmp_path / "back")
    held = tensors(source)
    assert same({name: made[name] for name in held}, held)
    assert len(made) == 12
    added = [value for name, value in made.items() if name not in held and ".lora_B." in name]
    assert added
    assert not any(value.any() for value in added)


GATE = "base_model.model.model.layers.1.mlp.experts.2.gate_proj.lora_A.weight"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def test_unequal_a_of_experts_is_refused(tmp_path: Path) -> None:
    def change(held: dict[str, Any]) -> None:
        held[GATE][0, 0] += 1

    source = changed("moe_ep2", tmp_path / "adapter", change)
    with pytest.raises(InputError) as fault:
        convert(str(source), str(tmp_path / "x"), to="megatron-dist", config=base_of("moe_ep2"))
    assert fault.value.code == "E1435"
    assert "experts.2.gate_proj and model.layers.1.mlp.experts.2.up_proj" in fault.value.message
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("change", "config", "code"),
    [
        (lambda held: held.pop(f"{Q}.lora_B.weight"), {}, "E1437"),
        (lambda held: None, {"alpha_pattern": {"q_proj": 16}}, "E1436"),
        (lambda held: None, {"use_qalora": True}, "E1422"),
        (lambda held: held.update({"base_model.model.lm_head.weight": np.zeros((32, 16), np.float32)}), {}, "E1436"),
    ],
)
def test_what_megatron_can_not_hold(change: Any, config: dict[str, Any], code: str, tmp_path: Path) -> None:
    source = changed("llama_tp2", tmp_path / "adapter", change, **config)
    with pytest.raises((UsageError, Incomplete)) as fault:
        convert(str(source), str(tmp_path / "x"), to="megatron-dist", config=base_of("llama_tp2"))
    assert fault.value.code == code


@pytest.mark.parametrize(
    ("case", "to"), [("llama_tp2.hf", "megatron"), ("llama_tp2", "megatron"), ("llama_tp2", "safetensors")]
)
def test_a_format_that_would_lose_the_scaling_is_refused(case: str, to: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as fault:
        convert(str(HERE / case), str(tmp_path / "x"), to=to, config=base_of(case))
    assert fault.value.code == "E1436"
    assert not (tmp_path / "x").exists()


def test_without_the_runs_config_there_is_no_scaling(tmp_path: Path) -> None:
    shutil.copytree(HERE / "llama_tp2", tmp_path / "run")
    (tmp_path / "run/iter_0000003/run_config.yaml").unlink()
    with pytest.raises(UsageError) as fault:
        convert(str(tmp_path / "run"), str(tmp_path / "x"), to="peft", config=base_of("llama_tp2"))
    assert fault.value.code == "E1436"


def test_an_adapter_beside_its_base_has_its_rows_where_the_ranks_had_them(tmp_path: Path) -> None:
    """Canonical gate and up and DoRA's magnitudes: written by two ranks, then by four, and read as they were."""
    fc1 = "decoder.layers.0.mlp.linear_fc1."
    rng = np.random.default_rng(0)
    shapes = {"to_wrap.weight": (32, 16), "adapter.weight_magnitude": (32,), "adapter.linear_out.weight": (32, 4)}
    shapes |= {f"adapter.adapter_{part}.linear_out.weight": (16, 4) for part in ("gate", "up")}
    values = {fc1 + name: rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}
    save_file(values, tmp_path / "in.safetensors")
    where = str(tmp_path / "in.safetensors")
    for ranks in (2, 4):
        out = str(tmp_path / f"tp{ranks}")
        convert(where, out, to="megatron-dist", dialect="keep", tp=ranks)
        assert diff(str(tmp_path / "in.safetensors"), out)["equal"]
        where = out
