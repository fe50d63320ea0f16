"""Per-rank DTensor files: one `torch.save` a rank and kind of state, as reinforcement learning trainers (verl) write.

    actor/model_world_size_4_rank_0.pt ... _rank_3.pt          {name: DTensor, buffer: tensor}
    actor/optim_world_size_4_rank_{0..3}.pt                    {"state": {name or number: {...}}, "param_groups": [...]}
    actor/extra_state_world_size_4_rank_{0..3}.pt              {"lr_scheduler": {...}, "rng": {...}}

The one idea: a DTensor's pickle holds the whole tensor's shape and its cut, and the file's name the rank, so each file
is a box of each tensor (`formats.state_dict.dtensor_spec`); no index and no collective is needed. The kinds become the
levels of one nested state, `{"model": ..., "optim": ..., "extra_state": ...}`, which `formats.state_dict.paths` names
like any other state.

Specification. File names: verl 2025 `utils/checkpoint/fsdp_checkpoint_manager.py` (`model_`, `optim_`, `extra_state_`,
then `world_size_W_rank_R.pt`); a name without `world_size_W` counts too. Content: torch 2.13 `distributed/tensor`; an
optimizer of `optimizer.state_dict()` numbers its parameters: `formats.state_dict.optimizer_ids` derives their names.

What ranks share: a tensor that is no DTensor, or a box that several hold (Replicate), is a replica, compared when the
values are read. Plain values have to be equal on all ranks, RNG states aside: those are each rank's own, kept as
`extra_state.rng.rank_R`, and a note says so: a job of another size can't go on with them.

Cost: as the pickles. What it does not do: write them (a trainer loads its own, of its own size: `ckpt reshard` gives
one file or dcp), or FSDP1's flat parameters (`LOCAL_STATE_DICT`), which say nothing of the tensors inside.

FSDP1's sharded state dicts are read the same way, from the boxes recorded in their ShardedTensors
(`formats.state_dict.sharded_tensors`); trainers of its time call the files `model_final.rank_0.pth` (DINOv2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.catalog import Catalog, Note, mark_replicas
from ckpt_tool.core.faults import read_by_file
from ckpt_tool.core.hints import Degrees, Globals, Hints
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.missing import is_collecting, report_missing
from ckpt_tool.core.tensor import Chunk, LogicalTensor, Path, StoredArray, TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, InputError
from ckpt_tool.formats import checksums
from ckpt_tool.formats.hub_folder import model_files as hf_files
from ckpt_tool.formats.state_dict import dtensor_spec
from ckpt_tool.formats.state_dict.coded import coded_notes
from ckpt_tool.formats.state_dict.content import TorchContent, read_content
from ckpt_tool.formats.state_dict.dtensor_spec import DTensorPlacement, RankMesh
from ckpt_tool.formats.state_dict.paths import Leaf, name_leaves
from ckpt_tool.formats.state_dict.roots import Ordered
from ckpt_tool.formats.state_dict.sharded_tensors import ShardOfRank, is_sharded, read_shards
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.formats.state_dict.unread import notes_of, set_apart
from ckpt_tool.storage.pickles.pickle_values import PickledRecord, TensorRef, WrapperRef
from ckpt_tool.storage.records import read_array
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.torch.torch_save.choice import MISSING, MIXED, ChosenFiles, TorchRankFile

DISAGREE = "E0354"
UNPLACED = dtensor_spec.UNPLACED
SHOWN = 50
# Keys of random number generators' states: the only plain values that may differ between ranks.
RNG = frozenset(("rng", "rng_state", "rng_states", "random_state", "random_states"))


class _RankShare(NamedTuple):
    """A rank's share of one tensor."""

    rank: int
    array: StoredArray
    shape: tuple[int, ...]  # of the global tensor
    placed: DTensorPlacement | None  # of a DTensor, else None
    shards: ShardOfRank | None = None  # of a ShardedTensor, else None


