"""`megatron-dist`: a torch_dist folder with Megatron's keys, by torch's own distributed checkpointing.

    latest_checkpointed_iteration.txt, iter_0000007/.metadata, __R_0.distcp, common.pt, metadata.json

The one idea: Megatron's planner hands boxes to torch's writer; so does this one. Layers differ (a dense first one), so
each has keys of its own; a layer's experts are stacked; gate and up are two boxes; norms are named as a part of the
linear that follows. The optimizer is `fully_reshardable`: complete tensors with the shapes of the model, written by the
first data rank of each box.

Where Muon steps the matrices, their masters are `fp32_param` (its optimizer is no distributed one), and the common
state is the chain: Muon's groups, then Adam's.

EMA, for which Megatron has no place, is under `optimizer.state.ema.KEY`, which it does not look at.
Source: NVIDIA/Megatron-LM core 0.16.1 `dist_checkpointing/`, `core/transformer/transformer_block.py`
(`sharded_state_dict`, `non_homogeneous_layers`), local layer spec (`sharded_state_dict_keys_map`). What it does not do:
flat optimizer buckets (`dp_reshardable`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from ckpt_tool.harness.pieces import MUON_STATES, STATES
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

SHARDING = "fully_reshardable"
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_LINEAR = re.compile(r"(.*\.linear_(?:proj|qkv|fc1|fc2))\.weight")


def write(whole: WholeState, folder: Path) -> None:
    """The folder with its pointer file and config.json."""
    iteration = int(whole.scalars["step"])
    inner = folder / f"iter_{iteration:07d}"
    inner.mkdir()
    parts: list[list[TensorBox]] = [[] for _ in whole.ranks]
    objects: list[dict[str, Any]] = [{} for _ in whole.ranks]

    for module in modules(whole.config):
        key, position, count = _key(module, whole)
        muon = whole.muon is not None and module.is_matrix
        states = {
            "model": "",
            "master": "optimizer.state.param." if whole.layout.zero and not muon else "optimizer.state.fp32_param.",
            **{state: f"optimizer.state.{state}." for state in (MUON_STATES if muon else STATES)[2:]},
        }
        tensors = {state: join_module(module, state, whole) for state in states}
        written_keys = set()
        for number, rank in enumerate(whole.ranks):
            for box in share_of(module, rank):
                if box in written_keys:
                    continue
                written_keys.add(box)
                for state, tensor in tensors.items():
                    values = tensor[region(box)]
                    offset = box.offset
                    shape = tuple(tensor.shape)
                    if position is not None:
                        values = values[None]
                        offset = (position, *offset)
                        shape = (count, *shape)
                    parts[number].append(TensorBox(states[state] + key, offset, values.contiguous(), shape))
                if linear := _LINEAR.fullmatch(key):
                    objects[number][f"{linear[1]}._extra_state/shard_{position or 0}_{count}"] = [None]

    ranks = [
        torch_dcp.DcpRank(rank_parts, rank_objects) for rank_parts, rank_objects in zip(parts, objects, strict=True)
    ]
    torch.save(_common(whole), inner / "common.pt")
    torch_dcp.write(ranks, inner)
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (inner / "metadata.json").write_text(
        json.dumps(backends | {"common_backend": "torch", "common_backend_version": 1})
    )
    (folder / "config.json").write_text(json.dumps(whole.config, indent=2))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def _key(module: MegatronWeight, whole: WholeState) -> tuple[str, int | None, int]:
    """The key, and of stacked experts the position and how many there are."""
    name = module.name
    for local, stored in _NORMS.items():
        name = name.replace(local, stored)
    if module.expert is None:
        return name, None, 1
    stacked = name.replace(f"local_experts.{module.expert}.", "experts.")
    return stacked, module.expert, int(whole.config["moe_num_experts"])


def _common(whole: WholeState) -> dict[str, Any]:
    """The common state, which is the same on all ranks. A distributed optimizer records how its states are sharded."""
    lies = {"param_state_sharding_type": SHARDING} if whole.layout.zero else {}
    dense = {"optimizer": {"param_groups": [_group(whole, decays, expert=False) for decays in (True, False)]}} | lies
    experts = {"optimizer": {"param_groups": [_group(whole, True, expert=True)]}} | lies
    parallel = whole.layout.ep > 1
    chain: Any = {0: dense, 1: experts} if parallel else dense
    if whole.muon is not None:
        kinds = (False, True) if parallel else (False,)
        groups = [hyperparameters(whole.scalars, decays=True, expert=expert, muon=True) for expert in kinds]
        chain = {0: {"optimizer": {"param_groups": groups}}, 1: dense}
    return {
        "args": namespace(whole),
        "checkpoint_version": 3.0,
        "iteration": int(whole.scalars["step"]),
        "num_floating_point_operations_so_far": 0,
        "optimizer": chain,
        "opt_param_scheduler": scheduler(whole),
        "content_metadata": {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "distrib_optim_sharding_type": SHARDING,
            "distrib_optim_fully_reshardable_mem_efficient": False,
        },
        HARNESS: dict(whole.scalars),
    }


def _group(whole: WholeState, decays: bool, *, expert: bool) -> dict[str, Any]:
    return hyperparameters(whole.scalars, decays=decays, expert=expert)
