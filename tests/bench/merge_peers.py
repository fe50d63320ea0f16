"""The peer and the judge of merging models: mergekit, and plain torch on whole tensors to check with.

    build-grown HF OUT SEED         a model grown from HF: each weight plus noise of 0.02, bf16
    mergekit METHOD OUT HF GROWN..  mergekit-yaml by the Python that CKPT_MERGEKIT_PYTHON names, arithmetic in fp32
    same-merged METHOD OUT HF GROWN..   OUT is the merge, bit for bit (ties: but for equal magnitudes at a threshold)

METHOD: `linear` (weights 0.3 and 0.7) or `ties` (HF is the base, density 0.5). Commands of `peers.py`. Nothing here
imports ckpt_tool.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

WEIGHTS = (0.3, 0.7)
DENSITY = 0.5


def build_grown(hf: str, out: str, seed: str) -> None:
    generator = torch.Generator().manual_seed(int(seed))
    Path(out).mkdir()
    for file in sorted(Path(hf).iterdir()):
        if file.suffix != ".safetensors":
            shutil.copy(file, out)
            continue
        with safe_open(file, "pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}
        for name, tensor in tensors.items():
            tensors[name] = (tensor.float() + torch.randn(tensor.shape, generator=generator) * 0.02).bfloat16()
        save_file(tensors, Path(out) / file.name, {"format": "pt"})


def mergekit(method: str, out: str, hf: str, *grown: str) -> None:
    models = [hf, *grown] if method == "linear" else list(grown)
    own = (
        [{"weight": w} for w in WEIGHTS] if method == "linear" else [{"weight": 1.0, "density": DENSITY}] * len(models)
    )
    config = {
        "merge_method": method,
        "dtype": "float32",
        "out_dtype": "bfloat16",
        "models": [{"model": model, "parameters": each} for model, each in zip(models, own, strict=True)],
        **({"base_model": hf} if method == "ties" else {}),
    }
    file = Path(f"{out}.yaml")
    file.write_text(json.dumps(config))
    python = os.environ.get("CKPT_MERGEKIT_PYTHON", sys.executable)
    options = ["--no-copy-tokenizer", "--no-write-model-card", "--quiet"]
    os.execv(python, [python, "-m", "mergekit.scripts.run_yaml", str(file), out, *options])


def same_merged(method: str, out: str, hf: str, *grown: str) -> None:
    """Prints the bytes compared; ends with 1 where a tensor differs."""
    folders = [Path(each) for each in (out, hf, *grown)]
    places = [
        {name: file for file in sorted(folder.glob("*.safetensors")) for name in safe_open(file, "pt").keys()}
        for folder in folders
    ]
    compared = 0
    wrong = []
    for name in places[1]:
        have, base, *rest = (safe_open(place[name], "pt").get_tensor(name) for place in places)
        want, loose = _linear(base, rest[0]) if method == "linear" else _ties(base, rest)
        if bool(((have != want) & ~loose).any()):
            wrong.append(name)
        compared += have.nbytes
    print(compared)
    sys.exit(1 if wrong or set(places[0]) != set(places[1]) else 0)


def _linear(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.zeros(a.shape)
    for model, weight in zip((a, b), torch.tensor(WEIGHTS), strict=True):
        total.addcmul_(model, weight.reshape((1,) * a.ndim))
    return (total / torch.tensor(WEIGHTS).sum()).bfloat16(), torch.zeros((), dtype=torch.bool)


def _ties(base: torch.Tensor, models: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    deltas = []
    loose = torch.zeros(base.shape, dtype=torch.bool)
    for model in models:
        delta = model.float() - base.float()
        size = delta.abs().flatten()
        least = size.kthvalue(size.numel() - max(1, int(DENSITY * size.numel())) + 1).values
        loose |= delta.abs() == least
        deltas.append(delta * (delta.abs() >= least))
    total = sum(deltas)
    masks = [delta.sign() == (total >= 0).float() * 2 - 1 for delta in deltas]
    divisor = sum(mask.float() for mask in masks).clamp(min=1)
    return (base.float() + sum(d * m for d, m in zip(deltas, masks, strict=True)) / divisor).bfloat16(), loose


COMMANDS = {"build-grown": build_grown, "mergekit": mergekit, "same-merged": same_merged}
