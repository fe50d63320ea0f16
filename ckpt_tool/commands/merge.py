"""`ckpt merge`: one checkpoint out of several, by one of four methods.

union (the default)    consolidate shards and join the tensors of several checkpoints, optionally without some keys
lora                   fold adapters into a base model (`adapters.fold`)
linear, slerp, ...     arithmetic merges of models (`merging`)
--config               a merge that a mergekit config describes (`merging.mergekit`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tool.conversion.kept_names import check_kept_names
from ckpt_tool.conversion.naming import refuse_experts
from ckpt_tool.conversion.optimizer_groups import without_removed
from ckpt_tool.conversion.passes import selected
from ckpt_tool.conversion.renaming import refuse_unmatched_in_all
from ckpt_tool.conversion.unused_options import refuse_new_names, refuse_unused_reading, refuse_without_patterns
from ckpt_tool.conversion.writing import write
from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint, UsageError
from ckpt_tool.merging.job import MergeJob, job_of, last_of, steps_of
from ckpt_tool.merging.merge import merge_models
from ckpt_tool.merging.mergekit import read_config
from ckpt_tool.merging.options import LORA, UNION, MergeOptions
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.moves import Stored
from ckpt_tool.quantised.keep_together import keep_parts_together
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.sources.opening import Opened, open_source
from ckpt_tool.sources.select import split_keys


def merge(
    sources: list[str], dst: str, reading: Reading, writing: Writing, options: MergeOptions, progress: Progress
) -> dict[str, Any]:
    """Merge `sources` into one checkpoint at `dst`, and return the document of `merge --json`.

    Raises:
        UsageError: E1440 to E1444, E2401.
        InputError: E1446 to E1449, and what reading and writing raise.
    """
    refuse_experts(writing, "merge leaves experts as they are")
    refuse_without_patterns("merge", writing)
    if options.on_conflict != "error" and (options.config is not None or options.name != UNION):
        raise UsageError(
            "--on-conflict only applies to --method union",
            code="E1442",
            place="ckpt merge",
            hint="adapters and arithmetic have no conflicts",
        )
    if options.config is not None:
        return merge_models(_configured(options.config, options), dst, reading, writing, progress)
    _refuse_steps_without_method(options)
    sources = [src for path in sources for src in _checkpoints(path, options, reading)]
    if options.name == LORA:
        from ckpt_tool.adapters.fold import fold

        _refuse(options, but=("--weight",))
        return fold(sources, dst, reading, writing, progress, weights=options.weights)
    if options.name != UNION:
        return merge_models(job_of(options, sources), dst, reading, writing, progress)
    _refuse(options, but=())
    refuse_new_names("merge", writing)
    opened = [open_source(src, reading) for src in sources]
    refuse_unused_reading(reading, *opened)
    adapters = [one.path for one in opened if one.format.holds.adapter]
    if options.method is None and adapters and len(adapters) < len(opened):
        raise UsageError(
            f"{adapters[0]} is an adapter, which can be folded into the model or be written next to it",
            code="E1442",
            place="ckpt merge",
            hint="--method lora folds it, --method union joins the tensors as they are",
        )
    job = Conversion.of(opened[0], reading, writing)
    if len(opened) == 1:
        return write(check_kept_names(selected(opened[0], job), job, "merge"), dst, job, progress)
    if writing.dequantize:
        raise UsageError(
            "--dequantize takes one source: codes and scales of several are joined first",
            code="E1467",
            hint="merge them as they are, then convert the result with --dequantize",
        )
    joined = check_kept_names(_union(opened, job, options.on_conflict), job, "merge")
    return write(joined, dst, job, progress)


def _configured(config: str, options: MergeOptions) -> MergeJob:
    """The job of a mergekit config. Only the seed and `--tokenizer` are options, everything else is in the config."""
    if options.name != UNION:
        raise UsageError(
            f"--config says the method, but --method {options.name} is given too",
            code="E1442",
            path=config,
            hint="give one of the two",
        )
    _refuse(options, but=("--tokenizer",), of="--config")
    return read_config(config, seed=options.seed, tokenizer=options.tokenizer)


def _refuse_steps_without_method(options: MergeOptions) -> None:
    """Raise UsageError E1442 if steps of a run are selected without a method that merges them."""
    picks = [option for option, value in (("--last", options.last), ("--steps", options.steps)) if value]
    if len(picks) > 1:
        raise UsageError(
            "--last and --steps both pick the steps", code="E1442", place="ckpt merge", hint="give one of the two"
        )
    if picks and options.name in (UNION, LORA):
        raise UsageError(
            f"{picks[0]} picks several steps of a run, and nothing says how to merge them",
            code="E1442",
            place="ckpt merge",
            hint=f"--method average averages them: ckpt merge RUN OUT --method average {picks[0]} ...",
        )


def _refuse(options: MergeOptions, *, but: tuple[str, ...], of: str = "") -> None:
    """Raise UsageError E1442 for options of arithmetic merges that would have no effect.

    Args:
        but: options that do have an effect here.
        of: what makes them ineffective, if it is not the method.
    """
    wrong = [option for option in options.given() if option not in but]
    wrong += ["--seed"] if options.seed is not None and not of else []
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)}: no effect with {of or f'merge --method {options.name}'}",
            code="E1442",
            hint="name the method with --method" if options.name == UNION and not of else "leave it off",
        )


def _checkpoints(path: str, options: MergeOptions, reading: Reading) -> list[str]:
    """The source itself, or the checkpoints in it that `--last` or `--steps` selects."""
    if options.last is None and not options.steps:
        return [path]
    from ckpt_tool.storage.opening import open_tree

    names = {
        name.split("/")[0] for name in open_tree(path, follow_symlinks=reading.follow_symlinks).listing() if "/" in name
    }
    if options.last is None:
        return steps_of(path, sorted(names), options.steps)
    return last_of(path, sorted(names), options.last)


def _refuse_mixed_experts(parts: list[Chosen], opened: list[Opened], found: Mapping[TensorKey, Stored]) -> None:
    """Raise InconsistentCheckpoint E2912 if the sources store the same experts in two layouts.

    The joined model would have these experts twice. A mix that a single source has by itself is not refused.
    """
    from ckpt_tool.families.experts import mixed_experts

    mixed = mixed_experts(key.name for key in found)
    own = {front for part in parts for front in mixed_experts(part.model)}
    new = [front for front in mixed if front not in own]
    if new:
        shown = ", ".join(front.replace("%d", "*") for front in new[:3])
        raise InconsistentCheckpoint(
            f"{shown}: one source has its experts one by one, another in one tensor a layer",
            code="E2912",
            path=opened[-1].path,
            faults=[front.replace("%d", "*") for front in new[3:]],
            hint="bring them into one layout first: ckpt convert --to safetensors --experts split (or fused)",
        )


def _union(opened: list[Opened], job: Conversion, on_conflict: str) -> Chosen:
    """All tensors of all sources, in order; the key patterns are applied to the union.

    Raises:
        InconsistentCheckpoint: E0353 if a key is in two sources and `on_conflict` is "error"; E2912 for mixed experts.
    """
    writing = job.writing
    refuse_unmatched_in_all(writing.rename, opened)
    bare = job._replace(writing=replace(writing, remove_keys=(), keep_keys=()), inherits=False, of_several=True)
    parts = [selected(one, bare) for one in opened]
    found: dict[TensorKey, Stored] = {}
    conflicts = []

    for number, part in enumerate(parts):
        for row in part.stored:
            key = row.tensor.key
            if key in found:
                conflicts.append(f"{key}: in {opened[found[key].source].path} and {opened[number].path}")
                if on_conflict != "last":
                    continue
            found[key] = Stored(number, row.tensor)

    extras: dict[str, Any] = {}
    for number, part in enumerate(parts):
        for name, value in part.extras.items():
            if name in extras and extras[name] != value:
                conflicts.append(f"extras {name}: differs in {opened[number].path}")
                if on_conflict != "last":
                    continue
            extras[name] = value

    if conflicts and on_conflict == "error":
        raise InconsistentCheckpoint(
            f"{len(conflicts)} keys are in more than one source; the first: {conflicts[0]}",
            code="E0353",
            hint="say which one wins with --on-conflict first or --on-conflict last",
            faults=conflicts[1:],
        )

    _refuse_mixed_experts(parts, opened, found)
    kept, removed = split_keys(found, remove=writing.remove_keys, keep=writing.keep_keys, model_only=writing.model_only)
    tensors = {key: row.tensor for key, row in found.items()}
    kept, removed = keep_parts_together(tensors, kept, removed, writing, opened[0], job.reading)
    gone: tuple[LogicalTensor, ...] = tuple(found[key].tensor for key in removed)

    return Chosen(
        tuple(opened),
        tuple(found[key] for key in kept),
        without_removed(extras, {key.name for key in removed} - {key.name for key in kept}),
        gone,
        tuple(entry for part in parts for entry in part.dropped),
        notes=tuple(f"{conflict}: the {on_conflict} one was taken" for conflict in conflicts),
        first_replica=job.reading.replica_policy == "first",
    )
