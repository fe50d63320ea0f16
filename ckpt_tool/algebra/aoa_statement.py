"""Statement: one line of Paddle's any-to-any language (AOA), parsed. And the two files that hold such lines.

    STATEMENT := NAMES '->' NAMES { ',' ATTRIBUTE | ',' WORD }
    NAME      := [A-Za-z_][A-Za-z0-9_.$*^]*  |  NAME '[' NUMBER ':' NUMBER ']'      NAME[0:3] is NAME_0, NAME_1, NAME_2
    ATTRIBUTE := NAME '=' (NUMBER | STRING)          WORD := fused_qkv | fused_qkv_old | fused_ffn

    >>> parse("w^T -> a, b, axis=0", 1)
    Statement(number=1, left=('w^T',), right=('a', 'b'), attributes={'axis': 0}, word='')

A name may end in `^T` (left side), hold one `*` and the placeholders `$LAYER_ID`, `$EXPERT_ID`, `$LAYER_ID_OFFSET`; `_`
alone is nothing. Source: PaddlePaddle 3.3.1, `distributed/flex_checkpoint/aoa/{lexer,parser}.py`; where Paddle lets a
misspelt attribute, a second `*` or an empty `[s:e]` pass, here it is an error. What it does not do: look at tensors
(`aoa_names`), or say what a statement does (`aoa_steps`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import DIGITS
from ckpt_tool.core.dtype import DType, from_torch
from ckpt_tool.errors import UsageError, near_misses

NOTHING = "_"
TRANSPOSED = "^T"
QKV, QKV_OLD, FFN = "fused_qkv", "fused_qkv_old", "fused_ffn"
WORDS = (QKV, QKV_OLD, FFN)
PLACEHOLDERS = ("$LAYER_ID_OFFSET", "$LAYER_ID", "$EXPERT_ID")
CASTS: dict[str, DType | None] = {name: from_torch(name) for name in ("float16", "float32", "bfloat16")}
MAX_NAMES = 65_536  # on one side; above any number of experts or heads

_NUMBERS, _TEXTS = ("axis", "num_heads", "num_key_value_groups"), ("permute", "dtype", "src_dtype", "dst_dtype")
_TOKEN = re.compile(
    r"\s*(?:(?P<arrow>->)|(?P<mark>[=:\[\],])|(?P<number>[0-9]+)|(?P<text>\"[^\"]*\"|'[^']*')"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_.$*^]*))"
)
_KIND = {"arrow": ">", "number": "0", "text": "t", "name": "n", "end": "e"}  # a letter for each kind of token
_PERMUTE = re.compile(r"\[\s*(?:[0-9]{1,9}\s*(?:,\s*[0-9]{1,9}\s*)*,?\s*)?\]")
_PLACEHOLDER = re.compile(r"\$[A-Z_]*")


class Statement(NamedTuple):
    """number: of the statement, from 1. left, right: names, `NAME[s:e]` written out. word: the fusion's, or ""."""

    number: int
    left: tuple[str, ...]
    right: tuple[str, ...]
    attributes: dict[str, int | str]
    word: str = ""


class AoaText(NamedTuple):
    """What a file of statements says. reverse: they are to be run from right to left, last one first."""

    statements: list[str]
    reverse: bool


def read_aoa(text: str) -> AoaText:
    """Statements from a file: JSON as Paddle's `aoa_config`, or plain text with one statement a line and `#` comments.

    JSON: `{"aoa_statements": [...], "aoa_config_reverse": false}`, or the list alone; `enable_traceback` is taken and
    means nothing here. Raises UsageError E1201, E1202 with the place.
    """
    if not text.lstrip().startswith(("{", "[")):
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        plain = [line for line in lines if line]
        if not plain:
            raise UsageError("no statement in the file", code="E1201", hint="one a line: NAME -> NAME")
        return AoaText(plain, False)
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except RecursionError as e:
        raise UsageError("the JSON of the statements is nested too deeply", code="E1201") from e
    except json.JSONDecodeError as e:
        raise UsageError(
            f"the statements are not JSON: {e.msg}",
            code="E1201",
            place=f"line {e.lineno}, column {e.colno}",
            hint="plain text works too: one statement a line",
        ) from e
    except ValueError as e:  # a number of more digits than Python reads
        raise UsageError(f"the statements are not JSON: {e}", code="E1201") from e
    config = {"aoa_statements": found} if isinstance(found, list) else found
    for key in config:
        if key not in ("aoa_statements", "aoa_config_reverse", "enable_traceback"):
            raise UsageError(
                f"{key!r} means nothing among the statements",
                code="E1202",
                place=f"/{key}",
                hint=near_misses(key, ("aoa_statements", "aoa_config_reverse"))
                or "want aoa_statements, aoa_config_reverse",
            )
    statements: Any = config.get("aoa_statements")
    reverse: Any = config.get("aoa_config_reverse", False)
    if not isinstance(statements, list) or not all(isinstance(line, str) for line in statements):
        raise UsageError("aoa_statements wants a list of strings", code="E1202", place="/aoa_statements")
    if not isinstance(reverse, bool):
        raise UsageError(
            f"aoa_config_reverse is {reverse!r}, want true or false", code="E1202", place="/aoa_config_reverse"
        )
    return AoaText(statements, reverse)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise UsageError(f"the key {key!r} stands twice", code="E1202", place=f"/{key}")
        out[key] = value
    return out


