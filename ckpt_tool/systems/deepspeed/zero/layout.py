"""Decides what is written: which tensors the ZeRO stage keeps, the degrees, the groups of every stage, the job.

Every decision that does not depend on a file's bytes is made here, once, and every impossible request is refused here;
`deepspeed.zero.write` only plans the files of the job's ranks. First comes `fit`, before any layout: the stages store
the same training state with different tensors, and every difference is exact and reported:

    stage 3       no 16-bit weights: those of parameters with an fp32 weight are left out (DeepSpeed rounds them again)
    from stage 3  the 16-bit weights are the rounding of `master` to the module's dtype, as DeepSpeed makes them on
                  resuming
    stage 1-3     `step` is one number a group: tensors of one step a parameter are folded, and compared while they are
                  read
    stage 1-3     fp32 weights without a `master` are their own master
    stage 0       the optimizer as torch stores it

Without `--zero` the stage is the source's; if the source states none, 1 with fp32 master weights, else 0. Then
`settle`:
a group of experts gets options of its own (`name: ep_size_N`, `moe: True`), pipeline stages their parameters.

Codes: E0286 states that no stage holds, E0287 degrees, E0288 pipeline stages. Source: DeepSpeed 0.19.8
`runtime/zero/stage3.py` (`_rigid_load_state_dict`: fp16 weights are copied from the fp32 ones), `moe/utils.py`. Cost: a
pass over the parameters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
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
from ckpt_tool.systems.deepspeed.stored_names import TIED, counts, expert_name_of, global_names, select_first_rank

UNFIT = "E0286"
DEGREE = "E0287"
SPLIT = "E0288"
_NO_OPTIMIZER = frozenset((MODEL, EMA, EXTRAS))
Rows = list[tuple[int, LogicalTensor]]

# -- which tensors -----------------------------------------------------------------------------------------------------


def _misfit_error(what: str, hint: str, key: str = "", faults: Sequence[str] = ()) -> UsageError:
    """Return the error for states that no ZeRO stage can hold."""
    return UsageError(what, code=UNFIT, key=key, hint=hint, faults=faults)


def _unequal_experts_error(expert: str, what: str) -> UsageError:
    """Return the error for experts that differ: `param_shapes` lists one expert rank's experts, for all ranks."""
    return _misfit_error(f"the experts of a layer are not alike: {expert} {what}", "write another format", expert)


def stage_of(states: Sequence[str], described: Described | None, wished: int | None) -> int:
    """Return the ZeRO stage to write. Raises UsageError E0286 for `--zero 0` if there are fp32 master weights."""
    has_master = MASTER in states
    trains = any(state not in _NO_OPTIMIZER for state in states)
    wrapped = described is not None and described.zero_stage == 0  # DeepSpeed's 16-bit wrapper keeps masters

    if wished is not None:
        if wished == 0 and has_master and not wrapped:
            what = "--zero 0: without ZeRO the optimizer has no fp32 master weights in addition to the module"
            raise _misfit_error(what, "write --zero 1, or add --drop master")
        return wished if trains else 0
    if described is not None and has_master:
        return described.zero_stage
    return 1 if has_master else 0


def _check_shapes(tensors: Sequence[LogicalTensor]) -> None:
    """Raise UsageError E0286 for states in another shape than their parameter's, such as Adafactor's factors.

    Without ZeRO a reader recognises a parameter by the shape of its states.
    """
    shapes = {tensor.key.name: tensor.shape for tensor in tensors if tensor.key.state == MODEL}
    misshaped = []
    for tensor in tensors:
        is_state = tensor.key.state not in _NO_OPTIMIZER and tensor.numel != 1
        if is_state and tensor.shape != shapes.get(tensor.key.name, tensor.shape):
            misshaped.append(tensor.key)
    if misshaped:
        states = ",".join(dict.fromkeys(key.state for key in misshaped))
        what = f"{misshaped[0]} does not have its parameter's shape"
        hint = f"--drop {states} leaves out what does not"
        raise _misfit_error(what, hint, misshaped[0].name, list(map(str, misshaped[1:])))


