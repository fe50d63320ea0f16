"""Which parameters each model-parallel rank of a torch_dist checkpoint had, in the order of its flat buffers.

The one idea: nothing in the checkpoint lists a rank's parameters, but it follows: the stage tells the layers
(`megatron.stages`), the model's own chunks tell how tensor-parallel ranks cut a tensor (the r-th box is rank r's, gate
and up count apart), the arguments tell how its layer names and groups things (Transformer Engine or local modules, the
container of experts), and `megatron.names.registration_order` puts them in order.

    TP 2: linear_fc1.weight in boxes gate_0, gate_1, up_0, up_1   ->   rank 1 holds [gate_1; up_1]

What can't be known for sure is tried: the arguments' reading first, then the others; the chunks of the buckets decide
(`megatron_dist.flat`). Source: as there. Cost: a few us a parameter. What it does not do: read files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import Box
from ckpt_tool.core.tensor import MODEL, Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.formats.megatron import names as megatron_names
from ckpt_tool.formats.megatron.names import GROUPED, SEQUENTIAL, TE_GROUPED, ExpertName
from ckpt_tool.formats.megatron.stages import Stage, Stages, from_args, from_counts

CHUNKS = 1 << 16  # of all stages: more is a damaged argument
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class Segment(NamedTuple):
    """A part of a parameter's line that lies in one logical tensor.

    start, numel: elements of the parameter's line. shape: in which the line is walked. corner: where the walked box (0,
    0, ...) lies in the logical tensor. transposed: the walked dims are (columns, rows) of it. split: at this column of
    the walked shape the up half begins, whose rows lie `jump` further down than the column says. first: begins a copy.
    """

    name: str
    start: int
    numel: int
    shape: tuple[int, ...]
    corner: tuple[int, ...]
    transposed: bool = False
    split: int = 0
    jump: int = 0
    first: bool = True

    def chunks(self, box: Box, array: StoredArray, at: int) -> Iterator[Chunk]:
        """`box` of the walked shape lies at element `at` of the 1-d array: as chunks of the logical tensor."""
        if not self.transposed:
            yield Chunk(box.translate(self.corner), array, Box((at,), (box.numel,)))
            return
        (row, column), (rows, columns) = box.offset, box.shape
        for begin, end in (
            (column, min(column + columns, self.split or column + columns)),
            (max(column, self.split), column + columns),
        ):
            if begin >= end or (not self.split and begin != column):
                continue
            piece = array.view(at + begin - column, (end - begin, rows), (1, columns))
            down = begin + (self.jump if self.split and begin >= self.split else 0)
            target = Box((self.corner[0] + down, self.corner[1] + row), (end - begin, rows))
            yield Chunk(target, piece, Box((0, 0), (end - begin, rows)))
            if not self.split:
                return


@dataclass(frozen=True)
class Parameter:
    """A parameter of one rank. name: in the rank's own spelling. regions: what it holds of each logical tensor. shared:
    is it an embedding that two stages hold (a bucket of its own)?"""

    name: str
    numel: int
    segments: tuple[Segment, ...]
    regions: Mapping[str, tuple[Box, ...]]
    shared: bool = False

    def region(self, name: str) -> tuple[Box, ...]:
        return self.regions[name]


@dataclass(frozen=True)
class Ranks:
    """One reading of a checkpoint's ranks. container: of experts. fused: does Transformer Engine fuse norms?"""

    tensors: Mapping[str, LogicalTensor]
    degrees: Mapping[str, int]
    stages: Stages
    fused: bool
    container: str
    experts: int

    @staticmethod
    def readings(
        tensors: Mapping[TensorKey, LogicalTensor], args: Mapping[str, Any], degrees: Mapping[str, int]
    ) -> Iterator[Ranks]:
        """What the arguments say, then what they may mean."""
        model = {
            key.name: tensor
            for key, tensor in tensors.items()
            if key.state == MODEL and tensor.chunks and not megatron_names.is_buffer(key.name)
        }
        layers = megatron_names.layers_count(name for name in model if name.startswith("decoder."))
        mtp = len({name.split(".")[2] for name in model if name.startswith("mtp.layers.")})
        pp, vpp = degrees["pp"], degrees["vpp"]
        if pp * vpp > CHUNKS:
            return
        stages = from_args(args, pp, vpp, layers, mtp=mtp)
        if stages is None:
            base = layers // (pp * vpp)
            stages = from_counts([*[base] * (pp * vpp - 1), layers - base * (pp * vpp - 1)], pp, vpp, mtp=mtp)
        experts = megatron_names.experts_count(model)
        engine = args.get("transformer_impl", "local") == "transformer_engine"
        grouped = bool(args.get("moe_grouped_gemm"))
        legacy = bool(args.get("moe_use_legacy_grouped_gemm")) or not engine
        said = SEQUENTIAL if not grouped else GROUPED if legacy else TE_GROUPED
        containers = [said, *(c for c in (SEQUENTIAL, TE_GROUPED, GROUPED) if c != said)] if experts else [SEQUENTIAL]
        for container in containers:
            for fused in (engine, not engine):
                yield Ranks(model, degrees, stages, fused, container, experts)

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical tensor's."""
        return self.tensors[name].shape

    def buffer(self, experts: bool, group: int, number: int, dtype: str) -> Sequence[Parameter]:
        """The parameters of buffer `number` of a dp group's dense or experts' optimizer, in the order of registration.

        dtype: of the parameters, as torch calls it. Empty when the group has no such buffer.
        """
        tp, ep = self.degrees["tp"], self.degrees["ep"]
        if experts:
            etp = self.degrees["etp"]
            tensor_rank, expert_rank, pp = group % etp, group // etp % ep, group // (etp * ep)
        else:
            tensor_rank, expert_rank, pp = group % tp, 0, group // tp
        if pp >= self.stages.pp:
            return ()
        seen = 0
        for vpp in range(self.stages.vpp):
            own = self._chunk(self.stages.of(pp, vpp), experts, tensor_rank, expert_rank)
            for kind in dict.fromkeys(self._dtype(parameter) for parameter in own):
                if seen == number:
                    return [parameter for parameter in own if self._dtype(parameter) == kind] if kind == dtype else ()
                seen += 1
        return ()

    def _dtype(self, parameter: Parameter) -> str:
        return str(self.tensors[parameter.segments[0].name].dtype.torch)

    # -- one chunk of a stage -----------------------------------------------------------------------------------------

    @cached_property
    def _by_stage(self) -> dict[tuple[int, int], list[str]]:
        """Logical names by (pp, vpp), in the model's order; what no layer holds stands by its module."""
        out: dict[tuple[int, int], list[str]] = {(c.pp, c.vpp): [] for c in self.stages.chunks}
        for name in self.tensors:
            for stage in self._stages_of(name):
                out[stage.pp, stage.vpp].append(name)
        for stage in self.stages.chunks:
            if stage.head and not stage.embedding and HEAD not in self.tensors and EMBEDDING in self.tensors:
                out[stage.pp, stage.vpp].append(HEAD)  # the tied copy
        return out

    def _stages_of(self, name: str) -> list[Stage]:
        layer = megatron_names.layer_of(name)
        if layer is not None:
            found = self.stages.holding(layer[1])
            return [found] if found else []
        if name.startswith("mtp."):
            return [self.stages.mtp_stage]
        if name.startswith("embedding."):
            return [chunk for chunk in self.stages.chunks if chunk.embedding or chunk.mtp]
        return [chunk for chunk in self.stages.chunks if chunk.head]

    def _chunk(self, stage: Stage, experts: bool, tensor_rank: int, expert_rank: int) -> list[Parameter]:
        """The parameters of one chunk that belong to the dense or the experts' optimizer, registered order."""
        apart = self.degrees["ep"] > 1
        own: dict[str, Parameter] = {}
        grouped: dict[tuple[str, int], list[str]] = {}
        for name in self._by_stage[stage.pp, stage.vpp]:
            expert = megatron_names.expert_of(name)
            if (expert is not None and apart) != experts:
                continue
            if expert is None:
                spelled = self._spelled(name)
                source = EMBEDDING if name == HEAD and HEAD not in self.tensors else name
                made = self._parameter(spelled, source, tensor_rank, self.degrees["tp"])
                own[spelled] = replace(made, shared=self._shared(name, stage))
                continue
            share = self.experts // self.degrees["ep"]
            if expert.expert // max(share, 1) != expert_rank:
                continue
            etp = self.degrees["etp"]
            if self.container == GROUPED and expert.rest in ("linear_fc1.weight", "linear_fc2.weight"):
                grouped.setdefault((expert.front, 1 + (expert.rest == "linear_fc2.weight")), []).append(name)
            else:
                local = ExpertName(expert.front, expert.expert - share * expert_rank, expert.rest)
                spelled = megatron_names.in_container(local, self.container)
                own[spelled] = self._parameter(spelled, name, tensor_rank % etp, etp)
        for (front, which), names in grouped.items():
            spelled = f"{front}weight{which}"
            own[spelled] = self._grouped(spelled, names, tensor_rank % self.degrees["etp"], which)
        spelled_names = list(own)
        return [own[spelled_names[i]] for i in megatron_names.registration_order(spelled_names)]

    def _shared(self, name: str, stage: Stage) -> bool:
        """Does another stage hold it too? Where the head is tied, or an MTP layer stands elsewhere."""
        if self.stages.pp == 1:
            return False
        copied = HEAD not in self.tensors or any(chunk.mtp for chunk in self.stages.chunks)
        return (
            name == HEAD
            and HEAD not in self.tensors
            or name == EMBEDDING
            and copied
            and not (stage.embedding and stage.head)
        )

    def _spelled(self, name: str) -> str:
        if not self.fused or "layernorm" not in name:
            return name
        layer = (
            name.partition(".self_attention.")[0]
            if ".self_attention." in name
            else name.rpartition(".")[0].rpartition(".")[0]
        )
        mla = f"{layer}.self_attention.linear_kv_down_proj.weight" in self.tensors
        return megatron_names.fused_norm(name, mla=mla, moe=f"{layer}.mlp.router.weight" in self.tensors)

    def _boxes(self, name: str, rank: int, degree: int) -> list[Box]:
        """The boxes that tensor rank `rank` of `degree` holds, in the order of its own rows."""
        boxes = sorted({chunk.box for chunk in self.tensors[name].chunks}, key=lambda box: box.offset)
        return boxes if len(boxes) == 1 or len(boxes) % degree else boxes[rank::degree]

    def _parameter(self, spelled: str, name: str, rank: int, degree: int) -> Parameter:
        segments, start = [], 0
        boxes = self._boxes(name, rank, degree)
        for number, box in enumerate(boxes):
            segments.append(Segment(name, start, box.numel, box.shape, box.offset, first=not number))
            start += box.numel
        return Parameter(spelled, start, tuple(segments), {name: tuple(boxes)})

    def _grouped(self, spelled: str, names: Sequence[str], rank: int, which: int) -> Parameter:
        """All local experts in one line, each transposed: (h, 2f) for weight1, (f, h) for weight2."""
        segments, start, regions = [], 0, {}
        for name in names:
            boxes = self._boxes(name, rank, self.degrees["etp"])
            numel = sum(box.numel for box in boxes)
            rows, columns = sum(box.shape[0] for box in boxes), boxes[0].shape[1]
            split = boxes[0].shape[0] if len(boxes) == 2 else 0
            jump = boxes[1].offset[0] - boxes[0].offset[0] - split if split else 0
            segments.append(Segment(name, start, numel, (columns, rows), boxes[0].offset, True, split, jump))
            start += prod((rows, columns))
            regions[name] = tuple(boxes)
        return Parameter(spelled, start, tuple(segments), regions)
