"""Scales follow a weight that is renamed, and hold back one that is turned, joined or cut."""

from __future__ import annotations

import pytest

from ckpt_tool.core.box import contiguous_strides
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.families.registry import by_name
from ckpt_tool.families.rewrite import mapping

CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 48,
}
OLD = "model.layers.1.self_attn.o_proj"
NEW = "decoder.layers.1.self_attention.linear_proj"


def test_a_renamed_weight_takes_its_scales_along() -> None:
    shapes = {f"{OLD}.weight": (64, 64), f"{OLD}.weight_scale_inv": (2, 2), "model.norm.weight": (64,), "other": (3,)}
    made = {each.name: each for each in mapping(by_name("llama"), "hf", "megatron", shapes, CONFIG).made}
    assert made.keys() == {f"{NEW}.weight", f"{NEW}.weight_scale_inv", "decoder.final_layernorm.weight"}
    (piece,) = made[f"{NEW}.weight_scale_inv"].pieces
    assert piece.src.name == f"{OLD}.weight_scale_inv" and piece.src.strides == piece.dst.strides == contiguous_strides(
        (2, 2)
    )


@pytest.mark.parametrize("scale", ["scale", "qscale_weight"])
def test_scales_of_a_module_stay_beside_it(scale: str) -> None:
    shapes = {f"{OLD}.weight": (64, 64), f"{OLD}.{scale}": (2, 2)}
    made = {each.name for each in mapping(by_name("llama"), "hf", "megatron", shapes, CONFIG).made}
    assert made == {f"{NEW}.weight", f"{NEW}.{scale}"}


@pytest.mark.parametrize(
    ("target", "shapes"),
    [
        ("paddle", {f"{OLD}.weight": (64, 64), f"{OLD}.weight_scale": (64, 1)}),  # turned
        (
            "megatron",
            {
                f"model.layers.0.mlp.{kind}_proj.weight{scale}": (96, 64) if not scale else (3, 2)
                for kind in ("gate", "up")
                for scale in ("", "_scale_inv")
            },
        ),  # joined
        # no weight
        ("megatron", {f"{OLD}.weight_packed": (64, 8), f"{OLD}.weight_scale": (64, 2), f"{OLD}.weight_shape": (2,)}),
    ],
)
def test_what_can_not_follow_is_a_fault(target: str, shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(InconsistentCheckpoint) as found:
        mapping(by_name("llama"), "hf", target, shapes, CONFIG)
    assert found.value.code == "E1377" and "--dequantize" in (found.value.hint or "")
