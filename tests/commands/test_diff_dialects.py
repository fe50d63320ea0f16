"""`ckpt diff --dialect`: one model under two systems' names is one model, and one changed bit in it is found."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt_tool as ckpt
from ckpt_tool.errors import UsageError

LLAMA = Path(__file__).parents[2] / "fixtures" / "convert" / "llama"


@pytest.mark.parametrize("dialect", ["hf", "megatron"])
def test_one_model_in_two_worlds(tmp_path: Path, dialect: str) -> None:
    for to in ("megatron-dist", "paddle-unified", "meta"):
        ckpt.convert(str(LLAMA / "hf"), str(tmp_path / to), to=to)
        result = ckpt.diff(str(LLAMA / "hf"), str(tmp_path / to), dialect=dialect)
        assert result["equal"] and result["compared"] >= 20, result["differences"]
    plain = ckpt.diff(str(LLAMA / "hf"), str(tmp_path / "megatron-dist"))
    assert not plain["equal"] and {row["kind"] for row in plain["differences"]} == {"missing_left", "missing_right"}


def test_a_changed_value_is_found_under_its_name(tmp_path: Path) -> None:
    ckpt.convert(str(LLAMA / "hf"), str(tmp_path / "m"), to="sharded", dialect="megatron")
    (file,) = tmp_path.joinpath("m").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    config = str(LLAMA / "hf" / "config.json")
    result = ckpt.diff(str(LLAMA / "hf"), str(tmp_path / "m"), dialect="hf", config=config)
    (row,) = result["differences"]
    assert row["kind"] == "value" and row["name"].startswith(("model.", "lm_head"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"a": "b\n"}', "control character (newline)"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b"{'a': 'b'}", "single quotes"),
        (b"a b\n\xff\xfe c", "not UTF-8"),
    ],
)
def test_a_map_that_does_not_read_is_a_usage_error(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "map").write_bytes(data)
    model = str(Path(__file__).parents[2] / "fixtures" / "safetensors" / "llama_one_file")
    with pytest.raises(UsageError) as caught:
        ckpt.diff(model, model, map=str(tmp_path / "map"))
    assert caught.value.code == "E0268" and said in caught.value.message
