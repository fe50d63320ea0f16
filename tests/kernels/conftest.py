"""One library and one device for all tests of the kernels.

CKPT_KERNELS chooses, as it does for `ckpt`: unset, or `host`, is the shim, built here by g++ once and kept in pytest's
cache under a hash of all that it is made of (CKPT_TEST_SHIM=FILE is one that was built from these sources already);
`cuda` is the GPU at hand; `path:FILE` is a library built before. A test asks for `device` and says nothing of which it
is; what only a GPU or only the shim can show asks for `gpu` or `shim`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckpt_tool.device.library import Device, Library

sys.path.insert(0, str(Path(__file__).parent))  # box_cases.py and its like

from library_builds import CHOICE, built


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
    """A g++ that gives the library of this session for whatever it is asked to compile: for tests of what is around a
    build."""
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
