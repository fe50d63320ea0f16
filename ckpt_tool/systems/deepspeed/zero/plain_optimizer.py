"""The optimizer without ZeRO, as torch saved it: it numbers the parameters; this module finds their names.

    {"module": {"w": T}, "optimizer": {"state": {0: {"step": T, "exp_avg": T}}, "param_groups": [{"params": [0]}]}}
    ->  w, w [step], w [exp_avg]

It is stored in the module files or, if there are experts, in a file for each expert rank, which has the dense
parameters and the rank's experts:

    expp_rank_1_mp_rank_00_optim_states.pt
          {"optimizer": {"state": {0: ..., 11: ...}, "param_groups": [{...}, {"moe": True, ...}]}}
    ->  embed.weight [exp_avg] (a copy of rank 0's), ...deepspeed_experts.2.w1.weight [exp_avg], ...

In 16 bits DeepSpeed wraps it: `optimizer_state_dict` inside, fp32 weights as `fp32_groups` (a list for each parameter
group), which are the state `master` here. The numbers are named by order and shape
(`formats.state_dict.optimizer_ids`), over all stages of a pipeline at once, dense groups and groups of experts
(`moe: True`) each by themselves; buffers and ties are no candidates. Where that is not unique, the numbers stay, and a
note says so; the stages of a pipeline and expert ranks can't be distinguished then, which is refused. Refused too:
`fp32_groups_flat` (the fused wrapper). The dense states of expert ranks are copies and get compared.

Source: DeepSpeed 0.19.8 `runtime/engine.py` (`_common_checkpoint_state`, `_save_moe_checkpoint`),
`runtime/fp16/unfused_optimizer.py`, `runtime/fp16/fused_optimizer.py`, `moe/utils.py`. Cost: as naming.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tool.core.box import whole
from ckpt_tool.core.catalog import Note
from ckpt_tool.core.tensor import MASTER, Chunk, LogicalTensor, Path, StoredArray, TensorKey
from ckpt_tool.formats.state_dict.optimizer_ids import Aligned, Candidate, align
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.systems.deepspeed.described import WRAPPER, Options
from ckpt_tool.systems.deepspeed.files import PLAIN_EXPERTS, ModuleFile, disagree, lost, malformed, numbered, refused
from ckpt_tool.systems.deepspeed.stored_names import counts, expert_name_of

_INNER = "optimizer_state_dict"
_SIZE = re.compile(r"ep_size_(\d{1,6})")
_RESUME = "resume it once with ZeRO 1 and save it"
_NUMBERED_TWICE = "the optimizer's param_groups do not number its parameters once each"
Arrays = Mapping[str, StoredArray]


class PlainOptimizer(NamedTuple):
    """The optimizer of a job without ZeRO, under the parameters' names."""

    tensors: dict[TensorKey, LogicalTensor]  # the optimizer's states
    options: Options | None  # None without an optimizer
    stages: list[list[list[str]]]  # names of each stage's groups
    notes: list[Note]


class _StateEntry(NamedTuple):
    """A tensor of an optimizer, with the number of its parameter (counted over all stages)."""

    number: int
    state: str
    array: StoredArray


class _FileOptimizer(NamedTuple):
    """The optimizer in one file."""

    groups: list[dict[str, Any]]  # `params` are numbers that begin at `_part`'s start
    entries: list[_StateEntry]
    wrapper: dict[str, Any]  # values of DeepSpeed's 16-bit wrapper


def of_modules(files: Sequence[ModuleFile], model: Arrays) -> PlainOptimizer:
    """Return the optimizer of a job that has it in its module files, one for each pipeline stage.

    The optimizer is removed from the files' values.

    Args:
        files: of all stages.
        model: the module's parameters in order, without buffers.

    Raises:
        InputError: E0356, a wrapper without names, or stages whose parameters can't be named.
    """
    parts: list[_FileOptimizer] = []
    for file in files:
        parts.append(_part(file, sum(len(group["params"]) for part in parts for group in part.groups)))
    groups = [group for part in parts for group in part.groups]
    entries = [entry for part in parts for entry in part.entries]
    if not groups:
        return PlainOptimizer({}, None, [], [])

    group_counts = [len(part.groups) for part in parts if part.groups]
    if len(set(group_counts)) > 1:
        what = f"the stages have {group_counts[:8]} parameter groups, want as many in each"
        raise disagree(what, files[0].path)

    # Group i of the whole model is group i of every stage.
    count = group_counts[0]
    merged: list[dict[str, Any]] = []
    for i in range(count):
        merged.append({"params": [number for group in groups[i::count] for number in group["params"]]})
    if count == 1 and all(isinstance(group.get("param_names"), list) for group in groups):
        merged[0]["param_names"] = [name for group in groups for name in group["param_names"]]
    elif len(files) == 1:
        merged = groups

    aligned = _align(merged, entries, model)
    if not aligned.names and len(files) > 1:
        what = f"a pipeline without ZeRO whose optimizers can't be given names: {aligned.why}"
        raise refused(what, files[0].path, _RESUME)

    note = Note("N-optimizer-ids", f"the optimizer's numbers are named {aligned.why}", files[0].path)
    if not aligned.names:
        what = f"the optimizer's parameters keep their numbers for names: {aligned.why}"
        note = Note("W-optimizer-ids", what, files[0].path)

    names = {number: aligned.names.get(number, str(number)) for group in merged for number in group["params"]}
    states = {TensorKey(names[entry.number], entry.state): [entry.array] for entry in entries}
    options: list[dict[str, Any]] = []
    for group, all_stages in zip(groups[:count], merged, strict=True):
        options.append({**_bare(group), "params": _name_params(all_stages, names)})
    stages: list[list[list[str]]] = []
    for part in parts:
        if part.groups:
            stages.append([_name_params(group, names) for group in part.groups])
    return PlainOptimizer(_tensors(states, files[0].path), _options(options, parts, states), stages, [note])


