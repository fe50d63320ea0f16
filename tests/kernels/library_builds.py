"""The libraries that tests load: built once for all workers of a run, and kept in pytest's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from ckpt_tool.device import build
from ckpt_tool.errors import StorageError

CHOICE = os.environ.get("CKPT_KERNELS", "host")


def built(
    config: pytest.Config, name: str, compiler: str, *extra: str, kernels: tuple[str, ...] = build.KERNELS
) -> Path:
    """The library of these kernels by this compiler, made where the cache has none. A test that asks for it is skipped
    where the compiler is missing, and fails with what the compiler said where the sources do not compile."""
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
        [
            nvcc,
            "-std=c++17",
            "-O3",
            "-shared",
            "-Xcompiler",
            "-fPIC,-fvisibility=hidden",
            "-cudart",
            "static",
            "-fmad=false",
            "-arch=native",
            *(str(folder / f"{name}.cu") for name in build.KERNELS),
            str(folder / "runtime.cu"),
            "-o",
            str(target),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
