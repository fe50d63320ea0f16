"""Builds one nested training state from a wanted output: every tensor at its path, in between the extras.

The one idea: a tensor that came from a nested state goes back to the same path; one that came without a path is put
where its kind is in that state, or in the layout of `get_state_dict`:

    {"model": {name: T}, "optim": {"state": {name: {"exp_avg": T, ...}}, "param_groups": [...]}, "ema": {...}, ...}

The writers of torch files and of DCP share it; they differ in the value that they put at a tensor's path. Extras that
are not plain values are left out, and a note lists them. Cost: one visit a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.target import Wanted, WantedTensor
from ckpt_tool.core.tensor import MODEL, Path, TensorKey
from ckpt_tool.core.wrapper_words import clean
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.state_dict.optimizer_ids import Candidate, align
from ckpt_tool.formats.state_dict.paths import Leaf, name_leaves
from ckpt_tool.formats.state_dict.roots import Ordered, Roots
from ckpt_tool.formats.state_dict.tree import SLOT, dotted, join, value_at, with_changed
from ckpt_tool.formats.state_dict.words import is_second_model
from ckpt_tool.storage.pickles.pickle_values import OrderedMap
from ckpt_tool.storage.pickles.pickle_writer import dumps

_LEAVE = object()


class Nested(NamedTuple):
    """A nested training state that is ready to be pickled."""

    tree: dict[Any, Any]
    paths: list[Path]  # the path of each wanted tensor in `tree`, in the order of `Wanted.tensors`
    notes: list[str]  # what was left out or changed, in words


def nest(wanted: Wanted, places: Sequence[Any], *, whole_numbers: bool) -> Nested:
    """Build the nested state of `wanted` with `places[i]` at the path of tensor i.

    Reading the result by the rules of `state_dict.paths` is guaranteed to give the wanted names again: if the old paths
    would not (a filter removed the evidence), the layout of the module's docstring is used; if an optimizer's numbers
    would not, its groups get `param_names`.

    Args:
        places: the value to store for each tensor of `wanted`.
        whole_numbers: number an optimizer's parameters by integers, as `torch.optim` requires. False keeps DCP's text
            keys, and writes names where a `torch.optim` file had integers whose names are known, because a DCP job
            requires names.

    Raises UsageError E0241 for two tensors at one path, E0243 for a name that no path gives.
    """
    extras, left_out = writable(wanted.extras)
    notes = [f"left out, because no plain value holds it: {', '.join(left_out[:20])}"] if left_out else []
    known = wanted.hints.get(Roots)
    if known is not None and known.ids and not whole_numbers:
        wanted, extras, known = _with_names_for_numbers(wanted, extras, known)

    attempts: list[tuple[Roots, bool]] = [(Roots(), False)]
    if known is not None and not (known.chosen and _has_second_model(wanted, known)):
        attempts.insert(0, (known, True))
    for roots, kept in attempts:
        here = _without_removed(extras, wanted, roots)
        paths = _paths(wanted, roots, here, kept=kept, whole_numbers=whole_numbers)
        _check_distinct(wanted, paths)
        here, named = _with_param_names(here, wanted, paths, roots)
        wrong = _unlike(wanted, paths, here)
        if wrong is None:
            break
    else:
        raise UsageError(
            f"no place in a nested state gives {wrong} its name back",
            code="E0243",
            key=str(wrong),
            hint="rename it, leave it out with --remove-keys, or write --to sharded",
        )

    if known is not None and not kept:
        notes.append(
            "laid out as get_state_dict does: at their old paths, the tensors that are left would be ambiguous"
        )

    notes += [f"{dotted(path)}: param_names were added, order and shape do not name its parameters" for path in named]
    tree = join(here, zip(paths, places, strict=True))
    for path, attributes in ordered(wanted.hints) if kept else ():
        tree = _order(tree, path, attributes)
    return Nested(tree, paths, notes)


def _has_second_model(wanted: Wanted, roots: Roots) -> bool:
    """Is there another level that a reader could take for the model? The user has named one of the two, and a reader
    of what is written shall not have to ask again."""
    return any(is_second_model(tensor.path, roots.model) for tensor in wanted.tensors)


def _with_names_for_numbers(
    wanted: Wanted, extras: dict[Any, Any], roots: Roots
) -> tuple[Wanted, dict[Any, Any], Roots]:
    """Replace the integers by which a torch optimizer lists its parameters with names.

    `torch.distributed.checkpoint.state_dict` requires `optim.state.NAME.exp_avg` and lists of names (torch 2.13
    `_get_optim_state_dict`). Numbers that are text come from a DCP whose job expects them again, so they stay."""
    extras = _without_removed(extras, wanted, roots)
    tensors = list(wanted.tensors)
    left = dict(roots.ids)
    for root, names in roots.ids.items():
        at = len(root) + 1
        own = [i for i, tensor in enumerate(tensors) if tensor.path[:at] == (*root, "state")]
        groups = value_at(extras, (*root, "param_groups"))
        listed = [n for group in groups for n in group["params"]] if _lists_numbers(groups) else []
        in_memory = all(type(tensors[i].path[at]) is int for i in own)
        if not own or not listed or not in_memory or not all(str(n) in names for n in listed):
            continue
        for i in own:
            path = tensors[i].path
            tensors[i] = tensors[i]._replace(path=(*path[:at], names[str(path[at])], *path[at + 1 :]))
        extras = with_changed(extras, (*root, "param_groups"), partial(_list_names, names=names))
        del left[root]
    return replace(wanted, tensors=tuple(tensors)), extras, replace(roots, ids=left)


def _lists_numbers(groups: Any) -> bool:
    return isinstance(groups, list) and _all_numbers(groups)


def _list_names(groups: list[Any], names: Mapping[str, str]) -> list[Any]:
    """The groups with names in place of numbers in `params`, and without `param_names`."""
    named_groups = []
    for group in groups:
        named = {key: value for key, value in group.items() if key != "param_names"}
        named["params"] = [names[str(number)] for number in group["params"]]
        named_groups.append(named)
    return named_groups


def _paths(wanted: Wanted, roots: Roots, extras: Mapping[Any, Any], *, kept: bool, whole_numbers: bool) -> list[Path]:
    """The output path of each tensor: its own if that still contains its name, else the usual one of its kind."""
    numbered = {name for names in roots.ids.values() for name in names.values()}
    out = []
    for tensor in wanted.tensors:
        path = tensor.path
        name = tensor.key.name
        if not kept or not path or not (name in numbered or name in clean(dotted(path))):
            path = roots.path(tensor.key)
        out.append(_with_integer(path, extras) if whole_numbers else path)
    return out


def _unlike(wanted: Wanted, paths: Sequence[Path], extras: Mapping[Any, Any]) -> TensorKey | None:
    """The first tensor that a reader would find under another name, or could not read; None if all names come back."""
    order = _order_in_file(paths, extras)
    leaves = [Leaf(paths[i], wanted.tensors[i].shape) for i in order]
    named = name_leaves(leaves, extras)
    for i, key in zip(order, named.keys, strict=True):
        if wanted.tensors[i].key != key or key in named.faults:
            return wanted.tensors[i].key
    return None


def _order_in_file(paths: Sequence[Path], extras: Mapping[Any, Any]) -> list[int]:
    """The tensors' indices in the order in which a walk of the nested state visits them."""
    ranks: dict[Path, int] = {(key,): n for n, key in enumerate(extras)}
    for path in paths:
        for depth in range(1, len(path) + 1):
            ranks.setdefault(path[:depth], len(ranks))
    return sorted(range(len(paths)), key=lambda i: [ranks[paths[i][:d]] for d in range(1, len(paths[i]) + 1)])


