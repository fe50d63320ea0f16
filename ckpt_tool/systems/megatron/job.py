"""The job behind a Megatron checkpoint: which part of which parameter every rank holds, and what it calls it.

A rank's array is described once, as slots (a box of a logical tensor, and its place in an array of the rank's own
shape). Model, fp32 master and moments are arrays of that shape, in whatever file they are stored, so one description
serves all of them, in legacy and torch_dist, for reader and writer:

    tensor rank 1 of 2, stage 1 (layers 2, 3):  decoder.layers.0.mlp.linear_fc1.weight (48, 32)
    <-> decoder.layers.2.mlp.linear_fc1.weight (96, 32): rows 24..48 are rows 0..24, rows 72..96 are rows 24..48

`MegatronJob.describe_array` is for readers: it derives the slots from a stored array's name and shape.
`JobRanks.arrays` is for writers: it derives all arrays of a rank from the logical names and shapes, in the order in
which the rank's modules register them, which is also the order of its optimizer. GroupedMLP's weight1 (h, E*2f) is (E,
h, 2f) in memory, weight2 (E*f, h) is (E, f, h): each expert's matrix is a transposed view.

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
_LAST = (
    "decoder.",
    "encoder.",
    "output_layer.",
    "lm_head.",
)  # outside layers, names that begin so are on the last stage
Shape = tuple[int, ...]


class MegatronRank(NamedTuple):
    """A model-parallel rank."""

    path: str  # its folder, relative to the root
    tp: int  # tensor rank, for dense tensors
    pp: int
    ep: int
    etp: int  # tensor rank, for experts


class View(NamedTuple):
    """A strided part of an array of the rank's own shape."""

    start: int  # elements
    shape: Shape
    strides: Shape  # elements


class Slot(NamedTuple):
    """One part of a logical tensor in a rank's array: box `box` of tensor `name` is stored in box `within` of the
    array, or of a view of it."""

    name: str
    shape: Shape
    box: Box
    within: Box
    view: View | None = None

    def chunk(self, array: StoredArray) -> Chunk:
        """Return the slot as a chunk of `array`, which must have the rank's own shape."""
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
        """Elements of the array."""
        return prod(self.shape)

    @property
    def expert(self) -> bool:
        """Whether it belongs to experts that are distributed over ranks (shared experts do not count)."""
        return ".experts." in self.local

    def parts(self) -> Iterator[tuple[str, Box, int, Shape | None]]:
        """Yield (name, box, first element in the row-major array, strides) of each slot; strides None: row-major."""
        for slot in self.slots:
            start, _, strides = slot.view or View(0, (), contiguous_strides(self.shape))
            start += sum(o * s for o, s in zip(slot.within.offset, strides, strict=True))
            yield slot.name, slot.box, start, strides if slot.view else None

    def places(self, at: int) -> Iterator[LinePlace]:
        """Yield where each logical tensor is stored in a flat buffer in which the array begins at element `at`.

        The key of a place is (name, whether the tensor is transposed there).
        """
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
    """Return the degrees with enough data ranks for the experts' ranks; appends to `notes` if the number grew.

    Expert ranks are no additional ranks: tp * cp * dp of the dense layers must be a multiple of etp * ep.
    """
    out = dict(degrees)
    others = degrees["tp"] * degrees["cp"]
    grid = degrees["etp"] * degrees["ep"]
    out["dp"] = lcm(degrees["dp"] * others, grid) // others
    if out["dp"] != degrees["dp"]:
        grown = f"data ranks raised from {degrees['dp']} to {out['dp']}"
        notes.append(f"{grown}: {degrees['ep']} expert ranks are carved out of them")
    return out


def check_experts(ep: int, experts: int | None, code: str) -> None:
    """Raise UsageError `code` if `experts` can't be distributed over `ep` ranks."""
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
    """Return the chunk of a matrix from a chunk of its transpose; only strides change, no data is read."""
    start, strides = chunk.region()
    box = _transpose_box(chunk.box)
    return Chunk(box, chunk.array.view(start, box.shape, strides[::-1]), whole(box.shape), chunk.replica)


