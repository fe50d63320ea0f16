"""The hub table of every family names what the real model has: names and shapes of transformers' classes, on no device."""

from __future__ import annotations

import os
from typing import Any

import pytest
from family_models import CLASSES, config_of, hub_shapes

from ckpt_tool.families.registry import FAMILIES, by_name
from ckpt_tool.families.rewrite import sizes_of
from ckpt_tool.families.table import instances


def real_shapes(family: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What the class saves: transformers 5 fuses experts in memory and undoes it on saving."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    from transformers.core_model_loading import revert_weight_conversion

    kind, architecture = CLASSES[family]
    told = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
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
        told |= rule.shapes({"n": 1, **sizes}, config)[0]
    assert {name: told[name] for name in shapes} == shapes


@pytest.mark.parametrize("family", ["llama", "qwen3", "ernie4_5", "ernie4_5_moe"])
def test_biases_are_known_where_a_config_asks_for_them(family: str) -> None:
    ask = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}
    shapes = real_shapes(family, config_of(family, **ask.get(family, {"use_bias": True})))
    assert any(name.endswith("bias") for name in shapes)
    _, unknown = instances(by_name(family).table("hf").left, shapes)
    assert not unknown
