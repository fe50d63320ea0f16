"""Metadata at scale, on sparse files: what it costs to look at 671 billion parameters, and to plan them anew.

    python tests/bench/scale.py [--rounds 5] [--work DIR]

Three measurements, each of whole processes: the start of `ckpt` above that of the bare interpreter; `ckpt inspect` of a
DeepSeek-V3-shaped model (163 files, 91,991 tensors, `deepseek_shape.py`); the plan of a training checkpoint of that
shape (model bf16, master and both moments fp32: 184,732 tensors, 9.6 TB) onto 2,048 ranks, tp 8, pp 16, ep 16 of dp 16,
as `ckpt reshard --dry-run` does it. The plan's process is taken apart once more from inside: reading the source's
heads, choosing what travels, planning; the goal is for the last two.

Headers and index are real, tensor bytes are holes: 60 MB of disk. No tensor byte is read by any of this.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import deepseek_shape
import measure
from measure import Sample, median, say

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
CKPT = [PYTHON, "-m", "ckpt_tool"]
STATES = (("model", "BF16"), ("master", "F32"), ("exp_avg", "F32"), ("exp_avg_sq", "F32"))
DEGREES = ("--tp", "8", "--pp", "16", "--ep", "16", "--dp", "16", "--pp-split", ",".join(["4"] * 14 + ["3", "3"]))

TRAINING = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
import scale
scale.write_training({out!r})
"""

INSIDE = """
import gc, json, resource, sys, time
gc.disable()
began = time.process_time()
from pathlib import Path
from ckpt_tool.options.reading import Reading
from ckpt_tool.option_kinds.statement import value_of
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.opening import open_source
from ckpt_tool.conversion.passes import selected
from ckpt_tool.conversion.planning import make_plan
from ckpt_tool.sources.chosen import Conversion
source, *degrees = sys.argv[1:]
given = dict(zip((name[2:].replace("-", "_") for name in degrees[::2]), degrees[1::2]))
times = {"imports": time.process_time() - began}
def clock(name, call):
    began = time.process_time()
    value = call()
    times[name] = time.process_time() - began
    return value
writing = value_of({**given, "dry_run": True}, Writing)
opened = clock("read", lambda: open_source(source, Reading(from_format="sharded")))
chosen = clock("choose", lambda: selected(opened, Conversion.of(opened, Reading(), writing)))
plan, _ = clock("plan", lambda: make_plan(chosen, Path("/nonexistent/out"), opened.format, writing))
times["ranks"] = plan.report["target"]["mesh"]
print(json.dumps({**times, **plan.report["plan"]}))
"""


def write_training(out: str) -> None:
    """The training checkpoint, `sharded` on one rank; runs in a process of its own, for it imports what it measures."""
    from ckpt_tool.core.dtype import DTYPES
    from ckpt_tool.core.layout import Layout, Placement
    from ckpt_tool.core.mesh import Mesh
    from ckpt_tool.core.target import Wanted, WantedTensor
    from ckpt_tool.core.tensor import TensorKey
    from ckpt_tool.systems.ckpt.sharded.format import FORMAT

    shapes = {name: shape for name, _, shape in deepseek_shape.tensors() if not name.endswith("_scale_inv")}
    wanted = [
        WantedTensor(TensorKey(name, state), shape, DTYPES[dtype])
        for state, dtype in STATES
        for name, shape in shapes.items()
    ]
    target = FORMAT.target(Wanted(tuple(wanted)), Layout(Mesh(), (Placement(),) * len(wanted)))
    os.makedirs(out)
    for file in target.files:
        with open(f"{out}/{file.path}", "wb") as f:
            f.truncate(file.size)
            for offset, data in file.literals:
                f.seek(offset)
                f.write(data)


def sources(work: Path) -> tuple[Path, Path]:
    """(the model's folder, the training checkpoint's), built where they are not there."""
    model = work / "deepseek_v3"
    training = work / "deepseek_v3_training"
    partial = work / "partial"
    for path in (model, training):
        if path.exists():
            continue
        say(f"building {path}")
        measure.remove(partial)
        here = Path(__file__).resolve().parent
        if path is model:  # in a process of its own: children inherit this one's peak
            measure.run([PYTHON, str(here / "deepseek_shape.py"), "build", str(partial)])
        else:
            measure.run([PYTHON, "-c", TRAINING.format(root=str(ROOT), here=str(here), out=str(partial))])
        partial.rename(path)
    return model, training


def rounds_of(commands: dict[str, list[str]], rounds: int) -> dict[str, list[Sample]]:
    """Every command in turn, `rounds` times, after one that is not counted (it warms the caches)."""
    samples: dict[str, list[Sample]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            sample = measure.run(command)
            if number:
                samples[name].append(sample)
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ckpt-bench")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    measure.as_installed(ROOT, given.work)
    model, training = sources(given.work)
    bare = "python -c pass"
    samples = rounds_of(
        {
            bare: [PYTHON, "-c", "pass"],
            "ckpt --version": [*CKPT, "--version"],
            "ckpt --help": [*CKPT, "--help"],
            "ckpt inspect, 91,991 tensors": [*CKPT, "inspect", str(model)],
            "ckpt reshard --dry-run, 671B to 2,048 ranks": [
                *CKPT,
                "reshard",
                str(training),
                str(given.work / "out"),
                *DEGREES,
                "--dry-run",
                "-q",
            ],
        },
        given.rounds,
    )
    goals = {
        "ckpt --version": "30 ms above",
        "ckpt --help": "0.15 s",
        "ckpt inspect, 91,991 tensors": "0.3 s, 30 MiB",
        "ckpt reshard --dry-run, 671B to 2,048 ranks": "0.5 s CPU for choose + plan",
    }
    floor = median(samples[bare], "wall")
    table = [
        [
            name,
            *(f"{median(found, what):.3f}" for what in ("wall", "cpu")),
            f"{median(found, 'wall') - floor:.3f}",
            f"{min(s.cpu for s in found):.3f}",
            f"{median(found, 'peak') / 2**20:.1f}",
            goals.get(name, "-"),
        ]
        for name, found in samples.items()
    ]
    print(f"{given.rounds} rounds, warm cache; {measure.machine(given.work)}\n")
    print(measure.table(("command", "wall s", "CPU s", "above bare", "least CPU s", "peak MiB", "goal"), table))
    inside = [_inside(training) for _ in range(given.rounds)]
    least = {name: min(each[name] for each in inside) for name in ("imports", "read", "choose", "plan")}
    print(
        "\nthe plan from inside, least CPU s: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in least.items())
    )
    print(f"choose + plan: {least['choose'] + least['plan']:.2f} s; {_facts(inside[0])}")
    return 0


def _inside(training: Path) -> dict[str, float]:
    done = subprocess.run([PYTHON, "-c", INSIDE, str(training), *DEGREES], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _facts(found: dict[str, float]) -> str:
    return (
        f"{found['files']:,} files, {found['copies']:,} copies, {found['bytes_written'] / 1e12:.2f} TB,"
        f" mesh {found['ranks']}"
    )


if __name__ == "__main__":
    sys.exit(main())
