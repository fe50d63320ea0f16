"""How a job scales with `--threads`: jobs of `bench.py` at 1, 2, 4, ... threads, beside `cp -r` by one and by as many.

    python tests/bench/threads.py                              jobs of JOBS, up to the cores at hand, 4 GB on /dev/shm
    python tests/bench/threads.py --work DIR --size 2GB --rounds 3 --job 'reshard tp8 -> tp2'

Sources and outputs lie on a file system of memory unless `--work` names another folder: what is measured is the tool,
not a disk. In each round every number of threads runs once, as a whole process, with digests and without fsync, beside
`cp -r` of the output and `cp` of its files by as many processes. Every output is compared with the first one's, byte
for byte.

Columns: wall in seconds (median), GB of output a second, how many times faster than one thread, `x cp`: the median of
the rounds' ratios to `cp -r`, and to `cp` by as many processes (one file is not cut: a job of few files has a slow
parallel `cp`), CPU in seconds, peak MiB. With `--json FILE` all samples too.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench
import measure
from measure import Contestant, Sample, in_turns, median, median_ratio, say

JOBS = ("reshard tp8 -> tp2", "dcp 4 -> 3 ranks, AdamW", "hf -> megatron tp4", "hf -> paddle", "linear merge of two")
MEMORY = Path("/dev/shm")


def doubled(most: int) -> list[int]:
    """1, 2, 4, ... and at last `most`."""
    return [*(1 << k for k in range(most.bit_length()) if 1 << k < most), most]


def parallel_cp(source: Path, out: Path, processes: int) -> list[str]:
    """`cp` of the files of `source` by so many processes."""
    folders = f"cd {shlex.quote(str(source))} && find . -type d -exec mkdir -p {shlex.quote(str(out))}/{{}} \\;"
    files = f"find . -type f -print0 | xargs -0 -P {processes} -I @ cp @ {shlex.quote(str(out))}/@"
    return ["sh", "-c", f"{folders} && {files}"]


class Found(NamedTuple):
    """A job's output in bytes, and samples by contestant: `1 threads`, `cp`, `cp by 2`, ..."""

    nbytes: int
    samples: dict[str, list[Sample]]


def measured(job: bench.Job, sources: bench.Sources, threads: Sequence[int], rounds: int) -> Found:
    scratch = sources.folder / "threads"
    measure.remove(scratch)
    scratch.mkdir(parents=True)
    reference = scratch / "reference"
    out = scratch / "out"
    measure.run([*bench.CKPT, *sources.fill(job.ours, job, reference), "-q", "--no-fsync"])
    command = [*bench.CKPT, *sources.fill(job.ours, job, out), "-q", "--no-fsync", "--threads"]
    same = bench.same_bytes(reference)
    contestants = [Contestant("cp", ["cp", "-r", str(reference), str(out)], out)]
    contestants += [Contestant(f"cp by {n}", parallel_cp(reference, out, n), out) for n in threads if n > 1]
    contestants += [Contestant(f"{n} threads", [*command, str(n)], out, same) for n in threads]
    try:
        return Found(measure.bytes_below(reference), in_turns(contestants, rounds))
    finally:
        measure.remove(scratch)


def row(name: str, threads: int, found: Found) -> list[str]:
    samples = found.samples
    ours = samples[f"{threads} threads"]
    cp = samples["cp"]
    wall = median(ours, "wall")
    return [
        name,
        str(threads),
        f"{wall:.2f}",
        f"{found.nbytes / 1e9 / wall:.2f}",
        f"{median(samples['1 threads'], 'wall') / wall:.2f}",
        f"{median_ratio(ours, cp, 'wall'):.2f}",
        f"{median_ratio(ours, samples.get(f'cp by {threads}', cp), 'wall'):.2f}",
        f"{median(ours, 'cpu'):.2f}",
        f"{max(sample.peak for sample in ours) / (1 << 20):.0f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how jobs scale with --threads.")
    parser.add_argument("--work", type=Path, default=MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir()))
    parser.add_argument("--size", default="4GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=len(os.sched_getaffinity(0)), help="threads; default: the cores")
    parser.add_argument("--job", action="append", choices=[job.name for job in bench.JOBS], help="repeatable")
    parser.add_argument("--json", type=Path, help="all samples")
    arguments = parser.parse_args()
    work = arguments.work / "ckpt-bench-threads"
    measure.as_installed(bench.ROOT, work)
    sources = bench.Sources(work, arguments.size)
    threads = doubled(arguments.most)
    say(measure.machine(work.parent))
    rows: list[list[str]] = []
    found: dict[str, Found] = {}
    try:
        for job in bench.JOBS:
            if job.name not in (arguments.job or JOBS):
                continue
            found[job.name] = measured(job, sources, threads, arguments.rounds)
            rows += [row(job.name, n, found[job.name]) for n in threads]
            if arguments.json:
                arguments.json.write_text(json.dumps(found) + "\n")
    finally:
        measure.remove(work)
    columns = ("job", "threads", "wall s", "GB/s", "faster", "x cp", "x cp by as many", "CPU s", "peak MiB")
    print(measure.table(columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
