"""The results of a pickle's calls and states, as inert values: opcodes REDUCE, NEWOBJ, INST, OBJ and BUILD.

    >>> from ckpt_tool.storage.pickles.pickle_machine import Machine
    >>> machine = Machine(b"", origin=0)
    >>> call(machine, machine.name("argparse", "Namespace"), ())
    Opaque(name='argparse.Namespace', args=(), state=None)

A call looks its name up in the builders' tables; a class that is known by its fields becomes a Record, an enum's member
a Symbol, everything else an Opaque of its arguments. What only code could answer (calling an instance, a framework's
function, `getattr` on anything but an enum) is condemned: the name counts as unsafe from then on. Nothing is called but
our own builders; states go to records alone, items to real lists, dicts and sets, or to an Opaque's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_tool.core.extras import Opaque, Symbol
from ckpt_tool.storage.pickles.pickle_builders import BUILDERS, COPYING, enum_member
from ckpt_tool.storage.pickles.pickle_globals import (
    ANNOTATIONS,
    BACK_REFERENCES,
    ENUMS,
    GETATTR,
    GETITEM,
    NONE_TYPE,
    PROCESS_GROUP,
    RECORDS,
    SHARDED_TENSOR,
    function_like,
)
from ckpt_tool.storage.pickles.pickle_numpy import set_array_state, set_dtype_state
from ckpt_tool.storage.pickles.pickle_values import Misuse, NumpyArray, OrderedMap, PickledRecord

if TYPE_CHECKING:
    from ckpt_tool.storage.pickles.pickle_machine import Machine


def call(machine: Machine, made: Any, args: Any) -> Any:
    """The inert value that represents a call of `made` with `args`. No function of the pickle is ever called, only our
    own builders."""
    if type(args) is not tuple:
        raise Misuse(f"a call's arguments are {type(args).__name__}, not a tuple", "E0363")

    if type(made) is Opaque:  # an instance that would be called: whatever that does, it is code
        machine.condemned.add(made.name)
        return Opaque(made.name, args)

    if type(made) is not Symbol or made.args:
        raise Misuse(f"calls a {type(made).__name__}", "E0363")

    name = made.name
    build = BUILDERS.get(name) or COPYING.get(name)
    if build is not None:
        if name in COPYING:
            machine.charge(sum(len(arg) for arg in args[:3] if hasattr(arg, "__len__")))
        try:
            return build(args)
        except Misuse as e:
            if e.code != "E0420":
                raise
            machine.condemned.add(name)  # `_codecs.encode` with another codec
            return Opaque(name, args)

    if name in RECORDS:
        return PickledRecord(name, args, dict(zip(RECORDS[name], args, strict=False)) if args else None)
    if name in ENUMS and len(args) == 1:
        return enum_member(name, args[0])
    if name == GETATTR:
        return _getattr(machine, args)
    if name in GETITEM:
        return _subscript(machine, name, args)
    if name == "builtins.type" and args == (None,):  # the type of None, which has no other spelling
        return Symbol(NONE_TYPE)
    if name.startswith("copyreg.") and len(args) > 1:
        return _copyreg(machine, name, args)
    if name == "builtins.type" or (function_like(name) and machine.tiers.get(name, 2) == 2):
        machine.condemned.add(name)
    return Opaque(name, args)


def _copyreg(machine: Machine, name: str, args: tuple[Any, ...]) -> Any:
    """The constructors that protocols 0 and 1 spell as functions: `_reconstructor(class, base, state)` and
    `__newobj__(class, *args)`, `__newobj_ex__(class, args, kwargs)`."""
    machine.charge(len(args))
    if type(args[0]) is Symbol and args[0].name.startswith("copyreg."):
        raise Misuse(f"{name} of {args[0].name}", "E0363")  # no class; a long chain of them would nest as deep
    if name == "copyreg._reconstructor" and len(args) == 3:
        return call(machine, args[0], () if args[2] is None else (args[2],))
    if name == "copyreg.__newobj_ex__" and len(args) == 3 and type(args[1]) is tuple:
        return call(machine, args[0], (*args[1], args[2]) if args[2] else args[1])
    if name == "copyreg.__newobj__":
        return call(machine, args[0], args[1:])
    raise Misuse(f"bad arguments of {name}", "E0363")


def _getattr(machine: Machine, args: tuple[Any, ...]) -> Any:
    """`getattr(Enum, "MEMBER")`, as Python 3.11 pickled enums, and the class of a ShardedTensor's process group, which
    old protocols spell so; anything else is unsafe."""
    if args == (Symbol(SHARDED_TENSOR), "ProcessGroupState"):
        if machine.good_getattr is None:
            machine.good_getattr = True
        return Symbol(PROCESS_GROUP)
    if len(args) == 2 and type(args[0]) is Symbol and not args[0].args and args[0].name in ENUMS:
        member = args[1]
        if type(member) is str and member.isidentifier() and not member.startswith("_"):
            if machine.good_getattr is None:
                machine.good_getattr = True
            return enum_member(args[0].name, member)
    machine.good_getattr = False
    return Opaque(GETATTR, args)


def _subscript(machine: Machine, name: str, args: tuple[Any, ...]) -> Any:
    """`getitem(typing.Optional, int)`, as annotations are pickled; anything else is unsafe."""
    what = args[0] if len(args) == 2 else None
    if type(what) is Symbol and what.name in ANNOTATIONS:
        machine.subscripts.setdefault(name, True)
    else:
        machine.subscripts[name] = False
    return Opaque(name, args)


def build_state(machine: Machine, made: Any, state: Any) -> None:
    """BUILD: the object's state, on records alone."""
    kind = type(made)
    if kind is PickledRecord:
        fields = _fields_of(made, state)
        machine.charge(len(fields) + len(made.state or ()))
        made.state = {**(made.state or {}), **fields}
    elif kind is Opaque:
        if isinstance(made.state, dict) and isinstance(state, dict):
            machine.charge(len(state) + len(made.state))
            state = {**made.state, **state}
        object.__setattr__(made, "state", state)  # filled in place: the memo holds the object already
    elif kind is NumpyArray:
        if type(state) is tuple and state and type(state[-1]) is str:
            machine.charge(len(state[-1]))
        set_array_state(made, state)
    elif kind is OrderedMap:
        made.attributes = state
    elif kind is Symbol and made.name == "numpy.dtype" and made.args:
        set_dtype_state(made, state)
    else:
        raise Misuse(f"BUILD sets the state of a {made.name if kind is Symbol else kind.__name__}", "E0365")


