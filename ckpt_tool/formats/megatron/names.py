"""Megatron-Core's names: what a rank calls a tensor, what it is called in the whole model, and in which order it
stands.

The one idea: a rank's name is the logical name with three things put in the rank's terms: the layer's number counts
from the chunk's first layer, the expert's from the rank's first expert, and a norm may be stored under the linear that
fuses it.

    stage 1 of 2 (layers 4..7), expert rank 1 (experts 2, 3)
    decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight      <- the rank's
    decoder.layers.5.mlp.experts.local_experts.2.linear_fc1.weight      <- the model's

Containers of experts, all one logical tensor an expert:
    sequential   mlp.experts.local_experts.<e>.linear_fc1.weight   (2f, h)
    te_grouped   mlp.experts.linear_fc1.weight<e>                  (2f, h)
    grouped      mlp.experts.weight1 (h, E*2f) and weight2 (E*f, h), viewed as (E, h, 2f) and (E, f, h), each transposed
Norms: the local spec's names are the logical ones; Transformer Engine fuses them into the linear that follows.

Order: the flat buffers of the distributed optimizer hold no names, so the order in which modules register their
parameters is part of the format. `registration_order` gives it from names alone.

Sources (NVIDIA/Megatron-LM, core 0.16.1): `core/transformer/transformer_layer.py`, `attention.py`,
`multi_latent_attention.py`, `mlp.py`, `moe/moe_layer.py`, `moe/experts.py`, `multi_token_prediction.py`,
`models/gpt/gpt_model.py` (order of the `self.x = build_module(...)` lines); `models/gpt/gpt_layer_specs.py` (which
norms TE fuses); 0.19 `multi_token_prediction.py` (`mtp_model_layer`). TransformerEngine 2.x
`module/layernorm_linear.py`, `grouped_linear.py` (order inside a module).

Cost: a few us a name. What it does not do: shapes, boxes (`megatron.rules`), files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckpt_tool.core.bounds import bounded, numeral

CONTAINERS = SEQUENTIAL, TE_GROUPED, GROUPED = "sequential", "te_grouped", "grouped"

_LAYER = re.compile(r"((?:decoder|encoder)\.layers\.)(\d{1,9})(\..+)", re.DOTALL)
_LOCAL_EXPERT = re.compile(r"(.*\.experts\.local_experts\.)(\d{1,9})(\..+)", re.DOTALL)
_TE_EXPERT = re.compile(r"(.*\.experts\.)(linear_fc[12])\.(weight|bias)(\d{1,9})", re.DOTALL)
_GROUPED = re.compile(r"(.*\.experts)\.weight([12])", re.DOTALL)
_MTP_INNER = re.compile(r"(mtp\.layers\.\d+\.)mtp_model_layer\.")

# What a fused linear (or a key of a distributed checkpoint) calls a norm -> the local spec's name, inside a layer.
NORM_ALIASES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
)
# Linear layers, each of which has an extra state.
LINEARS = frozenset(
    "linear_proj linear_qkv linear_fc1 linear_fc2 linear_q_proj linear_q_down_proj linear_q_up_proj "
    "linear_kv_down_proj linear_kv_up_proj eh_proj".split()
)
# Leaves that are buffers: in the model's state, in no optimizer.
BUFFERS = frozenset({"expert_bias", "local_tokens_per_expert", "global_tokens_per_expert", "inv_freq"})


class ExpertName(NamedTuple):
    """A name of one expert's tensor, taken apart: `front` ends in `.experts.`, `rest` is `linear_fc1.weight`."""

    front: str
    expert: int
    rest: str

    def logical(self) -> str:
        return f"{self.front}local_experts.{self.expert}.{self.rest}"


def is_buffer(name: str) -> bool:
    """Is it no parameter, so that no optimizer has a state of it?"""
    return name.rpartition(".")[2] in BUFFERS


def canonical(name: str) -> str:
    """The name with norms and MTP's inner layer under the alias that logical names use. Numbers stay as they are.

    >>> canonical("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight")
    'decoder.layers.3.input_layernorm.weight'
    """
    if name.startswith("mtp.") and ".mtp_model_layer." in name:
        name = _MTP_INNER.sub(r"\1transformer_layer.", name)
    if ".layer_norm_" in name:
        for fused, plain in NORM_ALIASES:
            front, found, rest = name.rpartition(fused)
            if found and (not front or front.endswith(".")) and "." not in rest:
                return f"{front}{plain}{rest}"
    return name


def is_fused_norm(name: str) -> bool:
    """Is it Transformer Engine's spelling of a norm?"""
    return canonical(name) != name and ".layer_norm_" in name


def fused_norm(name: str, *, mla: bool, moe: bool) -> str:
    """Transformer Engine's spelling of a logical name: norms go into the linear that follows. mla: the layer has latent
    attention (its first norm stays, its inner ones fuse); moe: the layer has experts (the norm before them stays)."""
    for fused, plain in NORM_ALIASES:
        front, found, rest = name.rpartition(plain)
        if not found or "." in rest or front and not front.endswith("."):
            continue
        inner = plain.startswith("self_attention.")
        if inner != mla and plain != "pre_mlp_layernorm." or moe and plain == "pre_mlp_layernorm.":
            return name
        return f"{front}{fused}{rest}"
    return name


