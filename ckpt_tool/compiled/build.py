"""Builds the compiled loops: one shared library that is loaded by ctypes and serves every Python.

    python -m ckpt_tool.compiled.build       # in a clone: next to the sources, where git ignores it

The hook of the wheel (`hatch_build.py`) calls `build` too. Nothing else does: a run never starts a compiler.

blocks.c and floats.c are compiled once for each path: `baseline` (x86-64-v2; elsewhere what every processor of the kind
has, which is NEON on aarch64), `avx2` and `avx512`. paths.c says which of them the processor at hand can run. Each is
compiled with -ffp-contract=off: a processor with AVX2 has fused multiply-adds, and a compiler that used them would
change bits.

$CC names the compiler, $CFLAGS and $LDFLAGS are passed on in front of the flags here, so that these decide.

Needs only Python and a C compiler: the hook imports this file where nothing that the package needs is installed. A
wheel goes without it. Cost: 13 s of CPU, on all cores at once.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ckpt_tool.compiled.sources import FOLDER, LIBRARY, SOURCES, is_current, source_digest

OF_EACH_PATH = ("blocks.c", "floats.c")  # the others have no loops over numbers: they are compiled once
REQUIRED = ("baseline",)  # a library without the other paths is slower, one without this is none

# No fast-math, no contraction: the bits are stated in the source.
FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden"),
    *("-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)

# What each path may use in addition to FLAGS. paths.c asks the processor for the same features, one by one.
_V2 = ("-march=x86-64", "-mtune=generic", "-mssse3", "-msse4.2", "-mpopcnt")
_AVX2 = (*_V2, "-mavx2", "-mfma", "-mbmi", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
_X86_64: Mapping[str, tuple[str, ...]] = {"baseline": _V2, "avx2": _AVX2, "avx512": _AVX512}
_ANY: Mapping[str, tuple[str, ...]] = {"baseline": ()}
# Measured on Zen 4 with gcc 12: floats of blocks take half the time with vectors of 256 bits; the rest wants 512.
_MORE_FLAGS = {("floats.c", "avx512"): ("-mprefer-vector-width=256",)}

_SECONDS = 300  # for one call of the compiler


class NotBuilt(Exception):
    """There is no library, and why: no compiler, or one that fails."""


class Built(NamedTuple):
    """A library that was built."""

    path: Path
    compiler: str
    paths: tuple[str, ...]
    failures: tuple[str, ...]  # paths that this compiler can't make, with its words


def find_compiler() -> list[str]:
    """The command of the C compiler: $CC, else cc, gcc or clang. Raises NotBuilt."""
    given = shlex.split(os.environ.get("CC", ""))
    if given:
        if shutil.which(given[0]) is None:
            raise NotBuilt(f"CC names the compiler {given[0]}, which is not on the PATH")
        return given
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise NotBuilt("no C compiler: neither cc, gcc nor clang is on the PATH")


def build(target: Path, folder: Path = FOLDER, environment: Mapping[str, str] | None = None) -> Built:
    """Compile the sources to `target`, which is replaced as a whole or left as it was.

    environment: variables for the compiler in addition to this process's. Raises NotBuilt; `failures` of the result
    says which paths this compiler can't make, and they are left out."""
    compiler = find_compiler()
    variables = {**os.environ, "LC_ALL": "C", **(environment or {})}
    version = _run([*compiler, "--version"], folder, variables).splitlines()[0]
    is_x86_64 = platform.machine().lower() in ("x86_64", "amd64")
    flags_of = _X86_64 if is_x86_64 else _ANY

    with tempfile.TemporaryDirectory(prefix="ckpt-loops-") as scratch:
        given = [*shlex.split(os.environ.get("CFLAGS", "")), *shlex.split(os.environ.get("ARCHFLAGS", ""))]
        compile_one = [*compiler, *given, *FLAGS]

        def compile_source(source: str, output: str, flags: Sequence[str]) -> str:
            """Returns what went wrong, "" for nothing."""
            command = [*compile_one, *flags, "-c", source, "-o", os.path.join(scratch, output)]
            try:
                _run(command, folder, variables)
            except NotBuilt as e:
                return str(e)
            return ""

        # Every source of every path at the same time.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            of_paths = {
                (path, source): pool.submit(
                    compile_source,
                    source,
                    _object_name(source, path),
                    (*flags, *_MORE_FLAGS.get((source, path), ()), f"-DCK_PATH={path}"),
                )
                for path, flags in flags_of.items()
                for source in OF_EACH_PATH
            }
            of_others = [
                pool.submit(compile_source, source, _object_name(source), flags_of["baseline"])
                for source in ("rows.c", "twins.c")
            ]

        errors = dict.fromkeys(flags_of, "")
        for (path, _), task in of_paths.items():
            errors[path] = errors[path] or task.result()
        fatal = [*(errors[path] for path in REQUIRED), *(task.result() for task in of_others)]
        if any(fatal):
            raise NotBuilt(next(filter(None, fatal)))
        paths = tuple(path for path, error in errors.items() if not error)
        failures = tuple(f"{path}: {error}" for path, error in errors.items() if error)

        facts = [f"-DCK_HAS_{path.upper()}" for path in paths if path not in REQUIRED]
        facts += [f'-DCK_BUILT_FROM="{source_digest(folder)}"', f'-DCK_COMPILER="{_quotable(version)}"']
        any_processor = ("-march=x86-64",) if is_x86_64 else ()
        error = compile_source("paths.c", _object_name("paths.c"), (*any_processor, *facts))
        if error:
            raise NotBuilt(error)

        objects = [_object_name(source, path) for path in paths for source in OF_EACH_PATH]
        objects += [_object_name(source) for source in SOURCES if source not in OF_EACH_PATH]
        linked = os.path.join(scratch, LIBRARY)
        _run([*compiler, *_link_flags(), *objects, "-o", linked], Path(scratch), variables)
        _replace(target, Path(linked))
    return Built(target, version, paths, failures)


