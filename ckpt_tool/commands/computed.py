"""Chosen tensors of which some are computed: the road by which dequantising, adapters and merges reach the plan.

    with_computed(chosen, [FoldedLora(...), ...], "base/ with adapter/", dtypes={key: BF16}, option="merge --method lora")

A computed tensor takes the place of the chosen one of its key, or comes last; it is F32 while it is computed and is rounded
once to `dtypes` of its key, or to what `--dtype` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpt_tool.commands.chosen import Chosen
from ckpt_tool.commands.options import Writing
from ckpt_tool.commands.select import group_of
from ckpt_tool.commands.source import Opened
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.plan.moves import Stored

if TYPE_CHECKING:
    from ckpt_tool.run.computed import Recipe


def refuse_saved_plan(writing: Writing, option: str) -> None:
    """Raise UsageError E0264 where the plan is to be run elsewhere: computed values only this process has."""
    if writing.plan_file or writing.ray:
        raise UsageError(
            f"{option} computes values while it reads, which a saved plan can't do yet", code="E0264",
            hint="run it itself, without --plan and --ray",
        )  # fmt: skip


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
    """`chosen` with what `recipes` make. shown: what messages call the computed source. dtypes: what each is rounded to,
    F32 where it says nothing; `--dtype` wins. Raises UsageError E0264 (`option` in words) with --plan and --ray."""
    from ckpt_tool.run.computed import ComputedTree

    refuse_saved_plan(writing, option)
    if not recipes:
        return replace(chosen, notes=(*chosen.notes, *notes))
    tree, number = ComputedTree(shown, recipes), len(chosen.sources)
    made = {tensor.key: Stored(number, tensor) for tensor in tree.tensors}
    stored = [made.pop(row.tensor.key, row) for row in chosen.stored]
    opened = Opened(tree, chosen.sources[0].format, Catalog(chosen.sources[0].catalog.format, {}))
    told = {key: dtype for key, dtype in dtypes.items() if not _said(writing, key)}
    return replace(
        chosen,
        sources=(*chosen.sources, opened),
        stored=(*stored, *made.values()),
        renewed=chosen.renewed | {tensor.key for tensor in tree.tensors},
        casts={**chosen.casts, **told},
        notes=(*chosen.notes, *notes),
    )


def more_than_computed(chosen: Chosen) -> int:
    """Bytes that are read of the files for computed tensors, less those that the plan counts for them, as if they lay in files."""
    if all(opened.catalog.tensors for opened in chosen.sources):
        return 0
    from ckpt_tool.run.computed import ComputedTree

    trees = {n: opened.tree for n, opened in enumerate(chosen.sources) if isinstance(opened.tree, ComputedTree)}
    rows = [row for row in chosen.stored if row.source in trees]
    files = {(row.source, chunk.array.path) for row in rows for chunk in row.tensor.chunks}
    return sum(trees[n].bytes_of_inputs(path) for n, path in files) - sum(row.tensor.nbytes for row in rows)


def _said(writing: Writing, key: TensorKey) -> bool:
    """Does `--dtype` say what the tensor is written as?"""
    return any(state in writing.dtypes for state in ("", key.state, group_of(key.state)))
