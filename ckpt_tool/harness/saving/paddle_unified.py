"""`paddle-unified`: PaddleFormers' unified checkpoint: whole tensors, each written by the rank of its stage and
experts.

    model-00001-of-00004.safetensors              bf16 weights, "format": "np" (Paddle's layout)
    master_weights-00001-of-00004.safetensors     fp32 masters; of fp32 weights a copy
    optimizer-00001-of-00004.safetensors          NAME/moment1_0, /moment2_0, /beta1_pow_acc_0, /beta2_pow_acc_0
    *.safetensors.index.json, scheduler.pdparams, config.json; ckpt_ema-* (ours: Paddle has no place for averages)

The one idea: tensor ranks are merged before writing, so what is left of a layout is who writes what. Cost: one pass.
Source: PaddleFormers 1.2.0 `trainer/unified_checkpoint/`. What it does not do: quantised moments, LoRA.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ckpt_tool.harness.saving.fault_point import fault_point
from ckpt_tool.harness.saving.paddle_model import PaddleWeight, powers, scheduler, select_stateful, value, weights
from ckpt_tool.harness.saving.whole import HARNESS, WholeState

_SUFFIXES = {"exp_avg": "moment1_0", "exp_avg_sq": "moment2_0"}


def write(whole: WholeState, folder: Path) -> None:
    """The files of every writing rank, then the indexes."""
    parts: list[list[PaddleWeight]] = [[] for _ in range(whole.layout.pp * whole.layout.ep)]
    for weight in weights(whole):
        parts[_writer(weight, whole)].append(weight)
    parts = [part for part in parts if part]
    maps: dict[str, dict[str, str]] = {stem: {} for stem in ("model", "master_weights", "optimizer", "ckpt_ema")}
    sizes = dict.fromkeys(maps, 0)
    for number, part in enumerate(parts):
        if number == len(parts) // 2:
            fault_point("files")
        for stem, tensors in _files(part, whole).items():
            name = f"{stem}-{number + 1:05d}-of-{len(parts):05d}.safetensors"
            save_file(tensors, folder / name, {"format": "np"})
            maps[stem] |= dict.fromkeys(tensors, name)
            sizes[stem] += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    (folder / "scheduler.pdparams").write_bytes(scheduler(whole, HARNESS))
    (folder / "config.json").write_text(json.dumps(whole.config, indent=2))
    fault_point("index")
    for stem, weight_map in maps.items():
        index: dict[str, object] = {"metadata": {"total_size": sizes[stem]}, "weight_map": weight_map}
        if stem == "optimizer":
            index["master_weights"] = True
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=4))


def _writer(weight: PaddleWeight, whole: WholeState) -> int:
    """Which file: of the first stage that holds it, and the expert rank of an expert."""
    for rank in whole.ranks:
        if any(piece.name == weight.module.parts[0] for piece in rank.pieces):
            experts = rank.at.ep if weight.module.expert is not None else 0
            return rank.at.pp * int(whole.layout.ep) + experts
    return 0


def _files(part: list[PaddleWeight], whole: WholeState) -> dict[str, dict[str, torch.Tensor]]:
    optimizer: dict[str, torch.Tensor] = {}
    stateful = select_stateful(part, whole)
    for weight in stateful:
        optimizer |= {
            f"{weight.name}/{suffix}": value(weight, state, whole).clone() for state, suffix in _SUFFIXES.items()
        }
        optimizer |= {f"{weight.name}/{suffix}": power for suffix, power in powers(whole)}
    states = {"model": {weight.name: value(weight, "model", whole).clone() for weight in part}, "optimizer": optimizer}
    for stem, state in (("master_weights", "master"), ("ckpt_ema", "ema")):
        states[stem] = {weight.name: value(weight, state, whole).clone() for weight in stateful}
    return states
