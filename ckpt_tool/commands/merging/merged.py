"""The merge itself: models opened and compared, groups of tensors, computed tensors in their place, written as any other.

    ckpt merge A B OUT --method slerp --t 0.3          ckpt merge OUT --config merge.yaml

Before a byte moves, all that speaks against it is told at once: architectures, tokenizers, tensors that one model lacks,
shapes, dtypes, parameters. The output has the config, tokenizer and other side files of the base, or of the first model;
its format, dialect and degrees are that model's too, unless `--to` and the rest say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tool.commands.chosen import Chosen
from ckpt_tool.commands.computed import refuse_saved_plan, with_computed
from ckpt_tool.commands.merging.groups import Group, Grouping
from ckpt_tool.commands.merging.models import TENSORS, Model, check_models, open_models, sliced_config, without_training
from ckpt_tool.commands.merging.recipes import moved, parameter_faults, recipe_of
from ckpt_tool.commands.merging.settings import Job, idle_filters
from ckpt_tool.commands.naming import under_other_names
from ckpt_tool.commands.options import Reading, Writing
from ckpt_tool.commands.select import split_keys
from ckpt_tool.commands.source import Opened
from ckpt_tool.commands.vocabulary import is_vocabulary
from ckpt_tool.commands.write import write
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.formats import registry
from ckpt_tool.plan.moves import Stored

if TYPE_CHECKING:
    from ckpt_tool.run.computed import Recipe

NUMBERS = "E1449"
_COMPUTED = ("F32", "BF16", "F16")  # dtypes that are merged; fp64 would lose bits, integers and fp8 are no weights


def merge_models(job: Job, dst: str, reading: Reading, writing: Writing, progress: Progress) -> dict[str, Any]:
    """Carry the job out. Returns the writers' document. Raises UsageError, InputError E1446-E1449, and what writing raises."""
    option = f"merge --method {job.method.name}"
    refuse_saved_plan(writing, option)
    lost = [state for state in writing.states if state not in ("model", "all", "extras")]
    if lost:
        raise UsageError(
            f"--state {lost[0]}: {option} makes a model; optimizer states of several jobs have no mean", code="E2401",
            hint="leave --state off",
        )  # fmt: skip
    if job.dtype and not writing.dtypes:
        writing = replace(writing, dtypes={"": job.dtype})
    models = open_models(job.models(), reading, writing, "" if job.method.name == "passthrough" else option)
    if job.method.trim in ("largest", "crumbs") and any(_grows(model, writing.vocab_size or 0) for model in models):
        raise UsageError(
            f"--vocab-size {writing.vocab_size}: rows of zeros would count among those that {job.method.name} leaves out",
            code="E1442", hint="merge first, then ckpt convert the output with --vocab-size",
        )  # fmt: skip
    notes = [*job.notes, *check_models(models, sliced=job.sliced, any_tokenizer=job.any_tokenizer)]
    chosen = _chosen(job, models, writing, option, notes)
    to = writing.to or models[0].opened.catalog.format
    inherits = to == models[0].opened.catalog.format and bool(registry.by_name(to).holds.mesh)
    named = _as_wanted(replace(chosen, inherits=inherits), models[0], reading, writing, to)
    return write(named, dst, writing, progress, to=to)


def _grows(model: Model, size: int) -> bool:
    return any(
        key.state == MODEL and is_vocabulary(key.name) and 0 < len(tensor.shape) and tensor.shape[0] < size
        for key, tensor in model.opened.catalog.tensors.items()
    )


def _as_wanted(chosen: Chosen, donor: Model, reading: Reading, writing: Writing, to: str) -> Chosen:
    """Under the names that the output wants; those that the first model came with where it keeps names."""
    fmt = registry.by_name(to)
    home = donor.opened.catalog.hints.get("dialect", donor.opened.format.holds.dialect)
    renamed = donor.chosen.all_hints.get("dialect") != donor.opened.catalog.hints.get("dialect")
    if renamed and writing.dialect in (None, "keep") and not writing.aoa and fmt.holds.dialect in ("keep", home):
        writing = replace(writing, dialect=home if isinstance(home, str) and home != "keep" else None)
    return under_other_names(chosen, reading, writing, fmt)


# -- what becomes of each tensor ----------------------------------------------------------------------------------------------


def _chosen(job: Job, models: Sequence[Model], writing: Writing, option: str, notes: list[str]) -> Chosen:
    donor = models[0]
    offsets, sources = dict[str, int](), list[Opened]()
    for model in models:
        offsets[model.path] = len(sources)
        sources += model.chosen.sources
    groups, removed, layers = _groups(job, models, writing)
    kinds = [_dtype(group, models) for group in groups]
    copied = [group for group, kind in zip(groups, kinds, strict=True) if kind is None]
    _check_numbers(copied, models)
    recipes, dtypes, rows = list["Recipe"](), dict[TensorKey, DType](), list[Stored]()
    for group, kind in zip(groups, kinds, strict=True):
        part, row = group.rows[0]
        key = TensorKey(group.name)
        path = row.tensor.path if key == row.tensor.key else ()
        rows.append(Stored(offsets[part.model] + row.source, replace(row.tensor, key=key, path=path)))
        if kind is not None:
            dtypes[key] = kind
            if not moved(job, group):
                recipes.append(recipe_of(job, group, _inputs(group, models)))
    extras, gone = without_training(donor.chosen.extras)
    config = sliced_config(models, layers, notes) if layers is not None else donor.chosen.config
    base = replace(
        donor.chosen, sources=tuple(sources), stored=tuple(rows), extras=extras, removed=removed, renewed=frozenset(row.tensor.key for row in rows),
        dropped=_dropped(models, gone), casts={}, config=config,
        notes=tuple(dict.fromkeys(note for model in models for note in model.chosen.notes)),
    )  # fmt: skip
    shown = f"{job.method.name} of {' and '.join(model.path for model in models)}"
    said = f"{len(recipes)} tensors are merged by {job.method.name}, {len(rows) - len(recipes)} are taken as they are"
    return with_computed(base, recipes, shown, writing, option=option, dtypes=dtypes, notes=(*notes, said))


