"""Keys of a flex checkpoint and the house's names and states.

    model_state/       model.norm.weight                   model.norm.weight, model
    master_weight/     model.norm.weight.w_0               model.norm.weight, master
    optimizer_state/   model.norm.weight.moment1_0         model.norm.weight, exp_avg
    optimizer_state/   model.norm.weight.beta1_pow_acc_0   model.norm.weight, beta1_pow_acc     (F32 [1])
    optimizer_state/   model.norm.weight.anything_0        model.norm.weight, anything
    ema_state/         model.norm.weight[.w_0]             model.norm.weight, ema

In a plain `save_state_dict` folder nothing says what is what but the keys: the accumulators' suffixes count there, `.w_0` too
unless it ends a static name (`linear_0.w_0`), and of a nested dict the first level where it is called as a model or an
optimizer is. Source: PaddlePaddle 3.3.1 `optimizer/adamw.py` (`sharded_state_dict`), PaddleFormers 1.2.0 `trainer/trainer.py`
(`_save_flex_optimizer_state`), `trainer/utils/zero_cost_checkpoint.py` (EMA).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckpt_tool.core.tensor import EMA, MASTER, MODEL, Path, TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.paddle.accumulators import check_named
from ckpt_tool.formats.paddle_flex.folders import EMA_FOLDER, MASTER_FOLDER, MODEL_FOLDER, OPTIMIZER_FOLDER
from ckpt_tool.formats.state_dict.paths import EMA_ROOTS, MASTER_ROOTS, MODEL_ROOTS, OPTIMIZER_ROOTS
from ckpt_tool.formats.state_dict.tree import dotted

AMBIGUOUS = "E1271"
MASTER_SUFFIX = ".w_0"
_STATES = {
    "moment1_0": "exp_avg", "moment2_0": "exp_avg_sq", "velocity_0": "momentum_buffer", "moment2_max_0": "max_exp_avg_sq",
    "beta1_pow_acc_0": "beta1_pow_acc", "beta2_pow_acc_0": "beta2_pow_acc",
}  # fmt: skip
_TYPES = {state: kind for kind, state in _STATES.items()}
_STATIC = re.compile(r"(?:.*[./])?[A-Za-z]+(?:_[A-Za-z]+)*_\d+")  # linear_0, create_parameter_3, layer_norm_1


def trainer_key(kind: str, key: str) -> TensorKey:
    """Name and state of a key in the Trainer's folder `kind`."""
    if kind == MODEL_FOLDER:
        return TensorKey(key, MODEL)
    if kind in (MASTER_FOLDER, EMA_FOLDER):
        return TensorKey(key.removesuffix(MASTER_SUFFIX), MASTER if kind == MASTER_FOLDER else EMA)
    if key.endswith(MASTER_SUFFIX):
        return TensorKey(key.removesuffix(MASTER_SUFFIX), MASTER)
    name, dot, last = key.rpartition(".")
    if not dot or not name or not last:
        return TensorKey(key, MODEL)
    return TensorKey(name, _STATES.get(last, last.removesuffix("_0") or last))


class Plain(NamedTuple):
    """Keys of a plain folder. keys: one for each (key, path) that was asked for. roots: role -> the first level of its path."""

    keys: list[TensorKey]
    roots: Mapping[str, str]


def plain_keys(entries: Iterable[tuple[str, Path]]) -> Plain:
    """Names and states of a plain folder's keys. Where two keys would get one name, all keep their own."""
    entries = list(entries)
    roots: dict[str, str] = {}
    keys = []
    for key, path in entries:
        role = _role(path)
        if role:
            roots.setdefault(role, path[0])  # type: ignore[arg-type]
            key = dotted(path[1:])
        keys.append(_plain_key(key, role))
    if len(set(keys)) != len(keys):
        return Plain([TensorKey(key) for key, _ in entries], {})
    return Plain(keys, roots)


def _role(path: Path) -> str:
    """What the first level of a nested path says: `model`, `optimizer`, `master`, `ema`, "" for nothing."""
    if len(path) < 2:
        return ""
    roles = ((MODEL, MODEL_ROOTS), ("optimizer", OPTIMIZER_ROOTS), (MASTER, MASTER_ROOTS), (EMA, EMA_ROOTS))
    return next((role for role, names in roles if path[0] in names), "")


def _plain_key(key: str, role: str) -> TensorKey:
    name, dot, last = key.rpartition(".")
    if role == EMA:
        return TensorKey(key.removesuffix(MASTER_SUFFIX), EMA)
    if role == MASTER:
        return TensorKey(key.removesuffix(MASTER_SUFFIX), MASTER)
    if dot and name and last in _STATES:
        return TensorKey(name, _STATES[last])
    if key.endswith(MASTER_SUFFIX) and not _STATIC.fullmatch(name):
        return TensorKey(name, MASTER)
    return TensorKey(key, MODEL)


def suffix_of(key: TensorKey) -> str:
    """What a tensor's key has behind its name, masters and accumulators; "" for the model. Raises UsageError E1271 for a state
    that would be read as another, E1606 for one of a tensor without a name."""
    if key.state == MODEL:
        return ""
    check_named(key)
    if key.state == MASTER:
        return MASTER_SUFFIX
    kind = _TYPES.get(key.state, f"{key.state}_0")
    if kind in _STATES and key.state not in _TYPES or "." in kind or kind in ("_0", "w_0"):
        raise UsageError(
            f"the state {key.state} can't be written: Paddle calls {_STATES.get(kind, 'no state')} so", code=AMBIGUOUS,
            key=str(key), hint=f"add --drop {key.state}",
        )  # fmt: skip
    return f".{kind}"


def folder_of(key: TensorKey) -> str:
    """The Trainer's folder of a tensor."""
    return {MODEL: MODEL_FOLDER, MASTER: MASTER_FOLDER, EMA: EMA_FOLDER}.get(key.state, OPTIMIZER_FOLDER)
