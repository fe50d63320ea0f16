"""`megatron`: Megatron's checkpoints before torch_dist: a folder a tensor, pipeline and expert rank, each with its own
pickles.

    latest_checkpointed_iteration.txt
    iter_0000007/mp_rank_01_000_001/model_optim_rng.pt
          args, model (model0, model1 of virtual stages), optimizer's groups
                                    distrib_optim.pt       flat fp32 buffers, with the distributed optimizer (ZeRO 1)

The one idea: local names (layers from 0 in each chunk, experts from 0 in each rank), and an optimizer without names:
its order is the model's. Flat buffers are filled backwards, every parameter at a multiple of 64 elements; a tied
embedding that two stages share has a bucket of its own. Parallel experts have an optimizer of their own: then all of it
is a list of two.

Where Muon steps the matrices, the chain is Muon's optimizer, then Adam's for the rest, neither a distributed one.

EMA is under a key of ours, `ckpt`, which Megatron does not look at (the tool's `systems.megatron.legacy` says its
form). Source: NVIDIA/Megatron-LM core 0.16.1 `training/checkpointing.py`, `core/optimizer/distrib_optimizer.py`,
`core/distributed/param_and_grad_buffer.py`, and files that it wrote. What it does not do: RNG states (a harness job has
a seed and a step instead), buckets of overlapped reduction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ckpt_tool.harness.pieces import RankState
from ckpt_tool.harness.saving.fault_point import fault_point
from ckpt_tool.harness.saving.megatron_model import (
    MegatronWeight,
    hyperparameters,
    join_module,
    modules,
    namespace,
    scheduler,
    share_of,
)
from ckpt_tool.harness.saving.whole import HARNESS, WholeState, region

_ALIGNMENT = 64  # elements
_FLAT = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_LINEAR = ("linear_proj.weight", "linear_qkv.weight", "linear_fc1.weight", "linear_fc2.weight")


class Local(NamedTuple):
    """A parameter of a rank."""

    name: str  # the rank's own
    chunk: int  # of the virtual pipeline
    module: MegatronWeight
    shared: bool = False  # a tied embedding on two stages


def write(whole: WholeState, folder: Path) -> None:
    """The iteration's folder, config.json and the pointer file."""
    iteration = int(whole.scalars["step"])
    layout = whole.layout
    args = namespace(whole)
    written = [rank for rank in whole.ranks if rank.at.dp < layout.ep]  # the first data rank of each set of experts
    for number, rank in enumerate(written):
        if number == len(written) // 2:
            fault_point("files")
        name = f"mp_rank_{rank.at.tp:02d}" + (f"_{rank.at.pp:03d}" if layout.pp > 1 else "")
        inner = folder / f"iter_{iteration:07d}" / (name + (f"_{rank.at.ep:03d}" if layout.ep > 1 else ""))
        inner.mkdir(parents=True)
        params = _locals(whole, rank)
        if layout.zero:
            torch.save(_build_distributed(whole, rank, params), inner / "distrib_optim.pt")
        common = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
        torch.save({**common, **_rank_file(whole, rank, params)}, inner / "model_optim_rng.pt")
    (folder / "config.json").write_text(json.dumps(whole.config, indent=2))
    fault_point("index")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


# -- the model ---------------------------------------------------------------------------------------------------------


