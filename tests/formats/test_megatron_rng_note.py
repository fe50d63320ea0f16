"""An output for Megatron that has no RNG states says so, and how to start the job without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt_tool as ckpt

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


@pytest.mark.parametrize("target", ["megatron", "megatron-dist", "megatron-fsdp"])
@pytest.mark.parametrize("source", ["megatron", "sharded"])
def test_the_note_names_the_option(source: str, target: str, tmp_path: Path) -> None:
    """From other tensor ranks the states do not fit; from a format without Megatron's there are none."""
    folder = next(path for path in sorted((FIXTURES / "megatron").iterdir()) if path.is_dir() and "tp2" in path.name)
    given = str(folder)
    if source == "sharded":
        given = str(tmp_path / "sharded")
        ckpt.convert(str(folder), given, to="sharded", drop=["extras"])
    report: Any = ckpt.convert(given, str(tmp_path / "out"), to=target, dry_run=True, dialect="megatron")
    notes = [note for note in report["notes"] if note.startswith("RNG states are not written")]
    assert len(notes) == 1 and "--no-load-rng" in notes[0], report["notes"]
