"""Rules and rank folders against slicing and counting by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_tool.core.extras import Opaque
from ckpt_tool.errors import Incomplete, UsageError
from ckpt_tool.systems.megatron.args import MegatronFacts, arguments, facts_of, updated
from ckpt_tool.systems.megatron.legacy.folders import coordinates, fit, folder_name, pairs
from ckpt_tool.systems.megatron.rules import (
    check_degree,
    global_shape,
    local_shape,
    norms_span,
    pieces,
    rule_of,
    sections_of,
    units_of,
)
from ckpt_tool.systems.megatron.stages import from_counts

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
    # z and x of 12 rows, B and C of 6, dt of 6; keys of 6 rows, values of 12, 6 value heads
    ("decoder.layers.0.mixer.in_proj.weight", (42, 4), lambda a, r, n: each(a, (12, 12, 6, 6, 6), r, n)),
    ("decoder.layers.0.mixer.conv1d_weight", (24, 1, 4), lambda a, r, n: each(a, (12, 6, 6), r, n)),
    ("decoder.layers.0.mixer.conv1d_bias", (24,), lambda a, r, n: each(a, (12, 6, 6), r, n)),
    ("decoder.layers.0.mixer.A_log", (6,), lambda a, r, n: np.split(a, n)[r]),
    ("decoder.layers.0.mixer.D", (6,), lambda a, r, n: np.split(a, n)[r]),
    ("decoder.layers.0.mixer.norm.weight", (12,), lambda a, r, n: np.split(a, n)[r]),
    ("decoder.layers.0.norm.weight", (4,), lambda a, r, n: a),
    ("decoder.layers.0.mixer.out_proj.weight", (4, 12), lambda a, r, n: np.split(a, n, axis=1)[r]),
    ("decoder.layers.1.self_attention.in_proj.weight", (48, 4), lambda a, r, n: each(a, (6, 6, 12, 12, 6, 6), r, n)),
    ("decoder.layers.1.self_attention.conv1d.weight", (24, 1, 4), lambda a, r, n: each(a, (6, 6, 12), r, n)),
    ("decoder.layers.1.self_attention.dt_bias", (6,), lambda a, r, n: np.split(a, n)[r]),
    ("decoder.layers.1.self_attention.out_norm.weight", (2,), lambda a, r, n: a),
    ("decoder.layers.1.self_attention.out_proj.weight", (4, 12), lambda a, r, n: np.split(a, n, axis=1)[r]),
    ("decoder.layers.1.self_attention.in_proj.weight_by_head", (48, 4), lambda a, r, n: np.split(a, n)[r]),
    ("decoder.layers.1.self_attention.in_proj_qkvz.weight", (48, 4), lambda a, r, n: np.split(a, n)[r]),
    ("decoder.layers.0.inner_layer.self_attention.in_proj.weight", (36, 4), lambda a, r, n: each(a, (12,) * 3, r, n)),
    (
        "decoder.layers.0.inner_layer.self_attention.conv1d.weight",
        (18, 1, 4),
        lambda a, r, n: each(a, (6,) * 3, r, n),
    ),
    ("decoder.layers.0.inner_layer.self_attention.g_b_proj.weight", (12, 4), lambda a, r, n: np.split(a, n)[r]),
    ("decoder.layers.0.inner_layer.self_attention.f_a_proj.weight", (12, 4), lambda a, r, n: a),
    ("decoder.layers.0.hyper_connection.mapping_proj.weight", (12, 4), lambda a, r, n: a),
    ("decoder.layers.0.hyper_connection.alpha_pre", (1,), lambda a, r, n: a),
    ("decoder.layers.2.self_attention.core_attention.indexer.linear_wq_b.weight", (12, 4), lambda a, r, n: a),
    ("decoder.layers.2.self_attention.core_attention.indexer.k_norm.bias", (12,), lambda a, r, n: a),
    (
        "language_model.decoder.layers.0.self_attention.linear_proj.weight",
        (5, 12),
        lambda a, r, n: np.split(a, n, 1)[r],
    ),
    ("language_model.embedding.word_embeddings.weight", (12, 4), lambda a, r, n: np.split(a, n)[r]),
    ("vision_model.decoder.layers.0.self_attention.linear_qkv.bias", (36,), lambda a, r, n: np.split(a, n)[r]),
    ("vision_model.decoder.layers.0.mlp.linear_fc1.weight", (24, 4), lambda a, r, n: np.split(a, n)[r]),
    ("vision_model.decoder.deepstack_merger_list.1.linear_fc2.weight", (5, 6), lambda a, r, n: np.split(a, n, 1)[r]),
    ("vision_model.merger.patch_norm.weight", (12,), lambda a, r, n: a),
    ("vision_model.patch_embed.proj.weight", (12, 4), lambda a, r, n: a),
    ("llava_model.vision_model.embedder.weight", (12, 4), lambda a, r, n: np.split(a, n)[r]),
    ("visual.blocks.0.mlp.linear_fc1.weight", (12, 4), lambda a, r, n: a),
    ("visual.blocks.0.attn.qkv.weight", (12, 4), lambda a, r, n: a),
    ("vision_tower.layers.0.attention.q_proj.weight", (12, 4), lambda a, r, n: a),
    ("multi_modal_projector.linear_1.weight", (12, 4), lambda a, r, n: a),
    ("multi_modal_projector.proj.weight", (12, 4), lambda a, r, n: np.split(a, n)[r]),
]
SECTIONS = {  # of the shapes above
    "mamba.in_proj": (2, 2, 1, 1, 1),
    "mamba.conv1d": (2, 1, 1),
    "gated delta net.in_proj": (1, 1, 2, 2, 1, 1),
    "gated delta net.conv1d": (1, 1, 2),
}


def each(array, rows, rank, size):
    """Part `rank` of each section, one below the other."""
    cut = []
    first = 0
    for count in rows:
        cut.append(np.split(array[first : first + count], size)[rank])
        first += count
    return np.concatenate(cut)


@pytest.mark.parametrize(("name", "shape", "cut"), CUTS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_pieces_are_what_slicing_gives(name, shape, cut, size):
    whole = np.arange(np.prod(shape)).reshape(shape)
    rule = rule_of(name, len(shape), gated=True, down_shared=True, sections=SECTIONS)
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
    for module in ("mixer", "self_attention"):
        rule = rule_of(f"decoder.layers.0.{module}.in_proj.weight", 2, gated=True, down_shared=True)
        assert not rule.known and "_head_dim" in rule.lacks


def test_a_degree_is_judged_by_query_groups():
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    units = units_of(name, rule_of(name, 2, gated=True, down_shared=True), (96, 8), MegatronFacts(groups=6, heads=12))
    with pytest.raises(UsageError, match="6 query groups do not divide by 4") as e:
        check_degree("tp", 4, [units])
    assert e.value.hint.endswith("2, 3, 6, 12")


def test_more_ranks_than_query_groups_share_them_since_megatron_0_16():
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    units = units_of(name, rule_of(name, 2, gated=True, down_shared=True), (96, 8), MegatronFacts(groups=6, heads=12))
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


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "dims", [{"tp": 10**9}, {"pp": 10**12}, {"ep": 10**9, "dp": 10**12}, {"tp": 30011, "ep": 30013}], ids=str
)
def test_absurd_degrees_are_refused_at_once(dims):
    with pytest.raises(Incomplete, match="no job|rank folders") as e:
        coordinates({"mp_rank_00": (0,)}, DEGREES | dims, {}, experts=True)
    assert e.value.code == "E0302" and "damaged" in e.value.hint


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


MIXER = {"in_proj.weight": (42, 4), "out_proj.weight": (4, 12), "A_log": (6,), "conv1d_weight": (24, 1, 4)}
DELTA = {"in_proj.weight": (48, 4), "out_proj.weight": (4, 12), "dt_bias": (6,), "conv1d.weight": (24, 1, 4)}
ARGS = MegatronFacts(mamba=(12, 6, 6), delta=(6, 12, 6))


def module(front, tensors, size=1, without=()):
    shapes = {f"{front}.{leaf}": shape for leaf, shape in tensors.items() if leaf not in without}
    dims = {name: 1 if ".out_proj." in name else 0 for name in shapes}
    return {n: tuple(x // size if d == dims[n] else x for d, x in enumerate(shape)) for n, shape in shapes.items()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sections_follow_from_the_modules_own_tensors(size):
    shapes = module("decoder.layers.0.mixer", MIXER, size) | module("decoder.layers.1.self_attention", DELTA, size)
    assert sections_of(shapes, MegatronFacts()) == SECTIONS
    assert sections_of(shapes, MegatronFacts(mamba=(30, 2, 6))) == SECTIONS, "tensors count before arguments"


def test_sections_by_the_arguments_and_none_where_layers_differ():
    alone = {"decoder.layers.0.mixer.conv1d_weight": (24, 1, 4)}
    assert sections_of(alone, ARGS) == SECTIONS and sections_of(alone, MegatronFacts()) == {}
    partly = module("decoder.layers.0.mixer", MIXER, without=("A_log",))
    assert sections_of(partly, MegatronFacts()) == {}
    odd = module("decoder.layers.0.mixer", MIXER | {"conv1d_weight": (22, 1, 4)})
    assert sections_of(odd, MegatronFacts()) == {}, "the tensors contradict each other"
    other = module("decoder.layers.1.mixer", MIXER | {"in_proj.weight": (54, 4), "conv1d_weight": (36, 1, 4)})
    assert sections_of(module("decoder.layers.0.mixer", MIXER) | other, MegatronFacts()) == {}


def test_a_degree_is_judged_by_key_heads_and_groups():
    name = "decoder.layers.1.self_attention.in_proj.weight"
    rule = rule_of(name, 2, gated=True, down_shared=True, sections=SECTIONS)
    units = [units_of(name, rule, (48, 4), MegatronFacts(delta_heads=2))]
    assert check_degree("tp", 2, units) == []
    with pytest.raises(UsageError, match="2 key heads do not divide by 3"):
        check_degree("tp", 3, units)
    with pytest.raises(UsageError, match="6 rows that divide all 6 sections do not divide by 4"):
        check_degree("tp", 4, [units_of(name, rule, (48, 4), MegatronFacts())])
    with pytest.raises(UsageError, match="rows that are no"):
        check_degree("tp", 2, [units_of(name, rule, (47, 4), MegatronFacts())])


def attention(q, k, wide):
    front = "decoder.layers.0.self_attention."
    shapes = {"q_layernorm": (q,), "k_layernorm": (k,), "linear_proj": (8, wide), "linear_qkv": (q + 2 * k, 8)}
    return {f"{front}{name}.weight": shape for name, shape in shapes.items()}


def test_norms_over_all_heads_are_shared_and_those_of_one_are_not():
    assert norms_span(attention(12, 6, 12), MegatronFacts(), 1) is True  # 4 heads, 2 groups
    assert norms_span(attention(3, 3, 12), MegatronFacts(heads=4), 1) is False
    assert norms_span(attention(12, 12, 12), MegatronFacts(heads=4), 2) is True
    assert norms_span(attention(3, 3, 3), MegatronFacts(heads=4), 4) is False, "core's own norms are of one head"
    assert norms_span(attention(12, 12, 12), MegatronFacts(), 2) is None
    assert norms_span(attention(12, 12, 12), MegatronFacts(heads=4), 1) is False, "OLMoE's are whole on every rank"
    assert norms_span(attention(24, 24, 12), MegatronFacts(heads=4), 2) is False, "and found so"
    name = "decoder.layers.0.self_attention.q_layernorm.weight"
    assert rule_of(name, 1, gated=True, down_shared=True, spanning=True).dim == 0
    assert not rule_of(name, 1, gated=True, down_shared=True, spanning=None).known
