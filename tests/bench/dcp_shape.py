"""A DCP checkpoint of very many ranks: torch's own `.metadata` over files that are one file.

    python tests/bench/dcp_shape.py /tmp/dcp --ranks 1024
    python tests/bench/dcp_shape.py /tmp/dist --ranks 1024 --keys torch_dist     Megatron's keys, layers in one tensor
    python tests/bench/dcp_shape.py /tmp/fsdp --ranks 1024 --keys megatron-fsdp  the gated fc1 in its halves

The shape is a Llama 70B in fp32 with both moments of AdamW, cut along dim 0 over all ranks (FSDP2): 2,169 tensors are
2.2 million boxes, and a `.metadata` of some 300 MB. Cut evenly, of zeros, every rank writes the same bytes: so the file
is written once, its values as holes, and every other rank's is a link to it. 20 MB of disk.

`.metadata` is pickled from torch's classes as `FileSystemWriter.finish` does: rank 0 gathers the plans, then the
results, so that texts and sizes are shared within one rank's and not between them.
"""

from __future__ import annotations

import argparse
import io
import json
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

# words: of Llama 3, filled up to what ranks divide
LAYERS = 80
HIDDEN = 8192
WIDTH = 28672
KEYS = 1024
WORDS = 131072
STATES = ("exp_avg", "exp_avg_sq")

Shape = tuple[int, ...]


class Item(NamedTuple):
    """A rank's part of a tensor of `shape`: an equal one along the dim behind those of `lead`, where it begins. at,
    length: bytes in the rank's file."""

    fqn: str
    path: tuple[str, ...]
    lead: Shape
    shape: Shape
    at: int
    length: int

    def box(self, rank: int, ranks: int) -> tuple[Shape, Shape]:
        """(offset, extent) of a rank's."""
        dim = len(self.lead)
        rows = self.shape[dim] // ranks
        rest = self.shape[dim + 1 :]
        return (*self.lead, rank * rows, *(0 for _ in rest)), (*(1 for _ in self.lead), rows, *rest)


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


def dcp_keys(layers: int) -> Iterator[tuple[tuple[str, ...], Shape, Shape]]:
    """(path, lead, shape) of every tensor."""
    for name, shape in parameters(layers):
        yield from ((road, (), shape) for road in (("model", name), *(("optim", "state", name, s) for s in STATES)))


_MODULES = (
    ("self_attention.linear_proj.weight", (HIDDEN, HIDDEN)),
    ("self_attention.linear_qkv.weight", (HIDDEN + 2 * KEYS, HIDDEN)),
    ("self_attention.linear_qkv.layer_norm_weight", (HIDDEN,)),
    ("mlp.linear_fc2.weight", (HIDDEN, WIDTH)),
    ("mlp.linear_fc1.layer_norm_weight", (HIDDEN,)),
)
_ENDS = (("embedding.word_embeddings.weight", (WORDS, HIDDEN)), ("decoder.final_layernorm.weight", (HIDDEN,)))


def torch_dist_keys(layers: int) -> Iterator[tuple[tuple[str, ...], Shape, Shape]]:
    """The same of Megatron's torch_dist: all layers of a module are one tensor."""
    for front in ("", *(f"optimizer.state.{state}." for state in STATES)):
        yield from (((f"{front}{name}",), (), shape) for name, shape in _ENDS)
        for name, shape in (*_MODULES, ("mlp.linear_fc1.weight", (2 * WIDTH, HIDDEN))):
            key = f"{front}decoder.layers.{name}"
            yield from (((key,), (i,), (layers, *shape)) for i in range(layers))


def fsdp_keys(layers: int) -> Iterator[tuple[tuple[str, ...], Shape, Shape]]:
    """The same of Megatron-FSDP: a fc1's gate and up apart."""
    halves = tuple((f"mlp.linear_fc1.weight_{half}", (WIDTH, HIDDEN)) for half in "wv")
    every = [*_ENDS]
    every += [(f"decoder.layers.{i}.{name}", shape) for i in range(layers) for name, shape in (*_MODULES, *halves)]
    for name, shape in every:
        yield ("model", f"module.{name}"), (), shape
        for state in STATES:
            yield ("optimizer", "state", f"module.module.module.{name}", state), (), shape


SPELLED = {"dcp": dcp_keys, "torch_dist": torch_dist_keys, "megatron-fsdp": fsdp_keys}


def write(out: Path, ranks: int, layers: int = LAYERS, keys: str = "dcp") -> None:
    """The checkpoint of `ranks` ranks (a power of two, at most 1,024) in the folder `out`."""
    out.mkdir(parents=True)
    items = list(_write_file(out / "__0_0.distcp", ranks, layers, keys))
    for rank in range(1, ranks):
        os.link(out / "__0_0.distcp", out / f"__{rank}_0.distcp")
    with open(out / ".metadata", "wb") as file:
        pickle.dump(_metadata(items, ranks), file)
    if keys == "torch_dist":
        torch.save({"iteration": 1}, out / "common.pt")
        (out / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def _write_file(path: Path, ranks: int, layers: int, keys: str) -> Iterator[Item]:
    """One rank's file, its values as holes."""
    known: dict[Shape, bytes] = {}
    with open(path, "wb") as file:
        for road, lead, shape in SPELLED[keys](layers):
            item = Item(".".join(road), road, lead, shape, file.tell(), 0)
            part = item.box(0, ranks)[1]
            if part not in known:
                made = io.BytesIO()
                torch.save(torch.zeros(part), made)
                known[part] = made.getvalue()
            _write_sparse(file, known[part])
            yield item._replace(length=len(known[part]))


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
        results = []
        file = f"__{rank}_0.distcp"
        for item in items:
            offsets, sizes = map(torch.Size, item.box(rank, ranks))
            chunks[item.fqn].append(ChunkStorageMetadata(offsets, sizes))
            info = _StorageInfo(file, item.at, item.length)
            results.append((MetadataIndex(item.fqn, offsets, rank), info))
        stored.update(pickle.loads(pickle.dumps(results)))  # as it comes from the rank
    tensors: dict[str, Any] = {
        fqn: TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), torch.Size(item.shape), pickle.loads(pickle.dumps(chunks[fqn]))
        )
        for fqn, item in {item.fqn: item for item in items}.items()
    }
    return Metadata(
        tensors, {item.fqn: item.path for item in items}, stored, StorageMeta(checkpoint_id="run", save_id="1"), "1.0.0"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--keys", choices=SPELLED, default="dcp")
    given = parser.parse_args()
    write(given.out, given.ranks, keys=given.keys)
    print(f"{(given.out / '.metadata').stat().st_size} bytes of .metadata")


if __name__ == "__main__":
    main()
