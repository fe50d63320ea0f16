"""What is to be written, settled: stage, degrees, groups, and the flat line of every rank.

    z1 of 4 ranks, asked for --dp 3     ->     Plan(stage=1, dp=3, stages=[[Group(18 names)]]), line_of(plan, group, 2)

The one idea: every question that has an answer without looking at a file's bytes is answered here, once, and refused
here; `deepspeed.state` and `deepspeed.optimizer` only write down. Codes: E0286 states that no stage holds, E0287
degrees, E0288 pipeline stages. Source: as `deepspeed.target`. Cost: a pass over the parameters for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.target import Wanted
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, STEP, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.deepspeed.described import OPTIMIZER, UNUSED, Described
from ckpt_tool.formats.deepspeed.fit import UNFIT, stage_of
from ckpt_tool.formats.deepspeed.flat import (
    SUB_GROUP_SIZE,
    Piece,
    alignment_gaps,
    deal,
    padding,
    partition,
    partition_size,
    sub_groups,
)
from ckpt_tool.formats.deepspeed.groups import Group, groups_of, stages_of, with_experts
from ckpt_tool.formats.deepspeed.moe import expert_name_of, holders, local_names
from ckpt_tool.formats.deepspeed.pipe import TIED
from ckpt_tool.formats.deepspeed.rank import LAYOUT_KEYS
from ckpt_tool.formats.state_dict.nesting import writable

DEGREE = "E0287"


@dataclass(slots=True)
class Plan:
    """What is to be written, settled once. rows: key -> its number among the wanted tensors. states: the optimizer's,
    in order. stages: the groups of every pipeline stage."""

    wanted: Wanted
    described: Described
    stage: int
    dp: int
    pp: int
    ep: int
    rows: dict[TensorKey, int]
    states: list[str]
    stages: list[list[Group]]
    extras: dict[str, Any]
    notes: list[str]
    config: Mapping[str, Any] = field(default_factory=dict)
    borders: dict[str, list[int]] = field(default_factory=dict)
    moved: bool = False  # other degrees than the source's

    @property
    def data_first(self) -> bool:
        return bool(self.config.get("use_data_before_expert_parallelism"))

    @property
    def plain_bf16(self) -> bool:
        """BF16_Optimizer: bf16 with fp32 accumulation at stage 1 (DeepSpeed's engine decides by the same)."""
        types, zero = self.config.get("data_types"), self.config.get("zero_optimization")
        offload = isinstance(zero, Mapping) and zero.get("offload_optimizer")
        fp32 = isinstance(types, Mapping) and types.get("grad_accum_dtype") in ("fp32", "float32")
        return self.stage == 1 and (
            self.described.plain_bf16 or fp32 and self.described.dtype == "BF16" and not offload
        )

    def row(self, name: str, state: str) -> int | None:
        return self.rows.get(TensorKey(name, state))

    def shape(self, name: str, state: str = MASTER) -> tuple[int, ...]:
        return self.wanted.tensors[self.rows[TensorKey(name, state)]].shape


def settle(wanted: Wanted) -> Plan:
    """Degrees, stage and groups, checked."""
    degrees = _degrees(wanted.options.get("degrees") or {})
    described = Described.from_extras(wanted.extras)
    rows = {tensor.key: number for number, tensor in enumerate(wanted.tensors)}
    present = list(dict.fromkeys(tensor.key.state for tensor in wanted.tensors))
    stage = stage_of(present, described, wanted.options.get("zero"))
    notes: list[str] = []
    extras, left_out = writable(wanted.extras)
    if left_out:
        notes.append(f"left out, because no plain value holds it: {', '.join(left_out[:20])}")
    described = _completed(described, wanted) if described else _foreign(wanted, stage, notes)
    states = [state for state in present if state not in (MODEL, MASTER, EMA, EXTRAS) and (state != STEP or stage == 0)]
    masters = {
        t.key.name: t.shape for t in wanted.tensors if t.key.state == MASTER or not stage and t.key.state in states
    }
    dp, pp, ep = degrees["dp"], degrees["pp"], degrees["ep"]
    groups = groups_of(extras, masters)
    if stage and any(not group.listed for group in groups):
        count = sum(len(group.names) for group in groups if not group.listed)
        notes.append(
            f"{count} parameters stand in no param_groups of the source: they are written as a group of their own"
            + (
                ""
                if len(groups) > 1
                else ", without options (lr, betas): the optimizer can't step before it is given some"
            )
        )
    if not described.stages and any(name.startswith(TIED) for name in masters):
        notes.append(
            "these are a pipeline's parameters, but the source does not say which layers hold the tied ones: they "
            "are written "
            "as one module, which a PipelineModule does not load (it resumes from a universal checkpoint)"
        )
    config = extras.get("ds_config")
    plan = Plan(
        wanted,
        described,
        stage,
        dp,
        pp,
        ep,
        rows,
        states,
        [],
        extras,
        notes,
        config if isinstance(config, Mapping) else {},
    )
    if stage or any(expert_name_of(name) for group in groups for name in group.names):
        groups = with_experts(groups, dp, ep, notes)
        if stage == 3 and any(group.ep for group in groups):
            raise UsageError(
                "--zero 3: DeepSpeed's own MoE has no ZeRO 3", code=UNFIT, hint="write --zero 1 or --zero 2"
            )
    if stage:
        _check_states(plan, groups)
    elif ep > 1 and dp % ep:
        raise UsageError(f"--ep {ep} does not divide --dp {dp}", code=DEGREE, hint="choose --ep that divides --dp")
    plan.stages = stages_of(groups, described, pp, wanted.options.get("pp_split") or ())
    if described.stages and stage > 1:
        raise UsageError(
            f"--zero {stage}: DeepSpeed's pipelines take no more than ZeRO 1", code=UNFIT, hint="write --zero 1"
        )
    plan.borders = borders_of(plan)
    _set_aside(plan)
    return plan


def _degrees(said: Mapping[str, int]) -> dict[str, int]:
    out = {name: said.get(name, 1) for name in ("tp", "pp", "vpp", "ep", "etp", "dp", "cp")}
    for name in ("tp", "vpp", "etp", "cp"):
        if out[name] > 1 and (name != "etp" or out["etp"] != out["tp"]):
            raise UsageError(
                f"--{name} {out[name]}: deepspeed is written for data, pipeline and expert ranks",
                code=DEGREE,
                hint=f"the nearest that it takes is --{name} 1",
            )
    return out


def _completed(described: Described, wanted: Wanted) -> Described:
    """The record with the dtype and the file prefix that a format between has lost."""
    dtype = described.dtype or _common_dtype(wanted)
    prefix = described.prefix or ("bf16_" if dtype == "BF16" else "")
    return replace(described, dtype=dtype, prefix=prefix)


def _common_dtype(wanted: Wanted) -> str:
    """What most of the model's tensors have."""
    kinds = [tensor.dtype.name for tensor in wanted.tensors if tensor.key.state == MODEL and tensor.dtype.is_float]
    return max(kinds, key=kinds.count, default="F32")


def _foreign(wanted: Wanted, stage: int, notes: list[str]) -> Described:
    """What a source of another system leaves to be decided: all from the tensors themselves."""
    model = [tensor for tensor in wanted.tensors if tensor.key.state == MODEL]
    masters = {tensor.key.name for tensor in wanted.tensors if tensor.key.state == MASTER}
    dtype = _common_dtype(wanted)
    others = [tensor.key.name for tensor in model if tensor.key.name not in masters] if stage else []
    if others:
        shown = ", ".join(others[:8])
        notes.append(f"{len(others)} tensors of the model have no fp32 weight and are written as buffers: {shown}")
    return Described(
        stage,
        prefix="bf16_" if dtype == "BF16" else "",
        dtype=dtype,
        module=tuple(t.key.name for t in model),
        buffers=tuple(others),
    )


def _check_states(plan: Plan, groups: Sequence[Group]) -> None:
    """Every parameter of a group has the same states, in its own shape and one dtype: a flat tensor has no holes."""
    faults = []
    for group in groups:
        for state in (MASTER, *plan.states):
            rows = [(name, plan.row(name, state)) for name in group.names]
            here = [plan.wanted.tensors[row] for _, row in rows if row is not None]
            faults += [f"{name} has no {state}" for name, row in rows if row is None and here]
            faults += [
                f"{t.key.name}: {state} has shape {list(t.shape)}, its weight {list(plan.shape(t.key.name))}"
                for t in here
                if t.shape != plan.shape(t.key.name)
            ]
            faults += [
                f"{t.key.name}: {state} is {t.dtype.name}, others {here[0].dtype.name}"
                for t in here
                if t.dtype != here[0].dtype
            ]
    known = {name for group in groups for name in group.names}
    faults += [
        f"{t.key.name} has {t.key.state} but no fp32 weight"
        for t in plan.wanted.tensors
        if t.key.state in plan.states and t.key.name not in known
    ]
    if faults:
        raise UsageError(
            f"the optimizer's states do not fill flat tensors: {faults[0]}",
            code=UNFIT,
            faults=faults[1:100],
            hint="write --zero 0 without master weights, another format, or --drop optimizer",
        )


def _set_aside(plan: Plan) -> None:
    """RNG states of other degrees, and values whose keys DeepSpeed needs, go where nobody takes them for something
    else."""
    before = plan.wanted.hints.get("degrees")
    same = not isinstance(before, Mapping) or all(
        before.get(name, 1) == value for name, value in (("dp", plan.dp), ("pp", plan.pp), ("ep", plan.ep))
    )
    plan.moved = not same
    random = [] if same else [key for key in plan.extras if is_random(str(key))]
    tensors = [t.key.name for t in plan.wanted.tensors if t.key.state == EXTRAS and not same and is_random(t.key.name)]
    taken = [key for key in plan.extras if key in LAYOUT_KEYS and key not in ("module", OPTIMIZER)]
    if not random and not taken and not tensors:
        return
    home = plan.extras.get(UNUSED)
    aside = dict(home) if isinstance(home, Mapping) else {}
    aside |= {key: plan.extras.pop(key) for key in (*random, *taken)}
    if aside:
        plan.extras[UNUSED] = aside
    if random or tensors:
        shown = ", ".join(map(str, [*random, *tensors][:8]))
        plan.notes.append(f"random states of the source's ranks are kept under {UNUSED}, not used: {shown}")
    if taken:
        shown = ", ".join(map(str, taken[:8]))
        plan.notes.append(f"kept under {UNUSED}, for DeepSpeed needs these keys: {shown}")


def is_random(key: str) -> bool:
    return "rng" in key.lower() or "random_state" in key.lower()


class Line(NamedTuple):
    """A rank's flat line of a group at ZeRO 1 or 2. names: (name, name inside the rank). size: elements of the
    partition, `spare` of them behind the last parameter. gaps: behind each parameter."""

    names: list[tuple[str, str]]
    pieces: list[Piece]
    size: int
    spare: int
    partitions: int
    gaps: list[int]


def line_of(plan: Plan, group: Group, data: int) -> Line:
    names, index, count = rank_names(plan, group, data)
    sizes = [prod(plan.shape(name)) for name, _ in names]
    gaps = flat_gaps(plan, sizes)
    total = sum(sizes) + sum(gaps)
    size = partition_size(total, count)
    return Line(names, partition(sizes, gaps, size, index), size, padding(total, size, index), count, gaps)


def borders_of(plan: Plan) -> dict[str, list[int]]:
    """Where the stages of a pipeline cut a parameter that several of them hold (a tied one): all cut it at all borders,
    so that equal boxes are copies of each other."""
    seen: dict[str, int] = {}
    for stage in plan.stages:
        for group in stage:
            for name in group.names:
                seen[name] = seen.get(name, 0) + 1
    out: dict[str, set[int]] = {name: set() for name, count in seen.items() if count > 1}
    for group in (group for stage in plan.stages for group in stage) if out else ():
        for data in range(plan.dp):
            line = line_of(plan, group, data)
            for piece in line.pieces:
                name = line.names[piece.param][0]
                if name in out:
                    out[name] |= {piece.start, piece.stop}
    return {name: sorted(cuts) for name, cuts in out.items()}


def rank_names(plan: Plan, group: Group, data: int) -> tuple[list[tuple[str, str]], int, int]:
    """((name, name inside the rank) of the group's line on data rank `data`, its partition's number, partitions)."""
    names, index, count = [(name, name) for name in group.names], data, plan.dp
    if group.ep:
        count = plan.dp // group.ep
        for expert, mine in enumerate(local_names(group.names, group.ep)):
            ranks = holders(expert, group.ep, plan.dp, data_first=plan.data_first)
            if data in ranks:
                names, index = mine, ranks.index(data)
                break
    return (deal(names, count) if plan.described.round_robin else names), index, count


def flat_gaps(plan: Plan, sizes: Sequence[int]) -> list[int]:
    """Elements of padding behind each parameter at ZeRO 1 and 2."""
    if not plan.described.aligned or plan.plain_bf16:
        return [0] * len(sizes)
    dtype = DTYPES.get(plan.described.dtype)
    return alignment_gaps(sizes, dtype.bits // 8 if dtype else 2)


def sub_group_names(plan: Plan, group: Group) -> list[list[str]]:
    """The names of each sub-group of a parameter group at ZeRO 3."""
    zero = plan.config.get("zero_optimization")
    size = zero.get("sub_group_size") if isinstance(zero, Mapping) else None
    limit = int(size) if isinstance(size, int | float) and 0 < size < 1 << 62 else SUB_GROUP_SIZE
    sizes = [prod(plan.shape(name)) for name in group.names]
    return [[group.names[i] for i in part] for part in sub_groups(sizes, plan.dp, limit)]
