"""The verbs as Python functions, with the options of the command line as keywords.

    import ckpt_tool as ckpt
    result = ckpt.convert("runs/7", "out", to="safetensors", dtype="bf16", max_shard_size="2GB")
    result["plan"]["bytes_written"]

Each returns the document that `--json` prints, whose type is in `core.documents`, and raises `CkptError` where the
command would exit with 2 to 7. What `--report` and the like do for a screen has no keyword here. The keywords, with
their types, defaults and lines of help, are those of the verb's statement (`options`): `_with_options` puts them into
signatures and docstrings, and `__init__.pyi` has both for checkers and editors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, cleandoc, signature
from os import PathLike
from os import fspath as text_of
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ckpt_tool.cli.verbs import VERBS
from ckpt_tool.core.documents import (
    ApplyResult,
    AuditResult,
    DeltaResult,
    DiffResult,
    InspectResult,
    LatestResult,
    PruneResult,
    StatusResult,
    VerifyResult,
    WriteResult,
)
from ckpt_tool.core.progress import SILENT, Progress
from ckpt_tool.core.urls import hide_in_argument
from ckpt_tool.errors import UsageError, near_misses
from ckpt_tool.options.python_docs import defaults_of, describe_options, options_for

if TYPE_CHECKING:
    from ckpt_tool.run.lazy import OpenCatalog

StrPath = str | PathLike[str]
F = TypeVar("F", bound=Callable[..., Any])

_READS = """
    UsageError: an option can't be had, or contradicts another.
    InputError: the checkpoint is malformed, incomplete or of an unknown format.
    UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
    StorageError: the disk or the store refused, or nothing is there.
"""
_WRITES = """
    OutputExists: the output exists, another run is writing it, or it is in the source.
    SourceChanged: a source changed during the run.
"""
# what a keyword of the command line would do on a screen, or that the function has in another way
_LEFT_OUT = {"inspect": ("depth",), "plan": ("dry_run", "plan")}


def fspath(path: StrPath) -> str:
    """A path as text, a URL without its secrets (`core.urls`)."""
    return hide_in_argument(text_of(path))


def _several(paths: StrPath | Sequence[StrPath]) -> list[str]:
    """The paths as text. One path is a list of one: text has letters, and no letter is meant as a path."""
    if isinstance(paths, str | PathLike):
        return [fspath(paths)]
    return [fspath(path) for path in paths]


def open(path: StrPath, from_format: str | None = None) -> OpenCatalog:
    """Open a checkpoint of any format. Headers are read now, values when a tensor is asked for them.

        checkpoint = ckpt.open("runs/7")
        checkpoint["model.norm.weight"].numpy()
        checkpoint.state("exp_avg")["model.norm.weight"][:16].torch()

    Args:
        path: a file, a folder or a URL.
        from_format: read it as this format instead of detecting it: "dcp".

    Returns:
        A mapping of the names of the model's tensors to `LazyTensor`s; `state(name)` gives other states.

    Raises:
        InputError: the checkpoint is malformed, incomplete or of an unknown format.
        UnsafeInput: reading it needs code that is stored in it, or leads out of its folder.
        StorageError: the disk or the store refused, or nothing is there.
    """
    from ckpt_tool.commands.open import open_catalog

    return open_catalog(fspath(path), from_format=from_format)


def _with_options(verb: str, *, writes: bool = False) -> Callable[[F], F]:
    """Put the options of a verb in a function's signature and docstring, in the place of `**options`."""

    def add(function: F) -> F:
        name = function.__name__
        groups = VERBS[verb].takes()
        options = options_for(groups, _left_out(verb, name))
        defaults = defaults_of(*groups)

        plain = signature(function)
        parameters = [each for each in plain.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=option.accepts())
            for name, option in options.items()
        ]
        function.__signature__ = plain.replace(parameters=parameters)  # type: ignore[attr-defined]

        if not function.__doc__:  # python -OO
            return function
        about, returns = cleandoc(function.__doc__).split("\n\nReturns:")
        raises = (_READS + _WRITES.lstrip("\n")) if writes else _READS
        described = describe_options(options, "    ")
        function.__doc__ = f"{about}\n{described}\n\nReturns:{returns}\n\nRaises:{raises}"
        return function

    return add


