"""A Llama written by transformers, cut to tp 4 x pp 2, cut again to tp 2, joined: transformers takes it as its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peers import Runner, Tensors, assert_same
from safetensors import safe_open

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module", params=["fp32", "bf16-tied"])
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`save_pretrained` of a tiny random Llama with 20 KB shards; 4 heads, 2 key-value heads, an odd feed-forward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=71,
        hidden_size=32,
        intermediate_size=52,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=request.param == "bf16-tied",
    )
    folder = tmp_path_factory.mktemp("llama") / "hf"
    model = LlamaForCausalLM(config)
    (model.bfloat16() if request.param == "bf16-tied" else model).save_pretrained(folder, max_shard_size="20KB")
    return folder


def stored(folder: Path) -> Tensors:
    """Every tensor in the folder's safetensors files, whatever the index says."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():
                assert name not in found
                found[name] = opened.get_tensor(name)
    return found


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        out: torch.Tensor = model(torch.arange(24).reshape(2, 12) % 71).logits
    return out


def test_there_and_back(llama: Path, ckpt: Runner, tmp_path: Path) -> None:
    cut = tmp_path / "tp4pp2"
    recut = tmp_path / "tp2"
    back = tmp_path / "back"
    ckpt("convert", llama, cut, "--to", "sharded", "--tp", "4", "--pp", "2")
    assert {path.name for path in cut.glob("*.safetensors")} == {
        f"model.tp{t:02d}_pp{p:02d}.safetensors" for t in range(4) for p in range(2)
    }
    ckpt("reshard", cut, recut, "--tp", "2")
    assert ckpt("inspect", recut)["mesh"] == {"tp": 2, "pp": 2}, "what is left out keeps the source's degree"
    ckpt("convert", recut, back, "--to", "safetensors", "--max-shard-size", "20KB")

    assert_same(stored(back), stored(llama))
    ours, theirs = (json.loads((x / "model.safetensors.index.json").read_text()) for x in (back, llama))
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert dict.fromkeys(ours["weight_map"].values()).keys() == {p.name for p in back.glob("*.safetensors")}
    assert json.loads((back / "config.json").read_text()) == json.loads((llama / "config.json").read_text())
    for file in back.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            size = sum(opened.get_tensor(name).nbytes for name in opened.keys())
            assert size <= 20_000 or len(opened.keys()) == 1

    assert torch.equal(logits(back), logits(llama))
    assert ckpt("diff", llama, back)["equal"] is True


def test_the_shards_tile_the_model(llama: Path, ckpt: Runner, tmp_path: Path) -> None:
    """The files of `sharded --tp 4` are plain safetensors: each box, by its header's offset, is a slice of the
    whole."""
    ckpt("convert", llama, tmp_path / "out", "--to", "sharded", "--tp", "4")
    whole = stored(llama)
    seen = {name: torch.zeros_like(t, dtype=torch.bool) for name, t in stored(llama).items()}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            said = " ".join(opened.metadata().values())
            for name in opened.keys():
                assert name in said
                part = opened.get_tensor(name)
                place = where(part, whole[name])
                assert place is not None, f"{file.name}: {name} is no slice of the original"
                seen[name][place] = True
    assert all(bool(mask.all()) for mask in seen.values())


def where(part: torch.Tensor, whole: torch.Tensor) -> tuple[slice, ...] | None:
    """The place at which `part` lies in `whole`, searched for, not read from our metadata."""
    for starts in (
        torch.cartesian_prod(*(torch.arange(w - p + 1) for w, p in zip(whole.shape, part.shape, strict=True)))
        .reshape(-1, whole.ndim)
        .tolist()
    ):
        place = tuple(slice(s, s + n) for s, n in zip(starts, part.shape, strict=True))
        if torch.equal(whole[place], part):
            return place
    return None
