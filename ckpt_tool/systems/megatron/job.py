"""The job behind a Megatron checkpoint: which part of which parameter every rank holds, and what it calls it.

A rank's array is described once, as slots (a box of a logical tensor, and its place in an array of the rank's own
shape). Model, fp32 master and moments are arrays of that shape, in whatever file they are stored, so that one
description serves all of them, legacy and torch_dist, reader and writer:

    tensor rank 1 of 2, stage 1 (layers 2, 3):  decoder.layers.0.mlp.linear_fc1.weight (48, 32)
    <-> decoder.layers.2.mlp.linear_fc1.weight (96, 32): rows 24..48 are rows 0..24, rows 72..96 are rows 24..48

`MegatronJob.describe_array` is for readers: from a stored array's name and shape follow the slots. `JobRanks.arrays` is
for writers: from the logical names and shapes follow all arrays of a rank, in the order in which its modules register
them, which is that of its optimizer. GroupedMLP's weight1 (h, E*2f) is (E, h, 2f) in memory, weight2 (E*f, h) is
(E, f, h): each expert's matrix is a transposed view.

Sources and rules: `megatron.stored_names`, `megatron.rules`, `megatron.stages`. The order of optimizers:
`megatron.optimizer`. Cost: some us a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm, prod
from types import MappingProxyType
from typing import NamedTuple

from ckpt_tool.core.box import Box, contiguous_strides, whole
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.flat_line import LinePlace
from ckpt_tool.core.mesh import divisors
from ckpt_tool.core.tensor import Chunk, StoredArray
from ckpt_tool.errors import InconsistentCheckpoint, UnmappedTensor, UsageError
from ckpt_tool.systems.megatron import stored_names as names
from ckpt_tool.systems.megatron.args import MegatronFacts
from ckpt_tool.systems.megatron.rules import (
    ETP,
    TP,
    DivisibleUnits,
    MegatronRule,
    RankPiece,
    check_degree,
    global_shape,
    is_vocabulary,
    norms_span,
    pieces,
    rule_of,
    sections_of,
    units_of,
)
from ckpt_tool.systems.megatron.stages import Stage, Stages, nearest
from ckpt_tool.systems.megatron.stored_names import EMBEDDING, TIED_HEAD

UNMAPPED = "E2003"
CONTRADICTION = "E0305"
_LAST = ("decoder.", "encoder.", "output_layer.", "lm_head.")  # on the head's stage
Shape = tuple[int, ...]


class MegatronRank(NamedTuple):
    """A model-parallel rank."""

    path: str  # its folder, relative to the root
    tp: int  # of dense tensors
    pp: int
    ep: int
    etp: int  # of experts


class View(NamedTuple):
    """A strided part of an array of the rank's own shape."""

    start: int  # elements
    shape: Shape
    strides: Shape  # elements


class Slot(NamedTuple):
    """`box` of logical tensor `name` (of `shape`) is `within` of the rank's array, or of a view of it."""

    name: str
    shape: Shape
    box: Box
    within: Box
    view: View | None = None

    def chunk(self, array: StoredArray) -> Chunk:
        """The slot of `array`, which is of the rank's own shape."""
        return Chunk(self.box, array if self.view is None else array.view(*self.view), self.within)


class RankArray(NamedTuple):
    """A parameter or buffer of a rank, in the rank's own spelling and shape."""

    local: str
    chunk: int  # of the virtual pipeline
    shape: Shape
    dtype: DType
    names: tuple[str, ...]  # the logical tensors in it (several for GroupedMLP)
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def expert(self) -> bool:
        return ".experts." in self.local

    def parts(self) -> Iterator[tuple[str, Box, int, Shape | None]]:
        """(name, box, first element in the row-major array, strides unless it is stored row-major)."""
        for slot in self.slots:
            start, _, strides = slot.view or View(0, (), contiguous_strides(self.shape))
            start += sum(o * s for o, s in zip(slot.within.offset, strides, strict=True))
            yield slot.name, slot.box, start, strides if slot.view else None

    def places(self, at: int) -> Iterator[LinePlace]:
        """Where the logical tensors are stored on a flat line on which the array begins at `at`, by (name, is it
        transposed there?)."""
        for name in self.names:
            slots = [slot for slot in self.slots if slot.name == name]
            view = slots[0].view
            if view is None:
                boxes = [(slot.box, slot.within) for slot in slots]
                yield LinePlace((name, False), at, 0, self.numel, self.shape, boxes)
            else:
                boxes = [(_transpose_box(slot.box), _transpose_box(slot.within)) for slot in slots]
                yield LinePlace((name, True), at + view.start, 0, prod(view.shape), view.shape[::-1], boxes)


