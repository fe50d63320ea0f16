"""Meta's checkpoints by `ckpt convert`: one hop to and from the hub, Megatron and Paddle; transformers is the judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

transformers = pytest.importorskip("transformers", minversion="5")
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama2": {"num_attention_heads": 6},
    "llama3": {"num_key_value_heads": 2, "rope_parameters": SCALED, "max_position_embeddings": 16384},
    "tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 72,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            **MODELS[request.param],
        }
    )
    folder = tmp_path_factory.mktemp(request.param) / "hf"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def to(source: Path, out: Path, fmt: str, *, config: Path | None = None, **more: Any) -> dict[str, Any]:
    reading = Reading(config=str(config) if config else None)
    return convert(str(source), str(out), reading, Writing(to=fmt, verify="full", **more), Silent())


def logits(folder: Path) -> torch.Tensor:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        out: torch.Tensor = model(torch.arange(30)[None]).logits
    return out


def same(a: Path, b: Path) -> bool:
    found = diff(str(a), str(b), Reading(), progress=Silent())
    return {d["name"] for d in found["differences"]} <= {"lm_head.weight"} and all(
        d["kind"] == "missing_left" for d in found["differences"]
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_there_and_back_to_the_bit(model: Path, tp: int, tmp_path: Path) -> None:
    done = to(model, tmp_path / "meta", "meta", degrees={"tp": tp})
    names = {path.name for path in (tmp_path / "meta").iterdir()}
    assert names >= {*(f"consolidated.{r:02d}.pth" for r in range(tp)), "params.json"}
    assert any("hf to meta" in note for note in done["notes"])
    shard = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    assert shard["layers.0.attention.wq.weight"].shape == (48 // tp, 48) and "output.weight" in shard
    by_rows = model.parent.name.startswith("llama3")  # as the loaders of Llama 3 want it, those of 1 and 2 want columns
    assert shard["tok_embeddings.weight"].shape == ((72 // tp, 48) if by_rows else (72, 48 // tp))
    (tmp_path / "meta" / "config.json").unlink()  # Meta's folders have none
    to(tmp_path / "meta", tmp_path / "back", "safetensors")
    assert same(model, tmp_path / "back")
    torch.testing.assert_close(logits(tmp_path / "back"), logits(model), rtol=0, atol=0)


def test_another_vocabulary_is_told_everywhere(model: Path, tmp_path: Path) -> None:
    to(model, tmp_path / "meta", "meta", degrees={"tp": 2}, vocab_size=80)
    assert json.loads((tmp_path / "meta" / "params.json").read_text())["vocab_size"] == 80
    to(tmp_path / "meta", tmp_path / "back", "safetensors", vocab_size=64)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == 64
    assert not (tmp_path / "back" / "params.json").exists()
    assert logits(tmp_path / "back").shape[-1] == 64


def test_one_hop_to_megatron_and_to_paddle(model: Path, tmp_path: Path) -> None:
    to(model, tmp_path / "meta", "meta", degrees={"tp": 2})
    (tmp_path / "meta" / "config.json").unlink()
    to(tmp_path / "meta", tmp_path / "megatron", "megatron-dist", degrees={"tp": 2})
    to(tmp_path / "meta", tmp_path / "paddle", "paddle-unified")
    untied = {**json.loads((model / "config.json").read_text()), "tie_word_embeddings": False}  # Meta writes both
    (tmp_path / "config.json").write_text(json.dumps(untied))
    for kind in ("megatron", "paddle"):
        to(tmp_path / kind, tmp_path / f"{kind}_hf", "safetensors", config=tmp_path)
        assert same(model, tmp_path / f"{kind}_hf")
    to(tmp_path / "megatron", tmp_path / "again", "meta", config=tmp_path, degrees={"tp": 2})
    assert diff(str(tmp_path / "meta"), str(tmp_path / "again"), Reading(), progress=Silent())["equal"]


def test_what_params_can_t_say_is_told_before_a_byte_moves(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}})
    )
    with pytest.raises(CkptError) as e:
        convert(
            str(model), str(tmp_path / "o"), Reading(config=str(tmp_path / "config.json")), Writing(to="meta"), Silent()
        )
    assert (e.value.code, e.value.exit_code) == ("E1413", 2) and not (tmp_path / "o").exists()
