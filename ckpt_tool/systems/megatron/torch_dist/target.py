"""Plans a torch_dist checkpoint: `latest_checkpointed_iteration.txt` and `iter_NNNNNNN/` with `.metadata`, `.distcp`
files, the common state and `metadata.json`, so that megatron-core's own `dist_checkpointing.load` accepts it.

The one idea: everything that is specific to Megatron is decided by `megatron.torch_dist.layout` (keys, boxes, ranks)
and `megatron.torch_dist.stored_state` (objects, common state); the rest is a DCP (`dcp_container.dcp_items`).

    iter_0000002/__0_0.distcp   [zip of embedding rows 0-63][zip of linear_qkv (1, 32, 32)] ... [objects]
    iter_0000002/.metadata      keys, boxes, location of each item; planner_data None, as Megatron's planner leaves it

* One file for each rank that writes: the first replica of each box.
* The optimizer is written as `fully_reshardable` (megatron-core >= 0.15), whatever the source had; without the
  distributed optimizer under `fp32_param`. States that Megatron does not know (EMA) are stored under
  `optimizer.state.NAME.KEY`, which it ignores. So are step counters of single parameters; the first of them is also in
  the common state (`common_step`), where Megatron expects one for all.
* `common.pt` (core <= 0.18 needs it, later ones read it), or an item `common_state/shard_0_1` when the source had that.
* `integrity.json` when the source had one: SHA-256 of every other file, filled in when the values are written.
* Without an iteration the folder is `release`, which Megatron takes for weights without one.

Source: NVIDIA/Megatron-LM core 0.16.1 `dist_checkpointing/serialization.py`, `strategies/torch.py`, training
`checkpointing.py` (names of folders and pointer file). Cost: 2 us a box, as much again where a run lists it. What it
does not do: `dp_reshardable`, async saves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.hints import Degrees
from ckpt_tool.core.target import Patch, Target, TargetFile, Wanted, whole_file
from ckpt_tool.core.tensor import EXTRAS, STEP
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.adapters.run import LoraHints
from ckpt_tool.formats.dcp_container.dcp_item_files import ItemFiles
from ckpt_tool.formats.dcp_container.dcp_metadata import METADATA, pickled
from ckpt_tool.formats.state_dict.composer import StoragePart, TorchComposer
from ckpt_tool.formats.state_dict.tree import join
from ckpt_tool.systems.megatron.adapter import RUN_CONFIG, is_adapter, run_text
from ckpt_tool.systems.megatron.args import DIMS, arguments, with_spec
from ckpt_tool.systems.megatron.chains import held_by
from ckpt_tool.systems.megatron.hints import DistHints
from ckpt_tool.systems.megatron.options import MegatronOptions
from ckpt_tool.systems.megatron.pointer import folder_of, pointer_to
from ckpt_tool.systems.megatron.rng import tensors_of_rng
from ckpt_tool.systems.megatron.torch_dist.folder import COMMON, CONFIG, INTEGRITY
from ckpt_tool.systems.megatron.torch_dist.layout import DistLayout
from ckpt_tool.systems.megatron.torch_dist.state import COMMON_STATE
from ckpt_tool.systems.megatron.torch_dist.stored_state import stored_state
from ckpt_tool.systems.megatron.wanted import UNHELD

_STEP_PATH = ("state", "common_step")
_HOLE = "0" * 64  # a SHA-256 in hex, before it is known


def dist_target(wanted: Wanted) -> Target:
    """Return all files of the output.

    Raises:
        UsageError: E0237, E0272, E0273 degrees that the model can't take, E0242, E2001 tensors that the format can't
            hold, E0375 extras that can't be pickled.
    """
    degrees = _degrees(wanted.wish.degrees)
    layout = DistLayout(wanted, with_spec(arguments(wanted.extras), wanted.wish.of(MegatronOptions).spec), degrees)
    state = stored_state(wanted, layout)
    folder = folder_of(wanted.extras.get("iteration"))
    own = wanted.hints.get(DistHints)
    as_file = own is None or own.common_file
    items = ItemFiles(wanted.tensors)
    for fqn, (shape, shares) in layout.entries().items():
        items.tensor(fqn, (fqn,), shape, shares, folder)

    common = TorchComposer()
    skeleton = _common(wanted, state.common, layout, common)
    files = [common.file(folder + COMMON, skeleton)] if as_file else []
    objects = {} if as_file else {f"{COMMON_STATE}/shard_0_1": common.file("", [skeleton])}
    nothing = TorchComposer().file("", [None])  # each object is pickled in a list of one element

    for fqn, value in state.objects:
        if fqn in items.entries or fqn in objects:
            raise UsageError(
                f"two things would be stored under {fqn!r}", code=UNHELD, key=fqn, hint="rename or remove one of them"
            )
        if value is None:  # most are: the extra states of modules without FP8
            objects[fqn] = nothing
        else:
            composer = TorchComposer()
            objects[fqn] = composer.file("", [tensors_of_rng(value, composer.value, inside=isinstance(value, bytes))])

    for fqn, made in objects.items():
        items.object(fqn, (fqn,), made, folder)
    backends: dict[str, Any] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    if as_file:
        backends |= {"common_backend": "torch", "common_backend_version": 1}

    files += [*items.finished(), whole_file(folder + METADATA, pickled(items.entries.values(), folder, nested=False))]
    files.append(whole_file(folder + CONFIG, json.dumps(backends).encode()))
    lora = wanted.hints.get(LoraHints)
    notes = state.notes

    if lora is not None and is_adapter(layout.names):
        line = f"{RUN_CONFIG} says the adapter, its base and the ranks: other sections of a run's config are left out"
        notes = (*notes, line)
        files.append(whole_file(folder + RUN_CONFIG, run_text(lora, layout.degrees, layout.job.gated)))

    if own is not None and own.integrity:
        files.append(_integrity(folder, files))
    files.append(pointer_to(folder))
    copies = wanted.side_file_copies()
    return Target("megatron-dist", (*files, *copies), notes=notes, places=items.places((*files, *copies)))


def _degrees(wished: Degrees) -> dict[str, int]:
    degrees = {dim: wished.at(dim) for dim in DIMS}
    if wished.etp is None:
        degrees["etp"] = degrees["tp"]
    return degrees


def _common(wanted: Wanted, common: dict[Any, Any], layout: DistLayout, composer: TorchComposer) -> Any:
    """Return the common state with its tensors: extras that are tensors, and a step for each optimizer that counts."""
    leaves = []
    step = None
    for number, tensor in enumerate(wanted.tensors):
        if tensor.key.state == EXTRAS:
            path = tensor.path or (tensor.key.name,)
            leaves.append(
                (path, composer.tensor(tensor.shape, tensor.dtype, [StoragePart(number, whole(tensor.shape), 0)]))
            )
        elif tensor.key.state == STEP and step is None and tensor.shape == ():
            step = composer.tensor((), tensor.dtype, [StoragePart(number, Box((), ()), 0)])
    if step is not None:
        counted = [(t.key.name, t.key.name in layout.shapes) for t in wanted.tensors if t.key.state == STEP]
        every = common.get("optimizer")
        for path in _inner_optimizers(every):
            at = next((key for key in path if type(key) is int), None)
            holds = held_by(every, at, layout.facts)
            if any(holds(name, layout.shapes[name]) for name, known in counted if known):
                leaves.append(((*path, *_STEP_PATH), step))
    return join(common, leaves)


def _inner_optimizers(value: Any) -> list[tuple[str | int, ...]]:
    """Return the paths of the dicts with `param_groups` in the common state."""
    if not isinstance(value, dict):
        return []
    if "param_groups" in value:
        return [("optimizer",)]
    if "optimizer" in value:
        return [("optimizer", "optimizer")]
    return [("optimizer", key, "optimizer") for key in value if type(key) is int]


def _integrity(folder: str, files: Sequence[TargetFile]) -> TargetFile:
    """Return the `integrity.json` of `files`, with a patch for each hash, which is known only after writing.

    Patches refer to files by number, so `files` must come first in the target, in this order.
    """
    numbers = {file.path[len(folder) :]: number for number, file in enumerate(files)}
    names = sorted(numbers)
    text = json.dumps({"algorithm": "sha256", "files": dict.fromkeys(names, _HOLE)}, indent=2)
    patches = []
    at = 0
    for name in names:
        at = text.index(_HOLE, at)
        patches.append(Patch(len(text[:at].encode()), "sha256", numbers[name]))
        at += len(_HOLE)
    data = text.encode()
    return TargetFile(folder + INTEGRITY, len(data), ((0, data),), (), tuple(patches))
