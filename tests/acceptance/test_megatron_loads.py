"""Megatron itself loads what `ckpt` wrote for other degrees, and holds the values it saved (marker `peers`).

A real job saves (fixtures/make/megatron_lm.py), `ckpt reshard` or `convert` lays the checkpoint out anew, a real job of
the new degrees loads it with `megatron.training.load_checkpoint` on top of `megatron.core.dist_checkpointing.load`, and
every parameter, master and moment of every rank is compared with what the name and the place say it must be
(load_megatron.py). Needs a Python with megatron-core 0.16.1 and a checkout of Megatron-LM at that tag:

    CKPT_MEGATRON_PYTHON=/venv/bin/python MEGATRON_LM=/src/Megatron-LM pytest tests/acceptance/test_megatron_loads.py -m
    peers
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
from peer_process import last_words
from peers import ROOT, Runner, assert_same, load_sharded
from safetensors.torch import load_file

PYTHON, SOURCE = os.environ.get("CKPT_MEGATRON_PYTHON", ""), os.environ.get("MEGATRON_LM", "")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(2000),  # of two jobs
    pytest.mark.skipif(
        not (PYTHON and SOURCE),
        reason="set CKPT_MEGATRON_PYTHON (a Python with megatron-core) and MEGATRON_LM (a checkout of Megatron-LM)",
    ),
]

Made = Callable[[str], Path]


def program(path: str, *args: object, adam: str = "torch") -> None:
    """Run a program of ours with Megatron's Python; its last words are the reason of a failure."""
    environment = {"OMP_NUM_THREADS": "1", "ADAM": adam}
    last_words([PYTHON, "-W", "ignore", ROOT / path, *args], 900, environment=environment)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """case -> its folder, saved by a real job, once a session."""
    folder = tmp_path_factory.mktemp("megatron")

    def make(case: str) -> Path:
        if not (folder / f"{case}.truth.safetensors").exists():
            program("fixtures/make/megatron_lm.py", folder, case)
        return folder / case

    return make


def loaded(checkpoint: Path, world: int, flags: str) -> dict[str, Any]:
    """What a job of `world` ranks with these flags holds after loading."""
    report = checkpoint.parent / f"{checkpoint.name}.json"
    program("tests/acceptance/load_megatron.py", checkpoint, world, flags, report)
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def mesh(*, tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None) -> str:
    flags = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --expert-model-parallel-size {ep}"
    return flags if etp is None else f"{flags} --expert-tensor-parallel-size {etp}"


class Hop(NamedTuple):
    """source: a case of the maker. world, flags: the job that loads. degrees: what `ckpt` is asked for."""

    source: str
    world: int
    flags: str
    degrees: str


