"""Tensor names folded into a tree: 92,000 names of a mixture of experts become some forty lines.

Siblings with numbers as names (layers, experts) share a line with a range if everything below them is equal: names,
dtypes and shapes. One that differs has its own line, so that a layer with a missing tensor is easy to see:

    layers.[0-2]            33 tensors
      mlp.down_proj.weight  ...
    layers.[3-60]           ...
      mlp.experts.[0-255]
        down_proj.weight    ...

The idea: equal subtrees have one number (`report.folding`), so comparing 58 layers of 256 experts compares integers.
This module chooses which levels to show. Cost: about 1 us per tensor. Values are not read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from ckpt_tool.report.folding import Folding, Subtree


class Line(NamedTuple):
    """One line of the tree."""

    level: int
    label: str
    copies: int  # how many equal subtrees the line represents (32 for 32 equal layers)
    tensors: int  # of all copies
    nbytes: int  # of all copies
    what: Hashable | None  # the kind of tensor of a leaf (such as dtype and shape); None for a module
    # the path of an equal subtree that is shown instead, without the components it shares with this line; "" for none
    twin: str = ""


class FoldedTree:
    """The folded tree of (name, what, nbytes) triples; tensors share a line only if their `what` is equal."""

    def __init__(self, tensors: Iterable[tuple[str, Hashable, int]] | Folding) -> None:
        """tensors: rows; or, for very many tensors, a Folding to which columns were added."""
        folding = tensors if isinstance(tensors, Folding) else _folding(tensors)
        self._root = folding.fold()
        self._whats = folding.whats
        self._sizes = folding.sizes
        self._subtrees = folding.subtrees

    def lines(self, *, depth: int | None = None, most: int = 48) -> list[Line]:
        """The lines of the tree from the top: down to `depth` levels, or, without a depth, at most about `most` lines.

        Without a depth, levels are unfolded from the top while they fit. A subtree that equals one already unfolded
        is not shown twice but names its twin.
        """
        top = self._children(self._root, "", "", 0, 1)
        if depth is not None:
            self._unfold_to(top, depth)
        else:
            self._unfold_within(top, most)
        return [line for node in top for line in node.lines()]

    def _unfold_to(self, nodes: list[_Node], depth: int) -> None:
        for node in nodes:
            if node.level + 1 < depth:
                node.children = self._below(node)
                self._unfold_to(node.children, depth)

    def _unfold_within(self, top: list[_Node], most: int) -> None:
        line_of: dict[int, str] = {}
        total = len(top)
        queue = deque(top)  # level by level, each in the order of its tree
        while queue:
            node = queue.popleft()
            if not self._subtrees[node.number].items:
                continue
            if node.number in line_of:
                node.line = node.line._replace(twin=_relative(line_of[node.number], node.path))
                continue
            below = self._below(node)
            if total + len(below) > most:
                continue
            line_of[node.number] = node.path
            node.children = below
            total += len(below)
            queue.extend(below)

    def _children(self, number: int, prefix: str, path: str, level: int, copies: int) -> list[_Node]:
        """The nodes directly below a subtree. An only child is shown on its parent's line, and so is each group of
        numbers: `layers.[0-31]`."""
        nodes: list[_Node] = []
        for item in self._subtrees[number].items:
            label = prefix + item.label
            child = item.number
            times = copies * item.copies
            subtree = self._subtrees[child]
            while subtree.leaf < 0 and len(subtree.items) == 1:
                only = subtree.items[0]
                label = f"{label}.{only.label}"
                child = only.number
                times = times * only.copies
                subtree = self._subtrees[child]
            if subtree.leaf < 0 and all(inner.numeric for inner in subtree.items):
                nodes += self._children(child, f"{label}.", path, level, times)
                continue
            facts = self._whats[subtree.leaf] if subtree.leaf >= 0 and not subtree.items else None
            line = Line(level, label, times, times * subtree.tensors, times * subtree.nbytes, facts)
            nodes.append(_Node(line, child, path + label))
        return nodes

    def _below(self, node: _Node) -> list[_Node]:
        subtree = self._subtrees[node.number]
        level = node.level + 1
        copies = node.line.copies
        inner = self._children(node.number, "", f"{node.path}.", level, copies)
        if subtree.leaf >= 0 and inner:  # `a` and `a.b` are both tensors
            itself = Line(
                level, "(itself)", copies, copies, copies * self._sizes[subtree.leaf], self._whats[subtree.leaf]
            )
            inner.insert(0, _Node(itself, self._bare(), node.path))
        return inner

    def _bare(self) -> int:
        """The number of a subtree with nothing below it."""
        if self._subtrees[-1].items or self._subtrees[-1].tensors:
            self._subtrees.append(Subtree(-1, (), 0, 0))
        return len(self._subtrees) - 1


def _folding(tensors: Iterable[tuple[str, Hashable, int]]) -> Folding:
    folding = Folding()
    names: list[bytes] = []
    leaves: list[int] = []
    for name, facts, nbytes in tensors:
        names.append(name.encode("utf-8", "surrogatepass"))
        leaves.append(folding.leaf(facts, nbytes))
    folding.add(names, leaves)
    return folding


class _Node:
    """A line and, once unfolded, what is below it."""

    __slots__ = ("children", "line", "number", "path")

    def __init__(self, line: Line, number: int, path: str) -> None:
        self.line = line
        self.number = number
        self.path = path
        self.children: list[_Node] = []

    @property
    def level(self) -> int:
        """The level of the node's line."""
        return self.line.level

    def lines(self) -> Iterator[Line]:
        """The node's line, then those of its unfolded children."""
        yield self.line
        for child in self.children:
            yield from child.lines()


def _relative(path: str, of: str) -> str:
    """`path` without the leading segments that `of` has too: `a.b.c` of `a.d` is `b.c`. Its last one always stays."""
    *parents, leaf = path.split(".")
    shared = 0
    for own_word, other_word in zip(parents, of.split("."), strict=False):
        if own_word != other_word:
            break
        shared += 1
    if shared and [*parents, leaf][shared][:1] in "[0123456789":
        shared -= 1  # a number says little without the name before it: layers.[0-2]
    return ".".join([*parents[shared:], leaf])
