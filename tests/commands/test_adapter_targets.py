"""Adapter tensors against bases by names and shapes alone: roots, orientations, stacked experts, all faults."""

from __future__ import annotations

import pytest

from ckpt_tool.adapters.targets import ROOTS, AdapterPart, Bias, Low, ReplacedTensor, Tokens, match, part_of
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.tensor import StoredArray, TensorKey, simple_tensor
from ckpt_tool.formats.adapters.settings import settings_of

P = "base_model.model."


def tensors(**shapes):
    return [simple_tensor(TensorKey(name), StoredArray("f", 0, DTYPES["F32"], shape)) for name, shape in shapes.items()]


def matched(adapter, base, config=None, **settings):
    made = settings_of({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings}, "adapter_config.json")
    return match(tensors(**adapter), {t.key.name: t for t in tensors(**base)}, made, config or {})


def pair(module, inner, outer, rank=2, prefix=P):
    return {f"{prefix}{module}.lora_A.weight": (rank, inner), f"{prefix}{module}.lora_B.weight": (outer, rank)}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (f"{P}model.q.lora_A.weight", AdapterPart("model.q", "lora_A")),
        (f"{P}model.q.lora_A.default.weight", AdapterPart("model.q", "lora_A")),
        ("model.q.lora_B.weight", AdapterPart("model.q", "lora_B")),
        (
            f"{P}_orig_mod.model.layers.0._fsdp_wrapped_module.q.lora_A.weight",
            AdapterPart("model.layers.0.q", "lora_A"),
        ),
        (f"{P}q.lora_B.bias", AdapterPart("q", "lora_B.bias")),
        (f"{P}experts.base_layer.base_layer.lora_B.weight", AdapterPart("experts", "lora_B", 2)),
        (f"{P}e.lora_embedding_A", AdapterPart("e", "lora_embedding_A")),
        (f"{P}e.lora_embedding_B.default", AdapterPart("e", "lora_embedding_B")),
        (f"{P}q.lora_magnitude_vector", AdapterPart("q", "lora_magnitude_vector")),
        (f"{P}q.lora_magnitude_vector.default.weight", AdapterPart("q", "lora_magnitude_vector")),
        (f"{P}e.token_adapter.trainable_tokens_delta", AdapterPart("e", "trainable tokens")),
        (f"{P}lm_head.weight", AdapterPart("lm_head.weight", "whole")),
        (f"{P}lm_head.modules_to_save.default.weight", AdapterPart("lm_head.weight", "whole")),
        (f"{P}q.base_layer.bias", AdapterPart("q.bias", "whole")),
        (f"{P}q.lora_A.bias", None),
        (f"{P}q.lora_diag.weight", None),
        (f"{P}q.lora_A.a.b.weight", None),
    ],
)
def test_names(name, part):
    assert part_of(name) == part


@pytest.mark.parametrize("root", ROOTS)
def test_roots(root):
    old = root.old or ""
    new = root.new or ""
    base = {f"{new}layers.{i}.q.weight": (6, 4) for i in range(2)}
    adapter = {key: shape for i in range(2) for key, shape in pair(f"{old}layers.{i}.q", 4, 6).items()}
    found = matched(adapter, base)
    assert not found.faults and set(found.changes) == set(base)
    assert bool(found.notes) == (old != new and bool(old or new))


def test_patterns_are_held_against_the_adapters_own_names():
    base = {"model.layers.0.q.weight": (6, 4), "model.layers.0.x.w": (3, 4, 6)}
    adapter = {
        **pair("layers.0.q", 4, 6, rank=3),
        f"{P}layers.0.x.lora_A.weight": (15, 4),
        f"{P}layers.0.x.lora_B.weight": (6, 15),
    }
    found = matched(
        adapter, base, rank_pattern={"^layers.0.q": 3, "^layers.0.x.w": 5}, alpha_pattern={"^layers.0.q": 12}
    )
    assert not found.faults, found.faults
    assert found.changes["model.layers.0.q.weight"][0].scaling == 4.0


def test_orientation_of_square_weights_follows_their_namesakes():
    base = {"a.c_proj.weight": (4, 4), "b.c_proj.weight": (8, 4), "a.c_attn.weight": (4, 4)}
    adapter = {**pair("a.c_proj", 4, 4), **pair("b.c_proj", 8, 4), **pair("a.c_attn", 4, 4)}
    found = matched(adapter, base)
    assert [change.turned for name in base for change in found.changes[name]] == [True, True, True]
    alone = {"a.c_attn.weight": (4, 4)}
    for said in (True, False):
        ((change,),) = matched(pair("a.c_attn", 4, 4), alone, fan_in_fan_out=said).changes.values()
        assert change.turned is said


def test_convolutions_and_embeddings():
    base = {"conv.weight": (6, 4, 3, 3), "e.weight": (50, 8)}
    adapter = {
        f"{P}conv.lora_A.weight": (2, 4, 3, 3),
        f"{P}conv.lora_B.weight": (6, 2, 1, 1),
        f"{P}e.lora_embedding_A": (2, 50),
        f"{P}e.lora_embedding_B": (8, 2),
    }
    found = matched(adapter, base)
    assert not found.faults and [c[0].turned for c in found.changes.values()] == [False, True]


