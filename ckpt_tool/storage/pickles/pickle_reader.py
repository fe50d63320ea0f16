"""The inert pickle reader: pickles as data, never as code.

A pickle is a program for a small stack machine whose opcodes may name any function of the reader's process and call it.
This reader executes the program on plain values only (`pickle_machine`): names are symbols, calls are records, tensors
are references to storages. It imports nothing that a file names, and the standard `pickle` is never used.

    >>> done = load(b"\\x80\\x02}U\\x04stepK\\x07s.", path="extra.pkl")
    >>> done.value, done.globals
    ({'step': 7}, ())
    >>> bad = load(b"cposix\\nsystem\\n(U\\x04truetR.", path="evil.pt")
    >>> str(bad.unsafe[0]), bad.unsafe[0].position, bad.unsafe[0].offset, bad.value
    ('posix.system', 0, 0, Opaque(name='posix.system', args=('true',), state=None))

Every name falls into one of three tiers (`pickle_globals`): understood, kept as a record, unsafe. Unsafe names do not
stop the reading: `inspect` shows them, every other caller passes the result to `refuse_unsafe`.

Cost: about 0.1 us an opcode; 100,000 chunks of DCP metadata in about a second. Values nest at most 200 deep and,
written out in full, have at most 100,000 parts and 16 for each opcode, so that no caller meets a billion laughs or a
list that holds itself. What it does not do: check that a dict key was written once (the last wins, as for every
unpickler), follow storages, keep NumPy's scalar types.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckpt_tool.core.extras import Opaque
from ckpt_tool.core.gc_pause import gc_paused
from ckpt_tool.errors import CkptError, CorruptFile, InputError, UnsafeInput
from ckpt_tool.storage.pickles.coded_states import coded
from ckpt_tool.storage.pickles.coded_weights import coded_weight
from ckpt_tool.storage.pickles.pickle_globals import META_TENSOR, UNSUPPORTED_TENSORS, is_tensor_record
from ckpt_tool.storage.pickles.pickle_machine import LONG_TEXT, Machine
from ckpt_tool.storage.pickles.pickle_numpy import OBJECTS, STRUCTURED
from ckpt_tool.storage.pickles.pickle_values import (
    UNSAFE,
    ArrayRef,
    GlobalUse,
    Irregular,
    MissingField,
    Misuse,
    NumpyArray,
    OrderedMap,
    Pickled,
    PickledRecord,
    StorageRef,
    StorageSpan,
    TensorRef,
    WrapperRef,
    as_extras,
)

if TYPE_CHECKING:
    from ckpt_tool.storage.pickles.pickle_rows import Rows
    from ckpt_tool.storage.source import Tree

__all__ = [
    "METADATA_OPCODES",
    "OPCODE_LIMIT",
    "GlobalUse",
    "MissingField",
    "NumpyArray",
    "OrderedMap",
    "Pickled",
    "PickledRecord",
    "StorageSpan",
    "StorageRef",
    "TensorRef",
    "WrapperRef",
    "as_extras",
    "load",
    "load_file",
    "load_many",
    "refuse_unsafe",
    "refuse_weight_bearing",
    "weight_bearing",
]

OPCODE_LIMIT = 10_000_000  # opcodes of one pickle: bounds the time that a malicious one can take
METADATA_OPCODES = 200_000_000  # for `.metadata` of large DCP and Paddle saves: about 80 opcodes a chunk
DEPTH_LIMIT = 200  # of nested values
_WINDOW = 1 << 20  # bytes read at a time by load_file
OTHER_FORM = "E0374"
CYCLE = "E2950"
ITSELF = "<itself>"  # the name of the record that replaces a reference from inside a value to that value
_PARAMETER = "torch._utils._rebuild_parameter"
ARRAY = "numpy.ndarray"


def load(
    data: bytes,
    *,
    path: str,
    member: str | None = None,
    multi: bool = False,
    origin: int = 0,
    opcodes: int = OPCODE_LIMIT,
) -> Pickled:
    """Read one pickle.

    Args:
        path: the file, as messages show it. member: the zip member, for messages.
        multi: more may follow STOP (`Pickled.end` says where); otherwise trailing bytes are refused (exit 4).
        origin: bytes from the start of the file to data[0], so that offsets are the file's.
        opcodes: limit; pass METADATA_OPCODES for the metadata of large saves.
    Never raises for unsafe globals: they are listed in `.unsafe`; call `refuse_unsafe` unless you are `inspect`.
    Raises CorruptFile (E0360-E0379) with the byte offset and the opcode's number; UnsafeInput (E042x) when the
    stream breaks after it named an unsafe global, or goes on after STOP.
    """
    return _execute(Machine(data, origin=origin, opcodes=opcodes), path, member, multi=multi)


def load_file(
    tree: Tree,
    path: str,
    *,
    start: int = 0,
    nbytes: int | None = None,
    multi: bool = False,
    span_from: int = 4096,
    opcodes: int = OPCODE_LIMIT,
    places: bool = False,
    rows: Rows | None = None,
) -> Pickled:
    """Read one pickle from bytes [start, start + nbytes) of a file without reading its large byte strings.

    A byte string of `span_from` bytes or more becomes `StorageSpan(offset in the file, nbytes)` and is never read (a
    window of up to 1 MiB may touch its ends), so that a `.pdparams` of many GB costs a few KiB a tensor; 0 reads them
    all.
    places: shorter ones keep their position, so that the data of every NumPy array is a Span.
    rows: what takes rows as columns; a pickle too odd for it raises Irregular.
    path: relative to the tree. Raises as `load` does.
    """
    size = tree.size(path)
    end = size if nbytes is None else start + nbytes
    if not 0 <= start <= end <= size:
        raise CorruptFile(
            f"a pickle at bytes {start} to {end} of a file of {size}",
            code="E0368",
            path=tree.display(path),
            offset=min(max(start, 0), size),
            hint="the file is cut short: compare its size with the source",
        )
    machine = machine_of(
        tree, path, start=start, end=end, span_from=span_from, opcodes=opcodes, places=places, rows=rows
    )
    return _execute(machine, tree.display(path), None, multi=multi)


def machine_of(
    tree: Tree,
    path: str,
    *,
    start: int,
    end: int,
    span_from: int = 4096,
    opcodes: int = OPCODE_LIMIT,
    places: bool = False,
    rows: Rows | None = None,
) -> Machine:
    """The machine over bytes [start, end) of a file, a window at a time."""
    window = [4096]
    last = [start]

    def refill(offset: int, wanted: int) -> bytes:
        # Read far ahead while the stream is dense; start small again behind a span that was jumped over.
        window[0] = min(window[0] * 4, _WINDOW) if offset - last[0] < 2 * window[0] else 4096
        last[0] = offset
        return tree.read(path, offset, min(max(wanted, window[0]), end - offset))

    first = tree.read(path, start, min(1 << 16, end - start))
    return Machine(
        first, origin=start, end=end, opcodes=opcodes, span_from=span_from, refill=refill, places=places, rows=rows
    )


def load_many(tree: Tree, path: str, count: int, *, start: int = 0) -> list[Pickled]:
    """`count` pickles back to back from byte `start` of the file (the legacy torch stream has five). More may follow.
    Raises as `load` does."""
    found: list[Pickled] = []
    for _ in range(count):
        found.append(load_file(tree, path, start=found[-1].end if found else start, multi=True, span_from=0))
    return found


def refuse_unsafe(pickled: Pickled, path: str, *, member: str | None = None) -> None:
    """Raise UnsafeInput E0420 (exit 4) when the pickle names a global of tier 3, with module.name, opcode number and
    byte offset of each. Every caller but `inspect` calls this."""
    if pickled.unsafe:
        raise _unsafe(pickled.unsafe, path, member, "")


def weight_bearing(value: Any, *, but_coded: bool = False) -> Iterator[Opaque]:
    """The outermost Opaques inside `value` that hold a tensor or a storage: weights that we can't read. but_coded:
    leave out what `coded_states` and `coded_weights` read."""
    seen: set[int] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        if type(item) in _INSIDE:
            seen.add(id(item))
        if type(item) is Opaque:
            if _holds_tensor(item) and not (but_coded and (coded(item) or coded_weight(item))):
                yield item
            continue
        todo.extend(_parts(item))


def refuse_weight_bearing(value: Any, path: str, *, member: str | None = None, but_coded: bool = False) -> None:
    """Raise if a tensor is part of something that is not understood: InputError E0374 for torch's sparse, quantised,
    nested or lazily conjugated tensors, UnsafeInput E0421 (exit 4) for an object of a class that we do not know.
    but_coded: the caller takes the tensors of coded states (`coded_states`), as `formats.state_dict.tree` does."""
    found = list(weight_bearing(value, but_coded=but_coded))
    if not found:
        return
    names = list(dict.fromkeys(item.name for item in found))
    strange = list(filter(_foreign, names))
    if strange:
        raise UnsafeInput(
            held_by(strange[0]),
            code="E0421",
            path=path,
            place=member,
            faults=map(shown, strange[1:]),
            hint="save plain tensors (state_dict()) with the software that made the file",
        )
    raise other_form(found[0], path, member)


def other_form(value: Opaque, path: str, member: str | None = None) -> InputError:
    """The error (E0374) for a tensor that is not stored as dense values; E2950 for a value that contains itself."""
    if value.name == ITSELF:
        return InputError(
            "a value among the extras holds itself, which no writer can spell",
            code=CYCLE,
            path=path,
            place=member,
            hint="--drop extras writes the rest",
        )

    inner = value
    while inner.name == _PARAMETER and type(inner.args[0]) is Opaque:
        inner = inner.args[0]
    what = UNSUPPORTED_TENSORS.get(inner.name, "a tensor of a quantised, complex32 or lazily conjugated kind")
    if inner.name == ARRAY:
        kind = {STRUCTURED: "records", OBJECTS: "Python objects"}.get(inner.args[0], shown(str(inner.args[0])))
        what = f"a NumPy array of {kind} in the place of a tensor"

    hint = "convert it to a dense tensor (to_dense, dequantize, resolve_conj)"
    if inner.name == META_TENSOR:
        hint = (
            "the model was offloaded when it was saved: save it again with accelerator.save_model, or as"
            " get_state_dict_offloaded_model gives it"
        )
    elif inner.name == ARRAY:
        hint = "convert it to an array of little-endian numbers, and save it again"

    return InputError(
        f"the file holds {what} ({inner.name}); only dense tensors with values of their own are read",
        code=OTHER_FORM,
        path=path,
        place=member,
        hint=hint,
    )


def foreign(value: Any) -> bool:
    """Is it an object of an unknown class that contains a tensor?"""
    return type(value) is Opaque and _foreign(value.name) and _holds_tensor(value)


def _foreign(name: str) -> bool:
    return name not in UNSUPPORTED_TENSORS and not name.startswith("torch._utils._rebuild")


def held_by(name: str) -> str:
    """The message about a tensor inside an object of class `name`."""
    return f"a tensor is held by an object of class {shown(name)}: reading it would need that class's code"


# -- execution --------------------------------------------------------------------------------------------------------


@gc_paused()
def _execute(machine: Machine, path: str, member: str | None, *, multi: bool) -> Pickled:
    try:
        value = machine.run()
        stream = machine.origin + machine.pos - machine.start
        if not _is_slight(value, machine.count + 1, texts=machine.longest > LONG_TEXT):
            if machine.rows is not None:
                raise Irregular
            _check_shared(value, 100_000 + 16 * (machine.count + 1), (1 << 22) + 16 * stream)
    except Misuse as e:
        raise _fault(e, machine, path, member) from e
    uses = machine.verdicts()
    end = machine.origin + machine.pos
    if not multi and end != machine.end:
        unsafe = [use for use in uses if use.tier == 3]
        if unsafe:
            raise _unsafe(unsafe, path, member, f"; and {machine.end - end} bytes follow the pickle's end")
        raise UnsafeInput(
            f"{machine.end - end} bytes follow the pickle's end",
            code="E0422",
            path=path,
            offset=end,
            place=member,
            hint="a second stream after the first is how code is hidden; save the file again",
        )
    return Pickled(value, uses, end, machine.count + 1, machine.protocol, tuple(machine.storages.values()))


def _fault(error: Misuse, machine: Machine, path: str, member: str | None) -> CkptError:
    """The error for a fault of the machine, with its position. If the pickle named unsafe globals before the fault, the
    error reports those: their code would have run."""
    unsafe = [use for use in machine.verdicts() if use.tier == 3]
    if unsafe:
        return _unsafe(unsafe, path, member, f"; then the stream is broken: {error.what}")
    kind = UnsafeInput if error.code in UNSAFE else CorruptFile
    return kind(
        error.what,
        code=error.code,
        path=path,
        offset=machine.origin + machine.at,
        place=", ".join(filter(None, (member, f"opcode {machine.count}"))),
        hint="the pickle is damaged or was made to break its reader; fetch the file again from its author",
    )


def _unsafe(unsafe: tuple[GlobalUse, ...] | list[GlobalUse], path: str, member: str | None, more: str) -> UnsafeInput:
    first = unsafe[0]
    return UnsafeInput(
        f"the pickle names {shown(str(first))}, which would be code to run (opcode {first.position}){more}",
        code="E0420",
        path=path,
        offset=first.offset,
        place=", ".join(filter(None, (member, f"opcode {first.position}"))),
        hint="`ckpt inspect --security` lists every name; get a checkpoint of plain tensors, safetensors best",
        faults=[f"{shown(str(use))} at byte {use.offset}, opcode {use.position}" for use in unsafe[1:100]],
    )


def shown(text: str) -> str:
    """Text from a file as one harmless line of at most 200 characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text[:200])


