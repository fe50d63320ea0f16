"""`ckpt verify` names the rank whose file is damaged, in each format whose files are ranks'."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckpt_tool as ckpt

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.mark.parametrize(
    ("source", "file", "rank"),
    [
        ("megatron/moe_tp2ep2etp1", "mp_rank_01_001/model_optim_rng.pt", "tp 1, ep 1"),
        ("deepspeed/z1_bf16_dp4", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", "dp 2, mp 0"),
        ("dcp/fsdp2_dp4", "__3_0.distcp", "dp 3"),
    ],
)
def test_the_rank_of_a_damaged_file_is_named(source: str, file: str, rank: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / source, tmp_path / "copy")
    (path,) = tmp_path.joinpath("copy").rglob(file)
    data = bytearray(path.read_bytes())
    for chunk in chunks_of(tmp_path / "copy", path):
        data[chunk.array.offset] ^= 0x40
        break
    path.write_bytes(data)
    (found,) = ckpt.verify(tmp_path / "copy")["findings"]
    assert found["file"].endswith(file)
    assert found["rank"] == rank, found


def chunks_of(folder: Path, path: Path) -> list:
    """The chunks that are stored in a file."""
    catalog = ckpt.open(folder).catalog
    return [
        chunk
        for tensor in catalog.tensors.values()
        for chunk in tensor.chunks
        if str(path).endswith(chunk.array.file) and chunk.box.numel
    ]


def test_a_checkpoint_without_ranks_names_none(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "torch" / "training.pt", tmp_path / "a.pt")
    (path,) = tmp_path.glob("a.pt")
    data = bytearray(path.read_bytes())
    data[chunks_of(tmp_path / "a.pt", Path("x/a.pt"))[0].array.offset] ^= 1
    path.write_bytes(data)
    (found,) = ckpt.verify(path)["findings"]
    assert "rank" not in found
