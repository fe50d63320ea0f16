"""The keys of a torch_dist checkpoint and the logical names of its tensors, both ways.

The one idea: a key is a name without the numbers of layer and expert. In "homogeneous" checkpoints all layers share one
key and are stacked along the first dim; all experts share one key and are stacked along the next. So a key shows how
many leading dims are positions (`leads`), and the name of a position is the key with the numbers put back, norms under
the local spec's names:

    decoder.layers.self_attention.linear_qkv.layer_norm_weight  (L, h)
          -> decoder.layers.{0..L-1}.input_layernorm.weight
    decoder.layers.mlp.experts.experts.linear_fc1.weight  (L, E, 2f, h)
        -> decoder.layers.{l}.mlp.experts.local_experts.{e}.linear_fc1.weight  (2f, h)
    decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight_w, ..._v  (f, h)    singleton shards: gate and up apart
        -> decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight  (2f, h)
    decoder.layers.0.mixer.in_proj.weight.z, ....x, ....B, ....C, ....dt         sections of a recurrent module apart
        -> decoder.layers.0.mixer.in_proj.weight, one below the other
    decoder.layers.0.self_attention.in_proj.weight                               whole: mcore-bridge's, by key head
        -> decoder.layers.0.self_attention.in_proj.weight_by_head
    decoder.layers.self_attention_sliding.linear_qkv.weight  (S, ...)            Megatron-Bridge's Gemma 4
    decoder.layers.self_attention_global.linear_qkv.weight  (L - S, ...)
        -> decoder.layers.{i}.self_attention.linear_qkv.weight of the S layers that see a window, of those that see all
    optimizer.state.fp32_param.KEY, optimizer.state.param.KEY               -> KEY's name [master]

Sources (NVIDIA/Megatron-LM): core 0.16.1 `transformer/transformer_block.py` (`sharded_state_dict`: which layers share a
key), `transformer/moe/experts.py` and `extensions/transformer_engine.py` (`experts.experts.`, `experts.<global>.` with
`singleton_local_shards`), `transformer/mlp.py` (`_w`, `_v`), `models/gpt/gpt_layer_specs.py`
(`sharded_state_dict_keys_map`: the local spec stores its norms under the fused linear's name),
`dist_checkpointing/optimizer.py`, `optimizer/optimizer.py` (`chained_K.` in front), `optimizer/distrib_optimizer.py`
(`param`), core 0.14 (`fp32_param`); core 0.19.2 `ssm/mamba_mixer.py`, `ssm/gated_delta_net/` (sections),
`multi_token_prediction.py`, `models/hybrid/hybrid_block.py` (no layer shares a key). megatron-bridge 0.6.2
`models/qwen_vl/modelling_qwen3_vl/transformer_block.py` (a tower's layers and mergers),
`models/gemma/modeling_gemma4.py` (`sharded_state_dict` of `Gemma4DenseSelfAttention`, `Gemma4SelfAttention`).
mcore-bridge 1.6.5 `model/modules/gated_delta_net.py`. NeMo puts `module.` in front, NeMo 1
`model.`.

Cost: a few us a key. What it does not do: shapes, files; encoder-decoder models' own aliases.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping
from typing import NamedTuple

from ckpt_tool.core.tensor import MASTER, MODEL
from ckpt_tool.systems.megatron.parts import HALF, apart, parts_of
from ckpt_tool.systems.megatron.stored_names import (
    BY_HEAD,
    NORM_ALIASES,
    STACK,
    by_head,
    canonical,
    convolution,
    is_tower,
    mtp_inner,
    norm_place,
)

_OPTIMIZER = re.compile(r"(?:chained_\d{1,4}\.)?optimizer\.state\.([^./]+)\.(.+)", re.DOTALL)
_NEMO = re.compile(r"module\.|model\.(?=(?:embedding|decoder|output_layer)\.)")
_STACKED = re.compile(rf"({STACK})\.(?!\d+\.)(.+)", re.DOTALL)
_EXPERTS = ".experts.experts."
# Kinds of attention that are stored under separate keys -> whether the kind has a sliding window.
KINDS: Mapping[str, bool] = {"sliding": True, "global": False}
_ATTENTION = ".self_attention."
_KIND = re.compile(r"(.*\.self_attention)_(sliding|global)(\..+)", re.DOTALL)
_OBJECT = re.compile(r"(.+)/shard_(\d{1,18}(?:\.\d{1,18})*)_(\d{1,18}(?:\.\d{1,18})*)", re.DOTALL)
_MASTERS = ("param", "fp32_param", "master_param")


class DistKey(NamedTuple):
    """A tensor's key, parsed."""

    state: str
    key: str  # of the model's tensor, without the optimizer's prefix
    layers: bool  # a leading dim numbers the layers
    experts: bool  # a leading dim numbers the experts
    # Which of `parts` is stored under the key, "" for the whole tensor: the gate's ("w") or the up's ("v") half of a
    # singleton fc1, or a section of a recurrent module.
    part: str = ""

    @property
    def kind(self) -> str:
        """The kind (of `KINDS`) of the layers under this key, which the leading dim counts; "" if all kinds share
        it."""
        found = _KIND.fullmatch(self.key) if ".self_attention_" in self.key else None
        return found[2] if found else ""

    @property
    def plain(self) -> str:
        """The key as it would be if the layers of all kinds shared one."""
        kind = self.kind
        return self.key.replace(f"{_ATTENTION[:-1]}_{kind}.", _ATTENTION, 1) if kind else self.key

    @property
    def leads(self) -> int:
        """The number of leading dims that are positions: layers, experts."""
        return self.layers + self.experts

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the whole tensor, in their order."""
        return parts_of(self.key, self.part)


class ObjectKey(NamedTuple):
    """The key of a stored object: `rng_state/shard_0.1_2.2` is base rng_state, at (0, 1) in a grid of shape (2, 2)."""

    base: str
    at: tuple[int, ...]
    shape: tuple[int, ...]


def parse_object(fqn: str) -> ObjectKey | None:
    """Return the parsed key of a ShardedObject, None for any other text."""
    found = _OBJECT.fullmatch(fqn)
    if found is None:
        return None
    at = tuple(map(int, found[2].split(".")))
    shape = tuple(map(int, found[3].split(".")))
    return ObjectKey(found[1], at, shape) if len(at) == len(shape) else None


def parse(fqn: str) -> DistKey:
    """Return a parsed tensor key. Keys of flat buckets are not supported, because they hold no names."""
    state = MODEL
    key = fqn
    found = _OPTIMIZER.fullmatch(fqn)
    if found is not None:
        state = MASTER if found[1] in _MASTERS else found[1]
        key = found[2]
    key = _NEMO.sub("", key, count=1) if key.startswith("mod") else key
    key, part = apart(key)
    layers = _STACKED.fullmatch(key) is not None
    _, experts, rest = key.partition(_EXPERTS)
    stacked = bool(experts) and not rest.partition(".")[0].isdigit()
    return DistKey(state, key, layers, stacked, part)


def of_kind(key: str, kind: str) -> str:
    """Return the key of an attention for layers of `kind`; any other key unchanged.

    >>> of_kind("decoder.layers.self_attention.linear_qkv.weight", "global")
    'decoder.layers.self_attention_global.linear_qkv.weight'
    """
    return key.replace(_ATTENTION, f"{_ATTENTION[:-1]}_{kind}.", 1) if kind else key


def name_of(key: DistKey, at: tuple[int, ...] = ()) -> str:
    """Return the logical name of one tensor under `key`.

    at: the numbers of its layer and expert, as many as `key.leads`. If layers of one kind have a key of their own, the
    number still counts all layers.
    """
    name = key.plain
    rest = list(at)
    if key.layers:
        found = _STACKED.fullmatch(name)
        if found is not None:
            name = f"{found[1]}.{rest.pop(0)}.{found[2]}"
    if _EXPERTS in name:
        number = f"{rest.pop(0)}." if key.experts else ""
        name = name.replace(_EXPERTS, f".experts.local_experts.{number}", 1)
    return canonical(name) if key.part else by_head(canonical(name))


def stored(name: str) -> str:
    """Return a logical name as a key spells it, apart from positions and norms.

    It is without the mark for rows by key head, with Mamba's convolution as a module, and with Megatron's name of MTP's
    inner layer.
    """
    return mtp_inner(convolution(name.removesuffix(BY_HEAD), "."), "transformer_layer")


# -- how a source spells its keys, so that a writer can spell them the same way ----------------------------------------

STACKED_LAYERS = "stacked-layers"
STACKED_EXPERTS = "stacked-experts"
SINGLETONS = "singletons"
HALVES = "halves"
APART = "attentions-apart"  # by `KINDS`


def stacked_style(stack: str) -> str:
    """Return the style for a stack of modules that share keys; a tower's stacks each have a style of their own."""
    return f"stacked:{stack}" if is_tower(f"{stack}.") else STACKED_LAYERS


