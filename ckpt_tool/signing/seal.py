"""What `--sign` and `--attest` add to an output, made of the hashes that were taken while it was written.

    --sign KEY      model.sig in the output: a signature of all its files, as `model_signing` makes it
    --attest FILE   a statement of what was written out of what, by which command; signed too where a key is given

Both are written into the staging folder before that gets the output's name. An attestation to be written elsewhere has
a hidden name next to its own until then: a run that is killed leaves no signature of an output that does not exist. An
attestation below the output (`--attest out/provenance.json`) is one of the files that are signed.

What an attestation claims is what was taken and no more. Files of the output: SHA-256, of every byte. Files of a
source: path, size and time, for a conversion reads parts of them and hashes none completely. Tensors as read and
as written: one sum over `ckpt verify`'s digests (XXH3-128, which shows accidents and not malice), in an annotation and
not as a digest of in-toto, which means cryptography. With `--verify off` there is no such sum.

What it does not do: outputs in stores, of one file, and shares of a plan, whose files no one process has written
(E1682). Cost: see `run.hashes`.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.inner_path import output_faults, unfit
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError, OutputExists, UsageError, wrap_os_error
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.plan import Plan
from ckpt_tool.report.files import check_apart, check_target, place_file
from ckpt_tool.signing import bundle
from ckpt_tool.signing.keys import PrivateKey, private_key
from ckpt_tool.signing.statements import SIGNATURE_FILE, provenance, signature
from ckpt_tool.signing.written import is_attestation, is_begun
from ckpt_tool.storage.opening import scheme_of
from ckpt_tool.storage.output.destination import Place, RemotePlace, check_beside
from ckpt_tool.storage.platform_calls import flush
from ckpt_tool.storage.source import Tree

if TYPE_CHECKING:
    from ckpt_tool.run.executor import Result

ATTESTATION_LIMIT = 64 << 20  # bytes of a file that may be an earlier attestation
_SUM = (
    "SHA-256 over lines of state, tab, name, tab, digest, sorted; digests as `ckpt verify --json` gives them, trees of "
    "XXH3-128: they show accidents, not malice"
)


@dataclass(frozen=True)
class Seal:
    """The signature and the attestation that a run adds to its output."""

    destination: Path
    key: PrivateKey | None
    attest: str | None
    inside: str | None  # the attestation's path below the output, None if it goes elsewhere
    writing: Writing
    plan: Plan | None = None
    trees: Mapping[str, Tree] = field(default_factory=dict)
    began: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The files that it adds to the output."""
        return (*([self.inside] if self.inside else []), *([SIGNATURE_FILE] if self.key else []))

    @property
    def said(self) -> dict[str, str]:
        """Its entries in the writer's document."""
        signed = {"signature": str(self.destination / SIGNATURE_FILE)} if self.key else {}
        return {**signed, **({"attestation": self.attest} if self.attest else {})}

    def over(self, plan: Plan, trees: Mapping[str, Tree]) -> Seal:
        """The seal for the output of this plan. Raises UsageError E1682 if that can't have one."""
        if plan.single is not None:
            raise _no(
                self.writing, "an output of one file has no folder for it", "write a folder: a name without a suffix"
            )
        names = [*(file.path for file in plan.outputs), *self.names]
        for path, reason in output_faults(names):
            if path in self.names:
                raise _no(self.writing, f"{path} {reason}", "name another file")
        if self.attest and not self.inside:
            check_beside(self.attest, "--attest", (tree.display() for tree in trees.values() if tree.local), ())
        return replace(self, plan=plan, trees=trees, began=_now())

    def files(self, hashes: Mapping[str, str], result: Result) -> Iterator[tuple[str, bytes]]:
        """(name, bytes) of the files to add to the output, given the hashes of all others (`run.executor.SealWriter`).
        The attestation comes first, so that the signature covers it."""
        if self.attest is not None:
            text = self._attestation(hashes, result)
            data = bundle.sign(text, self.key) if self.key else text + b"\n"
            if self.inside:
                yield self.inside, data
                hashes = {**hashes, self.inside: hashlib.sha256(data).hexdigest()}
            else:
                _save(self._waiting, data)
        if self.key is not None:
            yield SIGNATURE_FILE, bundle.sign(signature(self.destination.name, hashes), self.key)

    @property
    def _waiting(self) -> Path:
        """The path of the attestation until the output has its name."""
        path = Path(self.attest or "")
        return path.parent / f".{path.name}.ckpt-partial"

    def committed(self) -> None:
        """Called when the output has its name: gives the attestation its own. Raises OutputExists, StorageError."""
        if self.attest is not None and not self.inside:
            replaces = self._check_attest()
            try:
                place_file(str(self._waiting), self.attest, "--attest", replaces=replaces)
            except OSError as e:
                raise wrap_os_error(e, self.attest, "naming the attestation") from e

    def failed(self) -> None:
        """Called when nothing was committed: removes the attestation that waits."""
        if self.attest is not None and not self.inside:
            _remove_waiting(self._waiting)

    def _check_attest(self) -> bool:
        """Is there an earlier attestation, which will be replaced?

        Raises OutputExists for a file at the attestation's name: E1689 without `--force`, E0511 for what is no
        attestation of ours, such as the key.
        """
        path = str(self.attest)
        if os.path.lexists(path) and not self.writing.force:
            raise OutputExists(
                "the file of --attest exists",
                code="E1689",
                path=path,
                hint="choose another name, or --force to replace it",
            )
        return check_target(path, "--attest", is_attestation, limit=ATTESTATION_LIMIT)

    def _attestation(self, hashes: Mapping[str, str], result: Result) -> bytes:
        """The statement of provenance: the output's hashes, the command, and what was read."""
        report = self.plan.report if self.plan else {}
        # Taken without an import, since the package is above all its layers.
        version = str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])
        python = ".".join(map(str, sys.version_info[:3]))
        command = ["ckpt", *self.writing.command]
        target = {key: value for key, value in report.get("target", {}).items() if key != "files"}
        parameters = {"command": command, "source": report.get("source"), "target": target}
        output_uri = _uri(str(self.destination))
        return provenance(
            hashes,
            parameters=parameters,
            internal={"plan": self.plan.identifier() if self.plan else "", "verify": self.writing.verify},
            sources=[*self._sources(), *_describe_digests("tensors as read", output_uri, result.digests)],
            byproducts=_describe_digests("tensors as written", output_uri, result.digests_out),
            versions={"ckpt-tool": version, "python": python},
            began=self.began,
            ended=_now(),
        )

    def _sources(self) -> Iterator[dict[str, Any]]:
        """A descriptor for each source file: place, size and, for local files, time of modification."""
        sources = dict[str, dict[str, Any]]()
        for file in self.plan.sources if self.plan else ():
            for tree, path in self.trees[file.root].files_behind(file.path):
                display_path = tree.display(path)
                if display_path not in sources:
                    identity = tree.identity(path)
                    facts = (
                        {"bytes": identity.size, "mtime_ns": identity.mtime_ns}
                        if tree.local
                        else {"bytes": identity.size}
                    )
                    sources[display_path] = {"name": path, "uri": _uri(display_path), "annotations": {"ckpt": facts}}
        yield from sources.values()


