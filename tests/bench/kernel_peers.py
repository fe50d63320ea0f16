"""The whole table of the kernels in one run: every work, its peers, and the plain copy of the device, as JSON and
Markdown.

    python tests/bench/kernel_peers.py --out FOLDER                  the GPU at hand, less than 10 minutes
    python tests/bench/kernel_peers.py --out FOLDER --sweep          tiles, threads, blocks, spans and loads of box_copy
    CKPT_KERNELS=host python tests/bench/kernel_peers.py --out FOLDER --mib 1 --repeats 2    in miniature, without a GPU

How it is measured, `ckpt_tool/device/trial/bench.py` says. Peers work on the same buffers, between the same events, in
the same pass as the kernel; what a peer leaves in the target is compared with what the kernel left there, byte for
byte, over a poisoned target, and exit is 1 where they differ. A peer that needs long is repeated less. After
`--seconds` no further peer is begun, and the report says which are missing. Needs torch; cub is measured where nvcc is,
built here and nowhere else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import measure
import torch
from torch_peers import Buffers, peers

from ckpt_tool.device import build, choose
from ckpt_tool.device.library import Device, Library
from ckpt_tool.device.trial import bench, workloads
from ckpt_tool.device.trial.bench import BenchRow, Measured, Timer
from ckpt_tool.device.trial.workloads import WORKS, Knobs, Workload

POISON = 0xA5
PEER_SECONDS = 1.5  # of one peer in one pass
SWEPT = (
    "one run",
    "pieces of 64 KiB",
    "columns 64 B",
    "columns 512 B",
    "columns 4096 B",
    "pieces of 8 MiB, 1 off",
    "columns 130 B",
    "columns 512 B, 8 off",
)


def cub_library(device: Device, folder: Path) -> Path | None:
    """cub's peer, compiled for this device; None where there is no nvcc or no GPU."""
    nvcc = build.find_nvcc()
    if nvcc is None or device.info.host:
        return None
    target, (major, minor) = folder / "cub_peer.so", device.info.capability
    subprocess.run(
        [
            nvcc,
            "-std=c++17",
            "-O3",
            f"-arch=sm_{major}{minor}",
            "-shared",
            "-Xcompiler",
            "-fPIC,-fvisibility=hidden",
            "-cudart",
            "static",
            str(Path(__file__).with_name("cub_peer.cu")),
            "-o",
            str(target),
        ],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return target


class Contest:
    """Kernels and peers over the same buffers. faults: peers that left other bytes. missing: peers for which no time
    was left."""

    def __init__(self, device: Device, payload: int, repeats: int, until: float, cub: Path | None) -> None:
        self.device = device
        self.repeats = repeats
        self.until = until
        self.buffers = Buffers(payload, 2, "cpu" if device.info.host else "cuda")
        self.timer = Timer(device)
        self.found = Measured()
        self.peers: dict[tuple[str, str], list[Any]] = {}
        for work, name, same, how in peers(cub, device):
            self.peers.setdefault(work, []).append((name, same, how))
        self.faults: list[str] = []
        self.missing: set[str] = set()

    def run_pass(self, works: Sequence[Workload]) -> None:
        arena = self.buffers.arena
        bench.lay_out(self.device, arena, "bytes")
        plain = bench.plain_copy(self.device, arena, self.timer, self.repeats)
        moved = 2 * arena.payload
        self.found.add("plain copy", "one run", "cudaMemcpyAsync", (1, moved), moved / plain / 1e6, plain)
        for work in works:
            measure.say(f"{work.kernel}: {work.name}")
            bench.lay_out(self.device, arena, work.values)
            made = work.prepare(self.device, arena, Knobs())
            self.found.add(
                work.kernel,
                work.name,
                "ckpt",
                (made.boxes, made.moved),
                self.timer.milliseconds(made.call, self.repeats),
                plain,
            )
            for name, same, how in self.peers.get((work.kernel, work.name), ()):
                if time.monotonic() > self.until:
                    self.missing.add(f"{work.kernel}, {work.name}: {name}")
                    continue
                call = how(self.buffers)
                if same and not self._same(made.call, call):
                    self.faults.append(f"{work.kernel}, {work.name}: {name} leaves other bytes than the kernel")
                self.found.add(work.kernel, work.name, name, (made.boxes, made.moved), self._time(call), plain)
            self.device.sync()
            made.close()

    def _same(self, ours: Any, theirs: Any) -> bool:
        left = []
        for call in (ours, theirs):
            self.buffers.target.fill_(POISON)
            self._wait()
            call(0)
            self.device.sync()
            self._wait()
            left.append(self.buffers.target.clone())
        return torch.equal(*left)

    def _time(self, call: Any) -> float:
        self._wait()
        began = time.perf_counter()
        call(0)
        self._wait()
        once = time.perf_counter() - began
        return self.timer.milliseconds(call, max(3, min(self.repeats, int(PEER_SECONDS / max(once, 1e-6)))))

    def _wait(self) -> None:
        if not self.device.info.host:
            torch.cuda.synchronize()


def sweep(device: Device, payload: int, repeats: int, until: float, folder: Path) -> Iterator[dict[str, Any]]:
    """box_copy with other knobs, one at a time and tile with threads; `loads`: libraries built with other
    CK_COPY_LOADS."""
    plans = [
        Knobs(tile=tile, threads=threads) for tile, threads in product((8192, 16384, 32768, 65536), (32, 64, 128, 256))
    ]
    if not device.info.host:
        cores = device.info.multiprocessors
        plans += [Knobs(blocks=cores * n) for n in (2, 3, 4, 8, 12)]
    plans += [Knobs(spans_from=spans) for spans in ((), (32, 32, 32, 32), (64, 64, 256), (128, 512, 512, 1024))]
    works = [WORKS["box_copy", name] for name in SWEPT]
    for loads, library in ((4, None), *loaded(device, folder)):
        with_it = device if library is None else Device(library, device.number)
        for knobs in plans if library is None else [Knobs()]:
            if time.monotonic() > until:
                return
            found = Measured()
            timer = Timer(with_it)
            with bench.arena_on(with_it, payload, 2) as arena:
                bench.run_pass(with_it, arena, timer, found, works, repeats, knobs)
            timer.close()
            shares = {row.work: round(row.share, 4) for row in found.rows() if row.kernel == "box_copy"}
            yield {"loads": loads, **knobs._asdict(), "shares": shares}


def loaded(device: Device, folder: Path) -> Iterator[tuple[int, Library]]:
    """The kernels with other numbers of loads in flight, where they can be built."""
    for loads in (2, 8):
        target = folder / f"loads{loads}.so"
        extra = (f"-DCK_COPY_LOADS={loads}",)
        if device.info.host:
            build.compile_to(build.host_recipe(extra), target)
        else:
            major, minor = device.info.capability
            build.compile_to(build.cuda_recipe((10 * major + minor,), extra), target)
        yield loads, Library(target)


def markdown(rows: Iterable[BenchRow], about: dict[str, Any]) -> str:
    """A table for people: one line a work, the peers beside it as how many times faster the kernel is."""
    by_work: dict[tuple[str, str], list[BenchRow]] = {}
    for row in rows:
        by_work.setdefault((row.kernel, row.work), []).append(row)
    lines = []
    for (kernel, work), group in by_work.items():
        ours, *others = group
        times = ", ".join(f"{row.who} {row.milliseconds / ours.milliseconds:.2f}" for row in others)
        lines.append(
            [
                f"{kernel}: {work}",
                f"{ours.boxes:,}",
                f"{ours.milliseconds:.3f}",
                f"{ours.gbs:,.0f}",
                f"{ours.share:.3f}",
                f"{100 * ours.spread:.1f} %",
                times,
            ]
        )
    columns = ("work", "boxes", "ms", "GB/s", "of the plain copy", "spread", "time of a peer, ours is 1")
    head = f"{about['device']}, driver for CUDA {about['driver']}, torch {about['torch']}, {about['date']}; "
    return f"{head}{about['mib']} MiB a side, median of {about['repeats']}\n\n{measure.table(columns, lines)}\n"


def report(device: Device, arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    until = began + arguments.seconds
    info = device.info
    about = {
        "device": info.name,
        "uuid": info.uuid,
        "driver": info.driver,
        "runtime": info.runtime,
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "mib": arguments.mib,
        "repeats": arguments.repeats,
        "host_shim": info.host,
    }
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.sweep:
            found = list(sweep(device, arguments.mib << 20, arguments.repeats, until, Path(scratch)))
            (out / "sweep.json").write_text(json.dumps({**about, "sweep": found}, indent=1) + "\n")
            best = {work: max(found, key=lambda entry: entry["shares"].get(work, 0)) for work in SWEPT}
            for work, entry in best.items():
                print(work, entry["shares"][work], {k: v for k, v in entry.items() if k != "shares"})
            return 0
        works = [work for work in WORKS.values() if not arguments.kernel or work.kernel in arguments.kernel]
        contest = Contest(device, arguments.mib << 20, arguments.repeats, until, cub_library(device, Path(scratch)))
        for _ in range(bench.PASSES):
            contest.run_pass(works)
    rows = contest.found.rows()
    seconds = round(time.monotonic() - began, 1)
    document = {
        **about,
        "seconds": seconds,
        "faults": contest.faults,
        "missing": sorted(contest.missing),
        "rows": [row._asdict() for row in rows],
    }
    (out / "kernels.json").write_text(json.dumps(document, indent=1) + "\n")
    text = markdown(rows, about)
    (out / "kernels.md").write_text(text)
    print(
        text, *contest.faults, *(f"not measured: {name}" for name in sorted(contest.missing)), f"{seconds} s", sep="\n"
    )
    return 1 if contest.faults else 0


def main(words: Sequence[str] | None = None, device: Device | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the kernels beside their peers.")
    parser.add_argument("--out", required=True, help="folder for kernels.json and kernels.md, or sweep.json")
    parser.add_argument("--mib", type=int, default=1024, help="MiB of each side")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=480, help="no peer is begun after so many")
    parser.add_argument("--kernel", action="append", choices=sorted({kernel for kernel, _ in workloads.WORKS}))
    parser.add_argument("--sweep", action="store_true")
    return report(device or choose.open_device(), parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
