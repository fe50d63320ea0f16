"""A command of the tool that fails inside the harness: its own words, hint and exit code."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from ckpt_tool.harness.loading import ToolFailed, run_tool


def test_the_words_of_the_command(tmp_path):
    with pytest.raises(ToolFailed) as failed:
        run_tool("inspect", tmp_path / "gone")
    error = failed.value
    assert error.exit_code == 7 and error.code == "E1532"
    assert (
        f"ckpt inspect {tmp_path / 'gone'} ended with exit code 7: E0702" in error.message and "{" not in error.message
    )
    assert error.hint and error.hint != "run the line by hand"


def test_a_command_that_does_not_speak_json(tmp_path):
    with pytest.raises(ToolFailed) as failed:
        run_tool("inspekt", tmp_path, json_output=False)
    assert failed.value.exit_code == 2 and "is no verb of ckpt" in failed.value.message
