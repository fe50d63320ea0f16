"""The hub table of every family names what the real model has: names and shapes of transformers' classes, on no
device."""

from __future__ import annotations

import numpy as np
import pytest
from family_models import AHEAD, EXPERTS, NAMES, class_arguments, config_of, hub_shapes

from ckpt_tool.algebra.piece import apply
from ckpt_tool.families.registry import by_name, find
from ckpt_tool.families.rewrite import mapping, sizes_of
from ckpt_tool.families.table import instances


@pytest.mark.parametrize("family", NAMES)
def test_the_hub_table_names_them_with_their_shapes(family: str) -> None:
    config = config_of(family)
    shapes = hub_shapes(family, config, mtp=family in AHEAD)
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
    shapes = hub_shapes(family, config_of(family, **ask.get(family, {"use_bias": True})))
    assert any(name.endswith("bias") for name in shapes)
    _, unknown = instances(by_name(family).table("hf").left, shapes)
    assert set(unknown) <= {"lm_head.bias"}  # which every dialect calls so: it stays as it is


@pytest.mark.parametrize("family", [family for family in EXPERTS if "hf-fused" in by_name(family).dialects])
def test_experts_fused_in_memory_equal_what_the_real_library_saves(family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    from transformers.core_model_loading import revert_weight_conversion

    config = config_of(family)
    own = transformers.AutoConfig.for_model(config["model_type"], **class_arguments(config))
    model = getattr(transformers, config["architectures"][0])(own)
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
