"""Removes or adds the padding rows of a vocabulary, which are no tokens (`--vocab-size`).

    112 rows, --vocab-size 100   ->   100 rows of the embedding, of the output layer and of their moments
    100 rows, --vocab-size 112   ->   112 rows, the last 12 of zeros, counted in the report

Trainers pad embeddings to a multiple that depends on the tensor parallel degree (Megatron-LM 0.16
`vocab_utils.calculate_padded_vocab_size`), so the rows beyond the tokenizer's are useless elsewhere. Which tensors have
vocabulary rows is derived from their names; a name that is not on the list keeps its rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.core.tensor import MODEL, LogicalTensor, first_rows
from ckpt_tool.core.wrapper_words import WRAPPERS
from ckpt_tool.errors import UsageError
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.moves import Stored
from ckpt_tool.sources.chosen import Chosen, Conversion, with_computed

# What the hub's tables of tokens end in
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "backbone.embeddings.weight")
_VOCABULARY = re.compile(
    r"(?:^|\.)(?:embed_tokens|lm_head|tok_embeddings|word_embeddings|output_layer|wte|embed_out|embed_in|token_embd"
    r"|lm_head\.w_out|shared_head\.head|shared_head\.output|backbone\.embeddings|model\.embeddings)\.(?:weight|bias)$"
    r"|(?:^|\.)(?:gate|router)\.tid2eid$|(?:^|[./])embedder\.input_embedding$"
    # Words that other modules have too: they are a vocabulary at the top, or right below a wrapper.
    rf"|^(?:(?:{'|'.join(map(re.escape, WRAPPERS))}|decoder)\.)*(?:output|head|embed|embeddings)\.weight$"
    r"|^token_embedder\.embedding$"
)

_TURNED_HEADS = ("logits_dense.kernel",)  # (hidden, tokens)


def is_vocabulary(name: str) -> bool:
    """Does dim 0 of the tensor count tokens?"""
    return _VOCABULARY.search(name) is not None


def trim_vocabulary(stored: Iterable[Stored], size: int) -> tuple[list[Stored], list[dict[str, Any]]]:
    """The tensors with at most `size` rows in each vocabulary, and what went, by state, for the report.

    Raises UsageError E2302 where no tensor is a vocabulary.
    """
    rows = list(stored)
    out = list[Stored]()
    gone = dict[str, dict[str, Any]]()

    if not any(_has_rows(row.tensor) for row in rows):
        raise UsageError(
            f"--vocab-size {size}: no tensor here is named as a vocabulary",
            code="E2302",
            hint="the names that are known end in embed_tokens.weight, lm_head.weight, word_embeddings.weight, ...",
        )

    _refuse_other_rows(rows, size)
    for row in rows:
        tensor = row.tensor
        if not _has_rows(tensor) or tensor.shape[0] <= size:
            out.append(row)
            continue
        cut = first_rows(tensor, size)
        out.append(row._replace(tensor=cut))
        entry = gone.setdefault(
            tensor.key.state,
            {
                "state": tensor.key.state,
                "tensors": 0,
                "bytes": 0,
                "names": [],
                "reason": f"rows beyond --vocab-size {size}",
            },
        )
        entry["bytes"] += tensor.nbytes - cut.nbytes
        entry["names"].append(tensor.key.name)

    return out, list(gone.values())


def _refuse_other_rows(rows: Sequence[Stored], size: int) -> None:
    """Raise UsageError E2302 if a head has its tokens along another dim than 0 (Paddle's Linear, MaxText), or a
    vocabulary is another one (of audio codes, say): cutting one of them and not the other would break the model.

    Row counts may differ if one of the two was padded or cut before: --vocab-size makes them equal again."""
    model = [row.tensor for row in rows if row.tensor.key.state == MODEL]
    vocabularies = [tensor for tensor in model if _has_rows(tensor)]
    wrong = next((tensor for tensor in model if tensor.key.name.endswith(_TURNED_HEADS)), None)
    if wrong is None:
        wrong = _other_vocabulary(vocabularies)
    if wrong is None:
        return

    shown = ", ".join(f"{tensor.key.name} {list(tensor.shape)}" for tensor in (*vocabularies[:1], wrong))
    raise UsageError(
        f"--vocab-size {size}: the vocabularies are not of one size along dim 0: {shown}",
        code="E2302",
        key=wrong.key.name,
        hint="convert to the hub's names first (--to safetensors), and cut there",
    )


def _other_vocabulary(vocabularies: Sequence[LogicalTensor]) -> LogicalTensor | None:
    """The first tensor that is no vocabulary of the same tokens as most are: its rows have another width, or are fewer
    than half as many, or more than twice as many."""
    if not vocabularies:
        return None
    usual = Counter(tensor.shape[0] for tensor in vocabularies).most_common(1)[0][0]
    widths = {tensor.shape[1:] for tensor in vocabularies if tensor.shape[0] == usual}
    for tensor in vocabularies:
        is_near = usual <= 2 * tensor.shape[0] <= 4 * usual
        if tensor.shape[0] != usual and not (is_near and tensor.shape[1:] in widths):
            return tensor
    return None


def resized_vocabulary(chosen: Chosen, job: Conversion) -> Chosen:
    """The pass: `chosen` with `--vocab-size` rows in each vocabulary."""
    size = job.writing.vocab_size
    if size is None:
        return chosen
    stored, gone = trim_vocabulary(chosen.stored, size)
    resized = {row.tensor.key for row in stored if is_vocabulary(row.tensor.key.name)}
    chosen = replace(chosen, stored=tuple(stored), dropped=(*chosen.dropped, *gone), renewed=chosen.renewed | resized)
    return grown_vocabulary(chosen, job.writing)


def grown_vocabulary(chosen: Chosen, writing: Writing) -> Chosen:
    """`chosen` with rows of zeros in each vocabulary of fewer than `--vocab-size` rows. Raises UsageError: E2302 for
    values that are no floats of at most 32 bits, E0264 with --plan and --ray."""
    size = writing.vocab_size or 0
    short = [row for row in chosen.stored if _has_rows(row.tensor) and row.tensor.shape[0] < size]
    if not short:
        return chosen
    from ckpt_tool.run.recipes import Grown

    other = next((row.tensor for row in short if not row.tensor.dtype.is_float or row.tensor.dtype.bits > 32), None)
    if other is not None:
        raise UsageError(
            f"--vocab-size {size}: {other.key} of {other.dtype.name} can't be padded",
            code="E2302",
            key=str(other.key),
            hint="padding is for bf16, fp16 and fp32 values",
        )
    recipes = [
        Grown(row.tensor.key, (size, *row.tensor.shape[1:]), (chosen.input(row),), f"{size} rows") for row in short
    ]
    lines = [
        f"--vocab-size: {size - tensor.shape[0]} rows of zeros are added to {tensor.key}, which has {tensor.shape[0]}"
        for _, tensor in short
    ]
    return with_computed(
        chosen,
        recipes,
        f"{chosen.sources[0].path} (padded)",
        writing,
        option="--vocab-size beyond the rows there are",
        dtypes={row.tensor.key: chosen.casts.get(row.tensor.key, row.tensor.dtype) for row in short},
        notes=lines,
    )


def _has_rows(tensor: LogicalTensor) -> bool:
    """A vocabulary's tensor; the numbers that an optimizer keeps of it (powers of beta, steps) have no rows."""
    number = tensor.shape == (1,) and tensor.key.state != MODEL
    return bool(tensor.shape) and not number and is_vocabulary(tensor.key.name)
