"""Faults of AOA statements: each with its code and its statement, gathered over a pass and raised as one.

A statement with `$LAYER_ID` fails once for every layer: three such faults are listed and the others counted.
What it does not do: decide what is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckpt_tool.errors import UsageError, near_misses

LISTED = 3  # faults of one kind and statement that are listed
NEAR_MISSES = 6  # hints by likeness: each costs a look at all names


class StatementFault(NamedTuple):
    """A fault of a program."""

    code: str
    number: int  # of the statement, from 1; 0 if no single statement is at fault
    message: str
    hint: str = ""


class Faults:
    """The faults of one program. statements: their texts, in the order of their numbers."""

    def __init__(self, statements: Sequence[str]) -> None:
        self.statements = statements
        self.found: list[StatementFault] = []
        self._hints = 0

    def add(self, code: str, number: int, message: str, hint: str = "") -> None:
        """Record a fault of statement `number`, 0 for none."""
        self.found.append(StatementFault(code, number, message, hint))

    def take(self, number: int, error: UsageError) -> None:
        """Record an error that was raised by code that does not know the statement's number."""
        self.add(error.code, number, error.message, error.hint or "")

    def near(self, wrong: str, known: Iterable[str]) -> str:
        """A hint that lists similar names; "" after the first few faults, as each search looks at all names."""
        self._hints += 1
        return near_misses(wrong, known) if self._hints <= NEAR_MISSES else ""

    def check(self) -> None:
        """Raise UsageError with every fault so far; the first one gives the code. Silent without faults."""
        if not self.found:
            return
        listed: list[StatementFault] = []
        more: dict[tuple[str, int], int] = {}
        for fault in sorted(dict.fromkeys(self.found), key=lambda fault: fault.number or len(self.statements) + 1):
            kind = fault.code, fault.number
            more[kind] = more.get(kind, 0) + 1
            if more[kind] <= LISTED:
                listed.append(fault)
        counts = [
            f"{f'statement {number}: ' if number else ''}{n - LISTED} more like these [{code}]"
            for (code, number), n in more.items()
            if n > LISTED
        ]
        first = listed[0]
        raise UsageError(
            first.message,
            code=first.code,
            place=self._place(first.number) or None,
            hint=first.hint or None,
            faults=[*(self._line(fault) for fault in listed[1:]), *counts],
        )

    def _place(self, number: int) -> str:
        text = " ".join(self.statements[number - 1].split()) if number else ""
        return f"statement {number} `{text[:160]}{'...' if len(text) > 160 else ''}`" if number else ""

    def _line(self, fault: StatementFault) -> str:
        place = f"statement {fault.number}: " if fault.number else ""
        return f"{place}{fault.message} [{fault.code}]" + (f"; {fault.hint}" if fault.hint else "")
