"""FP8 scales of Transformer Engine in Megatron's checkpoints: carried where a module looks for them, named elsewhere.

The files are megatron-core's own; each scale is the sum of its module's weight (fixtures/make/megatron_fp8.py).
"""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ckpt_tool.commands.convert import convert
from ckpt_tool.core.progress import Silent
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.opening import open_source
from ckpt_tool.systems.megatron.extra_states import holds_scales

FIXTURES = Path(__file__).parents[2] / "fixtures"
DIST = FIXTURES / "megatron-dist" / "fp8_tp2"
LEGACY = FIXTURES / "megatron" / "fp8_pp2"
STREAMS = FIXTURES / "megatron" / "fp8_streams"


def written(source: Path, out: Path, to: str, **degrees: int) -> tuple[Path, str]:
    done = convert(str(source), str(out), Reading(), Writing(to=to, degrees=degrees), Silent())
    return out, " ".join(done["notes"])


def objects(path: Path) -> dict[str, torch.Tensor | None]:
    """The extra states of a torch_dist folder, by torch."""
    (folder,) = path.glob("iter_*")
    found = {}
    for index, item in FileSystemReader(folder).read_metadata().storage_data.items():
        if "_extra_state" in index.fqn:
            raw = (folder / item.relative_path).read_bytes()[item.offset : item.offset + item.length]
            (found[index.fqn],) = torch.load(io.BytesIO(raw), weights_only=True)
    return found


def kept(path: Path) -> Any:
    return open_source(str(path), Reading()).catalog.extras.get("extra_states")


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 1, "pp": 2}, {"tp": 1}], ids=str)
def test_torch_dist_s_scales_keep_their_places_in_every_layout(degrees, tmp_path):
    truth = load_file(DIST.with_name("fp8_tp2.truth.safetensors"))
    before = objects(DIST)
    out, notes = written(DIST, tmp_path / "out", "megatron-dist", **degrees)
    after = objects(out)
    assert after.keys() == before.keys() and len(after) == 8
    scales = {key: value for key, value in after.items() if value is not None}
    assert set(scales) == {
        f"decoder.layers.mlp.{name}._extra_state/shard_{i}_2" for name in ("linear_fc1", "linear_fc2") for i in (0, 1)
    }
    for key, value in scales.items():
        assert value.dtype == torch.uint8 and torch.equal(value, before[key])
        module, layer = key.split("._extra_state/shard_")
        weight = truth[f"model/{module.replace('layers.', f'layers.{layer[0]}.')}.weight"].float()
        half = weight.chunk(2, 0 if "fc1" in module else 1)[0]  # of tensor rank 0, which saves
        if "fc1" in module:  # its rows are half of the gate's and half of up's
            half = torch.cat([part.chunk(2)[0] for part in weight.chunk(2)])
        assert struct.pack("<f", float(half.sum())) in bytes(value.tolist())
    assert "2 extra states hold no FP8 scales" in notes and "histories are left out" not in notes


def test_legacy_scales_stay_with_their_ranks_and_are_named_elsewhere(tmp_path):
    found = kept(LEGACY)
    assert set(found) == {"mp_rank_00_000", "mp_rank_00_001"}
    assert all(holds_scales(value) for rank in found.values() for value in rank["0"].values())
    same, notes = written(LEGACY, tmp_path / "same", "megatron", pp=2)
    assert kept(same) == found and "histories are left out" not in notes
    for to, degrees in (("megatron", {"pp": 1}), ("megatron", {"pp": 2, "tp": 2}), ("megatron-dist", {"pp": 2})):
        out, notes = written(LEGACY, tmp_path / f"{to}{len(degrees)}{degrees['pp']}", to, **degrees)
        assert kept(out) is None and "FP8 scales and amax histories are left out" in notes


def test_streams_of_transformer_engine_1(tmp_path):
    found = kept(STREAMS)["mp_rank_00"]["0"]
    assert len(found) == 4 and not any("linear_qkv" in name or "linear_proj" in name for name in found)
    same, notes = written(STREAMS, tmp_path / "same", "megatron", tp=1)
    assert kept(same) == kept(STREAMS) and "4 extra states hold no FP8 scales" in notes


def test_torch_dist_s_scales_are_named_where_they_have_no_place(tmp_path):
    _, notes = written(DIST, tmp_path / "legacy", "megatron", tp=2)
    assert "left out" in notes and "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2" in notes
    _, notes = written(DIST, tmp_path / "fsdp", "megatron-fsdp")
    assert "4 extra states with FP8 scales and amax histories are left out" in notes


def test_empty_states_of_a_bf16_job_are_no_news():
    assert not holds_scales(None) and not holds_scales(b"") and not holds_scales(b"recipe")
    assert holds_scales(b"..amax_history_fwd..") and holds_scales({"of": "another kind"})
    notes = " ".join(
        note.message for note in open_source(str(FIXTURES / "megatron-dist" / "llama_tp2"), Reading()).catalog.notes
    )
    assert "extra state" not in notes
