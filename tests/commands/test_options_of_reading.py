"""`--lora-alpha` and `--prefer` for a source that has nothing of the kind: an error (E3016), not a run as without."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.cli import run

FIXTURES = Path(__file__).parents[2] / "fixtures"
HUB = FIXTURES / "safetensors" / "llama_one_file"
VERBS = {
    "convert": ["convert", "SRC", "OUT", "--to", "dcp"],
    "reshard": ["reshard", "SRC", "OUT"],
    "merge": ["merge", "SRC", "OUT"],
    "verify": ["verify", "SRC"],
    "audit": ["audit", "SRC"],
    "diff": ["diff", "SRC", "SRC"],
}


def call(verb: str, source: Path, out: Path, *options: str) -> int:
    places = {"SRC": str(source), "OUT": str(out)}
    return run([*(places.get(word, word) for word in VERBS[verb]), *options])


@pytest.mark.parametrize("options", [("--lora-alpha", "16"), ("--prefer", "fp61"), ("--prefer", "torch")])
@pytest.mark.parametrize("given", ["safetensors/llama_one_file", "dcp/tp2_dp2"])
@pytest.mark.parametrize("verb", VERBS)
def test_an_option_about_what_is_not_there_is_refused(
    verb: str, given: str, options: tuple[str, str], tmp_path: Path, capfd: Any
) -> None:
    assert call(verb, FIXTURES / given, tmp_path / "out", *options) == 2
    shown = capfd.readouterr().err
    assert "E3016" in shown and options[0] in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("word", ["safetensors", "model.safetensors", "model"])
@pytest.mark.parametrize("verb", VERBS)
def test_the_name_of_what_is_read_anyway_passes(verb: str, word: str, tmp_path: Path) -> None:
    assert call(verb, HUB, tmp_path / "out", "--prefer", word) in (0, 1 if verb == "verify" else 0)


def test_the_alpha_of_an_adapter_passes(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(FIXTURES / "peft" / "given", adapter)
    assert run(["verify", str(adapter), "--lora-alpha", "8"]) in (0, 1)
