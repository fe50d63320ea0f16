"""MaxText's trees: what its own mapping, hooks and stacking made of small models is what ours makes, both ways.

Goldens: `fixtures/maxtext`, by `fixtures/make/maxtext_trees.py` and `maxtext_models.py`, which run MaxText's functions
as they are.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes  # noqa: F401  (bf16 of safetensors)
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.algebra.element_map import element_map, joined
from ckpt_tool.cli import run
from ckpt_tool.systems.jax.maxtext_names import both, cycles

MADE = Path(__file__).parents[2] / "fixtures" / "maxtext"
CASES = [(path.parent.name, path.name) for path in sorted(MADE.glob("*/*scanned"))]
ROWS = {"gemma2": "48", "gemma3": "36"}  # of MaxText's vocabulary, where the hub's has 40
ROUNDED = ("gemma2", "gemma3", "gemma4_dense")  # BF16, of which MaxText makes norms in F32 and gives BF16 back


def same(a, b):
    return run(["diff", str(a), str(b), "-q"]) == 0


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_tree_is_the_hub_s_model_and_back(name, layout, tmp_path):
    tree = MADE / name / layout
    hub = MADE / name / "hub"
    words = ["--config", str(hub / "config.json"), "-q"]
    words += ["--vocab-size", "40"] if name in ROWS else []
    words += ["--dtype", "bf16"] if name in ROUNDED else []
    assert run(["convert", str(tree), str(tmp_path / "hub"), "--to", "safetensors", *words]) == 0
    back = MADE / name / "back"  # what MaxText's hooks make of the tree, where it is not the hub's to the bit
    assert same(tmp_path / "hub", back if back.exists() else hub)
    dialect = "maxtext" if layout == "scanned" else "maxtext-unscanned"
    out = tmp_path / "tree"
    words = ["--vocab-size", ROWS[name], "-q"] if name in ROWS else ["-q"]
    assert run(["convert", str(hub), str(out), "--to", "orbax", "--dialect", dialect, *words]) == 0
    assert same(out, tree)
    rows = [json.loads((path / "items/_METADATA").read_text())["tree_metadata"] for path in (out, tree)]
    assert rows[0].keys() == rows[1].keys() - {"('step',)"}, "the paths are those of MaxText's TrainState"


def test_moments_follow_their_weights(tmp_path):
    """Adam's moments lie as their weight does, beside one count."""
    torch = pytest.importorskip("torch")
    hub = MADE / "qwen3/hub"
    source = tmp_path / "state.pt"
    out = tmp_path / "tree"
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
    hub = MADE / "llama31/hub"
    tree = MADE / "llama31/scanned"
    assert run(["convert", str(hub), str(tmp_path / "out"), "--to", "orbax", "--dialect", "maxtext"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "3 tensors are divided by a square root, in fp32, rounded once: model.layers.0.self_attn.q_proj.weight" in said
    )
    words = ["--to", "orbax", "--dialect", "maxtext-unscanned", "--config", str(hub / "config.json"), "-q"]
    assert run(["convert", str(tree), str(tmp_path / "apart"), *words]) == 0
    assert same(tmp_path / "apart", MADE / "llama31/unscanned")


@pytest.mark.parametrize("case", ["llama", "gemma4_experts"])  # queries; an embedding
def test_moments_of_another_scale_are_refused(case, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    hub = MADE / case / "hub"
    source = tmp_path / "state.pt"
    model = {name: torch.from_numpy(value) for name, value in load_file(hub / "model.safetensors").items()}
    state = {name: {"exp_avg": value, "exp_avg_sq": value, "step": torch.tensor(4.0)} for name, value in model.items()}
    torch.save({"model": model, "optim": {"state": state, "param_groups": []}}, source)
    words = ["convert", str(source), str(tmp_path / "out"), "--to", "orbax", "--dialect", "maxtext"]
    words += ["--config", str(hub / "config.json")]
    assert run(words) == 2 and "E1285" in capsys.readouterr().err
    assert run([*words, "--drop", "optimizer", "-q"]) == 0 and same(tmp_path / "out", MADE / case / "scanned")


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_between_layouts_every_bit_stays(name, tmp_path):
    """Numbers that are added in fp32 and taken off again are none, and so are roots."""
    tree = MADE / name / "scanned"
    config = ["--config", str(MADE / name / "hub/config.json")]
    words = ["--to", "orbax", "--dialect", "maxtext-unscanned", *config, "--vocab-size", ROWS[name], "-q"]
    assert run(["convert", str(tree), str(tmp_path / "apart"), *words]) == 0
    assert same(tmp_path / "apart", MADE / name / "unscanned")


def test_a_vocabulary_of_another_length_says_which_option_helps(tmp_path, capsys):
    words = ["--to", "safetensors", "--config", str(MADE / "gemma2/hub/config.json")]
    assert run(["convert", str(MADE / "gemma2/scanned"), str(tmp_path / "out"), *words]) == 3
    said = capsys.readouterr().err
    assert "E1370" in said and "--vocab-size 40" in said and "token_embedder.embedding" in said


def changed(name, tmp_path, keep, **change):
    """A hub's model with the tensors that `keep` keeps, and with other values in its config."""
    hub = MADE / name / "hub"
    out = tmp_path / "in"
    out.mkdir()
    values = {key: np.array(value) for key, value in load_file(hub / "model.safetensors").items() if keep(key)}
    save_file(values, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps({**json.loads((hub / "config.json").read_text()), **change}))
    return ["convert", str(out), str(tmp_path / "out"), "--to", "orbax"]


@pytest.mark.parametrize("dialect", ["maxtext", "maxtext-unscanned"])
def test_layers_that_fill_no_cycle_have_no_place(dialect, tmp_path, capsys):
    """Gemma 2 has two layers in one of MaxText's, so the last of three is in none."""
    words = changed("gemma2", tmp_path, lambda key: ".layers.3." not in key, num_hidden_layers=3)
    assert run([*words, "--dialect", dialect, "-v"]) == 3
    assert "E1374" in (said := capsys.readouterr().err) and "model.layers.2.mlp.down_proj.weight" in said


def test_what_all_layers_lack_is_named(tmp_path, capsys):
    """Nothing in the hub's names shows it: MaxText's rules say that a model has it."""
    words = changed("gemma3", tmp_path, lambda key: ".q_norm." not in key)
    assert run([*words, "--dialect", "maxtext", "-v"]) == 3
    said = capsys.readouterr().err
    assert "E1484" in said and "decoder.layers_remainder.layers_1.self_attention.query_norm.scale" in said
    assert run([*words, "--dialect", "maxtext", "--lenient", "-q"]) == 0


@pytest.mark.parametrize("gone", ["decoder.layers.*", "decoder.layers.self_attention.out.kernel"])
def test_a_stack_that_is_missing_is_named(gone, tmp_path, capsys):
    """One tensor holds all layers, so that no other layer tells; a tree without any layer too."""
    part = tmp_path / "part"
    config = ["--config", str(MADE / "qwen3/hub/config.json")]
    words = ["merge", str(MADE / "qwen3/scanned"), str(part), "--to", "orbax", "--remove-keys", gone, "-q"]
    assert run(words) == 0
    assert run(["convert", str(part), str(tmp_path / "out"), "--to", "safetensors", *config]) == 3
    assert "E1484" in (said := capsys.readouterr().err) and "decoder.layers.self_attention.out.kernel" in said


def test_the_language_model_of_one_that_sees(tmp_path, capsys):
    """The tower is left behind in words; without them the way is named."""
    hub = load_file(MADE / "gemma3/hub/model.safetensors")
    tower = {"vision_tower.vision_model.post_layernorm.weight": np.ones(3, "f4")}
    text = json.loads((MADE / "gemma3/hub/config.json").read_text())
    (tmp_path / "in").mkdir()
    save_file(
        {**{f"language_model.{key}": value for key, value in hub.items()}, **tower}, tmp_path / "in/model.safetensors"
    )
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {},
    }
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    words = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "orbax", "--dialect", "maxtext"]
    assert run(words) == 2 and "--family gemma3 with --keep-keys" in capsys.readouterr().err
    words += ["--family", "gemma3", "--keep-keys", "language_model.*", "--vocab-size", "36", "-q"]
    assert run(words) == 0 and same(tmp_path / "out", MADE / "gemma3/scanned")


