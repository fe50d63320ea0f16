"""Identifies the tensors of a nested state that cannot be read, so that the other tensors can still be converted.

    {"optimizer": {"state": {0: {"exp_avg": Opaque("lib.Codes", ...)}}}}
      ->  Hidden(("optimizer", "state", 0, "exp_avg"), (64, 64), "F32", "lib.Codes", "a tensor is held by ...")

The name of such a tensor is derived from its path, as for any other, and from its shape where the object has one: a
tensor subclass has (torch 2.13 `_tensor.py`, `_rebuild_from_type_v2`), and so have torch's own sparse tensors. So a
reader treats it as an array like the others (`Hidden.array`), but with the path `Nowhere`, and names it by the rules of
its system. In the end `set_apart` separates such tensors from the rest. The object itself is never instantiated. Cost:
one visit a value. What it does not do: decide whether the rest may be converted (`sources.opening`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpt_tool.core.catalog import Note, Unread
from ckpt_tool.core.dtype import DTYPES, from_torch
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.tensor import EXTRAS, MODEL, ChunkColumns, LogicalTensor, Path, StoredArray, TensorKey
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.state_dict.tree import Parted, TensorHolder, dotted
from ckpt_tool.formats.state_dict.words import MODEL_ROOTS, SAME_SHAPE
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.pickle_globals import META_TENSOR
from ckpt_tool.storage.pickles.pickle_numpy import tensor_dtype
from ckpt_tool.storage.pickles.pickle_values import StorageRef, TensorRef, WrapperRef

_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_PARAMETER = "torch._utils._rebuild_parameter"
_SPARSE = "torch._utils._rebuild_sparse"
_VIEWS = frozenset(f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "qtensor"))
UNREAD = "N-unread-tensors"  # the note on such tensors
_SHOWN = 10


class Hidden(NamedTuple):
    """A tensor that cannot be read, before it has a logical name."""

    path: Path
    shape: tuple[int, ...]
    dtype: str  # as `DType.name`, "" if unknown
    # kind, fault: those of `core.catalog.Unread`
    kind: str = ""
    line: str = ""  # its line in `Catalog.unsafe`
    fault: CkptError | None = None
    at: int = 0  # the number of leaves that precede it in the state

    def array(self, file: str) -> StoredArray:
        """A placeholder array in `file` that readers can name and place like any other. An unknown dtype and shape
        become a single F32."""
        return StoredArray(Nowhere.of(self, file), 0, DTYPES[self.dtype or "F32"], self.shape)


class Nowhere(str):
    """The path of an array that cannot be read, as messages show it; `hidden` describes the tensor."""

    hidden: Hidden

    @classmethod
    def of(cls, hidden: Hidden, file: str) -> Nowhere:
        """The path for the tensor `hidden` of `file`, different for each tensor."""
        path = cls(f"{file} ({dotted(hidden.path)[:200]})")
        path.hidden = hidden
        return path


def is_shapeless(array: StoredArray) -> bool:
    """Is it the placeholder of a tensor that cannot be read and whose shape is unknown?"""
    return isinstance(array.path, Nowhere) and not array.path.hidden.dtype


def hidden_in(value: Any, parted: Parted, shown: str, where: str) -> tuple[list[str], list[Hidden]]:
    """(lines for `Catalog.unsafe`, the tensors that cannot be read) of a state `value` and its split form `parted`.

    Objects without a path (keys of dicts, the inside of other objects) only give a line.

    Args:
        shown: the file, for errors.
        where: the file and the item, for the lines.

    Raises InputError E0374 for tensors without a path that torch stores in forms of its own.
    """
    every = list(pickles.weight_bearing(value, but_coded=True))
    placed = {id(held.value) for held in parted.held}
    unplaced = [one for one in every if id(one) not in placed]
    lines = {one.name: f"{pickles.held_by(one.name)} ({where})" for one in every if pickles.foreign(one)}
    if unplaced and not lines:
        raise pickles.other_form(unplaced[0], shown)
    if unplaced:
        return list(lines.values()), []
    return list(lines.values()), [_hidden(held, lines, shown) for held in parted.held]


def _hidden(held: TensorHolder, lines: Mapping[str, str], shown: str) -> Hidden:
    name = held.value.name
    line = lines.get(held.value.name, "")
    looks = _looks(held.value) if held.whole is None else (held.whole.shape, held.whole.dtype.name)
    if line:
        return Hidden(held.path, *looks, name, line, at=held.before)
    fault = pickles.other_form(held.value, shown)
    fault.key = dotted(held.path)[:200]
    return Hidden(held.path, *looks, fault=fault, at=held.before)


def with_shapes(
    leaves: Sequence[tuple[Path, StoredArray]], wrapped: Mapping[Path, WrapperRef]
) -> list[tuple[Path, StoredArray]]:
    """The leaves, with unknown shapes taken from another state of the same parameter that has the same shape.

    wrapped: the distributed tensors among the leaves, whose global shape counts.
    """
    known = {
        path[:-1]: wrapped[path].shape if path in wrapped else array.shape
        for path, array in leaves
        if path[-1] in SAME_SHAPE and not is_shapeless(array)
    }
    return [
        (path, array._replace(shape=known[path[:-1]]))
        if is_shapeless(array) and path[-1] in SAME_SHAPE and path[:-1] in known
        else (path, array)
        for path, array in leaves
    ]


def set_apart(
    tensors: Mapping[TensorKey, LogicalTensor], faults: Mapping[TensorKey, CkptError] = MappingProxyType({})
) -> tuple[dict[TensorKey, LogicalTensor], tuple[Unread, ...]]:
    """Separate named tensors into (those that can be read, those that cannot). A tensor counts as unreadable if any
    part of it is. An unreadable object under a model's usual name counts as part of the model.

    Args:
        faults: why tensors cannot be read although their bytes are stored, by key.
    """
    found: dict[TensorKey, LogicalTensor] = {}
    rows = []
    for key, tensor in tensors.items():
        if key in faults:
            rows.append(Unread(key, f"{tensor.dtype.name} {list(tensor.shape)}", fault=faults[key]))
            continue
        if isinstance(tensor.chunks, ChunkColumns):  # columns never contain placeholders
            found[key] = tensor
            continue
        parts = [chunk.array.path.hidden for chunk in tensor.chunks if isinstance(chunk.array.path, Nowhere)]
        if not parts:
            found[key] = tensor
            continue
        one = parts[0]
        lines = dict.fromkeys(part.line for part in parts if part.line)
        if key.state == EXTRAS and str(one.path[-1]) in MODEL_ROOTS:
            key = TensorKey(key.name, MODEL)
        shown = f"{one.dtype or 'an object'} {list(tensor.shape)}"
        if one.fault is not None:
            one.fault.key = str(key)[:200]
            one.fault.hint = _with_removal(one.fault.hint, key.name)
        rows.append(Unread(key, shown, one.kind, tuple(lines), one.fault))
    return found, tuple(rows)


def _with_removal(hint: str | None, name: str) -> str:
    """The hint of a tensor that cannot be read, extended by the option that leaves it out."""
    removal = f"--remove-keys {shlex.quote(name[:200])} leaves it out"
    if hint is None or removal in hint:
        return hint or removal
    return f"{hint}; {removal}"


def notes_of(unread: Sequence[Unread]) -> list[Note]:
    """One note that lists the unread tensors, for a reader's report; none if there are none."""
    shown = [f"{one.key} ({one.shown})" for one in unread[:_SHOWN]]
    shown += [f"and {len(unread) - _SHOWN} more"] if len(unread) > _SHOWN else []
    why = dict.fromkeys(f"held by objects of class {one.kind}" if one.kind else str(one.fault) for one in unread)
    noun = "value" if any(one.fault is not None and one.fault.code == pickles.CYCLE for one in unread) else "tensor"
    count = f"{len(unread)} {noun}s are" if len(unread) > 1 else f"1 {noun} is"
    text = f"{count} not read: {', '.join(shown)}; {'; '.join(list(why)[:_SHOWN])}"
    return [Note(UNREAD, text)] if unread else []


