"""ZeRO's flat rules against torch: whole lines are made with torch.cat, torch.nn.functional.pad and torch.chunk."""

from __future__ import annotations

from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.formats.deepspeed import flat
from ckpt_tool.formats.deepspeed.moe import expert_name_of, global_names, holders, local_names

numels = st.lists(st.integers(1, 40), min_size=1, max_size=9)
ranks = st.integers(1, 7)


def params_of(sizes: list[int]) -> list[torch.Tensor]:
    return [torch.arange(1, n + 1) + 1000 * (i + 1) for i, n in enumerate(sizes)]


def laid(pieces: list[flat.Piece], params: list[torch.Tensor], length: int) -> torch.Tensor:
    out = torch.zeros(length, dtype=torch.int64)
    for piece in pieces:
        out[piece.at : piece.at + piece.stop - piece.start] = params[piece.param][piece.start : piece.stop]
    return out


@settings(max_examples=120, deadline=None)
@given(numels, ranks, st.sampled_from([0, 2, 4]))
def test_partitions_are_chunks_of_the_padded_line(sizes: list[int], n: int, itemsize: int) -> None:
    params = params_of(sizes)
    gaps = flat.alignment_gaps(sizes, itemsize) if itemsize else [0] * len(sizes)
    line = torch.cat([torch.nn.functional.pad(p, (0, gap)) for p, gap in zip(params, gaps, strict=True)])
    total = line.numel()
    line = torch.nn.functional.pad(line, (0, -total % (2 * n)))
    want = line.reshape(n, -1)
    size = flat.partition_size(total, n)
    assert size == want.shape[1]
    for rank in range(n):
        assert torch.equal(laid(flat.partition(sizes, gaps, size, rank), params, size), want[rank])
        assert flat.padding(total, size, rank) == max(0, min(size, (rank + 1) * size - total))
    starts = torch.tensor([0, *(s + g for s, g in zip(sizes, gaps, strict=True))]).cumsum(0)[:-1]
    assert itemsize == 0 or all(int(start) * itemsize % 16 == 0 for start in starts)


@settings(max_examples=120, deadline=None)
@given(numels, ranks)
def test_shares_are_rows_of_each_padded_parameter(sizes: list[int], n: int) -> None:
    params = params_of(sizes)
    for rank in range(n):
        rows = [torch.nn.functional.pad(p, (0, -p.numel() % n)).reshape(n, -1)[rank] for p in params]
        pieces, length = flat.shares(sizes, n, rank)
        assert length == sum(ceil(s / n) for s in sizes)
        assert torch.equal(laid(pieces, params, length), torch.cat(rows))


@settings(max_examples=120, deadline=None)
@given(numels, ranks, st.integers(1, 60))
def test_sub_groups_close_with_the_parameter_that_fills_them(sizes: list[int], n: int, limit: int) -> None:
    groups = flat.sub_groups(sizes, n, limit)
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    counts = [sum(ceil(sizes[i] / n) for i in group) for group in groups]
    assert all(count >= limit for count in counts[:-1]) and all(groups)
    for group, count in zip(groups, counts, strict=True):
        last = ceil(sizes[group[-1]] / n)
        assert count - last < limit or len(groups) == 1


@given(st.lists(st.integers(), max_size=20), ranks)
def test_dealing_out_and_back(items: list[int], n: int) -> None:
    hands: list[list[int]] = [[] for _ in range(n)]
    for i, item in enumerate(items):
        hands[i % n].append(item)
    assert flat.deal(items, n) == [item for hand in hands for item in hand]
    assert flat.undeal(flat.deal(items, n), n) == items


def test_experts_by_rank() -> None:
    one = "moe.deepspeed_moe.experts.deepspeed_experts.{}.w{}.weight"
    names = [one.format(e, w) for e in range(6) for w in (1, 2)]
    for ep in (1, 2, 3, 6):
        lines = local_names(names, ep)
        assert [local for _, local in lines[0]] == [one.format(e, w) for e in range(6 // ep) for w in (1, 2)]
        for rank, line in enumerate(lines):
            assert global_names([local for _, local in line], rank) == [name for name, _ in line]
    found = expert_name_of("a.deepspeed_moe.experts.deepspeed_experts.12.w.b")
    assert found and (found.number, found.part) == (12, ".w.b") and expert_name_of("a.experts.3.w") is None


@pytest.mark.parametrize(
    ("expert", "data_first", "want"),
    [(0, False, [0, 2, 4, 6]), (1, False, [1, 3, 5, 7]), (0, True, [0, 1, 2, 3]), (1, True, [4, 5, 6, 7])],
)
def test_who_holds_an_expert(expert: int, data_first: bool, want: list[int]) -> None:
    """The example in the docstring of DeepSpeed's `_create_expert_and_data_parallel`, of 8 ranks and ep 2."""
    assert holders(expert, 2, 8, data_first=data_first) == want
