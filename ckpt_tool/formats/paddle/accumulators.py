"""A rank's optimizer keys -> structured names and states: `linear_3.w_0_fp32_master_0_moment1_0` -> `...q_proj.weight [exp_avg]`.

The one idea: Paddle calls a tensor of the optimizer after the parameter's own (static) name, which is a counter that changes
with the stage and the code; only a table of the same rank (the model file's, or model_meta.json's) says whose it is. A static
name may be any text (`moe_gate_0`, `lm_head_0.w_0`), so the longest one of the table that begins the key is taken.

    table {"a.weight": "linear_1.w_0", "b.weight": "linear_11.w_0"}
    linear_11.w_0_moment1_0              b.weight [exp_avg]
    linear_1.w_0_fp32_master_0_beta1_pow_acc_0      a.weight [beta1_pow_acc]
    master_weights / linear_1.w_0        a.weight [master]

Two structured names may share one static name (tied embeddings): what is stored once is shown once, under the embedding's name
(the first of the table, where Paddle wrote it). Sources: paddlepaddle 3.3.1 `python/paddle/optimizer/optimizer.py` (`_add_accumulator`, `_create_master_weight`,
`state_dict`), PaddleFormers 1.2.0 `trainer/utils/reshard/common.py` (`convert_opt_name_to_tname`).
Cost: some dict look-ups a key. What it does not do: files, shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import UsageError

MASTER_WEIGHTS, SCHEDULER = "master_weights", "LR_Scheduler"
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight")
_INFIX = "fp32_master_0_"
STATES = {
    "moment1": "exp_avg", "moment2": "exp_avg_sq", "moment2_max": "max_exp_avg_sq", "velocity": "momentum_buffer",
    "beta1_pow_acc": "beta1_pow_acc", "beta2_pow_acc": "beta2_pow_acc",
}  # fmt: skip
SCALARS = frozenset(("beta1_pow_acc", "beta2_pow_acc"))
_COUNTER = re.compile(r"_\d+$")
_GUESS = re.compile(
    r"(.+?)(?:_fp32_master_0)?_(moment1|moment2|moment2_max|velocity|beta1_pow_acc|beta2_pow_acc|moment|inf_norm|"
    r"_avg_squared_grad|_avg_squared_update|mean_square|mean_grad|momentum)_0"
)


def check_named(key: TensorKey) -> None:
    """Raise UsageError E1606 for a state of a parameter without a name: its key would be a type alone, which is no key."""
    if not key.name:
        raise UsageError(
            f"the state {key.state} of a tensor without a name can't be written: Paddle calls a state after its parameter",
            code="E1606",
            key=str(key),
            hint="rename the tensor in the source, leave it out with --remove-keys '', or write another format",
        )


class Owner(NamedTuple):
    """Whose a tensor of the optimizer is. static: its parameter's own name. state: in the house's words."""

    static: str
    state: str


class Table:
    """Static name -> the first structured name that has it, of one rank; of a tied pair the embedding's."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.structured: dict[str, str] = {}
        for name, static in names.items():
            if self.structured.setdefault(static, name) != name and name.endswith(_EMBEDDINGS):
                self.structured[static] = name

    def owner(self, key: str) -> Owner | None:
        """Of accumulator `key`, None when no static name of the table begins it."""
        at = len(key)
        while (at := key.rfind("_", 0, at)) > 0:
            if key[:at] in self.structured:
                return Owner(key[:at], state_of(key[at + 1 :]))
        return None

    def guess(self, key: str) -> Owner | None:
        """The same without a table: by the accumulators that Paddle's optimizers have."""
        found = _GUESS.fullmatch(key)
        return Owner(found[1], state_of(f"{found[2]}_0")) if found else None


def state_of(accumulator: str) -> str:
    """`moment1_0`, `fp32_master_0_moment1_0` -> exp_avg; others under their own name without the counter."""
    bare = _COUNTER.sub("", accumulator.removeprefix(_INFIX))
    return STATES.get(bare, bare)


def without_master(tensors: Iterable[tuple[tuple[str | int, ...], tuple[int, ...]]]) -> list[str]:
    """Parameters that an optimizer's file calls moments after as after masters (`linear_3.w_0_fp32_master_0_moment1_0`), and of
    which it holds no master: Paddle writes both or none. tensors: (path, shape) of all; single numbers may lie on any rank."""
    wanted: dict[str, None] = {}
    held = set()
    for path, shape in tensors:
        first = str(path[0])
        if first == MASTER_WEIGHTS and len(path) == 2:
            held.add(str(path[1]))
        elif shape not in ((), (1,)) and f"_{_INFIX}" in first:
            wanted[first.rpartition(f"_{_INFIX}")[0]] = None
    return [static for static in wanted if static not in held]