def dict_of(machine: Machine, target: Any) -> dict[Any, Any]:
    """What SETITEM(S) may write to: a dict, or the items of an object of an unknown class."""
    if isinstance(target, dict):
        return target
    made = _items_of(machine, target, dict, "SETITEM")
    return made  # type: ignore[no-any-return]


def list_of(machine: Machine, target: Any) -> list[Any]:
    """What APPEND(S) may write to."""
    if type(target) is list:
        return target
    made = _items_of(machine, target, list, "APPEND")
    return made  # type: ignore[no-any-return]


def set_of(machine: Machine, target: Any) -> set[Any]:
    """What ADDITEMS may write to."""
    if type(target) is set:
        return target
    made = _items_of(machine, target, set, "ADDITEMS")
    return made  # type: ignore[no-any-return]


def _items_of(machine: Machine, target: Any, kind: type, opcode: str) -> Any:
    """The items of a subclass of list, dict or set: the last of the Opaque's arguments."""
    if type(target) is not Opaque:
        raise Misuse(f"{opcode} on a {type(target).__name__}", "E0364")
    _, items = machine.items.get(id(target), (None, None))
    if items is None:
        machine.charge(len(target.args))
        items = kind()
        machine.items[id(target)] = (target, items)
        object.__setattr__(target, "args", (*target.args, items))
    if type(items) is not kind:
        raise Misuse(f"{opcode} on an object that holds a {type(items).__name__}", "E0364")
    return items


def _fields_of(made: PickledRecord, state: Any) -> dict[str, Any]:
    """A record's state as fields: a dict, a tuple in the class's order, or a pair (dict, dict of slots)."""
    if isinstance(state, dict):
        back = BACK_REFERENCES.get(made.name)
        return state if back is None else {key: item for key, item in state.items() if key not in back}
    if type(state) is tuple and len(state) == 2 and type(state[1]) is dict and (not state[0] or type(state[0]) is dict):
        return {**(state[0] or {}), **state[1]}
    names = RECORDS[made.name]
    if type(state) is tuple and len(state) <= len(names):
        return dict(zip(names, state, strict=False))
    raise Misuse(f"state of a {made.name} is malformed", "E0365")
