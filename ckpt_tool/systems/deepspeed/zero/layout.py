"""What is to be written, settled: which tensors the ZeRO stage keeps, the degrees, the groups of every stage, the job.

The one idea: every question that has an answer without looking at a file's bytes is answered here, once, and refused
here; `deepspeed.zero.write` only writes down what the job's ranks hold. First `fit`, before anything is laid out: the
stages store the same training state with different tensors, and every difference is exact and reported:

    stage 3       no 16-bit weights: those of parameters with an fp32 weight are left out (DeepSpeed rounds them again)
    from stage 3  the 16-bit weights are the rounding of `master` to the module's dtype, as DeepSpeed makes them on
                  resuming
    stage 1-3     `step` is one number a group: tensors of one step a parameter are folded, and compared while they are
                  read
    stage 1-3     fp32 weights without a `master` are their own master
    stage 0       the optimizer as torch keeps it

Without `--zero` the stage is the source's; a source that says none: 1 with fp32 master weights, else 0. Then `settle`:
a group of experts gets options of its own (`name: ep_size_N`, `moe: True`), pipeline stages their parameters.

Codes: E0286 states that no stage holds, E0287 degrees, E0288 pipeline stages. Source: DeepSpeed 0.19.8
`runtime/zero/stage3.py` (`_rigid_load_state_dict`: fp16 weights are copied from the fp32 ones), `moe/utils.py`. Cost: a
pass over the parameters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.box import Box
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.hints import Degrees
from ckpt_tool.core.mesh import divisors_near
from ckpt_tool.core.target import LayoutWish, Wanted
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, STEP, Chunk, LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.base import Fitted
from ckpt_tool.formats.state_dict.nesting import writable
from ckpt_tool.systems.deepspeed.described import OPTIMIZER, UNUSED, Described, ZeroGroup, groups_of
from ckpt_tool.systems.deepspeed.files import LAYOUT_KEYS
from ckpt_tool.systems.deepspeed.job import Config, FlatGroup, Shape, ZeroJob, deal, partitioned, sub_groups
from ckpt_tool.systems.deepspeed.stored_names import TIED, counts, expert_name_of, first_rank, global_names

UNFIT = "E0286"
DEGREE = "E0287"
SPLIT = "E0288"
_NO_OPTIMIZER = frozenset((MODEL, EMA, EXTRAS))
Rows = list[tuple[int, LogicalTensor]]

# -- which tensors -----------------------------------------------------------------------------------------------------


def _unfit(what: str, hint: str, key: str = "", faults: Sequence[str] = ()) -> UsageError:
    """States that no stage holds."""
    return UsageError(what, code=UNFIT, key=key, hint=hint, faults=faults)


def _unlike(expert: str, what: str) -> UsageError:
    """`param_shapes` lists the experts of one expert rank, for all ranks."""
    return _unfit(f"the experts of a layer are not alike: {expert} {what}", "write another format", expert)


def stage_of(states: Sequence[str], described: Described | None, wished: int | None) -> int:
    """The ZeRO stage to write. Raises UsageError E0286 for `--zero 0` beside fp32 master weights."""
    has_master = MASTER in states
    trains = any(state not in _NO_OPTIMIZER for state in states)
    wrapped = described is not None and described.zero_stage == 0  # DeepSpeed's 16-bit wrapper keeps masters
    if wished is not None:
        if wished == 0 and has_master and not wrapped:
            what = "--zero 0: without ZeRO the optimizer has no fp32 master weights in addition to the module"
            raise _unfit(what, "write --zero 1, or add --drop master")
        return wished if trains else 0
    if described is not None and has_master:
        return described.zero_stage
    return 1 if has_master else 0


def _parameters_shapes(tensors: Sequence[LogicalTensor]) -> None:
    """Raise UsageError E0286 for factors (Adafactor's): the reader knows parameters by the shape of their states."""
    shapes = {tensor.key.name: tensor.shape for tensor in tensors if tensor.key.state == MODEL}
    other = [
        tensor.key
        for tensor in tensors
        if tensor.key.state not in _NO_OPTIMIZER
        and tensor.numel != 1
        and tensor.shape != shapes.get(tensor.key.name, tensor.shape)
    ]
    if other:
        states = ",".join(dict.fromkeys(key.state for key in other))
        what = f"{other[0]} does not have its parameter's shape"
        raise _unfit(what, f"--drop {states} leaves out what does not", other[0].name, list(map(str, other[1:])))


def fit(tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], wish: LayoutWish) -> Fitted:
    """The tensors that the stage keeps. Raises UsageError E0286 where the optimizer's states can't be kept exactly."""
    described = Described.from_extras(extras)
    states = list(dict.fromkeys(tensor.key.state for tensor in tensors))
    stage = stage_of(states, described, wish.zero)
    if stage == 0:
        _parameters_shapes(tensors)
        return Fitted(tuple(enumerate(tensors)))
    fitting = _Fitting(list(enumerate(tensors)), extras, described or Described())
    fitting.add_masters()
    if stage == 3:
        fitting.drop_module()
    else:
        fitting.refuse_removed(wish.removed)
        fitting.add_module()
    fitting.fold_steps()
    unlisted = tuple(row.key for _, row in fitting.rows if row.key.state == STEP)
    return Fitted(tuple(fitting.rows), fitting.casts, tuple(fitting.dropped), unlisted)


