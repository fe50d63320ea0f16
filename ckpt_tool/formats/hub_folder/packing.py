"""Which tensors share a file of a sharded model."""

from __future__ import annotations

from collections.abc import Sequence


def pack(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Which tensors share a file: indexes into `sizes` (bytes), by huggingface_hub's greedy rule.

    >>> pack([4, 4, 30, 4, 4], 10)
    [[2], [0, 1], [3, 4]]
    """
    done: list[list[int]] = []
    open_file: list[int] = []
    filled = 0
    for i, size in enumerate(sizes):
        if size > limit:
            done.append([i])
            continue
        if filled + size > limit:
            done.append(open_file)
            open_file = []
            filled = 0
        open_file.append(i)
        filled += size
    if open_file:
        done.append(open_file)
    return done
