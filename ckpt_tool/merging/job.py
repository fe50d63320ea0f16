"""A merge as a Job, whether it comes from options or from a mergekit config (`merging.mergekit`).

    job_of(MergeOptions("ties", base="llama", density=(0.5,), weights=(0.3, 0.7)), ["math", "code"])

`ema` and the average of checkpoints are `linear`: with decay d and checkpoints x_0 .. x_n in the order of training

    e_0 = x_0,  e_k = d e_(k-1) + (1 - d) x_k     so the weights are  d^n, (1 - d) d^(n-1), ..., (1 - d)

Settings of a merge: one value, a list that runs over the layers, or values for tensors whose names hold a text.

    weight: 0.3                                         every tensor
    weight: [0, 0.5, 1]                                 0 in the first layer, 0.5 in the middle, 1 in the last
    weight: [{filter: self_attn, value: [0, 1]}, {value: 0.5}]      the first that fits; `filter` is a part of the name

The layer's place t goes from 0 to 1 over the layers of its slice (1 where there is one layer, 0 outside the layers),
between two values of a list it is interpolated; of flags the list's element at int(t * (n - 1)) is taken. The first of
the model's, the slice's and the config's own settings that gives a value counts. All as mergekit 0.1.5 `config.py
evaluate_setting` and `parameter_resolver.py` have it; but a name that no parameter has, or a setting that can have no
effect, is an error here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_tool.errors import UsageError, near_misses
from ckpt_tool.merging.methods import METHODS, Method, MethodParameter
from ckpt_tool.merging.options import AVERAGE, EMA, MergeOptions
from ckpt_tool.merging.schedules import EXPONENTIAL, UNIFORM, weights_of
from ckpt_tool.sources.steps import step_of

_NEAR_MISSES = 6  # hints by likeness: each costs a look at all names
LARGEST = 3.4028234663852886e38  # of fp32
Value = float | bool
Gradient = tuple[Value, ...]


class CaseValue(NamedTuple):
    """values: one, or a list over the layers. filter: the text in the names that it is for, "" for all."""

    values: Gradient
    filter: str = ""


Setting = tuple[CaseValue, ...]
Settings = Mapping[str, Setting]


@dataclass(frozen=True, slots=True)
class LayersOfModel:
    """A model in a slice."""

    model: str
    settings: Settings = field(default_factory=dict)
    layers: tuple[int, int] | None = None  # [first, last) of its own, None for all


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """Layers of the output that are made of the same models."""

    parts: tuple[LayersOfModel, ...]
    settings: Settings = field(default_factory=dict)
    base: str | None = None  # where it is another than the job's


@dataclass(frozen=True, slots=True)
class MergeJob:
    """A merge, as asked for."""

    method: Method
    slices: tuple[LayerSlice, ...]
    base: str | None = None
    settings: Settings = field(default_factory=dict)
    sliced: bool = False  # the slices' layers are laid end to end; otherwise the one slice is whole models
    dtype: str | None = None  # what is written, None for what the models have
    seed: int = 0
    any_tokenizer: bool = False  # different tokenizers were allowed in words
    notes: tuple[str, ...] = ()
    called: str = ""  # the method as it was asked for, where it is another's name: `average` is a `linear`
    newest: str | None = None  # of an average over steps, the model whose counters, extras and config the output takes

    @property
    def method_typed(self) -> str:
        return self.called or self.method.name

    def base_of(self, slice_: LayerSlice) -> str | None:
        return slice_.base or self.base

    def models(self) -> tuple[str, ...]:
        """Every model once; the one whose config and tokenizer the output takes comes first: the base, of an
        average the newest, else the first."""
        named = [part.model for slice_ in self.slices for part in slice_.parts]
        stated_bases = [self.base, *(slice_.base for slice_ in self.slices)]
        bases = [base for base in stated_bases if base]
        newest = [self.newest] if self.newest else []
        return tuple(dict.fromkeys((*bases, *newest, *named)))


class ParameterPlace(NamedTuple):
    """Where a parameter is asked for: the tensor's name, and t."""

    name: str
    t: float


def setting(*values: Value) -> Setting:
    """A setting of one value, or of a list over the layers."""
    return (CaseValue(values),)


def value_of(
    job: MergeJob, slice_: LayerSlice, part: LayersOfModel | None, name: str, place: ParameterPlace
) -> Value | None:
    """The value of parameter `name` for a tensor, None where the parameter is optional and not given.

    part: the model it is asked for, None for what is one for the merge. Raises ValueError, in words: not given, out of
    its bounds.
    """
    parameter = job.method.parameters[name]
    scopes = (*([part.settings] if part else []), slice_.settings, job.settings)
    for scope in scopes:
        value = _evaluate(scope[name], place) if name in scope else None
        if value is not None:
            return _check_value(name, parameter, value)
    if parameter.default is None and not parameter.optional:
        whom = f" of {part.model}" if part else ""
        raise ValueError(f"{job.method.name} needs a {name}{whom} for {place.name}")
    return parameter.default


