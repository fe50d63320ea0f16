"""One `paddle.save` file as data, and a new one composed of pieces.

The one idea: such a file is a pickle of dicts that contains the bytes of its arrays unencoded, so reading it means
recording where each array is, and writing it means leaving gaps where the bytes will go.

    model_state.pdparams {"fc.weight": array, ..., "StructuredToParameterName@@": {"fc.weight": "linear_0.w_0"}}
      -> Saved(("fc.weight",), "linear_0.w_0", (8, 12), F32, (StoredArray("model_state.pdparams", 721, ...),))

    composer = PaddleComposer()
    weight = composer.tensor((8, 12), F32, [StoragePart(0, whole((8, 12)), 0)])
    file = composer.file("model_state.pdparams", {"fc.weight": weight}, {"fc.weight": "linear_0.w_0"})

Specification (PaddlePaddle 3.3.1, `python/paddle/framework/io.py`, `io_utils.py`; checked against files that it wrote):

* A pickle of protocol 2 to 4 (4 by default; 2 was the default before 2.1). Tensors are NumPy arrays, pickled the
    ordinary way.
* Encoding A, where every value is a tensor or a dict without one: plain arrays, and as last key the name table
  `StructuredToParameterName@@` {key: the tensor's own name}. `{}` is a table alone, 47 bytes.
* Encoding B, anything else (masters, nesting, lists, a bare tensor): each tensor is `tuple((name, array))`, no table.
* bfloat16 is stored as uint16 bits, float8 as int8 bits, without a mark. Paddle has no uint16 tensors of its own.
* Protocols 2 and 3 cut arrays of more than (2^30 - 1) / itemsize elements: flat parts `KEY@@.0`, `KEY@@.1`, ... and
  `UnpackBigParamInfor@@` {KEY: {"OriginShape": shape, "slices": [the parts' keys]}}.
* In protocol 2 arrays are text (`pickles.inline_arrays`). Versions after 3.3 write protocol 5 (NumPy's `_frombuffer`).

Written: protocol 4, the bytes that Paddle writes (`pickles.pickle_frames`). Cost: as the pickle; some us a value
written. What it does not do: names and states (`paddle.stored_names`); `use_binary_format`, a C++ dump that is no
pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box, contiguous_strides, whole
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.extras import Opaque
from ckpt_tool.core.flat_line import FlatLine
from ckpt_tool.core.target import TargetArray, TargetFile
from ckpt_tool.core.tensor import Chunk, Path, StoredArray
from ckpt_tool.errors import CorruptFile, InputError, InternalError, UnsafeInput, UsageError
from ckpt_tool.formats.state_dict.composer import StoragePart
from ckpt_tool.formats.state_dict.tree import DEPTH_LIMIT, SLOT, dotted
from ckpt_tool.storage.pickles import pickle_reader as pickles
from ckpt_tool.storage.pickles.inline_arrays import INLINE, inline_arrays, refuse_large
from ckpt_tool.storage.pickles.pickle_frames import Anew, FramePair, plan_framed
from ckpt_tool.storage.pickles.pickle_values import NumpyArray, StorageSpan, as_extras
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.dtypes import BY_CODE, CODES

# -- composing ---------------------------------------------------------------------------------------------------------

TABLE = "StructuredToParameterName@@"
DTYPE = "E1302"


class PaddleArray(NamedTuple):
    """A tensor of a `PaddleComposer`, to be put into a state."""

    number: int
    shape: tuple[int, ...]
    dtype: DType


class NamedTensor(NamedTuple):
    """A tensor with its own name: written as the pair of encoding B."""

    name: str
    ref: PaddleArray


class _PickleSource(NamedTuple):
    """Where the bytes of a tensor come from."""

    parts: Sequence[StoragePart]  # of wanted tensors
    data: bytes | None  # the bytes themselves, if they are known already


class PaddleComposer:
    """A new `paddle.save` file, array by array. Equal input gives equal bytes."""

    def __init__(self) -> None:
        self._sources: list[_PickleSource] = []

    def tensor(self, shape: Sequence[int], dtype: DType, parts: Sequence[StoragePart]) -> PaddleArray:
        """A tensor that `parts` fill; what they leave out is zero. BF16 is written as uint16 bits. Raises UsageError
        E0258 for a type that NumPy lacks."""
        return self._add(shape, dtype, parts, None)

    def value(self, shape: Sequence[int], dtype: DType, data: bytes) -> PaddleArray:
        """A tensor whose bytes (little-endian, row-major) are known already."""
        if len(data) != dtype.nbytes(prod(shape)):
            raise InternalError(f"{len(data)} bytes for a {dtype.name} tensor of shape {tuple(shape)}")
        return self._add(shape, dtype, (), data)

    def _add(self, shape: Sequence[int], dtype: DType, parts: Sequence[StoragePart], data: bytes | None) -> PaddleArray:
        if dtype.name not in CODES:
            raise UsageError(
                f"paddle.save has no place for {dtype.name}", code="E0258", hint="choose another type with --dtype"
            )
        self._sources.append(_PickleSource(parts, data))
        return PaddleArray(len(self._sources) - 1, tuple(shape), dtype)

    def file(self, path: str, state: Mapping[str, Any], names: Mapping[str, str] | None) -> TargetFile:
        """The plan of the file for `state`, which contains tensors of this composer.

        Args:
            path: Of the file.
            state: The dict to save.
            names: Static names by key, for encoding A; None for encoding B, whose tensors are `NamedTensor`.

        Raises:
            UsageError: E0375, a value that our pickles can't hold.
        """
        order: list[PaddleArray] = []
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


def _target(part: StoragePart, dtype: DType, offset: int) -> TargetArray:
    return TargetArray(part.tensor, part.box, offset + dtype.nbytes(part.start), strides=part.strides)


def _body(item: Any, order: list[PaddleArray]) -> Any:
    """A value of the state as the pickle writer takes it; appends its tensors to `order` as they are written."""
    if isinstance(item, NamedTensor):
        return FramePair((Anew(item.name), _array(item.ref, order)))
    if isinstance(item, PaddleArray):
        return _array(item, order)
    if isinstance(item, Mapping):
        return {key: _body(value, order) for key, value in item.items()}
    if type(item) is list:
        return [_body(value, order) for value in item]
    if type(item) is tuple:
        return tuple(_body(value, order) for value in item)
    return item


def _array(ref: PaddleArray, order: list[PaddleArray]) -> NumpyArray:
    order.append(ref)
    code = CODES[ref.dtype.name]
    order_mark = "|" if code in ("b1", "i1", "u1") else "<"
    return NumpyArray(order_mark + code, ref.shape, False, StorageSpan(0, ref.dtype.nbytes(prod(ref.shape))))


# -- reading -----------------------------------------------------------------------------------------------------------

SLICES = "UnpackBigParamInfor@@"
TOO_LARGE = "E1301"
ORDER = "E1303"
MALFORMED = "E1304"
_NOT_PICKLE = "E1305"
KEY_LIMIT = 4096  # characters of a key on the way to a tensor, as for safetensors


class Saved(NamedTuple):
    """One tensor of a file."""

    path: Path  # the keys that lead to it; slices are joined under their key; ("value",) for a bare tensor
    name: str  # its static name, "" if unknown
    shape: tuple[int, ...]  # as stored
    dtype: DType  # as stored: U16 may be bf16
    parts: tuple[StoredArray, ...]  # one array, or flat slices in row-major order


class PaddleContent(NamedTuple):
    """The content of one file: its tensors, and everything else."""

    leaves: list[Saved]  # its tensors, in the file's order
    extras: Any  # the plain values that are left
    unsafe: list[str]  # uses of names that only an unpickler would run
    globals: list[str]  # every name that the pickle mentions
    table: bool  # it has a name table (encoding A)


def read_paddle(tree: Tree, name: str) -> PaddleContent:
    """File `name`, from its pickle without the arrays' bytes.

    Raises InputError E1301 (protocol 2, too large), E1302 (an element type that is none of a tensor), E1303
    (big-endian), E1305 (no pickle), CorruptFile E1304 (name table or slices that contradict the arrays), UnsafeInput
    E0421 (a tensor on an object of an unknown class), and what pickles raise.
    """
    shown = tree.display(name)
    _refuse_other(tree.head(name, 8), shown)
    refuse_large(tree, name, TOO_LARGE)  # arrays of protocol 2 are text, which has to be decoded in memory
    pickled = pickles.load_file(tree, name, span_from=512, places=True)
    unsafe = [f"{use} at {shown}, opcode {use.position}" for use in pickled.unsafe]
    value = pickled.value
    reading = _PaddleTensorWalk(name, shown)
    reading.place_inline(value)
    table: dict[Any, Any] = {}
    slices: dict[Any, Any] = {}
    has_table = False

    if isinstance(value, dict):
        value = dict(value)
        has_table = TABLE in value
        table = _mapping(value.pop(TABLE, {}), TABLE, shown)
        slices = _mapping(value.pop(SLICES, {}), SLICES, shown)
        extras = reading.part(value, ())
    else:
        extras = reading.part({"value": value}, ())

    leaves = _join_slices(_name_leaves(reading.leaves, table), slices, shown)
    _refuse_lost(leaves, table, shown)
    return PaddleContent(
        leaves,
        {} if extras is _GONE else extras,
        unsafe + reading.unsafe,
        [str(use) for use in pickled.globals],
        has_table,
    )


def _refuse_other(head: bytes, shown: str) -> None:
    """Raise for a file that is no pickle of protocol 2 or later."""
    if len(head) >= 2 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return
    binary = head[:4] == b"\0\0\0\0"
    raise InputError(
        "a tensor dump of paddle.save(use_binary_format=True)" if binary else f"no pickle: it begins with {head!r}",
        code=_NOT_PICKLE,
        path=shown,
        offset=0,
        hint="load it with Paddle and save a state dict with paddle.save"
        if binary
        else "the file is damaged, or no file of paddle.save",
        bytes_differ=True,
    )


def _mapping(value: Any, key: str, shown: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _malformed_error(f"{key} is a {type(value).__name__}, not a dict", shown)
    return value


def _malformed_error(what: str, shown: str, key: str | None = None) -> CorruptFile:
    return CorruptFile(what, code=MALFORMED, path=shown, key=key, hint="the file was edited or damaged: fetch it again")


# -- taking apart -----------------------------------------------------------------------------------------------------

_GONE = object()  # a dict of which nothing is left


class _PaddleTensorWalk:
    """Collects the tensors of one file while walking through its value."""

    def __init__(self, file: str, shown: str) -> None:
        self.file = file
        self.shown = shown
        self.leaves: list[Saved] = []
        self.unsafe: list[str] = []
        self._inline: dict[int, int] = {}  # id of an array whose bytes are text -> its offset in the view

    def place_inline(self, value: Any) -> None:
        """Find the arrays of protocol 2 in the file's view (`pickles.inline_arrays`)."""
        at = 0
        for array in inline_arrays(value):
            self._inline[id(array)] = at
            at += len(array.data)

    def part(self, value: Any, path: Path) -> Any:
        """`value` without its tensors: `SLOT` in place of each, `_GONE` for a dict of which nothing is left."""
        if len(path) > DEPTH_LIMIT:
            raise _malformed_error(f"the state nests deeper than {DEPTH_LIMIT} levels", self.shown)

        if isinstance(value, NumpyArray):
            self._leaf(value, "", path)
            return SLOT

        if type(value) is tuple and len(value) == 2 and type(value[0]) is str and isinstance(value[1], NumpyArray):
            self._leaf(value[1], value[0], path)
            return SLOT

        if isinstance(value, dict):
            kept = {}
            for key, item in value.items():
                step = key if type(key) is int else str(key)
                if type(step) is str and len(step) > KEY_LIMIT:
                    raise _malformed_error(
                        f"a key of {len(step)} characters, want at most {KEY_LIMIT}", self.shown, step[:100]
                    )
                left = self.part(item, (*path, step))
                if left is not SLOT and left is not _GONE:
                    kept[as_extras(key)] = left
            return kept if kept or not value else _GONE

        if isinstance(value, list | tuple):
            parts = [self.part(item, (*path, i)) for i, item in enumerate(value)]
            items = [SLOT if part is _GONE else part for part in parts]
            return tuple(items) if isinstance(value, tuple) else items

        self._refuse_hanging(value, path)
        return as_extras(value)

    def _leaf(self, array: NumpyArray, name: str, path: Path) -> None:
        key = dotted(path)[:200]
        dtype = self._dtype(array.dtype, key)
        strides = None
        # Fortran order is read without a copy, as strides.
        if array.fortran and len(array.shape) > 1:
            strides = tuple(reversed(contiguous_strides(tuple(reversed(array.shape)))))
        if isinstance(array.data, StorageSpan):
            stored = StoredArray(self.file, array.data.offset, dtype, array.shape, strides)
        else:
            stored = StoredArray(self.file + INLINE, self._inline.get(id(array), 0), dtype, array.shape, strides)
        self.leaves.append(Saved(path, name, array.shape, dtype, (stored,)))

    def _dtype(self, code: str, key: str) -> DType:
        found = BY_CODE.get(code.lstrip("<>|="))
        if found is None:
            raise InputError(
                f"an array of NumPy's {code}, which is no tensor's type",
                code=DTYPE,
                path=self.shown,
                key=key,
                hint="convert it to numbers, or leave it out of what is saved",
            )
        if code[0] == ">" and DTYPES[found].bits > 8:  # single bytes have no order
            raise InputError(
                f"a big-endian array ({code})",
                code=ORDER,
                path=self.shown,
                key=key,
                hint="save it again on the machine that wrote it, as little-endian",
            )
        return DTYPES[found]

    def _refuse_hanging(self, value: Any, path: Path) -> None:
        """Raise UnsafeInput E0421 for a tensor inside an object of an unknown class, InputError E2950 for a value that
        contains itself."""
        if isinstance(value, Opaque) and value.name == pickles.ITSELF:
            raise pickles.other_form(value, self.shown)
        if _holds_array(value):
            name = getattr(value, "name", type(value).__name__)
            raise UnsafeInput(
                f"a tensor is held by an object of class {pickles.shown(str(name))}: reading it would need that "
                "class's code",
                code="E0421",
                path=self.shown,
                key=dotted(path)[:200],
                hint="save plain tensors (state_dict()) with the software that made the file",
            )


