"""Optimizer groups in the extras, when parameters go or take other names.

Groups are `param_groups: [{"params": [name, ...]}]`, with numbers and `param_names` side by side in torch's own, and
keys such as `param_groups.NAME.lr` in the flat spelling. All else stays, whatever it is called.

    renamed_groups({"param_groups": [{"lr": 1, "params": ["gate", "up"]}]}, {"gate": ("fc",), "up": ("fc",)})
    {"param_groups": [{"lr": 1, "params": ["fc"]}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.tensor import Path
from ckpt_tool.core.wrapper_words import clean
from ckpt_tool.errors import InconsistentCheckpoint

RECORDS = frozenset({"deepspeed"})  # extras in which a format keeps the names that its files repeat
Names = Mapping[str, tuple[str, ...]]  # parameter -> the parameters that are made of it


def without_removed(value: Any, names: set[str]) -> Any:
    """Extras whose optimizer groups no longer list the removed parameters; all else stays, whatever it is called.

    What a reader noted of names (RECORDS) forgets them too: an alias that stayed there would be written again from its
    twin.
    """
    if not names:
        return value
    gone: Names = dict.fromkeys(names, ())
    return renamed_groups(renamed_records(value, gone), gone)


def renamed_records(value: Any, names: Names, *, is_record: bool = False) -> Any:
    """The value with `names` renamed in its records (RECORDS), whose keys and list items are names, among others.

    A name of which nothing is made is left out.
    """
    if isinstance(value, dict):
        renamed: dict[Any, Any] = {}
        for key, item in value.items():
            new_keys = names.get(key, (key,)) if is_record else (key,)
            for new_key in new_keys:
                renamed[new_key] = renamed_records(item, names, is_record=is_record or key in RECORDS)
        return renamed

    if isinstance(value, list) and is_record:
        items: list[Any] = []
        for item in value:
            if isinstance(item, str):
                items += names.get(item, (item,))
            else:
                items.append(renamed_records(item, names, is_record=True))
        return items

    if isinstance(value, list):
        return [renamed_records(item, names) for item in value]
    return value


def _flat_parameter(key: str) -> str:
    """`w` of `param_groups.w.lr`; "" for any other key."""
    _, found, rest = f".{key}".partition(".param_groups.")
    return clean(rest.rpartition(".")[0]) if found else ""


def groups_by_name(value: Any, ids: Mapping[Path, Mapping[str, str]], path: Path = ()) -> Any:
    """Extras whose optimizer groups list names where they listed numbers, as far as all of a group's are known: numbers
    count the parameters of one model, and those of another naming are others.

    ids: path of an optimizer -> its numbers' names.

    >>> groups_by_name({"optim": {"param_groups": [{"params": [0]}]}}, {("optim",): {"0": "w"}})
    {'optim': {'param_groups': [{'params': ['w']}]}}
    """
    if isinstance(value, list):  # several optimizers: Lightning's `optimizer_states`
        return [groups_by_name(item, ids, (*path, number)) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    out = {key: groups_by_name(item, ids, (*path, str(key))) for key, item in value.items()}
    groups = out.get("param_groups")
    names = ids.get(path, {})
    if names and isinstance(groups, list):
        out["param_groups"] = [_listing_names(group, names) for group in groups]
    return out


def _listing_names(group: Any, names: Mapping[str, str]) -> Any:
    listed = group.get("params") if isinstance(group, dict) else None
    if not isinstance(listed, list) or not all(str(n) in names for n in listed):
        return group
    rest = {key: item for key, item in group.items() if key != "param_names"}
    return {**rest, "params": [names[str(n)] for n in listed]}


def renamed_groups(value: Any, names: Names) -> Any:
    """Extras whose optimizer groups list the parameters that were made of theirs, each once.

    Raises InconsistentCheckpoint E1281 where the parts of one parameter belong to groups (or carry values) that differ.
    """
    if isinstance(value, dict):
        out: dict[Any, Any] = {}
        for key, item in value.items():
            if key == "param_groups" and isinstance(item, list):
                out[key] = _renamed_lists(item, names)
                continue
            for to in _renamed_keys(key, names):
                if to in out and out[to] != item:
                    _differ(str(to), "optimizer settings of its parts differ")
                out[to] = renamed_groups(item, names)
        return out
    return [renamed_groups(item, names) for item in value] if isinstance(value, list) else value


def _renamed_keys(key: Any, names: Names) -> list[Any]:
    """A flat key under its parameters' new names; any other key as it is."""
    name = _flat_parameter(key) if isinstance(key, str) else ""
    if name not in names:
        return [key]
    head, _, setting = key.rpartition(".")
    start = head[: len(head) - len(head.partition("param_groups.")[2])]
    return [f"{start}{to}.{setting}" for to in names[name]]


def _renamed_lists(groups: list[Any], names: Names) -> list[Any]:
    seen: dict[str, int] = {}
    renames = any(names.values())
    out = []
    for number, group in enumerate(groups):
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            out.append(group)
            continue
        params = group["params"]
        listed = group.get("param_names")
        beside = isinstance(listed, list) and len(listed) == len(params)
        rows: dict[str, tuple[Any, Any]] = {}  # name -> what `params` and `param_names` hold
        for param, name in zip(params, listed if isinstance(listed, list) and beside else params, strict=True):
            for to in names.get(clean(str(name)), (name,)):
                if seen.setdefault(str(to), number) != number and renames:
                    _differ(str(to), f"its parts are in optimizer groups {seen[str(to)]} and {number}")
                rows.setdefault(str(to), (param if beside else to, to))
        lists = {"params": [param for param, _ in rows.values()]}
        out.append({**group, **lists, **({"param_names": [to for _, to in rows.values()]} if beside else {})})
    return out


def _differ(name: str, why: str) -> None:
    raise InconsistentCheckpoint(
        f"{name}: {why}", code="E1281", key=name, hint="leave the optimizer's settings out with --drop extras"
    )
