"""torchtune's recipe state: the optimizer of a run, joined to the model of the step that it belongs to.

    RUN/epoch_1/model-00001-of-00002.safetensors, config.json      the model, under the hub's names
    RUN/recipe_state/recipe_state.pt                               {"optimizer": ..., "epochs_run": 2, "seed": ...}

The optimizer's states have the shapes of torchtune's own parameters, under their numbers or names in the recipe, and
the one file is overwritten after each epoch. Which parameter a state belongs to is derived, never guessed: `epochs_run`
gives the epoch that the optimizer continues from; the family's rules give the model as it was in memory
(`sources.in_memory`); and the recipes pass all its parameters to the optimizer, in the order in which torchtune's
modules register them. Every count and shape is checked. An optimizer that does not fit is left out, with a note.

    {"state": {0: ...}, "param_groups": [{"params": [0, 1, ...]}]}       recipes for one device
    {"state": {"tok_embeddings.weight": ...}, "param_groups": ...}       distributed ones
    {"tok_embeddings.weight": {"state": {0: ...}, ...}, ...}             an optimizer a parameter (`optimizer_in_bwd`)

Source: torchtune 0.6.1 `recipes/{full_finetune_single_device,full_finetune_distributed}.py` (`save_checkpoint`, after
`epochs_run += 1`), `training/checkpointing/{_checkpointer,_checkpoint_client}.py`, `training/memory.py`
(OptimizerInBackwardWrapper). Cost: the model's mapping both ways, and the file's pickle. What it does not do: an
adapter's optimizer, or two models' (PPO).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.tensor import EXTRAS, MODEL, Path, StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.formats.beside import RECIPE_OF_RUN, UNREAD, recipe_note
from ckpt_tool.formats.moved import moved
from ckpt_tool.formats.state_dict.beside_model import Way, joined
from ckpt_tool.formats.state_dict.content import TorchContent, read_content
from ckpt_tool.formats.state_dict.optimizer_ids import numbers_of
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.config import config_in, read_config
from ckpt_tool.sources.in_memory import in_torchtune
from ckpt_tool.storage.pickles.survey import unsafe_names
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.trainers.names import tune_order

_EPOCH = re.compile(r"epoch_(\d{1,18})")
_OPTIMIZER = "optimizer"


class _OtherModel(Exception):
    """The optimizer is not this model's, or nothing shows that it is. The text is the reason."""


def newest_with_recipe(run: Tree, steps: Sequence[str]) -> str:
    """The newest of several steps if the recipe state continues from it, as in torchtune's own resuming; else ""."""
    try:
        return steps[-1] if _step(read_content(run, RECIPE_OF_RUN)) == steps[-1] else ""
    except StorageError:
        raise
    except (CkptError, _OtherModel):  # the reader of the step reports what is wrong
        return ""


def with_recipe(run: Tree, below: Tree, catalog: Catalog, reading: Reading) -> tuple[Catalog, bool]:
    """The step's catalog with the run's optimizer, and whether it was added.

    If it was, file paths are relative to the run; if not, the catalog is the step's own, with a note on the reason.

    Args:
        run: The tree of the run.
        below: The tree of the step.
        catalog: What was read of the step.
        reading: Options of the user.

    Raises:
        StorageError: The recipe state can't be fetched. Any other fault in it becomes the note.
    """
    step = next(iter({path.split("/")[0] for path in run.listing() if _leads_to(run, path, below)}), "")
    try:
        content = read_content(run, RECIPE_OF_RUN)
        catalog = replace(catalog, unsafe=(*catalog.unsafe, *content.unsafe))
        if _step(content) != step:
            raise _OtherModel(f"it goes on from {_step(content)}, and this is {step}")
        found = _with_states(run, moved(run, below, step, catalog), config_in(below), content, reading)
    except StorageError:
        raise
    except (CkptError, _OtherModel) as e:
        why = "; ".join(filter(None, (e.message, e.hint))) if isinstance(e, CkptError) else str(e)
        note = recipe_note(RECIPE_OF_RUN, why, e if isinstance(e, CkptError) else None)
        code = unsafe_names(run, (RECIPE_OF_RUN,))
        unsafe = tuple(dict.fromkeys((*catalog.unsafe, *code)))
        return replace(catalog, notes=(*catalog.notes, note), unsafe=unsafe), False
    if found.notes and found.notes[-1].code == UNREAD:
        return replace(catalog, notes=found.notes), False
    return found, True


