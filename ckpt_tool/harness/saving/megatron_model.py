"""The harness's model as Megatron builds it: modules in the order of registration, fused weights, a rank's share,
arguments.

    model.layers.0.self_attn.{q,k,v}_proj.weight
          -> decoder.layers.0.self_attention.linear_qkv.weight, groups of [q q k v]
    model.layers.0.mlp.{gate,up}_proj.weight      -> decoder.layers.0.mlp.linear_fc1.weight, [gate; up]

The one idea: a module of Megatron's is one to three hub tensors laid together; what a rank holds of it follows from
what it holds of those. Written with torch reshapes, not with the tool's equations: it is their judge.

Source: NVIDIA/Megatron-LM core 0.16.1 `core/transformer/attention.py`, `mlp.py`, `moe/`, local layer spec. What it does
not do: layouts that Megatron can't have (a weight that TP does not cut though it cuts its twin): UsageError E1535.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ckpt_tool.core.box import Box
from ckpt_tool.errors import UsageError
from ckpt_tool.harness.pieces import RankState, TensorPiece
from ckpt_tool.harness.saving.whole import WholeState

UNFIT = "E1535"
ADAM = {"optimizer": "adam"}  # by which core 0.19 finds the groups of a chain's Adam; stated here too, as its judge
Kind = Literal["plain", "qkv", "gated"]


class MegatronWeight(NamedTuple):
    """One weight of Megatron's."""

    name: str  # with global layer and expert numbers
    parts: tuple[str, ...]  # the hub tensors in it
    kind: Kind
    cut: int | None  # the dim that tensor ranks share, None for a replicated one
    layer: int | None = None
    expert: int | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether Muon steps it in a job that has it: core 0.19 `core/optimizer/emerging_optimizers.py`
        (`_is_nonlinear_or_embedding`)."""
        return self.layer is not None and not self.name.endswith("layernorm.weight")


def modules(config: Mapping[str, Any]) -> list[MegatronWeight]:
    """Every weight, in the order of registration."""
    listed_modules = [MegatronWeight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "plain", 0)]
    for layer in range(int(config["num_hidden_layers"])):
        listed_modules += _layer(layer, config)
    listed_modules.append(MegatronWeight("decoder.final_layernorm.weight", ("model.norm.weight",), "plain", None))
    if not config["tie_word_embeddings"]:
        listed_modules.append(MegatronWeight("output_layer.weight", ("lm_head.weight",), "plain", 0))
    return listed_modules


def _layer(layer: int, config: Mapping[str, Any]) -> Iterator[MegatronWeight]:
    prefix = f"decoder.layers.{layer}."
    hub = f"model.layers.{layer}."
    attention = tuple(f"{hub}self_attn.{part}_proj.weight" for part in "qkv")
    sparse = int(config["moe_num_experts"]) > 0 and layer >= int(config["moe_layer_start_index"])
    yield MegatronWeight(f"{prefix}input_layernorm.weight", (f"{hub}input_layernorm.weight",), "plain", None, layer)
    proj = (f"{hub}self_attn.o_proj.weight",)
    yield MegatronWeight(f"{prefix}self_attention.linear_proj.weight", proj, "plain", 1, layer)
    yield MegatronWeight(f"{prefix}self_attention.linear_qkv.weight", attention, "qkv", 0, layer)
    norm = (f"{hub}post_attention_layernorm.weight",)
    yield MegatronWeight(f"{prefix}pre_mlp_layernorm.weight", norm, "plain", None, layer)
    if not sparse:
        yield from _mlp(f"{prefix}mlp.", f"{hub}mlp.", layer, None)
        return
    yield MegatronWeight(f"{prefix}mlp.router.weight", (f"{hub}mlp.gate.weight",), "plain", None, layer)
    for expert in range(int(config["moe_num_experts"])):
        inner = f"{prefix}mlp.experts.local_experts.{expert}."
        yield from _mlp(inner, f"{hub}mlp.experts.{expert}.", layer, expert)
    if config["moe_num_shared_experts"]:
        yield from _mlp(f"{prefix}mlp.shared_experts.", f"{hub}mlp.shared_experts.", layer, None)


def _mlp(ours: str, hub: str, layer: int, expert: int | None) -> Iterator[MegatronWeight]:
    gated = (f"{hub}gate_proj.weight", f"{hub}up_proj.weight")
    yield MegatronWeight(f"{ours}linear_fc1.weight", gated, "gated", 0, layer, expert)
    yield MegatronWeight(f"{ours}linear_fc2.weight", (f"{hub}down_proj.weight",), "plain", 1, layer, expert)


def join_module(module: MegatronWeight, state: str, whole: WholeState) -> torch.Tensor:
    """The module's whole tensor of a state."""
    parts = [whole.tensors[state, name] for name in module.parts]
    if module.kind == "plain":
        return parts[0]
    if module.kind == "gated":
        return torch.cat(parts)
    groups = int(whole.config["num_key_value_heads"])
    width = parts[0].shape[1]
    return torch.cat([part.reshape(groups, -1, width) for part in parts], 1).reshape(-1, width)