# -- the shape of a value ---------------------------------------------------------------------------------------------

_INSIDE = frozenset(
    {
        list,
        tuple,
        dict,
        OrderedMap,
        set,
        frozenset,
        Opaque,
        PickledRecord,
        TensorRef,
        WrapperRef,
        NumpyArray,
        ArrayRef,
    }
)
_TENSORS = frozenset({TensorRef, StorageRef, WrapperRef, ArrayRef})
_PLAIN = frozenset({list, tuple, set, frozenset})


def _parts(item: Any) -> Any:
    """The direct parts of a container, not the parts of these."""
    kind = type(item)
    if kind in _PLAIN:
        return item
    if kind is dict:
        return (*item, *item.values())
    if kind is OrderedMap:
        return (*item, *item.values(), item.attributes)
    if kind is PickledRecord or kind is Opaque:
        return (item.args, item.state)
    if kind is TensorRef:
        return (item.attributes,)
    if kind is WrapperRef:
        return (item.local, item.spec, item.state)
    if kind is NumpyArray:
        return (item.data,)
    if kind is ArrayRef:
        return (item.array,)
    return ()


def _holds_tensor(value: Any) -> bool:
    seen: set[int] = set()
    todo = [value]
    while todo:
        item = todo.pop()
        kind = type(item)
        if kind in _TENSORS or is_tensor_record(item):
            return True
        if kind in _INSIDE and id(item) not in seen:
            seen.add(id(item))
            todo.extend(_parts(item))
    return False


