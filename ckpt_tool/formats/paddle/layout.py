"""Who holds what in a Paddle job: for degrees that were asked for, every rank and its part of every parameter.

The one idea: a rank is (stage, tensor rank, sharding rank). Stage and names say which parameters (`paddle.stages`), the tensor
rank which part of them (`paddle.rules`): a `Block`. With expert parallelism the ranks of a stage are numbered a second time,
r = shard * TP + tp: experts of expert rank r mod EP, whole, and r div EP is the rank in the experts' own sharding group. So

    tp * sharding == ep * moe_sharding        tp 2, sharding 4, ep 4:  r = 0..7, expert ranks 0 1 2 3 0 1 2 3

Where ranks of the tensor group share the experts (`moe_group` of ERNIE's classes, "mp" unless the config says otherwise) an
expert lies whole on one tensor rank, and is a parameter like others for sharding: `Laid.by_tensor`.

The states of a block are dealt to the ranks of its group, dense ones over `sharding`, experts over `moe_sharding`: whole to an
owner (v1) or as flat slices with padding (v2; `paddle.slices`): a `Share`.

    laid = settle(wanted)
    for rank in laid.ranks():
        laid.blocks(rank)     # the model as the rank computes with it
        laid.shares(rank)     # its part of master weights and moments

Sources: PaddleFormers 1.2.0 `trainer/training_args.py` (degrees, order of ranks), paddlepaddle 3.3.1
`fleet/base/topology.py` (`EPHybridCommunicateGroup`), and those of the modules named. Cost: some us a parameter, tensor rank and expert rank; a rank
more of the sharding group costs its shares. What it does not do: names inside files, files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.target import Wanted
from ckpt_tool.core.tensor import EMA, MODEL
from ckpt_tool.formats.paddle.degrees import (
    V1,
    Degrees,
    check_heads,
    config_of,
    degrees_of,
    experts_by_tensor,
    paddle_hints,
)
from ckpt_tool.formats.paddle.order import registration_order
from ckpt_tool.formats.paddle.parameters import Parameter, experts_in, parameters_of, rows_of
from ckpt_tool.formats.paddle.rules import Cut, cut_of, local_boxes
from ckpt_tool.formats.paddle.slices import BUFFER_MB, Member, Span, owners, spans
from ckpt_tool.formats.paddle.stages import Stages, items_of, stages_of

__all__ = [
    "Block", "Degrees", "Laid", "Parameter", "Rank", "Share", "Span", "config_of", "paddle_hints", "settle",
]  # fmt: skip


class Rank(NamedTuple):
    """A rank that keeps something of its own. number: in the job, as the Trainer orders them. ep: its expert rank. moe_shard:
    its rank in the experts' sharding group (without expert parallelism `shard`)."""

    number: int
    pp: int
    tp: int
    shard: int
    ep: int
    moe_shard: int


class Block(NamedTuple):
    """A tensor rank's part of a parameter. shape: its own. boxes: (box in the parameter, box in the block), tiling the block.
    cut: how tensor ranks part it; rank, of: this part's number; (Cut(None), 0, 1) where each holds the whole."""

    parameter: Parameter
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, Box], ...]
    cut: Cut
    rank: int
    of: int

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the block begins when those of all tensor ranks are laid end to end (what flex checkpoints call global)."""
        return tuple(self.rank * n if axis == self.cut.dim else 0 for axis, n in enumerate(self.shape))


class Share(NamedTuple):
    """What a rank keeps of a block's states: the whole block in its own shape, or with v2 a span of its row-major line."""

    block: Block
    span: Span | None


