"""J2, J3: the same input and options give the same bytes, whatever runs them, wherever, however often interrupted.

Threads, parts of a plan in any order, interruptions, hash seed, locale, time zone, umask, working folder, the paths of
source and output, the order in which a folder lists its files: none of them may show in a byte.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "fixtures" / "dcp" / "tp2_dp2"
DEEPSPEED = ROOT / "fixtures" / "deepspeed" / "z2_align_dp4"
MEGATRON = ROOT / "fixtures" / "megatron" / "moe_tp2ep2etp1"
TARGETS = {
    "sharded": (SOURCE, "out", ["--to", "sharded", "--tp", "2", "--dp", "2", "--zero", "1"]),
    "safetensors": (SOURCE, "out", ["--to", "safetensors", "--max-shard-size", "2KB"]),
    "one file": (SOURCE, "out.safetensors", ["--to", "safetensors"]),
    "torch": (SOURCE, "out.pt", ["--to", "torch"]),
    "dcp": (SOURCE, "out", ["--to", "dcp"]),
    "deepspeed": (DEEPSPEED, "out", ["--to", "deepspeed", "--zero", "3", "--dp", "3"]),
    "deepspeed-universal": (DEEPSPEED, "out", ["--to", "deepspeed-universal"]),
    "megatron": (MEGATRON, "out", ["--to", "megatron", "--tp", "1", "--pp", "2", "--ep", "2", "--dp", "2"]),
    "megatron-dist": (MEGATRON, "out", ["--to", "megatron-dist", "--tp", "2", "--pp", "2"]),
}
Made = tuple[Path, Path, str, list[str]]  # the output, its source, its name, the options


def content(path: Path) -> dict[str, bytes]:
    """Every file below `path` (or the one file) by its relative name."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def modes(path: Path) -> dict[str, int]:
    return {str(file.relative_to(path)): stat.S_IMODE(file.stat().st_mode) for file in [path, *path.rglob("*")]}


