"""`ckpt kernels build|info|check|bench`: the CUDA reshard kernels on this machine.

info says what there is and what a run would use, and why; build compiles; check holds the kernels against NumPy on the
device at hand; bench measures them beside a plain device copy. None of them reads a checkpoint.
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

CASES = 200
_LIBRARY_LIMIT = 256 << 20  # bytes of a file that may be a library


def info() -> dict[str, Any]:
    """What a run would use and why; driver, GPUs, nvcc, sources and what the cache holds. Builds nothing."""
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
        os.close(kept.opened)
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
    """The line in which a compiler says its version."""
    return next((line for line in lines if "release" in line), lines[0] if lines else "")


def _spelled(architectures: list[int]) -> str:
    return ", ".join(f"sm_{number}" for number in architectures) or "CPU"


def build(arch: str | None = None, *, out: str | None = None, force: bool = False) -> dict[str, Any]:
    """Compile the kernels and keep them in the cache, or write them to the new file `out`.

    arch: `90,100`, `native` (the GPUs at hand), `host` (the shim), None for sm_80, sm_90 and sm_100. force: though they
    are built, and over `out`. Raises UsageError, OutputExists E0500, StorageError as `device.build.ensure_built`."""
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
    """Architectures as numbers: 90 for sm_90, for `90`, `sm_90` or `9.0`. Raises UsageError E0283, E1556."""
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
    """Is it a library of kernels, which `--force` may replace?"""
    return data.startswith(b"\x7fELF") and b"ck_abi" in data


def _written(done: Built, out: str) -> str:
    """A copy of the library under a name of the user's, whole or not at all."""
    try:
        fd, partial = tempfile.mkstemp(prefix=".ckpt-kernels-", dir=os.path.dirname(os.path.abspath(out)))
        os.close(fd)
    except OSError as e:
        raise wrap_os_error(e, out, "writing the library") from e
    try:
        shutil.copyfile(done.through, partial)
        os.chmod(partial, 0o755)
        # Building takes minutes: what is at the name is looked at once more.
        replaces = check_target(out, "--out", _is_library, limit=_LIBRARY_LIMIT)
        place_file(partial, out, "--out", replaces=replaces)
    except (OSError, CkptError) as e:
        Path(partial).unlink(missing_ok=True)
        if isinstance(e, CkptError):
            raise
        raise wrap_os_error(e, out, "writing the library") from e
    return out


def check(*, cases: int = CASES, seed: int = 0, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every kernel on the device at hand against NumPy: `cases` random cases each. `ok` is false where any differs.

    Raises UsageError where there is no device (see `device.choose.open_device`), or E0283 for an unknown kernel."""
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
    """The kernels beside a plain copy on the same device, every work twice. quick: less payload, fewer repeats, more
    spread.

    Takes half a minute on a GPU; the shim gets 1 MiB, and its figures mean nothing. Raises UsageError where there is no
    device.
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
