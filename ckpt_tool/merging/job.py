"""The methods of merging: how many models each takes, whether one of them is the base, and its parameters.

Names and defaults are mergekit's (0.1.5 `merge_methods/`), with `-` where it writes `_`; `weight` has no default there,
and is 1 here where the command line says nothing.

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
from typing import Any, Literal, NamedTuple

from ckpt_tool.errors import UsageError, near_misses

Scope = Literal["shared", "model", "task"]  # one for the merge; one a model; one a model that is not the base
Base = Literal["none", "optional", "needed"]


class Parameter(NamedTuple):
    """default: None where the parameter must be given. low, high: the bounds of a number, both included unless
    `above`."""

    scope: Scope
    default: float | bool | None
    kind: Literal["number", "flag"] = "number"
    low: float = float("-inf")
    high: float = float("inf")
    above: bool = False  # low itself is out
    optional: bool = False  # None is a value: nothing


class Method(NamedTuple):
    """least, most: models, the base counted. trim: how task vectors are trimmed
    (`merging.task_vectors.Trim.kind`)."""

    name: str
    base: Base
    parameters: Mapping[str, Parameter]
    least: int = 1
    most: int | None = None
    trim: str | None = None
    consensus: bool = False

    @property
    def of_task_vectors(self) -> bool:
        return "lambda" in self.parameters

    @property
    def by_chance(self) -> bool:
        return self.trim in ("chance", "ranks")


def _flag(default: bool) -> Parameter:
    return Parameter("shared", default, "flag")


def _of_task_vectors(
    name: str, trim: str | None = None, *, consensus: bool = False, normalize: bool = False, rescale: bool = False
) -> Method:
    parameters = {
        "weight": Parameter("task", None),
        "density": Parameter("task", 1.0, low=0, high=1, above=True),
        "lambda": Parameter("shared", 1.0),
        "normalize": _flag(normalize),
        "rescale": _flag(rescale),
        "int8_mask": _flag(False),
    }
    if trim == "crumbs":
        parameters["gamma"] = Parameter("task", 0.01, low=0, high=1)
    if trim == "ranks":
        parameters["epsilon"] = Parameter("task", 0.15, low=0, high=0.5)
    return Method(name, "needed", parameters, 1, None, trim, consensus)


_ALL = (
    Method("linear", "none", {"weight": Parameter("model", None), "normalize": _flag(True)}),
    Method("slerp", "needed", {"t": Parameter("shared", None, low=0, high=1)}, 2, 2),
    Method(
        "nuslerp",
        "optional",
        {"weight": Parameter("task", None), "nuslerp_row_wise": _flag(False), "nuslerp_flatten": _flag(True)},
    ),
    _of_task_vectors("task-arithmetic"),
    _of_task_vectors("ties", "largest", consensus=True, normalize=True),
    _of_task_vectors("dare-linear", "chance", rescale=True),
    _of_task_vectors("dare-ties", "chance", consensus=True, rescale=True),
    _of_task_vectors("della", "ranks", consensus=True, normalize=True, rescale=True),
    _of_task_vectors("della-linear", "ranks", rescale=True),
    _of_task_vectors("breadcrumbs", "crumbs"),
    _of_task_vectors("breadcrumbs-ties", "crumbs", consensus=True),
    Method("model-stock", "needed", {"filter_wise": _flag(False)}, 3),
    Method("passthrough", "none", {"scale": Parameter("model", None, optional=True)}, 1, 1),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
# Of mergekit 0.1.5, not of this build.
FOREIGN = ("multislerp", "nearswap", "ram", "ramplus_tl", "sce", "arcee_fusion", "karcher")


def method_of(name: str) -> Method:
    """The method of that name, `_` or `-`. Raises UsageError E1440."""
    found = METHODS.get(name.replace("_", "-"))
    if found is None:
        foreign = name.replace("-", "_") in FOREIGN
        raise UsageError(
            f"this build does not merge by {name}" if foreign else f"no method {name!r}",
            code="E1440",
            hint=near_misses(name.replace("_", "-"), METHODS) or f"the methods are {', '.join(METHODS)}",
        )
    return found


# -- settings ----------------------------------------------------------------------------------------------------------


_NEAR_MISSES = 6  # hints by likeness: each costs a look at all names
LARGEST = 3.4028234663852886e38  # of fp32
Value = float | bool
Gradient = tuple[Value, ...]


class Case(NamedTuple):
    """values: one, or a list over the layers. filter: the text in the names that it is for, "" for all."""

    values: Gradient
    filter: str = ""


Setting = tuple[Case, ...]
Settings = Mapping[str, Setting]


@dataclass(frozen=True, slots=True)
class Part:
    """A model in a slice. layers: [first, last) of its own, None for all."""

    model: str
    settings: Settings = field(default_factory=dict)
    layers: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """Layers of the output that are made of the same models. base: where it is another than the job's."""

    parts: tuple[Part, ...]
    settings: Settings = field(default_factory=dict)
    base: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A merge, as asked for. sliced: the slices' layers are laid end to end; otherwise the one slice is whole models.

    dtype: what is written, None for what the models have. any_tokenizer: different tokenizers were allowed in words.
    """

    method: Method
    slices: tuple[Slice, ...]
    base: str | None = None
    settings: Settings = field(default_factory=dict)
    sliced: bool = False
    dtype: str | None = None
    seed: int = 0
    any_tokenizer: bool = False
    notes: tuple[str, ...] = ()

    def base_of(self, slice_: Slice) -> str | None:
        return slice_.base or self.base

    def models(self) -> tuple[str, ...]:
        """Every model once; the one whose config and tokenizer the output takes comes first: the base, or the first."""
        named = [part.model for each in self.slices for part in each.parts]
        bases = [base for base in (self.base, *(each.base for each in self.slices)) if base]
        return tuple(dict.fromkeys((*bases, *named)))


class Place(NamedTuple):
    """Where a parameter is asked for: the tensor's name, and t."""

    name: str
    t: float