def _leads_to(run: Tree, path: str, below: Tree) -> bool:
    return run.display(path.split("/")[0]) == below.shown


def _step(content: TorchContent) -> str:
    """The folder of the epoch that the recipe state continues from. Raises _OtherModel."""
    extras = content.extras if isinstance(content.extras, dict) else {}
    run = extras.get("epochs_run")
    if type(run) is not int or run < 1:
        raise _OtherModel("it does not say of which epoch it is (epochs_run)")
    return f"epoch_{run - 1}"  # torchtune saves after `epochs_run += 1`, and counts epochs from 0


def _with_states(
    run: Tree, catalog: Catalog, config: Mapping[str, Any] | None, content: TorchContent, reading: Reading
) -> Catalog:
    """The catalog with the optimizer's states and the rest of the recipe state.

    config: config.json of the step. Raises _OtherModel, InputError, UsageError.
    """
    if any(key.state != MODEL for key in catalog.tensors):
        raise _OtherModel("the step has states of its own")
    config = read_config(reading.config) if reading.config else config
    # The optimizer's states have the shapes of the model in memory, not of the stored one (the hub's names and layout).
    stored = {key.name: tensor.shape for key, tensor in catalog.tensors.items()}
    walked = in_torchtune(config or {}, stored, reading.family)
    shapes = stored if walked is None else walked.shapes
    order = tune_order(shapes)
    if order is None:
        raise _OtherModel("the model has tensors that torchtune has under no name known here")
    beside = content.extras[_OPTIMIZER] if isinstance(content.extras.get(_OPTIMIZER), dict) else {}
    leaves = [(path[1:], array) for path, array in content.leaves if path[0] == _OPTIMIZER]
    if "param_groups" not in beside:  # `optimizer_in_bwd`: one optimizer for each parameter
        leaves, beside = _together(leaves, beside)
    _check_numbers(beside, order)
    own = content._replace(leaves=leaves, extras=beside, unsafe=[])
    found = joined(run.display(RECIPE_OF_RUN), catalog, RECIPE_OF_RUN, own, [Way(shapes, order, walked)])
    rest = {TensorKey(dotted(path), EXTRAS): array for path, array in content.leaves if path[0] != _OPTIMIZER}
    tensors = {key: simple_tensor(key, array) for key, array in rest.items()}
    others = {key: value for key, value in content.extras.items() if key != _OPTIMIZER}
    return replace(found, tensors={**found.tensors, **tensors}, extras={**found.extras, **others})


def _check_numbers(beside: Mapping[str, Any], order: Sequence[str]) -> None:
    """Raise _OtherModel if an optimizer that numbers its parameters has another number of them than the model."""
    groups = beside.get("param_groups")
    numbers = numbers_of(groups if isinstance(groups, list) else [])
    count = sum(map(len, numbers or ()))
    if numbers is not None and count != len(order):
        raise _OtherModel(
            f"it numbers {count} parameters, torchtune has this model in {len(order)}"
            + (": it is the optimizer of an adapter" if count > len(order) else "")
        )


def _together(
    leaves: Sequence[tuple[Path, StoredArray]], optimizers: Mapping[str, Any]
) -> tuple[list[tuple[Path, StoredArray]], dict[str, Any]]:
    """Merge optimizers of one parameter each into one that has its states by name.

    Parameters with equal settings share a group. Raises _OtherModel for an optimizer that does not have exactly one
    parameter.
    """
    groups: list[dict[str, Any]] = []
    for name, own in optimizers.items():
        listed = own.get("param_groups") if isinstance(own, Mapping) else None
        if not isinstance(listed, list) or len(listed) != 1 or listed[0].get("params") not in ([0], [name]):
            raise _OtherModel("it holds no optimizer, and not one for each parameter either")
        same = next((group for group in groups if {**group, "params": 0} == {**listed[0], "params": 0}), None)
        if same is None:
            groups.append({**listed[0], "params": [name]})
        else:
            same["params"].append(name)
    alone = [path for path, _ in leaves if len(path) < 4 or path[1] != "state" or path[2] not in (0, path[0])]
    if not groups or alone:
        raise _OtherModel(f"it holds no optimizer: {dotted(alone[0]) if alone else 'it is empty'}")
    return [(("state", path[0], *path[3:]), array) for path, array in leaves], {"param_groups": groups}
