"""Names of averages, wrapped names and lost heads: what other trainers write next to a model is known or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import ckpt_tool as ckpt
from ckpt_tool.core.urls import full_url, hide_secrets
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.hub_folder.model_files import choose

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
Arrays = dict[str, np.ndarray[Any, Any]]


def llama() -> Arrays:
    rng = np.random.default_rng(3)
    shapes = {"model.embed_tokens.weight": (64, 16), "model.norm.weight": (16,), "lm_head.weight": (64, 16)}
    layer = {f"self_attn.{each}_proj.weight": (16, 16) for each in "qkvo"}
    layer |= {"mlp.gate_proj.weight": (32, 16), "mlp.up_proj.weight": (32, 16), "mlp.down_proj.weight": (16, 32)}
    layer |= {"input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def behind(prefix: str, tensors: Arrays) -> Arrays:
    return {prefix + name: array for name, array in tensors.items()}


def averaged(tensors: Arrays) -> Arrays:
    return {name: array * 0.5 for name, array in tensors.items()}


def write_folder(folder: Path, tensors: Arrays, config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_config(folder: Path, config: dict[str, Any] = CONFIG) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def torches(tensors: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in tensors.items()}


def assert_holds(folder: Path, wanted: Arrays) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all((found[name] == wanted[name]).all() for name in wanted)


SECOND_MODELS = ("shadow", "shadow_params", "teacher", "ema_model", "model_avg", "target_network", "averaged_model")


@pytest.mark.parametrize(
    "prefix", ["model_ema.", "ema.", "model_ema.module.", "averaged_model.module.", *(f"{w}." for w in SECOND_MODELS)]
)
def test_averages_in_safetensors_are_the_state_ema(tmp_path: Path, prefix: str) -> None:
    live = llama()
    average = averaged(live)
    source = write_folder(tmp_path / "in", {**live, **behind(prefix, average)})

    ckpt.convert(str(source), str(tmp_path / "live"), to="safetensors")
    ckpt.convert(str(source), str(tmp_path / "ema"), to="safetensors", as_model="ema")

    assert_holds(tmp_path / "live", live)
    assert_holds(tmp_path / "ema", average)


def test_averages_in_safetensors_without_dots_and_with_counters(tmp_path: Path) -> None:
    live = llama()
    average = averaged(live)
    flat = {f"model_ema.{name.replace('.', '')}": array for name, array in average.items()}
    counters = {"model_ema.decay": np.array([0.9], np.float32), "model_ema.num_updates": np.array([3])}
    source = write_folder(tmp_path / "in", {**live, **flat, **counters})

    ckpt.convert(str(source), str(tmp_path / "ema"), to="safetensors", as_model="ema")

    assert_holds(tmp_path / "ema", average)


def test_averages_in_safetensors_of_no_weight_are_refused(tmp_path: Path) -> None:
    live = llama()
    source = write_folder(tmp_path / "in", {**live, "model_ema.other.weight": np.ones(3, np.float32)})
    with pytest.raises(CkptError) as caught:
        ckpt.convert(str(source), str(tmp_path / "out"), to="safetensors", as_model="ema")
    assert caught.value.code == "E2952"


@pytest.mark.parametrize("word", SECOND_MODELS)
@pytest.mark.parametrize("live_root", ["", "student.", "online_network.", "model."])
@pytest.mark.parametrize("root", [None, "state_dict", "model"])
def test_a_second_model_in_a_state_dict_is_the_state_ema(
    tmp_path: Path, root: str | None, live_root: str, word: str
) -> None:
    live = behind(live_root, {"a.weight": np.ones((2, 3), np.float32), "b.bias": np.ones(3, np.float32)})
    second = behind(f"{word}.", averaged({name.removeprefix(live_root): array for name, array in live.items()}))
    state = torches({**live, **second})
    source = tmp_path / "state.pt"
    torch.save(state if root is None else {root: state, "epoch": 3}, source)

    ckpt.convert(str(source), str(tmp_path / "live"), to="safetensors")
    ckpt.convert(str(source), str(tmp_path / "ema"), to="safetensors", as_model="ema")

    assert_holds(tmp_path / "live", live)
    assert_holds(tmp_path / "ema", averaged(live))


@pytest.mark.parametrize("word", SECOND_MODELS)
@pytest.mark.parametrize("live_root", ["model", "student"])
def test_a_second_model_on_a_level_of_its_own_is_the_state_ema(tmp_path: Path, live_root: str, word: str) -> None:
    live = {"a.weight": np.ones((2, 3), np.float32), "b.bias": np.ones(3, np.float32)}
    source = tmp_path / "state.pt"
    torch.save({live_root: torches(live), word: torches(averaged(live)), "epoch": 3}, source)

    ckpt.convert(str(source), str(tmp_path / "live"), to="safetensors")
    ckpt.convert(str(source), str(tmp_path / "ema"), to="safetensors", as_model="ema")

    named = live if live_root == "model" else behind("student.", live)
    assert_holds(tmp_path / "live", named)
    assert_holds(tmp_path / "ema", averaged(named))


@pytest.mark.parametrize("word", ["shadow", "teacher", "target_network"])
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_second_model_of_another_kind_is_refused_by_name(tmp_path: Path, kind: str, word: str) -> None:
    """A teacher that is no copy, next to its student: it is not the model, and nobody may take it for that."""
    live = behind("student.", {"a.weight": np.ones((2, 3), np.float32)})
    second = behind(f"{word}.", {"a.weight": np.ones((5, 3), np.float32), "deep.weight": np.ones(2, np.float32)})
    source = tmp_path / "in"
    source.mkdir()
    if kind == "torch":
        torch.save(torches({**live, **second}), source / "pytorch_model.bin")
    else:
        save_file({**live, **second}, source / "model.safetensors")
    with pytest.raises(CkptError) as caught:
        ckpt.convert(str(source), str(tmp_path / "out"), to="safetensors")
    assert caught.value.code == "E2952" and word in caught.value.message
    ckpt.convert(str(source), str(tmp_path / "out"), to="safetensors", remove_keys=[f"{word}.*"])
    assert_holds(tmp_path / "out", live)


@pytest.mark.parametrize("word", SECOND_MODELS)
def test_a_reader_that_keeps_a_module_s_names_is_no_way_around(tmp_path: Path, word: str) -> None:
    """Sharded keeps names as they are, as DeepSpeed and Megatron do: the way to the hub sorts them."""
    live = {"a.weight": np.ones((2, 3), np.float32), "b.bias": np.ones(3, np.float32)}
    weights = torches({**live, **behind("other.", averaged(live))})
    torch.save(weights, tmp_path / "pytorch_model.bin")
    ckpt.convert(str(tmp_path / "pytorch_model.bin"), str(tmp_path / "job"), to="sharded", rename=[f"other.*={word}.*"])
    assert f"{word}.a.weight" in ckpt.open(str(tmp_path / "job")).state("model")

    ckpt.convert(str(tmp_path / "job"), str(tmp_path / "live"), to="safetensors")
    ckpt.convert(str(tmp_path / "job"), str(tmp_path / "ema"), to="safetensors", as_model="ema")

    assert_holds(tmp_path / "live", live)
    assert_holds(tmp_path / "ema", averaged(live))


def test_a_target_that_an_optimizer_trains_is_a_part_of_the_model(tmp_path: Path) -> None:
    names = ("a.weight", "teacher.a.weight")
    model = {name: torch.ones(2, 3) for name in names}
    states = {name: {"exp_avg": torch.zeros(2, 3), "exp_avg_sq": torch.zeros(2, 3)} for name in names}
    torch.save({"model": model, "optimizer": {"state": states, "param_groups": []}}, tmp_path / "state.pt")
    ckpt.convert(str(tmp_path / "state.pt"), str(tmp_path / "out"), to="dcp")
    assert set(ckpt.open(str(tmp_path / "out")).state("model")) == set(names)


@pytest.mark.parametrize("root", ["ema", "model_ema", "ema_state_dict", "swa_model", "averaged_model"])
def test_averages_behind_a_wrapper_take_the_models_names(tmp_path: Path, root: str) -> None:
    live = llama()
    average = averaged(live)
    wrapped = {**torches(behind("module.", average)), "n_averaged": torch.tensor(3)}
    torch.save({"model": torches(live), root: wrapped}, tmp_path / "state.pt")
    config = write_config(tmp_path)

    for out, more in (("live", {}), ("ema", {"as_model": "ema"})):
        ckpt.convert(str(tmp_path / "state.pt"), str(tmp_path / out), to="safetensors", config=config, **more)

    assert_holds(tmp_path / "live", live)
    assert_holds(tmp_path / "ema", average)


def test_averages_of_a_model_behind_a_wrapper(tmp_path: Path) -> None:
    live = llama()
    average = averaged(live)
    torch.save({"model": torches(behind("module.", live)), "ema": torches(average)}, tmp_path / "state.pt")

    out = tmp_path / "ema"
    ckpt.convert(str(tmp_path / "state.pt"), str(out), to="safetensors", config=write_config(tmp_path), as_model="ema")

    assert_holds(out, average)


def test_averages_under_other_names_are_never_mixed_with_the_model(tmp_path: Path) -> None:
    live = llama()
    other = torches(behind("encoder.", averaged(live)))
    torch.save({"model": torches(live), "ema": other}, tmp_path / "state.pt")
    with pytest.raises(CkptError) as caught:
        ckpt.convert(str(tmp_path / "state.pt"), str(tmp_path / "out"), to="safetensors", as_model="ema")
    assert caught.value.code == "E2974"


@pytest.mark.parametrize("prefix", ["module.", "model.", "student.", "base_model.model."])
def test_audit_finds_names_that_no_library_finds(tmp_path: Path, prefix: str) -> None:
    source = write_folder(tmp_path / "in", behind(prefix, llama()))
    (row,) = [row for row in ckpt.audit(str(source))["findings"] if row["code"] == "A0109"]
    assert f"`{prefix}`" in row["message"]


@pytest.mark.parametrize("tensors", [llama(), {name.removeprefix("model."): a for name, a in llama().items()}])
def test_audit_has_nothing_to_say_of_the_models_own_names(tmp_path: Path, tensors: Arrays) -> None:
    source = write_folder(tmp_path / "in", tensors)
    assert "A0109" not in [row["code"] for row in ckpt.audit(str(source))["findings"]]


@pytest.mark.parametrize(
    ("prefix", "is_taken_off"), [("module.", True), ("base_model.model.", True), ("model.", False)]
)
def test_wrappers_of_a_family_that_nobody_knows(tmp_path: Path, prefix: str, is_taken_off: bool) -> None:
    tensors = {"decoder.block.0.w": np.ones((2, 2), np.float32), "decoder.head.w": np.ones((2, 2), np.float32)}
    torch.save(torches(behind(prefix, tensors)), tmp_path / "state.pt")
    config = write_config(tmp_path, {"model_type": "of_nobody", "architectures": ["OfNobody"]})

    ckpt.convert(str(tmp_path / "state.pt"), str(tmp_path / "out"), to="safetensors", config=config)

    assert_holds(tmp_path / "out", tensors if is_taken_off else behind(prefix, tensors))


def test_a_family_that_nobody_knows_with_names_of_one_that_is_known(tmp_path: Path) -> None:
    tensors = llama()
    torch.save(torches(behind("net.", tensors)), tmp_path / "state.pt")
    config = write_config(tmp_path, {"model_type": "of_nobody", "architectures": ["OfNobody"]})

    ckpt.convert(str(tmp_path / "state.pt"), str(tmp_path / "out"), to="safetensors", config=config)

    assert_holds(tmp_path / "out", tensors)


def test_a_head_that_is_lost_is_no_tied_one(tmp_path: Path) -> None:
    tensors = llama()
    del tensors["lm_head.weight"]
    state = {**torches(tensors), "lm_head.weight": None}
    torch.save(state, tmp_path / "state.pt")

    ckpt.convert(str(tmp_path / "state.pt"), str(tmp_path / "out"), to="safetensors", config=write_config(tmp_path))

    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


def test_the_file_that_transformers_opens_comes_before_shards_of_other_names() -> None:
    shards = ["model.fp16-00001-of-00002.safetensors", "model.fp16-00002-of-00002.safetensors"]
    others = [f"diffusion_pytorch_{name.replace('.fp16', '')}" for name in shards]
    for beside in (shards, others):
        chosen = choose(["model.safetensors", *beside])
        assert chosen is not None and chosen.files == ("model.safetensors",)


@pytest.mark.parametrize(
    "url", ["https://[::1]/a?sig=HUSH", "s3://AK:HU/SH@bucket/k", "zip://a.pt::https://[::1]/z.zip?sig=HUSH"]
)
def test_secrets_of_unusual_urls_are_hidden(url: str) -> None:
    shown = hide_secrets(url)
    assert "HUSH" not in shown and "HU/SH" not in shown
    assert full_url(shown) == url


@pytest.mark.parametrize("url", ["https://host:8080/a@b", "https://[::1]:80/x", "hf://gpt2@main"])
def test_urls_without_secrets_stay(url: str) -> None:
    assert hide_secrets(url) == url