def setting(*values: Value) -> Setting:
    """A setting of one value, or of a list over the layers."""
    return (Case(values),)


def value_of(job: Job, slice_: Slice, part: Part | None, name: str, place: Place) -> Value | None:
    """The value of parameter `name` for a tensor, None where the parameter is optional and not given.

    part: the model it is asked for, None for what is one for the merge. Raises ValueError, in words: not given, out of
    its bounds.
    """
    parameter = job.method.parameters[name]
    scopes = (*([part.settings] if part else []), slice_.settings, job.settings)
    for scope in scopes:
        found = _evaluated(scope[name], place) if name in scope else None
        if found is not None:
            return _checked(name, parameter, found)
    if parameter.default is None and not parameter.optional:
        whom = f" of {part.model}" if part else ""
        raise ValueError(f"{job.method.name} needs a {name}{whom} for {place.name}")
    return parameter.default


def _evaluated(setting: Setting, place: Place) -> Value | None:
    for case in setting:
        if _for_all(case) or case.filter in place.name:
            return _along(case.values, place.t)
    return None


def _along(values: Gradient, t: float) -> Value:
    if len(values) == 1:
        return values[0]
    scaled = t * (len(values) - 1)
    low = int(scaled)
    if isinstance(values[0], bool):
        return values[low]
    high, share = min(len(values) - 1, low + 1), scaled - low
    return (1 - share) * values[low] + share * values[high]


def _checked(name: str, parameter: Parameter, value: Value) -> Value:
    if parameter.kind == "flag":
        return value
    if abs(value) > LARGEST:
        raise ValueError(f"{name} is {value:g}, beyond fp32, which merges compute in")
    if value < parameter.low or value > parameter.high or parameter.above and value <= parameter.low:
        bounds = f"{'above' if parameter.above else 'from'} {parameter.low:g} to {parameter.high:g}"
        raise ValueError(f"{name} is {value:g}, want {bounds}")
    return value


