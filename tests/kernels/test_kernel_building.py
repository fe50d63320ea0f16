"""Building: once for each way of making it, found again, made anew when anything that decides the result changes."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tool.device import build, cache, choose
from ckpt_tool.device.library import Library
from ckpt_tool.errors import StorageError, UsageError

needs_nvcc = pytest.mark.skipif(build.find_nvcc() is None, reason="no nvcc here: nothing can be compiled for a GPU")

# Compilers for tests: they say who they are and write what they were asked to make.
FAKE = """#!/bin/sh
case "$1" in
  --version) echo "$0 1.0"; exit ;;
  --list-gpu-code) echo sm_80; echo sm_90; echo sm_90a; echo sm_121; exit ;;
esac
for last; do :; done
echo "$@" > "$last"
echo x >> "${0%/*}/calls"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and a nvcc and a g++ that only pretend."""
    monkeypatch.setenv("CKPT_CACHE", str(tmp_path / "cache"))
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("nvcc", "g++"):
        (bin_ / name).write_text(FAKE)
        (bin_ / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    build.version_of.cache_clear()
    build.known_architectures.cache_clear()
    return tmp_path


def calls(home: Path) -> int:
    path = home / "bin" / "calls"
    return len(path.read_text().split()) if path.exists() else 0


def test_built_once_and_found_again(home: Path) -> None:
    first = build.ensure_built("cuda", (90,))
    second = build.ensure_built("cuda", (90,))
    assert (first.key, first.path, first.architectures) == (second.key, second.path, (90,))
    assert first.seconds > 0 == second.seconds and calls(home) == 1
    assert first.path == home / "cache" / "kernels" / first.key / "libck.so" and first.note == ""
    command = first.path.read_text()
    assert "-gencode=arch=compute_90,code=[sm_90,compute_90]" in command and "-compress-all" in command
    assert all(f"{name}.cu" in command for name in (*build.KERNELS, "runtime")) and "host.cpp" not in command
    assert build.ensure_built("cuda", (90,), force=True).seconds > 0 and calls(home) == 2
    assert build.ensure_built("host").kind == "host" and calls(home) == 3


def test_ptx_comes_with_the_last_architecture_alone(home: Path) -> None:
    flags = build.cuda_recipe((80, 90)).flags
    assert flags[-2:] == ("-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]")


def test_an_architecture_that_nvcc_does_not_know(home: Path) -> None:
    assert build.cuda_recipe((80, 90, 100)).architectures == (80, 90)
    assert build.cuda_recipe((130,)).architectures == (121,), "PTX of the newest before it serves"
    with pytest.raises(UsageError, match="no code for sm_70") as caught:
        build.cuda_recipe((70,))
    assert caught.value.code == "E1558"


def test_whatever_decides_the_result_is_in_the_key(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = home / "sources"
    shutil.copytree(build.sources(), sources)
    monkeypatch.setattr(build, "sources", lambda: sources)
    seen = [build.cuda_recipe((90,)).key]

    def changed() -> bool:
        seen.append(build.cuda_recipe((90,)).key)
        return len(set(seen)) == len(seen)

    for name in ("ck.h", "portable.h", "runtime.cu", "box_copy.cu"):
        with open(sources / name, "a") as file:
            file.write("// changed\n")
        assert changed(), name
    seen.append(build.cuda_recipe((80, 90)).key)
    monkeypatch.setattr(build, "CUDA_FLAGS", (*build.CUDA_FLAGS, "-G"))
    assert changed(), "flags"
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-g")
    assert changed(), "flags that nvcc takes from the environment"
    monkeypatch.setattr(build, "ABI_VERSION", build.ABI_VERSION + 1)
    assert changed(), "the ABI"
    (home / "bin" / "nvcc").write_text(FAKE.replace("1.0", "1.1"))
    build.version_of.cache_clear()
    assert changed(), "the compiler"


def test_a_poisoned_library_is_not_loaded_but_built_anew(home: Path) -> None:
    first = build.ensure_built("cuda", (90,))
    first.path.write_text("evil")
    again = build.ensure_built("cuda", (90,))
    assert "refused, built again" in again.note and "evil" not in again.path.read_text() and calls(home) == 2
    assert build.ensure_built("cuda", (90,)).note == ""


def test_a_cache_that_others_may_write_is_not_used(home: Path) -> None:
    build.ensure_built("cuda", (90,))
    (home / "cache" / "kernels").chmod(0o777)
    again = build.ensure_built("cuda", (90,))
    assert not again.path.is_relative_to(home / "cache") and "private folder" in again.note
    assert stat.S_IMODE(again.path.parent.stat().st_mode) == 0o700


def test_without_nvcc_what_was_built_where_one_was_serves(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build.ensure_built("cuda", (80, 90))
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert build.ensure_built("cuda", (90,)).key == made.key
    assert build.ensure_built("cuda", (103,)).key == made.key, "its PTX serves"
    with pytest.raises(UsageError, match="no nvcc") as caught:
        build.ensure_built("cuda", (86,))
    assert caught.value.code == "E1554" and "CKPT_KERNELS=path:FILE" in str(caught.value.hint)
    monkeypatch.setattr(build, "source_digest", lambda: "other sources")
    with pytest.raises(UsageError):
        build.ensure_built("cuda", (90,))


def test_no_compiler_and_one_that_fails(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "bin" / "nvcc").write_text(
        FAKE.replace("for last", 'echo "ck.h(3): error: no such thing" >&2; exit 2\nfor last')
    )
    with pytest.raises(StorageError, match="exit code 2") as caught:
        build.ensure_built("cuda", (90,))
    assert caught.value.code == "E1555" and caught.value.faults == ("ck.h(3): error: no such thing",)
    assert list(cache.every(cache.folder())) == []
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match="no g\\+\\+") as missing:
        build.ensure_built("host")
    assert missing.value.code == "E1554"


def test_two_processes_build_it_once(tmp_path: Path, quick_compiler: Path) -> None:
    """Both want the shim at the same time: one builds, the other waits and finds it; both load it."""
    program = (
        "from ckpt_tool.device import build, library\nb = build.ensure_built('host')\n"
        "library.Library(b.path, b.through).devices()\nprint(b.seconds > 0)"
    )
    environment = {**os.environ, "CKPT_CACHE": str(tmp_path)}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=build.PACKAGE.parent,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    said = sorted(process.communicate(timeout=200)[0].strip() for process in both)
    assert said == ["False", "True"] and all(process.returncode == 0 for process in both)
    assert len(list((tmp_path / "kernels").glob("*/libck.so"))) == 1


@needs_nvcc
@pytest.mark.slow
def test_real_kernels_without_a_driver_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nvcc made loads on any machine and says what is missing."""
    if choose.driver.probe().cards:
        pytest.skip("there is a GPU here")
    monkeypatch.setenv("CKPT_CACHE", str(tmp_path))
    made = build.ensure_built("cuda", (90,))
    library = Library(made.path, made.through)
    with pytest.raises(UsageError) as caught:
        library.devices()
    assert caught.value.code in ("E1556", "E1557") and caught.value.hint
