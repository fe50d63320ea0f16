"""The rows that Megatron pads a vocabulary with, left behind on the way to a system that has none.

    101 words, make_vocab_size_divisible_by 4, 2 tensor ranks   ->   104 rows; the hub's embedding has the 101

Megatron's arguments state the padded size, and where its tokenizer is known the real one; rows are cut only where they say
that the rows beyond the config's vocabulary are padding. Otherwise nothing is cut, and the mapping tells that config and
shapes contradict each other. (Megatron-LM 0.16.1 `training/tokenizer/tokenizer.py`, `_vocab_size_with_padding`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tool.commands.chosen import Chosen
from ckpt_tool.commands.vocabulary import is_vocabulary, trim_vocabulary
from ckpt_tool.core.tensor import MODEL
from ckpt_tool.formats.megatron.args import arguments

_RANKS = 64  # tensor ranks of the largest jobs: a rank pads by less than the multiple, and ranks may have changed since


def without_padding(chosen: Chosen, config: Mapping[str, Any] | None) -> Chosen:
    """`chosen` without the rows that only fill up Megatron's vocabulary, in every state; counted in the report."""
    args = arguments(chosen.sources[0].catalog.extras)
    size, padded = (config or {}).get("vocab_size"), args.get("padded_vocab_size")
    multiple = args.get("make_vocab_size_divisible_by")
    rows = {row.tensor.shape[0] for row in chosen.stored
            if row.tensor.key.state == MODEL and row.tensor.shape and is_vocabulary(row.tensor.key.name)}  # fmt: skip
    if type(size) is not int or type(padded) is not int or type(multiple) is not int or rows != {padded} or size < 1:
        return chosen
    surplus = padded - size
    if not 0 < surplus < multiple * _RANKS or args.get("vocab_size") not in (None, size):
        return chosen
    stored, gone = trim_vocabulary(chosen.stored, size)
    reason = f"{surplus} rows by which Megatron padded the vocabulary of {size}"
    cut = {row.tensor.key for row, old in zip(stored, chosen.stored, strict=True) if row is not old}
    return replace(
        chosen,
        stored=tuple(stored),
        renewed=chosen.renewed | cut,
        dropped=(*chosen.dropped, *({**entry, "reason": reason} for entry in gone)),
    )
