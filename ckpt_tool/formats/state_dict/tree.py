"""Splits a nested training state into tensors with their paths and plain extras, and joins them again.

    {"model": {"w": T0}, "epoch": 3, "rng": [T1, None]}

is split into the leaves `("model", "w")` -> T0 and `("rng", 0)` -> T1 and the extras
`{"epoch": 3, "rng": [SLOT, None]}`. A dict that contained only tensors disappears (the paths restore it), while a list
or tuple gets a `SLOT` in place of a tensor (or of a dict of only tensors), because positions matter there. `join` is
the inverse.

An optimizer state that torchao quantises (`pickles.coded_states`) is split into its plain tensors: `exp_avg@codes`,
`exp_avg@scale`, `exp_avg@qmap`; a quantised weight (`pickles.coded_weights`) into `m._weight_qdata`,
`m._weight_scale`.

Cost: one visit a value. What this module does not do: interpret names, states or files; look into objects of unknown
classes (`pickles.pickle_reader.refuse_weight_bearing` handles the tensors in those).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.tensor import Path
from ckpt_tool.errors import CorruptFile
from ckpt_tool.formats.state_dict.numpy_weights import as_tensor, is_tensor_place
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.coded_states import coded
from ckpt_tool.storage.pickles.coded_weights import coded_weight
from ckpt_tool.storage.pickles.pickle_globals import is_tensor_record
from ckpt_tool.storage.pickles.pickle_values import (
    ArrayRef,
    NumpyArray,
    PickledRecord,
    StorageRef,
    TensorRef,
    WrapperRef,
    as_extras,
)
from ckpt_tool.weight_schemes.quantised_weights import subclass_part

SLOT = Symbol("ckpt.tensor")  # placeholder for a tensor in a list or tuple of the extras
DEPTH_LIMIT = 200  # containers inside containers
VISIT_LIMIT = 20_000_000  # values of one state, shared ones counted each time

_GONE = object()  # marks a dict that is empty once its tensors are taken out
_TENSORS = (TensorRef, WrapperRef, ArrayRef)


class TensorHolder(NamedTuple):
    """An object at `path` that holds a tensor."""

    path: Path
    value: Opaque
    before: int  # the number of leaves that precede it
    whole: WrapperRef | None = None  # the distributed tensor of which it is this rank's part


@dataclass(slots=True)
class Parted:
    """A state split into tensors and extras."""

    # (path, TensorRef, WrapperRef or ArrayRef), in the state's own order
    leaves: list[tuple[Path, Any]] = field(default_factory=list)
    extras: Any = None  # everything that is not a tensor
    hanging: list[str] = field(default_factory=list)  # a line for every set or record that holds a tensor
    held: list[TensorHolder] = field(default_factory=list)  # objects of foreign classes that hold one
    # (path, attributes) of every OrderedDict that carried attributes of its own (`_metadata` of a torch module's state
    # dict)
    ordered: list[tuple[Path, Any]] = field(default_factory=list)
    visits: int = 0


def part(value: Any, path: Path = ()) -> Parted:
    """Split a nested state into tensors and extras. Raises CorruptFile E0398 if it is nested too deep or has too many
    values.

    path: a prefix for the path of every tensor.
    """
    parted = Parted()
    if isinstance(value, NumpyArray) and path and is_tensor_place(path):
        left = _part_array(value, path, parted)
    else:
        left = _part(value, path, parted)
    parted.extras = {} if left is _GONE else left
    return parted


def _part(value: Any, path: Path, out: Parted) -> Any:
    out.visits += 1
    if len(path) > DEPTH_LIMIT or out.visits > VISIT_LIMIT:
        raise CorruptFile(
            f"the state nests deeper than {DEPTH_LIMIT} levels or has more than {VISIT_LIMIT} values",
            code="E0398",
            place=dotted(path[:8])[:200] + "...",
            hint="the file is damaged or malicious: no trainer writes such a state",
        )

    if isinstance(value, WrapperRef) and type(value.local) is Opaque and holds_tensor(value.local):
        out.held.append(TensorHolder(path, value.local, len(out.leaves), value))
        return SLOT

    if isinstance(value, _TENSORS):
        out.leaves.append((path, value))
        return SLOT

    parts = coded(value)
    if parts is not None:
        out.leaves += [(part_path(path, name), ref) for name, ref in parts.items()]
        return SLOT

    weight = coded_weight(value)
    if weight is not None and path:
        out.leaves += [((*path[:-1], subclass_part(str(path[-1]), role)), ref) for role, ref in weight.items()]
        return SLOT

    if isinstance(value, dict):
        attributes = getattr(value, "attributes", None)
        if attributes and not holds_tensor(attributes):
            out.ordered.append((path, as_extras(attributes)))
        kept = {}
        for key, item in value.items():
            # bool is a subclass of int in Python, but a bool key must not become the number 0 or 1.
            step = key if isinstance(key, int) and not isinstance(key, bool) else str(key)
            if isinstance(item, NumpyArray) and is_tensor_place((*path, step), value.items()):
                left = _part_array(item, (*path, step), out)
            else:
                left = _part(item, (*path, step), out)
            if left is not SLOT and left is not _GONE:
                kept[_key(key)] = left
        return kept if kept or not value else _GONE

    if isinstance(value, list | tuple):
        items = [_part(item, (*path, i), out) for i, item in enumerate(value)]
        filled = [SLOT if item is _GONE else item for item in items]
        return tuple(filled) if isinstance(value, tuple) else filled

    if isinstance(value, PickledRecord | set | frozenset) and holds_tensor(value):
        name = getattr(value, "name", type(value).__name__)
        out.hanging.append(f"a tensor is held by a {name}, which is not understood, at {dotted(path)}")
    elif type(value) is Opaque and (value.name == pickles.ITSELF or holds_tensor(value)):
        out.held.append(TensorHolder(path, value, len(out.leaves)))
        return SLOT

    return as_extras(value)


def _part_array(value: NumpyArray, path: Path, out: Parted) -> Any:
    """Record a NumPy array at a tensor's usual place as a leaf, or as a tensor that cannot be read. Returns what
    remains of it in the extras."""
    tensor = as_tensor(value)
    if tensor is None:
        return as_extras(value)
    if isinstance(tensor, ArrayRef):
        out.leaves.append((path, tensor))
    else:
        out.held.append(TensorHolder(path, tensor, len(out.leaves)))
    return SLOT


def part_path(path: Path, name: str) -> Path:
    """The path of one part of a quantised state: that of the state with `@name` appended.

    >>> part_path(("optim", "state", "w", "exp_avg"), "scale")
    ('optim', 'state', 'w', 'exp_avg@scale')
    """
    return (*path[:-1], f"{path[-1]}@{name}")


def _key(key: Any) -> Any:
    """A dict's key as a plain value: objects that cannot be one are replaced by their class name in <>."""
    if isinstance(key, PickledRecord | Opaque | NumpyArray):
        return f"<{getattr(key, 'name', 'numpy.ndarray')}>"
    return as_extras(key)


