"""Models whose experts are stored in two layouts are not merged, and the hint says what brings them to one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tool as ckpt
from ckpt_tool.errors import CkptError

EXPERTS = "model.layers.0.mlp.experts"
SPLIT = {f"{EXPERTS}.{number}.down_proj.weight": np.ones((4, 2), np.float32) for number in range(2)}
FUSED = {f"{EXPERTS}.down_proj": np.ones((2, 4, 2), np.float32)}


@pytest.mark.parametrize("models", [(SPLIT, FUSED), (FUSED, SPLIT), (SPLIT | FUSED, FUSED)])
def test_split_and_fused_experts(models: tuple[dict[str, np.ndarray], ...], tmp_path: Path) -> None:
    sources = [str(tmp_path / f"{number}.safetensors") for number in range(2)]
    for source, tensors in zip(sources, models, strict=True):
        save_file(tensors, source)
    with pytest.raises(CkptError) as caught:
        ckpt.merge(sources, str(tmp_path / "out"), method="linear")
    assert caught.value.code == "E1447" and "--experts split" in (caught.value.hint or "")
