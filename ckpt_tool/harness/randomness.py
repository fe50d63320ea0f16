"""Every random number of the job, without any generator that lives on.

The one idea: a seed is a hash of what the numbers are for, so a run resumed anywhere, in any layout, draws the same
ones, and the whole RNG state of a checkpoint is {seed, step, consumed}. Example: the dropout mask of step 7, microbatch
3, layer 1, site 0 has the seed `seed_of(seed, "dropout", 7, 3, 1, 0)`, whichever rank needs it. Masks are drawn on the
CPU: a GPU gets the same.
"""

from __future__ import annotations

import zlib

import torch

from ckpt_tool.harness.shape import ModelShape, ParameterShape

_MASK = (1 << 64) - 1


def seed_of(*parts: int | str) -> int:
    """A 63-bit hash of numbers and words (splitmix64 of one after the other)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else part
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def _generator(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(*parts))


def initial(param: ParameterShape, seed: int) -> torch.Tensor:
    """The whole parameter at step 0, fp32: normal numbers of `param.std`, ones for a norm."""
    if not param.std:
        return torch.ones(param.shape)
    return torch.randn(param.shape, generator=_generator(seed, "init", param.name)) * param.std


def dropout_mask(shape: tuple[int, ...], rate: float, *site: int) -> torch.Tensor:
    """0 or 1 / (1 - rate), fp32, on the CPU. `site`: seed, step, global microbatch, layer, place in the layer."""
    keep = torch.rand(shape, generator=_generator("dropout", *site)) >= rate
    return keep.float() / (1.0 - rate)


def sample(shape: ModelShape, seed: int, index: int) -> torch.Tensor:
    """Sequence number `index` of the data: `sequence` + 1 tokens, each 5 times the one before plus 3, 4 or 5: there is
    something to learn."""
    noise = torch.randint(3, 6, (shape.sequence + 1,), generator=_generator(seed, "data", index)).tolist()
    token = seed_of(seed, "start", index) % shape.vocab
    tokens = []
    for step in noise:
        tokens.append(token)
        token = (5 * token + step) % shape.vocab
    return torch.tensor(tokens)
