"""What a DeepSpeed job says of its ranks' flat tensors, against torch: whole lines are made with torch.cat,
torch.nn.functional.pad and torch.chunk."""

from __future__ import annotations

from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.core.flat_line import FlatLine
from ckpt_tool.systems.deepspeed import job as jobs
from ckpt_tool.systems.deepspeed.files import EXPERT, LAYER, MODEL, MODEL3, OPTIM, PLAIN_EXPERTS, sort_files
from ckpt_tool.systems.deepspeed.job import FlatGroup, ZeroJob
from ckpt_tool.systems.deepspeed.stored_names import (
    expert_name_of,
    global_name,
    global_names,
    layer_and_local,
    select_first_rank,
)

numels = st.lists(st.integers(1, 40), min_size=1, max_size=9)
ranks = st.integers(1, 7)
EXPERT_NAME = "moe.deepspeed_moe.experts.deepspeed_experts.{}.w{}.weight"


def params_of(sizes: list[int]) -> dict[str, torch.Tensor]:
    return {f"p{i}": torch.arange(1, n + 1) + 1000 * (i + 1) for i, n in enumerate(sizes)}


def shapes_of(params: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in params.items()}


def laid(line: FlatLine[str], params: dict[str, torch.Tensor], length: int) -> torch.Tensor:
    out = torch.zeros(length, dtype=torch.int64)
    for place in line.places:
        out[place.at : place.end] = params[place.of].reshape(-1)[place.start : place.stop]
    return out


@settings(max_examples=120, deadline=None)
@given(numels, ranks, st.sampled_from([0, 2, 4]))
def test_partitions_are_chunks_of_the_padded_line(sizes: list[int], n: int, itemsize: int) -> None:
    params = params_of(sizes)
    group = jobs.partitioned(shapes_of(params), 0, 1, n, itemsize)
    padded = (torch.nn.functional.pad(p, (0, gap)) for p, gap in zip(params.values(), group.gaps, strict=True))
    line = torch.cat(list(padded))
    total = line.numel()
    line = torch.nn.functional.pad(line, (0, -total % (2 * n)))
    want = line.reshape(n, -1)
    job = ZeroJob(1, n, False, [[group]])
    for rank in range(n):
        (array,) = job.arrays(rank, 0)
        assert (array.size, array.partitions) == (want.shape[1], n)
        assert torch.equal(laid(array.line, params, array.size), want[rank])
        assert array.spare == max(0, min(array.size, (rank + 1) * array.size - total))
        for name, (numel, at) in array.slices().items():
            mine = want[rank][at : at + numel]
            assert set(mine.tolist()) <= set(params[name].tolist()) and mine.numel() == numel
    starts = torch.tensor([0, *(s + g for s, g in zip(sizes, group.gaps, strict=True))]).cumsum(0)[:-1]
    assert itemsize == 0 or all(int(start) * itemsize % 16 == 0 for start in starts)


@settings(max_examples=120, deadline=None)
@given(numels, ranks)
def test_shares_are_rows_of_each_padded_parameter(sizes: list[int], n: int) -> None:
    params = params_of(sizes)
    job = ZeroJob(3, n, False, [[FlatGroup(shapes_of(params), 0)]])
    for rank in range(n):
        rows = [torch.nn.functional.pad(p, (0, -p.numel() % n)).reshape(n, -1)[rank] for p in params.values()]
        (array,) = job.arrays(rank, 0)
        assert array.size == sum(ceil(s / n) for s in sizes)
        assert torch.equal(laid(array.line, params, array.size), torch.cat(rows))


@settings(max_examples=120, deadline=None)
@given(numels, ranks, st.integers(1, 60))
def test_sub_groups_close_with_the_parameter_that_fills_them(sizes: list[int], n: int, limit: int) -> None:
    shapes = shapes_of(params_of(sizes))
    groups = list(jobs.sub_groups(shapes, 5, n, limit))
    assert [name for group in groups for name in group.shapes] == list(shapes) and {g.number for g in groups} == {5}
    counts = [[ceil(shape[0] / n) for shape in group.shapes.values()] for group in groups]
    assert all(sum(count) >= limit for count in counts[:-1]) and all(counts)
    assert all(sum(count[:-1]) < limit for count in counts)


@given(st.lists(st.integers(), max_size=20), ranks)
def test_dealing_out_and_back(items: list[int], n: int) -> None:
    hands: list[list[int]] = [[] for _ in range(n)]
    for i, item in enumerate(items):
        hands[i % n].append(item)
    assert jobs.deal(items, n) == [item for hand in hands for item in hand]
    assert jobs.undeal(jobs.deal(items, n), n) == items


