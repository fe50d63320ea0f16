"""Expression: the arithmetic of family tables (axes, conditions), read by its own small parser, never by `eval`.

    >>> config = {"num_attention_heads": 8, "num_key_value_heads": 2, "mlp_only_layers": [0]}
    >>> expression("num_attention_heads // num_key_value_heads").value(config)
    4
    >>> bool(expression("i not in mlp_only_layers and (i + 1) % 2 == 0").value({**config, "i": 3}))
    True
    >>> extent("1:num_attention_heads:2", config)
    range(1, 8, 2)

Language, loosest first: `or`, `and`, `not`, one comparison (`== != < <= > >= in`, `not in`), `+ -`, `* // %`, unary
`-`, `a[i]`, `( )`. Operands: whole and decimal numbers, 'strings', `[lists]`, `true false none`, names of the config
(dotted names descend: `text_config.hidden_size`). `name?` is none where the config lacks the name, so that
`head_dim? or hidden_size // num_attention_heads` states a default; `and` and `or` give an operand, as in Python.
There are no calls, no attributes, no powers: an expression costs at most its own length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ckpt_tool.errors import UsageError, near_misses

MAX_CHARS, MAX_DEPTH = 800, 40  # far above any table; they keep a hostile one from exhausting the stack
Extent = int | range | tuple[int, ...]  # an axis: 0 <= k < n, or the indices that its name takes in order

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+(?:\.[0-9]+)?)|(?P<string>'[^']*'|\"[^\"]*\")|(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\??)"
    r"|(?P<op>//|==|!=|<=|>=|[-+*%()<>\[\],]))"
)
_LEVELS: tuple[tuple[str, ...], ...] = (("or",), ("and",), (), (), ("+", "-"), ("*", "//", "%"))
_NOT, _COMPARE, _UNARY = 2, 3, 6
_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=", "in", "not")
_WORDS: dict[str, Any] = {"true": True, "True": True, "false": False, "False": False, "none": None, "None": None}
_RESERVED = ("or", "and", "not", "in", "if")


@dataclass(frozen=True, slots=True)
class _Node:
    """op: `const` (value), `name` (value), `list`, `index`, `neg`, `not` or a binary operator, over `args`."""

    op: str
    args: tuple[_Node, ...] = ()
    value: Any = None


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression. `names`: what it asks for, without the `?` of optional names."""

    text: str
    root: _Node
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
    parser = _Parser(text)
    root = parser.level(0)
    if parser.peek():
        raise parser.fault(f"`{parser.peek()}` is left over")
    return Expression(text.strip(), root, frozenset(parser.names))


def extent(text: str, names: Mapping[str, Any]) -> Extent:
    """An axis as a table states it: `n`, a range `start:stop[:step]`, a list, or a config key that holds one.

    Raises UsageError: E0222-E0224 as above, E0231 when the value is no extent.
    """
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


