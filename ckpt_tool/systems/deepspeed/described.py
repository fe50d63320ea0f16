"""How a DeepSpeed job stored its training state: the record and the parameter groups in a catalog's extras.

Whatever a writer must know to write the same training state again (ZeRO stage, order and groups of the flat tensors,
ties, buffers, pipeline stages, MoE layers) is one plain value under `deepspeed` in the extras, so it passes through any
format that stores extras. The optimizer's options are under `optimizer`, one entry for each parameter group:

    {"deepspeed": {"zero_stage": 1, "dtype": "BF16", "shared": {"head.weight": "embed.weight"}, ...},
     "optimizer": {"param_groups": [{"lr": 0.01, "params": ["embed.weight", ...]}], "scalars": [{"step": 3.0}], ...},
     "global_steps": 3, "lr_scheduler": {...}, ...}

`params` are names in the order in which a flat group holds them (of the whole model: experts of all ranks, parameters
of all stages). Groups of any source are accepted (names, or numbers with `param_names`); names that have no fp32 weight
in the output are dropped, and parameters that no group lists get a group of their own. Extras are data of a checkpoint:
values of a wrong type are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt_tool.formats.state_dict.words import OPTIMIZER_ROOTS

HOME = "deepspeed"
OPTIMIZER = "optimizer"
WRAPPER = "wrapper"  # under `optimizer`: values that DeepSpeed's 16-bit wrapper stores next to the optimizer's state
UNUSED = "ckpt_unused"  # in a module file: values that DeepSpeed would misread under their own keys


@dataclass(frozen=True, slots=True)
class Described:
    """How a DeepSpeed job stored its training state."""

    zero_stage: int = 1  # 0 to 3
    plain_bf16: bool = False  # BF16_Optimizer
    prefix: str = ""  # of the optimizer files' names
    dtype: str = ""  # of the module's parameters, "" where unknown
    aligned: bool = False  # parameters are padded in flat tensors (parameter_alignment)
    round_robin: bool = False  # parameters are dealt to ranks (round_robin_gradients)
    module: tuple[str, ...] = ()  # names in the module's order
    buffers: tuple[str, ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict)  # alias -> kept name
    frozen: tuple[str, ...] = ()  # parameters without optimizer
    stages: tuple[tuple[tuple[str, ...], ...], ...] = ()  # of a pipeline: names in flat order by stage and group
    tied: Mapping[str, int] = field(default_factory=dict)  # layer index of each tied key
    moe: tuple[str, ...] = ()  # prefixes of the MoE layers in the order of their numbers

    def to_extras(self) -> dict[str, Any]:
        """Return the record as plain values (lists and dicts) for the extras."""
        return {name: _to_lists(value) for name, value in asdict(self).items()}

    @staticmethod
    def from_extras(extras: Mapping[str, Any]) -> Described | None:
        """Return the record in the extras, None if there is none or a value has a wrong type."""
        stated = extras.get(HOME)
        if not isinstance(stated, Mapping):
            return None
        try:
            return Described(**{name: _PARSERS[name](stated[name]) for name in _PARSERS if name in stated})
        except TypeError:
            return None


def _to_lists(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_lists(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


# -- parsers of the record's values: each raises TypeError for a value of another kind ---------------------------------


def _choice_parser(*known: object) -> Any:
    def parse(value: Any) -> Any:
        if type(value) is not type(known[0]) or value not in known:
            raise TypeError
        return value

    return parse


def _parse_tuple(value: Any, kind: type) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or not all(type(item) is kind for item in value):
        raise TypeError
    return tuple(value)


def _parse_names(value: Any) -> tuple[str, ...]:
    return _parse_tuple(value, str)


def _parse_stages(value: Any) -> tuple[tuple[tuple[str, ...], ...], ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(stage, list | tuple) for stage in value):
        raise TypeError
    return tuple(tuple(map(_parse_names, stage)) for stage in value)


def _mapping_parser(kind: type) -> Any:
    def parse(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError
        return dict(zip(_parse_names([*value]), _parse_tuple([*value.values()], kind), strict=True))

    return parse


_PARSERS: Mapping[str, Any] = {
    "zero_stage": _choice_parser(0, 1, 2, 3),
    "plain_bf16": bool,
    "prefix": _choice_parser("", "bf16_", "fp16_"),
    "dtype": lambda value: _parse_names([value])[0],
    "aligned": bool,
    "round_robin": bool,
    "module": _parse_names,
    "buffers": _parse_names,
    "shared": _mapping_parser(str),
    "frozen": _parse_names,
    "stages": _parse_stages,
    "tied": _mapping_parser(int),
    "moe": _parse_names,
}


# -- the optimizer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """The optimizer's options, stored under `optimizer` in the extras."""

    groups: Sequence[Mapping[str, Any]] = ()  # `param_groups`, whose `params` are names
    scalars: Sequence[Mapping[str, Any]] | None = None  # of each group (`step`), None without ZeRO
    dtypes: Mapping[str, str] = field(default_factory=dict)  # of the scalars that were tensors
    rest: Mapping[str, Any] = field(default_factory=dict)  # of the whole optimizer (`loss_scaler`)

    def to_extras(self) -> dict[str, Any]:
        """Return the options as plain values for the extras."""
        flat = {} if self.scalars is None else {"scalars": list(self.scalars), "scalar_dtypes": dict(self.dtypes)}
        return {"param_groups": list(self.groups), **flat, **self.rest}

    @staticmethod
    def from_extras(extras: Mapping[str, Any]) -> Options:
        """Return the options without the groups and their scalars, which other sources store elsewhere.

        `stated_groups` finds the groups of any source.
        """
        optimizer = extras.get(OPTIMIZER)
        rest = dict(optimizer) if isinstance(optimizer, Mapping) else {}
        rest.pop("param_groups", None)
        rest.pop("scalars", None)
        stated_dtypes = rest.pop("scalar_dtypes", None)
        dtypes = {}
        if isinstance(stated_dtypes, Mapping):
            dtypes = {key: dtype for key, dtype in stated_dtypes.items() if isinstance(dtype, str)}
        return Options(dtypes=dtypes, rest=rest)

    @property
    def wrapper(self) -> Mapping[str, Any] | None:
        """The values that DeepSpeed's 16-bit wrapper stored next to the optimizer's state, None if it was not used."""
        wrapper = self.rest.get(WRAPPER)
        return wrapper if isinstance(wrapper, Mapping) else None


