"""Paddle and PaddleFormers load what `ckpt` wrote, and hold the values that their own job saved (marker `peers`).

The sources are fixtures that the real Trainer saved; `ckpt` lays them out for other degrees, another of Paddle's
formats, or for Hugging Face. A real job of those degrees (gloo ranks, the Trainer's own loaders; load_paddle.py)
resumes from the output, and every parameter, master and moment of every rank must be the planned value of its name and
place. Needs a Python with paddlepaddle 3.3.1 and paddleformers 1.2.0 (CPU), NumPy 1.26 and pyarrow < 26:

    CKPT_PADDLE_PYTHON=/venv/bin/python pytest tests/acceptance/test_paddle_loads.py -m peers
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peers import ROOT, Runner

PYTHON = os.environ.get("CKPT_PADDLE_PYTHON", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON, reason="set CKPT_PADDLE_PYTHON (a Python with paddlepaddle and paddleformers)"),
]
Made = Callable[[str], Path]


def program(path: str, *args: object) -> str:
    """Run a program of ours with Paddle's Python; its last words are the reason of a failure."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [PYTHON, "-W", "ignore", str(ROOT / path), *map(str, args)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, "\n".join((ran.stdout + ran.stderr).splitlines()[-40:])
    return ran.stdout


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """case -> its folder, saved by a real job, once a session (CKPT_PADDLE_MADE: a folder that keeps them)."""
    kept = os.environ.get("CKPT_PADDLE_MADE")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("paddle")

    def make(case: str) -> Path:
        if not (folder / case).exists():
            maker = "paddle_single" if case.endswith("_single") else "paddle_hybrid"
            program(f"fixtures/make/{maker}.py", folder, case)
        return folder / case

    return make


def resumed(checkpoint: Path, case: str) -> dict[str, Any]:
    """What a real job of this case holds after resuming from the checkpoint."""
    report = checkpoint.parent / f"{checkpoint.name}.report.json"
    program("tests/acceptance/load_paddle.py", checkpoint, case, report)
    found: dict[str, Any] = json.loads(report.read_text())
    return found


class Hop(NamedTuple):
    """source: a case of the makers. to, degrees: what `ckpt` is asked for. case: the job that resumes.

    least: so many tensors at least must have been compared (no job compares nothing and passes).
    """

    source: str
    to: str
    degrees: str
    case: str
    least: int = 80


HOPS = [
    Hop("llama_bf16_legacy_tp2", "paddle", "--tp 1", "llama_bf16_legacy_single"),
    Hop("llama_bf16_uc_hf_single", "paddle", "--tp 2", "llama_bf16_legacy_tp2"),
    Hop("llama_bf16_legacy_tp2", "paddle", "--tp 1 --dp 2 --sharding v1", "llama_bf16_io_sd2v1"),
    Hop("ernie_bf16_flex_tp2", "paddle", "--tp 2 --dp 2 --sharding v2", "ernie_bf16_io_tp2sd2v2"),
    Hop("ernie_bf16_flex_tp2", "paddle", "--tp 2 --pp 2", "ernie_bf16_legacy_tp2pp2"),
    Hop("moe_bf16_uc_pd_single", "paddle", "--tp 1", "moe_bf16_legacy_single"),
    Hop("llama_bf16_legacy_tp2", "paddle-flex", "--tp 1 --dp 2 --sharding v2", "llama_bf16_flex_sd2v2"),
    Hop("llama_bf16_legacy_tp2", "paddle-flex", "--pp 2 --tp 1", "llama_bf16_flex_pp2"),
    Hop("ernie_bf16_legacy_single", "paddle-flex", "--tp 2", "ernie_bf16_flex_tp2"),
    Hop("ernie_bf16_flex_tp2", "paddle-flex", "--tp 1 --dp 3 --sharding v2", "ernie_bf16_flex_sd3v2"),
    Hop("ernie_bf16_legacy_single", "paddle-flex", "--tp 2 --dp 2 --sharding v2", "ernie_bf16_flex_tp2sd2v2"),
    Hop("moe_bf16_legacy_single", "paddle-flex", "--ep 2 --dp 2 --sharding v2", "moe_bf16_flex_ep2sd2v2"),
    Hop("llama_bf16_flex_pp2", "paddle-unified", "", "llama_bf16_uc_pd_single"),
    Hop("llama_bf16_flex_pp2", "paddle-unified", "", "llama_bf16_uc_pd_tp2"),
    Hop("ernie_bf16_flex_tp2", "paddle-unified", "", "ernie_bf16_uc_pd_single"),
    Hop("ernie_bf16_legacy_single", "paddle-unified", "", "ernie_bf16_uc_hf_tp2"),
    Hop("ernie_bf16_legacy_single", "paddle-unified", "", "ernie_bf16_uc_hf_sd2v1"),
    Hop("moe_bf16_flex_ep2sd2v2", "paddle-unified", "", "moe_bf16_uc_pd_single"),
    Hop("llama_bf16_legacy_tp2", "paddle", "--tp 1 --dp 2 --sharding v2", "llama_bf16_io_sd2v2"),
    Hop("moe_bf16_legacy_single", "paddle", "--ep 2 --dp 2 --sharding v2", "moe_bf16_io_ep2sd2v2"),
    Hop("ernie_bf16_io_tp2sd2v2", "paddle", "--tp 2 --dp 2 --sharding v1", "ernie_bf16_io_tp2sd2v1"),
    Hop("moe_bf16_flex_ep2sd2v2", "paddle", "--ep 1 --dp 1", "moe_bf16_legacy_single"),
]


