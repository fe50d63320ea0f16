"""A hint names options that exist, and says whose they are where the running verb has no such option.

`hints()` reads every hint of the package from its syntax trees: the texts that are given as `hint=`. What a person sees
of one under a verb is `cli.hinted_options.name_verbs` of it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ckpt_tool import cli
from ckpt_tool.cli.hinted_options import name_verbs
from ckpt_tool.cli.verbs import VERBS
from ckpt_tool.errors import catalogue

sys.path.append(str(Path(__file__).resolve().parent))

from syntax import nodes_of

ROOT = Path(__file__).resolve().parents[1]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
OPTIONS = {name: verb.option_names() | {"--help"} for name, verb in VERBS.items()}
KNOWN = frozenset().union(*OPTIONS.values()) | {"--version"}
# Of other programs: Megatron, Ray, PaddleFormers, pip, git, GitHub's CLI.
FOREIGN = frozenset(
    """
    --no-load-rng --head --dist-ckpt-optim-fully-reshardable --ckpt-convert-update-legacy-dist-opt-format
    --moe-use-legacy-grouped-gemm --mla-down-proj-fusion --overlap-param-gather-with-optimizer-step --use-mcore-models
    """.split()
)


def hints() -> Iterator[tuple[str, str]]:
    """(place, text) of each text that is given as a hint, `{}` for a value in it."""
    for path in sorted((ROOT / "ckpt_tool").rglob("*.py")):
        source = path.read_text()
        if "hint=" not in source:
            continue
        for node in nodes_of(source):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                if keyword.arg == "hint":
                    for text in texts_of(keyword.value):
                        yield f"{path.relative_to(ROOT)}:{keyword.value.lineno}", text


def texts_of(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.IfExp):
        yield from texts_of(node.body)
        yield from texts_of(node.orelse)


@cache  # made by the tests: importing this module must not parse the package
def hints_with_options() -> list[tuple[str, str]]:
    return [(place, text) for place, text in hints() if "--" in text]


def test_the_hints_are_seen() -> None:
    assert len(hints_with_options()) > 200


def test_options_of_hints_exist() -> None:
    unknown = {(place, word) for place, text in hints_with_options() for word in OPTION.findall(text)}
    assert {pair for pair in unknown if pair[1] not in KNOWN | FOREIGN} == set()


def stray_options(hint: str, verb: str) -> list[str]:
    """The options of a hint that the verb lacks and that nothing says another verb's name of."""
    stray = []
    for match in OPTION.finditer(hint):
        option = match[0]
        if option == "--help":
            continue
        clause = re.split(r"[;:]\s|\.\s|,\s(?:or|and)\s|\n", hint[: match.start()])[-1]
        before = re.findall(r"\bckpt ([a-z]+)", clause)
        is_command = any(option in OPTIONS.get(name, ()) for name in before)
        is_named = re.search(rf"{option}\b[^;]*? \(of ckpt [a-z]+\)", hint)
        if option in KNOWN and option not in OPTIONS[verb] and not (is_command or is_named):
            stray.append(option)
    return stray


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_a_hint_says_whose_option_it_names(verb: str) -> None:
    texts = [*hints_with_options(), *((row.code, row.do) for row in catalogue().values())]
    shown = [(place, name_verbs(text, verb, OPTIONS)) for place, text in texts]
    assert [(place, text, stray) for place, text in shown if (stray := stray_options(text, verb))] == []


@pytest.mark.parametrize(
    ("verb", "hint", "shown"),
    [
        ("convert", "make floats with --dequantize", "make floats with --dequantize"),
        ("diff", "make floats with --dequantize", "make floats with --dequantize (of ckpt convert)"),
        ("diff", "--dtype F32 or --dtype F16 helps", "--dtype F32 (of ckpt convert) or --dtype F16 helps"),
        ("verify", "ckpt convert SRC OUT --dequantize first", "ckpt convert SRC OUT --dequantize first"),
        ("verify", "ckpt inspect shows it; --drop it", "ckpt inspect shows it; --drop (of ckpt convert) it"),
        ("verify", "start the job with --no-load-rng", "start the job with --no-load-rng"),
        ("inspect", "--rename 'a.*=*' first", "--rename 'a.*=*' (of ckpt convert) first"),
        ("verify", "leave it out with --state model", "leave it out with --state model (of ckpt convert)"),
    ],
)
def test_what_is_shown(verb: str, hint: str, shown: str) -> None:
    assert name_verbs(hint, verb, OPTIONS) == shown


def test_diff_of_a_quantised_model_names_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    """E1706 is raised by whatever maps names: `diff` has no --dequantize."""
    quantised = str(ROOT / "fixtures" / "gguf-made" / "quantised.gguf")
    assert cli.run(["diff", quantised, quantised, "--dialect", "hf"]) == 2
    error = capsys.readouterr().err
    assert "error[E1706]" in error and "--dequantize (of ckpt convert)" in error
