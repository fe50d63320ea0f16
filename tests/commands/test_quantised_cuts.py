"""Tensor parallel cuts of quantised weights fall between blocks, and scales go with their codes.

The oracle makes floats of each rank's file alone, in torch, and compares them with the same slice of the whole
weight's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

FIXTURES = Path(__file__).parents[2] / "fixtures" / "quantized"
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def cut(source: Path, out: Path, to: str = "sharded", **writing: Any) -> dict[str, Any]:
    return convert(str(source), str(out), Reading(), Writing(to=to, fsync=False, dialect="keep", **writing), Silent())


def ranks(out: Path) -> list[dict[str, torch.Tensor]]:
    """Each rank's tensors."""
    return [load_file(file) for file in sorted(out.glob("model.*.safetensors"))]


def floats(name: str, here: dict[str, torch.Tensor], case: str) -> torch.Tensor:
    """The floats of what one rank holds of a weight."""
    if case == "mxfp4_gpt_oss":
        blocks = here[f"{name}_blocks"]
        scales = here[f"{name}_scales"]
        pairs = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], -1).flatten(-3)
        values = pairs.reshape(*scales.shape, 32) * torch.exp2(scales.float() - 127)[..., None]
        return values.flatten(-2).transpose(-1, -2)
    if case.startswith("int4"):
        packed = here[f"{name}_packed"]
        scales = here[f"{name}_scale"].float()
        shifts = torch.arange(0, 32, 4)
        codes = ((packed[..., None] >> shifts) & 15).flatten(-2).float() - 8
        if f"{name}_zero_point" in here:
            zeros = ((here[f"{name}_zero_point"][:, None] >> shifts[None, :, None]) & 15).flatten(0, 1).float() - 8
            codes = codes - zeros.repeat_interleave(32, 1)
        return codes * scales.repeat_interleave(32, 1)
    codes = here[name].float()
    scales = next(here[f"{name}{end}"] for end in ("_scale_inv", "_scale") if f"{name}{end}" in here)
    high = codes.shape[0] // scales.shape[0]
    wide = codes.shape[1] // scales.shape[1]
    return codes * scales.float().repeat_interleave(high, 0).repeat_interleave(wide, 1)


@pytest.mark.parametrize("case", ["fp8_block", "int4_group", "int4_group_asym", "mxfp4_gpt_oss", "fp8_channel"])
def test_a_rank_alone_has_the_right_floats(case: str, tmp_path: Path) -> None:
    cut(FIXTURES / case, tmp_path / "out", degrees={"tp": 2})
    truth = {
        key.removeprefix("model/"): value for key, value in load_file(FIXTURES / f"{case}.truth.safetensors").items()
    }
    smaller = 0
    for here in ranks(tmp_path / "out"):
        assert here.keys() == ranks(tmp_path / "out")[0].keys()
    parts: dict[str, list[torch.Tensor]] = {}
    names = [
        name
        for name in truth
        if "_proj" in name and "bias" not in name and not (case == "mxfp4_gpt_oss" and "self_attn" in name)
    ]
    for here in ranks(tmp_path / "out"):
        for name in names:
            parts.setdefault(name, []).append(floats(name, here, case).to(torch.bfloat16))
    for name, (first, second) in parts.items():
        whole = truth[name]
        if first.shape == whole.shape:
            assert torch.equal(first, whole) and torch.equal(second, whole), name
            continue
        smaller += 1
        dim = next(d for d in range(whole.ndim) if first.shape[d] != whole.shape[d])
        assert torch.equal(torch.cat([first, second], dim), whole), name
    assert smaller >= (2 if case in ("mxfp4_gpt_oss", "fp8_block") else 5), "most weights are cut"


