"""`params.json`: the sizes of a model under Meta's keys, as far as they are needed to join and to write shards.

    {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 1024, ...}
    -> MetaSizes(dim=4096, layers=32, heads=32, kv=8, head=128, vocab=128256)

Sources: llama-models (July 2025) `models/llama3/args.py`; mistral-inference 1.6 `args.py` (head_dim, hidden_dim); a
`model` level around it, as some releases have, is stepped into (transformers 4.45, `convert_llama_weights_to_hf.py`).
What it does not do: the width of the MLP from `multiple_of` and `ffn_dim_multiplier` (`systems.meta.config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ckpt_tool.core.hints import Hint
from ckpt_tool.errors import CorruptFile
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts.strict_json import parse
from ckpt_tool.systems.meta.consolidated.files import PARAMS

WRONG = "E1405"
LIMIT = 1 << 20  # bytes: real ones have some hundred
MOST = 1 << 40  # a bound for any size, far beyond every model


class MetaSizes(NamedTuple):
    """The sizes of a model, as its params.json states them."""

    dim: int
    layers: int
    heads: int  # number of heads of queries
    kv: int  # number of heads of keys, and of values
    head: int  # elements of one head
    vocab: int | None  # None where the file leaves it to the tokenizer


@dataclass(frozen=True, slots=True)
class MetaHints(Hint):
    """What a source in Meta's format passes on to a writer of the same format."""

    KEY: ClassVar[str] = "meta"
    params: Mapping[str, Any] | None  # the content of params.json
    embedding: int | None  # the dim along which the embedding is sharded, None if it is not
    as_read: bool  # the params are the source's own file, which may be copied


def read_params(tree: Tree) -> Mapping[str, Any] | None:
    """The content of params.json, None if there is no such file. Raises CorruptFile E1405."""
    if not tree.exists(PARAMS):
        return None
    value = parse(tree.read_whole(PARAMS, limit=LIMIT), path=tree.display(PARAMS))
    if not isinstance(value, dict):
        raise CorruptFile(
            "params.json is no JSON object",
            code=WRONG,
            path=tree.display(PARAMS),
            offset=0,
            hint="fetch it again: it states the model's sizes",
        )
    return value


def sizes_of(params: Mapping[str, Any], path: str) -> MetaSizes:
    """The model's sizes in a params.json. path: of the file, for messages.

    Raises CorruptFile E1405, with all faults at once.
    """
    inner = params.get("model")
    level = inner if isinstance(inner, Mapping) else params
    faults = [
        f"{name} is {_show_value(level.get(name))}, want a whole number above 0"
        for name in ("dim", "n_layers", "n_heads")
        if not _count(level.get(name))
    ]
    for name in ("n_kv_heads", "head_dim", "hidden_dim", "multiple_of"):
        if level.get(name) is not None and not _count(level[name]):
            faults.append(f"{name} is {_show_value(level[name])}, want a whole number above 0")

    for name in ("ffn_dim_multiplier", "norm_eps", "rope_theta"):
        if level.get(name) is not None and not _number(level[name]):
            faults.append(f"{name} is {_show_value(level[name])}, want a number above 0")

    # Only valid numbers are compared with each other.
    if not faults:
        dim = level["dim"]
        heads = level["n_heads"]
        kv = level.get("n_kv_heads") or heads
        if heads % kv:
            faults.append(f"{heads} heads don't divide among {kv} heads of keys (n_kv_heads)")
        if level.get("head_dim") is None and dim % heads:
            faults.append(f"dim {dim} doesn't divide among {heads} heads")

    if faults:
        raise CorruptFile(
            faults[0],
            code=WRONG,
            path=path,
            faults=faults[1:],
            hint="fetch params.json again: it states the model's sizes",
        )

    vocab = level.get("vocab_size")
    return MetaSizes(
        dim, level["n_layers"], heads, kv, level.get("head_dim") or dim // heads, vocab if _count(vocab) else None
    )


def _show_value(value: object) -> str:
    return repr(value) if not isinstance(value, list | dict) and len(repr(value)) < 100 else "something else"


def _count(value: object) -> bool:
    return type(value) is int and 0 < value <= MOST


def _number(value: object) -> bool:
    return type(value) in (int, float) and 0 < value <= MOST  # type: ignore[operator]
