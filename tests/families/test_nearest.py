"""A model type that no family has: the error names the nearest family, what differs, and how to use it anyway."""

from __future__ import annotations

import pytest
from family_models import NAMES, Shapes, config_of, hub_shapes

from ckpt_tool.errors import InputError
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.families.nearest import nearest
from ckpt_tool.families.registry import by_name, find
from ckpt_tool.families.rewrite import mapping

SCALE = "model.layers.{}.self_attn.scale"
OWN = "model.layers.{}.mlp.mixer.weight"


def plus(**change: tuple[int, ...]) -> tuple[dict[str, object], Shapes]:
    """Qwen3 under another name."""
    config = {**config_of("qwen3"), "model_type": "qwen3_plus", "architectures": ["Qwen3PlusForCausalLM"]}
    return config, hub_shapes("qwen3", config_of("qwen3"))


def refused(config: dict[str, object] | None, names: Shapes, code: str = "E1372") -> InputError:
    with pytest.raises(InputError) as error:
        find(config, names)
    assert error.value.code == code
    return error.value


def test_the_same_tensors_under_another_type() -> None:
    config, shapes = plus()
    error = refused(config, shapes)
    assert error.message == (
        "config.json says model_type 'qwen3_plus', for which there is no family; "
        "the nearest, qwen3, knows all 14 kinds of tensors"
    )
    assert not error.faults
    assert (error.hint or "").startswith("if it computes like qwen3, --family qwen3 converts it; `ckpt help families`")
    found = find(config, shapes, family="qwen3")
    assert found.dialect == "hf"
    known = mapping(found.family, "hf", "megatron", shapes, config)
    assert known == mapping(found.family, "hf", "megatron", shapes, config_of("qwen3"))


def test_what_differs_is_listed() -> None:
    config, shapes = plus()
    for i in range(2):
        shapes |= {SCALE.format(i): (6,), OWN.format(i): (18, 18), f"model.layers.{i}.self_attn.q_norm.weight": (24,)}
        del shapes[f"model.layers.{i}.self_attn.k_norm.weight"]
    error = refused(config, shapes)
    assert "the nearest, qwen3, knows 12 of 15 kinds of tensors" in error.message
    assert error.faults == (
        f"2 kinds of tensors in no rule of qwen3: {SCALE.format(0)} [6]; {OWN.format(0)} [18, 18]",
        "1 name of qwen3 without a tensor (optional ones count): model.layers.{i}.self_attn.k_norm.weight",
        "1 shape unlike those of qwen3: model.layers.0.self_attn.q_norm.weight [24], where `d` is [4]",
    )
    assert "--family" not in (error.hint or "")  # its rules would be refused for the shapes


def test_names_beside_the_rules_want_lenient() -> None:
    config, shapes = plus()
    error = refused(config, {**shapes, SCALE.format(0): (6,)})
    assert "--family qwen3 --lenient converts what its rules know and keeps the rest" in (error.hint or "")


def test_a_model_that_is_close_to_nothing() -> None:
    shapes = {f"net.blocks.{i}.{part}.kernel": (18, 18) for i in range(3) for part in ("mix", "gate", "out")}
    error = refused({"model_type": "netnet", "hidden_size": 18}, {**shapes, "lm_head.weight": (22, 18)})
    assert "knows only 1 of 4 kinds of tensors" in error.message
    assert (
        "3 kinds of tensors in no rule of" in error.faults[0] and "net.blocks.0.mix.kernel [18, 18]" in error.faults[0]
    )
    assert "--family" not in (error.hint or "") and "ckpt help families" in (error.hint or "")
    nothing = refused({"model_type": "netnet"}, shapes)
    assert nothing.message == "config.json says model_type 'netnet', for which there is no family"
    assert not nothing.faults and "--dialect keep" in (nothing.hint or "")


def test_a_family_that_is_not_the_checkpoint_s() -> None:
    """The config names a family of ours, and no name is its own."""
    config, shapes = plus()
    del shapes["lm_head.weight"]
    error = refused({**config, "model_type": "gpt2", "architectures": []}, shapes, "E1373")
    assert "the nearest, qwen3, knows all 13 kinds" in error.message and "--family qwen3" in (error.hint or "")


def test_names_of_another_system_are_held_against_its_rules() -> None:
    config, shapes = plus()
    known = find(config_of("qwen3"), shapes).family
    ours = {made.name: made.shape for made in mapping(known, "hf", "megatron", shapes, config_of("qwen3")).made}
    with pytest.raises(InputError, match="the nearest, qwen3, knows all") as error:
        find(config, ours, stated="megatron")
    assert error.value.code == "E1372"
    near = nearest(FAMILIES, ours, config, "qwen3_plus", "megatron")
    assert near is not None and near.dialect == "megatron" and not near.lacking


@pytest.mark.share(9)
@pytest.mark.parametrize("name", NAMES)
def test_a_family_s_own_model_is_known_whole(name: str) -> None:
    """By it alone, and so by the nearest of all: several have the same tensors."""
    config = {**config_of(name), "model_type": "unknown", "architectures": []}
    shapes = hub_shapes(name, config_of(name))
    for families in ([by_name(name)], FAMILIES):
        near = nearest(families, shapes, config, name)
        assert near is not None and near.known == near.kinds and not near.strange and not near.unfit