def _groups(
    job: Job, models: Sequence[Model], writing: Writing
) -> tuple[list[Group], tuple[LogicalTensor, ...], list[tuple[str, int]] | None]:
    """(what the output is made of, what the key patterns took, where the layers of a sliced output come from)."""
    held = {model.path: model.tensors for model in models}
    names = list(dict.fromkeys(name for tensors in held.values() for name in tensors))
    grouping = Grouping(job, held, names if job.sliced else _kept(names, writing)[0])
    groups = grouping.groups()
    faults = [
        *grouping.faults,
        *dict.fromkeys(fault for group in groups if not moved(job, group) and (fault := _dtype_fault(group))),
    ]
    wrong = [*grouping.wrong, *dict.fromkeys(fault for group in groups for fault in parameter_faults(job, group))]
    wrong += idle_filters(job, [group.name for group in groups] if job.sliced else names)
    if faults:
        raise InconsistentCheckpoint(
            f"the merge can't be made: {faults[0]}", code=TENSORS, faults=[*faults[1:500], *wrong[:100]],
            hint="--tied-head untie (or tie) makes heads alike" if "lm_head.weight: not in" in faults[0]
            else "models must have the same tensors of the same shapes; --remove-keys leaves out what one of them lacks",
        )  # fmt: skip
    if wrong:
        raise UsageError(wrong[0], code="E1441", faults=wrong[1:100], place=f"--method {job.method.name}")
    if job.sliced:
        kept, out = _kept([group.name for group in groups], writing)
        gone = [group.rows[0][1].tensor for group in groups if group.name in set(out)]
        return [group for group in groups if group.name in set(kept)], tuple(gone), grouping.layers
    gone = [
        next(tensors[name] for tensors in held.values() if name in tensors).tensor for name in _kept(names, writing)[1]
    ]
    return groups, tuple(gone), None


def _kept(names: Sequence[str], writing: Writing) -> tuple[list[str], list[str]]:
    keys = [TensorKey(name) for name in names]
    kept, gone = split_keys(keys, remove=writing.remove_keys, keep=writing.keep_keys, model_only=writing.model_only)
    return [key.name for key in kept], [key.name for key in gone]


def _inputs(group: Group, models: Sequence[Model]) -> list[Any]:
    from ckpt_tool.run.computed import Input

    chosen = {model.path: model.chosen for model in models}
    return [Input(row.tensor, chosen[part.model].sources[row.source].tree) for part, row in group.rows]


def _dtype_fault(group: Group) -> str:
    names = {row.tensor.dtype.name for _, row in group.rows}
    floats = {name for name in names if DTYPES[name].is_float}
    if not floats:
        return "" if len(names) == 1 else f"{group.name}: {' and '.join(sorted(names))}"
    if strange := sorted(names - set(_COMPUTED)):
        hint = (
            "quantised weights: --dequantize"
            if "F8" in strange[0] or "F4" in strange[0]
            else "fp32 is what merges compute in"
        )
        return f"{group.name}: {strange[0]} is not merged ({hint})"
    return ""


def _dtype(group: Group, models: Sequence[Model]) -> DType | None:
    """What the merged tensor is written as: the dtype that all have, else fp32; None for what is no float."""
    casts = {model.path: model.chosen.casts for model in models}
    found = {casts[part.model].get(row.tensor.key, row.tensor.dtype).name for part, row in group.rows}
    if not any(DTYPES[name].is_float for name in found):
        return None
    return DTYPES[found.pop()] if len(found) == 1 else DTYPES["F32"]


def _check_numbers(groups: Sequence[Group], models: Sequence[Model]) -> None:
    """Raise InconsistentCheckpoint E1449 for tensors of integers that differ: they have no mean. Reads them."""
    from ckpt_tool.run.scan import digests_of

    trees = {model.path: [opened.tree for opened in model.chosen.sources] for model in models}
    wrong = []
    for group in groups:
        found: dict[str, str] = {}
        for part, row in group.rows:
            catalog = Catalog("safetensors", {row.tensor.key: row.tensor})
            digest = digests_of(catalog, trees[part.model][row.source])[row.tensor.key]
            found.setdefault(digest, part.model)
        if len(found) > 1:
            wrong.append(
                f"{group.name} ({group.rows[0][1].tensor.dtype.name}) differs in {' and '.join(found.values())}"
            )
    if wrong:
        raise InconsistentCheckpoint(
            f"what is no float is not merged, and must be equal: {wrong[0]}", code=NUMBERS, faults=wrong[1:],
            hint="leave it out with --remove-keys",
        )  # fmt: skip


def _dropped(models: Sequence[Model], gone: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """What of the models stays behind, by model, for the report."""
    other = {"not asked for": "a merge has no optimizer"}
    entries = [
        {**entry, "reason": f"{model.path}: {other.get(entry['reason'], entry['reason'])}"} if "reason" in entry else entry
        for model in models for entry in model.chosen.dropped
    ]  # fmt: skip
    if gone:
        entries.append({"state": "extras", "tensors": 0, "bytes": 0, "names": list(gone), "reason": "of the optimizer"})
    return tuple(entries)
