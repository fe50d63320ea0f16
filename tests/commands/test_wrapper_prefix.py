"""Prefixes of trainers' wrappers, over every family: taken off where what is left is the family's, else told; and a
head that a prefix hides is never taken for one that is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ckpt_tool as ckpt
from ckpt_tool.conversion.tied_head import has_head, pair_of
from ckpt_tool.conversion.vocabulary import is_vocabulary
from ckpt_tool.errors import CkptError, UsageError
from ckpt_tool.families.base import HUB
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.families.registry import by_name, find
from ckpt_tool.families.wrappers import describe_prefix, find_wrapper

NAMES = [family.name for family in FAMILIES]
KNOWN = (
    "module.",
    "net.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "module._orig_mod.",
    "model.module.",
    "base_model.model.",
)
CONFIG = {
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


def names_of(family: str, dialect: str = HUB) -> list[str]:
    """One name of each form that the dialect's rules know."""
    return [form.replace("%d", "0") for form in by_name(family).table(dialect).left]


def llama() -> dict[str, np.ndarray[Any, Any]]:
    """A llama of one layer whose head is not its embedding."""
    rng = np.random.default_rng(3)
    shapes = {"model.embed_tokens.weight": (64, 16), "model.norm.weight": (16,), "lm_head.weight": (64, 16)}
    layer = {f"self_attn.{each}_proj.weight": (16, 16) for each in "qkvo"}
    layer |= {"mlp.gate_proj.weight": (32, 16), "mlp.up_proj.weight": (32, 16), "mlp.down_proj.weight": (16, 32)}
    layer |= {"input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def save(folder: Path, kind: str, tensors: dict[str, np.ndarray[Any, Any]]) -> str:
    """The tensors as a source of that kind."""
    folder.mkdir()
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return str(folder)
    state = {name: torch.from_numpy(array) for name, array in tensors.items()}
    if kind == "torch":
        torch.save(state, folder / "state.pt")
        return str(folder / "state.pt")
    if kind == "lightning":
        torch.save({"state_dict": state, "epoch": 1, "global_step": 7, "optimizer_states": []}, folder / "last.ckpt")
        return str(folder / "last.ckpt")
    from torch.distributed import checkpoint

    checkpoint.save({"model": state}, checkpoint_id=folder / "dcp", no_dist=True)
    return str(folder / "dcp")


def config_file(folder: Path, **change: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **change}))
    return str(path)


@pytest.mark.parametrize("family", NAMES)
def test_a_known_wrapper_is_found_for_every_family_and_its_own_names_are_none(family: str) -> None:
    names = names_of(family)
    one = [by_name(family)]
    assert find_wrapper(names, one) == ""
    for prefix in KNOWN:
        assert find_wrapper([prefix + name for name in names], one) == prefix
    stranger = ["module.value_head.weight", *(f"module.{name}" for name in names)]
    assert find_wrapper(stranger, one) == ""


@pytest.mark.parametrize("family", NAMES)
def test_an_error_for_any_family_says_that_its_names_have_a_prefix(family: str) -> None:
    names = [f"student.{name}" for name in names_of(family)]
    kind = by_name(family).classes[0].model_type
    with pytest.raises(CkptError, match=r"begin with `student\.`") as caught:
        find({"model_type": kind}, names)
    assert caught.value.code == "E1373" and "--rename 'student.*=*'" in caught.value.hint
    assert describe_prefix(names_of(family), [by_name(family)]) == ""


