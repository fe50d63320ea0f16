"""The ground on which faults are tried: a small checkpoint, one command, and what must hold after any fault.

Invariant I: the source is as it was; the output's name is absent, old and whole, or new and whole; nothing lies beside
it but our staging folder; the same command, given again, ends with the bytes of an undisturbed run and leaves nothing
beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import exchanging
import numpy as np
import pytest
import safetensors.numpy

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "fixtures" / "dcp" / "tp2_dp2"

Snapshot = dict[str, tuple[Any, ...]]


def snapshot(folder: Path, *, times: bool = False) -> Snapshot:
    """Every path below `folder` (and itself) with type, mode, link target or content; times: mtime and inode too."""
    out: Snapshot = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        info = path.lstat()
        row: list[Any] = [stat.S_IFMT(info.st_mode), stat.S_IMODE(info.st_mode)]
        if stat.S_ISREG(info.st_mode):
            row.append(path.read_bytes())
        elif stat.S_ISLNK(info.st_mode):
            row.append(os.readlink(path))
        if times:
            row += [info.st_mtime_ns, info.st_ino]
        out[str(path.relative_to(folder))] = tuple(row)
    return out


class Ran(NamedTuple):
    """One run. status: exit code, or minus the signal. error: the JSON object on stderr, {} where there is none."""

    status: int
    out: str
    err: str
    ops: list[str]

    @property
    def error(self) -> dict[str, Any]:
        for line in reversed(self.err.splitlines()):
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line).get("error", {})
                return found
        return {}


class FaultServer:
    """The process of `fault_server.py`."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fault_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self._reply() == "ready"

    def _reply(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the fault server died"
        return line.strip()

    def run(
        self, args: list[str], *, under: Path, uid: int = 0, limits: dict[str, int] | None = None, **fault: Any
    ) -> Ran:
        """One run in a forked process. uid: give up root for it. limits: RLIMIT_* names and values."""
        files = {name: self._work / name for name in ("out", "err", "ops")}
        job = {
            "args": args,
            "under": str(under),
            "fault": fault,
            "uid": uid,
            "limits": limits,
            **{name: str(path) for name, path in files.items()},
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        status = json.loads(self._reply())["status"]
        texts = {name: path.read_text(errors="replace") for name, path in files.items()}
        return Ran(status, texts["out"], texts["err"], texts["ops"].splitlines())

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(10)


class Ground:
    """One command on one small checkpoint, in folders of its own.

    source: what is read. place: the folder in which the output shall appear. kind: `folder`, `file` (the output is one
    file) or `force` (an older output is replaced).
    """

    def __init__(
        self, root: Path, server: FaultServer, kind: str, source: Path = FIXTURE, to: Sequence[str] = ()
    ) -> None:
        self.root = root
        self.server = server
        self.kind = kind
        self.fixture = source
        self.source = root / "source"
        self.place = root / "place"
        shutil.copytree(source, self.source)
        self.final = self.place / ("out.safetensors" if kind == "file" else "out")
        to = to or (["--to", "safetensors"] if kind == "file" else ["--to", "sharded", "--tp", "2"])
        self.args = ["convert", str(self.source), str(self.final), *to, "--threads", "2", "--json", "-q"]
        self.source_before = snapshot(self.source, times=True)
        self.old: Snapshot | None = None
        self.reset()
        if kind == "force":
            done = self.run()
            assert done.status == 0, done.err
            kept = root / "old"
            os.rename(self.final, kept)
            (kept / "README.md").write_bytes(b"older")  # a side file, which the old output's reader knows
            self.old = snapshot(kept)
            self.args.append("--force")
            self.reset()
        done = self.run()
        assert done.status == 0, done.err
        self.operations = done.ops
        self.new = snapshot(self.final)
        self.check_clean()

    def reset(self, *, source: bool = False) -> None:
        """The state before the command. source: lay a fresh source too."""
        if source:
            shutil.rmtree(self.source)
            shutil.copytree(self.fixture, self.source)
            self.source_before = snapshot(self.source, times=True)
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        if self.old is not None:
            shutil.copytree(self.root / "old", self.final)

    def run(self, *extra: str, **fault: Any) -> Ran:
        """The command, in a forked process, with a fault."""
        return self.server.run([*self.args, *extra], under=self.place, **fault)

    # -- invariant I ----------------------------------------------------------------------------------------------

    def state(self) -> str:
        """`absent`, `old` or `new`; fails when the final name holds anything else."""
        if not os.path.lexists(self.final):
            return "absent"
        have = snapshot(self.final)
        if have == self.new:
            return "new"
        assert have == self.old, f"the output is neither the old one nor the new one: {sorted(have)}"
        return "old"

    def check_invariant(self) -> str:
        """After any fault: the source untouched, the name whole, only our staging folder beside it."""
        assert snapshot(self.source, times=True) == self.source_before, "the source was touched"
        beside = set(os.listdir(self.place)) - {self.final.name}
        hidden = {name for name in beside if exchanging.set_aside_as(name) == self.final.name}
        if hidden and not exchanging.HAS_RENAMEAT2:
            beside -= hidden
            for name in hidden:
                left = {f"out/{path}": row for path, row in snapshot(self.place / name).items()}
                old = {f"out/{path}": row for path, row in (self.old or {}).items()}
                assert exchanging.is_left_of(left, old, replaced=self.state() == "new")
        assert beside <= {f".{self.final.name}.ckpt-partial"}, f"left beside the output: {beside}"
        state = self.state()
        if state == "absent" and hidden and not exchanging.HAS_RENAMEAT2:
            print(exchanging.WEAKER)
        elif self.kind == "force":
            assert state != "absent", "the old output was lost before the new one was there"
        return state

    def check_clean(self) -> None:
        """After a run that ended well: nothing beside the output."""
        assert self.state() == "new"
        assert os.listdir(self.place) == [self.final.name], f"left beside the output: {os.listdir(self.place)}"

    def check_recovery(self) -> None:
        """The same command again ends with the bytes of an undisturbed run."""
        before = self.check_invariant()
        again = self.run()
        if before == "new" and self.kind != "force":
            assert (again.status, again.error["code"]) == (5, "E0501"), again.err
        else:
            assert again.status == 0, again.err
        if not exchanging.HAS_RENAMEAT2:
            self.server.run(["clean", str(self.place), "--remove", "-q"], under=self.place)
        self.check_clean()
        assert snapshot(self.source, times=True) == self.source_before, "the source was touched"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    process = FaultServer(tmp_path_factory.mktemp("server"))
    yield process
    process.close()


@pytest.fixture(scope="module", params=["folder", "file", "force"])
def ground(request: pytest.FixtureRequest, server: FaultServer, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """Each kind of output in turn."""
    return Ground(tmp_path_factory.mktemp(request.param), server, request.param)


@pytest.fixture(scope="module")
def folder_ground(server: FaultServer, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground(tmp_path_factory.mktemp("folder_only"), server, "folder")


# Training states whose files each hold what several ranks or parameters have, and what is made on the way: the fixture,
# and what it becomes.
RANKED = {
    "deepspeed": ("deepspeed/z2_align_dp4", ["--to", "deepspeed", "--dp", "3", "--zero", "1"]),
    "deepspeed-universal": ("deepspeed/z1_fp16_dp2", ["--to", "deepspeed-universal"]),
    "megatron": ("megatron/moe_tp2ep2etp1", ["--to", "megatron", "--tp", "1", "--pp", "2", "--ep", "2", "--dp", "2"]),
    "megatron-dist": ("megatron-dist/moe_ep2_flat", ["--to", "megatron-dist", "--ep", "1", "--dp", "2"]),
    "paddle": ("paddle/llama_bf16_legacy_tp2", ["--to", "paddle", "--pp", "2", "--dp", "2", "--sharding", "v2"]),
    "paddle-unified": ("paddle/ernie_bf16_io_tp2sd2v2", ["--to", "paddle-unified"]),
    "paddle-flex": ("paddle-unified/llama_tied_hf", ["--to", "paddle-flex", "--tp", "2", "--dp", "2"]),
    # what is computed on the way, and containers whose last file has the checksums or places of the others
    "gguf": ("gguf-made/llama3", ["--to", "gguf", "--max-shard-size", "20000"]),
    "gguf-type": ("gguf-made/llama3", ["--to", "gguf", "--gguf-type", "q8_0"]),
    "orbax": ("dcp/tp2_dp2", ["--to", "orbax"]),
    "quantize": ("gguf-made/llama3", ["--to", "safetensors", "--quantize", "fp8-block", "--max-shard-size", "20000"]),
    "repack": ("quantized-inputs/gptq_int4", ["--to", "safetensors", "--repack", "compressed-tensors"]),
    "dequantize": ("quantized/bnb_nf4", ["--to", "safetensors", "--dequantize"]),
}


@pytest.fixture(scope="module", params=list(RANKED))
def ranked_ground(
    request: pytest.FixtureRequest, server: FaultServer, tmp_path_factory: pytest.TempPathFactory
) -> Ground:
    """Each format of Megatron's, DeepSpeed's and Paddle's as the output, GGUF, Orbax, and weights that are computed."""
    fixture, to = RANKED[request.param]
    return Ground(tmp_path_factory.mktemp(request.param), server, "folder", ROOT / "fixtures" / fixture, to)


class MergeGround(Ground):
    """`merge --method dare-ties` of two models and their base, which lie side by side in the source."""

    def run(self, *extra: str, **fault: Any) -> Ran:
        base, *models = (str(self.source / f"{name}.safetensors") for name in ("base", "a", "b"))
        args = ["merge", *models, str(self.final), "--method", "dare-ties", "--base", base, "--density", "0.5"]
        seed = [] if "--seed" in extra else ["--seed", "3"]
        options = [*seed, "--threads", "2", "--json", "-q"]
        return self.server.run([*args, *options, *extra], under=self.place, **fault)


@pytest.fixture(scope="module")
def merge_ground(server: FaultServer, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    folder = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(0)
    base = {f"w{k}": rng.normal(size=(300, 500)).astype(np.float32) for k in range(4)}
    for name in ("base", "a", "b"):
        grown = {key: w + (name != "base") * rng.normal(0, 0.1, w.shape).astype(np.float32) for key, w in base.items()}
        safetensors.numpy.save_file(grown, folder / f"{name}.safetensors")
    return MergeGround(tmp_path_factory.mktemp("merge"), server, "folder", folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB; skips where mounting is not permitted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "ckpt-test", str(disk)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a tmpfs can't be mounted here: {done.stderr.strip()}")
    yield disk
    with contextlib.suppress(subprocess.CalledProcessError):
        subprocess.run(["umount", "-l", str(disk)], check=True)
