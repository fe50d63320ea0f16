"""What `--quantize` lays out is what `quantised_weights.find` recognises, by the config that is written with it."""

from __future__ import annotations

from math import prod

import pytest

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.weight_schemes.declared_scheme import quantisation
from ckpt_tool.weight_schemes.quantised_weights import find
from ckpt_tool.weight_schemes.written_schemes import SCHEMES, config_of, laid_out

SHAPES = [(128, 128), (1, 256), (300, 384), (576, 7168), (2, 200, 256)]


@pytest.mark.parametrize("floats", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_reader_finds_what_the_writer_lays_out(name: str, floats: str) -> None:
    scheme = SCHEMES[name]
    for shape in SHAPES[: 5 if name == "fp8-block" else 4]:
        laid = laid_out(scheme, "m.0.weight", shape, DTYPES[floats])
        stated = quantisation(config_of(scheme, ["lm_head"]))
        assert stated is not None and stated.known
        found = find(dict(laid.values()), **stated.found_by)
        assert not found.faults and not found.beside and found.names == {tensor for tensor, _ in laid.values()}
        (weight,) = found.weights.values()
        assert (weight.made, weight.codes, weight.lead) == ("m.0.weight", scheme.codes, laid["codes"][0])
        assert weight.shape == shape and weight.bits == scheme.bits
        assert weight.parts == {role: tensor for role, (tensor, _) in laid.items() if role != "codes"}
        for block, own, size in zip(weight.block, scheme.block, shape[-2:], strict=True):
            assert block == own or block == size < (own or size + 1)
        kind = laid["codes"][1]
        assert kind.dtype.nbytes(prod(kind.shape)) * 8 == prod(shape) * scheme.bits


def test_groups_that_do_not_divide_a_row_do_not_fit() -> None:
    assert SCHEMES["fp8-block"].fits((3, 5)) and SCHEMES["int8"].fits((3, 5))
    assert not SCHEMES["int4-g128"].fits((4, 130)) and SCHEMES["nvfp4"].fits((4, 144))
    short = {
        shape: SCHEMES["fp8-block"].is_short(shape) for shape in ((24, 52), (256, 128), (576, 7168), (2, 128, 130))
    }
    assert [*short.values()] == [False, False, True, True] and not SCHEMES["int8"].is_short((576, 130))
    assert not any(scheme.fits((0, 128)) for scheme in SCHEMES.values())