def layer_of(name: str) -> tuple[str, int] | None:
    """(`decoder.layers.`, number) of a name inside a pipelined layer; None outside (MTP layers are not pipelined).

    >>> layer_of("decoder.layers.7.mlp.linear_fc1.weight")
    ('decoder.layers.', 7)
    """
    found = _LAYER.fullmatch(name)
    return (found[1], int(found[2])) if found else None


def shift_layer(name: str, by: int) -> str:
    """The name with its layer's number moved by `by`."""
    found = _LAYER.fullmatch(name) if by else None
    return f"{found[1]}{int(found[2]) + by}{found[3]}" if found else name


def expert_of(name: str) -> ExpertName | None:
    """The expert that a name of the sequential or the TE-grouped container belongs to; None for anything else.

    >>> expert_of("decoder.layers.1.mlp.experts.linear_fc1.weight3").logical()
    'decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight'
    """
    found = _LOCAL_EXPERT.fullmatch(name)
    if found:
        return ExpertName(found[1].removesuffix("local_experts."), int(found[2]), found[3][1:])
    found = _TE_EXPERT.fullmatch(name)
    return ExpertName(found[1], int(found[4]), f"{found[2]}.{found[3]}") if found else None


def grouped_of(name: str) -> tuple[str, int] | None:
    """(front up to `.experts.`, 1 or 2) of GroupedMLP's `weight1`, `weight2`; None for anything else."""
    found = _GROUPED.fullmatch(name)
    return (f"{found[1]}.", int(found[2])) if found else None


def container_of(name: str) -> str | None:
    """Which container of experts the name shows; None for names outside experts."""
    if ".experts." not in name:
        return None
    if _LOCAL_EXPERT.fullmatch(name):
        return SEQUENTIAL
    if _TE_EXPERT.fullmatch(name):
        return TE_GROUPED
    return GROUPED if _GROUPED.fullmatch(name) else None


def in_container(name: ExpertName, container: str) -> str:
    """The name in the sequential or the TE-grouped container. `name.expert`: the rank's own number."""
    if container == TE_GROUPED:
        module, _, leaf = name.rest.rpartition(".")
        return f"{name.front}{module}.{leaf}{name.expert}"
    return name.logical()


# -- order ------------------------------------------------------------------------------------------------------------

_FIRST = (
    "embedding word_embeddings position_embeddings tokentype_embeddings encoder decoder layers "
    # a layer
    "input_layernorm self_attention pre_cross_attn_layernorm cross_attention pre_mlp_layernorm mlp "
    # attention
    "core_attention linear_proj linear_qkv linear_q linear_kv linear_q_proj linear_q_down_proj linear_q_up_proj "
    "linear_kv_down_proj linear_kv_up_proj q_layernorm k_layernorm kv_layernorm "
    # experts
    "router experts local_experts shared_experts linear_fc1 linear_fc2 "
    # MTP
    "enorm hnorm eh_proj transformer_layer mtp_model_layer final_layernorm final_norm mtp output_layer"
).split()
_RANK = {word: i for i, word in enumerate(_FIRST)}
_LEAF_ORDER = "softmax_offset gate_weight layer_norm_weight layer_norm_bias weight weight1 weight2 bias expert_bias"
_LEAVES = {word: i for i, word in enumerate(_LEAF_ORDER.split())}
_NUMBERED = re.compile(r"(weight|bias)(\d{1,9})")


def registration_order(names: Sequence[str]) -> list[int]:
    """Positions of `names` (one chunk's, in the rank's own spelling) in the order in which the model registers them.

    A module's own parameters come before those of its submodules; words that Megatron's GPT models do not have keep the
    order in which they are first seen, so that an order which is right already stays.
    """
    seen: dict[str, int] = {}
    for name in names:
        for word in name.split("."):
            seen.setdefault(word, len(seen))
    keys = [_order_key(name, seen) for name in names]
    return sorted(range(len(names)), key=keys.__getitem__)


def _order_key(name: str, seen: dict[str, int]) -> tuple[tuple[int, int, int], ...]:
    *modules, leaf = name.split(".")
    key: list[tuple[int, int, int]] = []
    grouped = "experts" in modules and modules[-1] in ("linear_fc1", "linear_fc2") and _NUMBERED.fullmatch(leaf)
    for word in modules:
        if numeral(word):
            key.append((1, int(word), 0))
        else:
            rank = _RANK.get(word)
            key.append((1, rank, 0) if rank is not None else (1, len(_RANK), seen[word]))
    if grouped:
        key.append((0, int(grouped[2]), grouped[1] == "bias"))
    else:
        rank = _LEAVES.get(leaf)
        key.append((0, rank, 0) if rank is not None else (0, len(_LEAVES), seen[leaf]))
    return tuple(key)


def experts_count(names: Iterable[str]) -> int:
    """How many experts a layer has at most, from logical names; 0 without experts. Raises InconsistentCheckpoint
    E1650."""
    numbers = [found.expert for name in names if ".experts." in name and (found := expert_of(name))]
    return bounded(max(numbers, default=-1) + 1, len(numbers), "experts by the tensors' names")


def layers_count(names: Iterable[str]) -> int:
    """How many layers there are by logical names, MTP's aside. Raises InconsistentCheckpoint E1650."""
    numbers = [found[1] for name in names if (found := layer_of(name))]
    return bounded(max(numbers, default=-1) + 1, len(numbers), "layers by the tensors' names")


def mtp_count(names: Iterable[str]) -> int:
    """How many MTP layers there are."""
    return len({name.split(".")[2] for name in names if name.startswith("mtp.layers.")})
