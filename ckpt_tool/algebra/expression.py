"""Expression: the arithmetic of family tables (axes, conditions), parsed by `ast` and never run: a value is found by
walking the tree, of which few kinds of nodes are known.

    >>> config = {"num_attention_heads": 8, "num_key_value_heads": 2, "mlp_only_layers": [0]}
    >>> expression("num_attention_heads // num_key_value_heads").value(config)
    4
    >>> bool(expression("i not in mlp_only_layers and (i + 1) % 2 == 0").value({**config, "i": 3}))
    True
    >>> extent("1:num_attention_heads:2", config)
    range(1, 8, 2)

The language is a part of Python's: `or`, `and`, `not`, one comparison (`== != < <= > >= in`, `not in`), `+ - * // %`,
unary `-`, `a[i]`, `( )`. Operands: whole and decimal numbers, 'strings', `[lists]`, `true false none`, names of the
config (dotted names descend: `text_config.hidden_size`). `name?` is none where the config lacks the name, so that
`head_dim? or hidden_size // num_attention_heads` states a default. There are no calls, no powers: an expression costs
at most its own length.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ckpt_tool.errors import UsageError, near_misses

MAX_CHARS = 800  # far above any table; it keeps a hostile one from exhausting the stack
Extent = int | range | tuple[int, ...]  # an axis: 0 <= k < n, or the indices that its name takes in order

_OPTIONAL = re.compile(r"(?<=\w)\?")
_COUNT = "count of "
_MARK = "\u0294"  # a letter in the place of `?`, so that columns stay
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ANY: dict[type, Callable[[Any, Any], Any]] = {  # of any values, not of numbers alone
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_WORDS: dict[str, Any] = {"true": True, "True": True, "false": False, "False": False, "none": None, "None": None}


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression. `names`: what it needs, without the `?` of optional names."""

    text: str
    root: ast.expr
    names: frozenset[str]

    def value(self, names: Mapping[str, Any]) -> Any:
        """Its value under `names`. Raises UsageError: E0223 an unknown name, E0224 values that don't go together."""
        try:
            return _value(self.root, names)
        except (TypeError, ValueError, ZeroDivisionError, IndexError) as e:
            raise UsageError(f"`{self.text}` has no value: {e}", code="E0224", hint="check the config's values") from e


