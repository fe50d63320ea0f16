"""Statement: one line of Paddle's any-to-any language (AOA), parsed. And the two files that hold such lines.

    STATEMENT := NAMES '->' NAMES { ',' ATTRIBUTE | ',' WORD }
    NAME      := [A-Za-z_][A-Za-z0-9_.$*^]*  |  NAME '[' NUMBER ':' NUMBER ']'      NAME[0:3] is NAME_0, NAME_1, NAME_2
    ATTRIBUTE := NAME '=' (NUMBER | STRING)          WORD := fused_qkv | fused_qkv_old | fused_ffn

    >>> parse("w^T -> a, b, axis=0", 1)
    Statement(number=1, left=('w^T',), right=('a', 'b'), attributes={'axis': 0}, word='')

A name may end in `^T` (left side), hold one `*` and the placeholders `$LAYER_ID`, `$EXPERT_ID`, `$LAYER_ID_OFFSET`; `_`
alone is nothing. Source: PaddlePaddle 3.3.1, `distributed/flex_checkpoint/aoa/{lexer,parser}.py`; where Paddle lets a
misspelt attribute, a second `*` or an empty `[s:e]` pass, here it is an error. What it does not do: look at shapes,
or decide what a statement does (`steps`).

Names: a statement with placeholders and stars, once for every layer and expert that the checkpoint has.

    shapes: e.0.w, e.1.w, layers.0.a, layers.2.a
    layers.$LAYER_ID.a -> h.$LAYER_ID.b        layers.0.a -> h.0.b;  layers.2.a -> h.2.b
    layers.$LAYER_ID_OFFSET.a -> h.$LAYER_ID_OFFSET.b     layer 2 -> h.1 (the right side counts one lower)
    e.*.w -> stack, axis=0                     e.0.w, e.1.w -> stack, axis=0   (by number)

Ids are found among the names that the side to be read has: the source's, the destination's where a pattern names only
what is made. Several placeholders take every pair of ids that are found. Source: PaddlePaddle 3.3.1, `aoa/macros.py`
(`id`, `layer_id_offset_macro`, `star_macro`). Stricter than Paddle: a pattern without a match is an error, so are
unlike placeholders in one statement. Ids are those of all names of the side that is read, not of the first name only,
so a lacking partner shows. With `reverse` all of it works from the right side, stars included, where Paddle still looks
left. A `_` may be the other side of a pattern: each of its names is dropped, or has no source.

Cost: one look at each name, then at those of like form alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.bounds import DIGITS
from ckpt_tool.core.dtype import DType, from_torch
from ckpt_tool.errors import UsageError, near_misses
from ckpt_tool.systems.paddle.aoa.faults import Faults

NOTHING = "_"
TRANSPOSED = "^T"
QKV = "fused_qkv"
QKV_OLD = "fused_qkv_old"
FFN = "fused_ffn"
WORDS = (QKV, QKV_OLD, FFN)
PLACEHOLDERS = ("$LAYER_ID_OFFSET", "$LAYER_ID", "$EXPERT_ID")
CASTS: dict[str, DType | None] = {name: from_torch(name) for name in ("float16", "float32", "bfloat16")}
MAX_NAMES = 65_536  # on one side; above any number of experts or heads

_NUMBERS = ("axis", "num_heads", "num_key_value_groups")
_TEXTS = ("permute", "dtype", "src_dtype", "dst_dtype")
_TOKEN = re.compile(
    r"\s*(?:(?P<arrow>->)|(?P<mark>[=:\[\],])|(?P<number>[0-9]+)|(?P<text>\"[^\"]*\"|'[^']*')"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_.$*^]*))"
)
_KIND = {"arrow": ">", "number": "0", "text": "t", "name": "n", "end": "e"}  # a letter for each kind of token
_PERMUTE = re.compile(r"\[\s*(?:[0-9]{1,9}\s*(?:,\s*[0-9]{1,9}\s*)*,?\s*)?\]")
_PLACEHOLDER = re.compile(r"\$[A-Z_]*")


class Statement(NamedTuple):
    """One AOA statement."""

    number: int  # of the statement, from 1
    left: tuple[str, ...]  # names, `NAME[s:e]` written out
    right: tuple[str, ...]  # names, `NAME[s:e]` written out
    attributes: dict[str, int | str]
    word: str = ""  # the fusion's, or ""


class AoaText(NamedTuple):
    """What a file of statements says."""

    statements: list[str]
    reverse: bool  # they are to be run from right to left, last one first


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
            raise UsageError(f"the key {key!r} appears twice", code="E1202", place=f"/{key}")
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
        raise UsageError("an attribute is before the arrow", code="E1200", hint="attributes come last")
    names, attributes, words = _split_right_side(right)
    statement = Statement(number, tuple(name for name, _ in left), names, attributes, words)
    _check_names(statement)
    return statement


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """(kind, text, column from 1), an `end` last."""
    here = 0
    end = len(text.rstrip())
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
    """The items between commas up to the last token: (name, None), or (attribute, value). `NAME[s:e]` gives its
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


