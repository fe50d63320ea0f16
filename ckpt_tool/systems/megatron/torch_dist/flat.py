"""The `dp_reshardable` optimizer of a torch_dist checkpoint: flat buckets that name no parameter, split into named
parameters.

The order of a rank's parameters is known (`megatron.job`), so is the rule that fills a bucket (walk them backwards,
start each at a multiple of 64; `megatron.optimizer`), and the checkpoint says how long each bucket is and, by its
chunks, where parameters begin and end. So the rule assigns the names and the chunks prove it: a parameter whose ends
are no chunk's ends is an error, never a guess.

    optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg
          F32 (20288,)
    dp group 1 of TP 2, PP 1: tensor rank 1     chunks 0-2047, 2048-2079, 2080-2111, 2112-2879 ...
    -> output_layer.weight rows 64-127, decoder.final_layernorm.weight, ...

* dp group: the model-parallel rank, pipeline * TP + tensor; with a `chained_1.` in front it is the experts' optimizer,
  and the rank counts etp + ETP * (ep + EP * pipeline). Experts have their own buffers only where EP > 1.
* A layer-wise optimizer (Muon, core >= 0.18) is `chained_0.`: it holds matrices whole, under their names, and the
  buffers of `chained_1.` hold the rest. So a parameter with a state of its own key is in no bucket.
* gbuf: buffers of chunk 0 of a virtual pipeline, then of chunk 1, ...; one for each dtype of parameters.
* bucket: as many parameters, backwards, as reach its length. Gaps hold what was in memory: they are not read.
* An embedding that first and last stage share is stored by both; the copies are replicas, cut at other places.
* GroupedMLP (until core 0.16) has one parameter for all its experts, stored transposed.
* `dp_zero_gather_scatter` (core <= 0.14) has the same buffers as one object a dp group, bucket after bucket without the
  padding at their ends. Only the total length proves the order there, so only the arguments' reading counts, and they
  must say how layers are built (it changes the order, not the length). How the buffer was split into buckets needs no
  other proof than the length: read as one bucket, it has the right length only if no bucket but the last ends in a gap,
  and then every parameter has the place that it has in one bucket.

The local shapes are those of the model's own chunks: the r-th box is tensor rank r's. What can't be known for sure is
tried: the arguments' reading first, then the others; the chunks of the buckets decide.

Source: NVIDIA/Megatron-LM core 0.16.1 `optimizer/distrib_optimizer.py` (`sharded_param_state_dp_reshardable`),
`optimizer/__init__.py` (which group is which), `distributed/distributed_data_parallel.py`. Cost: 10 us a piece. Frozen
parameters are not supported: they are absent from the buckets, and nothing in the checkpoint says which they are.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.catalog import Unread
from ckpt_tool.core.dtype import DTYPES, DType
from ckpt_tool.core.flat_line import FlatLine, LinePlace
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.tensor import MASTER, MODEL, Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import CkptError, InconsistentCheckpoint, InputError
from ckpt_tool.formats.dcp_container.dcp_metadata import DcpTensorEntry
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.args import facts_of
from ckpt_tool.systems.megatron.job import JobRanks, MegatronJob, MegatronRank, RankArray, transpose_chunk
from ckpt_tool.systems.megatron.optimizer import ALIGNMENT, Buffer, bucketing_of, lay_buffers
from ckpt_tool.systems.megatron.stages import from_args, from_counts

MISFIT = "E2004"
_KEY = re.compile(
    r"(?:chained_(\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,9})"
    r"\.gbuf_idx_(\d{1,4})\.dtype_\((?:torch\.)?(\w+), ?(?:torch\.)?(\w+)\)\.bucket_idx_(\d{1,6})\.(\w+)"
)
CHUNKS = 1 << 16  # the most chunks of all stages; more means a damaged argument
_MASTERS = ("param", "master_param", "fp32_param")


class BucketLine(NamedTuple):
    """One state of one bucket: its pieces in order."""

    fqn: str
    numel: int
    dtype: DType
    starts: list[int]  # elements
    stops: list[int]
    arrays: list[StoredArray]  # 1-d, in the same order

    def ends_at(self, element: int) -> bool:
        """Return whether a piece begins or ends at this element."""
        where = bisect_right(self.starts, element) - 1
        return element == self.numel or (where >= 0 and element in (self.starts[where], self.stops[where]))


class _BufferId(NamedTuple):
    """Which buffer of which optimizer shard, as the checkpoint's keys number them."""

    experts: bool  # it belongs to the experts' own optimizer
    group: int  # dp_group_idx: the model-parallel rank
    buffer: int  # gbuf_idx


