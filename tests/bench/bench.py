"""The benchmark: every job against `cp -r` of the same bytes and against what a user would run instead, in turns.

    python tests/bench/bench.py --size 2GB                     all jobs, 5 rounds, one table
    python tests/bench/bench.py --size 200MB --rounds 1 --only 'tp8'

The sources are built once below `--work` (random finite bytes, Llama's names and proportions; `synthetic.py`) and are
in the page cache when they are read. In each round `cp -r`, this tool (without and with fsync) and the peers run one
after the other as whole processes; every output is compared with a reference and removed before the next. The reference
is this tool's first output, which the real library judges against the source before anything is timed (`peers.py
same-*`).

Columns: wall and CPU in seconds (medians); `x cp`: the median of the rounds' ratios to `cp -r` of the output, and for
merges of models of all that they read (with fsync: to `cp -r` and an fsync of every file); `start`: peak memory above
that of the same command on a checkpoint of 3 MB; `faster`, `leaner`: the peer's wall and peak memory as multiples of
ours without fsync; `verified`: bytes that the judge compared.

It does not measure cold caches, remote stores or many machines; `scale.py` has the metadata at scale.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import measure
from measure import Contestant, Failed, Sample, in_turns, median, median_ratio, say

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = sys.executable
CKPT = [PYTHON, "-m", "ckpt_tool"]
FSYNC = "ckpt --fsync"
NO_FSYNC = "ckpt --no-fsync"
CP = "cp"
CP_FSYNC = "cp and fsync"
TINY = "3MB"

# The same command with the executor's fsync off, for builds whose command line has no --no-fsync: all of them older
# than `executor.RunOptions`.
WITHOUT_FSYNC = """
import functools, sys
from ckpt_tool.run import executor
plain = executor.Executor.__init__
executor.Executor.__init__ = lambda self, *a, **k: plain(self, *a, **{**k, "fsync": False})
from ckpt_tool.cli import run
sys.exit(run(sys.argv[1:]))
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """A command of `peers.py`. arguments: {src} and {out} stand for paths. judge: as of a job, () for none."""

    label: str
    arguments: tuple[str, ...]
    judge: tuple[str, ...] = ()
    file: bool = False  # the output is one file


@dataclass(frozen=True, slots=True)
class Job:
    """A line of the table. source: a name of `SOURCES`. ours: the command line, {src} and {out} stand for paths.

    judge: a command of `peers.py` that holds the output against `truth`, a name of `SOURCES`.
    """

    name: str
    source: str
    ours: tuple[str, ...]
    judge: tuple[str, ...]
    peers: tuple[Peer, ...] = ()
    file: bool = False  # the output is one file
    needs: frozenset[str] = field(default_factory=frozenset)
    copied: tuple[str, ...] = ()  # names of `SOURCES` that `cp` copies; () for the output


