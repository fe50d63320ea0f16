"""Every kernel with one thing wrong, thousands of times: do the tests see it?

    python tests/kernels/mutants.py box_copy              all mutants of one target
    python tests/kernels/mutants.py descriptors -s 0/2    the first half; another process may run 1/2 at the same time
    python tests/kernels/mutants.py all -n 20             a sample of each
    python tests/kernels/mutants.py box_copy --again OUT  those that an earlier run printed: does a new test see them?

A mutant is a source in which one operator, comparison, constant, cast or field is another (`changes`). A source of a
kernel is compiled into the host shim with the objects of the others as they are; a module of Python is loaded in place
of the real one. Then the target's tests run against it, in a child that ends at the first red one. A mutant is killed
by a red test, a crash, or by taking ten times as long; ASan has the last word on those of a kernel that are left. One
that does not compile is none. What survives is printed, and either its line stands in `equivalent.py` with the reason
why no test could see it, or a test is missing.

Cost: about 2 s a mutant of a kernel, 1 s one of Python.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from equivalent import why_alike

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "kernels"
# of the random lists of boxes; of the watched cases of a kernel
CASES = 2000
QUICK = 40
TRAPS = (
    "-fsanitize=undefined",
    "-fsanitize-undefined-trap-on-error",
)  # a misaligned access or a wrong index ends the child
SECONDS = 30  # a child's CPU time; the tests of a target take a tenth of it


class Target(NamedTuple):
    """A source and what judges it. after, before: only what lies between these texts in the source is mutated."""

    file: str  # below the root
    kernels: tuple[str, ...]  # of kernel_cases.py: some of their cases come first, most mutants go no further
    tests: tuple[str, ...]  # patterns below tests/kernels/
    after: str = ""
    before: str = ""


COPY_TESTS = ("test_box_cases.py", "test_box_huge.py", "test_kernels_watched.py")
TARGETS = {
    "box_copy": Target("kernels/box_copy.cu", ("box_copy",), COPY_TESTS),
    "box_transpose": Target(
        "kernels/box_transpose.cu", ("box_transpose",), ("test_box_transpose.py", "test_transpose_huge.py")
    ),
    "box_cast": Target(
        "kernels/box_cast.cu",
        ("box_cast", "box_dequantise"),
        ("test_box_cast.py", "test_box_dequantise.py", "test_values_huge.py"),
    ),
    "box_quantise": Target("kernels/box_quantise.cu", ("box_quantise",), ("test_box_quantise.py",)),
    "adamw_ema": Target("kernels/adamw_ema.cu", ("adamw_ema",), ("test_device_adamw.py",)),
    "digest": Target("kernels/digest.cu", ("digest",), ("test_device_digests.py", "test_values_huge.py")),
    "compare": Target("kernels/compare.cu", ("compare",), ("test_device_comparisons.py", "test_values_huge.py")),
    "floats": Target(
        "kernels/floats.h",
        ("box_cast", "box_dequantise"),
        ("test_box_cast.py", "test_box_dequantise.py", "test_device_comparisons.py"),
    ),
    "span": Target("kernels/span.h", ("digest", "compare"), ("test_device_digests.py", "test_device_comparisons.py")),
    "walking": Target("kernels/portable.h", ("box_copy",), COPY_TESTS, "// -- walking a descriptor list"),
    "pairs": Target(
        "kernels/portable.h",
        ("box_cast", "box_dequantise"),
        ("test_box_cast.py", "test_box_dequantise.py"),
        "// -- floats by their bits",
        "// -- walking a descriptor list",
    ),
    "descriptors": Target(
        "ckpt_tool/device/descriptors.py",
        ("box_copy", "box_transpose"),
        (
            "test_descriptors.py",
            "test_launches.py",
            "test_box_huge.py",
            "test_box_cases.py",
            "test_box_transpose.py",
            "test_transpose_huge.py",
            "test_box_cast.py",
        ),
    ),
    "casts": Target(
        "ckpt_tool/device/casts.py", ("box_cast", "box_dequantise"), ("test_box_cast.py", "test_box_dequantise.py")
    ),
}

UNITS = {
    "box_copy": ("box_copy.cu",),
    "box_transpose": ("box_transpose.cu", "box_copy.cu"),
    "digest": ("digest.cu",),
    "compare": ("compare.cu",),
    "box_cast": ("box_cast.cu",),
    "box_dequantise": ("box_cast.cu",),
    "box_quantise": ("box_quantise.cu",),
    "adamw_ema": ("adamw_ema.cu",),
}

# -- making them -------------------------------------------------------------------------------------------------------

OPERATORS = {
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "/": ("*",),
    "%": ("/",),
    "//": ("*",),
    "<<": (">>",),
    ">>": ("<<",),
    "<": ("<=", ">"),
    "<=": ("<", ">"),
    ">": (">=", "<"),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "&&": ("||",),
    "||": ("&&",),
    "and": ("or",),
    "or": ("and",),
    "&": ("|",),
    "|": ("&",),
    "^": ("|",),
    "+=": ("-=",),
    "-=": ("+=",),
    "++": ("--",),
    "--": ("++",),
    ">>=": ("<<=",),
    "<<=": (">>=",),
    "*=": ("+=",),
    "/=": ("*=",),
    "%=": ("/=",),
    "|=": ("&=",),
    "&=": ("|=",),
    "^=": ("|=",),
}
NAMES = {
    "src": "dst",
    "dst": "src",
    "sstr": "dstr",
    "dstr": "sstr",
    "source": "target",
    "target": "source",
    "div1": "div2",
    "div2": "div1",
    "divr": "div2",
    "rows": "run",
    "run": "rows",
    "rows_per_tile": "tiles_per_row",
    "tiles_per_row": "rows_per_tile",
    "tile0": "aux",
    "by_source": "by_target",
    "by_target": "by_source",
    "uint64_t": "uint32_t",
    "int64_t": "int32_t",
    "ck_tid": "ck_bid",
    "ck_nt": "ck_nb",
    "ck_bid": "ck_tid",
    "ck_nb": "ck_nt",
}
TOKEN = re.compile(
    r"(?P<skip>//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|^[ \t]*#[^\n]*(?:\\\n[^\n]*)*)"
    r"|(?P<number>0[xX][0-9a-fA-F]+[uUlL]*|\d[\d.]*(?:[eE][-+]?\d+)?[uUlLfF]*)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<operator><<=|>>=|->|::|\+\+|--|&&|\|\||[-+*/%&|^<>=!]=|<<|>>|[-+*/%&|^<>])",
    re.MULTILINE | re.DOTALL,
)


class Mutant(NamedTuple):
    """`new` in place of what stands at [begin, end) of the source."""

    begin: int
    end: int
    new: str
    line: int
    text: str  # the line as it stands
    change: str  # "< to <= (2)": the second such token of the line

    @property
    def place(self) -> str:
        return f"{self.line}: {self.text}    [{self.change}]"


def changes(kind: str, text: str) -> tuple[str, ...]:
    """What a token is replaced by."""
    if kind == "operator" or text in ("and", "or"):
        return OPERATORS.get(text, ())
    if kind == "name":
        return (NAMES[text],) if text in NAMES else ()
    match = re.fullmatch(r"(0[xX][0-9a-fA-F]+|\d+)([uUlL]*)", text)
    if match is None:
        return ()
    value = int(match[1], 0)
    suffix = match[2]
    return (f"{value + 1}{suffix}", f"{value - 1}{suffix}") if value else (f"1{suffix}",)


def tokens_of_c(source: str, begin: int) -> Iterator[tuple[int, str, str]]:
    """(offset, kind, text) of each token within function bodies."""
    for match in TOKEN.finditer(source, begin):
        if match.lastgroup and match.lastgroup != "skip":
            yield match.start(), match.lastgroup, match[0]


def tokens_of_python(source: str) -> Iterator[tuple[int, str, str]]:
    """The same of a module, without what no run reads: annotations, imports, strings."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    dull: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for node in ast.walk(ast.parse(source)):
        found = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        found += [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
        for inner in found:
            if isinstance(inner, ast.expr | ast.stmt):
                dull.append(((inner.lineno, inner.col_offset), (inner.end_lineno or 0, inner.end_col_offset or 0)))
    kinds = {tokenize.OP: "operator", tokenize.NUMBER: "number", tokenize.NAME: "name"}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds and not any(low <= token.start < high for low, high in dull):
            yield starts[token.start[0] - 1] + token.start[1], kinds[token.type], token.string


def mutants_of(target: Target) -> list[Mutant]:
    source = (ROOT / target.file).read_text()
    begin = source.index(target.after)
    lines = source.splitlines()
    end = source.index(target.before) if target.before else len(source)
    tokens = tokens_of_python(source) if target.file.endswith(".py") else tokens_of_c(source, begin)
    seen: Counter[tuple[int, str]] = Counter()
    found = []
    for at, kind, text in tokens:
        if at >= end:
            break
        number = source.count("\n", 0, at) + 1
        line = lines[number - 1].strip()
        seen[number, text] += 1
        for new in changes(kind, text):
            change = f"{text} to {new} ({seen[number, text]})"
            found.append(Mutant(at, at + len(text), new, number, line, change))
    return found


# -- judging them ------------------------------------------------------------------------------------------------------


class Shim:
    """Builds the host shim with one source replaced, compiling only what includes it."""

    def __init__(self, scratch: Path) -> None:
        from ckpt_tool.device import build

        self.units = [f"{name}.cu" for name in build.KERNELS] + ["host.cpp"]
        self.flags = [flag for flag in build.HOST_FLAGS if flag not in ("-O2", "-g", "-shared")] + ["-O1", "-w", *TRAPS]
        self.plain = scratch / "plain"
        self.folder = scratch / "mutated"
        for folder in (self.plain, self.folder):
            shutil.copytree(SOURCES, folder)
        prefix = scratch / "prefix.h"
        prefix.write_text("#include <functional>\n#include <stddef.h>\n#include <stdint.h>\n#include <string.h>\n")
        subprocess.run(["g++", *self.flags, "-x", "c++-header", str(prefix)], check=True)
        self.flags += ["-include", str(prefix)]
        for unit in self.units:
            if not self.compile(self.plain, unit):
                raise RuntimeError(f"{unit} does not compile as it is")
        self.library = scratch / "plain.so"
        self.link(self.library, {})

    def compile(self, folder: Path, unit: str) -> bool:
        command = ["g++", *self.flags, "-c", "-x", "c++", str(folder / unit), "-o", str(folder / f"{unit}.o")]
        return subprocess.run(command, capture_output=True).returncode == 0

    def link(self, library: Path, mutated: dict[str, Path]) -> None:
        objects = [str(mutated.get(unit, self.plain / f"{unit}.o")) for unit in self.units]
        subprocess.run(["g++", "-shared", "-pthread", *objects, "-o", str(library)], check=True, capture_output=True)

    def reached(self, name: str, unit: str) -> bool:
        """Does `unit` include `name`, by whatever way?"""
        if unit == name:
            return True
        text = (self.plain / unit).read_text()
        return any(self.reached(name, inner) for inner in re.findall(r'#include "([^"]+)"', text))

    def build(self, name: str, text: str) -> Path | None:
        """The library with `text` for `name`; None where it does not compile."""
        original = (self.plain / name).read_text()
        (self.folder / name).write_text(text)
        try:
            units = [unit for unit in self.units if self.reached(name, unit) and (unit == name or unit != "host.cpp")]
            if not all(self.compile(self.folder, unit) for unit in units):
                return None
            library = self.folder / "mutated.so"
            library.unlink(missing_ok=True)  # a new file: the old one may be mapped
            self.link(library, {unit: self.folder / f"{unit}.o" for unit in units})
            return library
        finally:
            (self.folder / name).write_text(original)

    def dirty(self, name: str, text: str, kernels: tuple[str, ...]) -> bool:
        """Does a sanitizer of addresses complain of the cases of these kernels? The shim's lists and records are no
        tensors: nobody watches what is read beside them."""
        from planting import ADDRESS, run_under

        original = (self.plain / name).read_text()
        (self.folder / name).write_text(text)
        try:
            for kernel in kernels:
                library = self.folder / "sanitized.so"
                units = [str(self.folder / unit) for unit in (*UNITS[kernel], "host.cpp")]
                flags = [
                    "-std=c++20",
                    "-shared",
                    "-fPIC",
                    "-fno-strict-aliasing",
                    "-ffp-contract=off",
                    "-pthread",
                    "-w",
                    *ADDRESS,
                ]
                subprocess.run(
                    ["g++", *flags, "-x", "c++", *units, "-o", str(library)], check=True, capture_output=True
                )
                if run_under("asan", str(HERE / "kernel_cases.py"), str(library), kernel, "100").returncode:
                    return True
            return False
        finally:
            (self.folder / name).write_text(original)


def load_instead(file: str, text: str) -> None:
    """Make `text` the module of `file`, before anyone imports it."""
    import types

    name = file.removesuffix(".py").replace("/", ".")
    __import__(name.rpartition(".")[0])
    module = types.ModuleType(name)
    module.__file__ = str(ROOT / file)
    sys.modules[name] = module
    exec(compile(text, str(ROOT / file), "exec"), module.__dict__)


def passes(target: Target, library: Path, text: str | None = None) -> bool:
    """Are the target's tests green with this library, and `text` as its module? In a child of this process."""
    child = os.fork()
    if child:
        return _green(child)
    code = 99
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        os.environ["CKPT_KERNELS"], os.environ["CKPT_KERNEL_CASES"] = f"path:{library}", str(CASES)
        if text is not None:
            load_instead(target.file, text)
        code = _run(target, library)
    finally:
        os._exit(code)


def _run(target: Target, library: Path) -> int:
    """0 where all is well: the watched cases first, which take no time, then the tests."""
    import pytest
    from kernel_cases import KERNELS

    from ckpt_tool.device.library import Device, Library

    device = Device(Library(library))
    for kernel in target.kernels:
        if any(KERNELS[kernel](device, seed) for seed in range(QUICK)):
            return 1
    files = [str(path) for pattern in target.tests for path in sorted(HERE.glob(pattern))]
    options = [
        word for plugin in ("cacheprovider", "faulthandler", "xdist", "anyio") for word in ("-p", f"no:{plugin}")
    ]
    options += ["-o", "addopts=--import-mode=importlib", "-m", "not slow and not peers and not crash"]  # one process
    return int(pytest.main(["-x", "-q", *options, "--rootdir", str(ROOT), *files]))


def _green(child: int) -> bool:
    """Wait for a child: did it end by itself, with nothing to complain of?"""
    limit = time.monotonic() + 3 * SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


class Verdict(NamedTuple):
    mutant: Mutant
    result: str  # killed, survived, equivalent


def judge(name: str, chosen: list[Mutant], *, loud: bool = True, trust: bool = False) -> list[Verdict]:
    """Run the tests of a target against each of these mutants. RuntimeError where they are red without any.

    trust: those that equivalent.py knows are not run: they take longest.
    """
    target = TARGETS[name]
    verdicts = []
    source = (ROOT / target.file).read_text()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        shim = Shim(Path(scratch))
        import hypothesis  # noqa: F401  what children need and never change is loaded once
        import numpy  # noqa: F401
        import pytest  # noqa: F401

        if not target.file.endswith(".py"):
            import kernel_cases  # noqa: F401
        if not passes(target, shim.library):
            raise RuntimeError(f"the tests of {name} are red without a mutant")
        for number, mutant in enumerate(chosen):
            alike = why_alike(Path(target.file).name, mutant.text, mutant.change)
            if trust and alike:
                verdicts.append(Verdict(mutant, "equivalent"))
                continue
            text = source[: mutant.begin] + mutant.new + source[mutant.end :]
            if target.file.endswith(".py"):
                green = passes(target, shim.library, text)
            else:
                library = shim.build(Path(target.file).name, text)
                if library is None:
                    continue
                green = passes(target, library) and not shim.dirty(Path(target.file).name, text, target.kernels)
            result = "killed"
            if green:
                result = "equivalent" if alike else "survived"
            verdicts.append(Verdict(mutant, result))
            if loud and green:
                print(f"{name} {number + 1}/{len(chosen)} {result}: {mutant.place}", flush=True)
            elif loud and len(verdicts) % 50 == 0:
                print(f"{name} {number + 1}/{len(chosen)}: {len(verdicts)} judged", flush=True)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("-s", "--slice", default="0/1", help="part I of N")
    parser.add_argument("-n", "--sample", type=int, default=0, help="so many mutants, drawn by chance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="only those that a former run's output, in this file, names")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first ones: they were judged before")
    parser.add_argument("--trust", action="store_true", help="don't run those that equivalent.py knows")
    parser.add_argument("--list", action="store_true", help="only show them")
    options = parser.parse_args()
    part, parts = map(int, options.slice.split("/"))
    missed = 0
    for name in TARGETS if options.target == "all" else [options.target]:
        chosen = mutants_of(TARGETS[name])
        if options.again:
            told = options.again.read_text()
            chosen = [mutant for mutant in chosen if f"{mutant.text}    [{mutant.change}]" in told]
        if options.sample:
            chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
        chosen = chosen[part::parts][options.skip :]
        if options.list:
            print("\n".join(mutant.place for mutant in chosen))
            continue
        began = time.monotonic()
        counts = Counter(verdict.result for verdict in judge(name, chosen, trust=options.trust))
        total = counts.total()
        print(
            f"{name}: {total} mutants, {counts['killed']} killed ({counts['killed'] / max(total, 1):.1%}), "
            f"{counts['equivalent']} equivalent, {counts['survived']} survived, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        missed += counts["survived"]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(HERE)]
    sys.exit(main())
