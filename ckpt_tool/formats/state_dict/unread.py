"""Tensors of a nested state that no reader gives: which they are, so that who does not ask for them can have the rest.

    {"optimizer": {"state": {0: {"exp_avg": Opaque("lib.Codes", ...)}}}}
      ->  Hidden(("optimizer", "state", 0, "exp_avg"), (64, 64), "F32", "lib.Codes", "a tensor hangs on an object ...")

What such a tensor is follows from where it hangs, as for any other (`formats.state_dict.paths`), and from its shape
where the object tells one: a tensor subclass does (torch 2.13 `_tensor.py`, `_rebuild_from_type_v2`). Nothing is ever
made of the object. Cost: one visit a value. What it does not do: decide whether the rest may be taken
(`sources.opening`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ckpt_tool.core.catalog import Note, Unread
from ckpt_tool.core.dtype import from_torch
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.tensor import EXTRAS, MODEL, Path, TensorKey
from ckpt_tool.errors import CkptError, UnsafeInput
from ckpt_tool.formats.state_dict.paths import Leaf
from ckpt_tool.formats.state_dict.tree import Parted
from ckpt_tool.formats.state_dict.words import MODEL_ROOTS
from ckpt_tool.storage import pickles
from ckpt_tool.storage.pickle_values import TensorRef

_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_SHOWN = 10


class Hidden(NamedTuple):
    """One of them, before it has a name. dtype: as `DType.name`, "" where the object does not tell. kind, line, fault:
    those of `core.catalog.Unread`."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    kind: str = ""
    line: str = ""
    fault: CkptError | None = None

    @property
    def leaf(self) -> Leaf:
        """What `name_leaves` is to name."""
        return Leaf(self.path, self.shape)


def hidden_in(value: Any, parted: Parted, shown: str, where: str) -> tuple[list[str], list[Hidden]]:
    """(lines for `Catalog.unsafe`, the tensors they are of) for a state `value` that was parted.

    Args:
        shown: the file, for errors. where: the same for the lines, with the item.

    Raises InputError E0374 for tensors that torch keeps in forms of its own. Of objects at places that have no path
    (keys of dicts, the inside of others) there is a line alone.
    """
    try:
        pickles.refuse_weight_bearing(value, shown, but_coded=True)
    except UnsafeInput:
        lines = {
            one.name: f"{pickles.held_by(one.name)} ({where})"
            for one in pickles.weight_bearing(value, but_coded=True)
            if pickles.foreign(one)
        }
        placed = {id(held) for _, held in parted.held}
        if any(id(one) not in placed for one in pickles.weight_bearing(value, but_coded=True)):
            return list(lines.values()), []
        return list(lines.values()), [
            Hidden(path, *_looks(held), held.name, lines[held.name]) for path, held in parted.held if held.name in lines
        ]
    return [], []


def named(hidden: Sequence[Hidden], keys: Sequence[TensorKey]) -> tuple[Unread, ...]:
    """Those tensors under their keys. An object where a model may hang is taken for the model's."""
    rows = []
    for one, key in zip(hidden, keys, strict=True):
        if key.state == EXTRAS and str(one.path[-1]) in MODEL_ROOTS:
            key = TensorKey(key.name, MODEL)
        rows.append(Unread(key, f"{one.dtype or 'an object'} {list(one.shape)}", one.kind, one.line, one.fault))
    return tuple(rows)


def notes_of(unread: Sequence[Unread]) -> list[Note]:
    """The lines for a reader's report."""
    shown = [f"{one.key} ({one.shown})" for one in unread[:_SHOWN]]
    shown += [f"and {len(unread) - _SHOWN} more"] if len(unread) > _SHOWN else []
    why = dict.fromkeys(f"held by objects of class {one.kind}" if one.kind else str(one.fault) for one in unread)
    text = f"{len(unread)} tensors are not read: {', '.join(shown)}; {'; '.join(list(why)[:_SHOWN])}"
    return [Note("N-unread-tensors", text)] if unread else []


def _looks(held: Opaque) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) of a tensor subclass, as far as its pickle tells."""
    made = held.args[0] if len(held.args) == 1 else None
    if type(made) is TensorRef:
        return made.shape, made.dtype.name
    if type(made) is Opaque and made.name == _WRAPPER and len(made.args) == 8:
        dtype, shape = made.args[1:3]
        known = from_torch(dtype.name) if type(dtype) is Symbol else None
        if type(shape) is tuple and all(type(n) is int for n in shape):
            return shape, known.name if known else ""
    return (), ""