class MegatronJob(NamedTuple):
    """How parameters are split between ranks, and what ranks call them."""

    facts: MegatronFacts
    degrees: Mapping[str, int]
    stages: Stages
    experts: int  # in a layer, 0 for none
    gated: bool  # fc1 holds gate and up
    down_shared: bool  # MLA's down projections are cut
    te: bool = False  # norms are fused into Transformer Engine's linears
    container: str = names.SEQUENTIAL  # of experts
    mtp_inner: str = "transformer_layer"  # what an MTP layer calls its inner one
    convolution: str = "_"  # the separator in `conv1d_weight` of Mamba, `_` or `.`
    rows: int | None = None  # rows of stored vocabularies, None: as many as they have
    kept: int | None = None  # rows that are the model's, None: all; the rest is padding
    # Boxes that a checkpoint shows for a tensor; they take precedence over any rule. The r-th belongs to rank r (gate
    # and up are counted separately).
    boxes: Mapping[str, Sequence[Box]] = MappingProxyType({})
    sections: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # of `rules.sections_of`
    spanning: bool | None = False  # of `rules.norms_span`

    def of_shapes(self, shapes: Mapping[str, Shape], ranks: int) -> MegatronJob:
        """Return the job with the sections and norms that tensor shapes show.

        Args:
            shapes: by name, of one rank of `ranks`.
            ranks: how many ranks share a layer; 1 if the shapes are the whole model's.
        """
        sections = sections_of(shapes, self.facts)
        return self._replace(sections=sections, spanning=norms_span(shapes, self.facts, ranks))

    def rule(self, name: str, rank: int) -> MegatronRule:
        """Return the rule of a logical tensor with `rank` dims."""
        return rule_of(
            name,
            rank,
            gated=self.gated,
            down_shared=self.down_shared,
            sections=self.sections,
            spanning=self.spanning,
        )

    def check(self, shapes: Iterable[tuple[str, Shape]]) -> list[str]:
        """Return notes on the degrees. Raises UsageError E0273 if tensor ranks can't share a parameter."""
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
        """Return the pieces of a tensor of `shape` (padding included) that a rank has, in the order of the rank's
        rows."""
        rule = self.rule(name, len(shape))
        rank_number = rank.etp if rule.axis == ETP else rank.tp
        ranks = self.degrees[rule.axis]

        # Boxes that a checkpoint shows take precedence over any rule.
        stored_boxes = self.boxes.get(name)
        if stored_boxes is None:
            return pieces(rule, shape, rank_number, ranks)
        rank_pieces = list[RankPiece]()
        row = 0
        # One box, or a number that ranks can't share evenly, is what every rank has.
        is_on_every_rank = len(stored_boxes) == 1 or len(stored_boxes) % ranks
        for box in stored_boxes if is_on_every_rank else stored_boxes[rank_number::ranks]:
            rank_pieces.append(RankPiece(box, Box((row, *(0,) * (len(shape) - 1)), box.shape) if shape else box))
            row += box.shape[0] if shape else 0
        return rank_pieces

    def describe_array(self, local: str, shape: Shape, dtype: DType, rank: MegatronRank, chunk: int) -> RankArray:
        """Return the description of a stored array of a rank: its logical tensors and their slots.

        Args:
            local: the rank's name of the array.
            shape: of the stored array.
            dtype: of the stored array.
            rank: whose array it is.
            chunk: of the virtual pipeline.

        Raises:
            UnmappedTensor: E2003, no rule says how tensor ranks share the name.
            InconsistentCheckpoint: E0305, grouped experts that do not fit.
        """
        experts_per_rank = self.experts // self.degrees["ep"]
        grouped_weight = 0
        tensor_shape = shape

        # The logical names of what the array holds, and the shape that the rank has of each.
        # A rank numbers layers from the first one of its chunk, and experts from its own first one.
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
        # If the halves are uneven, the shape differs from the rule's: the slots stay, and the catalog reports the gap.
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
        """Return the rank's array that holds its part of `members`.

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
            # Each expert's matrix is stored transposed in a GroupedMLP's weights.
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
        """Yield each chunk that has a copy of a logical tensor, with the copy's logical name.

        The copies of a tied embedding: the first chunk, the chunk with the MTP layers, and the last chunk, where the
        copy is named as an output layer.
        """
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
    """The arrays of every rank of a job.

    tensors: shape and dtype by logical name. The names are sorted by chunk and expert rank once, so that a rank's
    arrays cost no search through the whole model.
    """

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
        """Return the arrays of a rank, chunk by chunk, in the order in which the model registers them."""
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
        """Return the name, and the shape that is split between ranks: with the padding of a vocabulary."""
        shape = self.tensors[name][0]
        rows = self.job.rows
        if rows is not None and is_vocabulary(name) and shape:
            shape = (rows, *shape[1:])
        return name, shape

    def _local_name(self, name: str, stage: Stage) -> str:
        """Return the rank's own name of a logical tensor."""
        if self.job.te:
            name = names.fused_norm(name, self.tensors)
        name = names.mtp_inner(name.removesuffix(names.BY_HEAD), self.job.mtp_inner)
        return names.shift_layer(names.convolution(name, self.job.convolution), -stage.first)
