"""Ctrl-C at any moment of the start ends the command without a traceback and without an output."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "fixtures" / "safetensors" / "llama_one_file"


@pytest.mark.parametrize("delay", [0.06, 0.09, 0.12, 0.16, 0.2, 0.3, 0.45])
def test_an_interrupt_shows_no_traceback(delay: float, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "ckpt_tool", "convert", str(SOURCE), str(tmp_path / "out"), "--to", "torch"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    if "site.py" in said or said.startswith("Could not import runpy") or "<frozen" in said.partition("ckpt_tool")[0]:
        pytest.skip("the interpreter was not up yet: its own start was interrupted")
    assert "Traceback" not in said, said
    assert process.returncode in (0, 130, -signal.SIGINT)
    assert process.returncode == 0 or not (tmp_path / "out").exists()