def _holds_array(value: Any) -> bool:
    """Whether a record, an object or a set contains an array."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, NumpyArray | StorageSpan):
            return True
        if id(item) in seen or isinstance(item, str | bytes | int | float | None):
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            todo += item
        else:
            todo += [getattr(item, "args", None), getattr(item, "state", None)]
    return False


def _name_leaves(leaves: list[Saved], table: Mapping[Any, Any]) -> list[Saved]:
    """The leaves with the static names of the name table."""
    out = []
    for saved in leaves:
        name = table.get(saved.path[0], saved.name) if len(saved.path) == 1 else saved.name
        out.append(saved._replace(name=name) if type(name) is str else saved)
    return out


def _refuse_lost(leaves: list[Saved], table: Mapping[Any, Any], shown: str) -> None:
    """Raise CorruptFile E1304 for a name of the table without a tensor: Paddle lists the file's own tensors only."""
    held = {str(saved.path[0]) for saved in leaves}
    lost = [str(key)[:200] for key in table if str(key) not in held]
    if lost:
        raise _malformed_error(
            f"{TABLE} names {len(lost)} tensors that the file does not hold: {lost[0]}", shown, lost[0]
        )


def _join_slices(leaves: list[Saved], slices: Mapping[Any, Any], shown: str) -> list[Saved]:
    """The leaves with sliced arrays joined under their key, at the position of the first slice."""
    if not slices:
        return leaves

    by_key = {saved.path: saved for saved in leaves}
    first: dict[Path, Saved] = {}
    gone: set[Path] = set()

    for key, info in slices.items():
        names = info.get("slices") if isinstance(info, dict) else None
        shape = info.get("OriginShape") if isinstance(info, dict) else None
        shape = tuple(shape) if isinstance(shape, list | tuple) else None
        if not isinstance(names, list) or not names or shape is None or any(type(n) is not int or n < 0 for n in shape):
            raise _malformed_error(f"{SLICES} says nothing usable of its shape and parts", shown, str(key)[:200])
        paths = [(str(name),) for name in names]
        missing = [path[0] for path in paths if path not in by_key]
        if missing or len(set(paths)) != len(paths):
            raise _malformed_error(
                f"parts of a sliced tensor are missing or named twice: {', '.join(missing)[:200]}",
                shown,
                str(key)[:200],
            )
        parts = [by_key[path] for path in paths]
        if sum(prod(part.shape) for part in parts) != prod(shape) or len({part.dtype for part in parts}) > 1:
            raise _malformed_error(
                f"the parts of a sliced tensor do not make up its shape {list(shape)}", shown, str(key)[:200]
            )
        arrays = tuple(a._replace(shape=(a.numel,), strides=None) for part in parts for a in part.parts)
        first[paths[0]] = Saved((str(key),), parts[0].name, shape, parts[0].dtype, arrays)
        gone |= set(paths)

    return [first.get(saved.path, saved) for saved in leaves if saved.path in first or saved.path not in gone]


