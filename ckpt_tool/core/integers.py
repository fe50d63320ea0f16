"""Arithmetic of whole numbers that Python has no word for.

>>> ceil_div(7, 2), ceil_div(8, 2)
(4, 4)
"""

from __future__ import annotations


def ceil_div(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`: the quotient, rounded up."""
    return -(-count // size)
