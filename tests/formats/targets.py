"""What the torch formats' tests share: a slow executor of targets, values from torch, and readers that are not ours.

`write` puts a Target on disk byte by byte as its documentation says, sharing nothing with `ckpt_tool.run`; `gather`
reads a logical tensor box by box into NumPy.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.dtype import from_torch
from ckpt_tool.core.hints import Hints
from ckpt_tool.core.layout import Layout, place
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.target import Target, Wanted, WantedTensor
from ckpt_tool.core.tensor import LogicalTensor, TensorKey
from ckpt_tool.storage.source import Tree

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, shape (*its shape, itemsize)."""
    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
    return raw.reshape(*tensor.shape, tensor.element_size())


def wanted_of(
    tensors: Mapping[TensorKey, torch.Tensor], paths: Mapping[TensorKey, Any] | None = None, **rest: Any
) -> Wanted:
    """A Wanted of these torch tensors."""
    items = []
    for key, tensor in tensors.items():
        dtype = from_torch(str(tensor.dtype))
        assert dtype is not None
        items.append(WantedTensor(key, tuple(tensor.shape), dtype, (paths or {}).get(key, ())))
    return Wanted(tuple(items), **_typed(rest))


def rewanted(catalog: Catalog, **rest: Any) -> Wanted:
    """What `convert` would want of a catalog: everything, where it was."""
    items = tuple(WantedTensor(t.key, t.shape, t.dtype, t.path) for t in catalog.tensors.values())
    given = {"extras": catalog.extras, "hints": catalog.hints, "source_format": catalog.format}
    return Wanted(items, **_typed(given | rest))


def _typed(given: dict[str, Any]) -> dict[str, Any]:
    """Hints may be given in their plain form."""
    hints = given.get("hints")
    return {**given, "hints": Hints(hints)} if isinstance(hints, dict) else given


def along_rows(wanted: Wanted, *, policy: str = "dtensor", **degrees: int) -> Layout:
    """Every tensor cut along dim 0 over all mesh dims, uneven where it does not divide (FSDP2's rule)."""
    mesh = Mesh.of(**degrees)
    names = [name for name, _ in mesh.dims]
    cut = {t: [(0, names)] if names and t.shape else [] for t in wanted.tensors}
    return Layout(mesh, tuple(place(t.shape, cut[t], mesh, policy=policy) for t in wanted.tensors))


def write(target: Target, folder: Path, values: Sequence[np.ndarray]) -> None:
    """Lay the target out below `folder`. values[i]: `bits` of tensor i. Holes must be disjoint and inside the file."""
    for file in target.files:
        assert file.copy_of is None
        data = np.zeros(file.size, np.uint8)
        taken = np.zeros(file.size, bool)

        def put(
            offset: int, raw: np.ndarray, data: np.ndarray = data, taken: np.ndarray = taken, name: str = file.path
        ) -> None:
            assert offset + raw.size <= data.size, f"{name}: {offset} + {raw.size} leaves the file"
            assert not taken[offset : offset + raw.size].any(), f"{name}: two things lie at {offset}"
            data[offset : offset + raw.size] = raw
            taken[offset : offset + raw.size] = True

        for offset, piece in file.literals:
            put(offset, np.frombuffer(piece, np.uint8))
        stored = []
        for array in file.arrays:
            where = tuple(slice(o, o + n) for o, n in zip(array.box.offset, array.box.shape, strict=True))
            stored.append(np.ascontiguousarray(values[array.tensor][where]).reshape(-1))
            put(array.offset, stored[-1])
        for patch in file.patches:
            assert patch.kind == "crc32"
            if patch.span is None:
                crc = zlib.crc32(stored[patch.of].tobytes())
            else:
                crc = zlib.crc32(data[patch.span[0] : sum(patch.span)].tobytes())
            data[patch.offset : patch.offset + 4] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.tobytes())


def gather(tree: Tree, tensor: LogicalTensor) -> np.ndarray:
    """The whole tensor, shape (*its shape, itemsize), put together from the first replica of each box."""
    size = tensor.dtype.bits // 8
    out = np.full((*tensor.shape, size), 0xEE, np.uint8)
    for chunk in tensor.chunks:
        if chunk.replica or not chunk.box.numel:
            continue
        start, strides = chunk.region()
        last = start + sum((n - 1) * s for n, s in zip(chunk.box.shape, strides, strict=True))
        raw = np.frombuffer(tree.read(chunk.array.path, chunk.array.offset, (last + 1) * size), np.uint8)
        view = np.lib.stride_tricks.as_strided(
            raw[start * size :], (*chunk.box.shape, size), (*(s * size for s in strides), 1)
        )
        out[tuple(slice(o, o + n) for o, n in zip(chunk.box.offset, chunk.box.shape, strict=True))] = view
    return out


def values_of(tree: Tree, catalog: Catalog) -> list[np.ndarray]:
    return [gather(tree, tensor) for tensor in catalog.tensors.values()]


def ramp(shape: Sequence[int], dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """start, start + 1, ... of `shape`: a value out of place shows."""
    count = torch.arange(start, start + prod(shape))
    if dtype == torch.bool:
        return (count % 3 == 0).reshape(tuple(shape))
    count = count % 100 if dtype.itemsize == 1 else count
    return (count.float() if dtype.is_floating_point else count).to(dtype).reshape(tuple(shape))
