"""Reads a legacy Megatron checkpoint: every rank's pickles, put into one catalog.

Three passes, all over small values: the pickles of all ranks yield names and shapes; names yield the layers of each
stage and the experts of each rank, and so the position of every array in the whole model; then boxes are gathered
(`megatron.job`).

The optimizer's arrays get their names from the rank's own model (`megatron.optimizer`), checked by sizes: a flat buffer
must be exactly as long as its parameters make it, a numbered array must have its parameter's shape. A misfit is an
error, never a guess.

    distrib_optim.pt    {0: {(bf16, f32): {param, exp_avg, exp_avg_sq: f32 [10112]}}}     -> master, exp_avg, exp_avg_sq
    model_optim_rng.pt  optimizer.state {3: {exp_avg, exp_avg_sq, step}}, fp32_from_fp16_params [[...], [...]]
    layer_wise_optimizer_0.pt    the same for the parameters assigned to data rank 0 (`megatron.chains`)

Before 2024-02-13 Megatron wrote each bucket under a plain dtype, in another order of parameters (0.16.1
`load_parameter_state_from_dp_zero_legacy`): such files are refused.

Specification: `systems.megatron.legacy.format`. Cost: a pickle a rank, some us a parameter and state. Of tensor values
only RNG states are read (some KiB a rank, for up to 64 ranks)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.catalog import Catalog, Note, mark_replicas
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.faults import read_by_file
from ckpt_tool.core.hints import Degrees, Globals, Hints
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.missing import report_missing
from ckpt_tool.core.tensor import EXTRAS, MASTER, MODEL, Chunk, LogicalTensor, Path, StoredArray, TensorKey
from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, InputError, UnknownFormat
from ckpt_tool.formats.state_dict.content import TorchContent, read_content
from ckpt_tool.formats.state_dict.tree import dotted, join
from ckpt_tool.formats.state_dict.unread import Hidden, Nowhere, is_shapeless, notes_of, set_apart
from ckpt_tool.formats.state_dict.words import SAME_SHAPE
from ckpt_tool.storage.records import read_array
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.args import arguments, differences, facts_of
from ckpt_tool.systems.megatron.chains import (
    Members,
    chain_members,
    dealt,
    is_layer_wise,
    is_share,
    share_files,
    shares_beside,
)
from ckpt_tool.systems.megatron.extra_states import EXTRA_STATES, WITHOUT, holds_scales, is_empty, is_extra_state
from ckpt_tool.systems.megatron.groups import VALUES, chained, groups_of
from ckpt_tool.systems.megatron.hints import MegatronHints
from ckpt_tool.systems.megatron.job import CONTRADICTION, MegatronJob, MegatronRank, RankArray
from ckpt_tool.systems.megatron.legacy.folders import (
    MISSING,
    MODEL_FILE,
    OPTIM_FILE,
    coordinates,
    rank_folders,
    refuse_renamed,
)
from ckpt_tool.systems.megatron.optimizer import Bucketing, Buffer, bucketing_of, lay_buffers
from ckpt_tool.systems.megatron.rules import gated
from ckpt_tool.systems.megatron.stages import Stages, from_counts

OURS = "ckpt"  # key of the values that Megatron has no place for
STEPS = "E0379"
FORM = "E0303"
UNFIT = "E2004"
RNG_RANKS = 64  # beyond so many ranks their RNG states are left unread
RNG_BYTES = 1 << 16  # the largest RNG state
EXTRA_BYTES = 1 << 26  # of an extra state: 1024 steps of amax of a thousand tensors are 4 MiB


@dataclass(slots=True)
class _RankFiles:
    """A rank's model file, its arrays sorted by kind."""

    path: str  # the rank's folder
    content: TorchContent
    chunks: list[list[tuple[str, StoredArray]]]  # by chunk: parameters and buffers in the model's order
    rest: list[tuple[Path, StoredArray]]  # arrays of no other kind
    optimizer: list[tuple[Path, StoredArray]]  # paths below `optimizer`
    ours: list[tuple[Path, StoredArray]]  # paths below our own key
    rng: list[tuple[Path, StoredArray]]
    where: MegatronRank = field(default_factory=lambda: MegatronRank("", 0, 0, 0, 0))  # known when all files are read

    @property
    def extras(self) -> dict[Any, Any]:
        """The file's values that are no tensors."""
        return self.content.extras if isinstance(self.content.extras, dict) else {}


def read_ranks(tree: Tree) -> Catalog:
    """Return the catalog of the checkpoint. `systems.megatron.legacy.format` lists the errors."""
    folders = rank_folders(tree)
    if not folders:
        raise UnknownFormat(
            f"no rank folder (mp_rank_*/{MODEL_FILE})",
            code="E0393",
            path=tree.display(),
            hint="pass the folder of an iteration, or its parent with latest_checkpointed_iteration.txt",
        )
    # A folder may lack an optimizer file: the job has none, or the file of another rank holds the parameters.
    optimizer_files = [f"{path}/{OPTIM_FILE}" for path in folders]
    optimizer_files = [file for file in optimizer_files if tree.exists(file)]
    optimizer_files += share_files(tree, folders)
    model_files = [f"{path}/{MODEL_FILE}" for path in folders]
    contents = read_by_file((*model_files, *optimizer_files), lambda file: read_content(tree, file))

    ranks = [_sort_model_file(tree, path, contents[f"{path}/{MODEL_FILE}"]) for path in folders]
    return _MegatronReading(tree, folders, ranks, {file: contents[file] for file in optimizer_files}).catalog()


