"""What is missing of a checkpoint that is only looked at.

Every reader refuses a checkpoint that is not complete, and so does every command that writes. `ckpt inspect` wants to
know what is there all the same. A reader therefore does not raise what is wrong where it could go on without the file:
it reports it here, and leaves the file out.

    report_missing(Incomplete("1 of 2 files is missing: b.safetensors", code="E0380"), files=["b.safetensors"])

raises the error, as ever; inside `collected_missing()` it is remembered instead. Readers go on only in the thread that
asked for it: what another thread of the process reads at the same time is refused as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import CkptError


@dataclass(slots=True)
class MissingParts:
    """What a reader went on without."""

    faults: list[CkptError] = field(default_factory=list)
    files: dict[str, int | None] = field(default_factory=dict)  # path -> how many tensors it holds, if that is known
    file_bytes: dict[str, int] = field(default_factory=dict)  # path -> its size, or that of its tensors, if known
    tensors: dict[TensorKey, int | None] = field(default_factory=dict)  # tensor -> missing bytes, if known


_COLLECTING: ContextVar[MissingParts | None] = ContextVar("missing parts", default=None)


@contextmanager
def collected_missing() -> Iterator[MissingParts]:
    """Let readers of this thread go on without what is missing, and remember what that is."""
    parts = MissingParts()
    token = _COLLECTING.set(parts)
    try:
        yield parts
    finally:
        _COLLECTING.reset(token)


def is_collecting() -> bool:
    """Is the checkpoint only looked at, so that a reader may go on without what is missing?"""
    return _COLLECTING.get() is not None


def report_missing(
    fault: CkptError,
    *,
    files: Iterable[str] | Mapping[str, int] = (),
    file_bytes: Mapping[str, int] | None = None,
    tensors: Mapping[TensorKey, int | None] | None = None,
) -> None:
    """Raise `fault`, or remember it where the checkpoint is only looked at.

    Args:
        files: the missing files, relative to the root; with the number of tensors in each where that is known.
        file_bytes: the sizes of those files, as far as they are known.
        tensors: the tensors that are incomplete, and how many bytes of each are missing.
    """
    parts = _COLLECTING.get()
    if parts is None:
        raise fault

    parts.faults.append(fault)
    for path in files:
        size = files[path] if isinstance(files, Mapping) else None
        parts.files[path] = size if size is not None else parts.files.get(path)
    parts.file_bytes.update(file_bytes or {})
    parts.tensors.update(tensors or {})
