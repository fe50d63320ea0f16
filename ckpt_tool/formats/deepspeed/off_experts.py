"""Experts without ZeRO: every expert rank saves its own optimizer, in torch's numbers, of the dense parameters and its
experts.

    expp_rank_1_mp_rank_00_optim_states.pt
          {"optimizer": {"state": {0: ..., 11: ...}, "param_groups": [{...}, {"moe": True, ...}]}}
    ->  embed.weight [exp_avg] (a copy of rank 0's), ...deepspeed_experts.2.w1.weight [exp_avg], ...

The one idea: a group is dense or of experts (`moe: True`), and each kind is named by itself: dense numbers follow the
module, experts' numbers follow the rank's experts layer by layer, expert by expert. The dense states of the ranks are
copies and get compared. Source: DeepSpeed 0.19.8 `runtime/engine.py` (`_save_moe_checkpoint`), `moe/utils.py`. Cost: as
naming.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.core.box import whole
from ckpt_tool.core.tensor import MASTER, Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, InputError
from ckpt_tool.formats.deepspeed.files import expp_name
from ckpt_tool.formats.deepspeed.moe import counts, expert_name_of
from ckpt_tool.formats.deepspeed.off import WRAPPER, Off, part_of
from ckpt_tool.formats.deepspeed.rank import DISAGREE, REFUSED, ModuleFile
from ckpt_tool.formats.state_dict.optimizer_ids import Candidate, align

_SIZE = re.compile(r"ep_size_(\d{1,6})")


def optimizer_of_experts(
    files: Mapping[int, ModuleFile], dense: Mapping[str, StoredArray], experts: Mapping[str, StoredArray], shown: str
) -> Off:
    """The optimizers of all expert ranks. files: by expert rank. experts: global names in the order of layers, experts
    and parts. Raises Incomplete E0302, InconsistentCheckpoint E0359, InputError E0356 where the numbers can't be
    named."""
    parts = {rank: part_of(file) for rank, file in sorted(files.items())}
    said = [int(m[1]) for part in parts.values() for g in part.groups if (m := _SIZE.fullmatch(str(g.get("name"))))]
    ep = max([max(files) + 1, *said])
    layers = counts(experts)
    lost = [expp_name(rank) for rank in range(ep) if rank not in files]
    if lost or any(count % ep for count in layers.values()):
        raise Incomplete(
            f"of {ep} expert ranks {len(lost)} have no optimizer: {', '.join(lost[:8])}"
            if lost
            else f"{ep} expert ranks have an optimizer, for {sorted(set(layers.values()))} experts",
            code="E0302",
            path=shown,
            hint="every expert rank writes its own: fetch all expp_rank_* files",
            faults=lost[8:100],
        )
    chunks: dict[TensorKey, list[StoredArray]] = {}
    names: list[list[str]] = []
    options: list[dict[str, Any]] = []
    wrapper: dict[str, Any] = {}
    for rank, file in sorted(files.items()):
        part = parts[rank]
        wrapper = wrapper or part.wrapper
        mine = [name for name in experts if _rank_of(name, layers, ep) == rank]
        named = _names(part.groups, part.shapes(), dense, {name: experts[name] for name in mine}, file.path)
        if not options:
            options = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in part.groups]
            names = [[] for _ in options]
        if len(options) != len(part.groups):
            raise InconsistentCheckpoint(
                f"{len(part.groups)} parameter groups, but {len(options)} in expert rank 0's",
                code=DISAGREE,
                path=file.path,
                hint="files of two runs lie together",
            )
        for entry in part.entries:
            chunks.setdefault(TensorKey(named[entry.number], entry.state), []).append(entry.array)
        for number, group in enumerate(part.groups):
            have = set(names[number])
            names[number] += [named[n] for n in group["params"] if named[n] not in have]
    tensors = {}
    for key in sorted(chunks, key=lambda key: key.state != MASTER):
        first, *others = chunks[key]
        if any(other.shape != first.shape for other in others):
            raise InconsistentCheckpoint(
                f"{key.state} has several shapes on the expert ranks",
                code=DISAGREE,
                path=shown,
                key=key.name,
                hint="files of two runs lie together",
            )
        box = whole(first.shape)
        copies = [Chunk(box, array, box, number) for number, array in enumerate((first, *others))]
        tensors[key] = LogicalTensor(key, first.shape, first.dtype, tuple(copies))
    extras: dict[str, Any] = {"param_groups": [{**o, "params": n} for o, n in zip(options, names, strict=True)]}
    if wrapper or any(key.state == MASTER for key in tensors):
        extras[WRAPPER] = wrapper
    return Off(tensors, extras, [], [])


def _rank_of(name: str, layers: Mapping[str, int], ep: int) -> int:
    found = expert_name_of(name)
    return -1 if found is None else found.number // (layers[found.layer] // ep)


def _names(
    groups: Sequence[Mapping[str, Any]],
    shapes: Mapping[int, Mapping[str, tuple[int, ...]]],
    dense: Mapping[str, StoredArray],
    experts: Mapping[str, StoredArray],
    path: str,
) -> dict[int, str]:
    """Number -> name of one rank's optimizer."""
    out: dict[int, str] = {}
    for moe, arrays in ((False, dense), (True, experts)):
        mine = [group for group in groups if bool(group.get("moe")) is moe]
        numbers = {n for group in mine for n in group["params"]}
        here = {n: states for n, states in shapes.items() if n in numbers}
        candidates = [Candidate(name, a.shape, (a.path, a.offset, a.shape)) for name, a in arrays.items()]
        found = align(mine, here, candidates) if numbers else None
        if found is not None and not found.names:
            raise InputError(
                f"the optimizer of an expert rank can't be given names: {found.why}",
                code=REFUSED,
                path=path,
                hint="resume it once with ZeRO 1 and save it",
            )
        out |= found.names if found is not None else {}
    return out
