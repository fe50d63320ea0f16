"""The kernels made into a shared library: by nvcc for a GPU, by g++ for the host shim, once for each way of making it.

    built("cuda", (90,))    compiled for compute capability 9.0, or found in the cache
    built("cuda")           for all of ARCHITECTURES, and PTX of the last, from which a driver makes code for later ones
    built("host")           the shim, for tests

The cache key (`cache.py`) covers everything that decides the result: the sources, the flags, the compiler's version
output and the version of the ABI. If any of them changes, the library is built again. nvcc is needed to build, not to
run: without it, a library in the cache that was built from these sources is used.

Cost: some seconds for one architecture, some more for all; a hash of the sources (0.2 ms) and the compiler's --version
(10 ms) where it is built already.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ckpt_tool.device import cache
from ckpt_tool.device.descriptors import DESC
from ckpt_tool.device.library import ABI_VERSION
from ckpt_tool.errors import StorageError, UsageError, wrap_os_error

KERNELS = ("box_copy", "box_cast", "box_quantise", "box_transpose", "digest", "compare", "adamw_ema")
ARCHITECTURES = (80, 90, 100)  # A100, H100 and H200, B200; PTX of the last serves what comes after
PACKAGE = Path(__file__).resolve().parents[1]
COMPILE_SECONDS = 900
LOCK_SECONDS = 1200

Kind = Literal["host", "cuda"]

# The arithmetic is stated operation by operation: no compiler may fuse a product and a sum into one rounding.
HOST_FLAGS = (
    "-std=c++20",
    "-O2",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-pthread",
    "-U_FORTIFY_SOURCE",  # Ubuntu's g++ defines it: its longjmp ends a process that leaps between the stacks of fibers
)
STRICT = ("-g", "-Wall", "-Wextra", "-Werror")  # for our tests; a user's compiler may be of another mind
CUDA_FLAGS = (
    "-std=c++17",
    "-O3",
    "-shared",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
    "-fmad=false",
    "-cudart",
    "static",
    "-Xfatbin",
    "-compress-all",
    "--threads",
    "0",
)


class Built(NamedTuple):
    """A library that may be loaded (`Library(path, through)`)."""

    path: Path
    through: Path
    kind: Kind
    key: str
    architectures: tuple[int, ...]  # those it has code for; () for the shim
    seconds: float  # what the build took, 0 where it was found
    # what a reader should know, "" for nothing: an entry of the cache that was refused, a folder that could not be used
    note: str
    about: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BuildRecipe:
    """All that decides what a build makes."""

    kind: Kind
    compiler: str
    version: str  # what the compiler says of itself
    flags: tuple[str, ...]
    architectures: tuple[int, ...]

    @property
    def key(self) -> str:
        """The cache key: a hash of everything that decides what is built."""
        parts = (
            self.kind,
            self.version,
            "\0".join(self.flags),
            platform.machine(),
            source_digest(),
            *(f"{name}={os.environ.get(name, '')}" for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")),
        )
        return hashlib.sha256("\0\0".join(parts).encode()).hexdigest()

    def command(self, target: Path) -> list[str]:
        """The compiler's command line for the library `target`."""
        folder = sources()
        units = [str(folder / f"{name}.cu") for name in KERNELS]
        if self.kind == "host":
            return [self.compiler, *self.flags, "-x", "c++", *units, str(folder / "host.cpp"), "-o", str(target)]
        return [self.compiler, *self.flags, *units, str(folder / "runtime.cu"), "-o", str(target)]

    def about(self) -> dict[str, Any]:
        """The facts that the cache keeps with a library."""
        return {
            "kind": self.kind,
            "architectures": list(self.architectures),
            "sources": source_digest(),
            "compiler": self.version.strip().splitlines(),
            "flags": list(self.flags),
        }


def sources() -> Path:
    """The folder of the kernel sources: inside an installed package, next to the package in a source checkout."""
    inside = PACKAGE / "_kernels"
    return inside if inside.is_dir() else PACKAGE.parent / "kernels"


