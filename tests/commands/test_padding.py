"""Rows that Megatron pads a vocabulary with: cut where its arguments explain them, else nothing is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

SOURCE = Path(__file__).parents[2] / "fixtures" / "megatron-dist" / "moe_ep2_flat"  # 40 rows for 37 words, multiple 4
CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 5,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_local_experts": 2,
    "vocab_size": 37,
}


def run(out: Path, reading: Reading, **writing: Any) -> dict[str, Any]:
    return convert(
        str(SOURCE), str(out), reading, Writing(**{"to": "safetensors", "fsync": False, **writing}), Silent()
    )


def configured(folder: Path, **change: Any) -> Reading:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    return Reading(config=str(folder / "config.json"))


@pytest.mark.parametrize("told", ["config", "arguments"])
def test_padding_stays_behind_and_is_told(told: str, tmp_path: Path) -> None:
    report = run(tmp_path / "out", configured(tmp_path) if told == "config" else Reading(family="mixtral"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["model.embed_tokens.weight"].shape == found["lm_head.weight"].shape == (37, 12)
    entry = next(each for each in report["dropped"] if "padded the vocabulary" in each["reason"])
    assert entry["bytes"] == 2 * 3 * 12 * 2 and len(entry["names"]) == 2 and "3 rows" in entry["reason"]


def test_a_config_of_another_vocabulary_cuts_nothing(tmp_path: Path) -> None:
    """The arguments say 37 words: a config of 30 is another model's, or older than the tokens that were added."""
    with pytest.raises(InconsistentCheckpoint) as caught:
        run(tmp_path / "out", configured(tmp_path, vocab_size=30))
    assert caught.value.code == "E1370" and not (tmp_path / "out").exists()


def test_inside_megatron_padding_stays(tmp_path: Path) -> None:
    report = run(tmp_path / "out", Reading(), to="sharded", states=("model",))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["output_layer.weight"].shape == (40, 12) and not any(
        "padded" in e["reason"] for e in report["dropped"]
    )
