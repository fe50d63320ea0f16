"""The job of a DeepSpeed checkpoint: which interval of which parameter each rank's flat tensors store, and where.

A `ZeroJob` is the ZeRO stage, the ranks and the flat groups; `ZeroJob.arrays` returns the content of a rank's flat
tensors. The reader makes a job from `param_shapes` and compares it with the optimizer files, the writer makes one from
the parameter groups and fills its tensors.

ZeRO 1 and 2 (and BF16_Optimizer) concatenate the parameters of a group and cut the result into equal partitions; ZeRO 3
cuts every parameter separately:

    three parameters of 7, 4 and 3 elements over 2 ranks
    ZeRO 1, 2   14 -> padded to 16, partitions of 8    rank 0: 7 of the first, 1 of the second; rank 1: 3 and 3, 2 zeros
    ZeRO 3      7 -> 4 + 3(+1), 4 -> 2 + 2, 3 -> 2 + 1(+1)     rank 0: 4, 2, 2; rank 1: 3 and a zero, 2, 1 and a zero

Rules. 1, 2: the group's length is rounded up to a multiple of 2 * ranks; with `parameter_alignment` each parameter but
the last is padded to a multiple of 16 bytes of the 16-bit type. 3: rank r of n holds elements [r * c, (r + 1) * c) of a
parameter, c = ceil(numel / n), the last ones short (filled with zeros in the file) or empty; a parameter group is split
into sub-groups, each closed by the parameter that brings its rank's length to `sub_group_size`. Round robin: the
parameters of a group are dealt to the ranks like cards, then concatenated rank by rank. Experts: every expert rank has
a flat line of its own experts, cut over the data ranks that hold them; data rank r of n is expert rank r % ep, and
number r // ep among those; with `use_data_before_expert_parallelism` it is expert rank r // (n / ep), number r % (n /
ep).

Source: DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py` (__init__, `_round_robin_reorder`),
`runtime/bf16_optimizer.py`, `runtime/zero/partition_parameters.py` (`_partition_param`), `runtime/zero/stage3.py`
(`_create_fp16_sub_groups`), `utils/groups.py` (`_create_expert_and_data_parallel`). Pure. Cost: a microsecond or two a
parameter and rank that holds a part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Any, NamedTuple, TypeVar

from ckpt_tool.core.flat_line import FlatLine, LinePlace
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.systems.deepspeed.stored_names import global_names

START_ALIGNMENT = 2  # elements: DeepSpeed's nccl_start_alignment_factor
PARAMETER_ALIGNMENT = 16  # bytes
SUB_GROUP_SIZE = 1_000_000_000  # elements, DeepSpeed's default
Shape = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Config:
    """The settings in `ds_config` that decide how flat tensors are cut."""

    stage: object = None  # as the file states it, unchecked
    round_robin: bool = False  # `round_robin_gradients`
    aligned: bool = False  # `parameter_alignment`
    sub_group_size: int = SUB_GROUP_SIZE  # elements of a rank
    data_first: bool = False  # `use_data_before_expert_parallelism`
    fp32_accumulation: bool = False  # of gradients, on the device

    @staticmethod
    def of(ds_config: object) -> Config:
        """Return the settings in a `ds_config`; values of a type that DeepSpeed does not use are ignored."""
        config = _mapping(ds_config)
        zero = _mapping(config.get("zero_optimization"))
        types = _mapping(config.get("data_types"))
        size = zero.get("sub_group_size")
        return Config(
            zero.get("stage"),
            bool(zero.get("round_robin_gradients")),
            bool(zero.get("parameter_alignment")),
            int(size) if isinstance(size, int | float) and 0 < size < 1 << 62 else SUB_GROUP_SIZE,
            bool(config.get("use_data_before_expert_parallelism")),
            types.get("grad_accum_dtype") in ("fp32", "float32") and not zero.get("offload_optimizer"),
        )


def _mapping(value: object) -> Mapping[Any, Any]:
    """Return the value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


