"""How each tensor of Meta's models is sharded between tensor parallel ranks, by the end of its name.

    layers.3.attention.wo.weight   cut along dim 1 (RowParallelLinear)       tok_embeddings.weight   dim 0 or dim 1
    layers.3.attention.wq.weight   cut along dim 0 (ColumnParallelLinear)    layers.3.ffn_norm.weight   on every rank

Embeddings are cut along their columns by Llama 1 and 2 (`ParallelEmbedding`), along the vocabulary since Llama 3
(`VocabParallelEmbedding`): shapes and params.json show which. If there are more ranks than heads of keys, neighbouring
ranks hold the same head (Llama 3.1 405B in 16 shards). Sources: meta-llama/llama (July 2023) and llama-models (July
2025) `model.py`; llama-models `models/checkpoint.py`; transformers 4.45 `convert_llama_weights_to_hf.py`.
"""

from __future__ import annotations

import re

from ckpt_tool.systems.meta.consolidated.params import MetaSizes

EMBEDDING = "tok_embeddings.weight"
ALL = -1  # in place of a dim: every rank holds a full copy
EITHER = -2  # in place of a dim: 0 or 1, depending on the generation (the embedding)
_DIMS = {
    EMBEDDING: EITHER,
    "output.weight": 0,
    "norm.weight": ALL,
    "rope.freqs": ALL,
    "attention.wq.weight": 0,
    "attention.wk.weight": 0,
    "attention.wv.weight": 0,
    "attention.wo.weight": 1,
    "feed_forward.w1.weight": 0,
    "feed_forward.w3.weight": 0,
    "feed_forward.w2.weight": 1,
    "attention_norm.weight": ALL,
    "ffn_norm.weight": ALL,
}
_LAYER = re.compile(r"layers\.(0|[1-9]\d{0,5})\.(.+)")
_IN_LAYER = ("attention.", "feed_forward.", "attention_norm.", "ffn_norm.")


def cut_of(name: str) -> int | None:
    """The dim along which a tensor is sharded, `ALL`, `EITHER`, or None for a name that Meta's Llama does not have."""
    found = _LAYER.fullmatch(name)
    end = found[2] if found else name
    if end.startswith(_IN_LAYER) != (found is not None):
        return None
    return _DIMS.get(end)


def layer_of(name: str) -> int | None:
    """The number of the layer in a tensor's name, None outside of layers."""
    found = _LAYER.fullmatch(name)
    return int(found[1]) if found else None


def is_key_or_value(name: str) -> bool:
    """Whether the tensor is a projection to keys or values, which may have fewer heads than there are ranks."""
    return name.endswith((".attention.wk.weight", ".attention.wv.weight"))


def shape_of(name: str, sizes: MetaSizes, hidden: int | None) -> tuple[int | None, ...] | None:
    """The shape of the unsharded tensor by params.json; None if it does not determine the tensor.

    A dim that params.json does not state is None. hidden: the width of the MLP, taken from the files.
    """
    dim = sizes.dim
    q = sizes.heads * sizes.head
    kv = sizes.kv * sizes.head
    found = _LAYER.fullmatch(name)
    return {
        EMBEDDING: (sizes.vocab, dim),
        "output.weight": (sizes.vocab, dim),
        "norm.weight": (dim,),
        "attention.wq.weight": (q, dim),
        "attention.wk.weight": (kv, dim),
        "attention.wv.weight": (kv, dim),
        "attention.wo.weight": (dim, q),
        "feed_forward.w1.weight": (hidden, dim),
        "feed_forward.w3.weight": (hidden, dim),
        "feed_forward.w2.weight": (dim, hidden),
        "attention_norm.weight": (dim,),
        "ffn_norm.weight": (dim,),
    }.get(found[2] if found else name)
