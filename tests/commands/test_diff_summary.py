"""`ckpt diff` answers what a person asks: which modules changed, by how much, whose file holds it, what would match."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckpt_tool as ckpt
from ckpt_tool.report.comparison import comparison
from ckpt_tool.report.plain import Look, render

FIXTURES = Path(__file__).parents[2] / "fixtures"
HUB = FIXTURES / "safetensors" / "llama_one_file"


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """The model with both down projections scaled, one value of one q projection moved, and a tensor gone."""
    tensors = {name: ckpt.open(HUB)[name].numpy() for name in ckpt.open(HUB)}
    for name in tensors:
        if name.endswith("down_proj.weight"):
            tensors[name] = (tensors[name].astype(np.float32) * 1.01).astype(tensors[name].dtype)
    q = tensors["model.layers.1.self_attn.q_proj.weight"].copy()
    q.flat[7] += 100
    tensors["model.layers.1.self_attn.q_proj.weight"] = q
    del tensors["model.norm.weight"]
    save_file({name: np.ascontiguousarray(each) for name, each in tensors.items()}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_groups_come_worst_first(changed: Path) -> None:
    summary = ckpt.diff(HUB, changed)["summary"]
    assert [group["pattern"] for group in summary[:3]] == [
        "model.layers.*.self_attn.q_proj.weight",
        "model.layers.*.mlp.down_proj.weight",
        "model.norm.weight",
    ]
    q, down, norm = summary[:3]
    assert (q["changed"], q["equal"], q["elements"]) == (1, 1, 1)
    assert q["names"] == {"changed": "model.layers.1.self_attn.q_proj.weight"}
    assert (down["changed"], down["equal"]) == (2, 0)
    assert down["names"] == {"changed": "model.layers.[0-1].mlp.down_proj.weight"}
    assert down["rel_l2"] == pytest.approx(0.01, rel=0.05)
    assert norm["only_left"] == 1
    assert all(group["equal"] == group["tensors"] for group in summary[3:])


@pytest.mark.parametrize("width", [None, 200, 80, 50, 30])
def test_a_person_sees_modules_states_and_amounts_at_any_width(changed: Path, width: int | None) -> None:
    text = render(comparison(ckpt.diff(HUB, changed)), Look(width=width))
    assert "rel. L2" in text
    joined = "".join(text.split())  # a narrow window breaks names
    assert "model:whatdiffers,worstfirst" in joined
    assert joined.index("q_proj") < joined.index("down_proj") < joined.index("onlyinthefirst")
    assert joined.endswith("differ") and "notequal:4tensorsof" in joined


LAYERS = 6
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "post_attention_layernorm")


def save_layers(path: Path, steps: dict[int, float]) -> Path:
    """A model of six layers, its values moved at random, by `steps[layer]` of their own size."""
    random = np.random.default_rng(1)
    tensors = {"model.norm.weight": np.ones(8, np.float32)}
    for layer in range(LAYERS):
        for module in MODULES:
            values = random.normal(size=(8, 8)).astype(np.float32)
            change = random.normal(size=(8, 8)).astype(np.float32)
            tensors[f"model.layers.{layer}.{module}.weight"] = values + np.float32(steps.get(layer, 0)) * change
    save_file(tensors, path)
    return path


@pytest.fixture
def one_layer_more(tmp_path: Path) -> tuple[Path, Path]:
    """Two models: every layer of the second has changed, layer 3 a hundred times more than the others."""
    steps = {layer: 0.1 if layer == 3 else 0.001 for layer in range(LAYERS)}
    return save_layers(tmp_path / "a.safetensors", {}), save_layers(tmp_path / "b.safetensors", steps)


def test_the_worst_layer_is_named_in_each_row_and_in_a_table(one_layer_more: tuple[Path, Path]) -> None:
    document = ckpt.diff(*one_layer_more)
    assert document["by_layer"][0]["layer"] == "model.layers.3"
    assert document["by_layer"][0]["rel_l2"] == pytest.approx(0.1, rel=0.2)
    assert document["by_layer"][1]["rel_l2"] == pytest.approx(0.001, rel=0.2)
    assert all(group["worst"]["name"].startswith("model.layers.3.") for group in document["summary"][:4])

    lines = render(comparison(document), Look()).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("model: what differs, worst first"))
    assert lines[start].endswith("(amounts of each row's worst tensor)")
    first = lines[start + 2].split()
    assert first[1:5] == ["6", "of", "6", "3"]
    assert float(first[5]) == pytest.approx(document["summary"][0]["worst"]["rel_l2"], rel=0.1)
    start = next(number for number, line in enumerate(lines) if line.startswith("model: by layer, worst first"))
    assert lines[start + 2].split()[0] == "model.layers.3"


def test_layers_that_changed_alike_take_one_line(tmp_path: Path) -> None:
    left = save_layers(tmp_path / "a.safetensors", {})
    right = save_layers(tmp_path / "b.safetensors", dict.fromkeys(range(LAYERS), 0.01))
    text = render(comparison(ckpt.diff(left, right)), Look())
    assert "model: all 6 layers changed alike, relative L2 9." in text
    assert "by layer" not in text


def test_ten_layers_are_listed() -> None:
    amounts = [1.0, *[0.001] * 29]
    layers = [
        {"state": "model", "layer": f"layers.{number}", "changed": 1, "rel_l2": x, "cosine": 0.5, "max_abs": x}
        for number, x in enumerate(amounts)
    ]
    difference = {"name": "layers.0.w", "state": "model", "kind": "value"}
    document = {"equal": False, "compared": 30, "differences": [difference], "by_layer": layers}
    text = render(comparison(document), Look())
    assert "layers.9 " in text and "layers.10 " not in text
    assert "... 20 layers that changed less; --json lists all" in text


def test_single_tensors_come_worst_first_with_their_norms(one_layer_more: tuple[Path, Path]) -> None:
    text = render(comparison(ckpt.diff(*one_layer_more), everything=True), Look())
    lines = text.split("tensors whose values differ, worst first\n")[1].splitlines()
    assert " ".join(lines[0].split()) == "tensor state rel. L2 cosine max abs elements first at"  # no ulp is small
    assert all(line.split()[0].startswith("model.layers.3.") for line in lines[1:5])
    amounts = [float(line.split()[2]) for line in lines[1:25]]
    assert amounts == sorted(amounts, reverse=True)


def test_small_distances_in_the_last_place_are_shown(tmp_path: Path) -> None:
    values = np.ones(4, np.float32)
    save_file({"w": values}, tmp_path / "a.safetensors")
    save_file({"w": np.nextafter(values, np.float32(2))}, tmp_path / "b.safetensors")
    document = ckpt.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    lines = render(comparison(document, everything=True), Look()).split("tensors whose values differ")[1].splitlines()
    assert lines[1].split()[-4:] == ["ulp", "elements", "first", "at"]
    assert lines[2].split()[-3:] == ["1", "4", "[0]"]


def test_the_optimizer_follows_the_model_and_is_cut_short() -> None:
    """Counts of steps change by far the most, and a difference of weights is what people look for."""
    groups = []
    for state, amount in (("step", 9.0), ("exp_avg_sq", 3.0), ("model", 0.1)):
        for number in range(12):
            pattern = f"{'abcdefghijkl'[number]}.*.weight"
            numbers = {"changed": pattern.replace("*", "[0-1]")}
            amounts = {"rel_l2": amount, "cosine": 0.5, "max_abs": 1.0, "max_ulp": 9999}
            worst = {"name": pattern.replace("*", "1"), **amounts}
            counts = {"tensors": 2, "equal": 0, "changed": 2, "other_shape": 0, "other_dtype": 0}
            sides = {"only_left": 0, "only_right": 0, "nonfinite": 0, "names": numbers}
            groups.append({"state": state, "pattern": pattern, **counts, **sides, **worst, "worst": worst})
    document = {"equal": False, "compared": 72, "differences": [{"kind": "value", "name": "a"}], "summary": groups}
    text = render(comparison(document), Look())
    order = [text.index(f"{state}: what differs") for state in ("model", "exp_avg_sq", "step")]
    assert order == sorted(order)
    assert [text[start:].split("\n\n")[0].count("[0-1]") for start in order] == [12, 5, 5]
    assert text.count("... 7 more groups; -v lists all") == 2


def test_rows_fit_a_window_of_80_columns_and_missing_columns_are_named(one_layer_more: tuple[Path, Path]) -> None:
    text = render(comparison(ckpt.diff(*one_layer_more)), Look(width=80))
    lines = text.split("(amounts of each row's worst tensor)\n")[1].splitlines()
    assert lines[0].split() == ["module", "changed", "worst", "rel.", "L2"]
    assert all(len(line) <= 80 and line.endswith(("e-01", "e-02")) for line in lines[1:5])
    assert lines[5] == "  no room here for: cosine, max abs"


def test_the_state_is_never_left_out(tmp_path: Path) -> None:
    """Adam's states have one name: a line without its state would be a second line of the same tensor."""
    source = FIXTURES / "dcp" / "fsdp2_dp4"
    ckpt.convert(source, tmp_path / "out", to="dcp", remove_keys=["lm_head.*"])
    for width in (30, 50, 80, 120):
        text = render(comparison(ckpt.diff(source, tmp_path / "out")), Look(width=width))
        for state in ("model", "step", "exp_avg", "exp_avg_sq"):
            assert state in text


