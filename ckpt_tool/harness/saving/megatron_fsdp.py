"""`megatron-fsdp`: what a job with Megatron-FSDP saves (`fsdp_dtensor`), by torch's own distributed checkpointing.

    latest_checkpointed_iteration.txt, iter_0000007/.metadata, __R_0.distcp

The one idea: the model consists of the fp32 main weights. Every weight is stored under its name in the live modules,
with the prefixes of wrappers, gate and up separately; the data ranks that hold it store any number of complete rows
each. Hyperparameters are stored for each parameter, the step for each half of gate and up.

EMA, for which Megatron has no place, is stored as another state next to the moments, which Megatron does not request.
Source: NVIDIA/Megatron-LM core_v0.19.0 `training/checkpointing.py` (`preprocess_fsdp_dtensor_state_dict`),
`core/optimizer/distrib_optimizer.py` (`sharded_param_state_fsdp_dtensor`). What it does not do: pipeline stages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ckpt_tool.core.box import Box
from ckpt_tool.harness.saving import torch_dcp
from ckpt_tool.harness.saving.megatron_model import (
    MegatronWeight,
    hyperparameters,
    join_module,
    modules,
    namespace,
    scheduler,
    share_of,
)
from ckpt_tool.harness.saving.torch_dcp import TensorBox
from ckpt_tool.harness.saving.whole import HARNESS, WholeState, region

_WRAPPED = "module.module.module."
_STATES = ("exp_avg", "exp_avg_sq", "ema")
Keys = tuple[str, ...]


def write(whole: WholeState, folder: Path) -> None:
    """The folder with its pointer file and config.json."""
    iteration = int(whole.scalars["step"])
    inner = folder / f"iter_{iteration:07d}"
    inner.mkdir()
    parts: list[list[TensorBox]] = [[] for _ in whole.ranks]
    paths: dict[str, tuple[Any, ...]] = {}
    objects: dict[str, Any] = {}

    def put(path: Keys, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                put((*path, str(key)), item)
        else:
            paths[".".join(path)], objects[".".join(path)] = path, value

    for module in modules(whole.config):
        name = _WRAPPED + module.name
        step = torch.tensor(float(iteration))
        put(("optimizer", "param_to_group_meta", name), _group(module, whole))
        for part in ("_w", "_v") if module.kind == "gated" else ("",):
            path: Keys = ("optimizer", "state", name + part, "step")
            paths[".".join(path)] = path
            parts[0].append(TensorBox(".".join(path), (), step, ()))
        for state in ("master", *_STATES):
            tensor = join_module(module, state, whole)
            for number, box in _boxes(module, whole):
                part, offset, shape = _locate_stored(module, box, tuple(tensor.shape))
                path = ("model", f"module.{module.name}{part}")
                path = path if state == "master" else ("optimizer", "state", name + part, state)
                paths[".".join(path)] = path
                parts[number].append(TensorBox(".".join(path), offset, tensor[region(box)].float().contiguous(), shape))
    args = namespace(whole)
    args.ckpt_format = "fsdp_dtensor"
    args.use_megatron_fsdp = True
    common = {"checkpoint_version": 3.0, "iteration": iteration, "opt_param_scheduler": scheduler(whole)}
    for key, value in {"args": args, **common, HARNESS: dict(whole.scalars)}.items():
        put((key,), value)
    ranks = [torch_dcp.DcpRank(rank_parts, objects if number == 0 else {}) for number, rank_parts in enumerate(parts)]
    torch_dcp.write(ranks, inner, paths)
    (folder / "config.json").write_text(json.dumps(whole.config, indent=2))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def _group(module: MegatronWeight, whole: WholeState) -> dict[str, Any]:
    decays = not module.name.endswith("norm.weight")
    return hyperparameters(whole.scalars, decays=decays, expert=False)


def _boxes(module: MegatronWeight, whole: WholeState) -> Iterator[tuple[int, Box]]:
    """(rank, box of the joined weight): what several ranks share is cut by whole rows between them, unevenly."""
    holders: dict[Box, list[int]] = {}
    for number, rank in enumerate(whole.ranks):
        for box in share_of(module, rank):
            holders.setdefault(box, []).append(number)
    for box, ranks in holders.items():
        rows = box.shape[0]
        start = 0
        for place, number in enumerate(ranks):
            end = rows if place == len(ranks) - 1 else min(rows, -(-rows * (place + 1) // len(ranks)) + place % 2)
            if end > start:
                yield number, Box((box.offset[0] + start, *box.offset[1:]), (end - start, *box.shape[1:]))
            start = end


def _locate_stored(
    module: MegatronWeight, box: Box, shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """(end of the key, where the box begins in what is stored under it, that one's shape)."""
    if module.kind != "gated":
        return "", box.offset, shape
    half = shape[0] // 2
    up = box.offset[0] >= half
    return "_v" if up else "_w", (box.offset[0] - half * up, *box.offset[1:]), (half, *shape[1:])
