"""DeepSpeed's file names: which rank of which kind a file is, and which files a whole checkpoint has.

    bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt   optimizer of data rank 2, model rank 0 ("pp_rank" is the DATA rank)
    mp_rank_00_model_states.pt                       module of model rank 0 (ZeRO 0-2)
    zero_pp_rank_2_mp_rank_00_model_states.pt        what data rank 2 says of the module (ZeRO 3)
    layer_03-model_states.pt                         a layer of a PipelineModule
    layer_1_expert_3_mp_rank_00_model_states.pt      expert 3 (global number) of MoE layer 1

Source: DeepSpeed 0.19.8 `runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name`),
`runtime/pipe/module.py` (`ckpt_layer_path`). The model rank of a pipeline is stage * tp + tp rank. Cost: the listing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_OPTIM = re.compile(r"((?:bf16_|fp16_)?)zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_?optim_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d{2,6})_model_states\.pt")
_MODEL3 = re.compile(r"zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_model_states\.pt")
_LAYER = re.compile(r"layer_(\d{2,6})-model_states\.pt")
_LAYER_TP = re.compile(r"layer_(\d{2,6})-model_(\d{2,6})-model_states\.pt")
_EXPERT = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_(\d{2,6})_model_states\.pt")
_EXPERT_OLD = re.compile(r"expert_(\d{1,6})_mp_rank_(\d{2,6})_model_states\.pt")
_EXPP = re.compile(r"expp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt")


@dataclass(slots=True)
class Files:
    """The files of one checkpoint by kind. optim, model3: (data rank, model rank) -> name. model: model rank -> name.
    layers: layer index -> name. expp: expert rank -> name of its optimizer without ZeRO. experts: (MoE layer, expert)
        -> name. refused: (name, why) of kinds that are not read.
    prefixes: of the optimizer files: `bf16_` or ""."""

    optim: dict[tuple[int, int], str] = field(default_factory=dict)
    model: dict[int, str] = field(default_factory=dict)
    model3: dict[tuple[int, int], str] = field(default_factory=dict)
    layers: dict[int, str] = field(default_factory=dict)
    experts: dict[tuple[int, int], str] = field(default_factory=dict)
    expp: dict[int, str] = field(default_factory=dict)
    refused: list[tuple[str, str]] = field(default_factory=list)
    prefixes: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.optim or self.model or self.model3)

    def all(self) -> tuple[str, ...]:
        """Every file, the models first."""
        numbered = [kind[number] for kind in (self.model, self.layers, self.expp) for number in sorted(kind)]
        paired = [kind[pair] for kind in (self.model3, self.experts, self.optim) for pair in sorted(kind)]
        return (*numbered, *paired)


def sort_files(names: Iterable[str]) -> Files:
    """The kinds of the files directly in a checkpoint's folder; names of no kind are left alone."""
    out = Files()
    for name in names:
        if match := _OPTIM.fullmatch(name):
            out.optim[int(match[2]), int(match[3])] = name
            out.prefixes.add(match[1])
        elif match := _MODEL.fullmatch(name):
            out.model[int(match[1])] = name
        elif match := _MODEL3.fullmatch(name):
            out.model3[int(match[1]), int(match[2])] = name
        elif match := _LAYER.fullmatch(name):
            out.layers[int(match[1])] = name
        elif match := _EXPERT.fullmatch(name):
            out.experts[int(match[1]), int(match[2])] = name
            if int(match[3]):
                out.refused.append((name, "experts of tensor parallel ranks"))
        elif _LAYER_TP.fullmatch(name):
            out.refused.append((name, "layers of tensor parallel ranks: how each weight is cut stands nowhere in them"))
        elif _EXPERT_OLD.fullmatch(name):
            out.refused.append((name, "experts without their layer's number (DeepSpeed before 0.6)"))
        elif match := _EXPP.fullmatch(name):
            out.expp[int(match[1])] = name
    return out


def optim_name(prefix: str, data: int, model: int) -> str:
    """The name of an optimizer file."""
    return f"{prefix}zero_pp_rank_{data}_mp_rank_{model:02d}_optim_states.pt"


def model_name(model: int) -> str:
    """The name of a module's file, ZeRO 0-2."""
    return f"mp_rank_{model:02d}_model_states.pt"


def model3_name(data: int, model: int) -> str:
    """The name of a rank's module file, ZeRO 3."""
    return f"zero_pp_rank_{data}_mp_rank_{model:02d}_model_states.pt"


def layer_name(index: int) -> str:
    """The name of a pipeline layer's file."""
    return f"layer_{index:02d}-model_states.pt"


def expp_name(expert: int) -> str:
    """The name of an expert rank's optimizer file without ZeRO."""
    return f"expp_rank_{expert}_mp_rank_00_optim_states.pt"


def expert_name(layer: int, expert: int) -> str:
    """The name of an expert's file."""
    return f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