class Laid:
    """Everything that was decided. parameters: by name, in the order in which Paddle registers them."""

    def __init__(
        self, degrees: Degrees, stages: Stages, parameters: Mapping[str, Parameter], config: Mapping[str, Any],
        notes: Sequence[str], buffer_mb: int, *, by_tensor: bool = False,
    ) -> None:  # fmt: skip
        self.degrees, self.stages, self.parameters, self.by_tensor = degrees, stages, parameters, by_tensor
        self.config, self.notes, self.buffer_mb = config, tuple(notes), buffer_mb
        self._by_stage: list[list[Parameter]] = [[] for _ in range(degrees.pp)]
        for parameter in parameters.values():
            for stage in parameter.stages:
                first = (
                    parameter.alias is not None and degrees.pp > 1
                )  # a pipeline makes shared layers before all others
                self._by_stage[stage].insert(0 if first else len(self._by_stage[stage]), parameter)
        self._blocks = lru_cache(maxsize=None)(self._make_blocks)
        self._owners = lru_cache(maxsize=None)(self._make_owners)

    def ranks(self) -> Iterator[Rank]:
        """Every rank but the copies that plain data parallelism makes, stage by stage, tensor ranks fastest."""
        for pp in range(self.degrees.pp):
            for shard in range(self.degrees.sharding):
                for tp in range(self.degrees.tp):
                    yield self.rank(pp, tp, shard)

    def rank(self, pp: int, tp: int, shard: int) -> Rank:
        d = self.degrees
        number = (shard * d.pp + pp) * d.tp + tp
        if d.ep == 1:
            return Rank(number, pp, tp, shard, 0, shard)
        moe_shard, ep = divmod(shard * d.tp + tp, d.ep)
        return Rank((moe_shard * d.pp + pp) * d.ep + ep, pp, tp, shard, ep, moe_shard)

    def blocks(self, rank: Rank) -> Sequence[Block]:
        """What the rank's model consists of, in the order of registration."""
        return self._blocks(rank.pp, rank.tp, rank.ep)

    def _make_blocks(self, pp: int, tp: int, ep: int) -> tuple[Block, ...]:
        out = []
        for parameter in self._by_stage[pp]:
            if parameter.expert is not None and parameter.expert != (tp if self.by_tensor else ep):
                continue
            alone = Cut(None) if parameter.expert is not None else None
            cut = alone or cut_of(parameter.name, parameter.shape, self.config, self.degrees.tp, ep=self.degrees.ep)
            shape, boxes = local_boxes(parameter.shape, cut, self.degrees.tp, tp)
            of = 1 if cut.dim is None else self.degrees.tp
            out.append(Block(parameter, shape, tuple(boxes), cut, tp if of > 1 else 0, of))
        return tuple(out)

    def optimized(self, rank: Rank) -> list[Block]:
        """The blocks of the optimizer's list of parameters: a tied pair stands in it once."""
        every = self.blocks(rank)
        here = {block.parameter.name for block in every}
        return [b for b in every if b.parameter.trained and b.parameter.alias not in here]

    def shares(self, rank: Rank) -> list[Share]:
        """What the rank keeps of the states, in the order of the optimizer's list; under v1 in that of dealing."""
        blocks = self.optimized(rank)
        if not self.degrees.version:
            return [Share(block, None) for block in blocks]
        if self.degrees.version == V1:
            named = {block.parameter.name: block for block in blocks}
            dealt = self.owner_of(rank).items()
            return [Share(b, None) for name, to in dealt if to == self.group_rank(b := named[name], rank)]
        held: dict[str, Span] = {}
        for colour in self.colours(blocks):
            ranks, own = self.group_size(colour[0]), self.group_rank(colour[0], rank)
            held |= spans([_member(b) for b in colour], ranks, own, buffer_mb=self.buffer_mb)
        return [Share(b, held[b.parameter.name]) for b in blocks if b.parameter.name in held]

    def group_rank(self, block: Block, rank: Rank) -> int:
        """The rank's number in the group that shares the block's states."""
        return rank.moe_shard if self._grouped(block) else rank.shard

    def group_size(self, block: Block) -> int:
        """The ranks of that group."""
        return self.degrees.moe_sharding if self._grouped(block) else self.degrees.sharding

    def _grouped(self, block: Block) -> bool:
        """Are its states shared in the experts' own group?"""
        return block.parameter.expert is not None and not self.by_tensor

    def colours(self, blocks: Sequence[Block]) -> list[list[Block]]:
        """The blocks of each group, dense ones first, each in order; an empty kind is left out."""
        dense = [block for block in blocks if not self._grouped(block)]
        experts = [block for block in blocks if self._grouped(block)]
        return [kind for kind in (dense, experts) if kind]

    def owner_of(self, rank: Rank) -> Mapping[str, int]:
        """Under v1: the rank, in its group, that owns each parameter of the rank's model."""
        return self._owners(rank.pp, rank.tp, rank.ep)

    def _make_owners(self, pp: int, tp: int, ep: int) -> dict[str, int]:
        any_rank = Rank(0, pp, tp, 0, ep, 0)
        out: dict[str, int] = {}
        for colour in self.colours(self.optimized(any_rank)):
            out |= owners([_member(b) for b in colour], self.group_size(colour[0]))
        return out


def _member(block: Block) -> Member:
    dtype = block.parameter.dtype
    return Member(block.parameter.name, prod(block.shape), dtype.name, max(1, dtype.bits // 8))


def settle(wanted: Wanted) -> Laid:
    """All of it for what is wanted. Raises UsageError E1250 to E1253, and as `paddle.rules.cut_of`."""
    own = paddle_hints(wanted)
    config = config_of(wanted)
    rows = rows_of(wanted.tensors)
    names = registration_order(list(rows), tuple(own.get("names") or ()))
    items = items_of(names, config)
    notes: list[str] = []
    degrees = degrees_of(wanted, experts_in(names), notes)
    if degrees.ep == 1 and all(state in (MODEL, EMA) for states in rows.values() for state in states):
        degrees = degrees._replace(sharding=1, version="")  # there is nothing to share
    stages = stages_of(items, degrees.pp, wanted.options.get("pp_split") or (), own.get("counts") or ())
    if stages.method == "uniform":
        notes.append(
            f"{items.layers} decoder layers do not divide by {degrees.pp} stages: cut as Paddle's uniform method does, "
            f"{', '.join(map(str, stages.counts))}"
        )
    by_tensor = experts_by_tensor(experts_in(names), degrees, config)
    holders = degrees.tp if by_tensor else degrees.ep
    parameters = parameters_of(names, rows, stages, config, own.get("names") or {}, holders)
    check_heads(config, degrees, names)
    said = own.get("comm_buffer_mb")
    size = said if type(said) is int and said > 0 else BUFFER_MB
    laid = Laid(degrees, stages, parameters, config, notes, size, by_tensor=by_tensor)
    if degrees.version == V1 and degrees.ep > 1:
        notes.append("sharding v1 with expert ranks: experts are dealt to owners inside their own sharding group")
        laid.notes = tuple(notes)
    for rank in laid.ranks():  # every cut is tried before anything is laid out
        if rank.shard == 0 or rank.ep:
            laid.blocks(rank)
    return laid
