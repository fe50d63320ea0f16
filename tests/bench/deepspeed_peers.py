"""DeepSpeed's own converters against `ckpt convert` on the same ZeRO-2 checkpoint: wall, CPU, memory, and what they
lose.

    CKPT_DEEPSPEED_PYTHON=/venv/bin/python python tests/bench/deepspeed_peers.py --parameters 175 --rounds 3

The source is saved by a real DeepSpeed engine on 4 gloo ranks (bf16, ZeRO-2, AdamW, one step; 175 million parameters
are 2.45 GB) and stays in the page cache. In each round `cp -r`, `ckpt convert --no-fsync` and the peer run one after
the other as whole processes; after the first round the peer's output is compared with ours, bit for bit, by torch:

    zero_to_fp32      the fp32 model alone        ckpt convert SRC OUT --to safetensors --as-model master
    ds_to_universal   one file a value            ckpt convert SRC OUT --to deepspeed-universal

Then the same two scripts meet checkpoints of other kinds (fixtures/make/deepspeed_zero.py), and the second table says
what came out of each: every tensor of the truth, some of them, or none and why. Peak memory of a peer with workers is
that of its largest process. Options of both scripts are their defaults but for the number of workers (2, the cores).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import measure
from measure import Contestant, Failed, in_turns, median, median_ratio, say

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEEPSPEED = os.environ.get("CKPT_DEEPSPEED_PYTHON", "")
UNIVERSAL = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
WORKERS = ["--num_extract_workers", "2", "--num_merge_workers", "2"]
JOBS = {
    "zero_to_fp32": ["--to", "safetensors", "--as-model", "master", "--max-shard-size", "1TB"],
    "ds_to_universal": ["--to", "deepspeed-universal"],
}
LOSSES = {
    "z1_dp3_frozen": "ZeRO 1, frozen parameters",
    "z2_dp4_round_robin": "ZeRO 2, round_robin_gradients",
    "moe_z2_ep2_dp2_fp32": "ZeRO 2, native MoE, ep 2",
    "pipe_pp2_dp2_z1": "pipeline 2, ZeRO 1",
    "z0_dp2_bf16": "ZeRO off",
}


def peer(job: str, source: Path, out: Path) -> list[str]:
    """The script's command line. source: the folder that holds `latest`."""
    start = [DEEPSPEED, "-W", "ignore"]
    if job == "zero_to_fp32":
        more = ["--safe_serialization", "--max_shard_size", "1TB"]
        return [*start, "-m", "deepspeed.utils.zero_to_fp32", str(source), str(out), *more]
    tag = (source / "latest").read_text()
    return [*start, *UNIVERSAL, *WORKERS, "--input_folder", str(source / tag), "--output_folder", str(out)]


def ours(job: str, source: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "ckpt_tool", "convert", str(source), str(out), *JOBS[job], "-q", *more]


def inner(*arguments: object) -> str:
    """Run a command of deepspeed_judge.py with DeepSpeed's Python; its stdout. Raises Failed."""
    command = [DEEPSPEED, "-W", "ignore", str(HERE / "deepspeed_judge.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failed("\n".join(done.stderr.splitlines()[-8:]))
    return done.stdout


def speed(source: Path, work: Path, rounds: int) -> list[list[str]]:
    """A row for each contestant of each job."""
    rows = []
    for job in JOBS:
        mine = work / "ours"
        theirs = work / "theirs"

        def same(out: Path, job: str = job, mine: Path = mine) -> None:
            """Once: the peer's output holds what ours holds."""
            if not (work / f"{job}.judged").exists():
                measure.remove(mine)
                measure.run(ours(job, source, mine))
                (work / f"{job}.judged").write_text(inner(job, mine, out))
                measure.remove(mine)

        contestants = [
            Contestant("cp -r", ["cp", "-r", str(source), str(work / "copy")], work / "copy"),
            Contestant("ckpt convert", ours(job, source, mine, "--no-fsync"), mine),
            Contestant(job, peer(job, source, theirs), theirs, same),
        ]
        samples = in_turns(contestants, rounds)
        verified = int((work / f"{job}.judged").read_text().split()[-1])
        base = samples["ckpt convert"]
        for name, each in samples.items():
            ratio = "-" if each is base else f"{median_ratio(each, base, 'wall'):.1f}x"
            lean = "-" if each is base else f"{median(each, 'peak') / median(base, 'peak'):.1f}x"
            load = f"{max(sample.load for sample in each):.1f}"
            row = [job, name, f"{median(each, 'wall'):.2f}", f"{median(each, 'cpu'):.2f}"]
            rows.append([*row, f"{median(each, 'peak') / 2**20:.0f}", ratio, lean, f"{verified / 1e6:,.0f}", load])
    return rows


def losses(work: Path) -> list[list[str]]:
    """What each script, and ckpt, makes of checkpoints of other kinds."""
    folder = work / "kinds"
    rows = []
    folder.mkdir(exist_ok=True)
    for case, kind in LOSSES.items():
        if not (folder / f"{case}.truth.safetensors").exists():
            make = [DEEPSPEED, "-W", "ignore", str(ROOT / "fixtures" / "make" / "deepspeed_zero.py"), str(folder), case]
            subprocess.run(make, check=True, capture_output=True)
        for job in JOBS:
            row = [kind, job]
            for who in (peer, ours):
                out = work / "loss"
                measure.remove(out)
                row.append(outcome(job, who(job, folder / case, out), out, folder / f"{case}.truth.safetensors"))
            rows.append(row)
    return rows


def outcome(job: str, command: list[str], out: Path, truth: Path) -> str:
    try:
        measure.run(command)
    except Failed as fault:
        said = [line.strip() for line in str(fault).splitlines() if "Error" in line or "error" in line]
        return f"fails: {(said or str(fault).splitlines())[-1][:90]}"
    return inner("against", job, out, truth).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=int, default=175, help="millions (14 bytes each; default 175)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ckpt-bench")
    parser.add_argument("--losses", action="store_true", help="the second table alone")
    given = parser.parse_args()
    if not DEEPSPEED:
        raise SystemExit("set CKPT_DEEPSPEED_PYTHON: a Python with DeepSpeed 0.19")
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    work = given.work / f"deepspeed-{given.parameters}"
    work.mkdir(parents=True, exist_ok=True)
    measure.as_installed(ROOT, given.work)
    if not given.losses:
        source = work / "zero2"
        if not source.exists():
            say(f"building {source}")
            inner("build", work / "partial", given.parameters)
            (work / "partial").rename(source)
        nbytes = measure.bytes_below(source)
        say(f"{nbytes / 1e9:.2f} GB, ZeRO-2, 4 ranks; {measure.machine(work)}")
        columns = [
            "job",
            "by",
            "wall s",
            "CPU s",
            "peak MiB",
            "wall of ckpt's",
            "peak of ckpt's",
            "verified MB",
            "load",
        ]
        print(measure.table(columns, speed(source, work, given.rounds)), end="\n\n")
    print(measure.table(["checkpoint", "script", "its output", "ckpt's output for the same"], losses(work)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
