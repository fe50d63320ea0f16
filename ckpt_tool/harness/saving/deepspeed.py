"""`deepspeed`: the files of a ZeRO 1, 2 or 3 engine: a module file, and an optimizer file a data rank.

    latest, global_step7/mp_rank_00_model_states.pt                     16-bit module, param_shapes, client state
          global_step7/bf16_zero_pp_rank_R_mp_rank_00_optim_states.pt  rank R's part of the flat fp32 groups
    at 3  global_step7/zero_pp_rank_R_mp_rank_00_model_states.pt
          the module has no values: they are the masters', rounded

The one idea: matrices and norms are two parameter groups (weight decay or none), each laid end to end. ZeRO 1 and 2 pad
the whole and cut it evenly, ZeRO 3 cuts every parameter. EMA and the job's scalars ride in the client state.
DeepSpeed's own classes (its loss scaler, an enum, a pair of numbers) are named in the pickles, so they are made here
under their names.

Source: DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py`, `stage3.py`, `runtime/engine.py`, and files that it wrote.
What it does not do: pipelines, DeepSpeed's own experts (here experts are parameters like others), ZeRO 0.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.harness.saving.fault_point import fault_point
from ckpt_tool.harness.saving.whole import HARNESS, WholeState, adam_group

_VERSION = "0.19.8"
_STATES = ("exp_avg", "exp_avg_sq")


class LossScaler:
    """A static scale, as bf16 has it."""

    def __init__(self) -> None:
        self.cur_scale = 1.0
        self.dynamic = False


class ZeroStageEnum(int, Enum):
    """DeepSpeed's word for the stage."""

    disabled, optimizer_states, gradients, weights = range(4)


class fragment_address:
    """DeepSpeed's name for a parameter's part of a rank's flat tensor, in elements."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel = numel
        self.start = start


_CLASSES: Mapping[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.utils.tensor_fragment": fragment_address,
}


def write(whole: WholeState, folder: Path) -> None:
    """`latest`, the step's folder, config.json."""
    stage = whole.layout.zero or 1  # one rank without ZeRO is ZeRO 1 over one rank
    tag = f"global_step{int(whole.scalars['step'])}"
    inner = folder / tag
    inner.mkdir()
    matrices = [name for name, tensor in whole.state("master").items() if tensor.ndim > 1]
    vectors = [name for name, tensor in whole.state("master").items() if tensor.ndim < 2]
    groups = [group for group in (matrices, vectors) if group]
    with _rename_classes():
        for rank in range(whole.layout.dp):
            if rank == whole.layout.dp // 2:
                fault_point("files")
            states = _optimizer3(whole, groups, rank) if stage == 3 else _optimizer12(whole, groups, rank, stage)
            file = {"optimizer_state_dict": states, "ds_config": _config(whole, stage), "ds_version": _VERSION}
            torch.save(file, inner / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
            if stage == 3:
                torch.save(_module(whole, groups, stage), inner / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        if stage < 3:
            torch.save(_module(whole, groups, stage), inner / "mp_rank_00_model_states.pt")
    (folder / "config.json").write_text(json.dumps(whole.config, indent=2))
    fault_point("index")
    (folder / "latest").write_text(tag)


@contextmanager
def _rename_classes() -> Iterator[None]:
    """The classes under DeepSpeed's names, for as long as files are written."""
    parts = [name.split(".") for name in _CLASSES]
    names = {".".join(words[:count]) for words in parts for count in range(1, len(words) + 1)}
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: ModuleType(name) for name in names})
    for name, kind in _CLASSES.items():
        setattr(sys.modules[name], kind.__name__, kind)
        kind.__module__ = name
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _flat(whole: WholeState, state: str, names: Sequence[str]) -> torch.Tensor:
    return torch.cat([whole.tensors[state, name].reshape(-1) for name in names])