@pytest.mark.parametrize("family", NAMES)
def test_head_and_embedding_are_one_pair_under_any_prefix_in_every_dialect(family: str) -> None:
    """The truth is what the family's rules say is as long as the vocabulary, outside the layers."""
    known = by_name(family)
    for dialect in known.known_dialects:
        terms = [term for rule in known.table(dialect).rules for term in rule.left if term.name]
        rows = [term for term in terms if term.pattern.text.split()[:1] == ["v"]]
        assert [term.name.form for term in rows if not is_vocabulary(term.name.form.replace("%d", "0"))] == []
        top = {term.name.form for term in rows if "%d" not in term.name.form and term.name.form.endswith("weight")}
        if len(top) != 2:
            continue
        for prefix in ("", "module.", "net."):
            pair = pair_of([prefix + name for name in top])
            assert pair is not None and {*pair} == {prefix + name for name in top}, (dialect, prefix)


@pytest.mark.parametrize("prefix", ["student.", "base_model.model.model.", "x.y."])
@pytest.mark.parametrize("family", NAMES)
def test_a_head_behind_a_prefix_is_there(family: str, prefix: str, tmp_path: Path) -> None:
    """No config is changed for a head that only its prefix hides, and none is put beside names of nobody."""
    known = by_name(family)
    names = names_of(family)
    if not has_head(names) or known.language:
        pytest.skip("its head has another name, or its config has parts")
    tensors = {prefix + name: np.ones((22, 2) if is_vocabulary(name) else 2, np.float32) for name in names}
    kind = known.classes[0]
    config = {"model_type": kind.model_type, "architectures": [kind.architecture], "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 22}))
    # One more name that no rule knows keeps every prefix on.
    tensors[f"{prefix}stranger.weight"] = np.ones(2, np.float32)
    source = save(tmp_path / "more", "safetensors", tensors)
    with pytest.raises(CkptError, match="begin with|beside|next to"):
        ckpt.convert(source, str(tmp_path / "out"), to="safetensors", config=str(tmp_path / "config.json"))
    (tmp_path / "more/config.json").write_text((tmp_path / "config.json").read_text())
    ckpt.convert(source, str(tmp_path / "out"), to="safetensors", dtype="bf16")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["tie_word_embeddings"] is False and written["vocab_size"] == 22


@pytest.mark.parametrize("prefix", ["model.", "module.", "net.", "model._orig_mod.", "base_model.model."])
@pytest.mark.parametrize("kind", ["torch", "lightning", "dcp", "safetensors"])
def test_every_source_comes_out_under_the_hub_s_names(kind: str, prefix: str, tmp_path: Path) -> None:
    tensors = llama()
    plain = save(tmp_path / "plain", "safetensors", tensors)
    source = save(tmp_path / "in", kind, {prefix + name: array for name, array in tensors.items()})
    report = ckpt.convert(source, str(tmp_path / "out"), to="safetensors", config=config_file(tmp_path))
    assert ckpt.diff(plain, str(tmp_path / "out"))["equal"]
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    assert any("wrapper" in note for note in report["notes"])
    for target in ("megatron", "paddle"):
        ckpt.convert(source, str(tmp_path / target), to=target, config=config_file(tmp_path))
        ckpt.convert(str(tmp_path / target), str(tmp_path / f"{target}-hub"), to="safetensors")
        assert ckpt.diff(plain, str(tmp_path / f"{target}-hub"))["equal"]


@pytest.mark.share(4)  # the error is one for all pairs of a kind and a target, and each asks every family
@pytest.mark.parametrize("target", ["megatron", "megatron-dist", "paddle", "paddle-unified", "gguf", "meta", "orbax"])
@pytest.mark.parametrize("kind", ["torch", "lightning", "dcp", "safetensors"])
def test_names_of_nobody_are_one_error_for_all_sources(kind: str, target: str, tmp_path: Path) -> None:
    source = save(tmp_path / "in", kind, {f"student.{name}": array for name, array in llama().items()})
    more = {"dialect": "maxtext"} if target == "orbax" else {}
    with pytest.raises(CkptError, match=r"all 12 names begin with `student\.`") as caught:
        ckpt.convert(source, str(tmp_path / "out"), to=target, config=config_file(tmp_path), **more)
    assert caught.value.code == "E1373"
    with pytest.raises(CkptError, match=r"begin with `student\.`"):
        ckpt.convert(source, str(tmp_path / "out"), to=target, **more)
    assert not (tmp_path / "out").exists()


def test_numbers_and_groups_of_an_optimizer_follow(tmp_path: Path) -> None:
    """Names without the prefix in every state, and torch's numbers stay numbers."""
    tensors = {f"module.{name}": torch.from_numpy(array) for name, array in llama().items()}
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in tensors.values()]
    optimizer = torch.optim.AdamW(parameters)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    torch.save({"model": tensors, "optimizer": optimizer.state_dict()}, tmp_path / "job.pt")

    job = str(tmp_path / "job.pt")
    kept = ckpt.convert(job, str(tmp_path / "kept.pt"), to="torch", config=config_file(tmp_path))
    assert any("keep their wrapper's prefix `module.`" in note for note in kept["notes"])
    assert next(iter(torch.load(tmp_path / "kept.pt", weights_only=True)["model"])).startswith("module.")
    ckpt.convert(job, str(tmp_path / "out.pt"), to="torch", dialect="hf", config=config_file(tmp_path))
    written = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(written["model"]) == list(llama())
    assert written["optimizer"]["param_groups"][0]["params"] == list(range(12))
    assert torch.equal(written["optimizer"]["state"][5]["exp_avg"], optimizer.state_dict()["state"][5]["exp_avg"])
    optimizer.load_state_dict(written["optimizer"])


