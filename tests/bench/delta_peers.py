"""Deltas beside what people use in their place, in turns: sizes, wall, CPU, peak memory.

    python tests/bench/delta_peers.py [--gb 2] [--rounds 3] [--changed 0.02]

A pair of bf16 models of which that share of the elements differs by one unit in the last place, as a step of
reinforcement learning leaves them. `read both` is `cat` of one file and then of the other, which is all that it does;
what is named cold begins with nothing in the page cache, the others are warm. Each delta is given beside `read both` of
its own round. xdelta3 (`apt install xdelta3`) and zstd are left out, with a line, where they are not there; xdelta3
runs once, and takes minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from measure import Failed, Sample, bytes_below, run

READ = "read both"
ENCODINGS = ("xor", "overwrite")
PAIR = """
import json, sys
import numpy as np
out, gb, share = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
rng, shapes = np.random.default_rng(0), [(65536, 2048), *[(4096, 2048)] * max(1, int((gb * 1e9 - 2.7e8) / 16777216))]
head, at = {}, 0
for i, (n, m) in enumerate(shapes):
    head[f"model.layers.{i}.weight"] = {"dtype": "BF16", "shape": [n, m], "data_offsets": [at, at := at + 2 * n * m]}
text = json.dumps(head).encode()
text += b" " * (-len(text) % 8)
with open(out + "/base/model.safetensors", "wb") as a, open(out + "/new/model.safetensors", "wb") as b:
    for file in (a, b):
        file.write(len(text).to_bytes(8, "little") + text)
    for n, m in shapes:
        old = ((rng.standard_normal(n * m, np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
        new = old.copy()
        where = np.flatnonzero(rng.random(n * m, np.float32) < share)
        new[where] = (new[where].astype(np.int32) + rng.choice([-1, 1], len(where))).astype(np.uint16)
        a.write(old.tobytes())
        b.write(new.tobytes())
"""


def drop(folder: Path) -> None:
    """Out of the page cache."""
    for path in folder.rglob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--changed", type=float, default=0.02)
    parser.add_argument("--patience", type=int, default=600, help="seconds for xdelta3")
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="ckpt-deltas-"))
    base = work / "base"
    new = work / "new"
    ckpt = [sys.executable, "-m", "ckpt_tool"]
    base.mkdir()
    new.mkdir()
    subprocess.run([sys.executable, "-c", PAIR, str(work), str(given.gb), str(given.changed)], check=True)
    old = base / "model.safetensors"
    file = new / "model.safetensors"
    quiet = ["--no-fsync", "-q"]
    delta = [*ckpt, "delta", str(base), str(new)]
    rows: dict[str, tuple[list[str], str | None]] = {
        f"{READ}, cold": (["cat", str(old), str(file)], None),
        **{f"ckpt delta {way}, cold": ([*delta, str(work / way), "--encoding", way, *quiet], way) for way in ENCODINGS},
        READ: (["cat", str(old), str(file)], None),
        **{f"ckpt delta {way}": ([*delta, str(work / way), "--encoding", way, *quiet], way) for way in ENCODINGS},
        **{
            f"ckpt patch {way}": (
                [*ckpt, "patch", str(base), str(work / f"kept-{way}"), str(work / "out"), *quiet],
                "out",
            )
            for way in ENCODINGS
        },
        "cp of the new": (["cp", str(file), str(work / "copy")], "copy"),
        "zstd -1 -T2 of the new": (["zstd", "-1", "-T2", "-q", "-f", str(file), "-o", str(work / "zst")], "zst"),
        "xdelta3 -1": (
            [
                "timeout",
                str(given.patience),
                "xdelta3",
                "-1",
                "-f",
                "-e",
                "-s",
                str(old),
                str(file),
                str(work / "vcdiff"),
            ],
            "vcdiff",
        ),
    }
    for way in ENCODINGS:
        subprocess.run([*delta, str(work / f"kept-{way}"), "--encoding", way, *quiet], check=True)
    taken: dict[str, list[Sample]] = {name: [] for name in rows}
    sizes: dict[str, int] = {}
    try:
        for number in range(given.rounds):
            for name, (command, output) in rows.items():
                slow = "xdelta3" in command
                if shutil.which("xdelta3" if slow else command[0]) is None or (slow and number):
                    print(f"# {name} left out in round {number}", flush=True)
                    continue
                if output:
                    shutil.rmtree(work / output, ignore_errors=True)
                if name.endswith("cold"):
                    drop(work)
                else:
                    run(["cat", str(old), str(file)])
                try:
                    taken[name].append(run(command))
                except Failed:
                    if not slow:
                        raise
                    print(f"# {name} was not done after {given.patience} s", flush=True)
                    continue
                if output:
                    sizes[name] = bytes_below(work / output)
        whole = file.stat().st_size
        print("contestant | wall s (least) | CPU s (least) | peak MiB | bytes | of the new")
        for name, samples in taken.items():
            if samples:
                wall, cpu, peak = (
                    f(getattr(s, k) for s in samples) for f, k in ((min, "wall"), (min, "cpu"), (max, "peak"))
                )
                share = f"{sizes[name]} | {100 * sizes[name] / whole:.2f} %" if name in sizes else "- | -"
                print(f"{name} | {wall:.2f} | {cpu:.2f} | {peak / 2**20:.0f} | {share}")
        for way in ENCODINGS:
            for cold in (", cold", ""):
                pairs = [*zip(taken[f"ckpt delta {way}{cold}"], taken[READ + cold], strict=True)]
                for what in ("wall", "cpu"):
                    ratios = ", ".join(f"{getattr(a, what) / getattr(b, what):.2f}" for a, b in pairs)
                    print(f"{way}{cold} beside {READ}{cold}, {what}, each round: {ratios}")
        reads = taken[READ]
        print(f"load {reads[0].load:.1f} to {reads[-1].load:.1f}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
