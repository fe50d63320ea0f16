"""Writing the optimizer files: a rank's fp32 weights and moments as flat tensors, with what DeepSpeed says of them.

    bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt
          {"optimizer_state_dict": {"single_partition_of_fp32_groups": [T], ...}}

Keys and their order as DeepSpeed 0.19.8 has them (`runtime/zero/stage_1_and_2.py` and `stage3.py` `state_dict`,
`runtime/bf16_optimizer.py`); its classes are written from values: a loss scaler from a dict, `fragment_address` from
two numbers. Cost: a few microseconds a piece. What it does not do: decide anything (`deepspeed.plan`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ckpt_tool.core.box import flat_boxes, whole
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.core.target import TargetFile
from ckpt_tool.core.tensor import MASTER, STEP, TensorKey
from ckpt_tool.formats.deepspeed.described import OPTIMIZER
from ckpt_tool.formats.deepspeed.files import optim_name
from ckpt_tool.formats.deepspeed.flat import Piece, shares
from ckpt_tool.formats.deepspeed.groups import Group
from ckpt_tool.formats.deepspeed.off import WRAPPER
from ckpt_tool.formats.deepspeed.plan import Plan, line_of, sub_group_names
from ckpt_tool.formats.deepspeed.rank import scalar_bytes
from ckpt_tool.formats.torch.content import Part, TorchComposer
from ckpt_tool.storage.pickle_values import OrderedMap, TensorRef

VERSION = "0.19.8"  # the DeepSpeed whose layout is written
FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"
STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"


def with_stage(config: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """The source's configuration with the stage that is written."""
    zero = config.get("zero_optimization")
    return {**config, "zero_optimization": {**(zero if isinstance(zero, Mapping) else {}), "stage": stage}}


def optimizer_file(plan: Plan, data: int, model: int) -> TargetFile:
    composer = TorchComposer()
    groups = plan.stages[model]
    state = _stage3(plan, composer, groups, data) if plan.stage == 3 else _stage12(plan, composer, groups, data)
    config = {**plan.config}
    skeleton = {
        "optimizer_state_dict": state,
        "ds_config": with_stage(config, plan.stage),
        "ds_version": plan.extras.get("ds_version", VERSION),
    }
    return composer.file(optim_name(plan.described.prefix, data, model), skeleton)


def _rest(plan: Plan, *keys: str) -> dict[str, Any]:
    """Scalars of the whole optimizer, as the source has them or DeepSpeed's defaults."""
    home = plan.extras.get(OPTIMIZER)
    said = dict(home) if isinstance(home, Mapping) else {}
    defaults = {"loss_scaler": None, "dynamic_loss_scale": False, "overflow": False}
    given = {key: said.get(key, defaults.get(key)) for key in keys if key in said or plan.stage == 3}
    layout = ("param_groups", "scalars", "scalar_dtypes", "state", "ds_version", WRAPPER)
    given |= {key: item for key, item in said.items() if key not in layout and key not in keys}
    if "loss_scaler" in given:
        given["loss_scaler"] = _loss_scaler(given["loss_scaler"])
    return given


def _loss_scaler(said: Any) -> Any:
    if isinstance(said, Opaque):
        return said
    state: dict[str, Any] = dict(said) if isinstance(said, Mapping) else {"cur_scale": 1.0, "dynamic": False}
    name = state.pop("class", "deepspeed.runtime.fp16.loss_scaler.LossScaler")
    return Opaque(name, (), state)


def _stage12(plan: Plan, composer: TorchComposer, groups: Sequence[Group], data: int) -> dict[str, Any]:
    """ZeRO 1, 2 and BF16_Optimizer."""
    plain = plan.plain_bf16
    flat: list[TensorRef] = []
    states: dict[Any, Any] = {}
    paddings, counts, gaps, mappings = [], [], [], []
    for number, group in enumerate(groups):
        names, pieces, size, spare, count, between = line_of(plan, group, data)
        flat.append(
            _flat(plan, composer, names, pieces, MASTER, size if plain else size - spare)._replace(requires_grad=True)
        )
        states[number] = _moments(plan, composer, group, names, pieces, size)
        mappings.append(_mapping(names, pieces))
        paddings.append(spare)
        counts.append(count)
        gaps.append(between)
    options = [{**group.options, "params": [number]} for number, group in enumerate(groups)]
    base = {"state": {n: state for n, state in states.items() if state}, "param_groups": options}
    if plain:
        return {
            **_rest(plan, "clip_grad"),
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": flat,
            "group_paddings": paddings,
            "partition_count": counts,
            "ds_version": plan.extras.get("ds_version", VERSION),
            "param_slice_mappings": mappings,
        }
    return {
        **_rest(plan, "loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad"),
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": flat,
        "zero_stage": Symbol(STAGE, (plan.stage,)),
        "group_paddings": paddings,
        "param_alignment_paddings": gaps,
        "partition_count": counts,
        "ds_version": plan.extras.get("ds_version", VERSION),
        "param_slice_mappings": mappings,
    }


