"""Flat buffers against a slow model of the rule: fill a list backwards, element by element."""

from __future__ import annotations

from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.systems.megatron.optimizer import default_bucket_size, lay_flat


def slow(numels, shared, bucket_size, data_ranks):
    """[(parameter or None, bucket)] for every element of the padded buffer, made one element at a time."""
    line = []
    buckets = []
    begun = 0
    members = 0

    def close():
        nonlocal begun, members
        buckets.append((begun, len(line)))
        while len(line) % lcm(data_ranks, 128):
            line.append(None)
        begun = len(line)
        members = 0

    for i in reversed(range(len(numels))):
        while len(line) % 64:
            line.append(None)
        if shared[i] and members:
            close()
        line.extend((i, k) for k in range(numels[i]))
        members += 1
        if shared[i] or (bucket_size is not None and len(line) - begun >= bucket_size):
            close()
    if members:
        close()
    return line, buckets


@given(
    st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=12),
    st.one_of(st.none(), st.integers(1, 600)),
    st.integers(1, 6),
)
def test_every_element_is_where_the_rule_puts_it(params, bucket_size, data_ranks):
    numels = [n for n, _ in params]
    shared = [s for _, s in params]
    flat = lay_flat(numels, shared=shared, bucket_size=bucket_size, data_ranks=data_ranks)
    line, buckets = slow(numels, shared, bucket_size, data_ranks)
    coalesced = [one for start, stop in buckets for one in line[start:stop]]
    assert flat.unpadded == len(coalesced)
    assert [(b.start, b.start + b.unpadded) for b in flat.buckets] == buckets
    assert sum(b.padded for b in flat.buckets) == len(line)
    for i, numel in enumerate(numels):
        at = flat.coalesced(i)
        assert coalesced[at : at + numel] == [(i, k) for k in range(numel)]
        place = flat.places[i]
        at = flat.buckets[place.bucket].start + place.start
        assert line[at : at + numel] == [(i, k) for k in range(numel)]


def test_the_example_of_the_module():
    flat = lay_flat([100, 70, 10], data_ranks=4)
    assert [flat.coalesced(i) for i in range(3)] == [192, 64, 0]
    assert (flat.unpadded, flat.buckets[0].padded) == (292, 384)


def test_no_parameters_make_no_bucket():
    assert lay_flat([]).buckets == ()


@pytest.mark.parametrize(("ranks", "want"), [(1, 40_000_000), (64, 64_000_000)])
def test_default_bucket_size(ranks, want):
    assert default_bucket_size(ranks) == want
