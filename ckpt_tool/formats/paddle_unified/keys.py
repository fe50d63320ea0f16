"""Keys of a unified checkpoint's files and the house's names and states.

    file        key                                  name, state
    model       model.norm.weight                    model.norm.weight, model
    masters     model.norm.weight                    model.norm.weight, master
    optimizer   model.norm.weight/moment1_0          model.norm.weight, exp_avg
    optimizer   model.norm.weight/beta1_pow_acc_0    model.norm.weight, beta1_pow_acc      (F32 [1])
    optimizer   model.norm.weight/anything_0         model.norm.weight, anything

The key is parted at its last `/` (Paddle's structured names have none). Quantised moments: `formats.paddle.quant`.
Source: PaddleFormers 1.2.0 `trainer/unified_checkpoint/utils.py` (`generate_base_static_name`; `FP32_MASTER` is no part of a key).
"""

from __future__ import annotations

from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import EMA, MASTER, MODEL, TensorKey
from ckpt_tool.errors import CorruptFile, UsageError
from ckpt_tool.formats.paddle import quant
from ckpt_tool.formats.paddle.accumulators import check_named

NO_TYPE, AMBIGUOUS = "E1350", "E1271"

_STATES = {
    "moment1_0": "exp_avg", "moment2_0": "exp_avg_sq", "velocity_0": "momentum_buffer", "moment2_max_0": "max_exp_avg_sq",
}  # fmt: skip
_TYPES = {state: kind for kind, state in _STATES.items()} | {
    quant.FIRST8: "moment1_0", quant.SECOND8: "moment2_0", quant.PACKED: "moment2_0",
    quant.FIRST_SCALES: "moment1_0" + quant.SYMMETRIC,
    quant.SECOND_LOW: "moment2_0" + quant.LOW, quant.SECOND_HIGH: "moment2_0" + quant.HIGH,
}  # fmt: skip


def optimizer_key(key: str, dtype: DType, *, path: str) -> TensorKey:
    """Name and state of an optimizer file's key. Raises CorruptFile E1350 for a key without a type."""
    name, found, kind = key.rpartition("/")
    if not found or not name or not kind:
        raise CorruptFile(
            "an optimizer key without a type: want NAME/TYPE", code=NO_TYPE, path=path, key=key[:200],
            hint="the file holds something else than a Paddle optimizer: was a model file renamed?",
        )  # fmt: skip
    if "@" in kind:
        for suffix in quant.SUFFIXES:
            if kind.endswith(suffix):
                base = kind.removesuffix(suffix)
                return TensorKey(name, _STATES.get(base, base.removesuffix("_0")) + suffix)
    state = _STATES.get(kind, kind.removesuffix("_0"))
    if state == "exp_avg" and dtype.name == "I8":
        return TensorKey(name, quant.FIRST8)
    if state == "exp_avg_sq" and dtype.name in ("U8", "I8"):
        return TensorKey(name, quant.SECOND8 if dtype.name == "U8" else quant.PACKED)
    return TensorKey(name, state)


def file_key(key: TensorKey) -> str:
    """The key of a tensor in its file. Raises UsageError E1271 for a state whose name Paddle uses for another, E1606 for
    one of a tensor without a name."""
    if key.state in (MODEL, MASTER, EMA):
        return key.name
    check_named(key)
    kind = _TYPES.get(key.state)
    if kind is None:
        kind = f"{key.state}_0"
        if kind in _STATES or "/" in kind:
            raise UsageError(
                f"the state {key.state} can't be written: Paddle calls {_STATES.get(kind, 'no state')} so", code=AMBIGUOUS,
                key=str(key), hint=f"add --drop {key.state}",
            )  # fmt: skip
    return f"{key.name}/{kind}"