class _Fitting:
    """The tensors on their way. rows: (number among the source's, tensor). casts: to which dtype a tensor is rounded.
    dropped: entries of the report."""

    def __init__(self, rows: Rows, extras: Mapping[str, Any], described: Described) -> None:
        self.rows = rows
        self.extras = extras
        self.described = described
        self.casts: dict[TensorKey, DType] = {}
        self.dropped: list[dict[str, Any]] = []

    def of(self, state: str) -> dict[str, tuple[int, LogicalTensor]]:
        """Name -> row of a state's tensors."""
        return {row.key.name: (i, row) for i, row in self.rows if row.key.state == state}

    def report(self, state: str, reason: str, gone: Sequence[LogicalTensor] = ()) -> None:
        nbytes = sum(row.nbytes for row in gone)
        self.dropped.append({"state": state, "tensors": len(gone), "bytes": nbytes, "reason": reason})

    def trained(self) -> set[str]:
        """Parameters with an fp32 weight, and their other names."""
        masters = self.of(MASTER)
        return {*masters, *(alias for alias, kept in self.described.shared.items() if kept in masters)}

    def add_masters(self) -> None:
        """fp32 weights are their own master where a parameter has states and no master."""
        model = self.of(MODEL)
        masters = self.of(MASTER)
        stateful = {row.key.name for _, row in self.rows if row.key.state not in (*_NO_OPTIMIZER, MASTER)}
        made = [(name, *model[name]) for name in model if name in stateful and name not in masters]
        for name, _, row in made:
            if row.dtype.name != "F32":
                raise _unfit(
                    f"{name} has optimizer states but no fp32 master weight, and its weight is {row.dtype.name}",
                    "write --zero 0, which keeps the optimizer as it is; or --drop optimizer",
                    name,
                )
        lost = stateful - masters.keys() - model.keys()
        if lost:
            what = f"{len(lost)} parameters have optimizer states but no weights; the first: {min(lost)}"
            raise _unfit(what, "take the state model or master along, or --drop optimizer", min(lost))
        if made:
            self.report(MASTER, f"{len(made)} fp32 weights are their own master")
        self.rows += [(i, row._replace(key=TensorKey(name, MASTER), path=())) for name, i, row in made]

    def drop_module(self) -> None:
        """ZeRO 3 has no 16-bit weights of what it trains."""
        trained = self.trained()
        gone = [row for _, row in self.rows if row.key.state == MODEL and row.key.name in trained]
        self.rows = [(i, row) for i, row in self.rows if row.key.state != MODEL or row.key.name not in trained]
        if gone:
            self.report(MODEL, "ZeRO 3 keeps no 16-bit weights: DeepSpeed rounds them from the fp32 master", gone)

    def refuse_removed(self, removed: Iterable[TensorKey]) -> None:
        """A removed weight whose master stays would be made again from it (`--model-only`)."""
        masters = self.of(MASTER)
        names = sorted(key.name for key in removed if key.state == MODEL and key.name in masters)
        if names:
            what = f"{names[0]} can't leave the module alone: DeepSpeed needs a weight for every fp32 master"
            raise _unfit(
                what, "remove its optimizer and master states with it: leave --model-only off", names[0], names[1:20]
            )

    def add_module(self) -> None:
        """The module's weights, rounded from the master where the source has none."""
        have = self.of(MODEL)
        masters = self.of(MASTER)
        shared = self.described.shared
        kinds = [row.dtype.name for _, row in have.values() if row.dtype.is_float]
        dtype = self.described.dtype or max(kinds, key=kinds.count, default=_configured(self.extras))
        made: Rows = []
        trained = self.trained()
        for name in [*masters, *(alias for alias in shared if alias in trained)]:
            if name in have:
                continue
            if dtype not in DTYPES:
                what = f"the module has no weights for {name}, and nothing says their dtype"
                raise _unfit(what, "write --zero 3, which keeps the fp32 weights alone", name)
            index, row = masters[shared.get(name, name) if name not in masters else name]
            self.casts[TensorKey(name)] = DTYPES[dtype]
            made.append((index, row._replace(key=TensorKey(name), path=())))
        if made:
            reason = f"{len(made)} weights of the module are the fp32 master rounded to {dtype}, as DeepSpeed rounds it"
            self.report(MODEL, reason)
            order = {name: number for number, name in enumerate(self.described.module)}
            model = [pair for pair in self.rows if pair[1].key.state == MODEL] + made
            model.sort(key=lambda pair: order.get(pair[1].key.name, len(order)))
            self.rows = model + [pair for pair in self.rows if pair[1].key.state != MODEL]

    def fold_steps(self) -> None:
        """`step` tensors of a group as one, whose replicas are the others: they are compared when they are read."""
        steps = self.of(STEP)
        if not steps:
            return
        self.rows = [pair for pair in self.rows if pair[1].key.state != STEP]
        folded: set[str] = set()
        for group in groups_of(self.extras, {name: row.shape for name, (_, row) in self.of(MASTER).items()}):
            mine = [steps[name] for name in group.names if name in steps]
            folded |= set(group.names)
            if not mine:
                continue
            index, first = mine[0]
            if any(row.numel != 1 or row.dtype != first.dtype for _, row in mine):
                what = "the step counters of a group have several shapes or dtypes"
                raise _unfit(what, "write --zero 0, which keeps a step for each parameter", first.key.name)
            of_each = enumerate(row.chunks[0] for _, row in mine)
            chunks = tuple(Chunk(Box((), ()), chunk.array, chunk.within, count) for count, chunk in of_each)
            key = TensorKey(f"group.{group.number}", STEP)
            self.rows.append((index, LogicalTensor(key, (), first.dtype, chunks)))
        lost = len(steps.keys() - folded)
        reason = "one step a group: equal ones are folded, and compared while they are read"
        left = f"; {lost} of no parameter are left out" if lost else ""
        self.report(STEP, reason + left, [row for _, row in steps.values()])


