"""The `dp_reshardable` optimizer of a torch_dist checkpoint: flat buckets without a name in them, given their names
back.

The one idea: the order of a model's parameters is known (`megatron.names`), so is the rule that fills a bucket (walk
them backwards, start each at a multiple of 64; `megatron.flat`), and the checkpoint says how long each bucket is and,
by its chunks, where parameters begin and end. So names are put on by the rule and the chunks prove it: a parameter
whose ends are no chunk's ends is an error, never a guess.

    optimizer.distributed.dp_group_idx_1.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg
          F32 (20288,)
    dp group 1 of TP 2, PP 1: tensor rank 1     chunks 0-2047, 2048-2079, 2080-2111, 2112-2879 ...
    -> output_layer.weight rows 64-127, decoder.final_layernorm.weight, ...

* dp group: the model-parallel rank, pipeline * TP + tensor; with a `chained_1.` in front it is the experts' optimizer,
  and the rank counts etp + ETP * (ep + EP * pipeline). Experts have their own buffers only where EP > 1.
* gbuf: buffers of chunk 0 of a virtual pipeline, then of chunk 1, ...; one for each dtype of parameters.
* bucket: as many parameters, backwards, as reach its length. Gaps hold what was in memory: they are not read.
* An embedding that first and last stage share lies in both; the copies are replicas, cut at other places.
* GroupedMLP (until core 0.16) has one parameter for all its experts, stored transposed.
* `dp_zero_gather_scatter` (core <= 0.14) has the same buffers as one object a dp group, bucket after bucket without the
  padding at their ends; nothing but the whole length proves the order there.

Source: NVIDIA/Megatron-LM core 0.16.1 `optimizer/distrib_optimizer.py` (`sharded_param_state_dp_reshardable`),
`optimizer/__init__.py` (which group is which), `distributed/distributed_data_parallel.py`. The local shapes are those
of the model's own chunks. Cost: 10 us a piece. What it does not do: frozen parameters (they are absent and not known to
be).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box, flat_boxes
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import MASTER, Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint, InputError
from ckpt_tool.formats.containers.dcp_metadata import TensorEntry
from ckpt_tool.formats.megatron.args import Facts, facts_of
from ckpt_tool.formats.megatron.flat import default_bucket_size, lay_flat
from ckpt_tool.formats.megatron_dist.ranks import Parameter, Ranks, Segment

MISFIT = "E2004"
_KEY = re.compile(
    r"(?:chained_(\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,9})"
    r"\.gbuf_idx_(\d{1,4})\.dtype_\((?:torch\.)?(\w+), ?(?:torch\.)?(\w+)\)\.bucket_idx_(\d{1,6})\.(\w+)"
)
_ALIGNMENT = 64  # elements at which a parameter starts
_MASTERS = ("param", "master_param", "fp32_param")


class Line(NamedTuple):
    """One state of one bucket: its pieces in order. starts: elements; arrays: 1-d, in the same order."""

    fqn: str
    numel: int
    dtype: DType
    starts: list[int]
    stops: list[int]
    arrays: list[StoredArray]

    def ends_at(self, element: int) -> bool:
        """Does a piece begin or end at this element?"""
        where = bisect_right(self.starts, element) - 1
        return element == self.numel or where >= 0 and element in (self.starts[where], self.stops[where])

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, StoredArray, int]]:
        """(from, to, array, element of the array) of the elements start to stop."""
        where = max(bisect_right(self.starts, start) - 1, 0)
        while where < len(self.starts) and self.starts[where] < stop:
            a, b = max(start, self.starts[where]), min(stop, self.stops[where])
            if a < b:
                yield a, b, self.arrays[where], a - self.starts[where]
            where += 1


class _Where(NamedTuple):
    experts: bool
    group: int
    buffer: int


_Buckets = dict[_Where, dict[int, dict[str, Line]]]
_Found = dict[TensorKey, dict[tuple[Box, ...], list[list[Chunk]]]]


def flat_states(
    flat: Sequence[tuple[TensorEntry, list[StoredArray]]],
    gathered: Sequence[tuple[int, int, int, str, dict[str, StoredArray]]],
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
    buckets, dtypes = _buckets(flat, degrees["ep"] > 1, shown)
    faults: list[str] = []
    for ranks in Ranks.readings(tensors, args, degrees):
        try:
            found = _named(buckets, dtypes, ranks, shown)
            _coalesced(gathered, facts_of(args), degrees, ranks, found, shown)
            return {key: _tensor(key, copies, ranks, shown) for key, copies in found.items()}
        except InconsistentCheckpoint as e:
            faults.append(e.message)
    first = faults[0] if faults else f"the arguments say {degrees['pp']} stages of {degrees['vpp']} chunks"
    raise InconsistentCheckpoint(
        f"the model's parameters do not fill the optimizer's flat buckets: {first}",
        code=MISFIT,
        path=shown,
        hint="the arguments in the checkpoint are not those of the run, or parameters were frozen: save once with "
        "--dist-ckpt-optim-fully-reshardable",
        faults=faults[1:],
    )


def _buckets(
    flat: Sequence[tuple[TensorEntry, list[StoredArray]]], parallel: bool, shown: str
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
        line = Line(entry.fqn, entry.shape[0], entry.dtype, starts, stops, [arrays[i] for i in order])
        dtypes[where] = found[4]
        out.setdefault(where, {}).setdefault(int(found[6]), {})[_state(found[7])] = line
    return out, dtypes


def _state(name: str) -> str:
    return MASTER if name in _MASTERS else name


def _named(buckets: _Buckets, dtypes: Mapping[_Where, str], ranks: Ranks, shown: str) -> _Found:
    """Every chunk under its name, by the region of the tensor that its rank holds."""
    out: _Found = {}
    for where in sorted(buckets):
        parameters = ranks.buffer(where.experts, where.group, where.buffer, dtypes[where])
        left = list(reversed(parameters))
        for number in sorted(buckets[where]):
            lines = buckets[where][number]
            size = {line.numel for line in lines.values()}
            if len(size) != 1 or sorted(buckets[where]) != list(range(len(buckets[where]))):
                raise _misfit(next(iter(lines.values())), "its states differ in length, or a bucket is missing", shown)
            _fill(left, lines, size.pop(), out, shown)
        if left:
            line = next(iter(buckets[where][max(buckets[where])].values()))
            raise _misfit(line, f"{len(left)} parameters are left over, such as {left[0].name}", shown)
    return out


def _coalesced(
    gathered: Sequence[tuple[int, int, int, str, dict[str, StoredArray]]],
    facts: Facts,
    degrees: Mapping[str, int],
    ranks: Ranks,
    out: _Found,
    shown: str,
) -> None:
    """The chunks of gathered buffers, under their names."""
    data_ranks = degrees["dp"] * degrees["cp"]
    for chained, group, number, dtype, arrays in gathered:
        experts = degrees["ep"] > 1 and chained == 1
        parameters = ranks.buffer(experts, group, number, dtype)
        stage = group // (degrees["etp"] * degrees["ep"] if experts else degrees["tp"])
        bucketed = facts.overlap and stage == 0 and number == 0
        size = (facts.bucket_size or default_bucket_size(data_ranks)) if bucketed else None
        laid = lay_flat(
            [p.numel for p in parameters],
            shared=[p.shared for p in parameters],
            bucket_size=size,
            data_ranks=data_ranks,
        )
        for state, array in arrays.items():
            line = Line(f"dp group {group}, buffer {number}", array.numel, array.dtype, [0], [array.numel], [array])
            if laid.unpadded != array.numel:
                raise _misfit(line, f"the parameters that belong there take {laid.unpadded}", shown)
            for index, parameter in enumerate(parameters):
                _place(parameter, line, laid.coalesced(index), _state(state), out)


def _place(parameter: Parameter, line: Line, start: int, state: str, out: _Found) -> None:
    """The parameter's chunks, at element `start` of the line, into `out`."""
    for segment in parameter.segments:
        copies = out.setdefault(TensorKey(segment.name, state), {}).setdefault(parameter.region(segment.name), [])
        if segment.first:
            copies.append([])
        copies[-1] += _chunks(line, start, segment)