@dataclass(slots=True)
class _RankStates:
    """The states of all ranks, collected by their path in the nested state."""

    parts: dict[Path, list[_RankShare]] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    unsafe: dict[str, None] = field(default_factory=dict)
    globals: dict[str, None] = field(default_factory=dict)
    ordered: list[tuple[Path, Any]] = field(default_factory=list)
    meshes: dict[RankMesh, None] = field(default_factory=dict)
    own: dict[str, list[int]] = field(default_factory=dict)  # RNG key -> the ranks that have a state of their own
    kinds: dict[str, list[int]] = field(default_factory=dict)  # kind of file -> the ranks read so far, in order


def read(tree: Tree, chosen: ChosenFiles, *, required: bool, prefer: str | None = None) -> Catalog:
    """Read the per-rank files `chosen.ranks` into one catalog.

    Args:
        required: refuse files without CRCs.
        prefer: the level of the state that holds the model, if the user names one.

    Raises Incomplete E0380 naming the ranks without a file or a tensor, InconsistentCheckpoint E0384 (files of two
    jobs) and E0354 (ranks that disagree), InputError E0399 (a part that can't be placed).
    """
    _check_ranks(tree, chosen.ranks)
    state = _RankStates()
    contents = read_by_file((file.name for file in chosen.ranks), lambda name: read_content(tree, name, dtensors=True))
    for file in chosen.ranks:
        _add(tree, file, contents[file.name], state)

    _check_flat(tree, chosen.ranks, state)
    leaves = []
    tensors = []
    names = {(file.kind, file.rank): file.name for file in chosen.ranks}

    for path, parts in state.parts.items():
        tensor = _tensor(tree, path, parts, names)
        tensors.append(tensor)
        leaves.append(Leaf(path, tensor.shape))

    named = name_leaves(leaves, state.extras, path=tree.display(chosen.ranks[0].name), prefer=prefer)
    keyed, unread = set_apart(
        {key: t._replace(key=key) for key, t in zip(named.keys, tensors, strict=True)}, named.faults
    )

    # Tensors may be on meshes of their own, such as one of data parallelism alone; the largest covers the most ranks.
    mesh = max((found.mesh() for found in state.meshes), key=lambda mesh: mesh.size, default=Mesh())

    notes = [
        *chosen.notes,
        *named.notes,
        *notes_of(unread),
        *coded_notes(keyed.values()),
        *_own_notes(state),
        *checksums.missing(tree, keyed.values(), required=required),
    ]
    degrees = Degrees(**mesh.to_json())
    if is_collecting():  # what is missing of each tensor is reported here, and does not stop the reading
        Catalog("torch", keyed).check()

    hints = Hints.of(named.roots, Globals.each(state.globals), Ordered(tuple(state.ordered)), degrees)
    return Catalog(
        "torch",
        tensors=keyed,
        extras=state.extras,
        mesh=mesh,
        files=tuple(file.name for file in chosen.ranks),
        sidefiles=hf_files.of_a_job(tree),
        notes=tuple(notes),
        unsafe=tuple(state.unsafe),
        hints=hints,
        unread=unread,
    )


