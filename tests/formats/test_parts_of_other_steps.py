"""A trainer's folder whose record is of another step than its optimizer: refused by writers, found by `verify`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tool.cli import run


def saved(folder: Path, optimizer_step: int, recorded: int, *, scaler: bool = False) -> str:
    """What transformers' Trainer leaves: a model, its optimizer, its record."""
    folder.mkdir()
    module = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(optimizer_step):
        module(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    save_file(module.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    record = {"epoch": 1.0, "global_step": recorded, "log_history": [{"loss": float("nan"), "step": recorded}]}
    (folder / "trainer_state.json").write_text(json.dumps(record, indent=2))
    if scaler:
        torch.save({}, folder / "scaler.pt")
    return str(folder)


@pytest.mark.parametrize(
    ("optimizer_step", "recorded", "scaler", "code"),
    [(4, 4, False, 0), (2, 40, False, 3), (5, 4, False, 3), (5, 4, True, 3), (3, 5, True, 0), (2, 40, True, 3)],
)
def test_parts_of_two_steps(optimizer_step, recorded, scaler, code, tmp_path, capfd):
    source = saved(tmp_path / "in", optimizer_step, recorded, scaler=scaler)
    assert run(["convert", source, str(tmp_path / "out"), "--to", "dcp"]) == code
    assert ("E0305" in capfd.readouterr().err) == (code == 3)
    assert run(["verify", source]) == (1 if code else 0)
    if code:
        assert run(["convert", source, str(tmp_path / "out"), "--to", "dcp", "--lenient"]) == 0
