"""Missing parts of a checkpoint that is only inspected.

Readers refuse a checkpoint that is not complete, and so do all commands that write. `ckpt inspect` shows the parts that
exist nevertheless. So if a reader can go on without a file, it does not raise the error itself: it reports it here, and
leaves the file out.

    report_missing(Incomplete("1 of 2 files is missing: b.safetensors", code="E0380"), files=["b.safetensors"])

raises the error as usual; inside `collected_missing()` the error is remembered instead. This holds only for the thread
that opened the context: other threads that read at the same time raise errors.
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
    """The parts that readers went on without, and the errors that they would have raised."""

    faults: list[CkptError] = field(default_factory=list)
    files: dict[str, int | None] = field(default_factory=dict)  # path -> how many tensors it holds, if that is known
    file_bytes: dict[str, int] = field(default_factory=dict)  # path -> its size, or that of its tensors, if known
    tensors: dict[TensorKey, int | None] = field(default_factory=dict)  # tensor -> missing bytes, if known


_COLLECTING: ContextVar[MissingParts | None] = ContextVar("missing parts", default=None)


@contextmanager
def collected_missing() -> Iterator[MissingParts]:
    """Within this context, readers of this thread go on without missing parts, which are collected."""
    parts = MissingParts()
    token = _COLLECTING.set(parts)
    try:
        yield parts
    finally:
        _COLLECTING.reset(token)


def is_collecting() -> bool:
    """Is the checkpoint only inspected, so that a reader may go on without missing parts?"""
    return _COLLECTING.get() is not None


def report_missing(
    fault: CkptError,
    *,
    files: Iterable[str] | Mapping[str, int] = (),
    file_bytes: Mapping[str, int] | None = None,
    tensors: Mapping[TensorKey, int | None] | None = None,
) -> None:
    """Raise `fault`, or remember it if the checkpoint is only inspected.

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
