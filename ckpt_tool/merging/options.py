"""The options of the command line as a Job: the same thing that a mergekit config comes to.

    job_of(MergeOptions("ties", base="llama", density=(0.5,), weights=(0.3, 0.7)), ["math", "code"])

`ema` and the average of checkpoints are `linear`: with decay d and checkpoints x_0 .. x_n in the order of training

    e_0 = x_0,  e_k = d e_(k-1) + (1 - d) x_k     so the weights are  d^n, (1 - d) d^(n-1), ..., (1 - d)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ckpt_tool.errors import UsageError
from ckpt_tool.merging.job import METHODS, Job, Method, Part, Setting, Slice, all_faults, setting

EMA = "ema"
NAMES = (*METHODS, EMA)
_STEP = re.compile(r"(?:iter_|global_step|checkpoint-|step-|step_|epoch_)(\d+)$")


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """The options of arithmetic merges, as given. weights, density: one for each source but the base, or one for
    all."""

    method: str
    weights: tuple[float, ...] = ()
    base: str | None = None
    density: tuple[float, ...] = ()
    t: float | None = None
    seed: int | None = None
    epsilon: float | None = None
    gamma: float | None = None
    factor: float | None = None  # --lambda
    normalize: bool | None = None
    decay: float | None = None
    last: int | None = None
    tokenizer: str | None = None

    def given(self) -> list[str]:
        """The options that were given, but the method and the seed."""
        named = {each.name: each.name for each in fields(self)} | {"weights": "weight", "factor": "lambda"}
        return [
            f"--{option}"
            for name, option in named.items()
            if name not in ("method", "seed") and getattr(self, name) not in (None, ())
        ]


def job_of(options: MergeOptions, sources: Sequence[str]) -> Job:
    """The job. sources: as given, in their order. Raises UsageError E1442 with every fault."""
    method, faults = METHODS["linear" if options.method == EMA else options.method], list[str]()
    models = list(sources)
    base = options.base
    if method.name == "slerp" and base is None and len(models) == 2:
        base = models[0]
    weights = _decaying(options, len(models), faults) if options.method == EMA else options.weights
    if base is not None and method.base == "none":
        faults.append(f"{options.method} has no base: --base {base}")
    elif base is not None and base not in models:
        models.append(base)
    tasks = [model for model in models if method.base == "none" or model != base]
    own = {
        name: _each(values, tasks, f"--{name}", faults)
        if name in method.parameters
        else [setting(*values[:1])] * len(tasks)
        for name, values in (("weight", weights), ("density", options.density))
        if values
    }
    faults += _idle(options, method)
    parts = [
        Part(model, {name: values[tasks.index(model)] for name, values in own.items() if values and model in tasks})
        for model in models
    ]
    shared = _shared(options, method)
    if not weights and "weight" in method.parameters:
        shared["weight"] = setting(1.0)
    if method.name == "passthrough" and options.weights:
        faults.append("passthrough has no weights")
    notes = _notes(options, method)
    job = Job(
        method,
        (Slice(tuple(parts)),),
        base,
        shared,
        seed=options.seed or 0,
        notes=notes,
        any_tokenizer=options.tokenizer == "base",
    )
    faults += all_faults(job)
    if faults:
        raise UsageError(
            faults[0],
            code="E1442",
            faults=faults[1:],
            place="ckpt merge",
            hint="ckpt merge MODEL MODEL ... OUT --method NAME --base BASE --weight W for each model",
        )
    return job


def _shared(options: MergeOptions, method: Method) -> dict[str, Setting]:
    given = {
        "t": options.t,
        "epsilon": options.epsilon,
        "gamma": options.gamma,
        "lambda": options.factor,
        "normalize": options.normalize,
    }
    return {name: setting(value) for name, value in given.items() if value is not None}


def _each(values: tuple[float, ...], models: Sequence[str], option: str, faults: list[str]) -> list[Setting]:
    if len(values) not in (0, 1, len(models)) or option == "--weight" and len(values) == 1 < len(models):
        faults.append(
            f"{option} is given {len(values)} times for {len(models)} models"
            + (" (the base has none)" if option == "--weight" else "")
        )
        return []
    return [setting(value) for value in (values * len(models) if len(values) == 1 else values)]


def _decaying(options: MergeOptions, count: int, faults: list[str]) -> tuple[float, ...]:
    """The weights of an exponential average over `count` checkpoints."""
    if options.weights:
        faults.append("ema has its weights from --decay: --weight")
    if options.decay is None or not 0 <= options.decay < 1:
        found = "nothing" if options.decay is None else f"{options.decay:g}"
        faults.append(f"ema needs --decay from 0 to below 1, found {found}")
        return (1.0,) * count
    rest = 1 - options.decay
    return tuple(options.decay ** (count - 1 - k) * (rest if k else 1) for k in range(count))


def _idle(options: MergeOptions, method: Method) -> list[str]:
    """Options that the method has and that change nothing here, one line each."""
    faults = (
        [f"--seed: {options.method} leaves nothing to chance"]
        if options.seed is not None and not method.by_chance
        else []
    )
    if method.trim and not any(density < 1 for density in options.density):
        faults += [
            f"{option}: nothing is trimmed without a --density below 1"
            for option, value in (("--gamma", options.gamma), ("--epsilon", options.epsilon))
            if value is not None
        ]
    return faults


def _notes(options: MergeOptions, method: Method) -> tuple[str, ...]:
    notes = []
    if method.trim and not options.density:
        notes.append(f"{method.name} without --density keeps task vectors whole")
    if options.decay is not None and options.method != EMA:
        raise UsageError("--decay is of --method ema alone", code="E1442", place="ckpt merge")
    return tuple(notes)


def last_of(folder: str, names: Sequence[str], count: int) -> list[str]:
    """The last `count` checkpoints of a folder in the order of training. names: what is in it.

    >>> last_of("run", ["checkpoint-90", "checkpoint-100", "logs", "checkpoint-80"], 2)
    ['run/checkpoint-90', 'run/checkpoint-100']

    Raises UsageError E1450 where there are fewer, or of two kinds.
    """
    found = sorted((int(match[1]), name) for name in names if (match := _STEP.match(name)))
    kinds = {name.rstrip("0123456789") for _, name in found}
    if len(found) < count or len(kinds) > 1:
        what = (
            f"{len(found)} checkpoints"
            if len(kinds) < 2
            else f"checkpoints of {len(kinds)} kinds ({', '.join(sorted(kinds))})"
        )
        raise UsageError(
            f"--last {count}: the folder holds {what}",
            code="E1450",
            path=folder,
            hint="it takes iter_N, checkpoint-N, global_stepN, ...; or name the checkpoints themselves",
        )
    return [f"{folder.rstrip('/')}/{name}" for _, name in found[-count:]]
