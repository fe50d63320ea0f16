"""The subject of an audit: an open checkpoint, its config, and the family with whose rules it is compared.

The parameters are those of the model, or the fp32 masters if a job keeps no others (ZeRO 3). If neither config nor
names identify a family, its rules are not checked, and the report says so.
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
    """A checkpoint with everything that the checks of an audit need to know."""

    opened: Opened
    model: ModelConfig
    kinds: Mapping[str, TensorKind]  # dtype and shape of each parameter
    # as `kinds`, but a quantised weight is one tensor: with the shape of its floats and the dtype of its codes
    weights: Mapping[str, TensorKind]
    quantised: Quantised  # which weights are quantised
    state: str  # the state that `kinds` lists
    found: FamilyMatch | None
    why: str  # why no family is known, "" if one is
    arguments: Mapping[str, Any]  # the config as Megatron's arguments, {} if it is not sufficient for them
    asked: bool = False  # was the family given by --family?

    @property
    def sure(self) -> bool:
        """Is the family given by the model's own config or by the user? If it is derived from a job's arguments or from
        names alone, it may be a similar one."""
        return self.found is not None and (self.asked or (self.model.config is not None and not self.model.derived))

    def ruled(self, name: str) -> bool:
        """Does a rule of the family include this name? True if no family is known."""
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
        """The parameters in the form that the checks shared with conversions expect."""
        return ModelTensors(self.kinds, self.quantised, self.weights)

    @property
    def whole(self) -> bool:
        """Is it a complete model, not an adapter?"""
        return not self.opened.format.holds.adapter and not any("lora_" in name for name in self.kinds)


def subject_of(opened: Opened, reading: Reading) -> Subject:
    """The subject of an audit of an open checkpoint. Raises UsageError for a config that can't be read, and for a
    `--family` that does not exist."""
    model = config_of(opened, reading)
    rows = list(opened.catalog.rows())
    state = MODEL if any(row.state == MODEL for row in rows) else MASTER
    kinds = {row.name: TensorKind(row.dtype, row.shape) for row in rows if row.state == state}
    tensors = tensors_of_model(kinds, model.config)
    match, reason = _family(opened, model, tensors.weights, reading)
    try:
        arguments = megatron_args(model.config).config if model.config else {}
    except CkptError:  # a config that no family knows has no arguments
        arguments = {}
    asked = reading.family is not None
    return Subject(opened, model, kinds, tensors.weights, tensors.quantised, state, match, reason, arguments, asked)


def _family(
    opened: Opened, model: ModelConfig, kinds: Mapping[str, TensorKind], reading: Reading
) -> tuple[FamilyMatch | None, str]:
    """The family and "", or None and the reason why none is known."""
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
