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
    assert "what differs, worst first" in text
    assert "relative L2" in text
    joined = "".join(text.split())  # a narrow window breaks names
    assert joined.index("q_proj") < joined.index("down_proj") < joined.index("onlyinthefirst")
    assert joined.endswith("differ") and "notequal:4tensorsof" in joined


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


@pytest.mark.parametrize(("old", "new"), [("", "module."), ("model.", "net.model."), ("model.", "")])
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
