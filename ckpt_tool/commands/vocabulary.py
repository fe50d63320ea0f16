"""`--vocab-size`: rows that pad a vocabulary to what its trainer's kernels like are cut off, in every state.

    112 rows, --vocab-size 100   ->   100 rows of the embedding, of the output layer and of their moments

Trainers pad embeddings to a multiple that depends on the tensor parallel degree (Megatron-LM 0.16
`vocab_utils.calculate_padded_vocab_size`), so the rows beyond the tokenizer's are of no use to anybody else. Which tensors
are vocabularies is told by their names; a name that is not on the list keeps its rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ckpt_tool.core.tensor import MODEL, LogicalTensor, first_rows
from ckpt_tool.errors import UsageError
from ckpt_tool.plan.moves import Stored

_VOCABULARY = re.compile(
    r"(?:^|\.)(?:embed_tokens|lm_head|tok_embeddings|word_embeddings|output_layer|wte|embed_out|embed_in)\.(?:weight|bias)$"
)


def is_vocabulary(name: str) -> bool:
    """Does dim 0 of the tensor count tokens?"""
    return _VOCABULARY.search(name) is not None


def trim_vocabulary(stored: Iterable[Stored], size: int) -> tuple[list[Stored], list[dict[str, Any]]]:
    """The tensors with at most `size` rows in each vocabulary, and what went, by state, for the report.

    Raises UsageError E0268 where no tensor is a vocabulary, or one has fewer rows.
    """
    rows, out, gone = list(stored), list[Stored](), dict[str, dict[str, Any]]()
    found = [row.tensor for row in rows if _has_rows(row.tensor)]
    short = [tensor for tensor in found if tensor.shape[0] < size]
    if not found or short:
        raise UsageError(
            f"--vocab-size {size}: {short[0].key} has {short[0].shape[0]} rows" if short
            else f"--vocab-size {size}: no tensor here is named as a vocabulary", code="E0268",
            hint="the size is that of the tokenizer: at most the rows that the embedding has",
        )  # fmt: skip
    for row in rows:
        tensor = row.tensor
        if not _has_rows(tensor) or tensor.shape[0] == size:
            out.append(row)
            continue
        cut = first_rows(tensor, size)
        out.append(row._replace(tensor=cut))
        entry = gone.setdefault(tensor.key.state, {
            "state": tensor.key.state, "tensors": 0, "bytes": 0, "names": [], "reason": f"rows beyond --vocab-size {size}",
        })  # fmt: skip
        entry["bytes"] += tensor.nbytes - cut.nbytes
        entry["names"].append(tensor.key.name)
    return out, list(gone.values())


def _has_rows(tensor: LogicalTensor) -> bool:
    """A vocabulary's tensor; the numbers that an optimizer keeps of it (powers of beta, steps) have no rows."""
    number = tensor.shape == (1,) and tensor.key.state != MODEL
    return bool(tensor.shape) and not number and is_vocabulary(tensor.key.name)
