"""The skeleton writer: plain values and records of known classes as a pickle that names only what is in our tables.

The idea: output pickles are written from values, never copied from an input, so no name of an input's pickle can travel
on. What may be named is fixed: torch's rebuild functions, storages, dtypes, `torch.Size`, the metadata classes and
enums of `pickle_globals`, a few plain containers. Anything else is an error that names it.

    >>> dumps({"step": 7})
    b'\\x80\\x02}q\\x00X\\x04\\x00\\x00\\x00stepq\\x01K\\x07s.'

Deterministic: equal values give equal bytes; dicts keep their order, sets are sorted, each text and name is written
once and then fetched from the memo. Protocol 2 uses the opcodes that `torch.load(weights_only=True)` reads; protocol 4
suits `pickle.load`, as DCP's and Paddle's metadata is read. Cost: about 1 us a value. What it does not do: shared or
cyclic objects (each mention is written out), torch.storage objects of their own. Source: torch 2.13
`_weights_only_unpickler.py`, `serialization.py` `persistent_id`; CPython `pickle.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import contiguous_strides
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.errors import UsageError
from ckpt_tool.storage.pickles.pickle_globals import (
    ENUMS,
    LAYOUTS,
    PLAIN_OBJECTS,
    RECORDS,
    STORAGE_CLASSES,
    TORCH_DTYPES,
)
from ckpt_tool.storage.pickles.pickle_values import (
    NumpyArray,
    OrderedMap,
    PickledRecord,
    StorageRef,
    StorageSpan,
    TensorRef,
)

DEPTH_LIMIT = 200
BATCH = 1000  # items of one SETITEMS or APPENDS, as CPython writes them
_CLASS_OF = {dtype.name: name for name, (dtype, _) in STORAGE_CLASSES.items() if dtype and "ntyped" not in name}
_DCP = "torch.distributed.checkpoint"
# Fields that torch writes as torch.Size, which reads as a plain tuple.
_SIZES = {
    f"{_DCP}.metadata.TensorStorageMetadata": ("size",),
    f"{_DCP}.metadata.ChunkStorageMetadata": ("offsets", "sizes"),
    f"{_DCP}.metadata.MetadataIndex": ("offset",),
    f"{_DCP}.planner.TensorWriteData": ("size",),
}
# Records whose class takes its state as a tuple in the order of its fields.
_TUPLE_STATES = frozenset({f"{_DCP}.metadata.TensorProperties"})
_CALLED = frozenset({"builtins.complex", "builtins.slice", "builtins.range"})


class TorchSize(tuple[int, ...]):
    """A tuple to be written as `torch.Size`."""

    __slots__ = ()


def stored(
    key: str, shape: Sequence[int], dtype: DType, *, requires_grad: bool = False, parameter: bool = False
) -> TensorRef:
    """A dense tensor of a new file: row-major, alone in storage `key`. Raises UsageError E0375 for sub-byte dtypes."""
    if dtype.torch is None:
        raise _refused(f"{dtype.name} tensors", "torch has no such dtype: choose another with --dtype")
    numel = prod(shape)
    nbytes = dtype.nbytes(numel)
    kind = _CLASS_OF.get(dtype.name)
    storage = StorageRef(key, dtype, numel, nbytes, "cpu", kind) if kind else None
    if storage is None:
        storage = StorageRef(key, STORAGE_CLASSES["UntypedStorage"][0], nbytes, nbytes, "cpu", "UntypedStorage")
    steps = contiguous_strides(shape)
    return TensorRef(storage, 0, tuple(shape), steps, dtype, requires_grad=requires_grad, is_parameter=parameter)


def dumps(value: Any, *, protocol: int = 2) -> bytes:
    """`value` as a pickle, deterministic: equal values give equal bytes.

    Takes plain values, TorchSize, OrderedMap (as OrderedDict), Symbol of dtypes, devices, layouts and known enums,
    Record and Opaque of the classes in our tables, NumpyArray with loaded bytes, and TensorRef: as
    `torch._utils._rebuild_tensor_v2`, or `_v3` over an UntypedStorage for dtypes without a storage class; storages by
    persistent id `("storage", class, key, "cpu", numel)`.
    protocol: 2 for torch files, 4 for the metadata of DCP and Paddle.
    Raises UsageError E0375 naming anything that is not on the list.
    """
    plan = plan_pickle(value, protocol=protocol)
    if plan.offsets:
        raise _refused("a NumPy array whose bytes were not loaded")
    return plan.literals[0][1]


class PicklePlan(NamedTuple):
    """A pickle before its arrays' bytes exist."""

    size: int  # bytes
    literals: tuple[tuple[int, bytes], ...]  # (offset, bytes)
    offsets: tuple[int, ...]  # where the bytes of each Span go, in the order of the value


