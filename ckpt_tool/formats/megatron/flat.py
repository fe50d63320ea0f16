"""The flat buffers of Megatron's distributed optimizer: which element of a buffer belongs to which parameter.

The one idea: a buffer is filled backwards. Its parameters are walked in REVERSE order of registration; each starts at a
multiple of 64 elements; buckets close when they are full, or around an embedding that two pipeline stages share; the
end of a bucket is padded so that the data ranks can share it evenly. Nothing of this is stored: it follows from the
order.

    three parameters of 100, 70 and 10 elements, one bucket, 4 data ranks
    walked 10, 70, 100    at 0..10, 64..134, 192..292     unpadded 292, padded to lcm(4, 128) = 384

There is one buffer for each (dtype of the parameter, dtype of its gradient), for each chunk of a virtual pipeline, and,
where experts are parallel (expert_model_parallel_size > 1), a set of its own for their parameters. `distrib_optim.pt`
holds a buffer's buckets end to end WITHOUT the padding at their ends (`coalesced`); `dp_reshardable` holds each bucket
on its own, without it too; data rank r of n owns elements [r*N/n, (r+1)*N/n) of each padded bucket of N elements.

Sources (NVIDIA/Megatron-LM, core 0.16.1): `core/distributed/param_and_grad_buffer.py` (`_ParamAndGradBuffer.__init__`),
`core/distributed/distributed_data_parallel.py` (sizes of buckets, order of buffers),
`core/optimizer/distrib_optimizer.py` (`get_parameter_state_dp_zero`: coalesced),
`core/models/common/language_module/language_module.py` (`shared_embedding`).

Cost: linear. What it does not do: names, shapes, files.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

ALIGNMENT = 64  # elements at which a parameter starts
BUSBW = 1 << 16  # elements, with pad_buckets_for_high_nccl_busbw


class Place(NamedTuple):
    """Where a parameter lies. start: elements from the start of its bucket."""

    bucket: int
    start: int
    numel: int


class Bucket(NamedTuple):
    """start: elements from the start of the padded buffer. padded, unpadded: elements; gaps inside count in both.
    first: elements from the start of the coalesced buffer."""

    start: int
    padded: int
    unpadded: int
    first: int


class FlatBuffer(NamedTuple):
    """A buffer laid out. places: of each parameter, in the order of REGISTRATION (as they were given)."""

    places: tuple[Place, ...]
    buckets: tuple[Bucket, ...]

    @property
    def unpadded(self) -> int:
        """Elements of the coalesced buffer: `numel_unpadded` of distrib_optim.pt."""
        return sum(bucket.unpadded for bucket in self.buckets)

    def coalesced(self, index: int) -> int:
        """Where parameter number `index` starts in the coalesced buffer, in elements."""
        place = self.places[index]
        return self.buckets[place.bucket].first + place.start


def lay_flat(
    numels: Sequence[int],
    *,
    shared: Sequence[bool] = (),
    bucket_size: int | None = None,
    data_ranks: int = 1,
    busbw: bool = False,
) -> FlatBuffer:
    """The buffer of parameters with `numels` elements, given in the order of registration.

    shared: which is an embedding that two stages share (a bucket of its own each). bucket_size: elements at which a
    bucket closes, None for one bucket. data_ranks: of the group that shares the buffer. Shared and data ranks change
    nothing of the coalesced form as long as there is one bucket.
    """
    divisor = lcm(data_ranks, 128, BUSBW) if busbw else lcm(data_ranks, 128)
    alone = tuple(shared) or (False,) * len(numels)
    places: list[Place] = [Place(0, 0, 0)] * len(numels)
    buckets: list[Bucket] = []
    begun, start, first = 0, 0, 0  # of the current bucket; of the next parameter; in the coalesced buffer
    filled = False

    def close(stop: int) -> int:
        nonlocal begun, first, filled
        padded = -(-stop // divisor) * divisor
        buckets.append(Bucket(begun, padded - begun, stop - begun, first))
        first += stop - begun
        begun, filled = padded, False
        return padded

    for i in reversed(range(len(numels))):
        start = -(-start // ALIGNMENT) * ALIGNMENT
        if alone[i] and filled:
            start = close(start)
        stop = start + numels[i]
        places[i] = Place(len(buckets), start - begun, numels[i])
        filled = True
        full = bucket_size is not None and stop - begun >= bucket_size
        start = close(stop) if full or alone[i] else stop
    if filled:
        close(start)
    return FlatBuffer(tuple(places), tuple(buckets))


def default_bucket_size(data_ranks: int) -> int:
    """Elements of a bucket when gradients overlap and no `ddp_bucket_size` is given."""
    return max(40_000_000, 1_000_000 * data_ranks)
