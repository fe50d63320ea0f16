"""Checks from headers whether a training state is consistent: moments and their parameters, step counters, experts.

The one idea: boxes that tile (`core.catalog`) show that a tensor is complete; this module checks whether the tensors
belong together. Every finding is a fault that a trainer would run into later, as a crash or, worse, silently:

    w (3, 4) with w [exp_avg] (4, 3)                       moments of another model, or of another layout
    w [exp_avg] without w, but v with v [exp_avg]          a parameter that the model lost
    w [master] without w, but v with v [master]            the same
    w [exp_avg] without w [exp_avg_sq], where others have both
    param_groups [{"step": 3}, {"step": 4}]                groups of two saves
    experts.0, experts.1, experts.3                        an expert that no rank wrote

What is no fault: a `step` tensor a parameter that differs from another's (torch counts a parameter's own steps, and one
without a gradient does not step: `torch/optim/adamw.py`, 2.13); states of other shapes than their parameter's by design
(factored or quantised optimizers name theirs otherwise); optimizers whose names have nothing to do with the model's
(then nothing can be concluded). A format declares which checks do not apply to it (`Holds.lone_shards`,
`Holds.all_experts`).

Cost: one pass over the catalog's rows if there are states other than the model. What it does not do: read values
(`run.rounding`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.inner_path import base_of
from ckpt_tool.core.tensor import MASTER, MODEL, TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint
from ckpt_tool.formats.base import Holds

MOMENTS = frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"))
DEPTH = 8  # levels of the extras in which groups are looked for
_EXPERT = re.compile(r"(.*\.(?:local_|deepspeed_)?experts)\.(\d{1,9})\.(.+)")
_NUMBER = re.compile(r"\d+")
_FACTORED = "exp_avg_sq_row"  # Adafactor's second moment of a matrix; vectors keep exp_avg_sq
_LENIENT = "; --lenient takes it as it is"


def unsound(catalog: Catalog, holds: Holds) -> Iterator[CkptError]:
    """Every inconsistency of the training state: InconsistentCheckpoint E0305 (moments, steps), Incomplete E0302
    (experts)."""
    if holds.lone_shards:
        return
    yield from _steps(catalog.extras)
    if catalog.states() != (MODEL,):
        yield from _moments(catalog)
    if holds.all_experts:
        yield from _experts(catalog)


def check_sound(catalog: Catalog, holds: Holds, more: Iterable[CkptError] = ()) -> None:
    """Raise the first fault, with the others in its `faults`. more: faults found from values (`formats.steps`)."""
    faults = [*unsound(catalog, holds), *more]
    if faults:
        first = faults[0]
        raise type(first)(
            first.message,
            code=first.code,
            path=first.path,
            key=first.key,
            hint=first.hint,
            faults=[f"{fault.key or ''}: {fault.message}".lstrip(": ") for fault in faults[1:100]],
        )


def _moments(catalog: Catalog) -> Iterator[CkptError]:
    shapes = _shapes(catalog)
    yield from _pairs(catalog, shapes)
    model = shapes.get(MODEL, {})
    masters = shapes.get(MASTER, {})
    if not model and not masters:
        return

    without = [name for name in masters if name not in model]
    if 0 < len(without) < len(masters):  # in ZeRO 3 and Paddle's sharding_io no master has a weight: that is no fault
        yield Incomplete(
            f"{len(without)} of {len(masters)} master weights have no weight in the model, the others have",
            code="E0302",
            key=f"{without[0]} [{MASTER}]",
            path=_path(catalog, without[0], MASTER),
            hint=f"a rank's part of the model is missing, or was copied over by another's{_LENIENT}",
        )

    parameters = {**masters, **model}
    names = set[str]()
    lost = list[tuple[str, str]]()

    for state in (MASTER, *(state for state in shapes if state in MOMENTS)):
        mine = shapes.get(state, {})
        if state != MASTER:
            names |= mine.keys()
        for name in [name for name, shape in mine.items() if parameters.get(name) != shape]:
            want = parameters.get(name)
            if want is not None:
                yield InconsistentCheckpoint(
                    f"{state} has shape {list(mine[name])}, its parameter {list(want)}",
                    code="E0305",
                    key=f"{name} [{state}]",
                    path=_path(catalog, name, state),
                    hint=f"optimizer and model come from two runs: fetch one save whole{_LENIENT}",
                )
            elif not numeral(name):
                lost.append((name, state))

    if len({name for name, _ in lost}) < len(names):  # if no name fits, optimizer and model use different dialects
        for name, state in lost:
            yield InconsistentCheckpoint(
                f"{state} of a parameter that the model lacks",
                code="E0305",
                key=f"{name} [{state}]",
                path=_path(catalog, name, state),
                hint=f"a part of the model is missing, or the optimizer belongs to another model{_LENIENT}",
            )


def _pairs(catalog: Catalog, shapes: Mapping[str, Mapping[str, Any]]) -> Iterator[CkptError]:
    """Incomplete E0302 for parameters with only one of Adam's two moments.

    It is a fault only if most parameters have both, and either parameters of the same role in other layers have both
    or no other lacks one: Lion stores one moment alone, and may leave norms and embeddings to Adam.
    """
    first, second = (shapes.get(state, {}) for state in ("exp_avg", "exp_avg_sq"))
    alone = [name for name in (*first, *second) if (name in first) != (name in second)]
    if alone:
        whole = Counter(map(_place, first.keys() & second.keys()))
        lone = Counter(map(_place, alone))
        alone = [name for name in alone if whole[_place(name)] or lone[_place(name)] == 1]
    if not alone or _FACTORED in shapes or len(alone) >= len(first.keys() & second.keys()):
        return
    for name in alone:
        have, lacks = ("exp_avg", "exp_avg_sq") if name in first else ("exp_avg_sq", "exp_avg")
        yield Incomplete(
            f"a parameter with {have} and without {lacks}",
            code="E0302",
            key=f"{name} [{lacks}]",
            path=_path(catalog, name, have),
            hint=f"a rank's part of the optimizer was lost: fetch one save whole{_LENIENT}",
        )


def _place(name: str) -> str:
    """The name with # for its numbers: parameters of the same role in different layers get the same result."""
    return _NUMBER.sub("#", name)


