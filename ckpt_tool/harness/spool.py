"""A rank's snapshot: the copy that is made inside a step, and the file that a thread writes of it afterwards.

    snapshot = Snapshot()
    copy = snapshot.take(trainer.state())     # in the step: one copy into buffers that are there already
    write(copy, folder)                       # later, elsewhere: rank_0003.safetensors, then rank_0003.done
    read(folder, like=copy)                   # by the rank that puts the checkpoint together: all ranks' states

The one idea: the step pays for a copy and nothing else; a rank's file counts only when its marker is there, and the
marker says how long the file is and what its digest is. Plain safetensors and JSON, so a half-written one can't do
harm.

Cost: as much memory as the state. What it does not do: wait for anyone (`harness.store`).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from ckpt_tool.core.extras import from_json, to_json
from ckpt_tool.errors import CorruptFile, Incomplete
from ckpt_tool.harness.pieces import Coordinates, RankState, TensorPiece
from ckpt_tool.harness.saving.fault_point import fault_point

UNFINISHED = "E1536"
DAMAGED = "E1537"


class Snapshot:
    """Buffers on the CPU, made at the first save and filled again at every later one; pinned where the state is on a
    GPU."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def take(self, state: RankState) -> RankState:
        """A copy of the state that the trainer can't change any more."""
        tensors = [piece.tensor.detach() for piece in state.pieces]
        if [(t.shape, t.dtype) for t in tensors] != [(b.shape, b.dtype) for b in self._buffers]:
            self._buffers = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.synchronize()
        pieces = [piece._replace(tensor=b) for piece, b in zip(state.pieces, self._buffers, strict=True)]
        return RankState(state.layout, state.shape, state.at, pieces, json.loads(json.dumps(state.scalars)))


def write(state: RankState, folder: Path) -> None:
    """`rank_NNNN.safetensors` and, when it is whole, `rank_NNNN.done`."""
    facts = {
        "at": asdict(state.at),
        "scalars": to_json(state.scalars),
        "pieces": [[p.name, p.state, p.shape, p.offset, p.box, p.flat, p.replica] for p in state.pieces],
    }
    tensors = {str(number): piece.tensor.contiguous() for number, piece in enumerate(state.pieces)}
    data = save(tensors, {"facts": json.dumps(facts)})
    name = f"rank_{state.at.rank:04d}"
    with (folder / f"{name}.safetensors").open("wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        fault_point("spool")
        file.write(data[len(data) // 2 :])
    fault_point("rank-done")
    marker = {"size": len(data), "digest": hashlib.blake2b(data, digest_size=16).hexdigest()}
    put(folder / f"{name}.done", json.dumps(marker))


def done(folder: Path) -> set[int]:
    """The ranks whose markers are there."""
    return {int(path.stem.removeprefix("rank_")) for path in folder.glob("rank_*.done")}


def read(folder: Path, world: int, like: RankState) -> list[RankState]:
    """Every rank's state. like: of any rank of the job, for the layout and the model.

    Raises Incomplete E1536 (ranks without a marker), CorruptFile E1537 (a file that is not as its marker says).
    """
    missing = sorted(set(range(world)) - done(folder))
    if missing:
        raise Incomplete(
            f"{len(missing)} of {world} ranks did not finish: {', '.join(map(str, missing[:10]))}",
            code=UNFINISHED,
            path=str(folder),
            hint="the save was cut off: take the checkpoint before it",
        )
    return [_read(folder, rank, like) for rank in range(world)]


def put(path: Path, text: str) -> None:
    """A file that is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.rename(path)


def _read(folder: Path, rank: int, like: RankState) -> RankState:
    name = f"rank_{rank:04d}"
    marker = json.loads((folder / f"{name}.done").read_text())
    data = (folder / f"{name}.safetensors").read_bytes()
    if (len(data), hashlib.blake2b(data, digest_size=16).hexdigest()) != (marker["size"], marker["digest"]):
        raise CorruptFile(
            f"{len(data)} bytes are not the {marker['size']} that the rank's marker speaks of",
            code=DAMAGED,
            path=str(folder / f"{name}.safetensors"),
            hint="the file was changed after it was written",
        )
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    facts: dict[str, Any] = json.loads(header["__metadata__"]["facts"])
    tensors = load(data)
    pieces = []
    for number, (piece, state, shape, offset, box, flat, replica) in enumerate(facts["pieces"]):
        span = None if flat is None else (int(flat[0]), int(flat[1]))
        values = tensors[str(number)]
        pieces.append(TensorPiece(piece, state, tuple(shape), tuple(offset), tuple(box), values, span, replica))
    position = facts["at"]
    position["chunks"] = tuple(tuple(chunk) for chunk in position["chunks"])
    return RankState(like.layout, like.shape, Coordinates(**position), pieces, from_json(facts["scalars"]))
