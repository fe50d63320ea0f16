"""SIGKILL at every file operation, by two roads: in the process (every operation of every thread) and by strace.

After each kill invariant I must hold, and the same command must end with the bytes of an undisturbed run. The default
run kills at every operation of a small run in forked processes (tens of milliseconds each); `-m crash` adds the
kernel's own view by strace on real `python -m ckpt_tool` processes, and 200 kills at random moments of a larger run.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from exchanging import HAS_RENAMEAT2

ROOT = Path(__file__).resolve().parents[2]
KILLED = -signal.SIGKILL


# -- in the process: every operation ------------------------------------------------------------------------------


def kill_everywhere(ground: Any, how: str, places: Iterable[int]) -> dict[str, int]:
    """Kill at each of `places` in turn; what was found after the kills. Stops where a run has no such operation."""
    seen: dict[str, int] = {}
    for at in places:
        ground.reset()
        done = ground.run(at=at, do=how, op=None if how == "kill" else "write,pwrite")
        if done.status != KILLED:
            assert done.status == 0, done.err
            break
        where = f"{how} at operation {at} ({done.ops[-1]})"
        try:
            state = ground.check_invariant()
            seen[state] = seen.get(state, 0) + 1
            ground.check_recovery()
        except AssertionError as e:
            raise AssertionError(f"after {where}: {e}") from e
    return seen


def kill_after_the_commit(ground: Any) -> None:
    """Kill at the last fsync, which makes the new name durable. The number of all operations is not the same in every
    run (each thread opens the files that it writes), the number of fsyncs is."""
    ground.reset()
    last = sum(op.startswith("fsync ") for op in ground.operations)
    done = ground.run(at=last, do="kill", op="fsync")
    assert (done.status, ground.check_invariant()) == (KILLED, "new"), done.err
    ground.check_recovery()


@pytest.mark.share(3)
@pytest.mark.parametrize("how", ["kill", "tear"])
def test_kills_all_over_a_run_leave_old_or_new(ground: Any, how: str) -> None:
    """G1, G16, G17, a share: some places, more of them at the end, where the commit is. `tear` does half
    of a write first."""
    total = len(ground.operations)
    places = {2, *range(4, total, max(1, total // 7)), *range(max(1, total - 6), total + 1, 2)}
    seen = kill_everywhere(ground, how, sorted(places if how == "kill" else range(1, total, max(1, total // 5))))
    assert seen.get("old" if ground.kind == "force" else "absent", 0) >= 1
    if how == "kill":
        kill_after_the_commit(ground)


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["kill", "tear"])
def test_a_kill_at_every_operation_leaves_old_or_new(ground: Any, how: str) -> None:
    """G1, G16, G17, whole: until there is no Nth operation."""
    seen = kill_everywhere(ground, how, count(1))
    print(f"{how} ({ground.kind}): {sum(seen.values())} kills, {seen}")


@pytest.mark.share(4)
def test_kills_leave_nothing_of_a_training_state_of_ranks(ranked_ground: Any) -> None:
    """The same for the formats of Megatron, DeepSpeed and Paddle: at the beginning, in the data, before and after the
    commit."""
    total = len(ranked_ground.operations)
    seen = kill_everywhere(ranked_ground, "kill", sorted({2, total // 2, 3 * total // 4}))
    assert seen == {"absent": 3}
    kill_after_the_commit(ranked_ground)


def test_a_kill_while_resuming_and_then_another_still_recovers(ground: Any) -> None:
    """Kills on kills: the second run dies too, at another place, and the third finishes."""
    total = len(ground.operations)
    for first, second in [(total // 3, 5), (2 * total // 3, total // 2), (5 * total // 6, 3)]:
        ground.reset()
        assert ground.run(at=first, do="kill").status == KILLED
        ground.check_invariant()
        ground.run(at=second, do="kill")
        ground.check_recovery()


def test_a_killed_run_is_gone_on_with_and_not_started_over(folder_ground: Any) -> None:
    """The second run writes less than the first: finished units are hashed and kept."""
    ground = folder_ground
    ground.reset()
    journal = [i for i, op in enumerate(ground.operations, 1) if op.startswith("write ")]
    assert ground.run(at=journal[-1] + 1, do="kill").status == KILLED
    again = ground.run(at=0, do="none")
    assert again.status == 0
    ground.check_clean()
    first, second = (sum(op.startswith("pwrite") for op in ops) for ops in (ground.operations, again.ops))
    assert second < first
    ground.reset()
    assert ground.run(at=journal[-1] + 1, do="kill").status == KILLED
    fresh = ground.run("--no-resume", at=0, do="none")
    assert fresh.status == 0
    ground.check_clean()
    assert sum(op.startswith("pwrite") for op in fresh.ops) == first


# -- going on from what a kill left, when someone has been at it (G18, G19) ---------------------------------------


@pytest.fixture(scope="module")
def half_done(folder_ground: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The staging folder of a run that was killed when all its units were done and journalled."""
    ground = folder_ground
    journal = [i for i, op in enumerate(ground.operations, 1) if op.startswith("write ")]
    ground.reset()
    assert ground.run(at=journal[-1] + 1, do="kill").status == KILLED
    (left,) = ground.place.iterdir()
    kept = tmp_path_factory.mktemp("half") / "staged"
    shutil.copytree(left, kept)
    return kept


