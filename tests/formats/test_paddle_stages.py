"""Pipelines: which stage holds which parameter; borders against PaddlePaddle's own `SegmentLayers`."""

from __future__ import annotations

import json

import pytest
from targets import FIXTURES

from ckpt_tool.errors import UsageError
from ckpt_tool.systems.paddle.job import Items, items_of, stages_of
from ckpt_tool.systems.paddle.stored_names import registration_order, static_names

SEGMENTS = json.loads((FIXTURES / "paddle-sharding" / "golden.json").read_text())["segments"]
MTP = [
    "mtp_block.0.mlp.down_proj.weight",
    "mtp_hidden_norm.0.weight",
    "mtp_emb_norm.0.weight",
    "mtp_linear_proj.0.weight",
]


@pytest.mark.parametrize(("layers", "stages", "borders"), SEGMENTS)
def test_borders_are_paddle_s(layers: int, stages: int, borders: list[int]) -> None:
    assert list(stages_of(Items("model.", layers, 0), stages).borders) == borders


def test_ends_stand_on_the_first_and_the_last_stage() -> None:
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", *(f"model.{name}" for name in MTP)]
    names += [f"model.layers.{i}.input_layernorm.weight" for i in range(4)]
    stages = stages_of(items_of(names, {}), 2)
    assert stages.counts == (2, 2) and stages.items == Items("model.", 4, 1)
    held = {name: stages.of(name) for name in names}
    assert held["model.embed_tokens.weight"] == 0 and {held[f"model.{name}"] for name in MTP} == {1}
    assert (held["model.norm.weight"], held["lm_head.weight"]) == (1, 1)
    assert [held[f"model.layers.{i}.input_layernorm.weight"] for i in range(4)] == [0, 0, 1, 1]


def test_layers_of_multi_token_prediction_are_no_decoder_layers() -> None:
    names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(3)] + ["model.layers.2.eh_proj.weight"]
    assert items_of(names, {}) == Items("model.", 2, 1)
    assert items_of(names[:3], {"num_hidden_layers": 2}) == Items("model.", 2, 1)
    assert stages_of(items_of(names, {}), 2).of("model.layers.2.eh_proj.weight") == 1


def test_a_wish_and_the_source_s_own_split_go_first() -> None:
    items = Items("model.", 4, 0)
    assert stages_of(items, 2, (3, 1)).counts == (3, 1)
    assert stages_of(items, 2, (), (1, 3)).counts == (1, 3)
    assert stages_of(items, 2, (), (1, 2)).counts == (2, 2)  # of another model
    for pp, wish in ((2, (3, 2)), (2, (4,)), (8, ())):
        with pytest.raises(UsageError) as caught:
            stages_of(items, pp, wish)
        assert caught.value.code == "E1250"


def test_names_are_ordered_as_the_model_registers_them() -> None:
    layer = "model.layers.1."
    order = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight",
        f"{layer}self_attn.q_proj.weight",
        f"{layer}self_attn.o_proj.weight",
        f"{layer}mlp.gate.weight",
        f"{layer}mlp.experts.2.up_gate_proj.weight",
        f"{layer}mlp.experts.10.up_gate_proj.weight",
        f"{layer}mlp.shared_experts.down_proj.weight",
        f"{layer}mlp.moe_statics.e_score_correction_bias",
        f"{layer}input_layernorm.weight",
        "model.norm.weight",
        *(f"model.{name}" for name in MTP),
        "lm_head.weight",
    ]
    assert registration_order(sorted(order)) == order
    assert registration_order(["b", "a"], ("b", "a", "c")) == ["b", "a"]
    spread = ["x.experts.0.w", "y", "x.experts.2.w", "x.experts.1.w"]  # what other ranks hold stands behind
    assert registration_order(spread, spread) == ["x.experts.0.w", "x.experts.1.w", "x.experts.2.w", "y"]


def test_static_names_count_by_class() -> None:
    names = [
        "e.embed_tokens.weight",
        "l.q_proj.weight",
        "l.q_proj.bias",
        "l.o_proj.weight",
        "l.input_layernorm.weight",
        "m.layers.3.mlp.gate.weight",
        "m.layers.3.mlp.moe_statics.e_score_correction_bias",
        "x.norm.weight",
        "x.norm.bias",
        "lm_head.weight",
    ]
    assert list(static_names(names, {}).values()) == [
        "embedding_0.w_0",
        "linear_0.w_0",
        "linear_0.b_0",
        "linear_1.w_0",
        "create_parameter_0.w_0",
        "moe_gate_0",
        "mm_layer_3_corr_bias_0",
        "layer_norm_0.w_0",
        "layer_norm_0.b_0",
        "lm_head_0.w_0",
    ]
    assert static_names(names, {"lm_head.weight": names[0]})["lm_head.weight"] == "embedding_0.w_0"
    assert static_names(["lm_head.weight"], {}, pipeline=True) == {"lm_head.weight": "lm_head_pipe_0.w_0"}