LLAMA = "BASE LLAMA BF16 ADAM"
MOE = "BASE LLAMA MOE BF16 ADAM"
GPT2 = "BASE GPT2 BF16 ADAM"
DIST = [
    Hop("dist_tp2pp2_dpresh", 4, f"{LLAMA} DIST {mesh(tp=4)}", "--tp 4 --pp 1 --dp 1"),
    Hop("dist_tp2pp2_dpresh", 2, f"{LLAMA} DIST VPP {mesh(pp=2)}", "--tp 1 --pp 2 --vpp 2 --dp 1"),
    Hop("dist_tp2pp2_dpresh", 3, f"{LLAMA} DIST UNEVEN {mesh(pp=3)}", "--tp 1 --pp 3 --pp-split 1,2,1 --dp 1"),
    Hop("dist_tp4_full", 4, f"{LLAMA} DIST {mesh(tp=2, pp=2)}", "--tp 2 --pp 2 --dp 1"),
    Hop("dist_dp4_buckets_dpresh", 2, f"{LLAMA} DIST {mesh(tp=2)}", "--tp 2 --dp 1"),
    Hop("dist_adamw", 2, f"BASE LLAMA BF16 DIST {mesh(pp=2)}", "--tp 1 --pp 2 --dp 1"),
    Hop("dist_fp32_dpresh", 4, f"BASE LLAMA ADAM DIST {mesh(tp=2)}", "--tp 2 --dp 2"),
    Hop("dist_fp16_full", 2, f"BASE LLAMA --fp16 ADAM DIST {mesh(tp=2)}", "--tp 2 --dp 1"),
    Hop("dist_gpt2_tied_pp2_dpresh", 4, f"{GPT2} DIST {mesh(pp=4)}", "--tp 1 --pp 4 --dp 1"),
    Hop("dist_gpt2_tied_pp2_dpresh", 2, f"{GPT2} DIST", "--tp 1 --pp 1 --dp 2"),
    Hop("dist_moe_ep2pp2_dpresh", 4, f"{MOE} DIST {mesh(tp=2, ep=2)}", "--tp 2 --pp 1 --ep 2 --dp 2"),
    Hop("dist_moe_ep2pp2_dpresh", 2, f"{MOE} DIST {mesh(tp=2)}", "--tp 2 --pp 1 --ep 1 --dp 1"),
    Hop("dist_moe_tp2ep2_full", 4, f"{MOE} DIST {mesh(ep=4)}", "--tp 1 --pp 1 --ep 4 --dp 4"),
    Hop("dist_moe_grouped_ep2_full", 2, f"{MOE} DIST {mesh(tp=2, ep=2, etp=1)}", "--tp 2 --ep 2 --etp 1 --dp 1"),
    Hop(
        "dist_mla_moe_mtp_dpresh",
        2,
        f"BASE MLA MOE BF16 ADAM DIST {mesh(ep=2)} --mtp-num-layers 1 --num-layers 4",
        "--tp 1 --ep 2 --dp 2",
    ),
    Hop("dist_mtp_pp2_full", 2, f"{LLAMA} DIST {mesh(tp=2)} --mtp-num-layers 1", "--tp 2 --pp 1 --dp 1"),
]
FRESH = "--no-load-rng"  # random states of other degrees are not written: Megatron must not look for them
RESUMED = "--use-checkpoint-opt_param-scheduler"  # another global batch than the job's that saved
LEGACY = [
    Hop("dense_tp2dp2", 4, f"{LLAMA} LEGACY {FRESH} {mesh(tp=2, pp=2)}", "--tp 2 --pp 2 --dp 1"),
    Hop("dense_tp4", 2, f"{LLAMA} LEGACY {FRESH} VPP {mesh(pp=2)}", "--tp 1 --pp 2 --vpp 2 --dp 1"),
    Hop("dense_pp4", 3, f"{LLAMA} LEGACY {FRESH} UNEVEN {mesh(pp=3)}", "--pp 3 --pp-split 1,2,1 --dp 1"),
    Hop("dense_pp2vpp2", 4, f"{LLAMA} LEGACY {FRESH} {mesh(tp=2)}", "--tp 2 --pp 1 --vpp 1 --dp 2"),
    Hop("dense_dp3_buckets", 2, f"{LLAMA} LEGACY BUCKETS {FRESH} {RESUMED} {mesh(tp=2)}", "--tp 2 --dp 1"),
    Hop("dense_adamw", 2, f"BASE LLAMA BF16 LEGACY {FRESH} {mesh(pp=2)}", "--tp 1 --pp 2 --dp 1"),
    Hop("gpt2_tied_tp2pp2", 4, f"{GPT2} LEGACY {FRESH} {mesh(pp=4)}", "--tp 1 --pp 4 --dp 1"),
    Hop("gpt2_tied_tp1", 4, f"{GPT2} LEGACY {FRESH} {mesh(tp=2, pp=2)}", "--tp 2 --pp 2 --dp 1"),
    Hop("moe_tp2ep2etp1", 4, f"{MOE} LEGACY {FRESH} {mesh(ep=4)}", "--tp 1 --ep 4 --etp 1 --dp 4"),
    Hop("moe_ep2dp4", 2, f"{MOE} LEGACY {FRESH} {mesh(tp=2)}", "--tp 2 --ep 1 --dp 1"),
    Hop("moe_tp2ep1", 4, f"{MOE} LEGACY {FRESH} {mesh(pp=2, ep=2)}", "--tp 1 --pp 2 --ep 2 --dp 2"),
    Hop("moe_grouped_ep2", 4, f"{MOE} LEGACY {FRESH} --moe-grouped-gemm {mesh(ep=4)}", "--ep 4 --dp 4"),
    Hop("mla_tp2", 1, f"BASE MLA BF16 ADAM LEGACY {FRESH}", "--tp 1 --dp 1"),
    Hop("mtp_pp2", 2, f"{LLAMA} LEGACY {FRESH} {mesh(tp=2)} --mtp-num-layers 1", "--tp 2 --pp 1 --dp 1"),
]


def check(found: dict[str, Any]) -> None:
    assert not found["wrong"], "\n".join(found["wrong"][:20])
    assert found["compared"] > 100
    assert found["iteration"] == 2
    assert found["step"] == [2.0]
    assert found["samples"] == found["scheduler"]
    assert found["samples"] in (16, 18)  # two steps of the global batch, which is 9 over three ranks


