"""Adapts what is chosen to the output's format, and refuses options and file names that the format would ignore.

    --to safetensors --zero 3          E0261: zero has no meaning for safetensors
    --to torch OUT.ckpt                one file: `Holds.single` has the suffix
    --to safetensors OUT.ckpt          E1611: named like a weights file of another format

Each format declares the options that it uses (`Holds.uses_options`); what depends on the content (`torch` with training
state is one file) is declared by its target (`Target.by_size`). Only options that were given explicitly count, and
options that change nothing are no fault: `--zero 0` without data ranks, `--on-indivisible error` without fallbacks, a
degree of 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckpt_tool.conversion.layout import degrees_of, split_of
from ckpt_tool.core.target import LayoutWish, Target
from ckpt_tool.core.tensor import EMA, MASTER, MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import WEIGHT_SUFFIXES, Fitting, Format
from ckpt_tool.option_kinds.statement import options_given
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import Chosen, Conversion, dtypes_of, extras_left_behind, left_behind, written_as
from ckpt_tool.sources.config import file_config, quantised_config
from ckpt_tool.sources.select import group_of
from ckpt_tool.storage.output.destination import Place
from ckpt_tool.weight_schemes.quantised_weights import CODES, part_of

SHARD_SIZE = "max-shard-size"


# -- options and names -------------------------------------------------------------------------------------------------


def refuse_idle(fmt: Format, writing: Writing) -> None:
    """Raise UsageError E0261 for options that the format would silently ignore; one error lists all of them."""
    given = {
        SHARD_SIZE: writing.max_shard_size is not None,
        "zero": bool(writing.zero) or (writing.zero is not None and "dp" in fmt.holds.mesh),
        "quantize": writing.quantize is not None,
        "repack": writing.repack is not None,
        "pp-split": bool(writing.pp_split),
        "layout": writing.layout is not None,
        "on-indivisible": writing.on_indivisible not in (None, "error"),
        **{option.names[0][2:]: True for _, option in options_given(writing) if option.by_format},
    }
    idle = [name for name, was_given in given.items() if was_given and name not in fmt.holds.uses_options]
    if idle:
        faults = [f"--{name} has no meaning for {fmt.name}: {_whose(name)}" for name in idle]
        raise UsageError(
            faults[0].partition(":")[0], code="E0261", hint=f"{_whose(idle[0])}: leave it off", faults=faults[1:]
        )


def refuse_unsplit(target: Target, fmt: Format, writing: Writing) -> None:
    """Raise UsageError E0261 for `--max-shard-size` if the output is one file of any size."""
    if writing.max_shard_size is None or target.by_size:
        return
    if target.single is not None:
        why = f"{target.single} is one file"
        hint = "leave it off, or name a folder as the output"
    else:
        why = f"{fmt.name} writes training state and extras as one file"
        hint = "leave it off, or write the model alone: --state model"
    raise UsageError(f"--{SHARD_SIZE} has no effect: {why}", code="E0261", hint=hint)


def single_name(destination: Place, fmt: Format) -> str | None:
    """The file name of an output that is a single file, None for a folder.

    If a format can be one file, a name with one of its suffixes requests that. A name with the suffix of another
    format's weights is an error (UsageError E1611), because a reader would take the file for that format. Formats that
    are always folders accept any name, and an existing folder always remains one.
    """
    single = fmt.holds.single
    suffix = destination.suffix.lower()
    if not single or destination.is_dir():
        return None
    if suffix in single:
        return destination.name
    if suffix in WEIGHT_SUFFIXES:
        raise UsageError(
            f"{destination.name} is named like a file of another format: one file of {fmt.name} ends in "
            f"{' or '.join(single)}",
            code="E1611",
            path=str(destination),
            hint=f"name it {destination.stem}{single[0]} for one file, {destination.stem} for a folder",
        )
    return None


def _whose(option: str) -> str:
    """A phrase that names the formats that use an option: `it belongs to dcp and sharded`."""
    *most, last = (name for name in registry.NAMES if option in registry.by_name(name).holds.uses_options)
    return f"it belongs to {', '.join(most)} and {last}" if most else f"it belongs to {last}"


# -- tensors -----------------------------------------------------------------------------------------------------------


def held(chosen: Chosen, job: Conversion) -> Chosen:
    """Drop what the target format cannot store, with entries in the report. States that the user requested explicitly
    are an error instead (UsageError E0257)."""
    fmt = job.fmt
    writing = job.writing
    requested = {name for name in writing.states if name != "all"} - set(writing.drop)
    states = {row.tensor.key.state for row in chosen.stored}
    groups = {state: group_of(state) for state in states}
    homeless = {state for state, group in groups.items() if state != MODEL and not fmt.holds.has(group)}
    stored = tuple([row for row in chosen.stored if row.tensor.key.state not in homeless])
    reason = f"{fmt.name} has no place for it" if fmt.holds.all_states else f"{fmt.name} holds the model only"
    gone = (row.tensor for row in chosen.stored if row.tensor.key.state in homeless) if homeless else ()
    dropped = [*chosen.dropped, *left_behind(gone, reason, named=False)]
    for state in [str(entry["state"]) for entry in dropped[len(chosen.dropped) :]]:
        if state in requested or groups[state] in requested:
            raise UsageError(
                f"--to {fmt.name} has no place for the state {state}",
                code="E0257",
                hint=f"write to a training format (dcp, torch, sharded), or add --drop {groups[state]}",
            )
    if MASTER not in writing.drop and not fmt.holds.adapter:  # an adapter alone has no masters of its base
        _refuse_to_lose_masters(chosen, stored)
    if fmt.holds.own_header:
        from ckpt_tool.quantised.keep_together import refuse_to_part

        refuse_to_part(chosen, f"files of {fmt.name}")
    extras = chosen.extras
    if extras and not fmt.holds.extras:
        if "extras" in requested:
            raise UsageError(f"--to {fmt.name} has no place for extras", code="E0257", hint="add --drop extras")
        dropped.append(extras_left_behind(extras, f"{fmt.name} has no place for them", chosen.sources))
        extras = {}
    dtypes = dtypes_of(writing)
    unheld = [
        row.tensor
        for row in stored
        if row.tensor.dtype.name in fmt.holds.dtypes
        and written_as(row.tensor, dtypes, chosen.casts).name in fmt.holds.dtypes
    ]
    if unheld:
        raise UsageError(
            f"{fmt.name} has no {unheld[0].dtype.name}",
            code="E0258",
            key=str(unheld[0].key),
            hint=_way_out(unheld[0], chosen),
            faults=[str(tensor.key) for tensor in unheld[1:]],
        )
    if not stored:
        raise _nothing_left(chosen, masters=MASTER in homeless)
    return replace(chosen, stored=stored, dropped=tuple(dropped), extras=extras)


def _way_out(unheld: LogicalTensor, chosen: Chosen) -> str:
    """The hint for a tensor whose dtype the format lacks. It never advises dropping a part of a quantised weight, since
    the remaining parts would then represent other values."""
    if unheld.key.state != MODEL:
        return "choose another format, or --remove-keys"
    from ckpt_tool.quantised.keep_together import found_in, model_kinds

    config = chosen.config if chosen.config is not None else quantised_config(chosen.sources[0])
    scheme, found = found_in(model_kinds(row.tensor for row in chosen.stored), config, checked=False)
    if unheld.key.name in found.names or (scheme is not None and part_of(unheld.key.name)):
        return "--dequantize writes quantised weights as floats; else choose another format"
    if unheld.dtype.name in CODES:
        return "--dequantize writes quantised weights as floats; plain values are cast with --dtype"
    return "choose another format, or --remove-keys"


def _nothing_left(chosen: Chosen, *, masters: bool) -> UsageError:
    """The error (E0259) for an output without a tensor. masters: were the source's master weights dropped?"""
    if not any(opened.catalog.tensors for opened in chosen.sources):
        return UsageError(
            "the source holds no tensor, so there is nothing to write",
            code="E0259",
            hint="an empty state dict is what a rank saves that has nothing; pass the whole folder",
        )

    states = dict.fromkeys(state for opened in chosen.sources for state in opened.catalog.states())
    if not {MODEL, MASTER, EMA} & states.keys():
        return UsageError(
            f"no model is in this source, it holds {', '.join(states)}",
            code="E0259",
            path=chosen.sources[0].path,
            hint="pass the model's own folder or file; --to dcp or torch writes these states as they are",
        )

    if {MODEL, MASTER, EMA} & states.keys() == {EMA} and not masters:
        return UsageError(
            "no model is in this source, only averages of one",
            code="E0259",
            path=chosen.sources[0].path,
            hint="--as-model ema writes them as the model",
        )

    hint = (
        "the only weights here are fp32 masters: --as-model master writes them as the model, --dtype bf16 rounds them"
    )
    return UsageError(
        "nothing is left to write", code="E0259", hint=hint if masters else "widen --state or the key patterns"
    )


