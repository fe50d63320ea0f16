"""`sharded`, by its specification (`systems/ckpt/sharded/format.py`) alone: safetensors, JSON and hashlib.

    model.tp00_dp00.safetensors, model.tp01_dp00.safetensors, ..., master.tp00_dp00.safetensors, ..., ckpt.index.json

The one idea: each rank writes the boxes that it holds. ZeRO's flat pieces are no boxes; of those the data ranks of one
box write rows: rank r of n has rows [r*N/n, (r+1)*N/n) of the box's N, so a short tensor's rows are on some ranks only.

Cost: one pass. What it does not do: digests (the index says that none was taken).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ckpt_tool.core.box import Box
from ckpt_tool.harness.pieces import RankState, TensorPiece
from ckpt_tool.harness.saving.fault_point import fault_point
from ckpt_tool.harness.saving.whole import HARNESS, WholeState, region

_DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
_ORDER = ("tp", "pp", "ep", "dp")
NO_DIGEST = "0" * 32


def write(whole: WholeState, folder: Path) -> None:
    """Every rank's files, then the index."""
    mesh = mesh_of(whole.layout)
    files = _files(whole, mesh)
    placements, tensors = _tensors(whole, mesh)
    extras = {"iteration": whole.scalars["step"], HARNESS: dict(whole.scalars)}
    save = digits(canonical([mesh, extras, {path: file["boxes"] for path, file in files.items()}]))

    for path, file in _write_files(files):
        metadata = {
            "format": "pt",
            "ckpt_format": "sharded",
            "ckpt_version": "1",
            "mesh": canonical(mesh),
            "save": save,
            "state": file["state"],
            "rank": canonical(file["rank"]),
            "boxes": file["text"],
        }
        save_file(file["arrays"], folder / path, metadata)

    index = {
        "ckpt_format": "sharded",
        "ckpt_version": 1,
        "schema_version": 1,
        "mesh": mesh,
        "extras": extras,
        "save": save,
        "fallbacks": [],
        "sidefiles": ["config.json"],
        "placements": placements,
        "tensors": tensors,
        "source": {"format": "sharded", "hints": {}},
        "files": [_list_file(folder, path, file) for path, file in files.items()],
    }
    (folder / "config.json").write_text(json.dumps(whole.config, indent=2))
    fault_point("index")
    (folder / "ckpt.index.json").write_text(json.dumps(index))


def _list_file(folder: Path, path: str, file: dict[str, Any]) -> dict[str, Any]:
    """What the index says of a file."""
    return {
        "path": path,
        "size": (folder / path).stat().st_size,
        "state": file["state"],
        "rank": file["rank"],
        "boxes": file["boxes"],
    }


