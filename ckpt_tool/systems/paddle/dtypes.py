"""Paddle's dtypes: names, numbers, and the NumPy type that their bytes are pickled as."""

from __future__ import annotations

# Our name, Paddle's ("" if it has no such tensors), NumPy's code of the stored array, number in phi/common/data_type.h
_TYPES = (
    ("BOOL", "bool", "b1", 1),
    ("U8", "uint8", "u1", 2),
    ("I8", "int8", "i1", 3),
    ("U16", "", "u2", 4),
    ("I16", "int16", "i2", 5),
    ("U32", "", "u4", 6),
    ("I32", "int32", "i4", 7),
    ("U64", "", "u8", 8),
    ("I64", "int64", "i8", 9),
    ("F32", "float32", "f4", 10),
    ("F64", "float64", "f8", 11),
    ("C64", "complex64", "c8", 12),
    ("C128", "complex128", "c16", 13),
    ("F16", "float16", "f2", 15),
    ("BF16", "bfloat16", "u2", 16),
    ("F8_E4M3", "float8_e4m3fn", "i1", 17),
    ("F8_E5M2", "float8_e5m2", "i1", 18),
)
DTYPE_NAMES = {paddle: name for name, paddle, _, _ in _TYPES if paddle}
DTYPE_NUMBERS = {number: name for name, _, _, number in _TYPES}
CODES = {name: code for name, _, code, _ in _TYPES}
# Several dtypes share a code; reversed, so that the first row wins: a bare u2 is U16 until more is known.
BY_CODE = {code: name for name, _, code, _ in reversed(_TYPES)}
BY_CODE |= {paddle: name for name, paddle, _, number in _TYPES if number > 15}  # what ml_dtypes adds to NumPy