def source_digest() -> str:
    """SHA-256 of the sources and of the ABI that this Python speaks. Raises StorageError where a source can't be
    read."""
    digest = hashlib.sha256(f"{DESC.itemsize} {ABI_VERSION}".encode())
    headers = sorted(path.name for path in sources().glob("*.h"))
    for name in (*headers, "runtime.cu", "host.cpp", *(f"{kernel}.cu" for kernel in KERNELS)):
        path = sources() / name
        try:
            text = path.read_bytes()
        except OSError as e:
            raise wrap_os_error(e, path, "reading the kernels' sources") from e
        digest.update(f"\0{name} {len(text)}\0".encode() + text)
    return digest.hexdigest()


# -- compilers ---------------------------------------------------------------------------------------------------------


def find_nvcc() -> str | None:
    """nvcc: on the PATH, in $CUDA_HOME or $CUDA_PATH, or where CUDA's installer puts it."""
    for folder in (None, *(os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")), "/usr/local/cuda"):
        path = shutil.which("nvcc", path=None if folder is None else os.path.join(folder, "bin"))
        if path:
            return path
    return None


@functools.cache
def version_of(compiler: str) -> str:
    """What a compiler says of itself. Raises StorageError E1555."""
    return _run([compiler, "--version"], seconds=60)


@functools.cache
def known_architectures(nvcc: str) -> tuple[int, ...]:
    """The architectures that an nvcc can make code for, plain ones, ascending: (75, 80, 86, ...)."""
    words = _run([nvcc, "--list-gpu-code"], seconds=60).split()
    return tuple(sorted(int(word[3:]) for word in words if word.startswith("sm_") and word[3:].isdigit()))


def host_recipe(extra: tuple[str, ...] = ()) -> BuildRecipe:
    """The shim by g++. Raises UsageError E1554 where there is none."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise UsageError(
            "no g++ on the PATH: the host shim can't be built",
            code="E1554",
            hint="install g++ 11 or newer, or name one in CXX",
        )
    return BuildRecipe("host", compiler, version_of(compiler), (*HOST_FLAGS, *extra), ())


def cuda_recipe(architectures: tuple[int, ...] = ARCHITECTURES, extra: tuple[str, ...] = ()) -> BuildRecipe:
    """The kernels for those of these architectures (90 for compute capability 9.0) that nvcc knows, with PTX of the
    last. Where it knows none of them, for the newest before them: the driver makes code of its PTX.

    Raises UsageError: E1554 where there is no nvcc, E1558 where it knows none that serves."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise UsageError(
            "no nvcc: it is not on the PATH, in $CUDA_HOME/bin or in /usr/local/cuda/bin",
            code="E1554",
            hint="install the CUDA toolkit (12.0 or newer), or build elsewhere and set CKPT_KERNELS=path:FILE",
        )
    supported = known_architectures(nvcc)
    chosen = (
        tuple(sorted(set(architectures) & set(supported))) or tuple(n for n in supported if n < min(architectures))[-1:]
    )
    if not chosen:
        missing = ", ".join(f"sm_{number}" for number in architectures)
        raise UsageError(
            f"{nvcc} makes no code for {missing}: it knows {', '.join(f'sm_{number}' for number in supported)}",
            code="E1558",
            hint="a newer CUDA toolkit knows newer GPUs; CUDA 13 has dropped those before sm_75",
        )
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in chosen[:-1]]
    targets.append(f"-gencode=arch=compute_{chosen[-1]},code=[sm_{chosen[-1]},compute_{chosen[-1]}]")
    return BuildRecipe("cuda", nvcc, version_of(nvcc), (*CUDA_FLAGS, *targets, *extra), chosen)


