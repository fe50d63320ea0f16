"""Names and structure of the output: dialects, AOA statements, and what stays as it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy, and so safetensors, the word bfloat16)
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import InputError, UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

FIXTURES = Path(__file__).parents[2] / "fixtures"
UNIFIED = FIXTURES / "paddle-unified" / "llama_tied_hf"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}
SHAPES = {
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.k_proj.weight": (4, 8),
    "self_attn.v_proj.weight": (4, 8),
    "self_attn.o_proj.weight": (8, 8),
    "mlp.gate_proj.weight": (6, 8),
    "mlp.up_proj.weight": (6, 8),
    "mlp.down_proj.weight": (8, 6),
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
}
STATEMENTS = """
# hub to Paddle
model.layers.$LAYER_ID.self_attn.q_proj.weight^T, model.layers.$LAYER_ID.self_attn.k_proj.weight^T,\
 model.layers.$LAYER_ID.self_attn.v_proj.weight^T -> model.layers.$LAYER_ID.self_attn.qkv_proj.weight,\
 fused_qkv, num_heads=4, num_key_value_groups=2
model.layers.$LAYER_ID.mlp.gate_proj.weight^T, model.layers.$LAYER_ID.mlp.up_proj.weight^T ->\
 model.layers.$LAYER_ID.mlp.up_gate_proj.weight, fused_ffn
