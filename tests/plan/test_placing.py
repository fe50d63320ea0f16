"""Where tensors go when only names, shapes and the source's cut are known."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.layout import held
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.target import WantedTensor
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.plan.balance import balance_stages
from ckpt_tool.plan.placing import Wishes, lay_out, rules_from


def tensors(*rows):
    return tuple(WantedTensor(TensorKey(name, state), shape, DTYPES["F32"]) for name, shape, state in rows)


def test_common_names_are_cut_as_megatron_cuts_them():
    rows = tensors(
        ("model.embed_tokens.weight", (64, 8), "model"),
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), "model"),
        ("model.layers.0.self_attn.o_proj.weight", (8, 8), "model"),
        ("model.layers.0.input_layernorm.weight", (8,), "model"),
        ("model.layers.0.self_attn.o_proj.weight", (8, 8), "exp_avg"),
        ("model.layers.0.self_attn.o_proj.weight", (), "step"),
    )
    layout, fallbacks = lay_out(rows, Wishes(Mesh.of(tp=4)))
    assert [p.shard for p in layout.placements] == [
        ((0, ("tp",)),),
        ((0, ("tp",)),),
        ((1, ("tp",)),),
        (),
        ((1, ("tp",)),),
        (),
    ]
    assert fallbacks == []


def test_matrices_that_lie_the_other_way_round_are_cut_along_the_other_dim():
    rows = tensors(
        ("layers.0.up_gate_proj.weight", (8, 16), "model"),
        ("layers.0.o_proj.weight", (16, 8), "model"),
        ("embed_tokens.weight", (32, 8), "model"),
        ("layers.0.qkv_proj.bias", (16,), "model"),
    )
    layout, _ = lay_out(rows, Wishes(Mesh.of(tp=4), in_out=True))
    assert [placement.shard[0][0] for placement in layout.placements] == [1, 0, 0, 0]


def test_a_dim_that_does_not_divide_is_reported_with_its_extra_bytes():
    rows = tensors(("a.weight", (10, 3), "model"), ("b.weight", (9, 3), "model"), ("c.weight", (10, 3), "exp_avg"))
    layout, fallbacks = lay_out(rows, Wishes(Mesh.of(dp=2, tp=4), zero=3))
    assert [p.shard for p in layout.placements] == [((0, ("dp",)),), (), ((0, ("dp",)),)]
    assert [(f["used"], f["tensors"], f["extra_bytes"]) for f in fallbacks] == [
        (["dp"], 2, 2 * 120 * 3),
        ([], 1, 108 * 7),
    ]


def test_layers_go_to_stages_and_ends_to_the_ends():
    rows = tensors(
        ("model.norm.weight", (8,), "model"),
        ("model.embed_tokens.weight", (64, 8), "model"),
        *((f"model.layers.{i}.w.weight", (8, 8), "model") for i in range(5)),
    )
    with pytest.raises(UsageError, match="5 layers are fewer than 6 pipeline stages") as caught:
        lay_out(rows, Wishes(Mesh.of(pp=6)))
    assert caught.value.exit_code == 2 and "--pp 5 at most" in caught.value.hint
    layout, _ = lay_out(rows, Wishes(Mesh.of(pp=2)))  # the embedding is as large as eight layers
    assert [dict(p.at)["pp"] for p in layout.placements] == [1, 0, 0, 1, 1, 1, 1]
    layout, _ = lay_out(rows, Wishes(Mesh.of(pp=2), pp_split=(3, 2)))
    assert [dict(p.at)["pp"] for p in layout.placements] == [1, 0, 0, 0, 0, 1, 1]
    with pytest.raises(UsageError, match="pp-split"):
        lay_out(rows, Wishes(Mesh.of(pp=2), pp_split=(3, 3)))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_stages_are_balanced_as_well_as_can_be(sizes, data):
    stages = data.draw(st.integers(1, len(sizes)))

    def judged(split):
        sums = [sum(sizes[sum(split[:k]) : sum(split[: k + 1])]) for k in range(stages)]
        return max(sums), sum(n * n for n in sums), [-count for count in split]

    inner = combinations(range(1, len(sizes)), stages - 1)
    splits = [tuple(b - a for a, b in pairwise((0, *cuts, len(sizes)))) for cuts in inner]
    assert balance_stages(sizes, stages) == min(splits, key=judged)


def test_data_ranks_cut_unevenly_and_tensor_ranks_do_not():
    rows = tensors(("layers.0.mlp.up_proj.weight", (10, 4), "model"), ("norm.weight", (7,), "model"))
    layout, fallbacks = lay_out(rows, Wishes(Mesh.of(dp=3, tp=4), zero=3, uneven=True))
    assert [p.shard for p in layout.placements] == [((0, ("dp",)),), ((0, ("dp",)),)]
    assert [p.uneven for p in layout.placements] == [(0,), (0,)]
    assert [part.box.shape[0] for part in held((7,), layout.placements[1], layout.mesh) if not part.replica] == [
        3,
        3,
        1,
    ]
    assert {f["reason"] for f in fallbacks} == {"uneven"}


def test_experts_go_to_their_ranks():
    rows = tensors(*((f"layers.0.experts.{e}.w1.weight", (8, 8), "model") for e in range(4)))
    layout, _ = lay_out(rows, Wishes(Mesh.of(ep=2)))
    assert [dict(p.at)["ep"] for p in layout.placements] == [0, 0, 1, 1]
    with pytest.raises(UsageError, match="4 experts do not divide over 3"):
        lay_out(rows, Wishes(Mesh.of(ep=3)))
    with pytest.raises(UsageError, match="0 experts"):
        lay_out(tensors(("w", (4, 4), "model")), Wishes(Mesh.of(ep=3)))


def test_a_layout_file_wins():
    degrees, rules = rules_from(
        {"mesh": {"tp": 2}, "rule": [{"match": "*.odd", "shard": {"1": ["tp"]}}, {"match": "lone", "at": {"tp": 1}}]},
        "f",
    )
    layout, _ = lay_out(
        tensors(("a.odd", (2, 4), "model"), ("lone", (3,), "model")), Wishes(Mesh.of(**degrees), rules=rules)
    )
    assert layout.placements[0].shard == ((1, ("tp",)),) and layout.placements[1].at == (("tp", 1),)
    with pytest.raises(UsageError, match="does not read"):
        rules_from({"rule": [{"shard": {}}]}, "f")
