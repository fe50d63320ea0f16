"""Faults that a stranger found in the formats of Paddle, each kept from coming back.

Checkpoints that lie are in `tests/hostile/paddle_cases.py`; here are jobs that must succeed, and what they must say.
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckpt_tool.cli import run

FIXTURES = Path(__file__).parents[2] / "fixtures"
PLAIN, UNIFIED = FIXTURES / "paddle/llama_tied_bf16_legacy_single", FIXTURES / "paddle-unified/llama_tied_hf"


def said(capfd, *arguments, code=0):
    """The JSON document of a command that must end with `code`."""
    assert run([*map(str, arguments), "--json"]) == code
    streams = capfd.readouterr()
    return json.loads((streams.out if code < 2 else streams.err).strip().splitlines()[-1])


@pytest.mark.parametrize("to", ["paddle", "paddle-flex", "paddle-unified", "torch"])
def test_padding_of_a_vocabulary_goes_from_numbers_too(tmp_path, capfd, to):
    """Powers of beta are one number a parameter: they have no rows to cut."""
    out = tmp_path / "out"
    said(capfd, "convert", PLAIN, out, "--to", to, "--vocab-size", "50")
    rows = said(capfd, "inspect", out)["tensors"]
    shapes = {tuple(row["shape"]) for row in rows if row["name"].endswith("embed_tokens.weight")}
    assert {shape[0] for shape in shapes if len(shape) == 2} == {50}
    assert {shape for shape in shapes if len(shape) == 1} <= {(1,)}


def test_files_that_no_rank_has_are_named(tmp_path, capfd):
    folder = tmp_path / "in"
    shutil.copytree(PLAIN, folder)
    (folder / "other.pdparams").write_bytes(pickle.dumps({"w": np.ones(4, "f4")}, protocol=4))
    document = said(capfd, "convert", folder, tmp_path / "out", "--to", "paddle")
    assert any("other.pdparams" in note for note in document["notes"])


def test_states_of_a_shape_of_their_own_travel(tmp_path, capfd):
    """Scales of a quantised moment have another shape than their parameter: `paddle` reads what it writes."""
    folder = tmp_path / "in"
    shutil.copytree(PLAIN, folder)
    path = folder / "optimizer.pdopt"
    state = pickle.loads(path.read_bytes())
    key = next(key for key, value in state.items() if key.endswith("moment1_0"))
    name = key.removesuffix("moment1_0") + "scales_0"
    state[name] = (name, np.arange(5, dtype="f4"))
    path.write_bytes(pickle.dumps(state, protocol=4))
    said(capfd, "convert", folder, tmp_path / "out", "--to", "paddle")
    assert said(capfd, "diff", folder, tmp_path / "out")["equal"]


def test_a_state_that_was_left_out_is_no_model(tmp_path, capfd):
    error = said(
        capfd, "convert", PLAIN, tmp_path / "out", "--to", "paddle", "--as-model", "master", "--state", "model", code=2
    )["error"]
    assert error["code"] == "E0265" and "--state" in error["message"]


def test_linked_folders_are_followed_when_asked(tmp_path, capfd):
    folder = tmp_path / "in"
    shutil.copytree(FIXTURES / "paddle-flex/llama_tied_pp2", folder)
    (folder / "model_state").rename(tmp_path / "elsewhere")
    (folder / "model_state").symlink_to(tmp_path / "elsewhere")
    original = FIXTURES / "paddle-flex/llama_tied_pp2"
    said(capfd, "convert", folder, tmp_path / "out", "--to", "sharded", "--dialect", "keep", "--follow-symlinks")
    assert said(capfd, "diff", original, tmp_path / "out")["equal"]
