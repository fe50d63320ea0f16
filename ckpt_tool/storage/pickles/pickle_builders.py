"""Builders: what a pickle's call of a tier 1 name makes. Each is a plain function from arguments to an inert value.

A pickle says `REDUCE(function, args)`; the machine looks `function` up here by its full name and gets a value back, or
`Misuse` when the arguments are not those that the real function takes. No builder calls what the pickle names, and
none allocates by a number that the pickle states.

    >>> BUILDERS["torch.Size"](((2, 3),))
    (2, 3)

Tensor facts (torch 2.13 `_utils.py`, `_tensor.py`): sizes, strides and offsets count elements; `_rebuild_tensor_v3`
carries the dtype that has no storage class; metadata `{"conj": True}` means that the bytes are not the values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from ckpt_tool.core.dtype import DType, from_torch
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.storage.pickles.pickle_globals import (
    ENUMS,
    FROM_NUMPY,
    LAYOUTS,
    PLAIN_TENSORS,
    SHARDED_TENSOR,
    STORAGE_CLASSES,
    STORAGES,
    UNSUPPORTED_TENSORS,
    WRAPPERS,
    is_tensor_record,
)
from ckpt_tool.storage.pickles.pickle_numpy import NUMPY_BUILDERS, device_tensor
from ckpt_tool.storage.pickles.pickle_values import (
    ArrayRef,
    Misuse,
    NumpyArray,
    OrderedMap,
    PickledRecord,
    StorageRef,
    TensorRef,
    WrapperRef,
    safe_key,
)

RANK_LIMIT = 64
_FROM_CPU = "torch._utils._rebuild_device_tensor_from_cpu_tensor"
KEY_LIMIT = 64  # characters of a storage's key
Args = tuple[Any, ...]


def _want(fits: bool, what: str, code: str = "E0363") -> None:
    if not fits:
        raise Misuse(what, code)


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    """A tuple of at most 64 ints >= 0 below 2^63."""
    if type(value) is not tuple:
        raise Misuse(f"{what} is {type(value).__name__}, not a tuple", "E0372")
    if len(value) > RANK_LIMIT:
        raise Misuse(f"{what} has {len(value)} dims, want at most {RANK_LIMIT}", "E0372")
    for n in value:
        if type(n) is not int or not 0 <= n < 1 << 63:
            raise Misuse(f"{what} holds {_brief(n)}; want integers from 0 to 2^63 - 1", "E0372")
    return value


def _brief(value: Any) -> str:
    return repr(value)[:40] if type(value) in (int, float, str, bool) else type(value).__name__


# -- torch ------------------------------------------------------------------------------------------------------------


def storage(pid: Any) -> StorageRef | Symbol:
    """A persistent id of a torch file: `("storage", class, key, location, numel[, view])`, numel in elements.

    Raises Misuse for anything else. `("module", class, file, source)` of torch before 1.0 is the class itself.
    """
    _want(
        type(pid) is tuple and len(pid) >= 2, f"persistent id is {_brief(pid)}, want a torch storage's tuple", "E0366"
    )
    kind = pid[0].decode("ascii", "replace") if type(pid[0]) is bytes else pid[0]
    if kind == "module" and type(pid[1]) is Symbol:
        return pid[1]
    _want(kind == "storage" and len(pid) in (5, 6), "persistent id is no torch storage's", "E0366")
    name = STORAGES.get(pid[1].name) if type(pid[1]) is Symbol and not pid[1].args else None
    if name is None:
        shown = pid[1].name if type(pid[1]) is Symbol else _brief(pid[1])
        raise Misuse(f"unknown storage class {shown}", "E0366")
    key = pid[2]
    location = pid[3]
    numel = pid[4]
    if type(key) is int:
        key = str(key)
    _want(type(key) is str and 0 < len(key) <= KEY_LIMIT, f"storage key is {_brief(key)}", "E0366")
    if not key.replace("_", "").isalnum() or not key.isascii():
        raise Misuse(f"storage key {key!r} is no plain number", "E0423")
    _want(type(numel) is int and 0 <= numel < 1 << 60, f"storage has {_brief(numel)} elements", "E0366")
    _want(len(pid) == 5 or pid[5] is None, "storage views of torch before 0.1.10 are not supported", "E0366")
    dtype, width = STORAGE_CLASSES[name]
    place = location.decode("ascii", "replace") if type(location) is bytes else location
    return StorageRef(key, dtype, numel, numel * width, place if type(place) is str else "", name)


def tensor(ref: Any, offset: Any, size: Any, stride: Any, dtype: DType, requires_grad: Any = False) -> TensorRef:
    """A view of a storage, checked: offset, size and stride in elements of `dtype`, all inside the storage."""
    shape = _sizes(size, "size")
    steps = _sizes(stride, "stride")
    _want(type(ref) is StorageRef, "tensor without a storage", "E0372")
    _want(type(offset) is int and 0 <= offset < 1 << 63, f"storage offset is {_brief(offset)}", "E0372")
    _want(len(shape) == len(steps), f"size has {len(shape)} dims, stride {len(steps)}", "E0372")
    _want(prod(shape) * dtype.bits <= 8 << 63, f"size {list(shape)[:8]} is out of range", "E0372")
    last = offset + sum((n - 1) * s for n, s in zip(shape, steps, strict=True)) if 0 not in shape else -1
    if (last + 1) * dtype.bits > ref.nbytes * 8:
        raise Misuse(
            f"a view of size {list(shape)}, stride {list(steps)}, offset {offset} ends at element {last + 1} of its"
            f" storage, which has {ref.nbytes} bytes of {dtype.name}",
            "E0373",
        )
    made = TensorRef(ref, offset, shape, steps, dtype, bool(requires_grad))
    if last > 0 and not made.contiguous and _overlaps(shape, steps):
        raise Misuse(f"elements of a view of size {list(shape)}, stride {list(steps)} overlap", "E0373")
    return made


def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Might two elements share a place? Dims of stride 0 (`expand`) may: they repeat one element by intent."""
    reach = 0  # of the finer dims, in elements
    for step, n in sorted((s, n) for s, n in zip(stride, shape, strict=True) if s and n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


def _tensor_v2(args: Args) -> TensorRef | Opaque:
    _want(len(args) in (4, 6, 7), f"_rebuild_tensor takes 4, 6 or 7 arguments, not {len(args)}", "E0372")
    ref = args[0]
    if (type(ref) is StorageRef and ref.dtype is None) or _math_bits(args[6:]):
        return Opaque("torch._utils._rebuild_tensor_v2", args)
    dtype = ref.dtype if type(ref) is StorageRef else None
    if dtype is None:
        raise Misuse("tensor without a storage", "E0372")
    return tensor(args[0], args[1], args[2], args[3], dtype, args[4] if len(args) > 4 else False)


def _tensor_v3(args: Args) -> TensorRef | Opaque:
    _want(len(args) in (7, 8), f"_rebuild_tensor_v3 takes 7 or 8 arguments, not {len(args)}", "E0372")
    dtype = from_torch(args[6].name) if type(args[6]) is Symbol else None
    if dtype is None or _math_bits(args[7:]):
        return Opaque("torch._utils._rebuild_tensor_v3", args)
    return tensor(args[0], args[1], args[2], args[3], dtype, args[4])


def _device_array(name: str, args: Args) -> ArrayRef | Opaque:
    """A tensor of a device without storages (XLA): `(array, dtype, device, requires_grad)`."""
    dtype = from_torch(args[1].name) if len(args) == 4 and type(args[1]) is Symbol else None
    array = args[0] if dtype is not None else None
    made = device_tensor(array, dtype) if type(array) is NumpyArray else None
    return Opaque(name, args) if made is None else made


def _device_tensor(args: Args) -> TensorRef | Opaque:
    """The same, rebuilt from a CPU tensor, which nearly always has the right dtype already."""
    dtype = from_torch(args[1].name) if len(args) == 4 and type(args[1]) is Symbol else None
    if dtype is not None and type(args[0]) is TensorRef and args[0].dtype == dtype:
        return args[0]
    return Opaque(_FROM_CPU, args)


def _math_bits(metadata: Args) -> bool:
    """Is the tensor lazily conjugated or negated (or does it carry metadata that we do not know)?"""
    return bool(metadata) and bool(metadata[0]) and metadata[0] != {"conj": False, "neg": False}


def _parameter(args: Args) -> Any:
    _want(len(args) in (3, 4), f"_rebuild_parameter takes 3 or 4 arguments, not {len(args)}", "E0372")
    inner = args[0]
    if type(inner) is TensorRef:
        state = args[3] if len(args) == 4 and args[3] else inner.attributes
        return inner._replace(requires_grad=bool(args[1]), is_parameter=True, attributes=state)
    if type(inner) in (WrapperRef, ArrayRef):
        return inner
    return Opaque("torch._utils._rebuild_parameter", args)


def _from_type(args: Args) -> Any:
    """`(function, type, arguments, state)`: a tensor with Python attributes, or of a subclass."""
    _want(
        len(args) == 4 and type(args[2]) is tuple, "_rebuild_from_type_v2 takes (function, type, args, state)", "E0372"
    )
    function, kind, inner, state = args
    name = kind.name if type(kind) is Symbol else _brief(kind)
    build = TENSOR_BUILDERS.get(function.name) if type(function) is Symbol and not function.args else None
    if build is None:
        return Opaque(name, inner, state)
    made = build(inner)
    if type(made) is WrapperRef:
        if made.name == SHARDED_TENSOR:
            return _sharded(made, state)
        fields = _fields(state)
        local = fields.get("_local_tensor")
        spec = fields.get("_spec")
        made.local = local if type(local) in (TensorRef, Opaque) else None
        made.spec = spec
        made.state = {k: v for k, v in fields.items() if k not in ("_local_tensor", "_spec")} or None
        return made
    if type(made) is TensorRef and name in PLAIN_TENSORS:
        return made._replace(attributes=state or None)
    if name in PLAIN_TENSORS and (type(made) is ArrayRef or is_tensor_record(made)):
        return made
    return Opaque(name, (made,), state)


def _sharded(made: WrapperRef, state: Any) -> WrapperRef:
    """A ShardedTensor's state is (its shards here, metadata of all shards, process group, spec, rpc). Its spec here is
    the metadata; the state keeps the Records of its shards and of its process group."""
    _want(type(state) is tuple and len(state) == 5 and type(state[0]) is list, "state of a ShardedTensor", "E0372")
    shards = [shard for shard in state[0] if type(shard) is PickledRecord]
    tensors = [shard.state.get("tensor") if shard.state else None for shard in shards]
    fits = len(shards) == len(state[0]) and all(type(held) is TensorRef for held in tensors)
    _want(fits and type(state[1]) is PickledRecord, "a ShardedTensor without its shards", "E0372")
    made.local = tensors[0] if tensors else None
    made.spec = state[1]
    made.state = {"shards": shards, "group": state[2]}
    return made


def _fields(state: Any) -> dict[Any, Any]:
    """An object's state as one dict: of classes with slots it is `(its __dict__ or None, its slots)`."""
    if type(state) is tuple and len(state) == 2:
        return {key: value for part in state if isinstance(part, dict) for key, value in part.items()}
    return state if isinstance(state, dict) else {}


def _wrapper(args: Args) -> WrapperRef | Opaque:
    """`(class, dtype, size, stride, storage_offset, layout, device, requires_grad)`; size and stride are global."""
    _want(len(args) == 8, f"_rebuild_wrapper_subclass takes 8 arguments, not {len(args)}", "E0372")
    kind, dtype, size, stride = args[:4]
    known = from_torch(dtype.name) if type(dtype) is Symbol else None
    if type(kind) is not Symbol or kind.name not in WRAPPERS or known is None:
        return Opaque("torch._utils._rebuild_wrapper_subclass", args)
    shape = _sizes(size, "size")
    steps = _sizes(stride, "stride")
    _want(len(shape) == len(steps) <= RANK_LIMIT, "size and stride differ in rank", "E0372")
    return WrapperRef(kind.name, shape, steps, known, bool(args[7]))


TENSOR_BUILDERS: dict[str, Callable[[Args], Any]] = {
    "torch._utils._rebuild_tensor": _tensor_v2,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
}


def _size(args: Args) -> tuple[int, ...]:
    _want(len(args) == 1, "torch.Size takes one argument")
    return _sizes(args[0], "a torch.Size")


def _device(args: Args) -> Symbol:
    _want(1 <= len(args) <= 2 and all(type(a) in (str, int) for a in args), "torch.device takes a name and a number")
    return Symbol("torch.device", args)


def _layout(args: Args) -> Symbol:
    _want(len(args) == 1 and type(args[0]) is str and args[0] in LAYOUTS, "_get_layout takes a layout's name")
    return Symbol(args[0])


# -- the standard library ---------------------------------------------------------------------------------------------


def _items(args: Args, what: str) -> Any:
    """The one iterable argument of a container: a list, tuple or set; () without arguments."""
    if not args:
        return ()
    fits = len(args) == 1 and (type(args[0]) in (list, tuple, set, frozenset) or isinstance(args[0], dict))
    _want(fits, f"{what} takes one list, not {', '.join(map(_brief, args))[:80]}")
    return args[0]


def _mapping(args: Args) -> OrderedMap:
    """OrderedDict, dict, Counter: nothing, a mapping, or pairs."""
    items = _items(args, "a dict")
    if isinstance(items, dict):
        return OrderedMap(items)
    made = OrderedMap()
    for pair in items:
        _want(type(pair) in (list, tuple) and len(pair) == 2, "a dict is made of pairs")
        made[safe_key(pair[0])] = pair[1]
    return made


def _default_map(args: Args) -> OrderedMap:
    _want(not args or args[0] is None or type(args[0]) is Symbol, "a defaultdict takes a class")
    return _mapping(args[1:])


def _deque(args: Args) -> list[Any]:
    return list(_items(args[:1], "a deque"))


def _text_bytes(text: Any, encoding: Any) -> bytes:
    """Bytes that protocols 0-2 spell as latin-1 text. Any other codec is refused: it would be code by name."""
    known = type(text) is str and type(encoding) is str and encoding.lower() in ("latin1", "latin-1", "iso-8859-1")
    _want(known, f"_codecs.encode({_brief(text)}, {_brief(encoding)}) is no spelling of bytes", "E0420")
    try:
        return bytes(text.encode("latin-1"))
    except UnicodeEncodeError as e:
        raise Misuse(f"bytes spelt as latin-1 text hold a character that is not latin-1: {e.reason}", "E0363") from e


def _encode(args: Args) -> bytes:
    _want(len(args) == 2, "_codecs.encode takes a text and a codec", "E0420")
    return _text_bytes(*args)


def _bytes(args: Args) -> bytes:
    if not args:
        return b""
    if len(args) == 2:
        return _text_bytes(*args)
    _want(len(args) == 1 and isinstance(args[0], bytes), f"bytes({_brief(args[0])}) is no spelling of bytes")
    return bytes(args[0])


def _numbers(name: str, least: int, most: int, kinds: tuple[type, ...]) -> Callable[[Args], Opaque]:
    def build(args: Args) -> Opaque:
        _want(least <= len(args) <= most and all(type(a) in kinds for a in args), f"bad arguments of {name}")
        return Opaque(name, args)

    return build


_INTS = (int, type(None))
BUILDERS: dict[str, Callable[[Args], Any]] = {
    **TENSOR_BUILDERS,
    **NUMPY_BUILDERS,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "builtins.complex": _numbers("builtins.complex", 2, 2, (float, int)),
    "builtins.slice": _numbers("builtins.slice", 1, 3, _INTS),
    "builtins.range": _numbers("builtins.range", 1, 3, (int,)),
    **{name: partial(Opaque, name) for name in UNSUPPORTED_TENSORS},
    **{name: partial(_device_array, name) for name in FROM_NUMPY},
    _FROM_CPU: _device_tensor,
}

# Builders that copy what they are given: the machine charges them for its length.
COPYING: dict[str, Callable[[Args], Any]] = {
    "collections.OrderedDict": _mapping,
    "collections.Counter": _mapping,
    "collections.defaultdict": _default_map,
    "collections.deque": _deque,
    "builtins.dict": _mapping,
    "builtins.list": lambda args: list(_items(args, "a list")),
    "builtins.tuple": lambda args: tuple(_items(args, "a tuple")),
    "builtins.set": lambda args: {safe_key(item) for item in _items(args, "a set")},
    "builtins.frozenset": lambda args: frozenset(safe_key(item) for item in _items(args, "a frozenset")),
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "_codecs.encode": _encode,
}


def enum_member(name: str, value: Any) -> Symbol:
    """A member of a known enum, by value or by name: `Symbol(name, (value,))`."""
    _want(type(value) in (int, str, bool), f"member {_brief(value)} of {name}")
    return Symbol(name, (ENUMS[name].get(value, value) if type(value) is str else value,))