def _evaluate(setting: Setting, place: ParameterPlace) -> Value | None:
    for case in setting:
        if _applies_to_all(case) or case.filter in place.name:
            return _along(case.values, place.t)
    return None


def _along(values: Gradient, t: float) -> Value:
    if len(values) == 1:
        return values[0]
    scaled = t * (len(values) - 1)
    low = int(scaled)
    if isinstance(values[0], bool):
        return values[low]
    high = min(len(values) - 1, low + 1)
    share = scaled - low
    return (1 - share) * values[low] + share * values[high]


def _check_value(name: str, parameter: MethodParameter, value: Value) -> Value:
    if parameter.kind == "flag":
        return value
    if abs(value) > LARGEST:
        raise ValueError(f"{name} is {value:g}, beyond the range of fp32, in which merges compute")
    if value < parameter.low or value > parameter.high or (parameter.above and value <= parameter.low):
        bounds = f"{'above' if parameter.above else 'from'} {parameter.low:g} to {parameter.high:g}"
        raise ValueError(f"{name} is {value:g}, want {bounds}")
    return value


def find_misplaced_settings(
    job: MergeJob, slice_: LayerSlice, settings: Settings, part: LayersOfModel | None
) -> list[str]:
    """What settings say that can have no effect, one line each. part: whose they are, None for a slice's or the
    job's."""
    faults = []
    for name in settings:
        parameter = job.method.parameters.get(name)
        if parameter is None:
            parameters = ", ".join(job.method.parameters) or "none"
            faults.append(f"{name}: no parameter of {job.method.name} (its parameters: {parameters})")
        elif part is not None and parameter.scope == "shared":
            faults.append(f"{name}: one for the whole merge, not for the model {part.model}")
        elif part is not None and parameter.scope == "task" and part.model == job.base_of(slice_):
            faults.append(f"{name}: the base {part.model} takes none")
        else:
            faults += _out_of_bounds(name, parameter, settings[name])
            if any(_applies_to_all(case) for case in settings[name][:-1]):
                faults.append(f"{name}: a case without a filter is for all names, those after it are never reached")
    return faults


def idle_filters(job: MergeJob, names: Sequence[str]) -> list[str]:
    """Filters that are in none of the `names`, one line each: most often a slip, and the value is never used."""
    scopes = [
        job.settings,
        *(each.settings for each in job.slices),
        *(p.settings for each in job.slices for p in each.parts),
    ]
    cases = [
        (name, case.filter)
        for scope in scopes
        for name, cases in scope.items()
        for case in cases
        if not _applies_to_all(case)
    ]
    parts = {part for each in names for part in each.split(".")}
    all_names = "\n".join(names)
    faults: list[str] = []
    for name, text in dict.fromkeys(cases):
        if "\n" in text or text not in all_names:
            near = near_misses(text, parts) if len(faults) < _NEAR_MISSES else ""
            faults.append(f"{name}: no tensor's name has the filter {text!r} in it{f'; {near}' if near else ''}")
    return faults


def _applies_to_all(case: CaseValue) -> bool:
    return case.filter in ("", "*")


def _out_of_bounds(name: str, parameter: MethodParameter, setting: Setting) -> Iterator[str]:
    for value in (value for case in setting for value in case.values):
        try:
            _check_value(name, parameter, value)
        except ValueError as e:
            yield str(e)


def contract_faults(job: MergeJob) -> list[str]:
    """What is wrong with the number of models and the base of each slice, one line each."""
    method = job.method
    faults = []
    for number, slice_ in enumerate(job.slices, 1):
        prefix = f"slice {number}: " if job.sliced else ""
        models = [part.model for part in slice_.parts]
        base = job.base_of(slice_)
        has_base = base in models
        tasks = len(models) - has_base
        if len(set(models)) < len(models):
            faults.append(f"{prefix}a model is named twice: {_twice(models)}")
        if method.base == "needed" and base is None:
            faults.append(f"{prefix}{method.name} needs a base (--base, base_model)")
        elif base is not None and not has_base and method.base != "none":
            faults.append(f"{prefix}the base {base} is not among the models")
        if len(models) < method.least or (method.most is not None and len(models) > method.most):
            if method.most == method.least:
                bound = ""
            else:
                bound = "at most " if method.most else "at least "
            count = method.most or method.least
            requirement = f"{bound}{count} model{'s' * (count > 1)}{', the base counted' * (method.base != 'none')}"
            faults.append(f"{prefix}{method.name} takes {requirement}; there are {len(models)}")
        if method.name == "nuslerp" and tasks != 2:
            faults.append(f"{prefix}nuslerp takes 2 models in addition to the base; there are {tasks}")
        if method.of_task_vectors and not tasks:
            faults.append(f"{prefix}{method.name} needs a model in addition to the base")
    return faults


