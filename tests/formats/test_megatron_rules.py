"""Rules and rank folders against slicing and counting by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_tool.core.extras import Opaque
from ckpt_tool.errors import Incomplete, UsageError
from ckpt_tool.formats.megatron.args import Facts, arguments, facts_of, updated
from ckpt_tool.formats.megatron.folders import coordinates, fit, folder_name, pairs
from ckpt_tool.formats.megatron.rules import check_degree, global_shape, local_shape, pieces, rule_of, units_of
from ckpt_tool.formats.megatron.stages import from_counts

CUTS = [  # name, shape, how NumPy cuts it for rank r of n
    ("embedding.word_embeddings.weight", (12, 3), lambda a, r, n: np.split(a, n)[r]),
    ("decoder.layers.0.self_attention.linear_qkv.bias", (12,), lambda a, r, n: np.split(a, n)[r]),
    ("decoder.layers.0.self_attention.linear_proj.weight", (5, 12), lambda a, r, n: np.split(a, n, axis=1)[r]),
    ("decoder.layers.0.self_attention.linear_proj.bias", (5,), lambda a, r, n: a),
    ("decoder.layers.0.mlp.linear_fc2.weight", (5, 12), lambda a, r, n: np.split(a, n, axis=1)[r]),
    (
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        (24, 3),
        lambda a, r, n: np.concatenate([np.split(half, n)[r] for half in np.split(a, 2)]),
    ),
    (
        "decoder.layers.0.mlp.linear_fc1.bias",
        (24,),
        lambda a, r, n: np.concatenate([np.split(half, n)[r] for half in np.split(a, 2)]),
    ),
    ("decoder.layers.0.mlp.router.weight", (4, 6), lambda a, r, n: a),
    ("decoder.layers.0.mlp.router.expert_bias", (4,), lambda a, r, n: a),
    ("decoder.layers.0.self_attention.q_layernorm.weight", (4,), lambda a, r, n: a),
    ("decoder.layers.0.self_attention.core_attention.softmax_offset", (12,), lambda a, r, n: np.split(a, n)[r]),
    ("mtp.layers.0.eh_proj.weight", (12, 4), lambda a, r, n: np.split(a, n)[r]),
]


@pytest.mark.parametrize(("name", "shape", "cut"), CUTS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_pieces_are_what_slicing_gives(name, shape, cut, size):
    whole = np.arange(np.prod(shape)).reshape(shape)
    rule = rule_of(name, len(shape), gated=True, down_shared=True)
    assert rule.known
    for rank in range(size):
        want = cut(whole, rank, size)
        assert local_shape(rule, shape, size) == want.shape and global_shape(rule, want.shape, size) == shape
        got = np.full(want.shape, -1)
        for piece in pieces(rule, shape, rank, size):
            inside = tuple(slice(o, o + n) for o, n in zip(piece.within.offset, piece.within.shape, strict=True))
            box = tuple(slice(o, o + n) for o, n in zip(piece.box.offset, piece.box.shape, strict=True))
            got[inside] = whole[box]
        np.testing.assert_array_equal(got, want)


def test_down_projections_by_spec_and_experts_by_their_own_axis():
    down = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    assert rule_of(down, 2, gated=True, down_shared=True).dim == 0
    assert rule_of(down, 2, gated=True, down_shared=False).dim is None
    expert = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    assert rule_of(expert, 2, gated=True, down_shared=True).axis == "etp"
    assert (
        rule_of("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", 2, gated=True, down_shared=True).axis == "tp"
    )
    assert not rule_of("decoder.layers.0.mixer.in_proj.weight", 2, gated=True, down_shared=True).known


def test_a_degree_is_judged_by_query_groups():
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    units = units_of(name, rule_of(name, 2, gated=True, down_shared=True), (96, 8), Facts(groups=6, heads=12))
    with pytest.raises(UsageError, match="6 query groups do not divide by 4") as e:
        check_degree("tp", 4, [units])
    assert e.value.hint.endswith("2, 3, 6, 12")


def test_more_ranks_than_query_groups_share_them_since_megatron_0_16():
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    units = units_of(name, rule_of(name, 2, gated=True, down_shared=True), (96, 8), Facts(groups=6, heads=12))
    (note,) = check_degree("tp", 12, [units])
    assert "6 query groups" in note and "0.16" in note
    assert check_degree("tp", 6, [units]) == []
    with pytest.raises(UsageError):
        check_degree("tp", 18, [units])  # 96 rows


DEGREES = {"tp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "dp": 1, "cp": 1}


@pytest.mark.parametrize(
    ("degrees", "want"),
    [
        ({"tp": 2, "ep": 2, "dp": 2}, {(0, 0), (1, 1)}),
        ({"tp": 4, "ep": 2, "dp": 1}, {(0, 0), (1, 1), (2, 0), (3, 1)}),
        ({"tp": 2, "ep": 2, "etp": 2, "dp": 2}, {(0, 0), (1, 0), (0, 1), (1, 1)}),
        ({"ep": 4, "dp": 4}, {(0, 0), (0, 1), (0, 2), (0, 3)}),
        ({"tp": 2, "cp": 2, "dp": 2}, {(0, 0), (1, 0)}),
    ],
)
def test_pairs_of_tensor_and_expert_rank(degrees, want):
    assert set(pairs(DEGREES | degrees)) == want


def test_two_numbers_mean_stage_or_expert_rank_by_the_arguments():
    folders = {"mp_rank_00_000": (0, 0), "mp_rank_00_001": (0, 1)}
    by_stage = coordinates(folders, DEGREES | {"pp": 2}, {}, experts=False)
    by_expert = coordinates(folders, DEGREES | {"ep": 2, "dp": 2}, {}, experts=True)
    assert [(r.pp, r.ep) for r in by_stage] == [(0, 0), (1, 0)] and [(r.pp, r.ep) for r in by_expert] == [
        (0, 0),
        (0, 1),
    ]


def test_missing_folders_are_named_all_at_once():
    degrees = DEGREES | {"tp": 2, "pp": 2, "etp": 2}
    have = {"mp_rank_00_000": (0, 0)}
    with pytest.raises(Incomplete, match="3 rank folders are missing: mp_rank_01_000, mp_rank_00_001, mp_rank_01_001"):
        coordinates(have, degrees, {}, experts=False)


def test_data_ranks_grow_with_the_experts():
    degrees, notes = fit({"tp": 2, "ep": 4, "etp": 1}, 8)
    assert degrees["dp"] == 2 and "raised from 1 to 2" in notes[0]
    assert folder_name(1, 2, 3, degrees | {"pp": 4}) == "mp_rank_01_002_003"


def test_arguments_keep_what_the_degrees_do_not_touch():
    args = Opaque("argparse.Namespace", (), {"tensor_model_parallel_size": 4, "swiglu": True, "seed": 7, "rank": 3})
    stated = arguments({"args": args})
    assert facts_of(stated).tp == facts_of(stated).etp == 4 and facts_of(stated).gated
    new = updated(stated, DEGREES | {"tp": 2, "etp": 2, "pp": 2, "dp": 3}, from_counts([3, 1], 2), 5)
    assert (new["tensor_model_parallel_size"], new["world_size"], new["rank"], new["seed"]) == (2, 12, 5, 7)
    assert new["decoder_first_pipeline_num_layers"] == 3 and "num_virtual_stages_per_pipeline_rank" not in new
    assert arguments({"args": {"a": 1}}) == {}
