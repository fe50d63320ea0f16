"""Main weights: Megatron-FSDP stores the optimizer's fp32 copy as the model; other formats store the rounded model and
the fp32 copy.

The one idea: a job that computes in bf16 updates fp32 weights and rounds them, so the fp32 copy determines both:

    megatron-fsdp               model F32
    megatron, megatron-dist     model BF16, master F32      the model is the master, rounded

Both directions are exact and reported. Main weights differ from a model that was trained in fp32 by all of: `args.bf16`
(or fp16), fp32 weights of all matrices, states of an optimizer, and no separate master.

Sources (NVIDIA/Megatron-LM core 0.19.0): `core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py`
(`main_weight_buffer`, `copy_main_weights_to_model_weights`), `core/optimizer/optimizer.py`
(`_copy_main_params_to_model_params`: `copy_`, which rounds to nearest even). Cost: a pass over the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.tensor import EMA, EXTRAS, MASTER, MODEL, LogicalTensor, TensorKey
from ckpt_tool.formats.base import Fitted
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.args import arguments

F32 = DTYPES["F32"]
_HALVES = {"bf16": "BF16", "fp16": "F16"}  # argument -> dtype
_NO_OPTIMIZER = (MODEL, EMA, EXTRAS)


def half_of(extras: Mapping[str, Any], tensors: Iterable[LogicalTensor]) -> str | None:
    """Return `bf16` or `fp16` if the model's tensors are the main weights of a job that computes in it, else None."""
    args = arguments(extras)
    half = next((name for name in _HALVES if args.get(name) is True), None)
    every = list(tensors)
    states = {tensor.key.state for tensor in every}
    if half is None or MASTER in states or not states.difference(_NO_OPTIMIZER):
        return None
    # All matrices must be fp32; the dtype of vectors decides nothing.
    matrices = [tensor.dtype for tensor in every if tensor.key.state == MODEL and len(tensor.shape) > 1]
    return half if matrices and set(matrices) == {F32} else None


def with_masters(tensors: Sequence[LogicalTensor], extras: Mapping[str, Any]) -> Fitted:
    """Return the tensors with the main weights as the master, and the model rounded from them.

    Each changed tensor refers to its source by number, so the same bytes are read for the master and for the model.
    """
    half = half_of(extras, tensors)
    if half is None:
        return Fitted(tuple(enumerate(tensors)))
    stepped = {t.key.name for t in tensors if t.key.state not in _NO_OPTIMIZER}
    rows = list[tuple[int, LogicalTensor]]()
    masters = list[tuple[int, LogicalTensor]]()
    casts = dict[TensorKey, DType]()
    for number, tensor in enumerate(tensors):
        rows.append((number, tensor))
        key = tensor.key
        if key.state != MODEL or names.is_buffer(key.name) or tensor.dtype != F32:
            continue
        casts[key] = DTYPES[_HALVES[half]]
        if key.name in stepped:
            masters.append((number, tensor._replace(key=TensorKey(key.name, MASTER), path=())))
    reason = f"{len(casts)} weights are the fp32 main weights rounded to {half}, as the job rounds them"
    kept = f"{len(masters)} main weights, which were the model, are the master"
    return Fitted((*rows, *masters), casts, (_line(MODEL, reason), _line(MASTER, kept)))


def as_the_model(tensors: Sequence[LogicalTensor]) -> Fitted:
    """Return the tensors with each master in place of the model's weight, and other 16-bit weights widened to fp32."""
    masters = {t.key.name: number for number, t in enumerate(tensors) if t.key.state == MASTER}
    have = {t.key.name for t in tensors if t.key.state == MODEL}
    rows = list[tuple[int, LogicalTensor]]()
    casts = dict[TensorKey, DType]()
    gone = list[LogicalTensor]()
    wide = 0

    for number, tensor in enumerate(tensors):
        name, state = tensor.key
        if state == MODEL and name in masters:
            gone.append(tensor)
            number = masters[name]
            tensor = tensors[number]._replace(key=TensorKey(name), path=())
        elif state == MASTER and name in have:
            continue
        elif state == MASTER:
            tensor = tensor._replace(key=TensorKey(name), path=())
        elif state == MODEL and tensor.dtype.name in _HALVES.values():
            casts[tensor.key] = F32
            wide += 1
        rows.append((number, tensor))

    dropped = []
    if gone:
        dropped.append(
            _line(MODEL, "16-bit weights that the fp32 master rounds to are left out, as Megatron-FSDP does", gone)
        )

    if masters:
        dropped.append(_line(MASTER, f"{len(masters)} masters are the model, as Megatron-FSDP keeps its main weights"))
    if wide:
        dropped.append(_line(MODEL, f"{wide} 16-bit weights are widened to fp32, as main weights are"))
    return Fitted(tuple(rows), casts, tuple(dropped))


def _line(state: str, reason: str, gone: Sequence[LogicalTensor] = ()) -> dict[str, Any]:
    return {"state": state, "tensors": len(gone), "bytes": sum(t.nbytes for t in gone), "reason": reason}
