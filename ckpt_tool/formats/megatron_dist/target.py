"""Writing a torch_dist checkpoint: `latest_checkpointed_iteration.txt` and `iter_NNNNNNN/` with `.metadata`, `.distcp`
files, the common state and `metadata.json`, so that megatron-core's own `dist_checkpointing.load` takes it.

The one idea: everything of Megatron's is decided by `megatron_dist.layout` (keys, boxes, ranks) and
`megatron_dist.state` (objects, common state); what is left is a DCP of items, each a torch zip that depends on nothing
but dtype and shape.

    iter_0000002/__0_0.distcp   [zip of embedding rows 0-63][zip of linear_qkv (1, 32, 32)] ... [objects]
    iter_0000002/.metadata      keys, boxes, where each item lies; planner_data None, as Megatron's planner leaves it

* One file a rank that writes: the first replica of each box. Items begin at multiples of 64 bytes (Megatron's do not;
  offsets are read from the metadata), identifiers are None, so that equal input gives equal bytes.
* The optimizer is written as `fully_reshardable` (megatron-core >= 0.15), whatever the source had; without the
  distributed optimizer under `fp32_param`. What Megatron has no place for (EMA) lies under `optimizer.state.NAME.KEY`
  and is ignored by it. A step counter a parameter lies there too, and the first of them in the common state
  (`common_step`), where Megatron
  looks: it has one for all.
* `common.pt` (core <= 0.18 needs it, later ones read it), or an item `common_state/shard_0_1` when the source had that.
* `integrity.json` when the source had one: SHA-256 of every file beside it, filled in when the values have moved.
* Without an iteration the folder is `release`, which Megatron takes for weights without one.

Source: NVIDIA/Megatron-LM core 0.16.1 `dist_checkpointing/serialization.py`, `strategies/torch.py`, training
`checkpointing.py` (names of folders and pointer file). Cost: 20 us a box. What it does not do: `dp_reshardable`, async
saves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.target import Patch, Target, TargetArray, TargetFile, Wanted, whole_file
from ckpt_tool.core.tensor import EXTRAS, STEP
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.dcp.folders import METADATA
from ckpt_tool.formats.dcp.metadata_pickle import Item as MetadataItem
from ckpt_tool.formats.dcp.metadata_pickle import MetadataPickle
from ckpt_tool.formats.megatron.args import DIMS, arguments, with_spec
from ckpt_tool.formats.megatron_dist.folder import COMMON, CONFIG, INTEGRITY, POINTER
from ckpt_tool.formats.megatron_dist.layout import UNHELD, DistLayout, Entry
from ckpt_tool.formats.megatron_dist.objects import COMMON_STATE
from ckpt_tool.formats.megatron_dist.state import stored_state, tensors_of_rng
from ckpt_tool.formats.state_dict.tree import join
from ckpt_tool.formats.torch.content import Part, TorchComposer
from ckpt_tool.storage.pickle_writer import dumps, stored
from ckpt_tool.storage.zip_plan import ZipPlan, plan_zip

ROOT = "archive"  # the top folder in an item's zip, as torch.save to a buffer names it
ALIGNMENT = 64  # bytes between items
_STEP_PATH = ("state", "common_step")
_HOLE = "0" * 64  # a SHA-256 in hex, before it is known


def dist_target(wanted: Wanted) -> Target:
    """The whole output. Raises UsageError: E0237, E0272, E0273 (degrees that the model can't take), E0242, E2001 (what
    can't be held), E0375 (extras that no pickle of ours can hold)."""
    degrees = _degrees(wanted.options.get("degrees") or {})
    layout = DistLayout(wanted, with_spec(arguments(wanted.extras), wanted.options.get("spec")), degrees)
    state = stored_state(wanted, layout)
    folder = _folder(wanted.extras.get("iteration"))
    said = wanted.hints.get("dist")
    as_file = not (isinstance(said, dict) and said.get("common_file") is False)
    writer = _Writer(wanted, folder)
    for entry in layout.entries():
        writer.tensor(entry)
    common = TorchComposer()
    skeleton = _common(wanted, state.common, common)
    files = []
    if as_file:
        files.append(common.file(folder + COMMON, skeleton))
    else:
        writer.append(f"{COMMON_STATE}/shard_0_1", common.file("", [skeleton]))
    for fqn, value in state.objects:
        writer.object(fqn, value)
    backends: dict[str, Any] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    if as_file:
        backends |= {"common_backend": "torch", "common_backend_version": 1}
    files += writer.finished()
    files.append(whole_file(folder + CONFIG, json.dumps(backends).encode()))
    if isinstance(said, dict) and said.get("integrity"):
        files.append(_integrity(folder, files))
    name = folder.rstrip("/")
    pointer = str(int(name.removeprefix("iter_"))) if name != "release" else name
    files.append(whole_file(POINTER, pointer.encode()))
    copies = tuple(TargetFile(name, size, copy_of=name) for name, size in wanted.sidefiles)
    return Target("megatron-dist", (*files, *copies), notes=state.notes)


def _degrees(said: Mapping[str, int]) -> dict[str, int]:
    degrees = {dim: int(said.get(dim, 1)) for dim in DIMS}
    if "etp" not in said:
        degrees["etp"] = degrees["tp"]
    return degrees


def _folder(iteration: Any) -> str:
    if type(iteration) is int and 0 < iteration < 10**12:
        return f"iter_{iteration:07d}/"
    return "release/"


def _common(wanted: Wanted, common: dict[Any, Any], composer: TorchComposer) -> Any:
    """The common state with its tensors: the extras that are tensors, and the optimizer's one step."""
    leaves = []
    step = None
    for number, tensor in enumerate(wanted.tensors):
        if tensor.key.state == EXTRAS:
            path = tensor.path or (tensor.key.name,)
            leaves.append((path, composer.tensor(tensor.shape, tensor.dtype, [Part(number, whole(tensor.shape), 0)])))
        elif tensor.key.state == STEP and step is None and tensor.shape == ():
            step = composer.tensor((), tensor.dtype, [Part(number, Box((), ()), 0)])
    if step is not None:
        leaves += [((*path, *_STEP_PATH), step) for path in _inner_optimizers(common.get("optimizer"))]
    return join(common, leaves)


def _inner_optimizers(value: Any) -> list[tuple[str | int, ...]]:
    """Where the dicts with `param_groups` lie in the common state."""
    if not isinstance(value, dict):
        return []
    if "param_groups" in value:
        return [("optimizer",)]
    if "optimizer" in value:
        return [("optimizer", "optimizer")]
    return [("optimizer", key, "optimizer") for key in value if type(key) is int]


def _integrity(folder: str, files: Sequence[TargetFile]) -> TargetFile:
    """`integrity.json` of `files`, which come first in the target in this order: a hole for each hash."""
    numbers = {file.path[len(folder) :]: number for number, file in enumerate(files)}
    names = sorted(numbers)
    text = json.dumps({"algorithm": "sha256", "files": dict.fromkeys(names, _HOLE)}, indent=2)
    patches, at = [], 0
    for name in names:
        at = text.index(_HOLE, at)
        patches.append(Patch(len(text[:at].encode()), "sha256", numbers[name]))
        at += len(_HOLE)
    data = text.encode()
    return TargetFile(folder + INTEGRITY, len(data), ((0, data),), (), tuple(patches))


class _File:
    """A `.distcp` file in the making."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0
        self.literals: list[tuple[int, bytes]] = []
        self.arrays: list[TargetArray] = []
        self.patches: list[Patch] = []

    def begin(self) -> int:
        """The byte where the next item begins."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT

    def finished(self) -> TargetFile:
        return TargetFile(self.path, self.size, tuple(self.literals), tuple(self.arrays), tuple(self.patches))


class _Writer:
    """Lays items into files, and remembers where."""

    def __init__(self, wanted: Wanted, folder: str) -> None:
        self.wanted = wanted
        self.folder = folder
        self.files: dict[int, _File] = {}
        self.metadata = MetadataPickle()
        self.items: list[MetadataItem] = []
        self._zips: dict[tuple[DType, tuple[int, ...]], ZipPlan] = {}
        self._seen: set[str] = set()

    def _file(self, rank: int) -> _File:
        return self.files.setdefault(rank, _File(f"{self.folder}__{rank}_0.distcp"))

    def _fresh(self, fqn: str) -> None:
        if fqn in self._seen:
            raise UsageError(
                f"two things would be stored under {fqn!r}", code=UNHELD, key=fqn, hint="rename or remove one of them"
            )
        self._seen.add(fqn)

    def tensor(self, entry: Entry) -> None:
        """A stored tensor: an item a box."""
        self._fresh(entry.fqn)
        if entry.dtype.torch is None:
            raise UsageError(
                f"torch has no {entry.dtype.name}", code="E0242", key=entry.fqn, hint="cast it with --dtype"
            )
        self.metadata.tensor(entry.fqn, entry.dtype, entry.shape, ((item.offset, item.shape) for item in entry.items))
        for number, item in enumerate(entry.items):
            plan, file = self._zip(entry.dtype, item.shape), self._file(item.rank)
            base = file.begin()
            file.literals += [(base + at, data) for at, data in plan.literals]
            if item.box.numel:
                file.patches += [Patch(base + hole, "crc32", len(file.arrays)) for hole in plan.crcs[0]]
                file.arrays.append(TargetArray(item.tensor, item.box, base + plan.offsets[0]))
            file.size = base + plan.size
            self.items.append((entry.fqn, item.offset, number, file.path[len(self.folder) :], base, plan.size))

    def _zip(self, dtype: DType, shape: tuple[int, ...]) -> ZipPlan:
        plan = self._zips.get((dtype, shape))
        if plan is None:
            ref = stored("0", shape, dtype)
            plan = self._zips[dtype, shape] = plan_zip(ROOT, dumps(ref), [("0", ref.storage.nbytes)])
        return plan

    def object(self, fqn: str, value: Any) -> None:
        """An object, in a list of one as Megatron saves it, in rank 0's file."""
        composer = TorchComposer()
        skeleton = [tensors_of_rng(value, composer)]
        self.append(fqn, composer.file("", skeleton))

    def append(self, fqn: str, made: TargetFile) -> None:
        """A torch file as an item of rank 0's file."""
        self._fresh(fqn)
        file = self._file(0)
        base, arrays = file.begin(), len(file.arrays)
        file.literals += [(base + at, data) for at, data in made.literals]
        file.arrays += [array._replace(offset=base + array.offset) for array in made.arrays]
        for patch in made.patches:
            span = patch.span and (base + patch.span[0], patch.span[1])
            of = patch.of if patch.of < 0 else arrays + patch.of
            file.patches.append(patch._replace(offset=base + patch.offset, of=of, span=span))
        file.size = base + made.size
        self.metadata.obj(fqn)
        self.items.append((fqn, None, None, file.path[len(self.folder) :], base, made.size))

    def finished(self) -> Sequence[TargetFile]:
        files = [self.files[rank].finished() for rank in sorted(self.files)]
        return [*files, whole_file(self.folder + METADATA, self.metadata.close(None, self.items))]
