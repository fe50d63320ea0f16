"""Chosen: the tensors to be written, as an immutable value that each pass of a conversion takes and returns.

Some of its tensors may be computed; dequantising, adapters and merges use that:

    with_computed(chosen, [FoldedLora(...), ...], "base/ with adapter/", dtypes={key: BF16}, option="merge --method
    lora")

A computed tensor replaces the chosen one with the same key, or is appended. It is computed in F32 and rounded once, to
`dtypes` of its key or to the dtype given by `--dtype`. The passes are in `conversion.passes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.tensor import EXTRAS, MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import Format
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import VARIANTS, Writing
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.opening import Opened
from ckpt_tool.sources.select import group_of

if TYPE_CHECKING:
    from ckpt_tool.run.computed import Input, Recipe

# The reason of an entry of `dropped` that `--state` or `--drop` leaves out.
AS_REQUESTED = "as requested"


class Reported(Protocol):
    """What a pass adds to the report. done: have the values been processed?"""

    def document(self, *, done: bool) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is to be written, independent of the output's format."""

    sources: tuple[Opened, ...]
    # each tensor, under its key in the output, and the index in `sources` of the source that holds it
    stored: tuple[Stored, ...]
    extras: Mapping[str, Any]
    # removed, dropped: for the report
    removed: tuple[LogicalTensor, ...] = ()
    dropped: tuple[dict[str, Any], ...] = ()
    inherits: bool = False  # degrees that the user does not give are those of the first source
    notes: tuple[str, ...] = ()
    # keys whose values differ from the source's tensor of that key, so that the source's digest does not apply
    renewed: frozenset[TensorKey] = frozenset()
    lenient: bool = False  # `--lenient`
    first_replica: bool = False  # take replica 0 without comparing the others, as an option asks for
    casts: Mapping[TensorKey, DType] = field(default_factory=dict)  # what the format rounds (`formats.base.Fitted`)
    unlisted: tuple[TensorKey, ...] = ()  # tensors that the format stores as plain values
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # source parameter -> the output's made of it
    config: Mapping[str, Any] | None = None  # the model's config: that of `--config`, or set by a pass
    config_from: str = "--config"  # where the config comes from, in words
    config_path: str | None = None  # the path given by `--config`
    hints: Hints | None = None  # None for the first source's; set by passes that change names
    untrue: tuple[str, ...] = ()  # keys of config.json that no longer hold for the output: `quantization_config`
    stale: tuple[str, ...] = ()  # side files that no longer hold for the output and are not copied
    stated: Mapping[str, Any] = field(default_factory=dict)  # keys of config.json that are added for the output
    reported: Reported | None = None  # what the report says about values once they have been processed

    @property
    def home(self) -> str:
        """The dialect of the first source's format, `keep` if it has none of its own."""
        return registry.by_name(self.sources[0].catalog.format).holds.dialect

    @property
    def all_hints(self) -> Hints:
        """The hints that formats recorded about the source, or those of a later pass."""
        return self.sources[0].catalog.hints if self.hints is None else self.hints

    def dialect_in(self, fmt: Format) -> str:
        """The dialect of an output in `fmt`: `hf`, `paddle`, `megatron`, ..., `keep` if it is unknown."""
        dialect = self.all_hints.dialect
        if isinstance(dialect, str):
            return dialect
        return fmt.holds.dialect if self.home == "keep" else self.home

    @property
    def model(self) -> dict[str, Stored]:
        """The tensors of the model, by name."""
        return {row.tensor.key.name: row for row in self.stored if row.tensor.key.state == MODEL}

    def input(self, row: Stored) -> Input:
        """A tensor in the form that a recipe reads."""
        from ckpt_tool.run.computed import Input

        return Input(row.tensor, self.sources[row.source].tree)

    def noted(self, *lines: str) -> Chosen:
        """A copy with more lines for the report."""
        return replace(self, notes=(*self.notes, *lines)) if lines else self


class Conversion(NamedTuple):
    """The job of a conversion: how its sources are read, what is written, and in which format."""

    reading: Reading
    writing: Writing
    fmt: Format
    inherits: bool = False  # degrees that the user does not give are those of the source
    # is the source one of several? Then a rule of --rename that matches nothing in it may match in another
    of_several: bool = False

    @classmethod
    def of(cls, opened: Opened, reading: Reading, writing: Writing) -> Conversion:
        """The conversion to `--to`, or to the source's own format; the latter keeps the source's degrees if its files
        are those of ranks."""
        fmt = registry.by_name(writing.to or opened.catalog.format)
        return cls(reading, writing, fmt, fmt.name == opened.catalog.format and bool(fmt.holds.mesh))

    @property
    def dialect(self) -> str:
        """The dialect of the output: `--dialect`, or that of the format; for a variant, the system's dialect."""
        asked = self.writing.dialect or self.fmt.holds.dialect
        return VARIANTS.get(asked, asked)


def dtypes_of(writing: Writing) -> dict[str, DType]:
    """The casts of `--dtype`: state ("" for all) -> dtype."""
    return {state: DTYPES[name] for state, name in writing.dtypes.items()}