def compile_to(recipe: BuildRecipe, target: Path) -> str:
    """Compile to `target` and return the compiler's output. Temporary files are put into the same folder.

    Raises StorageError E1555 if the compiler fails.
    """
    scratch = target.parent / f".tmp-{os.getpid()}"
    try:
        scratch.mkdir(mode=0o700, exist_ok=True)
        return _run(recipe.command(target), seconds=COMPILE_SECONDS, scratch=scratch)
    except OSError as e:
        raise wrap_os_error(e, scratch, "compiling the kernels") from e
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(command: list[str], *, seconds: float, scratch: Path | None = None) -> str:
    name = Path(command[0]).name
    environment = {**os.environ, "LC_ALL": "C", **({"TMPDIR": str(scratch)} if scratch else {})}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as e:
        raise StorageError(f"{name} has not ended after {seconds:g} s", code="E1555", path=command[0]) from e
    except OSError as e:
        raise wrap_os_error(e, command[0], f"starting {name}") from e

    if done.returncode != 0:
        printed = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise StorageError(
            f"{name} failed with exit code {done.returncode}",
            code="E1555",
            path=command[0],
            faults=printed[-20:],
            hint="CUDA 12.0 or newer and a g++ that it supports are needed; --device cpu does without the kernels",
        )

    return done.stdout + done.stderr


# -- building, once ----------------------------------------------------------------------------------------------------


def ensure_built(kind: Kind, architectures: tuple[int, ...] = ARCHITECTURES, *, force: bool = False) -> Built:
    """The library of that kind, from the cache if it has a valid one, else compiled into it. force: compile always.

    Raises UsageError E1554 (no compiler), E1558 (no such architecture), StorageError E1555 (the compiler fails), E1559
    (the cache can't be used)."""
    if kind == "cuda" and not force and find_nvcc() is None:
        cached = found_for(architectures)
        if cached is not None:
            return cached
    return _build_in_cache(host_recipe() if kind == "host" else cuda_recipe(architectures), force=force)


def found_for(architectures: tuple[int, ...]) -> Built | None:
    """A library that the cache has of these very sources with code for all those GPUs, or PTX from which their driver
    can make it, by whichever compiler. None where there is none."""
    digest = source_digest()
    for key, kept in cache.every(cache.folder()):
        if not isinstance(kept, cache.Kept):
            continue
        of = kept.about
        has = of["architectures"]
        serves = bool(has) and all(wanted in has or wanted > max(has) for wanted in architectures)
        if of["sources"] == digest and of["kind"] == "cuda" and serves:
            return _as_built(kept, key, 0.0, "")
        os.close(kept.opened)
    return None


def _build_in_cache(recipe: BuildRecipe, *, force: bool) -> Built:
    key = recipe.key
    note = ""
    if not force:
        existing, note = _sound(cache.folder(), key)
        if existing is not None:
            return _as_built(existing, key, 0.0, "")
    place, reason = cache.place_to_build()
    notes = [text for text in (note, reason) if text]
    with cache.lock(place, key, LOCK_SECONDS):
        existing, note = _sound(place, key)  # another process may have built it while this one waited
        if existing is not None and not force:
            return _as_built(existing, key, 0.0, "; ".join(notes))
        began = time.monotonic()
        stored = cache.keep(place, key, recipe.about(), lambda target: _compile(recipe, target))
        return _as_built(stored, key, time.monotonic() - began, "; ".join(notes))


def _compile(recipe: BuildRecipe, target: Path) -> None:
    compile_to(recipe, target)


def _sound(place: Path, key: str) -> tuple[cache.Kept | None, str]:
    try:
        return cache.look_up(place, key), ""
    except cache.Refused as e:
        return None, f"{e}: refused, built again"


def _as_built(kept: cache.Kept, key: str, seconds: float, note: str) -> Built:
    about = kept.about
    return Built(kept.path, kept.through(), about["kind"], key, tuple(about["architectures"]), seconds, note, about)


def build_host(target: Path, extra: tuple[str, ...] = ()) -> Path:
    """Compile the host shim to `target`, with every warning an error: for tests, which want sanitizers or a fault
    planted."""
    compile_to(host_recipe((*STRICT, *extra)), target)
    return target
