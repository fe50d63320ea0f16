"""A legacy Megatron rank's model: which boxes of which logical tensors each of its parameters holds.

The one idea: a parameter of a rank is described once, as slots (a logical tensor's box, and where it lies in an array
of the rank's own shape); model, fp32 master and moments are arrays of that shape, wherever they lie, so one description
serves all:

    rank TT 1 of 2, stage 1 (layers 2, 3):  decoder.layers.0.mlp.linear_fc1.weight (48, 32)
    -> decoder.layers.2.mlp.linear_fc1.weight (96, 32): rows 24..48 are rows 0..24, rows 72..96 are rows 24..48

GroupedMLP's weight1 and weight2 hold all experts of the rank, transposed: each expert is a strided view.

Sources and rules: `megatron.names`, `megatron.rules`, `megatron.stages`. Cost: some us a parameter.
What it does not do: read files, order parameters for the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.catalog import mark_replicas
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.tensor import Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint, UnmappedTensor
from ckpt_tool.formats.megatron import names
from ckpt_tool.formats.megatron.args import Facts
from ckpt_tool.formats.megatron.ranks import CONTRADICTION, Rank
from ckpt_tool.formats.megatron.rules import ETP, VOCABULARY, Rule, global_shape, pieces, rule_of
from ckpt_tool.formats.megatron.stages import Stage

UNMAPPED = "E2003"
TIED_HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


class View(NamedTuple):
    """A strided part of an array of the rank's own shape. start: elements. strides: elements."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Slot(NamedTuple):
    """`box` of logical tensor `name` (of `shape`) is `within` of the rank's array, or of a view of it."""

    name: str
    shape: tuple[int, ...]
    box: Box
    within: Box
    view: View | None = None


@dataclass(frozen=True, slots=True)
class Cutting:
    """What decides how parameters are cut. gated, down_shared: as `megatron.rules.rule_of` takes them."""

    facts: Facts
    degrees: Mapping[str, int]
    gated: bool
    down_shared: bool
    local_experts: int  # a rank's
    rows: int | None = None  # of vocabularies, without those that we added as padding

    def rule(self, name: str, rank: int) -> Rule:
        return rule_of(name, rank, gated=self.gated, down_shared=self.down_shared)


def slots_of(local: str, shape: Sequence[int], rank: Rank, stage: Stage, cutting: Cutting) -> list[Slot]:
    """Where the rank's parameter `local` of `shape` lies in logical tensors. Raises UnmappedTensor E2003 for names
    without a rule where tensor ranks share, InconsistentCheckpoint E0305 for grouped experts that do not fit."""
    name = names.canonical(names.shift_layer(local, stage.first))
    grouped = names.grouped_of(name)
    if grouped:
        return _grouped(local, grouped, shape, rank, cutting)
    expert = names.expert_of(name)
    if expert:
        name = expert._replace(expert=expert.expert + rank.ep * cutting.local_experts).logical()
    elif name == TIED_HEAD and cutting.facts.tied:
        name = EMBEDDING
    rule = cutting.rule(name, len(shape))
    number, size = (rank.etp, cutting.degrees["etp"]) if rule.axis == ETP else (rank.tp, cutting.degrees["tp"])
    if not rule.known and size > 1:
        raise UnmappedTensor(
            f"no rule says how tensor ranks share {local} {list(shape)}",
            code=UNMAPPED,
            key=name,
            path=rank.path,
            hint="bring the job to tensor parallel size 1 with its own software, or remove the key (--remove-keys)",
        )
    full = global_shape(rule, shape, size)
    slots = [Slot(name, full, piece.box, piece.within) for piece in pieces(rule, full, number, size)]
    return _trimmed(slots, cutting.rows) if cutting.rows is not None and name in VOCABULARY else slots


def _trimmed(slots: Iterable[Slot], rows: int) -> list[Slot]:
    """The slots without the rows from `rows` on."""
    out = []
    for slot in slots:
        left = max(0, min(slot.box.shape[0], rows - slot.box.offset[0]))
        if left:
            mine = (left, *slot.box.shape[1:])
            shape = (min(rows, slot.shape[0]), *slot.shape[1:])
            out.append(slot._replace(shape=shape, box=Box(slot.box.offset, mine), within=Box(slot.within.offset, mine)))
    return out