@pytest.mark.parametrize("hop", DIST + LEGACY, ids=lambda hop: f"{hop.source}{hop.degrees.replace(' ', '')}")
def test_megatron_holds_what_it_saved_at_other_degrees(made: Made, ckpt: Runner, tmp_path: Path, hop: Hop) -> None:
    ckpt("reshard", made(hop.source), tmp_path / "out", *hop.degrees.split())
    check(loaded(tmp_path / "out", hop.world, hop.flags))


@pytest.mark.parametrize(
    ("source", "world", "flags", "degrees"),
    [
        ("dense_tp4", 4, f"{LLAMA} DIST {mesh(tp=2, pp=2)}", "--tp 2 --pp 2"),
        ("moe_tp2ep2etp1", 2, f"{MOE} DIST {mesh(ep=2)}", "--ep 2 --dp 2"),
        ("gpt2_tied_tp2pp2", 1, f"{GPT2} DIST", ""),
        (
            "mla_moe_mtp_ep2pp2",
            2,
            f"BASE MLA MOE BF16 ADAM DIST {mesh(tp=2)} --mtp-num-layers 1 --num-layers 4",
            "--tp 2",
        ),
    ],
    ids=["dense", "moe", "tied", "mla"],
)
def test_megatron_loads_torch_dist_made_of_a_legacy_one(
    made: Made, ckpt: Runner, tmp_path: Path, source: str, world: int, flags: str, degrees: str
) -> None:
    ckpt("convert", made(source), tmp_path / "out", "--to", "megatron-dist", *degrees.split())
    check(loaded(tmp_path / "out", world, flags))


@pytest.mark.parametrize("source", ["dense_tp4", "moe_tp2ep2etp1", "gpt2_tied_tp2pp2"])
def test_the_long_way_round_is_bit_identical(made: Made, ckpt: Runner, tmp_path: Path, source: str) -> None:
    """megatron -> megatron-dist -> deepspeed-universal -> dcp -> megatron, every state the truth's."""
    truth = load_file(made(source).parent / f"{source}.truth.safetensors")
    here = made(source)
    ways = ["megatron-dist --tp 2", "deepspeed-universal", "dcp --dp 2", "megatron --tp 2 --pp 2"]
    for number, way in enumerate(ways):
        ckpt("convert", here, tmp_path / str(number), "--dialect", "keep", "--to", *way.split())
        here = tmp_path / str(number)
    ckpt("convert", here, tmp_path / "open", "--to", "sharded", "--dialect", "keep")
    got = {key: value for key, value in load_sharded(tmp_path / "open").items() if not key.startswith("step/")}
    assert_same(got, truth)


@pytest.mark.parametrize("case", ["dense_tp2dp2", "moe_ep2dp4"])
def test_torch_reads_the_legacy_files(made: Made, ckpt: Runner, tmp_path: Path, case: str) -> None:
    """Plain `torch.load` in Megatron's own environment, classes of Megatron and all."""
    ckpt("reshard", made(case), tmp_path / "out", "--tp", 1, "--pp", 2, "--ep", 1, "--dp", 1)
    code = (
        "import sys, torch; sys.path.append(sys.argv[2])\n"
        "from pathlib import Path\n"
        "for file in sorted(Path(sys.argv[1]).rglob('*.pt')):\n"
        "    state = torch.load(file, weights_only=False)\n"
        "    if file.name == 'model_optim_rng.pt': print(type(state['args']).__name__, state['iteration'])\n"
    )
    command = [PYTHON, "-W", "ignore", "-c", code, str(tmp_path / "out"), SOURCE]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines() == ["Namespace 2", "Namespace 2"]


def test_the_truth_is_what_torch_reads(made: Made) -> None:
    """The maker's own claim, checked by DCP alone: no assumption of ours stands between Megatron's file and the
    truth."""
    import torch.distributed.checkpoint as dcp

    source = made("dist_fp32_dpresh")
    truth = load_file(source.parent / "dist_fp32_dpresh.truth.safetensors")
    folder = next(source.glob("iter_*"))
    name = "decoder.layers.mlp.linear_fc1.weight"
    size = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata[name].size
    state = {name: torch.empty(size)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for layer, tensor in enumerate(state[name]):
        assert torch.equal(tensor, truth[f"model/decoder.layers.{layer}.mlp.linear_fc1.weight"])