def seal_of(writing: Writing, destination: Place, *, part: str = "") -> Seal | None:
    """The seal that the options ask for, None without such options. part: the option by which others write, too.

    Raises UsageError E1680, E1681 for the key, E1682 if the output can't be sealed, OutputExists E0510, E1689,
    StorageError.
    """
    if not writing.sign and not writing.attest:
        return None
    if writing.plan_file or writing.emit:
        raise _no(writing, "a plan that is saved is sealed by who carries it out", "give it to ckpt apply")

    if isinstance(destination, RemotePlace):
        reason = "parts of objects are sent to a store in any order, and none is read again"
        raise _no(writing, reason, "write to a local folder, and upload that")

    if part or writing.ray:
        raise _no(
            writing,
            f"with {part or '--ray'} no process has seen all that is written",
            "run the plan whole; or sign what it has written: model_signing sign key OUT --private_key KEY",
        )

    key = private_key(writing.sign) if writing.sign else None
    if writing.sign:
        check_beside(writing.sign, "--sign", (), (str(destination),))
    inside = None

    if writing.attest:
        inside = _below(writing.attest, destination)
        reason = "" if inside is None else unfit(inside)
        if reason:
            raise _no(writing, f"{inside} {reason}", "name another file")

    seal = Seal(destination, key, writing.attest, inside, writing)
    if writing.attest and inside is None:
        check_apart({"--sign": writing.sign, "--attest": writing.attest})
        seal._check_attest()

    return seal


def _below(path: str, destination: Path) -> str | None:
    """The path relative to the output, None if it is elsewhere."""
    folder, name = os.path.split(os.path.abspath(path))
    real = Path(os.path.realpath(folder), name)
    target = Path(os.path.realpath(destination.parent), destination.name)
    return real.relative_to(target).as_posix() if real != target and real.is_relative_to(target) else None


def _no(writing: Writing, why: str, hint: str) -> UsageError:
    """The error E1682 for an output that can't be signed or attested."""
    option = "--sign" if writing.sign else "--attest"
    return UsageError(f"{option} can't be had here: {why}", code="E1682", hint=hint)


def _describe_digests(name: str, uri: str, digests: Mapping[TensorKey, str]) -> list[dict[str, Any]]:
    """A descriptor with one sum over the digests of all tensors; [] if no digests were computed."""
    if not digests:
        return []
    lines = sorted(f"{key.state}\t{key.name}\t{digest}\n" for key, digest in digests.items())
    total_digest = hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
    annotations = {"tensors": len(lines), "sum": total_digest, "sum_is": _SUM}
    return [{"name": name, "uri": uri, "annotations": {"ckpt": annotations}}]


def _uri(shown: str) -> str:
    """The URI of a path; a URL stays as it is."""
    return shown if scheme_of(shown) else Path(os.path.abspath(shown)).as_uri()


def _now() -> str:
    """The time in UTC, in the format of RFC 3339."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def _save(path: Path, data: bytes) -> None:
    """Write and fsync the attestation under its hidden name. Raises OutputExists E0511, StorageError."""
    _remove_waiting(path)
    try:
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            flush(file.fileno())
    except FileExistsError as e:
        raise OutputExists(
            f"{path.name}, where the attestation waits for the output, is no attestation",
            code="E0511",
            path=path,
            hint="move it away, or choose another name for --attest",
        ) from e
    except OSError as e:
        raise wrap_os_error(e, path, "writing the attestation") from e


def _remove_waiting(path: Path) -> None:
    """Remove a waiting attestation, complete or cut short; any other file with that hidden name stays."""
    try:
        check_target(str(path), "--attest", lambda raw: is_attestation(raw) or is_begun(raw), limit=ATTESTATION_LIMIT)
    except CkptError:
        return
    path.unlink(missing_ok=True)