def ckpt(*args: str | Path, cwd: Path = ROOT, umask: int = 0o022, **env: str) -> None:
    """One real process."""
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tool", *map(str, args), "-q"],
        cwd=cwd,
        umask=umask,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def quick(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """The command line in a forked process."""

    def run(*args: str | Path) -> None:
        done = server.run([*map(str, args), "-q"], under=tmp_path_factory.getbasetemp())
        assert done.status == 0, done.err

    return run


@pytest.fixture(scope="module", params=list(TARGETS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """An output made by one thread, its source and name, and the options that made it."""
    source, name, options = TARGETS[request.param]
    out = tmp_path_factory.mktemp("plain") / name
    ckpt("convert", source, out, *options, "--threads", "1", PYTHONHASHSEED="0", LC_ALL="C.UTF-8", TZ="UTC")
    return out, source, name, options


@pytest.mark.share(6)
def test_threads_hash_seed_locale_zone_and_folder(made: Made, tmp_path: Path) -> None:
    first, source, name, options = made
    out = tmp_path / name
    ckpt(
        "convert",
        source,
        out,
        *options,
        "--threads",
        "64",
        "--memory",
        "256MiB",
        cwd=tmp_path,
        umask=0o077,
        PYTHONHASHSEED="4242",
        LC_ALL="C",
        LANG="C",
        PYTHONUTF8="0",
        TZ="Asia/Kathmandu",
        HOME=str(tmp_path),
        COLUMNS="40",
        TERM="dumb",
    )
    assert content(out) == content(first)
    if out.is_dir():
        assert modes(out).keys() == modes(first).keys()
        assert {mode & 0o700 for mode in modes(out).values()} == {mode & 0o700 for mode in modes(first).values()}
        assert not any(mode & 0o077 for mode in modes(out).values()), "the user's umask counts"


@pytest.mark.share(27)
@pytest.mark.parametrize("threads", ["2", "7"])
def test_any_number_of_threads(made: Made, quick: Callable[..., None], tmp_path: Path, threads: str) -> None:
    first, source, name, options = made
    quick("convert", source, tmp_path / name, *options, "--threads", threads, "--memory", "16MiB")
    assert content(tmp_path / name) == content(first)


@pytest.mark.share(3)
def test_the_same_umask_gives_the_same_modes(made: Made, quick: Callable[..., None], tmp_path: Path) -> None:
    first, source, name, options = made
    out = tmp_path / name
    quick("convert", source, out, *options)
    assert modes(out) == modes(first)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "f").write_bytes(b"")
    usual_file = stat.S_IMODE((plain / "f").stat().st_mode)
    usual_folder = stat.S_IMODE(plain.stat().st_mode)
    if os.umask(0o022) == 0o022 and out.is_dir():
        assert set(modes(out).values()) == {usual_file, usual_folder}


@pytest.mark.share(3)
def test_another_place_and_another_order_of_the_files(made: Made, quick: Callable[..., None], tmp_path: Path) -> None:
    """The source copied elsewhere, its files made in another order; J3: the output under another name."""
    first, source, name, options = made
    elsewhere = tmp_path / "a much longer path, with spaces and ünïcode" / "source"
    elsewhere.mkdir(parents=True)
    for path in sorted((p for p in source.rglob("*") if p.is_file()), reverse=True):
        target = elsewhere / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        os.utime(target, (1, 1))
    out = tmp_path / ("another-name" + Path(name).suffix)
    quick("convert", elsewhere, out, *options)
    assert content(out) == content(first)
    for data in content(out).values():
        assert b"ckpt-partial" not in data and str(tmp_path).encode() not in data and str(ROOT).encode() not in data


@pytest.mark.share(12)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_parts_of_a_plan_in_any_order(made: Made, quick: Callable[..., None], tmp_path: Path, count: int) -> None:
    first, source, name, options = made
    plan = tmp_path / "plan.json"
    out = tmp_path / name
    quick("convert", source, out, *options, "--plan", plan)
    for number in range(count, 0, -1):
        assert not out.exists()
        quick("apply", plan, "--part", f"{number}/{count}")
    assert content(out) == content(first)
    assert sorted(os.listdir(tmp_path)) == sorted(["plan.json", name])


@pytest.mark.share(6)
def test_parts_at_the_same_time(made: Made, tmp_path: Path) -> None:
    first, source, name, options = made
    plan = tmp_path / "plan.json"
    out = tmp_path / name
    ckpt("convert", source, out, *options, "--plan", plan, PYTHONHASHSEED="7")
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "ckpt_tool", "apply", str(plan), "--part", f"{number}/3", "-q"],
            cwd=ROOT,
            text=True,
            stderr=subprocess.PIPE,
        )
        for number in range(1, 4)
    ]
    for run in runs:
        _, err = run.communicate(timeout=120)
        assert run.returncode == 0, err
    assert content(out) == content(first)
    assert sorted(os.listdir(tmp_path)) == sorted(["plan.json", name])


@pytest.mark.share(2)
def test_another_host_another_time(made: Made, tmp_path: Path) -> None:
    """In a UTS namespace with another host name; skips where there is none."""
    first, source, name, options = made
    out = tmp_path / name
    probe = subprocess.run(["unshare", "-r", "-u", "hostname", "elsewhere"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"no UTS namespace here: {probe.stderr.strip()}")
    line = f'hostname elsewhere && exec "{sys.executable}" -m ckpt_tool "$@" -q'
    done = subprocess.run(
        ["unshare", "-r", "-u", "sh", "-c", line, "sh", "convert", str(source), str(out), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert content(out) == content(first)


def test_there_and_back_is_canonical(quick: Callable[..., None], tmp_path: Path) -> None:
    """E16 for our own format: other degrees and back give the first bytes, through a plan that knows nothing of
    them."""
    a, b, back = (tmp_path / name for name in ("a", "b", "back"))
    quick("convert", SOURCE, a, "--to", "sharded", "--tp", "2")
    quick("reshard", a, b, "--tp", "1", "--dp", "3", "--zero", "3")
    quick("reshard", b, back, "--tp", "2", "--dp", "1", "--zero", "0")
    assert content(back) == content(a)
