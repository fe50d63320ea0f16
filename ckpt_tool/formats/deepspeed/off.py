"""Without ZeRO the optimizer lies in the module files as torch saved it: numbers for parameters, given names here.

    {"module": {"w": T}, "optimizer": {"state": {0: {"step": T, "exp_avg": T}}, "param_groups": [{"params": [0]}]}}
    ->  w, w [step], w [exp_avg]

In 16 bits DeepSpeed wraps it: `optimizer_state_dict` inside, fp32 weights as `fp32_groups` (a list for each parameter
group), which are the state `master` here. The numbers are named by order and shape
(`formats.state_dict.optimizer_ids`), over all stages of a pipeline at once; buffers and ties are no candidates. Where
that is not unique, the numbers stay, and a note says so; the stages of a pipeline can't be told apart then, which is
refused. Refused too: `fp32_groups_flat` (the fused wrapper). Source: DeepSpeed 0.19.8 `runtime/engine.py`
(`_common_checkpoint_state`), `runtime/fp16/unfused_optimizer.py`, `runtime/fp16/fused_optimizer.py`. Cost: as naming.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tool.core.catalog import Note
from ckpt_tool.core.tensor import MASTER, LogicalTensor, Path, StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import CorruptFile, InconsistentCheckpoint, InputError
from ckpt_tool.formats.deepspeed.rank import DISAGREE, MALFORMED, REFUSED, ModuleFile
from ckpt_tool.formats.state_dict.optimizer_ids import Candidate, align
from ckpt_tool.formats.state_dict.tree import dotted

WRAPPER = "wrapper"  # in the extras under `optimizer`: what DeepSpeed's 16-bit wrapper keeps beside
_INNER = "optimizer_state_dict"


class Off(NamedTuple):
    """tensors: of the optimizer. options: for the extras, names for `params`. stages: names of each stage's groups."""

    tensors: dict[TensorKey, LogicalTensor]
    options: dict[str, Any]
    stages: list[list[list[str]]]
    notes: list[Note]


class Entry(NamedTuple):
    """A tensor of an optimizer: of parameter `number` (counted over all stages)."""

    number: int
    state: str
    array: StoredArray


def optimizer_off(files: Sequence[ModuleFile], model: Mapping[str, StoredArray]) -> Off:
    """The optimizers of the module files, one a stage. model: the module's parameters in order, buffers left out. Takes
    the optimizer out of the files' values. Raises InputError E0356 for wrappers without names and stages that can't be
    named."""
    entries: list[Entry] = []
    groups: list[dict[str, Any]] = []
    sizes: list[list[int]] = []  # of each stage, parameters of each group
    wrapper: dict[str, Any] = {}
    total = 0
    for file in files:
        part = part_of(file, total)
        wrapper = wrapper or part.wrapper
        if part.groups:
            sizes.append([len(group["params"]) for group in part.groups])
        groups += part.groups
        entries += part.entries
        total += sum(len(group["params"]) for group in part.groups)
    if not groups:
        return Off({}, {}, [], [])
    if len({len(stage) for stage in sizes}) > 1:
        raise InconsistentCheckpoint(
            f"the stages have {[len(stage) for stage in sizes][:8]} parameter groups, want as many in each",
            code="E0359",
            path=files[0].path,
            hint="files of two runs lie together",
        )
    return _named(files, model, entries, groups, sizes, wrapper)


class OptimizerPart(NamedTuple):
    """One file's optimizer. groups: `params` are numbers, from `part_of`'s start on. wrapper: of DeepSpeed's 16-bit
    one."""

    groups: list[dict[str, Any]]
    entries: list[Entry]
    wrapper: dict[str, Any]

    def shapes(self) -> dict[int, dict[str, tuple[int, ...]]]:
        """Number -> state -> shape."""
        out: dict[int, dict[str, tuple[int, ...]]] = {}
        for entry in self.entries:
            out.setdefault(entry.number, {})[entry.state] = entry.array.shape
        return out


def part_of(file: ModuleFile, start: int = 0) -> OptimizerPart:
    """The optimizer of one file, taken out of its values. Raises InputError E0356 for the fused wrapper."""
    values = file.values.pop("optimizer", None)
    if not isinstance(values, dict):
        return OptimizerPart([], [], {})
    if any(path[1:2] == ("fp32_groups_flat",) for path, _ in file.optimizer):
        raise InputError(
            "the optimizer of DeepSpeed's fused 16-bit wrapper without ZeRO: its flat fp32 groups have no names",
            code=REFUSED,
            path=file.path,
            hint="resume it once with ZeRO 1 and save it, or --from torch for the module",
        )
    inner = values.get(_INNER, values)
    beside = {key: item for key, item in values.items() if inner is not values and key not in (_INNER, "fp32_groups")}
    mine = _groups(inner.get("param_groups") if isinstance(inner, dict) else None, file.path)
    numbers = {n: start + i for i, n in enumerate(n for group in mine for n in group["params"])}
    entries = _entries(file, numbers, mine)
    _check(entries, file.path)
    groups = [{**group, "params": [numbers[n] for n in group["params"]]} for group in mine]
    return OptimizerPart(groups, entries, beside)


