"""Every way `ckpt` can fail: a closed tree of errors, their stable codes and exit codes.

The class fixes the exit code, the code names the fault, and the fields say where it is and what to try. A code has one
meaning and one class, which `error_codes.toml` states and `ckpt explain CODE` shows; its digits are a mere number,
grouped by kind, and promise no exit code. Example:

    raise CorruptFile("header length is 9000 bytes, but the file has 12 after its first 8",
                      code="E0311", path="model.safetensors", offset=0,
                      hint="the download may be cut short: compare the file size with the source")

prints as three lines

    error[E0311]: header length is 9000 bytes, but the file has 12 after its first 8
      at: model.safetensors, byte 0
      hint: the download may be cut short: compare the file size with the source

This module imports nothing of the project. It does not print: `report` does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, NamedTuple


class CkptError(Exception):
    """Base of all errors of ckpt. `code` is stable, so scripts may match on it; the wording is not.

    Args:
        message: what was found and what was wanted.
        code: `E` and four digits, a row of `error_codes.toml`. Only a class with a code of its own may leave it out.
        path: the file (or folder) at fault.
        offset: bytes from the start of `path`.
        place: a finer place than a byte: zip member, JSON pointer, pickle opcode, plan row.
        key: the tensor, as `name` or `name [state]`.
        hint: what to try next.
        faults: further faults of the same pass, one line each; all are shown.
        bytes_differ: the bytes of `path` are not those that were written, as far as its reader can say. A CorruptFile
            says so always.
    """

    exit_code: ClassVar[int] = 70
    default_code: ClassVar[str] = "E7000"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        path: str | os.PathLike[str] | None = None,
        offset: int | None = None,
        place: str | None = None,
        key: str | None = None,
        hint: str | None = None,
        faults: Iterable[str] = (),
        bytes_differ: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.path = None if path is None else os.fspath(path)
        self.offset = offset
        self.place = place
        self.key = key
        self.hint = hint
        self.faults = tuple(faults)
        self.bytes_differ = bytes_differ or isinstance(self, CorruptFile)
        self.others: tuple[CkptError, ...] = ()  # the same further faults as errors, where they are known as such

    def where(self) -> str:
        """The place as one line, "" if nothing is known of it."""
        parts = [self.path] if self.path else []
        if self.offset is not None:
            parts.append(f"byte {self.offset}")
        if self.place:
            parts.append(self.place)
        if self.key:
            parts.append(f"tensor {self.key}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, object]:
        """The error as the one JSON object that `--json` prints on stderr."""
        return {
            "schema_version": 1,
            "error": {
                "code": self.code,
                "exit_code": self.exit_code,
                "message": self.message,
                "path": self.path,
                "offset": self.offset,
                "place": self.place,
                "tensor": self.key,
                "hint": self.hint,
                "faults": list(self.faults),
            },
        }


class UsageError(CkptError):
    """What was asked for can't be had: an option, a pattern, a degree (exit 2)."""

    exit_code = 2


class InputError(CkptError):
    """The input is malformed, incomplete or of an unknown format (exit 3)."""

    exit_code = 3


class CorruptFile(InputError):
    """Bytes that break their own format's rules."""


class Incomplete(InputError):
    """A part of the checkpoint is missing: a shard, a rank, a box, or the file that says how the others fit."""


class Unexplained(Incomplete):
    """The file that says how the parts fit is not there. Other versions or systems never write it, so that the
    checkpoint may be complete all the same."""


class UnknownFormat(InputError):
    """No format, or more than one, claims the path."""


class UnmappedTensor(InputError):
    """A tensor without a rule, or a rule without a tensor."""


class InconsistentCheckpoint(InputError):
    """Parts that contradict each other: overlapping boxes, replicas that differ, step counters."""


REPLICAS_DIFFER = "E2701"


class ReplicasDiffer(InconsistentCheckpoint):
    """Ranks hold different values of a tensor of which they should hold the same copy."""


class UnsafeInput(CkptError):
    """Refused for safety: needs code to be run, leaves its folder, or reads as two formats (exit 4)."""

    exit_code = 4


class OutputExists(CkptError):
    """The output exists, is locked by another run, or is located inside the source (exit 5)."""

    exit_code = 5


class SourceChanged(CkptError):
    """A source or a plan changed underneath the run (exit 6)."""

    exit_code = 6


class StorageError(CkptError):
    """The operating system refused: I/O error, no space, no permission (exit 7)."""

    exit_code = 7

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message, **fields)
        if _WATCHING and self.code not in _ANSWERS:
            _WATCHING[-1].append(self)


_ANSWERS = frozenset({"E0702", "E0710"})  # nothing is there, or it has no descriptor: nothing has failed
_WATCHING: list[list[StorageError]] = []


