"""Composing a `paddle.save` file: its pickle laid out before a tensor byte moves. Reading one: `formats.paddle.file`.

    composer = PaddleComposer()
    weight = composer.tensor((8, 12), F32, [Part(0, whole((8, 12)), 0)])
    file = composer.file("model_state.pdparams", {"fc.weight": weight}, {"fc.weight": "linear_0.w_0"})

Protocol 4, the bytes that Paddle writes (`storage.pickle_frames`); bfloat16 as uint16 bits, float8 as int8 bits. The
specification and its source: `formats.paddle.file`. Cost: some us a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.target import TargetArray, TargetFile
from ckpt_tool.errors import InternalError, UsageError
from ckpt_tool.formats.torch.content import Part
from ckpt_tool.storage.pickle_frames import Anew, Pair, plan_framed
from ckpt_tool.storage.pickle_values import NumpyArray, Span

TABLE = "StructuredToParameterName@@"
DTYPE = "E1302"
BY_CODE = {
    "b1": "BOOL", "i1": "I8", "i2": "I16", "i4": "I32", "i8": "I64", "u1": "U8", "u2": "U16", "u4": "U32", "u8": "U64",
    "f2": "F16", "f4": "F32", "f8": "F64", "c8": "C64", "c16": "C128", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_CODES = {name: code for code, name in BY_CODE.items() if code[-1].isdigit() and code[1:].isdigit()}
_BITS = {"BF16": "u2", "F8_E4M3": "i1", "F8_E5M2": "i1"}  # as Paddle stores them


class ArrayRef(NamedTuple):
    """A tensor of a `PaddleComposer`, to be put into a state."""

    number: int
    shape: tuple[int, ...]
    dtype: DType


class Named(NamedTuple):
    """A tensor with its own name: written as the pair of encoding B."""

    name: str
    ref: ArrayRef


class _Source(NamedTuple):
    parts: Sequence[Part]
    data: bytes | None  # known already


class PaddleComposer:
    """A new `paddle.save` file, array by array. Equal input gives equal bytes."""

    def __init__(self) -> None:
        self._sources: list[_Source] = []

    def tensor(self, shape: Sequence[int], dtype: DType, parts: Sequence[Part]) -> ArrayRef:
        """A tensor that `parts` fill; what they leave out is zero. BF16 is written as uint16 bits. Raises UsageError E0258
        for a type that NumPy lacks."""
        return self._add(shape, dtype, parts, None)

    def value(self, shape: Sequence[int], dtype: DType, data: bytes) -> ArrayRef:
        """A tensor whose bytes (little-endian, row-major) are known already."""
        if len(data) != dtype.nbytes(prod(shape)):
            raise InternalError(f"{len(data)} bytes for a {dtype.name} tensor of shape {tuple(shape)}")
        return self._add(shape, dtype, (), data)

    def _add(self, shape: Sequence[int], dtype: DType, parts: Sequence[Part], data: bytes | None) -> ArrayRef:
        if dtype.name not in _CODES and dtype.name not in _BITS:
            raise UsageError(
                f"paddle.save has no place for {dtype.name}", code="E0258", hint="choose another type with --dtype"
            )
        self._sources.append(_Source(parts, data))
        return ArrayRef(len(self._sources) - 1, tuple(shape), dtype)

    def file(self, path: str, state: Mapping[str, Any], names: Mapping[str, str] | None) -> TargetFile:
        """The file of `state`, in which the tensors made here stand. names: the tensors' own names by key, for encoding A;
        None for encoding B, whose tensors are `Named`. Raises UsageError E0375 for values that no pickle of ours holds."""
        order: list[ArrayRef] = []
        body = {key: _body(item, order) for key, item in state.items()}
        if names is not None:
            body[TABLE] = {key: Anew(name) for key, name in names.items()}
        plan = plan_framed(body)
        filled = [ref for ref in order if ref.dtype.nbytes(prod(ref.shape))]
        literals = [*plan.literals]
        arrays: list[TargetArray] = []
        for ref, offset in zip(filled, plan.offsets, strict=True):
            source = self._sources[ref.number]
            if source.data is not None:
                literals.append((offset, source.data))
            arrays += [_target(part, ref.dtype, offset) for part in source.parts if part.box.numel]
        return TargetFile(path, plan.size, tuple(sorted(literals)), tuple(arrays))


def _target(part: Part, dtype: DType, offset: int) -> TargetArray:
    return TargetArray(part.tensor, part.box, offset + dtype.nbytes(part.start), strides=part.strides)


def _body(item: Any, order: list[ArrayRef]) -> Any:
    """A state's value as the pickle takes it, its tensors noted in the order of writing."""
    if isinstance(item, Named):
        return Pair((Anew(item.name), _array(item.ref, order)))
    if isinstance(item, ArrayRef):
        return _array(item, order)
    if isinstance(item, Mapping):
        return {key: _body(value, order) for key, value in item.items()}
    if type(item) is list:
        return [_body(value, order) for value in item]
    if type(item) is tuple:
        return tuple(_body(value, order) for value in item)
    return item


def _array(ref: ArrayRef, order: list[ArrayRef]) -> NumpyArray:
    order.append(ref)
    code = _BITS.get(ref.dtype.name) or _CODES[ref.dtype.name]
    order_mark = "|" if code in ("b1", "i1", "u1") else "<"
    return NumpyArray(order_mark + code, ref.shape, False, Span(0, ref.dtype.nbytes(prod(ref.shape))))
