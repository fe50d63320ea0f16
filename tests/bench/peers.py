"""What a user would run without this tool: each peer as one small command, so that it is measured as a whole process.

    python tests/bench/peers.py cat SRC OUT N              tp ranks' safetensors -> N ranks: load all, torch.cat, save
    python tests/bench/peers.py dcp-to-torch SRC OUT       torch.distributed.checkpoint.format_utils
    python tests/bench/peers.py dcp-to-dcp SRC OUT         the same there and back: torch's offline road to new ranks
    python tests/bench/peers.py dcp-to-safetensors SRC OUT
    python tests/bench/peers.py consolidate SRC OUT        consolidate_safetensors_files
    python tests/bench/peers.py transformers SRC OUT SIZE  from_pretrained, save_pretrained
    python tests/bench/peers.py contiguous SRC OUT         torch.load, contiguous(), save_file

and what the benchmark needs from the real libraries: a source that only they write, and judges that are not ours:

    python tests/bench/peers.py build-hf-shards SRC OUT   4 gloo ranks, HuggingFaceStorageWriter, FSDP2's cut
    python tests/bench/peers.py build-transposed SRC OUT  a torch file whose matrices are stored as (inputs, outputs)
    python tests/bench/peers.py same-hf A B               two safetensors folders hold the same bytes
    python tests/bench/peers.py same-tp HF OUT N          N rank files are the torch.chunk of the whole tensors
    python tests/bench/peers.py same-dcp TRAINING OUT  torch.distributed.checkpoint loads OUT: the values are TRAINING's
    python tests/bench/peers.py same-torch TRAINING FILE  torch.load of FILE: the values are TRAINING's

`pretrained_peers.py` has those of the jobs that change names, `adapter_peers.py` those of folding, `merge_peers.py`
those of merging models. A judge prints the bytes that it compared and ends with 1 where one differs. Nothing here
imports ckpt_tool.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

import adapter_peers
import merge_peers
import pretrained_peers

# Megatron's cut, spelled out here a second time: columns along dim 0, rows along dim 1, the rest on every rank.
_COLUMN = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj|embed_tokens)\.weight$|^lm_head\.weight$")
_ROW = re.compile(r"\.(o_proj|down_proj)\.weight$")

Tensors = dict[str, torch.Tensor]


def cut_dim(name: str) -> int | None:
    return 0 if _COLUMN.search(name) else 1 if _ROW.search(name) else None


def rank_files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("model.tp*.safetensors"))


# -- the peers --------------------------------------------------------------------------------------------------------


def cat(src: str, out: str, ranks: str) -> None:
    """The script that everyone writes: load every rank, cat, chunk, save every rank."""
    loaded = [load_file(path) for path in rank_files(src)]
    whole: Tensors = {}
    for name in loaded[0]:
        dim = cut_dim(name)
        whole[name] = loaded[0][name] if dim is None else torch.cat([rank[name] for rank in loaded], dim)
    os.makedirs(out)
    count = int(ranks)
    for rank in range(count):
        part = {
            name: tensor if (dim := cut_dim(name)) is None else tensor.chunk(count, dim)[rank].contiguous()
            for name, tensor in whole.items()
        }
        save_file(part, f"{out}/model.tp{rank:02d}.safetensors")


def dcp_to_torch(src: str, out: str) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(src, out)


def dcp_to_dcp(src: str, out: str) -> None:
    """Through one torch file and back: one rank's files, whatever the ranks that will load them."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    middle = f"{out}.pt"
    try:
        dcp_to_torch_save(src, middle)
        torch_save_to_dcp(middle, out)
    finally:
        Path(middle).unlink(missing_ok=True)


def dcp_to_safetensors(src: str, out: str) -> None:
    """Through a torch file, then the model's tensors alone to safetensors."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    middle = f"{out}.pt"
    try:
        dcp_to_torch_save(src, middle)
        state = torch.load(middle, weights_only=True)
    finally:
        Path(middle).unlink(missing_ok=True)
    os.makedirs(out)
    save_file(
        {name: tensor.contiguous() for name, tensor in _model(state)}, f"{out}/model.safetensors", {"format": "pt"}
    )


def consolidate(src: str, out: str) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    names: set[str] = set()
    for path in Path(src).glob("*.safetensors"):
        with safe_open(path, "pt") as f:
            names.update(f.keys())
    os.makedirs(out)
    consolidate_safetensors_files(src, out, dict.fromkeys(sorted(names), 1))


def transformers(src: str, out: str, size: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(src, dtype=torch.bfloat16)
    model.save_pretrained(out, max_shard_size=size)


def contiguous(src: str, out: str) -> None:
    """The script that everyone writes to turn the Linear weights of one system into another's."""
    state = torch.load(src, weights_only=True)
    os.makedirs(out)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, f"{out}/model.safetensors")


# -- sources ----------------------------------------------------------------------------------------------------------


