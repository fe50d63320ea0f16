"""What the harness saves, read by the real systems' own functions: the truth, value for value (marker `peers`).

    CKPT_DEEPSPEED_PYTHON=/venv/bin/python CKPT_MEGATRON_PYTHON=... CKPT_PADDLE_PYTHON=... pytest -m peers tests/harness

DeepSpeed joins masters by `zero_to_fp32`, Megatron loads every tensor by `dist_checkpointing`, Paddle by
`load_merged_state_dict`; legacy Megatron files are unpickled beside Megatron. So the writers make files of these
systems, not only files that our readers take.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_process import last_words
from safetensors.torch import load_file

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))

import made_states as made  # noqa: E402

from ckpt_tool.harness.saving import formats  # noqa: E402
from ckpt_tool.harness.saving.whole import WholeState, assemble  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]
SPEC = made.Spec()
TRUTH = made.truth(SPEC)
# Paddle 3.3.1's joiner overwrites the end of a block that ranks share inside its last row with zeros
# (`load_state_dict.py`: the
# longer part is padded to whole rows, and comes last). The one such cut of this layout is not compared.
LOST = ("master", "model.layers.2.self_attn.qkv_proj.weight")


def saved(fmt: str, tmp_path: Path, **degrees: Any) -> tuple[Path, WholeState]:
    folder = tmp_path / fmt
    folder.mkdir()
    whole = assemble(made.ranks(SPEC, made.layout(split=(), **degrees)))
    formats.write(fmt, whole, folder)
    return folder, whole


def read(peer: str, fmt: str, folder: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    python = os.environ.get(f"CKPT_{peer}_PYTHON", "")
    if not python:
        pytest.skip(f"set CKPT_{peer}_PYTHON")
    program = Path(__file__).with_name("peer_reads.py")
    out = tmp_path / "read.safetensors"
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    last_words([python, program, fmt, folder, out], 500, environment=environment)
    return load_file(out)


def qkv(state: str, layer: int) -> torch.Tensor:
    """Query groups: its queries, then its key, then its value. By index, not by the writers' reshapes."""
    q, k, v = (TRUTH[state, f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv")
    d = SPEC.head
    r = SPEC.per
    rows = []
    for group in range(SPEC.kv):
        rows += [q[group * r * d : (group + 1) * r * d], k[group * d : (group + 1) * d], v[group * d : (group + 1) * d]]
    return torch.cat(rows)


def pair(state: str, root: str) -> tuple[torch.Tensor, torch.Tensor]:
    return TRUTH[state, f"{root}.gate_proj.weight"], TRUTH[state, f"{root}.up_proj.weight"]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_deepspeed_joins_the_masters(zero: int, tmp_path: Path) -> None:
    folder, _ = saved("deepspeed", tmp_path, dp=3, zero=zero)
    found = read("DEEPSPEED", "deepspeed", folder, tmp_path)
    want = {f"master/{name}": tensor for (state, name), tensor in TRUTH.items() if state == "master"}
    assert found.keys() == want.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in want.items())


def test_megatron_loads_every_tensor(tmp_path: Path) -> None:
    folder, _ = saved("megatron-dist", tmp_path, tp=2, pp=3, dp=2, ep=2)
    found = read("MEGATRON", "megatron-dist", folder, tmp_path)
    assert (found.pop("iteration").item(), found.pop("step").item()) == (7, 7)
    prefixes = {"": "model", "optimizer.state.param.": "master"}
    prefixes |= {f"optimizer.state.{state}.": state for state in ("exp_avg", "exp_avg_sq", "ema")}
    for prefix, state in prefixes.items():
        want = {"embedding.word_embeddings.weight": TRUTH[state, "model.embed_tokens.weight"]}
        want["output_layer.weight"] = TRUTH[state, "lm_head.weight"]
        for layer in range(SPEC.layers):
            ours = f"decoder.layers.{layer}"
            hub = f"model.layers.{layer}"
            want[f"{ours}.self_attention.linear_qkv.weight"] = qkv(state, layer)
            want[f"{ours}.self_attention.linear_proj.weight"] = TRUTH[state, f"{hub}.self_attn.o_proj.weight"]
            want[f"{ours}.self_attention.linear_qkv.layer_norm_weight"] = TRUTH[state, f"{hub}.input_layernorm.weight"]
            want[f"{ours}.mlp.linear_fc1.layer_norm_weight"] = TRUTH[state, f"{hub}.post_attention_layernorm.weight"]
        want["decoder.layers.0.mlp.linear_fc1.weight"] = torch.cat(pair(state, "model.layers.0.mlp"))
        for layer in range(1, SPEC.layers):
            experts = [torch.cat(pair(state, f"model.layers.{layer}.mlp.experts.{e}")) for e in range(SPEC.experts)]
            want[f"decoder.layers.{layer}.mlp.experts.experts.linear_fc1.weight"] = torch.stack(experts)
        for key, tensor in want.items():
            assert torch.equal(found.pop(prefix + key), tensor), prefix + key
    assert all("fc2" in key or "router" in key or "fc1" in key or "final" in key for key in found)


def test_legacy_files_unpickle_beside_megatron(tmp_path: Path) -> None:
    folder, _ = saved("megatron", tmp_path, tp=2, dp=2, ep=2)
    found = read("MEGATRON", "megatron", folder, tmp_path)
    half = qkv("model", 1).shape[0] // 2
    for tp in range(2):
        got = found[f"mp_rank_{tp:02d}_001/decoder.layers.1.self_attention.linear_qkv.weight"]
        assert torch.equal(got, qkv("model", 1)[tp * half : (tp + 1) * half])
        gate, up = (part.chunk(2)[tp] for part in pair("model", "model.layers.1.mlp.experts.3"))
        got = found[f"mp_rank_{tp:02d}_001/decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"]
        assert torch.equal(got, torch.cat((gate, up)))


def test_paddle_joins_every_key(tmp_path: Path) -> None:
    folder, _ = saved("paddle-flex", tmp_path, tp=2, pp=3, dp=2, ep=2, zero=1)
    found = read("PADDLE", "paddle-flex", folder, tmp_path)
    assert found.pop("step").item() == 7
    places = {
        "model": ("model_state/", ""),
        "master": ("master_weight/", ".w_0"),
        "exp_avg": ("optimizer_state/", ".moment1_0"),
        "exp_avg_sq": ("optimizer_state/", ".moment2_0"),
        "ema": ("ema_state/", ".w_0"),
    }
    for state, (inner, suffix) in places.items():
        want = {
            "lm_head.weight": TRUTH[state, "lm_head.weight"],
            "model.norm.weight": TRUTH[state, "model.norm.weight"],
        }
        for layer in range(SPEC.layers):
            root = f"model.layers.{layer}"
            want[f"{root}.self_attn.qkv_proj.weight"] = qkv(state, layer).t()
            want[f"{root}.self_attn.o_proj.weight"] = TRUTH[state, f"{root}.self_attn.o_proj.weight"].t()
        for expert in range(SPEC.experts):
            root = f"model.layers.2.mlp.experts.{expert}"
            (gate0, gate1), (up0, up1) = (part.chunk(2) for part in pair(state, root))
            want[f"{root}.up_gate_proj.weight"] = torch.cat((gate0, up0, gate1, up1)).t()  # rank after rank
        for key, tensor in want.items():
            if (state, key) != LOST:
                assert torch.equal(found[inner + key + suffix], tensor.float()), key
