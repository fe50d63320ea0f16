"""Which tensors a flex checkpoint has: what is made of others, exactly, and said in words.

    tied embeddings     both names stand in model_state/; states stand once, under the name that is first in the alphabet
                        (lm_head.weight before model.embed_tokens.weight); with pipeline stages each stage looks for its own name
    bf16 weights        model_state/ has them, although a job with sharding v2 rounds its masters instead; where the source has
                        masters alone they are those, rounded to bf16

Names that the source has and Paddle would not look for stay beside: its loader asks for the keys it knows.
Source: PaddlePaddle 3.3.1 `optimizer/adamw.py` (`sharded_state_dict`: the first of the sorted names), PaddleFormers 1.2.0
`trainer/trainer.py` (`_load_flex_checkpoint`), runs of tied models. Cost: a pass over the tensors. What it does not do: values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.target import Wanted, WantedTensor
from ckpt_tool.core.tensor import EXTRAS, MODEL, LogicalTensor, TensorKey
from ckpt_tool.formats.base import Fitted
from ckpt_tool.formats.paddle.fit import Rows, with_head, with_weights
from ckpt_tool.formats.paddle.layout import Laid, settle
from ckpt_tool.formats.paddle_flex.heads import with_heads


def fit(tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], options: Mapping[str, Any]) -> Fitted:
    """The tensors to write. Raises UsageError as `paddle.layout.settle` does."""
    rows: Rows = list(enumerate(tensors))
    if _is_plain(options):
        return Fitted(tuple(rows))
    dropped: list[dict[str, Any]] = []
    casts: dict[TensorKey, DType] = {}
    rows = with_head(rows, _settled(rows, extras, options), dropped)
    rows = _tied(rows, _settled(rows, extras, options), dropped)
    rows = with_weights(rows, options, casts, dropped)
    return Fitted(tuple(rows), casts, tuple(dropped))


def _is_plain(options: Mapping[str, Any]) -> bool:
    """Will a plain folder be written again?"""
    hints = options.get("hints")
    own = hints.get("paddle") if isinstance(hints, Mapping) else None
    degrees: Mapping[str, int] = options.get("degrees") or {}
    return isinstance(own, Mapping) and own.get("flex") == "plain" and all(size == 1 for size in degrees.values())


def _settled(rows: Rows, extras: Mapping[str, Any], options: Mapping[str, Any]) -> Laid:
    listed = tuple(WantedTensor(row.key, row.shape, row.dtype) for _, row in rows)
    said = options.get("hints")
    wanted = Wanted(listed, extras, said if isinstance(said, Mapping) else {}, options=options)
    return settle(with_heads(wanted)[0])


def _tied(rows: Rows, laid: Laid, dropped: list[dict[str, Any]]) -> Rows:
    """States of a tied pair under every name by which Paddle's loader asks for them, beside those that there are."""
    head = next((p for p in laid.parameters.values() if p.alias is not None), None)
    if head is None or head.alias is None:
        return rows
    pair = head.alias, head.name
    asked = pair if laid.parameters[head.alias].stages != head.stages else (min(pair),)
    have = {row.key for _, row in rows}
    made: Rows = []
    for index, row in rows:
        if row.key.name in pair and row.key.state not in (MODEL, EXTRAS):
            keys = [TensorKey(name, row.key.state) for name in asked]
            fresh = [key for key in keys if key not in have]
            have.update(fresh)
            made += [(index, replace(row, key=key, path=())) for key in fresh]
    for state in dict.fromkeys(row.key.state for _, row in made):
        dropped.append({
            "state": state, "tensors": 0, "bytes": 0,
            "reason": f"{' and '.join(pair)} are tied: its {state} stands under {' and '.join(asked)}, where Paddle asks for it",
        })  # fmt: skip
    return rows + made