def fit(tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], wish: LayoutWish) -> Fitted:
    """Return the tensors that the ZeRO stage has. Raises UsageError E0286 if it can't hold the optimizer's states
    exactly.
    """
    described = Described.from_extras(extras)
    states = list(dict.fromkeys(tensor.key.state for tensor in tensors))
    stage = stage_of(states, described, wish.zero)
    if stage == 0:
        _check_shapes(tensors)
        return Fitted(tuple(enumerate(tensors)))

    # Masters come first: what the module keeps depends on them.
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
    """The source's tensors, turned step by step into those that a ZeRO stage keeps."""

    def __init__(self, rows: Rows, extras: Mapping[str, Any], described: Described) -> None:
        self.rows = rows  # (number among the source's tensors, tensor)
        self.extras = extras
        self.described = described
        self.casts: dict[TensorKey, DType] = {}  # to which dtype a tensor is rounded
        self.dropped: list[dict[str, Any]] = []  # entries of the report

    def rows_by_name(self, state: str) -> dict[str, tuple[int, LogicalTensor]]:
        """Return {name: row} of a state's tensors."""
        return {row.key.name: (i, row) for i, row in self.rows if row.key.state == state}

    def report(self, state: str, reason: str, dropped: Sequence[LogicalTensor] = ()) -> None:
        """Add an entry to the report: what is left out of a state, or made differently, and why."""
        nbytes = sum(row.nbytes for row in dropped)
        self.dropped.append({"state": state, "tensors": len(dropped), "bytes": nbytes, "reason": reason})

    def trained_names(self) -> set[str]:
        """Return the names of the parameters with an fp32 weight, and their aliases."""
        masters = self.rows_by_name(MASTER)
        return {*masters, *(alias for alias, kept in self.described.shared.items() if kept in masters)}

    def add_masters(self) -> None:
        """Make fp32 weights their own master where a parameter has states and no master."""
        model = self.rows_by_name(MODEL)
        masters = self.rows_by_name(MASTER)
        stateful = {row.key.name for _, row in self.rows if row.key.state not in (*_NO_OPTIMIZER, MASTER)}
        new_masters = [(name, *model[name]) for name in model if name in stateful and name not in masters]
        for name, _, row in new_masters:
            if row.dtype.name != "F32":
                raise _misfit_error(
                    f"{name} has optimizer states but no fp32 master weight, and its weight is {row.dtype.name}",
                    "write --zero 0, which keeps the optimizer as it is; or --drop optimizer",
                    name,
                )

        without_weight = stateful - masters.keys() - model.keys()
        if without_weight:
            first = min(without_weight)
            what = f"{len(without_weight)} parameters have optimizer states but no weights; the first: {first}"
            raise _misfit_error(what, "take the state model or master along, or --drop optimizer", first)
        if new_masters:
            self.report(MASTER, f"{len(new_masters)} fp32 weights are their own master")
        self.rows += [(i, row._replace(key=TensorKey(name, MASTER), path=())) for name, i, row in new_masters]

    def drop_module(self) -> None:
        """Drop the 16-bit weights of what is trained, which ZeRO 3 does not have."""
        trained = self.trained_names()
        dropped = []
        kept_rows = []
        for i, row in self.rows:
            if row.key.state == MODEL and row.key.name in trained:
                dropped.append(row)
            else:
                kept_rows.append((i, row))
        self.rows = kept_rows
        if dropped:
            self.report(MODEL, "ZeRO 3 keeps no 16-bit weights: DeepSpeed rounds them from the fp32 master", dropped)

    def refuse_removed(self, removed: Iterable[TensorKey]) -> None:
        """Refuse `--model-only` removals: a removed weight whose master stays would be made again from it."""
        masters = self.rows_by_name(MASTER)
        names = sorted(key.name for key in removed if key.state == MODEL and key.name in masters)
        if names:
            what = f"{names[0]} can't leave the module alone: DeepSpeed needs a weight for every fp32 master"
            raise _misfit_error(
                what, "remove its optimizer and master states with it: leave --model-only off", names[0], names[1:20]
            )

    def add_module(self) -> None:
        """Add the module's weights, rounded from the master where the source has none."""
        model = self.rows_by_name(MODEL)
        masters = self.rows_by_name(MASTER)
        shared = self.described.shared
        dtypes = [row.dtype.name for _, row in model.values() if row.dtype.is_float]
        dtype = self.described.dtype or max(dtypes, key=dtypes.count, default=_configured_dtype(self.extras))

        new_weights: Rows = []
        trained = self.trained_names()
        for name in [*masters, *(alias for alias in shared if alias in trained)]:
            if name in model:
                continue
            if dtype not in DTYPES:
                what = f"the module has no weights for {name}, and nothing says their dtype"
                raise _misfit_error(what, "write --zero 3, which keeps the fp32 weights alone", name)
            index, row = masters[shared.get(name, name) if name not in masters else name]
            self.casts[TensorKey(name)] = DTYPES[dtype]
            new_weights.append((index, row._replace(key=TensorKey(name), path=())))
        if not new_weights:
            return

        count = len(new_weights)
        self.report(
            MODEL, f"{count} weights of the module are the fp32 master rounded to {dtype}, as DeepSpeed rounds it"
        )

        # In the module's own order, as DeepSpeed writes it.
        order = {name: number for number, name in enumerate(self.described.module)}
        model_rows = [row for row in self.rows if row[1].key.state == MODEL] + new_weights
        model_rows.sort(key=lambda row: order.get(row[1].key.name, len(order)))
        self.rows = model_rows + [row for row in self.rows if row[1].key.state != MODEL]

    def fold_steps(self) -> None:
        """Replace the `step` tensors of a group by one tensor with the others as its replicas.

        Replicas are compared when they are read, so differing steps are an error then.
        """
        steps = self.rows_by_name(STEP)
        if not steps:
            return
        masters = {name: row.shape for name, (_, row) in self.rows_by_name(MASTER).items()}
        self.rows = [row for row in self.rows if row[1].key.state != STEP]

        folded: set[str] = set()
        for group in groups_of(self.extras, masters):
            group_steps = [steps[name] for name in group.names if name in steps]
            folded |= set(group.names)
            if not group_steps:
                continue
            index, first = group_steps[0]
            if any(row.numel != 1 or row.dtype != first.dtype for _, row in group_steps):
                what = "the step counters of a group have several shapes or dtypes"
                raise _misfit_error(what, "write --zero 0, which keeps a step for each parameter", first.key.name)
            chunks = []
            for replica, (_, row) in enumerate(group_steps):
                chunk = row.chunks[0]
                chunks.append(Chunk(Box((), ()), chunk.array, chunk.within, replica))
            key = TensorKey(f"group.{group.number}", STEP)
            self.rows.append((index, LogicalTensor(key, (), first.dtype, tuple(chunks))))

        reason = "one step a group: equal ones are folded, and compared while they are read"
        without_parameter = len(steps.keys() - folded)
        if without_parameter:
            reason += f"; {without_parameter} of no parameter are left out"
        self.report(STEP, reason, [row for _, row in steps.values()])