# -- parameter groups --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ZeroGroup:
    """A parameter group of the new checkpoint."""

    names: list[str]
    options: Mapping[str, Any] = field(default_factory=dict)  # without `params`
    scalars: Mapping[str, Any] = field(default_factory=dict)  # `step` and such
    ep: int = 0  # expert ranks, 0 for a group without experts
    listed: bool = True  # False: made for parameters that no group of the source lists
    number: int = 0  # position in the result of `groups_of`


def groups_of(extras: Mapping[str, Any], masters: Mapping[str, tuple[int, ...]]) -> list[ZeroGroup]:
    """Return the groups of the parameters in `masters` (name -> shape), in the source's order."""
    groups: list[ZeroGroup] = []
    grouped_names: set[str] = set()
    for stated, scalars in stated_groups(extras):
        names = [name for name in dict.fromkeys(names_of(stated)) if name in masters and name not in grouped_names]
        grouped_names |= set(names)
        options = {key: item for key, item in stated.items() if key not in ("params", "param_names")}
        if names:
            groups.append(ZeroGroup(names, options, scalars, number=len(groups)))
    ungrouped_names = [name for name in masters if name not in grouped_names]
    if ungrouped_names:
        first = groups[0] if groups else ZeroGroup([])
        groups.append(ZeroGroup(ungrouped_names, first.options, first.scalars, listed=False, number=len(groups)))
    return groups


def stated_groups(extras: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return (parameter group, its scalars) for all groups of the source's optimizer.

    The groups of chained optimizers (Megatron's experts) follow each other; their scalars are unknown, so they are {}.
    """
    optimizers = _find_optimizers(extras)
    groups = [group for home in optimizers for group in home["param_groups"] if isinstance(group, Mapping)]
    stated_scalars = optimizers[0].get("scalars") if len(optimizers) == 1 else None
    scalars = (
        stated_scalars
        if isinstance(stated_scalars, list) and len(stated_scalars) == len(groups)
        else [None] * len(groups)
    )
    return [(g, s if isinstance(s, Mapping) else {}) for g, s in zip(groups, scalars, strict=True)]


def names_of(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's parameters, [] if it has only numbers."""
    for key in ("param_names", "params"):
        names = group.get(key)
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            return list(names)
    return []


def _find_optimizers(extras: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the dicts in the extras that have `param_groups`: one, or several of a chained optimizer."""
    if isinstance(extras.get("param_groups"), list):
        return [extras]
    for key in sorted(OPTIMIZER_ROOTS, key=lambda key: (key != OPTIMIZER, key)):
        value = extras.get(key)
        optimizers = []
        for part in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(part, Mapping):
                continue
            # Megatron's chained optimizers have theirs one level down.
            inner = part if isinstance(part.get("param_groups"), list) else part.get(OPTIMIZER)
            if isinstance(inner, Mapping) and isinstance(inner.get("param_groups"), list):
                optimizers.append(inner)
        if optimizers:
            return optimizers
    return []
