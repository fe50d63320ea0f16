"""DeepSpeed itself resumes from what `ckpt` wrote, and its next step is the uninterrupted run's (marker `peers`).

A real engine trains two steps and saves (fixtures/make/deepspeed_zero.py), `ckpt` lays the checkpoint out for another
number of data ranks or another ZeRO stage, a real engine of that shape loads it and takes the third step
(resume_deepspeed.py). Two judgements, both on what DeepSpeed's own functions say of the live engine:

- what it loaded is the truth, bit for bit, whatever the degrees;
- after the step it holds, bit for bit, what a run of its own shape holds that was never interrupted. All ranks compute
  on the same batch, so over 1, 2 or 4 ranks the averaged gradient is exact and the order of the reduction can't show.
  Over 3 ranks the mean rounds: there the step is compared with 1 part in 1000 of the largest value, and the loaded
  state still exactly.

    CKPT_DEEPSPEED_PYTHON=/venv/bin/python pytest tests/acceptance/test_deepspeed_resumes.py -m peers
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peer_process import last_words
from peers import ROOT, Runner, Tensors, assert_same
from safetensors.torch import load_file

PYTHON = os.environ.get("CKPT_DEEPSPEED_PYTHON", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(900),  # of three jobs, each within LIMIT
    pytest.mark.skipif(not PYTHON, reason="set CKPT_DEEPSPEED_PYTHON (a Python with DeepSpeed 0.19)"),
]

LIMIT = 250  # seconds
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}

Made = Callable[[str], Path]
Ran = Callable[[str, str, int, int], Tensors]


def program(path: str, *args: object) -> None:
    last_words([PYTHON, "-W", "ignore", ROOT / path, *args], LIMIT, environment=ENVIRONMENT)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="session")
def made(folder: Path) -> Made:
    """case -> its folder, saved by a real engine, once a session."""

    def make(case: str) -> Path:
        if not (folder / f"{case}.truth.safetensors").exists():
            program("fixtures/make/deepspeed_zero.py", folder, case)
        return folder / case

    return make


@pytest.fixture(scope="session")
def job(folder: Path) -> Ran:
    """(case, checkpoint, ranks, stage) -> what the engine holds before and after its step; `-` is never interrupted."""

    def run(case: str, checkpoint: str, world: int, stage: int) -> Tensors:
        out = folder / f"{case}.{world}.{stage}.{checkpoint.replace('/', '_')}.safetensors"
        if not out.exists():
            program("tests/acceptance/resume_deepspeed.py", case, checkpoint, world, stage, out)
        return load_file(out)

    return run


def part(found: Tensors, prefix: str) -> Tensors:
    return {key.removeprefix(f"{prefix}/"): value for key, value in found.items() if key.startswith(f"{prefix}/")}


def assert_loaded(found: Tensors, truth: Tensors) -> None:
    """Every value that both shapes keep: ZeRO 3 has no 16-bit weights, a trained parameter's are bf16(master)."""
    got = part(found, "loaded")
    both = got.keys() & truth.keys()
    assert {key for key in truth if not key.startswith("model/")} <= both
    assert_same({key: got[key] for key in both}, {key: truth[key] for key in both})


class Hop(NamedTuple):
    """case: of the maker. world: ranks of the job that resumes. stage: its ZeRO stage. args: what `ckpt` is asked."""

    case: str
    world: int
    stage: int
    args: str


HOPS = [
    Hop("z1_dp4_groups_tied", 2, 1, "reshard --dp 2"),
    Hop("z1_dp4_groups_tied", 2, 2, "reshard --dp 2 --zero 2"),
    Hop("z1_dp4_groups_tied", 2, 3, "reshard --dp 2 --zero 3"),
    Hop("z2_dp4_frozen_groups", 1, 2, "reshard --dp 1"),
    Hop("z2_dp2_fp32", 4, 2, "reshard --dp 4"),
    Hop("z2_fp16_dp2", 4, 2, "reshard --dp 4"),
    Hop("z2_dp4_align", 2, 2, "reshard --dp 2"),
    Hop("z2_dp4_round_robin", 2, 2, "reshard --dp 2"),
    Hop("z1_bf16_optimizer_dp2", 4, 1, "reshard --dp 4"),
    Hop("z3_dp4_tied_sub_groups", 2, 3, "reshard --dp 2"),
    Hop("z3_dp2_fp32_frozen", 4, 3, "reshard --dp 4"),
    Hop("z0_dp2_fp32", 4, 0, "reshard --dp 4"),
    Hop("pipe_pp2_dp2_z1", 2, 1, "reshard --dp 1"),
    Hop("pipe_pp2_bf16_optimizer_tied", 2, 1, "reshard --dp 1"),
    Hop("moe_z1_ep2_dp4", 2, 1, "reshard --dp 2"),
    Hop("moe_z2_ep2_dp2_fp32", 4, 2, "reshard --dp 4"),
    Hop("z1_dp4_groups_tied", 2, 1, "convert --to deepspeed-universal"),
    Hop("z2_dp2_fp32", 4, 2, "convert --to deepspeed-universal"),
]


