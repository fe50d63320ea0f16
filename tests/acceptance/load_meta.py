"""Meta's own model code opens one shard that `ckpt` wrote, strictly, and gives logits: run by a Python with torch.

    python load_meta.py CODE FOLDER OUT      # CODE: a checkout of meta-llama/llama-models, or of meta-llama/llama

OUT: the logits of tokens 0 to 39, by `torch.save`. fairscale's parallel layers, of one rank, are torch's; nothing moves
to a GPU.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch


def stand_in() -> None:
    """fairscale for one rank."""
    initialize = types.ModuleType("initialize")
    layers = types.ModuleType("layers")

    def linear(inputs: int, outputs: int, bias: bool = True, **_: Any) -> torch.nn.Module:
        return torch.nn.Linear(inputs, outputs, bias=bias)

    def embedding(rows: int, dim: int, **_: Any) -> torch.nn.Module:
        return torch.nn.Embedding(rows, dim)

    initialize.get_model_parallel_world_size = lambda: 1  # type: ignore[attr-defined]
    for name in ("ColumnParallelLinear", "RowParallelLinear"):
        setattr(layers, name, linear)
    for name in ("VocabParallelEmbedding", "ParallelEmbedding"):
        setattr(layers, name, embedding)
    path = "fairscale"
    above = types.ModuleType("fairscale")
    sys.modules[path] = above
    for name in ("nn", "model_parallel"):
        path = f"{path}.{name}"
        module = types.ModuleType(name)
        sys.modules[path] = module
        setattr(above, name, module)
        above = module
    for name, module in (("initialize", initialize), ("layers", layers)):
        sys.modules[f"{path}.{name}"] = module
        setattr(above, name, module)
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def main(code: str, folder: str, out: str) -> None:
    stand_in()
    sys.path.insert(0, code)
    if (Path(code) / "models" / "llama3").is_dir():
        from models.llama3.args import ModelArgs
        from models.llama3.model import Transformer
    else:
        sys.path.insert(0, str(Path(code) / "llama"))
        from model import ModelArgs, Transformer  # the package wants a tokenizer's library
    params = json.loads((Path(folder) / "params.json").read_text())
    model = Transformer(ModelArgs(max_seq_len=64, max_batch_size=1, **params))
    state = torch.load(Path(folder) / "consolidated.00.pth", weights_only=True, mmap=True)
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        torch.save(model.eval()(torch.arange(40)[None], 0), out)


if __name__ == "__main__":
    main(*sys.argv[1:])