class _ParameterSlot(NamedTuple):
    """Where one logical tensor is stored inside a parameter of a bucket."""

    number: int  # position among all slots of the bucket, which indexes the lists of chunks
    name: str
    region: tuple[Box, ...]  # the part of the logical tensor that the parameter holds
    transposed: bool  # stored transposed in the parameter


Gathered = Sequence[tuple[int, int, int, str, dict[str, StoredArray]]]  # as `Objects` has them
_Buckets = dict[_BufferId, dict[int, dict[str, BucketLine]]]  # buffer -> bucket number -> state -> line
# tensor -> region -> the chunks of each copy of that region
_NamedChunks = dict[TensorKey, dict[tuple[Box, ...], list[list[Chunk]]]]


def flat_states(
    flat: Sequence[tuple[DcpTensorEntry, Sequence[StoredArray]]],
    gathered: Gathered,
    tensors: Mapping[TensorKey, LogicalTensor],
    args: Mapping[str, Any],
    degrees: Mapping[str, int],
    shown: str,
) -> dict[TensorKey, LogicalTensor]:
    """Return the states that are stored in flat buckets, under the model's names.

    Args:
        flat: each bucket's entry and the arrays of its pieces.
        gathered: coalesced buffers (`Objects`).
        tensors: those that are read already: the model, and states that have keys of their own.
        args: Megatron's arguments.
        degrees: parallel degrees by dim.
        shown: the checkpoint's path for messages.

    Raises:
        InconsistentCheckpoint: E2004, the model's parameters do not fill the buckets as the rule says.
    """
    # A parameter whose optimizer state has a key of its own (layer-wise optimizers) is in no bucket.
    names_outside_buckets = frozenset(key.name for key in tensors if key.state != MODEL)
    buckets, dtypes = _parse_buckets(flat, degrees["ep"] > 1 and not names_outside_buckets, shown)

    # Only what is trained has an optimizer state.
    model = {
        key.name: tensor
        for key, tensor in tensors.items()
        if key.state == MODEL and tensor.chunks and not names.is_buffer(key.name)
    }

    # The arguments may be ambiguous or missing: try each reading until the cuts of the buckets confirm one.
    faults: list[str] = []
    readings = list(_possible_jobs(model, args, degrees))

    # Gathered buffers show no cuts, so a reading other than the arguments' own would be a guess.
    if gathered:
        readings = readings[:1] if "transformer_impl" in args else []

    for job in readings:
        try:
            buffers = _Buffers(job, model, names_outside_buckets)
            named_chunks = _name_chunks(buckets, dtypes, buffers, shown)
            _name_gathered_chunks(gathered, buffers, named_chunks, shown)
            return {
                key: _build_tensor(key, copies, model[key.name].shape, shown) for key, copies in named_chunks.items()
            }
        except InconsistentCheckpoint as error:
            faults.append(error.message)

    if gathered and "transformer_impl" not in args:
        what = "nothing says in which order the parameters are stored in the optimizer's gathered buffers"
        why = "open the folder that holds weights/ and context/, if NeMo wrote it"
    else:
        first_fault = faults[0] if faults else f"the arguments say {degrees['pp']} stages of {degrees['vpp']} chunks"
        what = f"the model's parameters do not fill the optimizer's flat buckets: {first_fault}"
        why = "the arguments in the checkpoint are not those of the run, or parameters were frozen"
        why += ", or buckets of a size that they do not state were filled" if gathered else ""

    raise InconsistentCheckpoint(
        what,
        code=MISFIT,
        path=shown,
        hint=f"{why}; else save once with --dist-ckpt-optim-fully-reshardable (NeMo: with the strategy's "
        "ckpt_parallel_save_optim=True), or leave those states out with --drop master,optimizer",
        faults=faults[1:],
    )


