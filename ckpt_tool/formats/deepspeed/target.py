"""Writing: every rank's files of a DeepSpeed checkpoint, for any number of data ranks, expert ranks and ZeRO stage.

The one idea: what `deepspeed.fit` left is laid out by the same flat rules that reading uses (`deepspeed.flat`), so a
rank's flat tensor is a storage with parts of many parameters in it:

    --dp 3, ZeRO 1
          latest, global_step3/mp_rank_00_model_states.pt, global_step3/bf16_zero_pp_rank_{0,1,2}_..._optim_states.pt

As DeepSpeed 0.19.8 writes: `partition_count`, `group_paddings` of the rank, `param_alignment_paddings`,
`param_slice_mappings` with the rank's own names, fp32 partitions cut by the padding (whole under BF16_Optimizer),
frozen parameters and fragments, `shared_params` on the first rank alone, `latest`; its own classes (loss scaler, enum,
fragment_address) are written from values. `DeepSpeedEngine.load_checkpoint` resumes from it. Counters, scheduler and
client state come from the extras; what a source does not say is DeepSpeed's default, or missing and named in a note (an
optimizer's options). RNG states of other degrees are kept under `ckpt_unused`, where nobody takes them for those of the
new ranks. Cost: a few microseconds a parameter and rank that holds a part of it. What it does not do: tensor parallel
ranks.
"""

from __future__ import annotations

from typing import Any

from ckpt_tool.core.target import Target, TargetFile, Wanted, whole_file
from ckpt_tool.formats.deepspeed.optimizer import optimizer_file
from ckpt_tool.formats.deepspeed.plan import settle
from ckpt_tool.formats.deepspeed.state import ModuleWriter


def target(wanted: Wanted) -> Target:
    """The whole output. Raises UsageError E0286 (states), E0287 (degrees), E0288 (pipeline stages)."""
    plan = settle(wanted)
    folder = f"global_step{_count(plan.extras.get('global_steps'))}"
    module = ModuleWriter(plan)
    files = [whole_file("latest", folder.encode())]
    files += [_below(folder, file) for file in module.files()]
    if plan.stage:
        for model in range(plan.pp):
            for data in range(plan.dp):
                files.append(_below(folder, optimizer_file(plan, data, model)))
    files += [TargetFile(path, size, copy_of=path) for path, size in wanted.sidefiles]
    return Target("deepspeed", tuple(files), notes=tuple(dict.fromkeys(plan.notes)))


def _below(folder: str, file: TargetFile) -> TargetFile:
    return TargetFile(f"{folder}/{file.path}", file.size, file.literals, file.arrays, file.patches)


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 62 else 0
