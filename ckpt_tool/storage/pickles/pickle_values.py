"""What a pickle is read into: plain Python values and a few inert records. Nothing here can act.

    None, bool, int, float, str, bytes, list, tuple, set, dict      as they are
    collections.OrderedDict, defaultdict, Counter                   OrderedMap (a dict)
    torch.Size                                                      tuple of int
    torch.float32, torch.device("cpu"), torch.strided, an enum      core.extras.Symbol
    a torch tensor                                                  TensorRef (over a StorageRef)
    a DTensor                                                       WrapperRef (over its local TensorRef)
    numpy.ndarray                                                   NumpyArray; NumPy scalars become Python numbers
    a tensor that torch pickles as a NumPy array (XLA's)            ArrayRef (over its NumpyArray)
    metadata classes of DCP, DTensor, Paddle                        Record, with attribute-like access
    any other class                                                 core.extras.Opaque(name, args, state)

Example: the state dict `{"w": torch.zeros(2, 3)}` reads as

    {"w": TensorRef(StorageRef("0", F32, numel=6, nbytes=24, ...), offset=0, shape=(2, 3), stride=(3, 1), dtype=F32)}

Record, NumpyArray and Opaque are filled in place while the pickle is read (a pickle names an object before its
state); afterwards they are values. Records compare by identity: index DCP's `storage_data` by fields of its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.errors import CorruptFile

if TYPE_CHECKING:
    from ckpt_tool.compiled.rows import RowColumns as Taken


class StorageSpan(NamedTuple):
    """Bytes left in the file: `nbytes` at `offset` (bytes from the start of the file). Only `load_file` makes them."""

    offset: int
    nbytes: int


class Placed(bytes):
    """Short bytes that were read, with their place. offset: bytes from the start of the file. Only `load_file` makes
    them, where it was asked for places."""

    offset: int = -1


class StorageRef(NamedTuple):
    """A torch storage that a persistent id names."""

    key: str  # record `data/<key>` of a zip, or the key of a legacy stream
    dtype: DType | None  # None when torch's type has no twin here (quantised types, complex32)
    numel: int  # elements of the storage class, bytes for an UntypedStorage
    nbytes: int  # bytes
    location: str  # where it lived (`cpu`, `cuda:0`); ignored
    kind: str  # the storage class, `FloatStorage`


class TensorRef(NamedTuple):
    """A dense tensor over a storage."""

    storage: StorageRef
    # offset, stride: in elements of `dtype`. Checked when made: ints >= 0, rank <= 64, the view is inside
    # `storage.nbytes`
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: DType
    requires_grad: bool = False
    is_parameter: bool = False
    # Python attributes of the tensor object (Megatron's `tensor_model_parallel`, ...), None if none
    attributes: Any = None

    @property
    def contiguous(self) -> bool:
        """Row-major without gaps (dims of extent 1 may have any stride; empty tensors always are)."""
        step = 1
        if 0 in self.shape:
            return True
        for extent, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and stride != step:
                return False
            step *= extent
        return True


@dataclass(slots=True, eq=False)
class WrapperRef:
    """A tensor subclass that wraps a local tensor: `torch.distributed.tensor.DTensor`."""

    name: str  # the class
    # shape, stride: the GLOBAL ones, in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: DType
    requires_grad: bool
    # the part of it in this file; an object if that part is a tensor subclass too; None until its state was read
    local: TensorRef | Opaque | None = None
    spec: PickledRecord | None = None  # the DTensorSpec as a Record (mesh, placements, tensor_meta)
    state: Any = None


class MissingField(CorruptFile, AttributeError):
    """A record lacks a field. Is a CorruptFile (exit 3) and, for `getattr` with a default, an AttributeError."""

    default_code = "E0378"


class Irregular(Exception):
    """A pickle does something with its rows that columns have no answer to: read it without."""


class RowRun:
    """Rows that were taken as columns (`pickle_rows`), in place of one of their objects.

    taken: all values of the rows. columns: name -> (kind of value, which of the row's values of that kind, how many a
    row has). texts: the texts of all runs so far, by id.
    """

    __slots__ = ("columns", "taken", "texts")

    def __init__(self, taken: Taken, columns: Mapping[str, tuple[str, int, int]], texts: Mapping[int, str]) -> None:
        self.taken = taken
        self.columns = columns
        self.texts = texts


class PickledRecord:
    """An object of a known class: `name` (module.class), `args`, `state`, and its fields as attributes.

        chunk = PickledRecord("torch.distributed.checkpoint.metadata.ChunkStorageMetadata", state={"offsets": (0,),
        ...}) chunk.offsets                      # (0,)
        chunk.get("sizes", tuple)          # the field, checked: CorruptFile when absent or of another type
        "offsets" in chunk, list(chunk)    # fields at hand

    Field names never start with an underscore here: `mesh.get("_rank_map")` reads those.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = (), state: dict[str, Any] | None = None) -> None:
        self.name = name
        self.args = args
        self.state: dict[str, Any] | None = state

    def __getattr__(self, field: str) -> Any:
        if not field.startswith("_") and self.state is not None and field in self.state:
            return self.state[field]
        if field.startswith("__"):  # copy, pickle, inspect ask for these
            raise AttributeError(field)
        raise MissingField(
            f"a {self.name} has no field {field!r}; it has {', '.join(map(str, self.state or ())) or 'none'}",
            hint="the file is damaged, or of a version that this one does not know",
        )

    def get(self, field: str, kind: type | tuple[type, ...] | None = None, *, path: str | None = None) -> Any:
        """The field, which must be there and, with `kind`, of that type. Raises MissingField (a CorruptFile)."""
        if self.state is None or field not in self.state:
            raise MissingField(
                f"a {self.name} has no field {field!r}",
                path=path,
                hint="the file is damaged, or of a version that this one does not know",
            )
        value = self.state[field]
        if kind is not None and not isinstance(value, kind):
            raise MissingField(
                f"field {field!r} of a {self.name} is {type(value).__name__}, not {_names(kind)}",
                path=path,
                hint="the file is damaged, or of a version that this one does not know",
            )
        return value

    def __contains__(self, field: str) -> bool:
        return self.state is not None and field in self.state

    def __iter__(self) -> Iterator[str]:
        return iter(self.state or ())

    def __repr__(self) -> str:
        return f"Record({self.name!r}, args={len(self.args)}, fields={list(self.state or ())})"