def test_what_would_part_a_block_falls_back_and_is_said(tmp_path: Path) -> None:
    report = cut(FIXTURES / "fp8_block", tmp_path / "out", degrees={"tp": 4})
    here = ranks(tmp_path / "out")[0]
    q = "model.layers.0.self_attn.q_proj.weight"
    k = "model.layers.0.self_attn.k_proj.weight"
    assert here[q].shape == (64, 64) and here[f"{q}_scale_inv"].shape == (2, 2), (
        "two blocks of 32 rows do not make four"
    )
    assert here[k].shape == (32, 64) and here["model.embed_tokens.weight"].shape == (12, 64)
    (fallback,) = report["fallbacks"]
    assert fallback["reason"] == "replicated" and fallback["example"].endswith("_proj.weight"), (
        "scales are not told apart"
    )
    with pytest.raises(UsageError) as found:
        cut(FIXTURES / "fp8_block", tmp_path / "strict", degrees={"tp": 4}, on_indivisible="error")
    assert found.value.code == "E0214" and found.value.exit_code == 2


def test_ragged_blocks_are_never_parted(tmp_path: Path) -> None:
    """300 rows are three blocks of 128, the last one short: no even cut falls between them, not even in three."""
    tensors = {
        "m.up_proj.weight": torch.arange(300 * 256)
        .remainder(120)
        .to(torch.uint8)
        .reshape(300, 256)
        .view(torch.float8_e4m3fn),
        "m.up_proj.weight_scale_inv": torch.ones(3, 2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    cut(tmp_path / "model.safetensors", tmp_path / "out", degrees={"tp": 3})
    here = ranks(tmp_path / "out")[0]
    assert here["m.up_proj.weight"].shape == (300, 256) and here["m.up_proj.weight_scale_inv"].shape == (3, 2)


@pytest.mark.parametrize("policy", ["pad", "dtensor", "prefix", "best-subset", "replicate"])
def test_every_policy_leaves_blocks_whole(policy: str, tmp_path: Path) -> None:
    cut(FIXTURES / "fp8_block", tmp_path / "out", degrees={"tp": 3, "dp": 2}, on_indivisible=policy, zero=3)
    for here in ranks(tmp_path / "out"):
        for name, tensor in here.items():
            if f"{name}_scale_inv" in here:
                scales = here[f"{name}_scale_inv"]
                assert tensor.shape == (32 * scales.shape[0], 32 * scales.shape[1]), name


def test_a_format_with_its_own_ranks_refuses(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as found:
        cut(FIXTURES / "fp8_block", tmp_path / "out", "megatron", degrees={"tp": 4})
    assert found.value.exit_code == 2


def test_boxes_that_do_not_fit_their_scales_are_refused(tmp_path: Path) -> None:
    """192 columns are two blocks, 128 and 64 of them: a format that parts every tensor evenly would part them after
    96."""
    codes = torch.zeros(128, 192, dtype=torch.uint8).view(torch.float8_e4m3fn)
    source = tmp_path / "model.safetensors"
    save_file({"m.q_proj.weight": codes, "m.q_proj.weight_scale_inv": torch.ones(1, 2)}, source)
    with pytest.raises(UsageError) as found:
        cut(source, tmp_path / "out", "paddle-flex", degrees={"tp": 2})
    assert found.value.code == "E1466" and "--dequantize" in (found.value.hint or "")
    cut(source, tmp_path / "whole", "paddle-flex")


def test_codes_of_unknown_order_are_cut_nowhere(tmp_path: Path) -> None:
    kinds = {
        "qweight": torch.arange(64, dtype=torch.int32).reshape(8, 8),
        "qzeros": torch.ones(2, 8, dtype=torch.int32),
        "scales": torch.ones(2, 64, dtype=torch.float16),
        "g_idx": torch.arange(64, dtype=torch.int32),
    }
    tensors = {f"model.layers.0.mlp.up_proj.{name}": tensor for name, tensor in kinds.items()}
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(64, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    report = cut(tmp_path / "model.safetensors", tmp_path / "out", degrees={"tp": 2})
    here = ranks(tmp_path / "out")[1]
    assert here.pop("model.layers.0.mlp.down_proj.weight").shape == (64, 32)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in here.items()) and len(here) == 4
    assert any("up_proj" in entry["example"] for entry in report["fallbacks"])
