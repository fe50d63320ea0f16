"""`ckpt merge SRC OUT --remove-keys PATTERN` on the files of ranks: flat buffers are laid anew, the report is exact,
and what is left is bit for bit the truth without the keys. The truth beside each fixture comes from the real systems.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import FIXTURES, Runner, assert_same, load_sharded
from safetensors.torch import load_file

ROWS = [
    ("deepspeed/z1_bf16_dp4", "layers.1.up.weight"),
    ("deepspeed/z1_bf16_dp4", "head.weight"),  # the alias of embed.weight, which stays
    ("deepspeed/z1_bf16_dp4", "frozen.*"),
    ("deepspeed/z2_align_dp4", "embed.weight"),
    ("deepspeed/z2_round_robin_dp4", "layers.0.w1.weight"),
    ("deepspeed/z3_bf16_dp4", "layers.1.up.weight"),
    ("deepspeed/z0_bf16_dp2", "layers.0.w1.weight"),
    ("deepspeed/pipe_pp2_dp2_z1", "2.*"),
    ("deepspeed/moe_z2_ep2_dp4", "moe2.*"),
    ("deepspeed-universal/z1_bf16_dp2", "layers.0.w1.weight"),
    ("deepspeed-universal/z3_bf16_dp2", "layers.0.w1.weight"),
    ("megatron/moe_tp2ep2etp1", "output_layer.weight"),
    ("megatron/gpt2_tied_pp2_adamw", "decoder.layers.2.mlp.linear_fc1.weight"),
    ("megatron-dist/moe_ep2_flat", "decoder.final_layernorm.weight"),
    ("megatron-dist/dp2_model_space", "output_layer.weight"),
    ("torch/ranks_tp2_dp2", "layers.0.w1.weight"),
]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.share(3)
@pytest.mark.parametrize(("fixture", "pattern"), ROWS)
def test_the_keys_their_twins_and_their_bytes_are_gone(
    fixture: str, pattern: str, ckpt: Runner, tmp_path: Path
) -> None:
    source = FIXTURES / fixture
    out = tmp_path / "out"
    truth = load_file(f"{source}.truth.safetensors")
    gone = {key: tensor for key, tensor in truth.items() if fnmatchcase(key.split("/", 1)[1], pattern)}
    left = {key: tensor for key, tensor in truth.items() if key not in gone}
    assert gone
    said = ckpt("merge", source, out, "--remove-keys", pattern)
    assert {f"{row['state']}/{row['name']}": row["bytes"] for row in said["removed"]} == {
        key: tensor.nbytes for key, tensor in gone.items()
    }
    assert said["removed_bytes"] == sum(tensor.nbytes for tensor in gone.values())
    assert ckpt("verify", out)["ok"] is True

    ckpt("convert", out, tmp_path / "laid_open", "--to", "sharded", "--dialect", "keep")
    got = load_sharded(tmp_path / "laid_open")
    assert_same({key: tensor for key, tensor in got.items() if key in truth}, left)
    assert not [key for key in got if fnmatchcase(key.split("/", 1)[1], pattern)]
    data = b"".join(path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file())
    stays = b"".join(map(raw, left.values()))
    for key, tensor in gone.items():
        sample = raw(tensor)[:32]
        assert len(set(sample)) < 4 or sample in stays or sample not in data, f"the bytes of {key} are still there"
        assert key.split("/", 1)[1].encode() not in data, f"{key} is still named"


def read(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def test_flat_buffers_shrink_by_what_went(ckpt: Runner, tmp_path: Path) -> None:
    """Megatron's buckets by torch.load: the elements that are left, behind each other, and no others."""
    source = FIXTURES / "megatron" / "moe_tp2ep2etp1"
    ckpt("merge", source, tmp_path / "out", "--remove-keys", "decoder.layers.1.*")
    truth = load_file(f"{source}.truth.safetensors")
    numbers = []
    for folder in (source, tmp_path / "out"):
        files = sorted(folder.rglob("distrib_optim.pt"))
        assert len(files) == 2
        numbers.append(sum(numel for file in files for numel in unpadded(read(file))))
    went = [key for key in truth if key.startswith("master/decoder.layers.1.")]
    assert went and numbers[0] > numbers[1]
    replicated = sum(prod(truth[key].shape) for key in went if "layernorm" in key or "router" in key)
    shrunk = numbers[0] - numbers[1] - sum(prod(truth[key].shape) for key in went) - replicated
    assert 0 <= shrunk < 64 * 2 * len(went), "each parameter begins at a multiple of 64"


def unpadded(value: Any) -> list[int]:
    """Every `numel_unpadded` in a distrib_optim.pt."""
    if isinstance(value, dict):
        own = [value["numel_unpadded"]] if isinstance(value.get("numel_unpadded"), int) else []
        return own + [n for item in value.values() for n in unpadded(item)]
    if isinstance(value, list | tuple):
        return [n for item in value for n in unpadded(item)]
    return []


def test_no_file_or_folder_is_left_of_a_universal_parameter(ckpt: Runner, tmp_path: Path) -> None:
    ckpt("merge", FIXTURES / "deepspeed-universal" / "z1_bf16_dp2", tmp_path / "out", "--remove-keys", "layers.0.w1.*")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert files and not [path for path in files if "layers.0.w1" in str(path) or b"layers.0.w1" in path.read_bytes()]


def test_a_fold_of_experts_that_the_degree_cannot_take(ckpt: Runner, tmp_path: Path) -> None:
    """Three experts over two ranks: exit 2 with the degrees that do, nothing written."""
    for fixture in ("deepspeed/moe_z2_ep2_dp4", "megatron/moe_tp2ep2etp1"):
        ran = ckpt.run("merge", FIXTURES / fixture, tmp_path / "out", "--remove-keys", "*experts.3.*")
        assert ran.code == 2 and "1, 3" in ran.err and list(tmp_path.iterdir()) == []