def _twice(models: Sequence[Any]) -> Any:
    return next(model for number, model in enumerate(models) if model in models[:number])


def all_faults(job: MergeJob) -> list[str]:
    """All faults of a job that are known before a model is opened, one line each."""
    faults = contract_faults(job)
    for slice_ in job.slices:
        faults += find_misplaced_settings(job, slice_, slice_.settings, None)
        for part in slice_.parts:
            faults += find_misplaced_settings(job, slice_, part.settings, part)
    faults += find_misplaced_settings(job, job.slices[0], job.settings, None)
    return list(dict.fromkeys(faults))


# -- from options ------------------------------------------------------------------------------------------------------


def job_of(options: MergeOptions, sources: Sequence[str]) -> MergeJob:
    """The job. sources: as given, in their order. Raises UsageError E1442 with every fault."""
    averages = options.name in (AVERAGE, EMA)
    method = METHODS["linear" if averages else options.name]
    faults = list[str]()
    models = list(sources)
    base = options.base
    if method.name == "slerp" and base is None and len(models) == 2:
        base = models[0]

    weights = _compute_schedule(options, len(models), faults) if averages else options.weights
    if base is not None and method.base == "none":
        faults.append(f"{options.name} has no base: --base {base}")
    elif base is not None and base not in models:
        models.append(base)

    tasks = [model for model in models if method.base == "none" or model != base]
    parts = _settle_models(models, tasks, method, {"weight": weights, "density": options.density}, faults)
    faults += _idle(options, method)

    shared = _read_shared_settings(options, method)
    if not weights and "weight" in method.parameters:
        shared["weight"] = setting(1.0)
    if method.name == "passthrough" and options.weights:
        faults.append("passthrough has no weights")

    notes = _notes(options, method)
    job = MergeJob(
        method,
        (LayerSlice(parts),),
        base,
        shared,
        seed=options.seed or 0,
        notes=notes,
        any_tokenizer=options.tokenizer == "base",
        called=options.name,
        newest=models[-1] if averages else None,
    )
    faults += all_faults(job)

    if averages and len(models) == 1:
        raise UsageError(
            f"{options.name} needs at least 2 checkpoints, and there is {models[0]} alone",
            code="E1442",
            place="ckpt merge",
            hint=f"ckpt merge RUN OUT --method {options.name} --last N averages the last N steps of a run, --steps A,B "
            "those that are named; without --method ckpt merge SRC OUT copies one",
        )

    if faults:
        raise UsageError(
            faults[0],
            code="E1442",
            faults=faults[1:],
            place="ckpt merge",
            hint="ckpt merge MODEL MODEL ... OUT --method NAME --base BASE --weight W for each model",
        )

    return job


def _settle_models(
    models: Sequence[str],
    tasks: Sequence[str],
    method: Method,
    given: Mapping[str, tuple[float, ...]],
    faults: list[str],
) -> tuple[LayersOfModel, ...]:
    """The models with the settings of their own. tasks: the models but the base. given: parameter -> its values on the
    command line, one of each task, or one for all."""
    by_parameter: dict[str, list[Setting]] = {}
    for name, values in given.items():
        if values and name in method.parameters:
            by_parameter[name] = _each(values, tasks, f"--{name}", faults)
        elif values:
            by_parameter[name] = [setting(*values[:1])] * len(tasks)

    settled: list[LayersOfModel] = []
    for model in models:
        settings: dict[str, Setting] = {}
        if model in tasks:
            task = tasks.index(model)
            settings = {name: of_tasks[task] for name, of_tasks in by_parameter.items() if of_tasks}
        settled.append(LayersOfModel(model, settings))
    return tuple(settled)


def _read_shared_settings(options: MergeOptions, method: Method) -> dict[str, Setting]:
    settings = {
        "t": options.t,
        "epsilon": options.epsilon,
        "gamma": options.gamma,
        "lambda": options.factor,
        "normalize": options.normalize,
    }
    return {name: setting(value) for name, value in settings.items() if value is not None}


