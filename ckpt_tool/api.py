"""The verbs as Python functions, with the options of the command line as keywords.

    import ckpt_tool as ckpt
    document = ckpt.convert("runs/7", "out", to="safetensors", dtype="bf16", max_shard_size="2GB")
    document["plan"]["bytes_written"]

Each returns the document that `--json` prints and raises `CkptError` where the command would exit with 2 to 7. What
`--report` and the like do for a screen has no keyword here. `progress` is any `core.progress.Progress`. The keywords,
with their types and their lines of help, are those of the verb's statement (`options`); `__init__.pyi` has them for
checkers and editors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from os import PathLike
from os import fspath as text_of
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_tool.cli.verbs import VERBS
from ckpt_tool.core.progress import SILENT, Progress
from ckpt_tool.core.urls import hide_secrets
from ckpt_tool.options.statement import options_of

if TYPE_CHECKING:
    from ckpt_tool.run.lazy import OpenCatalog

StrPath = str | PathLike[str]
Document = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Document])


def fspath(path: StrPath) -> str:
    """A path as text, a URL without its secrets (`core.urls`)."""
    return hide_secrets(text_of(path))


def open(path: StrPath, from_format: str | None = None) -> OpenCatalog:
    """The checkpoint at `path` as a catalog of lazy tensors; values are read when a tensor is sliced."""
    from ckpt_tool.commands.open import open_catalog

    return open_catalog(fspath(path), from_format=from_format)


def _documented(function: F) -> F:
    """A function with its verb's options in its signature and its docstring, in the place of `**options`."""
    own, options = inspect.signature(function), options_of(*VERBS[function.__name__].takes())
    named = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    named += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option.accepts())
        for name, option in options.items()
    ]
    function.__signature__ = own.replace(parameters=named)  # type: ignore[attr-defined]
    lines = "\n".join(f"    {name}: {option.help}" for name, option in options.items())
    function.__doc__ = f"{function.__doc__}\n\n{lines}\n"
    return function


@_documented
def reshard(src: StrPath, dst: StrPath, *, progress: Progress = SILENT, **options: Any) -> Document:
    """The same checkpoint for other parallel degrees: `ckpt reshard SRC DST`."""
    from ckpt_tool.commands.convert import reshard as command

    reading, writing = _taken("reshard", options)
    return command(fspath(src), fspath(dst), reading, writing, progress)


@_documented
def convert(src: StrPath, dst: StrPath, *, progress: Progress = SILENT, **options: Any) -> Document:
    """Another format, dialect and degrees: `ckpt convert SRC DST --to FORMAT`."""
    from ckpt_tool.commands.convert import convert as command

    reading, writing = _taken("convert", options)
    return command(fspath(src), fspath(dst), reading, writing, progress)


@_documented
def merge(sources: Sequence[StrPath], dst: StrPath, *, progress: Progress = SILENT, **options: Any) -> Document:
    """Join shards, strip keys, merge models: `ckpt merge SRC... DST`."""
    from ckpt_tool.commands.merge import merge as command

    writing, reading, wanted = _taken("merge", options)
    return command([fspath(source) for source in sources], fspath(dst), reading, writing, wanted, progress)


@_documented
def delta(src: StrPath, new: StrPath, dst: StrPath, *, progress: Progress = SILENT, **options: Any) -> Document:
    """What changed between two checkpoints, as slime and SGLang have it: `ckpt delta BASE NEW DST`; src: the base."""
    from ckpt_tool.commands.delta import delta as command

    wanted, reading = _taken("delta", options)
    return command(fspath(src), fspath(new), fspath(dst), reading, wanted, progress)


@_documented
def patch(
    src: StrPath, deltas: Sequence[StrPath], dst: StrPath, *, progress: Progress = SILENT, **options: Any
) -> Document:
    """A base, src, with a chain of deltas applied: `ckpt patch BASE DELTA... DST`."""
    from ckpt_tool.commands.patch import patch as command

    reading, writing = _taken("patch", options)
    return command(fspath(src), [fspath(delta) for delta in deltas], fspath(dst), reading, writing, progress)


@_documented
def diff(a: StrPath, b: StrPath, *, progress: Progress = SILENT, **options: Any) -> Document:
    """Are two checkpoints equal in value? `ckpt diff A B`; look at `equal` in the result."""
    from ckpt_tool.commands.diff import diff as command

    wanted, reading = _taken("diff", options)
    return command(fspath(a), fspath(b), reading, wanted, progress=progress)


@_documented
def verify(path: StrPath, *, progress: Progress = SILENT, **options: Any) -> Document:
    """Is it complete and sound? `ckpt verify SRC`; look at `ok` in the result."""
    from ckpt_tool.commands.verify import verify as command

    wanted, reading = _taken("verify", options)
    return command(fspath(path), reading, wanted, progress=progress)


@_documented
def audit(path: StrPath, *, progress: Progress = SILENT, **options: Any) -> Document:
    """Is it complete and plausible for its own config? `ckpt audit SRC`; look at `ok` in the result."""
    from ckpt_tool.commands.audit import audit as command

    wanted, reading = _taken("audit", options)
    return command(fspath(path), reading, wanted, progress=progress)


@_documented
def latest(run: StrPath, *, progress: Progress = SILENT, **options: Any) -> Document:
    """The newest sound step of a run: `ckpt latest RUN`; `path` in the result, None where no step is sound."""
    from ckpt_tool.commands.latest import latest as command

    wanted, reading = _taken("latest", options)
    return command(fspath(run), reading, wanted, progress=progress)


@_documented
def prune(run: StrPath, *, progress: Progress = SILENT, **options: Any) -> Document:
    """Remove the steps of a run that no rule keeps: `ckpt prune RUN`; `keep` and `remove` in the result."""
    from ckpt_tool.commands.prune import prune as command

    wanted, reading = _taken("prune", options)
    return command(fspath(run), reading, wanted, progress=progress)


def _taken(verb: str, options: dict[str, Any]) -> list[Any]:
    """A value of each of the verb's groups. Raises UsageError."""
    taken = {name: hide_secrets(value) if isinstance(value, str) else value for name, value in options.items()}
    return VERBS[verb].groups(taken)
