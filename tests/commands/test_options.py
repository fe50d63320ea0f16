"""Options as values: the same from a shell and from Python, all faults at once, nothing guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from writings import writing_of

from ckpt_tool.errors import UsageError
from ckpt_tool.option_kinds import values
from ckpt_tool.option_kinds.statement import options_of, value_of, values_of
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing


def test_nothing_asked_for_is_the_default() -> None:
    assert values_of({}, Reading, Writing) == [Reading(), Writing()]
    assert value_of(dict.fromkeys(options_of(Writing)), Writing) == Writing(), "None means not given"


def test_every_option_arrives() -> None:
    given = {
        "to": "Megatron_Dist",
        "dialect": "megatron",
        "aoa": "m.aoa",
        "sharding": "v2",
        "tp": "8",
        "pp": 2,
        "ep": "4",
        "layout": "l.toml",
        "pp_split": "8,9, 9,6",
        "zero": "3",
        "on_indivisible": "pad",
        "state": ["model,master", "ema"],
        "drop": "extras",
        "as_model": "ema",
        "dtype": ["bf16", "optimizer=float32"],
        "dequantize": True,
        "vocab_size": "100",
        "allow_lossy": True,
        "remove_keys": ["*.bias", "re:^a"],
        "keep_keys": "w*",
        "model_only": True,
        "max_shard_size": "2GB",
        "force": True,
        "resume": False,
        "memory": "64MiB",
        "threads": "7",
        "verify": "full",
        "dry_run": True,
        "plan": "p.json",
        "ray": "auto",
    }
    writing = value_of(given, Writing)
    assert writing == writing_of(
        to="megatron-dist",
        dialect="megatron",
        aoa="m.aoa",
        sharding="v2",
        degrees={"tp": 8, "pp": 2, "ep": 4},
        layout="l.toml",
        pp_split=(8, 9, 9, 6),
        zero=3,
        on_indivisible="pad",
        states=("model", "master", "ema"),
        drop=("extras",),
        as_model="ema",
        dtypes={"": "BF16", "optimizer": "F32"},
        dequantize=True,
        allow_lossy=True,
        vocab_size=100,
        remove_keys=("*.bias", "re:^a"),
        keep_keys=("w*",),
        model_only=True,
        max_shard_size=2_000_000_000,
        force=True,
        resume=False,
        memory=64 << 20,
        threads=7,
        verify="full",
        dry_run=True,
        plan_file="p.json",
        ray="auto",
    )


def test_strict_shard_is_a_policy() -> None:
    assert value_of({"strict_shard": True}, Writing).on_indivisible == "error"
    assert value_of({"strict_shard": True, "on_indivisible": "error"}, Writing).on_indivisible == "error"
    with pytest.raises(UsageError, match="--strict-shard means"):
        value_of({"strict_shard": True, "on_indivisible": "pad"}, Writing)


def test_all_faults_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        values_of(
            {"from_format": "safetensor", "tp": "x", "memory": "5G", "zero": 4, "dtype": "bf17", "tpp": 1},
            Reading,
            Writing,
        )
    error = caught.value
    assert (error.exit_code, error.code) == (2, "E0280")
    assert error.message == "unknown option 'tpp'" and "tp" in str(error.hint)
    assert [fault.split(":")[0] for fault in error.faults] == ["--from", "--tp", "--zero", "--dtype", "--memory"]
    assert "(did you mean safetensors?)" in error.faults[0] and "5GB or 5GiB" in error.faults[-1]


def test_reading_knows_no_writing() -> None:
    with pytest.raises(UsageError, match="unknown option 'tp'"):
        value_of({"tp": 2}, Reading)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("1GiB", 1 << 30),
        ("64MiB", 64 << 20),
        ("1.5 kB", 1500),
        ("1048576", 1 << 20),
        ("7b", 7),
        ("2tb", 2 * 10**12),
        (4096, 4096),
        ("0.5GiB", 1 << 29),
    ],
)
def test_sizes(text: Any, nbytes: int) -> None:
    assert values.size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["5G", "", "GB", "-1GB", "1e9", "5 GB/s", "0", 0, -3, None, True, 1.5, "9" * 30, "1GBB", "inf"]
)
def test_bad_sizes(text: Any) -> None:
    with pytest.raises(values.BadValue):
        values.size(text)


@pytest.mark.parametrize("value", ["0", "-1", "1.0", "x", "", " ", True, 1.5, "1" * 25, None, "٣"])
def test_bad_counts(value: Any) -> None:
    with pytest.raises(values.BadValue):
        values.count(value)


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "x", None])
def test_bad_tolerances(value: Any) -> None:
    with pytest.raises(values.BadValue):
        values.tolerance(value)


def test_shares() -> None:
    assert values.share("3/8") == (3, 8) and values.share((1, 1)) == (1, 1)
    for bad in ("0/8", "9/8", "3", "3/", "-1/2", (0, 2), None, "1/0"):
        with pytest.raises(values.BadValue, match="want I/N"):
            values.share(bad)


def test_words_and_numbers() -> None:
    assert values.words(["a,b", "b", " c "]) == ("a", "b", "c")
    assert values.numbers(0.3) == (0.3,) and values.numbers(["0.3,0.5", "0.2"]) == (0.3, 0.5, 0.2)
    for bad in ("a,,b", "", ["a", ""]):
        with pytest.raises(values.BadValue):
            values.words(bad)


@pytest.mark.parametrize("name", ["int16", "I64", "optimizer=uint16", "bool"])
def test_floats_are_not_cast_to_integers(name: str) -> None:
    with pytest.raises(values.BadValue, match="want a dtype of floats"):
        values.dtypes(name)


def test_two_dtypes_for_one_state_are_a_fault() -> None:
    assert values.dtypes({"": "bf16", "master": "fp32"}) == {"": "BF16", "master": "F32"}
    assert values.dtypes("bf16,torch.bfloat16") == {"": "BF16"}
    with pytest.raises(values.BadValue, match="two dtypes for all states: BF16 and F32"):
        values.dtypes(["bf16", "fp32"])


def test_patterns_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("# what goes\nlm_head.*\n\n  re:bias$  \nlm_head.*\n")
    assert values.patterns([f"@{file}", "*.norm"]) == ("lm_head.*", "re:bias$", "*.norm")


def test_bad_patterns(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_text("# nothing\n")
    for pattern, found in [
        ("re:[", "no regular expression"),
        (f"@{tmp_path / 'none'}", "can't be read"),
        (f"@{tmp_path}", "can't be read"),
        (f"@{tmp_path / 'latin'}", "not UTF-8 at byte 3"),
        (f"@{tmp_path / 'empty'}", "no line but comments"),
        ("", "want text"),
    ]:
        with pytest.raises(values.BadValue, match=found):
            values.patterns(pattern)
    with pytest.raises(UsageError) as caught:
        value_of({"remove_keys": f"@{tmp_path / 'none'}"}, Writing)
    assert caught.value.path == str(tmp_path / "none")


ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text()), st.binary())


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(sorted(options_of(Reading, Writing))), ANYTHING))
def test_any_value_is_taken_or_refused_in_words(given: dict[str, Any]) -> None:
    try:
        values_of(given, Reading, Writing)
    except UsageError as error:
        assert error.exit_code == 2 and error.message