def share_of(module: MegatronWeight, rank: RankState) -> list[Box]:
    """What the rank computes with, as boxes of the joined tensor: two for gate and up; none where it has no part of it.

    Raises UsageError E1535 where the trainer cuts it otherwise than Megatron could.
    """
    piece_of = {piece.name: piece for piece in rank.pieces if piece.state == "model"}
    if module.parts[0] not in piece_of:
        return []

    pieces = [piece_of[name] for name in module.parts]
    size = rank.layout.tp if module.cut is not None else 1
    for piece in pieces:
        share_shape = [n // (size if dim == module.cut else 1) for dim, n in enumerate(piece.shape)]
        if list(piece.box) != share_shape:
            raise UsageError(
                f"{piece.name} of {list(piece.shape)} is held as {list(piece.box)}, and Megatron has it in "
                f"{size} equal parts",
                code=UNFIT,
                hint="choose sizes that the tensor degree divides, tensor degree 1, or the format sharded",
            )

    tp_rank = rank.at.tp if size > 1 else 0
    shape = _shape(pieces)
    if module.cut is None or size == 1:
        return [Box((0,) * len(shape), shape)]

    if module.kind == "gated":
        half = shape[0] // 2
        boxes = [Box((half_begin + tp_rank * (half // size), 0), (half // size, shape[1])) for half_begin in (0, half)]
        return boxes

    part = shape[module.cut] // size
    offset = tuple(tp_rank * part if dim == module.cut else 0 for dim in range(len(shape)))
    return [Box(offset, tuple(part if dim == module.cut else n for dim, n in enumerate(shape)))]


def _shape(pieces: Sequence[TensorPiece]) -> tuple[int, ...]:
    return (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])


def namespace(whole: WholeState) -> argparse.Namespace:
    """What a job's `args` say of model, degrees and optimizer: the part of Megatron's 650 attributes that decides about
    files."""
    config = whole.config
    layout = whole.layout
    settings = whole.scalars["optimizer"]
    experts = int(config["moe_num_experts"])
    layers = int(config["num_hidden_layers"])
    first_moe = int(config["moe_layer_start_index"])

    model = {
        "num_layers": layers,
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "group_query_attention": True,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "swiglu": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "position_embedding_type": "rope",
        "rotary_interleaved": True,
        "rotary_base": int(config["rope_theta"]),
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "vocab_size": config["vocab_size"],
        "padded_vocab_size": config["vocab_size"],
        "make_vocab_size_divisible_by": 1,
        "transformer_impl": "local",
        "layernorm_epsilon": config["rms_norm_eps"],
        "max_position_embeddings": 131072,
        "params_dtype": torch.bfloat16,
        "num_experts": experts or None,
        "moe_grouped_gemm": False,
    }

    if experts:
        model |= {
            "moe_router_topk": config["moe_k"],
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_layer_freq": [int(layer >= first_moe) for layer in range(layers)],
            "moe_router_score_function": "softmax",
            "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["moe_num_shared_experts"]
            or None,
            "moe_router_dtype": "fp32",
        }

    job = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": 1,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.tp,
        "data_parallel_size": layout.dp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "world_size": layout.tp * layout.pp * layout.dp,
        "use_distributed_optimizer": layout.zero > 0,
        "bf16": True,
        "fp16": False,
        "iteration": whole.scalars["step"],
        "consumed_train_samples": whole.scalars["consumed"],
        "seed": whole.scalars["seed"],
        "lr": whole.scalars["scheduler"].get("peak"),
        "optimizer": "adam" if whole.muon is None else "muon",
        "use_layer_wise_distributed_optimizer": whole.muon is not None and layout.zero > 0,
        "adam_beta1": settings["beta1"],
        "adam_beta2": settings["beta2"],
        "adam_eps": settings["eps"],
        "weight_decay": settings["weight_decay"],
        "clip_grad": settings["clip"],
        "accumulate_allreduce_grads_in_fp32": True,
        "pipeline_model_parallel_layout": _pipeline(whole),
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "overlap_grad_reduce": False,
        "ckpt_fully_parallel_save": True,
    }
    return argparse.Namespace(**model, **job)


def _pipeline(whole: WholeState) -> str | None:
    """Megatron's layout string where the layers do not spread evenly: `Ett|t|tL`."""
    layout = whole.layout
    stages = {rank.at.pp: rank.at.chunks for rank in whole.ranks}
    counts = [len(stages[stage][chunk]) for chunk in range(layout.vpp) for stage in range(layout.pp)]
    if len(set(counts)) == 1:
        return None
    parts = ["t" * count for count in counts]
    return "|".join(["E" + parts[0], *parts[1:-1], parts[-1] + "L"])


def scheduler(whole: WholeState) -> dict[str, Any]:
    """The learning rate's schedule in Megatron's words (`OptimizerParamScheduler.state_dict`)."""
    state = whole.scalars["scheduler"]
    return {
        "max_lr": state.get("peak", whole.scalars["lr"]),
        "min_lr": state.get("floor", 0.0),
        "lr_decay_style": "cosine",
        "lr_warmup_steps": state.get("warmup", 0),
        "lr_decay_steps": state.get("total", 0),
        "num_steps": int(whole.scalars["consumed"]),
    }


def hyperparameters(scalars: Mapping[str, Any], *, decays: bool, expert: bool, muon: bool = False) -> dict[str, Any]:
    """A parameter group of Megatron's optimizer, without its parameters; the step counter is the group's. muon: is it
    of the matrices that Muon steps? Muon counts no steps; Adam's groups next to them name Adam."""
    settings = scalars["optimizer"]
    overrides = {
        **(ADAM if "muon" in scalars else {}),
        "betas": (settings["beta1"], settings["beta2"]),
        "eps": settings["eps"],
        "bias_correction": True,
        "step": int(scalars["step"]),
    }
    return {
        "is_expert_parallel": expert,
        "default_config": True,
        "wd_mult": 1.0 if decays else 0.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": scalars["scheduler"].get("peak", scalars["lr"]),
        "min_lr": scalars["scheduler"].get("floor", 0.0),
        "lr": scalars["lr"],
        "weight_decay": settings["weight_decay"] if decays else 0.0,
        **({"momentum": scalars["muon"]["momentum"]} if muon else overrides),
    }
