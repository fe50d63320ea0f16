"""The hub table of every family names what the real model has: names and shapes of transformers' classes, on no
device."""

from __future__ import annotations

import numpy as np
import pytest
from family_models import AHEAD, NAMES, config_of, hub_shapes, real_class, saved_shapes

from ckpt_tool.algebra.piece import PAD, apply
from ckpt_tool.families.registry import by_name, find
from ckpt_tool.families.rewrite import mapping, sizes_of
from ckpt_tool.families.table import instances


@pytest.mark.parametrize("family", NAMES)
def test_the_hub_table_names_them_with_their_shapes(family: str) -> None:
    config = config_of(family)
    saved = by_name(family).saved
    shapes = hub_shapes(family, config, mtp=family in AHEAD) if saved == "hf" else saved_shapes(config)
    table = by_name(family).table(saved)
    named, unknown = instances(table.left, shapes)
    assert not [name for name in unknown if table.in_tower(name) is None]
    assert all(any(name.startswith(tower.left) for name in unknown) for tower in table.towers)
    facts = by_name(family).facts(config)
    sizes, _ = sizes_of(by_name(family), table, named, shapes, facts)
    counts = dict[str, int]()  # of what nothing but the names counts
    for group in named:
        for numbers in group.values:
            counts |= {
                axis: max(n + 1, counts.get(axis, 0)) for axis, n in zip(group.spots[0].axes, numbers, strict=True)
            }
    told: dict[str, tuple[int, ...]] = {}
    for rule in table.rules:
        told |= rule.shapes({**dict.fromkeys(rule.axes, 1), **counts, **sizes}, facts)[0]
    if by_name(family).own:  # a size for each layer; a shape that no size fits is refused
        told |= {each.name: each.shape for each in mapping(by_name(family), saved, saved, shapes, config).made}
    assert {name: told.get(name) for name in shapes if name not in unknown} == {
        name: shape for name, shape in shapes.items() if name not in unknown
    }


@pytest.mark.parametrize("family", ["llama", "qwen3", "ernie4_5", "ernie4_5_moe"])
def test_biases_are_known_where_a_config_asks_for_them(family: str) -> None:
    ask = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}
    shapes = hub_shapes(family, config_of(family, **ask.get(family, {"use_bias": True})))
    assert any(name.endswith("bias") for name in shapes)
    _, unknown = instances(by_name(family).table("hf").left, shapes)
    assert set(unknown) <= {"lm_head.bias"}  # which every dialect calls so: it stays as it is


@pytest.mark.parametrize("family", NAMES)
def test_the_names_in_memory_come_to_those_that_the_real_library_saves(family: str) -> None:
    """transformers 5 fuses experts and moves towers in memory, as a training job's state dict has them, and undoes it
    on saving: the second oracle of a family's dialects of the hub."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5")
    from transformers.core_model_loading import revert_weight_conversion

    config = config_of(family)
    model = real_class(config)
    live = {name: torch.arange(tensor.numel()).reshape(tensor.shape) for name, tensor in model.state_dict().items()}
    want = {name: tensor.numpy() for name, tensor in revert_weight_conversion(model, dict(live)).items()}
    arrays = {name: tensor.numpy() for name, tensor in live.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    dialect = find(config, shapes).dialect
    saved = by_name(family).saved
    assert (dialect == saved) == (arrays.keys() == want.keys())
    mapped = mapping(by_name(family), dialect, saved, shapes, config)
    pieces = [piece for made in mapped.made for piece in made.pieces]
    got = apply(pieces, arrays, {made.name: made.shape for made in mapped.made})
    kept = {name: array for name, array in arrays.items() if name in want.keys() - got.keys()}
    assert (got | kept).keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal((got | kept)[name], array, err_msg=name)


def test_experts_that_only_pass_on_have_rows_in_memory_and_no_tensors_in_files() -> None:
    """LongCat-Flash: transformers 5.23 builds gate and up for them too, which nothing reads."""
    config = config_of("longcat_flash")
    released = hub_shapes("longcat_flash", config)
    real = {**config, "zero_expert_num": 2}
    saved = hub_shapes("longcat_flash", real)
    released |= {name: shape for name, shape in saved.items() if ".router." in name}
    family = by_name("longcat_flash")
    there = {each.name: each for each in mapping(family, "hf", "hf-fused", released, real).made}
    gate_up = there["model.layers.0.mlp.experts.gate_up_proj"]
    assert gate_up.shape == (6, 10, config["hidden_size"])
    held = sum(piece.numel for piece in gate_up.pieces if piece.src.name != PAD)
    assert held == 4 * 10 * config["hidden_size"]  # the others are zeros
    shapes = {name: each.shape for name, each in there.items()}
    assert {each.name: each.shape for each in mapping(family, "hf-fused", "hf", shapes, real).made} == released
