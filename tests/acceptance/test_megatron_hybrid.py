"""Megatron-Core's HybridModel loads what `--hybrid-layer-pattern` made of a model of the hub, and computes what its
GPTModel does, bit for bit (marker `peers`). Seen with megatron-core 0.19.2 and torch 2.13.0. Needs 0.19 or newer:

    CKPT_MEGATRON_PYTHON=/venv/bin/python pytest tests/acceptance/test_megatron_hybrid.py -m peers
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from peers import ROOT, Runner
from safetensors.torch import load_file

PYTHON = os.environ.get("CKPT_MEGATRON_PYTHON", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON, reason="set CKPT_MEGATRON_PYTHON (a Python with megatron-core 0.19)"),
]
HUB = ROOT / "fixtures/convert/llama/hf"


def test_its_logits_are_those_of_the_gpt_model(ckpt: Runner, tmp_path: Path) -> None:
    found = []
    for name, pattern in (("gpt", "none"), ("hybrid", "*-*-*-")):
        options = () if pattern == "none" else ("--hybrid-layer-pattern", pattern)
        ckpt("convert", HUB, tmp_path / name, "--to", "megatron-dist", "--tp", "2", *options)
        program = ROOT / "tests/acceptance/megatron_hybrid_logits.py"
        command = [PYTHON, "-W", "ignore", program, pattern, tmp_path / name / "release", HUB / "config.json"]
        ran = subprocess.run(
            [*map(str, command), str(tmp_path / f"{name}.safetensors")],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ran.returncode == 0, "\n".join((ran.stdout + ran.stderr).splitlines()[-25:])
        found.append(load_file(tmp_path / f"{name}.safetensors")["logits"])
    assert found[0].std() > 0.1
    assert torch.equal(*found)
