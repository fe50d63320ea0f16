"""Data that a command learns during its run and its document leaves out, kept if a report is to be made of it.

    with collected() as data:                # around one command, for --report alone
        document = job.run(progress)
    data["checkpoint"]                       # what `for_report("checkpoint", ...)` was called with, in order

Without `--report` a call of `for_report` costs a comparison: what it would keep is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ReportData = dict[str, list[Any]]
_data: ReportData | None = None


@contextmanager
def collect_report_data(wanted: bool = True) -> Iterator[ReportData]:
    """Collect what `for_report` is given while the block runs, by its kind; nothing where it is not wanted."""
    global _data
    data = dict[str, list[Any]]()
    before = _data
    _data = data if wanted else None
    try:
        yield data
    finally:
        _data = before


def keep_for_report(what: str, make: Callable[[], Any]) -> None:
    """Keep `make()` as data of the kind `what`, if a report is to be made."""
    if _data is not None:
        _data.setdefault(what, []).append(make())
