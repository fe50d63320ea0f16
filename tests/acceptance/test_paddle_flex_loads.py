"""Paddle itself loads the flex checkpoints that `ckpt` wrote, and holds the values that the first job saved (marker
`peers`).

A real Trainer saves (fixtures/make/paddle_single.py), `ckpt` lays the checkpoint out anew or brings it over from
another of Paddle's formats, and PaddleFormers' `_load_flex_checkpoint`, or PaddlePaddle's `load_merged_state_dict` for
several ranks, loads it (load_paddle_flex.py). Needs a Python with paddlepaddle 3.3.1 and paddleformers 1.2.0:

    CKPT_PADDLE_PYTHON=/venv/bin/python pytest tests/acceptance/test_paddle_flex_loads.py -m peers
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from peers import ROOT, Runner

PYTHON = os.environ.get("CKPT_PADDLE_PYTHON", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON, reason="set CKPT_PADDLE_PYTHON (a Python with paddlepaddle and paddleformers)"),
]
Made = Callable[[str], Path]


def program(path: str, *args: object) -> str:
    """Run a program of ours with Paddle's Python; its last words are the reason of a failure."""
    command = [PYTHON, "-W", "ignore", str(ROOT / path), *map(str, args)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, "\n".join((ran.stdout + ran.stderr).splitlines()[-25:])
    return ran.stdout


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """case -> its folder, saved by a real Trainer, once a session."""
    folder = tmp_path_factory.mktemp("paddle")

    def make(case: str) -> Path:
        if not (folder / f"{case}.truth.safetensors").exists():
            program("fixtures/make/paddle_single.py", folder, case)
        return folder / case

    return make


def judged(*args: object) -> str:
    return program("tests/acceptance/load_paddle_flex.py", *args).strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("source", "kind", "way"),
    [
        (
            "ernie_bf16_flex_single",
            "ernie",
            (["--tp", "2", "--dp", "2", "--sharding", "v2"], ["--tp", "1", "--dp", "1"]),
        ),
        ("llama_bf16_legacy_single", "llama", (["--tp", "2", "--pp", "2"], ["--tp", "1", "--pp", "1"])),
        ("moe_bf16_uc_hf_single", "moe", ([],)),
        ("llama_tied_bf16_legacy_single", "llama_tied", ([],)),
    ],
)
def test_the_trainer_resumes(
    source: str, kind: str, way: tuple[list[str], ...], made: Made, ckpt: Runner, tmp_path: Path
) -> None:
    at = made(source)
    truth = made(f"{kind}_bf16_flex_single")
    for number, degrees in enumerate(way):
        out = tmp_path / str(number)
        ckpt("convert", at, out, "--to", "paddle-flex", *degrees)
        at = out
    verdict = judged("trainer", at, f"{truth}.truth.safetensors", kind, "bfloat16")
    assert verdict.endswith(" 0 differ") and int(verdict.split()[0]) > 80


@pytest.mark.parametrize(
    ("kind", "tp", "degrees"),
    [
        ("ernie", 2, ["--tp", "2", "--pp", "2", "--dp", "2", "--sharding", "v2"]),
        ("llama", 1, ["--dp", "3", "--sharding", "v2"]),
    ],
)
def test_paddle_merges_what_ranks_hold(
    kind: str, tp: int, degrees: list[str], made: Made, ckpt: Runner, tmp_path: Path
) -> None:
    source = made(f"{kind}_bf16_flex_single")
    ckpt("reshard", source, tmp_path / "out", *degrees)
    verdict = judged("merged", tmp_path / "out", f"{source}.truth.safetensors", tp)
    assert verdict.endswith(" 0 differ") and int(verdict.split()[0]) > 80
