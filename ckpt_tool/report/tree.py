"""Tensor names folded into a tree: 92,000 names of a mixture of experts are some forty lines.

Siblings with numbers for names (layers, experts) that hold exactly the same below them, names, dtypes and shapes,
are one line with a range; one that differs stands alone, so a layer with a missing tensor shows itself:

    layers.[0-2]            33 tensors
      mlp.down_proj.weight  ...
    layers.[3-60]           ...
      mlp.experts.[0-255]
        down_proj.weight    ...

The idea: equal subtrees have one number (`report.folding`), so comparing 58 layers of 256 experts compares integers;
what is left here is to choose what to show. Cost: about 1 us a tensor. It does not look at values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from ckpt_tool.report.folding import Folding, Subtree


class Line(NamedTuple):
    """One line of the tree. copies: how often the subtree stands for itself (32 layers). what: a leaf's, else None.

    tensors, nbytes: of all copies. twin: an equal subtree that is shown instead, as
    its path without what it shares with this line's; "" for none.
    """

    level: int
    label: str
    copies: int
    tensors: int
    nbytes: int
    what: Hashable | None
    twin: str = ""


class Tree:
    """The folded tree of (name, what, nbytes) triples; `what` is all that must be equal for tensors to be one line."""

    def __init__(self, tensors: Iterable[tuple[str, Hashable, int]] | Folding) -> None:
        """tensors: rows, or a folding that has taken its columns (the road for very many)."""
        folding = tensors if isinstance(tensors, Folding) else _folding(tensors)
        self._root = folding.fold()
        self._whats, self._sizes, self._subtrees = folding.whats, folding.sizes, folding.subtrees

    def lines(self, *, depth: int | None = None, most: int = 48) -> list[Line]:
        """The tree top down: all of it down to `depth` levels, or, without a depth, what is best seen in `most` lines.

        Without a depth, levels unfold from the top while they fit; a subtree equal to one that is unfolded already is
        not shown twice but names its twin.
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
        seen: dict[int, str] = {}
        total = len(top)
        queue = deque(top)  # level by level, each in the order of its tree
        while queue:
            node = queue.popleft()
            if not self._subtrees[node.number].items:
                continue
            if node.number in seen:
                node.line = node.line._replace(twin=_relative(seen[node.number], node.path))
                continue
            below = self._below(node)
            if total + len(below) > most:
                continue
            seen[node.number] = node.path
            node.children = below
            total += len(below)
            queue.extend(below)

    def _children(self, number: int, prefix: str, path: str, level: int, copies: int) -> list[_Node]:
        """The nodes right below a subtree. A lone child stands on its parent's line, and so does each group of
        numbers: `layers.[0-31]`."""
        nodes: list[_Node] = []
        for item in self._subtrees[number].items:
            label, child, times = prefix + item.label, item.number, copies * item.copies
            subtree = self._subtrees[child]
            while subtree.leaf < 0 and len(subtree.items) == 1:
                only = subtree.items[0]
                label, child, times = f"{label}.{only.label}", only.number, times * only.copies
                subtree = self._subtrees[child]
            if subtree.leaf < 0 and all(inner.numeric for inner in subtree.items):
                nodes += self._children(child, f"{label}.", path, level, times)
                continue
            what = self._whats[subtree.leaf] if subtree.leaf >= 0 and not subtree.items else None
            line = Line(level, label, times, times * subtree.tensors, times * subtree.nbytes, what)
            nodes.append(_Node(line, child, path + label))
        return nodes

    def _below(self, node: _Node) -> list[_Node]:
        subtree = self._subtrees[node.number]
        level, copies = node.level + 1, node.line.copies
        inner = self._children(node.number, "", f"{node.path}.", level, copies)
        if subtree.leaf >= 0 and inner:  # `a` and `a.b` are both tensors
            own = Line(level, "(itself)", copies, copies, copies * self._sizes[subtree.leaf], self._whats[subtree.leaf])
            inner.insert(0, _Node(own, self._bare(), node.path))
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
    for name, what, nbytes in tensors:
        names.append(name.encode("utf-8", "surrogatepass"))
        leaves.append(folding.leaf(what, nbytes))
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
        return self.line.level

    def lines(self) -> Iterator[Line]:
        yield self.line
        for child in self.children:
            yield from child.lines()


def _relative(path: str, of: str) -> str:
    """`path` without the leading segments that `of` has too: `a.b.c` of `a.d` is `b.c`. Its last one always stays."""
    *parents, last = path.split(".")
    shared = 0
    for mine, other in zip(parents, of.split("."), strict=False):
        if mine != other:
            break
        shared += 1
    if shared and [*parents, last][shared][:1] in "[0123456789":
        shared -= 1  # a number says little without the name before it: layers.[0-2]
    return ".".join([*parents[shared:], last])