def plan_pickle(value: Any, *, protocol: int = 4) -> PicklePlan:
    """`value` as a pickle in which each NumpyArray over a `StorageSpan` is a hole of `StorageSpan.nbytes` bytes (its
    offset is
    ignored), so that a `.pdparams` is laid out before a tensor byte moves. Else as `dumps`; holes want protocol >=
    3."""
    if protocol not in (2, 3, 4):
        raise _refused(f"pickle protocol {protocol}", "want 2, 3 or 4")
    writer = PickleWriter(protocol)
    writer.save(value)
    writer.out += b"."
    literals = []
    offsets = []
    start = shift = 0  # in `out`; bytes of the holes so far
    for at, nbytes in writer.holes:
        literals.append((start + shift, bytes(writer.out[start:at])))
        offsets.append(at + shift)
        start = at
        shift = shift + nbytes
    literals.append((start + shift, bytes(writer.out[start:])))
    return PicklePlan(len(writer.out) + shift, tuple(literals), tuple(offsets))


def _refused(what: str, hint: str = "drop it by name, or convert it to plain values") -> UsageError:
    return UsageError(f"{what} can't be written into a pickle of ours", code="E0375", hint=hint)


class PickleWriter:
    """One pickle in the making. out: the bytes so far; memo: text or name -> its number."""

    def __init__(self, protocol: int) -> None:
        self.protocol = protocol
        self.out = bytearray(b"\x80" + bytes([protocol]))
        self.memo: dict[object, int] = {}
        self.count = 0  # memo entries
        self.depth = 0
        self.holes: list[tuple[int, int]] = []  # (index in out, bytes)

    def save(self, value: Any) -> None:
        """Write one value."""
        write = WRITERS.get(type(value))
        if write is None:
            raise _refused(f"a value of type {type(value).__name__}")
        self.depth += 1
        if self.depth > DEPTH_LIMIT:
            raise _refused(f"a value nested more than {DEPTH_LIMIT} deep (or holding itself)")
        write(self, value)
        self.depth -= 1

    # -- memo ---------------------------------------------------------------------------------------------------------

    def _remember(self, key: object = None) -> None:
        """Give what is on top of the stack the next memo number."""
        if self.protocol >= 4:
            self.out += b"\x94"
        elif self.count < 256:
            self.out += b"q" + bytes([self.count])
        else:
            self.out += b"r" + struct.pack("<I", self.count)
        if key is not None:
            self.memo[key] = self.count
        self.count += 1

    def _recalled(self, key: object) -> bool:
        """Fetch `key` from the memo if it is there."""
        number = self.memo.get(key)
        if number is None:
            return False
        self.out += b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)
        return True

    # -- plain values -------------------------------------------------------------------------------------------------

    def none(self, value: None) -> None:
        """None."""
        self.out += b"N"

    def boolean(self, value: bool) -> None:
        """True or False."""
        self.out += b"\x88" if value else b"\x89"

    def integer(self, value: int) -> None:
        """A whole number of any size, in the shortest opcode that holds it."""
        if 0 <= value < 256:
            self.out += b"K" + bytes([value])
        elif 0 <= value < 65536:
            self.out += b"M" + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            # One more bit than the number has, for its sign.
            raw = value.to_bytes((value.bit_length() >> 3) + 1, "little", signed=True)
            if len(raw) > 255:
                raise _refused(f"an integer of {len(raw)} bytes")
            self.out += b"\x8a" + bytes([len(raw)]) + raw

    def real(self, value: float) -> None:
        """A float, as eight big-endian bytes."""
        self.out += b"G" + struct.pack(">d", value)

    def text(self, value: str) -> None:
        """A str; one that was written before is taken from the memo."""
        if self._recalled(value):
            return
        raw = value.encode("utf-8", "surrogatepass")
        if len(raw) >= 1 << 32:
            raise _refused(f"a text of {len(raw)} bytes")
        if self.protocol >= 4 and len(raw) < 256:
            self.out += b"\x8c" + bytes([len(raw)]) + raw
        else:
            self.out += b"X" + struct.pack("<I", len(raw)) + raw
        self._remember(value)

    def raw(self, value: bytes) -> None:
        """bytes; protocol 2 has none and spells them as latin-1 text, as Python does."""
        if self.protocol < 3:
            self.named("_codecs.encode")
            self.text(value.decode("latin-1"))
            self.text("latin1")
            self.out += b"\x86R"
        else:
            self._counted(len(value))
            self.out += value

    def _counted(self, nbytes: int) -> None:
        """The opcode of a byte string and its length."""
        if nbytes < 256:
            self.out += b"C" + bytes([nbytes])
        elif nbytes < 1 << 32:
            self.out += b"B" + struct.pack("<I", nbytes)
        elif self.protocol >= 4:
            self.out += b"\x8e" + struct.pack("<Q", nbytes)
        else:
            raise _refused(f"{nbytes} bytes in protocol {self.protocol}", "want protocol 4")

    # -- containers ---------------------------------------------------------------------------------------------------

    def tuple_of(self, value: tuple[Any, ...]) -> None:
        """A tuple; up to three items have opcodes without a mark."""
        if len(value) > 3:
            self.out += b"("
        for item in value:
            self.save(item)
        self.out += (b")", b"\x85", b"\x86", b"\x87")[len(value)] if len(value) < 4 else b"t"

    def list_of(self, value: Iterable[Any]) -> None:
        """A list of values, in batches as CPython writes them."""
        self.out += b"]"
        self._remember()
        items = iter(value)
        while batch := [*islice(items, BATCH)]:
            self.out += b"("
            for item in batch:
                self.save(item)
            self.out += b"e"

    def dict_of(self, value: dict[Any, Any]) -> None:
        """A dict, in its own order."""
        self.out += b"}"
        self._remember()
        self._items(value)

    def _items(self, value: dict[Any, Any]) -> None:
        items = iter(value.items())
        while batch := [*islice(items, BATCH)]:
            if len(batch) > 1:
                self.out += b"("
            for key, item in batch:
                self.save(key)
                self.save(item)
            self.out += b"u" if len(batch) > 1 else b"s"

    def ordered(self, value: OrderedMap) -> None:
        """A `collections.OrderedDict`, with the attributes that were set on it."""
        self.named("collections.OrderedDict")
        self.out += b")R"
        self._remember()
        self._items(value)
        if value.attributes:
            self.save(value.attributes)
            self.out += b"b"

    def set_of(self, value: set[Any] | frozenset[Any]) -> None:
        """A set or frozenset, sorted by `repr` so that equal sets give equal bytes."""
        self.named("builtins.set" if isinstance(value, set) else "builtins.frozenset")
        self.list_of(sorted(value, key=repr))
        self.out += b"\x85R"

    # -- names, calls, records ----------------------------------------------------------------------------------------

    def named(self, full: str) -> None:
        """A global of ours, `module.name`."""
        if self._recalled((full,)):
            return
        module, _, name = full.rpartition(".")
        # The name of the module in Python 2, which protocol 2 is written for.
        if self.protocol < 3 and module == "builtins":
            module = "__builtin__"
        self.out += b"c" + f"{module}\n{name}\n".encode("ascii")
        self._remember((full,))

    def _call(self, full: str, args: tuple[Any, ...]) -> None:
        self.named(full)
        self.tuple_of(args)
        self.out += b"R"

    def size(self, value: TorchSize) -> None:
        """A `torch.Size`."""
        self._call("torch.Size", (tuple(value),))

    def symbol(self, value: Symbol) -> None:
        """A name and its arguments, as one of the calls that the machine knows."""
        if value.name in TORCH_DTYPES and not value.args:
            self.named(value.name)
        elif value.name in LAYOUTS and not value.args:
            self._call("torch.serialization._get_layout", (value.name,))
        elif (value.name == "torch.device" and value.args) or (value.name in ENUMS and len(value.args) == 1):
            self._call(value.name, value.args)
        elif value.name == "numpy.dtype" and len(value.args) == 1:
            self._numpy_dtype(value.args[0])
        else:
            raise _refused(f"the name {value.name}")

    def record(self, value: PickledRecord) -> None:
        """An object of a class of RECORDS, with its state. Raises what is refused for any other."""
        if value.name not in RECORDS:
            raise _refused(f"an object of class {value.name}")
        self.named(value.name)
        if value.args:  # a named tuple: its arguments are all there is
            self.tuple_of(value.args)
            self.out += b"\x81"
            return
        self.out += b")\x81"
        state = value.state
        if not state:
            return
        sizes = _SIZES.get(value.name, ())
        fields = {k: TorchSize(v) if k in sizes and type(v) is tuple else v for k, v in state.items()}
        if value.name in _TUPLE_STATES:
            self.save(tuple(fields.get(name) for name in RECORDS[value.name]))
        else:
            self.save(fields)
        self.out += b"b"

    def opaque(self, value: Opaque) -> None:
        """An object that was read and not understood, where its form is that of an array or a scalar of NumPy."""
        if value.name == "numpy.ndarray" and len(value.args) == 4:
            self.array(NumpyArray(*value.args))
            return
        if value.name == "numpy.scalar" and len(value.args) == 2:
            self.named("numpy.core.multiarray.scalar")
            self._numpy_dtype(value.args[0])
            self.raw(value.args[1])
            self.out += b"\x86R"
            return
        if value.name not in PLAIN_OBJECTS and value.name not in _CALLED:
            raise _refused(f"an object of class {value.name}")
        self.named(value.name)
        self.tuple_of(value.args)
        self.out += b"R" if value.args or value.name in _CALLED else b"\x81"
        if value.state is not None:
            self.save(value.state)
            self.out += b"b"

    # -- arrays -------------------------------------------------------------------------------------------------------

    def tensor(self, value: TensorRef) -> None:
        """A tensor or parameter over a storage, as torch rebuilds it."""
        if value.is_parameter:
            self.named("torch._utils._rebuild_parameter")
            self.tensor(value._replace(is_parameter=False, requires_grad=False))
            self.boolean(value.requires_grad)
            self._call("collections.OrderedDict", ())
            self.out += b"\x87R"
            return

        typed = _CLASS_OF.get(value.dtype.name) == value.storage.kind
        function = "torch._utils._rebuild_tensor_v2" if typed else "torch._utils._rebuild_tensor_v3"
        if value.attributes:
            self.named("torch._tensor._rebuild_from_type_v2")
            self.out += b"("

        self.named(function)
        if value.attributes:
            self.named("torch.Tensor")
        self.out += b"("
        self._storage(value.storage)
        for item in (value.offset, value.shape, value.stride, value.requires_grad):
            self.save(item)

        self._call("collections.OrderedDict", ())
        if not typed:
            self.named(f"torch.{value.dtype.torch}")
        self.out += b"t"
        if value.attributes:
            self.save(value.attributes)
            self.out += b"t"

        self.out += b"R"

    def _storage(self, ref: StorageRef) -> None:
        if ref.kind not in STORAGE_CLASSES:
            raise _refused(f"a storage of class {ref.kind}")
        self.out += b"("
        self.text("storage")
        self.named(f"torch.storage.{ref.kind}" if "ntyped" in ref.kind else f"torch.{ref.kind}")
        self.text(ref.key)
        self.text("cpu")
        self.integer(ref.numel)
        self.out += b"tQ"

    def array(self, value: NumpyArray) -> None:
        """A numpy.ndarray; the module's old name is the one that NumPy 1 and 2 both know."""
        if isinstance(value.data, StorageSpan) and self.protocol < 3:
            raise _refused("a NumPy array whose bytes come later, in protocol 2", "want protocol 4")
        self.named("numpy.core.multiarray._reconstruct")
        self.named("numpy.ndarray")
        self.tuple_of((0,))
        self.raw(b"b")
        self.out += b"\x87R("
        self.integer(1)
        self.tuple_of(value.shape)
        self._numpy_dtype(value.dtype)
        self.boolean(value.fortran)
        if isinstance(value.data, StorageSpan):
            self._counted(value.data.nbytes)
            self.holes.append((len(self.out), value.data.nbytes))
        elif isinstance(value.data, bytes):
            self.raw(value.data)
        else:
            raise _refused("a NumPy array of Python objects")
        self.out += b"tb"

    def _numpy_dtype(self, code: str) -> None:
        bare = code.lstrip("<>|=")
        if not (bare.isalnum() and bare[:1] in "biufcSUV"):
            raise _refused(f"the NumPy dtype {code}")
        self._call("numpy.dtype", (bare, False, True))
        self.save((3, code[0] if code[0] in "<>|" else "|", None, None, None, -1, -1, 0))
        self.out += b"b"


WRITERS: dict[type, Callable[[PickleWriter, Any], None]] = {
    type(None): PickleWriter.none,
    bool: PickleWriter.boolean,
    int: PickleWriter.integer,
    float: PickleWriter.real,
    str: PickleWriter.text,
    bytes: PickleWriter.raw,
    bytearray: lambda writer, value: writer.raw(bytes(value)),
    tuple: PickleWriter.tuple_of,
    list: PickleWriter.list_of,
    dict: PickleWriter.dict_of,
    OrderedMap: PickleWriter.ordered,
    set: PickleWriter.set_of,
    frozenset: PickleWriter.set_of,
    TorchSize: PickleWriter.size,
    Symbol: PickleWriter.symbol,
    PickledRecord: PickleWriter.record,
    Opaque: PickleWriter.opaque,
    TensorRef: PickleWriter.tensor,
    NumpyArray: PickleWriter.array,
}
