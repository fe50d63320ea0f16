"""Where each parameter is stored in the flat buffers of Megatron's optimizer, for reader and writer.

The optimizer's files hold no names. They follow from three orders, each derived from the order in which the model
registers its parameters: the order of buffers (chunk by chunk, by dtype, experts separate), of groups (with weight
decay or without, experts separate: `megatron.groups`), and of parameters (group by group, inside a group in the model's
order).

    a stage with  w (2-d), w.bias, norm (1-d), v (2-d):   group 0 (decay): w, v -> 0, 1    group 1: w.bias, norm -> 2, 3

A buffer is filled backwards: its parameters are walked in REVERSE order of registration; each starts at a multiple of
64 elements; buckets close when they are full, or around an embedding that two pipeline stages share; the end of a
bucket is padded so that the data ranks can share it evenly. Nothing of this is stored: it follows from the order.

    three parameters of 100, 70 and 10 elements, one bucket, 4 data ranks
    walked 10, 70, 100    at 0..10, 64..134, 192..292     unpadded 292, padded to lcm(4, 128) = 384

There is one buffer for each (dtype of the parameter, dtype of its gradient), for each chunk of a virtual pipeline.
`distrib_optim.pt` holds a buffer's buckets end to end WITHOUT the padding at their ends (`coalesced`);
`dp_reshardable` holds each bucket on its own, without it too; data rank r of n owns elements [r*N/n, (r+1)*N/n) of each
padded bucket of N elements.

Sources (NVIDIA/Megatron-LM core 0.16.1): `core/optimizer/optimizer.py` (`Float16OptimizerWithFloat16Params`),
`core/optimizer/distrib_optimizer.py` (`get_parameter_state_dp_zero`: coalesced),
`core/distributed/param_and_grad_buffer.py` (`_ParamAndGradBuffer.__init__`),
`core/distributed/distributed_data_parallel.py` (sizes of buckets, order of buffers),
`core/models/common/language_module/language_module.py` (`shared_embedding`).

Cost: linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.systems.megatron.job import MegatronJob, RankArray
from ckpt_tool.systems.megatron.stored_names import EMBEDDING, TIED_HEAD, stem

ALIGNMENT = 64  # elements at which a parameter starts
BUSBW = 1 << 16  # elements, with pad_buckets_for_high_nccl_busbw


class BucketPlace(NamedTuple):
    """Where a parameter is stored in a flat buffer."""

    bucket: int
    start: int  # elements from the start of its bucket
    numel: int


class Bucket(NamedTuple):
    """A part of a buffer that is reduced at once. All counts are elements."""

    start: int  # from the start of the padded buffer
    padded: int  # length with the padding at its end; gaps between parameters count
    unpadded: int  # length without it; gaps count here too
    first: int  # from the start of the coalesced buffer


class FlatBuffer(NamedTuple):
    """The layout of a flat buffer: its buckets, and the place of each parameter."""

    places: tuple[BucketPlace, ...]  # of each parameter, in the order of REGISTRATION (as they were given)
    buckets: tuple[Bucket, ...]

    @property
    def unpadded(self) -> int:
        """Elements of the coalesced buffer: `numel_unpadded` of distrib_optim.pt."""
        return sum(bucket.unpadded for bucket in self.buckets)

    def coalesced(self, index: int) -> int:
        """Return the element at which parameter number `index` starts in the coalesced buffer."""
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
    """Return the layout of a buffer of parameters with `numels` elements, given in the order of registration.

    As long as there is one bucket, the coalesced form does not depend on shared embeddings or data ranks.

    Args:
        numels: elements of each parameter.
        shared: for each parameter, whether it is an embedding that two stages share; () if none is. Each of those gets
        a
            bucket of its own.
        bucket_size: elements at which a bucket closes, None for one bucket.
        data_ranks: number of ranks in the group that shares the buffer.
        busbw: whether padding is rounded up for the bandwidth of NCCL (pad_buckets_for_high_nccl_busbw).
    """
    # Each data rank owns an equal part of a bucket, so its padded length is a multiple of the number of ranks.
    divisor = lcm(data_ranks, 128, BUSBW) if busbw else lcm(data_ranks, 128)
    alone = tuple(shared) or (False,) * len(numels)
    places: list[BucketPlace] = [BucketPlace(0, 0, 0)] * len(numels)
    buckets: list[Bucket] = []
    bucket_start = 0
    next_start = 0  # of the next parameter
    coalesced_start = 0  # of the current bucket, in the coalesced buffer
    bucket_has_members = False

    def close_bucket(stop: int) -> int:
        """Add the bucket that ends at `stop`, and return where the next one starts, after the padding."""
        nonlocal bucket_start, coalesced_start, bucket_has_members
        padded_stop = ceil_div(stop, divisor) * divisor
        buckets.append(Bucket(bucket_start, padded_stop - bucket_start, stop - bucket_start, coalesced_start))
        coalesced_start += stop - bucket_start
        bucket_start = padded_stop
        bucket_has_members = False
        return padded_stop

    # Megatron fills buffers backwards, because gradients are ready in that order.
    for i in reversed(range(len(numels))):
        next_start = ceil_div(next_start, ALIGNMENT) * ALIGNMENT
        if alone[i] and bucket_has_members:
            next_start = close_bucket(next_start)
        stop = next_start + numels[i]
        places[i] = BucketPlace(len(buckets), next_start - bucket_start, numels[i])
        bucket_has_members = True
        is_full = bucket_size is not None and stop - bucket_start >= bucket_size
        next_start = close_bucket(stop) if is_full or alone[i] else stop

    if bucket_has_members:
        close_bucket(next_start)
    return FlatBuffer(tuple(places), tuple(buckets))


def default_bucket_size(data_ranks: int) -> int:
    """Return the elements of a bucket if gradients overlap and no `ddp_bucket_size` is given: Megatron's default."""
    return max(40_000_000, 1_000_000 * data_ranks)


