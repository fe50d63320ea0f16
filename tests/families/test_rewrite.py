"""A checkpoint's tensors in another dialect: parts of checkpoints, ties, and every fault by name."""

from __future__ import annotations

import time
from typing import Any

import pytest
from family_models import config_of, hub_shapes

from ckpt_tool.algebra.mapped import Mapped
from ckpt_tool.algebra.pattern import pattern
from ckpt_tool.algebra.piece import PAD
from ckpt_tool.errors import InconsistentCheckpoint, InputError, UsageError
from ckpt_tool.families.base import Family
from ckpt_tool.families.registry import by_name
from ckpt_tool.families.rewrite import mapping
from ckpt_tool.families.sizes import infer_sizes

Shapes = dict[str, tuple[int, ...]]


def ernie(source: str, target: str, shapes: Shapes, config: dict[str, Any] | None) -> Mapped:
    return mapping(by_name("ernie4_5"), source, target, shapes, config)


def names(mapped: Mapped) -> list[str]:
    return [made.name for made in mapped.made]


CONFIG = config_of("ernie4_5")
HUB = hub_shapes("ernie4_5", CONFIG)
PADDLE = {made.name: made.shape for made in ernie("hf", "paddle", HUB, CONFIG).made}


def test_one_layer_of_a_checkpoint_is_a_checkpoint() -> None:
    part = {name: shape for name, shape in HUB.items() if ".layers.1." in name}
    made = ernie("hf", "paddle", part, CONFIG)
    assert names(made) == [name for name in PADDLE if ".layers.1." in name]
    assert not made.dropped and not made.unfilled


def test_one_tensor_is_a_checkpoint() -> None:
    assert names(ernie("hf", "paddle", {"model.norm.weight": (18,)}, CONFIG)) == ["model.norm.weight"]
    assert names(ernie("hf", "paddle", {}, CONFIG)) == []


def test_the_order_is_the_source_s() -> None:
    backwards = dict(reversed(HUB.items()))
    assert names(ernie("hf", "paddle", backwards, CONFIG))[0] == next(iter(backwards))


def test_what_no_rule_knows_is_not_in_the_result() -> None:
    made = ernie("hf", "paddle", {**HUB, "score.weight": (3, 3), "model.layers.007.mlp.down_proj.weight": (1,)}, CONFIG)
    assert names(made) == list(PADDLE)
    assert "score.weight" not in made.dropped


def test_a_half_tensor_names_what_is_missing() -> None:
    part = {
        name: shape
        for name, shape in HUB.items()
        if name not in ("model.layers.0.self_attn.v_proj.weight", "model.layers.1.mlp.up_proj.weight")
    }
    with pytest.raises(InconsistentCheckpoint, match="layers.0.self_attn.v_proj.weight is missing") as error:
        ernie("hf", "paddle", part, CONFIG)
    assert error.value.code == "E1371"
    assert len(error.value.faults) == 1 and "model.layers.1.mlp.up_proj.weight is missing" in error.value.faults[0]


def test_shapes_against_the_config_come_all_at_once() -> None:
    wrong = {**HUB, "model.norm.weight": (17,), "model.layers.0.mlp.up_proj.weight": (9, 18)}
    with pytest.raises(InconsistentCheckpoint, match=r"shape \[17\], .* wants \[18\]") as error:
        ernie("hf", "paddle", wrong, CONFIG)
    assert error.value.code == "E1370" and len(error.value.faults) == 1
    assert "f=10" in error.value.faults[0]


def test_a_wrong_dialect_is_told_by_its_shapes() -> None:
    config = config_of("llama")
    shapes = hub_shapes("llama", config)
    there = {made.name: made.shape for made in mapping(by_name("llama"), "hf", "paddle", shapes, config).made}
    with pytest.raises(InconsistentCheckpoint) as error:
        mapping(by_name("llama"), "hf", "paddle", there, config)
    assert "--family llama:paddle" in (error.value.hint or "")


