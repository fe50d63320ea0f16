"""Names of strangers on a screen, and numbers as people say them."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.report import text

ANY = st.text(st.characters(min_codepoint=0, max_codepoint=0x10FFFF, categories=None))


@given(ANY)
def test_nothing_that_acts_survives(name: str) -> None:
    shown = text.show_text(name)
    assert "\n" not in shown
    assert not any(unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") for char in shown)
    assert len(shown) <= 12 * text.CLIP
    assert not shown.lstrip().startswith(("::", "##["))
    shown.encode("utf-8")  # no surrogate is left


@given(st.text(st.characters(categories=["L", "N", "P"], exclude_characters=":#")))
def test_printable_text_of_any_script_stays(name: str) -> None:
    assert text.escape(name) == name


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\r\nb\tc", "a\\r\\nb\\tc"),
        ("x\u202ey", "x\\u202ey"),
        ("\x9b31m", "\\x9b31m"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("\udcff", "\\xff"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("::error::pwned", "\\x3a:error::pwned"),
        ("  ##[group]", "  \\x23#[group]"),
        ("层.0.重み", "层.0.重み"),
    ],
)
def test_escape(raw: str, want: str) -> None:
    assert text.escape(raw) == want


def test_a_name_of_megabytes_is_cut_with_its_length_told() -> None:
    shown = text.show_text("a" * 1_000_000 + "end")
    assert len(shown) == text.CLIP and "(1000003 characters)" in shown and shown.endswith("end")


@pytest.mark.parametrize(
    ("nbytes", "want"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_600, "1.00 MB"),
        (13_476_839_424, "13.5 GB"),
        (688_600_000_000, "689 GB"),
        (2e15, "2.00 PB"),
        (4e18, "4000 PB"),
    ],
)
def test_size(nbytes: float, want: str) -> None:
    assert text.size(nbytes) == want


@given(st.integers(min_value=1, max_value=10**17))
def test_size_is_within_a_percent(nbytes: int) -> None:
    number, unit = text.size(nbytes).split()
    back = float(number) * 10 ** (3 * ("B", "kB", "MB", "GB", "TB", "PB").index(unit))
    assert abs(back - nbytes) <= 0.01 * nbytes


@pytest.mark.parametrize(
    ("seconds", "want"), [(0.04, "0.0 s"), (9.9, "9.9 s"), (59.4, "59 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")]
)
def test_duration(seconds: float, want: str) -> None:
    assert text.duration(seconds) == want


@pytest.mark.parametrize(
    ("numbers", "want"),
    [
        ([0], "0"),
        (range(32), "0-31"),
        ([0, 1, 2, 5], "0-2,5"),
        (range(0, 31, 2), "0-30 step 2"),
        ([1, 2], "1-2"),
        ([0, 2, 3, 7, 9, 10, 20], "0,2-3,7,...,20"),
        ([5, 3, 3, 4], "3-5"),
    ],
)
def test_ranges(numbers: list[int], want: str) -> None:
    assert text.ranges(numbers) == want


def test_plurals() -> None:
    assert [text.plural(n, "copy") for n in (0, 1, 2910)] == ["0 copies", "1 copy", "2,910 copies"]
    assert text.more(0, "file") == "" and text.more(1, "file") == "... 1 more file; -v lists all"
    assert text.parameters(6_738_415_616) == "6.74 B" and text.parameters(12) == "12"
