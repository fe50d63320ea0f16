"""A Paddle job: its degrees and ranks, its stages, and how optimizer states are sharded between its ranks. Readers and
writers share this model; it knows no files.

A rank is (stage, tensor rank, sharding rank). With expert parallelism the ranks of a stage are numbered a second time,
r = shard * tp_degree + tp: its expert rank is r mod ep_degree, and r div ep_degree its rank in the experts' own
sharding group. So

    tp * sharding == ep * moe_sharding        tp 2, sharding 4, ep 4:  r = 0..7, expert ranks 0 1 2 3 0 1 2 3

Stages: the pipeline is one list of layers, `embedding, decoder 0 .. L-1, norm, MTP .. , lm_head`, and a stage is a run
of it. The usual method counts decoder layers alone and gives the ends to the first and the last stage; where the layers
do not divide by the stages, PaddleFormers cuts the whole list evenly instead, the longer runs last:

    4 layers, 2 stages    [embedding 0 1] [2 3 norm lm_head]           layer:DecoderLayer
    5 layers, 2 stages    [embedding 0 1 2] [3 4 norm lm_head]         uniform, 8 items
    --pp-split 3,1        [embedding 0 1 2] [3 norm lm_head]           as it was wished for

Sharding: greedy passes over the optimizer's list of parameters, so the list's order and the shapes decide all. v1
(`DygraphShardingOptimizer`) gives whole parameters, the largest first, equal ones in the list's order, each to the rank
with the least so far:

    sizes 6 4 4 2 over 2 ranks    rank 0: 6, 2    rank 1: 4, 4

v2 (`DygraphShardingOptimizerV2`): parameters of one colour (dense, experts), sorted by dtype, are laid into buffers,
each padded to a multiple of 256 bytes times the ranks; rank r holds [r, r + 1) * size / n of every buffer. A buffer is
closed by the parameter that fills it (256 MB), dtype by dtype. Two fp32 parameters of 100 and 40 elements over 2 ranks:

    128 + 128 elements: rank 0 holds elements 0 .. 100 of the first and 28 of padding, rank 1 the 40 of the second and
    88

What a rank stores of a parameter is its part of the buffer with the padding, one flat array; ranks beyond it store
nothing.

Sources: paddlepaddle 3.3.1 `fleet/base/topology.py` (`EPHybridCommunicateGroup`),
`fleet/meta_parallel/parallel_layers/pp_layers.py` (`SegmentLayers`),
`fleet/meta_optimizers/dygraph_optimizer/dygraph_sharding_optimizer.py` (`_partition_parameters`,
`_build_comm_buffers`), `fleet/utils/tensor_fusion_helper.py` (`build_reduce_scatter_buffer`, `ShardingGradView`), runs
of `core.eager_assign_group_by_size`; PaddleFormers 1.2.0 `nn/pp_model.py` (the list, the choice of the method). Cost: n
log n. What it does not do: virtual stages; overlapped pipelines, whose buffers are one a chunk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from ckpt_tool.core.bounds import check_count
from ckpt_tool.core.flat_line import FlatLine
from ckpt_tool.core.hints import Hint
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.errors import UsageError
from ckpt_tool.systems.paddle.options import SHARDINGS
from ckpt_tool.systems.paddle.rules import text_config

V1, V2 = SHARDINGS


@dataclass(frozen=True, slots=True)
class PaddleHints(Hint):
    """What a reader of Paddle's formats passes on to a writer; None for a fact that the source's format lacks."""

    KEY: ClassVar[str] = "paddle"
    flex: str | None = None  # `trainer` or `plain`
    kind: str | None = None  # `plain`, `sharding_io`, `nested`, `unified`
    layout: str | None = None  # of a unified model file, `np` or `pt`
    skip_save_model_weight: bool | None = None  # it has master weights and no model weights
    sharding: str | None = None  # `v1`, `v2`, "" if states are not sharded
    sharding_degree: int | None = None  # number of ranks that states are sharded over
    told: bool | None = None  # the user named the config
    names: Mapping[str, str] | None = None  # structured -> static
    counts: tuple[int, ...] | None = None  # decoder layers of each stage
    roots: Mapping[str, Any] | None = None  # of a plain flex folder: kind of state -> first key of its nested paths
    safetensors: bool | None = None  # data files of a plain flex folder are safetensors
    config: Mapping[str, Any] | None = None  # the model's
    stem: str | None = None  # of the model file's name


def hints_of_config(config: Mapping[str, Any], *, renamed: bool) -> tuple[list[Hint], list[str]]:
    """The hints that hold the model's config for a Paddle output, and no notes.

    config: under the hub's keys. Nested values are left out, except `architectures`.
    """
    plain = {key: value for key, value in config.items() if isinstance(value, str | int | float | bool)}
    return [PaddleHints(config={**plain, "architectures": config.get("architectures")})], []


class PaddleRank(NamedTuple):
    """A rank of a job, with its coordinates."""

    number: int  # in the job, as the Trainer orders them
    pp: int
    tp: int
    shard: int
    ep: int  # its expert rank
    moe_shard: int  # its rank in the experts' sharding group (without expert parallelism `shard`)


class JobDegrees(NamedTuple):
    """The parallel degrees of a Paddle job."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1  # all data ranks
    sharding: int = 1  # data ranks that states are sharded over (1: they are not)
    version: str = ""  # `v1`, `v2`, "" if states are not sharded, or a reader does not know yet
    by_data: bool = False  # expert ranks are data ranks (files `moeNN`)

    @property
    def moe_sharding(self) -> int:
        """Number of ranks over which the states of one expert rank's experts are sharded."""
        apart = self.ep > 1 and not self.by_data
        return max(self.tp * self.sharding // self.ep, 1) if apart else self.sharding

    def rank(self, pp: int, tp: int, shard: int) -> PaddleRank:
        """The rank at these coordinates; its expert coordinates follow from them."""
        number = (shard * self.pp + pp) * self.tp + tp
        if self.ep == 1 or self.by_data:
            return PaddleRank(number, pp, tp, shard, 0, shard)
        # The second numbering of a stage's ranks, r = shard * tp_degree + tp.
        moe_shard, ep = divmod(shard * self.tp + tp, self.ep)
        return PaddleRank((moe_shard * self.pp + pp) * self.ep + ep, pp, tp, shard, ep, moe_shard)

    def ranks(self) -> Iterator[PaddleRank]:
        """Every rank that has files, stage by stage, tensor ranks fastest; not the replicas of data parallelism."""
        for pp in range(self.pp):
            for shard in range(self.sharding):
                for tp in range(self.tp):
                    yield self.rank(pp, tp, shard)

    def to_json(self) -> dict[str, int]:
        """The degrees under the names that a report uses."""
        return {"tp": self.tp, "pp": self.pp, "ep": self.ep, "dp": self.dp}


# -- how states are shared ---------------------------------------------------------------------------------------------

ALIGNMENT = 256  # bytes, on GPU, XPU and NPU
BUFFER_MB = 256  # `sharding_comm_buffer_size_MB`, Paddle's default
_WIDTHS = {"F16": 2, "BF16": 2, "F32": 4}  # bytes of an element, by which Paddle pads


class OptimizerMember(NamedTuple):
    """A parameter of the optimizer's list, as a rank holds it."""

    name: str
    numel: int
    dtype: str  # of the model's weight, under our name; Paddle pads by it
    width: int  # bytes of an element of it


class ParameterSpan(NamedTuple):
    """Elements [start, stop) of a parameter's row-major line, followed by padding up to `length` elements."""

    start: int
    stop: int
    length: int


def owners(members: Sequence[OptimizerMember], ranks: int) -> dict[str, int]:
    """The rank that owns each parameter under v1, in the order in which Paddle assigns them."""
    sizes = [0] * ranks
    out = {}
    # The sort is stable: parameters of equal size are assigned in the optimizer's order, as in Paddle.
    for member in sorted(members, key=lambda m: -m.numel):
        rank = sizes.index(min(sizes))
        out[member.name] = rank
        sizes[rank] += member.numel
    return out


def spans(
    members: Sequence[OptimizerMember], ranks: int, rank: int, *, buffer_mb: int = BUFFER_MB
) -> dict[str, ParameterSpan]:
    """The span of each parameter of one colour that a rank holds under v2.

    Parameters of which it holds nothing are left out.

    Args:
        members: The parameters, in the optimizer's order.
        ranks: The size of the sharding group.
        rank: The rank's number in the group.
        buffer_mb: The size at which a buffer is closed.
    """
    out = {}
    for buffer in buffers(members, buffer_mb):
        sizes = [padded(m.numel, _WIDTHS.get(m.dtype, m.width), ranks) for m in buffer]
        share = sum(sizes) // ranks
        line = FlatLine.end_to_end((member, (size,), 0) for member, size in zip(buffer, sizes, strict=True))
        for member, _, start, stop, *_ in line.window(rank * share, (rank + 1) * share).places:
            out[member.name] = ParameterSpan(min(start, member.numel), min(stop, member.numel), stop - start)
    return out


def padded(numel: int, width: int, ranks: int) -> int:
    """The number of elements that a parameter takes in its buffer, with padding. width: bytes of an element."""
    unit = ALIGNMENT // width * ranks
    return ceil_div(numel, unit) * unit


def buffers(members: Sequence[OptimizerMember], buffer_mb: int = BUFFER_MB) -> list[list[OptimizerMember]]:
    """The parameters of each fused buffer, sorted by the name of the dtype: bfloat16, float16, float32."""
    limit = buffer_mb << 20
    order = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
    done: list[list[OptimizerMember]] = []
    current: list[OptimizerMember] = []
    filled = 0
    for member in sorted(members, key=lambda m: order.get(m.dtype, m.dtype)):
        if current and current[0].dtype != member.dtype:
            done = [*done, current]
            current = []
            filled = 0
        # A buffer is closed by the parameter that fills it, so it may be longer than the limit.
        current.append(member)
        filled += member.numel * member.width
        if filled >= limit:
            done = [*done, current]
            current = []
            filled = 0
    return [*done, current] if current else done


# -- stages ------------------------------------------------------------------------------------------------------------

NO_SPLIT = "E1250"
_LAYER = re.compile(r"^(.*?)\b(?:layers|h)\.(\d{1,9})\.", re.ASCII)
_MTP = re.compile(r"\bmtp_\w+\.(\d{1,9})\.", re.ASCII)
_AHEAD = ("eh_proj", "enorm", "hnorm")  # modules that only layers of multi-token prediction have
_HEADS = ("lm_head", "output_layer", "score", "classifier", "qa_outputs", "cls")


class Items(NamedTuple):
    """The sequential list of layers that a pipeline is cut from."""

    prefix: str  # of the names of decoder layers (`model.`)
    layers: int
    mtp: int

    @property
    def total(self) -> int:
        """Embedding, decoder layers, norm, MTP layers, head."""
        return self.layers + self.mtp + 3

    def at(self, name: str) -> int:
        """The position in the list of the layer that parameter `name` belongs to.

        A parameter whose name shows no layer counts as part of the embedding.
        """
        found = _LAYER.match(name)
        if found and found[1] == self.prefix:
            number = int(found[2])
            return 1 + number if number < self.layers else 2 + number
        ahead = _MTP.search(name)
        if ahead:
            return 2 + self.layers + min(int(ahead[1]), max(self.mtp - 1, 0))
        words = [word for word in name.split(".") if not word.isdecimal()]
        if any(word in _HEADS for word in words[:-1]):
            return self.total - 1
        return 1 + self.layers if not found and any("norm" in word for word in words) else 0


def items_of(names: Iterable[str], config: Mapping[str, Any]) -> Items:
    """The list of layers that `names` (structured, with global numbers) imply.

    config: its `num_hidden_layers` separates decoder layers from MTP layers, which have numbers after them.
    """
    names = list(names)
    by_prefix: dict[str, set[int]] = {}
    ahead: dict[str, set[int]] = {}
    own: set[int] = set()
    for name in names:
        found = _LAYER.match(name)
        if found:
            by_prefix.setdefault(found[1], set()).add(int(found[2]))
            if any(f".{word}." in name for word in _AHEAD):
                ahead.setdefault(found[1], set()).add(int(found[2]))
        elif mtp := _MTP.search(name):
            own.add(int(mtp[1]))
    if not by_prefix:
        return Items("", 0, len(own))
    # There may be several lists of layers, such as a vision encoder's: the longest is the decoder's.
    prefix = max(by_prefix, key=lambda key: len(by_prefix[key]))
    numbers = by_prefix[prefix]
    stated = text_config(config).get("num_hidden_layers")
    layers = most = check_count(max(numbers) + 1, len(names), "layers by the tensors' names")
    if type(stated) is int and 0 < stated <= layers:
        layers = stated
    elif prefix in ahead:
        layers = min(ahead[prefix])
    return Items(prefix, layers, max(most - layers, len(own)))


class PaddleStages(NamedTuple):
    """The stages of a pipeline."""

    items: Items
    borders: tuple[int, ...]  # `pp + 1` positions in the list; stage s holds [borders[s], borders[s + 1])
    method: str  # Paddle's name of it, for notes

    @property
    def pp(self) -> int:
        """The number of stages."""
        return len(self.borders) - 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Decoder layers of each stage."""
        last = 1 + self.items.layers
        return tuple(
            max(0, min(stop, last) - max(start, 1)) for start, stop in zip(self.borders, self.borders[1:], strict=False)
        )

    def of(self, name: str) -> int:
        """The stage that holds parameter `name`."""
        at = self.items.at(name)
        return next(stage for stage, stop in enumerate(self.borders[1:]) if at < stop)


def stages_of(items: Items, pp: int, wish: Sequence[int] = (), before: Sequence[int] = ()) -> PaddleStages:
    """Cut the list of layers into `pp` stages.

    Args:
        items: The list of layers.
        pp: The number of stages.
        wish: Decoder layers of each stage, from `--pp-split`.
        before: Decoder layers of each of the source's stages, kept if they fit.

    Raises:
        UsageError: E1250, no such cut exists.
    """
    if wish:
        if len(wish) != pp or sum(wish) != items.layers or min(wish) < 0:
            raise UsageError(
                f"--pp-split {','.join(map(str, wish))} does not distribute {items.layers} layers over {pp} stages",
                code=NO_SPLIT,
                hint=f"give {pp} numbers that sum to {items.layers}",
            )
        return _split_by_counts(items, wish, "as --pp-split says")
    if len(before) == pp and sum(before) == items.layers:
        return _split_by_counts(items, before, "as the source's")
    if pp > items.total:
        raise UsageError(
            f"--pp {pp}: the pipeline is a list of {items.total} layers",
            code=NO_SPLIT,
            hint=f"the nearest that it takes is --pp {items.total}",
        )
    if (items.layers % pp == 0 and items.layers) or pp == 1:
        return _split_by_counts(items, [items.layers // pp] * pp, "layer:DecoderLayer")
    # Paddle's uniform method cuts the whole list evenly; the longer stages come last.
    size, extra = divmod(items.total, pp)
    sizes = [size + (stage >= pp - extra) for stage in range(pp)]
    return PaddleStages(items, tuple(accumulate(sizes, initial=0)), "uniform")


def _split_by_counts(items: Items, counts: Sequence[int], method: str) -> PaddleStages:
    inner = tuple(accumulate(counts[:-1], initial=1))[1:]
    return PaddleStages(items, (0, *inner, items.total), method)
