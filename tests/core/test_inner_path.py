"""Which text may be a file's name below a folder. The list of what may not is also `tests/storage/test_source.py`'s."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core import inner_path as inner
from ckpt_tool.core.inner_path import (
    FOLDERS,
    inner_path,
    is_journal,
    is_leaving,
    output_faults,
    unfit,
)
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
    "a/" * (FOLDERS + 1) + "b",
    ("n" * 250 + "/") * 8 + "w",
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


USERS = ["x.ckpt-partial", ".ckpt-partial", "a.ckpt-journal.txt", ".ckpt-journal.txt", ".ckpt-journal-of-mine"]
USERS += [".ckpt-removed", "run.ckpt-removed", ".run.12345.ckpt-removed", ".out.ckpt-partial.tar", "d/" * 20 + "w"]


@pytest.mark.parametrize("path", USERS)
def test_names_that_only_resemble_ours_are_a_user_s(path: str) -> None:
    assert not is_leaving(path) and not is_journal(path)
    assert unfit(path) == "" and unfit(f"folder/{path}/file") == ""


def test_each_name_that_we_make_is_ours() -> None:
    from ckpt_tool.storage.output import claims, journal, staging
    from ckpt_tool.storage.output.destination import staging_path

    writers = (None, (2, 8), staging.new_worker())
    assert all(map(is_journal, [claims.FOLDER, *map(journal.name_of, writers)]))
    assert is_leaving(staging_path(Path("runs/out")).name) and is_leaving(".step-9.3f9c21aa.ckpt-removed")


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