def _locals(whole: WholeState, rank: RankState) -> list[Local]:
    """The rank's parameters in the order of registration, chunk by chunk."""
    locals_found: list[Local] = []
    last_chunk = len(rank.at.chunks) - 1
    experts = int(whole.config["moe_num_experts"]) // int(whole.layout.ep)
    tied = bool(whole.config["tie_word_embeddings"]) and whole.layout.pp > 1
    for chunk, layers in enumerate(rank.at.chunks):
        for module in modules(whole.config):
            if module.layer is None:
                is_first = module.name.startswith("embedding.")
                is_here = (rank.at.pp, chunk) == ((0, 0) if is_first else (whole.layout.pp - 1, last_chunk))
                if is_here:
                    locals_found.append(Local(module.name, chunk, module, is_first and tied))
            elif module.layer in layers and (module.expert is None or module.expert // experts == rank.at.ep):
                name = module.name.replace(f"layers.{module.layer}.", f"layers.{layers.index(module.layer)}.")
                if module.expert is not None:
                    name = name.replace(f"experts.{module.expert}.", f"experts.{module.expert % experts}.")
                locals_found.append(Local(name, chunk, module))
    if tied and rank.at.pp == whole.layout.pp - 1:
        locals_found.append(Local("output_layer.weight", last_chunk, modules(whole.config)[0], True))
    return locals_found


def _value(whole: WholeState, rank: RankState, param: Local, state: str) -> torch.Tensor:
    """The rank's part of a state: its boxes laid end to end."""
    tensor = join_module(param.module, state, whole)
    return torch.cat([tensor[region(box)] for box in share_of(param.module, rank)]).contiguous()


def _rank_file(whole: WholeState, rank: RankState, params: Sequence[Local]) -> dict[str, Any]:
    chunks = range(len(rank.at.chunks))
    models: dict[str, dict[str, Any]] = {f"model{chunk}" if len(chunks) > 1 else "model": {} for chunk in chunks}
    averages: dict[int, dict[str, Any]] = {chunk: {"ema": {}} for chunk in chunks}
    for param, model in ((param, list(models.values())[param.chunk]) for param in params):
        model[param.name] = _value(whole, rank, param, "model")
        if param.name.endswith(_LINEAR):
            model[param.name.removesuffix("weight") + "_extra_state"] = None
        averages[param.chunk]["ema"][param.name] = _value(whole, rank, param, "ema")
    return {
        **models,
        "optimizer": _optimizer(whole, rank, params),
        "opt_param_scheduler": scheduler(whole),
        "num_floating_point_operations_so_far": 0,
        HARNESS: dict(whole.scalars),
        "ckpt": {"states": averages},
    }


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _parts(whole: WholeState, params: Sequence[Local]) -> list[list[Local]]:
    """The parameters of each optimizer: all, or dense and expert ones where experts are parallel; Muon's, then the
    rest."""
    if whole.muon is not None:
        matrices = [param for param in params if param.module.is_matrix]
        others = [param for param in params if not param.module.is_matrix]
        return [matrices, others]
    if whole.layout.ep == 1:
        return [list(params)]
    dense = [param for param in params if param.module.expert is None]
    experts = [param for param in params if param.module.expert is not None]
    return [dense, experts]


def _optimizer(whole: WholeState, rank: RankState, params: Sequence[Local]) -> Any:
    """What `model_optim_rng.pt` says of it: groups alone with the distributed optimizer, else everything."""
    parts = _parts(whole, params)
    muon = whole.muon is not None
    optimizers = [
        _one(whole, rank, part, expert=number == 1 and not muon, muon=number == 0 and muon)
        for number, part in enumerate(parts)
    ]
    return optimizers if len(optimizers) > 1 else optimizers[0]


def _one(whole: WholeState, rank: RankState, params: Sequence[Local], *, expert: bool, muon: bool) -> dict[str, Any]:
    decaying = [param for param in params if _decays(param)]
    others = [param for param in params if not _decays(param)]
    state: dict[int, Any] = {}
    described = []
    masters = []
    for decays, group in ((True, decaying), (False, others)):
        if not group:
            continue
        about = hyperparameters(whole.scalars, decays=decays, expert=expert, muon=muon)
        if not whole.layout.zero:  # torch's AdamW counts steps a parameter, Muon none
            about.pop("step", None)
            about["params"] = list(range(len(state), len(state) + len(group)))
        described.append(about)
        masters.append([_value(whole, rank, p, "master") for p in group if not _is_fp32(whole, p)])
        for param in group:
            state_names = ("momentum_buffer",) if muon else ("exp_avg", "exp_avg_sq")
            moments = {name: _value(whole, rank, param, name) for name in state_names}
            state[len(state)] = moments if muon else {"step": torch.tensor(float(whole.scalars["step"])), **moments}
    if whole.layout.zero:
        return {"optimizer": {"param_groups": described}}
    return {"optimizer": {"state": state, "param_groups": described}, "fp32_from_fp16_params": masters}


def _decays(param: Local) -> bool:
    return not param.name.endswith("layernorm.weight")


def _is_fp32(whole: WholeState, param: Local) -> bool:
    return whole.tensors["model", param.module.parts[0]].dtype == torch.float32


def _build_distributed(whole: WholeState, rank: RankState, params: Sequence[Local]) -> Any:
    """`distrib_optim.pt`: of each optimizer its buffers, None where another folder has the dense one."""
    optimizers: list[Any] = []
    for number, part in enumerate(_parts(whole, params)):
        is_own = number == 1 or rank.at.dp == 0
        optimizers.append(_buffers(whole, rank, part) if is_own else None)
    return optimizers if len(optimizers) > 1 else optimizers[0]


def _buffers(whole: WholeState, rank: RankState, params: Sequence[Local]) -> dict[Any, Any]:
    """Number of the buffer -> {(dtype, dtype of its gradients): the lines}; one a chunk and dtype."""
    buffers: dict[Any, Any] = {"buckets_coalesced": True}
    for chunk in range(len(rank.at.chunks)):
        by_dtype: dict[torch.dtype, list[Local]] = {}
        for param in params:
            if param.chunk == chunk:
                by_dtype.setdefault(torch.float32 if _is_fp32(whole, param) else torch.bfloat16, []).append(param)
        for dtype, members in by_dtype.items():
            lines = {stored: _line(whole, rank, members, state) for stored, state in _FLAT.items()}
            key = (dtype, torch.float32)
            buffers[len(buffers) - 1] = {key: {**lines, "numel_unpadded": lines["param"].numel()}}
    return buffers


def _line(whole: WholeState, rank: RankState, members: Sequence[Local], state: str) -> torch.Tensor:
    """The buffer of a state: buckets end to end, each without the padding at its end."""
    buckets: list[list[torch.Tensor]] = [[]]
    for param in reversed(members):
        values = _value(whole, rank, param, state).reshape(-1)
        filled = sum(part.numel() for part in buckets[-1])
        buckets[-1].append(
            torch.zeros(-filled % _ALIGNMENT)
        )  # before the bucket closes: the gap counts as the bucket's
        if param.shared and filled:
            buckets.append([])
        buckets[-1].append(values)
        if param.shared:
            buckets.append([])
    return torch.cat([part for bucket in buckets for part in bucket])
