"""Peers and judges of the jobs that change names: the script that everyone writes, and plain torch to check with.

    to-megatron SRC OUT TP     load the safetensors, interleave QKV by group, chunk, torch.save a file a tensor rank
    to-fp8 SRC OUT             load the safetensors, quantise every Linear by blocks of 128 x 128, save_file
    to-paddle SRC OUT          load the safetensors, transpose every Linear, pickle NumPy arrays as paddle.save does
    same-megatron HF OUT TP    the files of ranks hold what Megatron's layout makes of HF
    same-fp8 HF OUT            codes and scales are those that `to-fp8` makes
    same-paddle HF OUT         the one .pdparams holds what Paddle's layout makes of HF

Commands of `peers.py`. Nothing here imports ckpt_tool, and pickles are read for plain arrays alone.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
_LINEAR = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$")


def load(folder: str) -> Tensors:
    return {
        name: tensor for path in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def megatron(hf: Tensors, config: dict[str, Any]) -> Tensors:
    """The whole model under Megatron's names."""
    groups = config["num_key_value_heads"]
    size = config["head_dim"]
    out = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        to = f"decoder.layers.{i}"
        q, k, v = (hf[f"{at}.self_attn.{name}_proj.weight"].unflatten(0, (groups, -1)) for name in "qkv")
        assert k.shape[1] == size
        out[f"{to}.self_attention.linear_qkv.weight"] = torch.cat([q, k, v], 1).flatten(0, 1)
        out[f"{to}.self_attention.linear_proj.weight"] = hf[f"{at}.self_attn.o_proj.weight"]
        out[f"{to}.mlp.linear_fc1.weight"] = torch.cat(
            [hf[f"{at}.mlp.gate_proj.weight"], hf[f"{at}.mlp.up_proj.weight"]]
        )
        out[f"{to}.mlp.linear_fc2.weight"] = hf[f"{at}.mlp.down_proj.weight"]
        out[f"{to}.input_layernorm.weight"] = hf[f"{at}.input_layernorm.weight"]
        out[f"{to}.pre_mlp_layernorm.weight"] = hf[f"{at}.post_attention_layernorm.weight"]
    return out


def part(name: str, tensor: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """What tensor rank `rank` of `tp` holds."""
    if name.endswith("norm.weight"):
        return tensor
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp, 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0)[rank].contiguous()


def to_megatron(src: str, out: str, ranks: str) -> None:
    whole = megatron(load(src), json.loads(Path(src, "config.json").read_text()))
    tp = int(ranks)
    for rank in range(tp):
        folder = Path(out, f"iter_0000001/mp_rank_{rank:02d}")
        os.makedirs(folder)
        state = {name: part(name, tensor, rank, tp) for name, tensor in whole.items()}
        torch.save({"model": state, "checkpoint_version": 3.0, "iteration": 1}, folder / "model_optim_rng.pt")


def to_paddle(src: str, out: str) -> None:
    os.makedirs(out)
    state = {
        name: np.ascontiguousarray(_bits(tensor).T) if _LINEAR.search(name) else _bits(tensor)
        for name, tensor in load(src).items()
    }
    with open(f"{out}/model_state.pdparams", "wb") as file:
        pickle.dump(state, file, protocol=4)


def blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of a matrix, as DeepSeek's `act_quant` has them, over blocks."""
    rows, columns = tensor.shape
    padded = torch.nn.functional.pad(tensor.float(), (0, -columns % 128, 0, -rows % 128))
    tiles = padded.reshape(padded.shape[0] // 128, 128, -1, 128)
    scales = tiles.abs().amax((1, 3)) / 448
    scales = torch.where(scales == 0, 1, scales)
    codes = (tiles / scales[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.reshape(padded.shape)[:rows, :columns].contiguous(), scales


def fp8(hf: Tensors) -> Tensors:
    out: Tensors = {}
    for name, tensor in hf.items():
        if _LINEAR.search(name):
            out[name], out[f"{name}_scale_inv"] = blocks(tensor)
        else:
            out[name] = tensor
    return out


def to_fp8(src: str, out: str) -> None:
    os.makedirs(out)
    save_file(fp8(load(src)), f"{out}/model.safetensors")


def same_fp8(hf: str, out: str) -> None:
    compared = 0
    wrong = []
    have = load(out)
    for name, want in fp8(load(hf)).items():
        found = have.pop(name, None)
        compared += want.nbytes
        if found is None or not torch.equal(found.view(torch.uint8), want.view(torch.uint8)):
            wrong.append(name)
    _verdict(compared, wrong + list(have))


def same_megatron(hf: str, out: str, ranks: str) -> None:
    whole = megatron(load(hf), json.loads(Path(hf, "config.json").read_text()))
    tp = int(ranks)
    compared = 0
    wrong = []
    for rank in range(tp):
        (file,) = Path(out).rglob(f"mp_rank_{rank:02d}/model_optim_rng.pt")
        with torch.serialization.safe_globals([Namespace]):
            state = torch.load(file, weights_only=True, mmap=True)["model"]
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        for name, tensor in whole.items():
            want = part(name, tensor, rank, tp)
            have = tensors.pop(name, None)
            compared += want.nbytes
            if have is None or not torch.equal(have.view(torch.int16), want.view(torch.int16)):
                wrong.append(f"{name} of rank {rank}")
        wrong += tensors
    _verdict(compared, wrong)


class _Arrays(pickle.Unpickler):
    """NumPy's own constructors and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def same_paddle(hf: str, out: str) -> None:
    (file,) = Path(out).rglob("*.pdparams")
    with file.open("rb") as data:
        state = _Arrays(data).load()
    compared = 0
    wrong = []
    for name, tensor in load(hf).items():
        want = _bits(tensor)
        want = want.T if _LINEAR.search(name) else want
        have = state.pop(name, None)
        compared += want.nbytes
        if have is None or not np.array_equal(have, want):
            wrong.append(name)
    _verdict(compared, wrong + [name for name, value in state.items() if isinstance(value, np.ndarray)])


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.view(torch.int16).numpy().view(np.uint16)


def _verdict(compared: int, wrong: list[str]) -> None:
    if wrong:
        raise SystemExit(f"{len(wrong)} differ: {', '.join(wrong[:5])}")
    print(compared)


COMMANDS = {
    "to-fp8": to_fp8,
    "to-megatron": to_megatron,
    "to-paddle": to_paddle,
    "same-fp8": same_fp8,
    "same-megatron": same_megatron,
    "same-paddle": same_paddle,
}