def _grouped(local: str, grouped: tuple[str, int], shape: Sequence[int], rank: Rank, cutting: Cutting) -> list[Slot]:
    """weight1 (h, E*2f) is (E, h, 2f) in memory, weight2 (E*f, h) is (E, f, h); an expert's is the transposed."""
    front, which = grouped
    count, size = cutting.local_experts, cutting.degrees["etp"]
    hidden, wide = (shape[0], shape[1]) if which == 1 else (shape[1], shape[0])
    if not count or wide % count:
        raise InconsistentCheckpoint(
            f"{local} {list(shape)} does not hold {count} experts",
            code=CONTRADICTION,
            path=rank.path,
            key=local,
            hint="args.num_experts or args.expert_model_parallel_size contradict the tensor",
        )
    own = wide // count
    out = []
    for e in range(count):
        name = names.ExpertName(front, e + rank.ep * count, f"linear_fc{which}.weight").logical()
        start = e * hidden * own
        if which == 1:
            view, mine = View(start, (own, hidden), (1, own)), (own, hidden)
        else:
            view, mine = View(start, (hidden, own), (1, hidden)), (hidden, own)
        rule = cutting.rule(name, 2)
        full = global_shape(rule, mine, size)
        out += [Slot(name, full, piece.box, piece.within, view) for piece in pieces(rule, full, rank.etp, size)]
    return out


class Gathering:
    """Logical tensors of all states while the ranks' arrays are gathered."""

    def __init__(self) -> None:
        self._found: dict[TensorKey, tuple[tuple[int, ...], DType, list[Chunk]]] = {}

    def add(self, state: str, slots: Iterable[Slot], array: StoredArray) -> None:
        """`array`, of the rank's own shape, holds `slots` for `state`. Raises InconsistentCheckpoint E0305 when two
        ranks tell different shapes or dtypes."""
        for slot in slots:
            key = TensorKey(slot.name, state)
            source = array if slot.view is None else _viewed(array, slot.view)
            known = self._found.setdefault(key, (slot.shape, array.dtype, []))
            if known[:2] != (slot.shape, array.dtype):
                raise InconsistentCheckpoint(
                    f"one rank tells {known[1].name} {list(known[0])}, another {array.dtype.name} {list(slot.shape)}",
                    code=CONTRADICTION,
                    path=array.path,
                    key=str(key),
                    hint="rank files of different runs lie together",
                )
            known[2].append(Chunk(slot.box, source, slot.within))

    def plain(self, key: TensorKey, array: StoredArray) -> None:
        """A tensor that every rank keeps whole (a step counter)."""
        box = Box((0,) * len(array.shape), array.shape)
        self._found.setdefault(key, (array.shape, array.dtype, []))[2].append(Chunk(box, array, box))

    def append(self, key: TensorKey, array: StoredArray) -> None:
        """`array` holds further rows of a tensor that is gathered already."""
        known = self._found.get(key)
        if known is None or known[0][1:] != array.shape[1:] or known[1] != array.dtype:
            raise InconsistentCheckpoint(
                f"rows {list(array.shape)} of a tensor that is not there, or of another shape",
                code=CONTRADICTION,
                path=array.path,
                key=str(key),
                hint="the file was edited, or rank files of different runs lie together",
            )
        shape, dtype, chunks = known
        box = Box((shape[0], *(0,) * (len(shape) - 1)), array.shape)
        chunks.append(Chunk(box, array, whole(array.shape)))
        self._found[key] = ((shape[0] + array.shape[0], *shape[1:]), dtype, chunks)

    def tensors(self) -> dict[TensorKey, LogicalTensor]:
        """All tensors: by state, parameters in the order in which the model registers them."""
        states = {key.state: None for key in self._found}
        model = list(dict.fromkeys(key.name for key in self._found))
        order = [model[i] for i in names.registration_order(model)]
        out = {}
        for state in states:
            for name in order:
                found = self._found.get(TensorKey(name, state))
                if found:
                    key = TensorKey(name, state)
                    chunks = mark_replicas(found[2]) if len(found[2]) > 1 else tuple(found[2])
                    out[key] = LogicalTensor(key, found[0], found[1], chunks)
        return out


def _viewed(array: StoredArray, view: View) -> StoredArray:
    return replace(array, offset=array.offset + array.dtype.nbytes(view.start), shape=view.shape, strides=view.strides)
