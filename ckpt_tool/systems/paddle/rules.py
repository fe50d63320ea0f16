"""How tensor parallelism cuts a Paddle parameter, and which weights Hugging Face files store transposed: by name.

The one idea: the module's own name says its layer class, and the class says the cut. A column parallel layer cuts the
last axis (Paddle's Linear weights are [in, out]) and its bias, a row parallel one axis 0 and no bias, an embedding its
rows. Two kinds hold several matrices side by side, of which each rank has a share of each:

    up_gate_proj [h, 2f], tp 2    logical [gate | up]    rank 0: [g_0 | u_0], rank 1: [g_1 | u_1]    PaddleCut(1, (1,
    1)) qkv_proj, grouped a kv head   logical = ranks laid end to end                                    PaddleCut(1)

Specification, from `_get_tensor_parallel_mappings` of PaddleNLP 3.0.0b4 and PaddleFormers 0.4.0 (every model folder),
from `transformers/conversion_utils.py` (`normal_fuse_split_tp`, `naive_fuse_split_tp`: two or three matrices, the third
form with `num_kv_groups`), from the layers of PaddleFormers 1.2.0 (`nn/linear.py`, `nn/lm_head.py`, `nn/mlp.py`,
`peft/lora`):

* embed_tokens: rows; lm_head: its vocabulary axis, [vocab, hidden] in PaddleFormers and where tied, [hidden, vocab] in
  PaddleNLP (derived from `hidden_size` and the shape). Neither is cut where tp does not divide the vocabulary
  (PaddleNLP).
* k_proj, v_proj, kv_b_proj: cut only where tp divides `num_key_value_heads`; else every rank holds them whole.
* Routed experts: whole under expert parallelism, in DeepSeek always, in ERNIE when `moe_group` is the tensor group;
    else cut.
* LoRA: column layers cut lora_B, row layers lora_A. Norms, routers, latent projections (q_a, kv_a): whole.
* `ernie` (PaddleFormers' pretraining class) with grouped query heads, and Phi-3: qkv_proj is three matrices [Q | K |
    V].
* gpt-oss: experts are plain parameters of every rank, a rank's sinks are its heads'.
* HF: `transpose_weight_keys` of PaddleFormers 1.2.0; only 2-d `.weight` without "lora" in the key.

Order of judgement: the model type's own table, then the table of names that mean one thing everywhere; then nothing is
known and the tensor is named in an error. Cost: a dict look-up. What it does not do: GLM's old per-head [q k v], T5's
buckets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.mesh import divisors_near
from ckpt_tool.errors import InputError, UsageError

UNKNOWN_STORED = "E1310"
UNKNOWN_WANTED = "E1265"
UNEVEN = "E1266"

COLUMN = "column"
ROW = "row"
GATED = "gated"
THREE = "three"
KV = "kv"
VOCAB = "vocab"
HEAD = "head"
MIX = "mix"
WHOLE = "whole"


class PaddleCut(NamedTuple):
    """How tensor ranks cut a parameter."""

    dim: int | None  # the axis that is cut, None if each rank has a full copy
    parts: tuple[int, ...] = ()  # relative sizes of matrices stored side by side along `dim`, each cut by all ranks


# An extra of ours, {"tensor_ranks": 2, "parted": True}: how the source cut keys and values, if no config states it.
HEADS = "paddle_heads"
_NOT = PaddleCut(None)
_GATED = ("up_gate_proj", "gate_up_fused_proj", "gate_up_proj")
_KINDS = {
    COLUMN: "q_proj up_proj gate_proj qkv_proj q_b_proj linear1 fc1 w3",
    ROW: "o_proj down_proj out_proj linear2 fc2 dense_4h_to_h c_proj",
    GATED: " ".join(_GATED),
    KV: "k_proj v_proj kv_b_proj",
    VOCAB: "embed_tokens word_embeddings wte",
    HEAD: "lm_head output_layer",
    MIX: "eh_proj mtp_linear_proj",
    WHOLE: "gate router shared_expert_gate q_a_proj kv_a_proj_with_mqa moe_statics score classifier embed_positions "
    "position_embeddings rotary_emb",
}
_MODULES = {module: kind for kind, modules in _KINDS.items() for module in modules.split()}
_PAIRS: dict[str, str] = {  # parent.module, where the module alone says nothing
    "mlp.w1": COLUMN,
    "mlp.w2": COLUMN,
    "experts.w1": COLUMN,
    "experts.w2": ROW,
    "shared_head.head": HEAD,
    "self_attention.dense": ROW,
    "attention.dense": ROW,
    "attn.c_attn": THREE,
    **{
        f"{a}.{m}": COLUMN
        for a in ("SelfAttention", "EncDecAttention")
        for m in ("q", "k", "v", "relative_attention_bias")
    },
    **{f"{a}.o": ROW for a in ("SelfAttention", "EncDecAttention")},
    **{f"DenseReluDense.{m}": COLUMN for m in ("wi", "wi_0", "wi_1")},
    "DenseReluDense.wo": ROW,
}
_OF_MODEL: dict[str, dict[str, str]] = {
    "bloom": {"query_key_value": COLUMN, "dense_h_to_4h": COLUMN},
    "chatglm": {"query_key_value": COLUMN, "dense_h_to_4h": COLUMN},
    "chatglm_v2": {"query_key_value": THREE, "dense_h_to_4h": GATED},
    "glm": {"dense_h_to_4h": COLUMN},
    "opt": {"project_in": COLUMN, "project_out": COLUMN},
    "t5": {"shared": VOCAB},
    "ernie": {"qkv_proj": THREE},
    "phi3": {"qkv_proj": THREE},
    "gpt_oss": {"experts": WHOLE},
}
_NAIVE = frozenset(  # model types whose experts are never cut by tensor ranks
    ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "ernie4_5_moe", "ernie4_5_moe_vl")
)
_WHOLE_LEAVES = frozenset(("e_score_correction_bias", "inv_freq", "cos_cached", "sin_cached"))
_EXPERT = re.compile(r"(?:^|\.)experts\.\d+\.")
_TENSOR_GROUPS = frozenset(("mp", "model", "tp", "mpdp"))


# -- the cut -----------------------------------------------------------------------------------------------------------


def cut_of(name: str, shape: tuple[int, ...], config: Mapping[str, Any], tp: int, *, ep: int = 1) -> PaddleCut:
    """How `tp` ranks cut a tensor that is to be written.

    Args:
        name: Structured name.
        shape: Of the unsharded tensor.
        config: The model's config.json, {} if unknown.
        tp: Number of tensor ranks.
        ep: Number of expert ranks.

    Raises:
        UsageError: E1265, no rule, or one that needs the config; E1266, uneven.
    """
    if tp == 1 or not shape:
        return _NOT
    cut = _judge(name, shape, shape, config, tp, ep, False)
    if isinstance(cut, str):
        raise UsageError(
            f"{cut}, so how --tp {tp} splits it is not known",
            code=UNKNOWN_WANTED,
            key=name,
            hint="pass the model's config.json with --config, or --tp 1",
        )
    if cut.dim is not None and not divides(shape, cut, tp):
        length = shape[cut.dim] // max(sum(cut.parts), 1) if cut.parts else shape[cut.dim]
        raise UsageError(
            f"dim {cut.dim} of {list(shape)} does not split evenly over {tp} ranks",
            code=UNEVEN,
            key=name,
            hint=f"degrees near that do: {', '.join(map(str, divisors_near(length, tp)))}",
        )
    return cut


def stored_cut(
    name: str,
    local: tuple[int, ...],
    config: Mapping[str, Any],
    tp: int,
    *,
    ep: int = 1,
    distributed: bool | None = None,
) -> PaddleCut:
    """How `tp` ranks cut a tensor that is stored, given the shape `local` of one rank's part.

    distributed: the flag in model_meta.json, which replaces rules that need the config's sizes. Raises InputError
    E1310 if no rule applies.
    """
    if tp == 1 or not local or distributed is False:
        return _NOT
    cut = _judge(name, local, None, config, tp, ep, bool(distributed))
    if isinstance(cut, str):
        raise InputError(
            f"{cut}, so how {tp} ranks split it is not known",
            code=UNKNOWN_STORED,
            key=name,
            hint="pass the model's config.json with --config: it names the model and its sizes",
        )
    return cut


def _judge(
    name: str,
    shape: tuple[int, ...],
    whole: tuple[int, ...] | None,
    config: Mapping[str, Any],
    tp: int,
    ep: int,
    cut: bool,
) -> PaddleCut | str:
    """The cut, or a sentence about what is missing to determine it.

    Args:
        name: Structured name.
        shape: The unsharded shape if `whole` is given, else that of a rank's part.
        whole: The unsharded shape, None if unknown.
        config: The model's config.
        tp: Number of tensor ranks.
        ep: Number of expert ranks.
        cut: The tensor is known to be a part.
    """
    facts = text_config(config)
    kind, leaf = _kind(name, facts)
    if kind is None:
        if len(shape) == 1 and (leaf == "weight" or "norm" in name):
            return _NOT
        return "no rule for this name"
    if kind == WHOLE or (_EXPERT.search(name) and not experts_are_cut(facts, ep)):
        return _NOT
    if kind == KV and cut:  # the meta states that it is a part: no need for the number of heads
        kind = COLUMN
    if kind == KV:
        heads = _int(facts, "num_key_value_heads", "multi_query_group_num", "num_attention_heads", "n_head")
        parted = _seen_parted(facts, tp) if heads is None else heads % tp == 0
        if parted is None:
            return "the number of key and value heads is not known"
        kind = COLUMN if parted else WHOLE
    if kind in (VOCAB, HEAD):
        kind = _vocabulary(kind, shape, whole, facts, tp, cut)
    elif kind == MIX:
        hidden = _int(facts, "hidden_size")
        part = whole is None and hidden is not None and len(shape) == 2 and shape[1] * tp == hidden
        kind = COLUMN if cut or part else WHOLE
    return kind if kind.startswith("the ") else _cut(kind, leaf, len(shape), facts)


def _seen_parted(facts: Mapping[str, Any], tp: int) -> bool | None:
    """Whether `tp` ranks cut keys and values, derived from how the source's ranks did (`HEADS`); None if unknown.

    If n ranks cut the heads, so does every divisor of n; if n ranks do not, no multiple of n does.
    """
    seen = facts.get(HEADS)
    ranks, parted = (seen.get("tensor_ranks"), seen.get("parted")) if isinstance(seen, Mapping) else (None, None)
    if type(ranks) is not int or ranks < 1 or type(parted) is not bool:
        return None
    return parted if (ranks % tp if parted else tp % ranks) == 0 else None


def _vocabulary(
    kind: str, shape: tuple[int, ...], whole: tuple[int, ...] | None, facts: Mapping[str, Any], tp: int, cut: bool
) -> str:
    """ROW, COLUMN or WHOLE for the two tensors with a vocabulary axis; a sentence if that can't be determined."""
    axis = 0 if kind == VOCAB or len(shape) == 1 else head_axis(shape, facts, tp if whole is None else 1)
    rows = whole[axis] if whole is not None else _int(facts, "vocab_size", "padded_vocab_size")
    # A whole vocabulary is in every file only where tp does not divide it.
    if cut or (rows is None and shape[axis] % tp == 0):
        rows = shape[axis] * tp
    if rows is None:
        return "the size of the vocabulary is not known"
    if rows % tp:
        return WHOLE
    return COLUMN if axis or len(shape) == 1 else ROW