def _is_slight(value: Any, opcodes: int, *, texts: bool) -> bool:
    """Does a quick pass prove that the value does not contain itself, is not too deep, and is not huge when written
    out? If not, `_check_shared` decides.

    The pass goes through containers level by level. A value without shared parts has no more parts than the stream has
    opcodes; a value with shared parts may exceed that, and is counted exactly instead. Runs have no parts here: each
    has fewer than its rows' opcodes.

    Args:
        opcodes: of the stream.
        texts: does the value contain strings long enough to matter?
    """
    budget = 2 * opcodes + 1000
    level = [value] if type(value) in _INSIDE else []
    depth = 0
    while level and depth < DEPTH_LIMIT and budget >= 0 and not texts:
        depth += 1
        budget -= len(level)
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is dict:
                below += [part for part in item.values() if type(part) in _INSIDE]
                below += [part for part in item if type(part) is tuple]
                budget -= len(item)
            elif kind is PickledRecord:
                if item.state is not None:
                    below.append(item.state)
                if item.args:
                    below.append(item.args)
            else:
                parts = _parts(item)
                below += [part for part in parts if type(part) in _INSIDE]
                budget -= len(parts)
            if budget < 0:
                break
        level = below

    return not level and budget >= 0


def _cut(holder: Any, whole: Any) -> None:
    """Replace the reference from `holder` to `whole`, which contains it, by the mark `ITSELF`. Valid files have such
    cycles among their extras (OmegaConf's nodes know their parents), and these must not prevent reading the model.
    Raises Misuse E0370 for holders whose parts can't be replaced."""
    mark = Opaque(ITSELF)
    kind = type(holder)
    if kind is list:
        holder[:] = [mark if item is whole else item for item in holder]
    elif isinstance(holder, dict):
        for key, item in holder.items():
            if item is whole:
                holder[key] = mark
        if isinstance(holder, OrderedMap) and holder.attributes is whole:
            holder.attributes = None
    elif kind is Opaque and holder.state is whole:
        object.__setattr__(holder, "state", None)
    elif kind is NumpyArray and holder.data is whole:
        holder.data = []
    else:
        raise Misuse(f"a {type(whole).__name__} holds itself", "E0370")


