"""PaddleFormers itself resumes from the unified checkpoints that `ckpt` wrote, bit for bit (marker `peers`).

The sources are fixtures, saved by real Trainers: ranks' own files, legacy ranks, fp32 masters alone. `ckpt` brings them
into one unified checkpoint, which jobs of one process and of several load with the Trainer's own loaders at their
default arguments, that is with the model file in the Hugging Face layout; one in Paddle's layout with `convert_from_hf`
off. (PaddleFormers 1.2.0 has no mapping for tensor ranks of a unified checkpoint: load_paddle.py gives it that of
0.4.0.)

    CKPT_PADDLE_PYTHON=/venv/bin/python pytest tests/acceptance/test_paddle_unified_loads.py -m peers
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from peers import FIXTURES, ROOT, Runner

PYTHON = os.environ.get("CKPT_PADDLE_PYTHON", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON, reason="set CKPT_PADDLE_PYTHON (a Python with paddlepaddle and paddleformers)"),
]
ERNIE_RANKS = FIXTURES / "paddle-unified" / "ernie_nm_tp2"
ERNIE_MASTERS = FIXTURES / "paddle" / "ernie_bf16_io_tp2sd2v2"
TIED = FIXTURES / "paddle" / "llama_tied_bf16_legacy_single"
LLAMA_RANKS = FIXTURES / "paddle" / "llama_bf16_legacy_tp2"


def program(path: str, *args: object) -> str:
    """Run a program of ours with Paddle's Python; its last words are the reason of a failure."""
    command = [PYTHON, "-W", "ignore", str(ROOT / path), *map(str, args)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, "\n".join((ran.stdout + ran.stderr).splitlines()[-25:])
    return ran.stdout


@pytest.mark.parametrize(
    ("source", "model", "convert", "least"),
    [(LLAMA_RANKS, "llama", "1", 126), (ERNIE_MASTERS, "ernie", "1", 90), (ERNIE_RANKS, "ernie", "0", 90)],
)
def test_one_process_resumes(source: Path, model: str, convert: str, least: int, ckpt: Runner, tmp_path: Path) -> None:
    ckpt("convert", source, tmp_path / "out", "--to", "paddle-unified", "--dialect", "keep")
    truth = {"llama": LLAMA_RANKS, "ernie": ERNIE_RANKS}[model]
    said = program(
        "tests/acceptance/load_paddle_unified.py",
        tmp_path / "out",
        model,
        "bfloat16",
        f"{truth}.truth.safetensors",
        convert,
    )
    compared, differ = (int(word) for word in said.strip().splitlines()[-1].split() if word.isdigit())
    assert differ == 0 and compared >= least, said[-2000:]


@pytest.mark.parametrize(
    ("source", "case"),
    [
        (LLAMA_RANKS, "llama_bf16_uc_hf_pp2"),
        (LLAMA_RANKS, "llama_bf16_uc_hf_tp2"),
        (LLAMA_RANKS, "llama_bf16_uc_hf_sd2v2"),
        (ERNIE_MASTERS, "ernie_bf16_uc_hf_sd2v1"),
        (TIED, "llama_tied_bf16_uc_hf_sd2v1"),
        (ERNIE_RANKS, "ernie_bf16_uc_pd_sd2v1"),
    ],
)
def test_several_ranks_resume(source: Path, case: str, ckpt: Runner, tmp_path: Path) -> None:
    ckpt("convert", source, tmp_path / "out", "--to", "paddle-unified", "--dialect", "keep")
    program("tests/acceptance/load_paddle.py", tmp_path / "out", case, tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["wrong"] and report["compared"] >= 90, report