def test_a_layer_or_an_expert_that_the_config_has_no_room_for() -> None:
    with pytest.raises(InconsistentCheckpoint, match="i=1, the config says 1") as error:
        ernie("hf", "paddle", HUB, {**CONFIG, "num_hidden_layers": 1})
    assert error.value.code == "E1370"


def test_heads_want_a_config() -> None:
    with pytest.raises(InputError, match="num_attention_heads") as error:
        ernie("hf", "paddle", HUB, None)
    assert error.value.code == "E1376" and "--config" in (error.value.hint or "")


def test_a_transposition_alone_wants_none() -> None:
    """Llama's weights are only turned, but its heads are still three axes: what is asked for is named."""
    mlp = {name: shape for name, shape in HUB.items() if "mlp" in name or "norm" in name or "embed" in name}
    assert len(mapping(by_name("llama"), "hf", "paddle", mlp, None).made) == len(mlp)


def test_sizes_follow_from_shapes_where_one_settles_them() -> None:
    config = config_of("deepseek_v3")
    shapes = hub_shapes("deepseek_v3", config, mtp=True)
    family = by_name("deepseek_v3")
    assert mapping(family, "hf", "paddle", shapes, None) == mapping(family, "hf", "paddle", shapes, config)


def test_two_spellings_of_one_tensor_are_one_too_many() -> None:
    config = config_of("llama")
    shapes = {"model.layers.0.mlp.gate_up_fused_proj.weight": (18, 20), "model.layers.0.mlp.up_proj.weight": (18, 10)}
    with pytest.raises(InconsistentCheckpoint, match="all hold the hub's model.layers.0.mlp.up_proj.weight") as error:
        mapping(by_name("llama"), "paddle", "hf", shapes, config)
    assert error.value.code == "E1375"


def test_a_fused_spelling_is_read_and_the_first_one_written() -> None:
    config = config_of("llama")
    shapes = {"llama.layers.0.mlp.gate_up_fused_proj.weight": (18, 20), "lm_head.weight": (18, 22)}
    family = by_name("llama")
    assert names(mapping(family, "paddle-nlp", "hf", shapes, config)) == [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
    ]
    made = mapping(family, "paddle-nlp", "paddle", shapes, config).made
    assert [(each.name, each.shape) for each in made] == [
        ("model.layers.0.mlp.gate_proj.weight", (18, 10)),
        ("model.layers.0.mlp.up_proj.weight", (18, 10)),
        ("lm_head.weight", (22, 18)),
    ]


@pytest.mark.parametrize(("tied", "shape"), [(True, (22, 18)), (False, (18, 22))])
def test_paddlenlp_lays_a_head_out_as_it_is_tied(*, tied: bool, shape: tuple[int, ...]) -> None:
    config = config_of("llama", tie_word_embeddings=tied)
    made = mapping(by_name("llama"), "hf", "paddle-nlp", {"lm_head.weight": (22, 18)}, config).made
    assert made[0].shape == shape


def test_tied_heads_stay_as_stored() -> None:
    config = config_of("ernie4_5", tie_word_embeddings=True)
    alone = {name: shape for name, shape in HUB.items() if name != "lm_head.weight"}
    assert ernie("hf", "paddle", alone, config).aliases == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert ernie("hf", "paddle-contiguous", alone, config).aliases == (("lm_head.weight", "ernie.embed_tokens.weight"),)
    both = ernie("hf", "paddle", HUB, config)
    assert "lm_head.weight" in names(both) and not both.aliases
    assert not ernie("hf", "paddle", alone, CONFIG).aliases


def test_buffers_that_no_parameter_is_are_dropped_by_name() -> None:
    config = config_of("llama")
    shapes = {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,), "model.norm.weight": (18,)}
    made = mapping(by_name("llama"), "hf", "paddle", shapes, config)
    assert made.dropped == ("model.layers.0.self_attn.rotary_emb.inv_freq",) and names(made) == ["model.norm.weight"]