def _check_shared(value: Any, most_parts: int, most_text: int) -> None:
    """Break the cycles of a value; raise Misuse E0370 if it is nested too deep or would be huge when written out.
    Visits each container once."""
    depth: dict[int, int] = {}
    size: dict[int, int] = {}
    text: dict[int, int] = {}
    # A stack in place of recursion: a malicious value may be nested deeper than Python's stack.
    todo: list[tuple[Any, bool]] = [(value, False)]
    while todo:
        item, done = todo.pop()
        key = id(item)
        if not done and key in depth:
            continue

        parts = list(_parts(item))
        inside = [part for part in parts if type(part) in _INSIDE]
        if done:  # parts that were replaced by the mark have no size
            inside = [part for part in inside if id(part) in size]
        else:
            depth[key] = 0  # open: meeting it again below means that it holds itself
            todo.append((item, True))
            for part in inside:
                if depth.get(id(part)) == 0:
                    _cut(item, part)
                elif id(part) not in depth:
                    todo.append((part, False))
            continue

        depth[key] = 1 + max((depth[id(part)] for part in inside), default=0)
        size[key] = len(parts) + sum(size[id(part)] for part in inside)
        text[key] = sum(text[id(part)] for part in inside) + sum(
            len(part) for part in parts if type(part) is str or isinstance(part, bytes)
        )
        if depth[key] > DEPTH_LIMIT:
            raise Misuse(f"values nest more than {DEPTH_LIMIT} deep", "E0370")

        if size[key] > most_parts or text[key] > most_text:
            raise Misuse(
                f"written out in full the value has more than {most_parts} parts or {most_text} characters", "E0370"
            )