# -- chunks -----------------------------------------------------------------------------------------------------------


def chunks_of(saved: Saved, box: Box, within: Box | None = None, dtype: DType | None = None) -> tuple[Chunk, ...]:
    """The chunks by which a stored tensor, or a part of it, fills `box` of a logical tensor. Slices give several.

    Args:
        saved: The stored tensor.
        box: Of the logical tensor.
        within: The part of the stored shape. If its shape differs from `box`, it has as many elements in row-major
            order (a flat slice).
        dtype: The type of the bits (BF16 for a stored U16), of the same width.
    """
    within = whole(saved.shape) if within is None else within
    if within.numel != box.numel or not within.inside(saved.shape):
        raise InternalError(f"{within} of {saved.path} of shape {saved.shape} can't fill {box}")
    kind = saved.dtype if dtype is None else dtype
    if kind.bits != saved.dtype.bits:
        raise InternalError(f"{saved.path}: {saved.dtype.name} bits can't be {kind.name}")
    if not box.numel:  # nothing to read: no chunk
        return ()
    parts = [part._replace(dtype=kind) for part in saved.parts]
    if len(parts) == 1 and (within.shape == box.shape or len(saved.shape) == 1):
        return (Chunk(box, parts[0], within),)
    if len(parts) == 1 and within.shape == saved.shape and parts[0].strides is None:
        flat = parts[0]._replace(shape=(within.numel,))
        return (Chunk(box, flat, whole(flat.shape)),)
    if within.shape != box.shape:
        raise InternalError(f"a part of {saved.path} in another shape")
    line = FlatLine.of_block(box, saved.shape, ((box, within),))
    start = 0
    chunks: list[Chunk] = []
    for part in parts:
        chunks += (chunk for _, chunk in line.chunks(part._replace(shape=(part.numel,), strides=None), start))
        start += part.numel
    return tuple(chunks)