def _with_param_names(
    extras: dict[Any, Any], wanted: Wanted, paths: Sequence[Path], roots: Roots
) -> tuple[dict[Any, Any], list[Path]]:
    """(extras, the optimizers whose groups got `param_names`, because a reader could not derive the names)."""
    by_optimizer: dict[Path, dict[int, str]] = {}
    for path, tensor in zip(paths, wanted.tensors, strict=True):
        if "state" in path[:-2] and numeral(path[path.index("state") + 1]):
            at = path.index("state")
            by_optimizer.setdefault(path[:at], {})[int(path[at + 1])] = tensor.key.name
    added = []
    order = _order_in_file(paths, extras) if by_optimizer else []
    for root, names in by_optimizer.items():
        groups = value_at(extras, (*root, "param_groups"))
        if not isinstance(groups, list) or not _all_numbers(groups):
            continue
        ordered_tensors = (wanted.tensors[i] for i in order)
        model = [Candidate(t.key.name, t.shape) for t in ordered_tensors if t.key.state == MODEL]
        moments: dict[int, dict[str, tuple[int, ...]]] = {}
        for path, tensor in zip(paths, wanted.tensors, strict=True):
            if path[: len(root) + 1] == (*root, "state"):
                moments.setdefault(int(path[len(root) + 1]), {})[str(path[len(root) + 2])] = tensor.shape
        found = align(groups, moments, model).names
        if {n: found.get(n, str(n)) for n in names} != names:
            every = {int(n): name for n, name in roots.ids.get(root, {}).items()} | names
            extras = with_changed(extras, (*root, "param_groups"), partial(_name_groups, names=every))
            added.append(root)
    return extras, added


