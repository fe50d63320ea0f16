"""Do a config and the tensors of a model belong together?

    a Llama's config of 6 layers, tensors of a Qwen3 of 4 layers
        model.layers.4.* is not there
        model.layers.0.self_attn.k_norm.weight is in a layer, and no rule of llama has it

A library takes such a folder without an error: it gives random values to what the config counts and no file holds, and
ignores what the config does not know. So a config that comes from another place than the source (`--config`) is
compared with the tensors before a byte moves; a config that the source brought with it stays as it is, and
`ckpt audit` compares it by the same functions. Rows of vocabularies, an output layer that is not there, and tensors
outside the layers are other checks' (`output_config`, `auditing`). Cost: a few us a tensor, nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckpt_tool.conversion.vocabulary import is_vocabulary
from ckpt_tool.core.target import Wanted
from ckpt_tool.core.tensor import MODEL
from ckpt_tool.errors import InconsistentCheckpoint, InputError, UsageError
from ckpt_tool.families.base import HUB, Config
from ckpt_tool.families.completeness import is_head, missing, strange
from ckpt_tool.families.registry import FamilyMatch, find
from ckpt_tool.families.rewrite import Unfitting, unfitting
from ckpt_tool.families.table import one_of_each
from ckpt_tool.formats.hub_folder.saved_by import MLX
from ckpt_tool.quantised.keep_together import found_in
from ckpt_tool.sources.chosen import Chosen
from ckpt_tool.weight_schemes.declared_scheme import is_of_one_scheme, quantisation
from ckpt_tool.weight_schemes.quantised_weights import DTYPES, FoundWeights, TensorKind

_NO_NAMES = "E1373"  # of `families.registry.find`: the family that the config names has none of the names
_OF_HUB = (HUB, MLX)  # what dialects begin with whose names libraries of the hub load
_SHOWN = 5  # notes of --lenient
_FAULTS = 200  # lines of an error


class ModelTensors(NamedTuple):
    """The tensors of a model, as its family's rules see them."""

    kinds: Mapping[str, TensorKind]  # as they are stored
    quantised: FoundWeights  # what of them are codes and scales
    weights: Mapping[str, TensorKind]  # one for each quantised weight, of the shape of its floats


def tensors_of_model(kinds: Mapping[str, TensorKind], config: Config | None) -> ModelTensors:
    """The tensors, and what they are by the quantisation that the config or their names state."""
    _, quantised = found_in(kinds, config)
    return ModelTensors(kinds, quantised, _join_codes(kinds, quantised))


def _join_codes(kinds: Mapping[str, TensorKind], quantised: FoundWeights) -> Mapping[str, TensorKind]:
    """`kinds` with one tensor a quantised weight, where its codes were."""
    if not quantised.weights:
        return kinds
    made = quantised.weights
    own = quantised.names - made.keys()
    return {
        made[name].made if name in made else name: TensorKind(kind.dtype, made[name].floats) if name in made else kind
        for name, kind in kinds.items()
        if name not in own
    }


def modules_of_unknown_codes(kinds: Mapping[str, TensorKind], config: Config | None) -> set[str]:
    """Modules that an unknown quantisation scheme may cover; which of their tensors belong to it is undecidable."""
    scheme = quantisation(config, kinds)
    if scheme is None or scheme.known:
        return set()
    return {
        name.rpartition(".")[0] for name, kind in kinds.items() if kind.dtype.name in DTYPES or is_of_one_scheme(name)
    }


def surplus_names(match: FamilyMatch, tensors: ModelTensors, config: Config | None) -> list[str]:
    """The names in the layers that no rule of the family has."""
    coded = modules_of_unknown_codes(tensors.kinds, config)
    names = strange(match.family, match.dialect, tensors.weights)
    return [name for name in names if name.rpartition(".")[0] not in coded]


