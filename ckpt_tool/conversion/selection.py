"""Selects the tensors of one source that the options request. The public functions are passes, or used by one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.core.catalog import Unread
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, STEP, LogicalTensor, TensorKey
from ckpt_tool.errors import CkptError, InconsistentCheckpoint, UsageError
from ckpt_tool.formats.beside import RECIPE, RECIPE_OF_RUN, UNREAD, has_recipe, optimizer_files
from ckpt_tool.formats.soundness import check_sound
from ckpt_tool.formats.steps import other_steps, trainer_step
from ckpt_tool.formats.two_models import two_in_one_state
from ckpt_tool.options.writing import EMA_THEN_MODEL
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import AS_REQUESTED, Chosen, Conversion, extras_left_behind, left_behind
from ckpt_tool.sources.opening import Opened
from ckpt_tool.sources.select import group_of, left_by_word, removed_keys, split_keys, state_filter

SHOWN_NAMES = 8  # tensors of a note


def refuse_code(opened: Opened, job: Conversion) -> None:
    """Raise UnsafeInput for pickles that would execute code, except in states that an option or the format drops."""
    writing = job.writing
    unread = [one.key for one in opened.catalog.unread]
    opened.refuse_unsafe(
        left_by_word(writing.states, writing.drop),
        lambda state: job.fmt.holds.has(group_of(state)),
        removed_keys(unread, remove=writing.remove_keys, keep=writing.keep_keys, model_only=writing.model_only),
    )


def sound(chosen: Chosen, job: Conversion) -> Chosen:
    """Check that the source's headers are consistent, and return `chosen` with notes. Raises the first fault, beginning
    with UnsafeInput."""
    opened = chosen.sources[0]
    refuse_code(opened, job)
    if not opened.catalog.tensors:
        unread = [one.fault for one in opened.catalog.unread if one.fault is not None]
        if unread:
            raise unread[0]
    opened.catalog.check()
    if not job.reading.lenient:
        more = list(_other_saves(opened))
        if not left_by_word(job.writing.states, job.writing.drop)(MODEL):
            more += two_in_one_state(opened.tree, opened.catalog, _removed_extras(opened, job))
        more += _faults_of_adapter(opened, job)
        check_sound(opened.catalog, opened.format.holds, more)
    refuse_left_optimizer(opened, job)
    return chosen.noted(*opened.own_objects())


def _removed_extras(opened: Opened, job: Conversion) -> Collection[TensorKey]:
    """The tensors among the extras that the user's patterns leave out."""
    writing = job.writing
    if not (writing.remove_keys or writing.keep_keys):
        return ()
    extras = [key for key in opened.catalog.tensors if key.state == EXTRAS]
    if not extras:
        return ()
    return removed_keys(extras, remove=writing.remove_keys, keep=writing.keep_keys, model_only=writing.model_only)


def _faults_of_adapter(opened: Opened, job: Conversion) -> Iterator[CkptError]:
    """Faults in the pairs of an adapter's tensors.

    A target that cannot store adapters refuses them itself, so only tensors without elements are reported for it.
    Raises UsageError E2931 for weights with an unknown purpose next to the adapter.
    """
    if "peft" not in opened.catalog.hints.plain:
        return
    from ckpt_tool.formats.adapters.beside import refuse_unknown_weights
    from ckpt_tool.formats.adapters.pairs import EMPTY, find_adapter_faults

    if opened.format.holds.adapter:
        refuse_unknown_weights(opened.tree, opened.catalog.files)
    for fault in find_adapter_faults(opened.catalog, opened.tree.display()):
        if fault.code == EMPTY or job.fmt.holds.adapter:
            yield fault


def _other_saves(opened: Opened) -> Iterable[CkptError]:
    """Faults by which step counters show that parts of the checkpoint come from different saves."""
    yield from other_steps(opened.tree, opened.catalog)
    yield from trainer_step(opened.outer or opened.tree, opened.tree, opened.catalog)


