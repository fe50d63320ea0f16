"""Names of DeepSpeed's parameters: experts inside a rank and in the whole model, layers of a pipeline and their files.

A rank counts its experts from 0; the model counts all of them. With 4 experts on ep 2:

    ...deepspeed_experts.1.w1.weight on expert rank 1  ->  ...deepspeed_experts.3.w1.weight     (1 * 2 + 1)

The layer files of a PipelineModule hold local names, the optimizer's tables hold global ones:

    layer_03-model_states.pt  {"norm.weight": ...}  ->  3.norm.weight
    layer_00-model_states.pt  {"word.weight": ...}  ->  tied_modules.embed.word.weight

A tied layer is saved once, by the first stage that has it; its parameters are named `tied_modules.KEY.NAME` in the
tables of every stage that uses it. The file does not state its key: it is the one whose names and shapes the file has.

Source: DeepSpeed 0.19.8 `runtime/engine.py` (`_save_moe_checkpoint`), `moe/utils.py` (the groups `ep_size_N`),
`runtime/pipe/module.py` (`save_state_dict`, `ckpt_layer_path`, `_build`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckpt_tool.core.bounds import numeral

MARK = ".deepspeed_moe.experts.deepspeed_experts."
_EXPERT = re.compile(r"^(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,6})(\..+)$")
TIED = "tied_modules."
Shape = tuple[int, ...]


class ZeroExpertName(NamedTuple):
    """The name of an expert's parameter, split: `layer` + `number` + `part` is the name."""

    layer: str  # `moe.deepspeed_moe.experts.deepspeed_experts.`, part: `.w1.weight`
    number: int
    part: str


def expert_name_of(name: str) -> ZeroExpertName | None:
    """Return the parts of the name of an expert's parameter, None for any other parameter."""
    match = _EXPERT.match(name) if MARK in name else None
    return ZeroExpertName(match[1], int(match[2]), match[3]) if match else None


def counts(names: Iterable[str]) -> dict[str, int]:
    """Return {MoE layer: number of its different experts among `names`}, in the order of first appearance."""
    seen: dict[str, set[int]] = {}
    for name in names:
        if found := expert_name_of(name):
            seen.setdefault(found.layer, set()).add(found.number)
    return {layer: len(numbers) for layer, numbers in seen.items()}


def global_names(names: Iterable[str], expert_rank: int) -> list[str]:
    """Return the whole model's names of `expert_rank`'s parameters.

    `names` are a rank's own names, which are the same on every expert rank: each counts its experts from 0.
    """
    first_names = list(names)
    if not expert_rank:
        return first_names

    experts_of_rank = counts(first_names)
    renamed = []
    for name in first_names:
        expert = expert_name_of(name)
        if expert is not None:
            number = expert_rank * experts_of_rank[expert.layer] + expert.number
            name = f"{expert.layer}{number}{expert.part}"
        renamed.append(name)
    return renamed


def select_first_rank(names: Iterable[str], ep: int) -> list[str]:
    """Return the names of expert rank 0's experts in the order of its module: layer by layer, expert by expert.

    Args:
        names: of a parameter group, with all experts of the whole model.
        ep: expert ranks.
    """
    experts_per_rank = {layer: count // ep for layer, count in counts(names).items()}
    layer_order = {layer: i for i, layer in enumerate(experts_per_rank)}
    part_order: dict[tuple[str, str], int] = {}  # by layer and part, in order of first sight

    keyed: list[tuple[tuple[int, int, int], str]] = []
    for name in names:
        expert = expert_name_of(name)
        if expert is None:
            continue
        part = part_order.setdefault((expert.layer, expert.part), len(part_order))
        if expert.number < experts_per_rank[expert.layer]:
            keyed.append(((layer_order[expert.layer], expert.number, part), name))
    return [name for _, name in sorted(keyed)]


# -- pipelines ---------------------------------------------------------------------------------------------------------


def tied_keys(shapes: Mapping[str, Shape], shared: Iterable[str]) -> dict[str, dict[str, Shape | None]]:
    """Return {tied key: {local name: shape}}, in the order of first appearance.

    The shape is None for a parameter that the optimizer does not have.
    """
    out: dict[str, dict[str, Shape | None]] = {}
    for name in (*shapes, *shared):
        if name.startswith(TIED):
            key, _, local = name[len(TIED) :].partition(".")
            out.setdefault(key, {}).setdefault(local, shapes.get(name))
    return out


def key_of_layer(
    index: int, local: Mapping[str, Shape], known: Mapping[str, Shape], tied: Mapping[str, Mapping[str, Shape | None]]
) -> str | None:
    """Return the tied key whose parameters the file of layer `index` has, None if the layer is not tied.

    Args:
        index: of the layer.
        local: the file's names and shapes.
        known: the shapes of all global names.
        tied: the keys that are not yet assigned to a file.
    """
    if any(f"{index}.{name}" in known for name in local):
        return None
    for key, names in tied.items():
        wanted = [name for name, shape in names.items() if shape is not None]
        if wanted and all(name in local and local[name] == names[name] for name in wanted):
            return key
    return None


def global_name(index: int, key: str | None, local: str) -> str:
    """Return the global name of a parameter of layer `index`, or of the tied layer `key`."""
    return f"{index}.{local}" if key is None else f"{TIED}{key}.{local}"


def layer_and_local(name: str, tied: Mapping[str, int]) -> tuple[int, str]:
    """Return (layer in whose file a parameter is stored, its name there): the inverse of `global_name`.

    tied: key -> layer.
    """
    if name.startswith(TIED):
        key, _, local = name[len(TIED) :].partition(".")
        return tied.get(key, 0), local
    index, _, local = name.partition(".")
    return int(index) if numeral(index) else 0, local