def carve_out_experts(degrees: Mapping[str, int], notes: list[str]) -> dict[str, int]:
    """Degrees with data ranks enough for the experts' ranks to be carved out of them; `notes` says where they grew."""
    out = dict(degrees)
    others = degrees["tp"] * degrees["cp"]
    grid = degrees["etp"] * degrees["ep"]
    out["dp"] = lcm(degrees["dp"] * others, grid) // others
    if out["dp"] != degrees["dp"]:
        grown = f"data ranks raised from {degrees['dp']} to {out['dp']}"
        notes.append(f"{grown}: {degrees['ep']} expert ranks are carved out of them")
    return out


def check_experts(ep: int, experts: int | None, code: str) -> None:
    """Raise UsageError `code` where `ep` ranks can't share the experts."""
    if ep > 1 and not experts:
        raise UsageError(f"--ep {ep}: the model has no experts", code=code, hint="leave --ep off")
    if experts and experts % ep:
        raise UsageError(
            f"--ep {ep}: {experts} experts do not divide by {ep}",
            code=code,
            hint=f"the nearest degrees that do: {nearest(ep, divisors(experts))}",
        )


def _transpose_box(box: Box) -> Box:
    return Box(box.offset[::-1], box.shape[::-1])


def transpose_chunk(chunk: Chunk) -> Chunk:
    """The chunk of a matrix, from that of the transposed one."""
    start, strides = chunk.region()
    box = _transpose_box(chunk.box)
    return Chunk(box, chunk.array.view(start, box.shape, strides[::-1]), whole(box.shape), chunk.replica)


