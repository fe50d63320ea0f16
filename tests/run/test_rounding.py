"""The master's rounding against the model, the oracle being torch's own cast."""

from __future__ import annotations

from pathlib import Path

import torch

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.verify import verify
from ckpt_tool.core.progress import Silent
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Verification
from ckpt_tool.options.writing import Writing
from ckpt_tool.run.rounding import Drift, drifts
from ckpt_tool.sources.opening import open_source


def saved(folder: Path, dtype: torch.dtype) -> tuple[Path, torch.Tensor]:
    """A state whose model is the rounding of its master: ties, subnormals, infinities, NaNs of several payloads."""
    bits = torch.arange(0, 1 << 32, 65521, dtype=torch.int64)  # a prime step through all fp32 patterns
    master = bits.to(torch.uint32).view(torch.float32)[: 64 * 1000].reshape(64, -1)
    special = torch.tensor([1.00390625, 1.01171875, -0.0, 3.4e38, 65520.0, 1e-45, float("inf"), float("nan")])
    state = {
        "model": {"w": master.to(dtype), "s": special.to(dtype), "fp32": special},
        "master": {"w": master, "s": special, "fp32": special * 2},
    }
    path = folder / "in.pt"
    torch.save(state, path)
    return path, state["model"]["w"]


def found(path: Path) -> list[Drift]:
    opened = open_source(str(path), Reading())
    return drifts(opened.catalog, opened.tree)


def test_what_torch_rounds_is_right(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        path, _ = saved(tmp_path, dtype)
        assert found(path) == []


def test_one_bit_is_found_in_any_layout(tmp_path: Path) -> None:
    path, model = saved(tmp_path, torch.bfloat16)
    state = torch.load(path)
    state["model"]["w"].view(torch.int16)[5, 17] += 1
    state["model"]["w"].view(torch.int16)[40, 3] -= 1
    torch.save(state, path)
    convert(str(path), str(tmp_path / "cut"), Reading(), Writing(to="sharded", degrees={"tp": 3, "dp": 2}), Silent())
    for where in (path, tmp_path / "cut"):
        (drift,) = found(where)
        assert drift == Drift(TensorKey("w"), 2, (5, 17))
        findings = verify(str(where), Reading(), progress=Silent())["findings"]
        assert [(f["code"], f["tensor"]) for f in findings] == [("W-master", "w")] and "[5, 17]" in findings[0][
            "message"
        ]
    assert not verify(str(path), Reading(), Verification("quick"), progress=Silent())["findings"]