def list_unnamed(
    flat: Sequence[tuple[DcpTensorEntry, Sequence[StoredArray]]], gathered: Gathered, why: CkptError
) -> tuple[Unread, ...]:
    """Return the buckets and buffers under their own keys, so that a user who drops these states can read the rest."""
    unread = []
    for entry, _ in flat:
        bucket, _, state = entry.fqn.rpartition(".")
        unread.append(_unread_state(bucket, state, entry.dtype, entry.shape, why))

    for chained, group, number, dtype, arrays in gathered:
        buffer = f"chained_{chained}.optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{number}.{dtype}"
        for state, stored in arrays.items():
            unread.append(_unread_state(buffer, state, stored.dtype, stored.shape, why))
    return tuple(unread)


def _unread_state(name: str, state: str, dtype: DType, shape: Sequence[int], why: CkptError) -> Unread:
    return Unread(TensorKey(name, _state_name(state)), f"{dtype.name} {list(shape)}", fault=why)


def _possible_jobs(
    model: Mapping[str, LogicalTensor], args: Mapping[str, Any], degrees: Mapping[str, int]
) -> Iterator[MegatronJob]:
    """Yield the job that the arguments describe, then the other jobs that are possible."""
    layers = names.layers_count(name for name in model if names.stem(name).startswith("decoder."))
    mtp = names.mtp_count(model)
    pp = degrees["pp"]
    vpp = degrees["vpp"]
    if pp * vpp > CHUNKS:
        return
    stages = from_args(args, pp, vpp, layers, mtp=mtp)
    if stages is None:
        # Nothing usable about stages: as many layers for each chunk, what does not divide goes to the last.
        layers_per_chunk = layers // (pp * vpp)
        leading_counts = [layers_per_chunk] * (pp * vpp - 1)
        stages = from_counts([*leading_counts, layers - sum(leading_counts)], pp, vpp, mtp=mtp)

    experts = names.experts_count(model)
    facts = facts_of(args)._replace(mtp=mtp, tied=names.TIED_HEAD not in map(names.stem, model))

    # The model's own chunks show each tensor rank's part: the r-th box is rank r's.
    boxes: dict[str, list[Box]] = {}
    for name, tensor in model.items():
        distinct_boxes = {chunk.box for chunk in tensor.chunks}
        boxes[name] = sorted(distinct_boxes, key=lambda box: box.offset)
    job = MegatronJob(facts, degrees, stages, experts, bool(facts.gated), not facts.te, boxes=boxes)

    # The experts' class and the use of Transformer Engine change the order of parameters, not the model's tensors.
    containers = dict.fromkeys((facts.container, *names.CONTAINERS)) if experts else (names.SEQUENTIAL,)
    for container in containers:
        for te in (facts.te, not facts.te):
            yield job._replace(container=container, te=te)


