"""The inert pickle reader: pickles as data, never as code. (API first; the machine follows.)"""

from __future__ import annotations

from typing import Any

from ckpt_tool.storage.pickle_values import (
    GlobalUse,
    NumpyArray,
    OrderedMap,
    Pickled,
    Record,
    Span,
    StorageRef,
    TensorRef,
    WrapperRef,
    as_extras,
)
from ckpt_tool.storage.source import Tree

__all__ = [
    "GlobalUse", "NumpyArray", "OrderedMap", "Pickled", "Record", "Span", "StorageRef", "TensorRef", "WrapperRef",
    "as_extras", "load", "load_file", "load_many", "refuse_unsafe", "refuse_weight_bearing",
]  # fmt: skip

OPCODE_LIMIT = 10_000_000  # of one pickle
METADATA_OPCODES = 200_000_000  # for `.metadata` of large DCP and Paddle saves: about 100 opcodes a chunk


def load(
    data: bytes, *, path: str, member: str | None = None, multi: bool = False, start: int = 0,
    opcodes: int = OPCODE_LIMIT,
) -> Pickled:  # fmt: skip
    """Read one pickle from `data[start:]`.

    Args:
        path: the file, as messages show it. member: the zip member, for messages.
        multi: more may follow STOP (legacy torch streams); otherwise trailing bytes are refused (exit 4).
        opcodes: limit; pass METADATA_OPCODES for the metadata of large saves.
    Never raises for unsafe globals: they are listed in `.unsafe`; call `refuse_unsafe` unless you are `inspect`.
    Raises CorruptFile (E0360-E0379) with the byte offset and the opcode's number; UnsafeInput (E042x) when the
    stream breaks after it named an unsafe global, or goes on after STOP.
    """
    raise NotImplementedError


def load_file(
    tree: Tree, path: str, *, start: int = 0, nbytes: int | None = None, multi: bool = False,
    span_from: int = 4096, opcodes: int = OPCODE_LIMIT,
) -> Pickled:  # fmt: skip
    """Read one pickle from bytes [start, start + nbytes) of a file without reading its large byte strings.

    A byte string of `span_from` bytes or more becomes `Span(offset in the file, nbytes)` and is never read, so that
    a `.pdparams` of many GB costs a few KiB per tensor. path: relative to the tree.
    """
    raise NotImplementedError


def load_many(tree: Tree, path: str, count: int, *, start: int = 0) -> list[Pickled]:
    """`count` pickles back to back from byte `start` of the file (the legacy torch stream has five)."""
    raise NotImplementedError


def refuse_unsafe(pickled: Pickled, path: str, *, member: str | None = None) -> None:
    """Raise UnsafeInput E0420 (exit 4) when the pickle names a global of tier 3, with module.name, opcode number and
    byte offset of each. Every caller but `inspect` calls this."""
    raise NotImplementedError


def refuse_weight_bearing(value: Any, path: str, *, member: str | None = None) -> None:
    """Raise when a tensor hangs on something that is not understood: InputError E0374 for torch's sparse, quantised,
    nested or meta tensors, UnsafeInput E0421 (exit 4) for an object of an unknown class that holds a tensor."""
    raise NotImplementedError
