"""One library and one device for all tests of the kernels.

CKPT_KERNELS chooses, as it does for `ckpt`: unset, or `host`, is the shim, built here by g++ once and kept in pytest's cache
under a hash of all that it is made of (CKPT_TEST_SHIM=FILE is one that was built from these sources already); `cuda` is the GPU at hand; `path:FILE` is a library built before. A test asks for
`device` and says nothing of which it is; what only a GPU or only the shim can show asks for `gpu` or `shim`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ckpt_tool.errors import StorageError
from ckpt_tool.run.device import build
from ckpt_tool.run.device.library import Library
from ckpt_tool.run.device.memory import Device

sys.path.insert(0, str(Path(__file__).parent))  # box_cases.py and its like

CHOICE = os.environ.get("CKPT_KERNELS", "host")


def built(
    config: pytest.Config, name: str, compiler: str, *extra: str, kernels: tuple[str, ...] = build.KERNELS
) -> Path:
    """The library of these kernels by this compiler, made where the cache has none. A test that asks for it is skipped where
    the compiler is missing, and fails with what the compiler said where the sources do not compile."""
    ready = os.environ.get("CKPT_TEST_SHIM")
    if name == "host" and ready:
        return Path(ready)
    program = shutil.which(compiler)
    if program is None:
        pytest.skip(f"no {compiler} here: the kernels can't be built")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256("\0".join([version, *extra, *kernels, Path(build.__file__).read_text()]).encode())
    for source in sorted(build.sources().iterdir()):
        if source.suffix in (".cu", ".h", ".cpp"):
            key.update(source.name.encode() + b"\0" + source.read_bytes())
    cache = getattr(config, "cache", None)  # there is none with -p no:cacheprovider
    folder = Path(tempfile.mkdtemp(prefix="ckpt-kernels-")) if cache is None else cache.mkdir("kernels")
    path = folder / f"{name}-{key.hexdigest()[:16]}.so"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers of this run wait for it
        if not path.exists():
            make(path, compiler, program, extra, kernels)
    return path


def make(path: Path, compiler: str, program: str, extra: tuple[str, ...], kernels: tuple[str, ...]) -> None:
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        if compiler == "g++":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(build, "KERNELS", kernels)
                build.build_host(Path(temporary), extra)
        else:
            build_device(Path(temporary), program)
        os.replace(temporary, path)
    except (StorageError, subprocess.CalledProcessError) as e:
        said = getattr(e, "stderr", None) or "\n".join(map(str, getattr(e, "faults", ())))
        pytest.fail(f"{compiler} refused the kernels: {e}\n{said}", pytrace=False)
    finally:
        Path(temporary).unlink(missing_ok=True)


def build_device(target: Path, nvcc: str) -> None:
    folder = build.sources()
    subprocess.run(
        [nvcc, "-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-cudart", "static", "-fmad=false",
         "-arch=native", *(str(folder / f"{name}.cu") for name in build.KERNELS), str(folder / "runtime.cu"), "-o", str(target)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def host_library(request: pytest.FixtureRequest) -> Path:
    """The plain host shim as a file: for tests that run it in a process of their own."""
    return built(request.config, "host", "g++")


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest) -> Library:
    if CHOICE == "host":
        return Library(built(request.config, "host", "g++"))
    if CHOICE == "cuda":
        return Library(built(request.config, "cuda", "nvcc"))
    if CHOICE.startswith("path:"):
        return Library(Path(CHOICE.removeprefix("path:")))
    pytest.skip(f"CKPT_KERNELS={CHOICE}: no kernels to test")


@pytest.fixture(scope="session")
def device(library: Library) -> Device:
    """The device under test: the host shim, or a GPU where CKPT_KERNELS says so."""
    if library.devices() == 0:
        pytest.skip("no GPU here")
    return Device(library)


@pytest.fixture(scope="session")
def shim(device: Device) -> Device:
    """The host shim, for what needs its addresses to be plain memory."""
    if not device.info.host:
        pytest.skip("for the host shim: a GPU's addresses are no memory of this process")
    return device


@pytest.fixture(scope="session")
def gpu(device: Device) -> Device:
    """A real GPU."""
    if device.info.host:
        pytest.skip("needs a GPU (CKPT_KERNELS=cuda)")
    return device


@pytest.fixture
def quick_compiler(host_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A g++ that gives the library of this session for whatever it is asked to compile: for tests of what is around a build."""
    program = tmp_path / "quick-g++"
    program.write_text(
        f"""#!/bin/sh
case "$1" in --version) echo "g++ (that copies) 1.0"; exit ;; esac
for last; do :; done
sleep 0.3
cp "{host_library}" "$last"
""".lstrip()
    )
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    return program