model.layers.$LAYER_ID.mlp.down_proj.weight^T -> model.layers.$LAYER_ID.mlp.down_proj.weight
model.layers.$LAYER_ID.self_attn.o_proj.weight^T -> model.layers.$LAYER_ID.self_attn.o_proj.weight
lm_head.weight -> lm_head.weight, dtype='bfloat16'
"""


def hub_model(folder: Path, config: dict[str, Any] | None) -> dict[str, np.ndarray]:
    names = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8)}
    names |= {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in SHAPES.items()}
    arrays = {}
    start = 0
    for name, shape in names.items():
        arrays[name] = np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
        start += arrays[name].size
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return arrays


def run(source: Path, out: Path, reading: Reading | None = None, **writing: Any) -> dict[str, Any]:
    return convert(
        str(source), str(out), reading or Reading(), Writing(**{"to": "sharded", "fsync": False, **writing}), Silent()
    )


def test_statements_make_what_the_layout_says(tmp_path: Path) -> None:
    arrays = hub_model(tmp_path / "hub", None)
    (tmp_path / "s.aoa").write_text(STATEMENTS)
    report = run(tmp_path / "hub", tmp_path / "out", aoa=str(tmp_path / "s.aoa"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    q, k, v = (arrays[f"model.layers.1.self_attn.{x}_proj.weight"].T for x in "qkv")
    want = np.concatenate([q[:, :4], k[:, :2], v[:, :2], q[:, 4:], k[:, 2:], v[:, 2:]], 1)
    assert np.array_equal(found["model.layers.1.self_attn.qkv_proj.weight"], want)
    gate, up = (arrays[f"model.layers.0.mlp.{x}_proj.weight"].T for x in ("gate", "up"))
    assert np.array_equal(found["model.layers.0.mlp.up_gate_proj.weight"], np.concatenate([gate, up], 1))
    assert str(found["lm_head.weight"].dtype) == "bfloat16"
    assert np.array_equal(found["model.norm.weight"], arrays["model.norm.weight"])
    assert len(found) == 3 + 2 * 6 and report["digest_checked"]


def test_statements_that_drop_are_told(tmp_path: Path) -> None:
    hub_model(tmp_path / "hub", None)
    (tmp_path / "s.json").write_text(json.dumps({"aoa_statements": ["lm_head.weight -> _"]}))
    report = run(tmp_path / "hub", tmp_path / "out", aoa=str(tmp_path / "s.json"))
    assert report["dropped"][0]["names"] == ["lm_head.weight"] and "s.json" in report["dropped"][0]["reason"]


def test_a_part_that_is_dropped_is_told(tmp_path: Path) -> None:
    hub_model(tmp_path / "hub", None)
    (tmp_path / "s.aoa").write_text("lm_head.weight -> lm_head.weight, rest, axis=0\nrest -> _")
    report = run(tmp_path / "hub", tmp_path / "out", aoa=str(tmp_path / "s.aoa"))
    assert any("40 of 80 elements of lm_head.weight are left out" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model.layers.$LAYER_ID.nothing -> x.$LAYER_ID", "nothing"),
        ("lm_head.weight -> a, b, c, axis=0", "3"),
        ("lm_head.weight ->", "nothing on one side|want|names"),
        ("\udcff", "UTF-8"),
    ],
)
def test_bad_statements_are_usage_errors(tmp_path: Path, text: str, says: str) -> None:
    hub_model(tmp_path / "hub", None)
    (tmp_path / "s.aoa").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=says):
        run(tmp_path / "hub", tmp_path / "out", aoa=str(tmp_path / "s.aoa"))
    assert not (tmp_path / "out").exists()


def test_statements_and_a_dialect_exclude_each_other(tmp_path: Path) -> None:
    hub_model(tmp_path / "hub", None)
    (tmp_path / "s.aoa").write_text(STATEMENTS)
    with pytest.raises(UsageError, match="both say"):
        run(tmp_path / "hub", tmp_path / "out", aoa=str(tmp_path / "s.aoa"), dialect="hf")


def test_to_paddle_and_back_is_the_source(tmp_path: Path) -> None:
    arrays = hub_model(tmp_path / "hub", LLAMA)
    run(tmp_path / "hub", tmp_path / "paddle", dialect="paddle")
    found = load_file(tmp_path / "paddle" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    assert np.array_equal(found[name], arrays[name].T) and np.array_equal(
        found["model.norm.weight"], arrays["model.norm.weight"]
    )
    run(tmp_path / "paddle", tmp_path / "back", Reading(config=str(tmp_path / "hub")), to="safetensors")
    assert diff(str(tmp_path / "hub"), str(tmp_path / "back"), Reading(), progress=Silent())["equal"]


def test_the_trainers_two_layouts_are_one_model(tmp_path: Path) -> None:
    """The real writer stored the model the hub's way round, masters and moments Paddle's."""
    report = run(UNIFIED, tmp_path / "out", dialect="hf")
    stored = load_file(next(UNIFIED.glob("model-*.safetensors")))
    found = {state: load_file(tmp_path / "out" / f"{state}.safetensors") for state in ("model", "master", "exp_avg")}
    assert np.array_equal(stored["lm_head.weight"].view(np.uint16), stored["model.embed_tokens.weight"].view(np.uint16))
    del stored["lm_head.weight"]  # tied: the hub has one of the two
    assert all(np.array_equal(found["model"][name].view(np.uint16), stored[name].view(np.uint16)) for name in stored)
    masters = load_file(next(UNIFIED.glob("master_weights-*.safetensors")))
    name = next(name for name in masters if "gate_proj" in name)
    assert np.array_equal(found["master"][name], masters[name].T)
    assert any("llama, paddle to hf" in note for note in report["notes"])


def test_names_that_no_family_knows_stay_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    save_file({"net.0.w": np.zeros((2, 3), np.float32)}, tmp_path / "src" / "model.safetensors")
    run(tmp_path / "src", tmp_path / "mine", to="dcp")
    report = run(tmp_path / "mine", tmp_path / "out", to="paddle-unified")
    assert any("kept as they are" in note for note in report["notes"])
    with pytest.raises(InputError) as caught:
        run(tmp_path / "mine", tmp_path / "other", dialect="paddle")
    assert "--dialect keep" in str(caught.value.hint)


def test_a_model_type_of_no_family_can_take_the_nearest_s_rules(tmp_path: Path) -> None:
    hub_model(tmp_path / "llama", LLAMA)
    hub_model(tmp_path / "hub", {**LLAMA, "model_type": "lamina"})
    with pytest.raises(InputError, match="'lamina'.*the nearest, llama, knows all 12 kinds of tensors") as caught:
        run(tmp_path / "hub", tmp_path / "out", to="megatron-dist")
    assert caught.value.code == "E1372" and caught.value.path == str(tmp_path / "hub")
    assert not (tmp_path / "out").exists()
    run(tmp_path / "llama", tmp_path / "same", to="megatron-dist", degrees={"tp": 2})
    family = Reading(family="llama")
    report = run(tmp_path / "hub", tmp_path / "out", family, to="megatron-dist", degrees={"tp": 2})
    assert any("no Megatron arguments are written" in note for note in report["notes"])
    assert diff(str(tmp_path / "out"), str(tmp_path / "same"), Reading(), progress=Silent())["equal"]
    run(tmp_path / "out", tmp_path / "back", family, to="safetensors")
    assert diff(str(tmp_path / "hub"), str(tmp_path / "back"), Reading(), progress=Silent())["equal"]


def test_paddles_way_round_is_noticed_where_nobody_says_it(tmp_path: Path) -> None:
    """dcp has no word for whose names it holds; a model-only output is the hub's all the same."""
    hub_model(tmp_path / "hub", LLAMA)
    run(tmp_path / "hub", tmp_path / "dcp", to="dcp", dialect="paddle")
    run(tmp_path / "dcp", tmp_path / "back", Reading(config=str(tmp_path / "hub")), to="safetensors")
    assert diff(str(tmp_path / "hub"), str(tmp_path / "back"), Reading(), progress=Silent())["equal"]
    run(tmp_path / "hub", tmp_path / "plain", to="dcp")
    report = run(tmp_path / "plain", tmp_path / "same", to="safetensors")
    assert not any("names and structure" in note for note in report["notes"])


