"""Gradients of one step, summed over microbatches and data ranks in a fixed order.

The one idea: the sum over microbatches is a pairwise tree over their global numbers, ((0+1)+(2+3))+..., so a data
rank with microbatches 4..7 forms a subtree of it, and joining the tops of all ranks gives the bits of one rank that
had all of them:

    sums.add(Ref("w", 0), microbatch=5, g)       kept until 4 arrives, then added as 4+5, in whatever order they come
    sums.joined(comm, group, refs)               flat line of all refs, the tops of the group's ranks paired up

At most log2(microbatches) + 1 gradients of a shard live at a time. Experts have the gradients of all sources of their
EP group, which are consecutive microbatches too. Native mode: added as they come, then an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt_tool.harness.comm import Comm
from ckpt_tool.harness.layout import Group
from ckpt_tool.harness.tape import Ref


class GradientSums:
    """Sums in the making. Gradients are fp32, of the shape of the shard."""

    def __init__(self, *, canonical: bool) -> None:
        self._canonical = canonical
        self._trees: dict[Ref, dict[tuple[int, int], torch.Tensor]] = {}

    def add(self, ref: Ref, microbatch: int, gradient: torch.Tensor) -> None:
        """Add a microbatch's gradient: in the order of the tree of sums where they are canonical, else as it comes."""
        tree = self._trees.setdefault(ref, {})
        if not self._canonical:
            tree[0, 0] = tree[0, 0] + gradient if (0, 0) in tree else gradient
            return
        level = 0
        place = microbatch
        while (level, place ^ 1) in tree:
            sibling = tree.pop((level, place ^ 1))
            gradient = gradient + sibling  # a + b is b + a to the bit
            level = level + 1
            place = place >> 1
        tree[level, place] = gradient

    def joined(self, comm: Comm, group: Group, refs: Sequence[Ref]) -> torch.Tensor:
        """The sums of all `refs` over the group as one flat line; what was kept for them is let go."""
        line = torch.cat([self._top(ref).reshape(-1) for ref in refs])
        if not self._canonical:
            return comm.all_reduce(group, line)
        parts = comm.all_gather(group, line)
        while len(parts) > 1:
            parts = [left_part + right for left_part, right in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def _top(self, ref: Ref) -> torch.Tensor:
        tree = self._trees.pop(ref)
        if len(tree) != 1:
            raise RuntimeError(f"{ref}: microbatches of one rank leave {sorted(tree)}, not one subtree")
        return next(iter(tree.values()))
