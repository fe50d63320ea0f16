"""Failing disks, full disks, short reads, sources that change, destinations that are not ours.

Each fault must end with its exit code and an error that names the file, invariant I must hold, and the same command,
given again, must end with the bytes of an undisturbed run. Most faults are made in the process at the Nth operation
(see `fault_server.py`); a few are the kernel's own: strace, a tmpfs of 1 MiB, resource limits.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from exchanging import HAS_FALLOCATE

from ckpt_tool.storage.source import identity_of

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534

# kind of operation -> errors that it may meet
ERRORS = {
    "write": ["ENOSPC", "EDQUOT", "EIO"],
    "pwrite": ["ENOSPC", "EDQUOT", "EIO", "EFBIG", "ESTALE"],
    "posix_fallocate": ["ENOSPC", "EIO"],
    "ftruncate": ["EIO"],
    "open": ["EMFILE", "ENOSPC", "EACCES", "ENOMEM", "EIO"],
    "mkdir": ["ENOSPC", "EACCES", "EROFS"],
    "fsync": ["EIO", "ENOSPC"],
    "renameat2": ["EXDEV", "EACCES", "EBUSY", "ENOSPC", "EIO"],
    "unlink": ["EIO"],
    "chmod": ["EPERM"],
    "close": ["EIO", "ENOSPC"],
    "close_ro": ["EIO"],
}


def places(ground: Any, op: str, *, most: int) -> list[int]:
    """Which of a kind's operations to strike: the first, the last, and some between."""
    total = sum(line.startswith(op + " ") for line in ground.operations)
    step = max(1, total // most)
    return sorted({*range(1, total + 1, step), total} - {0})[-most:]


def strike(ground: Any, op: str, at: int, name: str, *, on: bool = False) -> Any:
    """One failing operation; the error's form, the invariant and the recovery are checked here. Where a run has no such
    operation, its last one of that kind fails."""
    fault = {"op": op, "do": "errno", "number": getattr(errno, name), "on": on}
    ground.reset()
    done = ground.run(at=at, **fault)

    # Each thread opens the files that it writes: a run may have fewer operations than the one that was counted.
    while len(done.ops) < at:
        assert done.status == 0, done.err
        at = len(done.ops)
        assert at, f"no {op} at all"
        ground.reset()
        done = ground.run(at=at, **fault)

    where = f"{name} at {op} number {at}{' and on' if on else ''} ({done.ops[at - 1]})"
    harmless = op in ("close_ro", "unlink", "chmod", "open") or "journal" in done.ops[at - 1]
    assert done.status == 7 or (done.status == 0 and harmless), f"{where}: exit {done.status}\n{done.err}"
    if done.status == 7:
        error = done.error
        assert re.fullmatch(r"E07\d\d", error["code"]), (where, error)
        assert error["path"] and error["hint"], (where, error)
        assert done.out == "", where
    try:
        if done.status == 0:  # the operation was one that need not succeed: it came after the commit
            assert ground.check_invariant() == "new"
        ground.check_recovery()
    except AssertionError as e:
        raise AssertionError(f"after {where}: {e}") from e
    return done


CASES = [(op, name) for op, names in ERRORS.items() for name in names]


@pytest.mark.share(3)
@pytest.mark.parametrize(("op", "name"), CASES, ids=lambda x: x)
def test_an_operation_that_fails_once(folder_ground: Any, op: str, name: str) -> None:
    """G4, G5, G6, G9, G12, a share of the places."""
    statuses = {strike(folder_ground, op, at, name).status for at in places(folder_ground, op, most=2)}
    if op not in ("close", "close_ro", "unlink", "chmod"):
        assert statuses == {7}


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("on", [False, True], ids=["once", "and on"])
@pytest.mark.parametrize(("op", "name"), CASES, ids=lambda x: x)
def test_an_operation_that_fails_anywhere(ground: Any, op: str, name: str, on: bool) -> None:
    """G4, G5, G6, G9, G12: every Nth operation of a kind."""
    for at in places(ground, op, most=10**6):
        strike(ground, op, at, name, on=on)


@pytest.mark.share(4)
def test_an_operation_that_fails_in_every_format_of_many_files(ranked_ground: Any) -> None:
    """The same for what is computed, and for formats whose last file has the others' checksums or places: a full disk
    and a bad one, once, at the first, a middle and the last place of each kind."""
    for op in ("pwrite", "write", "fsync", "posix_fallocate", "close"):
        for at in places(ranked_ground, op, most=2):
            strike(ranked_ground, op, at, "ENOSPC" if "write" in op else "EIO")


def test_a_run_with_fewer_operations_than_counted_is_struck_at_its_last(folder_ground: Any) -> None:
    """How often a file is opened and closed depends on which threads write into it."""
    total = sum(line.startswith("fsync ") for line in folder_ground.operations)
    done = strike(folder_ground, "fsync", total + 2, "EIO")
    assert (len(done.ops), done.error["code"]) == (total, "E0707")


def test_a_disk_that_stays_full(folder_ground: Any) -> None:
    """G4: from the Nth write on there is no space."""
    for op in ("pwrite", "posix_fallocate" if HAS_FALLOCATE else "pwrite", "write"):
        done = strike(folder_ground, op, 2, "ENOSPC", on=True)
        assert done.error["code"] == "E0701" and "space" in str(done.error["hint"])


def test_a_name_that_appears_at_the_last_moment(folder_ground: Any) -> None:
    """G9: EEXIST on the commit is exit 5; what appeared is left alone."""
    ground = folder_ground
    ground.reset()
    done = ground.run(op="renameat2", at=1, do="errno", number=errno.EEXIST)
    assert (done.status, done.error["code"]) == (5, "E0505")
    ground.check_recovery()


def test_a_file_system_without_fallocate(folder_ground: Any) -> None:
    folder_ground.reset()
    done = folder_ground.run(op="posix_fallocate", at=1, on=True, do="errno", number=errno.EOPNOTSUPP)
    assert done.status == 0, done.err
    folder_ground.check_clean()


# -- fsync (G7, G8) -----------------------------------------------------------------------------------------------


def test_a_failed_fsync_is_final(ground: Any) -> None:
    """G7: exit 7, the file is not fsynced again in the hope of better news, what was staged is thrown away."""
    files = [op.split(" ", 1)[1] for op in ground.operations if op.startswith("fsync ")]
    for at, path in enumerate(files, 1):
        if path.endswith("ckpt-partial") or path == ".":
            continue  # a folder: below
        ground.reset()
        done = ground.run(op="fsync", at=at, do="errno", number=errno.EIO)
        assert (done.status, done.error["code"]) == (7, "E0700"), done.err
        struck = done.ops[at - 1]
        assert done.ops.count(struck) == 1, f"{struck}: a second fsync would have lied"
        assert not (ground.place / f".{ground.final.name}.ckpt-partial").exists(), "staged bytes can't be trusted now"
        ground.check_recovery()
        if at > 3:
            break


def test_a_failed_fsync_of_a_folder(ground: Any) -> None:
    """G8: before the commit, exit 7 and no new name; after it, exit 7, and the message says that it is complete."""
    folders = [i for i, op in enumerate([o for o in ground.operations if o.startswith("fsync ")], 1)]
    total = len(folders)
    ground.reset()
    before = ground.run(op="fsync", at=total - 1, do="errno", number=errno.EIO)
    assert before.status == 7 and ground.state() == ("old" if ground.kind == "force" else "absent"), before.err
    ground.check_recovery()
    ground.reset()
    after = ground.run(op="fsync", at=total, do="errno", number=errno.EIO)
    assert (after.status, after.error["code"]) == (7, "E0707"), after.err
    assert "complete" in after.error["message"] and "durability" in after.error["hint"]
    assert ground.state() == "new"
    ground.check_recovery()


def whole_calls(trace: str) -> Iterator[str]:
    """The lines of a trace of several threads, a call that another's line has parted as one."""
    begun: dict[str, str] = {}
    for line in trace.splitlines():
        thread, _, call = line.partition(" ")
        resumed = re.match(r"<\.\.\. \w+ resumed>(.*)", call.strip())
        if call.endswith("<unfinished ...>"):
            begun[thread] = call.removesuffix("<unfinished ...>").strip()
        else:
            yield begun.pop(thread, "") + resumed[1] if resumed else call.strip()


def test_a_failed_fsync_as_the_kernel_sees_it(folder_ground: Any, tmp_path: Path) -> None:
    """G7 by strace: of the descriptor whose fsync failed there is no second fsync."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    ground = folder_ground
    log = tmp_path / "trace"
    ground.reset()
    done = subprocess.run(
        [
            "strace",
            "-f",
            "-y",
            "-o",
            str(log),
            "-e",
            "trace=fsync,fdatasync",
            "-e",
            "inject=fsync:error=EIO:when=1",
            sys.executable,
            "-m",
            "ckpt_tool",
            *ground.args,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "ptrace" in done.stderr:
        pytest.skip(f"strace can't trace here: {done.stderr.strip()}")
    assert done.returncode == 7, done.stderr
    calls = re.findall(r"(fsync|fdatasync)\(\d+<([^>]*)>\)\s+= (-?\d)", "\n".join(whole_calls(log.read_text())))
    failed = [path for _, path, result in calls if result == "-1"]
    assert failed and len(failed) == len(set(failed))
    assert not [path for _, path, result in calls if result == "0" and path in failed]
    ground.check_recovery()


# -- a disk that is really full -----------------------------------------------------------------------------------


@pytest.fixture
def tight(folder_ground: Any, small_disk: Path) -> Iterator[tuple[list[str], Path]]:
    """The command with its output on a tmpfs of 1 MiB."""
    place = small_disk / "place"
    place.mkdir()
    args = [str(place / "out") if arg == str(folder_ground.final) else arg for arg in folder_ground.args]
    yield args, place


def test_too_small_a_disk_is_told_before_anything_is_written(server: Any, small_disk: Path, tmp_path: Path) -> None:
    """F4: need and have in the message."""
    source = tmp_path / "source"
    source.mkdir()
    safetensors.numpy.save_file({"w": np.zeros(1 << 19, np.float32)}, source / "model.safetensors")
    done = server.run(["convert", str(source), str(small_disk / "out"), "--to", "sharded", "--json"], under=small_disk)
    assert (done.status, done.error["code"]) == (7, "E0706"), done.err
    numbers = [int(n) for n in re.findall(r"\d{5,}", done.error["message"])]
    assert any(n >= 1 << 21 for n in numbers) and any(n <= 1 << 20 for n in numbers), done.error
    assert os.listdir(small_disk) == [] and done.ops == []


def test_a_disk_without_inodes_is_told_before_anything_is_written(
    server: Any, folder_ground: Any, tmp_path: Path
) -> None:
    disk = tmp_path / "few"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=5", "ckpt-test", str(disk)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"a tmpfs can't be mounted here: {done.stderr.decode().strip()}")
    try:
        args = [str(disk / "out") if arg == str(folder_ground.final) else arg for arg in folder_ground.args]
        ran = server.run(args, under=disk)
        assert (ran.status, ran.error["code"]) == (7, "E0706"), ran.err
        assert "inodes" in ran.error["message"] and os.listdir(disk) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("at", [2, 40, 100])
def test_a_disk_that_another_process_fills_midway(
    server: Any, folder_ground: Any, tight: Any, small_disk: Path, at: int
) -> None:
    """G4 for real: exit 7 or 0 (all was allocated in time); with room again the same command succeeds."""
    args, place = tight
    filler = small_disk / "filler"
    done = server.run(args, under=place, at=at, do="fill", file=str(filler))
    assert filler.stat().st_size > 100_000
    if done.status != 0:
        assert (done.status, done.error["code"]) == (7, "E0701"), done.err
        assert set(os.listdir(place)) <= {".out.ckpt-partial"}
        filler.unlink()
        again = server.run(args, under=place)
        assert again.status == 0, again.err
    assert os.listdir(place) == ["out"]
    have = {path.name: path.read_bytes() for path in (place / "out").iterdir()}
    assert have == {name: row[2] for name, row in folder_ground.new.items() if name != "."}


# -- short and interrupted calls (G10) ----------------------------------------------------------------------------


def test_every_write_of_one_byte(ground: Any) -> None:
    ground.reset()
    done = ground.run(op="write,pwrite,copy_file_range", at=1, on=True, do="short")
    assert done.status == 0, done.err
    ground.check_clean()


def test_every_read_of_one_byte(folder_ground: Any) -> None:
    ground = folder_ground
    ground.reset()
    done = ground.server.run(
        ground.args, under=ground.root, reads=True, op="pread,preadv,read", at=1, on=True, do="short"
    )
    assert done.status == 0, done.err
    ground.check_clean()


def test_short_copies_inside_the_kernel(folder_ground: Any) -> None:
    folder_ground.reset()
    done = folder_ground.run("--verify", "off", op="copy_file_range,pwrite", at=1, on=True, do="short")
    assert done.status == 0, done.err
    new = {name: row for name, row in folder_ground.new.items() if name != "ckpt.index.json"}
    os.remove(folder_ground.final / "ckpt.index.json")  # without digests, as it was asked for
    from_disk = {path.name: path.read_bytes() for path in folder_ground.final.iterdir()}
    assert from_disk == {name: row[2] for name, row in new.items() if name != "."}


def test_interrupted_calls_as_the_kernel_gives_them(folder_ground: Any) -> None:
    """EINTR at every second call of the kinds that can be interrupted, on files (listing a folder is never cut short by
    the kernel, and Python does not ask again there)."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    ground = folder_ground
    ground.reset()
    kinds = ("pwrite64", "pread64", "preadv", "write", "fsync", "openat", "fallocate", "ftruncate")
    names = {op.split(" ", 1)[1] for op in ground.operations}
    paths = [ground.place / name for name in names if not name.endswith((".", "partial"))] + list(
        ground.source.rglob("*.*")
    )
    options = [part for path in sorted(set(map(str, paths))) for part in ("-P", path)]
    options += [part for kind in kinds for part in ("-e", f"inject={kind}:error=EINTR:when=2+2")]
    done = subprocess.run(
        ["strace", "-f", "-o", os.devnull, *options, sys.executable, "-m", "ckpt_tool", *ground.args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "ptrace" in done.stderr:
        pytest.skip(f"strace can't trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    ground.check_clean()


# -- the source (G11, H1) -----------------------------------------------------------------------------------------


def source_reads(ground: Any) -> list[str]:
    """The reads of an undisturbed run, in order."""
    ground.reset()
    done = ground.server.run(ground.args, under=ground.source, reads=True, op="pread,preadv,copy_file_range")
    assert done.status == 0, done.err
    reads: list[str] = done.ops
    return reads


@pytest.mark.parametrize("name", ["EIO", "ESTALE"])
def test_a_source_that_cannot_be_read(folder_ground: Any, name: str) -> None:
    """G11: exit 7 with file and offset, nothing committed, at every read."""
    ground = folder_ground
    total = len(source_reads(ground))
    for at in range(1, total + 1, max(1, total // 4)):
        ground.reset()
        done = ground.server.run(
            ground.args,
            under=ground.source,
            reads=True,
            op="pread,preadv",
            at=at,
            do="errno",
            number=getattr(errno, name),
        )
        assert done.status == 7, (at, done.err)
        error = done.error
        assert error["path"].startswith(str(ground.source)) and error["offset"] is not None, error
        assert ground.check_invariant() == "absent"
        ground.check_recovery()


@pytest.mark.parametrize("how", ["truncate", "grow", "rewrite", "replace"])
def test_a_source_that_changes_while_it_is_read(folder_ground: Any, how: str) -> None:
    """H1: exit 6 once a header was read (3 or 4 while it is read), nothing committed, nothing left."""
    ground = folder_ground
    ops = source_reads(ground)
    total = len(ops)
    planned = next(i for i, op in enumerate(ops, 1) if op.startswith("preadv"))  # headers come by pread
    statuses = []
    try:
        for at in sorted({*range(1, total + 1, max(1, total // 4)), planned - 1, planned, total}):
            ground.reset(source=True)
            done = ground.server.run(
                ground.args, under=ground.source, reads=True, op="pread,preadv,copy_file_range", at=at, do=how
            )
            statuses.append(done.status)
            if at < planned and done.status == 0:  # before its header was read: simply the source as it is
                continue
            assert done.status == 6 or (at < planned and done.status in (3, 4)), (how, at, done.status, done.err)
            assert done.error["path"].startswith(str(ground.source)), done.error
            assert os.listdir(ground.place) == [], (how, at, os.listdir(ground.place))
    finally:
        ground.reset(source=True)
    assert statuses[-1] == 6 and statuses.count(6) >= 3, statuses


def test_a_source_that_is_gone_when_the_run_wants_it(folder_ground: Any, tmp_path: Path) -> None:
    """H3: a file swapped for a link between plan and apply is not followed."""
    ground = folder_ground
    ground.reset()
    plan = tmp_path / "plan.json"
    assert ground.run("--plan", str(plan)).status == 0
    (shard,) = sorted(ground.source.rglob("__0_0.distcp"))
    elsewhere = tmp_path / "elsewhere"
    shutil.copy2(shard, elsewhere)
    shard.unlink()
    shard.symlink_to(elsewhere)
    try:
        done = ground.server.run(["apply", str(plan), "--json"], under=ground.place)
        assert done.status in (4, 6), done.err
        assert os.listdir(ground.place) == []
    finally:
        ground.reset(source=True)


# -- what lies in the way (H4, H5) --------------------------------------------------------------------------------


def staged(ground: Any) -> Path:
    return ground.place / f".{ground.final.name}.ckpt-partial"


@pytest.mark.parametrize(
    "what", ["link to a folder", "dangling link", "file", "fifo", "folder with a stranger's file", "journal link"]
)
def test_a_staging_name_that_is_taken_is_never_followed(ground: Any, tmp_path: Path, what: str) -> None:
    """H4: exit 5 (or 7), what the name leads to is untouched."""
    ground.reset()
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious").write_bytes(b"precious")
    if what == "link to a folder":
        staged(ground).symlink_to(home)
    elif what == "dangling link":
        staged(ground).symlink_to(tmp_path / "nowhere")
    elif what == "file":
        staged(ground).write_bytes(b"a file")
    elif what == "fifo":
        os.mkfifo(staged(ground))
    elif what == "folder with a stranger's file":
        staged(ground).mkdir()
        (staged(ground) / "precious").write_bytes(b"precious")
    else:
        staged(ground).mkdir()
        (staged(ground) / ".ckpt-journal").symlink_to(home / "precious")
    done = ground.run()
    assert done.status in (5, 7), (what, done.err)
    assert done.error["path"] and done.error["hint"]
    assert (home / "precious").read_bytes() == b"precious" and not (tmp_path / "nowhere").exists()
    if what == "folder with a stranger's file":
        assert (staged(ground) / "precious").read_bytes() == b"precious"
    assert ground.state() == ("old" if ground.kind == "force" else "absent")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder away needs root")
def test_a_staging_folder_of_another_user_is_refused(ground: Any) -> None:
    ground.reset()
    staged(ground).mkdir()
    os.chown(staged(ground), NOBODY, NOBODY)
    done = ground.run()
    assert (done.status, done.error["code"]) == (5, "E0504"), done.err
    assert ground.state() == ("old" if ground.kind == "force" else "absent")


def test_a_part_that_fails_leaves_the_others_work(server: Any, folder_ground: Any, tmp_path: Path) -> None:
    """G22: part 2 of 3 meets a full disk before it has done anything; parts 1 and 3 are not lost by it."""
    ground = folder_ground
    plan = tmp_path / "plan.json"
    ground.reset()
    assert ground.run("--plan", str(plan)).status == 0

    def part(index: int, **fault: Any) -> Any:
        return server.run(["apply", str(plan), "--part", f"{index}/3", "--json", "-q"], under=ground.place, **fault)

    assert part(1).status == 0
    failed = part(2, op="posix_fallocate,pwrite", at=1, do="errno", number=errno.ENOSPC, on=True)
    assert (failed.status, failed.error["code"]) == (7, "E0701"), failed.err
    assert part(3).status == 0
    assert ground.check_invariant() == "absent"
    assert part(3).status == 0, "a part may be run twice"
    assert ground.check_invariant() == "absent"
    assert part(2).status == 0
    ground.check_clean()


@pytest.mark.share(2)
@pytest.mark.parametrize("at", ["mkdir", "fsync", "renameat2", "fsync parent"])
def test_two_equal_runs(ground: Any, tmp_path: Path, at: str) -> None:
    """H5: the first waits at one operation, the second comes: exit 5, and its words name the first while it works."""
    ground.reset()
    go = tmp_path / "go"
    results: list[Any] = []
    kind = at.split()[0]
    number = sum(op.startswith(kind + " ") for op in ground.operations) if at == "fsync parent" else 1
    fault = {"op": kind, "at": number, "do": "pause", "file": str(go)}
    first = threading.Thread(target=lambda: results.append(ground.run(**fault)))
    first.start()
    deadline = time.monotonic() + 60
    while not Path(f"{go}.there").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second = subprocess.run([sys.executable, "-m", "ckpt_tool", *ground.args], cwd=ROOT, capture_output=True, text=True)
    go.write_bytes(b"")
    first.join(60)
    statuses = (results[0].status, second.returncode)
    if at == "mkdir":  # nobody held the lock yet: the second may have made the whole output
        assert statuses in ((0, 5), (5, 0), (0, 0)), (statuses, second.stderr, results[0].err)
    elif ground.kind == "force" and at == "fsync parent":
        assert statuses[0] == 0 and second.returncode in (0, 5), second.stderr
    else:
        assert statuses == (0, 5), (statuses, second.stderr, results[0].err)
        if at == "fsync":
            assert "process" in second.stderr and socket.gethostname() in second.stderr
    ground.check_invariant()
    ground.check_recovery()


def test_runs_to_different_outputs_do_not_meet(folder_ground: Any, tmp_path: Path) -> None:
    ground = folder_ground
    ground.reset()
    others = [ground.place / f"out{i}" for i in range(3)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ckpt_tool",
                *(str(out) if arg == str(ground.final) else arg for arg in ground.args),
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        for out in others
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert sorted(os.listdir(ground.place)) == ["out0", "out1", "out2"]


# -- the destination (F) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["file", "folder", "empty folder", "link", "dangling link"])
def test_an_output_that_exists_is_left_alone(folder_ground: Any, what: str) -> None:
    """F1."""
    ground = folder_ground
    ground.reset()
    if what == "file":
        ground.final.write_bytes(b"mine")
    elif what == "link":
        ground.final.symlink_to("/usr/share")
    elif what == "dangling link":
        ground.final.symlink_to("nowhere")
    else:
        ground.final.mkdir()
        if what == "folder":
            (ground.final / "mine").write_bytes(b"mine")
    before = identity_of(os.lstat(ground.final))
    done = ground.run()
    assert (done.status, done.error["code"]) == (5, "E0501"), done.err
    assert identity_of(os.lstat(ground.final)) == before and os.listdir(ground.place) == ["out"] and done.ops == []


@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
@pytest.mark.parametrize(
    "what", ["the source", "inside the source", "around the source", "a link to the source", "bind mount"]
)
def test_an_output_that_touches_the_source_is_refused(server: Any, tmp_path: Path, what: str, force: bool) -> None:
    """F2, with --force too."""
    holder = tmp_path / "holder"
    source = holder / "source"
    shutil.copytree(ROOT / "fixtures" / "dcp" / "tp2_dp2", source)
    out = {
        "the source": source,
        "inside the source": source / "out",
        "around the source": holder,
        "a link to the source": tmp_path / "link",
        "bind mount": tmp_path / "bound" / "out",
    }[what]
    if what == "a link to the source":
        out.symlink_to(source)
    if what == "bind mount":
        out.parent.mkdir()
        done = subprocess.run(["mount", "--bind", str(source), str(out.parent)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a bind mount can't be made here: {done.stderr.strip()}")
    before = sorted((path, path.lstat().st_mtime_ns) for path in holder.rglob("*"))
    try:
        ran = server.run(
            ["convert", str(source), str(out), "--to", "sharded", "--json", *(["--force"] if force else [])],
            under=tmp_path,
        )
        assert ran.status == 5, ran.err
        assert ran.error["code"] == ("E0502" if force else ran.error["code"])
        assert not [op for op in ran.ops if not op.startswith(("open holder/source", "open bound", "close"))]
        assert sorted((path, path.lstat().st_mtime_ns) for path in holder.rglob("*")) == before
    finally:
        if what == "bind mount":
            subprocess.run(["umount", "-l", str(out.parent)], check=True)


def test_an_output_that_is_a_hard_link_to_the_source_file_is_refused(server: Any, tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    out = tmp_path / "place" / "out.safetensors"
    safetensors.numpy.save_file({"w": np.arange(6, dtype=np.float32)}, source)
    out.parent.mkdir()
    os.link(source, out)
    before = source.read_bytes()
    for force in ([], ["--force"]):
        ran = server.run(["convert", str(source), str(out), "--to", "safetensors", "--json", *force], under=tmp_path)
        assert ran.status == 5, ran.err
        assert source.read_bytes() == before and os.stat(source).st_ino == os.stat(out).st_ino


def test_a_missing_parent_is_exit_7(folder_ground: Any) -> None:
    """F3."""
    ground = folder_ground
    args = [str(ground.place / "no" / "out") if arg == str(ground.final) else arg for arg in ground.args]
    ground.reset()
    done = ground.server.run(args, under=ground.place)
    assert (done.status, done.error["code"]) == (7, "E0704"), done.err
    assert os.listdir(ground.place) == []


def test_a_read_only_mount_is_exit_7(folder_ground: Any, small_disk: Path) -> None:
    """F3."""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, capture_output=True)
    args = [str(small_disk / "out") if arg == str(folder_ground.final) else arg for arg in folder_ground.args]
    done = folder_ground.server.run(args, under=small_disk)
    assert done.status == 7, done.err
    assert done.error["path"].startswith(str(small_disk))


@pytest.fixture
def common(folder_ground: Any) -> Iterator[Path]:
    """A folder that another user can reach (pytest's own are private), with a copy of the source."""
    if os.geteuid() != 0:
        pytest.skip("giving up root needs root")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    shutil.copytree(folder_ground.source, folder / "source")
    (folder / "place").mkdir()
    for path in [folder / "source", *(folder / "source").rglob("*"), folder / "place"]:
        os.chown(path, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def as_nobody(server: Any, common: Path) -> Any:
    out = common / "place" / "out"
    return server.run(
        ["convert", str(common / "source"), str(out), "--to", "sharded", "--json", "-q"], under=common, uid=NOBODY
    )


def test_a_folder_without_permission_is_exit_7(server: Any, common: Path) -> None:
    """F3."""
    (common / "place").chmod(0o500)
    done = as_nobody(server, common)
    assert (done.status, done.error["code"]) == (7, "E0705"), done.err


def test_a_read_only_source_is_enough(server: Any, common: Path) -> None:
    """F8: files 0400, folders 0500."""
    for path in sorted((common / "source").rglob("*"), reverse=True):
        path.chmod(0o500 if path.is_dir() else 0o400)
    (common / "source").chmod(0o500)
    done = as_nobody(server, common)
    assert done.status == 0, done.err


def test_an_unreadable_source_file_is_named_before_anything_is_written(server: Any, common: Path) -> None:
    """F9."""
    (shard,) = sorted((common / "source").rglob("__1_0.distcp"))
    shard.chmod(0)
    done = as_nobody(server, common)
    assert done.status == 7, done.err
    assert done.error["path"].endswith("__1_0.distcp")
    assert os.listdir(common / "place") == [] and not any(op.startswith("mkdir") for op in done.ops)


# -- limits (F5, F6, F7) ------------------------------------------------------------------------------------------


def test_a_limit_on_file_sizes_is_exit_7(folder_ground: Any) -> None:
    """F5: RLIMIT_FSIZE; SIGXFSZ must not kill."""
    ground = folder_ground
    ground.reset()
    done = ground.server.run(ground.args, under=ground.place, limits={"RLIMIT_FSIZE": 2000})
    assert done.status == 7, (done.status, done.err)
    assert done.error["path"] and "size" in str(done.error["hint"]).lower() + done.error["message"].lower()
    ground.check_recovery()


def shards(folder: Path, count: int) -> Path:
    folder.mkdir()
    for i in range(count):
        safetensors.numpy.save_file(
            {f"layers.{i}.w.weight": np.arange(i, i + 12, dtype=np.float32).reshape(4, 3)},
            folder / f"model-{i + 1:05d}-of-{count:05d}.safetensors",
        )
    return folder


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_many_shards_under_a_small_limit_of_descriptors(server: Any, tmp_path: Path, count: int) -> None:
    """F6."""
    source = shards(tmp_path / "source", count)
    out = tmp_path / "out"
    args = ["convert", str(source), str(out), "--to", "sharded", "--tp", "4", "--threads", "2", "--json", "-q"]
    done = server.run(args, under=tmp_path, limits={"RLIMIT_NOFILE": 24})
    assert done.status == 0, done.err
    files = [safetensors.numpy.load_file(out / f"model.tp0{i}.safetensors") for i in range(4)]
    for i in range(0, count, max(1, count // 50)):
        got = np.concatenate([file[f"layers.{i}.w.weight"] for file in files])
        np.testing.assert_array_equal(got, np.arange(i, i + 12, dtype=np.float32).reshape(4, 3))


def test_a_tensor_larger_than_the_memory_is_streamed(tmp_path: Path) -> None:
    """F7: 192 MB of one tensor with --memory 16MiB; the process's peak stays far below the tensor."""
    source = tmp_path / "m.safetensors"
    rows = 192 << 10
    safetensors.numpy.save_file({"w.weight": np.arange(rows * 250, dtype=np.float32).reshape(rows, 250)}, source)
    code = "import sys; from ckpt_tool.cli import run; status = run(sys.argv[1:]);" + (
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0], file=sys.stderr); sys.exit(status)"
    )
    args = ["convert", str(source), str(tmp_path / "out"), "--to", "sharded", "--tp", "2", "--memory", "16MiB", "-q"]
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak_mib = int(done.stderr.split()[-1]) // 1024
    assert peak_mib < 120, f"{peak_mib} MiB for a tensor of {rows * 1000 >> 20} MiB"


# -- streams and environment (F10) --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("LC_ALL=C PYTHONUTF8=0 {}", 0),
        ("{} >&-", 0),
        ("{} 2>&-", 0),
        ("{} <&-", 0),
        ("{} >&- 2>&- <&-", 0),
        ("{} > /dev/full", 7),
        ("{} 2> /dev/full", 0),
        ("env -u TERM -u HOME -u LANG {}", 0),
    ],
)
def test_streams_that_are_gone_and_a_bare_environment(folder_ground: Any, how: str, status: int) -> None:
    """F10: closed or full streams and a bare locale change nothing about the output."""
    ground = folder_ground
    ground.reset()
    line = how.format(" ".join([sys.executable, "-m", "ckpt_tool", *ground.args]))
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, (how, done.stderr)
    assert "Traceback" not in done.stderr
    ground.check_clean()


def test_a_closed_pipe_is_quiet(folder_ground: Any) -> None:
    """F10: EPIPE on stdout is 141 without a word; the output is whole."""
    ground = folder_ground
    ground.reset()
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tool", *ground.args], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
    ground.check_clean()