JOBS = (
    Job(
        "reshard tp8 -> tp2",
        "tp8",
        ("reshard", "{src}", "{out}", "--tp", "2"),
        ("same-tp", "{hf}", "{out}", "2"),
        (Peer("torch.cat script", ("cat", "{src}", "{out}", "2"), ("same-tp", "{hf}", "{out}", "2")),),
    ),
    Job(
        "reshard tp2 -> tp8",
        "tp2",
        ("reshard", "{src}", "{out}", "--tp", "8"),
        ("same-tp", "{hf}", "{out}", "8"),
        (Peer("torch.cat script", ("cat", "{src}", "{out}", "8"), ("same-tp", "{hf}", "{out}", "8")),),
    ),
    Job(
        "dcp 4 -> 3 ranks, AdamW",
        "dcp4",
        ("reshard", "{src}", "{out}", "--dp", "3"),
        ("same-dcp", "{training}", "{out}"),
        (
            Peer(
                "dcp_to_torch_save, torch_save_to_dcp",
                ("dcp-to-dcp", "{src}", "{out}"),
                ("same-dcp", "{training}", "{out}"),
            ),
        ),
    ),
    Job(
        "dcp -> torch",
        "dcp4",
        ("convert", "{src}", "{out}", "--to", "torch"),
        ("same-torch", "{training}", "{out}"),
        (
            Peer(
                "dcp_to_torch_save",
                ("dcp-to-torch", "{src}", "{out}"),
                ("same-torch", "{training}", "{out}"),
                file=True,
            ),
        ),
        file=True,
    ),
    Job(
        "dcp -> safetensors",
        "dcp_model",
        ("convert", "{src}", "{out}", "--to", "safetensors"),
        ("same-hf", "{hf}", "{out}"),
        (Peer("dcp_to_torch_save, save_file", ("dcp-to-safetensors", "{src}", "{out}"), ("same-hf", "{hf}", "{out}")),),
    ),
    Job(
        "dcp HF shards -> safetensors",
        "hf_shards",
        ("convert", "{src}", "{out}", "--to", "safetensors", "--max-shard-size", "1TB"),
        ("same-hf", "{hf}", "{out}"),
        (Peer("consolidate_safetensors_files", ("consolidate", "{src}", "{out}"), ("same-hf", "{hf}", "{out}")),),
    ),
    Job(
        "safetensors -> smaller files",
        "hf",
        ("convert", "{src}", "{out}", "--to", "safetensors", "--max-shard-size", "{shard}"),
        ("same-hf", "{hf}", "{out}"),
        (
            Peer(
                "from_pretrained, save_pretrained",
                ("transformers", "{src}", "{out}", "{shard}"),
                ("same-hf", "{hf}", "{out}"),
            ),
        ),
    ),
    Job(
        "transposed Linear weights",
        "transposed",
        ("convert", "{src}", "{out}", "--to", "safetensors", "--max-shard-size", "{shard}"),
        ("same-hf", "{hf}", "{out}"),
        (Peer("torch.load, contiguous, save_file", ("contiguous", "{src}", "{out}"), ("same-hf", "{hf}", "{out}")),),
    ),
    Job(  # the line is Paddle's, both files Hugging Face's: transposed on both sides
        "safetensors -> paddle-unified",
        "hf",
        ("convert", "{src}", "{out}", "--to", "paddle-unified"),
        ("same-hf", "{hf}", "{out}"),
    ),
    Job(  # Hugging Face's names to Megatron's: QKV by group, gate and up in one, four tensor ranks
        "hf -> megatron tp4",
        "hf",
        ("convert", "{src}", "{out}", "--to", "megatron", "--tp", "4"),
        ("same-megatron", "{hf}", "{out}", "4"),
        (
            Peer(
                "safetensors, torch.cat, torch.save",
                ("to-megatron", "{src}", "{out}", "4"),
                ("same-megatron", "{hf}", "{out}", "4"),
            ),
        ),
    ),
    Job(  # every Linear transposed once
        "hf -> paddle",
        "hf",
        ("convert", "{src}", "{out}", "--to", "paddle"),
        ("same-paddle", "{hf}", "{out}"),
        (Peer("safetensors, NumPy, pickle", ("to-paddle", "{src}", "{out}"), ("same-paddle", "{hf}", "{out}")),),
    ),
    Job(  # every Linear twice read: for its scales, and for its codes
        "bf16 -> fp8 blocks",
        "hf",
        ("convert", "{src}", "{out}", "--to", "safetensors", "--quantize", "fp8-block"),
        ("same-fp8", "{hf}", "{out}"),
        (Peer("torch by blocks, save_file", ("to-fp8", "{src}", "{out}"), ("same-fp8", "{hf}", "{out}")),),
        copied=("hf",),
    ),
    Job(  # rank 16 on every Linear
        "merge a LoRA",
        "hf",
        ("merge", "{src}", "{adapter}", "{out}", "--method", "lora"),
        ("same-folded", "{hf}", "{adapter}", "{out}"),
        (
            Peer(
                "PEFT, merge_and_unload",
                ("fold-by-peft", "{src}", "{adapter}", "{out}"),
                ("same-folded", "{hf}", "{adapter}", "{out}"),
            ),
        ),
    ),
    Job(  # 0.3 and 0.7 of two models
        "linear merge of two",
        "hf",
        ("merge", "{src}", "{grown1}", "{out}", "--method", "linear", "--weight", "0.3", "--weight", "0.7"),
        ("same-merged", "linear", "{out}", "{hf}", "{grown1}"),
        (
            Peer(
                "mergekit",
                ("mergekit", "linear", "{out}", "{hf}", "{grown1}"),
                ("same-merged", "linear", "{out}", "{hf}", "{grown1}"),
            ),
        ),
        copied=("hf", "grown1"),
    ),
    Job(  # thresholds of whole tensors: every input is read three times
        "ties of a base and two",
        "hf",
        ("merge", "{grown1}", "{grown2}", "{out}", "--method", "ties", "--base", "{src}", "--density", "0.5"),
        ("same-merged", "ties", "{out}", "{hf}", "{grown1}", "{grown2}"),
        (
            Peer(
                "mergekit",
                ("mergekit", "ties", "{out}", "{hf}", "{grown1}", "{grown2}"),
                ("same-merged", "ties", "{out}", "{hf}", "{grown1}", "{grown2}"),
            ),
        ),
        copied=("hf", "grown1", "grown2"),
    ),
)