def _names(kind: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))


class OrderedMap(dict[Any, Any]):
    """A dict that was an OrderedDict, defaultdict or Counter. attributes: those of the object itself (`_metadata` of a
    torch state dict), None if it has none."""

    __slots__ = ("attributes",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.attributes: Any = None


class NumpyArray:
    """A numpy.ndarray. dtype: NumPy's type string with byte order (`<f4`, `|u1`, or `bfloat16` of ml_dtypes; `|O` of
    Python objects, `{structured}` of records). shape: elements. fortran: column-major. data: the raw bytes, or
    their place (`StorageSpan`); the list of values if they are objects. at: offset in bytes of its data in the view of
    its pickle's arrays (`inline_arrays`), -1 if it is not part of that view."""

    __slots__ = ("at", "data", "dtype", "fortran", "shape")

    def __init__(
        self,
        dtype: str = "",
        shape: tuple[int, ...] = (),
        fortran: bool = False,
        data: bytes | StorageSpan | list[Any] = b"",
    ) -> None:
        self.at = -1
        self.dtype = dtype
        self.shape = shape
        self.fortran = fortran
        self.data = data

    def __repr__(self) -> str:
        return f"NumpyArray({self.dtype!r}, {self.shape}, fortran={self.fortran})"


class ArrayRef(NamedTuple):
    """A dense tensor whose values are a NumPy array's."""

    array: NumpyArray
    dtype: DType  # the tensor's own
    # the tensor is BF16 and the array holds its values as F32, as torch pickles tensors of devices without storage
    widened: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements."""
        return self.array.shape


class GlobalUse(NamedTuple):
    """A global that the pickle names, at its first use."""

    # module, name: as the file spells them
    module: str
    name: str
    position: int  # number of the opcode, from 0
    offset: int  # bytes from the start of the stream's file
    tier: int  # 1 understood, 2 kept as a record, 3 unsafe

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Pickled(NamedTuple):
    """One pickle, read."""

    value: Any
    globals: tuple[GlobalUse, ...]  # each once, in order of first use
    end: int  # bytes from the start of the file to just behind STOP
    opcodes: int  # how many were executed
    protocol: int  # the PROTO opcode's, 0 without one
    storages: tuple[StorageRef, ...] = ()  # each torch storage that a persistent id names, once

    @property
    def unsafe(self) -> tuple[GlobalUse, ...]:
        """The globals of tier 3: `inspect` shows them, everything else refuses (`pickles.refuse_unsafe`)."""
        return tuple(use for use in self.globals if use.tier == 3)


def as_extras(value: Any) -> Any:
    """`value` with what `core.extras` cannot hold turned into Opaque: Record, NumpyArray (its bytes must be loaded),
    set as it is. TensorRef, WrapperRef and Span stay: they are no extras, the caller takes them out first."""
    kind = type(value)
    if kind in (str, int, float, bool, bytes, type(None), Symbol):
        return value
    if kind is Placed:
        return bytes(value)
    if isinstance(value, dict):
        return {key: as_extras(item) for key, item in value.items()}
    if kind is list:
        return [as_extras(item) for item in value]
    if kind is tuple:
        return tuple(as_extras(item) for item in value)
    if isinstance(value, PickledRecord):
        return Opaque(value.name, tuple(as_extras(item) for item in value.args), as_extras(value.state))
    if isinstance(value, Opaque):
        return Opaque(value.name, tuple(as_extras(item) for item in value.args), as_extras(value.state))
    if isinstance(value, NumpyArray):
        return Opaque("numpy.ndarray", (value.dtype, value.shape, value.fortran, as_extras(value.data)))
    return value


UNSAFE = frozenset({"E0420", "E0423"})  # codes of complaints that become UnsafeInput; the others become CorruptFile


class Misuse(Exception):
    """A builder's or the machine's complaint, raised inside and turned into a CkptError with its place at once."""

    def __init__(self, what: str, code: str) -> None:
        super().__init__(what)
        self.what = what
        self.code = code


class MoreWanted(Exception):
    """The machine's window ends inside an opcode's argument: `nbytes` are wanted from the opcode's start."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


KEY_LIMIT = 65536  # characters
SCALARS = frozenset({str, int, float, bool, bytes, type(None)})


def safe_key(key: Any) -> Any:
    """`key` as a dict key or set member that can be hashed and compared in little time.

    Scalars, records (by identity) and tuples of at most 64 parts pass; an Opaque becomes a Symbol of its name and
    scalar arguments; anything else raises Misuse. The bounds matter: hashing a tuple costs its size at each look-up,
    and hashing one nested a million deep would end the process.
    """
    return _safe_part(key, [64])


def _safe_part(key: Any, room: list[int]) -> Any:
    room[0] -= 1
    key = bytes(key) if type(key) is Placed else key
    kind = type(key)
    if room[0] < 0:
        raise Misuse("a dict key has more than 64 parts", "E0369")
    if kind is str or kind is bytes:
        if len(key) > KEY_LIMIT:
            raise Misuse(f"a dict key of {len(key)} characters, want at most {KEY_LIMIT}", "E0369")
        return key
    if kind in SCALARS or kind is PickledRecord or kind is Symbol or kind is frozenset or kind is RowRun:
        return key
    if kind is tuple:
        return tuple(_safe_part(item, room) for item in key)
    if kind is Opaque:
        plain = len(key.args) <= 8 and all(type(item) in SCALARS for item in key.args)
        return Symbol(key.name, key.args if plain else (f"object of {len(key.args)} arguments",))
    if kind is TensorRef:  # `optimizer.state` saved as it is has parameters for keys
        return key._replace(attributes=None)
    raise Misuse(f"a {kind.__name__} is no dict key", "E0364")
