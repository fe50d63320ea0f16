"""A real Megatron-LM job that is told nothing of the model: `--use-checkpoint-args` and the flags that `ckpt` said.

    MEGATRON_LM=SOURCE python use_checkpoint_args.py CHECKPOINT "FLAGS" REPORT.json

The job is initialized by `megatron.training.initialize`, which takes the arguments from the checkpoint; the model is
built by Megatron-LM's own `gpt_builders.py`, loaded by `load_checkpoint`, and asked for logits. Not Megatron's: CUDA
(`cuda_on_cpu`) and the attention core of latent attention. REPORT: {"logits": [...], "args": {...}}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiled kernels ask the GPU that is none for its name
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "make"))

import megatron_lm as made
import torch
from megatron.core.models import backends
from megatron.core.transformer.moe import moe_utils
from megatron.training import checkpointing, get_args, training
from megatron.training.initialize import initialize_megatron
from megatron_logits import Core
from ranks import on_ranks

SIZES = ("--seq-length", "--max-position-embeddings", "--vocab-size", "--make-vocab-size-divisible-by")
ALWAYS = "--use-checkpoint-args --exit-on-missing-checkpoint --no-load-optim --no-load-rng --attention-softmax-in-fp32"
KEPT = (
    "num_layers",
    "hidden_size",
    "num_query_groups",
    "rotary_base",
    "moe_layer_freq",
    "padded_vocab_size",
    "swiglu",
    "num_experts",
)


def job_flags() -> list[str]:
    """BASE without what says anything of the model."""
    words = made.BASE.split()
    out = []
    skip = False
    for word in words:
        skip, was = word in SIZES, skip
        if not skip and not was:
            out.append(word)
    return out


def body(rank: int, world: int, checkpoint: str, flags: str, report: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    sys.argv = ["pretrain_gpt.py", *job_flags(), *ALWAYS.split(), "--load", checkpoint, *flags.split()]
    initialize_megatron(allow_no_cuda=True)
    from gpt_builders import gpt_builder

    args: Any = get_args()
    moe_utils.te_general_gemm = None  # 0.16.1 has no name for it without Transformer Engine
    if args.multi_latent_attention:  # whose core the local spec does not have
        backends.LocalSpecProvider.core_attention = lambda self: Core

    def provider(pre_process: bool = True, post_process: bool = True, **more: Any) -> Any:
        return gpt_builder(args, pre_process, post_process)

    model = training.get_model(provider, made.ModelType.encoder_or_decoder, wrap_with_ddp=False)
    checkpointing.load_checkpoint(model, None, None)
    ids = torch.arange(1, 17).reshape(1, 16)
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    with torch.no_grad():
        logits = model[0].eval()(ids, torch.arange(16).reshape(1, 16), mask)
    found = {name: getattr(args, name) for name in KEPT}
    Path(report).write_text(json.dumps({"logits": logits.tolist(), "args": found}))


if __name__ == "__main__":
    on_ranks(1, body, *sys.argv[1:])