def _left_out(verb: str, function: str) -> set[str]:
    """The keywords of a verb that the function does not take."""
    stated = VERBS[verb]
    out = set(_LEFT_OUT.get(function, ()))
    if verb == "apply":  # what a saved plan has decided
        out |= {name for name, option in options_for(stated.takes(), ()).items() if option.section in stated.but}
    return out


@_with_options("inspect")
def inspect(path: StrPath, **options: Any) -> InspectResult:
    """Say what is in a checkpoint, from its headers alone. Nothing in it is ever run.

    Args:
        path: a file, a folder or a URL.

    Returns:
        `format`, `mesh`, `total`, `states`, `tensors` (a dict for each), `extras`, `notes`.
    """
    from ckpt_tool.commands.inspect import inspect as command

    wanted, reading = _groups("inspect", options)
    return cast(InspectResult, command(fspath(path), reading, wanted))


@_with_options("reshard", writes=True)
def reshard(src: StrPath, dst: StrPath, *, progress: Progress = SILENT, **options: Any) -> WriteResult:
    """Write the same checkpoint for other parallel degrees, with every state of it.

        ckpt.reshard("runs/7", "out", tp=4, pp=2)

    Args:
        src: the checkpoint: a file, a folder or a URL.
        dst: the output: a new file or folder, or a place in a store.
        progress: receives the progress of the run; without it nothing is shown.

    Returns:
        `plan` (bytes, files), `states`, `fallbacks`, `dropped` (what was not written, and why), `notes`.
    """
    from ckpt_tool.commands.convert import reshard as command

    reading, writing = _groups("reshard", options)
    return cast(WriteResult, command(fspath(src), fspath(dst), reading, writing, progress))


@_with_options("convert", writes=True)
def convert(src: StrPath, dst: StrPath, *, progress: Progress = SILENT, **options: Any) -> WriteResult:
    """Convert a checkpoint to another format, other names and other parallel degrees, in one step.

        ckpt.convert("runs/7", "out", to="safetensors", dtype="bf16")

    Args:
        src: the checkpoint: a file, a folder or a URL.
        dst: the output: a new file or folder, or a place in a store.
        progress: receives the progress of the run; without it nothing is shown.

    Returns:
        `plan` (bytes, files), `states`, `fallbacks`, `dropped` (what was not written, and why), `notes`.
    """
    from ckpt_tool.commands.convert import convert as command

    reading, writing = _groups("convert", options)
    return cast(WriteResult, command(fspath(src), fspath(dst), reading, writing, progress))


@_with_options("convert", writes=True)
def plan(
    src: StrPath, dst: StrPath, file: StrPath | None = None, *, progress: Progress = SILENT, **options: Any
) -> WriteResult:
    """Plan a conversion, or without `to` a reshard, and write no checkpoint.

        ckpt.plan("runs/7", "out", "plan.json", to="dcp", dp=8)
        ckpt.apply("plan.json")

    A merge is planned by `ckpt.merge(..., dry_run=True)` or `ckpt.merge(..., plan="plan.json")`.

    Args:
        src: the checkpoint: a file, a folder or a URL.
        dst: what will be written. It may exist with `force=True`.
        file: where the plan is saved for `ckpt.apply`; None saves nothing.
        progress: shown the plan; silent where none is given.

    Returns:
        What the run would return, without `elapsed_s` and `digest_checked`; `plan_file` where one was saved.
    """
    from ckpt_tool.commands import convert as commands

    verb = "reshard" if options.get("to") is None else "convert"
    _refuse_left_out("plan", options)
    how = {"dry_run": True} if file is None else {"plan": fspath(file)}
    reading, writing = _groups(verb, {**options, **how})
    command = commands.reshard if verb == "reshard" else commands.convert
    return cast(WriteResult, command(fspath(src), fspath(dst), reading, writing, progress))