def of_experts(files: Mapping[int, ModuleFile], dense: Arrays, experts: Arrays, shown: str) -> PlainOptimizer:
    """Return the optimizer of a job that has a file for each expert rank.

    Args:
        files: by expert rank.
        dense: the dense parameters.
        experts: by global name, in the order of layers, experts and parts.
        shown: the checkpoint's path, for messages.

    Raises:
        Incomplete: E0302, files of expert ranks are missing.
        InconsistentCheckpoint: E0359, ranks contradict each other.
        InputError: E0356, the parameters can't be named.
    """
    parts = {rank: _part(file) for rank, file in sorted(files.items())}
    group_names = [str(group.get("name")) for part in parts.values() for group in part.groups]
    stated_sizes = [int(match[1]) for match in map(_SIZE.fullmatch, group_names) if match]
    ep = max([max(files) + 1, *stated_sizes])
    experts_per_rank = {layer: count // ep for layer, count in counts(experts).items()}
    whole_ranks = all(count % ep == 0 for count in counts(experts).values())
    absent = [PLAIN_EXPERTS.format(expert=rank, model=0) for rank in range(ep) if rank not in files]
    if absent or not whole_ranks:
        raise lost(
            f"of {ep} expert ranks {len(absent)} have no optimizer: {', '.join(absent[:8])}"
            if absent
            else f"{ep} expert ranks have an optimizer, for {sorted(set(counts(experts).values()))} experts",
            shown,
            "every expert rank writes its own: fetch all expp_rank_* files",
            faults=absent[8:],
        )

    owners: dict[str, int] = {}  # expert rank by parameter
    for name in experts:
        expert = expert_name_of(name)
        if expert is not None:
            owners[name] = expert.number // experts_per_rank[expert.layer]

    held: dict[TensorKey, list[StoredArray]] = {}
    names: list[dict[str, None]] = [{} for _ in parts[0].groups]

    for rank, part in parts.items():
        path = files[rank].path
        if len(names) != len(part.groups):
            raise disagree(f"{len(part.groups)} parameter groups, but {len(names)} in expert rank 0's", path)
        named = _names(part, dense, {name: array for name, array in experts.items() if owners[name] == rank}, path)
        for entry in part.entries:
            held.setdefault(TensorKey(named[entry.number], entry.state), []).append(entry.array)
        for group, so_far in zip(part.groups, names, strict=True):
            so_far |= dict.fromkeys(named[n] for n in group["params"])

    options = [{**_bare(group), "params": [*mine]} for group, mine in zip(parts[0].groups, names, strict=True)]
    return PlainOptimizer(_tensors(held, shown), _options(options, list(parts.values()), held), [], [])


# -- names -------------------------------------------------------------------------------------------------------------


def _names(part: _FileOptimizer, dense: Arrays, experts: Arrays, path: str) -> dict[int, str]:
    """Return {number: name} for the parameters of one expert rank's optimizer."""
    out: dict[int, str] = {}
    for moe, arrays in ((False, dense), (True, experts)):
        mine = [group for group in part.groups if bool(group.get("moe")) is moe]
        numbers = {n for group in mine for n in group["params"]}
        if numbers:
            found = _align(mine, [entry for entry in part.entries if entry.number in numbers], arrays)
            if not found.names:
                what = f"the optimizer of an expert rank can't be given names: {found.why}"
                raise refused(what, path, _RESUME)
            out |= found.names
    return out


def _align(groups: Sequence[Mapping[str, Any]], entries: Sequence[_StateEntry], arrays: Arrays) -> Aligned:
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    for entry in entries:
        shapes.setdefault(entry.number, {})[entry.state] = entry.array.shape
    return align(groups, shapes, [Candidate(name, a.shape, (a.path, a.offset, a.shape)) for name, a in arrays.items()])


def _tensors(held: Mapping[TensorKey, Sequence[StoredArray]], shown: str) -> dict[TensorKey, LogicalTensor]:
    """Return the states, fp32 weights first; several arrays of one state are the copies of expert ranks."""
    tensors = {}
    for key in sorted(held, key=lambda key: key.state != MASTER):
        first = held[key][0]
        if any(other.shape != first.shape for other in held[key]):
            raise disagree(f"{key.state} has several shapes on the expert ranks", shown, key.name)
        box = whole(first.shape)
        copies = tuple(Chunk(box, array, box, number) for number, array in enumerate(held[key]))
        tensors[key] = LogicalTensor(key, first.shape, first.dtype, copies)
    return tensors


def _options(groups: list[dict[str, Any]], parts: Sequence[_FileOptimizer], held: Mapping[TensorKey, Any]) -> Options:
    wrapper = next((part.wrapper for part in parts if part.wrapper), {})
    has_wrapper = bool(wrapper) or any(key.state == MASTER for key in held)
    return Options(groups, rest={WRAPPER: wrapper} if has_wrapper else {})


def _name_params(group: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    return [names[number] for number in group["params"]]


def _bare(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in group.items() if key not in ("params", "param_names")}


# -- one file ----------------------------------------------------------------------------------------------------------


def _part(file: ModuleFile, start: int = 0) -> _FileOptimizer:
    """Return the optimizer of one file, and remove it from the file's values.

    start: the number of the first parameter. Raises InputError E0356 for the fused wrapper.
    """
    values = file.values.pop("optimizer", None)
    if not isinstance(values, dict):
        return _FileOptimizer([], [], {})
    if any(path[1:2] == ("fp32_groups_flat",) for path, _ in file.optimizer):
        raise refused(
            "the optimizer of DeepSpeed's fused 16-bit wrapper without ZeRO: its flat fp32 groups have no names",
            file.path,
            "resume it once with ZeRO 1 and save it, or --from torch for the module",
        )
    inner = values.get(_INNER, values)
    beside = {key: item for key, item in values.items() if inner is not values and key not in (_INNER, "fp32_groups")}
    stated = inner.get("param_groups") if isinstance(inner, dict) else None
    groups = numbered(stated) if isinstance(stated, list) else []
    if groups is None:
        raise malformed(_NUMBERED_TWICE, file.path)
    stored_numbers = [number for group in groups for number in group["params"]]
    if len(set(stored_numbers)) != len(stored_numbers):
        raise malformed(_NUMBERED_TWICE, file.path)
    numbers = {number: start + i for i, number in enumerate(stored_numbers)}
    entries = [_entry(path, array, numbers, groups, file.path) for path, array in file.optimizer]
    _check(entries, file.path)

    renumbered: list[dict[str, Any]] = []
    for group in groups:
        renumbered.append({**group, "params": [numbers[number] for number in group["params"]]})
    return _FileOptimizer(renumbered, entries, beside)


def _entry(
    path: Path, array: StoredArray, numbers: Mapping[int, int], groups: Sequence[Mapping[str, Any]], shown: str
) -> _StateEntry:
    """Return one tensor of the optimizer: a state, or an fp32 weight. Raises InputError E0356 for any other."""
    if path[-3:-2] == ("state",) and path[-2] in numbers:
        return _StateEntry(numbers[int(path[-2])], str(path[-1]), array)
    params = groups[int(path[2])]["params"] if _index(path, 2, len(groups)) else []
    if path[1:2] != ("fp32_groups",) or len(path) != 4 or not _index(path, 3, len(params)):
        raise refused(f"the optimizer keeps a tensor at {dotted(path)[:200]}, which is not understood", shown, _RESUME)
    return _StateEntry(numbers[params[int(path[3])]], MASTER, array)


def _index(path: Path, at: int, count: int) -> bool:
    """Return whether element `at` of the path is an integer below `count`."""
    step = path[at] if len(path) > at else None
    return type(step) is int and 0 <= step < count


def _check(entries: Sequence[_StateEntry], path: str) -> None:
    """Raise InconsistentCheckpoint E0359 unless a parameter's fp32 weight and moments have one shape.

    Either all parameters must have an fp32 weight, or none.
    """
    shapes: dict[int, tuple[int, ...]] = {}
    masters = {entry.number for entry in entries if entry.state == MASTER}
    for entry in entries:
        if entry.array.shape in ((), (1,)):  # a number of the parameter's: its step, Paddle's powers of beta
            continue
        shape = shapes.setdefault(entry.number, entry.array.shape)
        if shape != entry.array.shape or (masters and entry.number not in masters):
            raise disagree(
                f"{entry.state} of parameter {entry.number} has shape {list(entry.array.shape)}, another state "
                f"{list(shape)}, and {len(masters)} parameters have an fp32 weight",
                path,
                hint="the file was put together of two: fetch it again",
            )
