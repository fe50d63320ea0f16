"""A wanted output as one nested training state: every tensor at its path, the extras around them.

The one idea: a tensor that came from a nested state goes back to the very path it hung at; one that came without a path
is given the place that its kind has in that state, or in the layout of `get_state_dict`:

    {"model": {name: T}, "optim": {"state": {name: {"exp_avg": T, ...}}, "param_groups": [...]}, "ema": {...}, ...}

Shared by the writers of torch files and of DCP, which differ in what they put at a tensor's place. Extras that only a
foreign class could hold are left out, and named. Cost: one visit a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.target import Wanted, WantedTensor
from ckpt_tool.core.tensor import MODEL, Path
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.state_paths import Roots, clean
from ckpt_tool.formats.state_tree import SLOT, dotted, join
from ckpt_tool.storage.pickle_values import OrderedMap
from ckpt_tool.storage.pickle_writer import dumps

_LEAVE = object()


class Nested(NamedTuple):
    """tree: the state. paths: of each wanted tensor in it. notes: what was left out, in words."""

    tree: dict[Any, Any]
    paths: list[Path]
    notes: list[str]


def nest(wanted: Wanted, places: Sequence[Any], *, whole_numbers: bool) -> Nested:
    """Put `places[i]` where tensor i of `wanted` belongs.

    whole_numbers: number an optimizer's parameters by integers, as `torch.optim` asks; False keeps DCP's text keys.
    Raises UsageError E0241 for two tensors at one path.
    """
    roots = Roots.from_hints(wanted.hints) or Roots()
    kept_paths = Roots.from_hints(wanted.hints) is not None
    extras, left_out = writable(wanted.extras)
    extras = _without_removed(extras, wanted, roots)
    paths = [_path(tensor, roots, kept=kept_paths) for tensor in wanted.tensors]
    if whole_numbers:
        paths = [_with_integer(path, extras) for path in paths]
    _check_distinct(wanted, paths)
    tree = join(extras, zip(paths, places, strict=True))
    for path, attributes in wanted.hints.get("ordered", ()):
        tree = _order(tree, tuple(path), attributes)
    notes = [f"left out, because no plain value holds it: {', '.join(left_out[:20])}"] if left_out else []
    return Nested(tree, paths, notes)


def _path(tensor: WantedTensor, roots: Roots, *, kept: bool) -> Path:
    """The tensor's own path if it still is its name's, else the place of its kind."""
    if kept and tensor.path:
        named = {n for names in roots.ids.values() for n in names.values()}
        if tensor.key.name in clean(dotted(tensor.path)) or tensor.key.name in named:
            return tensor.path
    return roots.path(tensor.key)


def _check_distinct(wanted: Wanted, paths: Sequence[Path]) -> None:
    seen: dict[Path, WantedTensor] = {}
    for path, tensor in zip(paths, wanted.tensors, strict=True):
        other = seen.setdefault(path, tensor)
        if other is not tensor:
            raise UsageError(
                f"{other.key} and {tensor.key} both belong at {dotted(path)}", code="E0241", key=str(tensor.key),
                hint="leave one of them out with --remove-keys, or write another format",
            )  # fmt: skip


def _with_integer(path: Path, extras: Mapping[Any, Any]) -> Path:
    """`("optim", "state", "0", ...)` with 0 where the groups beside it list integers."""
    if "state" not in path[:-2]:
        return path
    at = path.index("state")
    number = path[at + 1]
    node: Any = extras
    for step in path[:at]:
        node = node.get(step) if isinstance(node, Mapping) else None
    groups = node.get("param_groups") if isinstance(node, Mapping) else None
    if isinstance(number, str) and number.isdigit() and isinstance(groups, list):
        listed = [n for group in groups if isinstance(group, Mapping) for n in group.get("params") or ()]
        if listed and all(type(n) is int for n in listed):
            return (*path[: at + 1], int(number), *path[at + 2 :])
    return path


def _without_removed(extras: dict[Any, Any], wanted: Wanted, roots: Roots) -> dict[Any, Any]:
    """Groups without the numbers of parameters that are no longer there, where the numbers' names are known."""
    have = {tensor.key.name for tensor in wanted.tensors}
    if not roots.ids or not any(tensor.key.state == MODEL for tensor in wanted.tensors):
        return extras
    for path, names in roots.ids.items():
        gone = {int(number) for number, name in names.items() if name not in have}
        lost = {name for name in names.values() if name not in have}
        if gone:
            extras = _edit(extras, (*path, "param_groups"), lambda groups, g=gone, n=lost: _prune(groups, g, n))
    return extras


def _edit(value: Any, path: Path, change: Any) -> Any:
    if not path:
        return change(value)
    if not isinstance(value, Mapping) or path[0] not in value:
        return value
    return {**value, path[0]: _edit(value[path[0]], path[1:], change)}


def _prune(groups: Any, numbers: set[int], names: set[str]) -> Any:
    if not isinstance(groups, list):
        return groups
    out = []
    for group in groups:
        if isinstance(group, Mapping) and isinstance(group.get("params"), list):
            group = {**group, "params": [n for n in group["params"] if n not in numbers]}
            if isinstance(group.get("param_names"), list):
                group["param_names"] = [name for name in group["param_names"] if clean(str(name)) not in names]
        out.append(group)
    return out


def _order(tree: dict[Any, Any], path: Path, attributes: Any) -> dict[Any, Any]:
    """The tree with the dict at `path` as an OrderedDict that has its attributes again."""
    node: Any = tree
    for step in path[:-1]:
        node = node.get(step) if isinstance(node, dict) else None
    here = tree if not path else node.get(path[-1]) if isinstance(node, dict) else None
    if type(here) is not dict:
        return tree
    ordered = OrderedMap(here)
    ordered.attributes = attributes
    if not path:
        return ordered
    node[path[-1]] = ordered
    return tree


# -- what may be written ------------------------------------------------------------------------------------------------


def writable(extras: Mapping[str, Any]) -> tuple[dict[Any, Any], list[str]]:
    """(the extras that our pickles can hold, `PATH: class` of what they can't)."""
    left_out: list[str] = []
    kept = _writable(extras, (), left_out)
    return (kept if isinstance(kept, dict) else {}), left_out


def _writable(value: Any, path: Path, left_out: list[str]) -> Any:
    if isinstance(value, Mapping):
        found = {}
        for key, item in value.items():
            kept = _writable(item, (*path, str(key)), left_out)
            if kept is not _LEAVE and _fits(key, (*path, str(key)), left_out):
                found[key] = kept
        return found
    if isinstance(value, list | tuple):
        items = [_writable(item, (*path, i), left_out) for i, item in enumerate(value)]
        filled = [None if item is _LEAVE else item for item in items]
        return tuple(filled) if isinstance(value, tuple) else filled
    return value if _fits(value, path, left_out) else _LEAVE


def _fits(value: Any, path: Path, left_out: list[str]) -> bool:
    if value is None or isinstance(value, str | int | float | bytes) or value == SLOT:
        return True
    try:
        dumps(value)
    except UsageError:
        name = value.name if isinstance(value, Opaque | Symbol) else type(value).__name__
        left_out.append(f"{dotted(path)}: {name}")
        return False
    return True
