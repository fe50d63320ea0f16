"""A composed torch file: torch itself reads it, CRCs of records that several boxes and zeros make up included."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from targets import bits, ramp, write

from ckpt_tool.core.box import Box, flat_boxes
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.target import Target
from ckpt_tool.formats.state_dict.composer import StoragePart, TorchComposer
from ckpt_tool.formats.state_dict.content import read_content
from ckpt_tool.storage.opening import open_tree

F32 = DTYPES["F32"]
I64 = DTYPES["I64"]


def test_pieces_gaps_and_known_values(tmp_path: Path) -> None:
    values = [ramp((4, 6)), ramp((3,), start=100)]
    composer = TorchComposer()
    start = 2
    parts = []
    for box in flat_boxes((4, 6), 3, 20):
        parts.append(StoragePart(0, box, start))
        start += box.numel
    parts.append(StoragePart(1, Box((0,), (3,)), 30))
    flat = composer.tensor((40,), F32, parts)
    step = composer.value((), I64, (7).to_bytes(8, "little"))
    rest = composer.tensor((0,), F32, [])
    view = composer.view(flat, (3,), 30, (1,))
    skeleton: dict[str, Any] = {"flat": flat, "view": view, "step": step, "none": rest, "x": 1}
    write(Target("torch", (composer.file("f.pt", skeleton),)), tmp_path, [bits(value) for value in values])
    read = torch.load(tmp_path / "f.pt", weights_only=True)
    want = torch.zeros(40)
    want[2:19] = values[0].reshape(-1)[3:20]
    want[30:33] = values[1]
    assert torch.equal(read["flat"], want) and torch.equal(read["view"], values[1])
    assert read["step"].item() == 7 and read["step"].dtype == torch.int64 and read["none"].numel() == 0
    assert read["x"] == 1
    with zipfile.ZipFile(tmp_path / "f.pt") as archive:
        assert archive.testzip() is None
    content = read_content(open_tree(str(tmp_path)), "f.pt")
    assert [path for path, _ in content.leaves] == [("flat",), ("view",), ("step",), ("none",)]
    assert content.extras == {"x": 1}
