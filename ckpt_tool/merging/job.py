"""A merge as a MergeJob, made from command line options here or from a mergekit config in `merging.mergekit`.

    job_of(MergeOptions("ties", base="llama", density=(0.5,), weights=(0.3, 0.7)), ["math", "code"])

`ema` and the average of checkpoints are `linear`: with decay d and checkpoints x_0 .. x_n in the order of training

    e_0 = x_0,  e_k = d e_(k-1) + (1 - d) x_k     so the weights are  d^n, (1 - d) d^(n-1), ..., (1 - d)

The setting of a parameter is one value, a list over the layers (a gradient), or values for certain tensor names:

    weight: 0.3                                         every tensor
    weight: [0, 0.5, 1]                                 0 in the first layer, 0.5 in the middle, 1 in the last
    weight: [{filter: self_attn, value: [0, 1]}, {value: 0.5}]      the first match; `filter` is a part of the name

The position t of a layer goes from 0 to 1 over the layers of its slice (1 if there is only one layer, 0 for tensors
outside the layers). Between two values of a list numbers are interpolated; of flags the element int(t * (n - 1)) is
taken. Settings of the model take precedence over those of the slice, and these over those of the config. All this
follows mergekit 0.1.5 (`config.py evaluate_setting`, `parameter_resolver.py`), except that an unknown parameter, or a
setting that can have no effect, is an error here.
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

_NEAR_MISSES = 6  # "did you mean" hints at most, since each compares a text with all names
LARGEST = 3.4028234663852886e38  # the largest finite fp32
Value = float | bool
Gradient = tuple[Value, ...]


class CaseValue(NamedTuple):
    """The value of a parameter for the tensors whose names contain `filter`."""

    values: Gradient  # one value, or a list over the layers
    filter: str = ""  # "" and "*" match every name


Setting = tuple[CaseValue, ...]
Settings = Mapping[str, Setting]


@dataclass(frozen=True, slots=True)
class LayersOfModel:
    """One model of a slice, and which of its layers are merged there."""

    model: str
    settings: Settings = field(default_factory=dict)
    layers: tuple[int, int] | None = None  # [first, last) in the numbering of this model, None for all


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """Consecutive layers of the output that are merged from the same models."""

    parts: tuple[LayersOfModel, ...]
    settings: Settings = field(default_factory=dict)
    base: str | None = None  # the base model of this slice, if it differs from the job's


@dataclass(frozen=True, slots=True)
class MergeJob:
    """The complete description of a merge, before any model is opened."""

    method: Method
    slices: tuple[LayerSlice, ...]
    base: str | None = None
    settings: Settings = field(default_factory=dict)
    sliced: bool = False  # True: the layers of the slices are concatenated; False: one slice of complete models
    dtype: str | None = None  # the dtype of the output, None for that of the models
    seed: int = 0
    any_tokenizer: bool = False  # the user explicitly allowed different tokenizers
    notes: tuple[str, ...] = ()
    called: str = ""  # the requested method, if it is an alias: `average` and `ema` are `linear`
    newest: str | None = None  # of an average over steps: the model whose counters, extras and config the output takes

    @property
    def method_typed(self) -> str:
        """The method's name as the user typed it, for messages."""
        return self.called or self.method.name

    def base_of(self, slice_: LayerSlice) -> str | None:
        """The base model of a slice: its own, else the job's."""
        return slice_.base or self.base

    def models(self) -> tuple[str, ...]:
        """The paths of all models, each once.

        The model whose config and tokenizer the output takes comes first: the base, else the newest of an average, else
        the first model.
        """
        named = [part.model for slice_ in self.slices for part in slice_.parts]
        stated_bases = [self.base, *(slice_.base for slice_ in self.slices)]
        bases = [base for base in stated_bases if base]
        newest = [self.newest] if self.newest else []
        return tuple(dict.fromkeys((*bases, *newest, *named)))


class ParameterPlace(NamedTuple):
    """The tensor for which a parameter is evaluated: its name, and the position t of its layer in [0, 1]."""

    name: str
    t: float


def setting(*values: Value) -> Setting:
    """A setting without filters: one value, or a list over the layers."""
    return (CaseValue(values),)


def value_of(
    job: MergeJob, slice_: LayerSlice, part: LayersOfModel | None, name: str, place: ParameterPlace
) -> Value | None:
    """The value of parameter `name` for a tensor; None if the parameter is optional and was not given.

    Args:
        part: the model whose parameter it is, None for a parameter of the entire merge.

    Raises:
        ValueError: the parameter is required and missing, or out of bounds. Its text is shown to the user.
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
    """Settings that are invalid or can have no effect, one line each.

    Args:
        part: the model to which the settings belong, None for those of a slice or the job.
    """
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
    """Filters that match none of the `names`, one line each: usually a typo, and the value would never be used."""
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
    """Errors in the number of models and in the base of each slice, one line each."""
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
    """All errors of a job that are known before a model is opened, one line each."""
    faults = contract_faults(job)
    for slice_ in job.slices:
        faults += find_misplaced_settings(job, slice_, slice_.settings, None)
        for part in slice_.parts:
            faults += find_misplaced_settings(job, slice_, part.settings, part)
    faults += find_misplaced_settings(job, job.slices[0], job.settings, None)
    return list(dict.fromkeys(faults))


# -- from options ------------------------------------------------------------------------------------------------------


def job_of(options: MergeOptions, sources: Sequence[str]) -> MergeJob:
    """The job that command line options describe.

    Args:
        sources: paths of the models in the order of the command line.

    Raises:
        UsageError: E1442, with every error of the options.
    """
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
    """The models with their own settings.

    Args:
        tasks: the models without the base.
        given: parameter -> its values on the command line, one for each task, or one for all.
    """
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
    """Options that the method has but that would change nothing here, one line each."""
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
    """The last `count` checkpoints of a folder in the order of training. names: the names in the folder.

    >>> last_of("run", ["checkpoint-90", "checkpoint-100", "logs", "checkpoint-80"], 2)
    ['run/checkpoint-90', 'run/checkpoint-100']

    Raises UsageError E1450 if there are fewer, or if their names are of two kinds, such as `step-N` and `epoch-N`.
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
    """The requested checkpoints of a folder in the order of training. wanted: numbers of steps, or their names.

    >>> steps_of("run", ["step-30", "step-10", "step-20"], ["30", "step-10"])
    ['run/step-10', 'run/step-30']

    Raises UsageError E1450 for steps that do not exist, and for numbers that two of them have.
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
    """The names of steps that end with their number, in the order of training."""
    steps = [step for step in map(step_of, names) if step is not None and step.name[-1].isdigit()]
    return [step.name for step in sorted(steps, key=lambda step: (step.order, step.name))]
