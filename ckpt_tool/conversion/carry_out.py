"""Executes a plan: runs it, reads the staged output back, and commits it.

Which files an output may replace is determined before (`conversion.accounted`) and passed on: the run replaces these
and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.progress import Progress
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import (
    CorruptFile,
    InputError,
    InternalError,
    SourceChanged,
    StorageError,
    UnsafeInput,
    UsageError,
)
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.plan import Plan
from ckpt_tool.sources.opening import resolve
from ckpt_tool.storage.opening import open_store, scheme_of
from ckpt_tool.storage.output.replaced import ReplacedOutput
from ckpt_tool.storage.source import Tree

if TYPE_CHECKING:
    from ckpt_tool.run.executor import Executor, Result
    from ckpt_tool.run.upload import Upload
    from ckpt_tool.run.walk import Movers
    from ckpt_tool.signing.seal import Seal


def execute(
    plan: Plan,
    trees: Mapping[str, Tree],
    writing: Writing,
    progress: Progress,
    *,
    recorded: Mapping[TensorKey, str] | None = None,
    part: tuple[int, int] | None = None,
    worker: str | None = None,
    movers: Movers | None = None,
    plan_file: str | None = None,
    seal: Seal | None = None,
    replaced: ReplacedOutput | None = None,
    planned_from: Iterable[Tree] = (),
) -> Result:
    """Run the plan, check the staged output and commit it. Of several parts, the last one to finish checks and commits.

    Args:
        recorded: digests that the source states for its tensors; if values don't match, nothing is committed.
        part: (i, n) if this process runs part i of n of the plan, counted from 1; None for all of it.
        worker: the name of a worker that claims its units of work.
        movers: what moves the data, the CPU if None.
        plan_file: the file from which the plan was read. If the output then does not read back as planned, the plan is
            at fault (SourceChanged E1605), not this program.
        seal: the signature and attestation to add, see `signing.seal`.
        replaced: what `--force` may remove.
        planned_from: the sources from which this process made the plan. Files that it read in them and that the plan
            does not list (headers, indexes, metadata) must be of the same save as the values.
    """

    def check(staged: Path | Upload, digests: dict[TensorKey, str], source: dict[TensorKey, str]) -> None:
        for tree in planned_from:
            tree.check_unchanged(pointers=False)
        _check_recorded(source, recorded or {})
        full = writing.verify == "full" and (isinstance(staged, Path) or not staged.blind)
        try:
            _check_staged(_staged_tree(staged, plan), plan, digests, progress if full else None, writing.threads)
        except (InputError, UnsafeInput, InternalError) as e:
            if plan_file is None:
                raise
            raise SourceChanged(
                f"the output of the plan is not a {plan.format} checkpoint of the tensors that it names: {e.message}",
                code="E1605",
                path=plan_file,
                key=e.key,
                faults=e.faults,
                hint="the plan was not made by ckpt: make it again with --plan",
            ) from e

    executor = executor_of(
        plan,
        trees,
        writing,
        progress,
        part=part,
        worker=worker,
        check=check,
        movers=movers,
        seal=seal,
        replaced=replaced,
    )
    try:
        result = executor.run()
    except BaseException:
        if seal is not None:
            seal.failed()
        raise
    if seal is not None:
        seal.committed()
    return result


def executor_of(
    plan: Plan,
    trees: Mapping[str, Tree],
    writing: Writing,
    progress: Progress,
    *,
    replaced: ReplacedOutput | None,
    **more: Any,
) -> Executor:
    """The executor of a plan with the options of a run: for a local path or for a store.

    replaced: what `--force` may remove. more: further arguments of `Executor`.
    """
    from ckpt_tool.run.executor import Executor, RunOptions

    options = RunOptions(
        threads=writing.threads,
        memory=writing.memory,
        verify=writing.verify,
        resume=writing.resume,
        force=writing.force,
        fsync=writing.fsync,
        allow_lossy=writing.allow_lossy,
    )
    if scheme_of(plan.destination) is None:
        return Executor(plan, trees, options, progress=progress, replaced=replaced, **more)
    from ckpt_tool.run.store_executor import StoreExecutor
    from ckpt_tool.storage.stores.output_store import output_store

    store = output_store(plan.destination)
    return StoreExecutor(store, plan, trees, options, progress=progress, replaced=replaced, **more)


def refuse_in_store(writing: Writing) -> None:
    """Raise UsageError E2510 if `--device` is given for an output in a store."""
    if writing.device not in (None, "", "cpu"):
        raise UsageError(
            f"--device {writing.device} does not write into a store yet",
            code="E2510",
            hint="leave it off, or write to a local path and upload that",
        )


def _staged_tree(staged: Path | Upload, plan: Plan) -> Tree:
    """The staged output as a tree, which the format's reader can open like a finished checkpoint."""
    if isinstance(staged, Path):
        return Tree(staged / plan.single if plan.single else staged)
    from ckpt_tool.run.upload import Seen
    from ckpt_tool.storage.stores.remote import RemoteTree

    return RemoteTree(plan.destination, Seen(staged, open_store(plan.destination)))


def _check_recorded(digests: Mapping[TensorKey, str], recorded: Mapping[TensorKey, str]) -> None:
    wrong = [key for key, digest in digests.items() if recorded.get(key, digest) != digest]
    if wrong:
        raise CorruptFile(
            "the values do not have the digest that the source recorded for them",
            code="E0352",
            key=str(wrong[0]),
            hint="the source was damaged after it was written: restore it",
            faults=[str(key) for key in wrong[1:]],
        )


def _check_staged(
    staged: Tree, plan: Plan, digests: Mapping[TensorKey, str], progress: Progress | None, threads: int | None
) -> None:
    """Read the staged output's headers with the format's reader and compare them with the plan.

    progress: if given, the values are read and compared with `digests` too.
    """
    tree, _ = resolve(staged, Reading(from_format=plan.format))
    catalog = registry.by_name(plan.format).read(tree)
    catalog.check()
    have = {TensorKey(row.name, row.state): (row.shape, row.dtype) for row in catalog.rows()}
    unlisted = {TensorKey(*key) for key in plan.options.get("unlisted", ())}  # kept as plain values
    want = {move.key: (move.shape, move.dtype_out) for move in plan.moves if move.key not in unlisted}
    wrong = [key for key in {**want, **have} if have.get(key) != want.get(key)]
    if wrong:
        raise InternalError(
            f"the staged output does not read back as planned: {wrong[0]}: {have.get(wrong[0])}, want "
            f"{want.get(wrong[0])}",
            hint="please report this; nothing was committed",
        )
    if progress is not None and digests:
        from ckpt_tool.run.scan import digests_of

        orders = {move.key: move.order for move in plan.moves if move.order}
        progress.start(sum(tensor.nbytes for tensor in catalog.tensors.values()), "verifying what was written")
        again = digests_of(catalog, tree, threads=threads, orders=orders, progress=progress)
        progress.finish()
        for key, digest in digests.items():
            if key not in unlisted and again[key] != digest:
                raise StorageError(
                    "the values read back differ from those written",
                    code="E0709",
                    path=staged.shown,
                    key=str(key),
                    hint="the disk or the memory of this machine fails",
                )
