"""The Python face: the verbs as functions, with the options of the command line as keywords.

    import ckpt_tool as ckpt
    document = ckpt.convert("runs/7", "out", to="safetensors", dtype="bf16", max_shard_size="2GB")
    document["plan"]["bytes_written"]

Each returns the document that `--json` prints and raises `CkptError` where the command would exit with 2 to 7. What
`--report` and the like do for a screen has no keyword here. `progress` is any `core.progress.Progress`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Unpack

from ckpt_tool.commands import values
from ckpt_tool.commands.options import (
    DEVICES,
    DIALECTS,
    CallOptions,
    ReadingOptions,
    Taken,
    both_from,
    merging_from,
    reading_from,
)
from ckpt_tool.core.progress import SILENT, Progress

if TYPE_CHECKING:
    from ckpt_tool.run.lazy import OpenCatalog

StrPath = str | PathLike[str]
Document = dict[str, Any]


def open(path: StrPath, from_format: str | None = None) -> OpenCatalog:
    """The checkpoint at `path` as a catalog of lazy tensors; values are read when a tensor is sliced."""
    from ckpt_tool.commands.open import open_catalog

    return open_catalog(fspath(path), from_format=from_format)


def reshard(src: StrPath, dst: StrPath, *, progress: Progress = SILENT, **options: Unpack[CallOptions]) -> Document:
    """The same checkpoint for other parallel degrees: `ckpt reshard SRC DST`."""
    from ckpt_tool.commands.convert import reshard as command

    reading, writing = both_from(options)
    return command(fspath(src), fspath(dst), reading, writing, progress)


def convert(src: StrPath, dst: StrPath, *, progress: Progress = SILENT, **options: Unpack[CallOptions]) -> Document:
    """Another format, dialect and degrees: `ckpt convert SRC DST --to FORMAT`."""
    from ckpt_tool.commands.convert import convert as command

    reading, writing = both_from(options)
    return command(fspath(src), fspath(dst), reading, writing, progress)


def merge(
    sources: Sequence[StrPath],
    dst: StrPath,
    *,
    method: str | None = None,
    weight: float | Iterable[float] = (),
    base: StrPath | None = None,
    density: float | Iterable[float] = (),
    t: float | None = None,
    seed: int | None = None,
    epsilon: float | None = None,
    gamma: float | None = None,
    lambda_: float | None = None,
    normalize: bool | None = None,
    decay: float | None = None,
    last: int | None = None,
    tokenizer: str | None = None,
    on_conflict: str = "error",
    progress: Progress = SILENT,
    **options: Unpack[CallOptions],
) -> Document:
    """Join shards, strip keys, merge models: `ckpt merge SRC... DST`. Here `config` is a mergekit config."""
    from ckpt_tool.commands.merge import merge as command

    config = options.pop("config", None)
    asked = merging_from(
        {
            "method": method,
            "weight": weight,
            "base": base,
            "density": density,
            "t": t,
            "seed": seed,
            "epsilon": epsilon,
            "gamma": gamma,
            "lambda_": lambda_,
            "normalize": normalize,
            "decay": decay,
            "last": last,
            "tokenizer": tokenizer,
            "merge_config": config,
            "on_conflict": on_conflict,
        }
    )
    reading, writing = both_from(options)
    return command([fspath(source) for source in sources], fspath(dst), reading, writing, progress, **asked)


def diff(
    a: StrPath,
    b: StrPath,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    map: StrPath | None = None,
    state: str | Iterable[str] = (),
    dialect: str | None = None,
    device: str = "cpu",
    progress: Progress = SILENT,
    **options: Unpack[ReadingOptions],
) -> Document:
    """Are two checkpoints equal in value? `ckpt diff A B`; look at `equal` in the result."""
    from ckpt_tool.commands.diff import diff as command

    taken = Taken({"rtol": rtol, "atol": atol, "state": state or None, "dialect": dialect, "device": device})
    rtol, atol = taken.take("rtol", values.tolerance, 0.0), taken.take("atol", values.tolerance, 0.0)
    states = taken.take("state", values.words, ())
    dialect = taken.take("dialect", values.one_of(DIALECTS), None)
    device = taken.take("device", values.one_of(DEVICES), "cpu")
    taken.settle()
    map_file = None if map is None else fspath(map)
    reading = reading_from(options)
    return command(
        fspath(a),
        fspath(b),
        reading,
        rtol=rtol,
        atol=atol,
        map_file=map_file,
        states=states,
        dialect=dialect,
        device=device,
        progress=progress,
    )


def verify(
    path: StrPath,
    *,
    mode: str = "full",
    device: str = "cpu",
    progress: Progress = SILENT,
    **options: Unpack[ReadingOptions],
) -> Document:
    """Is it complete and sound? `ckpt verify SRC`; look at `ok` in the result."""
    from ckpt_tool.commands.verify import verify as command

    taken = Taken({"mode": mode, "device": device})
    mode = taken.take("mode", values.one_of(("quick", "full")), "full")
    device = taken.take("device", values.one_of(DEVICES), "cpu")
    taken.settle()
    return command(fspath(path), reading_from(options), mode=mode, device=device, progress=progress)
