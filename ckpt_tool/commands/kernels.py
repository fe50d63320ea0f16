"""`ckpt kernels build|info|check|bench`: the CUDA reshard kernels on this machine.

    info     what is installed, and which device and library a run would use, and why
    build    compile the kernels
    check    compare every kernel with NumPy on the device of this machine
    bench    measure every kernel, and a plain device copy for comparison

None of them reads a checkpoint.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tool.errors import CkptError, OutputExists, UsageError, wrap_os_error
from ckpt_tool.report.files import check_target, place_file

if TYPE_CHECKING:
    from ckpt_tool.device.build import Built
    from ckpt_tool.device.library import Device

CASES = 200  # random cases per kernel in `check`
_LIBRARY_LIMIT = 256 << 20  # bytes: --force does not replace a larger file, which can't be one of our libraries


def info() -> dict[str, Any]:
    """What a run would use and why, with driver, GPUs, nvcc, sources and the libraries in the cache. Builds nothing."""
    from ckpt_tool.device import build, cache, choose, driver

    choice = choose.choose_device()
    found = driver.probe()
    nvcc = build.find_nvcc()
    digest = build.source_digest()
    libraries = []
    refused = []
    for key, kept in cache.every(cache.folder()):
        if isinstance(kept, str):
            refused.append(kept)
            continue
        os.close(kept.opened)  # `cache.every` returns each library with an open descriptor
        libraries.append(
            {
                "key": key[:16],
                "kind": kept.about["kind"],
                "for": _spelled(kept.about["architectures"]),
                "bytes": kept.about["bytes"],
                "current": kept.about["sources"] == digest,
            }
        )
    return {
        "schema_version": 1,
        "uses": choice.level,
        "reason": choice.reason,
        "setting": os.environ.get("CKPT_KERNELS"),
        "driver": driver.spell_version(found.driver) if found.driver else None,
        "gpus": [{"name": card.name, "architecture": f"sm_{card.architecture}"} for card in found.cards],
        "nvcc": nvcc,
        "nvcc_version": _named(build.version_of(nvcc).splitlines()) if nvcc else None,
        "sources": str(build.sources()),
        "source_sha256": digest,
        "kernels": list(build.KERNELS),
        "cache": str(cache.folder()),
        "libraries": libraries,
        "refused": refused,
        "verdict": {
            "numpy": "no device: the CPU does all",
            "host": "the host shim: for tests, slower than the CPU's own way",
            "cuda": "a GPU, when a verb is given --device cuda",
            "path": "the library that CKPT_KERNELS names",
        }[choice.level],
    }


def _named(lines: list[str]) -> str:
    """The line of a compiler's output that contains its version."""
    return next((line for line in lines if "release" in line), lines[0] if lines else "")


def _spelled(architectures: list[int]) -> str:
    return ", ".join(f"sm_{number}" for number in architectures) or "CPU"


def build(arch: str | None = None, *, out: str | None = None, force: bool = False) -> dict[str, Any]:
    """Compile the kernels into the cache and, if `out` is given, copy them to this new file.

    Args:
        arch: `90,100`, `native` (the GPUs of this machine), `host` (the CPU shim); None for sm_80, sm_90 and sm_100.
        force: compile even if they are in the cache, and replace the file `out`.

    Raises:
        UsageError, OutputExists E0500, and StorageError as `device.build.ensure_built`.
    """
    from ckpt_tool.device import build as building

    if out is not None and os.path.lexists(out) and not force:
        raise OutputExists(f"{out} exists", code="E0500", path=out, hint="--force replaces it")
    if out is not None:
        check_target(out, "--out", _is_library, limit=_LIBRARY_LIMIT)
    done = (
        building.ensure_built("host", force=force)
        if arch == "host"
        else building.ensure_built("cuda", _wanted(arch), force=force)
    )
    notes = [done.note] if done.note else []
    left_out = sorted(set(_wanted(arch)) - set(done.architectures)) if arch != "host" else []
    if left_out:
        notes.append(
            f"nvcc makes no code for {_spelled(left_out)}: PTX of {_spelled([max(done.architectures)])} "
            "serves newer GPUs"
        )
    path = str(done.path) if out is None else _written(done, out)
    return {
        "schema_version": 1,
        "path": path,
        "kind": done.kind,
        "architectures": list(done.architectures),
        "bytes": done.about["bytes"],
        "sha256": done.about["sha256"],
        "key": done.key,
        "compiler": _named(done.about["compiler"]),
        "flags": " ".join(done.about["flags"]),
        "compiled": done.seconds > 0,
        "elapsed_s": round(done.seconds, 3),
        "notes": notes,
        "verdict": f"built in {done.seconds:.1f} s" if done.seconds else "built before: found in the cache",
    }