def wanted_tensors(chosen: Chosen, job: Conversion) -> Chosen:
    """Select the tensors and extras that `--state`, `--drop`, `--keep-keys` and `--remove-keys` request."""
    catalog = chosen.sources[0].catalog
    writing = job.writing
    count = [STEP] if catalog.count is not None else []
    present = dict.fromkeys([*catalog.states(), *(one.key.state for one in catalog.unread), *count])
    requested = state_filter(writing.states, [*present, *(["extras"] if catalog.extras else [])])
    unwanted = state_filter(writing.drop, [*present, EXTRAS], option="--drop") if writing.drop else lambda state: False
    unread = [one.key for one in catalog.unread]  # these are left behind, but patterns may name them
    keys = [*catalog.tensors, *unread] if unread else catalog.tensors
    kept, removed = split_keys(keys, remove=writing.remove_keys, keep=writing.keep_keys, model_only=writing.model_only)
    if unread:
        kept = [key for key in kept if key in catalog.tensors]
        removed = [key for key in removed if key in catalog.tensors]
    if removed:
        from ckpt_tool.quantised.keep_together import keep_parts_together

        kept, removed = keep_parts_together(catalog, kept, removed, writing, chosen.sources[0], job.reading)
    goes = {state for state in present if not requested(state) or unwanted(state)}
    dropped = left_behind((catalog.tensors[key] for key in kept if key.state in goes), AS_REQUESTED, named=False)
    dropped += _unread_left(catalog.unread)
    extras = catalog.extras
    if extras and (not requested(EXTRAS) or unwanted(EXTRAS)):
        dropped.append(extras_left_behind(extras, AS_REQUESTED, chosen.sources))
        extras = {}
    if removed:
        from ckpt_tool.conversion.optimizer_groups import without_removed

        extras = without_removed(extras, {key.name for key in removed} - {key.name for key in kept})
    if removed or goes:
        stays: Iterable[LogicalTensor] = [catalog.tensors[key] for key in kept if key.state not in goes]
    else:
        stays = catalog.tensors.values()
    return replace(
        chosen,
        stored=tuple([Stored(0, tensor) for tensor in stays]),
        extras=extras,
        removed=tuple(catalog.tensors[key] for key in removed),
        dropped=tuple(dropped),
    )


def _unread_left(unread: Iterable[Unread]) -> list[dict[str, Any]]:
    """Report entries for tensors that cannot be read. If any of them were wanted, an error was raised before."""
    rows: dict[tuple[str, str], list[str]] = {}
    for one in unread:
        why = f"held by objects of class {one.kind}, which are never created" if one.kind else str(one.fault)
        rows.setdefault((one.key.state, why), []).append(one.key.name)
    return [
        {"state": state, "tensors": len(names), "bytes": 0, "names": names[:50], "reason": f"not read: {why}"}
        for (state, why), names in rows.items()
    ]


def refuse_left_optimizer(opened: Opened, job: Conversion) -> None:
    """Raise UsageError E1643 if an optimizer's state is stored next to the model, cannot be read, and could be stored
    in the target: a requested state that cannot be converted is an error unless `--drop` names it."""
    writing = job.writing
    requested = not writing.states or any(name == "all" or group_of(name) == "optimizer" for name in writing.states)
    if not requested or writing.as_model or "optimizer" in writing.drop or not job.fmt.holds.has("optimizer"):
        return
    tree = opened.tree
    left = optimizer_files(tree.names() if tree.single is None else (), opened.catalog.files)
    if not left and opened.outer is not None and has_recipe(opened.outer):
        tree = opened.outer
        left = [RECIPE_OF_RUN]
    if left:
        why = next((note.message for note in opened.catalog.notes if note.code == UNREAD), "")
        numbered = "by parameter number, and nothing says which parameter each is, so it"
        reason = "that" if left[0].endswith(RECIPE) else numbered
        raise UsageError(
            f"{left[0]} holds an optimizer's state {reason} can't be taken along{f' ({why})' if why else ''}",
            code="E1643",
            path=tree.display(left[0]),
            faults=[f"{name} too" for name in left[1:]],
            hint="--state model (or --drop optimizer) writes the rest without it",
        )


