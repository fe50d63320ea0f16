"""Strict JSON against Python's own parser, and every rule it adds."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_tool.errors import CorruptFile
from ckpt_tool.storage.texts import strict_json
from ckpt_tool.storage.texts.strict_json import members, parse, pointer, value_at

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def exact(raw):
    """The slow road alone."""
    parser = strict_json._Exact(raw, "x.json", 0, "")
    value, end = parser.value(0)
    parser.expect_end(end)
    return value


def verdict(road, raw):
    try:
        return repr(road(raw))
    except CorruptFile as fault:
        return fault.code


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_both_roads_read_what_python_writes(value, ascii_only, indent):
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert repr(parse(raw, path="x.json")) == repr(json.loads(raw)) == repr(exact(raw))


@given(VALUES, st.data())
def test_both_roads_give_one_verdict_on_damaged_text(value, data):
    raw = bytearray(json.dumps(value).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        piece = data.draw(st.sampled_from(list(b'{}[],:"\\0-1eu.nN \xff\0')) | st.integers(0, 255))
        if data.draw(st.booleans()):
            raw[at] = piece
        else:
            raw.insert(at, piece)
    raw = bytes(raw)
    got = verdict(lambda text: parse(text, path="x.json"), raw)
    assert got == verdict(exact, raw)
    if not got.startswith("E03"):
        assert got.replace("-0.0", "0") == repr(json.loads(raw)).replace("-0.0", "0")


@given(st.dictionaries(TEXT, VALUES, max_size=5))
@example({"": 0})
@example({})
def test_members_are_those_of_the_object_and_tell_where_they_lie(value):
    raw = json.dumps(value).encode()
    found = list(members(raw, path="x.json", offset=100))
    assert [repr((each.key, each.value)) for each in found] == [repr(item) for item in value.items()]
    for each in found:
        assert raw[each.key_offset - 100 : each.key_offset - 99] == b'"'
        assert repr(value_at(raw, each.value_offset - 100, path="x.json")[0]) == repr(each.value)


@pytest.mark.parametrize(
    ("raw", "code", "offset", "place"),
    [
        (b'{"a": 1, "a": 1}', "E0321", 9, "/a"),
        (b'{"a": {"b": [1, {"c": 1, "c": 2}]}}', "E0321", 25, "/a/b/1/c"),
        (b'{"a": 1, "\\u0061": 1}', "E0321", 9, "/a"),
        (b'{"x/y~": [NaN]}', "E0322", 10, "/x~1y~0/0"),
        (b"[Infinity]", "E0322", 1, "/0"),
        (b"[-Infinity]", "E0322", 1, "/0"),
        (b"[1e999]", "E0322", 1, "/0"),
        (b"[[0]" + b",[0]" * 3 + b",-1e999]", "E0322", 17, "/4"),
        (b'["\\ud800"]', "E0324", 1, "/0"),
        (b'{"\\udfff": 1}', "E0324", 1, None),
        (b'["\\ud83d\\ude00\\ud83d"]', "E0324", 1, "/0"),
        (b"[" + b"9" * 4301 + b"]", "E0323", 1, "/0"),
        (b'{"a": "\xff"}', "E0319", 7, "/a"),
        (b"\xef\xbb\xbf{}", "E0320", 0, None),
        (b'{"a": 1}x', "E0320", 8, None),
        (b"", "E0320", 0, None),
        (b"[01]", "E0320", 1, "/1"),
        (b"[1.]", "E0320", 2, "/1"),
        (b"[+1]", "E0320", 1, "/0"),
        (b'["a\nb"]', "E0320", 3, "/0"),
        (b'["\\x41"]', "E0320", 2, "/0"),
        (b"{'a': 1}", "E0320", 1, None),
        (b'{"a": 1,}', "E0320", 7, "/a"),
        (b"[1,]", "E0320", 2, "/1"),
        (b"[1", "E0320", 2, "/1"),
        (b"[tru]", "E0320", 1, "/0"),
        (b'{"a" 1}', "E0320", 1, None),
        (b"]", "E0320", 0, None),
    ],
)
def test_every_rule_says_where_it_was_broken(raw, code, offset, place):
    with pytest.raises(CorruptFile) as caught:
        parse(raw, path="x.json", offset=1000, place="")
    assert (caught.value.code, caught.value.offset, caught.value.place) == (code, 1000 + offset, place)
    assert caught.value.path == "x.json" and caught.value.hint


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
def test_depth_is_bounded_without_a_recursion_error(opening):
    for raw in (opening * 100_000, opening * 65 + b"0"):
        with pytest.raises(CorruptFile) as caught:
            parse(raw, path="x.json")
        assert caught.value.code == "E0323"
    assert exact(b"[" * 64 + b"]" * 64) == parse(b"[" * 64 + b"]" * 64, path="x.json")
    with pytest.raises(CorruptFile):
        parse(b"[" * 65 + b"]" * 65, path="x.json")


def test_the_number_of_values_is_bounded(monkeypatch):
    monkeypatch.setattr(strict_json, "VALUE_LIMIT", 1000)
    parser = strict_json._Exact(b"[" + b"0," * 1000 + b"0]", "x.json", 0, "", 1000)
    with pytest.raises(CorruptFile, match="more than 1000 values"):
        parser.value(0)
    raw = b'{"a": [' + b"0," * 5000 + b"0]}"
    with pytest.raises(CorruptFile, match="more than 100 values"):
        list(members(raw, path="x.json", limit=100))


def test_a_fault_in_the_first_of_many_bytes_is_found_at_once():
    raw = b'{"a":1,"a":1,"b":"' + b"x" * 50_000_000 + b'"}'
    start = time.perf_counter()
    with pytest.raises(CorruptFile, match="duplicate key"):
        list(members(raw, path="x.json"))
    assert time.perf_counter() - start < 2


def test_bad_utf8_is_found_across_blocks(monkeypatch):
    monkeypatch.setattr(strict_json, "_BLOCK", 4)
    good = "aé€😀".encode() * 5
    strict_json.check_utf8(good, path="x.json")
    for at in range(len(good)):
        for bad in (good[:at] + b"\xff" + good[at:], good[:at] + b"\xc3"):
            try:
                bad.decode()
            except UnicodeDecodeError as e:
                with pytest.raises(CorruptFile) as caught:
                    strict_json.check_utf8(bad, path="x.json", offset=7)
                assert caught.value.offset == 7 + e.start


@pytest.mark.parametrize("raw", [b"-0", b" -0 ", b"[-0]", b"[1,-0]", b'{"a":-0}', b"[-0\n]"])
def test_minus_zero_is_a_float_on_both_roads(raw):
    assert "-0.0" in repr(parse(raw, path="x.json")) and repr(parse(raw, path="x.json")) == repr(exact(raw))


def test_pointers_escape_and_are_short():
    assert pointer("a/b", "~", 3) == "/a~1b/~0/3"
    assert len(pointer("x" * 10_000)) == 201


# -- what a fault is called --------------------------------------------------------------------------------------------

CONTROL = {
    "NUL": "\\u0000",
    "backspace": "\\b",
    "tab": "\\t",
    "newline": "\\n",
    "form feed": "\\f",
    "carriage return": "\\r",
    "escape": "\\u001b",
    "0x01": "\\u0001",
}


@pytest.mark.parametrize("where", ["value", "key", "element", "after others"])
@pytest.mark.parametrize("name", CONTROL)
def test_a_control_character_in_a_string_is_called_that(name: str, where: str) -> None:
    raw = json.loads(f'"{CONTROL[name]}"').encode()
    text = {
        "value": b'{"a": "x' + raw + b'y"}',
        "key": b'{"x' + raw + b'y": 1}',
        "element": b'["q", "x' + raw + b'y"]',
        "after others": b'{\n  "first": 1,\n  "\xc3\xa4\xe2\x82\xac": "x' + raw + b'y"\n}',
    }[where]
    with pytest.raises(CorruptFile) as caught:
        parse(text, path="x.json")
    message = caught.value.message
    at = text.index(b"x" + raw) + 1
    line, column = ("3", "11") if where == "after others" else ("1", str(at + 1))
    assert message == (
        f"control character ({name}) inside a string at line {line} column {column}; JSON writes it as {CONTROL[name]}"
    )
    assert caught.value.offset == at
    if where in ("value", "key"):
        with pytest.raises(CorruptFile, match="control character"):
            list(members(text, path="x.json"))


OTHER_DIALECTS = {  # what people and programs write -> (what it is called, the byte at fault)
    b"{'a': 1}": ("a text in single quotes", 1),
    b"{\"a\": 'b'}": ("a text in single quotes", 6),
    b"{`a`: 1}": ("a text in backquotes", 1),
    "{“a”: 1}".encode(): ("typographic quotes", 1),
    b'{"a": 1,}': ("a comma before the closing '}'", 7),
    b'{"a": [1,\n 2,\n]}': ("a comma before the closing ']'", 12),
    b'{"a": 1,, "b": 2}': ("two commas", 8),
    b"[1,,2]": ("two commas", 3),
    b'{"a": 1} // done': ("follows", 9),
    b'{"a": 1, // one\n "b": 2}': ("a comment", 9),
    b'{"a": /* one */ 1}': ("a comment", 6),
    b'{\n# c\n"a": 1}': ("a comment", 2),
    b'{"a": True}': ("True is not JSON", 6),
    b'{"a": None}': ("None is not JSON", 6),
    b"[undefined]": ("undefined is not JSON", 1),
    b'{"a": NaN}': ("NaN is not JSON", 6),
    b'{"a": nan}': ("nan is not JSON", 6),
    b'{"a": -Infinity}': ("-Infinity is not JSON", 6),
    b'{"a": +inf}': ("+inf is not JSON", 6),
    b"[Inf]": ("Inf is not JSON", 1),
    b"[01]": ("begins with a zero", 1),
    b"[-007]": ("begins with a zero", 1),
    b"[0x10]": ("the number 0x10", 1),
    b"[+1]": ("plus sign", 1),
    b"[.5]": ("both sides of its point", 1),
    b"[1.]": ("both sides of its point", 2),
    b"{a: 1}": ("want a key in quotes and ':', found 'a: 1}'", 1),
    b'{"a" 1}': ("want a key in quotes and ':'", 1),
    b'{"a": 1 "b": 2}': ("want ',' or the closing '}', found", 8),
    b"[1 2]": ("want ',' or the closing ']'", 3),
    b"[1}": ("want ',' or the closing ']', found '}'", 2),
    b'{"a": "x': ("a string is not closed", 6),
    b'{"a": "x\\': ("a string is not closed", 6),
    b'{"a': ("a string is not closed", 1),
    b'{"a": 1': ("the text ends before its last bracket", 7),
    b'{"a":': ("the text ends", 5),
    b"[": ("the text ends", 1),
    b"": ("the text is empty", 0),
    b" \n ": ("the text is empty", 3),
    b"\xef\xbb\xbf{}": ("byte order mark", 0),
    '{"a": 1}'.encode("utf-16"): ("UTF-16", 0),
    '{"a": 1}'.encode("utf-16-le"): ("UTF-16", 1),
    b'{"a": 1' + bytes(9): ("9 NUL bytes", 7),
    bytes(16): ("16 NUL bytes", 0),
    b'["\\x41"]': ("a string holds \\x, an escape", 2),
    b'["ok", "a\\\'b"]': ("a string holds \\', an escape", 9),
    b'["\\\\ \\u12"]': ("a string holds \\u, an escape", 5),
}


@pytest.mark.parametrize("text", OTHER_DIALECTS, ids=ascii)
def test_what_is_written_for_another_dialect_is_called_by_its_name(text: bytes) -> None:
    said, at = OTHER_DIALECTS[text]
    with pytest.raises(CorruptFile) as caught:
        parse(text, path="x.json")
    error = caught.value
    assert said in error.message, error.message
    assert error.offset == at and error.hint
    if b"\n" in text.strip() and "at line" in error.message:
        assert f"at line {text[:at].count(10) + 1} " in error.message


@given(st.binary(max_size=40) | st.text("{}[]\",:'tfn01.-+eE \n\t\x00\\/#NaI", max_size=24).map(str.encode))
def test_no_text_is_without_a_name_for_its_fault(text: bytes) -> None:
    try:
        parse(text, path="x.json", offset=100)
    except CorruptFile as e:
        assert e.message and 100 <= (e.offset or 0) <= 100 + len(text) and e.hint
