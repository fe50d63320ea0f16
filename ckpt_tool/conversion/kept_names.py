"""Verbs that keep names, and targets that have names of their own.

    ckpt merge HUB OUT --to megatron      E3060: Megatron finds no weight under the hub's names
    ckpt reshard DCP OUT --to megatron    passes where the job's names are Megatron's

One rule for all verbs: whether the names are the target's is what `ckpt convert` would find out (`passes.NAMES`).
`--dialect keep` writes any names. Files of safetensors and the formats without a dialect hold any names. Cost: nothing
where the source states the target's dialect, otherwise that of naming the tensors once.
"""

from __future__ import annotations

from ckpt_tool.conversion.passes import NAMES, passed
from ckpt_tool.errors import CkptError, UsageError
from ckpt_tool.sources.chosen import Chosen, Conversion

_ANY_NAMES = ("keep", "hf")  # dialects of formats that hold tensors under any names


def check_kept_names(chosen: Chosen, job: Conversion, verb: str) -> Chosen:
    """`chosen`, whose names the target's system loads as they are. Raises UsageError E3060 where they are others'."""
    target = job.dialect
    if target in _ANY_NAMES:
        return chosen

    from ckpt_tool.conversion.naming import dialect_of
    from ckpt_tool.families.base import SYSTEMS

    if dialect_of(chosen) == target or not chosen.model:
        return chosen

    reason: tuple[str, ...] = ()
    try:
        if passed(chosen, job, NAMES).stored == chosen.stored:
            return chosen
    except CkptError as error:
        reason = (f"ckpt convert reports: {error.message}",)

    sources = [opened.path for opened in chosen.sources if opened.catalog.tensors]
    first = "" if len(sources) == 1 else f"ckpt {verb} them with --to safetensors or dcp first, then "
    source = sources[0] if len(sources) == 1 else "SRC"
    system = SYSTEMS.get(target, target)
    raise UsageError(
        f"ckpt {verb} keeps names, and {system} does not load a tensor under the name {next(iter(chosen.model))}",
        code="E3060",
        path=sources[0],
        place=f"ckpt {verb} --to {job.fmt.name}",
        hint=f"{first}ckpt convert {source} OUT --to {job.fmt.name} changes names and takes degrees too; --dialect keep"
        " writes them as they are",
        faults=reason,
    )
