"""What nvcc made of the kernels, read from its own reports: no spills, no local memory, 16-byte loads and stores where
promised.

    python tests/kernels/machine_code.py [--arch 80,90,100] [--markdown]      exit 1 where a kernel breaks a promise

Two witnesses: the assembler's report (`-Xptxas -v`: registers, stack, spills), which every nvcc gives, and the machine
code by cuobjdump, which the CUDA toolkit has, and the triton wheel (`triton/backends/nvidia/bin/`). Without the second
the accesses are not looked at, and the report says so.

Registers count because they decide how many threads a multiprocessor holds; a load told to be in global memory is
`LDG`, one of which the compiler knows nothing `LD`; spilled registers and arrays that are indexed at run time are `LDL`
and `STL`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ckpt_tool.device import build

# What each kernel promises of its accesses: opcodes that must be there 16 bytes wide, `A|B` for one of the two. A
# kernel
# without a row is a fault.
PROMISES: dict[str, tuple[str, ...]] = {
    "box_copy": ("LDG", "STG"),
    "box_transpose": ("LDG", "STG"),
    "box_cast": ("LDG|STG",),  # the side of the wider elements
    "box_quantise": ("LDG",),  # codes are narrower
    "digest": ("LDG",),  # a leaf in, 16 bytes out
    "compare": ("LDG",),
    "adamw_ema": ("LDG", "STG"),
    "ema_swap": ("LDG", "STG"),
}
# Instances that promise nothing: those for the pairs of types that trained weights don't have, element by element.
WITHOUT = {"box_cast": re.compile(r"ck_any|f64")}

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_ARCHITECTURE = re.compile(r"^\s*(?:arch|\.target)\s*=?\s*sm_(\d+)")
_FUNCTION = re.compile(r"Function : (\S+)")
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*(?:\.[A-Za-z0-9_]+)*)")


class Resources(NamedTuple):
    """One kernel for one architecture, by the assembler. Bytes."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


Entry = tuple[str, int]  # mangled name, architecture


def resources_of(report: str) -> dict[Entry, Resources]:
    """The assembler's report, read."""
    found: dict[Entry, Resources] = {}
    entry: Entry | None = None
    frame = (0, 0, 0)
    for line in report.splitlines():
        if match := _ENTRY.search(line):
            entry = (match[1], int(match[2]))
            frame = (0, 0, 0)
        elif match := _FRAME.search(line):
            frame = (int(match[1]), int(match[2]), int(match[3]))
        elif (match := _USED.search(line)) and entry is not None:
            shared = _SHARED.search(line)
            found[entry] = Resources(int(match[1]), *frame, int(shared[1]) if shared else 0)
            entry = None
    return found


def accesses_of(listing: Iterable[str]) -> dict[Entry, Counter[str]]:
    """cuobjdump's listing as opcodes by kernel and architecture, with their widths: `LDG.128`, `STG.16`, `LDL.32`, and
    the reciprocals that a division costs (`MUFU.RCP`)."""
    found: dict[Entry, Counter[str]] = {}
    architecture = 0
    counted = Counter[str]()
    for line in listing:
        if match := _ARCHITECTURE.search(line):
            architecture = int(match[1])
        elif match := _FUNCTION.search(line):
            counted = found.setdefault((match[1], architecture), Counter())
        elif match := _OPCODE.search(line):
            opcode, *modifiers = match[1].split(".")
            if opcode in ("LD", "ST", "LDG", "STG", "LDL", "STL"):
                widths = [
                    word.lstrip("US") for word in modifiers if word.lstrip("US") in ("8", "16", "64", "128", "256")
                ]
                counted[f"{opcode}.{widths[0] if widths else 32}"] += 1
            elif match[1].startswith("MUFU.RCP"):
                counted["MUFU.RCP"] += 1
    return found


def kernels_in(sources: Path, names: Iterable[str]) -> list[str]:
    """The kernels that the sources declare."""
    found = []
    for name in names:
        found += re.findall(r"CK_KERNEL\([^)]*\)\s*void\s+(\w+)", (sources / f"{name}.cu").read_text(encoding="utf-8"))
    return found


def kernel_of(mangled: str, kernels: Iterable[str]) -> str:
    """The kernel that a mangled name is an instance of, "" for none."""
    return next((name for name in sorted(kernels, key=len, reverse=True) if f"{len(name)}{name}" in mangled), "")


