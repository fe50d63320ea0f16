"""A trainer's folder whose record is of another step than its optimizer or its schedule: refused by writers, found by
`verify`."""

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


def scheduled(folder: Path, calls: int, *, plateau: bool = False) -> None:
    """The schedule of a run that called it so often."""
    optimizer = torch.optim.AdamW(torch.nn.Linear(4, 3).parameters())
    if plateau:
        metric = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        for _ in range(calls):
            metric.step(1.0)
        torch.save(metric.state_dict(), folder / "scheduler.pt")
        return
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for _ in range(calls):
        optimizer.step()
        schedule.step()
    torch.save(schedule.state_dict(), folder / "scheduler.pt")


@pytest.mark.parametrize(
    ("calls", "ranks", "scaler", "plateau", "code"),
    [
        (10, 0, False, False, 0),
        (5, 0, False, False, 3),
        (15, 0, False, False, 3),
        (20, 2, False, False, 0),  # accelerate calls it once for each rank
        (10, 2, False, False, 0),
        (5, 2, False, False, 3),
        (8, 0, True, False, 0),
        (11, 0, True, False, 3),
        (1, 0, False, True, 0),
    ],
)
def test_schedule_of_another_step(calls, ranks, scaler, plateau, code, tmp_path, capfd):
    source = saved(tmp_path / "in", 10, 10, scaler=scaler)
    scheduled(tmp_path / "in", calls, plateau=plateau)
    for rank in range(ranks):
        torch.save({"cpu": torch.get_rng_state()}, tmp_path / f"in/rng_state_{rank}.pth")
    assert run(["convert", source, str(tmp_path / "out"), "--to", "dcp"]) == code
    error = capfd.readouterr().err
    assert ("E0305" in error) == ("scheduler.pt" in error) == (code == 3)
    assert run(["verify", source]) == (1 if code else 0)
    assert run(["audit", source]) == (1 if code else 0)
    assert ("E0305" in capfd.readouterr().out) == bool(code)


def test_schedule_of_an_optimizer_that_is_not_read(tmp_path, capfd):
    source = saved(tmp_path / "in", 10, 10)
    scheduled(tmp_path / "in", 5)
    (tmp_path / "in/optimizer.pt").unlink()
    assert run(["verify", source]) == 1
    assert "E0305" in capfd.readouterr().out