class _Parser:
    """Recursive descent over one text; `names` collects what is asked for."""

    def __init__(self, text: str) -> None:
        self.text, self.depth, self.at = text, 0, 0
        self.names: set[str] = set()
        self.tokens: list[tuple[str, str, int]] = []  # kind, text, column
        here = 0
        while len(text) <= MAX_CHARS and here < len(text.rstrip()):
            match = _TOKEN.match(text, here)
            if match is None:
                self.tokens.append(("end", text[here:].strip()[:1], here))
                raise self.fault(f"`{text[here:].strip()[:1]}` has no meaning here")
            kind = match.lastgroup or ""
            self.tokens.append((kind, match[kind], match.start(kind)))
            here = match.end()
        self.tokens.append(("end", "", len(text)))
        if len(text) > MAX_CHARS:
            raise self.fault(f"an expression of {len(text)} characters, at most {MAX_CHARS} are read")

    def fault(self, message: str) -> UsageError:
        column = self.tokens[min(self.at, len(self.tokens) - 1)][2] + 1
        return UsageError(f"{message}: `{self.text.strip()[:200]}`", code="E0222", place=f"column {column}")

    def peek(self) -> str:
        return self.tokens[self.at][1]

    def take(self) -> tuple[str, str]:
        kind, text, _ = self.tokens[self.at]
        self.at += kind != "end"
        return kind, text

    def want(self, text: str) -> None:
        if self.peek() != text:
            raise self.fault(f"want `{text}`, found `{self.peek() or 'the end'}`")
        self.take()

    def level(self, level: int) -> _Node:
        """What binds at least as tightly as `_LEVELS[level]`."""
        self.depth += 1
        if self.depth > MAX_DEPTH * len(_LEVELS):
            raise self.fault(f"more than {MAX_DEPTH} levels of nesting")
        if level == _NOT and self.peek() == "not":
            self.take()
            node = _Node("not", (self.level(_NOT),))
        elif level >= _UNARY:
            node = self.unary()
        else:
            node = self.level(level + 1)
            while self.peek() in _LEVELS[level]:
                node = _Node(self.take()[1], (node, self.level(level + 1)))
            if level == _COMPARE and self.peek() in _COMPARISONS:
                node = self.comparison(node)
        self.depth -= 1
        return node

    def comparison(self, left: _Node) -> _Node:
        op = self.take()[1]
        if op == "not":
            self.want("in")
            return _Node("not", (_Node("in", (left, self.level(_COMPARE + 1))),))
        node = _Node(op, (left, self.level(_COMPARE + 1)))
        if self.peek() in _COMPARISONS:
            raise self.fault("comparisons don't chain: join them with `and`")
        return node

    def unary(self) -> _Node:
        if self.peek() == "-":
            self.take()
            return _Node("neg", (self.level(_UNARY),))
        node = self.operand()
        while self.peek() == "[":
            self.take()
            node = _Node("index", (node, self.level(0)))
            self.want("]")
        return node

    def operand(self) -> _Node:
        kind, text = self.take()
        if kind == "number":
            return _Node("const", value=float(text) if "." in text else int(text))
        if kind == "string":
            return _Node("const", value=text[1:-1])
        if kind == "name" and text in _WORDS:
            return _Node("const", value=_WORDS[text])
        if kind == "name" and text not in _RESERVED:
            self.names.add(text.removesuffix("?"))
            return _Node("name", value=text)
        if text == "(":
            node = self.level(0)
            self.want(")")
            return node
        if text == "[":
            items = [] if self.peek() == "]" else [self.level(0)]
            while self.peek() == ",":
                self.take()
                items.append(self.level(0))
            self.want("]")
            return _Node("list", tuple(items))
        self.at -= kind != "end"
        raise self.fault(f"want a value, found `{text or 'the end'}`")


def _value(node: _Node, names: Mapping[str, Any]) -> Any:
    op, args = node.op, node.args
    if op == "const":
        return node.value
    if op == "name":
        return _lookup(node.value, names)
    left = _value(args[0], names) if args else None
    if op == "list":
        return [left, *(_value(arg, names) for arg in args[1:])] if args else []
    if op == "not":
        return not left
    if op == "and":
        return _value(args[1], names) if left else left
    if op == "or":
        return left or _value(args[1], names)
    if op == "neg":
        return -_number(left)
    right = _value(args[1], names)
    if op == "index":
        if isinstance(left, Sequence) and not isinstance(left, str):
            return left[right]
        raise TypeError(f"{left!r} is no list")
    return _apply(op, left, right)


def _apply(op: str, left: Any, right: Any) -> Any:
    match op:
        case "==":
            return left == right
        case "!=":
            return left != right
        case "in":
            return left in right
    a, b = _number(left), _number(right)
    match op:
        case "<":
            return a < b
        case "<=":
            return a <= b
        case ">":
            return a > b
        case ">=":
            return a >= b
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "//":
            return a // b
        case _:
            return a % b


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