def _refuse_other_names(state: str, taken: Collection[str], model: Collection[str]) -> None:
    """Raise InconsistentCheckpoint E2974 if a state that should replace the model's weights has other names: the output
    would contain both, as if they were different parameters."""
    if state == MASTER:  # a job may store most weights only as masters, and only buffers in the model
        return
    strangers = [name for name in taken if name not in model]
    missing = [name for name in model if name not in taken]
    if strangers and missing:
        from ckpt_tool.conversion.average_suggestion import hint_for_averages

        raise InconsistentCheckpoint(
            f"--as-model {state}: {strangers[0]} is no weight of the model, which has {missing[0]}",
            code="E2974",
            key=strangers[0],
            faults=[f"{name} is no weight of the model" for name in strangers[1:50]],
            hint=hint_for_averages(list(taken), list(model))
            or "--remove-keys leaves out what is not meant, --rename OLD=NEW gives one of the two the other's names",
        )


def is_parameter(tensor: LogicalTensor) -> bool:
    """Is the tensor a trained weight and not a buffer? Integers, masks and running statistics are buffers."""
    from ckpt_tool.core.buffers import is_buffer

    return (tensor.dtype.is_float or tensor.dtype.coded) and not is_buffer(tensor.key.name)


def _refuse_partial_average(parameters: Sequence[str], path: str, averaged: int) -> InconsistentCheckpoint:
    """The error (E3012) for parameters of the model that the average lacks."""
    more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
    return InconsistentCheckpoint(
        f"--as-model ema: the average has {averaged} tensors and lacks {parameters[0]}{more}: written together, some"
        " weights would be averaged and some not",
        code="E3012",
        path=path,
        key=parameters[0],
        faults=[f"{name} has no average" for name in parameters[1:]],
        hint=f"--as-model {EMA_THEN_MODEL} takes these from the model, as is right for weights that were frozen;"
        " --remove-keys leaves them out",
    )


def as_model(chosen: Chosen, job: Conversion) -> Chosen:
    """Replace the model's weights by the state given by `--as-model ema|master`.

    Parameters without an average are an error, so that averaged and plain weights are never mixed silently;
    `--as-model ema,model` takes these from the model.
    """
    state = job.writing.state_as_model
    rows = chosen.stored
    if not state:
        return chosen
    takes_models_own = job.writing.as_model == EMA_THEN_MODEL
    taken = {row.tensor.key.name: row for row in rows if row.tensor.key.state == state}
    catalog = chosen.sources[0].catalog
    faults = [one.fault for one in catalog.unread if one.key.state == state and one.fault is not None]
    if faults:
        raise faults[0]
    if not taken and state in catalog.states():
        raise UsageError(
            f"--as-model {state}: --state, --drop or the patterns leave {state} out",
            code="E0265",
            hint=f"ask for it: --as-model alone takes {state} for the model and drops the other weights",
        )
    if state not in (EMA, MASTER):
        ways = f"one of ema, master, {EMA_THEN_MODEL}"
        raise UsageError(f"--as-model {job.writing.as_model}", code="E0265", hint=ways)
    if not taken:
        raise UsageError(f"the checkpoint has no state {state}", code="E0265", hint="see ckpt inspect")
    model = chosen.model
    _refuse_other_names(state, taken, model)
    missing = [name for name in model if name not in taken]
    parameters = [name for name in missing if is_parameter(model[name].tensor)] if state == EMA else []
    if parameters and not takes_models_own:
        raise _refuse_partial_average(parameters, chosen.sources[0].path, len(taken))
    stored = []
    for name, row in {**model, **taken}.items():
        path = model[name].tensor.path if name in model else ()
        stored.append(row._replace(tensor=row.tensor._replace(key=TensorKey(name, MODEL), path=path)))
    gone = (
        row.tensor
        for row in rows
        if row.tensor.key.state not in (MODEL, state)
        or (row.tensor.key.state == MODEL and row.tensor.key.name in taken)
    )
    dropped = left_behind(gone, f"--as-model {state}", named=False)

    # Tensors that the state lacks are written from the model, so they get a note and are not reported as dropped.
    buffers = [name for name in missing if name not in parameters]
    kind = "buffers" if state == EMA else "buffers, and weights that have none"
    notes = []
    for names, why in ((buffers, kind), (parameters, f"--as-model {EMA_THEN_MODEL}")):
        if names:
            shown = ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
            notes.append(f"{len(names)} tensors have no {state}, and go as the model has them ({why}): {shown}")
    return replace(
        chosen.noted(*notes),
        stored=tuple(stored),
        dropped=(*chosen.dropped, *dropped),
        renewed=chosen.renewed | {row.tensor.key for row in stored},
    )