def build_transposed(src: str, out: str) -> None:
    """Linear weights as Paddle, TensorFlow and GPT-2's Conv1D lay them out, seen through `t()`. Of the old kind of
    torch file, which has no checksums of its arrays, as the files of those systems have none."""
    state = {}
    for name, tensor in _read(src):
        turned = tensor.dim() == 2 and "embed_tokens" not in name
        state[name] = tensor.t().contiguous().t() if turned else tensor
    torch.save(state, out, _use_new_zipfile_serialization=False)


def build_hf_shards(src: str, out: str, world: str = "4") -> None:
    import torch.multiprocessing as mp

    mp.spawn(_save_rank, (int(world), src, out), nprocs=int(world))


def _save_rank(rank: int, world: int, src: str, out: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, Any] = {}
    for path in sorted(Path(src).glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            for name in f.keys():
                part = f.get_slice(name)
                shape = part.get_shape()
                step = -(-shape[0] // world)
                local = part[rank * step : min((rank + 1) * step, shape[0])].contiguous()
                stride = torch.empty(shape, device="meta").stride()
                state[name] = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size(shape), stride=stride)
    writer = dcp.HuggingFaceStorageWriter(out, save_distributed=True, enable_consolidation=False)
    dcp.save(state, storage_writer=writer)
    dist.destroy_process_group()


# -- judges -----------------------------------------------------------------------------------------------------------


def _read(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            for name in f.keys():
                yield name, f.get_tensor(name)


def _training(folder: str) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(state, name, values) of a `sharded` folder of one rank."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as f:
            for name in f.keys():
                yield path.name.split(".")[0], name, f.get_tensor(name)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: the same shape, dtype and bytes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def _verdict(compared: int, wrong: list[str]) -> None:
    print(compared)
    if wrong:
        raise SystemExit(f"{len(wrong)} tensors differ: {', '.join(wrong[:5])}")


def same_hf(a: str, b: str) -> None:
    left = dict(_read(a))
    compared = 0
    wrong = []
    for name, tensor in _read(b):
        compared += tensor.nbytes
        if name not in left or not _same(tensor, left.pop(name)):
            wrong.append(name)
    _verdict(compared, wrong + list(left))


def same_tp(hf: str, out: str, ranks: str) -> None:
    files = rank_files(out)
    if len(files) != int(ranks):
        raise SystemExit(f"{len(files)} rank files, want {ranks}")
    handles = [safe_open(path, "pt").__enter__() for path in files]
    names = {name for handle in handles for name in handle.keys()}
    compared = 0
    wrong = []
    for name, tensor in _read(hf):
        dim = cut_dim(name)
        parts = [tensor] * len(files) if dim is None else tensor.chunk(len(files), dim)
        for handle, part in zip(handles, parts, strict=True):
            compared += part.nbytes
            if name not in names or not _same(handle.get_tensor(name), part):
                wrong.append(name)
        names.discard(name)
    _verdict(compared, wrong + sorted(names))


def same_dcp(training: str, out: str) -> None:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=FileSystemReader(out), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    _same_state(training, state)


def same_torch(training: str, file: str) -> None:
    _same_state(training, torch.load(file, weights_only=True, mmap=True))


def _same_state(training: str, state: Mapping[str, Any]) -> None:
    have = {(kind, name): tensor for kind, name, tensor in _leaves(state)}
    compared = 0
    wrong = []
    for kind, name, tensor in _training(training):
        found = have.pop((kind, name), None)
        compared += tensor.nbytes
        if found is None or not _same(found, tensor):
            wrong.append(f"{name} [{kind}]")
    _verdict(compared, wrong + [f"{name} [{kind}]" for kind, name in have])


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(state, parameter, tensor) in a nested training state, however it nests: the name is what looks like one of
    Llama's, the state is what follows it (`exp_avg`) or "model"."""
    if isinstance(value, torch.Tensor):
        joined = ".".join(path)
        found = re.search(r"(model\.(?:embed_tokens|norm|layers\.\d+)\..*?weight|lm_head\.weight)(?:\.(\w+))?$", joined)
        if found is None:
            raise SystemExit(f"a tensor without a place: {joined}")
        kind = found[2] or next((s for s in ("exp_avg_sq", "exp_avg", "step", "master") if s in path), "model")
        yield kind, found[1], value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))


def _model(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for kind, name, tensor in _leaves(state):
        if kind == "model":
            yield name, tensor


COMMANDS = {
    "cat": cat,
    "dcp-to-torch": dcp_to_torch,
    "dcp-to-dcp": dcp_to_dcp,
    "dcp-to-safetensors": dcp_to_safetensors,
    "consolidate": consolidate,
    "transformers": transformers,
    "build-hf-shards": build_hf_shards,
    "build-transposed": build_transposed,
    "contiguous": contiguous,
    "same-hf": same_hf,
    "same-tp": same_tp,
    "same-dcp": same_dcp,
    "same-torch": same_torch,
    **pretrained_peers.COMMANDS,
    **adapter_peers.COMMANDS,
    **merge_peers.COMMANDS,
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        raise SystemExit(json.dumps(sorted(COMMANDS)))
    COMMANDS[sys.argv[1]](*sys.argv[2:])
