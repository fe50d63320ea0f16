"""What a DeepSpeed checkpoint says of itself besides values: the record that travels in the extras, and back.

The one idea: whatever a writer must know to lay the same training state out again (ZeRO stage, order and groups of the
flat tensors, ties, buffers, pipeline stages, MoE layers) is one plain value under `deepspeed` in the extras, so that it
passes through any format that keeps extras; the optimizer's options stand under `optimizer`, one entry a parameter
group:

    {"deepspeed": {"zero_stage": 1, "dtype": "BF16", "shared": {"head.weight": "embed.weight"}, ...},
     "optimizer": {"param_groups": [{"lr": 0.01, "params": ["embed.weight", ...]}], "scalars": [{"step": 3.0}], ...},
     "global_steps": 3, "lr_scheduler": {...}, ...}

`params` are names in the order in which a flat group holds them (of the whole model: experts of all ranks, parameters
of all stages). Extras are data of a checkpoint: `Described.from_extras` believes nothing that has not the right type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

HOME = "deepspeed"
OPTIMIZER = "optimizer"
UNUSED = "ckpt_unused"  # in a module file: values that DeepSpeed shall not take for its own


@dataclass(frozen=True, slots=True)
class Described:
    """zero_stage: 0-3. plain_bf16: BF16_Optimizer. prefix: of the optimizer files' names. dtype: of the module's
    parameters, "" where unknown. module: names in the module's order. shared: alias -> kept name. frozen: parameters
    without optimizer. stages: of a pipeline, for each stage and group the names in flat order; () without one. tied:
    layer index of each tied key. moe: prefixes of the MoE layers in the order of their numbers.
    """

    zero_stage: int = 1
    plain_bf16: bool = False
    prefix: str = ""
    dtype: str = ""
    aligned: bool = False
    round_robin: bool = False
    module: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    stages: tuple[tuple[tuple[str, ...], ...], ...] = ()
    tied: Mapping[str, int] = field(default_factory=dict)
    moe: tuple[str, ...] = ()

    def to_extras(self) -> dict[str, Any]:
        """Plain values: lists and dicts."""
        return {name: _lists(value) for name, value in asdict(self).items()}

    @staticmethod
    def from_extras(extras: Mapping[str, Any]) -> Described | None:
        """The record in the extras; None where there is none, or one that was edited into nonsense."""
        said = extras.get(HOME)
        if not isinstance(said, Mapping):
            return None
        shared, tied, stages = said.get("shared", {}), said.get("tied", {}), said.get("stages", [])
        names = [_strings(said.get(key, [])) for key in ("module", "buffers", "frozen", "moe")]
        stage, dtype, prefix = said.get("zero_stage", 1), said.get("dtype", ""), said.get("prefix", "")
        module, buffers, frozen, moe = names
        if module is None or buffers is None or frozen is None or moe is None:
            return None
        if type(stage) is not int or stage not in (0, 1, 2, 3) or not isinstance(dtype, str):
            return None
        if prefix not in ("", "bf16_", "fp16_") or not isinstance(stages, list | tuple):
            return None
        if not isinstance(shared, Mapping) or not all(isinstance(x, str) for pair in shared.items() for x in pair):
            return None
        if not isinstance(tied, Mapping) or not all(isinstance(k, str) and type(i) is int for k, i in tied.items()):
            return None
        parts = []
        for one in stages:
            groups = [_strings(group) for group in one] if isinstance(one, list | tuple) else [None]
            if any(group is None for group in groups):
                return None
            parts.append(tuple(group for group in groups if group is not None))
        return Described(
            stage,
            bool(said.get("plain_bf16")),
            prefix,
            dtype,
            bool(said.get("aligned")),
            bool(said.get("round_robin")),
            module,
            buffers,
            dict(shared),
            frozen,
            tuple(parts),
            dict(tied),
            moe,
        )


def _strings(value: Any) -> tuple[str, ...] | None:
    fits = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    return tuple(value) if fits else None


def _lists(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_lists(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value
