"""Arithmetic merges of models: from a MergeJob to a checkpoint.

    ckpt merge A B OUT --method slerp --t 0.3          ckpt merge OUT --config merge.yaml

The steps: the models are opened and compared (`merging.models`), their tensors are grouped by tensor of the output
(`merging.groups`), each group becomes a recipe that computes the merged tensor (`merging.averages`,
`merging.task_vectors`), and the result is written as any other checkpoint (`conversion.writing`).

Before any data is written, every reason why the merge is impossible is reported at once: architectures, tokenizers,
tensors that one model lacks, shapes, dtypes, parameters. The output takes the config, tokenizer and other side files of
the base, or of the first model if there is no base; also its format, dialect and parallel degrees, unless options such
as `--to` change them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from struct import pack, unpack
from typing import TYPE_CHECKING, Any

from ckpt_tool.conversion.passes import in_wanted_names
from ckpt_tool.conversion.unused_options import refuse_dropped_model
from ckpt_tool.conversion.vocabulary import is_vocabulary
from ckpt_tool.conversion.writing import write
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import MODEL, LogicalTensor, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.merging.groups import Grouping, MergeGroup
from ckpt_tool.merging.job import MergeJob, idle_filters
from ckpt_tool.merging.models import TENSORS, MergedModel, check_models, open_models, sliced_config, without_training
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import AS_REQUESTED, Chosen, Conversion, refuse_saved_plan, with_computed
from ckpt_tool.sources.opening import Opened
from ckpt_tool.sources.select import split_keys

if TYPE_CHECKING:
    from ckpt_tool.merging.task_vectors import Trim
    from ckpt_tool.run.computed import Input, Recipe


NUMBERS = "E1449"
_NO_OPTIMIZER = "a merge has no optimizer"
_EXPERTS = ".experts."
# Tensors with a row for each token of the vocabulary.
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "word_embeddings.weight", "output_layer.weight")
# The dtypes that can be merged. Arithmetic is fp32, so fp64 would lose bits; integers and fp8 codes are no weights.
_COMPUTED = ("F32", "BF16", "F16")


def merge_models(job: MergeJob, dst: str, reading: Reading, writing: Writing, progress: Progress) -> dict[str, Any]:
    """Execute the merge and return the document of the written checkpoint.

    Raises:
        UsageError: options that contradict the merge.
        InputError: E1446 to E1449 for models that can't be merged, and what writing raises.
    """
    option = f"merge --method {job.method_typed}"
    refuse_saved_plan(writing, option)
    unsupported = [state for state in writing.states if state not in ("model", "all", "extras")]
    if unsupported:
        raise UsageError(
            f"--state {unsupported[0]}: {option} makes a model; optimizer states of several jobs have no mean",
            code="E2401",
            hint="leave --state off",
        )
    if job.dtype and not writing.dtypes:
        writing = replace(writing, dtypes={"": job.dtype})
    refuse_dropped_model("merge", writing)
    models = open_models(job.models(), reading, writing, "" if job.method.name == "passthrough" else option)
    if job.method.trim in ("largest", "crumbs") and any(_grows(model, writing.vocab_size or 0) for model in models):
        raise UsageError(
            f"--vocab-size {writing.vocab_size}: rows of zeros would count among those that "
            f"{job.method.name} leaves out",
            code="E1442",
            hint="merge first, then ckpt convert the output with --vocab-size",
        )
    notes = [*job.notes, *check_models(models, sliced=job.sliced, any_tokenizer=job.any_tokenizer)]
    chosen = _choose_merged(job, models, writing, option, notes)
    to = Conversion.of(models[0].opened, reading, writing)
    return write(in_wanted_names(replace(chosen, inherits=to.inherits), models[0].opened, to), dst, to, progress)


def _grows(model: MergedModel, size: int) -> bool:
    return any(
        key.state == MODEL and is_vocabulary(key.name) and 0 < len(tensor.shape) and tensor.shape[0] < size
        for key, tensor in model.opened.catalog.tensors.items()
    )


# -- the source of each output tensor ----------------------------------------------------------------------------------


def _choose_merged(
    job: MergeJob, models: Sequence[MergedModel], writing: Writing, option: str, notes: list[str]
) -> Chosen:
    donor = models[0]
    offsets = dict[str, int]()
    sources = list[Opened]()
    for model in models:
        offsets[model.path] = len(sources)
        sources += model.chosen.sources

    groups, removed, layers = _groups(job, models, writing)
    kinds = [_dtype(group, models) for group in groups]
    copied = [group for group, kind in zip(groups, kinds, strict=True) if kind is None]
    _check_numbers(copied, models)
    parts = {model.path: model.chosen for model in models}
    recipes = list["Recipe"]()
    dtypes = dict[TensorKey, DType]()
    rows = list[Stored]()

    for group, kind in zip(groups, kinds, strict=True):
        part, row = group.rows[0]
        key = TensorKey(group.name)
        path = row.tensor.path if key == row.tensor.key else ()
        rows.append(Stored(offsets[part.model] + row.source, row.tensor._replace(key=key, path=path)))
        if kind is not None:
            dtypes[key] = kind
            if not is_copied(job, group):
                recipes.append(recipe_of(job, group, [parts[part.model].input(row) for part, row in group.rows]))

    extras, gone = without_training(donor.chosen.extras)
    config = sliced_config(models, layers, notes) if layers is not None else donor.chosen.config
    base = replace(
        donor.chosen,
        sources=tuple(sources),
        stored=tuple(rows),
        extras=extras,
        removed=removed,
        renewed=frozenset(row.tensor.key for row in rows),
        dropped=_describe_dropped(models, gone),
        casts={},
        config=config,
        notes=tuple(dict.fromkeys(note for model in models for note in model.chosen.notes)),
    )
    description = f"{job.method_typed} of {' and '.join(model.path for model in models)}"
    line = f"{len(recipes)} tensors are merged by {job.method_typed}, {len(rows) - len(recipes)} are taken as they are"
    if job.newest:
        notes.append(f"counters, extras and side files are those of the newest checkpoint, {job.newest}")
    return with_computed(base, recipes, description, writing, option=option, dtypes=dtypes, notes=(*notes, line))


def _groups(
    job: MergeJob, models: Sequence[MergedModel], writing: Writing
) -> tuple[list[MergeGroup], tuple[LogicalTensor, ...], list[tuple[str, int]] | None]:
    """The groups of the output, the tensors that key patterns removed, and the origin of each layer of a sliced output.

    Raises:
        InconsistentCheckpoint: E1447, tensors that are missing or differ in shape, or dtypes that can't be merged.
        UsageError: E1441, invalid parameters.
    """
    tensors_of = {model.path: model.tensors for model in models}
    names = list(dict.fromkeys(chain.from_iterable(tensors_of.values())))
    grouping = Grouping(job, tensors_of, names if job.sliced else _split_kept(names, writing)[0])
    groups = grouping.groups()
    mixed = filter(lambda group: not is_copied(job, group), groups)
    faults = [*grouping.faults, *dict.fromkeys(filter(None, map(_dtype_fault, mixed)))]
    wrong = [*grouping.wrong]
    for group in groups:
        wrong += parameter_faults(job, group)
    wrong = list(dict.fromkeys(wrong))
    wrong += idle_filters(job, [group.name for group in groups] if job.sliced else names)

    if faults:
        raise InconsistentCheckpoint(
            f"the merge can't be made: {faults[0]}",
            code=TENSORS,
            faults=[*faults[1:500], *wrong[:100]],
            hint=_how_to_make_alike(tensors_of, faults[0]),
        )

    if wrong:
        raise UsageError(wrong[0], code="E1441", faults=wrong[1:100], place=f"--method {job.method_typed}")

    if job.sliced:
        kept_names, removed_names = _split_kept([group.name for group in groups], writing)
        gone = [group.rows[0][1].tensor for group in groups if group.name in set(removed_names)]
        return [group for group in groups if group.name in set(kept_names)], tuple(gone), grouping.layers

    gone = []
    for name in _split_kept(names, writing)[1]:
        first = next(tensors for tensors in tensors_of.values() if name in tensors)
        gone.append(first[name].tensor)
    return groups, tuple(gone), None


def _how_to_make_alike(held: Mapping[str, Mapping[str, Stored]], fault: str) -> str:
    """The hint for the first error. held: the tensors of each model."""
    name, _, fault_text = fault.partition(": ")
    if "is not merged" in fault_text:
        return (
            "convert the models to one type first: ckpt convert SRC DST --dtype bf16 (--dequantize for quantised ones)"
        )

    if fault_text.startswith("["):
        if name.endswith(_VOCABULARY):
            return "the vocabularies have different sizes: ckpt convert SRC DST --vocab-size N brings them to one size"
        return "merge models of one architecture: the shapes of this tensor differ; --remove-keys leaves it out"

    if fault.startswith("lm_head.weight: not in"):
        return "one of the models ties its head: --tied-head untie writes the heads of all, --tied-head tie none"

    if _EXPERTS in name and _has_both_layouts(name.partition(_EXPERTS)[0] + _EXPERTS, held):
        return (
            "experts are fused in one model, split in another: ckpt convert SRC DST --experts split, for each fused one"
        )

    longest = {path: _shared_prefix(tensors) for path, tensors in held.items()}
    for path, prefix in longest.items():
        bare = {name.removeprefix(prefix) for name in held[path]}
        others = [
            other_model
            for other_model, tensors in held.items()
            if other_model != path and len(bare & tensors.keys()) * 2 > len(bare)
        ]
        if prefix and others:
            return (
                f"most names of {path} begin with {prefix!r}, and without it they are those of {others[0]}: "
                f"convert {path} with --rename '{prefix}*=*' first"
            )

    return "models must have the same tensors of the same shapes; --remove-keys leaves out what one of them lacks"


def _shared_prefix(names: Iterable[str]) -> str:
    """The first component that more than half of the names share, such as `bert.` of a model with a head; else ""."""
    steps = Counter(name.partition(".")[0] for name in names)
    if not steps:
        return ""
    (step, count), *_ = steps.most_common(1)
    return f"{step}." if count * 2 > steps.total() else ""


def _split_kept(names: Sequence[str], writing: Writing) -> tuple[list[str], list[str]]:
    keys = [TensorKey(name) for name in names]
    kept, gone = split_keys(keys, remove=writing.remove_keys, keep=writing.keep_keys, model_only=writing.model_only)
    return [key.name for key in kept], [key.name for key in gone]


def _dtype_fault(group: MergeGroup) -> str:
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


def _dtype(group: MergeGroup, models: Sequence[MergedModel]) -> DType | None:
    """The dtype of the merged tensor: the common one, fp32 if the models' dtypes differ; None for non-float tensors."""
    casts = {model.path: model.chosen.casts for model in models}
    dtypes = {casts[part.model].get(row.tensor.key, row.tensor.dtype).name for part, row in group.rows}
    if not any(DTYPES[name].is_float for name in dtypes):
        return None
    return DTYPES[dtypes.pop()] if len(dtypes) == 1 else DTYPES["F32"]