def unfitting_shapes(match: FamilyMatch, tensors: ModelTensors, config: Config) -> Iterator[Unfitting]:
    """The tensors whose shapes the sizes of the config contradict. Rows of vocabularies are another check's, shapes of
    codes no parameters'."""
    codes = {name for name, kind in tensors.kinds.items() if not kind.dtype.is_float or kind.dtype.bits < 16}
    codes |= tensors.quantised.names  # bitsandbytes may call its bytes bf16
    shapes = {name: kind.shape for name, kind in tensors.kinds.items() if name not in codes and not is_vocabulary(name)}
    yield from unfitting(match.family, match.dialect, shapes, match.family.facts(config), every=True)


def say_missing(name: str) -> str:
    """The sentence about a tensor that a whole model has."""
    return f"{name} is not there"


def say_surplus(name: str, match: FamilyMatch) -> str:
    """The sentence about a name that the family does not have."""
    return f"{name} is in a layer, and no rule of {match.family.name} has it"


def say_unfitting(fault: Unfitting) -> str:
    """The sentence about a shape that the config contradicts."""
    wanted = ", ".join("any" if size is None else str(size) for size in fault.wanted)
    return f"{fault.name} is {list(fault.shape)}, by the config [{wanted}]"


def check_config_fits(config: Mapping[str, Any], chosen: Chosen, wanted: Wanted) -> list[str]:
    """Lines for the report about what contradicts the config that the user gave; they are there with `--lenient` alone.

    Raises InconsistentCheckpoint E3061 where anything does."""
    kinds = {each.key.name: TensorKind(each.dtype, each.shape) for each in wanted.tensors if each.key.state == MODEL}
    if not kinds or any("lora_" in name for name in kinds):
        return []
    faults = _find_contradictions(config, kinds, chosen)
    if not faults:
        return []

    given = chosen.config_path or "--config"
    if chosen.lenient:
        more = [f"and {len(faults) - _SHOWN} more of what contradicts {given}"] if len(faults) > _SHOWN else []
        return [*(f"{given} contradicts the tensors: {fault}" for fault in faults[:_SHOWN]), *more]
    raise InconsistentCheckpoint(
        f"the config is not that of these tensors: {faults[0]}",
        code="E3061",
        path=given,
        faults=faults[1:_FAULTS],
        hint=f"pass the config of this model with --config{_describe_family(kinds)}; --lenient writes this one, and a"
        " library then makes up values or does not open the folder",
    )


def _find_contradictions(config: Mapping[str, Any], kinds: Mapping[str, TensorKind], chosen: Chosen) -> list[str]:
    """What contradicts the config, one sentence each; nothing where no family of ours is known by it."""
    tensors = tensors_of_model(kinds, config)
    dialect = chosen.all_hints.dialect
    stated = dialect if isinstance(dialect, str) and dialect not in ("hf", "keep") else None
    try:
        match = find(config, _shapes_of_kinds(tensors.weights), stated=stated)
    except (UsageError, InputError) as error:
        other = _describe_family(kinds)
        is_of_another = error.code == _NO_NAMES and other
        return [f"{error.message.partition(';')[0]}{other}"] if is_of_another else []

    if not match.dialect.startswith(_OF_HUB):  # another system's names, which --dialect asked for
        return []

    # A selection by patterns need not be a complete model. A missing head is reported separately.
    lost = [] if chosen.removed else missing(match.family, match.dialect, tensors.weights, config)
    return [
        *(say_missing(name) for name in lost if not is_head(name)),
        *(say_surplus(name, match) for name in surplus_names(match, tensors, config)),
        *(say_unfitting(fault) for fault in unfitting_shapes(match, tensors, config)),
    ]


def _describe_family(kinds: Mapping[str, TensorKind]) -> str:
    """` (by their names the tensors are those of qwen3)`, "" if the names alone do not identify a family."""
    try:
        match = find(None, _shapes_of_kinds(kinds))
    except (UsageError, InputError):
        return ""
    is_whole = not strange(match.family, match.dialect, kinds)
    return f" (by their names the tensors are those of {match.family.name})" if is_whole else ""


def _shapes_of_kinds(kinds: Mapping[str, TensorKind]) -> dict[str, tuple[int, ...]]:
    """{name: shape} of one tensor of each kind, which is enough to identify a family."""
    return {name: kinds[name].shape for name in one_of_each(kinds)}