def test_scales_do_not_stay_behind_a_weight_that_turns() -> None:
    shapes = {"model.layers.0.mlp.up_proj.weight": (10, 18), "model.layers.0.mlp.up_proj.weight_scale_inv": (1, 1)}
    with pytest.raises(InconsistentCheckpoint, match="quantised") as error:
        mapping(by_name("deepseek_v3"), "hf", "paddle", shapes, config_of("deepseek_v3"))
    assert error.value.code == "E1377"


def test_no_such_dialect() -> None:
    with pytest.raises(UsageError, match="no dialect 'pdle'") as error:
        ernie("hf", "pdle", HUB, CONFIG)
    assert error.value.code == "E1231" and "did you mean paddle" in (error.value.hint or "")


def test_no_rule_in_the_target() -> None:
    config = config_of("glm4_moe")
    family = by_name("glm4_moe")
    lame = type(family)("lame", (), family.axes, family.hub, {"small": "model.norm.weight : h"})
    with pytest.raises(InconsistentCheckpoint, match="no rule for it") as error:
        mapping(lame, "hf", "small", {"model.norm.weight": (18,), "lm_head.weight": (22, 18)}, config)
    assert error.value.code == "E1374" and error.value.key == "lm_head.weight"


def test_names_of_any_numbers_cost_no_more_than_there_are_of_them() -> None:
    """2,000 layers with one expert each, no two alike, and numbers of 4,000 digits: no product, no surprise."""
    config = {**config_of("deepseek_v3"), "num_hidden_layers": 10**9, "n_routed_experts": 10**9}
    shapes = {f"model.layers.{7 * k}.mlp.experts.{11 * k}.up_proj.weight": (5, 18) for k in range(2000)}
    start = time.process_time()
    assert len(mapping(by_name("deepseek_v3"), "hf", "paddle", shapes, config).made) == 2000
    assert time.process_time() - start < 3
    long = {f"model.layers.{'9' * 5000}.mlp.up_proj.weight": (10, 18)}
    assert not mapping(by_name("deepseek_v3"), "hf", "paddle", long, config).made


def test_a_large_model_takes_moments() -> None:
    """8,000 tensors: far below a second; 671B (48,000) takes some 2."""
    config = config_of("deepseek_v3", num_hidden_layers=20, n_routed_experts=128)
    shapes = hub_shapes("deepseek_v3", config)
    start = time.process_time()
    made = mapping(by_name("deepseek_v3"), "hf", "paddle", shapes, config).made
    assert len(made) == len(shapes) > 7000
    assert time.process_time() - start < 3


# A family of its own: what a dialect may do that none of today's does.

STACKED = Family(
    "stacked",
    (),
    {"v": "vocab_size", "h": "hidden_size", "e": "num_experts", "p": "padding"},
    """
    [embed|head].w : v h
    head.w ~ embed.w if tie_word_embeddings?
    l.{i}.experts.{e}.w : h
    """,
    {
        "packed": """
        embed.w : (v + p) h = embed.w : v h ; _ : p h
        head.w : v h if not tie_word_embeddings?
        l.{i}.experts : e h = l.{i}.experts.{e}.w : h
        """
    },
)
PLAIN: dict[str, Any] = {"vocab_size": 5, "hidden_size": 2, "num_experts": 3, "padding": 1}


def test_experts_are_stacked_whole_or_not_at_all() -> None:
    shapes: Shapes = {f"l.{i}.experts.{e}.w": (2,) for i in (0, 4) for e in range(3)}
    made = mapping(STACKED, "hf", "packed", shapes, PLAIN).made
    assert [(each.name, each.shape) for each in made] == [("l.0.experts", (3, 2)), ("l.4.experts", (3, 2))]
    assert [piece.dst.offset for piece in made[1].pieces] == [0, 2, 4]
    back = mapping(STACKED, "packed", "hf", {each.name: each.shape for each in made}, {})
    assert {each.name: each.shape for each in back.made} == shapes
    del shapes["l.4.experts.1.w"]
    with pytest.raises(InconsistentCheckpoint, match=r"l.4.experts is made of it too, and l.4.experts.1.w is missing"):
        mapping(STACKED, "hf", "packed", shapes, PLAIN)
    for i in (0, 4):
        shapes.pop(f"l.{i}.experts.2.w")
        shapes.pop(f"l.{i}.experts.1.w", None)
    with pytest.raises(InconsistentCheckpoint, match="is missing"):  # two of three in no layer at all
        mapping(STACKED, "hf", "packed", shapes, PLAIN)