def _files(whole: WholeState, mesh: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Path -> state, rank, arrays by name, their boxes as text, and the hash of that: one file a state and rank."""
    files: dict[str, dict[str, Any]] = {}
    for rank in whole.ranks:
        position = coordinates(rank, mesh)
        label = "_".join(f"{dim}{position[dim]:02d}" for dim in mesh)
        boxes_of: dict[str, dict[str, Box]] = {}  # by state and name
        for piece in rank.pieces:
            box = _part(piece, rank)
            of_state = boxes_of.setdefault(piece.state, {})
            if box is not None:
                of_state[piece.name] = box
        for state, box_of in boxes_of.items():
            arrays = {name: whole.tensors[state, name][region(box)].contiguous() for name, box in box_of.items()}
            shapes = {name: list(whole.tensors[state, name].shape) for name in box_of}
            text = canonical({name: {"offset": list(b.offset), "shape": shapes[name]} for name, b in box_of.items()})
            rows = sorted([name, _DTYPES[array.dtype], list(array.shape)] for name, array in arrays.items())
            if arrays:
                path = f"{state}.{label}.safetensors" if label else f"{state}.safetensors"
                files[path] = {"state": state, "rank": position, "arrays": arrays, "text": text}
                files[path]["boxes"] = digits(text + canonical(rows))
    return files


def _tensors(whole: WholeState, mesh: dict[str, int]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """(the distinct placements, state -> name -> what the index says of the tensor)."""
    placements: list[dict[str, Any]] = []
    tensors: dict[str, dict[str, Any]] = {}
    for (kind, name), tensor in whole.tensors.items():
        cut = _placement(whole, kind, name, mesh)
        if cut not in placements:
            placements.append(cut)
        tensors.setdefault(kind, {})[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "digest": NO_DIGEST,
            "placement": placements.index(cut),
        }
    return placements, tensors


def mesh_of(layout: Any) -> dict[str, int]:
    """The mesh of a layout, its dims of size 1 left out; `dp` are the ranks that hold the same experts."""
    sizes = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "dp": layout.dp // layout.ep}
    return {dim: sizes[dim] for dim in _ORDER if sizes[dim] > 1}


def coordinates(rank: RankState, mesh: dict[str, int]) -> dict[str, int]:
    """The rank's place in the mesh."""
    rank_at = rank.at
    layout = rank.layout
    all_dims = {"tp": rank_at.tp, "pp": rank_at.pp, "ep": rank_at.ep, "dp": rank_at.dp // layout.ep}
    return {dim: all_dims[dim] for dim in mesh}


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digits(text: str) -> str:
    """BLAKE2b-128 of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _write_files(files: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The files, with a place to die after half of them."""
    for number, (path, file) in enumerate(files.items()):
        if number == len(files) // 2:
            fault_point("files")
        yield path, file


def _part(piece: TensorPiece, rank: RankState) -> Box | None:
    """The box that the rank writes; None where a short tensor leaves it nothing."""
    if piece.flat is None:
        return Box(piece.offset, piece.box)
    ranks = rank.layout.dp
    dp_rank = rank.at.dp
    if ".experts." in piece.name:
        ranks = ranks // rank.layout.ep
        dp_rank = dp_rank // rank.layout.ep
    rows = piece.box[0]
    row_begin = dp_rank * rows // ranks
    row_end = (dp_rank + 1) * rows // ranks
    offset = (piece.offset[0] + row_begin, *piece.offset[1:])
    return Box(offset, (row_end - row_begin, *piece.box[1:])) if row_end > row_begin else None


def _placement(whole: WholeState, state: str, name: str, mesh: dict[str, int]) -> dict[str, Any]:
    """Which mesh dims cut which tensor dim, derived from the boxes themselves; `at` for what one stage or expert rank
    has."""
    boxes_of: list[tuple[dict[str, int], Box]] = []
    for rank in whole.ranks:
        for piece in rank.pieces:
            box = _part(piece, rank) if (piece.state, piece.name) == (state, name) else None
            if box is not None:
                boxes_of.append((coordinates(rank, mesh), box))

    shape = tuple(whole.tensors[state, name].shape)
    cut: dict[str, Any] = {"shard": []}
    for dim in range(len(shape)):
        is_cut = any(box.shape[dim] < shape[dim] for _, box in boxes_of)
        names = [axis for axis in mesh if is_cut and _moves(boxes_of, axis, dim)]
        if names:
            cut["shard"].append([dim, names])

    fixed_at: dict[str, int] = {}
    for axis in ("pp", "ep"):
        indexes = {position[axis] for position, _ in boxes_of} if axis in mesh else set()
        if len(indexes) == 1:
            fixed_at[axis] = indexes.pop()
    if fixed_at:
        cut["at"] = fixed_at

    uneven = []
    for dim, _ in cut["shard"]:
        if len({box.shape[dim] for _, box in boxes_of}) > 1:
            uneven.append(dim)
    if uneven:
        cut["uneven"] = uneven
    return cut


def _moves(held: list[tuple[dict[str, int], Box]], axis: str, dim: int) -> bool:
    """Does the box move along `dim` when only `axis` changes?"""
    pairs_of: dict[tuple[Any, ...], set[int]] = {}
    for holder, box in held:
        others = tuple((name, number) for name, number in holder.items() if name != axis)
        pairs_of.setdefault(others, set()).add(box.offset[dim])
    return any(len(offsets) > 1 for offsets in pairs_of.values())