def _optimizer12(whole: WholeState, groups: Sequence[Sequence[str]], rank: int, stage: int) -> dict[str, Any]:
    """Rank's part of each group: the line, padded to twice the ranks, cut evenly; masters without the padding."""
    ranks = whole.layout.dp
    masters = []
    moments = {}
    paddings = []
    mappings = []

    for number, names in enumerate(groups):
        total = sum(whole.tensors["master", name].numel() for name in names)
        size = ceil_div(total, 2 * ranks) * 2
        low = rank * size
        high = min((rank + 1) * size, total)
        padding = size - max(high - low, 0)
        masters.append(_flat(whole, "master", names)[low:high].clone())
        moments[number] = {"step": torch.tensor(float(whole.scalars["step"]))} | {
            state: torch.cat([_flat(whole, state, names)[low:high], torch.zeros(padding)]) for state in _STATES
        }
        paddings.append(padding)
        mappings.append(_fragments(whole, names, low, rank * size + size))

    return {
        "loss_scaler": LossScaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": _clip(whole),
        "base_optimizer_state": {"state": moments, "param_groups": _param_groups(whole, len(groups))},
        "single_partition_of_fp32_groups": masters,
        "zero_stage": ZeroStageEnum(stage),
        "group_paddings": paddings,
        "param_alignment_paddings": [[0] * len(names) for names in groups],
        "partition_count": [ranks] * len(groups),
        "ds_version": _VERSION,
        "param_slice_mappings": mappings,
    }


def _fragments(whole: WholeState, names: Sequence[str], low: int, high: int) -> OrderedDict[str, fragment_address]:
    fragments: OrderedDict[str, fragment_address] = OrderedDict()
    position = 0
    for name in names:
        numel = whole.tensors["master", name].numel()
        start = max(position, low)
        stop = min(position + numel, high)
        if start < stop:
            fragments[name] = fragment_address(stop - start, start - low)
        position += numel
    return fragments


def _optimizer3(whole: WholeState, groups: Sequence[Sequence[str]], rank: int) -> dict[str, Any]:
    """Rank's share of every parameter, zeros where there is less than a share."""
    ranks = whole.layout.dp

    def shares(state: str, names: Sequence[str]) -> torch.Tensor:
        parts = []
        for name in names:
            line = whole.tensors[state, name].reshape(-1)
            share_size = ceil_div(line.numel(), ranks)
            part = line[rank * share_size : (rank + 1) * share_size]
            parts += [part, torch.zeros(share_size - part.numel())]
        return torch.cat(parts)

    step = torch.tensor(float(whole.scalars["step"]))
    state: dict[int, dict[str, torch.Tensor]] = {}
    for number, names in enumerate(groups):
        state[number] = {"step": step}
        for moment in _STATES:
            state[number][moment] = shares(moment, names)
    return {
        "zero_stage": ZeroStageEnum(3),
        "loss_scaler": LossScaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": ranks,
        "optimizer_state_dict": {"state": state, "param_groups": _param_groups(whole, len(groups))},
        "fp32_flat_groups": [shares("master", names) for names in groups],
    }


def _param_groups(whole: WholeState, count: int) -> list[dict[str, Any]]:
    group = adam_group(whole.scalars)
    decays = [group["weight_decay"], 0.0]
    return [{**group, "weight_decay": decays[number], "params": [number]} for number in range(count)]


def _module(whole: WholeState, groups: Sequence[Sequence[str]], stage: int) -> dict[str, Any]:
    """The module file: DeepSpeed's members, then the client's."""
    shapes = []
    for names in groups:
        shapes.append(OrderedDict((name, whole.tensors["master", name].shape) for name in names))
    module = whole.state("model")
    if stage == 3:
        module = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in module.items()}

    steps = int(whole.scalars["step"])
    consumed = int(whole.scalars["consumed"])
    return {
        "module": OrderedDict(module),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": {} if stage == 3 else None,
        "shared_params": {},
        "frozen_param_fragments": {} if stage == 3 else None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": steps,
        "global_samples": consumed,
        "dp_world_size": whole.layout.dp,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _config(whole, stage),
        "ds_version": _VERSION,
        HARNESS: dict(whole.scalars),
        "ema": whole.state("ema"),
    }


def _config(whole: WholeState, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": _clip(whole),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }


def _clip(whole: WholeState) -> float:
    return float(whole.scalars["optimizer"]["clip"])
