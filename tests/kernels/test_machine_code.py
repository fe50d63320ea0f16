"""The reports of nvcc and cuobjdump are read rightly, every promise that is broken is told, and the real kernels break
none."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import machine_code
import numpy as np
import pytest

from ckpt_tool.device import build
from ckpt_tool.device.descriptors import DESC, Strided, pack

WORDS = Path(__file__).with_name("portable_words.cu")
NAME = "_ZN44_GLOBAL__N__43238ba8_11_box_copy_cu_f8a118178box_copyEPK7ck_descjmmj"
# nvcc 13.0 and cuobjdump 13.1, cut down
REPORT = f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{NAME}' for 'sm_80'
ptxas info    : Function properties for {NAME}
    16 bytes stack frame, 36 bytes spill stores, 56 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers, 16 bytes cumulative stack size, 376 bytes cmem[0]
ptxas info    : Compiling entry function '{NAME}' for 'sm_100'
ptxas info    : Function properties for {NAME}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 60 registers, used 1 barriers, 33280 bytes smem
"""
LISTING = f"""Fatbin elf code:
================
arch = sm_80
	code for sm_80
		Function : {NAME}
	.headerflags	@"EF_CUDA_SM80"
        /*0000*/                   MOV R1, c[0x0][0x28] ;                      /* 0x00000a0000017a02 */
        /*0040*/                   STL.64 [R1], R2 ;                           /* 0x0000000201007387 */
        /*0050*/              @!P0 LDG.E.NA.128.CONSTANT R4, [R2.64] ;         /* 0x0000000402047981 */
        /*0060*/                   LDG.E.U16 R4, [R2.64] ;                     /* 0x0000000402047981 */
        /*0070*/               @P1 STG.E [R2.64], R4 ;                         /* 0x0000000402007986 */
        /*0080*/                   MUFU.RCP R2, R3 ;                           /* 0x0000000402007986 */
arch = sm_100
		Function : {NAME}
        /*0050*/              @!UP0 LDG.E.NA.128.CONSTANT R4, desc[UR4][R2.64] ;  /* 0x0000000402047981 */
        /*0070*/                   STG.E.128 desc[UR4][R2.64], R4 ;            /* 0x0000000402007986 */
        /*0080*/                   STG.E.ENL2.256 desc[UR4][R2.64], R4 ;       /* 0x0000000402007986 */
"""
CLEAN = machine_code.Resources(60, 0, 0, 0, 33280)


def test_the_assembler_s_report() -> None:
    assert machine_code.resources_of(REPORT) == {
        (NAME, 80): machine_code.Resources(64, 16, 36, 56, 0),
        (NAME, 100): CLEAN,
    }


def test_the_machine_code() -> None:
    found = machine_code.accesses_of(LISTING.splitlines())
    assert found == {
        (NAME, 80): {"STL.64": 1, "LDG.128": 1, "LDG.16": 1, "STG.32": 1, "MUFU.RCP": 1},
        (NAME, 100): {"LDG.128": 1, "STG.128": 1, "STG.256": 1},
    }


def test_every_broken_promise_is_told() -> None:
    resources = machine_code.resources_of(REPORT)
    accesses = machine_code.accesses_of(LISTING.splitlines())
    promises = {"box_copy": ("LDG", "STG")}
    found = machine_code.faults(resources, accesses, ["box_copy", "box_cast"], [80, 90, 100], promises)
    for part in (
        "for sm_80: 16 bytes of stack, 36 spilled and 56 loaded back",
        "for sm_80: local memory: {'STL.64': 1}",
        "for sm_80: no STG of 16 bytes",
        "box_cast: says nothing",
        "box_copy for sm_90: was not compiled",
    ):
        assert len([line for line in found if part in line]) == 1, part
    assert [line for line in found if line.startswith("box_copy for sm_100")] == []
    clean = {(NAME, 100): CLEAN}
    assert machine_code.faults(clean, {}, ["box_copy"], [100], promises) == []


def test_names() -> None:
    assert (
        machine_code.kernel_of(NAME, ["box", "box_copy"]) == "box_copy" and machine_code.kernel_of(NAME, ["copy"]) == ""
    )
    declared = machine_code.kernels_in(build.sources(), build.KERNELS)
    assert "box_copy" in declared and set(machine_code.PROMISES) >= set(declared), "a new kernel: say what it promises"


def test_no_kernel_has_words_of_one_machine() -> None:
    """CUDA's own words, inline assembly and atomics stand in portable.h alone; the runtime is CUDA's by its nature."""
    foreign = re.compile(
        r"threadIdx|blockIdx|blockDim|gridDim|__shfl|__sync|\batomic[A-Z]|\basm\b|__global__|__shared__|<<<|__CUDA"
    )
    for path in sorted(build.sources().glob("*.cu")):
        if path.name != "runtime.cu":
            found = foreign.findall(re.sub(r"//.*", "", path.read_text(encoding="utf-8")))
            assert not found, f"{path.name}: {found}"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here: the shim can't be built")