@pytest.mark.parametrize("data_first", [False, True])
@pytest.mark.parametrize("ep", [1, 2, 3, 6])
def test_every_expert_rank_has_a_line_of_its_own_experts(ep: int, data_first: bool) -> None:
    """12 data ranks, 6 experts of two matrices: each rank's line against the chunks of its experts' values."""
    params = {EXPERT_NAME.format(e, w): torch.arange(5) + 100 * e + 10 * w for e in range(6) for w in (1, 2)}
    own = select_first_rank(params, ep)
    assert own == [EXPERT_NAME.format(e, w) for e in range(6 // ep) for w in (1, 2)]
    group = jobs.partitioned(dict.fromkeys(own, (5,)), 0, ep, 12 // ep, 0)
    job = ZeroJob(2, 12, data_first, [[group]])
    seen: dict[int, torch.Tensor] = {}
    for rank in range(12):
        (array,) = job.arrays(rank, 0)
        expert, number = job.expert_rank(rank, ep)
        assert list(array.names) == global_names(own, expert) and list(array.names.values()) == own
        values = torch.cat([params[name] for name in array.names])
        values = torch.nn.functional.pad(values, (0, array.size * (12 // ep) - values.numel()))
        assert torch.equal(laid(array.line, params, array.size), values.chunk(12 // ep)[number])
        seen.setdefault(expert, torch.zeros(12 // ep))[number] += 1
    assert len(seen) == ep and all(bool((count == 1).all()) for count in seen.values())


@pytest.mark.parametrize(
    ("expert", "data_first", "want"),
    [(0, False, [0, 2, 4, 6]), (1, False, [1, 3, 5, 7]), (0, True, [0, 1, 2, 3]), (1, True, [4, 5, 6, 7])],
)
def test_who_holds_an_expert(expert: int, data_first: bool, want: list[int]) -> None:
    """The example in the docstring of DeepSpeed's `_create_expert_and_data_parallel`, of 8 ranks and ep 2."""
    job = ZeroJob(1, 8, data_first, [])
    assert [rank for rank in range(8) if job.expert_rank(rank, 2)[0] == expert] == want
    assert [job.expert_rank(rank, 2)[1] for rank in want] == [0, 1, 2, 3]


def test_stages_cut_a_tied_parameter_at_all_borders() -> None:
    stages = [{"tied": (6, 5), "a": (3,)}, {"b": (17,), "tied": (6, 5)}]
    job = ZeroJob(1, 2, False, [[jobs.partitioned(shapes, 0, 1, 2, 0)] for shapes in stages])
    spans = [
        {(p.start, p.stop) for data in range(2) for p in job.arrays(data, stage)[0].line.places if p.of == "tied"}
        for stage in range(2)
    ]
    assert spans[0] == spans[1] == {(0, 7), (7, 18), (18, 30)}


def test_names() -> None:
    found = expert_name_of("a.deepspeed_moe.experts.deepspeed_experts.12.w.b")
    assert found and (found.number, found.part) == (12, ".w.b") and expert_name_of("a.experts.3.w") is None
    for index, key, local in ((3, None, "norm.weight"), (0, "embed", "word.weight")):
        assert layer_and_local(global_name(index, key, local), {"embed": 0}) == (index, local)


def test_files_are_sorted_by_the_names_that_are_written() -> None:
    at = {"prefix": "bf16_", "data": 3, "model": 7, "layer": 11, "expert": 5}
    names = [kind.format(**at) for kind in (OPTIM, MODEL, MODEL3, LAYER, EXPERT, PLAIN_EXPERTS)]
    found = sort_files([*names, "zero_to_fp32.py", "mp_rank_7_model_states.pt"])
    assert (found.optim, found.model, found.model3) == ({(3, 7): names[0]}, {7: names[1]}, {(3, 7): names[2]})
    assert (found.layers, found.experts, found.expp) == ({11: names[3]}, {(11, 5): names[4]}, {5: names[5]})
    assert found.prefixes == {"bf16_"} and found.refused == [(names[4], "experts of tensor parallel ranks")]
    assert sort_files(["zero_pp_rank_0_mp_rank_00optim_states.pt"]).optim  # an older DeepSpeed's
    assert len(sort_files(["layer_01-model_00-model_states.pt", "expert_0_mp_rank_00_model_states.pt"]).refused) == 2