def _check_ranks(tree: Tree, files: Sequence[TorchRankFile]) -> None:
    """Raise if the file names are not one file for each rank of one job.

    Raises InconsistentCheckpoint E0384 (files of two jobs), Incomplete E0380 (a rank has no file).
    """
    worlds = sorted({file.world for file in files if file.world is not None})
    if len(worlds) > 1:
        odd = [file.name for file in files if file.world != worlds[-1]]
        raise InconsistentCheckpoint(
            f"files of jobs of {' and '.join(map(str, worlds))} ranks are mixed, such as {odd[0]}",
            code=MIXED,
            path=tree.display(),
            faults=odd[1:SHOWN],
            hint="remove the files of the older save",
        )

    # Names without `world_size` can't show that the last ranks are missing.
    world = worlds[0] if worlds else 1 + max(file.rank or 0 for file in files)
    faults: list[str] = []
    missing: list[str] = []

    for kind in dict.fromkeys(file.kind for file in files):
        have = {file.rank for file in files if file.kind == kind and file.rank is not None}
        beyond = sorted(rank for rank in have if rank >= world)
        if beyond:
            raise InconsistentCheckpoint(
                f"{kind} has a file of rank {beyond[0]}, but the names say {world} ranks",
                code=MIXED,
                path=tree.display(),
                hint="the file was renamed, or belongs to another save",
            )
        if have and world - len(have) > 0:
            # A damaged name may give any number of ranks; a million are enough for a message.
            gone = [rank for rank in range(min(world, 1 << 20)) if rank not in have]
            shown = ", ".join(map(str, gone[:20]))
            faults.append(f"{kind}: {world - len(have)} of {world} ranks have no file: rank {shown}")
            first = next(file for file in files if file.kind == kind)
            missing += [_name_of_rank(first, rank) for rank in gone[:100]]

    if faults:
        fault = Incomplete(
            faults[0],
            code=MISSING,
            path=tree.display(),
            faults=faults[1:],
            hint="pass the folder with every rank's file; fetch those that are missing",
        )
        report_missing(fault, files=missing)


def _name_of_rank(peer: TorchRankFile, rank: int) -> str:
    """The name of `rank`'s file, made from the name of another rank's file of the same kind."""
    folder, slash, name = peer.name.rpartition("/")
    before, _, after = name.rpartition(str(peer.rank))
    return f"{folder}{slash}{before}{rank}{after}"


# -- one file ----------------------------------------------------------------------------------------------------------


def _add(tree: Tree, file: TorchRankFile, content: TorchContent, state: _RankStates) -> None:
    """Add one rank's file to `state`: each tensor with its placement, and the plain values."""
    shown = tree.display(file.name)
    state.unsafe.update(dict.fromkeys(content.unsafe))
    state.globals.update(dict.fromkeys(content.globals))
    meshes: dict[int, RankMesh] = {}  # by the id of the pickled mesh, which all DTensors of a file share

    def load(ref: TensorRef) -> list[int]:
        return _integers(tree, content, ref)

    rank = file.rank
    root: Path = (file.kind,) if file.kind else ()
    for path, array in content.leaves:
        wrapper = content.wrapped.get(path)
        placed = shards = None
        if wrapper is not None and is_sharded(wrapper):
            shards = _shards(wrapper, path, rank, shown)
            rank = shards.rank if rank is None else rank
            # FSDP1 knows data parallelism alone: its ShardedTensors have one shard for each rank.
            count = len(shards.every)
            state.meshes[RankMesh((count,), tuple(range(count)), ("dp",))] = None
        elif wrapper is not None:
            try:
                placed, rank = _placed(wrapper, meshes, load, rank)
            except CkptError as e:
                e.path = e.path or shown
                e.key = e.key or dotted(path)[:200]
                raise
            state.meshes[placed.mesh] = None
        owner = rank if rank is not None else 0
        shape = wrapper.shape if wrapper is not None else array.shape
        at = _own_path(root, path, owner, state)
        state.parts.setdefault(at, []).append(_RankShare(owner, array, shape, placed, shards))
    owner = rank if rank is not None else 0
    state.kinds.setdefault(file.kind, []).append(owner)
    _add_extras(content.extras, file, owner, state, shown)
    if owner == 0:  # the attributes of OrderedDicts (`_metadata`) are the same on all ranks
        state.ordered += [((*root, *path), attributes) for path, attributes in content.ordered]


def _shards(wrapper: WrapperRef, path: Path, rank: int | None, shown: str) -> ShardOfRank:
    """The shards that a ShardedTensor records. Raises InconsistentCheckpoint E0354 if the file name gives another
    rank."""
    try:
        shards = read_shards(wrapper, str(path[-1]))
        if rank is not None and shards.rank not in (None, rank):
            raise InconsistentCheckpoint(
                f"the name says rank {rank}, the tensor inside rank {shards.rank}",
                code=DISAGREE,
                hint="the file was renamed: give it back its own name",
            )
    except CkptError as e:
        e.path = e.path or shown
        e.key = e.key or dotted(path)[:200]
        raise
    return shards


