"""The state of one rank: the model's values, its slices of the optimizer's state, and how they turn into pieces and
back.

    weights.gather("3") ... weights.release("3")     ZeRO 3: the values of layer 3 are whole only in between
    weights.rebuild()                                after an update: model values from all data ranks' masters
    weights.pieces(), weights.load(read)             what a rank saves, what it asks for

A tied head is the embedding under another name; with a pipeline the last stage has a copy, and both are updated alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from ckpt_tool.harness.comm import Comm
from ckpt_tool.harness.layout import Group, HarnessLayout
from ckpt_tool.harness.optimizer import MuonSlices, Slices
from ckpt_tool.harness.pieces import Coordinates, Read, State, TensorPiece, states_of
from ckpt_tool.harness.randomness import initial
from ckpt_tool.harness.shape import ModelShape
from ckpt_tool.harness.sharding import RankParameter, list_rank_parameters, parts
from ckpt_tool.harness.tape import Ref

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class RankWeights:
    """Parameters of a rank. `shards`: how many virtual shards of a cut parameter are its own. `muon`: does it step the
    matrices?"""

    def __init__(
        self,
        shape: ModelShape,
        layout: HarnessLayout,
        at: Coordinates,
        comm: Comm,
        seed: int,
        shards: int,
        *,
        muon: bool = False,
    ) -> None:
        self._layout = layout
        self._at = at
        self._comm = comm
        self.shards = shards
        self._muon = muon
        self.params: dict[str, RankParameter] = {
            item.param.name: item for item in list_rank_parameters(shape, layout, at)
        }
        self._tied = shape.tied
        self._shares: list[list[dict[str, tuple[int, int]]]] = []  # by kind, what each member of its group updates
        self._parts: dict[str, tuple[int, int]] = {}
        for group, items in self.kinds():
            parts_of_all = [parts(items, layout.zero, len(group), index, muon=muon) for index in range(len(group))]
            self._shares.append(parts_of_all)
            self._parts |= parts_of_all[group.index(at.rank)]

        self.slices: dict[str, Slices | MuonSlices] = {}
        self._values: dict[str, torch.Tensor] = {}  # whole boxes; with ZeRO 3 only while gathered
        self._own: dict[str, torch.Tensor] = {}  # ZeRO 3: the rank's part of the model's values
        for name, item in self.params.items():
            box = initial(item.param, seed)[_index(item.offset, item.box)].contiguous().to(comm.device)
            self._set(name, box.to(_DTYPES[item.param.dtype]))
            # a master begins as the rounded value: bf16 is all that a model file could have said
            line = box.to(_DTYPES[item.param.dtype]).float().reshape(-1)
            start, stop = self._parts[name]
            self.slices[name] = self._kind(item).fresh(line[start:stop])

    def _kind(self, item: RankParameter) -> type[Slices | MuonSlices]:
        return MuonSlices if self._muon and item.param.is_matrix else Slices

    def kinds(self) -> list[tuple[Group, list[RankParameter]]]:
        """Dense parameters and experts with the data ranks that hold the same; kinds without parameters are left
        out."""
        dense = [item for item in self.params.values() if item.param.expert is None]
        experts = [item for item in self.params.values() if item.param.expert is not None]
        pairs = [(self._layout.dp_group(self._at), dense), (self._layout.edp_group(self._at), experts)]
        return [(group, items) for group, items in pairs if items]

    def part(self, name: str) -> slice:
        """The rank's part of the parameter's line."""
        return slice(*self._parts[name])

    # -- values -------------------------------------------------------------------------------------------------------

    def block(self, ref: Ref) -> torch.Tensor:
        """The values of one virtual shard, contiguous."""
        name = self.alias(ref.name)
        value = self._values[name]
        item = self.params[name]
        if item.param.cut is None:
            return value
        size = item.box[item.param.cut] // self.shards
        return value.narrow(item.param.cut, (ref.block - self._at.tp * self.shards) * size, size).contiguous()

    def alias(self, name: str) -> str:
        """The name under which a parameter is kept: a tied head is the embedding."""
        return "model.embed_tokens.weight" if self._tied and name == "lm_head.weight" else name

    def refs(self, item: RankParameter) -> list[Ref]:
        """The own virtual shards of a parameter."""
        if item.param.cut is None:
            return [Ref(item.param.name, 0)]
        return [Ref(item.param.name, self._at.tp * self.shards + number) for number in range(self.shards)]

    def box_of(self, item: RankParameter, line: torch.Tensor) -> torch.Tensor:
        """The TP-local box from its shards laid end to end on `line`."""
        if item.param.cut is None:
            return line.view(item.box)
        shard = list(item.box)
        shard[item.param.cut] //= self.shards
        return torch.cat([part.view(shard) for part in line.chunk(self.shards)], item.param.cut)

    def _set(self, name: str, box: torch.Tensor) -> None:
        if self._layout.zero == 3:
            self._own[name] = box.reshape(-1)[self.part(name)].clone()
        else:
            self._values[name] = box

    def gather(self, room: str) -> None:
        """ZeRO 3: make the room's values whole, one exchange of bytes a kind. Else nothing."""
        if self._layout.zero != 3:
            return
        for group, items in self.kinds():
            items = [item for item in items if self._belongs_to_room(item, room)]
            padded = [_pad(self._own[item.param.name], math.ceil(item.numel / len(group))) for item in items]
            if not items:
                continue
            line = torch.cat([part.view(torch.uint8) for part in padded])
            sizes = [part.nbytes for part in padded]
            lines = [torch.split(part, sizes) for part in self._comm.all_gather(group, line)]
            for number, item in enumerate(items):
                raw = torch.cat([line[number] for line in lines])
                full = raw.view(_DTYPES[item.param.dtype])[: item.numel]
                self._values[item.param.name] = full.view(item.box).clone()

    def release(self, room: str) -> None:
        """ZeRO 3: let go of the room's values."""
        if self._layout.zero == 3:
            for name, item in self.params.items():
                if self._belongs_to_room(item, room):
                    self._values.pop(name, None)

    def _belongs_to_room(self, item: RankParameter, room: str) -> bool:
        return item.param.room == room or (self._tied and room == "head" and item.param.room == "embed")

    def rebuild(self) -> None:
        """Model values from the masters: rounded copies, exchanged between the data ranks where each has a part."""
        for (group, items), shares in zip(self.kinds(), self._shares, strict=True):
            if self._layout.zero in (1, 2):
                self._rebuild_line(group, items, shares)
                continue
            for item in items:
                name = item.param.name
                dtype = _DTYPES[item.param.dtype]
                rounded = self.slices[name].master.to(dtype)
                if self._layout.zero == 3:
                    self._own[name] = rounded.clone()
                else:
                    self._values[name] = rounded.clone().view(item.box)

    def _rebuild_line(
        self, group: Group, items: Sequence[RankParameter], shares: Sequence[Mapping[str, tuple[int, int]]]
    ) -> None:
        own_line = torch.cat([self.slices[item.param.name].master for item in items])
        sizes: list[int] = []
        for share in shares:
            sizes.append(sum(stop - start for start, stop in share.values()))
        lines = self._comm.all_gather(group, _pad(own_line, max(sizes)))
        places = [0] * len(group)
        for item in items:
            found = []
            for member, share in enumerate(shares):
                start, stop = share[item.param.name]
                found.append(lines[member][places[member] : places[member] + stop - start])
                places[member] += stop - start
            box = torch.cat(found).view(item.box)
            self._values[item.param.name] = box.to(_DTYPES[item.param.dtype], copy=True)

    # -- saving and loading -------------------------------------------------------------------------------------------

    def pieces(self) -> list[TensorPiece]:
        """What this rank holds, by parameter, then by state."""
        return [piece for item in self.params.values() for piece in self._pieces_of(item)]

    def _pieces_of(self, item: RankParameter) -> Iterator[TensorPiece]:
        name = item.param.name
        slices = self.slices[item.param.name]
        zero = self._layout.zero
        for state in states_of(item.param, muon=self._muon):
            cut = zero > 0 if state != "model" else zero == 3
            if state != "model":
                tensor: torch.Tensor = getattr(slices, state)
            else:
                tensor = self._own[name] if cut else self._values[name]
            yield TensorPiece(
                name,
                state,
                item.param.shape,
                item.offset,
                item.box,
                tensor if cut else tensor.view(item.box),
                self._parts[name] if cut else None,
                item.copies if cut else self._replica(item),
            )

    def _replica(self, item: RankParameter) -> int:
        """The number of a copy that every data rank has."""
        coordinates = self._at
        layout = self._layout
        index = coordinates.dp if item.param.expert is None else coordinates.dp // layout.ep
        return index * 2 * layout.tp + item.copies

    def load(self, read: Read) -> None:
        """Ask for everything this rank holds. Of a part of a line the rows it touches are requested."""
        for name, item in self.params.items():
            dtype = _DTYPES[item.param.dtype]
            if self._layout.zero == 3:
                self._own[name] = self._line(read, item, "model").to(dtype)
            else:
                box = read(name, "model", item.offset, item.box)
                self._values[name] = box.to(self._comm.device, dtype).reshape(item.box).contiguous()
            states = states_of(item.param, muon=self._muon)
            lines = {state: self._line(read, item, state).float() for state in states if state != "model"}
            self.slices[name] = self._kind(item)(**lines)

    def _line(self, read: Read, item: RankParameter, state: State) -> torch.Tensor:
        """The rank's part of a parameter's line, a new 1-d tensor."""
        start, stop = self._parts[item.param.name]
        width = math.prod(item.box[1:])
        low = start // width
        high = math.ceil(stop / width)
        if start == stop:
            return torch.zeros(0, device=self._comm.device)
        offset = (item.offset[0] + low, *item.offset[1:])
        box = (high - low, *item.box[1:])
        rows = read(item.param.name, state, offset, box).to(self._comm.device).reshape(-1)
        return rows[start - low * width : stop - low * width].clone()


def _index(offset: Sequence[int], box: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(offset, box, strict=True))


def _pad(line: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(line, (0, size - line.numel()))
