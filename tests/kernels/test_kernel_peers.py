"""The table beside torch, in miniature: torch's results are the kernels', byte for byte, and a peer that cheats is
found out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the peers are torch's")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import kernel_peers

from ckpt_tool.device.library import Device
from ckpt_tool.device.trial.workloads import WORKS

SMALL = ["--mib", "1", "--repeats", "1"]


def run(device: Device, tmp_path: Path, *words: str) -> tuple[int, dict[str, object]]:
    status = kernel_peers.main(["--out", str(tmp_path), *SMALL, *words], device)
    (report,) = tmp_path.glob("*.json")
    return status, json.loads(report.read_text())


def test_a_table_with_its_peers(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ("box_cast", "box_dequantise", "box_quantise")
    status, document = run(device, tmp_path, *(word for name in wanted for word in ("--kernel", name)))
    assert (status, document["faults"], document["missing"]) == (0, [], [])
    found = {(row["kernel"], row["work"], row["who"]) for row in document["rows"]}  # type: ignore[attr-defined]
    assert ("box_cast", "F32 to BF16 by 16,384", "_foreach_copy_") in found and (
        "plain copy",
        "one run",
        "cudaMemcpyAsync",
    ) in found
    assert {(kernel, work) for kernel, work, who in found if who == "ckpt"} == {
        key for key in WORKS if key[0] in wanted
    }
    said = capsys.readouterr().out
    assert said.startswith((tmp_path / "kernels.md").read_text()) and "| box_cast: F32 to BF16 " in said
    assert device.info.name in said.splitlines()[0]


def test_the_optimizers_peers_run(device: Device, tmp_path: Path) -> None:
    status, document = run(device, tmp_path, "--kernel", "adamw_ema", "--kernel", "ema_swap")
    rows = document["rows"]
    assert status == 0 and isinstance(rows, list) and len(rows) == 5
    assert all(row["moved"] % (38 if "AdamW" in row["work"] else 18) == 0 for row in rows[1:])


def test_a_peer_that_leaves_other_bytes_is_told(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = ("box_dequantise", "F4, 1 x 32, to BF16")
    monkeypatch.setattr(kernel_peers, "peers", lambda *_: [(work, "idler", True, lambda buffers: lambda slot: None)])
    status, document = run(device, tmp_path, "--kernel", "box_dequantise")
    assert status == 1
    assert document["faults"] == 2 * ["box_dequantise, F4, 1 x 32, to BF16: idler leaves other bytes than the kernel"]


def test_peers_for_which_no_time_is_left_are_named(device: Device, tmp_path: Path) -> None:
    status, document = run(device, tmp_path, "--kernel", "box_dequantise", "--seconds", "0")
    assert status == 0
    assert document["missing"] == [
        "box_dequantise, F4, 1 x 32, to BF16: torch, table and ldexp",
        "box_dequantise, F8_E4M3, 128 x 128, to BF16: torch, 3 passes",
    ]


@pytest.mark.slow
def test_the_whole_table(device: Device, tmp_path: Path) -> None:
    status, document = run(device, tmp_path)
    assert (status, document["faults"], document["missing"]) == (0, [], [])


@pytest.mark.slow
def test_the_sweep(device: Device, tmp_path: Path) -> None:
    status, document = run(device, tmp_path, "--sweep")
    entries = document["sweep"]
    assert status == 0 and isinstance(entries, list)
    assert {entry["loads"] for entry in entries} == {2, 4, 8} and all(len(entry["shares"]) == 8 for entry in entries)
