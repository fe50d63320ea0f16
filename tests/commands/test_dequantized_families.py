"""Releases in FP8 of families of several structures: --dequantize on the way to Megatron gives the bytes that their
values give, which NumPy has made beforehand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import InputError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.verbs import Comparison
from ckpt_tool.options.writing import Writing

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))

from family_models import config_of, hub_shapes

ml_dtypes = pytest.importorskip("ml_dtypes")
BLOCK = 8  # rows and columns that share a scale; published files have 128


def quantised(value: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scales, what they stand for in bfloat16) of a matrix."""
    rows, columns = value.shape
    scales = np.ones((ceil_div(rows, BLOCK), ceil_div(columns, BLOCK)), np.float32)
    for i, j in np.ndindex(scales.shape):
        block = np.abs(value[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK])
        scales[i, j] = block.max() / 448
    spread = np.kron(scales, np.ones((BLOCK, BLOCK), np.float32))[:rows, :columns]
    codes = (value / spread).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales, (codes.astype(np.float32) * spread).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m2", "qwen3_next", "glm4_moe_lite", "qwen3_omni_moe"])
def test_blocks_of_fp8_on_the_way_to_megatron(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    rng = np.random.default_rng(7)
    codes = dict[str, np.ndarray]()
    plain = dict[str, np.ndarray]()
    for name, shape in hub_shapes(family, config).items():
        value = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 2 and (".experts." in name or name.endswith("_proj.weight")):
            codes[name], codes[f"{name}_scale_inv"], plain[name] = quantised(value)
        else:
            plain[name] = codes[name] = (1 + value / 4).astype(ml_dtypes.bfloat16)
    assert len(codes) > len(plain)
    stated = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    for folder, tensors, more in (("fp8", codes, {"quantization_config": stated}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors", {"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **more}))
        writing = Writing(to="megatron-dist", fsync=False, dequantize=folder == "fp8")
        convert(str(tmp_path / folder), str(tmp_path / f"{folder}.out"), Reading(), writing, Silent())
    pair = str(tmp_path / "fp8.out"), str(tmp_path / "plain.out")
    assert diff(*pair, Reading(), Comparison(), progress=Silent())["equal"]
    with pytest.raises(InputError) as caught:  # Megatron knows no scales beside its weights
        convert(
            str(tmp_path / "fp8"), str(tmp_path / "no"), Reading(), Writing(to="megatron-dist", fsync=False), Silent()
        )
    assert caught.value.code == "E1486" and "--dequantize" in (caught.value.hint or "")
