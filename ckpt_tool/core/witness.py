"""Witness: what a command comes to know on its way and its document does not say, kept where a report is to be drawn.

    with witnessing() as seen:               # the rim, for --report alone
        document = job.run(progress)
    seen["checkpoint"]                       # all that `tell("checkpoint", ...)` was called with, in order

Without a witness `tell` costs a comparison: what is told is made when somebody listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Seen = dict[str, list[Any]]
_seen: Seen | None = None


@contextmanager
def witnessing(wanted: bool = True) -> Iterator[Seen]:
    """While it lasts, everything told is kept, by what it is; nothing if it is not wanted. For the rim, around one
    command."""
    global _seen
    seen = dict[str, list[Any]]()
    before, _seen = _seen, seen if wanted else None
    try:
        yield seen
    finally:
        _seen = before


def tell(what: str, make: Callable[[], Any]) -> None:
    """Keep `make()` under this word, if anybody listens."""
    if _seen is not None:
        _seen.setdefault(what, []).append(make())
