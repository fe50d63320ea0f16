"""box_dequantise on quantised models as they lie in their files, against the floats that transformers and
compressed-tensors made.

A whole file goes to the device and every weight is taken from where it lies in it, so codes and scales begin wherever
the file puts them. `fixtures/README.md` says who made the files and their truth.
"""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.device.casts import CastScales, CodeBox, Counted, pack_codes
from ckpt_tool.device.kernels import box_dequantise
from ckpt_tool.device.library import Device
from ckpt_tool.quantised.keep_together import found_in
from ckpt_tool.weight_schemes.quantised_weights import NIBBLES, TURNED, Quantised, TensorKind

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures/quantized"
# case -> weights of which the truth has the floats under the same name
CASES = {
    "fp8_block": 7,
    "fp8_channel": 7,
    "fp8_ct_block": 7,
    "fp8_ct_ragged": 7,
    "fp8_tensor": 7,
    "fp8_ue8m0": 7,
    "fp8_experts": 12,
    "int8_channel": 7,
    "mxfp4": 7,
    "mxfp4_gpt_oss": 2,
    "mxfp8": 7,
    "torchao_float8": 7,
}


class Entry(NamedTuple):
    dtype: DType
    shape: tuple[int, ...]
    offset: int  # bytes


def entries(path: Path) -> tuple[npt.NDArray[np.uint8], dict[str, Entry]]:
    """A safetensors file and what lies where in it."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    return np.frombuffer(raw, np.uint8), {
        name: Entry(DTYPES[about["dtype"]], tuple(about["shape"]), 8 + size + about["data_offsets"][0])
        for name, about in header.items()
    }


def box_of(weight: Quantised, tensors: dict[str, Entry], base: int, target: int) -> tuple[CodeBox, DType]:
    codes = tensors[weight.lead]
    scale = tensors[weight.parts["scale"]]
    rows, columns = weight.shape[-2:]
    matrices = prod(weight.shape[:-2])
    height = weight.block[0]
    width = weight.block[1]
    size = scale.dtype.bits // 8
    across = ceil_div(columns, width)
    down = ceil_div(rows, height)
    half = weight.codes in (NIBBLES, TURNED)
    of = CastScales(base + scale.offset, scale.dtype, weight.block, (down * across * size, across * size))
    source = (base + codes.offset) * (2 if half else 1)
    box = CodeBox(
        source, target, (matrices, rows, columns), (rows * columns, columns), (2 * rows * columns, 2 * columns), of
    )
    return box, DTYPES["F4"] if half else codes.dtype


@pytest.mark.parametrize("case", CASES)
def test_a_model_as_it_lies_in_its_file(device: Device, case: str) -> None:
    raw, tensors = entries(FIXTURES / case / "model.safetensors")
    truth_raw, truth = entries(FIXTURES / f"{case}.truth.safetensors")
    config = json.loads((FIXTURES / case / "config.json").read_text())
    _, found = found_in({name: TensorKind(entry.dtype, entry.shape) for name, entry in tensors.items()}, config)
    compared = 0
    with device.upload(raw) as file:
        for weight in found.weights.values():
            want = truth.get(f"model/{weight.made}")
            if want is None:  # transformers has other names for single experts
                continue
            assert want.dtype.name == "BF16"
            nbytes = 2 * prod(weight.shape)
            with device.alloc(nbytes) as out:
                box, codes = box_of(weight, tensors, file.address, out.address)
                assert box_dequantise(device, pack_codes([box], codes, DTYPES["BF16"])) == [Counted(0, 0)]
                got = device.download(out.address, nbytes).view(np.uint16).reshape(weight.shape)
            if weight.codes == TURNED:
                got = np.swapaxes(got, -1, -2)
            theirs = truth_raw[want.offset : want.offset + nbytes].view(np.uint16).reshape(want.shape)
            assert (got == theirs).all(), weight.made
            compared += 1
    assert compared == CASES[case]
