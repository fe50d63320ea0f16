"""The `dp_reshardable` optimizer of a torch_dist checkpoint: flat buckets without a name in them, given their names
back.

The one idea: the order of a rank's parameters is known (`megatron.job`), so is the rule that fills a bucket (walk them
backwards, start each at a multiple of 64; `megatron.optimizer`), and the checkpoint says how long each bucket is and,
by its chunks, where parameters begin and end. So names are put on by the rule and the chunks prove it: a parameter
whose ends are no chunk's ends is an error, never a guess.

    optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg
          F32 (20288,)
    dp group 1 of TP 2, PP 1: tensor rank 1     chunks 0-2047, 2048-2079, 2080-2111, 2112-2879 ...
    -> output_layer.weight rows 64-127, decoder.final_layernorm.weight, ...

* dp group: the model-parallel rank, pipeline * TP + tensor; with a `chained_1.` in front it is the experts' optimizer,
  and the rank counts etp + ETP * (ep + EP * pipeline). Experts have their own buffers only where EP > 1.
* A layer-wise optimizer (Muon, core >= 0.18) is `chained_0.`: it holds matrices whole, under their names, and the
  buffers of `chained_1.` hold what it leaves. So a parameter with a state of its own key lies in no bucket.
* gbuf: buffers of chunk 0 of a virtual pipeline, then of chunk 1, ...; one for each dtype of parameters.
* bucket: as many parameters, backwards, as reach its length. Gaps hold what was in memory: they are not read.
* An embedding that first and last stage share lies in both; the copies are replicas, cut at other places.
* GroupedMLP (until core 0.16) has one parameter for all its experts, stored transposed.
* `dp_zero_gather_scatter` (core <= 0.14) has the same buffers as one object a dp group, bucket after bucket without the
  padding at their ends. Nothing but the whole length proves the order there, so only the arguments' reading counts, and
  they must say how layers are built (it changes the order, not the length). Of buckets the length is proof enough: read
  as one bucket, it is the right one only if no bucket but the last ends in a gap, and then they all lie as in one.

The local shapes are those of the model's own chunks: the r-th box is tensor rank r's. What can't be known for sure is
tried: the arguments' reading first, then the others; the chunks of the buckets decide.

Source: NVIDIA/Megatron-LM core 0.16.1 `optimizer/distrib_optimizer.py` (`sharded_param_state_dp_reshardable`),
`optimizer/__init__.py` (which group is which), `distributed/distributed_data_parallel.py`. Cost: 10 us a piece. What it
does not do: frozen parameters (they are absent and not known to be).
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
from ckpt_tool.systems.megatron.job import JobRanks, MegatronJob, MegatronRank, RankArray, turned
from ckpt_tool.systems.megatron.optimizer import ALIGNMENT, Buffer, bucketing_of, lay_buffers
from ckpt_tool.systems.megatron.stages import from_args, from_counts

MISFIT = "E2004"
_KEY = re.compile(
    r"(?:chained_(\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,9})"
    r"\.gbuf_idx_(\d{1,4})\.dtype_\((?:torch\.)?(\w+), ?(?:torch\.)?(\w+)\)\.bucket_idx_(\d{1,6})\.(\w+)"
)
CHUNKS = 1 << 16  # of all stages: more is a damaged argument
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
        """Does a piece begin or end at this element?"""
        where = bisect_right(self.starts, element) - 1
        return element == self.numel or (where >= 0 and element in (self.starts[where], self.stops[where]))


class _Where(NamedTuple):
    experts: bool
    group: int
    buffer: int


class _Of(NamedTuple):
    """A logical tensor in a parameter, number so many on its line."""

    number: int
    name: str
    region: tuple[Box, ...]  # what the parameter holds of it
    transposed: bool  # is it so in the parameter?


Gathered = Sequence[tuple[int, int, int, str, dict[str, StoredArray]]]  # as `Objects` has them
_Buckets = dict[_Where, dict[int, dict[str, BucketLine]]]
_Found = dict[TensorKey, dict[tuple[Box, ...], list[list[Chunk]]]]


def flat_states(
    flat: Sequence[tuple[DcpTensorEntry, Sequence[StoredArray]]],
    gathered: Gathered,
    tensors: Mapping[TensorKey, LogicalTensor],
    args: Mapping[str, Any],
    degrees: Mapping[str, int],
    shown: str,
) -> dict[TensorKey, LogicalTensor]:
    """The states that lie in flat buckets, under the model's names.

    flat: each bucket's entry and the arrays of its pieces. gathered: coalesced buffers (`Objects`). tensors: the
    model's. args: Megatron's arguments. Raises InconsistentCheckpoint (E2004) when the model's parameters do not fill
    the buckets as the rule says.
    """
    apart = frozenset(key.name for key in tensors if key.state != MODEL)
    buckets, dtypes = _buckets(flat, degrees["ep"] > 1 and not apart, shown)
    model = {
        key.name: tensor
        for key, tensor in tensors.items()
        if key.state == MODEL and tensor.chunks and not names.is_buffer(key.name)
    }
    faults: list[str] = []
    readings = list(_readings(model, args, degrees))
    if gathered:
        readings = readings[:1] if "transformer_impl" in args else []
    for job in readings:
        try:
            ranks = _Buffers(job, model, apart)
            found = _named(buckets, dtypes, ranks, shown)
            _coalesced(gathered, ranks, found, shown)
            return {key: _tensor(key, copies, model[key.name].shape, shown) for key, copies in found.items()}
        except InconsistentCheckpoint as e:
            faults.append(e.message)
    if gathered and "transformer_impl" not in args:
        what = "nothing says in which order the parameters are stored in the optimizer's gathered buffers"
        why = "open the folder that holds weights/ and context/, if NeMo wrote it"
    else:
        first = faults[0] if faults else f"the arguments say {degrees['pp']} stages of {degrees['vpp']} chunks"
        what = f"the model's parameters do not fill the optimizer's flat buckets: {first}"
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


def nameless(
    flat: Sequence[tuple[DcpTensorEntry, Sequence[StoredArray]]], gathered: Gathered, why: CkptError
) -> tuple[Unread, ...]:
    """The buckets and buffers as they lie, for who leaves them behind."""
    rows = [(entry.fqn.rpartition("."), entry.dtype, entry.shape) for entry, _ in flat]
    for chained, group, number, dtype, arrays in gathered:
        front = f"chained_{chained}.optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{number}.{dtype}"
        rows += [((front, ".", state), stored.dtype, stored.shape) for state, stored in arrays.items()]
    return tuple(
        Unread(TensorKey(front, _state(state)), f"{dtype.name} {list(shape)}", fault=why)
        for (front, _, state), dtype, shape in rows
    )


def _readings(
    model: Mapping[str, LogicalTensor], args: Mapping[str, Any], degrees: Mapping[str, int]
) -> Iterator[MegatronJob]:
    """What the arguments say, then what they may mean."""
    layers = names.layers_count(name for name in model if names.stem(name).startswith("decoder."))
    mtp = names.mtp_count(model)
    pp = degrees["pp"]
    vpp = degrees["vpp"]
    if pp * vpp > CHUNKS:
        return
    stages = from_args(args, pp, vpp, layers, mtp=mtp)
    if stages is None:
        base = layers // (pp * vpp)
        stages = from_counts([*[base] * (pp * vpp - 1), layers - base * (pp * vpp - 1)], pp, vpp, mtp=mtp)
    experts = names.experts_count(model)
    facts = facts_of(args)._replace(mtp=mtp, tied=names.TIED_HEAD not in map(names.stem, model))
    found = {name: {chunk.box for chunk in tensor.chunks} for name, tensor in model.items()}
    boxes = {name: sorted(own, key=lambda box: box.offset) for name, own in found.items()}
    job = MegatronJob(facts, degrees, stages, experts, bool(facts.gated), not facts.te, boxes=boxes)
    for container in dict.fromkeys((facts.container, *names.CONTAINERS)) if experts else (names.SEQUENTIAL,):
        for te in (facts.te, not facts.te):
            yield job._replace(container=container, te=te)


class _Buffers:
    """The flat buffers of every dp group, as one reading has them. apart: names that another optimizer of the chain
    holds, in no bucket."""

    def __init__(self, job: MegatronJob, model: Mapping[str, LogicalTensor], apart: Set[str]) -> None:
        self.job = job
        self.apart = apart
        self.ranks = JobRanks(job, {name: (tensor.shape, tensor.dtype) for name, tensor in model.items()})
        self._known: dict[tuple[bool, int], list[Buffer]] = {}

    def of(self, where: _Where, dtype: str) -> Buffer | None:
        """Buffer number `where.buffer` of a dp group, None where the group has no such buffer of parameters of `dtype`
        (torch's word)."""
        group = where[:2]
        if group not in self._known:
            self._known[group] = self._laid(*group)
        found = self._known[group][where.buffer : where.buffer + 1]
        return found[0] if found and found[0].dtype.torch == dtype else None

    def _laid(self, experts: bool, group: int) -> list[Buffer]:
        tp, ep, etp = (self.job.degrees[dim] for dim in ("tp", "ep", "etp"))
        if experts:
            rank = MegatronRank("", 0, group // (etp * ep), group // etp % ep, group % etp)
        else:
            rank = MegatronRank("", group % tp, group // tp, 0, group % tp % etp)
        if rank.pp >= self.job.stages.pp:
            return []
        own = [array for array in self.ranks.arrays(rank) if self.apart.isdisjoint(array.names)]
        arrays = [array for array in own if (array.expert and ep > 1 and not self.apart) == experts]
        return lay_buffers(arrays, self.job, rank.pp, bucketing_of(self.job, experts=experts), DTYPES["F32"])


def _buckets(
    flat: Sequence[tuple[DcpTensorEntry, Sequence[StoredArray]]], parallel: bool, shown: str
) -> tuple[_Buckets, dict[_Where, str]]:
    """The lines, by buffer, bucket and state; and the parameters' dtype of each buffer."""
    out: _Buckets = {}
    dtypes: dict[_Where, str] = {}
    for entry, arrays in flat:
        found = _KEY.fullmatch(entry.fqn)
        if found is None or len(entry.shape) != 1:
            raise InputError(
                f"a tensor of the optimizer is under a key of an unknown kind: {entry.fqn[:200]}",
                code="E0303",
                path=shown,
                key=entry.fqn,
                hint="written by another version: load and save it with that",
            )
        where = _Where(parallel and found[1] == "1", int(found[2]), int(found[3]))
        order = sorted(range(len(arrays)), key=lambda i: entry.pieces[i].offset)
        starts = [entry.pieces[i].offset[0] for i in order]
        stops = [entry.pieces[i].offset[0] + entry.pieces[i].shape[0] for i in order]
        line = BucketLine(entry.fqn, entry.shape[0], entry.dtype, starts, stops, [arrays[i] for i in order])
        dtypes[where] = found[4]
        out.setdefault(where, {}).setdefault(int(found[6]), {})[_state(found[7])] = line
    return out, dtypes


def _state(name: str) -> str:
    return MASTER if name in _MASTERS else name


def _named(buckets: _Buckets, dtypes: Mapping[_Where, str], ranks: _Buffers, shown: str) -> _Found:
    """Every chunk under its name, by the region of the tensor that its rank holds."""
    out: _Found = {}
    for where in sorted(buckets):
        buffer = ranks.of(where, dtypes[where])
        left = list(reversed(buffer.members)) if buffer else []
        for number in sorted(buckets[where]):
            lines = buckets[where][number]
            size = {line.numel for line in lines.values()}
            if len(size) != 1 or sorted(buckets[where]) != list(range(len(buckets[where]))):
                raise _misfit(next(iter(lines.values())), "its states differ in length, or a bucket is missing", shown)
            _fill(left, lines, size.pop(), out, shown)
        if left:
            line = next(iter(buckets[where][max(buckets[where])].values()))
            raise _misfit(line, f"{len(left)} parameters are left over, such as {left[0].local}", shown)
    return out


def _coalesced(gathered: Gathered, ranks: _Buffers, out: _Found, shown: str) -> None:
    """The chunks of gathered buffers, under their names."""
    for chained, group, number, dtype, arrays in gathered:
        buffer = ranks.of(_Where(ranks.job.degrees["ep"] > 1 and chained == 1, group, number), dtype)
        members = [(array, buffer.flat.coalesced(at)) for at, array in enumerate(buffer.members)] if buffer else []
        need = buffer.flat.unpadded if buffer else 0
        for state, stored in arrays.items():
            line = BucketLine(
                f"dp group {group}, buffer {number}", stored.numel, stored.dtype, [0], [stored.numel], [stored]
            )
            if need != stored.numel:
                raise _misfit(line, f"the parameters that belong there take {need}", shown)
            _place(members, {_state(state): line}, out)


def _place(members: Sequence[tuple[RankArray, int]], lines: Mapping[str, BucketLine], out: _Found) -> None:
    """The chunks of parameters that begin at these elements of the lines, into `out`: a list for each copy of a
    region."""
    places: list[LinePlace] = []
    for array, start in sorted(members, key=lambda member: member[1]):
        for place in array.places(start):
            name, transposed = place.of
            region = tuple(slot.box for slot in array.slots if slot.name == name)
            places.append(LinePlace(_Of(len(places), name, region, transposed), *place[1:]))
    for key in (TensorKey(name, state) for array, _ in members for state in lines for name in array.names):
        out.setdefault(key, {})  # in the order of the parameters
    flat: FlatLine[_Of] = FlatLine(tuple(places))
    for state, line in lines.items():
        copies = [list[Chunk]() for _ in places]
        for start, stored in zip(line.starts, line.arrays, strict=True):
            for of, chunk in flat.chunks(stored, start):
                copies[of.number].append(turned(chunk) if of.transposed else chunk)
        for (of, *_), chunks in zip(places, copies, strict=True):
            out[TensorKey(of.name, state)].setdefault(of.region, []).append(chunks)


def _fill(left: list[RankArray], lines: Mapping[str, BucketLine], size: int, out: _Found, shown: str) -> None:
    """Take as many parameters off `left` as the bucket of `size` elements holds."""
    stop = 0
    members = list[tuple[RankArray, int]]()
    while (
        ceil_div(stop, ALIGNMENT) * ALIGNMENT < size
    ):  # a bucket closed by a shared embedding keeps the gap at its end
        some = next(iter(lines.values()))
        if not left:
            raise _misfit(some, f"{size - stop} of its {size} elements belong to no parameter", shown)
        array = left.pop(0)
        start = ceil_div(stop, ALIGNMENT) * ALIGNMENT
        stop = start + array.numel
        members.append((array, start))
        for line in lines.values():
            if stop > size or not line.ends_at(start) or not line.ends_at(stop):
                raise _misfit(
                    line, f"{array.local} would be elements {start} to {stop}, but no chunk is cut there", shown
                )
    _place(members, lines, out)


def _misfit(line: BucketLine, what: str, shown: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(f"{line.fqn} of {line.numel} elements: {what}", code=MISFIT, path=shown, key=line.fqn)


def _tensor(
    key: TensorKey, copies: Mapping[tuple[Box, ...], list[list[Chunk]]], shape: tuple[int, ...], shown: str
) -> LogicalTensor:
    """The tensor of all regions; the second copy of a region and the later ones are replicas."""
    chunks = [
        chunk if not number else Chunk(chunk.box, chunk.array, chunk.within, number)
        for lists in copies.values()
        for number, one in enumerate(lists)
        for chunk in one
    ]
    if not chunks:
        raise InconsistentCheckpoint(f"no bucket holds an element of {key}", code=MISFIT, path=shown, key=str(key))
    return LogicalTensor(key, shape, chunks[0].array.dtype, tuple(chunks))