# -- buffers -----------------------------------------------------------------------------------------------------------


class Buffer(NamedTuple):
    """A flat buffer with its parameters."""

    chunk: int  # of the virtual pipeline
    dtype: DType
    grads: DType  # dtype of its gradients
    members: tuple[RankArray, ...]  # its parameters, in registration order
    flat: FlatBuffer


class Bucketing(NamedTuple):
    """The settings that decide where buckets end."""

    size: int | None  # elements, None for one bucket a buffer
    data_ranks: int
    busbw: bool
    alone: bool  # shared embeddings get a bucket of their own


def bucketing_of(job: MegatronJob, *, experts: bool) -> Bucketing:
    """Return the bucket settings of the dense buffers or (`experts`) of the experts' buffers."""
    facts = job.facts
    degrees = job.degrees
    # Context-parallel ranks have the same weights, so they share the buffers like data ranks.
    ranks = degrees["dp"] * degrees["cp"]
    size = (facts.bucket_size or default_bucket_size(ranks)) if facts.overlap else None
    if experts:
        ranks = max(1, degrees["tp"] * ranks // (degrees["etp"] * degrees["ep"]))
    return Bucketing(size, ranks, facts.busbw, True)


def _has_own_bucket(array: RankArray, arrays: Sequence[RankArray], job: MegatronJob, pp: int) -> bool:
    """Return whether the array is an embedding that two pipeline stages share, which gets a bucket of its own."""
    if job.stages.pp == 1 or not (job.facts.tied or job.facts.mtp) or stem(array.local) not in (EMBEDDING, TIED_HEAD):
        return False
    if job.stages.of(pp, array.chunk).embedding:
        return stem(array.local) == EMBEDDING
    if stem(array.local) == EMBEDDING:
        return True  # the copy that MTP layers use
    return job.facts.tied and not any(stem(a.local) == EMBEDDING and a.chunk == array.chunk for a in arrays)


def lay_buffers(
    arrays: Sequence[RankArray], job: MegatronJob, pp: int, bucketing: Bucketing, grads: DType
) -> list[Buffer]:
    """Return the flat buffers of an optimizer in the order of their numbers (`gbuf_idx`).

    Args:
        arrays: the optimizer's parameters on one rank, in registration order.
        job: whose arguments decide the buckets.
        pp: the rank's pipeline stage.
        bucketing: of these parameters.
        grads: dtype of gradients if they are reduced in fp32.
    """
    # A buffer holds parameters of one chunk and one dtype.
    members_by_kind: dict[tuple[int, str], list[RankArray]] = {}
    for array in sorted(arrays, key=lambda array: array.chunk):
        members_by_kind.setdefault((array.chunk, array.dtype.name), []).append(array)

    # Only the first chunk's gradients overlap with the backward pass, so only its buffer is split into buckets.
    buffers = []
    for (chunk, _), members in members_by_kind.items():
        flat = lay_flat(
            [array.numel for array in members],
            shared=[bucketing.alone and _has_own_bucket(array, arrays, job, pp) for array in members],
            bucket_size=bucketing.size if pp == 0 and chunk == 0 else None,
            data_ranks=bucketing.data_ranks,
            busbw=bucketing.busbw,
        )
        dtype = members[0].dtype
        buffers.append(Buffer(chunk, dtype, grads if job.facts.grad_fp32 else dtype, tuple(members), flat))
    return buffers