def _configured(extras: Mapping[str, Any]) -> str:
    """The module's dtype as the configuration has it, "" where there is none."""
    config = extras.get("ds_config")
    if not isinstance(config, Mapping):
        return ""
    for key, dtype in (("bf16", "BF16"), ("bfloat16", "BF16"), ("fp16", "F16")):
        stated = config.get(key)
        if isinstance(stated, Mapping) and stated.get("enabled"):
            return dtype
    return "F32"


# -- settled -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Laid:
    """What is to be written."""

    wanted: Wanted
    described: Described
    config: Config
    stage: int
    dp: int
    pp: int
    ep: int
    rows: Mapping[TensorKey, int]  # key -> its number among the wanted tensors
    states: Sequence[str]  # the optimizer's, in order
    extras: dict[str, Any]
    notes: list[str]
    moved: bool  # other degrees than the source's?
    stages: Sequence[Sequence[ZeroGroup]] = ()  # the groups of every pipeline stage
    job: ZeroJob | None = None  # of ZeRO 1 to 3

    @property
    def plain_bf16(self) -> bool:
        """BF16_Optimizer: bf16 with fp32 accumulation at stage 1 (DeepSpeed's engine decides by the same)."""
        fp32 = self.config.fp32_accumulation and self.described.dtype == "BF16"
        return self.stage == 1 and (self.described.plain_bf16 or fp32)

    def row(self, name: str, state: str) -> int | None:
        return self.rows.get(TensorKey(name, state))

    def shape(self, name: str) -> Shape:
        """Of a parameter's fp32 weight."""
        return self.wanted.tensors[self.rows[TensorKey(name, MASTER)]].shape

    def flat_groups(self, groups: Sequence[ZeroGroup]) -> Iterator[FlatGroup]:
        """A pipeline stage's groups as they lie in flat tensors."""
        dtype = DTYPES.get(self.described.dtype)
        itemsize = (dtype.bits // 8 if dtype else 2) if self.described.aligned and not self.plain_bf16 else 0
        for number, group in enumerate(groups):
            ep = max(group.ep, 1)
            names = first_rank(group.names, ep) if group.ep else group.names
            for expert in range(1, ep):
                for its, name in zip(global_names(names, expert), names, strict=True):
                    if self.shape(its) != self.shape(name):
                        raise _unlike(its, f"has another shape than {name}")
            if self.described.round_robin and self.stage != 3:
                names = deal(names, self.dp // ep)
            shapes = {name: self.shape(name) for name in names}
            if self.stage == 3:
                yield from sub_groups(shapes, number, self.dp, self.config.sub_group_size)
            else:
                yield partitioned(shapes, number, ep, self.dp // ep, itemsize)


def settle(wanted: Wanted) -> Laid:
    """Degrees, stage, groups and job, checked."""
    degrees = _degrees(wanted.wish.degrees)
    described = Described.from_extras(wanted.extras)
    present = list(dict.fromkeys(tensor.key.state for tensor in wanted.tensors))
    stage = stage_of(present, described, wanted.wish.zero)
    extras, left_out = writable(wanted.extras)
    notes = [f"left out, because no plain value holds it: {', '.join(left_out[:20])}"] if left_out else []
    described = _completed(described, wanted) if described else _foreign(wanted, stage, notes)
    states = [state for state in present if state not in (MODEL, MASTER, EMA, EXTRAS) and (state != STEP or stage == 0)]
    masters = {
        t.key.name: t.shape for t in wanted.tensors if t.key.state == MASTER or (not stage and t.key.state in states)
    }
    dp = degrees["dp"]
    pp = degrees["pp"]
    ep = degrees["ep"]
    groups = groups_of(extras, masters)
    _note_foreign(groups, described, stage, notes)
    config = Config.of(extras.get("ds_config"))
    rows = {tensor.key: n for n, tensor in enumerate(wanted.tensors)}
    moved = _moved(wanted, dp, pp, ep)
    laid = Laid(wanted, described, config, stage, dp, pp, ep, rows, states, extras, notes, moved)
    if stage or any(expert_name_of(name) for group in groups for name in group.names):
        groups = _with_experts(groups, dp, ep, notes)
        if stage == 3 and any(group.ep for group in groups):
            raise _unfit("--zero 3: DeepSpeed's own MoE has no ZeRO 3", "write --zero 1 or --zero 2")
    elif ep > 1 and dp % ep:
        raise UsageError(f"--ep {ep} does not divide --dp {dp}", code=DEGREE, hint="choose --ep that divides --dp")
    if stage:
        _check_states(laid, groups)
    stages = _stages_of(groups, described, pp, wanted.wish.pp_split)
    if described.stages and stage > 1:
        raise _unfit(f"--zero {stage}: DeepSpeed's pipelines take no more than ZeRO 1", "write --zero 1")
    job = ZeroJob(stage, dp, config.data_first, [[*laid.flat_groups(one)] for one in stages]) if stage else None
    _set_aside(laid)
    return replace(laid, stages=stages, job=job)


def _note_foreign(groups: Sequence[ZeroGroup], described: Described, stage: int, notes: list[str]) -> None:
    """What the source does not say of its groups and layers."""
    unlisted = [name for group in groups if not group.listed for name in group.names]
    if stage and unlisted:
        bare = ", without options (lr, betas): the optimizer can't step before it is given some"
        notes.append(
            f"{len(unlisted)} parameters are in no param_groups of the source: they are written as a group of their "
            f"own{'' if len(groups) > 1 else bare}"
        )
    if not described.stages and any(name.startswith(TIED) for group in groups for name in group.names):
        notes.append(
            "these are a pipeline's parameters, but the source does not say which layers hold the tied ones: they are "
            "written as one module, which a PipelineModule does not load (it resumes from a universal checkpoint)"
        )


def _degrees(wished: Degrees) -> dict[str, int]:
    out = {name: wished.at(name) for name in ("tp", "pp", "vpp", "ep", "etp", "dp", "cp")}
    for name in ("tp", "vpp", "etp", "cp"):
        if out[name] > 1 and (name != "etp" or out["etp"] != out["tp"]):
            what = f"--{name} {out[name]}: deepspeed is written for data, pipeline and expert ranks"
            raise UsageError(what, code=DEGREE, hint=f"the nearest that it takes is --{name} 1")
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
    model = [tensor.key.name for tensor in wanted.tensors if tensor.key.state == MODEL]
    masters = {tensor.key.name for tensor in wanted.tensors if tensor.key.state == MASTER}
    others = [name for name in model if name not in masters] if stage else []
    if others:
        shown = ", ".join(others[:8])
        notes.append(f"{len(others)} tensors of the model have no fp32 weight and are written as buffers: {shown}")
    return _completed(Described(stage, module=tuple(model), buffers=tuple(others)), wanted)


def _check_states(laid: Laid, groups: Sequence[ZeroGroup]) -> None:
    """Every parameter of a group has the same states, in its own shape and one dtype: a flat tensor has no holes."""
    faults = []
    for group in groups:
        for state in (MASTER, *laid.states):
            rows = [(name, laid.row(name, state)) for name in group.names]
            here = [laid.wanted.tensors[row] for _, row in rows if row is not None]
            faults += [f"{name} has no {state}" for name, row in rows if row is None and here]
            for t in here:
                if t.shape != laid.shape(t.key.name):
                    shape = list(laid.shape(t.key.name))
                    faults.append(f"{t.key.name}: {state} has shape {list(t.shape)}, its weight {shape}")
            faults += [
                f"{t.key.name}: {state} is {t.dtype.name}, others {here[0].dtype.name}"
                for t in here
                if t.dtype != here[0].dtype
            ]
    known = {name for group in groups for name in group.names}
    faults += [
        f"{t.key.name} has {t.key.state} but no fp32 weight"
        for t in laid.wanted.tensors
        if t.key.state in laid.states and t.key.name not in known
    ]
    if faults:
        hint = "write --zero 0 without master weights, another format, or --drop optimizer"
        raise _unfit(f"the optimizer's states do not fill flat tensors: {faults[0]}", hint, faults=faults[1:100])


def _moved(wanted: Wanted, dp: int, pp: int, ep: int) -> bool:
    """Are these other degrees than the source's?"""
    before = wanted.hints.get(Degrees)
    now = {"dp": dp, "pp": pp, "ep": ep}
    return before is not None and any(before.at(name) != value for name, value in now.items())


def _set_aside(laid: Laid) -> None:
    """RNG states of other degrees, and values whose keys DeepSpeed needs, go where nobody takes them for something
    else."""
    random = [key for key in laid.extras if laid.moved and is_random(str(key))]
    names = (t.key.name for t in laid.wanted.tensors if t.key.state == EXTRAS and laid.moved)
    tensors = [name for name in names if is_random(name)]
    taken = [key for key in laid.extras if key in LAYOUT_KEYS and key not in ("module", OPTIMIZER)]
    home = laid.extras.get(UNUSED)
    aside = {key: laid.extras.pop(key) for key in (*random, *taken)}
    if aside:
        laid.extras[UNUSED] = {**(home if isinstance(home, Mapping) else {}), **aside}
    if random or tensors:
        shown = ", ".join(map(str, [*random, *tensors][:8]))
        laid.notes.append(f"random states of the source's ranks are kept under {UNUSED}, not used: {shown}")
    if taken:
        shown = ", ".join(map(str, taken[:8]))
        laid.notes.append(f"kept under {UNUSED}, for DeepSpeed needs these keys: {shown}")


def is_random(key: str) -> bool:
    """Is it a random state, which is of no use to ranks of other degrees?"""
    return "rng" in key.lower() or "random_state" in key.lower()


# -- groups by expert ranks and stages ---------------------------------------------------------------------------------


def _with_experts(groups: Sequence[ZeroGroup], dp: int, ep: int, notes: list[str]) -> list[ZeroGroup]:
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
            hint = f"expert degrees that do: {', '.join(map(str, near))}{other}"
            raise UsageError(f"--ep {ep} does not divide the {total} {what}", code=DEGREE, hint=hint)
    for group in groups:
        experts = [name for name in group.names if expert_name_of(name)]
        dense = [name for name in group.names if not expert_name_of(name)]
        if experts and dense:
            notes.append("DeepSpeed keeps experts in parameter groups of their own: one was split")
        if dense:
            out.append(replace(group, names=dense))
        if experts:
            own = first_rank(experts, ep)
            for odd in sorted({*experts} ^ {name for rank in range(ep) for name in global_names(own, rank)}):
                raise _unlike(odd, "has no counterpart among the experts of other ranks")
            options = {"name": "", "moe": True, **group.options}
            options |= {"name": f"ep_size_{ep}", "moe": True}
            out.append(replace(group, names=experts, options=options, ep=ep))
    return out


def _stages_of(
    groups: Sequence[ZeroGroup], described: Described, pp: int, split: Sequence[int]
) -> list[list[ZeroGroup]]:
    """The groups of every pipeline stage. Raises UsageError E0288 where the stages do not follow from what the
    source states."""
    known = described.stages
    if not known and pp > 1:
        raise _no_split(f"--pp {pp}: the source is no pipeline of DeepSpeed's (no layer files)", "leave --pp off")
    if not known:
        return [list(groups)]
    listed = {name for stage in known for part in stage for name in part}
    lost = next((name for group in groups for name in group.names if name not in listed), None)
    if lost is not None and pp > 1:
        raise _no_split(f"--pp {pp}: no stage of the source lists {lost}", "write --pp 1", lost)
    if pp == len(known) and not split:
        return [[_part(group, [n for part in stage for n in part]) for group in groups] for stage in known]
    if pp == 1:
        return [[_part(group, sorted(group.names, key=_layer)) for group in groups]]
    if len(split) != pp:
        raise _no_split(
            f"--pp {pp}: which layers a stage gets is decided by the model's partition_method, which no file states",
            f"say it with --pp-split (layers of each stage), or keep --pp {len(known)}, or --pp 1",
        )
    names = sorted((name for group in groups for name in group.names), key=_layer)
    for name in (name for name in names if name.startswith(TIED)):
        what = f"--pp-split: {name} is tied, and no file says which layers use it"
        raise _no_split(what, "keep --pp as it is, or --pp 1", name)
    bounds = [*accumulate(split)]
    last = _layer(names[-1])[1] if names else 0
    if bounds[-1] <= last:
        what = f"--pp-split covers {bounds[-1]} layers, but there is a layer {last}"
        raise _no_split(what, "count every layer of the PipelineModule, those without parameters too")
    parts: list[list[str]] = [[] for _ in split]
    for name in names:
        parts[bisect_right(bounds, _layer(name)[1])].append(name)
    return [[_part(group, part) for group in groups] for part in parts]


def _no_split(what: str, hint: str, key: str = "") -> UsageError:
    return UsageError(what, code=SPLIT, key=key, hint=hint)


def _part(group: ZeroGroup, names: Sequence[str]) -> ZeroGroup:
    """The group's parameters among `names`, in their order."""
    mine = set(group.names)
    return replace(group, names=[name for name in names if name in mine])


def _layer(name: str) -> tuple[int, int]:
    """Sorts tied modules first, then layers by number, each in the order given (a stable sort)."""
    index = name.partition(".")[0]
    return (1, int(index)) if numeral(index) else (0, 0)