class FlatGroup(NamedTuple):
    """A flat group of a pipeline stage; at ZeRO 3 a sub-group."""

    # name -> shape in flat order, experts under the numbers that expert rank 0 gives them: an entry of `param_shapes`
    shapes: Mapping[str, Shape]
    number: int  # of its parameter group
    ep: int = 1  # expert ranks; each has a flat line of its own for the group
    size: int = 0  # elements of each rank's partition
    gaps: tuple[int, ...] = ()  # elements of padding after each parameter (like `size` of ZeRO 1 and 2 alone)


def partitioned(shapes: Mapping[str, Shape], number: int, ep: int, ranks: int, itemsize: int) -> FlatGroup:
    """Return a flat group of ZeRO 1 or 2, cut into `ranks` partitions.

    Args:
        shapes: name -> shape in flat order.
        number: of the parameter group.
        ep: expert ranks.
        ranks: that share the group.
        itemsize: bytes of an element of the module if parameters are aligned, else 0.
    """
    numels = [prod(shape) for shape in shapes.values()]
    gaps = alignment_gaps(numels, itemsize) if itemsize else (0,) * len(numels)
    unit = START_ALIGNMENT * ranks
    return FlatGroup(shapes, number, ep, ceil_div(sum(numels) + sum(gaps), unit) * unit // ranks, gaps)


def alignment_gaps(numels: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the elements of padding after each parameter under `parameter_alignment`; the last one has none."""
    unit = PARAMETER_ALIGNMENT // gcd(PARAMETER_ALIGNMENT, itemsize)
    gaps = []
    start = 0
    for number, numel in enumerate(numels):
        is_last = number == len(numels) - 1
        gap = 0 if is_last else -(start + numel) % unit
        gaps.append(gap)
        start += numel + gap
    return tuple(gaps)


def sub_groups(shapes: Mapping[str, Shape], number: int, ranks: int, size: int) -> Iterator[FlatGroup]:
    """Yield the sub-groups of a parameter group at ZeRO 3. size: `sub_group_size`, in elements of a rank."""
    names = list(shapes)
    counts = [share(prod(shape), ranks) for shape in shapes.values()]
    first = 0
    elements = 0
    is_one_group = size >= sum(counts)
    for i, count in enumerate(counts):
        elements += count
        if (not is_one_group and elements >= size) or i == len(counts) - 1:
            yield FlatGroup({name: shapes[name] for name in names[first : i + 1]}, number)
            first = i + 1
            elements = 0


def deal(items: Sequence[T], hands: int) -> list[T]:
    """Return the items in the order of `round_robin_gradients`: a, b, c, d, e over 2 ranks -> a, c, e, b, d."""
    return [item for hand in range(hands) for item in items[hand::hands]]


def undeal(items: Sequence[T], hands: int) -> list[T]:
    """Return the items in their original order: the inverse of `deal`."""
    order = deal(range(len(items)), hands)
    return [item for _, item in sorted(zip(order, items, strict=True), key=lambda pair: pair[0])]


def share(numel: int, ranks: int) -> int:
    """Return the elements of each rank's share of one parameter at ZeRO 3, padding included."""
    return ceil_div(numel, ranks)


def shares(shapes: Mapping[str, Shape], ranks: int, rank: int) -> tuple[FlatLine[str], int]:
    """Return (content of a rank's concatenated shares of these parameters, number of elements with padding)."""
    places = []
    at = 0
    for name, shape in shapes.items():
        numel = prod(shape)
        count = share(numel, ranks)
        start = min(rank * count, numel)
        stop = min((rank + 1) * count, numel)
        if start < stop:
            places.append(LinePlace(name, at, start, stop, shape))
        at += count
    return FlatLine(tuple(places)), at


class FlatArray(NamedTuple):
    """A flat tensor of a rank; its fp32 weights and each of its moments have the same layout."""

    group: int  # number of its parameter group
    line: FlatLine[str]  # what it holds, under the names of the whole model
    names: Mapping[str, str]  # name in the whole model -> the rank's own, for all parameters of the group
    size: int  # elements
    spare: int  # elements at the end that belong to no parameter (gaps count as parameters')
    partitions: int  # ranks that share the group
    gaps: tuple[int, ...]  # as in `FlatGroup`

    def slices(self) -> dict[str, tuple[int, int]]:
        """Return {rank's own name of a parameter: (elements, position of the first)}: `param_slice_mappings`."""
        out: dict[str, tuple[int, int]] = {}
        for place in self.line.places:
            numel, at = out.get(self.names[place.of], (0, place.at))
            out[self.names[place.of]] = numel + place.stop - place.start, at
        return out


class _WholeLine(NamedTuple):
    """A group's flat line on one expert rank, before it is cut."""

    line: FlatLine[str]
    names: Mapping[str, str]


@dataclass(frozen=True)
class ZeroJob:
    """The layout of all flat tensors of a job: `arrays` returns the content of one rank's."""

    zero: int  # the stage, 1 to 3
    dp: int  # data ranks
    data_first: bool  # `use_data_before_expert_parallelism`
    stages: Sequence[Sequence[FlatGroup]]  # the flat groups of every pipeline stage

    def expert_rank(self, data: int, ep: int) -> tuple[int, int]:
        """Return (expert rank of a data rank, its number among the data ranks that hold the same experts)."""
        if self.data_first:
            return divmod(data, self.dp // ep)
        number, rank = divmod(data, ep)
        return rank, number

    def arrays(self, data: int, stage: int) -> list[FlatArray]:
        """Return the flat tensors of a rank, in the order of its file."""
        arrays = [self._build_array(data, stage, number) for number in range(len(self.stages[stage]))]
        if not self.borders:
            return arrays
        return [array._replace(line=array.line.cut(self.borders)) for array in arrays]

    def _build_array(self, data: int, stage: int, number: int) -> FlatArray:
        group = self.stages[stage][number]
        if self.zero == 3:
            line, size = shares(group.shapes, self.dp, data)
            return FlatArray(group.number, line, {name: name for name in group.shapes}, size, 0, self.dp, ())

        # ZeRO 1 and 2: a window of the group's line on this expert rank.
        expert, partition = self.expert_rank(data, group.ep)
        uncut = self._lines[stage][number][expert]
        stop = (partition + 1) * group.size
        line = uncut.line.window(stop - group.size, stop)
        spare = min(group.size, max(0, stop - uncut.line.end))
        return FlatArray(group.number, line, uncut.names, group.size, spare, self.dp // group.ep, group.gaps)

    @cached_property
    def _lines(self) -> list[list[list[_WholeLine]]]:
        """The uncut flat lines by stage, group and expert rank."""
        return [list(map(_lay_lines, stage)) for stage in self.stages]

    @cached_property
    def borders(self) -> Mapping[str, set[int]]:
        """The positions at which pipeline stages cut a parameter that several of them hold (a tied one).

        Every stage's copy is cut at the borders of all stages, so that boxes of different copies are equal or disjoint:
        equal boxes are replicas.
        """
        holders = Counter(name for stage in self.stages for group in stage for name in group.shapes)
        borders: dict[str, set[int]] = {name: set() for name, count in holders.items() if count > 1}
        if not borders:
            return borders

        for stage, groups in enumerate(self.stages):
            for number in range(len(groups)):
                for data in range(self.dp):
                    for place in self._build_array(data, stage, number).line.places:
                        if place.of in borders:
                            borders[place.of] |= {place.start, place.stop}
        return borders


def _lay_lines(group: FlatGroup) -> list[_WholeLine]:
    """Return the group's flat line on every expert rank."""
    lines = []
    for expert in range(group.ep):
        names = global_names(group.shapes, expert)
        line = FlatLine.end_to_end(zip(names, group.shapes.values(), group.gaps, strict=True))
        lines.append(_WholeLine(line, dict(zip(names, group.shapes, strict=True))))
    return lines
