"""Messages count in the singular where there is one of something.

A message is written for many (`f"{len(names)} tensors are ..."`); `core.plurals.agree` puts it into the singular where
it is shown. It knows nouns by a list, so the list is compared with every noun that the package counts by `len`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt_tool as ckpt
from ckpt_tool import cli
from ckpt_tool.auditing.findings import FoundFault, rows_of
from ckpt_tool.core.plurals import agree
from ckpt_tool.sources.sound import row

sys.path.append(str(Path(__file__).resolve().parent))

from syntax import nodes_of

ROOT = Path(__file__).resolve().parents[1]
NO_NOUNS = frozenset(("more", "of", "takes"))  # 1 more of this kind, 1 of the things, 1 takes all


@pytest.mark.parametrize(
    ("text", "singular"),
    [
        ("1 tensors are merged by average", "1 tensor is merged by average"),
        ("1 names share another parameter: a = b", "1 name shares another parameter: a = b"),
        ("the folder holds: 1 copies; 1 entries of 1 boxes", "the folder holds: 1 copy; 1 entry of 1 box"),
        ("--last 3: the folder holds 1 checkpoints", "--last 3: the folder holds 1 checkpoint"),
        ("1 fused gate weights have no place", "1 fused gate weight has no place"),
        ("1 quantised weights and 1 scales", "1 quantised weight and 1 scale"),
        ("11 tensors are merged", "11 tensors are merged"),
        ("0.1 tensors", "0.1 tensors"),
        ("layer 1 tensors are stored twice", "layer 1 tensors are stored twice"),
        ("model.layers.1 weights are lost", "model.layers.1 weights are lost"),
        ("1 status is known", "1 status is known"),
    ],
)
def test_one_is_singular(text: str, singular: str) -> None:
    assert agree(text) == singular


def counted_texts() -> Iterator[tuple[str, str]]:
    """(place, text from the number on) of f-strings that begin a count with `len`."""
    for path in sorted((ROOT / "ckpt_tool").rglob("*.py")):
        for node in nodes_of(path.read_text()):
            values = node.values if isinstance(node, ast.JoinedStr) else []
            for number, text in zip(values, values[1:], strict=False):
                is_count = isinstance(number, ast.FormattedValue) and ast.unparse(number.value).startswith("len(")
                if is_count and isinstance(text, ast.Constant):
                    yield f"{path.relative_to(ROOT)}:{number.lineno}", f"1{text.value}"


def test_every_noun_that_is_counted_is_known() -> None:
    texts = list(counted_texts())
    assert len(texts) > 200
    plurals = [(place, text) for place, text in texts if re.match(r"1 (?:[a-z0-9'-]+ ){0,2}?[a-z]{3,}s\b", text)]
    unknown = [
        f"{place}: {text}"
        for place, text in plurals
        if agree(text) == text and re.findall(r"[a-z]+", text)[0] not in NO_NOUNS
    ]
    assert unknown == []


def test_zero_3_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the master weights lack is written and noted, nothing advises what was asked for, one name shares."""
    source = str(ROOT / "fixtures" / "deepspeed" / "z3_bf16_dp4")
    report: Any = ckpt.convert(source, str(tmp_path / "out"), to="safetensors", as_model="master", dry_run=True)
    assert not any(row["state"] in ("master", "model") for row in report["dropped"])
    assert not any("--as-model" in note for note in report["notes"])
    assert any(note.startswith("1 name shares another parameter") for note in report["notes"])

    line = ["convert", source, str(tmp_path / "out"), "--to", "safetensors", "--as-model", "master", "--dry-run"]
    assert cli.run(line) == 0
    out = capsys.readouterr().out
    assert "1 name shares another parameter" in out and "frozen.weight" in out.partition("\nnotes\n")[2]
    assert cli.run(["convert", source, str(tmp_path / "out"), "--to", "deepspeed", "--dry-run"]) == 0
    assert "--as-model master" in capsys.readouterr().out


def test_errors_count_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised = str(ROOT / "fixtures" / "gguf-made" / "quantised.gguf")
    line = ["convert", quantised, str(tmp_path / "out"), "--to", "safetensors", "--keep-keys", "output.weight"]
    assert cli.run([*line, "--json"]) == 2
    assert "1 tensor is quantised" in capsys.readouterr().err
    assert cli.run(line) == 2
    assert "1 tensor is quantised" in capsys.readouterr().err


def test_findings_count_in_the_singular_wherever_they_are_shown(tmp_path: Path) -> None:
    """JSON, SARIF, JUnit and the page's figures take the message of the finding as it is made."""
    assert row("W-master", "1 elements are not finite", "w")["message"] == "1 element is not finite"
    (audited,) = rows_of([FoundFault("A0101", "1 tensors are missing", "w")])
    assert audited["message"] == "1 tensor is missing"