def _placed(
    wrapper: WrapperRef, meshes: dict[int, RankMesh], load: Any, rank: int | None
) -> tuple[DTensorPlacement, int]:
    """(placement of a DTensor, rank that wrote the file).

    The rank comes from the file name, or from the mesh (torch 2.13 records it there); the two have to agree.
    """
    spec = wrapper.spec
    if not isinstance(spec, PickledRecord):
        raise InputError("a DTensor without its spec", code=UNPLACED, hint="the file is damaged: save it again")
    record = spec.get("mesh")
    stated = (record.state or {}).get("_rank") if isinstance(record, PickledRecord) else None
    owner = rank
    if owner is None and type(stated) is int:
        owner = stated
    if type(stated) is int and stated != owner:
        raise InconsistentCheckpoint(
            f"the name says rank {rank}, the mesh inside rank {stated}",
            code=DISAGREE,
            hint="the file was renamed: give it back its own name",
        )
    mesh = meshes.get(id(record))
    if mesh is None:
        mesh = meshes[id(record)] = dtensor_spec.read_mesh(record, load, owner)
    if owner is None and len(mesh.ranks) > 1:
        raise InputError(
            f"a part of {len(mesh.ranks)} ranks, and nothing says which rank's",
            code=UNPLACED,
            hint="name the files as their trainer did: model_world_size_W_rank_R.pt, and pass the folder",
        )
    owner = mesh.ranks[0] if owner is None else owner
    return dtensor_spec.read_placed(spec, mesh, len(wrapper.shape)), owner


def _integers(tree: Tree, content: TorchContent, ref: TensorRef) -> list[int]:
    """The values of a small integer tensor, such as the ranks of a mesh."""
    array = content.find(ref) if content.find is not None else None
    if (
        array is None
        or array.dtype.name not in ("I32", "I64")
        or array.strides
        or array.numel > dtensor_spec.RANKS_LIMIT
    ):
        raise InputError("a mesh whose ranks are no list of integers", code=UNPLACED, hint="save it with torch >= 2.2")
    width = array.dtype.bits // 8
    data = read_array(tree, array)
    return [int.from_bytes(data[i : i + width], "little", signed=True) for i in range(0, len(data), width)]


def _own_path(root: Path, path: Path, rank: int, state: _RankStates) -> Path:
    """The path of a tensor in the merged state; RNG states, which each rank has of its own, go below `rank_R`."""
    if root == ("extra_state",) and str(path[0]).lower() in RNG:
        state.own.setdefault(str(path[0]), []).append(rank)
        return (*root, path[0], f"rank_{rank}", *path[1:])
    return (*root, *path)


def _add_extras(extras: Any, file: TorchRankFile, rank: int, state: _RankStates, shown: str) -> None:
    """Add a file's plain values to `state`.

    The first rank's values are kept; those of the other ranks have to be equal, RNG states excepted (E0354).
    """
    if not file.kind:
        _add_whole_extras(extras, rank, state, shown)
        return

    shared = extras if isinstance(extras, dict) else {"value": extras}
    if file.kind == "extra_state":
        own = {key: value for key, value in shared.items() if str(key).lower() in RNG}
        shared = {key: value for key, value in shared.items() if key not in own}
        for key, value in own.items():
            state.own.setdefault(str(key), []).append(rank)
            state.extras.setdefault(file.kind, {}).setdefault(key, {})[f"rank_{rank}"] = value

    # The first rank's values are taken; each later rank is compared with them.
    known = state.kinds[file.kind]
    if len(known) == 1:
        if shared:
            state.extras[file.kind] = {**shared, **state.extras.get(file.kind, {})}
        return

    mine = {
        k: v
        for k, v in state.extras.get(file.kind, {}).items()
        if not (file.kind == "extra_state" and str(k).lower() in RNG)
    }
    where = _difference(mine, shared)
    if where is not None:
        raise InconsistentCheckpoint(
            f"rank {rank} has another {dotted((file.kind, *where))} than rank {known[0]}",
            code=DISAGREE,
            path=shown,
            key=dotted((file.kind, *where)),
            hint="the files come from two saves or two steps: fetch one save's files again",
        )