def test_a_tensor_beside_the_rules_is_named(tmp_path: Path) -> None:
    hub_model(tmp_path / "hub", LLAMA)
    save_file(
        {"extra.thing": np.ones(3, np.float32), **load_file(tmp_path / "hub" / "model.safetensors")},
        tmp_path / "hub" / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(InputError, match="extra.thing") as caught:
        run(tmp_path / "hub", tmp_path / "out", dialect="paddle")
    assert caught.value.code == "E3010"
    report = run(tmp_path / "hub", tmp_path / "out", Reading(lenient=True), dialect="paddle")
    assert any("extra.thing" in note and "kept as they are" in note for note in report["notes"])
    assert "extra.thing" in load_file(tmp_path / "out" / "model.safetensors")


def test_a_config_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    hub_model(tmp_path / "hub", None)
    for text in ("[1]", "{", '{"a": 1, "a": 2}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match="config"):
            run(tmp_path / "hub", tmp_path / "out", Reading(config=str(tmp_path / "config.json")), dialect="paddle")


def test_a_config_that_was_passed_lies_beside_the_model(tmp_path: Path) -> None:
    hub_model(tmp_path / "hub", LLAMA)
    run(tmp_path / "hub", tmp_path / "flat", to="dcp", dialect="paddle")
    (tmp_path / "flat" / "config.json").unlink(missing_ok=True)
    run(tmp_path / "flat", tmp_path / "out", Reading(config=str(tmp_path / "hub")), to="safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == LLAMA


def test_a_whole_model_has_no_degrees(tmp_path: Path) -> None:
    """PaddleFormers refuses to open a model whose config names tensor ranks that do not run."""
    hub_model(tmp_path / "hub", {**LLAMA, "tensor_model_parallel_size": 2, "use_cache": True})
    report = run(tmp_path / "hub", tmp_path / "out", to="safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        **LLAMA,
        "tensor_model_parallel_size": 1,
        "use_cache": True,
    }
    assert any("tensor_model_parallel_size" in note for note in report["notes"])


def test_a_config_that_is_not_strict_json_is_copied_as_it_is(tmp_path: Path) -> None:
    hub_model(tmp_path / "hub", None)
    (tmp_path / "hub" / "config.json").write_text('{"limit": Infinity}')
    run(tmp_path / "hub", tmp_path / "out", to="safetensors")
    assert (tmp_path / "out" / "config.json").read_text() == '{"limit": Infinity}'


def test_one_matrix_that_is_not_square_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """q and o alone tell that all of them lie Paddle's way."""
    square = {name: (8, 8) for name, shape in SHAPES.items() if len(shape) == 2}
    longer = {"self_attn.q_proj.weight": (16, 8), "self_attn.o_proj.weight": (8, 16)}
    monkeypatch.setattr(sys.modules[__name__], "SHAPES", {**SHAPES, **square, **longer})
    config = {**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 8}
    hub_model(tmp_path / "hub", config)
    run(tmp_path / "hub", tmp_path / "mine", to="dcp", dialect="paddle")
    run(tmp_path / "mine", tmp_path / "back", to="safetensors")
    assert diff(str(tmp_path / "hub"), str(tmp_path / "back"), Reading(), progress=Silent())["equal"]


def test_paddlenlp_s_root_is_noticed_where_all_is_square(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SHAPES", {k: (8,) * len(shape) for k, shape in SHAPES.items()})
    arrays = hub_model(tmp_path / "hub", {**LLAMA, "num_key_value_heads": 4, "intermediate_size": 8})
    nlp = {
        name.replace("model.", "llama."): array.T.copy() if "_proj." in name else array
        for name, array in arrays.items()
    }
    nlp["lm_head.weight"] = arrays["lm_head.weight"].T.copy()
    (tmp_path / "nlp").mkdir()
    save_file(nlp, tmp_path / "nlp" / "model.safetensors")
    run(tmp_path / "nlp", tmp_path / "back", Reading(config=str(tmp_path / "hub")), to="safetensors")
    assert diff(str(tmp_path / "hub"), str(tmp_path / "back"), Reading(), progress=Silent())["equal"]