def _configured_dtype(extras: Mapping[str, Any]) -> str:
    """Return the module's dtype that `ds_config` states, "" if there is no configuration."""
    config = extras.get("ds_config")
    if not isinstance(config, Mapping):
        return ""
    for key, dtype in (("bf16", "BF16"), ("bfloat16", "BF16"), ("fp16", "F16")):
        stated = config.get(key)
        if isinstance(stated, Mapping) and stated.get("enabled"):
            return dtype
    return "F32"


# -- the layout --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ZeroLayout:
    """All decisions about a new checkpoint, made before its files are planned."""

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
    moved: bool  # the degrees differ from the source's
    stages: Sequence[Sequence[ZeroGroup]] = ()  # the groups of every pipeline stage
    job: ZeroJob | None = None  # of ZeRO 1 to 3

    @property
    def plain_bf16(self) -> bool:
        """Whether the optimizer is a BF16_Optimizer: bf16 with fp32 accumulation at stage 1, as DeepSpeed's engine
        decides.
        """
        fp32 = self.config.fp32_accumulation and self.described.dtype == "BF16"
        return self.stage == 1 and (self.described.plain_bf16 or fp32)

    def row(self, name: str, state: str) -> int | None:
        """Return the number of a wanted tensor, None if there is no such tensor."""
        return self.rows.get(TensorKey(name, state))

    def shape(self, name: str) -> Shape:
        """Return the shape of a parameter's fp32 weight."""
        return self.wanted.tensors[self.rows[TensorKey(name, MASTER)]].shape

    def flat_groups(self, groups: Sequence[ZeroGroup]) -> Iterator[FlatGroup]:
        """Yield the flat groups of a pipeline stage's parameter groups."""
        itemsize = 0  # of the module's dtype where parameters are aligned
        if self.described.aligned and not self.plain_bf16:
            dtype = DTYPES.get(self.described.dtype)
            itemsize = dtype.bits // 8 if dtype else 2

        for number, group in enumerate(groups):
            ep = max(group.ep, 1)
            names = select_first_rank(group.names, ep) if group.ep else group.names

            # A flat group lists expert rank 0's parameters: those of the other ranks must have the same shapes.
            for expert in range(1, ep):
                for counterpart, name in zip(global_names(names, expert), names, strict=True):
                    if self.shape(counterpart) != self.shape(name):
                        raise _unequal_experts_error(counterpart, f"has another shape than {name}")

            if self.described.round_robin and self.stage != 3:
                names = deal(names, self.dp // ep)
            shapes = {name: self.shape(name) for name in names}
            if self.stage == 3:
                yield from sub_groups(shapes, number, self.dp, self.config.sub_group_size)
            else:
                yield partitioned(shapes, number, ep, self.dp // ep, itemsize)


def settle(wanted: Wanted) -> ZeroLayout:
    """Return all decisions about the new checkpoint: degrees, stage, groups and job.

    Raises UsageError: E0286 states that no stage holds, E0287 degrees, E0288 pipeline stages.
    """
    degrees = _check_degrees(wanted.wish.degrees)
    described = Described.from_extras(wanted.extras)
    present = list(dict.fromkeys(tensor.key.state for tensor in wanted.tensors))
    stage = stage_of(present, described, wanted.wish.zero)
    extras, left_out = writable(wanted.extras)
    notes = [f"left out, because no plain value holds it: {', '.join(left_out[:20])}"] if left_out else []
    described = _complete_record(described, wanted) if described else _describe_foreign(wanted, stage, notes)

    # With ZeRO a group has one step, among its scalars; without, a step is a state like any other.
    states = [state for state in present if state not in (MODEL, MASTER, EMA, EXTRAS) and (state != STEP or stage == 0)]
    parameter_states = {MASTER} if stage else {MASTER, *states}
    masters = {tensor.key.name: tensor.shape for tensor in wanted.tensors if tensor.key.state in parameter_states}

    dp = degrees["dp"]
    pp = degrees["pp"]
    ep = degrees["ep"]
    groups = groups_of(extras, masters)
    _note_unknowns(groups, described, stage, notes)

    config = Config.of(extras.get("ds_config"))
    rows = {tensor.key: n for n, tensor in enumerate(wanted.tensors)}
    has_moved = _has_other_degrees(wanted, dp, pp, ep)
    layout = ZeroLayout(wanted, described, config, stage, dp, pp, ep, rows, states, extras, notes, has_moved)

    # DeepSpeed's own MoE keeps experts in parameter groups of their own.
    if stage or any(expert_name_of(name) for group in groups for name in group.names):
        groups = _split_experts(groups, dp, ep, notes)
        if stage == 3 and any(group.ep for group in groups):
            raise _misfit_error("--zero 3: DeepSpeed's own MoE has no ZeRO 3", "write --zero 1 or --zero 2")
    elif ep > 1 and dp % ep:
        raise UsageError(f"--ep {ep} does not divide --dp {dp}", code=DEGREE, hint="choose --ep that divides --dp")

    if stage:
        _check_states(layout, groups)

    stages = _split_stages(groups, described, pp, wanted.wish.pp_split)
    if described.stages and stage > 1:
        raise _misfit_error(f"--zero {stage}: DeepSpeed's pipelines take no more than ZeRO 1", "write --zero 1")

    job = ZeroJob(stage, dp, config.data_first, [[*layout.flat_groups(one)] for one in stages]) if stage else None
    _set_extras_aside(layout)
    return replace(layout, stages=stages, job=job)


def _note_unknowns(groups: Sequence[ZeroGroup], described: Described, stage: int, notes: list[str]) -> None:
    """Add notes on parameters without a group, and on tied layers whose position the source does not state."""
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


def _check_degrees(wished: Degrees) -> dict[str, int]:
    degrees = {name: wished.at(name) for name in ("tp", "pp", "vpp", "ep", "etp", "dp", "cp")}
    for name in ("tp", "vpp", "etp", "cp"):
        if degrees[name] > 1 and (name != "etp" or degrees["etp"] != degrees["tp"]):
            what = f"--{name} {degrees[name]}: deepspeed is written for data, pipeline and expert ranks"
            raise UsageError(what, code=DEGREE, hint=f"the nearest that it takes is --{name} 1")
    return degrees


def _complete_record(described: Described, wanted: Wanted) -> Described:
    """Return the record with a dtype and a file prefix, which another format may have lost."""
    dtype = described.dtype or _common_dtype(wanted)
    prefix = described.prefix or ("bf16_" if dtype == "BF16" else "")
    return replace(described, dtype=dtype, prefix=prefix)


def _common_dtype(wanted: Wanted) -> str:
    """Return the dtype that most of the model's tensors have."""
    kinds = [tensor.dtype.name for tensor in wanted.tensors if tensor.key.state == MODEL and tensor.dtype.is_float]
    return max(kinds, key=kinds.count, default="F32")


def _describe_foreign(wanted: Wanted, stage: int, notes: list[str]) -> Described:
    """Return a record for a source of another system, made from the tensors."""
    model = [tensor.key.name for tensor in wanted.tensors if tensor.key.state == MODEL]
    masters = {tensor.key.name for tensor in wanted.tensors if tensor.key.state == MASTER}
    buffers = [name for name in model if name not in masters] if stage else []
    if buffers:
        shown = ", ".join(buffers[:8])
        notes.append(f"{len(buffers)} tensors of the model have no fp32 weight and are written as buffers: {shown}")
    return _complete_record(Described(stage, module=tuple(model), buffers=tuple(buffers)), wanted)


def _check_states(layout: ZeroLayout, groups: Sequence[ZeroGroup]) -> None:
    """Raise UsageError E0286 unless every parameter of a group has the same states, in its own shape and one dtype: a
    flat tensor has no holes."""
    faults = []
    for group in groups:
        for state in (MASTER, *layout.states):
            rows = [(name, layout.row(name, state)) for name in group.names]
            tensors = [layout.wanted.tensors[row] for _, row in rows if row is not None]
            if not tensors:
                continue
            faults += [f"{name} has no {state}" for name, row in rows if row is None]
            for tensor in tensors:
                name = tensor.key.name
                if tensor.shape != layout.shape(name):
                    shape = list(layout.shape(name))
                    faults.append(f"{name}: {state} has shape {list(tensor.shape)}, its weight {shape}")
            for tensor in tensors:
                if tensor.dtype != tensors[0].dtype:
                    faults.append(f"{tensor.key.name}: {state} is {tensor.dtype.name}, others {tensors[0].dtype.name}")

    names_in_groups = {name for group in groups for name in group.names}
    for tensor in layout.wanted.tensors:
        if tensor.key.state in layout.states and tensor.key.name not in names_in_groups:
            faults.append(f"{tensor.key.name} has {tensor.key.state} but no fp32 weight")

    if faults:
        hint = "write --zero 0 without master weights, another format, or --drop optimizer"
        raise _misfit_error(f"the optimizer's states do not fill flat tensors: {faults[0]}", hint, faults=faults[1:100])


def _has_other_degrees(wanted: Wanted, dp: int, pp: int, ep: int) -> bool:
    """Return whether the degrees differ from the source's."""
    before = wanted.hints.get(Degrees)
    now = {"dp": dp, "pp": pp, "ep": ep}
    return before is not None and any(before.at(name) != value for name, value in now.items())


def _set_extras_aside(layout: ZeroLayout) -> None:
    """Move RNG states of other degrees, and values whose keys DeepSpeed needs, under a key that DeepSpeed ignores."""
    random_keys: list[Any] = []
    random_tensors: list[str] = []
    if layout.moved:
        random_keys = [key for key in layout.extras if is_random(str(key))]
        extra_names = (tensor.key.name for tensor in layout.wanted.tensors if tensor.key.state == EXTRAS)
        random_tensors = [name for name in extra_names if is_random(name)]
    needed_keys = [key for key in layout.extras if key in LAYOUT_KEYS and key not in ("module", OPTIMIZER)]

    unused = layout.extras.get(UNUSED)
    aside = {key: layout.extras.pop(key) for key in (*random_keys, *needed_keys)}
    if aside:
        layout.extras[UNUSED] = {**(unused if isinstance(unused, Mapping) else {}), **aside}

    if random_keys or random_tensors:
        names = ", ".join(map(str, [*random_keys, *random_tensors][:8]))
        layout.notes.append(f"random states of the source's ranks are kept under {UNUSED}, not used: {names}")
    if needed_keys:
        names = ", ".join(map(str, needed_keys[:8]))
        layout.notes.append(f"kept under {UNUSED}, for DeepSpeed needs these keys: {names}")


def is_random(key: str) -> bool:
    """Return whether the key names a random state, which ranks of other degrees can't use."""
    return "rng" in key.lower() or "random_state" in key.lower()


# -- groups by expert ranks and stages ---------------------------------------------------------------------------------


def _split_experts(groups: Sequence[ZeroGroup], dp: int, ep: int, notes: list[str]) -> list[ZeroGroup]:
    """Return the groups, with experts in groups of their own.

    Raises UsageError E0287, with the nearest valid degrees, if `ep` does not divide the ranks or the experts.
    """
    experts_by_layer = counts(name for group in groups for name in group.names)
    if ep > 1 and not experts_by_layer:
        raise UsageError(f"--ep {ep}: no parameter is an expert of DeepSpeed's MoE", code=DEGREE, hint="leave --ep off")

    totals = [(dp, "data ranks (--dp)")]
    totals += [(count, f"experts of {layer}") for layer, count in experts_by_layer.items()]
    for total, what in totals:
        if total % ep:
            near = divisors_near(total, ep)
            other = f"; or --dp {max(total // ep, 1) * ep} or {(total // ep + 1) * ep}" if total == dp else ""
            hint = f"expert degrees that do: {', '.join(map(str, near))}{other}"
            raise UsageError(f"--ep {ep} does not divide the {total} {what}", code=DEGREE, hint=hint)

    split_groups = []
    for group in groups:
        experts = [name for name in group.names if expert_name_of(name)]
        dense = [name for name in group.names if not expert_name_of(name)]
        if experts and dense:
            notes.append("DeepSpeed keeps experts in parameter groups of their own: one was split")
        if dense:
            split_groups.append(replace(group, names=dense))
        if not experts:
            continue

        # Every expert rank must have the parameters that rank 0 has.
        rank_zero_names = select_first_rank(experts, ep)
        expected = {name for rank in range(ep) for name in global_names(rank_zero_names, rank)}
        unmatched = sorted({*experts} ^ expected)
        if unmatched:
            raise _unequal_experts_error(unmatched[0], "has no counterpart among the experts of other ranks")

        # DeepSpeed's order of options: name and moe first.
        options = {"name": "", "moe": True, **group.options}
        options |= {"name": f"ep_size_{ep}", "moe": True}
        split_groups.append(replace(group, names=experts, options=options, ep=ep))
    return split_groups


def _split_stages(
    groups: Sequence[ZeroGroup], described: Described, pp: int, split: Sequence[int]
) -> list[list[ZeroGroup]]:
    """Return the groups of every pipeline stage. Raises UsageError E0288 if the source does not determine the
    stages."""
    source_stages = described.stages
    if not source_stages and pp > 1:
        raise _no_split_error(f"--pp {pp}: the source is no pipeline of DeepSpeed's (no layer files)", "leave --pp off")
    if not source_stages:
        return [list(groups)]

    stage_names = [list(chain.from_iterable(stage)) for stage in source_stages]
    listed_names = {name for names in stage_names for name in names}
    unlisted = next((name for group in groups for name in group.names if name not in listed_names), None)
    if unlisted is not None and pp > 1:
        raise _no_split_error(f"--pp {pp}: no stage of the source lists {unlisted}", "write --pp 1", unlisted)

    # The source's own stages, or one.
    if pp == len(source_stages) and not split:
        return [_select_all(groups, names) for names in stage_names]
    if pp == 1:
        return [[_select(group, sorted(group.names, key=_layer_order)) for group in groups]]
    if len(split) != pp:
        raise _no_split_error(
            f"--pp {pp}: which layers a stage gets is decided by the model's partition_method, which no file states",
            f"say it with --pp-split (layers of each stage), or keep --pp {len(source_stages)}, or --pp 1",
        )

    # Other stages: layer by layer, as --pp-split says.
    names = sorted((name for group in groups for name in group.names), key=_layer_order)
    tied_name = next((name for name in names if name.startswith(TIED)), None)
    if tied_name is not None:
        what = f"--pp-split: {tied_name} is tied, and no file says which layers use it"
        raise _no_split_error(what, "keep --pp as it is, or --pp 1", tied_name)
    bounds = [*accumulate(split)]
    last = _layer_order(names[-1])[1] if names else 0
    if bounds[-1] <= last:
        what = f"--pp-split covers {bounds[-1]} layers, but there is a layer {last}"
        raise _no_split_error(what, "count every layer of the PipelineModule, those without parameters too")
    parts: list[list[str]] = [[] for _ in split]
    for name in names:
        parts[bisect_right(bounds, _layer_order(name)[1])].append(name)
    return [_select_all(groups, part) for part in parts]


def _no_split_error(what: str, hint: str, key: str = "") -> UsageError:
    return UsageError(what, code=SPLIT, key=key, hint=hint)


def _select_all(groups: Sequence[ZeroGroup], names: Sequence[str]) -> list[ZeroGroup]:
    """Return the groups of a stage that has these parameters."""
    return [_select(group, names) for group in groups]


def _select(group: ZeroGroup, names: Sequence[str]) -> ZeroGroup:
    """Return the group with only the parameters among `names`, in the order of `names`."""
    group_names = set(group.names)
    return replace(group, names=[name for name in names if name in group_names])


def _layer_order(name: str) -> tuple[int, int]:
    """Return the sort key that puts tied modules first, then layers by number; a stable sort keeps the order inside."""
    index = name.partition(".")[0]
    return (1, int(index)) if numeral(index) else (0, 0)
