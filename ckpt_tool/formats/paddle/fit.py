"""Which tensors Paddle's files of ranks have: what is made of others, exactly, and said in words.

The one idea: the same training state, held by other tensors:

    tied embeddings     one tensor in a process, and its states once: under the embedding; with pipeline stages the first and the
                        last hold one each, so states stand under both names
    float32 weights     of a bf16 model have no master in a job; a unified checkpoint's copies of them are left out
    bf16 weights        a source of `sharding_io` may have none: without shared states they are the fp32 masters rounded to
                        bf16, as Paddle's loader rounds them; what others with masters alone computed in, nobody knows

Sources: PaddleFormers 1.2.0 `trainer/utils/sharding_io.py` (`_recover_params_from_master_weights`), `nn/pp_model.py`
(`SharedLayerDesc`), runs of tied models. Cost: a pass over the tensors. What it does not do: values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.target import Wanted, WantedTensor
from ckpt_tool.core.tensor import EXTRAS, MASTER, MODEL, LogicalTensor, TensorKey
from ckpt_tool.formats.base import Fitted
from ckpt_tool.formats.paddle.degrees import paddle_hints
from ckpt_tool.formats.paddle.layout import Laid, settle
from ckpt_tool.formats.paddle.rules import text_config
from ckpt_tool.formats.paddle.target import IO, PLAIN, kind_of

HEAD, EMBEDDINGS = "lm_head.weight", ("embed_tokens.weight", "word_embeddings.weight")
Rows = list[tuple[int, LogicalTensor]]


def fit(tensors: Sequence[LogicalTensor], extras: Mapping[str, Any], options: Mapping[str, Any]) -> Fitted:
    """The tensors to write. Raises UsageError as `paddle.layout.settle` does."""
    rows: Rows = list(enumerate(tensors))
    dropped: list[dict[str, Any]] = []
    casts: dict[TensorKey, DType] = {}
    wanted, laid = _settled(rows, extras, options)
    rows = _without_copies(with_head(rows, laid, dropped), dropped)
    wanted, laid = _settled(rows, extras, options)
    rows = _tied(rows, laid, dropped)
    own = paddle_hints(wanted)
    if kind_of(laid, wanted) == PLAIN and own.get("kind") == IO:  # so they are bf16; of other sources nobody knows
        rows = with_weights(rows, options, casts, dropped)
    return Fitted(tuple(rows), casts, tuple(dropped))


def _settled(rows: Rows, extras: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Wanted, Laid]:
    listed = tuple(WantedTensor(row.key, row.shape, row.dtype) for _, row in rows)
    said = options.get("hints")
    wanted = Wanted(listed, extras, said if isinstance(said, Mapping) else {}, options=options)
    return wanted, settle(wanted)


def with_head(rows: Rows, laid: Laid, dropped: list[dict[str, Any]]) -> Rows:
    """The tied head beside the embedding, as Paddle's files have it, where the config says that they are one."""
    names = {row.key.name for _, row in rows if row.key.state == MODEL}
    if text_config(laid.config).get("tie_word_embeddings") is not True or HEAD in names:
        return rows
    found = [(i, row) for i, row in rows if row.key.state == MODEL and row.key.name.endswith(EMBEDDINGS)]
    if len(found) != 1 or len(found[0][1].shape) != 2:
        return rows
    index, row = found[0]
    dropped.append(_made("the tied head is written beside the embedding, as Paddle's files have it"))
    return [*rows, (index, replace(row, key=TensorKey(HEAD, MODEL), path=()))]


def _without_copies(rows: Rows, dropped: list[dict[str, Any]]) -> Rows:
    """Without masters of the float32 weights of a bf16 model (router gates): unified checkpoints copy these weights
    among the masters, jobs keep none, and a job whose optimizer file has one refuses it."""
    kinds = {row.key.name: row.dtype.name for _, row in rows if row.key.state == MODEL}
    if set(kinds.values()) <= {"F32"}:
        return rows
    copies = [row for _, row in rows if row.key.state == MASTER and kinds.get(row.key.name) == "F32"]
    if not copies:
        return rows
    reason = "copies of float32 weights, of which Paddle's jobs keep no master"
    dropped.append(
        {"state": MASTER, "tensors": len(copies), "bytes": sum(row.nbytes for row in copies), "reason": reason}
    )
    gone = {row.key for row in copies}
    return [(index, row) for index, row in rows if row.key not in gone]


def _tied(rows: Rows, laid: Laid, dropped: list[dict[str, Any]]) -> Rows:
    """States of a tied pair under the names that their stages have."""
    head = next((p for p in laid.parameters.values() if p.alias is not None), None)
    if head is None or head.alias is None:
        return rows
    first, last = head.alias, head.name
    apart = laid.parameters[first].stages != head.stages
    held: dict[str, dict[str, tuple[int, LogicalTensor]]] = {}
    for index, row in rows:
        if row.key.name in (first, last) and row.key.state not in (MODEL, EXTRAS):
            held.setdefault(row.key.state, {})[row.key.name] = (index, row)
    out: Rows = []
    for index, row in rows:
        own = held.get(row.key.state, {}) if row.key.name in (first, last) and row.key.state != MODEL else {}
        if not own or apart or row.key.name == first:
            out.append((index, row))
        if apart and len(own) == 1:
            other = last if row.key.name == first else first
            out.append((index, replace(row, key=TensorKey(other, row.key.state), path=())))
            dropped.append(_made(f"of the tied {first} it stands on the first and on the last stage", row.key.state))
        elif own and not apart and row.key.name == last and len(own) == 1:
            out.append((index, replace(row, key=TensorKey(first, row.key.state), path=())))
            dropped.append(_made(f"of {last} it stands under {first}, to which it is tied", row.key.state))
        elif own and not apart and row.key.name == last:
            reason = f"{last} is tied to {first}: Paddle keeps it once"
            dropped.append(_made(reason, row.key.state) | {"tensors": 1, "bytes": row.nbytes})
    return out


def with_weights(
    rows: Rows, options: Mapping[str, Any], casts: dict[TensorKey, DType], dropped: list[dict[str, Any]]
) -> Rows:
    """Weights of the model where the source has masters alone; none anew that was removed by name."""
    have = {row.key.name for _, row in rows if row.key.state == MODEL}
    have |= {key.name for key in options.get("removed", ()) if key.state == MODEL}
    made: Rows = []
    for index, row in rows:
        if row.key.state == MASTER and row.key.name not in have:
            key = TensorKey(row.key.name, MODEL)
            made.append((index, replace(row, key=key, path=())))
            casts[key] = DTYPES["BF16"]
    if not made:
        return rows
    dropped.append(_made(f"{len(made)} weights are the fp32 masters rounded to BF16, as Paddle's loader rounds them"))
    return made + rows


def _made(reason: str, state: str = MODEL) -> dict[str, Any]:
    return {"state": state, "tensors": 0, "bytes": 0, "reason": reason}
