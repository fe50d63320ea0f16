"""Converts an optimizer's single step count into a step for each parameter.

    opt_state.0.{mu.w, mu.b, count = 3}   ->   w [exp_avg], w [step] = 3.0, b [exp_avg], b [step] = 3.0

optax counts once for all parameters, in int32. torch's optimizers store a number for each parameter with its moments,
in fp32, and restart from zero without it. The count is moved, not copied: it is removed from the extras, so that after
further training only one place states it when converting back (`systems.jax.orbax.leaves` merges equal steps).
fp32 has every count up to 2^24. Sources: optax 0.2.8 `_src/transform.py` (ScaleByAdamState), torch 2.13
`optim/adamw.py` (`_init_group`). Cost: 1 us a parameter. What it does not do: several counts, each for some parameters
(`optax.multi_transform`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import EXTRAS, STEP, Path, TensorKey
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.sources.select import state_filter

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_GONE = object()


def steps_of_count(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen` with a step of each parameter that has moments, where the source has one count and another format is
    written."""
    catalog = chosen.sources[0].catalog
    writing = job.writing
    count = catalog.count
    if count is None or job.fmt.name == catalog.format or not job.fmt.holds.all_states:
        return chosen
    present = (*catalog.states(), STEP, EXTRAS)
    dropped = bool(writing.drop) and state_filter(writing.drop, present, option="--drop")(STEP)
    names = dict.fromkeys(row.tensor.key.name for row in chosen.stored if row.tensor.key.state in _MOMENTS)
    if not names or dropped or not state_filter(writing.states, present)(STEP):
        return chosen
    keys = [TensorKey(name, STEP) for name in names]
    extras = _without(chosen.extras, count.path)
    where = ".".join(map(str, count.path))
    return replace(
        chosen,
        stored=(*chosen.stored, *(Stored(0, count._replace(key=key, path=())) for key in keys)),
        extras={} if extras is _GONE else extras,
        casts={**chosen.casts, **dict.fromkeys(keys, DTYPES["F32"])},
    ).noted(f"{where}, the one count of the optimizer, is the step of {len(names)} parameters, in F32")


def _without(value: Any, path: Path) -> Any:
    """Plain values without the one at a path, and without what holds nothing then; `_GONE` for nothing. A list of which
    a place goes has the others under their numbers."""
    if not path:
        return _GONE
    if not isinstance(value, Mapping | list | tuple):
        return value
    own = dict(value) if isinstance(value, Mapping) else {str(n): each for n, each in enumerate(value)}
    step = path[0] if path[0] in own else str(path[0])
    if step not in own:
        return value
    inner = _without(own.pop(step), path[1:])
    return own | ({} if inner is _GONE else {step: inner}) or _GONE
