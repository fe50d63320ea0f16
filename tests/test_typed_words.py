"""What people type who know another tool leads to a command of ours that exists, and never to one that deletes."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from ckpt_tool.cli import run
from ckpt_tool.cli.parser import unknown_verb
from ckpt_tool.cli.typed_words import ARGUMENTS_MEANT, DELETING, NEEDLESS, OF_VERB, OPTIONS_MEANT, VERBS_MEANT
from ckpt_tool.cli.verbs import VERBS
from ckpt_tool.commands.help import _PAGES_MEANT, help_on
from ckpt_tool.errors import UsageError, several_steps
from ckpt_tool.formats.entry import entries
from ckpt_tool.option_kinds.statement import value_of
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.select import state_filter

EVERY_OPTION = {name for verb in VERBS.values() for option in verb.options().values() for name in option.names}


@pytest.mark.parametrize("word", VERBS_MEANT)
def test_a_verb_of_another_tool_leads_to_a_command_that_exists(word: str) -> None:
    assert word not in VERBS
    for command in re.findall(r"ckpt (\w+)([^,(]*)", VERBS_MEANT[word]):
        verb, rest = command
        assert verb in VERBS and verb not in DELETING
        names = {name for option in VERBS[verb].options().values() for name in option.names}
        assert set(re.findall(r"--[\w-]+", rest)) <= names


@pytest.mark.parametrize("word", OPTIONS_MEANT)
def test_an_option_of_another_tool_leads_to_one_of_ours(word: str) -> None:
    assert word not in EVERY_OPTION
    assert OPTIONS_MEANT[word].split()[0] in EVERY_OPTION


@pytest.mark.parametrize("verb,word", OF_VERB)
def test_a_sentence_for_an_option_of_a_verb_names_options_that_exist(verb: str, word: str) -> None:
    assert word not in {name for option in VERBS[verb].options().values() for name in option.names}
    assert set(re.findall(r"--[a-z][\w-]*", OF_VERB[verb, word])) <= EVERY_OPTION


def test_what_is_needless_is_no_option_of_ours() -> None:
    assert not NEEDLESS.keys() & EVERY_OPTION and not NEEDLESS.keys() & OPTIONS_MEANT.keys()


def hint_of(*line: str) -> str:
    """The hint of the error that a command line gives."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        assert run([*line, "--json"]) == 2
    return str(json.loads(printed.getvalue())["error"]["hint"])


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (("merge", "a", "b", "out", "--lora"), "it is called --method lora here"),
        (("convert", "a", "out", "--lora"), "--method lora of ckpt merge does that"),
        (("inspect", "a", "--tp-size", "2"), "--tp of ckpt reshard does that"),
        (("convert", "a", "out", "--max_shard_size", "5GB"), "it is spelled --max-shard-size here"),
        (("verify", "a", "--quick"), "--mode quick reads headers alone"),
        (("inspect", "a", "--format", "json"), "--json prints the document"),
        (("merge", "a", "out", "--remove", "x"), "--remove-keys PATTERN leaves tensors out, --drop optimizer a state"),
        (("validate", "a"), "it trains a model of its own; ckpt verify SRC checks a checkpoint"),
        (("inspect", "a", "b"), "ckpt inspect takes one checkpoint at a time; ckpt diff A B compares two"),
        (("dcp_to_torch", "a", "out"), "you may mean ckpt convert SRC OUT.pt --to torch"),
        (
            ("convert", "a", "out", "--to", "fp8"),
            "quantising is not a format: --to safetensors --quantize SCHEME; --to gguf --gguf-type TYPE",
        ),
        (("convert", "--input", "a", "--output", "out"), "paths are written without an option: ckpt convert SRC DST"),
    ],
)
def test_the_hint_for_an_option_names_one_that_the_verb_has(line: tuple[str, ...], hint: str) -> None:
    assert hint_of(*line) == hint


def test_arguments_by_another_word_are_no_options_of_ours() -> None:
    assert not ARGUMENTS_MEANT & EVERY_OPTION


FSDP2 = str(Path(__file__).parents[1] / "fixtures" / "dcp" / "fsdp2_dp4")


