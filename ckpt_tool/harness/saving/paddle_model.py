"""The harness's model as PaddleFormers' ERNIE 4.5 has it: names, fused weights, Linear weights as (inputs, outputs).

    model.layers.0.self_attn.{q,k,v}_proj.weight
          -> model.layers.0.self_attn.qkv_proj.weight (hidden, groups of [q q k v])
    model.layers.0.mlp.{gate,up}_proj.weight      -> model.layers.0.mlp.up_gate_proj.weight (hidden, [gate | up])

The one idea: as `megatron_model`, with the transpose of every Linear; embeddings and the head stay (vocabulary,
hidden), norms are vectors. Written with torch reshapes: it judges the tool's equations.

Source: PaddleFormers 1.2.0 `transformers/ernie4_5_moe/modeling.py`. What it does not do: files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ckpt_tool.harness.saving.megatron_model import MegatronWeight, join_module, modules
from ckpt_tool.harness.saving.whole import WholeState
from ckpt_tool.storage.pickles.pickle_writer import dumps

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_FUSED = {"qkv": ("q_proj", "qkv_proj"), "gated": ("gate_proj", "up_gate_proj")}


class PaddleWeight(NamedTuple):
    """A weight of Paddle's."""

    name: str
    module: MegatronWeight  # what it is made of
    turned: bool  # is it the transpose of the module's?


def weights(whole: WholeState) -> list[PaddleWeight]:
    """Every weight, in the order of the layers."""
    listed_weights = []
    for module in modules(whole.config):
        name = module.parts[0]
        if module.kind in _FUSED:
            name = name.replace(*_FUSED[module.kind])
        linear = "layers." in name and not name.endswith("layernorm.weight")
        listed_weights.append(PaddleWeight(name, module, linear))
    if whole.config["tie_word_embeddings"]:  # Paddle stores a tied pair under both names
        listed_weights.append(PaddleWeight(HEAD, modules(whole.config)[0], False))
    return listed_weights


def select_stateful(found: Sequence[PaddleWeight], whole: WholeState) -> list[PaddleWeight]:
    """Those under whose names states are stored: of a tied pair on one stage the first in the alphabet, on two stages
    both."""
    once = bool(whole.config["tie_word_embeddings"]) and whole.layout.pp == 1
    return [weight for weight in found if not (once and weight.name == EMBEDDING)]


def value(weight: PaddleWeight, state: str, whole: WholeState) -> torch.Tensor:
    """The whole tensor of a state, as Paddle lays it."""
    tensor = join_module(weight.module, state, whole)
    return tensor.t().contiguous() if weight.turned else tensor


def powers(whole: WholeState) -> Iterator[tuple[str, torch.Tensor]]:
    """Paddle's accumulators of Adam's bias correction: beta to the power of the next step."""
    step = int(whole.scalars["step"])
    settings = whole.scalars["optimizer"]
    for number in (1, 2):
        yield f"beta{number}_pow_acc_0", torch.tensor([settings[f"beta{number}"] ** (step + 1)], dtype=torch.float32)


def scheduler(whole: WholeState, key: str) -> bytes:
    """`scheduler.pdparams`: what paddle.save makes of a scheduler's state; the job's scalars ride in it."""
    state: dict[str, Any] = {"last_epoch": int(whole.scalars["step"]), "last_lr": float(whole.scalars["lr"])}
    return dumps({**state, key: dict(whole.scalars)}, protocol=4)