def test_padding_is_made_and_dropped_but_no_tensor_is() -> None:
    there = mapping(STACKED, "hf", "packed", {"embed.w": (5, 2)}, PLAIN)
    assert there.made[0].shape == (6, 2) and {piece.src.name for piece in there.made[0].pieces} == {"embed.w", PAD}
    back = mapping(STACKED, "packed", "hf", {"embed.w": (6, 2)}, PLAIN)
    assert back.made[0].shape == (5, 2) and not back.dropped


def test_a_tied_head_that_the_target_has_no_name_for_is_dropped_by_name() -> None:
    shapes: Shapes = {"embed.w": (5, 2), "head.w": (5, 2)}
    tied = mapping(STACKED, "hf", "packed", shapes, {**PLAIN, "tie_word_embeddings": True})
    assert names(tied) == ["embed.w"] and tied.dropped == ("head.w",)
    assert names(mapping(STACKED, "hf", "packed", shapes, PLAIN)) == ["embed.w", "head.w"]
    with pytest.raises(InconsistentCheckpoint, match="no rule for it"):  # the only copy is never dropped
        mapping(STACKED, "hf", "packed", {"head.w": (5, 2)}, {**PLAIN, "tie_word_embeddings": True})


def test_a_name_of_two_rules_settles_no_size() -> None:
    with pytest.raises(InputError) as error:
        mapping(by_name("llama"), "paddle-nlp", "hf", {"lm_head.weight": (22, 18)}, {"tie_word_embeddings": True})
    assert error.value.code == "E1376"


def test_a_shape_settles_what_fits_alone() -> None:
    assert infer_sizes([(pattern("(g d) h"), (8, 3)), (pattern("d"), (2,))], {}) == {"h": 3, "d": 2, "g": 4}
    assert infer_sizes([(pattern("((1 + 1) f) h"), (7, 3)), (pattern("(g d)"), (6,))], {"g": 4}) == {"g": 4, "h": 3}
    assert infer_sizes([(pattern("(v + p)"), (3,))], {"p": 4}) == {"p": 4}
    assert infer_sizes([(pattern("a b"), (3,))], {}) == {}


def test_a_tower_keeps_what_follows_its_place() -> None:
    """Whatever lies there, scales of quantised weights too; what a rule makes as well is a fault."""
    family = by_name("qwen2_vl")
    config = config_of("qwen2_vl")
    shapes = {
        "visual.blocks.0.odd.weight": (3, 2, 1),
        "visual.merger.mlp.0.weight_scale_inv": (),
        "model.norm.weight": (24,),
    }
    made = mapping(family, "hf", "megatron", shapes, config).made
    assert [(each.name, each.shape) for each in made] == [
        ("visual.visual.blocks.0.odd.weight", (3, 2, 1)),
        ("visual.visual.merger.mlp.0.weight_scale_inv", ()),
        ("language_model.decoder.final_layernorm.weight", (24,)),
    ]
    back = mapping(family, "megatron", "hf-5", {each.name: each.shape for each in made}, config).made
    assert [each.name for each in back] == [
        "model.visual.blocks.0.odd.weight",
        "model.visual.merger.mlp.0.weight_scale_inv",
        "model.language_model.norm.weight",
    ]


def test_a_tensor_that_a_tower_and_a_rule_make_is_a_fault() -> None:
    family = Family(
        "seen", (), {"h": "hidden_size"}, "a.weight : h\nb.**\n", {"other": "b.w : h = a.weight : h\nb.**\n"}
    )
    with pytest.raises(InconsistentCheckpoint, match=r"b\.w is made of others too") as caught:
        mapping(family, "hf", "other", {"a.weight": (4,), "b.w": (4,)}, {"hidden_size": 4})
    assert caught.value.code == "E1375" and caught.value.key == "b.w"
