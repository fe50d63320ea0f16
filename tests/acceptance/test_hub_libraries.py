"""Folders of sentence-transformers and diffusers: what the libraries save, through `ckpt`, and loaded by them again.

    CKPT_LIBRARIES_PYTHON=/venv/bin/python pytest tests/acceptance/test_hub_libraries.py -m peers

The variable names a Python with sentence-transformers and diffusers (`tests/peers_environments.py`), which need not be
the one that runs pytest. Seen with sentence-transformers 6.2.0 and diffusers 0.42, torch 2.13 on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ckpt_tool
from ckpt_tool.cli import run

PYTHON = os.environ.get("CKPT_LIBRARIES_PYTHON", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="set CKPT_LIBRARIES_PYTHON (sentence-transformers and diffusers)"),
]
SAVE_SENTENCES = """
import json, sys, pathlib, torch
from transformers import BertConfig, BertModel, BertTokenizerFast
from sentence_transformers import SentenceTransformer, models
words = pathlib.Path(sys.argv[1]) / "words"
words.mkdir()
(words / "vocab.txt").write_text("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]))
BertTokenizerFast(vocab_file=str(words / "vocab.txt")).save_pretrained(words)
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
BertModel(BertConfig(vocab_size=7, max_position_embeddings=64, **sizes)).save_pretrained(words)
parts = [models.Transformer(str(words)), models.Pooling(32), models.Dense(32, 16), models.Normalize()]
live = SentenceTransformer(modules=parts)
live.save(sys.argv[1] + "/saved")
print(json.dumps([[type(part).__name__ for part in live], live.encode(["hello world"]).tolist()]))
"""
LOAD_SENTENCES = """
import json, sys
from sentence_transformers import SentenceTransformer
live = SentenceTransformer(sys.argv[1])
print(json.dumps([[type(part).__name__ for part in live], live.encode(["hello world"]).tolist()]))
"""
SAVE_PIPELINE = """
import sys
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
unet = UNet2DConditionModel(
    block_out_channels=(32, 64), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=32, norm_num_groups=8)
vae = AutoencoderKL(
    block_out_channels=[32, 64], down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
    norm_num_groups=8)
StableDiffusionPipeline(
    vae=vae, text_encoder=None, tokenizer=None, unet=unet, scheduler=DDPMScheduler(), safety_checker=None,
    feature_extractor=None, requires_safety_checker=False).save_pretrained(sys.argv[1])
unet.half().save_pretrained(sys.argv[1] + "/unet", variant="fp16")
"""
COMPARE = """
import json, sys, torch
from diffusers import UNet2DConditionModel
folder, variant, other = sys.argv[1:]
kind = torch.float16 if variant else torch.float32
mine = UNet2DConditionModel.from_pretrained(other, torch_dtype=kind).state_dict()
whole = UNet2DConditionModel.from_pretrained(folder, variant=variant or None, torch_dtype=kind).state_dict()
print(json.dumps([len(mine), all(torch.equal(mine[name], each) for name, each in whole.items())]))
"""


def by_library(code: str, *words: object) -> Any:
    """What a script of the other Python prints last, as JSON."""
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", code, *map(str, words)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(lines[-1]) if (lines := done.stdout.splitlines()) else None


def test_all_modules_of_a_sentence_transformer_are_loaded(tmp_path: Path) -> None:
    live = by_library(SAVE_SENTENCES, tmp_path)
    assert len(live[0]) == 4
    words = ["--to", "safetensors", "--max-shard-size", "40kB", "-q"]
    assert run(["convert", str(tmp_path / "saved"), str(tmp_path / "out"), *words]) == 0
    assert by_library(LOAD_SENTENCES, tmp_path / "out") == live


def test_a_component_of_diffusers_keeps_its_name_and_its_variant(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pipeline = tmp_path / "pipeline"
    by_library(SAVE_PIPELINE, pipeline)
    assert run(["convert", str(pipeline), str(tmp_path / "all"), "--to", "safetensors"]) == 3
    assert "pass one of its folders, each a checkpoint: unet, vae" in capfd.readouterr().err
    for variant, dtype, words in (("", "F32", ["--max-shard-size", "1MB"]), ("fp16", "F16", ["--prefer", "fp16"])):
        out = tmp_path / f"out{variant}"
        assert run(["convert", str(pipeline / "unet"), str(out), "--to", "safetensors", "-q", *words]) == 0
        count, same = by_library(COMPARE, pipeline / "unet", variant, out)
        assert count > 200 and same
        assert {tensor.dtype.name for tensor in ckpt_tool.open(out).catalog.tensors.values()} == {dtype}
