"""A real Megatron job resumes from a checkpoint that lay under the hub's names in between (marker `peers`).

A job saves weights, masters and moments; `convert --dialect hf` lays them open as a hub model with its optimizer states
(q, k and v apart, experts one by one), `convert --to megatron...` fuses them again for other degrees, and a real job of
those loads it: every parameter, master and moment of every rank is what its name and place say. Needs what
test_megatron_loads.py needs; padding of the vocabulary is kept on the way with `--vocab-size`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from peers import Runner
from test_megatron_loads import FRESH, LLAMA, Made, check, loaded, made, mesh, pytestmark

__all__ = ["made", "pytestmark"]
MIXTRAL = "BASE LLAMA MIXTRAL BF16 ADAM"
JOBS = [
    ("dense_tp4", "qwen3", "megatron-dist --tp 2", 2, f"{LLAMA} DIST {mesh(tp=2)}"),
    ("dist_tp2pp2_dpresh", "qwen3", "megatron --pp 2", 2, f"{LLAMA} LEGACY {FRESH} {mesh(pp=2)}"),
    ("moe_ep4", "qwen3_moe", "megatron-dist --tp 2 --ep 2 --dp 2", 4, f"{MIXTRAL} DIST {mesh(tp=2, ep=2)}"),
    ("mla_tp2", "deepseek_v3", "megatron-dist", 1, "BASE MLA BF16 ADAM DIST"),
    ("mtp_pp2", "glm4_moe", "megatron-dist --tp 2", 2, f"{LLAMA} DIST {mesh(tp=2)} --mtp-num-layers 1"),
]


@pytest.mark.parametrize(
    ("source", "family", "target", "world", "flags"), JOBS, ids=lambda value: str(value).split()[0]
)
def test_a_job_resumes_from_the_hub_s_names(
    source: str, family: str, target: str, world: int, flags: str, made: Made, ckpt: Runner, tmp_path: Path
) -> None:
    told = ["--family", family, "--vocab-size", 104]  # the jobs' rows, three of them padding
    ckpt("convert", made(source), tmp_path / "hub", "--to", "sharded", "--dialect", "hf", *told)
    ckpt("convert", tmp_path / "hub", tmp_path / "out", "--to", *target.split(), *told)
    check(loaded(tmp_path / "out", world, flags))
