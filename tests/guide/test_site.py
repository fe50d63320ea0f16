"""The documentation site: what its texts become for Python-Markdown, that both languages have the same pages, and that
a link that leads nowhere is seen. The site itself is built by `.ci/run`, with the extra `docs`."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from ckpt_tool.errors import catalogue

SITE = Path(__file__).resolve().parents[2] / ".github" / "site"
if not SITE.is_dir():
    pytest.skip("the site's program is in the repository alone (.github/site)", allow_module_level=True)
sys.path.append(str(SITE))

links = importlib.import_module("links")
pages = importlib.import_module("pages")

CASES = {
    "a list right below a sentence": ("Two:\n- one\n- two\n", "Two:\n\n- one\n- two\n"),
    "an item of two lines": ("- one\n  and more\n- two\n", "- one\n  and more\n- two\n"),
    "Chinese lines": ("先给计划，\n再写入。\n", "先给计划，再写入。\n"),
    "Chinese lines of an item": ("- 先给计划，\n  再写入。\n", "- 先给计划，再写入。\n"),
    "a Chinese and a Latin word": ("检查点\nDCP\n", "检查点\nDCP\n"),
    "a Chinese heading": ("# 题目\n正文\n", "# 题目\n正文\n"),
    "a table": ("| 甲 |\n|---|\n| 乙 |\n", "| 甲 |\n|---|\n| 乙 |\n"),
    "a block of code": ("```\n甲\n乙\n- c\n```\n", "```\n甲\n乙\n- c\n```\n"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_text_of_the_terminal_for_python_markdown(case: str) -> None:
    text, wanted = CASES[case]
    assert pages.for_markdown(text) == wanted


@pytest.mark.parametrize(
    "text, wanted",
    [("`*` or *", r"`*` or \*"), ("a_b [c] <d>", r"a\_b \[c\] &lt;d>"), ("one ` alone", r"one \` alone")],
)
def test_plain_text_is_no_markdown(text: str, wanted: str) -> None:
    assert pages._escaped(text) == wanted


def test_both_languages_have_the_same_pages(tmp_path: Path) -> None:
    found: dict[str, list[str]] = {}
    for language in pages.READMES:
        nav = pages.write_pages(language, tmp_path / language)
        found[language] = _files(tmp_path / language)
        assert sorted(_named(nav)) == found[language]
    assert found["en"] == found["zh"]
    assert {f"{topic}.md" for topic in ("recipes", "verify", "python")} <= set(found["en"])


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _named(nav: object) -> list[str]:
    """The pages that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _named(part)]


def test_every_code_has_its_anchor(tmp_path: Path) -> None:
    pages.write_pages("en", tmp_path)
    text = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "errors").glob("exit-*.md"))
    anchors = re.findall(r"\{ #([\w-]+) \}$", text, re.MULTILINE)
    assert sorted(anchors) == sorted(code.lower() for code in catalogue())


def test_a_page_of_the_guide_that_the_readme_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = pages.guide.topics("en")
    monkeypatch.setattr(pages.guide, "topics", lambda language: [*topics, topics[0]._replace(name="new")])
    with pytest.raises(ValueError, match="new"):
        pages.guide_order("en")


SOUND = '<h1 id="top">a</h1><a href="b/">b</a><a href="b/#part">b</a><a href="#top">a</a><img src="x.svg">'
PAGE = '<h2 id="part">b</h2><a href="..">a</a><a href="https://example.org/">elsewhere</a>'


@pytest.mark.parametrize(
    "added, fault",
    [
        ("", ""),
        ('<a href="c/">c</a>', "index.html: c/: there is no c/index.html"),
        ('<a href="b/#no">b</a>', "index.html: b/#no: b/index.html has no anchor no"),
        ('<script src="https://cdn.example.org/a.js"></script>', "index.html: loads https://cdn.example.org/a.js"),
        (
            '<link rel="stylesheet" href="//fonts.example.org/a.css">',
            "index.html: loads //fonts.example.org/a.css",
        ),
    ],
)
def test_a_link_that_leads_nowhere(added: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "index.html").write_text(SOUND + added)
    (tmp_path / "b" / "index.html").write_text(PAGE)
    (tmp_path / "x.svg").write_text("<svg/>")
    faults, external = links.check_links(tmp_path)
    assert faults == ([fault] if fault else [])
    assert "https://example.org/" in external
