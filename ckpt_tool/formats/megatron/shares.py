"""What a rank of a new legacy Megatron checkpoint keeps of the model: its parameters under its own names, in its own
order.

The one idea: `megatron.model` backwards. Every logical tensor is asked for its share on (stage, tensor rank, expert
rank); a share is a shape and parts, boxes that lie row-major from an element on. Model, master and moments have the
same parts.

    decoder.layers.2.mlp.linear_fc1.weight (96, 32) on stage 1 (layers 2, 3), tensor rank 1 of 2
    -> decoder.layers.0.mlp.linear_fc1.weight (48, 32): rows 24..48 from element 0, rows 72..96 from element 768

GroupedMLP's weight1 and weight2 lie transposed: a part is a column. Cost: some us a parameter (a column for
GroupedMLP). What it does not do: decide (`megatron.wanted`), order the optimizer's arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from ckpt_tool.core.box import Box, contiguous_strides
from ckpt_tool.core.dtype import DType
from ckpt_tool.formats.megatron import names
from ckpt_tool.formats.megatron.model import EMBEDDING, TIED_HEAD
from ckpt_tool.formats.megatron.ranks import Rank
from ckpt_tool.formats.megatron.rules import ETP, VOCABULARY, Rule, local_shape, pieces
from ckpt_tool.formats.megatron.stages import Stage
from ckpt_tool.formats.megatron.wanted import Shape


class Run(NamedTuple):
    """`box` of logical tensor `name` lies row-major from element `start` of the rank's array."""

    name: str
    box: Box
    start: int


