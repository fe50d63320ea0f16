"""Quantised weights without `--dequantize`: they are moved together with their scales and never cast.

--remove-keys PATTERN   also removes the scales of removed weights; --keep-keys also keeps the scales of kept weights
--dtype DTYPE           leaves codes and scales as they are, with a note: cast, they would no longer be a weight
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.patterns import Names
from ckpt_tool.core.target import Target, Wanted, WantedTensor
from ckpt_tool.core.tensor import MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import InputError, UsageError
from ckpt_tool.formats.base import Format
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.quantised.weight_counts import config_of
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.sources.opening import Opened
from ckpt_tool.weight_schemes.declared_scheme import DeclaredScheme, found_by, quantisation
from ckpt_tool.weight_schemes.quantised_weights import DTYPES, FoundWeights, TensorKind, Units, has_integers, units


def found_in(
    tensors: Mapping[str, TensorKind], config: Mapping[str, Any] | None = None, *, checked: bool = True
) -> tuple[DeclaredScheme | None, FoundWeights]:
    """The scheme of a model's tensors, from its config or their names, and the quantised weights among them.

    checked: compare the weights with the scheme. A caller that only moves them needs no faults, and the check takes as
    long as the search.
    """
    scheme = quantisation(config, tensors if has_integers(tensors.values()) else ())
    return scheme, found_by(scheme, tensors, checked=checked)


def model_kinds(tensors: Iterable[LogicalTensor]) -> dict[str, TensorKind]:
    """Dtypes and shapes of the model's tensors; {} if none can be a code, which is the most common case."""
    kinds = {tensor.key.name: TensorKind(tensor.dtype, tensor.shape) for tensor in tensors if tensor.key.state == MODEL}
    return kinds if any(kind.dtype.name in DTYPES for kind in kinds.values()) else {}


def keep_parts_together(
    catalog: Catalog | Mapping[TensorKey, LogicalTensor],
    kept: list[TensorKey],
    removed: list[TensorKey],
    writing: Writing,
    source: Opened,
    reading: Reading,
) -> tuple[list[TensorKey], list[TensorKey]]:
    """(kept, removed), corrected: scales are kept or removed with their weight, unless a pattern names them. The config
    of `source` says how weights are quantised."""
    if not removed:
        return kept, removed
    tensors = catalog.tensors if isinstance(catalog, Catalog) else catalog
    _, found = found_in(
        model_kinds(tensors[key] for key in (*kept, *removed)), config_of(source, reading), checked=False
    )
    if not found.weights:
        return kept, removed
    parts = (part for weight in found.weights.values() for part in weight.parts.values())
    removed_keys = set(removed)
    named_parts = Names(parts).matched(writing.remove_keys)[0] if writing.keep_keys else set[str]()
    for weight in found.weights.values():
        is_removed = TensorKey(weight.lead) in removed_keys
        for part in map(TensorKey, weight.parts.values()):
            if is_removed:
                removed_keys.add(part)
            elif writing.keep_keys and part.name not in named_parts:
                removed_keys.discard(part)
    order = [*kept, *removed] if not isinstance(catalog, Catalog) else list(catalog.tensors)
    return [key for key in order if key not in removed_keys], [key for key in order if key in removed_keys]


def as_they_are(chosen: Chosen, job: Conversion) -> Chosen:
    """`chosen`, with codes and scales excluded from `--dtype`."""
    if not any(state in ("", MODEL) for state in job.writing.dtypes):
        return chosen
    config = chosen.config if chosen.config is not None else config_of(chosen.sources[0], Reading())
    _, found = found_in(model_kinds(row.tensor for row in chosen.stored), config, checked=False)
    if not found.weights:
        return chosen
    names = found.names
    casts = {
        row.tensor.key: row.tensor.dtype
        for row in chosen.stored
        if row.tensor.key.state == MODEL and row.tensor.key.name in names
    }
    note = (
        f"--dtype leaves {len(found.weights)} quantised weights and their scales as they are; "
        "--dequantize converts them to floats"
    )
    return replace(chosen, casts={**casts, **chosen.casts}).noted(note)


