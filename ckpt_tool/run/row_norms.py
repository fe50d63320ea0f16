"""The rows of a matrix by their norms, and how well an arrangement of the rows in parts explains them.

Parts of a fused weight (query, key, value; gate, up) are trained separately, and their rows differ in norm. If each row
is labelled with the part that it belongs to, the labels explain a share of the norms' variance:

    [q q q q k k v v]  laid out as stated     labels explain most of it
    [q k v q k v ...]  laid out otherwise     the labels of the right arrangement explain it, the stated ones do not

Norms are compared as logarithms. Cost: one read of the tensor. What it does not do: decide (`auditing.fused`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.storage.source import Tree

PIECE = 8 << 20  # bytes of a tensor that are read at a time
Norms = np.ndarray[Any, np.dtype[np.float64]]


def row_norms(catalog: Catalog, tree: Tree, key: TensorKey) -> Norms:
    """The logarithm of the norm of each row of a matrix; rows of zeros count as the smallest other norm."""
    tensor = OpenCatalog(tree, catalog, key.state)[key.name]
    rows, columns = tensor.shape
    step = max(1, PIECE // max(1, columns * 4))
    parts = [
        np.sqrt(np.square(tensor[at : at + step].numpy().astype(np.float64)).sum(axis=1)) for at in range(0, rows, step)
    ]
    norms: Norms = np.concatenate(parts)
    least = norms[norms > 0].min() if (norms > 0).any() else 1.0
    logarithms: Norms = np.log(np.maximum(norms, least))
    return logarithms


def explained(norms: Norms, labels: Sequence[int]) -> float:
    """The share of the norms' variance that is between the parts, 0 to 1 (eta squared). labels: the part of each
    row."""
    total = float(np.square(norms - norms.mean()).sum())
    if total <= 0:
        return 0.0
    kinds = np.asarray(labels)
    between = sum(
        float((kinds == kind).sum() * (norms[kinds == kind].mean() - norms.mean()) ** 2) for kind in np.unique(kinds)
    )
    return between / total


def sloped(norms: Norms) -> float:
    """The share of the variance that a straight line over the rows explains, 0 to 1."""
    at = np.arange(len(norms), dtype=np.float64)
    spread = float(np.square(norms - norms.mean()).sum() * np.square(at - at.mean()).sum())
    return float(((norms - norms.mean()) * (at - at.mean())).sum()) ** 2 / spread if spread > 0 else 0.0


def apart(norms: Norms, labels: Sequence[int]) -> float:
    """Mean norm of part 0 minus that of part 1, in standard deviations within the parts (Cohen's d)."""
    kinds = np.asarray(labels)
    one = norms[kinds == 0]
    other = norms[kinds == 1]
    spread = float(np.sqrt((one.var() + other.var()) / 2))
    return float(one.mean() - other.mean()) / spread if spread > 0 else 0.0


def equal_rows(catalog: Catalog, tree: Tree, one: TensorKey, other: TensorKey, samples: int = 16) -> bool:
    """Are the rows of two tensors equal, judged by a few samples? False proves a difference, True proves nothing."""
    tensors = [OpenCatalog(tree, catalog, key.state)[key.name] for key in (one, other)]
    rows = tensors[0].shape[0]
    for at in sorted({i * (rows - 1) // max(1, samples - 1) for i in range(samples)}):
        first, second = (tensor[at].numpy() for tensor in tensors)
        if first.astype(np.float64).tobytes() != second.astype(np.float64).tobytes():
            return False
    return True
