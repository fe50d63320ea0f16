"""Recipes of one input: the same values, a number added, rows of zeros behind.

    Plus(key, (4096,), (Input(norm, tree),), "add 1", 1.0)      zero-centred norms as plain ones
    Grown(key, (128, 8), (Input(embedding, tree),), "to 128 rows")   a vocabulary of 100 rows in 128

All in fp32: bf16 and fp16 values go through it and back without a change. See `run.computed`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckpt_tool.run.computed import Floats, Read, Recipe


@dataclass(frozen=True, eq=False)
class Unchanged(Recipe):
    """The input's values: brings a tensor of one source beside computed ones."""

    def values(self, read: Read, start: int, stop: int) -> Floats:
        return read(0, start, stop).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Plus(Recipe):
    """The input's values and a number, added in fp32."""

    by: float

    def values(self, read: Read, start: int, stop: int) -> Floats:
        return read(0, start, stop).astype(np.float32) + np.float32(self.by)


@dataclass(frozen=True, eq=False)
class Constant(Recipe):
    """A few numbers that a config tells; the input is any tensor of the source, of which nothing is read."""

    numbers: tuple[float, ...]

    def values(self, read: Read, start: int, stop: int) -> Floats:
        return np.array(self.numbers[start:stop], np.float32)


@dataclass(frozen=True, eq=False)
class Grown(Recipe):
    """The input with rows of zeros behind its own. shape: with them."""

    def values(self, read: Read, start: int, stop: int) -> Floats:
        held = self.inputs[0].tensor.numel
        out = np.zeros(stop - start, np.float32)
        if start < held:
            out[: min(stop, held) - start] = read(0, start, min(stop, held))
        return out