def _wanted(arch: str | None) -> tuple[int, ...]:
    """Architectures as numbers: `90`, `sm_90` and `9.0` are all 90.

    Raises:
        UsageError: E0283 for a malformed architecture, E1556 for `native` without a GPU.
    """
    from ckpt_tool.device import build as building
    from ckpt_tool.device import driver

    if arch is None:
        return building.ARCHITECTURES
    if arch == "native":
        found = driver.probe()
        if not found.cards:
            raise UsageError(
                f"--arch native needs a GPU: {found.reason}",
                code="E1556",
                place="--arch",
                hint="name architectures: --arch 80,90,100",
            )
        return tuple(sorted({card.architecture for card in found.cards}))
    numbers = []
    for word in arch.split(","):
        digits = word.strip().lower().removeprefix("sm_").replace(".", "")
        if not (digits.isascii() and digits.isdigit() and 2 <= len(digits) <= 3):
            raise UsageError(
                f"found the architecture {word.strip()!r}, want numbers like 90 (sm_90), native or host",
                code="E0283",
                place="--arch",
                hint="80 is an A100, 90 an H100 or H200, 100 a B200",
            )
        numbers.append(int(digits))
    return tuple(sorted(set(numbers)))


def _is_library(data: bytes) -> bool:
    """Is this file content a kernel library of ours, which `--force` may replace?"""
    return data.startswith(b"\x7fELF") and b"ck_abi" in data


def _written(done: Built, out: str) -> str:
    """Copy the library to the path `out` atomically, and return the path."""
    try:
        fd, partial = tempfile.mkstemp(prefix=".ckpt-kernels-", dir=os.path.dirname(os.path.abspath(out)))
        os.close(fd)
    except OSError as e:
        raise wrap_os_error(e, out, "writing the library") from e
    try:
        shutil.copyfile(done.through, partial)
        os.chmod(partial, 0o755)
        # Building takes minutes, in which another process may have created the file: check it again.
        replaces = check_target(out, "--out", _is_library, limit=_LIBRARY_LIMIT)
        place_file(partial, out, "--out", replaces=replaces)
    except (OSError, CkptError) as e:
        Path(partial).unlink(missing_ok=True)
        if isinstance(e, CkptError):
            raise
        raise wrap_os_error(e, out, "writing the library") from e
    return out


def check(*, cases: int = CASES, seed: int = 0, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Compare every kernel with NumPy on the device of this machine, in `cases` random cases each.

    `ok` in the document is False if any result differs.

    Raises:
        UsageError: there is no device (see `device.choose.open_device`), or E0283 for an unknown kernel.
    """
    from ckpt_tool.device import choose
    from ckpt_tool.device.trial import check as trial
    from ckpt_tool.errors import near_misses

    for name in only:
        if name not in trial.TRIALS:
            raise UsageError(
                f"there is no kernel {name!r} to check, only {', '.join(trial.TRIALS)}",
                code="E0283",
                place="--kernel",
                hint=near_misses(name, trial.TRIALS) or None,
            )
    device = choose.open_device()
    outcomes = trial.trials(device, cases=cases, seed=seed, only=only)
    findings = [
        {"code": "E1579", "kernel": outcome.kernel, "message": text}
        for outcome in outcomes
        for text in outcome.findings
    ]
    return {
        "schema_version": 1,
        "ok": not findings,
        "device": _device(device),
        "seed": seed,
        "kernels": [
            {
                "kernel": outcome.kernel,
                "cases": outcome.cases,
                "bytes": outcome.nbytes,
                "seconds": outcome.seconds,
                "ok": not outcome.findings,
            }
            for outcome in outcomes
        ],
        "findings": findings,
        "verdict": f"{len(outcomes)} kernels do what NumPy does"
        if not findings
        else f"{len(findings)} findings: see above",
    }


def bench(*, quick: bool = False) -> dict[str, Any]:
    """Measure the kernels and a plain copy on the same device, every workload twice.

    Takes half a minute on a GPU. The CPU shim gets 1 MiB only, and its figures are meaningless.

    Args:
        quick: less data and fewer repeats, hence a larger spread.

    Raises:
        UsageError: there is no device.
    """
    from datetime import datetime, timezone

    from ckpt_tool.device import choose
    from ckpt_tool.device.trial import bench as benching

    device = choose.open_device()
    if device.info.host:
        most = 1 << 20
        repeats = 2
    else:
        most = 1 << 28 if quick else 1 << 30
        repeats = 10 if quick else 30
    payload = min(most, device.info.free_bytes // 8 // (1 << 20) << 20)
    rows = benching.measure_kernels(device, payload=payload, repeats=repeats)
    return {
        "schema_version": 1,
        "device": _device(device),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "payload_bytes": payload,
        "repeats": repeats,
        "rows": [
            {
                **row._asdict(),
                "milliseconds": round(row.milliseconds, 4),
                "gbs": round(row.gbs, 2),
                "share": round(row.share, 3),
                "spread": round(row.spread, 3),
            }
            for row in rows
        ],
        "verdict": "figures of the host shim mean nothing"
        if device.info.host
        else "share: of the plain copy on this device",
    }


def _device(device: Device) -> dict[str, Any]:
    found = device.info
    return {
        "name": found.name,
        "uuid": found.uuid or None,
        "architecture": f"sm_{found.capability[0]}{found.capability[1]}" if not found.host else "CPU",
        "total_bytes": found.total_bytes,
        "free_bytes": found.free_bytes,
        "driver": found.driver,
        "runtime": found.runtime,
    }