def faults(
    resources: Mapping[Entry, Resources],
    accesses: Mapping[Entry, Counter[str]],
    kernels: Iterable[str],
    architectures: Iterable[int],
    promises: Mapping[str, tuple[str, ...]] | None = None,
) -> list[str]:
    """Every broken promise, in words. accesses: empty where there was no disassembler."""
    promises = PROMISES if promises is None else promises
    kernels = list(kernels)
    architectures = list(architectures)
    found = []
    for name in kernels:
        if name not in promises:
            found.append(f"{name}: says nothing of its accesses: give it a row in PROMISES")
        for architecture in architectures:
            if not any(kernel_of(entry, kernels) == name and at == architecture for entry, at in resources):
                found.append(f"{name} for sm_{architecture}: was not compiled")
    for (entry, architecture), used in resources.items():
        where = f"{spelled(entry)} for sm_{architecture}"
        if used.stack or used.spill_stores or used.spill_loads:
            found.append(
                f"{where}: {used.stack} bytes of stack, {used.spill_stores} spilled and {used.spill_loads} loaded back"
            )
    for (entry, architecture), counted in accesses.items():
        where = f"{spelled(entry)} for sm_{architecture}"
        if local := {opcode: n for opcode, n in counted.items() if opcode.startswith(("LDL", "STL"))}:
            found.append(f"{where}: local memory: {local}")
        name = kernel_of(entry, kernels)
        if name in WITHOUT and WITHOUT[name].search(entry):
            continue
        for opcode in promises.get(name, ()):
            if not any(counted[f"{one}.{width}"] for one in opcode.split("|") for width in (128, 256)):
                found.append(f"{where}: no {opcode} of 16 bytes, only {dict(counted)}")
    return found


def spelled(mangled: str) -> str:
    """A mangled name as written, where a demangler is at hand."""
    program = shutil.which("c++filt") or shutil.which("cu++filt")
    if program is None:
        return mangled
    text = subprocess.run([program, mangled], capture_output=True, text=True, check=True).stdout.strip()
    return re.sub(
        r"\(anonymous namespace\)::|_GLOBAL__N__\w+::|^void |\(.*\)$", "", text.replace("(anonymous namespace)", "")
    ).lstrip(":")


def disassembler() -> str | None:
    """cuobjdump: named by $CUOBJDUMP, on the PATH, beside nvcc, or in the triton wheel where that is installed."""
    nvcc = build.find_nvcc()
    spec = importlib.util.find_spec("triton")
    places = [
        os.environ.get("CUOBJDUMP"),
        shutil.which("cuobjdump"),
        nvcc and str(Path(os.path.realpath(nvcc)).parent / "cuobjdump"),
    ]
    if spec is not None and spec.origin is not None:
        places.append(str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"))
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def compiled(target: Path, architectures: tuple[int, ...]) -> dict[Entry, Resources]:
    """Compile all kernels to `target`, every warning an error, and read the report. One thread: reports must not
    mix."""
    recipe = build.cuda_recipe(architectures, ("-Xptxas=-v", "-Werror=all-warnings"))
    flags = tuple(flag for flag in recipe.flags if flag not in ("--threads", "0"))
    return resources_of(build.compile_to(dataclasses.replace(recipe, flags=flags), target))


def disassembled(program: str, library: Path) -> dict[Entry, Counter[str]]:
    with subprocess.Popen([program, "-sass", str(library)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = accesses_of(process.stdout)
    if process.returncode != 0:
        raise SystemExit(f"{program} failed on {library}")
    return found


def table(resources: Mapping[Entry, Resources], accesses: Mapping[Entry, Counter[str]]) -> str:
    """Markdown: a row a kernel and architecture."""
    rows = [
        "| kernel | arch | registers | shared, bytes | stack and spills, bytes | 16-byte loads, stores | "
        "narrower | divides |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (entry, architecture), used in sorted(resources.items(), key=lambda row: (spelled(row[0][0]), row[0][1])):
        seen = accesses.get((entry, architecture))
        narrow = (
            "-"
            if seen is None
            else sum(n for opcode, n in seen.items() if re.fullmatch(r"(LDG|STG)\.(8|16|32|64)", opcode))
        )
        wide = "-" if seen is None else f"{seen['LDG.128']}, {seen['STG.128']}"
        rows.append(
            f"| {spelled(entry)} | sm_{architecture} | {used.registers} | {used.shared} | "
            f"{used.stack + used.spill_stores + used.spill_loads} | {wide} | {narrow} | "
            f"{'-' if seen is None else seen['MUFU.RCP']} |"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", default=",".join(map(str, build.ARCHITECTURES)))
    parser.add_argument("--keep", type=Path, help="leave the library there")
    arguments = parser.parse_args()
    nvcc = build.find_nvcc()
    program = disassembler()
    if nvcc is None:
        print("no nvcc here: the kernels were not compiled for any GPU")
        return 0
    architectures = tuple(int(word) for word in arguments.arch.split(","))
    with tempfile.TemporaryDirectory() as folder:
        library = arguments.keep or Path(folder) / "libck.so"
        resources = compiled(library, architectures)
        accesses = disassembled(program, library) if program else {}
        nbytes = library.stat().st_size
    print(table(resources, accesses))
    print(f"\n{nbytes} bytes, by {next(line for line in build.version_of(nvcc).splitlines() if 'release' in line)}")
    if program is None:
        print("no cuobjdump here (the CUDA toolkit has it, and the triton wheel): the accesses were not looked at")
    wrong = faults(resources, accesses, kernels_in(build.sources(), build.KERNELS), architectures)
    print("\n".join(wrong) if wrong else "every kernel keeps its promises")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
