"""What a person or a script passes in is bounded as what files say: degrees, layouts, merges and statements of any size
end at once, as exit 2 with something to try."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ckpt_tool.cli import run
from ckpt_tool.conversion.layout import parse_layout
from ckpt_tool.core.bounds import check_count, numeral
from ckpt_tool.core.mesh import divisors, divisors_near
from ckpt_tool.errors import InconsistentCheckpoint, UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures"
MODEL = FIXTURES / "convert" / "llama" / "hf"
FORMATS = ("sharded", "dcp", "megatron", "megatron-dist", "deepspeed", "paddle", "paddle-flex", "meta")
DEGREES = ("tp", "pp", "ep", "dp", "cp", "vpp", "etp")
SIZES = ("5000", "1000000", "999999999999999999")


def told(capfd, *arguments: str) -> dict[str, str]:
    """The error of a run that must end at once with exit 2, its hint included."""
    began = time.process_time()
    code = run([*arguments, "--json", "-q"])
    assert time.process_time() - began < 5
    error = json.loads(capfd.readouterr().err.strip().splitlines()[-1])["error"]
    assert code == 2 and error["exit_code"] == 2 and error["hint"], error
    return error


@pytest.mark.share(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("to", FORMATS)
def test_more_ranks_than_there_is_anything_to_share(to: str, degree: str, size: str, tmp_path: Path, capfd) -> None:
    told(capfd, "convert", f"{MODEL}", f"{tmp_path}/out", "--to", to, f"--{degree}", size)
    assert not list(tmp_path.iterdir())


def test_the_nearest_degree_is_named(tmp_path: Path, capfd) -> None:
    error = told(capfd, "convert", f"{MODEL}", f"{tmp_path}/out", "--to", "sharded", "--tp", "1000000")
    assert error["code"] == "E1651" and "--tp 1024" in error["hint"]
    error = told(capfd, "convert", f"{MODEL}", f"{tmp_path}/out", "--to", "dcp", "--tp", "1000", "--dp", "1000")
    assert error["code"] == "E1651" and "tp 1000 x dp 1000" in error["message"]


LAYOUTS = {
    "deep": "a = " + "[" * 100_000,
    "inline": "a = " + "{a = " * 5000,
    "dots": "a" + ".a" * 100_000 + " = 1",
    "digits": "[mesh]\ntp = " + "9" * 5000,
    "hexadecimal": "[mesh]\ntp = 0x" + "f" * 9000,
    "large": "[mesh]\ntp = 9223372036854775807",
    "infinite": "[mesh]\ntp = inf",
    "half": "[mesh]\ntp = 2.5",
    "flag": "[mesh]\ntp = true",
    "dim": '[[rule]]\nmatch = "*"\nshard = { ' + "9" * 5000 + ' = ["tp"] }',
    "at": '[[rule]]\nmatch = "*"\nat = { pp = 1e3 }',
    "pattern": '[[rule]]\nmatch = "' + "[" * 50_000 + '"\nshard = { 0 = ["tp"] }',
    "number for a table": "mesh = 5",
    "number for rules": "rule = 5",
    "not UTF-8": "\udcff",
    "long": "#" * (1 << 20),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_of_any_shape_ends_at_once(name: str) -> None:
    began = time.process_time()
    with pytest.raises(UsageError) as caught:
        parse_layout(LAYOUTS[name].encode("utf-8", "surrogateescape"), "layout.toml")
    assert caught.value.code == "E0252" and caught.value.hint and time.process_time() - began < 5


def test_a_layout_states_what_it_states() -> None:
    text = b'[mesh]\ntp = 2\n[[rule]]\nmatch = "*.w"\nshard = { 0 = ["tp"], 1 = "dp" }\nat = { pp = 1 }\n'
    degrees, (rule,) = parse_layout(text, "layout.toml")
    assert degrees == {"tp": 2} and rule.shard == ((0, ("tp",)), (1, ("dp",))) and rule.at == (("pp", 1),)


MERGES = {
    "range": "merge_method: passthrough\nslices:\n- sources: [{{model: {model}, layer_range: [0, 1000000000]}}]\n",
    "later": "merge_method: passthrough\nslices:\n- sources: [{{model: {model}, layer_range: [999999998, "
    "1000000000]}}]\n",
    "deep": "merge_method: " + "[" * 100_000,
    "aliases": "a0: &a0 [x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(40)),
    "digits": "merge_method: linear\nmodels: [{{model: {model}, parameters: {{weight: " + "9" * 5000 + "}}}}]\n",
}


@pytest.mark.parametrize("name", MERGES)
def test_a_merge_of_any_shape_ends_at_once(name: str, tmp_path: Path, capfd) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(MERGES[name].format(model=MODEL) if "{model}" in MERGES[name] else MERGES[name])
    began = time.process_time()
    code = run(["merge", f"{tmp_path}/out", "--config", f"{config}", "-q"])
    assert code in (2, 3) and "E70" not in capfd.readouterr().err and time.process_time() - began < 15


STATEMENTS = {
    "digits": "a -> b, axis=" + "9" * 5000,
    "range": "a[0:" + "9" * 5000 + "] -> b",
    "wide": "a[0:999999999] -> b",
    "dims": "a -> b, permute='[" + "9" * 5000 + "]'",
    "words": "a[n:n] -> b",
    "deep": "[" * 100_000,
    "number": '{"aoa_config_reverse": ' + "9" * 5000 + "}",
    "heads": "a, b, c -> d, fused_qkv, num_heads=999999999, num_key_value_groups=1",
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_statements_of_any_size_end_at_once(name: str, tmp_path: Path, capfd) -> None:
    file = tmp_path / "statements"
    file.write_text(STATEMENTS[name])
    error = told(capfd, "convert", f"{MODEL}", f"{tmp_path}/out", "--to", "sharded", "--aoa", f"{file}")
    assert error["code"].startswith("E12")


MAPS = {
    "deep": "{" * 100_000,
    "digits": '{"a": ' + "9" * 5000 + "}",
    "not UTF-8": "\udcff\udcfe",
    "list": '{"a": ["b"]}',
}


@pytest.mark.parametrize("name", MAPS)
def test_a_map_of_any_shape_ends_at_once(name: str, tmp_path: Path, capfd) -> None:
    file = tmp_path / "map"
    file.write_bytes(MAPS[name].encode("utf-8", "surrogateescape"))
    code = run(["diff", f"{MODEL}", f"{MODEL}", "--map", f"{file}"])
    assert code == 2 and "E0268" in capfd.readouterr().err


@pytest.mark.parametrize("text", ["²", "٣", "9" * 4000])
def test_a_pointer_of_other_digits_is_a_name(text: str, tmp_path: Path, capfd) -> None:
    (tmp_path / "latest").write_text(text)
    assert run(["inspect", f"{tmp_path}"]) in (3, 4)
    assert "E7000" not in capfd.readouterr().err


def test_divisors_of_large_numbers_take_no_time() -> None:
    began = time.process_time()
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(0) == divisors(-4) == []
    assert divisors_near(10**9, 999) == [800, 1000, 1250] and divisors_near(7, 3) == [1, 7]
    assert {1, 2**63 - 1, 7} <= set(divisors(2**63 - 1))
    assert time.process_time() - began < 1


def test_bounded_takes_what_can_be_and_no_more() -> None:
    assert check_count(4096, 3, "layers") == 4096 and check_count(92_000, 92_000, "layers") == 92_000
    with pytest.raises(InconsistentCheckpoint) as caught:
        check_count(10**9, 20, "layers by the tensors' names")
    assert caught.value.code == "E1650" and caught.value.hint
    with pytest.raises(InconsistentCheckpoint):
        check_count(10**5000, 20, "layers")
    assert numeral("07") and not numeral("9" * 5000) and not numeral(None)
