"""What a rank stores in a flex checkpoint, and which rank's file keeps what several of them hold.

The one idea: an `Item` is one local tensor with its place in the global one, made from the layout's blocks and shares
(`paddle.layout`); what Paddle's own save does with them, all ranks' items in a row, is then repeated to the letter:

    equal items (key, offset, range, shape) are stored once, in the file that has the least items so far; of those in the
    order of their names ("10_0.distcp" before "2_0.distcp")

so LayerNorms of a TP 2 job land in `1_0.distcp`, whose rank listed nothing else first. Source: PaddlePaddle 3.3.1
`flex_checkpoint/dcp/save_state_dict.py` (`balanced_dedup_key_in_dict`), `utils.py` (`merge_state_dict_metadata`).
Cost: some us an item. What it does not do: bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ckpt_tool.core.box import Box, contiguous_strides, flat_boxes, whole
from ckpt_tool.core.dtype import DType
from ckpt_tool.core.target import WantedTensor
from ckpt_tool.core.tensor import Path
from ckpt_tool.formats.paddle.layout import Block
from ckpt_tool.formats.torch.content import Part

Boxes = Sequence[tuple[Box, Box]]  # (box in the wanted tensor, box in the local block)


class Item(NamedTuple):
    """One local tensor. name: its own (static) name. offset, shape, whole: of its block in the global tensor. span: the part
    of the block's line that is stored, None for all of it. boxes: what fills the block, of wanted tensor `number`."""

    key: str
    path: Path
    name: str
    dtype: DType
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    span: tuple[int, int] | None
    number: int
    boxes: Boxes

    @property
    def identity(self) -> tuple[object, ...]:
        """What makes items of two ranks one."""
        return self.key, self.offset, self.span, self.shape

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape if self.span is None else (self.span[1] - self.span[0],)


def whole_item(key: str, path: Path, name: str, tensor: WantedTensor, number: int) -> Item:
    """A tensor that every rank holds whole."""
    shape, box = tensor.shape, whole(tensor.shape)
    return Item(key, path, name, tensor.dtype, (0,) * len(shape), shape, shape, None, number, ((box, box),))


def block_item(
    key: str, name: str, tensor: WantedTensor, number: int, block: Block, span: tuple[int, int] | None
) -> Item:  # fmt: skip
    """A rank's block of a tensor, or a range of its line. The global tensor is the blocks laid end to end."""
    shape = list(block.shape)
    if block.cut.dim is not None:
        shape[block.cut.dim] *= block.of
    return Item(key, (key,), name, tensor.dtype, block.offset, block.shape, tuple(shape), span, number, block.boxes)


def parts_of(item: Item) -> list[Part]:
    """The pieces that fill an item's stored array."""
    strides = contiguous_strides(item.shape)
    if item.span is None:
        return [_part(item, box, inner, 0, strides, full=len(item.boxes) == 1) for box, inner in item.boxes]
    out: list[Part] = []
    start = item.span[0]
    for piece in flat_boxes(item.shape, *item.span):
        for box, inner in item.boxes:
            shared = piece & inner if piece.shape else piece
            if shared is not None:
                there = shared.translate(tuple(b - i for b, i in zip(box.offset, inner.offset, strict=True)))
                out.append(_part(item, there, shared, start, strides, full=shared == piece))
    return out


def _part(item: Item, box: Box, inner: Box, start: int, strides: tuple[int, ...], *, full: bool) -> Part:
    """`box` of the tensor at `inner` of the block. start: element of the block's line where the array begins. full: does it
    lie there without gaps?"""
    at = sum(o * s for o, s in zip(inner.offset, strides, strict=True)) - start
    return Part(item.number, box, at, None if full else strides)


class Kept(NamedTuple):
    """A save of all ranks. files: rank -> the items that its file keeps, in their order. storage: (item, rank) in the order of
    the metadata. stated: the different shards of each key, in order."""

    files: Mapping[int, list[Item]]
    storage: Sequence[tuple[Item, int]]
    stated: Mapping[str, list[Item]]


def kept(ranks: Iterable[tuple[int, Sequence[Item]]], unique: int = 0) -> Kept:
    """What each rank's file keeps of its items. ranks: (rank, its items), in the order of ranks."""
    homes: dict[tuple[object, ...], list[int]] = {}
    first: dict[tuple[object, ...], Item] = {}
    stated: dict[str, list[Item]] = {}
    mine: dict[int, Sequence[Item]] = {}
    indexes: dict[int, list[tuple[object, ...]]] = {}  # of a list of items: ranks may share one
    for rank, items in ranks:
        mine[rank] = items
        found = indexes.get(id(items))
        if found is None:
            found = indexes[id(items)] = [item.identity for item in items]
        for item, index in zip(items, found, strict=True):
            if index not in first:
                first[index] = item
                stated.setdefault(item.key, []).append(item)
            homes.setdefault(index, []).append(rank)
    load = dict.fromkeys(mine, 0)
    names = {rank: file_name(rank, unique) for rank in mine}
    owner: dict[tuple[object, ...], int] = {}
    for index, candidates in homes.items():
        owner[index] = min(candidates, key=lambda r: (load[r], names[r]))
        load[owner[index]] += 1
    files = {rank: [item for item in items if owner[item.identity] == rank] for rank, items in mine.items()}
    return Kept(files, [(first[index], rank) for index, rank in owner.items()], stated)


def file_name(rank: int, unique: int = 0, *, safetensors: bool = False) -> str:
    return f"{rank}_{unique}.{'safetensors' if safetensors else 'distcp'}"
