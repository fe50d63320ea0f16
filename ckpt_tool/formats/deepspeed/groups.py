"""The parameter groups to write: which names, in which order, with which options; experts apart, stages apart.

The one idea: groups are taken from `param_groups` in the extras, as any source gives them (names, or numbers with
`param_names`); names that have no fp32 weight in the output fall out; parameters that no group lists get a group of
their own, which is said. Then a group is cut by pipeline stage, and a group of experts by expert rank.

    {"lr": 0.1, "params": ["w", "frozen"]}, masters w, b    ->    [w] with lr 0.1, [b] without options and a note

Source of the groups of experts (`name: ep_size_N`, `moe: True`): DeepSpeed 0.19.8 `moe/utils.py`. Cost: one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.mesh import divisors_near
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.deepspeed.described import HOME, OPTIMIZER, Described
from ckpt_tool.formats.deepspeed.moe import counts, expert_name_of
from ckpt_tool.formats.deepspeed.pipe import TIED

DEGREE, SPLIT = "E0287", "E0288"
_ROOTS = (OPTIMIZER, "optim", "optimizer_state_dict", "optimizers")
Shape = tuple[int, ...]


@dataclass(slots=True)
class Group:
    """A parameter group. options: without `params`. scalars: `step` and such. ep: expert ranks, 0 for a group without
    experts. listed: does the source list it? number: among `groups_of`."""

    names: list[str]
    options: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    ep: int = 0
    listed: bool = True
    number: int = 0


def groups_of(extras: Mapping[str, Any], masters: Mapping[str, Shape]) -> list[Group]:
    """The groups of the parameters in `masters`, in the source's order."""
    home = extras.get(OPTIMIZER)
    scalars = home.get("scalars") if isinstance(home, Mapping) else None
    out: list[Group] = []
    seen: set[str] = set()
    for number, said in enumerate(_said(extras)):
        names = [name for name in dict.fromkeys(_names(said)) if name in masters and name not in seen]
        seen |= set(names)
        options = {key: item for key, item in said.items() if key not in ("params", "param_names")}
        mine = scalars[number] if isinstance(scalars, list) and number < len(scalars) else {}
        if names:
            out.append(Group(names, options, dict(mine) if isinstance(mine, Mapping) else {}, number=len(out)))
    rest = [name for name in masters if name not in seen]
    if rest:
        first = out[0] if out else Group([])
        options = dict(first.options) if out else {}
        out.append(Group(rest, options, dict(first.scalars), listed=False, number=len(out)))
    return out


def _said(extras: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """`param_groups`, where the extras have them."""
    for root in (*_ROOTS, *extras):
        at = extras.get(root)
        groups = at.get("param_groups") if isinstance(at, Mapping) and root != HOME else None
        if isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups):
            return groups
    return []


def _names(group: Mapping[str, Any]) -> list[str]:
    for key in ("param_names", "params"):
        names = group.get(key)
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            return list(names)
    return []


def with_experts(groups: Sequence[Group], dp: int, ep: int, notes: list[str]) -> list[Group]:
    """The groups with experts in groups of their own. Raises UsageError E0287 where `ep` does not divide the ranks or
    the experts, naming the nearest degrees that do."""
    out = []
    found = counts(name for group in groups for name in group.names)
    if ep > 1 and not found:
        raise UsageError(f"--ep {ep}: no parameter is an expert of DeepSpeed's MoE", code=DEGREE, hint="leave --ep off")
    for total, what in ((dp, "data ranks (--dp)"), *((count, f"experts of {layer}") for layer, count in found.items())):
        if total % ep:
            near = divisors_near(total, ep)
            other = f"; or --dp {max(total // ep, 1) * ep} or {(total // ep + 1) * ep}" if total == dp else ""
            raise UsageError(
                f"--ep {ep} does not divide the {total} {what}",
                code=DEGREE,
                hint=f"expert degrees that do: {', '.join(map(str, near))}{other}",
            )
    for group in groups:
        experts = [name for name in group.names if expert_name_of(name)]
        dense = [name for name in group.names if not expert_name_of(name)]
        if experts and dense:
            notes.append("DeepSpeed keeps experts in parameter groups of their own: one was parted")
        if dense:
            out.append(replace(group, names=dense))
        if experts:
            options = {"name": "", "moe": True, **group.options}
            options |= {"name": f"ep_size_{ep}", "moe": True}
            out.append(replace(group, names=experts, options=options, ep=ep))
    return out


def stages_of(groups: Sequence[Group], described: Described | None, pp: int, split: Sequence[int]) -> list[list[Group]]:
    """The groups of every pipeline stage. Raises UsageError E0288 where stages can't be told from what the source
    says."""
    known = described.stages if described else ()
    if not known:
        if pp > 1:
            raise UsageError(
                f"--pp {pp}: the source is no pipeline of DeepSpeed's (no layer files)",
                code=SPLIT,
                hint="leave --pp off",
            )
        return [list(groups)]
    told = {name for stage in known for part in stage for name in part}
    lost = next((name for group in groups for name in group.names if name not in told), None)
    if lost is not None and pp > 1:
        raise UsageError(f"--pp {pp}: no stage of the source lists {lost}", code=SPLIT, key=lost, hint="write --pp 1")
    if pp == len(known) and not split:
        return [[_part(group, [n for part in stage for n in part]) for group in groups] for stage in known]
    if pp == 1:
        return [[_part(group, sorted(group.names, key=_layer)) for group in groups]]
    if not split or len(split) != pp:
        raise UsageError(
            f"--pp {pp}: which layers a stage gets is decided by the model's partition_method, which stands in no file",
            code=SPLIT,
            hint=f"say it with --pp-split (layers of each stage), or keep --pp {len(known)}, or --pp 1",
        )
    return _split(groups, split)


def _split(groups: Sequence[Group], split: Sequence[int]) -> list[list[Group]]:
    names = [name for group in groups for name in group.names]
    tied = [name for name in names if name.startswith(TIED)]
    if tied:
        raise UsageError(
            f"--pp-split: {tied[0]} is tied, and no file says which layers use it",
            code=SPLIT,
            key=tied[0],
            hint="keep --pp as it is, or --pp 1",
        )
    bounds = [sum(split[: i + 1]) for i in range(len(split))]
    last = max((_layer(name)[1] for name in names), default=0)
    if bounds[-1] <= last:
        raise UsageError(
            f"--pp-split covers {bounds[-1]} layers, but there is a layer {last}",
            code=SPLIT,
            hint="count every layer of the PipelineModule, those without parameters too",
        )
    parts: list[list[str]] = [[] for _ in split]
    for name in sorted(names, key=_layer):
        parts[next(i for i, end in enumerate(bounds) if _layer(name)[1] < end)].append(name)
    return [[_part(group, part) for group in groups] for part in parts]


def _part(group: Group, names: Sequence[str]) -> Group:
    """The group's parameters among `names`, in their order."""
    mine = set(group.names)
    return replace(group, names=[name for name in names if name in mine])


def _layer(name: str) -> tuple[int, int]:
    """Sorts tied modules first, then layers by number, each in the order given (a stable sort)."""
    index = name.partition(".")[0]
    return (1, int(index)) if numeral(index) else (0, 0)
