"""What belongs together, told from headers alone: nothing that a header can say stops it, and only codes are taken for
codes."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.weight_schemes.declared_scheme import quantisation, section, without
from ckpt_tool.weight_schemes.quantised_weights import CONFIG_KEYS, TensorKind, block_of, find, part_of, units

NAMES = [
    f"{stem}{end}"
    for stem in ("m.weight", "m")
    for end in (
        "",
        "_scale_inv",
        "_scale",
        "_packed",
        "_shape",
        "_zero_point",
        "_global_scale",
        "_scale_2",
        "_blocks",
        "_scales",
        "_g_idx",
        ".scale",
        ".qscale_weight",
        ".input_scale",
    )
]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 16, 64, 300]), max_size=4).map(tuple)
KINDS = st.builds(
    TensorKind,
    st.sampled_from(
        [DTYPES[name] for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "I32", "I64", "F4", "F32", "BF16")]
    ),
    SHAPES,
)


@settings(max_examples=400, deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES), KINDS, max_size=8),
    st.sampled_from([(), (128, 128), (1, 32), (7, 5)]),
    st.sampled_from([(), (4,), (4, 8), (3,)]),
)
def test_no_header_stops_it(tensors: dict[str, TensorKind], block: tuple[int, ...], bits: tuple[int, ...]) -> None:
    found = find(tensors, block=block, bits=bits)
    for lead, weight in found.weights.items():
        assert (
            lead in tensors and set(weight.names) <= tensors.keys() and min(weight.block) >= 1 and 1 <= weight.bits <= 8
        )
        assert prod(weight.floats) == prod(weight.shape)
        for name, unit in units(weight, tensors).items():
            assert len(unit.mine) == len(tensors[name].shape) and min((1, *unit.mine)) >= 0
            for size, pieces in zip(tensors[name].shape, unit.mine, strict=True):
                assert pieces <= max(size, 1) and (not pieces or size % pieces == 0)
    assert not set(found.beside) & found.names
    assert all(fault.name in tensors for fault in found.faults)


CONFIGS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["fp8", "compressed-tensors", "gptq"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *CONFIG_KEYS,
                    "quant_method",
                    "weight_block_size",
                    "config_groups",
                    "format",
                    "weights",
                    "num_bits",
                    "g0",
                    "block_structure",
                    "sparsity_config",
                    "transform_config",
                    "text_config",
                    "type",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
)


@settings(max_examples=150, deadline=None)
@given(CONFIGS)
def test_no_config_stops_it(told: object) -> None:
    config = told if isinstance(told, dict) else {"quantization_config": told}
    found = quantisation(config, ["m.weight"])
    assert found is None or (
        isinstance(found.scheme, str) and all(type(n) is int and n > 0 for n in (*found.block, *found.bits))
    )
    assert section(without(config, CONFIG_KEYS)) is None


@pytest.mark.parametrize("scale", [(4, 0), (4, 1), (0, 1), (4, 1000)])
@pytest.mark.parametrize("packed", [(4, 8), (4, 0), (0, 0)])
@pytest.mark.parametrize("dtype", ["I32", "U8"])
def test_packed_codes_of_nothing(scale: tuple[int, int], packed: tuple[int, int], dtype: str) -> None:
    tensors = {
        "w_packed": TensorKind(DTYPES[dtype], packed),
        "w_scale": TensorKind(DTYPES["F32"], scale),
        "w_shape": TensorKind(DTYPES["I64"], (2,)),
    }
    found = find(tensors)
    assert [units(weight, tensors) for weight in found.weights.values()] or found.faults


def test_plain_tensors_are_nothing() -> None:
    plain = {
        "m.weight": TensorKind(DTYPES["BF16"], (4, 4)),
        "m.weight_mask": TensorKind(DTYPES["U8"], (4, 4)),
        "m.ids": TensorKind(DTYPES["I8"], (9,)),
        "color_scale": TensorKind(DTYPES["F32"], ()),
    }
    found = find(plain)
    assert not found.weights and not found.faults and not found.beside


@pytest.mark.parametrize(
    ("shape", "grid", "told", "block"),
    [
        ((7168, 18432), (56, 144), (), (128, 128)),
        (
            (576, 7168),
            (5, 56),
            (128, 128),
            (128, 128),
        ),  # kv_a_proj_with_mqa of DeepSeek V3: the last block is half of one
        ((576, 7168), (5, 56), (), (128, 128)),
        ((64, 96), (2, 3), (32, 32), (32, 32)),
        ((64, 96), (2, 3), (), (32, 32)),
        ((64, 96), (64, 3), (), (1, 32)),
        ((64, 96), (64,), (), (1, 96)),
        ((64, 96), (1,), (), (64, 96)),
        ((8, 64, 96), (8,), (), (64, 96)),
        ((8, 64, 96), (8, 1, 1), (), (64, 96)),
        ((8, 64, 96), (8, 64, 1), (), (1, 96)),
        ((8, 256, 384), (8, 2, 3), (), (128, 128)),
        ((64, 96), (5, 7), (), None),
        ((8, 64, 96), (64, 1), (), None),
        ((64, 96), (0, 3), (), None),
    ],
)
def test_blocks(shape: tuple[int, ...], grid: tuple[int, ...], told: tuple[int, ...], block: object) -> None:
    assert block_of(shape, grid, told) == block


@pytest.mark.parametrize(("ending", "codes"), [("_scale_inv", 4), ("_scale", 8)])
def test_bytes_with_a_scale_for_sixteen(ending: str, codes: int) -> None:
    """Two codes a byte in groups of 32 (DeepSeek V4), or INT8 in groups of 16 (compressed-tensors): the name tells."""
    tensors = {"w": TensorKind(DTYPES["I8"], (8, 64)), f"w{ending}": TensorKind(DTYPES["F32"], (8, 4))}
    assert find(tensors).weights["w"].bits == codes


def test_stems() -> None:
    assert part_of("a.weight_scale_inv") == part_of("a.weight_scale") == part_of("a.scale") == "a.weight"
    assert (
        part_of("a.experts.gate_up_proj_blocks") == part_of("a.experts.gate_up_proj_scales") == "a.experts.gate_up_proj"
    )
    assert part_of("a.weight") is None


def test_sections_of_configs() -> None:
    assert quantisation({}) is None and quantisation({"quantization_config": {}}) is None
    inner = {"text_config": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 32]}}}
    found = quantisation(inner)
    assert found is not None and (found.scheme, found.block, found.known) == ("fp8", (64, 32), True)
    old = quantisation({"compression_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}})
    assert old is not None and old.known and old.scheme == "compressed-tensors (int-quantized)"
    sparse = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}
    assert "sparse" in quantisation({"quantization_config": sparse}).why  # type: ignore[union-attr]