def _shapes(catalog: Catalog) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of all tensors: state -> name -> shape."""
    out: dict[str, dict[str, tuple[int, ...]]] = {}
    if hasattr(catalog.tensors, "rows"):
        for row in catalog.rows():
            out.setdefault(row.state, {})[row.name] = row.shape
        return out
    for (name, state), tensor in catalog.tensors.items():
        mine = out.get(state)
        if mine is None:
            mine = out[state] = {}
        mine[name] = tensor.shape
    return out


def _path(catalog: Catalog, name: str, state: str) -> str | None:
    chunks = catalog.tensors[TensorKey(name, state)].chunks
    return base_of(chunks[0].array.path) if chunks else None


def _steps(extras: Mapping[str, Any]) -> Iterator[CkptError]:
    """InconsistentCheckpoint E0305 for parameter groups of one optimizer with different step counts."""
    for where, groups in _groups(extras, "", 0):
        known = [(i, step) for i, step in enumerate(map(_step, groups)) if step is not None]
        for i, step in known[1:]:
            if step != known[0][1]:
                yield InconsistentCheckpoint(
                    f"{where}: group {i} is at step {step}, group {known[0][0]} at {known[0][1]}",
                    code="E0305",
                    hint=f"files of two steps are mixed: fetch one save whole{_LENIENT}",
                )


def _groups(value: Any, where: str, depth: int) -> Iterator[tuple[str, list[Any]]]:
    """(dotted path, list) of all lists called `param_groups` or `scalars` (DeepSpeed's counters of its groups)."""
    if depth > DEPTH or not isinstance(value, Mapping):
        return
    for key, item in value.items():
        here = f"{where}.{key}" if where else str(key)
        if key in ("param_groups", "scalars") and isinstance(item, list | tuple):
            yield here, list(item)
        elif isinstance(item, Mapping):
            yield from _groups(item, here, depth + 1)
        elif isinstance(item, list | tuple) and len(item) <= 256:  # chained optimizers
            for i, part in enumerate(item):
                yield from _groups(part, f"{here}.{i}", depth + 1)


def _step(group: Any) -> int | float | None:
    step = group.get("step") if isinstance(group, Mapping) else None
    return step if type(step) in (int, float) else None


def _experts(catalog: Catalog) -> Iterator[CkptError]:
    """Incomplete E0302 for gaps in the experts' numbers, and for experts that lack a tensor that others of their layer
    have."""
    layers: dict[tuple[str, str], dict[int, set[str]]] = {}
    for row in catalog.rows():
        found = _EXPERT.fullmatch(row.name) if "experts." in row.name else None
        if found is not None:
            layers.setdefault((found[1], row.state), {}).setdefault(int(found[2]), set()).add(found[3])

    counts: dict[str, int] = {}
    for (prefix, _), of in layers.items():
        counts[prefix] = max(counts.get(prefix, 0), 1 + max(of))

    for (prefix, state), experts in layers.items():
        suffix = "" if state == MODEL else f" [{state}]"
        # Bounded, because a name in a damaged file may contain any number.
        gone = [i for i in range(min(counts[prefix], 1 << 16)) if i not in experts]
        if gone:
            yield Incomplete(
                f"{len(gone)} of {counts[prefix]} experts are missing: {', '.join(map(str, gone[:20]))}",
                code="E0302",
                key=f"{prefix}.{gone[0]}{suffix}",
                hint="a rank's file is missing: every expert parallel rank writes its own",
            )
        every: set[str] = set().union(*experts.values())
        for number, have in experts.items():
            if have != every:
                yield Incomplete(
                    f"expert {number} lacks {', '.join(sorted(every - have)[:4])}",
                    code="E0302",
                    key=f"{prefix}.{number}{suffix}",
                    hint="a rank's file is missing, or comes from another run",
                )