class _Buffers:
    """The flat buffers of every dp group, according to one reading of the arguments.

    Args:
        job: the reading.
        model: the trained parameters.
        apart: names that another optimizer of the chain holds, in no bucket.
    """

    def __init__(self, job: MegatronJob, model: Mapping[str, LogicalTensor], apart: Set[str]) -> None:
        self.job = job
        self.apart = apart
        self.ranks = JobRanks(job, {name: (tensor.shape, tensor.dtype) for name, tensor in model.items()})
        self._buffers_by_group: dict[tuple[bool, int], list[Buffer]] = {}

    def find_buffer(self, buffer_id: _BufferId, dtype: str) -> Buffer | None:
        """Return buffer number `buffer_id.buffer` of a dp group, None if the group has no such buffer of that dtype.

        dtype: of the buffer's parameters, as torch names it.
        """
        group = (buffer_id.experts, buffer_id.group)
        if group not in self._buffers_by_group:
            self._buffers_by_group[group] = self._lay_out(*group)
        buffers = self._buffers_by_group[group]
        if buffer_id.buffer >= len(buffers):
            return None
        buffer = buffers[buffer_id.buffer]
        return buffer if buffer.dtype.torch == dtype else None

    def _lay_out(self, experts: bool, group: int) -> list[Buffer]:
        # dp_group_idx counts tp + TP * pp, for experts etp + ETP * (ep + EP * pp).
        tp, ep, etp = (self.job.degrees[dim] for dim in ("tp", "ep", "etp"))
        if experts:
            rank = MegatronRank("", 0, group // (etp * ep), group // etp % ep, group % etp)
        else:
            rank = MegatronRank("", group % tp, group // tp, 0, group % tp % etp)
        if rank.pp >= self.job.stages.pp:
            return []

        # Experts have buffers of their own only where they are parallel and no layer-wise optimizer splits the chain.
        experts_have_buffers = ep > 1 and not self.apart
        arrays = []
        for array in self.ranks.arrays(rank):
            is_in_buffers = self.apart.isdisjoint(array.names)
            if is_in_buffers and (array.expert and experts_have_buffers) == experts:
                arrays.append(array)
        return lay_buffers(arrays, self.job, rank.pp, bucketing_of(self.job, experts=experts), DTYPES["F32"])


def _parse_buckets(
    flat: Sequence[tuple[DcpTensorEntry, Sequence[StoredArray]]], parallel: bool, shown: str
) -> tuple[_Buckets, dict[_BufferId, str]]:
    """Return the lines by buffer, bucket and state, and the dtype of each buffer's parameters.

    Args:
        flat: each bucket's entry and the arrays of its pieces.
        parallel: whether experts have buffers of their own.
        shown: the checkpoint's path for messages.
    """
    buckets: _Buckets = {}
    dtypes: dict[_BufferId, str] = {}
    for entry, arrays in flat:
        match = _KEY.fullmatch(entry.fqn)
        if match is None or len(entry.shape) != 1:
            raise InputError(
                f"a tensor of the optimizer is under a key of an unknown kind: {entry.fqn[:200]}",
                code="E0303",
                path=shown,
                key=entry.fqn,
                hint="written by another version: load and save it with that",
            )

        buffer_id = _BufferId(parallel and match[1] == "1", int(match[2]), int(match[3]))

        # A line is walked from its start, whatever the order of the checkpoint's index.
        by_offset = sorted(range(len(arrays)), key=lambda i: entry.pieces[i].offset)
        starts = [entry.pieces[i].offset[0] for i in by_offset]
        stops = [entry.pieces[i].offset[0] + entry.pieces[i].shape[0] for i in by_offset]

        line = BucketLine(entry.fqn, entry.shape[0], entry.dtype, starts, stops, [arrays[i] for i in by_offset])
        dtypes[buffer_id] = match[4]
        lines_by_bucket = buckets.setdefault(buffer_id, {})
        lines_by_bucket.setdefault(int(match[6]), {})[_state_name(match[7])] = line
    return buckets, dtypes


def _state_name(name: str) -> str:
    return MASTER if name in _MASTERS else name


def _name_chunks(buckets: _Buckets, dtypes: Mapping[_BufferId, str], buffers: _Buffers, shown: str) -> _NamedChunks:
    """Return every chunk under its parameter's name, by the region of the tensor that its rank has."""
    named_chunks: _NamedChunks = {}
    for buffer_id in sorted(buckets):
        buffer = buffers.find_buffer(buffer_id, dtypes[buffer_id])
        lines_by_bucket = buckets[buffer_id]
        no_bucket_is_missing = sorted(lines_by_bucket) == list(range(len(lines_by_bucket)))

        # Buckets are filled from the last parameter to the first.
        unplaced = list(reversed(buffer.members)) if buffer else []
        for number in sorted(lines_by_bucket):
            lines = lines_by_bucket[number]
            sizes = {line.numel for line in lines.values()}
            if len(sizes) != 1 or not no_bucket_is_missing:
                some_line = next(iter(lines.values()))
                raise _misfit_error(some_line, "its states differ in length, or a bucket is missing", shown)
            _name_bucket(unplaced, lines, sizes.pop(), named_chunks, shown)

        if unplaced:
            last_lines = lines_by_bucket[max(lines_by_bucket)]
            some_line = next(iter(last_lines.values()))
            what = f"{len(unplaced)} parameters are left over, such as {unplaced[0].local}"
            raise _misfit_error(some_line, what, shown)
    return named_chunks


def _name_gathered_chunks(gathered: Gathered, buffers: _Buffers, out: _NamedChunks, shown: str) -> None:
    """Add the chunks of gathered buffers, under their names, to `out`."""
    experts_are_parallel = buffers.job.degrees["ep"] > 1
    for chained, group, number, dtype, arrays in gathered:
        buffer = buffers.find_buffer(_BufferId(experts_are_parallel and chained == 1, group, number), dtype)
        members = []
        need = 0
        if buffer:
            members = [(array, buffer.flat.coalesced(position)) for position, array in enumerate(buffer.members)]
            need = buffer.flat.unpadded

        # A gathered buffer is a line of one piece: only its length can prove the reading.
        for state, stored in arrays.items():
            line = BucketLine(
                f"dp group {group}, buffer {number}", stored.numel, stored.dtype, [0], [stored.numel], [stored]
            )
            if need != stored.numel:
                raise _misfit_error(line, f"the parameters that belong there take {need}", shown)
            _add_chunks(members, {_state_name(state): line}, out)


def _add_chunks(members: Sequence[tuple[RankArray, int]], lines: Mapping[str, BucketLine], out: _NamedChunks) -> None:
    """Add the chunks of parameters to `out`, one list for each copy of a region.

    Args:
        members: parameters, and the elements of the lines at which they begin.
        lines: the states of one bucket or buffer.
        out: to which the chunks are added.
    """
    # Where each logical tensor is stored on the line, from its start to its end.
    places: list[LinePlace] = []
    for array, start in sorted(members, key=lambda member: member[1]):
        for place in array.places(start):
            name, transposed = place.of
            region = tuple(slot.box for slot in array.slots if slot.name == name)
            places.append(LinePlace(_ParameterSlot(len(places), name, region, transposed), *place[1:]))

    # Tensors are listed in the order of the parameters, whatever their order on the line.
    for array, _ in members:
        for state in lines:
            for name in array.names:
                out.setdefault(TensorKey(name, state), {})

    flat: FlatLine[_ParameterSlot] = FlatLine(tuple(places))
    for state, line in lines.items():
        chunks_by_slot = [list[Chunk]() for _ in places]
        for start, stored in zip(line.starts, line.arrays, strict=True):
            for slot, chunk in flat.chunks(stored, start):
                chunks_by_slot[slot.number].append(transpose_chunk(chunk) if slot.transposed else chunk)

        for (slot, *_), chunks in zip(places, chunks_by_slot, strict=True):
            out[TensorKey(slot.name, state)].setdefault(slot.region, []).append(chunks)


def _name_bucket(
    unplaced: list[RankArray], lines: Mapping[str, BucketLine], size: int, out: _NamedChunks, shown: str
) -> None:
    """Take as many parameters off `unplaced` as the bucket of `size` elements holds, and add their chunks to `out`."""
    stop = 0
    members = list[tuple[RankArray, int]]()

    # Aligned, because a bucket closed by a shared embedding keeps the gap at its end.
    while ceil_div(stop, ALIGNMENT) * ALIGNMENT < size:
        if not unplaced:
            some_line = next(iter(lines.values()))
            raise _misfit_error(some_line, f"{size - stop} of its {size} elements belong to no parameter", shown)
        array = unplaced.pop(0)
        start = ceil_div(stop, ALIGNMENT) * ALIGNMENT
        stop = start + array.numel
        members.append((array, start))

        # The proof: data ranks are cut where parameters begin and end.
        for line in lines.values():
            if stop > size or not line.ends_at(start) or not line.ends_at(stop):
                what = f"{array.local} would be elements {start} to {stop}, but no chunk is cut there"
                raise _misfit_error(line, what, shown)
    _add_chunks(members, lines, out)


def _misfit_error(line: BucketLine, what: str, shown: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(f"{line.fqn} of {line.numel} elements: {what}", code=MISFIT, path=shown, key=line.fqn)


def _build_tensor(
    key: TensorKey, copies: Mapping[tuple[Box, ...], list[list[Chunk]]], shape: tuple[int, ...], shown: str
) -> LogicalTensor:
    """Return the tensor of all regions; all copies of a region but the first are replicas."""
    chunks = []
    for copies_of_region in copies.values():
        for replica, copy in enumerate(copies_of_region):
            chunks += copy if replica == 0 else [chunk._replace(replica=replica) for chunk in copy]
    if not chunks:
        raise InconsistentCheckpoint(f"no bucket holds an element of {key}", code=MISFIT, path=shown, key=str(key))
    return LogicalTensor(key, shape, chunks[0].array.dtype, tuple(chunks))
