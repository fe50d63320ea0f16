"""Optimizer states of real Megatron jobs under the hub's names and back: the same bits in every state.

The truth beside each checkpoint was taken from the live job. What pads its vocabulary stays behind (the arguments say
how much), everything else comes back; on the way a moment of q, k and v lies where NumPy's regrouping of the truth puts
it. The fixtures run always; with `peers` real jobs of other layouts are made anew (fixtures/make/megatron_lm.py):

    CKPT_MEGATRON_PYTHON=/venv/bin/python MEGATRON_LM=/src/Megatron-LM pytest
    tests/acceptance/test_megatron_states_follow.py -m peers
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peer_process import last_words
from peers import ROOT
from safetensors.torch import load_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

FIXTURES = ROOT / "fixtures"
PYTHON, SOURCE = os.environ.get("CKPT_MEGATRON_PYTHON", ""), os.environ.get("MEGATRON_LM", "")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 24,
    "n_head": 4,
    "n_inner": 44,
    "n_positions": 32,
    "vocab_size": 101,
}


def laid_open(source: Path, out: Path, reading: Reading, dialect: str) -> dict[str, torch.Tensor]:
    """STATE/NAME -> tensor, of the checkpoint in that dialect."""
    convert(str(source), str(out), reading, Writing(to="sharded", dialect=dialect, fsync=False), Silent())
    return {
        f"{file.stem}/{name}": tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def assert_follows(source: Path, reading: Reading, tmp_path: Path, groups: int) -> None:
    truth = load_file(source.parent / f"{source.name}.truth.safetensors")
    newer = ".mtp_model_layer."  # core 0.17's word for what was transformer_layer, which our names keep
    truth = {key.replace(newer, ".transformer_layer."): tensor for key, tensor in truth.items()}
    hub = laid_open(source, tmp_path / "hub", reading, "hf")
    assert not any("decoder." in name for name in hub)
    back = laid_open(tmp_path / "hub", tmp_path / "back", reading, "megatron")
    states = {key.split("/")[0] for key in truth}
    assert {"exp_avg", "exp_avg_sq"} <= states
    for key, tensor in truth.items():
        rows = key.split("/", 1)[1] in VOCABULARY and tensor.ndim
        want = tensor[: len(back[key])] if rows else tensor
        assert back[key].shape == want.shape and torch.equal(back[key].to(want.dtype), want), key
    assert {key for key in back if key.split("/")[0] in states} == truth.keys()
    fused = truth.get("exp_avg/decoder.layers.1.self_attention.linear_qkv.weight")
    q = hub.get("exp_avg/model.layers.1.self_attn.q_proj.weight")
    if fused is not None and q is not None:  # each group: its query heads, a key, a value
        parts = fused.numpy().reshape(groups, -1, fused.shape[1])
        assert np.array_equal(parts[:, : q.shape[0] // groups].reshape(q.shape), q.numpy())


@pytest.mark.parametrize(
    ("case", "family", "groups"),
    [
        ("moe_ep2_flat", "mixtral", 2),
        ("dp2_model_space", "llama", 2),
        ("pp2_gathered", "llama", 2),
        ("tied_pp2_flat", "qwen2", 2),
    ],
)
def test_states_of_torch_dist(case: str, family: str, groups: int, tmp_path: Path) -> None:
    assert_follows(FIXTURES / "megatron-dist" / case, Reading(family=family), tmp_path, groups)


def test_states_of_a_legacy_job_with_biases(tmp_path: Path) -> None:
    """GPT-2's matrices are transposed in the hub."""
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    reading = Reading(config=str(tmp_path / "config.json"))
    source = FIXTURES / "megatron" / "gpt2_tied_pp2_adamw"
    assert_follows(source, reading, tmp_path, 4)
    truth = load_file(source.parent / f"{source.name}.truth.safetensors")
    hub = load_file(tmp_path / "hub" / "exp_avg_sq.safetensors")
    fc2 = truth["exp_avg_sq/decoder.layers.2.mlp.linear_fc2.weight"]
    assert torch.equal(hub["transformer.h.2.mlp.c_proj.weight"], fc2.T)


JOBS: list[Any] = [
    ("dense_pp2vpp2", "qwen3", 4),
    ("dense_adamw", "qwen3", 4),
    ("moe_grouped_tp2", "qwen3_moe", 4),
    ("mtp_pp2", "glm4_moe", 4),
    ("mla_tp2", "deepseek_v3", 4),
    ("dist_mixtral_ep4_dpresh", "qwen3_moe", 4),
    ("dist_tp2pp2_dpresh", "qwen3", 4),
]


@pytest.mark.peers
@pytest.mark.timeout(1000)
@pytest.mark.skipif(
    not (PYTHON and SOURCE),
    reason="set CKPT_MEGATRON_PYTHON (a Python with megatron-core) and MEGATRON_LM (a checkout of Megatron-LM)",
)
@pytest.mark.parametrize(("case", "family", "groups"), JOBS)
def test_states_of_real_jobs(case: str, family: str, groups: int, tmp_path: Path) -> None:
    command = [PYTHON, "-W", "ignore", FIXTURES / "make" / "megatron_lm.py", tmp_path, case]
    last_words(command, 900, environment={"OMP_NUM_THREADS": "1", "ADAM": "torch"})
    assert_follows(tmp_path / case, Reading(family=family), tmp_path, groups)