def _add_whole_extras(extras: Any, rank: int, state: _RankStates, shown: str) -> None:
    """As `_add_extras`, for files that hold all of a rank's state: the levels are those of the pickle itself."""
    shared = dict(extras) if isinstance(extras, dict) else {"value": extras}
    for key in [key for key in shared if str(key).lower() in RNG]:
        value = shared.pop(key)
        state.own.setdefault(str(key), []).append(rank)
        state.extras.setdefault(key, {})[f"rank_{rank}"] = value
    known = state.kinds[""]
    if len(known) == 1:
        state.extras = {**shared, **state.extras}
        return
    mine = {key: value for key, value in state.extras.items() if str(key).lower() not in RNG}
    where = _difference(mine, shared)
    if where is not None:
        raise InconsistentCheckpoint(
            f"rank {rank} has another {dotted(where)} than rank {known[0]}",
            code=DISAGREE,
            path=shown,
            key=dotted(where),
            hint="the files come from two saves or two steps: fetch one save's files again",
        )


def _difference(a: Any, b: Any) -> Path | None:
    """The path of the first difference of two plain values, None when they are equal."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            step = key if isinstance(key, int) else str(key)
            if key not in a or key not in b:
                return (step,)
            below = _difference(a[key], b[key])
            if below is not None:
                return (step, *below)
        return None
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            below = _difference(x, y)
            if below is not None:
                return (i, *below)
        return None
    same = type(a) is type(b) and (a == b or (a != a and b != b))  # NaN equals NaN here
    return None if same else ()


def _own_notes(state: _RankStates) -> Iterable[Note]:
    """Notes on RNG states, which a job of another size cannot resume from."""
    for name, ranks in state.own.items():
        count = len(set(ranks))
        if count > 1:
            yield Note(
                "N-rank-state",
                f"{name} is each rank's own: those of {count} ranks are carried as extra_state.{name}.rank_R; a job of "
                "another layout can't go on with them",
            )


def _check_flat(tree: Tree, files: Sequence[TorchRankFile], state: _RankStates) -> None:
    """Raise InputError E0399 for FSDP1's flat optimizer states: plain 1-d pieces next to a model of sharded DTensors.

    Nothing records which parameters such a piece belongs to.
    """
    cut = any(
        p.placed and any(p.placed.cuts) for path, parts in state.parts.items() if path[0] == "model" for p in parts
    )
    moments = [
        (path, parts) for path, parts in state.parts.items() if path[0] in ("optim", "optimizer") and parts[0].shape
    ]
    if cut and moments and not any(part.placed for _, parts in moments for part in parts):
        path, parts = moments[0]
        raise InputError(
            f"the optimizer's states are plain tensors, a rank's flat piece each ({list(parts[0].shape)})",
            code=UNPLACED,
            path=tree.display(parts[0].array.path),
            key=dotted(path)[:200],
            hint="save the optimizer with FSDP's sharded or full state dict, or as dcp",
        )


# -- one tensor --------------------------------------------------------------------------------------------------------


def _tensor(tree: Tree, path: Path, parts: Sequence[_RankShare], names: Mapping[Any, str]) -> LogicalTensor:
    """The global tensor that the ranks' parts make up. Raises InconsistentCheckpoint E0354, Incomplete E0380."""
    first = parts[0]
    key = dotted(path)[:200]
    for part in parts[1:]:
        for what, mine, theirs in (
            ("global shape", list(first.shape), list(part.shape)),
            ("dtype", first.array.dtype.name, part.array.dtype.name),
            ("placement", _cutting(first), _cutting(part)),
        ):
            if mine != theirs:
                shown = f": {theirs}, not {mine}" if what != "placement" else ""
                raise InconsistentCheckpoint(
                    f"rank {part.rank} has another {what} than rank {first.rank}{shown}",
                    code=DISAGREE,
                    path=tree.display(part.array.path),
                    key=key,
                    hint="the files come from two saves: fetch one save's files again",
                )

    if first.shards is not None:
        return _logical(path, first, _stated_chunks(tree, parts, first.shards, key))

    if first.placed is None:  # a plain tensor: every rank holds a full copy, and the copies are compared when read
        box = whole(first.shape)
        return _logical(path, first, [Chunk(box, part.array, box) for part in parts])

    have = {part.rank for part in parts}
    gone = sorted({rank for part in parts if part.placed for rank in part.placed.mesh.ranks} - have)
    if gone:
        keys = [(str(path[0]), rank) for rank in gone]
        without = [names[key] for key in keys if key in names]
        fault = Incomplete(
            f"rank {', '.join(map(str, gone[:20]))} of the mesh {'lacks it' if without else 'has no file'}",
            code=MISSING,
            path=tree.display(without[0]) if without else tree.display(),
            key=key,
            hint="pass the folder with every rank's file; fetch those that are missing",
        )
        report_missing(fault)

    return _logical(path, first, [chunk for part in parts for chunk in _chunks(tree, part, key)] or [_nothing(first)])


