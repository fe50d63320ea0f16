"""Recipes of one input: unchanged values, values mapped one by one, rows of zeros appended.

    Changed(key, (4096,), (Input(norm, tree),), "add(1)", (ElementMap("add", 1),))      zero-centred norms as plain ones
    Grown(key, (128, 8), (Input(embedding, tree),), "to 128 rows")   a vocabulary of 100 rows in 128

All in fp32: bf16 and fp16 values go through it and back without a change. See `run.computed`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckpt_tool.algebra.element_map import ElementMap
from ckpt_tool.run.computed import Floats, Read, Recipe


@dataclass(frozen=True, eq=False)
class Unchanged(Recipe):
    """The input's values as they are, so that a stored tensor can be part of a computed source."""

    def values(self, read: Read, start: int, stop: int) -> Floats:
        """See `Recipe.values`."""
        return read(0, start, stop).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Changed(Recipe):
    """The input's values, each one through the maps, in fp32."""

    maps: tuple[ElementMap, ...]

    def values(self, read: Read, start: int, stop: int) -> Floats:
        """See `Recipe.values`."""
        out: Floats = read(0, start, stop).astype(np.float32)
        for each in self.maps:
            out = each(out)
        return out


@dataclass(frozen=True, eq=False)
class Constant(Recipe):
    """A few numbers that a config states; the input is any tensor of the source, of which nothing is read."""

    numbers: tuple[float, ...]

    def values(self, read: Read, start: int, stop: int) -> Floats:
        """See `Recipe.values`."""
        return np.array(self.numbers[start:stop], np.float32)


@dataclass(frozen=True, eq=False)
class Grown(Recipe):
    """The input with rows of zeros appended. shape: including those rows."""

    def values(self, read: Read, start: int, stop: int) -> Floats:
        """See `Recipe.values`."""
        held = self.inputs[0].tensor.numel
        out = np.zeros(stop - start, np.float32)
        if start < held:
            out[: min(stop, held) - start] = read(0, start, min(stop, held))
        return out