@pytest.mark.parametrize("hop", HOPS, ids=lambda hop: f"{hop.case} {hop.args}")
def test_the_next_step_is_that_of_the_uninterrupted_run(
    made: Made, job: Ran, ckpt: Runner, tmp_path: Path, hop: Hop
) -> None:
    source, (verb, *args) = made(hop.case), hop.args.split()
    ckpt(verb, source, tmp_path / "out", *args)
    checkpoint = f"universal:{tmp_path / 'out'}" if "deepspeed-universal" in args else str(tmp_path / "out")
    found = job(hop.case, checkpoint, hop.world, hop.stage)
    assert_loaded(found, load_file(source.parent / f"{hop.case}.truth.safetensors"))
    assert_same(part(found, "stepped"), part(job(hop.case, "-", hop.world, hop.stage), "stepped"))
    assert found["counters"][0] == 3


ELSEWHERE = [
    # what the job that saved never was: the state that is loaded is the truth, but there is no such run to compare with
    (Hop("z2_dp4_frozen_groups", 2, 3, "reshard --dp 2 --zero 3"), "z2_dp4_frozen_groups"),
    (Hop("z3_dp4_frozen_sub_groups", 2, 1, "reshard --dp 2 --zero 1"), "z3_dp4_frozen_sub_groups"),
    (Hop("moe_z1_ep2_dp4", 4, 2, "reshard --ep 4 --zero 2"), "moe_z2_ep4_dp4"),
    (Hop("moe_z2_ep4_dp4", 2, 2, "reshard --ep 1 --dp 2"), "moe_z2_ep1_dp2"),
]


@pytest.mark.parametrize(("hop", "job_case"), ELSEWHERE, ids=lambda hop: getattr(hop, "args", ""))
def test_deepspeed_holds_the_truth_in_a_shape_of_another_kind(
    made: Made, job: Ran, ckpt: Runner, tmp_path: Path, hop: Hop, job_case: str
) -> None:
    source, (verb, *args) = made(hop.case), hop.args.split()
    ckpt(verb, source, tmp_path / "out", *args)
    found = job(job_case, str(tmp_path / "out"), hop.world, hop.stage)
    assert_loaded(found, load_file(source.parent / f"{hop.case}.truth.safetensors"))


@pytest.mark.parametrize(("case", "world"), [("z1_dp3_frozen", 4), ("z2_dp3_groups", 4), ("z3_dp3_groups", 2)])
def test_over_three_ranks_the_mean_rounds(
    made: Made, job: Ran, ckpt: Runner, tmp_path: Path, case: str, world: int
) -> None:
    source = made(case)
    stage = int(case[1])
    ckpt("reshard", source, tmp_path / "out", "--dp", world)
    found = job(case, str(tmp_path / "out"), world, stage)
    assert_loaded(found, load_file(source.parent / f"{case}.truth.safetensors"))
    whole = part(job(case, "-", 3, stage), "stepped")
    for key, value in part(found, "stepped").items():
        torch.testing.assert_close(value, whole[key], rtol=0, atol=1e-3 * float(whole[key].abs().max()) + 1e-3)


@pytest.mark.parametrize("case", ["z2_dp4_frozen_groups", "z3_dp4_frozen_sub_groups"])
def test_a_universal_checkpoint_of_ours_does_what_deepspeeds_own_does(
    made: Made, job: Ran, ckpt: Runner, tmp_path: Path, case: str
) -> None:
    """DeepSpeed 0.19.8 loads no frozen parameters of a universal checkpoint below stage 3, and at stage 3 its next step
    with two groups is not the uninterrupted run's, with a universal checkpoint of its own making as with ours."""
    source = made(case)
    stage = int(case[1])
    tag = (source / "latest").read_text()
    theirs = tmp_path / "theirs" / f"{tag}_universal"
    command = [PYTHON, "-W", "ignore", "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source / tag), "--output_folder", str(theirs), "--num_extract_workers", "1"]
    last_words([*command, "--num_merge_workers", "1"], LIMIT, environment=ENVIRONMENT)
    (tmp_path / "theirs" / "latest_universal").write_text(f"{tag}_universal")
    ckpt("convert", source, tmp_path / "ours", "--to", "deepspeed-universal")
    by_theirs = job(case, f"universal:{tmp_path / 'theirs'}", 2, stage)
    assert_same(job(case, f"universal:{tmp_path / 'ours'}", 2, stage), by_theirs)
