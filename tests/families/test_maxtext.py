"""MaxText's trees: what its own mapping, hooks and stacking made of small models is what ours makes, both ways.

Goldens: `fixtures/maxtext`, by `fixtures/make/maxtext_trees.py`, which runs MaxText's functions as they are.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.cli import run
from ckpt_tool.families.maxtext import both

MADE = Path(__file__).parents[2] / "fixtures" / "maxtext"
NAMES = ("qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "llama", "llama31", "mixtral")
CASES = [(name, layout) for name in NAMES for layout in ("scanned", "unscanned")]


def same(a, b):
    return run(["diff", str(a), str(b), "-q"]) == 0


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_tree_is_the_hub_s_model_and_back(name, layout, tmp_path):
    tree, hub = MADE / name / layout, MADE / name / "hub"
    config = ["--config", str(hub / "config.json")]
    assert run(["convert", str(tree), str(tmp_path / "hub"), "--to", "safetensors", *config, "-q"]) == 0
    back = MADE / name / "back"  # what MaxText's hooks make of the tree, where it is not the hub's to the bit
    assert same(tmp_path / "hub", back if back.exists() else hub)
    dialect = "maxtext" if layout == "scanned" else "maxtext-unscanned"
    out = tmp_path / "tree"
    assert run(["convert", str(hub), str(out), "--to", "orbax", "--dialect", dialect, "-q"]) == 0
    assert same(out, tree)
    rows = [json.loads((path / "items/_METADATA").read_text())["tree_metadata"] for path in (out, tree)]
    assert rows[0].keys() == rows[1].keys() - {"('step',)"}, "the paths are those of MaxText's TrainState"


def test_moments_follow_their_weights(tmp_path):
    """Adam's moments lie as their weight does, beside one count."""
    torch = pytest.importorskip("torch")
    hub, source, out = MADE / "qwen3/hub", tmp_path / "state.pt", tmp_path / "tree"
    model = {name: torch.from_numpy(value) for name, value in load_file(hub / "model.safetensors").items()}
    moments = {"exp_avg": 2.0, "exp_avg_sq": 3.0}
    state = {
        name: {**{moment: value * by for moment, by in moments.items()}, "step": torch.tensor(4.0)}
        for name, value in model.items()
    }
    torch.save({"model": model, "optim": {"state": state, "param_groups": []}}, source)
    config = ["--config", str(hub / "config.json"), "-q"]
    assert run(["convert", str(source), str(out), "--to", "orbax", "--dialect", "maxtext", *config]) == 0
    assert run(["convert", str(out), str(tmp_path / "back"), "--to", "sharded", "--dialect", "hf", *config]) == 0
    states = ["--state", "model,exp_avg,exp_avg_sq"]
    assert run(["diff", str(tmp_path / "back"), str(source), "-q", *states]) == 0
    rows = json.loads((out / "items/_METADATA").read_text())["tree_metadata"]
    at = "('opt_state', '0', 'mu', 'params', 'decoder', 'layers', 'mlp', 'wi_0', 'kernel')"
    assert at in rows and "('opt_state', '0', 'count')" in rows


def test_queries_in_another_scale_are_rounded_once_and_named(tmp_path, capsys):
    """Both layouts of one model are one change: from one to the other every bit stays."""
    hub, tree = MADE / "llama31/hub", MADE / "llama31/scanned"
    assert run(["convert", str(hub), str(tmp_path / "out"), "--to", "orbax", "--dialect", "maxtext"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "3 tensors are divided by a square root, in fp32, rounded once: model.layers.0.self_attn.q_proj.weight" in said
    )
    words = ["--to", "orbax", "--dialect", "maxtext-unscanned", "--config", str(hub / "config.json"), "-q"]
    assert run(["convert", str(tree), str(tmp_path / "apart"), *words]) == 0
    assert same(tmp_path / "apart", MADE / "llama31/unscanned")


def test_moments_of_another_scale_are_refused(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    hub, source = MADE / "llama/hub", tmp_path / "state.pt"
    model = {name: torch.from_numpy(value) for name, value in load_file(hub / "model.safetensors").items()}
    state = {name: {"exp_avg": value, "exp_avg_sq": value, "step": torch.tensor(4.0)} for name, value in model.items()}
    torch.save({"model": model, "optim": {"state": state, "param_groups": []}}, source)
    words = ["convert", str(source), str(tmp_path / "out"), "--to", "orbax", "--dialect", "maxtext"]
    words += ["--config", str(hub / "config.json")]
    assert run(words) == 2 and "E1285" in capsys.readouterr().err
    assert run([*words, "--drop", "optimizer", "-q"]) == 0 and same(tmp_path / "out", MADE / "llama/scanned")


def test_layers_are_an_axis_or_a_number():
    made = both("decoder.layers.a : h {} f, e {} = model.layers.{i}.a : f h, e")
    assert made["maxtext"] == "decoder.layers.a : h i f, e i = model.layers.{i}.a : f h, e"
    assert made["maxtext-unscanned"] == "decoder.layers_{i}.a : h f, e = model.layers.{i}.a : f h, e"


def test_a_layer_that_is_missing_is_named(tmp_path, capsys):
    hub = MADE / "qwen3/hub"
    values = {name: value for name, value in load_file(hub / "model.safetensors").items() if ".1.mlp.gate" not in name}
    (tmp_path / "in").mkdir()
    save_file(values, tmp_path / "in/model.safetensors")
    (tmp_path / "in/config.json").write_bytes((hub / "config.json").read_bytes())
    words = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "orbax", "--dialect", "maxtext"]
    assert run(words) == 3 and "model.layers.1.mlp.gate_proj.weight" in capsys.readouterr().err


def test_a_part_of_a_tree_is_known_and_not_whole(tmp_path, capsys):
    """By what is left: names that end as Flax's do."""
    tree, config = str(MADE / "qwen3/scanned"), ["--config", str(MADE / "qwen3/hub/config.json")]
    words = ["merge", tree, str(tmp_path / "part"), "--to", "orbax", "--remove-keys", "token_embedder.*", "-q"]
    assert run(words) == 0
    words = ["convert", str(tmp_path / "part"), str(tmp_path / "out"), "--to", "safetensors", *config]
    assert run(words) == 3 and "token_embedder" in capsys.readouterr().err
    assert run([*words, "--lenient", "-q"]) == 0
    assert all(name.startswith(("model.", "lm_head.")) for name in load_file(tmp_path / "out/model.safetensors"))