def parse(text: str, number: int) -> Statement:
    """One statement. Raises UsageError: E1200 no statement, E1203 an unknown attribute or word, E1204 a bad value,
    E1205 several names on both sides, E1206 a name that can't be one, E1207 `A -> B^T`."""
    tokens = list(_tokens(text))
    arrows = [i for i, (kind, _, _) in enumerate(tokens) if kind == "arrow"]
    if len(arrows) != 1:
        raise UsageError(
            f"{len(arrows)} arrows `->` in a statement, want one",
            code="E1200",
            hint="is a comma missing between two statements?" if arrows else "NAME -> NAME",
        )
    left = _items(tokens[: arrows[0] + 1])
    right = _items(tokens[arrows[0] + 1 :])
    if any(value is not None or name in WORDS for name, value in left):
        raise UsageError("an attribute stands before the arrow", code="E1200", hint="attributes come last")
    names, attributes, words = _parted(right)
    statement = Statement(number, tuple(name for name, _ in left), names, attributes, words)
    _check_names(statement)
    return statement


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """(kind, text, column from 1), an `end` last."""
    here, end = 0, len(text.rstrip())
    while here < end:
        match = _TOKEN.match(text, here)
        if match is None:
            at = here + len(text[here:]) - len(text[here:].lstrip())
            raise UsageError(
                f"`{text[at]}` has no meaning at column {at + 1}",
                code="E1200",
                hint="names are letters, digits, `.` and `_`; other tensors pass under their own names",
            )
        kind = match.lastgroup or ""
        if kind == "number" and len(match[kind]) > DIGITS:
            raise UsageError(
                f"a number of {len(match[kind])} digits at column {match.start(kind) + 1}",
                code="E1204",
                hint="no axis, head or layer has such a number",
            )
        yield kind, match[kind], match.start(kind) + 1
        here = match.end()
    yield "end", "", end + 1


def _items(tokens: list[tuple[str, str, int]]) -> list[tuple[str, int | str | None]]:
    """What stands between commas up to the last token: (name, None), or (attribute, value). `NAME[s:e]` as its
    names."""
    items: list[tuple[str, int | str | None]] = []
    rest = [*tokens[:-1], ("end", tokens[-1][1], tokens[-1][2])]
    at = 0
    while True:
        kind, name, column = rest[at]
        if kind != "name":
            raise UsageError(f"want a name at column {column}, found `{name or 'the end'}`", code="E1200")
        shape = "".join(token[1] if token[0] == "mark" else _KIND[token[0]] for token in rest[at + 1 : at + 6])
        if shape[:1] == "=":
            if rest[at + 2][0] not in ("number", "text"):
                raise UsageError(f"{name}= wants a number or a quoted text", code="E1200")
            value = rest[at + 2][1]
            items.append((name, int(value) if rest[at + 2][0] == "number" else value[1:-1]))
            at += 3
        elif shape[:1] == "[":
            if shape != "[0:0]":
                raise UsageError(f"want {name}[START:END] at column {column}", code="E1200")
            items += _array(name, int(rest[at + 2][1]), int(rest[at + 4][1]))
            at += 6
        else:
            items.append((name, None))
            at += 1
        if len(items) > MAX_NAMES:
            raise UsageError(f"more than {MAX_NAMES} names on one side", code="E1206")
        if rest[at][0] == "end":
            return items
        if rest[at][1] != ",":
            raise UsageError(f"want a comma at column {rest[at][2]}, found `{rest[at][1]}`", code="E1200")
        at += 1


