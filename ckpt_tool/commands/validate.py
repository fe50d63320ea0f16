"""`ckpt validate`: train, save sharded, kill, reshard, resume, and compare with the run that was never interrupted.

torch is needed (the extra `torch`) and loaded when the command runs. Without layouts the quick matrix is run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.installation import install_command
from ckpt_tool.core.progress import Progress
from ckpt_tool.errors import CkptError, UsageError
from ckpt_tool.options.verbs import Validating

if TYPE_CHECKING:
    from ckpt_tool.harness.evidence import Case
    from ckpt_tool.harness.roundtrip import RoundTrip


def validate(wanted: Validating, *, progress: Progress) -> dict[str, Any]:
    """The document of `validate --json`: `ok`, `cases` (see `harness.evidence.gather`).

    Raises UsageError: E1540 without torch, E1541 for options that contradict each other, E1501 and E1534 to E1535 for
    layouts and formats that can't be had. What a rank dies of is raised where one pair was asked for, and is a failed
    check of a matrix.
    """
    _torch(wanted)
    from ckpt_tool.harness import evidence, roundtrip

    began = time.perf_counter()
    cases = _cases(wanted)
    for case in cases:
        roundtrip.check(case) if isinstance(case, roundtrip.RoundTrip) else evidence.check(case)
    documents = []
    with tempfile.TemporaryDirectory(prefix="ckpt-validate-") as scratch:
        root = _root(wanted.keep, scratch)
        for number, case in enumerate(cases, 1):
            label = f"{number}/{len(cases)} " if len(cases) > 1 else ""
            folder = root / f"{number:03d}"
            folder.mkdir()

            def say(line: str, label: str = label) -> None:
                progress.note(f"{label}{line}")

            try:
                if isinstance(case, roundtrip.RoundTrip):
                    documents.append(roundtrip.gather(case, folder, say=say))
                else:
                    documents.append(evidence.gather(case, folder, say=say))
            except CkptError as e:
                if len(cases) == 1:
                    raise
                documents.append(
                    roundtrip.make_failure(case, e)
                    if isinstance(case, roundtrip.RoundTrip)
                    else evidence.make_failure(case, e)
                )
            if wanted.keep is None:
                _empty(folder)
    return {
        "schema_version": 1,
        "ok": all(document["ok"] for document in documents),
        "matrix": wanted.matrix,
        "cases": documents,
        "elapsed_s": round(time.perf_counter() - began, 3),
    }


def _torch(wanted: Validating) -> None:
    """Raise UsageError E1540 where torch is missing, or CUDA is asked for and is not there."""
    try:
        from ckpt_tool.harness import launch  # noqa: F401
    except ModuleNotFoundError as e:
        raise UsageError(
            f"the harness trains with torch, and {e.name} is not installed",
            code="E1540",
            hint=f"{install_command('torch')}, or torch as your machine needs it",
        ) from e
    if wanted.device == "cuda":
        from ckpt_tool.harness.runs import refuse_without_cuda

        refuse_without_cuda()


def _cases(wanted: Validating) -> Sequence[Case | RoundTrip]:
    from ckpt_tool.harness import matrix, roundtrip
    from ckpt_tool.harness.evidence import Case, all_faults
    from ckpt_tool.harness.layout import HarnessLayout
    from ckpt_tool.harness.runs import RunMachine

    if (wanted.source is None) != (wanted.target is None):
        missing = "--to-layout" if wanted.target is None else "--from-layout"
        raise UsageError(
            "a pair needs two layouts", code="E1541", place=missing, hint="give both, or neither for the matrix"
        )
    if wanted.source is not None and wanted.matrix is not None:
        raise UsageError("a pair or a matrix, not both", code="E1541", place="--matrix", hint="leave the layouts out")
    muon = wanted.optimizer == "muon"
    if wanted.matrix == "round-trip":
        if muon:
            raise UsageError(
                "round trips take AdamW's states only",
                code="E1541",
                place="--optimizer muon",
                hint="--matrix quick or full also adds and drops states on the way",
            )
        return roundtrip.cases(fmt=wanted.fmt, seed=wanted.seed)
    machine = RunMachine(wanted.backend, wanted.device)  # type: ignore[arg-type]  # checked by the command line
    planted = all_faults() if not wanted.no_controls and wanted.mode == "canonical" else ()
    if wanted.source is None or wanted.target is None:
        return matrix.cases(
            wanted.matrix or "quick",
            fmt=wanted.fmt,
            canonical=wanted.mode == "canonical",
            steps=wanted.steps,
            seed=wanted.seed,
            machine=machine,
            planted=planted,
            muon=muon,
        )
    return [
        Case(
            HarnessLayout.parse(wanted.source),
            HarnessLayout.parse(wanted.target),
            wanted.fmt or "sharded",
            canonical=wanted.mode == "canonical",
            before=wanted.steps,
            after=wanted.steps,
            seed=wanted.seed,
            machine=machine,
            planted=planted,
            muon=muon,
        )
    ]


def _root(keep: str | None, scratch: str) -> Path:
    if keep is None:
        return Path(scratch)
    root = Path(keep)
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        from ckpt_tool.errors import OutputExists

        raise OutputExists("the folder of --keep is not empty", code="E0512", path=str(root), hint="name a new one")
    return root


def _empty(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder)
