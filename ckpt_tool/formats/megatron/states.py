"""Reading a legacy Megatron rank's optimizer: its flat, numbered and nameless arrays get their names back.

The one idea: names are made from the rank's own model (`megatron.optimizer`) and proved by sizes: a buffer must be
exactly as long as its parameters make it, a numbered array must have its parameter's shape. What does not fit is an
error, not a guess.

    distrib_optim.pt    {0: {(bf16, f32): {param, exp_avg, exp_avg_sq: f32 [10112]}}}     -> master, exp_avg, exp_avg_sq
    model_optim_rng.pt  optimizer.state {3: {exp_avg, exp_avg_sq, step}}, fp32_from_fp16_params [[...], [...]]

Sources: `megatron.optimizer`, `megatron.flat`. Before 2024-02-13 Megatron wrote buckets apart under a plain dtype, of
another parameter order (0.16.1 `load_parameter_state_from_dp_zero_legacy`): refused by name.

Cost: some us a parameter. What it does not do: layer-wise optimizers (Muon).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import MASTER, StoredArray, TensorKey
from ckpt_tool.core.tensor import Path as TreePath
from ckpt_tool.errors import InconsistentCheckpoint, InputError
from ckpt_tool.formats.megatron.args import Facts
from ckpt_tool.formats.megatron.model import Gathering, Slot
from ckpt_tool.formats.megatron.optimizer import (
    Bucketing,
    Buffer,
    Param,
    bucketing_of,
    chained,
    groups_of,
    is_expert_group,
    lay_buffers,
    members_of,
)
from ckpt_tool.formats.megatron.stages import Stages

UNFIT, OLD = "E2004", "E0303"


class Owned(NamedTuple):
    """A rank's trainable parameters, their slots, and what decides their order."""

    params: Sequence[Param]
    slots: Sequence[Sequence[Slot]]
    facts: Facts
    degrees: Mapping[str, int]
    stages: Stages
    pp: int
    path: str  # of the model file, for messages


def _parts(owned: Owned, optimizers: Sequence[Any]) -> list[list[int]]:
    """Numbers of the parameters of each chained optimizer."""
    every = list(range(len(owned.params)))
    if len(optimizers) == 1:
        return [every]
    expert = [any(map(is_expert_group, groups_of(one))) for one in optimizers]
    if len(optimizers) != 2 or expert[0]:
        raise InputError(
            f"{len(optimizers)} chained optimizers, want one, or [dense, experts]",
            code=OLD,
            path=owned.path,
            hint="an optimizer a model chunk (--overlap-param-gather-with-optimizer-step) or a layer-wise one "
            "is not read:"
            " take the model with --state model, or save as torch_dist",
        )
    return [[i for i in every if owned.params[i].expert == part] for part in (False, True)]


# -- numbered ----------------------------------------------------------------------------------------------------------


def read_numbered(
    owned: Owned, leaves: Iterable[tuple[TreePath, StoredArray]], optimizer: Any, out: Gathering
) -> list[TreePath]:
    """The arrays of a non-distributed optimizer (paths below `optimizer`), put into `out`. Returns the paths of leaves
    that are none of its own. Raises InconsistentCheckpoint E2004 where they do not fit the model."""
    optimizers = chained(optimizer)
    listed = len(optimizers) > 1 or isinstance(optimizer, list)
    parts = _parts(owned, optimizers)
    numbers: list[list[int]] = []
    masters: list[list[list[int]]] = []
    for one, which in zip(optimizers, parts, strict=True):
        members = _members(owned, groups_of(one), which)
        numbers.append([i for group in members for i in group])
        masters.append([[i for i in group if owned.params[i].dtype.bits == 16] for group in members])
    foreign: list[TreePath] = []
    for path, array in leaves:
        part, inner = (path[0], path[1:]) if listed else (0, path)
        if not isinstance(part, int) or part >= len(parts):
            foreign.append(path)
            continue
        inner = inner[1:] if inner[:2] == ("optimizer", "state") else inner
        match inner:
            case ("state", int(number), str(state)) if number < len(numbers[part]):
                _put(owned, out, numbers[part][number], state, array)
            case ("fp32_from_fp16_params", int(group), int(at)) if group < len(masters[part]) and at < len(
                masters[part][group]
            ):
                _put(owned, out, masters[part][group][at], MASTER, array)
            case ("state", *_) | ("fp32_from_fp16_params", *_):
                raise _unfit(owned, f"optimizer entry {'.'.join(map(str, path))} has no parameter in the model")
            case _:
                foreign.append(path)
    return foreign


