"""Masks by chance, the same whoever asks for which part of them: a counter-based generator.

Element k of a tensor draws the 32-bit number k of the stream of Philox 4x64 whose key is made of the seed, the model's number
and the tensor's name. So a mask depends on nothing else: not on tiles, threads, formats or shards, nor on other tensors.

    draws(stream(42, 0, "model.norm.weight"), 10, 20) == draws(stream(42, 0, "model.norm.weight"), 0, 20)[10:]

An element of probability p is kept where its number is less than p * 2**32. mergekit draws from torch's one generator, tensor
by tensor: the same law, other masks.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

from ckpt_tool.run.merging.selection import Bits, Flags

Stream = tuple[int, int]
_BLOCK = 8  # 32-bit numbers a step of the counter
_ALL = 1 << 32


def stream(seed: int, model: int, name: str) -> Stream:
    """The key of a tensor's numbers: 128 bits of a hash."""
    made = blake2b(f"{seed}\0{model}\0{name}".encode(), digest_size=16).digest()
    return int.from_bytes(made[:8], "little"), int.from_bytes(made[8:], "little")


def draws(key: Stream, low: int, high: int) -> Bits:
    """The numbers of elements [low, high), each of 32 uniform bits."""
    first, last = low // _BLOCK, -(-high // _BLOCK)
    generator = np.random.Philox(key=np.array(key, np.uint64), counter=np.array([first, 0, 0, 0], np.uint64))
    raw: np.ndarray[Any, np.dtype[np.uint64]] = generator.random_raw((last - first) * 4)
    return raw.astype("<u8", copy=False).view("<u4")[low - first * _BLOCK : high - first * _BLOCK]


def kept(numbers: Bits, probability: float) -> Flags:
    """Which elements stay, each with the same probability."""
    limit = round(probability * _ALL)
    return numbers < np.uint32(limit) if limit < _ALL else np.ones(numbers.shape, np.bool_)


def kept_by_rank(numbers: Bits, magnitudes: Bits, columns: int, density: float, epsilon: float) -> Flags:
    """Which elements stay where a row's larger ones are likelier: density - epsilon for its smallest, density + epsilon for
    its largest, evenly between them by rank (DELLA's MAGPRUNE). Rows of one element: `density`.

    numbers, magnitudes: of whole rows of `columns` elements. Equal magnitudes rank by their order in the row.
    """
    if columns < 2:
        return kept(numbers, density)
    keys = magnitudes.reshape(-1, columns).astype(np.uint64) << np.uint64(32)
    keys |= np.arange(columns, dtype=np.uint64)
    keys.sort(axis=1)
    order = (keys & np.uint64(_ALL - 1)).astype(np.intp)
    ranks: Any = np.empty(order.shape, np.float32)
    share = np.arange(columns, dtype=np.float32) / np.float32(columns - 1)
    limits = np.float32(density - epsilon) + share * np.float32(2) * np.float32(epsilon)
    np.put_along_axis(ranks, order, np.broadcast_to(limits, order.shape), axis=1)
    flags: Flags = numbers < (ranks.reshape(-1).astype(np.float64) * _ALL).astype(np.uint64)
    return flags
