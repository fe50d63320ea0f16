"""Folding names: equal subtrees get one number, however many tensors there are.

The one idea: nearly all of 92,000 names differ in their numbers alone, so a name is cut behind its last number into a
head and a tail, and only the heads are walked:

    model.layers.3.mlp.experts.17 | .gate_proj.weight      head 17 of group `model.layers.3.mlp.experts.`

A head's block is the set of its tails; there are 15,000 blocks but a handful of different ones. Blocks with the same
tails are one subtree; the numbers of a group with equal subtrees are one entry; the group is a tail of the head
before it (`model.layers.3 | .mlp.experts`), and so on up to the root. Sets, not lists: a layer whose tensors a file
boundary has put in another order is still the same layer.

Cost: 0.6 us a name, less memory than the names. Names come as UTF-8 in columns, as headers keep them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from ckpt_tool.report.text import ranges

SEGMENTS = 40  # dots beyond this many belong to the last segment: a hostile name can't make a deep tree
K = TypeVar("K")
V = TypeVar("V")
# the keys under which a small trie keeps its own tensor and its numbers: no segment is an int
_LEAF = 0
_NUMBERED = 1
_HEAD = re.compile(rb"(?:.*\.)?(?:0|[1-9][0-9]{0,8})(?=\.|\Z)", re.DOTALL)
# Names that differ in digits alone are cut at one place; a leading zero makes a number a name, so 0 stays 0.
_MASK = bytes.maketrans(b"123456789", b"111111111")


class SubtreeItem(NamedTuple):
    """A child of a subtree: `copies` subtrees of one shape, `number`."""

    label: str
    copies: int
    numeric: bool
    number: int


class Subtree(NamedTuple):
    """A module of the tree of names."""

    leaf: int  # number of the tensor of this very name, -1 for none
    items: tuple[SubtreeItem, ...]
    tensors: int  # of one copy
    nbytes: int  # of one copy


class _Row(NamedTuple):
    """A tail: the segments below a head, with a leaf (-1: none) or the numbers of a group by subtree at its end."""

    path: tuple[str, ...]
    leaf: int
    numbered: tuple[tuple[int, tuple[int, ...]], ...] = ()


class _NumberGroup:
    """The numbers below one path: (number, block) of each head."""

    __slots__ = ("depth", "members", "path")

    def __init__(self, path: tuple[str, ...], depth: int) -> None:
        self.path = path  # below the head before it
        self.depth = depth  # more than that of the group of the head before it
        self.members: list[tuple[int, list[int]]] = []


class _Made(dict[K, V]):
    """A dict that makes what it lacks."""

    def __init__(self, make: Callable[[K], V]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: K) -> V:
        value = self[key] = self._make(key)
        return value


class Folding:
    """Folds columns of names: first `leaf` numbers the kinds of tensors, then `add` takes columns, last `fold`, once.

    A block is a list of numbers of tails; in it -1-g denotes group g until that group is folded.
    """

    def __init__(self) -> None:
        self.whats: list[Hashable] = []
        self.sizes: list[int] = []  # bytes, by leaf
        self.subtrees: list[Subtree] = []
        self._leaves = _Made(self._leaf)
        self._numbers: dict[Hashable, int] = {}
        self._by_block: dict[tuple[int, ...], int] = {}
        self._rows: list[_Row] = []
        self._row_numbers = _Made(self._row)
        self._tails = _Made(self._tail)
        self._splits = _Made(self._split)
        self._root: list[int] = []
        self._groups: list[_NumberGroup] = []
        self._group_rows: list[int] = []
        self._by_prefix = _Made(self._group)
        self._blocks = _Made(self._block)

    def leaf(self, what: Hashable, nbytes: int) -> int:
        """The number of a kind of tensor. what: all that must be equal for tensors to share a line."""
        return self._leaves[what, nbytes]

    def add(self, names: Sequence[bytes], leaves: Iterable[int]) -> None:
        """Tensors by name (UTF-8) and leaf."""
        if not names:
            return
        masks: Sequence[bytes] = b"\n".join(names).translate(_MASK).split(b"\n")
        if len(masks) != len(names):  # a name with a line feed
            masks = [name.translate(_MASK) for name in names]
        splits = self._splits
        blocks = self._blocks
        tails = self._tails
        root = self._root
        for name, key in zip(names, zip(masks, leaves, strict=True), strict=True):
            cut, tail = splits[key]
            if tail < 0:
                tail = tails[name[cut:] if cut else b"." + name, key[1]]
            if cut:
                blocks[name[:cut]].append(tail)
            else:
                root.append(tail)

    def fold(self) -> int:
        """The number of the whole tree's subtree."""
        self._group_rows = [0] * len(self._groups)
        for index in sorted(range(len(self._groups)), key=lambda i: -self._groups[i].depth):
            group = self._groups[index]
            numbers_of: dict[int, list[int]] = {}
            for number, block in group.members:
                numbers_of.setdefault(self._subtree_of(block), []).append(number)
            numbered = tuple(sorted((subtree, tuple(sorted(numbers))) for subtree, numbers in numbers_of.items()))
            self._group_rows[index] = self._row_numbers[_Row(group.path, -1, numbered)]
        return self._subtree_of(self._root)

    # -- heads and tails ----------------------------------------------------------------------------------------------

    def _leaf(self, key: tuple[Hashable, int]) -> int:
        self.whats.append(key[0])
        self.sizes.append(key[1])
        return len(self.whats) - 1

    def _row(self, row: _Row) -> int:
        self._rows.append(row)
        return len(self._rows) - 1

    def _split(self, key: tuple[bytes, int]) -> tuple[int, int]:
        """Where to cut a name of this mask and leaf, and its tail; -1 where that has digits, which the mask hides."""
        mask, leaf = key
        cut = _cut(mask)
        text = mask[cut:] if cut else b"." + mask
        return cut, -1 if b"0" in text or b"1" in text else self._tails[text, leaf]

    def _tail(self, key: tuple[bytes, int]) -> int:
        text, leaf = key
        return self._row_numbers[_Row(_segments(text[1:]) if text else (), leaf)]

    def _block(self, head: bytes) -> list[int]:
        """A new head's block, known to its group."""
        tail_begin = head.rfind(b".") + 1
        block: list[int] = []
        self._by_prefix[head[:tail_begin]].members.append((int(head[tail_begin:]), block))
        return block

    def _group(self, prefix: bytes) -> _NumberGroup:
        """A new group, known to the head before it. prefix: with its last dot; b"" for numbers at the root."""
        above = prefix[:-1]
        cut = _cut(above)
        below = above[cut + 1 :] if cut else above
        path = _segments(below) if prefix and cut < max(len(above), 1) else ()
        (self._blocks[above[:cut]] if cut else self._root).append(-1 - len(self._groups))
        group = _NumberGroup(path, prefix.count(b"."))
        self._groups.append(group)
        return group

    # -- subtrees -----------------------------------------------------------------------------------------------------

    def _subtree_of(self, block: list[int]) -> int:
        """The number of the block's subtree. Of equal blocks the first gives the order that is shown."""
        if min(block, default=0) < 0:
            block = [tail if tail >= 0 else self._group_rows[-1 - tail] for tail in block]
        key = tuple(sorted(block))
        number = self._by_block.get(key)
        if number is None:
            node: dict[Any, Any] = {}
            for tail in block:
                row = self._rows[tail]
                current = node
                for segment in row.path:
                    current = current.setdefault(segment, {})
                if row.leaf >= 0:
                    current[_LEAF] = row.leaf
                else:
                    current[_NUMBERED] = row.numbered
            number = self._by_block[key] = self._number(node)
        return number

    def _number(self, node: dict[Any, Any]) -> int:
        """The number of the node's subtree; equal subtrees have equal numbers. Depth is at most SEGMENTS + 1."""
        leaf = node.pop(_LEAF, -1)
        numbered = node.pop(_NUMBERED, ())
        named = [(segment, self._number(child)) for segment, child in node.items()]
        key = (leaf, frozenset(named), numbered)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.subtrees)
            self.subtrees.append(self._subtree(leaf, named, numbered))
        return number

    def _subtree(
        self, leaf: int, named: list[tuple[str, int]], numbered: tuple[tuple[int, tuple[int, ...]], ...]
    ) -> Subtree:
        items = [SubtreeItem(segment, 1, False, number) for segment, number in named]
        for number, found in sorted(numbered, key=lambda pair: pair[1]):
            label = str(found[0]) if len(found) == 1 else f"[{ranges(found)}]"
            items.append(SubtreeItem(label, len(found), True, number))
        below = [(item.copies, self.subtrees[item.number]) for item in items]
        return Subtree(
            leaf,
            tuple(items),
            (leaf >= 0) + sum(copies * subtree.tensors for copies, subtree in below),
            (self.sizes[leaf] if leaf >= 0 else 0) + sum(copies * subtree.nbytes for copies, subtree in below),
        )


def _cut(name: bytes) -> int:
    """Where the head of a name ends: behind its last segment that is a number; 0 where it has none."""
    if name.count(b".") > SEGMENTS:
        name = b".".join(name.split(b".", SEGMENTS)[:SEGMENTS])
    match = _HEAD.match(name)
    return match.end() if match else 0


def _segments(text: bytes) -> tuple[str, ...]:
    return tuple(text.decode("utf-8", "surrogatepass").split(".", SEGMENTS))