def _name_groups(groups: list[Any], names: Mapping[int, str]) -> list[Any]:
    named_groups = []
    for group in groups:
        param_names = [names.get(number, str(number)) for number in group["params"]]
        named_groups.append({**group, "param_names": param_names})
    return named_groups


def _all_numbers(groups: list[Any]) -> bool:
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            return False
        if any(type(number) is not int for number in group["params"]):
            return False
    return True


def _check_distinct(wanted: Wanted, paths: Sequence[Path]) -> None:
    """Raise if two tensors have the same path, or if one tensor's path is a prefix of another's."""
    seen: dict[Path, WantedTensor] = {}
    for path, tensor in zip(paths, wanted.tensors, strict=True):
        other = seen.setdefault(path, tensor)
        if other is not tensor:
            raise _at_one_path(other, tensor, path)
    for path, tensor in seen.items():
        for depth in range(1, len(path)):
            if path[:depth] in seen:
                raise _at_one_path(seen[path[:depth]], tensor, path[:depth])


def _at_one_path(a: WantedTensor, b: WantedTensor, path: Path) -> UsageError:
    return UsageError(
        f"{a.key} and {b.key} both belong at {dotted(path)}",
        code="E0241",
        key=str(b.key),
        hint="leave one of them out with --remove-keys, or write another format",
    )


def _with_integer(path: Path, extras: Mapping[Any, Any]) -> Path:
    """`("optim", "state", "0", ...)` with 0 for "0" if the `param_groups` next to it list integers."""
    if "state" not in path[:-2]:
        return path
    at = path.index("state")
    number = path[at + 1]
    groups = value_at(extras, (*path[:at], "param_groups"))
    if isinstance(number, str) and numeral(number) and isinstance(groups, list) and _all_numbers(groups):
        return (*path[: at + 1], int(number), *path[at + 2 :])
    return path


def _without_removed(extras: dict[Any, Any], wanted: Wanted, roots: Roots) -> dict[Any, Any]:
    """The extras with the numbers of removed parameters deleted from the optimizers' groups, as far as the names of
    the numbers are known."""
    have = {tensor.key.name for tensor in wanted.tensors}
    if not roots.ids or not any(tensor.key.state == MODEL for tensor in wanted.tensors):
        return extras
    for path, names in roots.ids.items():
        gone = {int(number) for number, name in names.items() if name not in have}
        lost = {name for name in names.values() if name not in have}
        if gone:
            extras = with_changed(extras, (*path, "param_groups"), partial(_prune, numbers=gone, names=lost))
    return extras


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


def ordered(hints: Hints) -> Iterator[tuple[Path, dict[Any, Any]]]:
    """(path, attributes) of the source's OrderedDicts with attributes that can be written."""
    found = hints.get(Ordered)
    for path, attributes in found.attributes if found else ():
        kept, left_out = writable(attributes)
        if not left_out:
            yield path, kept


def _order(tree: dict[Any, Any], path: Path, attributes: Any) -> dict[Any, Any]:
    """The tree with the dict at `path` turned into an OrderedDict with these attributes."""
    node: Any = tree
    for step in path[:-1]:
        node = node.get(step) if isinstance(node, dict) else None
    here: Any = tree
    if path:
        here = node.get(path[-1]) if isinstance(node, dict) else None
    if type(here) is not dict:
        return tree
    ordered = OrderedMap(here)
    ordered.attributes = attributes
    if not path:
        return ordered
    node[path[-1]] = ordered
    return tree


# -- what may be written -----------------------------------------------------------------------------------------------


def writable(extras: Mapping[str, Any]) -> tuple[dict[Any, Any], list[str]]:
    """(the extras that our pickle writer can store, `PATH: class` for each value that it cannot)."""
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
