"""A DCP checkpoint of very many ranks: torch's own `.metadata` over files that are one file.

    python tests/bench/dcp_shape.py /tmp/dcp --ranks 1024

The shape is a Llama 70B in fp32 with both moments of AdamW, cut along dim 0 over all ranks (FSDP2): 2,169 tensors are
2.2 million boxes, and a `.metadata` of some 300 MB. Cut evenly, of zeros, every rank writes the same bytes: so the file
is written once, its values as holes, and every other rank's is a link to it. 20 MB of disk.

`.metadata` is pickled from torch's classes as `FileSystemWriter.finish` does: rank 0 gathers the plans, then the
results, so that texts and sizes are shared within one rank's and not between them.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

LAYERS, HIDDEN, WIDTH, KEYS, WORDS = 80, 8192, 28672, 1024, 131072  # words: of Llama 3, filled up to what ranks divide
STATES = ("exp_avg", "exp_avg_sq")

Shape = tuple[int, ...]


class Item(NamedTuple):
    """A rank's part of a tensor. at, length: bytes in the rank's file."""

    fqn: str
    path: tuple[str, ...]
    shape: Shape
    at: int
    length: int


def parameters(layers: int = LAYERS) -> Iterator[tuple[str, Shape]]:
    yield "embed_tokens.weight", (WORDS, HIDDEN)
    for i in range(layers):
        at = f"layers.{i}"
        for name, rows in (("q_proj", HIDDEN), ("k_proj", KEYS), ("v_proj", KEYS), ("o_proj", HIDDEN)):
            yield f"{at}.self_attn.{name}.weight", (rows, HIDDEN)
        for name, rows, columns in (
            ("gate_proj", WIDTH, HIDDEN),
            ("up_proj", WIDTH, HIDDEN),
            ("down_proj", HIDDEN, WIDTH),
        ):
            yield f"{at}.mlp.{name}.weight", (rows, columns)
        yield f"{at}.input_layernorm.weight", (HIDDEN,)
        yield f"{at}.post_attention_layernorm.weight", (HIDDEN,)
    yield "norm.weight", (HIDDEN,)
    yield "lm_head.weight", (WORDS, HIDDEN)


def write(out: Path, ranks: int, layers: int = LAYERS) -> None:
    """The checkpoint of `ranks` ranks (a power of two, at most 1,024) in the folder `out`."""
    out.mkdir(parents=True)
    items = list(_write_file(out / "__0_0.distcp", ranks, layers))
    for rank in range(1, ranks):
        os.link(out / "__0_0.distcp", out / f"__{rank}_0.distcp")
    with open(out / ".metadata", "wb") as file:
        pickle.dump(_metadata(items, ranks), file)


def _write_file(path: Path, ranks: int, layers: int) -> Iterator[Item]:
    """One rank's file, its values as holes."""
    known: dict[Shape, bytes] = {}
    with open(path, "wb") as file:
        for name, shape in parameters(layers):
            roads = [("model", name), *(("optim", "state", name, state) for state in STATES)]
            for road in roads:
                part = (shape[0] // ranks, *shape[1:])
                if part not in known:
                    made = io.BytesIO()
                    torch.save(torch.zeros(part), made)
                    known[part] = made.getvalue()
                at = file.tell()
                _write_sparse(file, known[part])
                yield Item(".".join(road), road, shape, at, len(known[part]))


def _write_sparse(file: Any, raw: bytes) -> None:
    """The bytes, but for zeros in their middle."""
    head = len(raw[: len(raw) // 2].rstrip(b"\0"))
    tail = len(raw[head:].lstrip(b"\0"))
    file.write(raw[:head])
    file.seek(len(raw) - head - tail, 1)
    file.write(raw[len(raw) - tail :])


def _metadata(items: list[Item], ranks: int) -> Metadata:
    chunks: dict[str, list[ChunkStorageMetadata]] = {item.fqn: [] for item in items}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for rank in range(ranks):
        results, file = [], f"__{rank}_0.distcp"
        for item in items:
            sizes = torch.Size((item.shape[0] // ranks, *item.shape[1:]))
            offsets = torch.Size((rank * sizes[0], *(0,) * (len(sizes) - 1)))
            chunks[item.fqn].append(ChunkStorageMetadata(offsets, sizes))
            info = _StorageInfo(file, item.at, item.length)
            results.append((MetadataIndex(item.fqn, offsets, rank), info))
        stored.update(pickle.loads(pickle.dumps(results)))  # as it comes from the rank
    tensors: dict[str, Any] = {
        item.fqn: TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), torch.Size(item.shape), pickle.loads(pickle.dumps(chunks[item.fqn]))
        )
        for item in items
    }
    return Metadata(
        tensors, {item.fqn: item.path for item in items}, stored, StorageMeta(checkpoint_id="run", save_id="1"), "1.0.0"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=1024)
    given = parser.parse_args()
    write(given.out, given.ranks)
    print(f"{(given.out / '.metadata').stat().st_size} bytes of .metadata")


if __name__ == "__main__":
    main()