def _sort_model_file(tree: Tree, path: str, content: TorchContent) -> _RankFiles:
    rank = _RankFiles(path, content, [], [], [], [], [])
    arrays_by_key: dict[str, list[tuple[str, StoredArray]]] = {}
    for leaf, array in content.leaves:
        head = str(leaf[0])
        if _is_chunk(head):
            if len(leaf) != 2:
                raise InputError(
                    f"{dotted(leaf)[:120]}: a model of the classes before Megatron-Core",
                    code=FORM,
                    path=tree.display(f"{path}/{MODEL_FILE}"),
                    hint="load it with a Megatron-LM of that time (tools/checkpoint) and save it with "
                    "--use-mcore-models",
                )
            arrays_by_key.setdefault(head, []).append((str(leaf[1]), array))
        elif head == "optimizer":
            rank.optimizer.append((leaf[1:], array))
        elif head == OURS and len(leaf) > 2:
            rank.ours.append((leaf[1:], array))
        elif head == "rng_state":
            rank.rng.append((leaf, array))
        else:
            rank.rest.append((leaf, array))

    # A chunk without tensors (a stage that has no layer) still has its key among the plain values.
    chunk_keys = list(arrays_by_key)
    if isinstance(content.extras, dict):
        chunk_keys += [key for key in content.extras if _is_chunk(key)]
    count = max((int(key.removeprefix("model") or 0) for key in chunk_keys), default=0) + 1
    if count == 1 and "model0" not in arrays_by_key:
        rank.chunks = [arrays_by_key.get("model", [])]
    else:
        rank.chunks = [arrays_by_key.get(f"model{number}", []) for number in range(count)]
    return rank


def _is_chunk(key: Any) -> bool:
    """Return whether it is the key of a chunk of the virtual pipeline: `model`, `model0`, `model1`, ..."""
    if not isinstance(key, str) or not key.startswith("model"):
        return False
    number = key.removeprefix("model")
    return not number or (bool(numeral(number)) and len(key) < 9)


class Gathering:
    """Logical tensors of all states while the ranks' arrays are gathered."""

    def __init__(self) -> None:
        self._gathered: dict[TensorKey, tuple[tuple[int, ...], DType, list[Chunk]]] = {}
        self.values: dict[str, dict[str, Any]] = {}  # parameter -> its states that are numbers, not tensors

    def add(self, state: str, rank_array: RankArray, array: StoredArray) -> None:
        """Add `array`, which holds `rank_array` for `state`. Raises InconsistentCheckpoint E0305 when two ranks have
        different shapes or dtypes."""
        for slot in rank_array.slots:
            key = TensorKey(slot.name, state)
            gathered = self._gathered.setdefault(key, (slot.shape, array.dtype, []))
            if gathered[:2] != (slot.shape, array.dtype):
                shape, dtype, _ = gathered
                raise InconsistentCheckpoint(
                    f"one rank has {dtype.name} {list(shape)}, another {array.dtype.name} {list(slot.shape)}",
                    code=CONTRADICTION,
                    path=array.path,
                    key=str(key),
                    hint="rank files of different runs are mixed",
                )
            gathered[2].append(slot.chunk(array))

    def add_whole(self, key: TensorKey, array: StoredArray) -> None:
        """Add a tensor that every rank has whole (a step counter)."""
        box = Box((0,) * len(array.shape), array.shape)
        self._gathered.setdefault(key, (array.shape, array.dtype, []))[2].append(Chunk(box, array, box))

    def hide(self, key: TensorKey, path: Path, array: StoredArray, fault: CkptError) -> None:
        """Replace a tensor that can't be put together from the ranks' parts by a placeholder with the fault."""
        hidden = Hidden(path, array.shape, array.dtype.name, fault=fault)
        self._gathered.setdefault(key, (array.shape, array.dtype, []))
        self._gathered[key][2][:] = [Chunk(whole(array.shape), hidden.array(array.path), whole(array.shape))]

    def append(self, key: TensorKey, array: StoredArray) -> None:
        """Add `array` as further rows of a tensor that is gathered already."""
        gathered = self._gathered.get(key)
        if gathered is None or gathered[0][1:] != array.shape[1:] or gathered[1] != array.dtype:
            raise InconsistentCheckpoint(
                f"rows {list(array.shape)} of a tensor that is not there, or of another shape",
                code=CONTRADICTION,
                path=array.path,
                key=str(key),
                hint="the file was edited, or rank files of different runs are mixed",
            )

        shape, dtype, chunks = gathered
        box = Box((shape[0], *(0,) * (len(shape) - 1)), array.shape)
        chunks.append(Chunk(box, array, whole(array.shape)))
        self._gathered[key] = ((shape[0] + array.shape[0], *shape[1:]), dtype, chunks)

    def tensors(self) -> dict[TensorKey, LogicalTensor]:
        """Return all tensors, state by state, parameters in the order in which the model registers them."""
        states = {key.state: None for key in self._gathered}
        tensor_names = list(dict.fromkeys(key.name for key in self._gathered))
        ordered_names = [tensor_names[i] for i in names.registration_order(tensor_names)]

        tensors = {}
        for state in states:
            for name in ordered_names:
                key = TensorKey(name, state)
                if key not in self._gathered:
                    continue
                shape, dtype, chunks = self._gathered[key]
                marked = mark_replicas(chunks) if len(chunks) > 1 else tuple(chunks)
                tensors[key] = LogicalTensor(key, shape, dtype, marked)
        return tensors


