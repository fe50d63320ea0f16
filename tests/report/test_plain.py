"""Pages as text: aligned, uncut in a pipe, whole words in a narrow window, no raw control character anywhere."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.report import palette, plain
from ckpt_tool.report.page import STATE, Column, Facts, Lines, Page, PageTable, Styled, Verdict
from ckpt_tool.report.plain import Look, look_of, render
from ckpt_tool.report.text import cells

LONG = "model.layers.[0-31].self_attn.q_proj.weight_scale_inv"
TABLE = PageTable(
    "tensors",
    (Column("tensor"), Column("count", right=True, drop=2), Column("dtype"), Column("bytes", right=True, drop=1)),
    ((Styled("model", "name"), "33", "", "96 kB"), (LONG, "32", "BF16", "64 kB"), ("short", "1", "F32", "32 kB")),
    indents=(0, 1, 1),
)
PAGE = Page("t", (Facts((("path", "/a/b"), ("format", "dcp"))), TABLE, Lines("notes", ("one",)), Verdict(True, "done")))


def test_a_pipe_gets_everything_aligned() -> None:
    assert render(PAGE, Look()).splitlines() == [
        "path    /a/b",
        "format  dcp",
        "",
        "tensors",
        "  tensor                                                   count  dtype  bytes",
        "  model                                                       33         96 kB",
        f"    {LONG}     32  BF16   64 kB",
        "    short                                                      1  F32    32 kB",
        "",
        "notes",
        "  one",
        "",
        "done",
    ]


def test_a_narrow_window_drops_then_stacks() -> None:
    assert render(Page("t", (TABLE,)), Look(width=60)).splitlines() == [
        "tensors",
        "  tensor                                 count  dtype  bytes",
        "  model                                     33         96 kB",
        f"    {LONG}",
        "                                            32  BF16   64 kB",
        "    short                                    1  F32    32 kB",
    ]
    lines = render(Page("t", (TABLE,)), Look(width=40)).splitlines()
    assert lines[1].split() == ["tensor", "dtype", "bytes"] and all(len(line) <= 40 for line in lines)
    assert lines[-1] == "  no room here for: count"


def test_columns_go_before_a_row_of_one_line_takes_two() -> None:
    table = TABLE._replace(one_line=True)
    lines = render(Page("t", (table,)), Look(width=72)).splitlines()
    assert lines[1].split() == ["tensor", "dtype", "bytes"] and len(lines) == 6
    assert lines[-1] == "  no room here for: count"
    lines = render(Page("t", (table,)), Look(width=50)).splitlines()  # no column's loss would do: all but two stay
    assert lines[1].split() == ["tensor", "count", "dtype", "bytes"]


TEXTS = st.text(st.characters(max_codepoint=0x2FFF), max_size=60)
ROWS = st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=6).map(tuple)


@given(ROWS, st.integers(40, 200))
def test_no_control_character_and_nothing_lost(rows: tuple[tuple[str, str, str], ...], width: int) -> None:
    columns = (Column("a"), Column("b"), Column("", right=True))
    page = Page(
        "t",
        (PageTable("x", columns, rows, tuple(i % 3 for i in range(len(rows)))), Lines("y", tuple(r[0] for r in rows))),
    )
    out = render(page, Look(width=width))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", out)
    squeezed = re.sub(r"\s", "", render(page, Look()))
    assert sorted(re.sub(r"\s", "", out)) == sorted(squeezed), "a narrow window shows the same text"


@given(st.lists(TEXTS, max_size=5), st.integers(30, 120))
def test_lines_fit_the_window(texts: list[str], width: int) -> None:
    page = Page("t", (Lines("notes", tuple(texts)), Facts(tuple((text[:20], text) for text in texts))))
    for line in render(page, Look(width=width)).splitlines():
        assert cells(line) <= width


def test_colour_only_where_wanted() -> None:
    plain = render(PAGE, Look())
    coloured = render(PAGE, Look(colour=True))
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain and "\x1b[32mdone\x1b[0m" in coloured


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "color", "tty", "want"),
    [
        ({"TERM": "xterm"}, "auto", True, True),
        ({"TERM": "xterm"}, "auto", False, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "auto", True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, "auto", True, True),
        ({"TERM": "dumb"}, "auto", True, False),
        ({}, "auto", True, False),
        ({"FORCE_COLOR": "1"}, "auto", False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, "auto", False, False),
        ({"TERM": "xterm"}, "never", True, False),
        ({"NO_COLOR": "1"}, "always", False, True),
    ],
)
def test_when_there_is_colour(
    environment: dict[str, str], color: str, tty: bool, want: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert look_of(Tty() if tty else io.StringIO(), color).colour is want


def test_columns_of_the_environment_count_in_a_pipe_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert look_of(io.StringIO()).width == 60
    monkeypatch.setenv("COLUMNS", "junk")
    assert look_of(io.StringIO()).width is None
    assert look_of(None).width is None


def test_wide_characters_keep_the_columns() -> None:
    table = PageTable("", (Column("a"), Column("b")), (("层层", "x"), ("abcd", "y")))
    assert render(Page("t", (table,)), Look()).splitlines()[1:] == ["层层  x", "abcd  y"]


NAMES = PageTable(
    "names",
    (Column("name in the source"), Column("name in the output"), Column("tensors", right=True)),
    (("model.layers.*.self_attn.q_proj.weight", "decoder.layers.*.self_attention.linear_qkv.weight", "12"),),
)


@pytest.mark.parametrize("width", [30, 36, 50, 80, 200])
def test_no_table_is_wider_than_its_window(width: int) -> None:
    title = "each name with its states: model, master, exp_avg, exp_avg_sq"
    values = PageTable(
        title, (Column("tensor"), *(Column(word, right=True) for word in ("min", "max"))), ((LONG, "1", "2"),)
    )
    for table in (NAMES, values, TABLE):
        for line in render(Page("t", (table,)), Look(width=width)).splitlines():
            assert len(line) <= width, line


def test_numbers_that_fit_nowhere_have_their_titles() -> None:
    assert render(Page("t", (NAMES,)), Look(width=60)).splitlines() == [
        "names",
        "  name in the source",
        "      name in the output",
        "  model.layers.*.self_attn.q_proj.weight",
        "      decoder.layers.*.self_attention.linear_qkv.weight",
        "        tensors 12",
    ]


def test_names_break_behind_their_parts() -> None:
    page = Page(
        "t", (PageTable("", (Column("module"), STATE), (("layers.0.post_attention_layernorm.weight", "model"),)),)
    )
    assert render(page, Look(width=36)).splitlines() == [
        f"{'module':31}state",
        "layers.0.post_attention_layernorm.",
        "  weight",
        f"{'':31}model",
    ]


def test_a_state_is_never_dropped() -> None:
    report = Path(plain.__file__).parent
    for file in sorted(report.glob("*.py")):
        for line in file.read_text(encoding="utf-8").splitlines():
            assert not re.search(r'Column\("state"[^)]*drop', line), file.name
    assert STATE.drop == 0


def test_states_have_their_colours_and_no_other_text() -> None:
    page = Page("t", (PageTable("", (STATE, Column("n", right=True)), (("model", "1"), ("exp_avg", "2"))),))
    coloured = render(page, Look(colour=True))
    assert f"\x1b[{palette.terminal_code('model')}mmodel\x1b[0m" in coloured
    assert f"\x1b[{palette.terminal_code('exp_avg')}mexp_avg\x1b[0m" in coloured
    assert "\x1b[2mstate\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render(page, Look())
