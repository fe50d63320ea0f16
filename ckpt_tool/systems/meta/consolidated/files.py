"""Which files of a folder are a checkpoint as Meta and Mistral AI publish them, by their names.

    choose(["consolidated.00.pth", "consolidated.01.pth", "params.json"]).shards == both, in order
    choose(["consolidated.safetensors", "params.json"]).safetensors == ("consolidated.safetensors",)

Reads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ckpt_tool.core.missing import report_missing
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint

PARAMS = "params.json"
MISSING = "E1400"
MIXED = "E1401"
_SHARD = re.compile(r"consolidated\.(\d{1,4})\.pth")
_WHOLE = re.compile(r"consolidated(-\d{5}-of-\d{5})?\.safetensors|consolidated\.safetensors\.index\.json")


class MetaFiles(NamedTuple):
    """The files of one checkpoint; one of the two fields is empty."""

    shards: tuple[str, ...] = ()  # `consolidated.NN.pth`, by number
    safetensors: tuple[str, ...] = ()  # `consolidated*.safetensors` with unsharded tensors, and their index


def shard_number(path: str) -> int | None:
    """The number in a shard's name, None for any other file."""
    found = _SHARD.fullmatch(path.rpartition("/")[2])
    return int(found[1]) if found else None


def choose(names: Iterable[str]) -> MetaFiles | None:
    """The checkpoint's files among the names of a folder, None if there are none. Never raises; see `check`."""
    names = list(names)
    shards = sorted((name for name in names if _SHARD.fullmatch(name)), key=lambda name: (_number(name), name))
    if shards:
        return MetaFiles(tuple(shards))
    whole = tuple(sorted(name for name in names if _WHOLE.fullmatch(name)))
    return MetaFiles(safetensors=whole) if whole and PARAMS in names else None


def check(shards: tuple[str, ...], *, path: str, count: int = 0) -> None:
    """Raise Incomplete (E1400) or InconsistentCheckpoint (E1401) if the numbers show missing shards or two saves.

    Args:
        shards: File names, sorted by number.
        path: The folder, for messages.
        count: The total number of shards, 0 if it is not known.
    """
    numbers = [_number(name) for name in shards]
    twice = [name for name, number in zip(shards, numbers, strict=True) if numbers.count(number) > 1]
    if twice:
        raise InconsistentCheckpoint(
            f"one shard is there twice: {' and '.join(twice[:2])}",
            code=MIXED,
            path=path,
            hint="remove the files of the older save",
        )
    total = max(count, numbers[-1] + 1)
    absent = sorted(set(range(total)) - set(numbers))
    if absent:
        fault = Incomplete(
            f"{len(absent)} of {total} shards are missing: consolidated.{absent[0]:02d}.pth",
            code=MISSING,
            path=path,
            faults=[f"missing: consolidated.{number:02d}.pth" for number in absent[1:50]],
            hint="fetch the missing files; their names count them from 00",
        )
        report_missing(fault, files=[f"consolidated.{number:02d}.pth" for number in absent[:100]])
        raise fault  # a part of each tensor makes no tensor


def _number(name: str) -> int:
    found = _SHARD.fullmatch(name)
    return int(found[1]) if found else -1
