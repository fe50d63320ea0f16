"""Which expert an expert rank's `experts.0` is.

The one idea: Paddle's model classes keep a list as long as there are experts, with holes for those of other ranks, so names
bear global numbers. A class that lists its own alone counts from 0 on every rank, and then the same names stand in the files
of all expert ranks: rank e's expert i is number e * own + i.

    2 expert ranks, both hold experts.0, experts.1; config: 4 experts      rank 1's experts.1 -> experts.3
    the same, config: 2 experts                                            copies of one another

Without a config the same names are taken for local ones: copies of all experts on all expert ranks would not be expert
parallelism. Sources: PaddleFormers 1.2.0 `transformers/moe_layer.py`, `nn/moe_deepep/modular_moe_layer.py`;
`model_utils.py` (`global_expert_id_offset`). Cost: a pass over the names. What it does not do: grouped experts in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tool.formats.paddle.ranks import Degrees
from ckpt_tool.formats.paddle.rules import is_expert, text_config

_NUMBER = re.compile(r"((?:^|\.)experts\.)(\d{1,9})(?=\.)")
_COUNTS = ("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class Numbering:
    """local: experts of one rank, 0 where names bear global numbers. own: ranks hold experts that others do not have."""

    local: int = 0
    own: bool = False

    def logical(self, name: str, ep: int) -> str:
        """The name with the global number."""
        if not self.local or not ep:
            return name
        return _NUMBER.sub(lambda found: f"{found[1]}{int(found[2]) + ep * self.local}", name, count=1)

    def is_apart(self, name: str) -> bool:
        """May other ranks of the stage lack it?"""
        return self.own and is_expert(name)


def number_experts(
    held: Mapping[tuple[int, int, int], set[str]], degrees: Degrees, config: Mapping[str, Any], *, parted: bool = True
) -> Numbering:
    """How experts are numbered. held: the names of each (tp, pp, ep). parted: False where a meta says that every rank has all
    (no expert is kept out of the gradients' synchronisation)."""
    numbers: dict[tuple[int, int, int], frozenset[int]] = {}
    for at, names in held.items():
        mine = frozenset(int(found[2]) for name in names if (found := _NUMBER.search(name)))
        if mine:
            numbers[at] = mine
    if degrees.ep == 1:
        apart = any(
            not a & b for (x, a) in numbers.items() for (y, b) in numbers.items() if x[1] == y[1] and x[0] != y[0]
        )
        return Numbering(0, apart)  # experts spread over the tensor ranks
    if not parted:
        return Numbering()
    by_rank = {ep: frozenset().union(*(n for at, n in numbers.items() if at[2] == ep)) for (_, _, ep) in numbers}
    sets = set(by_rank.values())
    count = next(iter(sets), frozenset())
    if len(by_rank) == degrees.ep and len(sets) == 1 and count == frozenset(range(len(count))):
        stated = next((n for key in _COUNTS if type(n := text_config(config).get(key)) is int), None)
        if stated is None or stated != len(count):
            return Numbering(len(count), True)
        return Numbering(0, False)
    return Numbering(0, True)