def test_the_file_and_the_rank_that_hold_a_difference_are_named(tmp_path: Path) -> None:
    source = FIXTURES / "megatron" / "moe_tp2ep2etp1"
    ckpt.convert(source, tmp_path / "ranks", to="sharded", tp=2, ep=2)
    file = tmp_path / "ranks" / "model.tp01_ep00.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 0x30
    file.write_bytes(data)
    rows = ckpt.diff(tmp_path / "ranks", source, rank=True)["by_rank"]
    assert [(row["side"], row["file"], row["rank"], row["elements"]) for row in rows] == [
        ("first", "model.tp01_ep00.safetensors", "tp 1, ep 0", 1),
        ("second", "mp_rank_01_001/model_optim_rng.pt", "tp 1, ep 1", 1),
    ]


@pytest.mark.parametrize(("old", "new"), [("", "student."), ("model.", "net.model."), ("model.", "")])
def test_a_prefix_that_hides_equal_names_is_told(old: str, new: str, tmp_path: Path) -> None:
    tensors = {name: np.ascontiguousarray(ckpt.open(HUB)[name].numpy()) for name in ckpt.open(HUB)}
    names = {name: new + name.removeprefix(old) if name.startswith(old) else name for name in tensors}
    save_file({names[name]: each for name, each in tensors.items()}, tmp_path / "other.safetensors")
    found = ckpt.diff(HUB, tmp_path / "other.safetensors")
    assert f"--rename '{old}*={new}*'" in found["suggestion"]
    assert ckpt.diff(HUB, tmp_path / "other.safetensors", rename=[f"{old}*={new}*"])["equal"]


def test_other_dialects_are_told(tmp_path: Path) -> None:
    source = FIXTURES / "convert" / "llama" / "hf"
    ckpt.convert(source, tmp_path / "out", to="megatron-dist")
    assert "--dialect hf" in ckpt.diff(source, tmp_path / "out")["suggestion"]


def test_nothing_is_suggested_where_names_match(changed: Path) -> None:
    assert ckpt.diff(HUB, changed)["suggestion"] is None


def test_equal_checkpoints_have_a_summary_of_equal_groups() -> None:
    found = ckpt.diff(HUB, HUB)
    assert found["equal"]
    assert sum(group["equal"] for group in found["summary"]) == found["compared"]


def test_names_with_stars_and_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        tensors = {key: np.full(2, value, np.float32) for key in ("x.*.0", "[1].2.w", "3")}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    summary = ckpt.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")["summary"]
    assert {group["names"]["changed"] for group in summary} == {"x.*.0", "[1].2.w", "3"}
    assert load_file(tmp_path / "a.safetensors").keys() == {"x.*.0", "[1].2.w", "3"}