class _RankOptimizer:
    """A rank's optimizer, whose arrays go to `out`.

    Args:
        job: where parameters are stored.
        rank: whose optimizer it is.
        params: the rank's trainable parameters.
        stored: the optimizer's state without tensors.
        path: of the model file, for messages.
        out: to which the arrays are added.
    """

    def __init__(
        self, job: MegatronJob, rank: MegatronRank, params: Sequence[RankArray], stored: Any, path: str, out: Gathering
    ) -> None:
        self.job = job
        self.rank = rank
        self.path = path
        self.out = out
        self.listed = isinstance(stored, list) or len(chained(stored)) > 1
        self.chain = chained(stored)
        self.params: list[list[RankArray]] = [list(params)]  # of each chained optimizer
        if len(self.chain) > 1:
            dense = [array for array in params if not array.expert]
            experts = [array for array in params if array.expert]
            self.params = [dense, experts]
        self.every = list(params)

    def add_numbered(self, leaves: Iterable[tuple[Path, StoredArray]], members: list[Members] | None = None) -> None:
        """Add the arrays of a non-distributed optimizer.

        Args:
            leaves: arrays by their paths below `optimizer`.
            members: the parameters of each group of each optimizer of the chain, where they are not all.

        Raises:
            InconsistentCheckpoint: E2004, they do not fit the model.
        """
        members = self.check_counts(self.members() if members is None else members)

        # States are numbered through all groups of an optimizer; masters group by group, 16-bit parameters alone.
        numbers: list[list[RankArray]] = []
        masters: list[list[list[RankArray]]] = []
        for groups in members:
            numbers.append([array for group in groups for array in group])
            masters.append([_half_precision(group) for group in groups])
        self._add_plain_values(numbers)

        placed = list[tuple[RankArray, str, Path, StoredArray]]()
        for path, array in leaves:
            part, inner = (path[0], path[1:]) if self.listed else (0, path)
            if not isinstance(part, int) or part >= len(members):
                continue
            inner = inner[1:] if inner[:2] == ("optimizer", "state") else inner
            match inner:
                case ("state", int(number), str(state)) if number < len(numbers[part]):
                    placed.append((numbers[part][number], state, path, array))
                case ("fp32_from_fp16_params", int(group_number), int(position)) if _has_item(
                    masters[part], group_number, position
                ):
                    placed.append((masters[part][group_number][position], MASTER, path, array))
                case ("state", *_) | ("fp32_from_fp16_params", *_):
                    raise self._misfit_error(
                        f"optimizer entry {'.'.join(map(str, path))} has no parameter in the model"
                    )

        # A state that has another shape than one of its parameters (SOAP's) is cut like none of them.
        uncut_states: dict[str, None] = {}
        for parameter, state, _, array in placed:
            if state not in SAME_SHAPE and array.shape != parameter.shape and array.numel != 1:
                uncut_states[state] = None

        for parameter, state, path, array in placed:
            if state in uncut_states and array.numel != 1:
                self._add_uncut(parameter, state, path, array, uncut_states)
            else:
                self._add_state(parameter, state, array)

    def members(self) -> list[Members]:
        """Return the parameters of each group of each optimizer of the chain.

        Raises:
            InputError: E0303, a chain that is neither [dense, experts] nor [matrices, rest].
            InconsistentCheckpoint: E2004, groups that the model's parameters do not form.
        """
        members = chain_members(self.chain, self.every, self.job.facts)
        if members is not None:
            return members
        if len(self.chain) > 1:
            raise InputError(
                f"{len(self.chain)} chained optimizers, want one, [dense, experts] or [matrices, rest]",
                code=FORM,
                path=self.path,
                hint="an optimizer a model chunk (--overlap-param-gather-with-optimizer-step) is not read: take the "
                "model with --state model, or save as torch_dist",
            )
        raise self._misfit_error("the optimizer's groups are not those that the model's parameters make")

    def check_counts(self, members: list[Members]) -> list[Members]:
        """Return `members`. Raises InconsistentCheckpoint E2004 if the file's groups have other numbers of
        parameters."""
        for optimizer, model_groups in zip(self.chain, members, strict=True):
            groups = groups_of(optimizer)
            counts = [len(group["params"]) for group in groups if isinstance(group.get("params"), list)]
            model_counts = [len(group) for group in model_groups]
            if len(counts) != len(groups) or counts != model_counts:
                raise self._misfit_error(f"the optimizer's groups hold {counts} parameters, the model's {model_counts}")
        return members

    def _add_state(self, parameter: RankArray, state: str, array: StoredArray) -> None:
        if array.shape == parameter.shape:
            self.out.add(state, parameter, array)
        # A step counter is not cut: each logical tensor of the parameter gets a copy.
        elif array.numel == 1 and len(array.shape) < 2:
            for name in parameter.names:
                self.out.add_whole(TensorKey(name, state), array)
        else:
            raise InconsistentCheckpoint(
                f"{state} of shape {list(array.shape)} for a parameter of shape {list(parameter.shape)}",
                code=UNFIT,
                path=array.path,
                key=f"{parameter.names[0]} [{state}]",
                hint="the optimizer belongs to another model than the weights",
            )

    def _add_plain_values(self, numbers: Sequence[Sequence[RankArray]]) -> None:
        """Add the states that are plain numbers (the `step` of Emerging-Optimizers).

        Raises InconsistentCheckpoint E0379 if another rank has other numbers.
        """
        for optimizer, params in zip(self.chain, numbers, strict=True):
            inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else {}
            state = inner.get("state") if isinstance(inner, dict) else None
            for number, values in state.items() if isinstance(state, dict) else ():
                states = values.items() if isinstance(values, dict) else ()
                plain_states = {key: value for key, value in states if isinstance(value, int | float)}
                if not plain_states or number not in range(len(params)):
                    continue
                for name in params[number].names:
                    if self.out.values.setdefault(name, plain_states) != plain_states:
                        raise InconsistentCheckpoint(
                            f"{name} has {plain_states} on one rank, {self.out.values[name]} on another",
                            code=STEPS,
                            path=self.path,
                            key=name,
                            hint="files of two saves are mixed: get all of them from one",
                        )

    def _add_uncut(
        self, parameter: RankArray, state: str, path: Path, array: StoredArray, uncut_states: Iterable[str]
    ) -> None:
        """Add a state that does not have its parameter's shape, one of `uncut_states` (SOAP's preconditioners).

        If the rank has the whole parameter, the state is the parameter's. Else it belongs to the rank's part, and the
        ranks' states can't be joined.
        """
        key = TensorKey(parameter.names[0], state)
        if len(parameter.slots) == 1 and parameter.slots[0].box.shape == parameter.slots[0].shape:
            self.out.add_whole(key, array)
            return
        fault = InconsistentCheckpoint(
            f"{state} of shape {list(array.shape)} belongs to one rank's part {list(parameter.shape)} of a parameter "
            "that tensor ranks share",
            code=UNFIT,
            path=array.path,
            key=str(key),
            hint=f"no rule joins them: leave them out with --drop {','.join(uncut_states)}",
        )
        self.out.hide(key, ("optimizer", *path), array, fault)

    def add_flat(self, leaves: Iterable[tuple[Path, StoredArray]]) -> None:
        """Add the arrays of `distrib_optim.pt`.

        Raises InconsistentCheckpoint E2004 if a buffer is not as long as the model makes it, InputError E0303 for the
        form before February 2024.
        """
        # With experts the file is a list [dense, experts], whose paths begin with `value`.
        arrays: dict[int, dict[int, dict[str, StoredArray]]] = {}  # chained optimizer -> buffer -> state
        for path, array in leaves:
            place = path[1:] if path[0] == "value" else (0, *path)
            match place:
                case (int(part), int(number), str(), str(state)):
                    arrays.setdefault(part, {}).setdefault(number, {})[state] = array
                case _:
                    raise InputError(
                        f"an optimizer file of another form: {'.'.join(map(str, path))[:120]}",
                        code=FORM,
                        path=array.path,
                        hint="before 2024-02-13 Megatron wrote buckets apart: load it once with a Megatron of that "
                        "time to 0.16 (--ckpt-convert-update-legacy-dist-opt-format)",
                    )

        for part, stored in arrays.items():
            params = self.params[part] if part < len(self.params) else []
            for number, buffer in enumerate(self._buffers(params, stored, experts=part == 1)):
                for state, line in stored[number].items():
                    for position, member in enumerate(buffer.members):
                        view = line.view(buffer.flat.coalesced(position), member.shape)
                        self.out.add(MASTER if state == "param" else state, member, view)

    def _buffers(
        self, params: Sequence[RankArray], stored: Mapping[int, Mapping[str, StoredArray]], *, experts: bool
    ) -> list[Buffer]:
        """Return the layout of the stored buffers: with the buckets that the arguments state, or with one bucket
        each."""
        stated = bucketing_of(self.job, experts=experts)
        stored_sizes: list[list[int]] = []  # of each buffer, the distinct lengths of its states
        for number in sorted(stored):
            sizes = [array.numel for array in stored[number].values() if not is_shapeless(array)]
            stored_sizes.append(list(dict.fromkeys(sizes)))

        # Only the lengths can prove a bucketing: gaps around shared embeddings and full buckets change them.
        first_tried: list[int] = []
        for bucketing in dict.fromkeys((stated, stated._replace(size=None), Bucketing(None, 1, False, False))):
            buffers = lay_buffers(params, self.job, self.rank.pp, bucketing, DTYPES["F32"])
            model_sizes = [buffer.flat.unpadded for buffer in buffers]
            first_tried = first_tried or model_sizes
            if sorted(stored) != list(range(len(buffers))):
                continue
            if all(set(sizes) <= {size} for sizes, size in zip(stored_sizes, model_sizes, strict=True)):
                return buffers

        distinct_sizes = [size for sizes in stored_sizes for size in sizes]
        raise self._misfit_error(f"flat buffers of {distinct_sizes} elements, the model makes {first_tried}")

    def _misfit_error(self, message: str) -> InconsistentCheckpoint:
        return InconsistentCheckpoint(
            message,
            code=UNFIT,
            path=self.path,
            hint="frozen parameters, another model, or a version of Megatron that orders them otherwise: --state "
            "model leaves the optimizer out; or save once as torch_dist with --dist-ckpt-optim-fully-reshardable",
        )


