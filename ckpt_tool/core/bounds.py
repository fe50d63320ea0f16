"""Bounds: a count stated by a file, a name or an option is compared with what exists before a loop runs that often.

    model.layers.1000000000.w in a file of 20 tensors     no list of a billion layers: E1650

Cost: none. What it does not do: bound what a user asks for (`conversion.layout`).
"""

from __future__ import annotations

from ckpt_tool.errors import InconsistentCheckpoint

DIGITS = 18  # of a number in a name: what 64 bits hold
LEAST = 4096  # of layers and experts: few enough to count out, and a checkpoint may be one part of a model


def check_count(count: int, there: int, what: str, *, path: str | None = None, key: str | None = None) -> int:
    """Return `count`, unless it is more than both `there` and `LEAST`.

    Args:
        there: how many things can exist at most.
        what: the counted things in words, as in `layers by the tensors' names`.
        path, key: where the count is stated, if that is known.

    Raises InconsistentCheckpoint E1650.
    """
    if count <= max(there, LEAST):
        return count
    raise InconsistentCheckpoint(
        f"{count if count < 10**20 else 'very many'} {what}, but {there} of them could be here at most",
        code="E1650",
        path=path,
        key=key and key[:200],
        hint="a number in a name or a file is damaged: fetch the checkpoint again",
    )


def numeral(text: object) -> bool:
    """Is it a number, or the text of one, that `int` reads: plain digits, at most `DIGITS` of them?

    >>> numeral("07"), numeral(3), numeral("\u00b2"), numeral("9" * 5000), numeral("-1")
    (True, True, False, False, False)
    """
    if isinstance(text, int):
        return bool(0 <= text < 10**DIGITS)
    return isinstance(text, str) and len(text) <= DIGITS and text.isascii() and text.isdigit()
