"""A Slurm array carries a plan out: by parts that Slurm numbers, and by claims. Needs a cluster that sees this disk."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from ckpt_tool.cli import run


def _cluster() -> str:
    """Why no job can be sent; empty where one can."""
    if shutil.which("sbatch") is None:
        return "no sbatch here (Debian: slurmctld, slurmd, slurm-client, munge)"
    try:
        asked = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, timeout=5)
    except subprocess.TimeoutExpired:
        return "no Slurm answers within 5 s"
    return "" if asked.returncode == 0 and asked.stdout else f"no Slurm answers: {asked.stderr.strip()}"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.peers
@pytest.mark.parametrize("share", ["--part auto", "--claim"])
def test_an_array_job_commits_once_with_the_bytes_of_one_process(tmp_path: Path, share: str) -> None:
    if why := _cluster():
        pytest.skip(why)
    source = tmp_path / "in.safetensors"
    plan = str(tmp_path / "plan.json")
    out = tmp_path / "place" / "out"
    out.parent.mkdir()
    tensors = {f"layers.{i}.mlp.up_proj.weight": np.full((1024, 512), i, np.float32) for i in range(24)}
    safetensors.numpy.save_file(tensors, source)
    assert run(["convert", str(source), str(out), "--to", "sharded", "--tp", "2", "--plan", plan, "-q"]) == 0
    assert run(["apply", plan, "-q"]) == 0
    good = files_of(out)
    shutil.rmtree(out)

    command = f"{shlex.quote(sys.executable)} -m ckpt_tool apply {shlex.quote(plan)} {share} --json -q"
    lines = ["sbatch", "--wait", "--array=0-5", f"--output={tmp_path}/%a.out", f"--error={tmp_path}/%a.err"]
    sent = subprocess.run([*lines, "--wrap", command], capture_output=True, text=True, timeout=240)
    said = "".join(path.read_text() for path in sorted(tmp_path.glob("*.err")))
    assert sent.returncode == 0, sent.stderr + said
    documents = [json.loads((tmp_path / f"{task}.out").read_text()) for task in range(6)]
    if share == "--claim":
        assert all(document["committed"] for document in documents)
    else:
        assert [document["part"] for document in documents] == [[task + 1, 6] for task in range(6)]
        assert sum(document["committed"] for document in documents) == 1
    assert files_of(out) == good and [path.name for path in out.parent.iterdir()] == ["out"]