def holds_tensor(value: Any, depth: int = 0) -> bool:
    """Does `value` contain a tensor at any depth?"""
    if isinstance(value, (*_TENSORS, StorageRef)) or is_tensor_record(value):
        return True
    if depth > DEPTH_LIMIT:
        return False
    if isinstance(value, Mapping):
        return any(holds_tensor(item, depth + 1) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return any(holds_tensor(item, depth + 1) for item in value)
    if isinstance(value, PickledRecord | Opaque):
        return holds_tensor(value.args, depth + 1) or holds_tensor(value.state, depth + 1)
    return False


def dotted(path: Iterable[str | int]) -> str:
    """The path as torch's flattening spells it: `optim.param_groups.0.lr`."""
    return ".".join(map(str, path))


def join(extras: Mapping[str, Any], tensors: Iterable[tuple[Path, Any]]) -> dict[Any, Any]:
    """Rebuild the nested state: `extras` with each tensor (any value) at its path. Slots without a tensor become None.

    If a tensor's path runs through a plain value of the extras, that value moves to `("extras", *its path)`, so
    nothing is lost.
    """
    root: dict[Any, Any] = {key: _copy(item) for key, item in extras.items()}
    for path, tensor in tensors:
        _put(root, path, tensor)
    return {key: _sealed(item) for key, item in root.items()}


def value_at(extras: Any, path: Path) -> Any:
    """The value of the extras at `path`, None if there is none.

    >>> value_at({"optimizers": [{"param_groups": []}]}, ("optimizers", 0, "param_groups"))
    []
    """
    for step in path:
        if isinstance(extras, Mapping) and step in extras:
            extras = extras[step]
        elif isinstance(extras, list | tuple) and isinstance(step, int) and step < len(extras):
            extras = extras[step]
        else:
            return None
    return extras


def with_changed(extras: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """A copy of the extras in which `change` is applied to the value at `path`; the extras themselves if there is none.

    >>> with_changed({"optimizers": [{"lr": 1}]}, ("optimizers", 0, "lr"), lambda rate: rate + 1)
    {'optimizers': [{'lr': 2}]}
    """
    if not path:
        return change(extras)
    step = path[0]
    if isinstance(extras, Mapping) and step in extras:
        return {**extras, step: with_changed(extras[step], path[1:], change)}
    if isinstance(extras, list | tuple) and isinstance(step, int) and step < len(extras):
        items = list(extras)
        items[step] = with_changed(items[step], path[1:], change)
        return tuple(items) if isinstance(extras, tuple) else items
    return extras


class _Tuple(list[Any]):
    """A tuple in mutable form while its slots are filled (`_sealed` turns it back)."""


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if isinstance(value, tuple):
        return _Tuple(_copy(item) for item in value)
    return value


def _sealed(value: Any) -> Any:
    if isinstance(value, Symbol):
        return None if value == SLOT else value
    if type(value) is dict:
        return {key: _sealed(item) for key, item in value.items()}
    if type(value) is list:
        return [_sealed(item) for item in value]
    if type(value) is _Tuple:
        return tuple(_sealed(item) for item in value)
    return value


def _put(root: dict[Any, Any], path: Path, tensor: Any) -> None:
    node: Any = root
    for depth, step in enumerate(path[:-1]):
        node = _step(root, node, path[: depth + 1], step)
    last = path[-1]
    if isinstance(node, list) and isinstance(last, int) and last < len(node):
        if node[last] is not None and node[last] != SLOT:
            _displace(root, path, node[last])
        node[last] = tensor
        return
    if last in node:
        _displace(root, path, node[last])
    node[last] = tensor


def _step(root: dict[Any, Any], node: Any, here: Path, step: str | int) -> Any:
    """The container at key or index `step` of `node`, created if there is none. here: its path."""
    if isinstance(node, list):
        position = step if isinstance(step, int) else -1
        if not 0 <= position < len(node):
            raise CorruptFile(
                f"a tensor belongs at {dotted(here)}, but the list there has {len(node)} entries",
                code="E2606",
                hint="the extras were edited: keep all of them or drop them",
            )
        if not isinstance(node[position], dict | list):
            if node[position] is not None and node[position] != SLOT:
                _displace(root, here, node[position])
            node[position] = {}
        return node[position]
    below = node.get(step)
    if not isinstance(below, dict | list):
        if step in node:
            _displace(root, here, below)
        below = node[step] = {}
    return below


def _displace(root: dict[Any, Any], path: Path, value: Any) -> None:
    """Move a plain value whose path a tensor needs to ("extras", *path)."""
    node = root
    for step in ("extras", *path[:-1]):
        below = node.get(step)
        if not isinstance(below, dict):
            below = node[step] = {}
        node = below
    node[path[-1]] = value
