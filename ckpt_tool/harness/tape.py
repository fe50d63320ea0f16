"""Forward and backward of one layer, with the sums between ranks in the open.

The one idea: autograd works inside a block only, a few operations on one virtual shard; blocks are strung together by a
tape of our own, which knows the exchanges between ranks. So every sum over ranks or shards is written here, in one
order:

    xs = tape.spread(x)            x goes into every virtual shard;   back: the shards' gradients, added in order 0..V-1
    ys = [tape.block(f, [x_v], ["w" of v]) for each own v]
    y  = tape.join(ys)             partial sums, added in order 0..V-1;  back: the gradient goes to each

A GEMM therefore has the same shape, and a sum the same order, on 1 rank as on 4: the same bits. In native mode a rank
is one shard and the sums are all-reduces. Undoing a step frees what it kept; with `recompute` (ZeRO 3, whose weights
may not stay) a block keeps its inputs alone and runs again. Not thread-bound: a rank's exchanges run in the rank's own
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from ckpt_tool.harness.comm import Comm
from ckpt_tool.harness.layout import Group


class Ref(NamedTuple):
    """Virtual shard `block` of parameter `name` (0 where it is not cut)."""

    name: str
    block: int


class Weights(Protocol):
    """What a forward pass reads: the shards of this rank."""

    def block(self, ref: Ref) -> torch.Tensor:
        """The shard's values, contiguous."""


class GradientSink(Protocol):
    """What a backward pass gives its gradients to."""

    def add(self, ref: Ref, microbatch: int, gradient: torch.Tensor) -> None:
        """Take the fp32 gradient of a shard from one global microbatch."""


class Node:
    """A value on its way, and the gradient that has come back to it so far."""

    __slots__ = ("grad", "value")

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.grad: torch.Tensor | None = None

    def add(self, grad: torch.Tensor) -> None:
        """Add a gradient of one consumer of the value."""
        self.grad = grad if self.grad is None else self.grad + grad

    def take(self) -> torch.Tensor:
        """The accumulated gradient, zeros if there was none; the node no longer holds it afterwards."""
        grad = self.grad
        self.grad = None
        return torch.zeros_like(self.value) if grad is None else grad


def ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """((p0 + p1) + p2) + ... in fp32, rounded once to the parts' dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


class Tape:
    """What was done for one microbatch in one layer, in order, to be undone once."""

    def __init__(
        self, comm: Comm, tp: Group, weights: Weights, sink: GradientSink, *, canonical: bool, recompute: bool
    ) -> None:
        self._comm = comm
        self._tp = tp
        self._weights = weights
        self._sink = sink
        self._canonical = canonical
        self._recompute = recompute
        self._undo: list[Callable[[], None]] = []

    def backward(self) -> None:
        """Undo all steps, the last first; each is forgotten as soon as it is undone."""
        while self._undo:
            self._undo.pop()()

    # -- inside a shard -----------------------------------------------------------------------------------------------

    def block(
        self,
        compute: Callable[..., torch.Tensor],
        inputs: Sequence[Node],
        refs: Sequence[Ref] = (),
        microbatch: int = 0,
    ) -> Node:
        """`compute(*inputs, *weights)` with weights as fp32; their gradients go to the sink, under `microbatch`."""
        values = [node.value for node in inputs]

        def run(track: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
            leaves = [value.detach().requires_grad_(track) for value in values]
            leaves += [self._weights.block(ref).detach().float().requires_grad_(track) for ref in refs]
            with torch.set_grad_enabled(track):
                return leaves, compute(*leaves)

        leaves, made = run(not self._recompute)
        saved = None if self._recompute else (leaves, made)
        out = Node(made.detach())

        def undo() -> None:
            leaves, made = saved or run(True)
            grads = torch.autograd.grad(made, leaves, out.take()) if leaves else ()
            for node, grad in zip(inputs, grads[: len(inputs)], strict=True):
                node.add(grad)
            for ref, grad in zip(refs, grads[len(inputs) :], strict=True):
                self._sink.add(ref, microbatch, grad)

        self._undo.append(undo)
        return out

    # -- between tensor-parallel ranks --------------------------------------------------------------------------------

    def _total(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of all ranks' parts, one a virtual shard: in order, or by all-reduce in native mode."""
        if not self._canonical:
            return self._comm.all_reduce(self._tp, ordered_sum(parts).float()).to(parts[0].dtype)
        return ordered_sum(
            [part for partial in self._comm.all_gather(self._tp, torch.stack(list(parts))) for part in partial]
        )

    def spread(self, node: Node, count: int) -> list[Node]:
        """The node once for each of `count` own shards."""
        nodes = [Node(node.value) for _ in range(count)]
        self._undo.append(lambda: node.add(self._total([shard.take() for shard in nodes])))
        return nodes

    def join(self, nodes: Sequence[Node]) -> Node:
        """The sum over all shards of all ranks."""
        out = Node(self._total([node.value for node in nodes]))

        def undo() -> None:
            grad = out.take()
            for node in nodes:
                node.add(grad)

        self._undo.append(undo)
        return out

    def columns(self, nodes: Sequence[Node]) -> Node:
        """All shards of all ranks side by side along the last dim; back: each gets its own columns."""
        parts = self._comm.all_gather(self._tp, torch.stack([node.value for node in nodes]))
        out = Node(torch.cat([part for rank_parts in parts for part in rank_parts], -1))
        width = nodes[0].value.shape[-1]
        first_column = self._tp.index(self._comm.rank) * len(nodes) * width

        def undo() -> None:
            grad = out.take()
            for number, node in enumerate(nodes):
                node.add(grad.narrow(-1, first_column + number * width, width).contiguous())

        self._undo.append(undo)
        return out

    # -- rows ---------------------------------------------------------------------------------------------------------

    def split(self, node: Node, rows: Sequence[int]) -> list[Node]:
        """Bands of rows, some may be empty."""
        nodes = [Node(part.contiguous()) for part in torch.split(node.value, list(rows))]
        self._undo.append(lambda: node.add(torch.cat([part.take() for part in nodes])))
        return nodes

    def cat(self, nodes: Sequence[Node]) -> Node:
        """Bands of rows, one under the other."""
        out = Node(torch.cat([node.value for node in nodes]))

        def undo() -> None:
            for node, grad in zip(nodes, torch.split(out.take(), [len(node.value) for node in nodes]), strict=True):
                node.add(grad)

        self._undo.append(undo)
        return out

    def exchange(self, node: Node, group: Group, away: Sequence[int], here: Sequence[int]) -> Node:
        """`away[i]` rows go to rank i of the group, `here[i]` rows come from it and are in that order."""
        out = Node(self._exchange_rows(node.value, group, away, here))
        self._undo.append(lambda: node.add(self._exchange_rows(out.take(), group, here, away)))
        return out

    def _exchange_rows(
        self, value: torch.Tensor, group: Group, away: Sequence[int], here: Sequence[int]
    ) -> torch.Tensor:
        shapes = [(rows, *value.shape[1:]) for rows in here]
        return torch.cat(self._comm.exchange(group, torch.split(value, list(away)), shapes))
