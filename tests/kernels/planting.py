"""Sources of the kernels with one thing wrong, and runs of them under a sanitizer, in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ckpt_tool.device import build

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ADDRESS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
THREAD = ("-O1", "-fsanitize=thread", "-DCK_THREADS", "-Wno-tsan")  # TSan does not model fences, std::barrier has none


def plant(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the sources in `folder`, and of probe.cu, with `old` replaced by `new` where it first stands in
    `file`."""
    shutil.copytree(build.sources(), folder, ignore=shutil.ignore_patterns("*.so", "*.md"))
    shutil.copy(HERE / "probe.cu", folder)
    text = (folder / file).read_text()
    if old not in text:
        raise LookupError(f"{file} has no {old!r}: plant the fault elsewhere")
    (folder / file).write_text(text.replace(old, new, 1))
    return folder


def run_under(sanitizer: str, *command: str, library: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Python with `command` in a process into which `sanitizer` ("asan", "tsan", "" for none) is loaded; exit code 66
    is a report of it. library: what CKPT_KERNELS names, where the command is one that looks there."""
    environment = os.environ | {
        "ASAN_OPTIONS": "exitcode=66:detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "exitcode=66:print_stacktrace=1",
        "TSAN_OPTIONS": "exitcode=66:halt_on_error=1:report_signal_unsafe=0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
    }
    if sanitizer:  # it must come before everything else that allocates
        name = subprocess.run(
            ["g++", f"-print-file-name=lib{sanitizer}.so"], capture_output=True, text=True, check=True
        )
        environment["LD_PRELOAD"] = name.stdout.strip()
    if library is not None:
        environment["CKPT_KERNELS"] = f"path:{library}"
    # TSan wants its shadow where address space randomisation may put other things
    prefix = ["setarch", "-R"] if sanitizer == "tsan" else []
    return subprocess.run(
        [*prefix, sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600
    )
