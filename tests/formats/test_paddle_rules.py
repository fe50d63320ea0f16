"""Paddle's tensor parallel rules against NumPy slicing, written down from what each class of PaddleNLP/PaddleFormers
does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.errors import InputError, UsageError
from ckpt_tool.systems.paddle import rules
from ckpt_tool.systems.paddle.rules import PaddleCut, side_by_side

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "vocab_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
}
MOE = {**LLAMA, "model_type": "qwen2_moe"}


def column(w, tp):
    return np.split(w, tp, axis=-1)


def row(w, tp):
    return np.split(w, tp, axis=0)


def whole(w, tp):
    return [w] * tp


def gated(w, tp):
    gate, up = np.split(w, 2, axis=-1)
    return [np.concatenate(pair, axis=-1) for pair in zip(column(gate, tp), column(up, tp), strict=True)]


def grouped_three(w, tp):  # 8 query heads, 4 kv heads: Q is twice as wide as K and V
    unit = w.shape[-1] // 16
    q, k, v = np.split(w, [8 * unit, 12 * unit], axis=-1)
    return [np.concatenate(t, axis=-1) for t in zip(column(q, tp), column(k, tp), column(v, tp), strict=True)]


L = "model.layers.3."
CASES = [
    (L + "self_attn.q_proj.weight", (16, 32), LLAMA, column),
    (L + "self_attn.q_proj.bias", (32,), LLAMA, column),
    (L + "self_attn.k_proj.weight", (16, 16), LLAMA, column),
    (L + "self_attn.v_proj.bias", (16,), LLAMA, column),
    (L + "self_attn.k_proj.weight", (16, 16), {**LLAMA, "num_key_value_heads": 1}, whole),
    (L + "self_attn.qkv_proj.weight", (16, 64), LLAMA, column),
    (L + "self_attn.qkv_proj.weight", (16, 64), {**LLAMA, "model_type": "ernie"}, grouped_three),
    (L + "self_attn.qkv_proj.bias", (64,), {**LLAMA, "model_type": "ernie"}, grouped_three),
    (L + "self_attn.qkv_proj.weight", (16, 96), {**LLAMA, "model_type": "ernie", "num_key_value_heads": 8}, column),
    (L + "self_attn.o_proj.weight", (32, 16), LLAMA, row),
    (L + "self_attn.o_proj.bias", (16,), LLAMA, whole),
    (L + "self_attn.q_norm.weight", (8,), LLAMA, whole),
    (L + "self_attn.sinks", (8,), LLAMA, row),
    (L + "self_attn.q_a_proj.weight", (16, 8), LLAMA, whole),
    (L + "self_attn.q_b_proj.weight", (8, 32), LLAMA, column),
    (L + "self_attn.kv_b_proj.weight", (8, 32), LLAMA, column),
    (L + "self_attn.kv_b_proj.weight", (8, 32), {**LLAMA, "num_key_value_heads": 3}, whole),
    (L + "mlp.gate_proj.weight", (16, 24), LLAMA, column),
    (L + "mlp.up_gate_proj.weight", (16, 48), LLAMA, gated),
    (L + "mlp.up_gate_proj.bias", (48,), LLAMA, gated),
    (L + "mlp.gate_up_fused_proj.weight", (16, 48), LLAMA, gated),
    (L + "mlp.gate_up_fused_proj.lora_B", (4, 48), LLAMA, gated),
    (L + "mlp.gate_up_fused_proj.lora_A", (16, 4), LLAMA, whole),
    (L + "mlp.down_proj.weight", (24, 16), LLAMA, row),
    (L + "mlp.down_proj.lora_A", (24, 4), LLAMA, row),
    (L + "mlp.down_proj.lora_B", (4, 16), LLAMA, whole),
    (L + "mlp.down_proj.bias", (16,), LLAMA, whole),
    (L + "mlp.gate.weight", (16, 8), MOE, whole),
    (L + "mlp.shared_expert_gate.weight", (16, 1), MOE, whole),
    (L + "mlp.experts.11.gate_proj.weight", (16, 24), MOE, column),
    (L + "mlp.experts.11.up_gate_proj.weight", (16, 48), MOE, gated),
    (L + "mlp.experts.11.down_proj.weight", (24, 16), MOE, row),
    (L + "mlp.experts.11.down_proj.weight", (24, 16), {**MOE, "model_type": "deepseek_v3"}, whole),
    (L + "mlp.experts.1.up_proj.weight", (16, 24), {**MOE, "model_type": "ernie4_5_moe", "moe_group": "mp"}, whole),
    (L + "mlp.shared_experts.down_proj.weight", (24, 16), {**MOE, "model_type": "deepseek_v3"}, row),
    ("model.layers.9.block_sparse_moe.experts.0.w1.weight", (16, 24), {**LLAMA, "model_type": "mixtral"}, column),
    ("model.layers.9.block_sparse_moe.experts.0.w2.weight", (24, 16), {**LLAMA, "model_type": "mixtral"}, row),
    ("model.h.0.mlp.w2.weight", (16, 24), {**LLAMA, "model_type": "qwen"}, column),
    ("model.h.0.attn.c_attn.weight", (16, 64), {**LLAMA, "model_type": "qwen"}, grouped_three),
    ("model.h.0.mlp.c_proj.weight", (24, 16), {**LLAMA, "model_type": "qwen"}, row),
    ("encoder.layers.0.mlp.dense_h_to_4h.weight", (16, 48), {**LLAMA, "model_type": "chatglm_v2"}, gated),
    ("h.0.mlp.dense_h_to_4h.bias", (48,), {**LLAMA, "model_type": "bloom"}, column),
    ("llama.embed_tokens.weight", (48, 16), LLAMA, row),
    ("embed_tokens.weight", (50, 16), {**LLAMA, "vocab_size": 50}, None),
    ("lm_head.weight", (48, 16), LLAMA, row),
    ("lm_head.weight", (16, 48), LLAMA, column),
    ("lm_head.bias", (48,), LLAMA, column),
    ("lm_head.weight", (16, 16), {**LLAMA, "vocab_size": 16}, row),
    ("lm_head.weight", (16, 16), {**LLAMA, "vocab_size": 16, "paddlenlp_version": "3.0"}, column),
    ("model.norm.weight", (16,), LLAMA, whole),
    ("model.mtp_linear_proj.0.weight", (32, 16), LLAMA, whole),
    ("model.layers.3.mlp.moe_statics.e_score_correction_bias", (1, 8), LLAMA, whole),
]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("name", "shape", "config", "oracle"), CASES)
def test_boxes_are_what_the_class_cuts(name, shape, config, oracle, tp):
    if oracle is None:
        oracle = whole if shape[0] % tp else row
    w = np.arange(np.prod(shape)).reshape(shape)
    want = oracle(w, tp)
    cut = rules.cut_of(name, shape, config, tp)
    for rank in range(tp):
        local, boxes = rules.local_boxes(shape, cut, tp, rank)
        have = np.full(local, -1)
        for there, here in boxes:
            have[_slices(here)] = w[_slices(there)]
        np.testing.assert_array_equal(have, want[rank])
        stored = rules.stored_cut(name, local, config, tp)
        assert stored == cut
        assert rules.joined_shape(local, stored, tp) == shape


def _slices(box):
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def test_experts_are_whole_under_expert_parallelism():
    name = L + "mlp.experts.7.up_gate_proj.weight"
    assert rules.cut_of(name, (16, 48), MOE, 2, ep=2) == PaddleCut(None)
    assert rules.cut_of(L + "mlp.shared_expert.up_proj.weight", (16, 48), MOE, 2, ep=2) == PaddleCut(1)


def test_one_rank_needs_no_rule():
    assert rules.cut_of("anything.at.all", (3, 5), {}, 1) == PaddleCut(None)


def test_unknown_names_are_named():
    with pytest.raises(UsageError, match="no rule") as e:
        rules.cut_of("model.foo.weight", (4, 4), LLAMA, 2)
    assert e.value.code == "E1265" and e.value.key == "model.foo.weight"
    with pytest.raises(InputError, match="no rule"):
        rules.stored_cut("model.foo.weight", (4, 4), LLAMA, 2)


def test_without_a_config_kv_heads_are_not_guessed():
    with pytest.raises(InputError, match="key and value heads") as e:
        rules.stored_cut(L + "self_attn.k_proj.weight", (16, 8), {}, 2)
    assert e.value.hint and "--config" in e.value.hint
    assert rules.stored_cut(L + "self_attn.q_proj.weight", (16, 8), {}, 2) == PaddleCut(1)


def test_a_stored_vocabulary_that_tp_divides_is_a_part_and_another_is_asked_for():
    assert rules.stored_cut("model.embed_tokens.weight", (24, 16), {}, 2) == PaddleCut(0)
    with pytest.raises(InputError, match="vocabulary"):
        rules.stored_cut("model.embed_tokens.weight", (25, 16), {}, 2)
    assert rules.stored_cut("model.embed_tokens.weight", (25, 16), {"vocab_size": 25}, 2) == PaddleCut(None)
    assert rules.stored_cut("model.embed_tokens.weight", (25, 16), {"vocab_size": 50}, 2) == PaddleCut(0)


def test_an_uneven_cut_names_degrees_that_are_even():
    with pytest.raises(UsageError) as e:
        rules.cut_of(L + "mlp.up_gate_proj.weight", (16, 20), LLAMA, 4)
    assert e.value.code == "E1266" and "5" in (e.value.hint or "")


@given(
    st.sampled_from(
        [
            PaddleCut(0),
            PaddleCut(1),
            PaddleCut(None),
            PaddleCut(1, (1, 1)),
            PaddleCut(1, (4, 1, 1)),
            PaddleCut(0, (2, 1, 1)),
        ]
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_ranks_tile_the_whole(cut, tp, a, b):
    unit = tp * (sum(cut.parts) or 1)
    shape = (a * unit, b * unit)
    seen = np.zeros(shape, int)
    for rank in range(tp):
        local, boxes = rules.local_boxes(shape, cut, tp, rank)
        inner = np.zeros(local, int)
        for there, here in boxes:
            seen[_slices(there)] += 1
            inner[_slices(here)] += 1
        assert (inner == 1).all()
    assert (seen == (tp if cut.dim is None else 1)).all()


def test_hugging_face_transposes():
    qwen = {"model_type": "qwen3_moe"}
    assert rules.transposed_in_hf("model.layers.0.mlp.gate.weight", 2, qwen)
    assert rules.transposed_in_hf("model.layers.0.mlp.experts.3.down_proj.weight", 2, qwen)
    assert rules.transposed_in_hf("model.layers.0.mlp.gate.weight", 2, LLAMA) is False
    assert rules.transposed_in_hf("model.embed_tokens.weight", 2, qwen) is False
    for kind in ("gemma3_text", "gemma3"):
        assert rules.transposed_in_hf("lm_head.weight", 2, {"model_type": kind})
    assert rules.transposed_in_hf("lm_head.weight", 2, qwen) is False
    assert rules.transposed_in_hf("model.layers.0.self_attn.qkv_proj.weight", 2, qwen) is False
    assert rules.transposed_in_hf("model.layers.0.self_attn.q_proj.bias", 1, qwen) is False
    assert rules.transposed_in_hf("model.mtp_linear_proj.0.weight", 2, {"model_type": "ernie4_5_moe"})
    assert rules.transposed_in_hf("x.q_proj.lora_A.weight", 2, qwen) is False
    assert rules.transposed_in_hf("x.weight", 2, {"model_type": "nobody"}) is None


def test_fused_names():
    assert rules.is_fused("model.layers.0.mlp.experts.5.up_gate_proj.weight")
    assert not rules.is_fused("model.layers.0.self_attn.qkv_proj.weight")


REAL = sorted((Path(__file__).parents[2] / "fixtures" / "paddle-rules").glob("*.json"))


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_cuts_are_those_of_the_real_classes(path):
    """What `_get_tensor_parallel_mappings` of every class says. ERNIE-4.5-MoE builds its routed experts' rules with a
    key that no tensor has, and never cuts them (`disable_ffn_model_parallel`)."""
    cases = json.loads(path.read_text())
    assert len(cases) >= 20
    for case, real in cases.items():
        config = real["config"] | ({"paddlenlp_version": "3.0.0b4"} if "nlp" in path.stem else {})
        for name, (is_column, parts) in real["cuts"].items():
            if config["model_type"].startswith("ernie4_5_moe") and rules.is_expert(name):
                continue
            shape = _whole_shape(name, config, is_column=is_column)
            cut = rules.cut_of(name, shape, config, 2)
            assert (cut.dim, len(cut.parts) or 1) == (len(shape) - 1 if is_column else 0, parts), (case, name)


def _whole_shape(name, config, *, is_column):
    vocab = config["vocab_size"]
    hidden = config.get("hidden_size", 64)
    if name.endswith(("bias", "sinks")):
        return (96,)
    if any(word in name for word in ("embed", "wte", "shared.", "lm_head", "shared_head")):
        return (hidden, vocab) if is_column else (vocab, hidden)
    return (96, 192)


def test_heads_that_were_seen_tell_without_a_config() -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    shape = (32, 16)
    parted, kept = ({rules.HEADS: {"tensor_ranks": 4, "parted": is_parted}} for is_parted in (True, False))
    assert [rules.cut_of(name, shape, parted, tp).dim for tp in (2, 4)] == [1, 1]
    assert [rules.cut_of(name, shape, kept, tp).dim for tp in (4, 8)] == [None, None]
    for facts, tp in ((parted, 8), (kept, 2), ({rules.HEADS: {"tensor_ranks": "4"}}, 2), ({rules.HEADS: 3}, 2)):
        with pytest.raises(UsageError, match="not known"):
            rules.cut_of(name, shape, facts, tp)


def test_matrices_side_by_side() -> None:
    config = {"model_type": "phi3", "num_attention_heads": 6, "num_key_value_heads": 2}
    assert side_by_side("model.layers.0.self_attn.qkv_proj.weight", config) == (6, 2, 2)
    assert side_by_side("model.layers.0.self_attn.qkv_proj.weight", {**config, "model_type": "qwen3"}) == ()
    assert (
        side_by_side("model.layers.0.self_attn.qkv_proj.weight", {"model_type": "phi3"}) == ()
    )  # heads are not guessed
    assert side_by_side("model.layers.0.mlp.gate_up_proj.weight", {}) == (1, 1)
    assert side_by_side("model.layers.0.self_attn.o_proj.weight", config) == side_by_side("0.1", config) == ()