def _members(owned: Owned, groups: Sequence[Mapping[str, Any]], which: Sequence[int]) -> list[list[int]]:
    members = members_of(groups, owned.params, which, owned.facts)
    counts = [len(group["params"]) for group in groups if isinstance(group.get("params"), list)]
    if members is None or len(counts) != len(groups) or counts != [len(group) for group in members]:
        have = [len(group) for group in members] if members is not None else []
        raise _unfit(owned, f"the optimizer's groups hold {counts} parameters, the model's {have}")
    return members


def _put(owned: Owned, out: Gathering, number: int, state: str, array: StoredArray) -> None:
    param, slots = owned.params[number], owned.slots[number]
    if array.shape == param.shape:
        out.add(state, slots, array)
    elif array.numel == 1 and len(array.shape) < 2:
        for name in dict.fromkeys(slot.name for slot in slots):
            out.plain(TensorKey(name, state), array)
    else:
        raise InconsistentCheckpoint(
            f"{state} of shape {list(array.shape)} for a parameter of shape {list(param.shape)}",
            code=UNFIT,
            path=array.path,
            key=f"{slots[0].name} [{state}]",
            hint="the optimizer is of another model than the weights",
        )


def _unfit(owned: Owned, message: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(
        message,
        code=UNFIT,
        path=owned.path,
        hint="frozen parameters, another model, or a version of Megatron that orders them otherwise: --state "
        "model leaves the"
        " optimizer behind; or save once as torch_dist with --dist-ckpt-optim-fully-reshardable",
    )


# -- flat --------------------------------------------------------------------------------------------------------------


def read_flat(
    owned: Owned, leaves: Iterable[tuple[TreePath, StoredArray]], optimizer: Any, out: Gathering
) -> list[bool]:
    """The arrays of `distrib_optim.pt`, put into `out`. Which of the chained optimizers the file holds. Raises
    InconsistentCheckpoint E2004 when a buffer is not as long as the model makes it, InputError E0303 for the form
    before February 2024."""
    optimizers = chained(optimizer)
    parts = _parts(owned, optimizers)
    arrays: dict[tuple[int, int], dict[str, StoredArray]] = {}
    for path, array in leaves:
        steps = path[1:] if path[0] == "value" else (0, *path)
        match steps:
            case (int(part), int(number), str(), str(state)):
                arrays.setdefault((part, number), {})[state] = array
            case _:
                raise InputError(
                    f"an optimizer file of another form: {'.'.join(map(str, path))[:120]}",
                    code=OLD,
                    path=array.path,
                    hint="before 2024-02-13 Megatron wrote buckets apart: load it once with a Megatron of that "
                    "time to 0.16"
                    " (--ckpt-convert-update-legacy-dist-opt-format)",
                )
    held = [False] * len(optimizers)
    for part in range(len(optimizers)):
        own = {number: states for (where, number), states in arrays.items() if where == part}
        if not own:
            continue
        held[part] = True
        for number, buffer in enumerate(_buffers(owned, parts[part], own, experts=part == 1)):
            _spread(owned, buffer, own[number], out)
    return held


def _buffers(
    owned: Owned, which: Sequence[int], stored: Mapping[int, Mapping[str, StoredArray]], *, experts: bool
) -> list[Buffer]:
    """The buffers as they lie, tried with what the arguments say about buckets, then with one bucket each."""
    said = bucketing_of(owned.facts, experts=experts, degrees=owned.degrees)
    have = [[array.numel for array in stored[number].values()] for number in sorted(stored)]
    tried: list[int] = []
    for bucketing in dict.fromkeys((said, said._replace(size=None), Bucketing(None, 1, False, False))):
        buffers = lay_buffers(owned.params, owned.facts, owned.stages, owned.pp, bucketing, which, DTYPES["F32"])
        made = [buffer.flat.unpadded for buffer in buffers]
        tried = tried or made
        if sorted(stored) == list(range(len(buffers))) and all(
            set(sizes) == {size} for sizes, size in zip(have, made, strict=True)
        ):
            return buffers
    raise _unfit(
        owned,
        f"flat buffers of {[size for sizes in have for size in dict.fromkeys(sizes)]} elements, the model "
        f"makes {tried}",
    )


def _spread(owned: Owned, buffer: Buffer, states: Mapping[str, StoredArray], out: Gathering) -> None:
    for state, array in states.items():
        for at, member in enumerate(buffer.members):
            view = array.view(buffer.flat.coalesced(at), owned.params[member].shape)
            out.add(MASTER if state == "param" else state, owned.slots[member], view)
