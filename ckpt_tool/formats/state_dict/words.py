"""The words by which trainers' nested states call their parts: a model, an optimizer, EMA, masters, moments.

Sources: those of `formats.state_dict.paths`, which says what each means where it stands.
"""

from __future__ import annotations

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
    ("ema", "ema_model", "model_ema", "ema_state_dict", "state_dict_ema", "ema_weights", "ema_params")
)
MASTER_ROOTS = frozenset(
    ("master", "master_weights", "master_params", "master_model", "fp32_params", "fp32_weights", "fp32_master_weights")
)
MASTER_STATES = frozenset(
    ("master", "master_param", "master_params", "master_weight", "master_weights", "fp32", "fp32_param", "main_param")
)
OPTIMIZER_STATES = frozenset(
    (
        "step",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "exp_inf",
        "sum",
        "prev",
        "step_size",
        "exp_avg_sq_row",
        "exp_avg_sq_col",
        "row_var",
        "col_var",
        "variance",
        "ax",
        "state1",
        "state2",
        "master_param",
        "master_weight",
    )
)
