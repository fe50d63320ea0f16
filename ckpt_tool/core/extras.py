"""Extras: everything in a checkpoint that is no tensor, as plain values, and their JSON form.

Values: None, bool, int, float, str, bytes, list, tuple, dict (scalar keys), `Symbol` (a named constant such as
`torch.float32`) and `Opaque` (a record of a class that we know of but do not understand). Nothing here can act.

    >>> to_json({"betas": (0.9, 0.999)})
    {'betas': {'$tuple': [0.9, 0.999]}}
    >>> from_json({'betas': {'$tuple': [0.9, 0.999]}})
    {'betas': (0.9, 0.999)}
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tool.errors import CorruptFile


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named constant: `Symbol("torch.float32")`, `Symbol("torch.device", ("cpu",))`."""

    name: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Opaque:
    """An object of a class that we do not build: its name, constructor arguments and state, as data."""

    name: str  # module.qualname
    args: tuple[Any, ...] = ()
    state: Any = None


def names_in(value: Any) -> Iterator[str]:
    """The names of all constants and records in a value.

    >>> list(names_in({"dtype": [Symbol("torch.float32")], "run": Opaque("lib.Run", (), {"kind": Symbol("lib.Kind")})}))
    ['torch.float32', 'lib.Run', 'lib.Kind']
    """
    if isinstance(value, Symbol | Opaque):
        yield value.name
        value = (value.args, getattr(value, "state", None))
    if isinstance(value, Mapping):
        value = (*value, *value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from names_in(item)


def to_json(value: Any) -> Any:
    """The JSON form: exact and reversible; dicts with a key that starts with `$` or is no string are tagged."""
    if value is None or isinstance(value, bool | str):
        return value

    if isinstance(value, int):
        if abs(value) < 1 << 53:
            return value
        return {"$int": str(value) if value.bit_length() < 4096 else hex(value)}  # Python bounds decimals, not hex

    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, tuple):
        return {"$tuple": [to_json(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {"$set": [to_json(item) for item in sorted(value, key=repr)]}
    if isinstance(value, Symbol):
        return {"$symbol": [value.name, *(to_json(item) for item in value.args)]}
    if isinstance(value, Opaque):
        return {"$opaque": [value.name, [to_json(item) for item in value.args], to_json(value.state)]}

    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {"$dict": [[to_json(key), to_json(item)] for key, item in value.items()]}

    raise TypeError(f"extras hold plain values, not {type(value).__name__}")


def from_json(value: Any) -> Any:
    """The inverse of `to_json`. Raises CorruptFile (E0314) on an unknown tag, a bad body or bottomless nesting."""
    try:
        return _decode_tagged(value)
    except RecursionError as e:
        raise CorruptFile("extras are nested too deeply", code="E0314", hint="the index was edited or damaged") from e


def _decode_tagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode_tagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: _decode_tagged(item) for key, item in value.items()}

    (tag,) = value
    body = _body(tag, value)
    try:
        if tag == "$int":
            return int(body, 0)
        if tag == "$float":
            return float(body)
        if tag == "$bytes":
            return base64.b64decode(body, validate=True)
        if tag == "$tuple":
            return tuple(_decode_tagged(item) for item in body)
        if tag == "$set":
            return frozenset(_decode_tagged(item) for item in body)
        if tag == "$symbol":
            return Symbol(str(body[0]), tuple(_decode_tagged(item) for item in body[1:]))
        if tag == "$opaque":
            name, args, state = body
            return Opaque(str(name), tuple(_decode_tagged(item) for item in args), _decode_tagged(state))
        return {_decode_tagged(key): _decode_tagged(item) for key, item in body}
    except (TypeError, ValueError, IndexError) as e:
        raise CorruptFile(f"bad value under {tag}: {e}", code="E0314", hint="the index was edited or damaged") from e


def _body(tag: str, value: dict[str, Any]) -> Any:
    if tag not in _BODIES:
        raise CorruptFile(f"unknown tag {tag!r}", code="E0314", hint="written by a newer version?")
    body = value[tag]
    want = _BODIES[tag]
    if type(body) is not want:  # JSON gives exact types
        raise CorruptFile(
            f"want a {want.__name__} under {tag}, found a {type(body).__name__}",
            code="E0314",
            hint="the index was edited or damaged",
        )
    return body


_BODIES: dict[str, type] = {
    "$int": str,
    "$float": str,
    "$bytes": str,
    "$tuple": list,
    "$set": list,
    "$symbol": list,
    "$opaque": list,
    "$dict": list,
}


def display(value: Any) -> Any:
    """A readable JSON form for people and `inspect --json`: tuples as lists, symbols as names, long bytes as a
    count."""
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [display(item) for item in value]
    if isinstance(value, Symbol):
        return f"{value.name}({', '.join(map(repr, value.args))})" if value.args else value.name
    if isinstance(value, Opaque):
        return f"<{value.name}>"
    if isinstance(value, Mapping):
        return {str(key): display(item) for key, item in value.items()}
    return value
