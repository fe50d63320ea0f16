"""An option of one value that is given two is an error, for every verb and option; the last one does not win."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.cli import run
from ckpt_tool.cli.parser import parse
from ckpt_tool.cli.repeated import is_same_value
from ckpt_tool.cli.verbs import VERBS
from ckpt_tool.errors import UsageError
from ckpt_tool.option_kinds.statement import Option

MODEL = str(Path(__file__).parents[2] / "fixtures" / "safetensors" / "llama_one_file")
ONE_VALUE = [
    (verb.name, option)
    for verb in VERBS.values()
    for option in verb.options().values()
    if option.kind in ("value", "pair", "switch")
]
FLAGS = [
    (verb.name, option)
    for verb in VERBS.values()
    for option in verb.options().values()
    if option.kind in ("flag", "count")
]


def words_of(option: Option, value: str) -> list[str]:
    if option.kind == "switch":
        return [option.names[0] if value == "a" else option.names[-1]]
    return [option.names[0], *([value] if option.kind == "value" else [value, value])]


def code_of(line: list[str]) -> tuple[str, UsageError | None]:
    """The code of the line's error and the error, of what the parser finds; nothing is run."""
    try:
        parse(line)
    except UsageError as error:
        return error.code, error
    return "", None


def error_of(line: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = run([*line, "--json"])
    return code, json.loads(capsys.readouterr().err.splitlines()[-1])["error"]


@pytest.mark.share(8)
@pytest.mark.parametrize(("verb", "option"), ONE_VALUE, ids=[f"{verb} {option.names[0]}" for verb, option in ONE_VALUE])
def test_two_values_of_one_option_are_an_error(verb: str, option: Option) -> None:
    paths = ["no-such-path"] * len(VERBS[verb].arguments)
    code, error = code_of([verb, *paths, *words_of(option, "a"), *words_of(option, "b")])
    assert code == "E3020" and error is not None and error.exit_code == 2
    shown = "" if option.kind == "switch" else f"{option.names[0]} is given two values: "
    assert error.message.startswith(shown) and error.place == f"ckpt {verb}"

    code, _ = code_of([verb, *paths, *words_of(option, "a"), *words_of(option, "a")])
    assert code != "E3020"


@pytest.mark.share(8)
@pytest.mark.parametrize(("verb", "option"), FLAGS, ids=[f"{verb} {option.names[0]}" for verb, option in FLAGS])
def test_a_flag_may_be_repeated(verb: str, option: Option) -> None:
    paths = ["no-such-path"] * len(VERBS[verb].arguments)
    once, _ = code_of([verb, *paths, option.names[0]])
    twice, _ = code_of([verb, *paths, option.names[0], option.names[-1]])
    assert once == twice != "E3020"


def test_all_of_them_are_said_at_once_and_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    line = ["convert", MODEL, str(out), "--to", "dcp", "--tp=2", "--to=torch", "--tp", "4", "--family", "x"]
    code, error = error_of([*line, "--family=y"], capsys)
    assert code == 2 and not out.exists()
    assert [error["message"], *error["faults"]] == [
        "--to is given two values: dcp and torch",
        "--tp is given two values: 2 and 4",
        "--family is given two values: x and y",
    ]


def test_what_follows_two_dashes_is_no_option() -> None:
    assert code_of(["inspect", "--depth", "1", "--", "--depth"]) == ("", None)


def test_two_spellings_of_one_value_are_one() -> None:
    options = VERBS["convert"].options()
    assert is_same_value(options["max_shard_size"], ("5GB",), ("5000MB",))
    assert is_same_value(options["to"], ("megatron_dist",), ("megatron-dist",))
    assert not is_same_value(options["max_shard_size"], ("5GB",), ("5GiB",))
