"""Lightning's FSDP folder stays one: `meta.pt`, by which Lightning knows it, is copied where the output is a DCP."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from ckpt_tool.cli import run


def saved(folder: Path) -> Path:
    """A folder as Lightning's FSDP strategy leaves it."""
    dcp.save({"state_dict": {"w": torch.arange(6.0)}}, checkpoint_id=folder, no_dist=True)
    torch.save({"epoch": 1, "global_step": 20, "loops": {}}, folder / "meta.pt")
    return folder


def test_the_marker_goes_along(tmp_path):
    source = saved(tmp_path / "in.ckpt")
    assert run(["reshard", str(source), str(tmp_path / "out.ckpt"), "--dp", "2"]) == 0
    assert (tmp_path / "out.ckpt" / "meta.pt").read_bytes() == (source / "meta.pt").read_bytes()
    assert run(["convert", str(source), str(tmp_path / "hub"), "--to", "safetensors"]) == 0
    assert not (tmp_path / "hub" / "meta.pt").exists()


def test_a_marker_that_names_code_is_not_passed_on(tmp_path, capfd):
    source = saved(tmp_path / "in.ckpt")
    (source / "meta.pt").write_bytes(pickle.dumps({"epoch": 1})[:-1] + b"0cposix\nsystem\n.")
    assert run(["reshard", str(source), str(tmp_path / "out.ckpt"), "--dp", "2"]) == 0
    assert not (tmp_path / "out.ckpt" / "meta.pt").exists()
    assert "copy it into the output" in "".join(capfd.readouterr())
