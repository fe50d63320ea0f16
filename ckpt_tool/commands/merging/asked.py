"""What the command line asks for, as a Job: the same thing that a mergekit config comes to.

    job_of(Asked("ties", base="llama", density=(0.5,), weights=(0.3, 0.7)), ["math", "code"])

`ema` and the average of checkpoints are `linear`: with decay d and checkpoints x_0 .. x_n in the order of training

    e_0 = x_0,  e_k = d e_(k-1) + (1 - d) x_k     so the weights are  d^n, (1 - d) d^(n-1), ..., (1 - d)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tool.commands.merging.methods import METHODS, Method
from ckpt_tool.commands.merging.settings import Job, Part, Setting, Slice, all_faults, setting
from ckpt_tool.errors import UsageError

EMA = "ema"
NAMES = (*METHODS, EMA)
_STEP = re.compile(r"(?:iter_|global_step|checkpoint-|step-|step_|epoch_)(\d+)$")


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of arithmetic merges, as given. weights, density: one for each source but the base, or one for all."""

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

    def spoken(self) -> list[str]:
        """The options that were given, but the method and the seed."""
        return [
            option
            for option, value in (
                ("--weight", self.weights or None), ("--base", self.base), ("--density", self.density or None),
                ("--t", self.t), ("--epsilon", self.epsilon), ("--gamma", self.gamma), ("--lambda", self.factor),
                ("--normalize", self.normalize), ("--decay", self.decay), ("--last", self.last),
                ("--tokenizer", self.tokenizer),
            )
            if value is not None
        ]  # fmt: skip


def job_of(asked: Asked, sources: Sequence[str]) -> Job:
    """The job. sources: as given, in their order. Raises UsageError E1442 with every fault."""
    method, faults = METHODS["linear" if asked.method == EMA else asked.method], list[str]()
    models = list(sources)
    base = asked.base
    if method.name == "slerp" and base is None and len(models) == 2:
        base = models[0]
    weights = _decaying(asked, len(models), faults) if asked.method == EMA else asked.weights
    if base is not None and method.base == "none":
        faults.append(f"{asked.method} has no base: --base {base}")
    elif base is not None and base not in models:
        models.append(base)
    tasks = [model for model in models if method.base == "none" or model != base]
    own = {
        name: _each(values, tasks, f"--{name}", faults) if name in method.parameters else [setting(*values[:1])] * len(tasks)
        for name, values in (("weight", weights), ("density", asked.density)) if values
    }  # fmt: skip
    faults += _idle(asked, method)
    parts = [
        Part(model, {name: values[tasks.index(model)] for name, values in own.items() if values and model in tasks})
        for model in models
    ]
    shared = _shared(asked, method)
    if not weights and "weight" in method.parameters:
        shared["weight"] = setting(1.0)
    if method.name == "passthrough" and asked.weights:
        faults.append("passthrough has no weights")
    notes = _notes(asked, method)
    job = Job(method, (Slice(tuple(parts)),), base, shared, seed=asked.seed or 0, notes=notes,
              any_tokenizer=asked.tokenizer == "base")  # fmt: skip
    faults += all_faults(job)
    if faults:
        raise UsageError(
            faults[0], code="E1442", faults=faults[1:], place="ckpt merge",
            hint="ckpt merge MODEL MODEL ... OUT --method NAME --base BASE --weight W for each model",
        )  # fmt: skip
    return job


def _shared(asked: Asked, method: Method) -> dict[str, Setting]:
    given = {"t": asked.t, "epsilon": asked.epsilon, "gamma": asked.gamma, "lambda": asked.factor,
             "normalize": asked.normalize}  # fmt: skip
    return {name: setting(value) for name, value in given.items() if value is not None}


def _each(values: tuple[float, ...], models: Sequence[str], option: str, faults: list[str]) -> list[Setting]:
    if len(values) not in (0, 1, len(models)) or option == "--weight" and len(values) == 1 < len(models):
        faults.append(
            f"{option} is given {len(values)} times for {len(models)} models"
            + (" (the base has none)" if option == "--weight" else "")
        )
        return []
    return [setting(value) for value in (values * len(models) if len(values) == 1 else values)]


def _decaying(asked: Asked, count: int, faults: list[str]) -> tuple[float, ...]:
    """The weights of an exponential average over `count` checkpoints."""
    if asked.weights:
        faults.append("ema has its weights from --decay: --weight")
    if asked.decay is None or not 0 <= asked.decay < 1:
        found = "nothing" if asked.decay is None else f"{asked.decay:g}"
        faults.append(f"ema needs --decay from 0 to below 1, found {found}")
        return (1.0,) * count
    rest = 1 - asked.decay
    return tuple(asked.decay ** (count - 1 - k) * (rest if k else 1) for k in range(count))


def _idle(asked: Asked, method: Method) -> list[str]:
    """Options that the method has and that change nothing here, one line each."""
    faults = (
        [f"--seed: {asked.method} leaves nothing to chance"] if asked.seed is not None and not method.by_chance else []
    )
    if method.trim and not any(density < 1 for density in asked.density):
        faults += [f"{option}: nothing is trimmed without a --density below 1" for option, value in
                   (("--gamma", asked.gamma), ("--epsilon", asked.epsilon)) if value is not None]  # fmt: skip
    return faults


def _notes(asked: Asked, method: Method) -> tuple[str, ...]:
    notes = []
    if method.trim and not asked.density:
        notes.append(f"{method.name} without --density keeps task vectors whole")
    if asked.decay is not None and asked.method != EMA:
        raise UsageError("--decay is of --method ema alone", code="E1442", place="ckpt merge")
    return tuple(notes)


def last_of(folder: str, names: Sequence[str], count: int) -> list[str]:
    """The last `count` checkpoints of a folder in the order of training. names: what lies in it.

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
            f"--last {count}: the folder holds {what}", code="E1450", path=folder,
            hint="it takes iter_N, checkpoint-N, global_stepN, ...; or name the checkpoints themselves",
        )  # fmt: skip
    return [f"{folder.rstrip('/')}/{name}" for _, name in found[-count:]]
