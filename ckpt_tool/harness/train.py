"""The trainer of one rank: a step, its state, and how it goes on from one.

    trainer = Trainer(TrainingJob(ModelShape(), Layout.parse("tp2,dp2")), comm)
    for report in trainer.train(10): ...          TrainingStep(step, loss, norm, rate)
    state = trainer.state()                       RankState: pieces and scalars
    other.load(read, state.scalars)               the values by box, from anywhere

A step: the pipeline's schedule runs forwards and backwards, a tape a layer; gradients are joined bucket by bucket and
cut to the rank's part at once; one exchange shares all losses and square sums; the update is local; model values are
rebuilt. In canonical mode loss, norm and state are the same bits for every layout. All ranks return the same reports.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from ckpt_tool.errors import Incomplete
from ckpt_tool.harness.comm import Comm
from ckpt_tool.harness.gradients import GradientSums
from ckpt_tool.harness.layout import Group, HarnessLayout
from ckpt_tool.harness.model import Model, StepMoment
from ckpt_tool.harness.optimizer import AdamW, Muon, MuonSlices, Schedule, kernels_for
from ckpt_tool.harness.pieces import RankState, Read
from ckpt_tool.harness.randomness import sample
from ckpt_tool.harness.schedule import Op, schedule
from ckpt_tool.harness.shape import VIRTUAL, ModelShape
from ckpt_tool.harness.sharding import RankParameter
from ckpt_tool.harness.tape import Node, Ref, Tape
from ckpt_tool.harness.weights import RankWeights

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What is trained and how. `canonical`: bitwise over layouts; False is native mode, with all-reduces."""

    shape: ModelShape
    layout: HarnessLayout
    seed: int = 1234
    canonical: bool = True
    adam: AdamW = AdamW()
    muon: Muon | None = None  # steps the matrices of the layers, AdamW the rest; None: AdamW everything
    schedule: Schedule = Schedule()


class TrainingStep(NamedTuple):
    """What a step did: its number (from 1), the mean loss before it, the gradient norm before clipping, the learning
    rate."""

    step: int
    loss: float
    norm: float
    rate: float


class _Flight(NamedTuple):
    """A microbatch in a chunk between its forward and its backward."""

    tapes: list[tuple[str, Tape]]
    entry: Node
    exit: Node


