"""Without ZeRO the optimizer lies in the module file as torch saved it: numbers for parameters, given names here.

    {"module": {"w": T}, "optimizer": {"state": {0: {"step": T, "exp_avg": T}}, "param_groups": [{"params": [0]}]}}
    ->  w, w [step], w [exp_avg]

The numbers are named by `formats.state_paths`, as for any torch file. DeepSpeed's own fp16 wrappers, which keep flat fp32
groups without names in this place, are refused by name. Source: DeepSpeed 0.19.8 `runtime/engine.py`
(`_common_checkpoint_state`), `runtime/fp16/fused_optimizer.py`. Cost: as naming.
"""

from __future__ import annotations

from typing import Any

from ckpt_tool.core.tensor import LogicalTensor, TensorKey, simple_tensor
from ckpt_tool.errors import InputError
from ckpt_tool.formats.deepspeed_rank import REFUSED, ModuleFile
from ckpt_tool.formats.state_paths import Leaf, name_leaves


def optimizer_off(file: ModuleFile) -> tuple[dict[TensorKey, LogicalTensor], dict[str, Any]]:
    """(the optimizer's tensors, its options with names for `params`). Takes the optimizer out of the file's values."""
    values = file.values.pop("optimizer", None)
    if not file.optimizer and not isinstance(values, dict):
        return {}, {}
    wrapped = next(
        (path for path, _ in file.optimizer if len(path) > 1 and path[1] in ("fp32_groups_flat", "fp32_groups")), None
    )
    if wrapped is not None or isinstance(values, dict) and "optimizer_state_dict" in values:
        raise InputError(
            "the optimizer of DeepSpeed's fp16 wrapper without ZeRO: its flat fp32 groups have no names", code=REFUSED,
            path=file.path, hint="resume it once with ZeRO 1 and save it, or leave the optimizer out and convert the module",
        )  # fmt: skip
    extras = {"optimizer": values} if isinstance(values, dict) else {}
    model = [
        Leaf(("module", name), array.shape, (array.path, array.offset, array.shape))
        for name, array in file.module.items()
    ]
    leaves = [*model, *(Leaf(path, array.shape) for path, array in file.optimizer)]
    named = name_leaves(leaves, extras, path=file.path)
    tensors = {}
    for key, (path, array) in zip(named.keys[len(model) :], file.optimizer, strict=True):
        tensors[key] = simple_tensor(key, array, path)
    ids = named.roots.ids.get(("optimizer",), {})
    options = dict(values) if isinstance(values, dict) else {}
    options.pop("state", None)
    groups = options.get("param_groups")
    if isinstance(groups, list):
        options["param_groups"] = [_named(group, ids) for group in groups]
    return tensors, options


def _named(group: Any, ids: Any) -> Any:
    if not isinstance(group, dict) or not isinstance(group.get("params"), list):
        return group
    return {**group, "params": [ids.get(str(number), str(number)) for number in group["params"]]}
