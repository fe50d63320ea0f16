"""Every family that Paddle has: transformers saves a model, `convert` makes each of Paddle's formats of it and brings
it back.

What comes back is the source, bit for bit and name for name. What tensor ranks hold of Phi-3 and gpt-oss comes from
NumPy, as the forward passes of PaddleFormers 1.2.0 take it.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import tiny_model

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

pytest.importorskip("transformers", minversion="5")
SEES = "ernie4_5_vl_moe"  # no rule says how ranks share its tower; whole: test_paddle_pretrained.py
NAMES = [family.name for family in FAMILIES if "paddle" in family.dialects and family.name != SEES]
ROUTES = [("paddle-unified", 1), ("paddle", 2), ("paddle-flex", 2)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("hub")
    made = set[str]()

    def make(family: str) -> Path:
        if family not in made:
            tiny_model(family).save_pretrained(folder / family)
            made.add(family)
        return folder / family

    return make


def hop(source: Path, out: Path, to: str, config: Path | None = None, **writing: Any) -> dict[str, Any]:
    reading = Reading(config=str(config) if config else None)
    return convert(str(source), str(out), reading, Writing(to=to, fsync=False, **writing), Silent())


@pytest.mark.share(4)
@pytest.mark.parametrize(("to", "tp"), ROUTES)
@pytest.mark.parametrize("family", NAMES)
def test_there_and_back(family: str, to: str, tp: int, saved: Any, tmp_path: Path) -> None:
    source = saved(family)
    report = hop(source, tmp_path / "there", to, degrees={"tp": tp} if tp > 1 else {})
    assert any(f"the family {family}, hf to paddle" in note for note in report["notes"])
    hop(tmp_path / "there", tmp_path / "back", "safetensors", config=source)
    found, want = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", source))
    assert found.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def ranks(folder: Path) -> list[dict[str, np.ndarray]]:
    """What two tensor ranks hold, read by pickle as Paddle reads it."""
    return [pickle.loads((folder / f"model_state.tp0{rank}.pdparams").read_bytes()) for rank in (0, 1)]


def test_a_rank_of_phi3_holds_its_share_of_q_k_and_v(saved: Any, tmp_path: Path) -> None:
    source = saved("phi3")
    config = json.loads((source / "config.json").read_text())
    hop(source, tmp_path / "there", "paddle", degrees={"tp": 2})
    hub = load_file(source / "model.safetensors")
    d = config["head_dim"]
    q = config["num_attention_heads"] * d
    k = config["num_key_value_heads"] * d
    for rank, held in enumerate(ranks(tmp_path / "there")):
        whole = hub["model.layers.1.self_attn.qkv_proj.weight"]
        parts = [np.split(part, 2)[rank] for part in np.split(whole, [q, q + k])]
        np.testing.assert_array_equal(held["model.layers.1.self_attn.qkv_proj.weight"], np.concatenate(parts).T)
        halves = [np.split(half, 2)[rank] for half in np.split(hub["model.layers.1.mlp.gate_up_proj.weight"], 2)]
        np.testing.assert_array_equal(held["model.layers.1.mlp.gate_up_proj.weight"], np.concatenate(halves).T)


def test_a_rank_of_gpt_oss_holds_its_sinks_and_all_experts(saved: Any, tmp_path: Path) -> None:
    source = saved("gpt_oss")
    hop(source, tmp_path / "there", "paddle", degrees={"tp": 2})
    hub = load_file(source / "model.safetensors")
    at = "model.layers.1"
    for rank, held in enumerate(ranks(tmp_path / "there")):
        np.testing.assert_array_equal(held[f"{at}.self_attn.sinks"], np.split(hub[f"{at}.self_attn.sinks"], 2)[rank])
        for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
            np.testing.assert_array_equal(held[f"{at}.mlp.experts.{name}"], hub[f"{at}.mlp.experts.{name}"])