def _check_numbers(groups: Sequence[MergeGroup], models: Sequence[MergedModel]) -> None:
    """Raise InconsistentCheckpoint E1449 for integer tensors that differ, since they can't be averaged.

    The values of these tensors are read for the comparison.
    """
    from ckpt_tool.run.scan import digests_of

    sources_of = {model.path: model.chosen.sources for model in models}
    wrong = []
    for group in groups:
        faults: dict[str, str] = {}
        for part, row in group.rows:
            catalog = Catalog("safetensors", {row.tensor.key: row.tensor})
            tree = sources_of[part.model][row.source].tree
            digest = digests_of(catalog, tree)[row.tensor.key]
            faults.setdefault(digest, part.model)
        if len(faults) > 1:
            wrong.append(
                f"{group.name} ({group.rows[0][1].tensor.dtype.name}) differs in {' and '.join(faults.values())}"
            )
    if wrong:
        raise InconsistentCheckpoint(
            f"tensors that are not floats are not merged and must be equal: {wrong[0]}",
            code=NUMBERS,
            faults=wrong[1:],
            hint="leave it out with --remove-keys",
        )


def _describe_dropped(models: Sequence[MergedModel], gone: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """The dropped parts of the models, for the report; parts that several models drop for one reason share an entry."""
    alike: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for model in models:
        for entry in model.chosen.dropped:
            reason = str(entry.get("reason", ""))
            reason = _NO_OPTIMIZER if reason == AS_REQUESTED else reason
            alike.setdefault((entry["state"], reason), []).append((model.path, entry))

    entries = []
    for (_, reason), of_models in alike.items():
        paths = [path for path, _ in of_models]
        first_entry = of_models[0][1]
        combined = dict(first_entry)
        for figure in ("tensors", "bytes"):
            combined[figure] = sum(entry.get(figure, 0) for _, entry in of_models)
        if "names" in first_entry:
            names = (name for _, entry in of_models for name in entry.get("names", ()))
            combined["names"] = list(dict.fromkeys(names))[:50]
        if reason:
            whose = paths[0] if len(paths) == 1 else f"of {len(paths)} models"
            combined["reason"] = f"{whose}: {reason}"
        entries.append(combined)

    if gone:
        entries.append({"state": "extras", "tensors": 0, "bytes": 0, "names": list(gone), "reason": _NO_OPTIMIZER})
    return tuple(entries)


# -- a group as the recipe that computes the tensor --------------------------------------------------------------------


LEAST_TOTAL = 1e-6  # nuslerp treats weights with a smaller sum as equal (mergekit 0.1.5 `nuslerp.py`)


def parameter_faults(job: MergeJob, group: MergeGroup) -> list[str]:
    """Errors in the combination of a group's parameters, one line each."""
    faults = []
    weights = _drop_missing(group.own.get("weight", ()))
    total = _single_sum(weights)
    if group.shared.get("normalize") and not job.method.consensus and total in (0, inf):
        problem = "more than fp32 has"
        if total == 0:
            problem = "0 in fp32" if sum(weights) != 0 else "0"
        faults.append(f"{group.name}: the weights sum to {problem}, so they can't be normalized")
    for density, epsilon in zip(
        _drop_missing(group.own.get("density", ())), _drop_missing(group.own.get("epsilon", ())), strict=False
    ):
        if density < 1 and not 0 < density - epsilon <= density + epsilon < 1:
            faults.append(f"density {density:g} +- epsilon {epsilon:g} leaves (0, 1)")
    return faults


def is_copied(job: MergeJob, group: MergeGroup) -> bool:
    """Is the tensor copied unchanged from the first model?"""
    return job.method.name == "passthrough" and group.own["scale"][0] is None


def recipe_of(job: MergeJob, group: MergeGroup, inputs: Sequence[Input]) -> Recipe:
    """The recipe that computes the group's tensor. inputs: one for each of the group's rows, in the same order."""
    from ckpt_tool.merging.averages import Linear, ModelStock, NuSlerp, Slerp

    method = job.method
    key = TensorKey(group.name)
    shape = group.rows[0][1].tensor.shape
    base = job.base_of(group.slice_)
    is_base_row = [part.model == base for part, _ in group.rows]
    base_inputs = [entry for entry, is_base in zip(inputs, is_base_row, strict=True) if is_base]
    other_inputs = [entry for entry, is_base in zip(inputs, is_base_row, strict=True) if not is_base]
    text = f"{method.name} {sorted(group.shared.items())} {sorted(group.own.items())} {is_base_row} {job.seed}"
    match method.name:
        case "linear":
            return Linear(
                key,
                shape,
                tuple(inputs),
                text,
                tuple(_drop_missing(group.own["weight"])),
                bool(group.shared["normalize"]),
            )
        case "passthrough":
            return Linear(key, shape, tuple(inputs), text, tuple(_drop_missing(group.own["scale"])), False)
        case "slerp":
            return Slerp(key, shape, (*base_inputs, *other_inputs), text, float(group.shared["t"] or 0))
        case "nuslerp":
            along = None  # the axis along which vectors are interpolated; None: the tensor is one vector
            if len(shape) > 1 and not group.shared["nuslerp_flatten"]:
                along = 0 if group.shared["nuslerp_row_wise"] else -1
            return NuSlerp(
                key,
                shape,
                (*other_inputs, *base_inputs),
                text,
                _share(_drop_missing(group.own["weight"])),
                bool(base_inputs),
                along,
            )
        case "model-stock":
            return ModelStock(key, shape, (*base_inputs, *other_inputs), text, bool(group.shared["filter_wise"]))
    return _build_task_vectors(job, group, (*base_inputs, *other_inputs), text)


def _build_task_vectors(job: MergeJob, group: MergeGroup, inputs: tuple[Input, ...], text: str) -> Recipe:
    from ckpt_tool.merging.task_vectors import TaskVectors

    trims = tuple(_trim(job, group, number) for number in range(len(inputs) - 1))
    return TaskVectors(
        TensorKey(group.name),
        inputs[0].tensor.shape,
        inputs,
        text,
        tuple(_drop_missing(group.own["weight"])),
        trims,
        job.method.consensus,
        bool(group.shared["normalize"]),
        bool(group.shared["rescale"]),
        float(group.shared["lambda"] or 0),
    )


def _trim(job: MergeJob, group: MergeGroup, number: int) -> Trim | None:
    """How the task vector of model `number` (not counting the base) is trimmed, None if it is not."""
    from ckpt_tool.merging.task_vectors import Trim, stream

    kind: Any = job.method.trim
    if kind is None:
        return None
    density, gamma, epsilon = (_drop_missing(group.own.get(name, ())) for name in ("density", "gamma", "epsilon"))
    return Trim(
        kind,
        density[number],
        gamma[number] if gamma else 0.0,
        epsilon[number] if epsilon else 0.0,
        stream(job.seed, number, group.name),
    )


def _single_sum(weights: Sequence[float]) -> float:
    """The magnitude of the sum of the weights in fp32 arithmetic, inf if it overflows."""
    total = 0.0
    try:
        for weight in weights:
            (total,) = unpack("f", pack("f", total + unpack("f", pack("f", weight))[0]))
    except OverflowError:
        return inf
    return abs(total)


def _share(weights: Sequence[float]) -> float:
    """The parameter t of nuslerp for two weights: the share of the second model."""
    total = sum(weights)
    return 0.5 if abs(total) < LEAST_TOTAL else weights[1] / total


def _drop_missing(values: Sequence[float | bool | None]) -> list[float]:
    """The values without None, which the base has for parameters of task vectors."""
    return [float(value) for value in values if value is not None]


def _has_both_layouts(prefix: str, held: Mapping[str, Mapping[str, Any]]) -> bool:
    """Are the experts below a prefix numbered in one model, and fused in another?"""
    layouts = set()
    for tensors in held.values():
        rest = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
        layouts |= {part[0].isdigit() for part in rest if part}
    return len(layouts) == 2