def _split_right_side(items: list[tuple[str, int | str | None]]) -> tuple[tuple[str, ...], dict[str, int | str], str]:
    """The right side as (names, attributes, word)."""
    names: list[str] = []
    attributes: dict[str, int | str] = {}
    word = ""
    for name, value in items:
        if value is not None:
            if name in attributes:
                raise UsageError(f"{name} appears twice", code="E1204")
            attributes[name] = _value(name, value)
        elif name in WORDS:
            if word:
                raise UsageError(f"{word} and {name} in one statement", code="E1203", hint="a statement fuses once")
            word = name
        elif attributes or word:
            raise UsageError(
                f"`{name}` is after the attributes",
                code="E1203",
                hint=near_misses(name, (*WORDS, *_NUMBERS, *_TEXTS)) or "names come first",
            )
        else:
            names.append(name)
    if not names:
        raise UsageError("no name after the arrow", code="E1200", hint="`NAME -> _` drops a tensor")
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
    """The dims of a `permute`; () means all of them reversed."""
    return tuple(int(dim) for dim in re.findall("[0-9]+", text))


def _check_names(statement: Statement) -> None:
    left = statement.left
    right = statement.right
    word = statement.word

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
            "`_` is alone on its side, without attributes",
            code="E1206",
            hint="`NAME -> _` drops a tensor, `_ -> NAME` states one without a source",
        )


# -- for every layer and expert ----------------------------------------------------------------------------------------

_STAR = "*"
_OFFSET = "$LAYER_ID_OFFSET"
_HOLDER = re.compile("|".join(re.escape(word) for word in (*PLACEHOLDERS, _STAR)))
_DIGITS = re.compile("[0-9]+")
Ids = dict[str, int]  # placeholder -> number