class Trainer:
    """One rank. Raises UsageError E1501 if the model can't be laid out so; `steps` False: only to hold a state."""

    def __init__(self, job: TrainingJob, comm: Comm, *, steps: bool = True) -> None:
        job.layout.check(job.shape, canonical=job.canonical, steps=steps, muon=job.muon is not None)
        self.job = job
        self.comm = comm
        self.at = job.layout.at(comm.rank, job.shape)
        self.step = 0
        self.consumed = 0
        self.seed = job.seed
        self._tp = job.layout.tp_group(self.at)
        self._kernels = kernels_for(comm.device)
        self._build()

    def _build(self) -> None:
        job = self.job
        self._model = Model(job.shape, job.layout, self.at, self.comm, self.seed, canonical=job.canonical)
        muon = job.muon is not None
        self.weights = RankWeights(job.shape, job.layout, self.at, self.comm, self.seed, self._model.shards, muon=muon)
        self._sums = GradientSums(canonical=job.canonical)
        self._flights: dict[tuple[int, int], _Flight] = {}

    # -- steps --------------------------------------------------------------------------------------------------------

    def train(self, steps: int) -> Iterator[TrainingStep]:
        """Run `steps` steps, one a time as they are requested."""
        for _ in range(steps):
            yield self._one()

    def _one(self) -> TrainingStep:
        shape = self.job.shape
        layout = self.job.layout
        losses = torch.zeros(shape.batch, dtype=torch.float64)
        for op in schedule(layout.pp, layout.vpp, shape.batch // layout.dp)[self.at.pp]:
            if op.forward:
                self._forward(op, losses)
            else:
                self._backward(op)
        gradients, squares = self._join_gradients()
        sums = self.comm.all_reduce(self.comm.everyone, torch.cat([losses, squares]).to(self.comm.device)).tolist()
        loss = math.fsum(sums[: shape.batch]) / shape.batch
        norm = math.sqrt(math.fsum(sums[shape.batch :]))
        self.step += 1
        self.consumed += shape.batch
        self._update(gradients, norm)
        self.comm.barrier()
        return TrainingStep(self.step, loss, norm, self.job.schedule.rate(self.step))

    def _moment(self, op: Op) -> StepMoment:
        share = self.job.shape.batch // self.job.layout.dp
        return StepMoment(self.step, self.at.dp * share + op.microbatch, op.microbatch)

    def _forward(self, op: Op, losses: torch.Tensor) -> None:
        """One microbatch through one chunk; what goes on is sent, what backward needs is kept."""
        shape = self.job.shape
        layout = self.job.layout
        moment = self._moment(op)
        stage = op.chunk * layout.pp + self.at.pp
        tokens = sample(shape, self.seed, self.consumed + moment.microbatch).to(self.comm.device)
        flight = _Flight([], Node(torch.zeros(0)), Node(torch.zeros(0)))

        if stage == 0:
            x = self._model.embed(self._open(flight, "embed"), tokens[:-1], moment)
            self.weights.release("embed")
            entry = x
        else:
            size = (shape.sequence, shape.hidden)
            source = self._rank_of(stage - 1)
            entry = x = Node(self.comm.recv(size, torch.bfloat16, source, self._tag(op, stage, forward=True)).detach())

        for layer in self.at.chunks[op.chunk]:
            x = self._model.layer(self._open(flight, str(layer)), x, layer, moment)
            self.weights.release(str(layer))

        if stage == layout.stages - 1:
            x = self._model.loss(self._open(flight, "head"), x, tokens[1:], moment)
            self.weights.release("head")
            if self.at.tp == 0:
                losses[moment.microbatch] = x.value.double().cpu()
        else:
            self.comm.send(x.value, self._rank_of(stage + 1), self._tag(op, stage + 1, forward=True))

        self._flights[op.microbatch, op.chunk] = flight._replace(entry=entry, exit=x)

    def _backward(self, op: Op) -> None:
        """The way back: a layer's tape at a time, the last first, each forgotten at once."""
        shape = self.job.shape
        layout = self.job.layout
        stage = op.chunk * layout.pp + self.at.pp
        tapes, entry, outputs = self._flights.pop((op.microbatch, op.chunk))
        if stage == layout.stages - 1:
            outputs.add(torch.ones_like(outputs.value))
        else:
            size = (shape.sequence, shape.hidden)
            source = self._rank_of(stage + 1)
            outputs.add(self.comm.recv(size, torch.bfloat16, source, self._tag(op, stage, forward=False)))
        while tapes:
            room, tape = tapes.pop()
            self.weights.gather(room)
            tape.backward()
            self.weights.release(room)
        if stage > 0:
            self.comm.send(entry.take(), self._rank_of(stage - 1), self._tag(op, stage - 1, forward=False))

    def _open(self, flight: _Flight, room: str) -> Tape:
        """A tape for a room, whose weights are there."""
        self.weights.gather(room)
        zero3 = self.job.layout.zero == 3
        tape = Tape(self.comm, self._tp, self.weights, self._sums, canonical=self.job.canonical, recompute=zero3)
        flight.tapes.append((room, tape))
        return tape

    def _rank_of(self, stage: int) -> int:
        return self.job.layout.rank(tp=self.at.tp, dp=self.at.dp, pp=stage % self.job.layout.pp)

    def _tag(self, op: Op, stage: int, *, forward: bool) -> int:
        """A number for a message to virtual stage `stage`, the same at both ends."""
        return (op.microbatch * self.job.layout.stages + stage) * 2 + forward

    # -- gradients ----------------------------------------------------------------------------------------------------

    def _join_gradients(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The rank's parts of all gradients, and the square sums (fp64) that it answers for, one a shard of the
        model."""
        squares = torch.zeros(len(self._places()), dtype=torch.float64)
        gradients: dict[str, torch.Tensor] = {}
        for group, items in self.weights.kinds():
            for bucket in _buckets(items):
                self._join(group, bucket, gradients, squares)
        return gradients, squares

    def _join(
        self, group: Group, bucket: list[RankParameter], found: dict[str, torch.Tensor], squares: torch.Tensor
    ) -> None:
        """Join one bucket over its group. What isn't the rank's own part is let go here (ZeRO 2)."""
        tied = self.job.shape.tied and bucket[0].param.room == "embed"
        own = [ref for item in bucket for ref in self.weights.refs(item)]
        if tied:
            line = self._tied_line(group, own)
        else:
            line = self._sums.joined(self.comm, group, own)
        line = line / self.job.shape.batch
        start = 0
        places = self._places()
        for item in bucket:
            size = item.numel
            own_part = line[start : start + size]
            refs = self.weights.refs(item)
            if group.index(self.comm.rank) == 0 and item.copies == 0:
                for ref, shard in zip(refs, own_part.chunk(len(refs)), strict=True):
                    squares[places[ref]] = shard.double().square().sum().cpu()
            found[item.param.name] = (
                self.weights.box_of(item, own_part).reshape(-1)[self.weights.part(item.param.name)].clone()
            )
            start += size

    def _tied_line(self, group: Group, refs: list[Ref]) -> torch.Tensor:
        """A tied embedding's gradient: as a table, plus as a head, from the first and the last stage."""
        layout = self.job.layout
        lines = []
        if self.at.pp == 0:
            lines.append(self._sums.joined(self.comm, group, refs))
        if self.at.pp == layout.pp - 1:
            lines.append(self._sums.joined(self.comm, group, [ref._replace(name=_HEAD) for ref in refs]))
        if layout.pp > 1:
            lines = self.comm.all_gather(layout.ends_group(self.at), lines[0])
        return lines[0] + lines[1]

    def _places(self) -> dict[Ref, int]:
        """Every shard of the model by number, alike on all ranks."""
        count = VIRTUAL if self.job.canonical else self.job.layout.tp
        refs = [
            Ref(param.name, shard)
            for param in self.job.shape.parameters()
            for shard in range(1 if param.cut is None else count)
        ]
        return {ref: place for place, ref in enumerate(refs)}

    def _update(self, gradients: dict[str, torch.Tensor], norm: float) -> None:
        adam = self.job.adam
        rate = self.job.schedule.rate(self.step)
        scale = adam.scale(norm)
        for name, item in self.weights.params.items():
            gradient = gradients.pop(name).mul_(scale)
            slices = self.weights.slices[name]
            decays = item.param.decays
            if isinstance(slices, MuonSlices):
                self._muon_step(item, slices, gradient, rate)
            else:
                adam.update(slices, gradient, step=self.step, rate=rate, decays=decays, device=self._kernels)
        self.weights.rebuild()

    def _muon_step(self, item: RankParameter, slices: MuonSlices, gradient: torch.Tensor, rate: float) -> None:
        """By the whole matrix, whose parts the tensor ranks have; the data ranks that weren't dealt it do nothing."""
        muon = self.job.muon
        dim = item.param.cut
        if muon is None or not gradient.numel():
            return
        own_ahead = muon.ahead(slices, gradient).view(item.box)
        full_ahead = own_ahead if dim is None else torch.cat(self.comm.all_gather(self._tp, own_ahead), dim)
        step = muon.orthogonal(full_ahead)
        if dim is not None:
            step = step.narrow(dim, item.offset[dim], item.box[dim])
        muon.update(slices, step.reshape(-1), self.job.adam, rate=rate)

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> RankState:
        """What this rank would save now. The tensors are the live ones."""
        scalars = {
            "step": self.step,
            "consumed": self.consumed,
            "seed": self.seed,
            "lr": self.job.schedule.rate(self.step) if self.step else 0.0,
            "scheduler": asdict(self.job.schedule),
            "optimizer": self.job.adam.scalars(),
            **({} if self.job.muon is None else {"muon": self.job.muon.scalars()}),
        }
        return RankState(self.job.layout, self.job.shape, self.at, self.weights.pieces(), scalars)

    def load(self, read: Read, scalars: Mapping[str, Any]) -> None:
        """Go on from a saved state. Raises Incomplete E1503 if a scalar is missing, whatever `read` raises
        otherwise."""
        missing = [name for name in ("step", "consumed", "seed") if name not in scalars]
        if missing:
            raise Incomplete(
                f"the checkpoint doesn't say {', '.join(missing)}: without it no run can go on",
                code="E1503",
                hint="it was saved without its extras; save it with --state all",
            )
        self.step, self.consumed, self.seed = (int(scalars[name]) for name in ("step", "consumed", "seed"))
        self._build()
        self.weights.load(read)


def _buckets(items: list[RankParameter]) -> list[list[RankParameter]]:
    """Parameters by room: what is joined in one exchange."""
    rooms: dict[str, list[RankParameter]] = {}
    for item in items:
        rooms.setdefault(item.param.room, []).append(item)
    return list(rooms.values())