class Sources:
    """The checkpoints that the jobs read, each built when first asked for and kept below `folder`."""

    def __init__(self, folder: Path, size: str) -> None:
        self.folder = folder / size
        self.size = size

    def path(self, name: str) -> Path:
        """The source `name`, built if it is not there."""
        path = self.folder / name
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            say(f"building {path}")
            partial = self.folder / f"{name}.partial"
            measure.remove(partial)
            for command in self._recipe(name, partial):
                measure.run(command)
            partial.rename(path)
        return path

    def _recipe(self, name: str, out: Path) -> list[list[str]]:
        make = [PYTHON, str(HERE / "synthetic.py")]
        peer = [PYTHON, str(HERE / "peers.py")]
        convert = [*CKPT, "convert", "-q"]
        if name in ("hf", "training"):
            return [[*make, name, self.size, str(out)]]
        if name in ("tp8", "tp2"):
            hf = str(self.path("hf"))
            command = [*convert, hf, str(out), "--to", "sharded", "--tp", name[2:]]
            return [command, [*peer, "same-tp", hf, str(out), name[2:]]]
        if name == "dcp4":
            training = str(self.path("training"))
            command = [*convert, training, str(out), "--to", "dcp", "--dp", "4"]
            return [command, [*peer, "same-dcp", training, str(out)]]
        if name == "dcp_model":
            return [[*convert, str(self.path("hf")), str(out), "--to", "dcp", "--dp", "4"]]
        if name == "hf_shards":
            return [[*peer, "build-hf-shards", str(self.path("hf")), str(out)]]
        if name == "adapter":
            return [[*peer, "build-adapter", str(self.path("hf")), str(out), "16"]]
        if name in ("grown1", "grown2"):
            return [[*peer, "build-grown", str(self.path("hf")), str(out), name[5:]]]
        if name == "transposed":
            return [[*peer, "build-transposed", str(self.path("hf")), str(out)]]
        raise KeyError(name)

    def fill(self, arguments: tuple[str, ...], job: Job, out: Path) -> list[str]:
        """The arguments with {src}, {out}, {hf}, {training} and {shard} filled in."""
        known: dict[str, Callable[[], str]] = {
            "{src}": lambda: str(self.path(job.source)),
            "{out}": lambda: str(out),
            "{hf}": lambda: str(self.path("hf")),
            "{training}": lambda: str(self.path("training")),
            "{adapter}": lambda: str(self.path("adapter")),
            "{grown1}": lambda: str(self.path("grown1")),
            "{grown2}": lambda: str(self.path("grown2")),
            "{shard}": lambda: "500MB" if self.size != TINY else "1MB",
        }
        return [known[each]() if each in known else each for each in arguments]