def test_stacked_experts_of_gpt_oss():
    """down_proj is square, gate_up_proj tells which way the module's experts lie."""
    base = {"m.experts.gate_up_proj": (3, 8, 16), "m.experts.down_proj": (3, 8, 8), "m.experts.down_proj_bias": (3, 8)}
    inner = f"{P}m.experts.base_layer"
    outer = f"{P}m.experts"
    adapter = {
        f"{inner}.lora_A.weight": (6, 8),
        f"{inner}.lora_B.weight": (16, 6),
        f"{outer}.lora_A.weight": (6, 8),
        f"{outer}.lora_B.weight": (8, 6),
    }
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    found = matched(adapter, base, target_parameters=targets)
    assert not found.faults, found.faults
    assert {name: [(c.turned, c.experts, c.rank) for c in changes] for name, changes in found.changes.items()} == {
        "m.experts.gate_up_proj": [(True, 3, 2)],
        "m.experts.down_proj": [(True, 3, 2)],
    }
    alone = {key: shape for key, shape in adapter.items() if "base_layer" not in key}
    for kind, turned in (("gpt_oss", True), ("qwen3_moe", False)):
        (changes,) = matched(alone, base, {"model_type": kind}, target_parameters=targets[1:]).changes.values()
        assert changes[0].turned is turned


def test_kinds_of_changes():
    base = {"e.weight": (9, 4), "q.weight": (6, 4), "q.bias": (6,), "norm.weight": (4,)}
    adapter = {
        **pair("q", 4, 6),
        f"{P}q.lora_B.bias": (6,),
        f"{P}q.base_layer.bias": (6,),
        f"{P}norm.weight": (4,),
        f"{P}e.token_adapter.trainable_tokens_delta": (2, 4),
    }
    found = matched(adapter, base, trainable_token_indices=[8, 1])
    assert not found.faults, found.faults
    kinds = {name: [type(change) for change in changes] for name, changes in found.changes.items()}
    assert kinds == {
        "e.weight": [Tokens],
        "q.weight": [Low],
        "q.bias": [ReplacedTensor, Bias],
        "norm.weight": [ReplacedTensor],
    }
    assert found.changes["q.bias"][1].scaling == 2.0


@pytest.mark.parametrize(
    ("adapter", "settings", "part"),
    [
        ({f"{P}q.lora_A.weight": (2, 4)}, {}, "the other half"),
        ({f"{P}q.lora_A.weight": (8,), f"{P}q.lora_B.weight": (6, 2)}, {}, "no pair"),
        ({f"{P}q.lora_A.weight": (), f"{P}q.lora_B.weight": ()}, {}, "no pair"),
        (pair("q", 4, 6, rank=3), {}, "rank 3, and the config says 2"),
        (pair("q", 5, 6), {}, "don't fit q.weight of shape [6, 4]"),
        (pair("q", 4, 6), {"use_dora": True}, "there is no lora_magnitude_vector"),
        ({**pair("q", 4, 6), f"{P}q.lora_magnitude_vector": (5,)}, {"use_dora": True}, "5 magnitudes for 6 outputs"),
        ({**pair("q", 4, 6), f"{P}q.lora_B.bias": (6,)}, {}, "the base has no q.bias"),
        ({**pair("q", 4, 6), f"{P}q.lora_A.other.weight": (2, 4)}, {}, "appears twice"),
        (
            {f"{P}e.token_adapter.trainable_tokens_delta": (2, 4)},
            {"trainable_token_indices": [1, 9]},
            "does not fit 2 rows",
        ),
        ({f"{P}e.weight": (10, 4)}, {}, "its shape [10, 4] is not the base's [9, 4]"),
        ({f"{P}q.lora_magnitude_vector": (6,)}, {"use_dora": True}, "without its lora_A and lora_B"),
        (
            {f"{P}x.base_layer.lora_A.weight": (6, 8), f"{P}x.base_layer.lora_B.weight": (8, 6)},
            {},
            "levels of wrappers",
        ),
        ({f"{P}x.lora_A.weight": (6, 9), f"{P}x.lora_B.weight": (8, 6)}, {}, "don't fit x.w"),
    ],
)
def test_faults(adapter, settings, part):
    found = matched(adapter, {"e.weight": (9, 4), "q.weight": (6, 4), "x.w": (3, 8, 8)}, **settings)
    assert any(part in fault for fault in found.faults), found.faults


def test_the_first_registered_parameter_is_the_innermost():
    base = {"m.down_proj": (3, 8, 8), "m.gate_up_proj": (3, 8, 8)}
    adapter = {
        f"{P}m.base_layer.lora_A.weight": (6, 8),
        f"{P}m.base_layer.lora_B.weight": (8, 6),
        f"{P}m.lora_A.weight": (6, 8),
        f"{P}m.lora_B.weight": (8, 6),
    }
    found = matched(adapter, base)
    assert not found.faults, found.faults
    assert "base_layer" in found.changes["m.gate_up_proj"][0].a.key.name
    assert "base_layer" not in found.changes["m.down_proj"][0].a.key.name
    unknown = {name.replace("down", "x").replace("gate_up", "y"): shape for name, shape in base.items()}
    assert "more than one way" in matched(adapter, unknown).faults[0]