def _stage3(plan: Plan, composer: TorchComposer, groups: Sequence[Group], data: int) -> dict[str, Any]:
    """ZeRO 3: a flat tensor for each sub-group."""
    flat: list[TensorRef] = []
    states: dict[Any, Any] = {}
    options = []
    for group in groups:
        mine: list[int] = []
        for names in sub_group_names(plan, group):
            sizes = [prod(plan.shape(name)) for name in names]
            pieces, length = shares(sizes, plan.dp, data)
            pairs = [(name, name) for name in names]
            mine.append(len(flat))
            states[len(flat)] = _moments(plan, composer, group, pairs, pieces, length)
            flat.append(_flat(plan, composer, pairs, pieces, MASTER, length)._replace(requires_grad=True))
        options.append({**group.options, "params": mine})
    rest = _rest(plan, "loss_scaler", "dynamic_loss_scale", "overflow")
    return {
        "zero_stage": Symbol(STAGE, (3,)),
        **rest,
        "partition_count": plan.dp,
        "optimizer_state_dict": {"state": {n: s for n, s in states.items() if s}, "param_groups": options},
        "fp32_flat_groups": flat,
    }


def _flat(
    plan: Plan,
    composer: TorchComposer,
    names: Sequence[tuple[str, str]],
    pieces: Sequence[Piece],
    state: str,
    length: int,
) -> TensorRef:
    """A flat tensor of `length` elements with the pieces in it, zeros between."""
    parts = []
    rows = [plan.rows[TensorKey(name, state)] for name, _ in names]
    for piece in pieces:
        at, shape = piece.at, plan.wanted.tensors[rows[piece.param]].shape
        cuts = [c for c in plan.borders.get(names[piece.param][0], ()) if piece.start < c < piece.stop]
        for start, stop in zip([piece.start, *cuts], [*cuts, piece.stop], strict=True):
            for box in flat_boxes(shape, start, stop):
                parts.append(Part(rows[piece.param], box, at))
                at += box.numel
    dtype: DType = plan.wanted.tensors[rows[0]].dtype
    return composer.tensor((length,), dtype, parts)


def _moments(
    plan: Plan,
    composer: TorchComposer,
    group: Group,
    names: Sequence[tuple[str, str]],
    pieces: Sequence[Piece],
    length: int,
) -> dict[str, Any]:
    """The states of one flat group: scalars first, as torch's optimizers make them."""
    out: dict[str, Any] = {}
    home = plan.extras.get(OPTIMIZER)
    dtypes = home.get("scalar_dtypes") if isinstance(home, Mapping) else None
    mine = [state for state in plan.states if plan.row(names[0][0], state) is not None] if names else []
    folded = plan.row(f"group.{group.number}", STEP)
    if folded is not None:
        dtype = plan.wanted.tensors[folded].dtype
        out[STEP] = composer.tensor((), dtype, [Part(folded, whole(()), 0)])
    for key, value in group.scalars.items():
        dtype_name = dtypes.get(key) if isinstance(dtypes, Mapping) else None
        raw = scalar_bytes(value, dtype_name)
        if key not in out:
            out[key] = composer.value((), DTYPES[str(dtype_name)], raw) if raw is not None else value
    for state in mine:
        out[state] = _flat(plan, composer, names, pieces, state, length)
    return out


def _mapping(names: Sequence[tuple[str, str]], pieces: Sequence[Piece]) -> OrderedMap:
    out = OrderedMap()
    for piece in pieces:
        out[names[piece.param][1]] = Opaque(FRAGMENT, (), {"numel": piece.stop - piece.start, "start": piece.at})
    return out
