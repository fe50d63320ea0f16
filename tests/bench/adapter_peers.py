"""The peer and the judge of folding a LoRA: PEFT's own merge, and plain torch to check with.

    build-adapter HF OUT R       a LoRA of rank R on every Linear of the layers, fp32, random; by hand, as PEFT saves it
    fold-by-peft HF ADAPTER OUT  from_pretrained, PeftModel, merge_and_unload, save_pretrained
    same-folded HF ADAPTER OUT   OUT is bf16(W + (B @ A) * s), bit for bit

Commands of `peers.py`. Nothing here imports ckpt_tool.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

_LINEAR = re.compile(r"(model\.layers\.\d+\..*\.(q|k|v|o|gate|up|down)_proj)\.weight")
ALPHA = 2  # over rank


def build_adapter(hf: str, out: str, rank: str) -> None:
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for file in sorted(Path(hf).glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():
                if found := _LINEAR.fullmatch(name):
                    rows, columns = f.get_slice(name).get_shape()
                    for side, shape in (("A", (int(rank), columns)), ("B", (rows, int(rank)))):
                        drawn = torch.randn(shape, generator=generator) * 0.02
                        tensors[f"base_model.model.{found[1]}.lora_{side}.weight"] = drawn
    Path(out).mkdir()
    save_file(tensors, Path(out) / "adapter_model.safetensors", {"format": "pt"})
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": int(rank),
        "lora_alpha": ALPHA * int(rank),
        "target_modules": names,
        "bias": "none",
    }
    (Path(out) / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def fold_by_peft(hf: str, adapter: str, out: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)


def same_folded(hf: str, adapter: str, out: str) -> None:
    """Prints the bytes compared; ends with 1 where a tensor differs."""
    parts = load_file(Path(adapter) / "adapter_model.safetensors")
    have = {name: file for file in sorted(Path(out).glob("*.safetensors")) for name in safe_open(file, "pt").keys()}
    compared = 0
    wrong = []
    for file in sorted(Path(hf).glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():
                want = f.get_tensor(name)
                if found := _LINEAR.fullmatch(name):
                    a, b = (parts[f"base_model.model.{found[1]}.lora_{side}.weight"] for side in "AB")
                    want = (want.float() + (b @ a) * float(ALPHA)).to(want.dtype)
                got = None
                if name in have:
                    with safe_open(have.pop(name), "pt") as ours:
                        got = ours.get_tensor(name)
                compared += want.nbytes
                if (
                    got is None
                    or got.dtype != want.dtype
                    or not torch.equal(got.view(torch.int16), want.view(torch.int16))
                ):
                    wrong.append(name)
    if wrong or have:
        raise SystemExit(f"differ: {', '.join([*wrong, *have][:5])}")
    print(compared)


COMMANDS = {"build-adapter": build_adapter, "fold-by-peft": fold_by_peft, "same-folded": same_folded}