def test_keeping_names_keeps_prefixes(tmp_path: Path) -> None:
    source = save(tmp_path / "in", "safetensors", {f"module.{name}": array for name, array in llama().items()})
    ckpt.convert(source, str(tmp_path / "out"), to="safetensors", dialect="keep")
    assert all(name.startswith("module.") for name in ckpt.open(str(tmp_path / "out")))


def test_two_names_that_are_one_without_wrappers(tmp_path: Path) -> None:
    tensors = llama()
    tensors["_orig_mod.lm_head.weight"] = tensors["lm_head.weight"]
    source = save(tmp_path / "in", "safetensors", tensors)
    with pytest.raises(UsageError, match="both lm_head.weight") as caught:
        ckpt.convert(source, str(tmp_path / "out"), to="safetensors", config=config_file(tmp_path))
    assert caught.value.code == "E2910"


def test_vocabularies_of_other_sizes_are_not_cut(tmp_path: Path) -> None:
    """A head that is (hidden, tokens), as Paddle's and MaxText's are, would lose hidden units."""
    tensors = llama()
    tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"].T)
    source = save(tmp_path / "in", "safetensors", tensors)
    with pytest.raises(UsageError, match="not of one size") as caught:
        ckpt.convert(source, str(tmp_path / "out"), to="sharded", vocab_size=10)
    assert caught.value.code == "E2302"


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors"])
def test_a_trainer_s_own_names_are_not_put_beside_a_hub_s_config(kind: str, tmp_path: Path) -> None:
    """torchtitan's names, of which no rule tells all: no library would load such a folder."""
    words = {
        "model.embed_tokens": "tok_embeddings",
        "self_attn.q_proj": "attention.qkv_linear.wq",
        "self_attn.k_proj": "attention.qkv_linear.wk",
        "self_attn.v_proj": "attention.qkv_linear.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.": "",
    }
    tensors = {}
    for name, array in llama().items():
        for hub, own in words.items():
            name = name.replace(hub, own)
        tensors[name] = array
    source = save(tmp_path / "in", kind, tensors)
    for target in ("safetensors", "megatron"):
        with pytest.raises(CkptError, match="qkv_linear") as caught:
            ckpt.convert(source, str(tmp_path / "out"), to=target, config=config_file(tmp_path))
        assert caught.value.code == "E1485"
    ckpt.convert(source, str(tmp_path / "kept"), to="safetensors", dialect="keep", config=config_file(tmp_path))