class Forms:
    """Names by their form, which is the name with every number as `#`."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)
        self._by_form: dict[str, list[str]] = {}
        for name in self.names:
            self._by_form.setdefault(_DIGITS.sub("#", name), []).append(name)

    def ids(self, pattern: str) -> list[Ids]:
        """The numbers in place of the placeholders (and the star) of `pattern`, for each name that matches it."""
        groups: dict[str, str] = {}
        regex = ""
        at = 0
        for match in _HOLDER.finditer(pattern):
            known = match[0] in groups
            group = groups.setdefault(match[0], f"g{len(groups)}")
            regex += re.escape(pattern[at : match.start()]) + (
                f"(?P={group})" if known else f"(?P<{group}>[0-9]{{1,18}})"
            )
            at = match.end()
        fits = re.compile(regex + re.escape(pattern[at:])).fullmatch
        form = _DIGITS.sub("#", _HOLDER.sub("0", pattern))

        numbers: list[Ids] = []
        for name in self._by_form.get(form, ()):
            fitting = fits(name)
            if fitting:
                numbers.append({holder: int(fitting[group]) for holder, group in groups.items()})
        return numbers


def expand(
    statements: Iterable[Statement], source: Forms, wanted: Forms | None, faults: Faults, *, reverse: bool, skip: bool
) -> list[Statement]:
    """The statements without placeholders and stars, in order.

    Args:
        source, wanted: the names of the source, and those of the destination where they are known.
        skip: leave a statement out that no name of the source fits, as Paddle does.
    Faults: E1205 several names on both sides of a star, E1208 no match, E1209 unlike placeholders, E1210 a star or a
    number that can't be written out.
    """
    names = _Names(source, wanted, faults, reverse, skip)
    out: list[Statement] = []
    for statement in statements:
        try:
            out += [written for concrete in names.by_ids(statement) for written in names.by_stars(concrete)]
        except UsageError as e:
            faults.take(statement.number, e)
    return out


class _Names:
    def __init__(self, source: Forms, wanted: Forms | None, faults: Faults, reverse: bool, skip: bool) -> None:
        self.source = source
        self.wanted = wanted
        self.faults = faults
        self.reverse = reverse
        self.skip = skip

    def by_ids(self, statement: Statement) -> Iterator[Statement]:
        """The statement once for each id of `$LAYER_ID` and the other placeholders."""
        names = [name for name in (*statement.left, *statement.right) if name != NOTHING]
        holders = {frozenset(_HOLDER.findall(name)) - {_STAR} for name in names}
        if holders == {frozenset()}:
            yield statement
            return
        if len(holders) > 1:
            few = min(names, key=_holders)
            many = max(names, key=_holders)
            raise UsageError(
                f"`{few}` and `{many}` have unlike placeholders",
                code="E1209",
                hint="every name of a statement has the same ones: write the numbers of the others out",
            )
        found = self._ids(statement, sorted(holders.pop()))
        if prod(map(len, found.values())) > max(4 * len(self.source.names), MAX_NAMES):
            raise UsageError(f"the ids pair up {prod(map(len, found.values()))} times", code="E1210")
        for numbers in product(*found.values()):
            ids = dict(zip(found, numbers, strict=True))
            yield statement._replace(
                left=self._fill_ids(statement.left, ids, made=self.reverse),
                right=self._fill_ids(statement.right, ids, made=not self.reverse),
            )

    def _ids(self, statement: Statement, holders: Sequence[str]) -> dict[str, list[int]]:
        """The ids of each placeholder over all names of the side that is read; none where the statement is skipped."""
        read, made = (statement.right, statement.left) if self.reverse else (statement.left, statement.right)
        patterns, forms = (made, self.wanted) if read == (NOTHING,) else (read, self.source)
        if forms is None:
            raise UsageError(
                f"what `{patterns[0]}` means is not known",
                code="E1210",
                hint="write the numbers out: the names of the destination are not known here",
            )
        found: dict[str, set[int]] = {holder: set() for holder in holders}
        missing = []
        for pattern in patterns:
            ids = forms.ids(pattern.removesuffix(TRANSPOSED))
            for one in ids:
                for holder in holders:
                    found[holder].add(one[holder])
            if not ids:
                missing.append(pattern)
        if missing and not (self.skip and len(missing) == len(patterns)):
            raise self._no_match(missing[0], forms)
        return {holder: sorted(numbers) for holder, numbers in found.items()}

    def _no_match(self, pattern: str, forms: Forms) -> UsageError:
        bare = pattern.removesuffix(TRANSPOSED)
        where = "source" if forms is self.source else "destination"
        near = self.faults.near(_HOLDER.sub("0", bare), forms.names)
        return UsageError(
            f"no name of the {where} fits `{bare}`",
            code="E1208",
            hint=near or "leave the statement out, or --lenient, which skips those that fit nothing, as Paddle does",
        )

    def _fill_ids(self, names: Sequence[str], ids: Ids, *, made: bool) -> tuple[str, ...]:
        """The names at `ids`. The offset counts the right side one below the left, whichever is the one that is
        read."""
        shift = 0
        if made:
            shift = 1 if self.reverse else -1

        def number(match: re.Match[str]) -> str:
            """The number that replaces a placeholder; stars are filled in later."""
            if match[0] == _STAR:
                return _STAR
            value = ids[match[0]] + (shift if match[0] == _OFFSET else 0)
            if value < 0:
                raise UsageError(
                    f"layer {ids[match[0]]} has none below it",
                    code="E1210",
                    hint="drop or rename that layer first, by its number",
                )
            return str(value)

        return tuple(_HOLDER.sub(number, name) for name in names)

    def by_stars(self, statement: Statement) -> Iterator[Statement]:
        """With the stars written out, in numeric order."""
        if not any(_STAR in name for name in (*statement.left, *statement.right)):
            yield statement
            return
        left = self._expand_side(statement.left, read=not self.reverse)
        right = self._expand_side(statement.right, read=self.reverse)
        if NOTHING in (*left, *right):  # each of them is dropped, or has no source
            for name in [name for name in (*left, *right) if name != NOTHING]:
                pair = ((NOTHING,), (name,)) if NOTHING in left else ((name,), (NOTHING,))
                yield statement._replace(left=pair[0], right=pair[1])
        elif left and right:
            if len(left) > 1 and len(right) > 1:
                raise UsageError(f"{len(left)} names -> {len(right)} names: one side wants a single name", code="E1205")
            yield statement._replace(left=tuple(left), right=tuple(right))

    def _expand_side(self, patterns: Iterable[str], *, read: bool) -> list[str]:
        names: list[str] = []
        for pattern in patterns:
            names += self._expand_names(pattern, read=read)
        return names

    def _expand_names(self, pattern: str, *, read: bool) -> list[str]:
        if _STAR not in pattern:
            return [pattern]
        forms = self.source if read else self.wanted
        bare = pattern.removesuffix(TRANSPOSED)
        if forms is None:
            raise UsageError(
                f"what `{pattern}` means is not known",
                code="E1210",
                hint="write the names out, as NAME[START:END] or one by one: the names of the destination are "
                "not known here",
            )
        numbers = sorted(ids[_STAR] for ids in forms.ids(bare))
        if not numbers and not (self.skip and read):
            raise self._no_match(pattern, forms)
        if len(set(numbers)) < len(numbers):
            raise UsageError(f"`{bare}` fits two names of one number", code="E1210", hint="name them one by one")
        suffix = TRANSPOSED if bare != pattern else ""
        return [bare.replace(_STAR, str(number)) + suffix for number in numbers]


def _holders(name: str) -> int:
    return len(_HOLDER.findall(name))
