"""The kernels made into a shared library: by nvcc for a GPU, by g++ for the host shim."""

from __future__ import annotations

import subprocess
from pathlib import Path

KERNELS = ("box_copy",)
PACKAGE = Path(__file__).resolve().parents[2]


def sources() -> Path:
    """The folder of the sources: inside the package where it was installed, beside it in a checkout."""
    inside = PACKAGE / "_kernels"
    return inside if inside.is_dir() else PACKAGE.parent / "kernels"


def build_host(target: Path, extra: tuple[str, ...] = ()) -> Path:
    """Compile the host shim to `target` by g++."""
    folder = sources()
    command = ["g++", "-std=c++20", "-O2", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-Wall",
               "-Wextra", "-Werror", *extra, "-x", "c++", *(str(folder / f"{name}.cu") for name in KERNELS),
               str(folder / "host.cpp"), "-o", str(target)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target
