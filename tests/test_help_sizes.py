"""Help in two sizes: `-h` has what is asked for every day, `--help` everything, with rare options last, by system."""

from __future__ import annotations

import re

import pytest

from ckpt_tool.cli import run
from ckpt_tool.cli.parser import EVERYDAY
from ckpt_tool.cli.verbs import VERBS
from ckpt_tool.option_kinds.statement import OPTIONS, options_of


def help_of(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert run(line) == 0
    return capsys.readouterr().out


def names_in(text: str) -> set[str]:
    """The options that a help lists: those that begin a line."""
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, flags=re.M))


@pytest.mark.parametrize("verb", VERBS)
def test_the_long_help_has_every_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = names_in(help_of(capsys, verb, "--help"))
    for option in VERBS[verb].options().values():
        assert listed & set(option.names) or option.kind == "switch", option.names


@pytest.mark.parametrize("verb", VERBS)
def test_the_short_help_has_the_verbs_own_options_and_everyday_ones(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(capsys, verb, "-h")
    listed = names_in(text)
    own = {o.names[0] for o in VERBS[verb].options().values() if o.section.title == OPTIONS.title and not o.system}
    shown_too = EVERYDAY | {*VERBS[verb].everyday}
    everyday = {o.names[0] for name, o in VERBS[verb].options().items() if name in shown_too}
    switches = {o.names[0] for o in VERBS[verb].options().values() if o.kind == "switch"}
    assert own - switches <= listed <= own | everyday | switches | {"--help"}
    assert f"All options: ckpt {verb} --help" in text


def test_the_short_help_of_diff_names_what_lists_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"--verbose", "--report"} <= names_in(help_of(capsys, "diff", "-h"))


def test_the_short_help_of_convert_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(help_of(capsys, "convert", "-h").splitlines()) <= 55
    assert len(names_in(help_of(capsys, "convert", "-h"))) <= 13


def test_the_short_help_of_convert_has_what_the_readme_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"--config", "--tp", "--dtype", "--rename", "--drop", "--dry-run"} <= names_in(
        help_of(capsys, "convert", "-h")
    )


@pytest.mark.parametrize("size", ["-h", "--help"])
def test_help_says_how_its_two_sizes_differ(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_of(capsys, "convert", size).split())
    assert "Show the everyday options (-h) or all options (--help) and exit." in text


def test_options_of_one_system_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "convert", "--help")
    headings = re.findall(r"^(\w[\w ]*):$", text, flags=re.M)
    assert headings[-6:] == ["GGUF", "GPU", "Megatron", "Paddle", "Ray", "Examples"]


def test_everyday_options_exist() -> None:
    every = {name for verb in VERBS.values() for name in options_of(*verb.takes())}
    assert EVERYDAY - {"json"} <= every


@pytest.mark.parametrize("verb", VERBS)
def test_every_options_help_begins_with_a_verb_and_ends_as_a_sentence(verb: str) -> None:
    """`Write ...`, `Take ...`: an imperative, capitalised or behind the action of `kernels`; never a bare noun."""
    words = "Names Bytes Rows Threads Levels Layers Tensor Pipeline Expert Data Digest Share What Where Which The A An"
    nouns = rf"({'|'.join(words.split())}|Only|Every|Of)\b"
    for option in VERBS[verb].options().values():
        text = re.sub(r"^\w+: ", "", option.help)
        assert not re.match(nouns, text), (option.names, option.help)
        assert option.help.endswith("."), (option.names, option.help)


@pytest.mark.parametrize("verb", ["convert", "reshard", "merge", "inspect", "diff", "verify", "prune", "latest"])
def test_everyday_verbs_have_three_examples(verb: str) -> None:
    assert len(VERBS[verb].examples) >= 3


@pytest.mark.parametrize("columns", ["50", "80"])
def test_no_option_is_broken_at_a_hyphen(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = help_of(capsys, "convert", "--help")
    assert not re.search(r"-$", text, flags=re.M) and "\N{NON-BREAKING HYPHEN}" not in text
    assert max(map(len, text.split("Examples:")[0].splitlines())) <= int(columns)