def check(found: dict[str, Any], least: int) -> None:
    assert not found["wrong"], "\n".join(found["wrong"][:20])
    assert found["compared"] >= least
    assert {"exp_avg", "exp_avg_sq", "beta1_pow_acc", "beta2_pow_acc"} <= set(found["states"])


@pytest.mark.parametrize("hop", HOPS, ids=lambda hop: f"{hop.source}-{hop.case}")
def test_a_real_job_resumes(made: Made, ckpt: Runner, tmp_path: Path, hop: Hop) -> None:
    ckpt("convert", made(hop.source), tmp_path / "out", "--to", hop.to, *hop.degrees.split())
    check(resumed(tmp_path / "out", hop.case), hop.least)


@pytest.mark.parametrize("case", ["llama_bf16_flex_sd2v2", "ernie_bf16_legacy_tp2", "llama_bf16_uc_pd_single"])
def test_the_judge_passes_what_the_job_itself_saved(made: Made, case: str) -> None:
    check(resumed(made(case), case), 100)


def test_the_judge_sees_a_wrong_byte(made: Made, ckpt: Runner, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ckpt("convert", made("llama_bf16_flex_pp2"), out, "--to", "paddle-unified")
    file = next(out.glob("optimizer-*.safetensors"))
    broken = bytearray(file.read_bytes())
    broken[-3] ^= 0x40
    file.write_bytes(broken)
    assert resumed(out, "llama_bf16_uc_pd_single")["wrong"]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("llama_bf16_legacy_tp2", "llama"),
        ("llama_bf16_uc_hf_single", "llama"),
        ("llama_bf16_io_sd2v1", "llama"),  # masters alone: the weights are made of them
        ("ernie_bf16_legacy_single", "ernie"),
        ("ernie_bf16_flex_tp2", "ernie"),  # no config in the source: it is given
        ("moe_bf16_legacy_single", "moe"),
        ("moe_bf16_flex_ep2sd2v2", "moe"),
    ],
)
def test_paddleformers_and_transformers_open_the_hugging_face_export(
    made: Made, ckpt: Runner, tmp_path: Path, source: str, kind: str
) -> None:
    """Logits of the export in both systems are those of PaddleFormers' source model; the MoE can't run on CPU there."""
    options: list[object] = ["--as-model", "master", "--dtype", "bf16"] if "_io_" in source else ["--state", "model"]
    if "_flex_" in source:
        options += ["--config", made(f"{kind}_bf16_legacy_single") / "config.json"]
    out = tmp_path / "out"
    ckpt("convert", made(source), out, "--to", "safetensors", *options)
    program("tests/acceptance/load_paddle_hf.py", out, kind, tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text())
    assert not found["wrong"]
    assert found["parameters"] >= 15
    transformers = pytest.importorskip("transformers")
    model, said = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not said["missing_keys"] and not said["mismatched_keys"]
    if kind != "moe":
        assert found["difference"] == 0.0
        with torch.no_grad():
            logits = model(input_ids=torch.arange(1, 11).reshape(2, 5)).logits
        torch.testing.assert_close(logits, torch.tensor(found["logits"]), atol=2e-5, rtol=1e-4)
