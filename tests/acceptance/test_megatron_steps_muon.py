"""Megatron's own Muon goes on from what `ckpt validate --optimizer muon` saves, and from what ckpt makes of it.

Both jobs, of two layouts, hold every value that was saved, and after one step they hold the same bits (marker `peers`).

    CKPT_MEGATRON_PYTHON=/venv/bin/python MEGATRON_LM=/src/Megatron-LM pytest -m peers
    tests/acceptance/test_megatron_steps_muon.py

Needs megatron-core 0.19 with Emerging-Optimizers 0.3 (Python 3.12) and its sources. Gradients are clipped in neither
job: a norm is summed otherwise by other ranks. `--moe-layer-freq` because the harness stores every layer apart, as
Megatron does where layers differ.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from peer_process import last_words
from peers import ROOT
from safetensors.torch import load_file

from ckpt_tool.harness.evidence import Case, gather
from ckpt_tool.harness.layout import HarnessLayout
from ckpt_tool.harness.shape import ModelShape
from ckpt_tool.options.reading import Reading
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.opening import open_source

PYTHON, SOURCE = os.environ.get("CKPT_MEGATRON_PYTHON", ""), os.environ.get("MEGATRON_LM", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(1800),  # of a trainer and two jobs
    pytest.mark.skipif(
        not (PYTHON and SOURCE) or subprocess.run([PYTHON, "-c", "import emerging_optimizers"]).returncode != 0,
        reason="set CKPT_MEGATRON_PYTHON (a Python with megatron-core 0.19 and emerging-optimizers) and MEGATRON_LM",
    ),
]
SHAPE = ModelShape.quick().with_(experts=0, shared_experts=0, vocab=100)
FLAGS = f"""--num-layers {SHAPE.layers} --hidden-size {SHAPE.hidden} --num-attention-heads {SHAPE.heads}
    --group-query-attention --num-query-groups {SHAPE.kv_heads} --kv-channels {SHAPE.head_dim}
    --ffn-hidden-size {SHAPE.dense_ffn} --vocab-size {SHAPE.vocab - 1} --moe-layer-freq [0,0] --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
    --bf16 --ckpt-format torch_dist --optimizer muon --no-load-rng --clip-grad 0 --lr 0.003 --min-lr 0.0003
    --use-checkpoint-opt_param-scheduler"""


def stepped(checkpoint: Path, more: str, out: Path) -> dict[str, torch.Tensor]:
    program = ROOT / "tests/acceptance/step_megatron.py"
    environment = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    words = [PYTHON, "-W", "ignore", program, checkpoint, 2, " ".join(f"{FLAGS} {more}".split()), out]
    last_words(words, 700, environment=environment)
    return load_file(out)


@pytest.mark.parametrize(
    ("source", "target", "flags"),
    [("dp2", "pp2", "--use-distributed-optimizer"), ("dp2,zero0", "pp2,zero0", "")],
    ids=["layer-wise", "plain"],
)
def test_megatron_s_muon_steps_alike_from_both_layouts(source: str, target: str, flags: str, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    layouts = HarnessLayout.parse(source), HarnessLayout.parse(target)
    case = Case(*layouts, "megatron-dist", shape=SHAPE, muon=True, before=2, after=1, planted=())
    assert gather(case, tmp_path / "made")["ok"]
    saved = tmp_path / "made/run/step_0000002"
    resharded = tmp_path / "made/resharded"
    one = stepped(saved, flags, tmp_path / "one.safetensors")
    two = stepped(resharded, f"{flags} --pipeline-model-parallel-size 2", tmp_path / "two.safetensors")
    opened = open_source(str(saved), Reading())
    lazy = OpenCatalog(opened.tree, opened.catalog)
    want = {
        f"before/{key.state}/{key.name}": lazy.state(key.state)[key.name].torch()
        for key in opened.catalog.tensors
        if key.state in ("model", "master", "exp_avg", "exp_avg_sq", "momentum_buffer")
    }
    assert one.keys() == two.keys() and {key for key in one if key.startswith("before/")} == want.keys()
    for found in (one, two):
        assert not [key for key, value in want.items() if not torch.equal(found[key], value)]
    assert not [key for key in one if not torch.equal(one[key], two[key])]
    masters = [key for key in want if "/master/" in key]
    assert all(not torch.equal(one[key], one[key.replace("before", "after")]) for key in masters)
