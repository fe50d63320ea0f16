"""Running a command as a whole process and taking what it cost: wall, CPU, peak memory. Standard library alone.

The idea: on a machine that others use, one number means little and a ratio taken side by side means a lot. So the
contestants of a job run in turns (A B C A B C), each as its own process, and a ratio is the median over the rounds of
the pairs' ratios, not the ratio of two medians:

    rounds = in_turns([Contestant("cp", ...), Contestant("ours", ...)], 5)
    median_ratio(rounds["ours"], rounds["cp"], "wall")

CPU is user + system time of the process and of what it waited for (`os.wait4`). Peak memory is the kernel's high-water
mark of the resident set. A child starts as a copy of its parent, whose mark it inherits: so whoever imports this module
must stay small (no NumPy), and the mark of `cp` is the floor below which nothing is seen (about 12 MiB).

It does not drop caches: everything here is warm. It does not pin cores or change the machine.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Sample(NamedTuple):
    """One run. wall, cpu: seconds. peak: bytes of resident memory. load: the machine's 1-minute load before it."""

    wall: float
    cpu: float
    peak: int
    load: float


class Failed(RuntimeError):
    """A command that did not end with 0. The message holds the end of what it said."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A command and the output it makes. before: prepares a run (untimed). after: looks at the output before it goes.

    times: rounds that it takes part in, None for all of them (a peer that needs minutes may run fewer).
    """

    name: str
    command: Sequence[str]
    output: Path
    after: Callable[[Path], None] | None = None
    times: int | None = None


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None, silent: bool = True) -> Sample:
    """Run `command` to its end. Raises Failed with the last lines of its stderr when it does not end with 0."""
    load = os.getloadavg()[0]
    said = Path(f"/tmp/ckpt-bench-{os.getpid()}.err") if silent else None
    with open(said or os.devnull, "wb") as err, open(os.devnull, "wb") as out:
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=err if silent else None, env=env)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    text = said.read_text("utf-8", "replace") if said else ""
    if said:
        said.unlink()
    if child.returncode:
        raise Failed(f"{' '.join(command)}: exit {child.returncode}\n" + "\n".join(text.splitlines()[-12:]))
    return Sample(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, load)


def in_turns(contestants: Sequence[Contestant], rounds: int) -> dict[str, list[Sample]]:
    """`rounds` rounds; in each every contestant runs once, in turn, and its output is removed after it."""
    samples: dict[str, list[Sample]] = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        for each in contestants:
            if each.times is not None and number >= each.times:
                continue
            remove(each.output)
            settle()
            samples[each.name].append(run(each.command))
            if each.after is not None:
                each.after(each.output)
            remove(each.output)
    return samples


def as_installed(root: Path, work: Path) -> None:
    """Let the processes that are measured find `root` as an installed package: with its bytecode, kept below `work`."""
    os.environ["PYTHONPATH"] = str(root)
    os.environ["PYTHONPYCACHEPREFIX"] = str(work / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def settle() -> None:
    """Wait until what earlier runs wrote is on disk: else the next one pays for it."""
    os.sync()


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def bytes_below(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def median(samples: Sequence[Sample], what: str) -> float:
    return statistics.median(getattr(sample, what) for sample in samples)


def median_ratio(samples: Sequence[Sample], base: Sequence[Sample], what: str) -> float:
    """The median over the rounds that both took part in of (ours / base's)."""
    pairs = list(zip(samples, base, strict=False))
    return statistics.median(getattr(a, what) / max(getattr(b, what), 1e-9) for a, b in pairs)


def machine(folder: Path) -> str:
    """One line: processor, cores, memory, kernel, file system of `folder`, Python, load."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = next((int(line.split()[1]) >> 20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    load = " ".join(f"{x:.2f}" for x in os.getloadavg())
    return (
        f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory} GiB; kernel {platform.release()}; "
        f"{file_system(folder)}; Python {platform.python_version()}; load {load}"
    )


def file_system(folder: Path) -> str:
    """The type of the file system that holds `folder`, by the longest mount point above it."""
    real = str(folder.resolve()) + "/"
    best = ""
    kind = "?"
    for line in _lines("/proc/self/mounts"):
        _, point, name, *_ = line.split()
        if real.startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best = point
            kind = name
    return kind


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text that is a Markdown table too. The first column is flush left, the others right."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join(("-" * (w + 2)) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line(columns), rule, *map(line, rows)])


def say(text: str) -> None:
    """A line of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