@contextmanager
def failures_met() -> Iterator[list[StorageError]]:
    """Collect what disks and stores refuse while the context is open, in any thread, even if the error is handled.

    A reader that looks for a file may go on without it if it can't be read, as if the file were missing. A verdict on
    a checkpoint has to know that: what could not be read is unknown, neither complete nor broken.
    """
    met: list[StorageError] = []
    _WATCHING.append(met)
    try:
        yield met
    finally:
        _WATCHING.remove(met)


def is_failure(error: OSError) -> bool:
    """Did the system fail to answer? A missing file or a lack of permission is an answer."""
    import errno

    answers = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM)
    return error.errno not in answers


def is_absence(error: OSError) -> bool:
    """Did the system answer that there is no such file? A lack of permission leaves that open."""
    return not is_failure(error) and not isinstance(error, PermissionError)


class InternalError(CkptError):
    """A bug of ours (exit 70)."""


class Interrupted(CkptError):
    """SIGINT (exit 130) or SIGTERM (exit 143); the same command resumes."""

    exit_code = 130

    def __init__(self, message: str, *, signal: int = 2, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, code="E1300" if signal == 2 else "E1430")
        self.signal = signal
        self.exit_code = 128 + signal  # type: ignore[misc]  # per instance: 130 or 143


class Code(NamedTuple):
    """The meaning of an error code: a row of the catalogue."""

    code: str
    kind: str  # the class raised with it; `Finding`: it appears in reports only (exit 1); `Note`: it is no error
    exit_code: int | None  # None for notes, and if it is the exit code of another command
    title: str  # the meaning
    why: str  # the usual cause
    do: str  # what helps


@cache
def catalogue() -> Mapping[str, Code]:
    """Every code in ascending order, from `error_codes.toml`. Takes some 50 ms, which only `ckpt explain` spends."""
    from pathlib import Path

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    rows = tomllib.loads(Path(__file__).with_name("error_codes.toml").read_text(encoding="utf-8"))
    return {
        code: Code(code, row["class"], _exit_code(row), row["title"], row["why"], row["do"])
        for code, row in sorted(rows.items())
    }


def _exit_code(row: Mapping[str, Any]) -> int | None:
    """The exit code of a row: its own `exit`, or that of its class. None for notes, and if the row has 0, which means
    the exit code of another command."""
    kind = globals().get(row["class"])
    if row["class"] == "Note":
        return None
    number = row.get("exit", 1 if kind is None else kind.exit_code)
    return int(number) or None


def near_misses(wrong: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.5) -> str:
    """A "did you mean" ending for a hint, "" if no known word is similar. `known` may be large."""
    from difflib import get_close_matches  # 1 ms of every start

    close = get_close_matches(wrong, list(known)[:20_000], n=most, cutoff=cutoff)
    return f"did you mean {', '.join(close)}?" if close else ""


STEPS_LISTED = 8


def several_steps(shown: str, steps: Sequence[str]) -> UnknownFormat:
    """The error E0392 for a folder of several steps, if nothing says which one is meant. shown: the folder. steps:
    their paths, the oldest first."""
    listed = list(steps[-STEPS_LISTED:])
    if len(steps) > STEPS_LISTED:
        listed.insert(0, "...")
    return UnknownFormat(
        f"the folder holds {len(steps)} checkpoints and no pointer file",
        code="E0392",
        path=shown,
        hint=f"pass one of them: {', '.join(listed)}; ckpt latest {shown} prints the newest complete one",
    )


def wrap_os_error(
    error: OSError, path: str | os.PathLike[str], doing: str, *, offset: int | None = None
) -> StorageError:
    """An `OSError` as a `StorageError` that names the file and what was being done to it."""
    import errno

    hints = {
        errno.ENOSPC: "free some space or choose another disk; the same command resumes",
        errno.EDQUOT: "the quota is used up; the same command resumes",
        errno.EACCES: "check the permissions of the file and its folders",
        errno.EPERM: "check the permissions of the file and its folders",
        errno.EROFS: "the file system is mounted read-only: choose another output",
        errno.ENOENT: "there is no such file: check the path and where you are",
        errno.ENOTDIR: "a part of the path is a file: check the path",
        errno.EISDIR: "this is a folder, and a file is wanted",
        errno.EIO: "the device reports an error: check the disk before you try again",
        errno.EMFILE: "raise the limit of open files (ulimit -n) or pass fewer --threads",
        errno.EFBIG: "the file system or a limit (ulimit -f) forbids files of this size: pass a smaller "
        "--max-shard-size",
    }
    reason = os.strerror(error.errno) if error.errno else str(error)
    return StorageError(
        f"{doing} failed: {reason}",
        code="E0701" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "E0700",
        path=path,
        offset=offset,
        hint=hints.get(error.errno or 0),
    )
