"""Experts of DeepSpeed's own MoE: numbers inside a rank and in the whole model, and which ranks hold which.

A rank counts its experts from 0; the model counts all of them. With 4 experts on ep 2:

    ...deepspeed_experts.1.w1.weight in the file of data rank 3      (ep rank 3 % 2 = 1, 2 experts a rank)
    -> ...deepspeed_experts.3.w1.weight                              (1 * 2 + 1)

Data rank r of n is expert rank r % ep, and number r // ep among those that hold the same experts; with
`use_data_before_expert_parallelism` it is expert rank r // (n / ep), number r % (n / ep).
Source: DeepSpeed 0.19.8 `utils/groups.py` (`_create_expert_and_data_parallel`), `runtime/engine.py`
(`_save_moe_checkpoint`), `moe/utils.py` (the groups `ep_size_N`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MARK = ".deepspeed_moe.experts.deepspeed_experts."
_EXPERT = re.compile(r"^(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,6})(\..+)$")


class ExpertName(NamedTuple):
    """`layer` + number + `part` is the name. layer: `moe.deepspeed_moe.experts.deepspeed_experts.`, part:
    `.w1.weight`."""

    layer: str
    number: int
    part: str

    def numbered(self, number: int) -> str:
        return f"{self.layer}{number}{self.part}"


def expert_name_of(name: str) -> ExpertName | None:
    """The parts of an expert parameter's name; None for any other parameter."""
    match = _EXPERT.match(name) if MARK in name else None
    return ExpertName(match[1], int(match[2]), match[3]) if match else None


def counts(names: Iterable[str]) -> dict[str, int]:
    """Layer -> how many different experts `names` has of it, in order of first sight."""
    seen: dict[str, set[int]] = {}
    for name in names:
        found = expert_name_of(name)
        if found:
            seen.setdefault(found.layer, set()).add(found.number)
    return {layer: len(numbers) for layer, numbers in seen.items()}


def global_names(names: Sequence[str], ep_rank: int) -> list[str]:
    """What a rank calls its experts' parameters -> their names in the whole model."""
    local = counts(names)
    out = []
    for name in names:
        found = expert_name_of(name)
        out.append(found.numbered(ep_rank * local[found.layer] + found.number) if found else name)
    return out


def local_names(names: Sequence[str], ep: int) -> list[list[tuple[str, str]]]:
    """For each expert rank its parameters as (name in the whole model, name inside the rank), in a rank's own order.

    names: of one group, all experts. The order of a rank's parameters is the module's: layer by layer, expert by
        expert.
    """
    whole = counts(names)
    layers = {layer: number for number, layer in enumerate(whole)}
    parts: dict[tuple[str, str], int] = {}
    for name in names:
        found = expert_name_of(name)
        if found:
            parts.setdefault((found.layer, found.part), len(parts))
    ranks: list[list[tuple[tuple[int, int, int], str, str]]] = [[] for _ in range(ep)]
    for name in names:
        found = expert_name_of(name)
        if found is None:
            continue
        each = whole[found.layer] // ep
        rank, number = divmod(found.number, each)
        order = (layers[found.layer], number, parts[found.layer, found.part])
        ranks[rank].append((order, name, found.numbered(number)))
    return [[(name, local) for _, name, local in sorted(rank)] for rank in ranks]


def holders(ep_rank: int, ep: int, ranks: int, *, data_first: bool) -> list[int]:
    """The data ranks that hold the experts of `ep_rank`, in the order of their partitions."""
    if data_first:
        each = ranks // ep
        return list(range(ep_rank * each, (ep_rank + 1) * each))
    return list(range(ep_rank, ranks, ep))