def _each(values: tuple[float, ...], models: Sequence[str], option: str, faults: list[str]) -> list[Setting]:
    if len(values) not in (0, 1, len(models)) or (option == "--weight" and len(values) == 1 < len(models)):
        faults.append(
            f"{option} is given {len(values)} times for {len(models)} models"
            + (" (the base has none)" if option == "--weight" else "")
        )
        return []
    return [setting(value) for value in (values * len(models) if len(values) == 1 else values)]


def _compute_schedule(options: MergeOptions, count: int, faults: list[str]) -> tuple[float, ...]:
    """The weights of an average over `count` checkpoints, oldest first."""
    if options.weights:
        source = "--decay" if options.name == EMA else "--schedule"
        faults.append(f"{options.name} has its weights from {source}: --weight")

    schedule = EXPONENTIAL if options.name == EMA else options.schedule or UNIFORM
    if options.name == EMA and options.schedule is not None:
        faults.append("--schedule only applies to --method average")
    if schedule != EXPONENTIAL:
        if options.decay is not None:
            faults.append("--decay only applies to --schedule ema")
        return weights_of(schedule, count)

    if options.decay is None or not 0 <= options.decay < 1:
        decay = "nothing" if options.decay is None else f"{options.decay:g}"
        faults.append(f"ema needs --decay from 0 to below 1, found {decay}")
        return (1.0,) * count
    return weights_of(schedule, count, options.decay)


def _idle(options: MergeOptions, method: Method) -> list[str]:
    """Options that the method has and that change nothing here, one line each."""
    faults = (
        [f"--seed: {options.name} leaves nothing to chance"]
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
    if options.name not in (AVERAGE, EMA):
        for option, value in (("--decay", options.decay), ("--schedule", options.schedule)):
            if value is not None:
                raise UsageError(f"{option} only applies to --method average", code="E1442", place="ckpt merge")
    return tuple(notes)


def last_of(folder: str, names: Sequence[str], count: int) -> list[str]:
    """The last `count` checkpoints of a folder in the order of training. names: what is in it.

    >>> last_of("run", ["checkpoint-90", "checkpoint-100", "logs", "checkpoint-80"], 2)
    ['run/checkpoint-90', 'run/checkpoint-100']

    Raises UsageError E1450 where there are fewer, or of two kinds.
    """
    steps = _numbered_steps(names)
    kinds = {name.rstrip("0123456789") for name in steps}
    if len(kinds) > 1:
        raise UsageError(
            f"--last {count}: the folder holds checkpoints of {len(kinds)} kinds ({', '.join(sorted(kinds))})",
            code="E1450",
            path=folder,
            hint="name the checkpoints themselves, or their steps with --steps",
        )
    if len(steps) < count:
        names_of_steps = "steps are folders called iter_N, checkpoint-N, global_stepN, ...; name others one by one"
        all_of_them = (
            f"they are {', '.join(steps[:8])}{', ...' if len(steps) > 8 else ''}: --last {len(steps)} takes all"
        )
        raise UsageError(
            f"--last {count}: the folder holds {len(steps)} checkpoints",
            code="E1450",
            path=folder,
            hint=all_of_them if len(steps) > 1 else names_of_steps,
        )
    return [f"{folder.rstrip('/')}/{name}" for name in steps[-count:]]


def steps_of(folder: str, names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The wanted checkpoints of a folder in the order of training. wanted: numbers of steps, or their names.

    >>> steps_of("run", ["step-30", "step-10", "step-20"], ["30", "step-10"])
    ['run/step-10', 'run/step-30']

    Raises UsageError E1450 for steps that are not there, or numbers that two of them have.
    """
    steps = _numbered_steps(names)
    by_word: dict[str, list[str]] = {name: [name] for name in steps}
    for name in steps:
        number = name[len(name.rstrip("0123456789")) :]
        by_word.setdefault(str(int(number)), []).append(name)

    faults = [f"there is no step {word}" for word in wanted if word not in by_word]
    faults += [
        f"step {word} is {' and '.join(by_word[word])}: name one" for word in wanted if len(by_word.get(word, ())) > 1
    ]
    if faults:
        raise UsageError(
            f"--steps: {faults[0]}",
            code="E1450",
            path=folder,
            faults=faults[1:],
            hint=f"the folder holds {', '.join(steps[-5:]) or 'no steps'}{' and older ones' if len(steps) > 5 else ''}",
        )
    chosen = {by_word[word][0] for word in wanted}
    return [f"{folder.rstrip('/')}/{name}" for name in steps if name in chosen]


def _numbered_steps(names: Sequence[str]) -> list[str]:
    """The names that are steps' and end with their number, in the order of training."""
    steps = [step for step in map(step_of, names) if step is not None and step.name[-1].isdigit()]
    return [step.name for step in sorted(steps, key=lambda step: (step.order, step.name))]