def _object_name(source: str, path: str = "") -> str:
    stem = source.removesuffix(".c")
    return f"{stem}_{path}.o" if path else f"{stem}.o"


def _link_flags() -> list[str]:
    """Flags that make a library whose bytes depend on nothing but the sources and the compiler."""
    given = [*shlex.split(os.environ.get("LDFLAGS", "")), *shlex.split(os.environ.get("ARCHFLAGS", ""))]
    if sys.platform == "darwin":
        return [*given, "-shared", f"-Wl,-install_name,@rpath/{LIBRARY}"]
    return [*given, "-shared", "-s", "-Wl,-z,relro,-z,now"]


def _quotable(text: str) -> str:
    return "".join(letter for letter in text if letter.isprintable() and letter not in '"\\')


def _replace(target: Path, linked: Path) -> None:
    """A process that has the old library open keeps it; another that builds at this moment does no harm."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copyfile(linked, partial)
        partial.chmod(0o755)
        os.replace(partial, target)
    except OSError as e:
        raise NotBuilt(f"{target} can't be written: {e.strerror}") from e
    finally:
        partial.unlink(missing_ok=True)


def _run(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> str:
    """What the compiler printed. Raises NotBuilt with its first lines."""
    name = os.path.basename(command[0])
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as e:
        raise NotBuilt(f"{name} has not ended after {_SECONDS} s") from e
    except OSError as e:
        raise NotBuilt(f"{name} can't be started: {e.strerror}") from e
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        reason = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it printed nothing")
        raise NotBuilt(f"{name} failed with exit code {done.returncode}: {reason}")
    return done.stdout


def main() -> int:
    """Build the library next to the sources. 0: it is there; 1: it can't be built."""
    target = FOLDER / LIBRARY
    if is_current(target):
        print(f"{target} is up to date")
        return 0
    try:
        built = build(target)
    except NotBuilt as e:
        print(f"not built: {e}", file=sys.stderr)
        return 1
    print(f"{built.path}: {', '.join(built.paths)}, by {built.compiler}")
    for failure in built.failures:
        print(f"left out {failure}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