def go_on(ground: Any, half_done: Path, meddle: Callable[[Path], None]) -> Any:
    """Lay the half-done staging folder, let `meddle` change it, run the command: it must end right."""
    ground.reset()
    staged = ground.place / f".{ground.final.name}.ckpt-partial"
    shutil.copytree(half_done, staged)
    meddle(staged)
    done = ground.run(at=0, do="none")
    assert done.status == 0, done.err
    ground.check_clean()
    return done


@pytest.mark.parametrize("how", ["flip", "truncate", "grow", "delete", "swap"])
def test_staged_files_that_were_changed_are_written_again(folder_ground: Any, half_done: Path, how: str) -> None:
    """G18: the journal's word is not enough; every staged byte is hashed again."""
    names = sorted(path.name for path in half_done.glob("*.safetensors"))

    def meddle(staged: Path) -> None:
        for name, other in zip(names, [*names[1:], names[0]], strict=True):
            data = bytearray((half_done / name).read_bytes())
            if how == "flip":
                data[-1] ^= 1
            elif how == "truncate":
                del data[len(data) // 2 :]
            elif how == "grow":
                data += b"more"
            elif how == "swap":
                data = bytearray((half_done / other).read_bytes())
            (staged / name).write_bytes(data)
            if how == "delete":
                (staged / name).unlink()

    go_on(folder_ground, half_done, meddle)


def test_a_journal_cut_anywhere_is_believed_as_far_as_it_goes(folder_ground: Any, half_done: Path) -> None:
    """G19."""
    text = (half_done / ".ckpt-journal").read_bytes()
    for cut in sorted({0, 1, *range(0, len(text), max(1, len(text) // 10)), len(text) - 1}):
        go_on(folder_ground, half_done, lambda staged, cut=cut: (staged / ".ckpt-journal").write_bytes(text[:cut]))  # type: ignore[misc]


JOURNALS = {
    "garbage": lambda lines: [b"\xff\x00garbage", *lines],
    "another plan": lambda lines: [lines[0].replace(b'"plan":"', b'"plan":"0'), *lines[1:]],
    "units twice": lambda lines: [*lines, *lines[1:]],
    "units of no plan": lambda lines: [*lines, b'{"unit":999999,"hashes":[],"leaves":[],"overflows":{}}'],
    "wrong types": lambda lines: [
        lines[0],
        b'{"unit":"0","hashes":5,"leaves":null}',
        b'{"unit":[],"hashes":{}}',
        b"[]",
        b"5",
    ],
    "other leaves": lambda lines: [
        lines[0],
        *(re.sub(rb'"leaves":.*,"over', b'"leaves":[],"over', x) for x in lines[1:]),
    ],
    "leaves of no tensor": lambda lines: [
        lines[0],
        *(re.sub(rb'"leaves":.*,"over', b'"leaves":[[99,0,"AA==",0,"AA=="]],"over', x) for x in lines[1:]),
    ],
    "no base64": lambda lines: [
        lines[0],
        *(re.sub(rb'"leaves":.*,"over', b'"leaves":[[0,0,"*",0,5]],"over', x) for x in lines[1:]),
    ],
}


@pytest.mark.parametrize("how", list(JOURNALS))
def test_a_journal_that_was_edited_never_gives_a_wrong_output(folder_ground: Any, half_done: Path, how: str) -> None:
    """G19: the run ends right or refuses; it never mixes and never calls itself a bug."""
    ground = folder_ground
    ground.reset()
    staged = ground.place / f".{ground.final.name}.ckpt-partial"
    shutil.copytree(half_done, staged)
    lines = (half_done / ".ckpt-journal").read_bytes().splitlines()
    (staged / ".ckpt-journal").write_bytes(b"\n".join(JOURNALS[how](lines)) + b"\n")
    done = ground.run()
    assert done.status in (0, 6, 7), (how, done.status, done.err)
    ground.check_recovery()


def test_other_options_start_over(folder_ground: Any, half_done: Path) -> None:
    """G19: what another plan has staged is wiped, not mixed in."""
    ground = folder_ground
    ground.reset()
    other = [*ground.args, "--dp", "2"]
    assert ground.server.run(other, under=ground.place).status == 0
    want = {path.name: path.read_bytes() for path in ground.final.iterdir()}
    ground.reset()
    shutil.copytree(half_done, ground.place / f".{ground.final.name}.ckpt-partial")
    assert ground.server.run(other, under=ground.place).status == 0
    assert {path.name: path.read_bytes() for path in ground.final.iterdir()} == want
    assert os.listdir(ground.place) == [ground.final.name]


# -- signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "places"),
    # SIGHUP is handled as SIGTERM is, by the same lines: three places show that it is heard
    [
        (signal.SIGTERM, 5),
        (signal.SIGINT, 5),
        (signal.SIGHUP, 2),
        pytest.param(signal.SIGHUP, 5, marks=pytest.mark.slow),
    ],
)
def test_a_signal_at_any_operation_ends_with_its_code_and_resumes(folder_ground: Any, number: int, places: int) -> None:
    """G3: 130 or 143, or 0 when the signal came too late to matter; never a half-made output."""
    ground = folder_ground
    codes = set()
    total = len(ground.operations)
    for at in sorted({*range(1, total + 1, max(1, total // places)), total}):
        ground.reset()
        done = ground.run(at=at, do="stop", number=number)
        codes.add(done.status)
        assert done.status in (0, 130 if number == signal.SIGINT else 143), (at, done.err)
        if done.status:
            assert "resume" in str(done.error.get("hint")) or ground.state() == "new", done.err
        try:
            ground.check_recovery()
        except AssertionError as e:
            raise AssertionError(f"after signal {number} at operation {at} ({ground.operations[at - 1]}): {e}") from e
    assert (130 if number == signal.SIGINT else 143) in codes


# -- from outside: strace on a real process -----------------------------------------------------------------------

SYSCALLS = ("write", "pwrite64", "fsync", "renameat2", "mkdir", "unlink", "fallocate", "close", "openat")


def strace() -> str:
    found = shutil.which("strace")
    if found is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run([found, "-f", "-o", os.devnull, "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"strace can't trace here: {probe.stderr.strip()}")
    return found


def command(ground: Any) -> list[str]:
    args = ["1" if ground.args[i - 1] == "--threads" else arg for i, arg in enumerate(ground.args)]
    return [sys.executable, "-m", "ckpt_tool", *args]


def paths_of(ground: Any) -> list[str]:
    """-P options: strace counts only calls on these paths."""
    staged = ground.place / f".{ground.final.name}.ckpt-partial"
    names = {op.split(" ", 1)[1] for op in ground.operations}
    paths = {ground.place, ground.final, staged, *(ground.place / name for name in names)}
    return [option for path in sorted(map(str, paths)) for option in ("-P", path)]


def kill_by_strace(ground: Any, syscall: str, at: int) -> bool:
    """Kill a real run at its `at`-th `syscall` on the output's paths. False when there are no more."""
    ground.reset()
    done = subprocess.run(
        [
            strace(),
            "-f",
            "-o",
            os.devnull,
            *paths_of(ground),
            "-e",
            f"inject={syscall}:signal=SIGKILL:when={at}",
            *command(ground),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode == 0:
        return False
    assert done.returncode in (KILLED, 137), done.stderr
    try:
        ground.check_recovery()
    except AssertionError as e:
        raise AssertionError(f"after SIGKILL at {syscall} number {at}: {e}") from e
    return True


@pytest.mark.parametrize("syscall", ["fsync", "renameat2" if HAS_RENAMEAT2 else "rename", "write"])
def test_a_few_kills_by_strace(folder_ground: Any, syscall: str) -> None:
    """G1 on real processes, the quick share: the first two calls of three kinds."""
    strace()
    assert kill_by_strace(folder_ground, syscall, 1)
    if not syscall.startswith("rename"):
        assert kill_by_strace(folder_ground, syscall, 2)


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("syscall", SYSCALLS)
def test_every_kill_by_strace(ground: Any, syscall: str) -> None:
    """G1 on real processes: every Nth call of every kind, until there is no Nth."""
    strace()
    at = 1
    while kill_by_strace(ground, syscall, at):
        at += 1
    print(f"{syscall}: {at - 1} kills ({ground.kind})")


# -- at random moments (G2) ---------------------------------------------------------------------------------------


def big_source(folder: Path, nbytes: int) -> Path:
    """A model of several files, large enough that a run takes a while."""
    rows = nbytes // 8 // 1024 // 4
    folder.mkdir()
    for part in range(4):
        tensors = {
            f"model.layers.{part * 2 + i}.mlp.up_proj.weight": np.arange(rows * 1024, dtype=np.float32).reshape(
                rows, 1024
            )
            + part * 2
            + i
            for i in range(2)
        }
        safetensors.numpy.save_file(tensors, folder / f"model-{part + 1:05d}-of-00004.safetensors")
    return folder


def random_kills(root: Path, count: int, nbytes: int, seed: int) -> dict[str, int]:
    """Kill `count` runs of 4 threads at random moments; what state each left, and how the next run ended."""
    source = big_source(root / "source", nbytes)
    place = root / "place"
    good = root / "good"
    place.mkdir()
    args = [sys.executable, "-m", "ckpt_tool", "convert", str(source), "--to", "sharded", "--tp", "2", "--threads", "4"]
    args += ["-q", "--json"]
    began = time.monotonic()
    subprocess.run([*args, str(good)], cwd=ROOT, check=True, capture_output=True)
    took = time.monotonic() - began
    want = {path.name: path.read_bytes() for path in good.iterdir()}
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in source.iterdir()}
    rng = random.Random(seed)
    seen = {"absent": 0, "new": 0, "resumed": 0, "finished in time": 0}
    final = place / "out"
    for number in range(count):
        process = subprocess.Popen([*args, str(final)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(rng.uniform(0.15 * took, 1.1 * took))
        process.kill()
        assert process.stderr is not None
        message = process.stderr.read()
        status = process.wait()
        process.stderr.close()
        assert status in (KILLED, 0), message
        beside = set(os.listdir(place)) - {"out"}
        assert beside <= {".out.ckpt-partial"}, (number, beside)
        if status == 0:
            seen["finished in time"] += 1
        if final.exists():
            seen["new"] += 1
            assert {path.name: path.read_bytes() for path in final.iterdir()} == want, f"kill {number}: a broken output"
        else:
            seen["absent"] += 1
            if rng.random() < 0.5:
                continue  # leave it for the next kill to go on from
            done = subprocess.run([*args, str(final)], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, f"kill {number}: {done.stderr}"
            assert {path.name: path.read_bytes() for path in final.iterdir()} == want, f"kill {number}: resumed wrongly"
            assert os.listdir(place) == ["out"], f"kill {number}: {os.listdir(place)}"
            seen["resumed"] += 1
        shutil.rmtree(final)
        if seen["new"] and (place / ".out.ckpt-partial").exists():
            assert not any((place / ".out.ckpt-partial").iterdir()), "a finished run left more than an empty folder"
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in source.iterdir()} == before
    return {**seen, "kills": count, "run_ms": round(took * 1000)}


@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_200_kills_at_random_moments_with_4_threads(tmp_path: Path) -> None:
    """G2, with a summary."""
    seed = int(os.environ.get("CKPT_TEST_SEED", "0"))
    summary = random_kills(tmp_path, 200, 96 << 20, seed)
    print(f"random kills, seed {seed}: " + ", ".join(f"{value} {name}" for name, value in summary.items()))
    assert summary["absent"] >= 20, "most kills should come while the run is at work"


def test_a_few_kills_at_random_moments(tmp_path: Path) -> None:
    random_kills(tmp_path, 3, 16 << 20, 1)


# -- power loss (G15), by the order of operations -----------------------------------------------------------------


def test_everything_is_on_disk_before_the_name_appears(ground: Any) -> None:
    """Of the trace of a run: after its last write each file is fsynced, then its folder, then the rename, then the
    parent. A disk that drops all that was not fsynced then holds the old name or the whole new output."""
    ops = [op.split(" ", 1) for op in ground.operations]
    rename = next(i for i, (op, _) in enumerate(ops) if op == "renameat2")
    staged = f".{ground.final.name}.ckpt-partial"
    written = {path for op, path in ops[:rename] if op in ("pwrite", "posix_fallocate") and "journal" not in path}
    assert written
    for path in written:
        last = max(
            i for i, row in enumerate(ops) if row[0] in ("pwrite", "write", "posix_fallocate") and row[1] == path
        )
        assert any(op == "fsync" and where == path and i > last for i, (op, where) in enumerate(ops[:rename])), path
    created = max(
        i for i, (op, path) in enumerate(ops[:rename]) if op in ("open", "unlink") and path.startswith(staged)
    )
    folder = [i for i, (op, path) in enumerate(ops) if op == "fsync" and path == staged]
    assert any(i < rename for i in folder), "the staging folder must be fsynced before the rename"
    assert max(i for i in folder if i < rename) > max(
        i for i, (op, path) in enumerate(ops[:rename]) if op == "unlink" and path.startswith(staged)
    ), "and after the journal is gone"
    assert created < rename
    after = [(op, path) for op, path in ops[rename:] if op == "fsync"]
    assert after and after[0][1] == ".", "the parent must be fsynced after the rename"
    assert not any(op in ("pwrite", "write", "ftruncate") and re.match(r"out", path) for op, path in ops[rename:])
