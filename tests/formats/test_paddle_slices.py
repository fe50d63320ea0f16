"""Owners and slices against what PaddlePaddle's own optimizers did (fixtures/paddle-sharding)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from targets import FIXTURES

from ckpt_tool.systems.paddle.job import OptimizerMember, ParameterSpan, buffers, owners, spans

GOLDEN = json.loads((FIXTURES / "paddle-sharding" / "golden.json").read_text())["sharding"]


def members(case: dict[str, Any]) -> list[OptimizerMember]:
    out = []
    for i, (shape, dtype) in enumerate(zip(case["shapes"], case["dtypes"], strict=True)):
        numel = 1
        for n in shape:
            numel *= n
        out.append(
            OptimizerMember(
                f"p{i}", numel, {"bfloat16": "BF16", "float32": "F32"}[dtype], 2 if dtype == "bfloat16" else 4
            )
        )
    return out


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['ranks']}-ranks")
def test_owners_and_slices_are_paddle_s(case: dict[str, Any]) -> None:
    assert owners(members(case), case["ranks"]) == case["v1"]
    for rank, held in enumerate(case["v2"]):
        got = spans(members(case), case["ranks"], rank, buffer_mb=1)
        assert got == {name: ParameterSpan(*numbers) for name, numbers in held.items()}


def test_equal_ones_are_dealt_in_the_order_of_the_list() -> None:
    four = [OptimizerMember(name, 8, "F32", 4) for name in "dacb"]
    assert list(owners(four, 2).items()) == [("d", 0), ("a", 1), ("c", 0), ("b", 1)]


def test_a_buffer_is_closed_by_the_parameter_that_fills_it() -> None:
    listed = [
        OptimizerMember("a", 1 << 18, "F32", 4),
        OptimizerMember("b", 1, "F32", 4),
        OptimizerMember("c", 5, "BF16", 2),
    ]
    assert [[m.name for m in buffer] for buffer in buffers(listed, 1)] == [["c"], ["a"], ["b"]]
    assert buffers([], 1) == []


def test_a_rank_may_hold_padding_alone_or_nothing() -> None:
    one = [OptimizerMember("a", 3, "F32", 4)]
    assert spans(one, 2, 0) == {"a": ParameterSpan(0, 3, 64)}
    assert spans(one, 2, 1) == {"a": ParameterSpan(3, 3, 64)}
    two = [*one, OptimizerMember("b", 3, "F32", 4)]
    assert spans(two, 2, 1) == {"b": ParameterSpan(0, 3, 128)}