@dataclass(frozen=True, slots=True)
class Options:
    work: Path
    size: str
    rounds: int
    peer_rounds: int | None
    peers: bool
    fsync: tuple[bool, ...]  # which modes are measured
    has_no_fsync: bool  # the command line knows --no-fsync


def ours(job: Job, sources: Sources, out: Path, *, fsync: bool, options: Options) -> list[str]:
    arguments = [*sources.fill(job.ours, job, out), "-q"]
    if fsync:
        return [*CKPT, *arguments]
    if options.has_no_fsync:
        return [*CKPT, *arguments, "--no-fsync"]
    return [PYTHON, "-c", WITHOUT_FSYNC, *arguments]


def judge(job: Job, arguments: tuple[str, ...], sources: Sources, out: Path) -> int:
    """Bytes that the real library compared. Raises Failed where one differs."""
    command = [PYTHON, str(HERE / "peers.py"), *sources.fill(arguments, job, out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(command)}: {done.stderr[-500:]}")
    return int(done.stdout.split()[-1])


def same_bytes(reference: Path) -> Callable[[Path], None]:
    """A check that an output is, byte for byte, the reference."""

    def check(out: Path) -> None:
        done = subprocess.run(["diff", "-rq", str(reference), str(out)], capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"an output differs from the one that was judged: {done.stdout[:500]}{done.stderr[:500]}")

    return check


def start_up(job: Job, options: Options) -> int:
    """Peak memory in bytes of the same command on a tiny checkpoint."""
    tiny = Sources(options.work, TINY)
    out = tiny.folder / f"out{'.pt' if job.file else ''}"
    measure.remove(out)
    tiny.path(job.source)
    sample = measure.run(ours(job, tiny, out, fsync=True, options=options))
    measure.remove(out)
    return sample.peak


@dataclass(frozen=True, slots=True)
class Measured:
    """A job's samples by contestant. verified: bytes that the judge compared. start: bytes of peak memory at
    start-up."""

    job: Job
    samples: dict[str, list[Sample]]
    verified: int
    start: int


def measured(job: Job, options: Options) -> Measured:
    sources = Sources(options.work, options.size)
    suffix = ".pt" if job.file else ""
    reference = sources.folder / f"reference{suffix}"
    out = sources.folder / f"out{suffix}"
    sources.path(job.source)
    start = start_up(job, options)
    measure.remove(reference)
    measure.run(ours(job, sources, reference, fsync=True, options=options))
    verified = judge(job, job.judge, sources, reference)
    say(f"{job.name}: {verified:,} bytes verified; {measure.machine(options.work)}")
    copy = f'cp -r "{reference}" "{out}"'
    if job.copied:
        copy = f'mkdir "{out}" && cp -r {" ".join(shlex.quote(str(sources.path(name))) for name in job.copied)} "{out}"'
    contestants = [Contestant(CP, ["sh", "-c", copy], out)]
    fsync_all = f'{copy} && find "{out}" -type f -exec sync {{}} +'
    for fsync in options.fsync:
        if fsync:
            contestants.append(Contestant(CP_FSYNC, ["sh", "-c", fsync_all], out))
        command = ours(job, sources, out, fsync=fsync, options=options)
        contestants.append(Contestant(FSYNC if fsync else NO_FSYNC, command, out, same_bytes(reference)))
    judged: set[str] = set()

    def judge_once(peer: Peer) -> Callable[[Path], None]:
        def check(path: Path) -> None:
            if peer.label not in judged and peer.judge:
                judge(job, peer.judge, sources, path)
                judged.add(peer.label)

        return check

    for peer in job.peers if options.peers else ():
        path = sources.folder / f"peer{'.pt' if peer.file else ''}"
        command = [PYTHON, str(HERE / "peers.py"), *sources.fill(peer.arguments, job, path)]
        contestants.append(Contestant(peer.label, command, path, judge_once(peer), options.peer_rounds))
    try:
        return Measured(job, in_turns(contestants, options.rounds), verified, start)
    finally:
        measure.remove(reference)
        measure.remove(out)


COLUMNS = (
    "job",
    "fsync",
    "wall s",
    "x cp",
    "CPU s",
    "CPU x cp",
    "peak MiB",
    "above start",
    "peer",
    "peer wall s",
    "peer MiB",
    "faster",
    "leaner",
    "verified",
)


def rows(result: Measured) -> list[list[str]]:
    found = []
    for name, base in ((NO_FSYNC, CP), (FSYNC, CP_FSYNC)):
        samples = result.samples.get(name)
        if not samples:
            continue
        peak = median(samples, "peak")
        row = [
            result.job.name,
            "yes" if name == FSYNC else "no",
            f"{median(samples, 'wall'):.2f}",
            f"{median_ratio(samples, result.samples[base], 'wall'):.2f}",
            f"{median(samples, 'cpu'):.2f}",
            f"{median_ratio(samples, result.samples[base], 'cpu'):.2f}",
            f"{peak / 2**20:.0f}",
            f"{(peak - result.start) / 2**20:.0f}",
        ]
        peers = [peer for peer in result.job.peers if result.samples.get(peer.label)]
        for peer in peers:
            theirs = result.samples[peer.label]
            row += [
                peer.label,
                f"{median(theirs, 'wall'):.2f}",
                f"{median(theirs, 'peak') / 2**20:.0f}",
                f"{median_ratio(theirs, samples, 'wall'):.1f}x",
                f"{median(theirs, 'peak') / peak:.1f}x",
            ]
        row += ["-"] * (5 if not peers else 0)
        found.append([*row, f"{result.verified / 1e6:,.0f} MB"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", default="2GB", help="bytes of the model or the training state (default 2GB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-rounds", type=int, help="rounds of the peers, where they take too long")
    parser.add_argument("--only", default="*", metavar="NAME", help="jobs whose name holds this, or matches this glob")
    parser.add_argument("--no-peers", action="store_true", help="against cp alone")
    parser.add_argument("--fsync", action=argparse.BooleanOptionalAction, help="one mode alone (default: both)")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ckpt-bench")
    parser.add_argument("--json", type=Path, help="write the samples here too")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    measure.as_installed(ROOT, given.work)
    options = Options(
        given.work,
        given.size,
        given.rounds,
        given.peer_rounds,
        not given.no_peers,
        (False, True) if given.fsync is None else (given.fsync,),
        _knows_no_fsync(),
    )
    chosen = [job for job in JOBS if given.only in job.name or fnmatch.fnmatch(job.name, given.only)]
    if not chosen:
        raise SystemExit(f"no job is called {given.only!r}; there are: {', '.join(job.name for job in JOBS)}")
    found = []
    results = []
    failed = []
    for job in chosen:
        try:
            result = measured(job, options)
        except Failed as fault:
            say(f"FAILED: {job.name}: {fault}")
            failed.append(job.name)
            continue
        found += rows(result)
        results.append(
            {
                "job": job.name,
                "verified": result.verified,
                "start": result.start,
                "samples": {name: [s._asdict() for s in every] for name, every in result.samples.items()},
            }
        )
        say(measure.table(COLUMNS, rows(result)))
    print(f"{options.size}, {options.rounds} rounds, warm cache; {measure.machine(options.work)}\n")
    print(measure.table(COLUMNS, found))
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))
    return 1 if failed else 0


def _knows_no_fsync() -> bool:
    done = subprocess.run([*CKPT, "reshard", "--help"], capture_output=True, text=True, cwd=ROOT)
    return "--no-fsync" in done.stdout


if __name__ == "__main__":
    sys.exit(main())
