"""Logical tensors of a Paddle job, gathered from what each rank's files hold.

The one idea: a tensor is held by groups of ranks. A group, one (stage, tensor rank), or expert rank, has one copy of
one part: an array, or under sharding v2 flat slices of it that its sharding ranks keep, in their order and with padding
behind. Parts of all tensor ranks tile the tensor; a group more for the same part is a copy, compared when it is read.

    q_proj.weight (16, 32), tp 2, sharding v2 over 2 ranks: a group's part is (16, 16), 256 elements
    tp00_shard00: [200]   tp00_shard01: [312]     rows 0..12 and half of row 12; the rest, then 256 elements of padding

Where no config states how many key and value heads there are, the values decide: ranks whose k_proj differ hold
different heads, ranks whose k_proj are equal to the bit hold the same ones. A tensor of one value throughout (zeros,
ones) shows nothing. All states of a tensor are compared: weights in few bits may be equal by chance, their moments are
not. Up to 1 MiB a rank and state is read for one tensor of each kind; nothing where a config or a meta states it.

Experts: Paddle's model classes keep a list as long as there are experts, with holes for those of other ranks, so names
have global numbers. A class that lists only its own experts counts from 0 on every rank, and then the files of all
expert ranks have the same names: rank e's expert i is number e * own + i.

    2 expert ranks, both hold experts.0, experts.1; config: 4 experts      rank 1's experts.1 -> experts.3
    the same, config: 2 experts                                            copies of one another

Without a config the same names are taken for local ones: copies of all experts on all expert ranks would not be expert
parallelism.

Specification: `systems.paddle.rules` (parts), PaddleFormers 1.2.0 `trainer/utils/reshard/sharding_v2.py`
(`merge_tensors`: slices by rank, joined and cut to the parameter's size; betas are whole everywhere),
`transformers/moe_layer.py`, `nn/moe_deepep/modular_moe_layer.py`, `model_utils.py` (`global_expert_id_offset`). Cost:
some us a tensor and rank. What it does not do: read files or find whose a tensor is (`systems.paddle.pdparams.read`);
grouped experts in one tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ckpt_tool.core.box import whole
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.flat_line import Boxes, FlatLine
from ckpt_tool.core.missing import is_collecting
from ckpt_tool.core.tensor import EMA, MASTER, MODEL, Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import InconsistentCheckpoint, InputError
from ckpt_tool.formats.soundness import MOMENTS
from ckpt_tool.storage.records import read_array
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.job import ALIGNMENT, JobDegrees, PaddleRank, padded
from ckpt_tool.systems.paddle.pickle_file import Saved, chunks_of
from ckpt_tool.systems.paddle.ranks import CONTRADICTION, two_jobs
from ckpt_tool.systems.paddle.rules import (
    PaddleCut,
    experts_are_cut,
    is_expert,
    joined_shape,
    local_boxes,
    stored_cut,
    text_config,
)
from ckpt_tool.systems.paddle.stored_names import SCALARS

# -- parts or copies, by values ----------------------------------------------------------------------------------------

LOOKED_AT = 1 << 20  # bytes of each rank's array


def differ(tree: Tree, lists: Sequence[Sequence[StoredArray]]) -> bool | None:
    """Whether the ranks' arrays have different values; None if the values do not decide it.

    lists: for each state of a tensor the ranks' arrays, of one shape and dtype.
    """
    verdicts = [_differ(tree, arrays) for arrays in lists]
    if True in verdicts:
        return True
    return False if False in verdicts else None


def _differ(tree: Tree, arrays: Sequence[StoredArray]) -> bool | None:
    if len(arrays) < 2 or any(array.strides is not None for array in arrays):
        return None
    first = arrays[0]
    width = max(first.dtype.bits // 8, 1)
    nbytes = min(first.dtype.nbytes(first.numel), LOOKED_AT // width * width)
    if not nbytes:
        return None
    # Equal bytes mean copies, unless it is one value throughout (zeros, ones), which proves nothing.
    seen = read_array(tree, first, nbytes)
    if any(read_array(tree, other, nbytes) != seen for other in arrays[1:]):
        return True
    return None if seen == seen[:width] * (nbytes // width) else False


# -- experts -----------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"((?:^|\.)experts\.)(\d{1,9})(?=\.)")
_COUNTS = ("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class Numbering:
    """How the names of experts are numbered."""

    local: int = 0  # experts of one rank, 0 if names have global numbers
    own: bool = False  # ranks hold experts that others do not have

    def logical(self, name: str, ep: int) -> str:
        """The name with the global number."""
        if not self.local or not ep:
            return name
        return _NUMBER.sub(lambda found: f"{found[1]}{int(found[2]) + ep * self.local}", name, count=1)

    def is_apart(self, name: str) -> bool:
        """Whether other ranks of the stage may lack the tensor."""
        return self.own and is_expert(name)


def number_experts(
    held: Mapping[tuple[int, int, int], set[str]],
    degrees: JobDegrees,
    config: Mapping[str, Any],
    *,
    parted: bool = True,
) -> Numbering:
    """How experts are numbered.

    Args:
        held: The names in the files of each (tp, pp, ep).
        degrees: Of the job.
        config: The model's config.
        parted: False if a meta shows that every rank has all experts (gradients of all are synchronised).
    """
    numbers: dict[tuple[int, int, int], frozenset[int]] = {}
    for at, names in held.items():
        matches = map(_NUMBER.search, names)
        held_here = frozenset(int(match[2]) for match in matches if match)
        if held_here:
            numbers[at] = held_here

    if degrees.ep == 1:
        apart = any(
            not a & b for (x, a) in numbers.items() for (y, b) in numbers.items() if x[1] == y[1] and x[0] != y[0]
        )
        return Numbering(0, apart)  # experts spread over the tensor ranks
    if not parted:
        return Numbering()

    by_rank: dict[int, frozenset[int]] = {}
    for (_, _, ep), held_here in numbers.items():
        by_rank[ep] = by_rank.get(ep, frozenset()) | held_here
    sets = set(by_rank.values())
    count = next(iter(sets), frozenset())
    if len(by_rank) == degrees.ep and len(sets) == 1 and count == frozenset(range(len(count))):
        values = (text_config(config).get(key) for key in _COUNTS)
        stated = next((value for value in values if type(value) is int), None)
        if stated is None or stated != len(count):
            return Numbering(len(count), True)
        return Numbering(0, False)
    return Numbering(0, True)


# -- gathering ---------------------------------------------------------------------------------------------------------

SLICES = "E1316"
TWICE = "E1317"
_NUMBERS = re.compile(r"\d+")


class FileShare(NamedTuple):
    """What one file holds of a key."""

    where: PaddleRank
    saved: Saved
    dtype: DType
    buffered: bool  # it may be a slice of a fused buffer (v2)


@dataclass(slots=True)
class PaddleGathering:
    """All keys while files are taken apart."""

    degrees: JobDegrees
    config: Mapping[str, Any]  # the model's
    # structured name -> shape of a tensor rank's part
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    distributed: dict[str, bool] = field(default_factory=dict)  # what the meta says of it
    sliced: bool | None = None  # the states are slices (v2), None where nothing states it
    apart: Callable[[str], bool] = lambda name: False  # whether a name is an expert that other ranks lack
    # Whether the ranks' arrays of a name (one list for each state) have different values (`differ`).
    differ: Callable[[str, list[list[StoredArray]]], bool | None] = lambda name, lists: None
    saw_slices: bool = False
    _found: dict[TensorKey, dict[tuple[int, int, int], list[FileShare]]] = field(default_factory=dict)
    _cuts: dict[str, PaddleCut] = field(default_factory=dict)
    _kinds: dict[str, bool | None] = field(default_factory=dict)

    def shape(self, name: str, shape: tuple[int, ...], path: str) -> None:
        """A rank's part of `name` has `shape`. Raises InconsistentCheckpoint E0305 when another rank's has another."""
        known = self.shapes.setdefault(name, shape)
        if known != shape:
            raise two_jobs(CONTRADICTION, f"a part of shape {list(shape)}, another rank's is {list(known)}", path, name)

    def hold(self, key: TensorKey, held: FileShare) -> None:
        """Note what a file holds. Raises InconsistentCheckpoint E1317 when one file holds a key twice."""
        where = held.where
        own = where.ep if self.degrees.by_data or self.apart(key.name) else 0
        group = self._found.setdefault(key, {}).setdefault((where.pp, where.tp, own), [])
        if any(other.saved.parts[0].path == held.saved.parts[0].path for other in group):
            raise InconsistentCheckpoint(
                f"two tensors of one file are both its {key.state}: {'.'.join(map(str, held.saved.path))[:200]}",
                code=TWICE,
                path=held.saved.parts[0].path,
                key=str(key),
                hint="the file or the table of names was edited",
            )
        group.append(held)

    def keys(self) -> Iterable[TensorKey]:
        """The tensors that the files hold."""
        return self._found

    def holders(self, key: TensorKey) -> Iterable[tuple[int, int]]:
        """The (stage, tensor rank) of each group that holds a key."""
        return ((pp, tp) for pp, tp, _ in self._found[key])

    def tensors(self, order: Iterable[str]) -> dict[TensorKey, LogicalTensor]:
        """All tensors, by state; names in `order` (others behind). Raises InconsistentCheckpoint E0305, E1316,
        InputError E1310."""
        names = dict.fromkeys([*order, *(key.name for key in self._found)])
        states = dict.fromkeys(key.state for key in self._found)
        out = {}
        for state in sorted(states, key=lambda s: (s != "model", s != "master", list(states).index(s))):
            for name in names:
                key = TensorKey(name, state)
                if key in self._found:
                    out[key] = self._tensor(key)
        return out

    # -- one tensor ----------------------------------------------------------------------------------------------------

    def _tensor(self, key: TensorKey) -> LogicalTensor:
        groups = self._found[key]
        first = next(iter(groups.values()))[0]
        dtypes = {held.dtype for group in groups.values() for held in group}
        if len(dtypes) > 1:
            raise self._differ(key, first, " and ".join(sorted(dtype.name for dtype in dtypes)))
        local = self.shapes.get(key.name)
        if self._scalar(key, groups.values(), local):
            return self._copies(key, [held for group in groups.values() for held in group])
        if local is None:
            local = first.saved.shape
        if self._has_own_shape(key, groups.values(), local):
            return self._copies(key, [held for group in groups.values() for held in group])
        cut = self._cut(key.name, local)
        shape = joined_shape(local, cut, self.degrees.tp)
        # Tensor rank -> copies of its part so far: each further group that holds the part is a replica.
        copies: dict[int, int] = {}
        chunks: list[Chunk] = []
        for (_, tp, _), group in sorted(groups.items()):
            share = tp if cut.dim is not None else 0
            pieces = local_boxes(shape, cut, self.degrees.tp, share)[1]
            for part in self._parts(key, local, pieces, group):
                copy = copies.get(share, 0)
                copies[share] = copy + 1
                chunks += [chunk._replace(replica=copy) for chunk in part] if copy else part
        return LogicalTensor(key, shape, first.dtype, tuple(chunks))

    def _scalar(self, key: TensorKey, groups: Iterable[list[FileShare]], local: tuple[int, ...] | None) -> bool:
        """Whether the state is one number for each parameter (a power of beta)."""
        if key.state in SCALARS:
            return True
        if key.state in (MODEL, MASTER, EMA) or local is None:
            return False
        numel = prod(local)
        for group in groups:
            if len(group) >= numel or any(share.saved.shape not in ((), (1,)) for share in group):
                return False
        return True

    def _has_own_shape(self, key: TensorKey, groups: Iterable[list[FileShare]], local: tuple[int, ...]) -> bool:
        """Whether the state has a shape of its own (factors, scales of quantised moments) and is complete in one file.

        Moments always have their parameter's shape.
        """
        if key.state in (MODEL, MASTER, EMA) or key.state in MOMENTS or self.degrees.tp > 1 or self.sliced:
            return False
        return all(len(group) == 1 and group[0].saved.shape != local for group in groups)

    def _copies(self, key: TensorKey, held: list[FileShare]) -> LogicalTensor:
        shape = held[0].saved.shape
        chunks: list[Chunk] = []
        for copy, one in enumerate(held):
            if one.saved.shape != shape:
                raise self._differ(key, one, f"shapes {list(shape)} and {list(one.saved.shape)}")
            if key.state in SCALARS and prod(shape) != 1:
                raise InconsistentCheckpoint(
                    f"{key.state} has shape {list(shape)}: it is one number a parameter",
                    code=CONTRADICTION,
                    path=one.saved.parts[0].path,
                    key=str(key),
                    hint="the file was edited or damaged: fetch it again",
                )
            chunks += [c._replace(replica=copy) for c in chunks_of(one.saved, whole(shape), dtype=one.dtype)]
        return LogicalTensor(key, shape, held[0].dtype, tuple(chunks))

    def _cut(self, name: str, local: tuple[int, ...]) -> PaddleCut:
        cut = self._cuts.get(name)
        if cut is None:
            degrees = self.degrees
            distributed = self.distributed.get(name)
            if self.apart(name) or (is_expert(name) and not experts_are_cut(self.config, degrees.ep)):
                distributed = False
            try:
                cut = stored_cut(name, local, self.config, degrees.tp, ep=degrees.ep, distributed=distributed)
            except InputError:  # no rule without a config: compare the values of the ranks
                seen = self._decide_by_values(name)
                if seen is None:
                    raise
                cut = stored_cut(name, local, self.config, degrees.tp, ep=degrees.ep, distributed=seen)
            self._cuts[name] = cut
        return cut

    def _decide_by_values(self, name: str) -> bool | None:
        """Whether ranks hold parts, by the values of one tensor of each kind, in all states that are not sliced."""
        kind = _NUMBERS.sub("#", name)
        if kind not in self._kinds:
            lists = []
            for key, groups in self._found.items():
                if key.name == name and key.state not in SCALARS:
                    ranks = {tp: group[0].saved for (_, tp, _), group in groups.items() if len(group) == 1}
                    arrays = [saved.parts[0] for saved in ranks.values() if len(saved.parts) == 1]
                    if len(arrays) == self.degrees.tp and len({array.shape for array in arrays}) == 1:
                        lists.append(arrays)
            self._kinds[kind] = self.differ(name, lists)
        return self._kinds[kind]

    def parted_heads(self) -> bool | None:
        """Whether the ranks hold parts of keys and values, by their values; None if no rule needed to know."""
        seen = [parted for kind, parted in self._kinds.items() if kind.endswith(".k_proj.weight")]
        return seen[0] if seen else None

    def _parts(
        self, key: TensorKey, local: tuple[int, ...], pieces: Boxes, group: list[FileShare]
    ) -> Iterable[list[Chunk]]:
        """The copies that one group holds, as chunks of the logical tensor."""
        group = sorted(group, key=lambda held: self._turn(key.name, held.where))
        if self.sliced is not False and group[0].buffered and self._are_slices(local, group):
            self.saw_slices = True
            yield self._join_slices(key, local, pieces, group)
            return
        for held in group:
            if held.saved.shape != local:
                raise self._differ(key, held, f"shapes {list(local)} and {list(held.saved.shape)}")
            yield [chunk for there, here in pieces for chunk in chunks_of(held.saved, there, here, held.dtype)]

    def _turn(self, name: str, where: PaddleRank) -> int:
        """The rank within the group that shares the states of `name`."""
        return where.moe_shard if self.apart(name) else where.shard

    def _are_slices(self, local: tuple[int, ...], group: list[FileShare]) -> bool:
        if any(len(held.saved.shape) != 1 for held in group):
            return False
        return bool(self.sliced) or any(held.saved.shape != local for held in group)

    def _join_slices(
        self, key: TensorKey, local: tuple[int, ...], pieces: Boxes, group: list[FileShare]
    ) -> list[Chunk]:
        turns = [self._turn(key.name, held.where) for held in group]
        total = sum(held.saved.shape[0] for held in group)
        numel = prod(local)
        if turns != list(range(turns[0], turns[0] + len(turns))) or total not in self._padded_lengths(key.name, numel):
            if is_collecting():  # a slice is missing, and where the others begin depends on it
                return []
            raise InconsistentCheckpoint(
                f"slices of {[held.saved.shape[0] for held in group]} elements from sharding ranks {turns} do not "
                f"make up {numel} with padding to {ALIGNMENT} bytes a rank",
                code=SLICES,
                path=group[0].saved.parts[0].path,
                key=str(key),
                hint="files of two jobs are mixed, or the model's shapes are another's",
            )
        line = FlatLine.of_block(key, local, pieces)
        at = 0
        chunks: list[Chunk] = []
        for held in group:
            for array in held.saved.parts:
                chunks += (chunk for _, chunk in line.chunks(array._replace(dtype=held.dtype), at))
                at += array.numel
        return chunks

    def _padded_lengths(self, name: str, numel: int) -> set[int]:
        """The numbers of elements that a parameter may take in a fused buffer, padded to 256 bytes times the ranks.

        A parameter with a master has 16 bits. A smaller number is never accepted: if a slice is missing, the others
        must not pass for the complete tensor.
        """
        ranks = self.degrees.moe_sharding if self.apart(name) else self.degrees.sharding
        widths = (2,) if TensorKey(name, MASTER) in self._found else (2, 4)
        return {padded(numel, width, ranks) for width in widths}

    def _differ(self, key: TensorKey, held: FileShare, what: str) -> InconsistentCheckpoint:
        return two_jobs(
            CONTRADICTION,
            f"ranks hold it with different {'types' if 'shapes' not in what else ''}{what}".replace("  ", " "),
            held.saved.parts[0].path,
            str(key),
        )