def _refuse_to_lose_masters(chosen: Chosen, stored: Iterable[Stored]) -> None:
    """Raise UsageError E0249 if parameters exist only as fp32 masters (ZeRO 3) and would be dropped, while the rest of
    the model is written."""
    holders = [opened for opened in chosen.sources if MASTER in opened.catalog.states()]
    if not holders or not any(row.tensor.key.state == MODEL for row in stored):
        return
    gone = {tensor.key.name for tensor in chosen.removed}
    written = {row.tensor.key.name for row in stored}
    written |= {name for name, made in chosen.names.items() if not written.isdisjoint(made)}
    for opened in holders:
        keys = opened.catalog.tensors
        alone = [key.name for key in keys if key.state == MASTER and TensorKey(key.name) not in keys]
        lost = [name for name in alone if name not in written and name not in gone]
        if lost:
            raise UsageError(
                f"{len(lost)} parameters have no weights but their fp32 masters, which would be left out: {lost[0]}",
                code="E0249",
                key=lost[0],
                faults=lost[1:20],
                hint="--as-model master writes them as the model (with --dtype bf16 as the trainer would round them);"
                " --drop master leaves them out",
            )


def fitted(chosen: Chosen, job: Conversion) -> Chosen:
    """Convert the tensors to those that the format stores, for formats with variants that store the same state in
    different tensors (`formats.base.Fitting`)."""
    fmt = job.fmt
    if not isinstance(fmt, Fitting):
        return chosen
    made = fmt.fit(
        [row.tensor for row in chosen.stored], chosen.extras, chosen.all_hints, wish_of(chosen, fmt, job.writing)
    )
    stored = tuple(Stored(chosen.stored[index].source, tensor) for index, tensor in made.tensors)
    return replace(
        chosen,
        stored=stored,
        dropped=(*chosen.dropped, *made.dropped),
        casts={**chosen.casts, **made.casts},
        unlisted=made.unlisted,
    )


def wish_of(chosen: Chosen, fmt: Format, writing: Writing) -> LayoutWish:
    """The layout requested from a format that determines its own layout (`Holds.own_layout`)."""
    config = chosen.config
    if config is None and fmt.holds.dialect == "paddle":
        config = file_config(chosen.sources[0])
    degrees = degrees_of(chosen, writing)
    return LayoutWish(
        degrees,
        writing.zero,
        split_of(chosen, writing, degrees.at("pp")),
        config,
        writing.vocab_size,
        frozenset(t.key for t in chosen.removed),
        bool({MODEL, ""} & writing.dtypes.keys()),
        writing.of_systems,
    )