class Share(NamedTuple):
    """A rank's parameter or buffer. names: the logical tensors in it (several for GroupedMLP)."""

    local: str
    chunk: int
    shape: tuple[int, ...]
    dtype: DType
    names: tuple[str, ...]
    runs: tuple[Run, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Sharing:
    """The shares of every rank."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.mla = {name.partition(".self_attention.")[0] for name in shape.model if ".linear_kv_down_proj." in name}
        self.moe = {
            name.partition(".mlp.")[0] for name in shape.model if ".mlp.router." in name or ".mlp.experts." in name
        }
        self.dense: dict[tuple[int, int], list[str]] = {}  # by (stage, chunk)
        self.experts: dict[
            tuple[int, int, int], list[tuple[names.ExpertName, str]]
        ] = {}  # and expert rank; local numbers
        for name in shape.model:
            expert = names.expert_of(name) if ".experts." in name else None
            for stage in self._stages_of(name):
                if expert is None:
                    self.dense.setdefault((stage.pp, stage.vpp), []).append(name)
                else:
                    ep, own = divmod(expert.expert, shape.cutting.local_experts)
                    members = self.experts.setdefault((stage.pp, stage.vpp, ep), [])
                    members.append((expert._replace(expert=own), name))

    def _stages_of(self, name: str) -> list[Stage]:
        """The chunks that keep a copy of the tensor."""
        stages, facts = self.shape.stages, self.shape.facts
        layer = names.layer_of(name)
        if layer:
            found = stages.holding(layer[1])
            return [found or stages.chunks[-1]]
        first, last, ahead = stages.chunks[0], stages.chunks[-1], stages.mtp_stage
        if name == EMBEDDING:
            copies = [first, *([ahead] if facts.mtp else []), *([last] if facts.tied and stages.pp > 1 else [])]
            return list(dict.fromkeys(copies))
        if name.startswith("mtp."):
            return [ahead]
        if name.startswith(("output_layer.", "lm_head.", "decoder.final_")):
            return [last]
        return [first]

    def of(self, rank: Rank) -> list[list[Share]]:
        """The shares of a rank, by chunk, in the order in which the model registers them."""
        out = []
        for vpp in range(self.shape.degrees["vpp"]):
            stage = self.shape.stages.of(rank.pp, vpp)
            shares = list(self._chunk(rank, stage))
            order = names.registration_order([share.local for share in shares])
            out.append([shares[i] for i in order])
        return out

    def _chunk(self, rank: Rank, stage: Stage) -> Iterable[Share]:
        grouped: dict[str, list[tuple[names.ExpertName, str]]] = {}
        for name in self.dense.get((stage.pp, stage.vpp), ()):
            yield from self._plain(name, rank, stage)
        container = self.shape.style.container
        for own, name in self.experts.get((stage.pp, stage.vpp, rank.ep), ()):
            if container == names.GROUPED and own.rest in ("linear_fc1.weight", "linear_fc2.weight"):
                grouped.setdefault(f"{own.front}weight{own.rest[9]}", []).append((own, name))
            else:
                yield self._share(name, self._spelt(names.in_container(own, container), stage), rank, stage)
        for local, members in grouped.items():
            yield self._grouped(self._spelt(local, stage), sorted(members), rank, stage)

    def _plain(self, name: str, rank: Rank, stage: Stage) -> Iterable[Share]:
        facts, stages = self.shape.facts, self.shape.stages
        if name != EMBEDDING:
            yield self._share(name, self._spelt(name, stage), rank, stage)
            return
        if stage is stages.chunks[0] or facts.mtp and stage == stages.mtp_stage:
            yield self._share(name, name, rank, stage)
        if facts.tied and stages.pp > 1 and stage == stages.chunks[-1]:
            yield self._share(name, TIED_HEAD, rank, stage)

    def _spelt(self, name: str, stage: Stage) -> str:
        """The rank's own name of a logical one."""
        if self.shape.style.te:
            layer = next(
                (
                    name.partition(mark)[0]
                    for mark in (".input_layernorm.", ".pre_mlp_layernorm.", ".self_attention.")
                    if mark in name
                ),
                "",
            )
            name = names.fused_norm(name, mla=layer in self.mla, moe=layer in self.moe)
        if name.startswith("mtp.") and self.shape.style.mtp_inner != "transformer_layer":
            name = name.replace(".transformer_layer.", f".{self.shape.style.mtp_inner}.", 1)
        return names.shift_layer(name, -stage.first)

    def _rule(self, name: str, rank: Rank) -> tuple[Rule, tuple[int, ...], int, int]:
        """(rule, the shape to cut, the rank's number, of so many)."""
        shape = self.shape.tensor(self.shape.model[name]).shape
        rule = self.shape.cutting.rule(name, len(shape))
        number, size = (
            (rank.etp, self.shape.degrees["etp"]) if rule.axis == ETP else (rank.tp, self.shape.degrees["tp"])
        )
        if name in VOCABULARY and self.shape.rows is not None and shape:
            shape = (self.shape.rows, *shape[1:])
        return rule, shape, number, size

    def _share(self, name: str, local: str, rank: Rank, stage: Stage) -> Share:
        rule, shape, number, size = self._rule(name, rank)
        own = local_shape(rule, shape, size)
        steps = contiguous_strides(own)
        kept = self.shape.kept_rows if name in VOCABULARY else None
        runs = []
        for piece in pieces(rule, shape, number, size):
            box = piece.box
            if kept is not None and box.shape:
                box = Box(box.offset, (max(0, min(box.shape[0], kept - box.offset[0])), *box.shape[1:]))
            if box.numel or not box.shape:
                runs.append(Run(name, box, sum(o * s for o, s in zip(piece.within.offset, steps, strict=True))))
        dtype = self.shape.tensor(self.shape.model[name]).dtype
        return Share(local, stage.vpp, own, dtype, (name,), tuple(runs))

    def _grouped(self, local: str, members: list[tuple[names.ExpertName, str]], rank: Rank, stage: Stage) -> Share:
        """weight1 (h, E*2f), in memory (E, h, 2f); weight2 (E*f, h), in memory (E, f, h): runs are columns."""
        runs: list[Run] = []
        which, count = local[-1], len(members)
        inner = outer = 0
        for expert, name in members:
            rule, shape, number, size = self._rule(name, rank)
            rows, columns = local_shape(rule, shape, size)
            inner, outer = rows, columns  # a column of the weight is a row in memory
            start = expert.expert * rows * columns
            for piece in pieces(rule, shape, number, size):
                for column in range(piece.box.shape[1]):
                    box = Box((piece.box.offset[0], piece.box.offset[1] + column), (piece.box.shape[0], 1))
                    at = start + (piece.within.offset[1] + column) * rows + piece.within.offset[0]
                    runs.append(Run(name, box, at))
        full = (outer, count * inner) if which == "1" else (count * outer, inner)
        dtype = self.shape.tensor(self.shape.model[members[0][1]]).dtype
        return Share(local, stage.vpp, full, dtype, tuple(name for _, name in members), tuple(runs))
