"""`ckpt doctor`: what this machine offers, and a self-test that moves real bytes."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from importlib import metadata, util
from pathlib import Path
from typing import Any

from ckpt_tool.core.installation import install_command

PACKAGES = ("numpy", "safetensors", "typer", "rich", "xxhash", "ml_dtypes", "isal", "pyyaml", "torch", "fsspec", "ray")


def doctor() -> dict[str, Any]:
    """Versions, processors, memory, disk, file system, compiled loops, GPU, nvcc, extras; `self_test`: ok or what
    failed."""
    usage = shutil.disk_usage(".")
    return {
        "schema_version": 1,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk": {"path": os.getcwd(), "free_bytes": usage.free, "total_bytes": usage.total, "type": _file_system()},
        "packages": {name: _version(name) for name in PACKAGES},
        "extras": {
            "torch": util.find_spec("torch") is not None,
            "remote": util.find_spec("fsspec") is not None,
            "ray": util.find_spec("ray") is not None,
        },
        "install_extra": install_command("NAME"),
        "nvcc": shutil.which("nvcc"),
        "compiled": _compiled(),
        "kernels": _kernels(),
        "gpu": sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*")),
        "open_files_limit": _open_files(),
        "self_test": _self_test(),
    }


def _compiled() -> dict[str, Any]:
    """Which compiled loops a run on the CPU would use, and why. All of them are tried against NumPy and Python."""
    from ckpt_tool.compiled import library, loading, rows, twins
    from ckpt_tool.errors import CkptError

    opened = loading.opened_library(loading.FOLDER)
    facts = {"paths": list(opened.paths), "compiler": opened.compiler or None}
    try:
        choice = loading.chosen()
    except CkptError as e:
        return {"uses": "nothing", "reason": e.message, **facts}
    if choice.library is None:
        return {"uses": choice.path, "reason": choice.reason, **facts}

    shelves = (library.BlocksShelf(), rows.RowsShelf(), twins.TwinsShelf())
    refusals = [shelf.find_refusal(choice) for shelf in shelves]
    uses = loading.NUMPY if refusals[0] else choice.path
    return {"uses": uses, "reason": "; ".join(filter(None, refusals)) or choice.reason, **facts}


def _kernels() -> dict[str, Any]:
    """What `--device cuda` would use, and why. Builds nothing."""
    from ckpt_tool.device import choose, driver
    from ckpt_tool.errors import CkptError

    found = driver.probe()
    try:
        choice = choose.choose_device()
        uses = {"uses": choice.level, "reason": choice.reason}
    except CkptError as e:
        uses = {"uses": "nothing", "reason": e.message}
    return {**uses, "driver": driver.spell_version(found.driver) if found.driver else None}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _open_files() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _file_system() -> str:
    """The type of the file system of the working folder, as the kernel's mount table names it."""
    here = os.path.realpath(".")
    best = ""
    kind = "unknown"
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return kind
    for line in lines:
        fields = line.split()
        if len(fields) > 2 and (here + "/").startswith(fields[1].rstrip("/") + "/") and len(fields[1]) >= len(best):
            best = fields[1]
            kind = fields[2]
    return kind


def _self_test() -> str:
    """Write a checkpoint, reshard it to 2 ranks, back, and compare: `ok`, or the first thing that went wrong."""
    from ckpt_tool.commands.convert import convert, reshard
    from ckpt_tool.commands.diff import diff
    from ckpt_tool.core.dtype import DTYPES
    from ckpt_tool.core.progress import Silent
    from ckpt_tool.errors import CkptError
    from ckpt_tool.options.reading import Reading
    from ckpt_tool.options.writing import Writing
    from ckpt_tool.storage.safetensors_files.safetensors_file import build_header

    with tempfile.TemporaryDirectory(prefix="ckpt-doctor-") as folder:
        root = Path(folder)
        head, _, total = build_header([("a.weight", DTYPES["F32"], (6, 4)), ("b.bias", DTYPES["BF16"], (8,))], {})
        (root / "model.safetensors").write_bytes(head + bytes(i % 251 for i in range(total - len(head))))
        try:
            source = str(root / "model.safetensors")
            quiet = Silent()
            convert(
                source, str(root / "two"), Reading(), Writing(to="sharded", degrees={"tp": 2}, verify="full"), quiet
            )
            reshard(str(root / "two"), str(root / "three"), Reading(), Writing(degrees={"tp": 3}, verify="full"), quiet)
            document = diff(source, str(root / "three"), Reading(), progress=quiet)
        except CkptError as e:
            return f"failed: {e.message}"
        return "ok" if document["equal"] else f"failed: {document['differences'][0]}"
