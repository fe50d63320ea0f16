"""Trees of Gemma's own library: what its modules compute is what transformers computes of the weights that ours makes
of them, both ways.

Goldens: `fixtures/gemma`, by `fixtures/make/gemma_trees.py`, which runs the library's modules as they are and holds
their logits against transformers'.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.cli import run

MADE = Path(__file__).parents[2] / "fixtures" / "gemma"
NAMES = ("gemma", "gemma_own_keys", "gemma2", "gemma2_2b", "gemma3")


def same(a, b):
    return run(["diff", str(a), str(b), "-q"]) == 0


def tree_of(folder):
    return json.loads((folder / "_METADATA").read_text())["tree_metadata"].keys()


@pytest.mark.parametrize("layout", ["flat", "nested"])
@pytest.mark.parametrize("name", NAMES)
def test_a_tree_is_the_hub_s_model(name, layout, tmp_path):
    tree = MADE / name / layout
    hub = MADE / name / "hub"
    words = ["convert", str(tree), str(tmp_path / "hub"), "--to", "safetensors", "--config", str(hub / "config.json")]
    assert run([*words, "-q"]) == 0
    assert same(tmp_path / "hub", hub)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_the_hub_is_a_tree(name, tmp_path):
    out = tmp_path / "tree"
    flat = MADE / name / "flat"
    words = ["convert", str(MADE / name / "hub"), str(out), "--to", "orbax", "--dialect", "gemma", "-q"]
    assert run(words) == 0
    assert same(out, flat)
    assert tree_of(out) == tree_of(flat), "the keys are those of what Google released"


def test_moments_follow_their_weights(tmp_path):
    """With an optimizer it is a trainer's tree: weights below `params`, moments in optax's state."""
    torch = pytest.importorskip("torch")
    hub = MADE / "gemma3/hub"
    source = tmp_path / "state.pt"
    out = tmp_path / "tree"
    model = {name: torch.from_numpy(value) for name, value in load_file(hub / "model.safetensors").items()}
    state = {
        name: {"exp_avg": value * 2, "exp_avg_sq": value * 3, "step": torch.tensor(4.0)}
        for name, value in model.items()
    }
    torch.save({"model": model, "optim": {"state": state, "param_groups": []}}, source)
    config = ["--config", str(hub / "config.json"), "-q"]
    assert run(["convert", str(source), str(out), "--to", "orbax", "--dialect", "gemma", *config]) == 0
    assert run(["convert", str(out), str(tmp_path / "back"), "--to", "sharded", "--dialect", "hf", *config]) == 0
    assert run(["diff", str(tmp_path / "back"), str(source), "-q", "--state", "model,exp_avg,exp_avg_sq"]) == 0
    at = "('opt_state', '0', 'nu', 'transformer/layer_1/attn/kv_einsum', 'w')"
    assert at in tree_of(out)


@pytest.mark.parametrize("gone", ["layer_1.mlp.linear", "layer_2", "final_norm", "embedder"])
@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_what_a_tree_lacks_is_named(layout, gone, tmp_path, capsys):
    hub = MADE / "gemma3/hub"
    tree = MADE / "gemma3" / layout
    pattern = f"*{gone if layout == 'nested' else gone.replace('.', '/')}*"
    part = tmp_path / "part"
    assert (
        run(["convert", str(tree), str(part), "--to", "orbax", "--dialect", "keep", "--remove-keys", pattern, "-q"])
        == 0
    )
    words = ["convert", str(part), str(tmp_path / "out"), "--to", "safetensors", "--config", str(hub / "config.json")]
    assert run(words) != 0
    said = capsys.readouterr().err
    assert gone.rpartition(".")[2] in said and "layer_0" not in said


def test_a_head_of_its_own_has_no_place(tmp_path, capsys):
    hub = MADE / "gemma2/hub"
    values = load_file(hub / "model.safetensors")
    (tmp_path / "in").mkdir()
    save_file(values | {"lm_head.weight": values["model.embed_tokens.weight"] * 2}, tmp_path / "in/model.safetensors")
    config = json.loads((hub / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    assert run(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "orbax", "--dialect", "gemma"]) == 3
    assert "lm_head.weight" in capsys.readouterr().err