class MegatronJob(NamedTuple):
    """How parameters are split between ranks, and what ranks call them."""

    facts: MegatronFacts
    degrees: Mapping[str, int]
    stages: Stages
    experts: int  # of a layer
    gated: bool  # fc1 holds gate and up
    down_shared: bool  # MLA's down projections are cut
    te: bool = False  # norms are fused into Transformer Engine's linears
    container: str = names.SEQUENTIAL  # of experts
    mtp_inner: str = "transformer_layer"  # what an MTP layer calls its inner one
    convolution: str = "_"  # the separator in `conv1d_weight` of Mamba, `_` or `.`
    rows: int | None = None  # of stored vocabularies, None: as many as they have
    kept: int | None = None  # those that are the model's, None: all; what follows is padding
    # of tensors that were found cut; they count before any rule, the r-th of a tensor's is rank r's (gate and up
    # counted apart)
    boxes: Mapping[str, Sequence[Box]] = MappingProxyType({})
    # sections, spanning: of `rules.sections_of`, `rules.norms_span`
    sections: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    spanning: bool | None = False

    def of_shapes(self, shapes: Mapping[str, Shape], ranks: int) -> MegatronJob:
        """The job with what the shapes of one rank of `ranks` (1: of the whole model) show of sections and norms."""
        sections = sections_of(shapes, self.facts)
        return self._replace(sections=sections, spanning=norms_span(shapes, self.facts, ranks))

    def rule(self, name: str, rank: int) -> MegatronRule:
        """The rule of a logical tensor of so many dims."""
        return rule_of(
            name,
            rank,
            gated=self.gated,
            down_shared=self.down_shared,
            sections=self.sections,
            spanning=self.spanning,
        )

    def check(self, shapes: Iterable[tuple[str, Shape]]) -> list[str]:
        """Notes. Raises UsageError E0273 where tensor ranks can't share a parameter."""
        units: dict[str, list[DivisibleUnits]] = {TP: [], ETP: []}
        for name, shape in shapes:
            rule = self.rule(name, len(shape))
            divisible = units_of(name, rule, shape, self.facts) if 0 not in shape else None
            if divisible:
                units[rule.axis].append(divisible)

        # One report a degree: it names the nearest degrees that suit every tensor.
        notes = []
        for axis, axis_units in units.items():
            notes += check_degree(axis, self.degrees[axis], axis_units)
        return notes

    def pieces(self, name: str, shape: Shape, rank: MegatronRank) -> list[RankPiece]:
        """What a rank keeps of a tensor of `shape` (padding included), in the order of its own rows."""
        rule = self.rule(name, len(shape))
        rank_number = rank.etp if rule.axis == ETP else rank.tp
        ranks = self.degrees[rule.axis]

        # Boxes that a checkpoint shows count before any rule.
        stored_boxes = self.boxes.get(name)
        if stored_boxes is None:
            return pieces(rule, shape, rank_number, ranks)
        rank_pieces = list[RankPiece]()
        row = 0
        is_on_every_rank = len(stored_boxes) == 1 or len(stored_boxes) % ranks
        for box in stored_boxes if is_on_every_rank else stored_boxes[rank_number::ranks]:
            rank_pieces.append(RankPiece(box, Box((row, *(0,) * (len(shape) - 1)), box.shape) if shape else box))
            row += box.shape[0] if shape else 0
        return rank_pieces

    def describe_array(self, local: str, shape: Shape, dtype: DType, rank: MegatronRank, chunk: int) -> RankArray:
        """What a stored array of a rank holds.

        Raises:
            UnmappedTensor: E2003, no rule says how tensor ranks share the name.
            InconsistentCheckpoint: E0305, grouped experts that do not fit.
        """
        experts_per_rank = self.experts // self.degrees["ep"]
        grouped_weight = 0
        tensor_shape = shape

        # The logical names of what the array holds, and the shape that the rank has of each.
        name = names.canonical(names.shift_layer(local, self.stages.of(rank.pp, chunk).first))
        name = names.by_head(name) if names.BY_HEAD in self.sections else name
        members = [name]
        if grouped := names.grouped_of(name):
            front, grouped_weight = grouped
            if len(shape) != 2 or not experts_per_rank or shape[grouped_weight == 1] % experts_per_rank:
                raise InconsistentCheckpoint(
                    f"{local} {list(shape)} does not hold {experts_per_rank} experts",
                    code=CONTRADICTION,
                    path=rank.path,
                    key=local,
                    hint="args.num_experts or args.expert_model_parallel_size contradict the tensor",
                )
            first_expert = rank.ep * experts_per_rank
            members = [
                names.ExpertName(front, expert, f"linear_fc{grouped_weight}.weight").logical()
                for expert in range(first_expert, first_expert + experts_per_rank)
            ]
            if grouped_weight == 1:
                tensor_shape = (shape[1] // experts_per_rank, shape[0])
            else:
                tensor_shape = (shape[1], shape[0] // experts_per_rank)
        elif expert := names.expert_of(name):
            members = [expert._replace(expert=expert.expert + rank.ep * experts_per_rank).logical()]
        elif names.stem(name) == TIED_HEAD and self.facts.tied:
            members = [names.root_of(name) + EMBEDDING]

        # From the rank's shape to the whole tensor's, and back to slots.
        rule = self.rule(members[0], len(tensor_shape))
        ranks = self.degrees[rule.axis]
        if not rule.known and ranks > 1:
            raise UnmappedTensor(
                f"no rule says how tensor ranks share {local} {list(shape)}",
                code=UNMAPPED,
                key=members[0],
                path=rank.path,
                hint=f"its sections follow from {rule.lacks}: the arguments in the checkpoint lack them"
                if rule.lacks
                else "bring the job to tensor parallel size 1 with its own software, or remove the key (--remove-keys)",
            )
        global_tensor_shape = global_shape(rule, tensor_shape, ranks)
        array = self.build_array(
            local, chunk, dtype, [(name, global_tensor_shape) for name in members], rank, grouped_weight
        )
        # Odd halves have another shape than the rule makes: the slots stay, and the catalog names the gap.
        return array if array.shape == shape else array._replace(shape=shape)

    def build_array(
        self,
        local: str,
        chunk: int,
        dtype: DType,
        members: Sequence[tuple[str, Shape]],
        rank: MegatronRank,
        which: int = 0,
    ) -> RankArray:
        """The rank's array that holds its part of `members`.

        Args:
            local: the rank's name of the array.
            chunk: of the virtual pipeline.
            dtype: of the array.
            members: logical tensors by name and shape (padding included).
            rank: whose array it is.
            which: of GroupedMLP's two weights, 0 for any other array.
        """
        slots = list[Slot]()
        start = 0
        local_shape = Shape()
        for name, shape in members:
            rank_pieces = self.pieces(name, shape, rank)
            local_shape = rank_pieces[0].within.shape
            if len(rank_pieces) > 1:  # one below the other
                local_shape = (sum(piece.within.shape[0] for piece in rank_pieces), *local_shape[1:])
            view = View(start, local_shape, (1, local_shape[0])) if which else None

            # The padding of a vocabulary is in the rank's array, but it is no part of the logical tensor.
            if self.kept is not None and is_vocabulary(name) and shape:
                shape = (min(self.kept, shape[0]), *shape[1:])
                boxes = [(piece.box & whole(shape), piece.within.offset) for piece in rank_pieces]
                rank_pieces = [RankPiece(box, Box(offset, box.shape)) for box, offset in boxes if box]
            slots += [Slot(name, shape, box, within, view) for box, within in rank_pieces]
            start += prod(local_shape)

        if which:
            width = local_shape[which == 2] * len(members)
            local_shape = (local_shape[1], width) if which == 1 else (width, local_shape[0])
        return RankArray(local, chunk, local_shape, dtype, tuple([name for name, _ in members]), tuple(slots))

    def homes(self, name: str) -> Iterator[tuple[Stage, str]]:
        """The chunks that keep a copy of a logical tensor, and under which logical name (a tied head's is its own)."""
        chunks = self.stages.chunks
        first = next((chunk for chunk in chunks if chunk.embedding), chunks[0])
        head = next((chunk for chunk in chunks if chunk.head), chunks[-1])
        stem = names.stem(name)

        if layer := names.layer_of(name):
            yield self.stages.holding(layer[1]) or chunks[-1], name
        elif stem.startswith("embedding."):
            yield first, name
            if self.facts.mtp and self.stages.mtp_stage != first:
                yield self.stages.mtp_stage, name
            if self.facts.tied and stem == EMBEDDING and head != first:
                yield head, names.root_of(name) + TIED_HEAD
        elif stem.startswith("mtp."):
            yield self.stages.mtp_stage, name
        else:
            yield head if stem.startswith(_LAST) else first, name


class JobRanks:
    """What every rank of a job keeps of `tensors`: shape and dtype by logical name."""

    def __init__(self, job: MegatronJob, tensors: Mapping[str, tuple[Shape, DType]]) -> None:
        self.job = job
        self.tensors = tensors
        self._dense: dict[tuple[int, int], list[tuple[str, str]]] = {}  # by (stage, chunk): (spelled, logical)
        self._experts: dict[tuple[int, int, int], list[tuple[names.ExpertName, str]]] = {}  # and expert rank
        for name in tensors:
            expert = names.expert_of(name) if ".experts." in name else None
            for stage, alias in job.homes(name):
                if expert is None:
                    self._dense.setdefault((stage.pp, stage.vpp), []).append((alias, name))
                else:
                    ep, local_expert = divmod(expert.expert, max(job.experts // job.degrees["ep"], 1))
                    members = self._experts.setdefault((stage.pp, stage.vpp, ep), [])
                    members.append((expert._replace(expert=local_expert), name))

    def arrays(self, rank: MegatronRank) -> list[RankArray]:
        """The arrays of a rank, chunk by chunk, in the order in which the model registers them."""
        out = []
        for chunk in range(self.job.stages.vpp):
            chunk_arrays = list(self._chunk_arrays(rank, self.job.stages.of(rank.pp, chunk)))
            order = names.registration_order([array.local for array in chunk_arrays])
            out += [chunk_arrays[i] for i in order]
        return out

    def _chunk_arrays(self, rank: MegatronRank, stage: Stage) -> Iterator[RankArray]:
        job = self.job
        grouped: dict[str, list[tuple[int, str]]] = {}
        plain = list(self._dense.get((stage.pp, stage.vpp), ()))

        # A GroupedMLP has one parameter for all its experts; other containers have one each.
        for expert, name in self._experts.get((stage.pp, stage.vpp, rank.ep), ()):
            if job.container == names.GROUPED and expert.rest in ("linear_fc1.weight", "linear_fc2.weight"):
                grouped.setdefault(f"{expert.front}weight{expert.rest[9]}", []).append((expert.expert, name))
            else:
                plain.append((names.in_container(expert, job.container), name))

        for spelled, name in plain:
            yield job.build_array(
                self._local_name(spelled, stage), stage.vpp, self.tensors[name][1], [self._padded_shape(name)], rank
            )
        for spelled, experts in grouped.items():
            members = [self._padded_shape(name) for _, name in sorted(experts)]
            dtype = self.tensors[members[0][0]][1]
            yield job.build_array(self._local_name(spelled, stage), stage.vpp, dtype, members, rank, int(spelled[-1]))

    def _padded_shape(self, name: str) -> tuple[str, Shape]:
        """The name, and the shape that ranks share: with the padding of a vocabulary."""
        shape = self.tensors[name][0]
        rows = self.job.rows
        if rows is not None and is_vocabulary(name) and shape:
            shape = (rows, *shape[1:])
        return name, shape

    def _local_name(self, name: str, stage: Stage) -> str:
        """The rank's own name of a logical one."""
        if self.job.te:
            name = names.fused_norm(name, self.tensors)
        name = names.mtp_inner(name.removesuffix(names.BY_HEAD), self.job.mtp_inner)
        return names.shift_layer(names.convolution(name, self.job.convolution), -stage.first)
