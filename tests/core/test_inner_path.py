"""Which text may be a file's name below a folder. The list of what may not is also `tests/storage/test_source.py`'s."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core import inner_path as inner
from ckpt_tool.core.inner_path import inner_path, output_faults, unfit
from ckpt_tool.errors import UnsafeInput

OUTSIDE = [
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a/..",
    "..",
    ".",
    "",
    "a//b",
    "a/",
    "./a",
    "C:\\x",
    "C:x",
    "\\\\host\\x",
    "a\\..\\x",
    "x\0y",
    "a\nb",
    "\x1b[31m",
    "file:x",
    "s3://b/x",
    "a.",
    "a /b",
    "\ud800",
    "n" * 256,
    "é" * 128,
    "a/" * 7 + "b",
    ".ckpt-journal",
    ".CKPT-journal",
    ".ckpt-journal-1-of-2",
    "zero/.ckpt-journal/fp32.pt",
    ".out.ckpt-partial/x",
]


@pytest.mark.parametrize("path", OUTSIDE, ids=ascii)
def test_what_may_lead_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(UnsafeInput) as caught:
        inner_path(path)
    assert (caught.value.exit_code, caught.value.code) == (4, "E1600") and caught.value.hint


@given(st.text(st.characters(codec=None), max_size=12) | st.text("./\\:~ab\0\n ", max_size=12))
def test_what_passes_stays_below(path: str) -> None:
    if unfit(path):
        return
    joined = os.path.normpath(os.path.join(b"/root", os.fsencode(path)))
    assert joined == b"/root/" + b"/".join(map(os.fsencode, inner_path(path)))


@given(st.text("ab./-+_A", max_size=30) | st.from_regex(inner._PLAIN.pattern, fullmatch=True))
def test_the_quick_look_lets_nothing_pass_that_the_rules_refuse(path: str) -> None:
    quick = unfit(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner, "_PLAIN", re.compile("(?!)"))
        assert unfit(path) == quick


@pytest.mark.parametrize(
    ("paths", "wrong", "words"),
    [
        (["a", "b", "a"], "a", "twice"),
        (["w/fp32.pt", "W/fp32.pt"], "W/fp32.pt", "case"),
        (["zero/s.pt", "zero/s.pt/fp32.pt"], "zero/s.pt/fp32.pt", "folder"),
        (["zero/s.pt/fp32.pt", "zero/s.pt"], "zero/s.pt/fp32.pt", "folder"),
        (["a/b/c", "x", "a"], "a/b/c", "folder"),
        (["a", "../a"], "../a", "component"),
    ],
)
def test_outputs_that_do_not_go_together(paths: list[str], wrong: str, words: str) -> None:
    ((path, why),) = output_faults(paths)
    assert path == wrong and words in why


def test_outputs_that_go_together() -> None:
    assert not list(output_faults(["a", "b/a", "b/c", "b.c", "ab/c", "日本/重み.bin"]))