def _groups(said: Any, path: str) -> list[dict[str, Any]]:
    """`param_groups`, whose `params` are numbers. Raises CorruptFile E0355 for anything else."""
    groups = said if isinstance(said, list) else []
    fits = all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(type(n) is int for n in group["params"])
        for group in groups
    )
    if not fits or len({n for group in groups for n in group["params"]}) != sum(len(g["params"]) for g in groups):
        raise CorruptFile(
            "the optimizer's param_groups do not number its parameters once each",
            code=MALFORMED,
            path=path,
            hint="the file is damaged, or of a version of DeepSpeed that is not known here",
        )
    return groups


def _check(entries: Sequence[Entry], path: str) -> None:
    """The fp32 weight and the moments of a parameter have one shape, and all parameters have a weight or none."""
    shapes: dict[int, tuple[int, ...]] = {}
    masters = {entry.number for entry in entries if entry.state == MASTER}
    for entry in entries:
        if entry.array.shape in ((), (1,)):  # a number of the parameter's: its step, Paddle's powers of beta
            continue
        shape = shapes.setdefault(entry.number, entry.array.shape)
        if shape != entry.array.shape or masters and entry.number not in masters:
            raise InconsistentCheckpoint(
                f"{entry.state} of parameter {entry.number} has shape {list(entry.array.shape)}, another state "
                f"{list(shape)}, "
                f"and {len(masters)} parameters have an fp32 weight",
                code=DISAGREE,
                path=path,
                hint="the file was put together of two: fetch it again",
            )


def _entries(file: ModuleFile, numbers: Mapping[int, int], groups: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """States and fp32 weights of one file."""
    out = []
    for path, array in file.optimizer:
        if path[-3:-2] == ("state",) and path[-2] in numbers:
            out.append(Entry(numbers[int(path[-2])], str(path[-1]), array))
            continue
        params = groups[int(path[2])]["params"] if _index(path, 2, len(groups)) else []
        if path[1:2] != ("fp32_groups",) or len(path) != 4 or not _index(path, 3, len(params)):
            raise InputError(
                f"the optimizer keeps a tensor at {dotted(path)[:200]}, which is not understood",
                code=REFUSED,
                path=file.path,
                hint="resume it once with ZeRO 1 and save it",
            )
        out.append(Entry(numbers[params[int(path[3])]], MASTER, array))
    return out


def _index(path: Path, at: int, count: int) -> bool:
    """Is step `at` of the path a number below `count`?"""
    step = path[at] if len(path) > at else None
    return type(step) is int and 0 <= step < count


def _named(
    files: Sequence[ModuleFile],
    model: Mapping[str, StoredArray],
    entries: list[Entry],
    groups: list[dict[str, Any]],
    sizes: list[list[int]],
    wrapper: dict[str, Any],
) -> Off:
    count = len(sizes[0])
    merged = [{"params": [n for group in groups[g::count] for n in group["params"]]} for g in range(count)]
    if count == 1 and all(isinstance(group.get("param_names"), list) for group in groups):
        merged[0]["param_names"] = [name for group in groups for name in group["param_names"]]
    elif len(files) == 1:
        merged = groups
    shapes = OptimizerPart(groups, entries, wrapper).shapes()
    candidates = [Candidate(name, a.shape, (a.path, a.offset, a.shape)) for name, a in model.items()]
    found = align(merged, shapes, candidates)
    notes = [Note("N-optimizer-ids", f"the optimizer's numbers are named {found.why}", files[0].path)]
    if not found.names:
        if len(files) > 1:
            raise InputError(
                f"a pipeline without ZeRO whose optimizers can't be given names: {found.why}",
                code=REFUSED,
                path=files[0].path,
                hint="resume it once with ZeRO 1 and save it",
            )
        notes = [
            Note(
                "W-optimizer-ids",
                f"the optimizer's parameters keep their numbers for names: {found.why}",
                files[0].path,
            )
        ]
    names = {number: found.names.get(number, str(number)) for group in merged for number in group["params"]}
    tensors = {}
    for entry in sorted(entries, key=lambda entry: entry.state != MASTER):
        key = TensorKey(names[entry.number], entry.state)
        tensors[key] = simple_tensor(key, entry.array)
    options = [
        {
            **{k: v for k, v in groups[g].items() if k != "param_names"},
            "params": [names[n] for n in merged[g]["params"]],
        }
        for g in range(count)
    ]
    parts = [
        [[names[n] for n in group["params"]] for group in groups[s * count : (s + 1) * count]]
        for s in range(len(sizes))
    ]
    extras: dict[str, Any] = {"param_groups": options}
    if wrapper or any(entry.state == MASTER for entry in entries):
        extras[WRAPPER] = wrapper
    return Off(tensors, extras, parts, notes)
