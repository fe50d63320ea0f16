"""The names that trainers give to the parts of nested states: a model, an optimizer, EMA, masters, moments.

Sources: those of `formats.state_dict.paths`, which defines the meaning of each name by its position.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MODEL_ROOTS = ("model", "model_state_dict", "state_dict", "model_state", "module", "net", "network", "params")
OPTIMIZER_ROOTS = frozenset(
    (
        "optim",
        "optimizer",
        "optimizers",
        "opt",
        "optimizer_state_dict",
        "optim_state_dict",
        "optimizer_state",
        "optimizer_states",
    )
)
EMA_ROOTS = frozenset(
    (
        *("ema", "ema_model", "model_ema", "ema_state_dict", "state_dict_ema", "ema_weights", "ema_params"),
        # stochastic weight averaging, and what averages are called besides
        *("swa_model", "model_swa", "swa_state_dict", "swa_model_state_dict", "swa_params"),
        *("averaged_model", "avg_model", "average_model", "model_avg", "model_averaged", "averaged_params"),
        *("shadow_model", "model_shadow", "shadow_params"),
    )
)
# A second model that follows the first: mean teachers and DINO's, BYOL's and reinforcement learning's targets. The
# words say less than those above: a model that is none may have a module called so.
SECOND_MODELS = frozenset(
    (
        *("teacher", "teacher_model", "model_teacher", "teacher_state_dict", "teacher_params"),
        *("target_network", "target_net", "target_model", "target_encoder", "target_params"),
        *("momentum_encoder", "momentum_model", "shadow"),
    )
)
# Names of the model next to a second model of one of those names, unless the model's tensors are at the top.
LIVE_MODELS = (
    *("student", "student_model", "model_student", "online", "online_model", "online_network", "online_net"),
    *("online_encoder", "policy", "encoder", "network", "net", "model", "module", "params"),
)
_AVERAGE = re.compile(r"(?:^|_)ema(?:_|$)")
# Lightning's WeightAveraging: where this is, `state_dict` holds the averages and LIVE_ROOT the model that is trained
LIVE_ROOT = "current_model_state"
AVERAGING = "averaging_state"
MASTER_ROOTS = frozenset(
    ("master", "master_weights", "master_params", "master_model", "fp32_params", "fp32_weights", "fp32_master_weights")
)
MASTER_STATES = frozenset(
    ("master", "master_param", "master_params", "master_weight", "master_weights", "fp32", "fp32_param", "main_param")
)
# States with their parameter's shape, in torch.optim, apex and bitsandbytes' fp32 states; the first one present is used
# to infer it.
SAME_SHAPE = (
    "exp_avg",
    "exp_avg_sq",
    "momentum_buffer",
    "max_exp_avg_sq",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "exp_inf",
    "sum",
    "prev",
    "step_size",
    "ax",
    "state1",
    "master",
    "master_param",
)
_OTHER_SHAPES = (
    "step",
    "exp_avg_sq_row",
    "exp_avg_sq_col",
    "row_var",
    "col_var",
    "variance",
    "state2",
    "master_weight",
)
OPTIMIZER_STATES = frozenset((*SAME_SHAPE, *_OTHER_SHAPES))


def is_second_model(path: Sequence[str | int], root: Sequence[str | int]) -> bool:
    """Is a tensor at this path below a top level that a model may be called by, but not the model's own?

    Args:
        root: the level that the model is read from.

    >>> is_second_model(("state_dict", "w"), ("model",)), is_second_model(("epoch",), ("model",))
    (True, False)
    """
    return bool(root) and len(path) > 1 and path[0] in MODEL_ROOTS and path[0] != root[0]


def is_average(word: str) -> bool:
    """Is a level of this name one of averages, or of a second model that follows the first (`teacher`)? `ema`, and what
    has it for a part: `params_ema`, `g_ema`, `ema_unet`.

    >>> is_average("generator_ema"), is_average("EMA"), is_average("schema"), is_average("embed")
    (True, True, False, False)
    """
    lower = word.lower()
    return lower in EMA_ROOTS or lower in SECOND_MODELS or bool(_AVERAGE.search(lower))


def without_average(word: str) -> str:
    """What a level of averages is called without that: the name of what it averages.

    >>> without_average("generator_ema"), without_average("ema_model"), without_average("ema")
    ('generator', 'model', '')
    """
    return "_".join(part for part in word.split("_") if part.lower() != "ema")