def misplaced(job: Job, slice_: Slice, settings: Settings, part: Part | None) -> list[str]:
    """What settings say that can have no effect, one line each. part: whose they are, None for a slice's or the
    job's."""
    faults = []
    for name in settings:
        parameter = job.method.parameters.get(name)
        if parameter is None:
            known = ", ".join(job.method.parameters) or "none"
            faults.append(f"{name}: no parameter of {job.method.name} (its parameters: {known})")
        elif part is not None and parameter.scope == "shared":
            faults.append(f"{name}: one for the whole merge, not for the model {part.model}")
        elif part is not None and parameter.scope == "task" and part.model == job.base_of(slice_):
            faults.append(f"{name}: the base {part.model} takes none")
        else:
            faults += _out_of_bounds(name, parameter, settings[name])
            if any(_for_all(case) for case in settings[name][:-1]):
                faults.append(f"{name}: a case without a filter is for all names, those behind it are never reached")
    return faults


def idle_filters(job: Job, names: Sequence[str]) -> list[str]:
    """Filters that are in none of the `names`, one line each: most often a slip, and the value is never used."""
    scopes = [
        job.settings,
        *(each.settings for each in job.slices),
        *(p.settings for each in job.slices for p in each.parts),
    ]
    cases = [
        (name, case.filter) for scope in scopes for name, cases in scope.items() for case in cases if not _for_all(case)
    ]
    parts, every = {part for each in names for part in each.split(".")}, "\n".join(names)
    faults: list[str] = []
    for name, text in dict.fromkeys(cases):
        if "\n" in text or text not in every:
            near = near_misses(text, parts) if len(faults) < _NEAR_MISSES else ""
            faults.append(f"{name}: no tensor's name has the filter {text!r} in it{f'; {near}' if near else ''}")
    return faults


def _for_all(case: Case) -> bool:
    return case.filter in ("", "*")


def _out_of_bounds(name: str, parameter: Parameter, setting: Setting) -> Iterator[str]:
    for value in (value for case in setting for value in case.values):
        try:
            _checked(name, parameter, value)
        except ValueError as e:
            yield str(e)


def contract_faults(job: Job) -> list[str]:
    """What is wrong with the number of models and the base of each slice, one line each."""
    method, faults = job.method, []
    for number, slice_ in enumerate(job.slices, 1):
        where = f"slice {number}: " if job.sliced else ""
        models, base = [part.model for part in slice_.parts], job.base_of(slice_)
        held = base in models
        tasks = len(models) - held
        if len(set(models)) < len(models):
            faults.append(f"{where}a model is named twice: {_twice(models)}")
        if method.base == "needed" and base is None:
            faults.append(f"{where}{method.name} needs a base (--base, base_model)")
        elif base is not None and not held and method.base != "none":
            faults.append(f"{where}the base {base} is not among the models")
        if len(models) < method.least or method.most is not None and len(models) > method.most:
            bound = "" if method.most == method.least else "at most " if method.most else "at least "
            count = method.most or method.least
            wanted = f"{bound}{count} model{'s' * (count > 1)}{', the base counted' * (method.base != 'none')}"
            faults.append(f"{where}{method.name} takes {wanted}; there are {len(models)}")
        if method.name == "nuslerp" and tasks != 2:
            faults.append(f"{where}nuslerp takes 2 models beside the base; there are {tasks}")
        if method.of_task_vectors and not tasks:
            faults.append(f"{where}{method.name} needs a model beside the base")
    return faults


def _twice(models: Sequence[Any]) -> Any:
    return next(model for number, model in enumerate(models) if model in models[:number])


def all_faults(job: Job) -> list[str]:
    """All faults of a job that are known before a model is opened, one line each."""
    faults = contract_faults(job)
    for slice_ in job.slices:
        faults += misplaced(job, slice_, slice_.settings, None)
        for part in slice_.parts:
            faults += misplaced(job, slice_, part.settings, part)
    faults += misplaced(job, job.slices[0], job.settings, None)
    return list(dict.fromkeys(faults))
