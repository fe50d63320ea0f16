"""The build hook of the wheel: the compiled loops become one shared library in it.

    CKPT_BUILD_COMPILED unset       the library where there is a C compiler, else a wheel without it, with a warning
    CKPT_BUILD_COMPILED=required    an error where the library, or one of its paths, can't be built: for releases
    CKPT_BUILD_COMPILED=off         a wheel without it, for any platform

The library is loaded by ctypes, so one wheel serves every Python of a platform: py3-none-PLATFORM. A wheel without it
is py3-none-any, and says inside why (`ckpt doctor` shows it). An editable install gets the library next to the sources.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "CKPT_BUILD_COMPILED"
SETTINGS = ("", "required", "off")
FOLDER = "ckpt_tool/compiled"
REASON_FILE = "no_library.txt"  # as `ckpt_tool/compiled/loading.py` reads it


class CompiledLoops(BuildHookInterface[Any]):
    """Called by hatchling for the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        setting = os.environ.get(VARIABLE, "")
        if setting not in SETTINGS:
            raise SystemExit(f"{VARIABLE}={setting} is unknown: want required, off, or leave it unset")

        builder = _import_builder(Path(self.root))
        host = _host_platform()
        self._scratch = tempfile.mkdtemp(prefix="ckpt-wheel-")
        is_editable = version == "editable"
        folder = Path(self.root, FOLDER) if is_editable else Path(self._scratch)
        try:
            if setting == "off":
                raise builder.NotBuilt(f"{VARIABLE}=off")
            built = builder.build(folder / builder.LIBRARY, environment=_deployment_target(host))
        except builder.NotBuilt as e:
            if setting == "required":
                raise SystemExit(f"the compiled loops can't be built: {e}") from None
            self.app.display_warning(f"without compiled loops, NumPy does their work: {e}")
            if not is_editable:
                reason = folder / REASON_FILE
                reason.write_text(f"{e}\n", encoding="utf-8")
                build_data["force_include"][str(reason)] = f"{FOLDER}/{REASON_FILE}"
            return

        for failure in built.failures:
            self.app.display_warning(f"the compiled loops lack a path, {failure}")
        if built.failures and setting == "required":
            raise SystemExit("a path of the compiled loops can't be built: see above")
        if not is_editable:
            build_data["force_include"][str(built.path)] = f"{FOLDER}/{builder.LIBRARY}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{host}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)


def _import_builder(root: Path) -> ModuleType:
    """`ckpt_tool/compiled/build.py` of this tree. It imports nothing that is not there in an isolated build."""
    sys.path.insert(0, os.fspath(root))
    try:
        from ckpt_tool.compiled import build
    finally:
        sys.path.remove(os.fspath(root))
    return build


def _host_platform() -> str:
    """The platform of the wheel's tag: linux_x86_64 (auditwheel makes a release's manylinux), macosx_11_0_arm64."""
    name = os.environ.get("_PYTHON_HOST_PLATFORM") or sysconfig.get_platform()
    name = name.replace("-", "_").replace(".", "_")
    if not name.startswith("macosx_"):
        return name

    # A Python for two architectures runs here, but the compiler makes code for one.
    architecture = platform.machine()
    version = name.removeprefix("macosx_").split("_")[:2]
    if architecture == "arm64" and int(version[0]) < 11:  # there is no older macOS for it
        version = ["11", "0"]
    return f"macosx_{version[0]}_{version[1]}_{architecture}"


def _deployment_target(host: str) -> dict[str, str]:
    """On macOS: what the compiler is told of the oldest system, so that the tag is true."""
    if not host.startswith("macosx_"):
        return {}
    major, minor = host.split("_")[1:3]
    return {"MACOSX_DEPLOYMENT_TARGET": f"{major}.{minor}"}
