"""A conversion between dialects says which names become which, in its document, its text and its report."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

import ckpt_tool as ckpt
from ckpt_tool.cli import run
from ckpt_tool.core.name_table import table_of_names

HF = Path(__file__).resolve().parents[2] / "fixtures" / "convert" / "llama" / "hf"
QKV = "decoder.layers.*.self_attention.linear_qkv.weight"


def test_layers_are_folded_and_every_tensor_is_counted(tmp_path: Path) -> None:
    document = ckpt.plan(HF, tmp_path / "out", to="megatron-dist", tp=2)
    names = {row["source"]: row["target"] for row in document["names"]}
    for letter in "qkv":
        assert names[f"model.layers.*.self_attn.{letter}_proj.weight"] == [QKV]
    assert names["model.norm.weight"] == ["decoder.final_layernorm.weight"]
    assert sum(row["tensors"] for row in document["names"]) == len(ckpt.open(HF))


def test_a_saved_plan_keeps_the_names(tmp_path: Path) -> None:
    planned = ckpt.plan(HF, tmp_path / "out", tmp_path / "plan.json", to="megatron-dist")
    assert ckpt.apply(tmp_path / "plan.json")["names"] == planned["names"]


def test_names_that_stay_are_not_listed(tmp_path: Path) -> None:
    assert "names" not in ckpt.plan(HF, tmp_path / "out", to="dcp")


def test_the_text_has_them_with_v(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["convert", str(HF), str(tmp_path / "out"), "--to", "megatron-dist", "--dry-run"]
    assert run(line) == 0
    assert "linear_qkv" not in capsys.readouterr().out
    assert run([*line, "-v"]) == 0
    assert re.search(rf"model\.layers\.\*\.self_attn\.q_proj\.weight +{re.escape(QKV)} +3", capsys.readouterr().out)


def test_a_name_that_is_split_has_all_its_targets() -> None:
    rows = table_of_names({"h.0.c_attn": ("layers.0.q", "layers.0.k"), "h.1.c_attn": ("layers.1.q", "layers.1.k")})
    assert rows == [{"source": "h.*.c_attn", "target": ["layers.*.q", "layers.*.k"], "tensors": 2}]
    assert table_of_names({"a": ("a",)}) == []


def test_a_report_begins_with_its_command_and_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "a page.html"
    assert (
        run(["convert", str(HF), str(tmp_path / "out"), "--to", "megatron-dist", "--report", str(page), "--json"]) == 0
    )
    json.loads(capsys.readouterr().out)
    text = page.read_text(encoding="utf-8")
    head = re.sub("<[^>]+>", "", text[text.index("<main>") :][:2000])
    assert f"--report &#x27;{page}&#x27;" in head and "ckpt convert" in head
    assert time.strftime("%Y-%m-%d") in head and f"ckpt {ckpt.__version__}" in head
    assert QKV in text.replace("<wbr>", ""), "the table of names"


def test_a_report_has_no_secrets_of_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_tool import cli

    seen: list[str] = []
    monkeypatch.setattr(cli, "_run", lambda job, arguments: seen.extend(arguments) or 0)
    assert run(["inspect", "https://ann:secret@host/run"]) == 0
    assert seen and "secret" not in " ".join(seen)
