"""Chosen: what shall be written, as values, before any format has seen it: between `choose` and `write`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_tool.commands.source import Opened
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.formats import registry
from ckpt_tool.plan.moves import Stored


@dataclass(frozen=True, slots=True)
class Chosen:
    """What shall be written, before any format has seen it.

    stored: each tensor and the source (by position in `sources`) that it lies in, under the key it shall have.
    removed, dropped: for the report. inherits: degrees that the user does not name are those of the first source.
    """

    sources: tuple[Opened, ...]
    stored: tuple[Stored, ...]
    extras: Mapping[str, Any]
    removed: tuple[LogicalTensor, ...] = ()
    dropped: tuple[dict[str, Any], ...] = ()
    inherits: bool = False
    notes: tuple[str, ...] = ()
    renewed: frozenset[TensorKey] = frozenset()  # their values are not those of the source's tensor of that key
    first_replica: bool = False  # take replica 0 without comparing the others: it was said in words
    casts: Mapping[TensorKey, DType] = field(default_factory=dict)  # what the format rounds (`formats.base.Fitted`)
    unlisted: tuple[TensorKey, ...] = ()  # what it keeps as plain values
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # source parameter -> those made of it
    config: Mapping[str, Any] | None = None  # what `--config` says
    config_from: str = "--config"  # what told it, in words
    hints: Mapping[str, Any] | None = None  # where they are not the first source's: its names are others now
    untrue: tuple[str, ...] = ()  # keys of config.json that the output is no longer: `quantization_config`
    stale: tuple[str, ...] = ()  # side files that are no longer true, and not copied

    @property
    def home(self) -> str:
        """The dialect at home in the first source's format, `keep` where it has none."""
        return registry.by_name(self.sources[0].catalog.format).holds.dialect

    @property
    def all_hints(self) -> Mapping[str, Any]:
        """What formats remember of the source."""
        return self.sources[0].catalog.hints if self.hints is None else self.hints


def left_behind(tensors: Iterable[LogicalTensor], reason: str) -> list[dict[str, Any]]:
    """Entries of the report for tensors that are not written, one a state."""
    rows: dict[str, list[LogicalTensor]] = {}
    for tensor in tensors:
        rows.setdefault(tensor.key.state, []).append(tensor)
    return [
        {"state": state, "tensors": len(found), "bytes": sum(tensor.nbytes for tensor in found),
         "names": [tensor.key.name for tensor in found[:50]], "reason": reason}
        for state, found in rows.items()
    ]  # fmt: skip
