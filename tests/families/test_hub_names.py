"""The hub table of every family names what the real model has: names and shapes of transformers' classes, on no device."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from family_models import CLASSES, MOE, class_arguments, config_of, hub_shapes

from ckpt_tool.algebra.piece import apply
from ckpt_tool.families.registry import FAMILIES, by_name, find
from ckpt_tool.families.rewrite import mapping, sizes_of
from ckpt_tool.families.table import instances


def real_shapes(family: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What the class saves: transformers 5 fuses experts in memory and undoes it on saving."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    from transformers.core_model_loading import revert_weight_conversion

    kind, architecture = CLASSES[family]
    told = class_arguments(config)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(transformers.AutoConfig.for_model(kind, **told))
    return {name: tuple(t.shape) for name, t in revert_weight_conversion(model, model.state_dict()).items()}


def test_every_family_has_a_model_here() -> None:
    assert {family.name for family in FAMILIES} == set(CLASSES)


@pytest.mark.parametrize("family", CLASSES)
def test_our_models_are_the_real_ones(family: str) -> None:
    config = config_of(family)
    assert real_shapes(family, config) == hub_shapes(family, config)


@pytest.mark.parametrize("family", CLASSES)
def test_the_hub_table_names_them_with_their_shapes(family: str) -> None:
    config = config_of(family)
    shapes = hub_shapes(family, config, mtp=family in ("deepseek_v3", "glm4_moe", "ernie4_5_moe"))
    table = by_name(family).table("hf")
    named, unknown = instances(table.left, shapes)
    assert not unknown
    sizes, _ = sizes_of(by_name(family), table, named, shapes, config)
    told: dict[str, tuple[int, ...]] = {}
    for rule in table.rules:
        told |= rule.shapes({**dict.fromkeys(rule.axes, 1), **sizes}, config)[0]
    assert {name: told[name] for name in shapes} == shapes


@pytest.mark.parametrize("family", ["llama", "qwen3", "ernie4_5", "ernie4_5_moe"])
def test_biases_are_known_where_a_config_asks_for_them(family: str) -> None:
    ask = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}
    shapes = real_shapes(family, config_of(family, **ask.get(family, {"use_bias": True})))
    assert any(name.endswith("bias") for name in shapes)
    _, unknown = instances(by_name(family).table("hf").left, shapes)
    assert set(unknown) <= {"lm_head.bias"}  # which every dialect calls so: it stays as it is


@pytest.mark.parametrize("family", [family for family in MOE if "hf-fused" in by_name(family).dialects])
def test_experts_fused_in_memory_equal_what_the_real_library_saves(family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    from transformers.core_model_loading import revert_weight_conversion

    config = config_of(family)
    kind, architecture = CLASSES[family]
    told = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    model = getattr(transformers, architecture)(transformers.AutoConfig.for_model(kind, **told))
    live = {name: torch.arange(tensor.numel()).reshape(tensor.shape) for name, tensor in model.state_dict().items()}
    want = {name: tensor.numpy() for name, tensor in revert_weight_conversion(model, dict(live)).items()}
    arrays = {name: tensor.numpy() for name, tensor in live.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    assert find(config, shapes).dialect == "hf-fused"
    mapped = mapping(by_name(family), "hf-fused", "hf", shapes, config)
    pieces = [piece for made in mapped.made for piece in made.pieces]
    got = apply(pieces, arrays, {made.name: made.shape for made in mapped.made})
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