def styles_of(key: DistKey) -> tuple[str, ...]:
    """Return the styles that a key shows: stacked layers or experts, singleton shards, the spelling of a norm.

    A norm that may be stored in two ways shows `fused:ALIAS` or `plain:ALIAS`.
    """
    found = _STACKED.fullmatch(key.key)
    out = [stacked_style(found[1])] if found is not None else []
    out += [STACKED_EXPERTS] if key.experts else []
    out += [APART] if key.kind else []
    out += [SINGLETONS] if key.part in HALF or (_EXPERTS in key.key and not key.experts) else []
    out += [HALVES] if key.part in HALF else []
    for fused, alias in NORM_ALIASES:
        for style, text in (("fused", fused), ("plain", alias)):
            head, inside, tail = key.plain.partition(text)
            if inside and tail in ("weight", "bias") and (not head or head.endswith(".")):
                out.append(f"{style}:{alias}")
    return tuple(dict.fromkeys(out))


def spelled(key: str, name: str, styles: Collection[str], every: Container[str]) -> str:
    """Return the key with its norm spelled as in `styles`.

    If both spellings of a norm are in use, layers without the linear that would fuse it (Transformer Engine with
    experts) have the plain one.

    Args:
        key: without positions.
        name: the logical name.
        styles: of the source.
        every: all logical names.
    """
    place = norm_place(name, every)
    if place is None or place.rest not in ("weight", "bias") or f"fused:{place.plain}" not in styles:
        return key
    if not place.there and f"plain:{place.plain}" in styles:
        return key
    head, _, tail = key.rpartition(place.plain)
    return f"{head}{place.fused}{tail}"