def held_together(tensors: Sequence[WantedTensor], chosen: Chosen) -> dict[str, Units]:
    """How each tensor of a quantised weight among the wanted ones may be cut, by name."""
    kinds = {tensor.key.name: TensorKind(tensor.dtype, tensor.shape) for tensor in tensors if tensor.key.state == MODEL}
    if not any(kind.dtype.name in DTYPES for kind in kinds.values()):
        return {}
    opened = chosen.sources[0]
    config = chosen.config if chosen.config is not None else config_of(opened, Reading())
    scheme, found = found_in(kinds, config, checked=False)
    if scheme is not None and not scheme.known:  # the order of codes is unknown, so no cut is safe
        modules = {_module(name) for name, kind in kinds.items() if kind.dtype.name in DTYPES}
        whole = {name: (1,) * len(kind.shape) for name, kind in kinds.items() if _module(name) in modules}
        return {name: Units(name, name, pieces, pieces) for name, pieces in whole.items()}
    return {name: tensor for weight in found.weights.values() for name, tensor in units(weight, kinds).items()}


def _module(name: str) -> str:
    """The module of a tensor: `m.q_proj.qweight`, `m.q_proj.weight.absmax` -> `m.q_proj`."""
    return name.partition(".weight")[0] if ".weight" in name else name.rpartition(".")[0]


def refuse_cut_blocks(target: Target, wanted: Wanted, chosen: Chosen, fmt: Format) -> None:
    """Raise UsageError E1466 if a format with a layout of its own would separate codes from their scales: if a rank's
    box ends inside a block, or another rank holds its scales."""
    together = held_together(wanted.tensors, chosen) if fmt.holds.own_layout else {}
    if not together:
        return

    names = [tensor.key.name if tensor.key.state == MODEL else "" for tensor in wanted.tensors]
    shapes = {tensor.key.name: tensor.shape for tensor in wanted.tensors if tensor.key.state == MODEL}
    faults: dict[str, None] = {}

    for file in target.files:
        cuts: dict[tuple[str, int], set[tuple[int, int]]] = {}
        for array in file.arrays:
            unit = together.get(names[array.tensor])
            for dim, pieces in enumerate(unit.mine if unit is not None else ()):
                size = shapes[names[array.tensor]][dim]
                low = array.box.offset[dim]
                high = low + array.box.shape[dim]
                if unit is None or (pieces == 1 and (low, high) == (0, size)):
                    continue
                step = size // pieces
                if low % step or high % step or pieces == 1:
                    faults[names[array.tensor]] = None
                cuts.setdefault((unit.lead, dim), set()).add((low // step, high // step))
        faults |= {lead: None for (lead, _), seen in cuts.items() if len(seen) > 1}

    if faults:
        first, *rest = faults
        raise UsageError(
            f"{first}: {fmt.name} would cut a quantised weight within a block, or away from its scales",
            code="E1466",
            key=first,
            faults=rest,
            hint="convert it to floats on the way with --dequantize, or leave the degrees off",
        )


def refuse_to_part(chosen: Chosen, whose: str) -> None:
    """Raise InputError E1486 for quantised weights on their way to a system that stores no scales with its weights.

    Codes without scales are other numbers, and no program reads that system's files with scales. whose: the output, in
    words.
    """
    kinds = model_kinds(row.tensor for row in chosen.stored)
    if not kinds:
        return
    config = chosen.config if chosen.config is not None else config_of(chosen.sources[0], Reading())
    scheme, found = found_in(kinds, config, checked=False)
    names = list(found.names) if found.weights else []
    if scheme is not None and not scheme.known:
        names = [name for name, kind in kinds.items() if kind.dtype.name in DTYPES]
    if not names:
        return

    named = scheme.scheme if scheme is not None else "a scheme of codes and scales"
    way = "convert it to floats with its own library first"
    if scheme is None or scheme.known:
        way = "--dequantize converts it to floats on the way"
    raise InputError(
        f"the weights are quantised by {named}: {whose} have no place for scales, and {len(names)} of its "
        f"tensors are codes and scales, such as {min(names)}",
        code="E1486",
        key=min(names),
        hint=f"{way}; --to safetensors, dcp or torch moves it as it is",
    )


def refuse_codes(tensors: Sequence[LogicalTensor], option: str, path: str) -> None:
    """Raise UsageError E1465 if any of `tensors` is quantised, for an `option` that computes with weights."""
    scheme, found = found_in(model_kinds(tensors), checked=False)
    blocks = [tensor.key.name for tensor in tensors if tensor.dtype.block > 1]
    if blocks or found.weights or scheme is not None:
        lead = next(iter(blocks or found.weights), "")
        raise UsageError(
            f"{option} computes with weights, and those of {path} are quantised",
            code="E1465",
            key=lead or None,
            hint="convert them to floats with --dequantize, or in a step of its own: "
            "ckpt convert SRC OUT --to safetensors --dequantize",
        )
