"""The tensor types of GGUF files, as dtypes: those that ckpt knows anyway, and types made of blocks.

    of_number(12)   Q4_K: items of 144 bytes, each 256 elements of a row; `--dequantize` makes floats of them
    of_number(1)    F16
    of_number(0, big=True)   F32_BE: fp32 in big-endian byte order; `--dequantize` swaps the bytes

Numbers, elements and bytes of a block: gguf 0.19.0 `constants.py` (`GGMLQuantizationType`, `GGML_QUANT_SIZES`) and
llama.cpp of October 2026 `ggml.h`; llama.cpp has given up the numbers 4, 5, 31 to 33 and 36 to 38. Cost: a look-up.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ckpt_tool.core.dtype import DTYPES, DType


class GgufType(NamedTuple):
    """A tensor type of GGUF."""

    number: int  # in the file
    name: str
    elements: int  # of a block; 1 element where there are no blocks
    nbytes: int  # of a block; 1 element where there are no blocks


_TABLE = """
    0 F32 1 4, 1 F16 1 2, 2 Q4_0 32 18, 3 Q4_1 32 20, 6 Q5_0 32 22, 7 Q5_1 32 24, 8 Q8_0 32 34,
    9 Q8_1 32 36, 10 Q2_K 256 84, 11 Q3_K 256 110, 12 Q4_K 256 144, 13 Q5_K 256 176, 14 Q6_K 256 210,
    15 Q8_K 256 292, 16 IQ2_XXS 256 66, 17 IQ2_XS 256 74, 18 IQ3_XXS 256 98, 19 IQ1_S 256 50,
    20 IQ4_NL 32 18, 21 IQ3_S 256 110, 22 IQ2_S 256 82, 23 IQ4_XS 256 136, 24 I8 1 1, 25 I16 1 2,
    26 I32 1 4, 27 I64 1 8, 28 F64 1 8, 29 IQ1_M 256 56, 30 BF16 1 2, 34 TQ1_0 256 54, 35 TQ2_0 256 66,
    39 MXFP4 32 17, 40 NVFP4 64 36, 41 Q1_0 128 18, 42 Q2_0 64 18
"""  # number, name, elements and bytes of a block
KINDS = tuple(
    GgufType(int(number), name, int(elements), int(nbytes))
    for number, name, elements, nbytes in (row.split() for row in _TABLE.split(","))
)
# `general.file_type` of a file most of whose tensors have this type (`LlamaFileType`).
FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "BF16": 32,
    "TQ1_0": 36,
    "TQ2_0": 37,
    "MXFP4": 38,
}
# Types that llama.cpp uses only while it computes, never in files, so there are no floats to make of them.
NO_FLOATS = frozenset(("Q8_1", "Q8_K"))
_BIG = "_BE"
_BY_NUMBER = {kind.number: kind for kind in KINDS}
_BY_NAME = {kind.name: kind for kind in KINDS}


@cache
def of_number(number: int, *, big: bool = False) -> DType | None:
    """The dtype of a GGUF type number, None if the number is unknown. big: the file is big-endian."""
    kind = _BY_NUMBER.get(number)
    return None if kind is None else _dtype(kind, big=big)


@cache
def of_name(name: str) -> DType:
    """The dtype of a GGUF type name. Raises KeyError for an unknown name."""
    return _dtype(_BY_NAME[name], big=False)


def _dtype(kind: GgufType, *, big: bool) -> DType:
    """The dtype of a GGUF type; types of one byte have no byte order."""
    if kind.elements == 1 and (not big or kind.nbytes == 1):
        return DTYPES[kind.name]
    return DType(kind.name + _BIG * big, 8 * kind.nbytes, f"V{kind.nbytes}", False, None, kind.elements)


def kind_of(dtype: DType) -> GgufType:
    """The GGUF type that has this dtype. Raises KeyError if GGUF has no such type."""
    return _BY_NAME[dtype.name.removesuffix(_BIG)]


def is_big(dtype: DType) -> bool:
    """Are the bytes of this dtype in big-endian order?"""
    return dtype.coded and dtype.name.endswith(_BIG)