def _cut(kind: str, leaf: str, ndim: int, facts: Mapping[str, Any]) -> PaddleCut:
    column = kind in (COLUMN, GATED, THREE)
    if kind == WHOLE or (leaf == "lora_A" and column) or (leaf in ("lora_B", "bias") and not column):
        return _NOT
    dim = ndim - 1 if column else 0
    if kind == GATED:
        return PaddleCut(dim, (1, 1))
    if kind == THREE:
        return PaddleCut(dim, _three(facts))
    return PaddleCut(dim)


def _three(facts: Mapping[str, Any]) -> tuple[int, ...]:
    """Relative widths of [Q | K | V]; () if the class cuts it as one matrix (`ernie` without grouped heads)."""
    heads = _int(facts, "num_attention_heads")
    groups = _int(facts, "num_key_value_heads", "multi_query_group_num")
    if facts.get("model_type") == "ernie" and (groups is None or groups == heads):
        return ()
    return (heads, groups, groups) if heads and groups else (1, 1, 1)


_NLP_ONLY = ("mixtral",)  # models that PaddleNLP alone has


def head_axis(shape: tuple[int, ...], facts: Mapping[str, Any], share: int) -> int:
    """The vocabulary axis of an lm_head that is cut between `share` ranks.

    If the sizes do not decide, it is 0 ([vocab, hidden]), but 1 in PaddleNLP's files unless embeddings are tied.
    """
    hidden = _int(facts, "hidden_size")
    vocab = _int(facts, "vocab_size", "padded_vocab_size")
    fits = [
        axis
        for axis in (0, 1)
        if (vocab is None or shape[axis] in (vocab, vocab // share)) and (hidden is None or shape[1 - axis] == hidden)
    ]
    if len(fits) == 1 or not fits:
        return fits[0] if fits else 0
    naive = ("paddlenlp_version" in facts or model_type_of(facts) in _NLP_ONLY) and not facts.get("tie_word_embeddings")
    return 1 if naive else 0


def _kind(name: str, facts: Mapping[str, Any]) -> tuple[str | None, str]:
    """(kind of cut, last part) of a name; the kind is None for a name that no table has."""
    words = [word for word in name.split(".") if not word.isdecimal()]
    # Scales of a quantised weight are cut like the weight.
    if words[-1] == "weight_scale_inv" and words[-2:-1] == ["weight"]:
        words.pop()
    leaf = words[-1]
    if leaf in _WHOLE_LEAVES:
        return WHOLE, leaf
    if leaf == "sinks":
        return ROW, leaf
    module = words[-2] if len(words) > 1 else ""
    # Norms of any name, before the tables: q_norm and k_norm are not projections.
    if "norm" in module or module.startswith("ln_"):
        return WHOLE, leaf
    own = _OF_MODEL.get(model_type_of(facts), {}).get(module)
    return own or _PAIRS.get(".".join(words[-3:-1])) or _MODULES.get(module), leaf


def module_of(name: str) -> str:
    """The module's name, by which Paddle chooses what is transposed.

    >>> module_of("model.layers.3.mlp.gate_proj.weight")
    'gate_proj'
    """
    words = [word for word in name.split(".") if not word.isdecimal()]
    if not words:
        return name
    return words[-2] if len(words) > 1 else words[-1]


def is_fused(name: str) -> bool:
    """Whether the tensor is gate and up fused in one (their weight, bias or lora_B)."""
    words = [word for word in name.split(".") if not word.isdecimal()]
    return len(words) > 1 and words[-2] in _GATED and words[-1] in ("weight", "bias", "lora_B")


def side_by_side(name: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Relative widths of the matrices that a column parallel tensor holds side by side, each cut by all ranks.

    () for one matrix, and for [Q | K | V] of a model whose heads are not known.
    """
    if is_fused(name):
        return (1, 1)
    facts = text_config(config)
    if model_type_of(facts) not in _OF_MODEL or all(word.isdecimal() for word in name.split(".")):
        return ()
    kind, leaf = _kind(name, facts)
    known = _int(facts, "num_attention_heads") and _int(facts, "num_key_value_heads")
    return _three(facts) if kind == THREE and leaf in ("weight", "bias", "lora_B") and known else ()


def is_expert(name: str) -> bool:
    """Whether the tensor belongs to a routed expert."""
    return _EXPERT.search(name) is not None


def experts_are_cut(config: Mapping[str, Any], ep: int) -> bool:
    """Whether tensor ranks cut routed experts."""
    facts = text_config(config)
    return ep == 1 and model_type_of(facts) not in _NAIVE and facts.get("moe_group") not in _TENSOR_GROUPS


# -- geometry ----------------------------------------------------------------------------------------------------------


def divides(shape: tuple[int, ...], cut: PaddleCut, tp: int) -> bool:
    """Whether the cut divides `shape` evenly between `tp` ranks."""
    if cut.dim is None:
        return True
    length = shape[cut.dim]
    parts = sum(cut.parts) or 1
    return length % parts == 0 and all(length // parts * part % tp == 0 for part in cut.parts or (1,))


def joined_shape(local: tuple[int, ...], cut: PaddleCut, tp: int) -> tuple[int, ...]:
    """The unsharded shape of a tensor with parts of shape `local`: (4, 6), PaddleCut(1), tp 2 -> (4, 12)."""
    if cut.dim is None:
        return local
    return (*local[: cut.dim], local[cut.dim] * tp, *local[cut.dim + 1 :])


def local_boxes(
    shape: tuple[int, ...], cut: PaddleCut, tp: int, rank: int
) -> tuple[tuple[int, ...], list[tuple[Box, Box]]]:
    """The shape of a rank's part, and its boxes as (box in the unsharded tensor, box in the part). Even cuts only.

    >>> local_boxes((2, 8), PaddleCut(1, (1, 1)), 2, 1)[1][1]
    (Box(offset=(0, 6), shape=(2, 2)), Box(offset=(0, 2), shape=(2, 2)))
    """
    origin = (0,) * len(shape)
    if cut.dim is None:
        return shape, [(Box(origin, shape), Box(origin, shape))]
    dim = cut.dim
    unit = shape[cut.dim] // (sum(cut.parts) or 1)
    local = (*shape[:dim], shape[dim] // tp, *shape[dim + 1 :])
    boxes = []
    start = 0
    at = 0
    for part in cut.parts or (1,):
        width = unit * part // tp
        size = (*shape[:dim], width, *shape[dim + 1 :])
        there = (*origin[:dim], start + rank * width, *origin[dim + 1 :])
        boxes.append((Box(there, size), Box((*origin[:dim], at, *origin[dim + 1 :]), size)))
        start = start + unit * part
        at = at + width
    return local, boxes


# -- configs -----------------------------------------------------------------------------------------------------------


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config with the keys of its language model (`text_config`) at the top, where they win."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else config


def model_type_of(config: Mapping[str, Any]) -> str:
    """`model_type` of a config, "" if it has none (or something that is no text)."""
    stated = config.get("model_type")
    return stated if isinstance(stated, str) else ""


def _int(facts: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = facts.get(key)
        if type(value) is int and value > 0:
            return value
    return None


# -- Hugging Face ------------------------------------------------------------------------------------------------------

_SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_VISION = (*_SEVEN, "qkv", "proj")
_TRANSPOSED: dict[str, tuple[str, ...]] = {  # patterns of modules, as PaddleFormers 1.2.0 lists them
    **dict.fromkeys(("llama", "qwen2", "qwen3", "ernie4_5", "glm4_moe", "gpt_oss"), _SEVEN),
    "qwen2_moe": (*_SEVEN, "gate", "shared_expert_gate"),
    **dict.fromkeys(("qwen3_moe",), (*_SEVEN, "gate")),
    "ernie4_5_moe": (*_SEVEN, "gate", r"mtp_linear_proj\.\d+"),
    **dict.fromkeys(
        ("ernie4_5_moe_vl", "ernie4_5_vl_moe"),
        (*_VISION, "fc1", "fc2", "mlp", r"spatial_linear\.\d+", r"temporal_linear\.\d+", "lm_head"),
    ),
    "deepseek_v3": tuple(
        "kv_a_proj_with_mqa kv_b_proj o_proj q_a_proj q_b_proj gate_proj up_proj down_proj gate eh_proj".split()
    ),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    **dict.fromkeys(("gemma3_text", "gemma3"), (*_SEVEN, "lm_head")),
    "kimi_k2": (*_SEVEN, "proj", "up_gate_proj", "qkv_proj"),
    "qwen2_5_vl": (*_VISION, r"merger.mlp\.\d+"),
    "qwen3_vl": (*_VISION, r"linear_fc\d+"),
    "qwen3_next": (*_SEVEN, "gate", "in_proj_ba", "in_proj_qkvz", "out_proj", "shared_expert_gate"),
}


def transposed_in_hf(name: str, ndim: int, config: Mapping[str, Any]) -> bool | None:
    """Whether a Hugging Face file written by Paddle stores the tensor transposed; None for an unknown model type."""
    keys = _TRANSPOSED.get(model_type_of(config)) or _TRANSPOSED.get(model_type_of(text_config(config)))
    if keys is None:
        return None
    if ndim != 2 or "lora" in name or not name.endswith(".weight"):
        return False
    return any(re.search(rf"(?:^|\.){key}\.weight$", name) for key in keys)
