"""Boxes of tensors through torch's own distributed checkpointing, one planner a rank, without a process group.

    write([DcpRank([TensorBox("w", (0, 0), w[:2], (4, 6))], {}), DcpRank([TensorBox("w", (2, 0), w[2:], (4, 6))], {})],
    folder)

The one idea: torch parts a save into local plans, one global plan and the writing, and exchanges them over a process
group; here they are handed over as values. Plans, files and `.metadata` are torch's (`FileSystemWriter`,
`DefaultSavePlanner`), the boxes ours, as Megatron's planner does it too. A flat ZeRO shard is a few boxes, each an
item.

Source: torch 2.13 `distributed/checkpoint/` (`filesystem.py`, `default_planner.py`). Cost: 0.1 ms a box.
What it does not do: exchange anything between processes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckpt_tool.harness.saving.fault_point import fault_point


class TensorBox(NamedTuple):
    """A box of a tensor."""

    key: str  # the flat name
    # offset, shape: where it starts in the whole, and the whole's shape
    offset: tuple[int, ...]
    values: torch.Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DcpRank:
    """What one rank writes."""

    parts: Sequence[TensorBox]
    objects: Mapping[str, Any]  # by flat name, anything that torch.save takes


def write(ranks: Sequence[DcpRank], folder: Path, paths: Mapping[str, tuple[Any, ...]] | None = None) -> None:
    """A DCP folder. paths: flat name -> the keys that lead to it in the nested state dict; None where nothing nests."""
    planners = [_Planner(rank) for rank in ranks]
    writer = FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(True)
    for number, planner in enumerate(planners):
        planner.set_up_planner({}, writer.storage_meta(), number == 0)
    plans = [writer.prepare_local_plan(planner.create_local_plan()) for planner in planners]
    plans, metadata = planners[0].create_global_plan(plans)
    if paths is not None:
        metadata = replace(metadata, planner_data=dict(paths))
    results = []
    for number, (plan, planner) in enumerate(zip(writer.prepare_global_plan(plans), planners, strict=True)):
        if number == len(ranks) // 2:
            fault_point("files")
        results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
    fault_point("index")
    writer.finish(metadata, results)


class _Planner(DefaultSavePlanner):
    """Plans the boxes and objects of one rank."""

    def __init__(self, rank: DcpRank) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.rank = rank
        self.values = {_index(part): part.values for part in rank.parts}

    def create_local_plan(self) -> SavePlan:
        """A write item for each box and each object of the rank; torch would take them from a state dict."""
        items = []
        for part in self.rank.parts:
            chunk = ChunkStorageMetadata(torch.Size(part.offset), part.values.shape)
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(part.values), torch.Size(part.shape))
            items.append(WriteItem(_index(part), WriteItemType.SHARD, tensor_data=data))
        items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.rank.objects]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of a write item: the values of a box, or a pickled object."""
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save(self.rank.objects[write_item.index.fqn], stream)
            return stream
        return self.values[replace(write_item.index, index=None)].contiguous()


def _index(part: TensorBox) -> MetadataIndex:
    return MetadataIndex(part.key, torch.Size(part.offset))