def test_layers_are_an_axis_or_a_number():
    text = "decoder.layers.a : h {} f, e {} = model.layers.{i}.a : f h, e"
    made = both("", text)
    assert made["maxtext"].of == "decoder.layers.a : h i f, e i = model.layers.{i}.a : f h, e"
    assert made["maxtext-unscanned"].of == "decoder.layers_{i}.a : h f, e = model.layers.{i}.a : f h, e"
    assert cycles("", text, 4)["maxtext"].of == (
        "decoder.layers.layers_{place}.a : h cycle f, e cycle = model.layers.{4 * cycle + place}.a : f h, e"
    )


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
    tree = str(MADE / "qwen3/scanned")
    config = ["--config", str(MADE / "qwen3/hub/config.json")]
    words = ["merge", tree, str(tmp_path / "part"), "--to", "orbax", "--remove-keys", "token_embedder.*", "-q"]
    assert run(words) == 0
    words = ["convert", str(tmp_path / "part"), str(tmp_path / "out"), "--to", "safetensors", *config]
    assert run(words) == 3 and "token_embedder" in capsys.readouterr().err
    assert run([*words, "--lenient", "-q"]) == 0
    assert all(name.startswith(("model.", "lm_head.")) for name in load_file(tmp_path / "out/model.safetensors"))


@pytest.mark.parametrize("width", [2304, 2560, 3584, 5376, 20])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_an_embedding_s_scale_is_the_function_of_maxtext(width, kind):
    """`pad_hf_embedding_layer` and `pad_and_scale_embedding` of param_mapping.py, in their own words."""
    x = np.random.default_rng(5).normal(size=4000).astype("f4").astype(kind)
    plain = np.dtype("float32").type(width**0.5)
    rounded = np.dtype("bfloat16").type(width**0.5)
    for name, root in (("embed_scale", plain), ("embed_scale_bf16", rounded)):
        step = element_map(f"{name}({width})")
        there = step(x.astype("f4")).astype(kind)
        np.testing.assert_array_equal(there, (x * root).astype(kind))
        np.testing.assert_array_equal(step.undone(there.astype("f4")).astype(kind), (there / root).astype(kind))


def test_a_number_added_in_fp32_and_taken_off_is_none():
    wide = element_map("add_wide(1)")
    back = element_map("add(-1)")
    assert wide.undone == back and wide.wide and not back.wide
    assert joined([wide], [back]) == joined([back], [wide]) == ()
