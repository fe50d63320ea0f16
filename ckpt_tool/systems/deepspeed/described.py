"""What a DeepSpeed checkpoint says of itself besides values: the record and the parameter groups in the extras.

The one idea: whatever a writer must know to lay the same training state out again (ZeRO stage, order and groups of the
flat tensors, ties, buffers, pipeline stages, MoE layers) is one plain value under `deepspeed` in the extras, so that it
passes through any format that keeps extras; the optimizer's options stand under `optimizer`, one entry a parameter
group:

    {"deepspeed": {"zero_stage": 1, "dtype": "BF16", "shared": {"head.weight": "embed.weight"}, ...},
     "optimizer": {"param_groups": [{"lr": 0.01, "params": ["embed.weight", ...]}], "scalars": [{"step": 3.0}], ...},
     "global_steps": 3, "lr_scheduler": {...}, ...}

`params` are names in the order in which a flat group holds them (of the whole model: experts of all ranks, parameters
of all stages). Groups are taken as any source gives them (names, or numbers with `param_names`); names that have no
fp32 weight in the output fall out, and parameters that no group lists get a group of their own. Extras are data of a
checkpoint: nothing is believed that has not the right type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt_tool.formats.state_dict.words import OPTIMIZER_ROOTS

HOME = "deepspeed"
OPTIMIZER = "optimizer"
WRAPPER = "wrapper"  # under `optimizer`: what DeepSpeed's 16-bit wrapper keeps beside
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
        stated = extras.get(HOME)
        if not isinstance(stated, Mapping):
            return None
        try:
            return Described(**{name: _BELIEVED[name](stated[name]) for name in _BELIEVED if name in stated})
        except TypeError:
            return None


def _lists(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_lists(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


# -- what is believed: each raises TypeError for another value ---------------------------------------------------------


def _one_of(*known: object) -> Any:
    def believed(value: Any) -> Any:
        if type(value) is not type(known[0]) or value not in known:
            raise TypeError
        return value

    return believed


def _all(value: Any, kind: type) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not all(type(item) is kind for item in value):
        raise TypeError
    return tuple(value)


def _names(value: Any) -> tuple[str, ...]:
    return _all(value, str)


def _stages(value: Any) -> tuple[tuple[tuple[str, ...], ...], ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(stage, list | tuple) for stage in value):
        raise TypeError
    return tuple(tuple(map(_names, stage)) for stage in value)


def _map_to(kind: type) -> Any:
    def believed(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError
        return dict(zip(_names([*value]), _all([*value.values()], kind), strict=True))

    return believed


_BELIEVED: Mapping[str, Any] = {
    "zero_stage": _one_of(0, 1, 2, 3),
    "plain_bf16": bool,
    "prefix": _one_of("", "bf16_", "fp16_"),
    "dtype": lambda value: _names([value])[0],
    "aligned": bool,
    "round_robin": bool,
    "module": _names,
    "buffers": _names,
    "shared": _map_to(str),
    "frozen": _names,
    "stages": _stages,
    "tied": _map_to(int),
    "moe": _names,
}


# -- the optimizer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """What stands under `optimizer`."""

    groups: Sequence[Mapping[str, Any]] = ()  # `param_groups`, whose `params` are names
    scalars: Sequence[Mapping[str, Any]] | None = None  # of each group (`step`), None without ZeRO
    dtypes: Mapping[str, str] = field(default_factory=dict)  # of those that were tensors
    rest: Mapping[str, Any] = field(default_factory=dict)  # of the whole optimizer (`loss_scaler`)

    def to_extras(self) -> dict[str, Any]:
        """Plain values."""
        flat = {} if self.scalars is None else {"scalars": list(self.scalars), "scalar_dtypes": dict(self.dtypes)}
        return {"param_groups": list(self.groups), **flat, **self.rest}

    @staticmethod
    def from_extras(extras: Mapping[str, Any]) -> Options:
        """All but the groups and their scalars, which other sources keep elsewhere (`stated_groups`)."""
        home = extras.get(OPTIMIZER)
        rest = dict(home) if isinstance(home, Mapping) else {}
        _, _, dtypes = (rest.pop(key, None) for key in ("param_groups", "scalars", "scalar_dtypes"))
        named = {k: d for k, d in dtypes.items() if isinstance(d, str)} if isinstance(dtypes, Mapping) else {}
        return Options(dtypes=named, rest=rest)

    @property
    def wrapper(self) -> Mapping[str, Any] | None:
        """What DeepSpeed's 16-bit wrapper keeps beside the optimizer, None where there was none."""
        found = self.rest.get(WRAPPER)
        return found if isinstance(found, Mapping) else None


# -- parameter groups --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ZeroGroup:
    """A parameter group."""

    names: list[str]
    options: Mapping[str, Any] = field(default_factory=dict)  # without `params`
    scalars: Mapping[str, Any] = field(default_factory=dict)  # `step` and such
    ep: int = 0  # expert ranks, 0 for a group without experts
    listed: bool = True  # does the source list it?
    number: int = 0  # among `groups_of`


def groups_of(extras: Mapping[str, Any], masters: Mapping[str, tuple[int, ...]]) -> list[ZeroGroup]:
    """The groups of the parameters in `masters`, in the source's order."""
    out: list[ZeroGroup] = []
    seen: set[str] = set()
    for stated, scalars in stated_groups(extras):
        names = [name for name in dict.fromkeys(names_of(stated)) if name in masters and name not in seen]
        seen |= set(names)
        options = {key: item for key, item in stated.items() if key not in ("params", "param_names")}
        if names:
            out.append(ZeroGroup(names, options, scalars, number=len(out)))
    rest = [name for name in masters if name not in seen]
    if rest:
        first = out[0] if out else ZeroGroup([])
        out.append(ZeroGroup(rest, first.options, first.scalars, listed=False, number=len(out)))
    return out


def stated_groups(extras: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """(parameter group, its scalars) of an optimizer, or of all of a chained one (Megatron's experts)."""
    homes = _homes(extras)
    groups = [group for home in homes for group in home["param_groups"] if isinstance(group, Mapping)]
    listed = homes[0].get("scalars") if len(homes) == 1 else None
    scalars = listed if isinstance(listed, list) and len(listed) == len(groups) else [None] * len(groups)
    return [(g, s if isinstance(s, Mapping) else {}) for g, s in zip(groups, scalars, strict=True)]


def names_of(group: Mapping[str, Any]) -> list[str]:
    """The parameters of a group, where it has names."""
    for key in ("param_names", "params"):
        names = group.get(key)
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            return list(names)
    return []


def _homes(extras: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of the extras that have an optimizer's groups."""
    if isinstance(extras.get("param_groups"), list):
        return [extras]
    for key in sorted(OPTIMIZER_ROOTS, key=lambda key: (key != OPTIMIZER, key)):
        found = extras.get(key)
        parts = (part for part in (found if isinstance(found, list | tuple) else [found]) if isinstance(part, Mapping))
        inner = ((part if isinstance(part.get("param_groups"), list) else part.get(OPTIMIZER)) for part in parts)
        homes = [home for home in inner if isinstance(home, Mapping) and isinstance(home.get("param_groups"), list)]
        if homes:
            return homes
    return []
