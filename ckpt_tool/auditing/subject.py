"""The subject of an audit: an open checkpoint, its config, and the family with whose rules it is compared.

The parameters are those of the model, or the fp32 masters where a job keeps no others (ZeRO 3). Where no family is
known by config and names, the rules are left out, and the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt_tool.conversion.config_fit import ModelTensors, tensors_of_model
from ckpt_tool.core.tensor import MASTER, MODEL
from ckpt_tool.errors import CkptError, InputError, UsageError
from ckpt_tool.families.base import Config
from ckpt_tool.families.config.translation import megatron_args
from ckpt_tool.families.registry import FamilyMatch, find
from ckpt_tool.families.table import one_of_each
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import DIALECTS
from ckpt_tool.sources.config import ModelConfig, config_of
from ckpt_tool.sources.opening import Opened
from ckpt_tool.weight_schemes.quantised_weights import FoundWeights as Quantised
from ckpt_tool.weight_schemes.quantised_weights import TensorKind

Shape = tuple[int, ...]


class Subject(NamedTuple):
    """A checkpoint as its audit sees it."""

    opened: Opened
    model: ModelConfig
    kinds: Mapping[str, TensorKind]  # dtype and shape of each parameter
    # as `kinds`, but a quantised weight is one tensor: with the shape of its floats and the dtype of its codes
    weights: Mapping[str, TensorKind]
    quantised: Quantised  # which weights are quantised
    state: str  # the state that `kinds` lists
    found: FamilyMatch | None
    why: str  # why no family is known, where none is
    arguments: Mapping[str, Any]  # the config in Megatron's words, {} where it says too little
    asked: bool = False  # by --family

    @property
    def sure(self) -> bool:
        """Does a config of the model itself, or the user, say which family it is? What is made of a job's arguments, or
        known by names alone, may be another that is near."""
        return self.found is not None and (self.asked or (self.model.config is not None and not self.model.derived))

    def ruled(self, name: str) -> bool:
        """Does a rule of the family name it? True where no family is known."""
        return self.found is None or self.found.family.table(self.found.dialect).knows(name)

    @property
    def config(self) -> Config:
        """The model's config, empty if there is none."""
        return self.model.config or {}

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of all tensors by name."""
        return {name: kind.shape for name, kind in self.kinds.items()}

    @property
    def tensors(self) -> ModelTensors:
        """The parameters, as the checks that conversions share take them."""
        return ModelTensors(self.kinds, self.quantised, self.weights)

    @property
    def whole(self) -> bool:
        """Is it a model, and no adapter?"""
        return not self.opened.format.holds.adapter and not any("lora_" in name for name in self.kinds)


def subject_of(opened: Opened, reading: Reading) -> Subject:
    """Raises UsageError (a config that can't be read, `--family` that there is not)."""
    model = config_of(opened, reading)
    rows = list(opened.catalog.rows())
    state = MODEL if any(row.state == MODEL for row in rows) else MASTER
    kinds = {row.name: TensorKind(row.dtype, row.shape) for row in rows if row.state == state}
    tensors = tensors_of_model(kinds, model.config)
    match, reason = _family(opened, model, tensors.weights, reading)
    try:
        arguments = megatron_args(model.config).config if model.config else {}
    except CkptError:  # a config of which nothing is known
        arguments = {}
    asked = reading.family is not None
    return Subject(opened, model, kinds, tensors.weights, tensors.quantised, state, match, reason, arguments, asked)


def _family(
    opened: Opened, model: ModelConfig, kinds: Mapping[str, TensorKind], reading: Reading
) -> tuple[FamilyMatch | None, str]:
    if model.foreign is not None and reading.family is None:
        return None, model.foreign.message
    format_dialect = opened.catalog.hints.dialect
    home = registry.by_name(opened.catalog.format).holds.dialect
    named_dialect = format_dialect if isinstance(format_dialect, str) and format_dialect in DIALECTS else home
    try:
        alike = {name: kinds[name].shape for name in one_of_each(kinds)}
        return find(
            model.config,
            alike,
            stated=None if named_dialect in ("hf", "keep") else named_dialect,
            family=reading.family,
        ), ""
    except (UsageError, InputError) as e:
        if reading.family is not None:
            raise
        return None, e.message