def _array(name: str, start: int, stop: int) -> list[tuple[str, int | str | None]]:
    if not 0 < stop - start <= MAX_NAMES:
        raise UsageError(
            f"{name}[{start}:{stop}] is {max(stop - start, 0)} names",
            code="E1206",
            hint="START is the first number, END the one after the last",
        )
    return [(f"{name}_{i}", None) for i in range(start, stop)]


def _parted(items: list[tuple[str, int | str | None]]) -> tuple[tuple[str, ...], dict[str, int | str], str]:
    """The right side as (names, attributes, word)."""
    names: list[str] = []
    attributes: dict[str, int | str] = {}
    word = ""
    for name, value in items:
        if value is not None:
            if name in attributes:
                raise UsageError(f"{name} stands twice", code="E1204")
            attributes[name] = _value(name, value)
        elif name in WORDS:
            if word:
                raise UsageError(f"{word} and {name} in one statement", code="E1203", hint="a statement fuses once")
            word = name
        elif attributes or word:
            raise UsageError(
                f"`{name}` stands behind the attributes",
                code="E1203",
                hint=near_misses(name, (*WORDS, *_NUMBERS, *_TEXTS)) or "names come first",
            )
        else:
            names.append(name)
    if not names:
        raise UsageError("no name behind the arrow", code="E1200", hint="`NAME -> _` drops a tensor")
    return tuple(names), attributes, word


def _value(name: str, value: int | str) -> int | str:
    if name not in (*_NUMBERS, *_TEXTS):
        near = "reshape= came after PaddlePaddle 3.3.1 and is not built" if name == "reshape" else ""
        near = near or near_misses(name, (*_NUMBERS, *_TEXTS)) or f"there are {', '.join((*_NUMBERS, *_TEXTS))}"
        raise UsageError(f"{name} is no attribute", code="E1203", hint=near)
    if name in _NUMBERS and isinstance(value, str):
        raise UsageError(f"{name}='{value}': want a number without quotes", code="E1204")
    if name in _TEXTS and not isinstance(value, str):
        raise UsageError(f"{name}={value}: want a quoted text", code="E1204")
    if name.startswith("num_") and not 0 < int(value) <= MAX_NAMES:
        raise UsageError(f"{name}={value}: want 1 to {MAX_NAMES}", code="E1204")
    if name.endswith("dtype") and value not in CASTS:
        raise UsageError(
            f"{name}='{value}' is no cast of the language",
            code="E1204",
            hint=near_misses(str(value), CASTS) or f"there are {', '.join(CASTS)}",
        )
    if name == "permute" and not _PERMUTE.fullmatch(str(value).strip()):
        raise UsageError(f"permute='{value}': want dims as '[2, 0, 1]'", code="E1204", hint="'[]' reverses all dims")
    return value


def permutation(text: str) -> tuple[int, ...]:
    """The dims of a `permute`; () stands for all of them reversed."""
    return tuple(int(dim) for dim in re.findall("[0-9]+", text))


def _check_names(statement: Statement) -> None:
    left, right, word = statement.left, statement.right, statement.word
    for name in right:
        if name.endswith(TRANSPOSED):
            raise UsageError(
                f"`{name}` can't be assigned: a transpose is a view of what is read",
                code="E1207",
                hint=f"read it transposed: `A^T -> {name.removesuffix(TRANSPOSED)}`",
            )
    for name in (*left, *right):
        bare = name.removesuffix(TRANSPOSED)
        if "^" in bare or bare.count("*") > 1 or (name != bare and bare == NOTHING):
            raise UsageError(f"`{name}` is no name", code="E1206", hint="one `*` at most, and `^T` at the end alone")
        for placeholder in _PLACEHOLDER.findall(bare):
            if not placeholder.startswith(PLACEHOLDERS):
                raise UsageError(
                    f"`{placeholder}` in `{name}` is no placeholder",
                    code="E1206",
                    hint=near_misses(placeholder, PLACEHOLDERS) or f"there are {', '.join(PLACEHOLDERS)}",
                )
    if len(left) > 1 and len(right) > 1:
        near = near_misses(right[-1], WORDS)
        raise UsageError(
            f"{len(left)} names -> {len(right)} names: one side wants a single name",
            code="E1205",
            hint=near or "write it as two statements with a name between them",
        )
    if NOTHING in (*left, *right) and (len(left) + len(right) > 2 or left == right or statement.attributes or word):
        raise UsageError(
            "`_` stands alone on its side, without attributes",
            code="E1206",
            hint="`NAME -> _` drops a tensor, `_ -> NAME` states one without a source",
        )