@_with_options("apply", writes=True)
def apply(plan: StrPath, *, progress: Progress = SILENT, **options: Any) -> ApplyResult:
    """Run a saved plan, or one share of it; the last share to finish puts the output in its place.

        ckpt.apply("plan.json")
        ckpt.apply("plan.json", part="3/8")

    Args:
        plan: the file that `ckpt.plan`, or `plan=` of another function, has saved.
        progress: receives the progress of the run; without it nothing is shown.

    Returns:
        As `ckpt.convert`; `committed` says whether the output is in its place now, `part` and `parts` how it is shared.
    """
    from ckpt_tool.commands.apply import apply as command

    _refuse_left_out("apply", options)
    share, writing = _groups("apply", options)
    return cast(ApplyResult, command(fspath(plan), share, writing, progress))


@_with_options("status")
def status(target: StrPath, *, progress: Progress = SILENT, **options: Any) -> StatusResult:
    """Say how far a run is that writes, here or on other machines.

    Args:
        target: the output that is being written, or a saved plan.
        progress: receives the progress of `watch=True`; without it nothing is shown.

    Returns:
        `state` ("written" or "growing"), `bytes`, `of_bytes`, `seconds_left`, `parts` (done, running or dead).
    """
    from ckpt_tool.commands.status import status as command

    (wanted,) = _groups("status", options)
    return cast(StatusResult, command(fspath(target), progress, watch=wanted.watch))


@_with_options("merge", writes=True)
def merge(
    sources: StrPath | Sequence[StrPath], dst: StrPath, *, progress: Progress = SILENT, **options: Any
) -> WriteResult:
    """Merge models, fold adapters, average steps, or join the shards of one checkpoint.

        ckpt.merge(["base", "adapter"], "out", method="lora")
        ckpt.merge("runs/7", "out", method="average", last=4)

    Args:
        sources: the checkpoints, in their order. One path is one source. [] where `config` names them.
        dst: the output: a new file or folder, or a place in a store.
        progress: receives the progress of the run; without it nothing is shown.

    Returns:
        `plan` (bytes, files), `states`, `removed`, `dropped` (what was not written, and why), `notes`.
    """
    from ckpt_tool.commands.merge import merge as command

    writing, reading, wanted = _groups("merge", options)
    return cast(WriteResult, command(_several(sources), fspath(dst), reading, writing, wanted, progress))


@_with_options("delta", writes=True)
def delta(src: StrPath, new: StrPath, dst: StrPath, *, progress: Progress = SILENT, **options: Any) -> DeltaResult:
    """Write what changed between two checkpoints, in the form that slime and SGLang use.

    Args:
        src: the base: the checkpoint as it was.
        new: the checkpoint as it is, in any format and layout.
        dst: the output: a new folder.
        progress: receives the progress of the run; without it nothing is shown.

    Returns:
        `delta` (version, tensors, changed bytes), `plan`, `notes`.
    """
    from ckpt_tool.commands.delta import delta as command

    wanted, reading = _groups("delta", options)
    return cast(DeltaResult, command(fspath(src), fspath(new), fspath(dst), reading, wanted, progress))


@_with_options("patch", writes=True)
def patch(
    src: StrPath,
    deltas: StrPath | Sequence[StrPath],
    dst: StrPath,
    *,
    progress: Progress = SILENT,
    **options: Any,
) -> WriteResult:
    """Write a base with a chain of deltas applied.

    Args:
        src: the base.
        deltas: what `ckpt.delta` wrote, in their order. One path is one delta.
        dst: the output: a new file or folder, or a place in a store.
        progress: receives the progress of the run; without it nothing is shown.

    Returns:
        As `ckpt.convert`.
    """
    from ckpt_tool.commands.patch import patch as command

    reading, writing = _groups("patch", options)
    return cast(WriteResult, command(fspath(src), _several(deltas), fspath(dst), reading, writing, progress))


