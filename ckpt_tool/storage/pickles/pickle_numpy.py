"""NumPy arrays and scalars in pickles, read without NumPy.

An array is `_reconstruct(ndarray, (0,), b"b")`, then a state `(1, shape, dtype, fortran, bytes)`; a dtype is
`dtype("f4", False, True)`, then a state `(3, "<", None, None, None, -1, -1, 0)` whose second item is the byte order; a
scalar is `scalar(dtype, bytes)`. Protocol 5 writes `_frombuffer(bytes, dtype, shape, order)` instead.
Source: NumPy 1.26 and 2.x, `core/src/multiarray/{methods,descriptor}.c`, `core/numeric.py`.

Arrays of Python objects keep their values as a list, and those of records their bytes without the fields' names: no
tensor can be made of either, and no writer takes them, but who leaves the extras behind is not kept from the rest.

    >>> dtype = NUMPY_BUILDERS["numpy.dtype"](("f4", False, True)); set_dtype_state(dtype, (3, "<", None))
    >>> dtype
    Symbol(name='numpy.dtype', args=('<f4',))
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import prod
from typing import Any

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.storage.pickles.pickle_values import ArrayRef, Misuse, NumpyArray, Placed, StorageSpan

_KINDS = "biufcSUV"
_SCALARS = {
    "b1": "?",
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
    "f2": "e",
    "f4": "f",
    "f8": "d",
}
_NAMED = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}
OBJECTS = "|O"  # the dtype of arrays of Python objects
STRUCTURED = "{structured}"  # of arrays of records, whose fields are not read
_TENSORS = {
    "b1": "BOOL",
    "i1": "I8",
    "i2": "I16",
    "i4": "I32",
    "i8": "I64",
    "u1": "U8",
    "u2": "U16",
    "u4": "U32",
    "u8": "U64",
    "f2": "F16",
    "f4": "F32",
    "f8": "F64",
    "c8": "C64",
    "c16": "C128",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_CLASSES = {
    "Bool": "b1",
    "Int8": "i1",
    "Int16": "i2",
    "Int32": "i4",
    "Int64": "i8",
    "UInt8": "u1",
    "UInt16": "u2",
    "UInt32": "u4",
    "UInt64": "u8",
    "Float16": "f2",
    "Float32": "f4",
    "Float64": "f8",
    "Complex64": "c8",
    "Complex128": "c16",
}


def _fault(what: str) -> Misuse:
    return Misuse(what, "E0371")


def item_nbytes(dtype: str) -> int:
    """Bytes of one element of a dtype, spelled as in `NumpyArray.dtype`. Raises Misuse for kinds of no fixed size."""
    if dtype in _NAMED:
        return _NAMED[dtype]
    # U: four bytes per character.
    code = dtype.lstrip("<>|=")
    if code[:1] in _KINDS and code[1:].isdigit() and len(code) <= 10:
        return int(code[1:]) * (4 if code[0] == "U" else 1)
    raise _fault(f"NumPy dtype {dtype[:20]!r}: only numbers, booleans and fixed-size text are read")


def _dtype(args: tuple[Any, ...]) -> Symbol:
    if not args or type(args[0]) not in (str, Symbol):
        raise _fault("numpy.dtype takes a type's code")
    code = args[0]
    if type(code) is Symbol:
        code = code.name.rpartition(".")[2]
    if code[:1] == "O" and code[1:] in ("", "4", "8"):
        return Symbol("numpy.dtype", (OBJECTS,))
    if code not in _NAMED:
        item_nbytes(code)
        code = f"|{code}" if code in ("b1", "i1", "u1") or code[0] in "SV" else f"<{code}"
    return Symbol("numpy.dtype", (code,))


def set_dtype_state(dtype: Symbol, state: Any) -> None:
    """Apply the state of a pickled dtype: its byte order, or the fields of a structured dtype. Raises Misuse."""
    if type(state) is not tuple or not 3 <= len(state) <= 9 or state[1] not in ("<", ">", "|", "="):
        raise _fault("state of a numpy.dtype is malformed")
    # Subarray, field names, fields: a structured dtype.
    if any(item is not None for item in state[2:5]):
        object.__setattr__(dtype, "args", (STRUCTURED,))
        return
    code = dtype.args[0] if dtype.args else ""
    if code == OBJECTS:
        return
    if code not in _NAMED and state[1] != "|":
        object.__setattr__(dtype, "args", (("<" if state[1] == "=" else state[1]) + code.lstrip("<>|="),))


def dtype_code(value: Any) -> str:
    """The type string of a dtype symbol, or of a dtype's text."""
    if type(value) is Symbol and value.name == "numpy.dtype" and value.args:
        return str(value.args[0])
    if type(value) is Symbol and value.name.startswith("numpy.dtypes."):
        return dtype_code(_dtype((_CLASSES.get(value.name[13:].removesuffix("DType"), ""),)))
    raise _fault("array without a numpy.dtype")


