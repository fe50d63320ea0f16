"""`dcp`: the nested state dict of a plain torch job, each rank's boxes as it holds them.

    {"model": {NAME: ...}, "optim": {"state": {NAME: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [...]},
     (of matrices that Muon steps: {"momentum_buffer"}, and a parameter group of their own)
     "master_weights": {NAME: ...}, "ema": {NAME: ...}, "harness": {"step": 7, ...}}

The one idea: the state that a job keeps in addition to torch's optimizer is part of the same state dict, and DCP saves
it all. Cost: as `torch_dcp`. What it does not do: DTensors. The boxes are handed over directly, a flat ZeRO shard as a
few boxes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ckpt_tool.harness.saving import torch_dcp
from ckpt_tool.harness.saving.torch_dcp import TensorBox
from ckpt_tool.harness.saving.whole import HARNESS, WholeState, adam_group, first_holders, muon_group

_ROOTS = {"model": ("model",), "master": ("master_weights",), "ema": ("ema",)}


def write(whole: WholeState, folder: Path) -> None:
    """The DCP folder and config.json."""
    paths: dict[str, tuple[Any, ...]] = {}
    parts: list[list[TensorBox]] = [[] for _ in whole.ranks]
    for number, (state, name), box, values in first_holders(whole):
        path = (*_ROOTS[state], name) if state in _ROOTS else ("optim", "state", name, state)
        key = ".".join(path)
        paths[key] = path
        parts[number].append(TensorBox(key, box.offset, values, tuple(whole.tensors[state, name].shape)))
    step = torch.tensor(float(whole.scalars["step"]))
    for name in whole.state("exp_avg"):
        path = ("optim", "state", name, "step")
        paths[".".join(path)] = path
        parts[0].append(TensorBox(".".join(path), (), step, ()))
    objects = _objects(whole, paths)
    ranks = [torch_dcp.DcpRank(rank_parts, objects if number == 0 else {}) for number, rank_parts in enumerate(parts)]
    torch_dcp.write(ranks, folder, paths)
    (folder / "config.json").write_text(json.dumps(whole.config, indent=2))


def _objects(whole: WholeState, paths: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Plain values, flattened as torch flattens them: dicts and lists of dicts by their keys, other lists whole."""
    objects: dict[str, Any] = {}
    groups = [{"params": list(whole.state("exp_avg")), **adam_group(whole.scalars)}]
    if whole.muon is not None:
        groups.insert(0, {"params": list(whole.state("momentum_buffer")), **muon_group(whole.scalars)})

    def put(path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                put((*path, key), inner)
            return
        key = ".".join(map(str, path))
        paths[key], objects[key] = path, value

    for number, group in enumerate(groups):
        put(("optim", "param_groups", number), group)
    put((HARNESS,), dict(whole.scalars))
    return objects