@_with_options("diff")
def diff(a: StrPath, b: StrPath, *, progress: Progress = SILENT, **options: Any) -> DiffResult:
    """Compare the values of two checkpoints, in whatever formats and layouts they are.

    A difference is a result and raises nothing.

    Args:
        a: a checkpoint.
        b: another.
        progress: receives the progress of the run; without it nothing is shown.

    Returns:
        `equal`, `compared`, `differences` (a dict for each tensor that differs), `summary` (by state and module).
    """
    from ckpt_tool.commands.diff import diff as command

    wanted, reading = _groups("diff", options)
    return cast(DiffResult, command(fspath(a), fspath(b), reading, wanted, progress=progress))


@_with_options("verify")
def verify(path: StrPath, *, progress: Progress = SILENT, **options: Any) -> VerifyResult:
    """Check that a checkpoint is complete and undamaged.

    What is wrong with it is a result; what keeps it from being opened at all is raised.

    Args:
        path: a file, a folder or a URL.
        progress: receives the progress of the run; without it nothing is shown.

    Returns:
        `ok`, `findings`, `digests` (state -> tensor -> digest, the same in every format and layout).
    """
    from ckpt_tool.commands.verify import verify as command

    wanted, reading = _groups("verify", options)
    return cast(VerifyResult, command(fspath(path), reading, wanted, progress=progress))


@_with_options("audit")
def audit(path: StrPath, *, progress: Progress = SILENT, **options: Any) -> AuditResult:
    """Check that a checkpoint is complete and plausible for its own config.

    Args:
        path: a file, a folder or a URL.
        progress: receives the progress of the run; without it nothing is shown.

    Returns:
        `ok`, `family`, `findings`, worst first.
    """
    from ckpt_tool.commands.audit import audit as command

    wanted, reading = _groups("audit", options)
    return cast(AuditResult, command(fspath(path), reading, wanted, progress=progress))


@_with_options("latest")
def latest(run: StrPath, *, progress: Progress = SILENT, **options: Any) -> LatestResult:
    """Find the newest complete step of a training run.

    Args:
        run: the folder, or the URL, in which the run keeps its steps.
        progress: receives the steps that were skipped; without it nothing is shown.

    Returns:
        `path` and `step`, None where no step is complete; `passed_over` says which newer ones are not, and why.
    """
    from ckpt_tool.commands.latest import latest as command

    wanted, reading = _groups("latest", options)
    return cast(LatestResult, command(fspath(run), reading, wanted, progress=progress))


@_with_options("prune")
def prune(run: StrPath, *, progress: Progress = SILENT, **options: Any) -> PruneResult:
    """Remove the steps of a run that no rule keeps, never the last complete one.

        ckpt.prune("runs/7", keep_last=3, dry_run=True)["remove"]

    Args:
        run: the folder in which the run keeps its steps.
        progress: receives the progress of the run; without it nothing is shown.

    Returns:
        `keep` (each with its reasons), `remove`, `freed_bytes`.
    """
    from ckpt_tool.commands.prune import prune as command

    wanted, reading = _groups("prune", options)
    return cast(PruneResult, command(fspath(run), reading, wanted, progress=progress))


def _refuse_left_out(function: str, options: dict[str, Any]) -> None:
    """Raise UsageError E0280 for a keyword that the verb has and the function does not."""
    verb = "convert" if function == "plan" else function
    left_out = _left_out(verb, function)
    wrong = next((name for name in options if name in left_out), None)
    if wrong is not None:
        known = options_for(VERBS[verb].takes(), left_out)
        raise UsageError(
            f"unknown option {wrong!r} of ckpt.{function}",
            code="E0280",
            hint=near_misses(wrong, known) or f"the options are {', '.join(known)}",
        )


def _without_secrets(value: Any) -> Any:
    """The value of an option, its URLs without their secrets."""
    if isinstance(value, str):
        return hide_in_argument(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_without_secrets, value)) if type(value) in (list, tuple) else value
    return value


def _groups(verb: str, options: dict[str, Any]) -> list[Any]:
    """A value of each of the verb's groups of options. Raises UsageError."""
    if verb == "inspect":
        _refuse_left_out(verb, options)
    given = {name: _without_secrets(value) for name, value in options.items()}
    return VERBS[verb].groups(given)