def _looks(held: Opaque) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) of a tensor subclass or a sparse tensor, as far as its pickle contains them."""
    if held.name == _PARAMETER and type(held.args[0]) is Opaque:
        return _looks(held.args[0])
    if held.name == pickles.ARRAY:
        known = tensor_dtype(held.args[0])
        return held.args[1], known.name if known else ""
    if held.name == META_TENSOR and len(held.args) == 4:
        return _declared(held.args[1], held.args[0])
    if held.name in _VIEWS and len(held.args) > 3 and type(held.args[0]) is StorageRef:
        stored = held.args[0].dtype
        return _declared(held.args[2], Symbol(f"torch.{stored.torch}") if stored else None)
    if held.name.startswith(_SPARSE) and len(held.args) == 2 and type(held.args[1]) is tuple:
        for values, size in pairwise(held.args[1]):  # (indices, values, size, ...)
            if type(values) is TensorRef and type(size) is tuple and all(type(n) is int for n in size):
                return size, values.dtype.name
    made = held.args[0] if len(held.args) == 1 else None
    if type(made) is TensorRef:
        return made.shape, made.dtype.name
    if type(made) is Opaque and made.name == _WRAPPER and len(made.args) == 8:
        dtype, shape = made.args[1:3]
        return _declared(shape, dtype)
    return (), ""


def _declared(shape: Any, dtype: Any) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) from the values in a pickle, ((), "") if they contain no valid shape."""
    known = from_torch(dtype.name) if type(dtype) is Symbol else None
    if type(shape) is tuple and all(type(n) is int for n in shape):
        return shape, known.name if known else ""
    return (), ""
