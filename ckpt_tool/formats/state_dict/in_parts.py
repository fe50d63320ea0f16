"""Detects parameters stored in parts: a tuple, a list or a dict of tensors in place of one tensor of a state dict.

    {"fc.weight": (codes, scales), "fc.bias": T}          fc.weight is in parts, in a form that only its writer knows
    {"model": {"fc.weight": {"data": T}}, "epoch": 3}     so it is here
    {"model": {"layers": [{"w": T}, {"w": T}]}}           a tree of modules: layers.0.w, layers.1.w
    {"fc.weight": T, "callbacks": {"best": T}}            a trainer's own value next to the model
    {"fc.weight": T, "fc._extra_state": {"scale": T}}     what a module keeps besides: extras

Dropping the parts would lose a weight; names such as `fc.weight.0` would create weights that no model has. So such
parameters are an error that gives their path. Cost: a look at the words of each path.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tool.core.tensor import Path
from ckpt_tool.errors import InputError
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.formats.state_dict.words import OPTIMIZER_ROOTS

_PARAMETERS = frozenset(("weight", "bias"))  # what torch.nn calls the parameters of a module
_EXTRA_STATE = "_extra_state"  # torch.nn.Module.get_extra_state
_SHOWN = 3


def find_parameter(path: Path, *, is_flat: bool) -> Path | None:
    """The part of `path` that is the name of one parameter, None where the tensor itself is the parameter.

    Args:
        path: from the level of the model on.
        is_flat: the names of this level are dotted and its values tensors, so that a dotted name is a parameter's.

    >>> find_parameter(("fc.weight", 0), is_flat=True), find_parameter(("layers", 0, "weight"), is_flat=False)
    (('fc.weight',), None)
    """
    for depth, step in enumerate(path[:-1]):
        words = str(step).split(".")
        if words[-1] == _EXTRA_STATE or words[0].lower() in OPTIMIZER_ROOTS:
            return None
        is_list = type(path[depth + 1]) is int
        if words[-1] in _PARAMETERS or (len(words) > 1 and (is_list or is_flat)):
            return path[: depth + 1]
    return None


def refuse_parts(parameter: Path, leaf: Path, parts: Sequence[Path]) -> InputError:
    """The error (E3011) for one of the tensors that are stored under the name of a parameter."""
    name = dotted(parameter)[:200]
    inner = [dotted(part[len(parameter) :])[:40] for part in parts[:_SHOWN]]
    shown = ", ".join(inner) + (", ..." if len(parts) > _SHOWN else "")
    container = "a list or tuple" if type(leaf[len(parameter)]) is int else "a dict"
    return InputError(
        f"{name} is {container} where one tensor is expected: it holds {len(parts)} of them ({shown}), and nothing says"
        " which weight they make",
        code="E3011",
        key=dotted(leaf)[:200],
        hint="save each as a tensor under a name of its own, with the code that wrote the file; "
        f"--remove-keys '{name}*' leaves all of it out",
    )