def written_as(tensor: LogicalTensor, dtypes: Mapping[str, DType], casts: Mapping[TensorKey, DType]) -> DType:
    """The dtype of a tensor in the output, by the most specific rule for its state. Integers and `step` counters are
    never cast.

    dtypes: from `dtypes_of`. casts: `Chosen.casts`."""
    if tensor.key in casts:
        return casts[tensor.key]
    if not dtypes or tensor.key.state in ("step", "extras") or not tensor.dtype.is_float or tensor.dtype.bits < 8:
        return tensor.dtype
    state = tensor.key.state
    return dtypes.get(state) or dtypes.get(group_of(state)) or dtypes.get("") or tensor.dtype


def left_behind(tensors: Iterable[LogicalTensor], reason: str, *, named: bool = True) -> list[dict[str, Any]]:
    """Report entries for tensors that are not written, one for each state. named: include the tensors' names?"""
    rows: dict[str, list[LogicalTensor]] = {}
    for tensor in tensors:
        rows.setdefault(tensor.key.state, []).append(tensor)
    entries: list[dict[str, Any]] = []
    for state, left in rows.items():
        entry: dict[str, Any] = {
            "state": state,
            "tensors": len(left),
            "bytes": sum(tensor.nbytes for tensor in left),
        }
        if named:
            entry["names"] = [tensor.key.name for tensor in left[:50]]
        entry["reason"] = reason
        entries.append(entry)
    return entries


def extras_left_behind(extras: Mapping[str, Any], reason: str, sources: Iterable[Opened]) -> dict[str, Any]:
    """The entry of the report for extras that are not written.

    A plain number inside the model's own state dict may be a parameter (`logit_scale`), so it is listed by its own path
    and not by that of the model.
    """
    from ckpt_tool.formats.state_dict.numbers_of_model import levels_of_model, numbers_of_model

    levels = levels_of_model(tensor for opened in sources for tensor in opened.catalog.tensors.values())
    names: list[str] = []
    for name, value in extras.items():
        numbers, has_more = numbers_of_model(value, (name,), levels)
        names += [f"{dotted(path)} (a number)" for path in numbers]
        if has_more or not numbers:
            names.append(str(name))
    return {"state": EXTRAS, "tensors": 0, "bytes": 0, "names": sorted(names), "reason": reason}


def refuse_saved_plan(writing: Writing, option: str) -> None:
    """Raise UsageError E0264 if the plan is to be run by another process, which lacks the computed values.

    option: the option that computes values, for the message.
    """
    if writing.plan_file or writing.ray:
        raise UsageError(
            f"{option} computes values while it reads, which a saved plan can't do yet",
            code="E0264",
            hint="run it itself, without --plan and --ray",
        )


def with_computed(
    chosen: Chosen,
    recipes: Sequence[Recipe],
    shown: str,
    writing: Writing,
    *,
    option: str,
    dtypes: Mapping[TensorKey, DType],
    notes: Sequence[str] = (),
) -> Chosen:
    """Add the tensors that `recipes` compute to `chosen`; they replace chosen tensors with the same key.

    Args:
        shown: the name of the computed source in messages.
        option: the option that requests it, for the error.
        dtypes: the dtype to which each tensor is rounded, F32 by default; `--dtype` takes precedence.

    Raises UsageError E0264 with --plan and --ray.
    """
    from ckpt_tool.run.computed import ComputedTree

    refuse_saved_plan(writing, option)
    if not recipes:
        return chosen.noted(*notes)
    tree = ComputedTree(shown, recipes)
    number = len(chosen.sources)
    made = {tensor.key: Stored(number, tensor) for tensor in tree.tensors}
    stored = [made.pop(row.tensor.key, row) for row in chosen.stored]
    opened = Opened(tree, chosen.sources[0].format, Catalog(chosen.sources[0].catalog.format, {}))
    # `--dtype` for all states, the state or its group takes precedence over the recipes' dtypes.
    given = writing.dtypes.keys()
    casts = {key: dtype for key, dtype in dtypes.items() if not given & {"", key.state, group_of(key.state)}}
    return replace(
        chosen,
        sources=(*chosen.sources, opened),
        stored=(*stored, *made.values()),
        renewed=chosen.renewed | {tensor.key for tensor in tree.tensors},
        casts={**chosen.casts, **casts},
        notes=(*chosen.notes, *notes),
    )


def memory_of_computed(chosen: Chosen) -> int:
    """The most bytes that a thread needs in memory for computed tensors."""
    if all(opened.catalog.tensors for opened in chosen.sources):
        return 0
    from ckpt_tool.run.computed import ComputedTree

    return max((one.tree.memory for one in chosen.sources if isinstance(one.tree, ComputedTree)), default=0)


def more_than_computed(chosen: Chosen) -> int:
    """How many bytes more are read from the sources' files for computed tensors than the plan counts for them.

    The plan counts a computed tensor as if it were itself stored in a file.
    """
    if all(opened.catalog.tensors for opened in chosen.sources):
        return 0
    from ckpt_tool.run.computed import ComputedTree

    trees = {n: opened.tree for n, opened in enumerate(chosen.sources) if isinstance(opened.tree, ComputedTree)}
    rows = [row for row in chosen.stored if row.source in trees]
    files = {(row.source, chunk.array.path) for row in rows for chunk in row.tensor.chunks}
    return sum(trees[n].bytes_of_inputs(path) for n, path in files) - sum(row.tensor.nbytes for row in rows)
