"""The keys of a torch_dist checkpoint and the logical names of its tensors, both ways.

The one idea: a key is a name with two holes. In "homogeneous" checkpoints all layers share one key and lie along a
first dim; all experts share one key and lie along the next. So a key shows how many leading dims are positions
(`leads`), and the name of a position is the key with the numbers put back, its norms under the local spec's alias:

    decoder.layers.self_attention.linear_qkv.layer_norm_weight  (L, h)
          -> decoder.layers.{0..L-1}.input_layernorm.weight
    decoder.layers.mlp.experts.experts.linear_fc1.weight  (L, E, 2f, h)
        -> decoder.layers.{l}.mlp.experts.local_experts.{e}.linear_fc1.weight  (2f, h)
    decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight_w, ..._v  (f, h)    singleton shards: gate and up apart
        -> decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight  (2f, h)
    optimizer.state.fp32_param.KEY, optimizer.state.param.KEY               -> KEY's name [master]

Sources (NVIDIA/Megatron-LM): core 0.16.1 `transformer/transformer_block.py` (`sharded_state_dict`: which layers share a
key), `transformer/moe/experts.py` and `extensions/transformer_engine.py` (`experts.experts.`, `experts.<global>.` with
`singleton_local_shards`), `transformer/mlp.py` (`_w`, `_v`), `models/gpt/gpt_layer_specs.py`
(`sharded_state_dict_keys_map`: the local spec stores its norms under the fused linear's name),
`dist_checkpointing/optimizer.py`, `optimizer/optimizer.py` (`chained_K.` in front), `optimizer/distrib_optimizer.py`
(`param`), core 0.14 (`fp32_param`). NeMo puts `module.` in front.

Cost: a few us a key. What it does not do: shapes, files; encoder-decoder models' own aliases.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from ckpt_tool.core.tensor import MASTER, MODEL
from ckpt_tool.formats.megatron.names import NORM_ALIASES, canonical

_OPTIMIZER = re.compile(r"(?:chained_\d{1,4}\.)?optimizer\.state\.([^./]+)\.(.+)", re.DOTALL)
_STACKED = re.compile(r"((?:decoder|encoder)\.layers)\.(?!\d+\.)(.+)", re.DOTALL)
_EXPERTS = ".experts.experts."
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])", re.DOTALL)
_OBJECT = re.compile(r"(.+)/shard_(\d{1,18}(?:\.\d{1,18})*)_(\d{1,18}(?:\.\d{1,18})*)", re.DOTALL)
_MASTERS = ("param", "fp32_param", "master_param")


class DistKey(NamedTuple):
    """A tensor's key, taken apart. key: of the model's tensor, without the optimizer's front. layers, experts: does a
    leading dim number layers, experts? half: 0 for the gate's, 1 for the up's half of a singleton fc1, None for all."""

    state: str
    key: str
    layers: bool
    experts: bool
    half: int | None = None

    @property
    def leads(self) -> int:
        """Leading dims that are positions."""
        return self.layers + self.experts


class ObjectKey(NamedTuple):
    """A stored object: `rng_state/shard_0.1_2.2` is base rng_state, at (0, 1), of shape (2, 2)."""

    base: str
    at: tuple[int, ...]
    shape: tuple[int, ...]


def parse_object(fqn: str) -> ObjectKey | None:
    """The key of a ShardedObject, None for any other text."""
    found = _OBJECT.fullmatch(fqn)
    if found is None:
        return None
    at, shape = (tuple(int(n) for n in text.split(".")) for text in found.group(2, 3))
    return ObjectKey(found[1], at, shape) if len(at) == len(shape) else None


def parse(fqn: str) -> DistKey:
    """Any tensor key but those of flat buckets."""
    state, key = MODEL, fqn
    found = _OPTIMIZER.fullmatch(fqn)
    if found is not None:
        state, key = MASTER if found[1] in _MASTERS else found[1], found[2]
    key = key.removeprefix("module.")
    half = _HALF.fullmatch(key)
    if half is not None:
        key = half[1]
    layers = _STACKED.fullmatch(key) is not None
    _, experts, rest = key.partition(_EXPERTS)
    stacked = bool(experts) and not rest.partition(".")[0].isdigit()
    return DistKey(state, key, layers, stacked, None if half is None else "wv".index(half[2]))


def name_of(key: DistKey, at: tuple[int, ...] = ()) -> str:
    """The logical name of the tensor at the positions `at` (as many as `key.leads`)."""
    name, rest = key.key, list(at)
    if key.layers:
        found = _STACKED.fullmatch(name)
        if found is not None:
            name = f"{found[1]}.{rest.pop(0)}.{found[2]}"
    if _EXPERTS in name:
        number = f"{rest.pop(0)}." if key.experts else ""
        name = name.replace(_EXPERTS, f".experts.local_experts.{number}", 1)
    return canonical(name)


# -- how a source spells its keys, to spell them so again --------------------------------------------------------------

STACKED_LAYERS, STACKED_EXPERTS, SINGLETONS, HALVES = "stacked-layers", "stacked-experts", "singletons", "halves"


def styles_of(key: DistKey) -> tuple[str, ...]:
    """What a key shows of its checkpoint: stacked layers or experts, singleton shards, `fused:ALIAS` or
    `plain:ALIAS` for a norm that may be stored either way."""
    out = [STACKED_LAYERS] if key.layers else []
    out += [STACKED_EXPERTS] if key.experts else []
    out += [SINGLETONS] if key.half is not None or _EXPERTS in key.key and not key.experts else []
    out += [HALVES] if key.half is not None else []
    for stored, alias in NORM_ALIASES:
        for style, text in (("fused", stored), ("plain", alias)):
            head, found, tail = key.key.partition(text)
            if found and tail in ("weight", "bias") and (not head or head.endswith(".")):
                out.append(f"{style}:{alias}")
    return tuple(out)


def spelled(key: str, styles: Collection[str], *, moe: bool) -> str:
    """A key (positions aside) with its norm as these styles store it. moe: its layer has experts; where both spellings
    are in use for the norm before the feed-forward part, those layers have the plain one (Transformer Engine)."""
    for stored, alias in NORM_ALIASES:
        head, found, tail = key.rpartition(alias)
        if not found or tail not in ("weight", "bias") or head and not head.endswith("."):
            continue
        if f"fused:{alias}" in styles and not (moe and f"plain:{alias}" in styles):
            return f"{head}{stored}{tail}"
    return key