def _filled(array: NumpyArray, shape: Any, dtype: Any, *, fortran: bool, data: Any) -> NumpyArray:
    code = dtype_code(dtype)
    if type(shape) is int:
        shape = (shape,)
    if type(shape) is not tuple or len(shape) > 64 or any(type(n) is not int or not 0 <= n < 1 << 63 for n in shape):
        raise _fault("shape of a NumPy array is malformed")

    if code == OBJECTS:
        if type(data) is not list or len(data) != prod(shape):
            raise _fault("a NumPy array of Python objects without its values")
        array.shape = shape
        array.dtype = code
        array.fortran = fortran
        array.data = data
        return array

    if type(data) is Placed:
        data = StorageSpan(data.offset, len(data))
    if code == STRUCTURED:
        if type(data) not in (bytes, StorageSpan):
            raise _fault("a NumPy array of records without its bytes")
        array.shape = shape
        array.dtype = code
        array.fortran = fortran
        array.data = data
        return array

    have = -1
    if type(data) is StorageSpan:
        have = data.nbytes
    elif type(data) is bytes:
        have = len(data)
    if have != prod(shape) * item_nbytes(code):
        raise _fault(f"a NumPy array of shape {list(shape)[:8]} of {code} has {have} bytes")

    array.shape = shape
    array.dtype = code
    array.fortran = fortran
    array.data = data
    return array


def set_array_state(array: NumpyArray, state: Any) -> None:
    """Fill an array from `([version,] shape, dtype, fortran, data)`. Raises Misuse E0371."""
    if type(state) is not tuple or len(state) not in (4, 5):
        raise _fault("state of a numpy.ndarray is malformed")
    shape, dtype, fortran, data = state[-4:]
    if type(data) is str:  # Python 2 wrote bytes as text; the reader keeps what happens to be UTF-8 as text
        data = data.encode("utf-8", "surrogatepass")
    _filled(array, shape, dtype, fortran=bool(fortran), data=data)


def tensor_dtype(code: str) -> DType | None:
    """The dtype of a tensor of the same bytes, None where there is none: text, objects, records, big-endian numbers.

    >>> tensor_dtype("<f4").name, tensor_dtype(">f4"), tensor_dtype("|O")
    ('F32', None, None)
    """
    dtype = DTYPES.get(_TENSORS.get(code.lstrip("<>|="), ""))
    if dtype is None or (code[0] == ">" and dtype.bits > 8):
        return None
    return dtype


def is_text(code: str) -> bool:
    """Is it the dtype of text or raw bytes of a fixed size?"""
    return code.lstrip("<>|=")[:1] in ("S", "U")


def device_tensor(array: NumpyArray, dtype: DType | None) -> ArrayRef | None:
    """The tensor of `dtype` that torch keeps as a NumPy array, None where the array's values are not simply its own.

    torch pickles BF16 as F32, because NumPy has no such type; the lower halves of these are zeros.
    """
    stored = tensor_dtype(array.dtype) if array.dtype else None
    if stored is None or dtype is None or type(array.data) is not bytes:
        return None
    if stored == dtype:
        return ArrayRef(array, dtype)
    halved = stored.name == "F32" and dtype.name == "BF16"
    # Little-endian: the lower 16 bits are the first two bytes of each value.
    if halved and not any(array.data[0::4]) and not any(array.data[1::4]):
        return ArrayRef(array, dtype, widened=True)
    return None


def _reconstruct(args: tuple[Any, ...]) -> NumpyArray:
    if len(args) != 3 or args[0] != Symbol("numpy.ndarray"):
        raise _fault("_reconstruct of another class than numpy.ndarray")
    return NumpyArray()


def _frombuffer(args: tuple[Any, ...]) -> NumpyArray:
    if len(args) not in (4, 5) or args[3] not in ("C", "F"):
        raise _fault("_frombuffer takes (buffer, dtype, shape, order)")
    return _filled(NumpyArray(), args[2], args[1], fortran=args[3] == "F", data=args[0])


def _scalar(args: tuple[Any, ...]) -> Any:
    """A Python number where that is exact, Opaque("numpy.scalar", (dtype, bytes)) for the rest."""
    if len(args) != 2:
        raise _fault("a NumPy scalar takes a dtype and bytes")
    code = dtype_code(args[0])
    data = args[1]
    if type(data) is str and len(data) <= 16:
        data = data.encode("utf-8", "surrogatepass")
    if code == STRUCTURED and isinstance(data, bytes):
        return Opaque("numpy.scalar", (code, bytes(data)))
    if not isinstance(data, bytes) or len(data) != item_nbytes(code):
        raise _fault(f"a NumPy scalar of {code} without its bytes")
    letter = _SCALARS.get(code.lstrip("<>|="))
    if letter is None:
        return Opaque("numpy.scalar", (code, bytes(data)))
    return struct.unpack((">" if code[0] == ">" else "<") + letter, data)[0]


NUMPY_BUILDERS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "numpy.dtype": _dtype,
    **{f"numpy.{core}.multiarray._reconstruct": _reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _frombuffer for core in ("core", "_core")},
}
