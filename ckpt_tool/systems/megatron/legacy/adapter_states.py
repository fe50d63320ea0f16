"""The optimizer of an adapter that verl trained in Megatron: in `dist_ckpt/`, next to the adapter's files.

    actor/adapter_checkpoint/mp_rank_TT[_PPP][_EEE]_adapter.pt    the adapter (`systems.megatron.legacy.adapter_files`)
    actor/dist_ckpt/    optimizer.state.exp_avg.decoder.layers.self_attention.linear_proj.adapter.linear_in.weight, ...

`MegatronCheckpointManager.generate_state_dict` hands Megatron's optimizer the model's sharded state dict, so its states
have the model's keys, as a torch_dist has them (`systems.megatron.torch_dist`), which for an adapter are the names of
its tensors. They are added to the adapter if every name and shape is the adapter's and no rows are stored in an order
of the tensor ranks (`systems.megatron.adapter.stretches`); else they are dropped, and a note states why.

Source: volcengine/verl b178a3cd `utils/checkpoint/megatron_checkpoint_manager.py`,
`utils/megatron/dist_checkpointing.py`.
Megatron's distributed optimizer is saved so by core <= 0.15 alone: later ones refuse (flattened ranges). Cost: reading
that folder's `.metadata`. What it does not do: schedules and RNG states, adapters of experts, which the files give to
each expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from ckpt_tool.core.catalog import Catalog, Note
from ckpt_tool.core.tensor import EXTRAS, MODEL, LogicalTensor
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.adapters.run import LoraHints
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.formats.moved import moved
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron.adapter import is_gated, stretches
from ckpt_tool.systems.megatron.legacy.verl_files import STATES, states_beside

_FOLDER = STATES.rstrip("/")


def with_states(tree: Tree, catalog: Catalog, options: ReadOptions) -> Catalog:
    """Return the catalog of an adapter's files with the optimizer's states added; any other catalog unchanged.

    Faults in the folder of the states are reported in a note, because the adapter is complete without them.
    """
    if not states_beside(tree):
        return catalog
    lora = catalog.hints.get(LoraHints)
    if lora is None:
        return catalog
    below = tree.below(_FOLDER)
    try:
        found = moved(tree, below, _FOLDER, registry.detect(below)[0].read(below, options))
    except StorageError:
        raise
    except CkptError as e:
        return _left(catalog, e.message, e)
    states = {key: tensor for key, tensor in found.tensors.items() if key.state not in (MODEL, EXTRAS)}
    joined = replace(catalog, unsafe=(*catalog.unsafe, *found.unsafe))
    if len(states) < len(found.tensors):
        line = f"{STATES} holds a model or other tensors too: --from megatron-dist opens it"
        joined = replace(joined, notes=(*joined.notes, Note("N-no-state", line, STATES)))
    why = next(_unlike(catalog, states.values(), lora), "") if states else "it holds no states"
    if why:
        return _left(joined, why)
    return replace(
        joined,
        tensors={**catalog.tensors, **states},
        extras={**catalog.extras, **found.extras},
        files=(*catalog.files, *found.files),
        indexes=(*catalog.indexes, *found.indexes),
    )


def _left(catalog: Catalog, why: str, fault: CkptError | None = None) -> Catalog:
    line = f"not read: the optimizer of the adapter's run, its scheduler and random states: {why}"
    return replace(catalog, notes=(*catalog.notes, Note("N-no-state", line, STATES, fault=fault)))


def _unlike(catalog: Catalog, states: Collection[LogicalTensor], lora: LoraHints) -> Iterator[str]:
    """What keeps states from being those of the adapter."""
    shapes = {key.name: tensor.shape for key, tensor in catalog.tensors.items()}
    ranks = catalog.mesh.to_json().get("tp", 1)
    gated = is_gated(lora, shapes) is not False
    for tensor in states:
        name = tensor.key.name
        shape = shapes.get(tensor.key.name)
        if shape is None:
            yield f"it has states of {name}, which the adapter's files do not have"
        elif tensor.numel != 1 and tensor.shape != shape:
            yield f"{tensor.key} has shape {list(tensor.shape)}, the adapter's tensor {list(shape)}"
        elif tensor.shape and stretches(name, shape[0], ranks, gated=gated):
            yield f"rows of {name} are in it as {ranks} tensor ranks had them"
    held = {tensor.key.name for tensor in states}
    if missing := next((name for name in shapes if name not in held), ""):
        yield f"it has no state of {missing}"
