"""Faults of one pass: code that reads many files goes on after a broken one, and raises all faults as one error.

contents = by_file(names, lambda name: read_content(tree, name))
      # or one error that names every file that can't be read
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ckpt_tool.errors import CkptError, InputError, UnsafeInput

K = TypeVar("K")
V = TypeVar("V")
ASKS_FOR_CODE = ("E0420", "E0421")
FAULTS_SHOWN = 100  # of one pass, each a line


def read_by_file(names: Iterable[str], read: Callable[[str], V]) -> dict[str, V]:
    """The results of `read` by file, each file read once. Faults are raised as by `read_each`."""
    files = list(dict.fromkeys(names))
    return dict(zip(files, read_each(files, read), strict=True))


def together(faults: Sequence[CkptError]) -> CkptError:
    """The first of several faults of one pass, to raise: with the others listed in it, each with its place."""
    first_fault = faults[0]
    lines = list[str]()
    for fault in faults[1:FAULTS_SHOWN]:
        lines += [f"{fault.message} ({fault.where()})", *fault.faults]
    first_fault.faults = (*first_fault.faults, *lines[:FAULTS_SHOWN])
    for fault in faults[1:FAULTS_SHOWN]:
        first_fault.others = (*first_fault.others, fault, *fault.others)
    return first_fault


def both(one: Callable[[], K], other: Callable[[], V]) -> tuple[K, V]:
    """The results of two independent readings. The faults of both are raised as one error, as by `read_each`."""
    results: list[K | V] = read_each((0, 1), lambda number: other() if number else one())
    return results[0], results[1]  # type: ignore[return-value]  # in this order


def read_each(
    items: Iterable[K], read: Callable[[K], V], *, file: Callable[[K], object] = lambda item: item
) -> list[V]:
    """The results of `read` for all items, in order.

    Faults of the input are raised as one error (`together`) after all items were tried; input that needs unsafe code,
    and failures of the operating system, at once.

    file: the file of an item, if several items share one: a file that can't be read is named once.
    """
    results: list[V] = []
    faults: dict[object, CkptError] = {}
    for item in items:
        if faults and file(item) in faults:
            continue
        try:
            results.append(read(item))
        except (InputError, UnsafeInput) as fault:
            if fault.code in ASKS_FOR_CODE:
                raise
            faults[file(item)] = fault
    if faults:
        raise together(list(faults.values()))
    return results