@pytest.mark.parametrize(
    ("option", "pattern", "hint"),
    [
        ("--remove-keys", "optimizer", "optimizer is a state, not a part of names: --drop optimizer leaves it out"),
        ("--remove-keys", "optim.*", "optimizer is a state, not a part of names: --drop optimizer leaves it out"),
        (
            "--remove-keys",
            "*exp_avg*",
            "exp_avg and exp_avg_sq are states, not a part of names: --drop exp_avg,exp_avg_sq leaves them out",
        ),
        ("--keep-keys", "model", "model is a state, not a part of names: --state model takes it alone"),
    ],
)
def test_a_pattern_that_names_a_state_leads_to_the_option_for_states(
    option: str, pattern: str, hint: str, tmp_path: Path
) -> None:
    assert hint_of("reshard", FSDP2, str(tmp_path / "out"), option, pattern) == hint
    followed = re.search(r"(--\w+) (\S+) (?:leaves|takes)", hint)
    assert followed is not None
    assert run(["reshard", FSDP2, str(tmp_path / "out"), *followed.groups(), "--dry-run", "-q"]) == 0


@pytest.mark.parametrize("rule", ["layers=blocks", "norm=rms"])
def test_a_rule_for_a_part_of_a_name_is_shown_with_its_stars(rule: str, tmp_path: Path) -> None:
    hint = hint_of("reshard", FSDP2, str(tmp_path / "out"), "--rename", rule)
    starred = re.search(r"--rename '([^']+)' changes a part of them", hint)
    assert starred is not None, hint
    assert run(["reshard", FSDP2, str(tmp_path / "out"), "--rename", starred[1], "--dry-run", "-q"]) == 0


@pytest.mark.parametrize("word", ["rename", "rm", "del", "pruen", "cleen", "purge", "remove", "rn", "klean"])
def test_no_hint_leads_to_a_verb_that_deletes(word: str) -> None:
    hint = unknown_verb(word).hint or ""
    assert "did you mean prune" not in hint and "did you mean clean" not in hint
    assert not re.search(r"ckpt (prune|clean)", hint)


def test_words_for_formats_are_of_one_format_and_of_no_other() -> None:
    words = [word for entry in entries().values() for word in entry.called]
    assert len(words) == len(set(words))
    assert not set(words) & entries().keys()


@pytest.mark.parametrize(
    ("word", "name"), [("hf", "safetensors"), ("HuggingFace", "safetensors"), ("nemo", "megatron-dist")]
)
def test_a_format_by_another_word_is_named(word: str, name: str) -> None:
    with pytest.raises(UsageError, match="want one of") as caught:
        value_of({"to": word}, Writing)
    assert name in (caught.value.hint or "")


@pytest.mark.parametrize("word", ["fp8", "int4", "INT8", "nf4", "model=fp8", "mxfp4", "w8a8", "4bit", "q4_k_m"])
def test_quantised_weights_are_no_dtype(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        value_of({"dtype": [word]}, Writing)
    assert "--quantize" in (caught.value.hint or "")


@pytest.mark.parametrize("word", ["bf16", "fp16", "float32", "half", "float8_e4m3fn", "F8_E4M3"])
def test_floats_are_dtypes(word: str) -> None:
    value_of({"dtype": [word]}, Writing)


@pytest.mark.parametrize("topic", _PAGES_MEANT)
def test_a_topic_by_another_word_leads_to_a_page(topic: str) -> None:
    with pytest.raises(UsageError, match="has no page") as caught:
        help_on(topic)
    page = re.match(r"ckpt help ([\w-]+) has it", caught.value.hint or "")
    assert page is not None and help_on(page[1])["text"]


def test_the_option_that_was_typed_is_named() -> None:
    with pytest.raises(UsageError, match="--drop optimiser: no such state") as caught:
        state_filter(["optimiser"], ["model", "exp_avg"], option="--drop")
    assert "did you mean optimizer" in (caught.value.hint or "")


def test_a_folder_of_steps_lists_as_many_as_it_counts() -> None:
    steps = [f"run/step-{number}" for number in range(1, 5)]
    fault = several_steps("run", steps)
    assert fault.message.startswith("the folder holds 4 checkpoints") and ", ".join(steps) in (fault.hint or "")
    long = several_steps("run", [f"run/step-{number}" for number in range(1, 21)])
    assert "pass one of them: ..., run/step-13, " in (long.hint or "")
