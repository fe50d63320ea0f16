"""Keeps torchao's description of its tensors in safetensors headers, without which no library can rebuild them.

A tensor subclass is stored as its parts (`weight_schemes.quantised_weights.subclass_part`). In every file, the
`__metadata__` has a JSON text for each tensor of the model, and the list of all of them:

    "m.weight": {"_type": "Int8Tensor", "_data": {"block_size": [1, 64], ...}, "_tensor_data_names": ["qdata", "scale"]}
    "m.bias": {"_type": "Tensor"}
    "tensor_names": ["m.weight", "m.bias"]

transformers 5.23 joins the headers of all files and takes the list of the last one; vLLM reads a file at a time. So
every file states every tensor, as torchao does. Nothing is looked up or called by these texts: a reader finds weights
by names, dtypes and shapes (`weight_schemes.quantised_weights`), and a text is written again as it is.

Source: torchao 0.18 `prototype/safetensors/safetensors_support.py`; transformers 5.23
`quantizers/quantizer_torchao.py`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from ckpt_tool.core.hints import Hint
from ckpt_tool.weight_schemes.quantised_weights import subclass_part

NAMES = "tensor_names"
_PLAIN = json.dumps({"_type": "Tensor"})
_PARTS = "_tensor_data_names"


@dataclass(frozen=True, slots=True)
class Subclasses(Hint):
    """stated: weight -> the text that its file's header has of it; weights whose parts are not written have none."""

    KEY: ClassVar[str] = "torchao"
    stated: Mapping[str, str]


def stated_in(metadata: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Tensor -> its text, of headers as `__metadata__` has them, {} where none is torchao's or one is unsound."""
    found: dict[str, str] = {}
    for each in metadata:
        if NAMES not in each:
            continue
        names = _parsed(each[NAMES])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return {}
        if not all(isinstance(each.get(name), str) for name in names):
            return {}
        found |= {name: each[name] for name in names}
    return found if all(parts_of(text) is not None for text in found.values()) else {}


@lru_cache(maxsize=4096)  # weights of one size have one text
def parts_of(text: str) -> tuple[str, ...] | None:
    """The parts that a tensor's text names, () of a plain tensor; None for what is no such text.

    >>> parts_of('{"_type": "Int8Tensor", "_data": {}, "_tensor_data_names": ["qdata", "scale"]}')
    ('qdata', 'scale')
    """
    value = _parsed(text)
    if not isinstance(value, dict) or not isinstance(value.get("_type"), str):
        return None
    parts = value.get(_PARTS, [])
    sound = isinstance(parts, list) and all(isinstance(part, str) for part in parts)
    return tuple(parts) if sound and bool(parts) == (value["_type"] != "Tensor") else None


@lru_cache(maxsize=4096)
def block_in(text: str) -> tuple[int, int] | None:
    """The (rows, columns) that share a scale by a weight's text, None where it says none.

    >>> block_in('{"_type": "Int8Tensor", "_data": {"block_size": [1, 64]}, "_tensor_data_names": ["qdata", "scale"]}')
    (1, 64)
    """
    value = _parsed(text)
    data = value.get("_data") if isinstance(value, dict) else None
    block = data.get("block_size") if isinstance(data, dict) else None
    if not isinstance(block, list) or len(block) != 2:
        return None
    height, width = block
    sound = type(height) is int and type(width) is int and height > 0 and width > 0
    return (height, width) if sound else None


def present(stated: Mapping[str, str], tensors: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """(the texts of weights of which a part is among `tensors`, the parts of those that are not). stated: of plain
    tensors too."""
    texts: dict[str, str] = {}
    lost: list[str] = []
    for weight, parts in _named(stated).items():
        lost_parts = [part for part in parts if part not in tensors]
        if len(lost_parts) < len(parts):
            texts[weight] = stated[weight]
            lost += lost_parts
    return texts, lost


def header_of(subclasses: Subclasses | None, tensors: Iterable[str]) -> dict[str, str]:
    """What every file states, {} where nothing is torchao's. tensors: all that are written, in order."""
    if subclasses is None:
        return {}
    stated = subclasses.stated
    owners = {part: weight for weight, parts in _named(stated).items() for part in parts}
    names = dict.fromkeys(owners.get(name, name) for name in tensors)
    return {NAMES: json.dumps(list(names)), **{name: stated.get(name, _PLAIN) for name in names}}


def _named(stated: Mapping[str, str]) -> dict[str, list[str]]:
    """Weight -> its parts, as they are called."""
    names: dict[str, list[str]] = {}
    for weight, text in stated.items():
        names[weight] = [subclass_part(weight, part) for part in parts_of(text) or ()]
    return names


def _parsed(text: object) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
