"""DType: one name for each element type, the safetensors spelling, with the other systems' spellings at the edge.

    >>> DTYPES["BF16"].nbytes(6)
    12
    >>> from_torch("bfloat16").name
    'BF16'

Sub-byte types (F4, F6_*) count elements in shapes, as safetensors does; `nbytes` must come out whole. Types of blocks
(GGUF's Q4_K: 144 bytes for 256 elements of a row) count blocks; `elements` is the number of elements in these.
Source of the names and widths: safetensors 0.8 `tensor.rs`; of the torch names: torch 2.13 `torch.storage`.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpt_tool.errors import InputError


class DType(NamedTuple):
    """An element type, or a type of blocks of elements."""

    name: str  # safetensors' spelling
    bits: int  # width of an item
    # A NumPy type of the same width: with the right values if NumPy has the type (`exact`), else an unsigned integer or
    # raw bytes that only carry the bits (BF16, FP8, blocks).
    numpy: str
    exact: bool
    torch: str | None  # torch's name, None if torch has no such dtype
    block: int = 0  # elements in an item of a type of blocks; 0: items are elements; 1: big-endian elements

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements. Raises InputError E0306 if these do not fill complete bytes."""
        bits = numel * self.bits
        if bits % 8:
            raise InputError(f"{numel} elements of {self.name} are {bits} bits, not whole bytes", code="E0306")
        return bits // 8

    @property
    def is_float(self) -> bool:
        """Is it a type of floating-point numbers? Types of blocks and complex numbers are not."""
        return not self.block and (self.name[0] == "F" or self.name == "BF16")

    @property
    def coded(self) -> bool:
        """Are items blocks or big-endian numbers? They can be moved as bytes or decoded to floats, nothing else."""
        return self.block > 0

    def elements(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in elements of a tensor that has the shape `shape` in items.

        >>> DType("Q8_0", 34 * 8, "V34", False, None, 32).elements((2, 3))
        (2, 96)
        """
        return (*shape[:-1], shape[-1] * self.block) if self.block and shape else shape


def _table() -> dict[str, DType]:
    rows = (
        ("BOOL", 8, "bool", True, "bool"),
        ("U8", 8, "uint8", True, "uint8"),
        ("I8", 8, "int8", True, "int8"),
        ("U16", 16, "uint16", True, "uint16"),
        ("I16", 16, "int16", True, "int16"),
        ("U32", 32, "uint32", True, "uint32"),
        ("I32", 32, "int32", True, "int32"),
        ("U64", 64, "uint64", True, "uint64"),
        ("I64", 64, "int64", True, "int64"),
        ("F16", 16, "float16", True, "float16"),
        ("BF16", 16, "uint16", False, "bfloat16"),
        ("F32", 32, "float32", True, "float32"),
        ("F64", 64, "float64", True, "float64"),
        ("C64", 64, "complex64", True, "complex64"),
        ("C128", 128, "complex128", True, "complex128"),
        ("F8_E4M3", 8, "uint8", False, "float8_e4m3fn"),
        ("F8_E5M2", 8, "uint8", False, "float8_e5m2"),
        ("F8_E8M0", 8, "uint8", False, "float8_e8m0fnu"),
        ("F8_E4M3FNUZ", 8, "uint8", False, "float8_e4m3fnuz"),
        ("F8_E5M2FNUZ", 8, "uint8", False, "float8_e5m2fnuz"),
        ("F4", 4, "uint8", False, None),
        ("F6_E2M3", 6, "uint8", False, None),
        ("F6_E3M2", 6, "uint8", False, None),
    )
    return {row[0]: DType(*row) for row in rows}


DTYPES: dict[str, DType] = _table()

# C128 has no safetensors name: formats that write safetensors refuse it by this set.
SAFETENSORS_NAMES = frozenset(DTYPES) - {"C128"}

_BY_TORCH = {d.torch: d for d in DTYPES.values() if d.torch}
_ALIASES = {
    "half": "F16",
    "fp16": "F16",
    "float": "F32",
    "fp32": "F32",
    "double": "F64",
    "fp64": "F64",
    "bf16": "BF16",
    "long": "I64",
    "int": "I32",
    "short": "I16",
    "char": "I8",
    "byte": "U8",
    "cfloat": "C64",
    "cdouble": "C128",
    "complex32": "",
}


def from_torch(name: str) -> DType | None:
    """The DType of a torch dtype's name, with or without `torch.`; None when torch's type has no twin here."""
    return _BY_TORCH.get(name.removeprefix("torch."))


def from_name(name: str) -> DType | None:
    """The DType a person means: `bf16`, `BF16`, `bfloat16`, `torch.bfloat16`, `fp32`; None when unknown."""
    dtype = DTYPES.get(name.upper()) or from_torch(name.lower())
    return dtype or DTYPES.get(_ALIASES.get(name.lower(), ""))