def test_every_word_of_the_header_on_the_shim(tmp_path: Path) -> None:
    recipe = build.host_recipe(build.STRICT)
    folder = build.sources()
    library = tmp_path / "words.so"
    subprocess.run(
        [
            recipe.compiler,
            *recipe.flags,
            f"-I{folder}",
            "-x",
            "c++",
            str(WORDS),
            str(folder / "host.cpp"),
            "-o",
            str(library),
        ],
        check=True,
    )
    boxes = pack(
        [Strided(0, 0, (3, 4, 2), (1000, 100, 10), (64, 16, 8), 2), Strided(0, 0, (2,), (40_000,), (40_000,), 40_000)]
    )
    lists = np.concatenate([boxes.packed, boxes.packed])
    lists["tile0"] = (0, 3, 7, 8)
    assert lists.dtype == DESC
    read = np.arange(32, dtype=np.uint8)
    written = np.zeros(32, np.uint8)
    sums = np.array([0, 2**63, 0, 2**63, 0, 0, 0, 0, 0, 0], np.uint64)
    call = ctypes.CDLL(str(library)).ck_words
    call.argtypes = [
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    assert call(read.ctypes.data, written.ctypes.data, lists.ctypes.data, 4, sums.ctypes.data, 0, None) == 0
    assert list(sums[:3]) == [2 * 64 * 65 // 2, 1, 64]
    assert (int(sums[3]) & 0xFFFFFFFF, int(sums[3]) >> 32, int(sums[4])) == (63, 0, 2 * 64)
    assert list(sums[5:]) == [
        2,
        2 * 100 + 1 * 10,
        0x55443322,
        1000003 // 7 + 5,
        (6 + 2 - 2 + 2**64 - 2 - 32 + 3 + 0x07060504 + 0x1F1E1D1C) % 2**64,
    ]
    want = read.copy()
    want[1] = 0
    assert list(written) == list(want)


@pytest.mark.slow
@pytest.mark.skipif(build.find_nvcc() is None, reason="no nvcc here: nothing can be compiled for a GPU")
def test_every_word_of_the_header_on_every_architecture(tmp_path: Path) -> None:
    """On all that this nvcc knows, not only on those that are shipped."""
    nvcc = build.find_nvcc()
    assert nvcc is not None
    recipe = build.cuda_recipe(build.known_architectures(nvcc), ("-Werror=all-warnings", "-Xptxas=-v"))
    done = subprocess.run(
        [nvcc, *recipe.flags, f"-I{build.sources()}", str(WORDS), "-o", str(tmp_path / "words.so")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(machine_code.resources_of(done.stderr)) == 2 * len(recipe.architectures)


@pytest.mark.slow
@pytest.mark.skipif(build.find_nvcc() is None, reason="no nvcc here: nothing can be compiled for a GPU")
def test_the_kernels_keep_their_promises(tmp_path: Path) -> None:
    library = tmp_path / "libck.so"
    resources = machine_code.compiled(library, build.ARCHITECTURES)
    program = machine_code.disassembler()
    accesses = machine_code.disassembled(program, library) if program else {}
    declared = machine_code.kernels_in(build.sources(), build.KERNELS)
    assert machine_code.faults(resources, accesses, declared, build.ARCHITECTURES) == []
    assert not program or set(accesses) == set(resources)


@pytest.mark.slow
@pytest.mark.skipif(build.find_nvcc() is None, reason="no nvcc here: nothing can be compiled for a GPU")
def test_a_kernel_with_local_memory_is_seen(tmp_path: Path) -> None:
    """The check can fail: an array that is indexed at run time has no registers."""
    (tmp_path / "spoiled.cu").write_text("""#include "portable.h"
CK_KERNEL(64) void spoiled(uint64_t to, uint32_t n) {
    uint32_t v[64];
    for (uint32_t k = 0; k < 64; ++k) v[k * 37 % 64] = k * n;
    for (uint32_t k = 0; k < n; ++k) v[(k * k) % 64] += v[(n + k) % 64];
    ck_store<uint32_t>(to, v[n % 64]);
}
CK_API int ck_spoiled(uint64_t to, uint32_t n, void* stream) { return CK_LAUNCH(spoiled, 1, 64, stream, to, n); }
""")
    nvcc = build.find_nvcc()
    library = tmp_path / "spoiled.so"
    assert nvcc is not None
    command = [
        nvcc,
        *build.cuda_recipe((90,), ("-Xptxas=-v",)).flags,
        f"-I{build.sources()}",
        str(tmp_path / "spoiled.cu"),
    ]
    done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, check=True)
    resources = machine_code.resources_of(done.stderr)
    program = machine_code.disassembler()
    accesses = machine_code.disassembled(program, library) if program else {}
    found = machine_code.faults(resources, accesses, ["spoiled"], [90], {"spoiled": ("STG",)})
    assert any("bytes of stack" in line for line in found)
    if program:
        assert any("local memory" in line for line in found) and any("no STG of 16 bytes" in line for line in found)
