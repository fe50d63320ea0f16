"""Translates what only Megatron has when names become another system's: how norms are centred, and vocabulary padding.

    101 words, make_vocab_size_divisible_by 4, 2 tensor ranks: 104 rows   ->   the hub's embedding has the 101

Without `--vocab-size` Megatron's padding is dropped on the way to a system that has none. Its arguments state the padded
size and, if its tokenizer is known, the real one; rows are cut only if the arguments confirm that the rows beyond the
config's vocabulary are padding. Otherwise nothing is cut, and the mapping reports that config and shapes contradict
each other. (Megatron-LM 0.16.1 `training/tokenizer/tokenizer.py`, `_vocab_size_with_padding`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tool.conversion.vocabulary import is_vocabulary, trim_vocabulary
from ckpt_tool.core.tensor import MODEL
from ckpt_tool.families.base import SHIFTED
from ckpt_tool.families.registry import FamilyMatch
from ckpt_tool.sources.chosen import Chosen
from ckpt_tool.systems.megatron.args import arguments
from ckpt_tool.systems.megatron.source_config import centred_norms

_RANKS = 64  # tensor ranks of the largest jobs: a rank pads by less than the multiple, and ranks may have changed since


def leave_names(chosen: Chosen, found: FamilyMatch) -> tuple[Chosen, FamilyMatch]:
    """Return `chosen` without padding, and the match with the dialect that fits how its norms are centred."""
    if found.dialect == "megatron" and centred_norms(chosen.sources[0]) == (not found.family.centred):
        found = found._replace(dialect=SHIFTED)
    return without_padding(chosen, chosen.config), found


def without_padding(chosen: Chosen, config: Mapping[str, Any] | None) -> Chosen:
    """Return `chosen` without the rows that only pad Megatron's vocabulary, in every state; the report counts them."""
    args = arguments(chosen.sources[0].catalog.extras)
    size = (config or {}).get("vocab_size")
    padded = args.get("padded_vocab_size")
    multiple = args.get("make_vocab_size_divisible_by")
    rows = {
        row.tensor.shape[0]
        for row in chosen.stored
        if row.tensor.key.state == MODEL and row.tensor.shape and is_vocabulary(row.tensor.key.name)
    }
    # Nothing is cut unless all vocabularies have exactly the padded size that the arguments state.
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
