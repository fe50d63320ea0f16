"""The kernels in the shim under the sanitizers of g++: clean as they are, and red where a fault is planted.

ASan and UBSan: bytes beyond a buffer, misaligned accesses, overflow. TSan, with a real thread for each thread of a
block: what no barrier orders.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from library_builds import CHOICE, built
from planting import ADDRESS, HERE, THREAD, plant, run_under

from ckpt_tool.device import build

Planted = Callable[..., Path]
REPORT = 66  # the exit code of a sanitizer that found something


@pytest.fixture(autouse=True)
def _shim_only() -> None:
    if CHOICE != "host":
        pytest.skip("sanitizers of g++ see the host shim only; compute-sanitizer is for a GPU")
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: no sanitizers")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    """Builds `kernels` from sources with `old` replaced by `new` in `file`."""

    def build_it(
        file: str, old: str, new: str, flags: tuple[str, ...], kernels: tuple[str, ...] = build.KERNELS
    ) -> Path:
        folder = plant(tmp_path / "kernels", file, old, new)
        with monkeypatch.context() as m:
            m.setattr(build, "sources", lambda: folder)
            m.setattr(build, "KERNELS", kernels)
            return build.build_host(tmp_path / "planted.so", flags)

    return build_it


# -- the kernels -------------------------------------------------------------------------------------------------------

# what each kernel's cases need; a transpose that moves whole rows is a copy
SOURCES = {
    "box_copy": ("box_copy",),
    "box_transpose": ("box_transpose", "box_copy"),
    "digest": ("digest",),
    "compare": ("compare",),
    "box_cast": ("box_cast",),
    "box_dequantise": ("box_cast",),
    "box_quantise": ("box_quantise",),
    "adamw_ema": ("adamw_ema",),
}
BARRIERS = ("box_transpose", "box_quantise", "digest", "compare")


def cases(library: Path, count: int, first: int = 0) -> subprocess.CompletedProcess[str]:
    return run_under("asan", str(HERE / "box_cases.py"), str(library), str(count), str(first))


def kernel_cases(sanitizer: str, library: Path, kernel: str, count: int) -> subprocess.CompletedProcess[str]:
    return run_under(sanitizer, str(HERE / "kernel_cases.py"), str(library), kernel, str(count))


def test_random_boxes_are_clean_under_address_and_undefined_behaviour(request: pytest.FixtureRequest) -> None:
    done = cases(built(request.config, "asan", "g++", *ADDRESS, kernels=("box_copy",)), 400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "400 cases equal" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kernel", SOURCES)
def test_kernels_are_clean_under_address_and_undefined_behaviour(request: pytest.FixtureRequest, kernel: str) -> None:
    library = built(request.config, f"asan-{kernel}", "g++", *ADDRESS, kernels=SOURCES[kernel])
    done = kernel_cases("asan", library, kernel, 300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kernel", BARRIERS)
def test_threads_of_a_block_do_not_race(request: pytest.FixtureRequest, kernel: str) -> None:
    library = built(request.config, f"tsan-{kernel}", "g++", *THREAD, kernels=SOURCES[kernel])
    done = kernel_cases("tsan", library, kernel, 12)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_transpose_without_its_barrier_is_a_race(planted: Planted) -> None:
    library = planted("box_transpose.cu", "    ck_sync();\n", "", THREAD, SOURCES["box_transpose"])
    done = kernel_cases("tsan", library, "box_transpose", 12)
    assert done.returncode == REPORT, done.stdout + done.stderr
    assert "data race" in done.stderr


def test_a_row_too_far_is_seen(planted: Planted) -> None:
    done = cases(
        planted(
            "portable.h", "i2 = row - upper * d.ext[2];", "i2 = row - upper * d.ext[2] + 1;", ADDRESS, ("box_copy",)
        ),
        400,
    )
    assert done.returncode == REPORT, done.stdout + done.stderr
    assert "heap-buffer-overflow" in done.stderr


# rows of 32 bytes that begin 4 bytes off the grid, said to allow 16 bytes at a time
OVERSTATED = """
import sys
from pathlib import Path
from ckpt_tool.device import descriptors
from ckpt_tool.device.kernels import box_copy
from box_cases import device_of

device = device_of(Path(sys.argv[1]))
source, target = device.alloc(1024), device.alloc(1024)
boxes = descriptors.pack([descriptors.Strided(source.address + 4, target.address, (8,), (64,), (64,), 32)])
boxes.packed["op"], boxes.packed["vlog"], boxes.packed["divr"] = descriptors.ELEMENTS, 4, descriptors.magic(32 // 16)
box_copy(device, boxes)
"""


def test_an_overstated_width_is_seen(request: pytest.FixtureRequest) -> None:
    library = built(request.config, "asan", "g++", *ADDRESS, kernels=("box_copy",))
    done = run_under("asan", "-c", OVERSTATED, str(library))
    assert done.returncode not in (0, 1), done.stdout + done.stderr
    assert "misaligned address" in done.stderr


# -- what the shim sees at barriers ------------------------------------------------------------------------------------

FIRST = "ck_sync(); // all parts are there"
SECOND = "ck_sync(); // the next round writes them again"


def probe(planted: Planted, old: str, new: str, flags: tuple[str, ...]) -> Path:
    return planted("probe.cu", old, new, flags, ("probe",))


@pytest.mark.parametrize(
    "flags",
    [(), pytest.param(ADDRESS, marks=pytest.mark.slow), pytest.param(THREAD, marks=pytest.mark.slow)],
    ids=["plain", "address", "thread"],
)
def test_barriers_and_shuffles_add_up(planted: Planted, flags: tuple[str, ...]) -> None:
    library = probe(planted, FIRST, FIRST, flags)
    done = run_under({(): "", ADDRESS: "asan", THREAD: "tsan"}[flags], str(HERE / "run_probe.py"), str(library))
    assert done.returncode == 0, done.stdout + done.stderr


def test_fibers_leap_where_the_compiler_fortifies(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ubuntu's g++ does by itself: its longjmp ends a process that leaps to another stack."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec "{shutil.which("g++")}" -D_FORTIFY_SOURCE=2 "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    done = run_under("", str(HERE / "run_probe.py"), str(probe(planted, FIRST, FIRST, ())))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "barrier", [FIRST, pytest.param(SECOND, marks=pytest.mark.slow)], ids=["before reading", "before writing again"]
)
def test_a_missing_barrier_is_a_race(planted: Planted, barrier: str) -> None:
    library = probe(planted, barrier, barrier.removeprefix("ck_sync();"), THREAD)
    done = run_under("tsan", str(HERE / "run_probe.py"), str(library))
    assert done.returncode == REPORT, done.stdout + done.stderr
    assert "data race" in done.stderr


@pytest.mark.parametrize("who", ["ck_bid() == 1 && ck_tid() == 40"])
def test_a_thread_that_leaves_before_a_barrier_is_told(planted: Planted, who: str) -> None:
    library = probe(planted, FIRST, f"if ({who}) return;\n{FIRST}", ())
    done = run_under("", str(HERE / "run_probe.py"), str(library))
    assert done.returncode < 0, done.stdout + done.stderr
    assert "before a barrier that others wait at" in done.stderr