def _cutting(part: _RankShare) -> Any:
    """How a part is cut, as a value to compare.

    Ranks themselves are left out: with tensor parallelism each group of ranks has a mesh of its own, of the same shape.
    """
    if part.shards is not None:
        return part.shards.every
    return None if part.placed is None else (part.placed.mesh.shape, part.placed.cuts, part.placed.order)


def _stated_chunks(tree: Tree, parts: Sequence[_RankShare], shards: ShardOfRank, key: str) -> list[Chunk]:
    """The chunks of a ShardedTensor. Raises Incomplete E0380 for shards of its metadata that are in no file."""
    boxes = {part.shards.box for part in parts if part.shards is not None}
    missing = [rank for rank, box in enumerate(shards.every) if box not in boxes and box.numel]
    if missing:
        fault = Incomplete(
            f"{len(missing)} of the {len(shards.every)} shards that its metadata states are in no file: "
            f"those of rank {', '.join(map(str, missing[:20]))}",
            code=MISSING,
            path=tree.display(),
            key=key,
            hint="pass the folder with every rank's file; fetch those that are missing",
        )
        report_missing(fault)
    return [
        Chunk(part.shards.box, part.array, whole(part.array.shape))
        for part in parts
        if part.shards is not None and part.shards.box is not None
    ]


def _nothing(first: _RankShare) -> Chunk:
    """The one chunk of an empty tensor."""
    zeros = (0,) * len(first.shape)
    return Chunk(Box(zeros, first.shape), first.array, Box(zeros, first.array.shape))


def _chunks(tree: Tree, part: _RankShare, key: str) -> Iterable[Chunk]:
    """The chunks of a DTensor that one rank holds: none, or several if its placement is strided."""
    at = part.placed.mesh.coordinates(part.rank) if part.placed is not None else None
    if part.placed is None or at is None:
        raise InconsistentCheckpoint(
            f"rank {part.rank} is not in the mesh of its own tensor",
            code=DISAGREE,
            path=tree.display(part.array.path),
            key=key,
            hint="the file was renamed, or belongs to another save",
        )
    local, found = dtensor_spec.boxes(part.shape, part.placed, at)
    if local != part.array.shape:
        raise InputError(
            f"rank {part.rank} holds a part of shape {list(part.array.shape)}, its placement gives {list(local)}",
            code=UNPLACED,
            path=tree.display(part.array.path),
            key=key,
            hint="the file was renamed to another rank's name, or was written by a version that cuts otherwise",
        )
    return [Chunk(box, part.array, within) for box, within in found]


def _logical(path: Path, first: _RankShare, chunks: Sequence[Chunk]) -> LogicalTensor:
    return LogicalTensor(TensorKey(""), first.shape, first.array.dtype, mark_replicas(chunks), path)
