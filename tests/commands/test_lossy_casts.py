"""Casts that lose values, from the command line: counted, refused, or let through with --allow-lossy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

SOURCES = {
    "fp16": (torch.float32, [1.0, 65519.0, 65520.0, -1e9, float("inf"), 1e-9], torch.float16, 2),
    "bf16": (torch.float32, [1.0, 3.4e38, -3.402e38, float("-inf")], torch.bfloat16, 2),
    "float8_e4m3fn": (torch.float32, [1.0, 464.0, 465.0, -1e9, float("inf"), 0.0], torch.float8_e4m3fn, 3),
    "f8_e5m2": (torch.float32, [1.0, 57344.0, 61440.0], torch.float8_e5m2, 1),
}


def ckpt(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ckpt_tool", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_what_overflows_is_refused_and_counted(dtype: str, source: torch.dtype, tmp_path: Path) -> None:
    _, values, kind, lost = SOURCES[dtype]
    if source == torch.bfloat16 and dtype == "bf16":
        pytest.skip("no cast")
    tensor = torch.tensor(values).to(source)
    if source == torch.bfloat16:  # its own rounding comes first
        largest = {torch.float16: 65520.0, torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0}[kind]
        wide = tensor.float().abs()
        lost = (
            int((wide > largest).sum())
            if kind == torch.float8_e4m3fn
            else int(((wide >= largest) & wide.isfinite()).sum())
        )
    save_file({"w": tensor, "fine": torch.ones(3)}, tmp_path / "in.safetensors")
    line = (
        "convert",
        str(tmp_path / "in.safetensors"),
        str(tmp_path / "out"),
        "--to",
        "safetensors",
        "--dtype",
        dtype,
        "--no-fsync",
    )
    refused = ckpt(*line, "--json")
    assert refused.returncode == 3, refused.stderr
    error = json.loads(refused.stderr)["error"]
    assert error["code"] == "E0350" and error["message"].startswith(f"{lost} ")
    assert error["faults"] == [f"w: {lost} value{'s' if lost > 1 else ''}"] and not (tmp_path / "out").exists()
    shown = ckpt(*line, "--allow-lossy")
    assert shown.returncode == 0 and f"w: {lost} value" in shown.stdout, shown.stdout
    done = ckpt(*line, "--json", "--allow-lossy", "--force")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["overflows"] == {"w": lost}
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["w"].view(torch.uint8), tensor.to(kind).view(torch.uint8))


def test_what_fits_is_not_held_up(tmp_path: Path) -> None:
    save_file({"w": torch.tensor([448.0, -2.5, 0.0, float("nan")])}, tmp_path / "in.safetensors")
    done = ckpt(
        "convert",
        str(tmp_path / "in.safetensors"),
        str(tmp_path / "out"),
        "--to",
        "safetensors",
        "--dtype",
        "float8_e4m3fn",
        "--json",
    )
    assert done.returncode == 0 and "overflows" not in json.loads(done.stdout)