@lru_cache(maxsize=1024)
def expression(text: str) -> Expression:
    """Parse `text`. Raises UsageError (E0222) with the column."""
    if len(text) > MAX_CHARS:
        raise _fault(text, f"an expression of {len(text)} characters, at most {MAX_CHARS} are read", 1)
    try:
        root = ast.parse(_OPTIONAL.sub(_MARK, text.strip()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        message = f"not an expression: {e.msg}" if isinstance(e, SyntaxError) else "it is nested too deeply"
        raise _fault(text, message, getattr(e, "offset", None) or 1) from e
    names: set[str] = set()
    _check(root, text, names)
    return Expression(text.strip(), root, frozenset(names))


def extent(text: str, names: Mapping[str, Any]) -> Extent:
    """An axis as a table states it: `n`, a range `start:stop[:step]`, a list, or a config key that holds one;
    `count of X`, as many as a text or a list of texts has entries (`M*-M*E`: six layers).

    Raises UsageError: E0222-E0224 as above, E0231 when the value is no extent.
    """
    if text.startswith(_COUNT):
        entries = expression(text.removeprefix(_COUNT)).value(names)
        if entries and (isinstance(entries, str) or (isinstance(entries, list) and _texts(entries))):
            return len(entries)
        raise UsageError(f"`{text}` is {entries!r}: want text or a list of texts", code="E0231")
    parts = [expression(part).value(names) for part in text.split(":")]
    whole = all(isinstance(part, int) and not isinstance(part, bool) for part in parts)
    if len(parts) == 1 and isinstance(parts[0], list | tuple):
        if all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in parts[0]):
            return tuple(parts[0])
    elif len(parts) == 1 and whole and parts[0] >= 0:
        return int(parts[0])
    elif 2 <= len(parts) <= 3 and whole and parts[0] >= 0 and (len(parts) == 2 or parts[2] > 0):
        return range(*parts)
    shown = ":".join(map(repr, parts))
    raise UsageError(f"`{text}` is {shown}: want a size, a range or a list of indices, none negative", code="E0231")


def _texts(items: list[Any]) -> bool:
    return all(isinstance(item, str) for item in items)


def extents(axes: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, Extent]:
    """Every axis of a family under one config; an axis may use those before it. All faults at once."""
    found: dict[str, Extent] = {}
    faults = []
    names = dict(config)
    for axis, text in axes.items():
        try:
            found[axis] = extent(text, names)
        except UsageError as e:
            faults.append((axis, e))
            continue
        if isinstance(found[axis], int):
            names[axis] = found[axis]
    if faults:
        axis, first = faults[0]
        raise UsageError(
            f"axis {axis}: {first.message}",
            code=first.code,
            place=first.place,
            hint=first.hint,
            faults=[f"axis {axis}: {e.message}" for axis, e in faults[1:]],
        )
    return found


def _fault(text: str, message: str, column: int) -> UsageError:
    shown = text.strip()[:200].replace(_MARK, "?")
    return UsageError(f"{message.replace(_MARK, '?')}: `{shown}`", code="E0222", place=f"column {column}")


def _check(node: ast.expr, text: str, names: set[str]) -> None:
    """Raise UsageError E0222 for what is not of the language; collect the names."""
    name = _name_of(node)
    if name is not None:
        if name not in _WORDS:
            names.add(name.removesuffix("?"))
        return
    match node:
        case ast.Constant(value=int() | float() | str()):
            parts: list[ast.expr] = []
        case ast.List(elts=parts) | ast.BoolOp(values=parts):
            pass
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=inner):
            parts = [inner]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            parts = [left, right]
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _BINARY or type(op) in _ANY:
            parts = [left, right]
        case ast.Subscript(value=left, slice=right):
            parts = [left, right]
        case ast.Compare(ops=[_, _, *_]):
            raise _fault(text, "comparisons don't chain: join them with `and`", node.col_offset + 1)
        case _:
            raise _fault(text, f"{type(node).__name__} has no meaning here", node.col_offset + 1)
    for part in parts:
        _check(part, text, names)


def _name_of(node: ast.expr) -> str | None:
    """`text_config.hidden_size?` of a chain of attributes, None of anything else."""
    if isinstance(node, ast.Name):
        return node.id.replace(_MARK, "?")
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool)):
        return str(node.value)
    front = _name_of(node.value) if isinstance(node, ast.Attribute) else None
    return f"{front}.{node.attr.replace(_MARK, '?')}" if isinstance(node, ast.Attribute) and front else None


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    name = _name_of(node)
    if name is not None:
        return _WORDS[name] if name in _WORDS else _lookup(name, names)

    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=items):
            return [_value(item, names) for item in items]
        case ast.BoolOp(op=op, values=[first, *rest]):
            value = _value(first, names)
            for each in rest:
                if bool(value) == isinstance(op, ast.Or):
                    break
                value = _value(each, names)
            return value
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _value(inner, names)
        case ast.UnaryOp(operand=inner):
            return -_number(_value(inner, names))
        case ast.Subscript(value=items, slice=index):
            found = _value(items, names)
            if isinstance(found, Sequence):  # of a string the characters: `hybrid_override_pattern[i] == 'M'`
                return found[_value(index, names)]
            raise TypeError(f"{found!r} is no list")
        case ast.Compare(left=left, ops=[op], comparators=[right]) | ast.BinOp(left=left, op=op, right=right):
            a = _value(left, names)
            b = _value(right, names)
            kind = type(op)
            return _ANY[kind](a, b) if kind in _ANY else _BINARY[kind](_number(a), _number(b))

    raise TypeError(f"no value of {type(node).__name__}")  # `_check` lets nothing else pass


def _number(value: Any) -> int | float:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value


def _lookup(name: str, names: Mapping[str, Any]) -> Any:
    plain = name.removesuffix("?")
    if plain in names:
        return names[plain]
    inner: Any = names
    for part in plain.split("."):
        inner = inner.get(part, _MISSING) if isinstance(inner, Mapping) else _MISSING
    if inner is not _MISSING:
        return inner
    if name.endswith("?"):
        return None
    raise UsageError(
        f"the config has no {plain!r}",
        code="E0223",
        hint=near_misses(plain, map(str, names)) or "give it with --config, or state a default: `name? or 1`",
    )


_MISSING = object()