class _MegatronReading:
    """The reading of one checkpoint: what the ranks agree on, then the tensors, then everything else."""

    def __init__(
        self,
        tree: Tree,
        folders: Mapping[str, tuple[int, ...]],
        ranks: list[_RankFiles],
        optims: Mapping[str, TorchContent],
    ) -> None:
        """Check that all ranks belong to one run, and find the layers and experts of each.

        Args:
            tree: the checkpoint's folder.
            folders: of the ranks, with the numbers in their names.
            ranks: the model files.
            optims: files of the distributed optimizer, by path.
        """
        self.tree = tree
        self.optims = optims
        self.ranks = ranks
        self.first = ranks[0]
        self.notes: list[Note] = []
        self.scales: dict[str, Any] = {}  # extra states with FP8 scales: folder -> chunk -> name -> value
        self.unsafe = [line for rank in ranks for line in rank.content.unsafe]
        self.globals = dict.fromkeys(line for rank in ranks for line in rank.content.globals)
        self.args = arguments(self.first.extras)
        self.facts = facts_of(self.args)
        self.degrees = self.facts.degrees if self.args else _guess_degrees(folders, ranks)
        self.local = [name for rank in ranks for chunk in rank.chunks for name, _ in chunk]
        self.experts = any(".experts." in name for name in self.local)
        self._check_same_run()
        numbers = {rank.path: _rank_number(rank) for rank in ranks}
        for rank, where in zip(ranks, coordinates(folders, self.degrees, numbers, experts=self.experts), strict=True):
            rank.where = where
        refuse_renamed(tree, [(rank.where, arguments(rank.extras)) for rank in ranks], self.degrees)
        self.stages = self._count_stages()
        self.job = self._build_job()

    def catalog(self) -> Catalog:
        """Return the catalog of all ranks."""
        out = Gathering()
        for rank in self.ranks:
            params = self._add_model(rank, out)
            self._add_ours(rank, out)
            self._add_optimizer(rank, params, out)

        # Vocabulary rows that Megatron does not load at this tensor parallel size follow all others.
        for leaf, array in self.first.ours:
            if leaf[0] == "vocab_tail" and len(leaf) == 3:
                out.append(TensorKey(str(leaf[2]), str(leaf[1])), array)

        self._check_steps()

        # Tensors of the first rank that belong to no parameter.
        places = dict(self.first.rest)
        for path, array in self.first.optimizer:
            if path[-1:] == ("scale",):  # fp16's loss scale: one for all chained optimizers
                places.setdefault(("optimizer", *path[-2:]), array)
        for leaf, array in places.items():
            out.add_whole(TensorKey(dotted(leaf), EXTRAS), array)

        # They keep their place, so that a writer of this format puts them back there.
        tensors = out.tensors()
        for leaf in places:
            key = TensorKey(dotted(leaf), EXTRAS)
            tensors[key] = tensors[key]._replace(path=leaf)

        catalog = Catalog(
            "megatron",
            tensors=tensors,
            extras=self._extras() | ({VALUES: out.values} if out.values else {}),
            mesh=Mesh.of_degrees(self.degrees),
            files=self._files(),
            sidefiles=(),
            notes=tuple(self.notes),
            unsafe=tuple(dict.fromkeys(self.unsafe)),
            hints=self._hints(),
        )

        # A gap in the optimizer has a likelier cause than the gap itself: say that first.
        try:
            catalog.check()
        except Incomplete as error:
            raise self._explain_missing_optimizer() or error from None

        read_tensors, unread = set_apart(tensors)
        return replace(catalog, tensors=read_tensors, unread=unread, notes=(*catalog.notes, *notes_of(unread)))

    def _explain_missing_optimizer(self) -> Incomplete | None:
        """Return an error naming the ranks without an optimizer file, None if no rank or every rank lacks it."""
        files = [f"{rank.path}/{OPTIM_FILE}" for rank in self.ranks]
        lost = [file for file in files if not self.tree.exists(file)]
        if not lost or len(lost) == len(files):
            return None
        return Incomplete(
            f"{len(lost)} of {len(files)} ranks lack their {OPTIM_FILE}, which holds their part of the optimizer",
            code=MISSING,
            path=self.tree.display(lost[0]),
            faults=lost[1:50],
            hint="copy it from where the job wrote it, or leave the optimizer out with --state model",
        )

    # -- what the ranks agree on ---------------------------------------------------------------------------------------

    def _check_same_run(self) -> None:
        """Raise InconsistentCheckpoint E0305 if ranks differ in iteration, degrees or model."""
        faults: list[tuple[str, str]] = []
        for rank in self.ranks:
            faults += ((rank.path, what) for what in self._list_differences(rank))
        folder = (self.first.path.rpartition("/")[0] or self.tree.shown).rstrip("/").rpartition("/")[2]
        iteration = self.first.extras.get("iteration")
        if (
            type(iteration) is int
            and folder.startswith("iter_")
            and numeral(folder[5:])
            and int(folder[5:]) != iteration
        ):
            self.notes.append(
                Note("N0304", f"the folder is {folder}, the files belong to iteration {iteration}", self.first.path)
            )

        if faults:
            path, what = faults[0]
            raise InconsistentCheckpoint(
                f"{path} {what} in {self.first.path}",
                code=CONTRADICTION,
                path=self.tree.display(f"{path}/{MODEL_FILE}"),
                faults=[f"{path} {what}" for path, what in faults[1:50]],
                hint="rank files of different saves are mixed: take all ranks from one",
            )

    def _list_differences(self, rank: _RankFiles) -> Iterator[str]:
        """Yield how a rank differs from the first one. Differences that don't affect tensors become a note instead."""
        values = rank.extras
        first_values = self.first.extras
        for key in ("iteration", "checkpoint_version", "num_floating_point_operations_so_far", "opt_param_scheduler"):
            if values.get(key) != first_values.get(key):
                yield f"belongs to {key} {_short(values.get(key))}, not {_short(first_values.get(key))} as"

        # Some arguments decide how tensors are cut; the others may differ (paths, logging).
        args = arguments(values)
        deciding, undeciding = differences(self.args, args)
        for key in deciding:
            yield f"was written with {key} {_short(args.get(key))}, not {_short(self.args.get(key))} as"
        if undeciding:
            what = (
                f"{len(undeciding)} arguments differ from those of {self.first.path}, which are kept: "
                f"{', '.join(map(str, undeciding[:10]))}"
            )
            self.notes.append(Note("N0305", what, f"{rank.path}/{MODEL_FILE}"))

        if len(rank.chunks) != len(self.first.chunks):
            yield f"has {len(rank.chunks)} model chunks, not {len(self.first.chunks)} as"

    def _count_stages(self) -> Stages:
        """Return the layers of each chunk, as the files show them. Raises Incomplete E0302 if some are missing."""
        counts: dict[tuple[int, int], int] = {}
        mtp: dict[tuple[int, int], int] = {}
        for rank in self.ranks:
            for number, chunk in enumerate(rank.chunks):
                place = (number, rank.where.pp)
                layers = names.layers_count(name for name, _ in chunk)
                mtp_layers = names.mtp_count(name for name, _ in chunk)
                counts[place] = max(counts.get(place, 0), layers)
                mtp[place] = max(mtp.get(place, 0), mtp_layers)

        # Layers are numbered chunk by chunk, inside a chunk stage by stage.
        places = [(v, p) for v in range(len(self.first.chunks)) for p in range(self.degrees["pp"])]
        total = sum(counts.get(place, 0) for place in places)
        if self.facts.layers and total != self.facts.layers and any(counts.values()):
            fault = Incomplete(
                f"the ranks hold {total} layers, the arguments say {self.facts.layers}",
                code=MISSING,
                path=self.tree.display(self.first.path),
                faults=[f"stage {p}, chunk {v}: {counts.get((v, p), 0)} layers" for v, p in places][:50],
                hint="a layer is missing from a rank's file, or files of two models are mixed",
            )
            report_missing(fault)
            self._fill_missing_layers(counts, places, self.facts.layers - total)

        mtp_place = next((i for i, place in enumerate(places) if mtp.get(place)), None)
        stages = from_counts(
            [counts.get(place, 0) for place in places],
            self.degrees["pp"],
            len(self.first.chunks),
            mtp=max(mtp.values(), default=0),
            mtp_at=mtp_place,
        )
        self.degrees["vpp"] = len(self.first.chunks)
        return stages

    @staticmethod
    def _fill_missing_layers(counts: dict[tuple[int, int], int], order: Sequence[tuple[int, int]], layers: int) -> None:
        """Assign the missing layers to the stages without layers, so that later stages keep their numbers."""
        empty = [place for place in order if not counts.get(place)]
        for number, place in enumerate(empty):
            counts[place] = layers // len(empty) + (number < layers % len(empty))

    def _build_job(self) -> MegatronJob:
        arrays = [pair for rank in self.ranks for chunk in rank.chunks for pair in chunk]
        shapes = {name: array.shape for name, array in arrays if not is_shapeless(array)}

        # Names show the number of experts, except for grouped ones, which have no number in their names.
        experts_per_rank = names.experts_count(self.local)
        ep = self.degrees["ep"]
        if not experts_per_rank and self.experts and self.facts.experts:
            experts_per_rank = self.facts.experts // ep

        if self.facts.experts and experts_per_rank and experts_per_rank * ep != self.facts.experts:
            fault = Incomplete(
                f"{ep} expert ranks hold {experts_per_rank} experts each, "
                f"the arguments say {self.facts.experts} in all",
                code=MISSING,
                path=self.tree.display(self.first.path),
                hint="expert tensors are missing from the rank files",
            )
            report_missing(fault)

        return MegatronJob(
            self.facts,
            self.degrees,
            self.stages,
            experts_per_rank * ep,
            gated(shapes, self.facts),
            self._down_shared(shapes),
            kept=self._vocab_rows(),
        ).of_shapes(shapes, self.degrees["tp"])

    def _vocab_rows(self) -> int | None:
        """Return the rows of vocabularies without the zero rows that our writer added, None if it added none."""
        ours = self.first.extras.get(OURS)
        rows = ours.get("vocab_rows") if isinstance(ours, dict) else None
        if type(rows) is not int or rows <= 0:
            return None
        self.notes.append(Note("N0303", f"vocabulary rows from {rows} on are padding that ckpt added", self.first.path))
        return rows

    def _down_shared(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether MLA's down projections are cut over tensor ranks.

        Their sizes show it if the arguments state the whole size; else they are copies exactly with Transformer
        Engine's spec, which fused norms show.
        """
        tp = self.degrees["tp"]
        for name, shape in shapes.items():
            if name.endswith("linear_q_down_proj.weight") and self.facts.q_rank:
                return tp > 1 and shape[0] * tp == self.facts.q_rank
            if name.endswith("linear_kv_down_proj.weight") and self.facts.kv_rank and self.facts.rope_dim is not None:
                return tp > 1 and shape[0] * tp == self.facts.kv_rank + self.facts.rope_dim
        return not any(names.is_fused_norm(name) for name in shapes)

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _add_model(self, rank: _RankFiles, out: Gathering) -> list[RankArray]:
        """Add the rank's model to `out`, and return its trainable parameters, in order."""
        params = []
        dropped_names = [name for name, value in _plain_entries(rank) if value is not None and not is_extra_state(name)]

        # Extra states are kept where they hold FP8 scales; all others are rebuilt by a job.
        scales = self.scales.setdefault(rank.path.rpartition("/")[2], {})
        names_without_scales = []
        for number, name, value in self._extra_states(rank):
            if value is None:
                dropped_names.append(name)
            elif holds_scales(value):
                scales.setdefault(str(number), {})[name] = value
            else:
                names_without_scales.append(name)
        if names_without_scales:
            self.notes.append(
                Note("N0301", f"{len(names_without_scales)} {WITHOUT}", rank.path, names_without_scales[0])
            )

        for number, chunk in enumerate(rank.chunks):
            for name, array in chunk:
                if is_extra_state(name):
                    continue
                if is_shapeless(array):
                    out.add_whole(TensorKey(name), array)
                    continue
                rank_array = self.job.describe_array(name, array.shape, array.dtype, rank.where, number)
                out.add(MODEL, rank_array, array)
                if not names.is_buffer(name):
                    params.append(rank_array)

        if dropped_names:
            what = f"{len(dropped_names)} plain values of the model are left out"
            self.notes.append(Note("N0301", what, rank.path, dropped_names[0]))
        return params

    def _extra_states(self, rank: _RankFiles) -> Iterator[tuple[int, str, Any]]:
        """Yield (chunk, name, value) of the extra states that are not empty.

        The value of a uint8 tensor is its bytes, that of any other tensor None.
        """
        plain_chunks = [chunk for name, chunk in rank.extras.items() if _is_chunk(name) and isinstance(chunk, dict)]
        for number, chunk in enumerate(plain_chunks):
            for key, value in chunk.items():
                if is_extra_state(str(key)) and not is_empty(value):
                    yield number, str(key), value

        for number, arrays in enumerate(rank.chunks):
            for name, array in arrays:
                if not is_extra_state(name) or not array.numel:
                    continue
                is_plain = array.dtype.name == "U8" and array.strides is None and not isinstance(array.path, Nowhere)
                is_readable = is_plain and array.numel <= EXTRA_BYTES
                yield number, name, read_array(self.tree, array) if is_readable else None

    def _add_ours(self, rank: _RankFiles, out: Gathering) -> None:
        """Add what is stored under our key `ckpt`: more states by the rank's names, and whole tensors."""
        for leaf, array in rank.ours:
            match leaf:
                case ("states", int(chunk), str(state), str(name)) if chunk < len(rank.chunks):
                    out.add(state, self.job.describe_array(name, array.shape, array.dtype, rank.where, chunk), array)
                case ("vocab_tail", _, _):
                    continue  # added when all rows before them are there
                case ("tensors", str(state), str(name)):
                    if rank is self.first:
                        out.add_whole(TensorKey(name, state), array)
                case _:
                    raise InputError(
                        f"{OURS}.{dotted(leaf)[:100]}: not a place that this version knows",
                        code=FORM,
                        path=array.path,
                        hint="written by a newer version of ckpt?",
                    )

    def _add_optimizer(self, rank: _RankFiles, params: list[RankArray], out: Gathering) -> None:
        numbered = [pair for pair in rank.optimizer if pair[0][-1:] != ("scale",)]
        if is_layer_wise(self.args) and numbered:
            self._add_shares(rank, params, out)
            return

        content = self.optims.get(f"{rank.path}/{OPTIM_FILE}")
        if not numbered and content is None:
            return

        path = self.tree.display(f"{rank.path}/{MODEL_FILE}")
        optimizer = _RankOptimizer(self.job, rank.where, params, rank.extras.get("optimizer"), path, out)
        if numbered:
            optimizer.add_numbered(numbered)
        if content is not None:
            self.unsafe += content.unsafe
            self.globals.update(dict.fromkeys(content.globals))
            optimizer.add_flat(content.leaves)

    def _add_shares(self, rank: _RankFiles, params: list[RankArray], out: Gathering) -> None:
        """Add the shares of a layer-wise optimizer that data ranks wrote next to the model file.

        The optimizer in the model file repeats one of these shares, so it is not read.
        """
        for share in shares_beside(rank.path, rank.where, self.degrees, self.optims, self.tree):
            path = self.tree.display(share.file)
            content = self.optims[share.file]
            stored = content.extras.get("value", content.extras) if isinstance(content.extras, dict) else content.extras
            optimizer = _RankOptimizer(self.job, rank.where, params, stored, path, out)
            leaves = [(leaf[1:] if leaf[:1] == ("value",) else leaf, array) for leaf, array in content.leaves]
            optimizer.add_numbered(leaves, dealt(optimizer.members(), optimizer.chain, share.dense, share.experts))
            self.unsafe += content.unsafe
            self.globals.update(dict.fromkeys(content.globals))

    def _check_steps(self) -> None:
        """Raise InconsistentCheckpoint E0379 if groups or ranks have different step counters."""
        path_by_step: dict[float, str] = {}
        for rank in self.ranks:
            for optimizer in chained(rank.extras.get("optimizer")):
                for group in groups_of(optimizer):
                    step = group.get("step")
                    if isinstance(step, int | float) and not isinstance(step, bool):
                        path_by_step.setdefault(float(step), f"{rank.path}/{MODEL_FILE}")

        if len(path_by_step) > 1:
            (a, path), (b, other) = list(path_by_step.items())[:2]
            raise InconsistentCheckpoint(
                f"the optimizer's step counters disagree: {a:g} and {b:g}",
                code=STEPS,
                path=self.tree.display(other),
                place="optimizer.param_groups",
                faults=[f"step {a:g} in {path}", f"step {b:g} in {other}"],
                hint="the groups were not saved at one time: go back to a complete save, or take --state model",
            )

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _extras(self) -> dict[str, Any]:
        extras = {key: value for key, value in self.first.extras.items() if not _is_chunk(key) and key != OURS}
        if "optimizer" in extras:
            extras["optimizer"] = _without_params(extras["optimizer"])
        rng = self._read_rng()
        extras.pop("rng_state", None)
        if rng:
            extras["rng_state"] = rng

        scales = {folder: rank_scales for folder, rank_scales in self.scales.items() if rank_scales}
        if scales:
            extras[EXTRA_STATES] = scales
        ours = self.first.extras.get(OURS)
        if isinstance(ours, dict) and isinstance(ours.get("extras"), dict):
            extras |= ours["extras"]
        return extras

    def _read_rng(self) -> dict[str, Any]:
        """Return the RNG states by folder: {"mp_rank_00": [{...}]}, with tensors as bytes."""
        if len(self.ranks) > RNG_RANKS:
            self.notes.append(Note("N0302", f"RNG states of {len(self.ranks)} ranks are not read", self.first.path))
            return {}

        states_by_folder = {}
        for rank in self.ranks:
            if "rng_state" not in rank.extras and not rank.rng:
                continue

            values = []
            for leaf, array in rank.rng:
                nbytes = array.dtype.nbytes(array.numel)
                if nbytes > RNG_BYTES or array.strides is not None or isinstance(array.path, Nowhere):
                    self.notes.append(
                        Note("N0302", f"an RNG state of {nbytes} bytes is not read", array.path, dotted(leaf))
                    )
                    continue
                values.append((leaf, read_array(self.tree, array)))

            states = join({"rng_state": rank.extras.get("rng_state", [])}, values)
            states_by_folder[rank.path.rpartition("/")[2]] = states["rng_state"]
        return states_by_folder

    def _files(self) -> tuple[str, ...]:
        every = [f"{rank.path}/{name}" for rank in self.ranks for name in (MODEL_FILE, OPTIM_FILE)]
        return (*(name for name in every if self.tree.exists(name)), *(f for f in self.optims if is_share(f)))

    def _hints(self) -> Hints:
        states = {_name_pattern(key) for rank in self.ranks for key in _extra_states(rank)}
        prefix = self.first.path.rpartition("/")[0] or self.tree.shown.rstrip("/").rpartition("/")[2]
        containers = (names.container_of(name) for name in self.local)
        has_mtp_model_layer = any(".mtp_model_layer." in name for name in self.local)
        return Hints.of(
            Degrees(**self.degrees),
            Globals.each(self.globals),
            MegatronHints(
                te=any(names.is_fused_norm(name) for name in self.local),
                container=next((container for container in containers if container), None),
                mtp_inner="mtp_model_layer" if has_mtp_model_layer else None,
                extra_states=tuple(sorted(states)),
                counts=tuple(self.stages.counts),
                mtp=tuple(i for i, stage in enumerate(self.stages.chunks) if stage.mtp),
                gated=self.job.gated,
                down_shared=self.job.down_shared,
                release=prefix == "release",
                distributed=any(self.tree.exists(f"{rank.path}/{OPTIM_FILE}") for rank in self.ranks),
                convolution="." if any(name != names.convolution(name, "_") for name in self.local) else "_",
            ),
        )


def _half_precision(arrays: Iterable[RankArray]) -> list[RankArray]:
    """Return the arrays that have an fp32 master, in their order."""
    return [array for array in arrays if array.dtype.bits == 16]


def _has_item(groups: Sequence[Sequence[RankArray]], group: int, position: int) -> bool:
    return group < len(groups) and position < len(groups[group])


def _short(value: Any) -> str:
    return str(value)[:80]


def _rank_number(rank: _RankFiles) -> int | None:
    value = arguments(rank.extras).get("rank")
    return value if type(value) is int else None


def _guess_degrees(folders: Mapping[str, tuple[int, ...]], ranks: Iterable[_RankFiles]) -> dict[str, int]:
    """Return the degrees that the folders' names show, for a checkpoint without arguments.

    A second number in a name counts as the pipeline stage.
    """
    numbers = list(folders.values())
    degrees = dict.fromkeys(("pp", "vpp", "ep", "dp", "cp"), 1)
    degrees["tp"] = degrees["etp"] = max(n[0] for n in numbers) + 1
    degrees["pp"] = max((n[1] for n in numbers if len(n) > 1), default=0) + 1
    degrees["ep"] = max((n[2] for n in numbers if len(n) > 2), default=0) + 1
    return degrees


def _without_params(optimizer: Any) -> Any:
    """The optimizer's values without the numbers of parameters, which hold for the source's layout alone."""
    if isinstance(optimizer, list):
        return [_without_params(one) for one in optimizer]
    if not isinstance(optimizer, dict):
        return optimizer
    values = {key: value for key, value in optimizer.items() if key not in ("fp32_from_fp16_params", "state")}
    for key in ("optimizer", "param_groups"):
        value = values.get(key)
        if key == "optimizer" and isinstance(value, dict):
            values[key] = _without_params(value)
        elif key == "param_groups" and isinstance(value, list):
            values[key] = [_drop_params(group) for group in value]
    return values


def _drop_params(group: Any) -> Any:
    return {key: value for key, value in group.items() if key != "params"} if isinstance(group, dict) else group


def _plain_entries(rank: _RankFiles) -> list[tuple[str, Any]]:
    """What a rank's model holds other than tensors."""
    chunks = [chunk for name, chunk in rank.extras.items() if _is_chunk(name) and isinstance(chunk, dict)]
    return [(str(key), value) for chunk in chunks for key, value in chunk.items()]


def _extra_states(rank: _RankFiles) -> list[str]:
    """Modules that have an extra state, by the rank's names."""
    stated = [name for name, _ in _plain_entries(rank)]
    stated += [name for chunk in rank.chunks for name, _ in chunk]
    return [key for key in stated if key.endswith("._extra_state")]


def _name_pattern(name: str) -> str:
    """The name with `*` for each number, so that all layers have one pattern."""
    return ".".join("*" if word.isdecimal() else word for word in name.split("."))
