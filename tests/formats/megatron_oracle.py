"""Legacy Megatron checkpoints made with torch and NumPy alone: the oracle that our reader and writer are held to.

A job is a dict of whole tensors, cut by slicing, named and ordered by hand as Megatron-Core 0.16.1 does. `save` writes
rank folders; `load` reads them with `torch.load`.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

HIDDEN = 8
HEADS = 12
GROUPS = 12
WIDTH = 2
FFN = 12
VOCAB = 16
ATTENTION = ("self_attention.linear_proj.weight", "self_attention.linear_qkv.weight")


def counting(*shape: int, start: int = 0) -> torch.Tensor:
    """Values that tell their place, exact in bf16 only modulo 251."""
    n = 1
    for extent in shape:
        n *= extent
    return (torch.arange(start, start + n) % 251).float().reshape(shape)


def model(layers: int, experts: int = 0, *, tied: bool = False) -> dict[str, torch.Tensor]:
    """Whole tensors by logical name, in the order in which Megatron registers them."""
    out = {"embedding.word_embeddings.weight": counting(VOCAB, HIDDEN)}
    for i in range(layers):
        p = f"decoder.layers.{i}."
        out[p + "input_layernorm.weight"] = counting(HIDDEN, start=i)
        out[p + ATTENTION[0]] = counting(HIDDEN, HEADS * WIDTH, start=3 * i)
        out[p + ATTENTION[1]] = counting((HEADS + 2 * GROUPS) * WIDTH, HIDDEN, start=5 * i)
        out[p + "pre_mlp_layernorm.weight"] = counting(HIDDEN, start=7 * i)
        if experts:
            out[p + "mlp.router.weight"] = counting(experts, HIDDEN, start=9 * i)
        for e in range(experts):
            q = f"{p}mlp.experts.local_experts.{e}."
            out[q + "linear_fc1.weight"] = counting(2 * FFN, HIDDEN, start=11 * i + 100 * e)
            out[q + "linear_fc2.weight"] = counting(HIDDEN, FFN, start=13 * i + 50 * e)
        if not experts:
            out[p + "mlp.linear_fc1.weight"] = counting(2 * FFN, HIDDEN, start=11 * i)
            out[p + "mlp.linear_fc2.weight"] = counting(HIDDEN, FFN, start=13 * i)
    out["decoder.final_layernorm.weight"] = counting(HIDDEN, start=17)
    if not tied:
        out["output_layer.weight"] = counting(VOCAB, HIDDEN, start=19)
    return out


def share(name: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Tensor rank `rank`'s part, by plain slicing."""
    if name.endswith("linear_fc1.weight"):
        gate, up = whole.chunk(2)
        return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
    if name.endswith(("linear_fc2.weight", "linear_proj.weight")):
        return whole.chunk(size, dim=1)[rank]
    if name.endswith(("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight")):
        return whole.chunk(size)[rank]
    return whole


def arguments(
    layers: int, experts: int = 0, *, tied: bool = False, tp: int = 1, pp: int = 1, ep: int = 1, **more
) -> Namespace:
    return Namespace(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=more.pop("etp", tp),
        virtual_pipeline_model_parallel_size=more.pop("vpp", None),
        data_parallel_size=more.pop("dp", ep),
        context_parallel_size=1,
        num_layers=layers,
        num_experts=experts or None,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        group_query_attention=True,
        swiglu=True,
        hidden_size=HIDDEN,
        untie_embeddings_and_output_weights=not tied,
        make_vocab_size_divisible_by=4,
        vocab_size=VOCAB - 1,
        padded_vocab_size=VOCAB,
        transformer_impl="local",
        params_dtype=torch.bfloat16,
        **more,
    )


def save(root: Path, states: dict[str, dict], args: Namespace, *, iteration: int = 7) -> Path:
    """One iteration folder of rank folders. states: rank folder's name -> the dict of its model file, less args."""
    folder = root / f"iter_{iteration:07d}"
    for name, state in states.items():
        (folder / name).mkdir(parents=True)
        whole = {"args": args, "checkpoint_version": 3.0, "iteration": iteration, **state}
        torch.save(whole, folder / name / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return root


def load(path: Path) -> dict:
    return torch.load(path, weights_only=False)