def _fill(left: list[Parameter], lines: Mapping[str, Line], size: int, out: _Found, shown: str) -> None:
    """Take as many parameters off `left` as the bucket of `size` elements holds."""
    stop = 0
    while -(-stop // _ALIGNMENT) * _ALIGNMENT < size:  # a bucket closed by a shared embedding keeps the gap at its end
        some = next(iter(lines.values()))
        if not left:
            raise _misfit(some, f"{size - stop} of its {size} elements belong to no parameter", shown)
        parameter = left.pop(0)
        start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        stop = start + parameter.numel
        for state, line in lines.items():
            if stop > size or not line.ends_at(start) or not line.ends_at(stop):
                raise _misfit(
                    line, f"{parameter.name} would be elements {start} to {stop}, but no chunk is cut there", shown
                )
            _place(parameter, line, start, state, out)


def _misfit(line: Line, what: str, shown: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(f"{line.fqn} of {line.numel} elements: {what}", code=MISFIT, path=shown, key=line.fqn)


def _chunks(line: Line, start: int, segment: Segment) -> Iterator[Chunk]:
    """The segment's chunks. start: the parameter's first element in the line."""
    begin = start + segment.start
    for a, b, array, element in line.runs(begin, begin + segment.numel):
        done = element
        for box in flat_boxes(segment.shape, a - begin, b - begin):
            yield from segment.chunks(box, array, done)
            done += box.numel


def _tensor(
    key: TensorKey, copies: Mapping[tuple[Box, ...], list[list[Chunk]]], ranks: Ranks, shown: str
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
    return LogicalTensor(key, ranks.shape(key.name), chunks[0].array.dtype, tuple(chunks))
