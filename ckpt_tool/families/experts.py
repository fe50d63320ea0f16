"""Experts: in which layouts the hub's files of a family may have them, and under which dialect each is.

    expert_layouts(QWEN3_MOE)     {"split": "hf", "fused": "hf-fused"}     released one by one, fused in memory
    expert_layouts(PHIMOE)        {"split": "hf", "fused": "hf-5"}         the same, with other names in memory
    expert_layouts(QWEN3_VL_MOE)  {"fused": "hf", "split": "hf-split"}     released fused
    expert_layouts(QWEN3)         {}                                       no experts

It goes by the family's tables alone: experts one by one have their number in the name, fused ones a dim. The decoder's
layers `{i}` say which layout is released; of several dialects with a layout the first counts that has no expert
otherwise, in layers of multi-token prediction neither (Qwen3.6 has those fused too, Qwen3.5 one by one).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ckpt_tool.families.base import HUB, MEMORY, Family
from ckpt_tool.families.table import Table, form_of

SPLIT = "split"
FUSED = "fused"
LAYOUTS: Mapping[str, str] = {SPLIT: "hf-split", FUSED: "hf-fused"}  # layout -> its dialect where it has a name for it
# A tensor of one expert, and one of all of a layer's, in the hub's names and in those of trainers
_APART = re.compile(r"(.*\bexperts)\.\d+\..+")
_FUSED_NAME = re.compile(r"(.*\bexperts)\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3|w13|w12)(?:[._].*)?")
_NUMBERED = re.compile(r"experts\.\{(\w+)\}")


def expert_layouts(family: Family) -> dict[str, str]:
    """{layout: its dialect}, the released one first; {} for a family without experts."""
    released = next(iter(_layouts(family, HUB)[0]), None)
    if released is None:
        return {}
    layouts = dict[str, str]()
    for layout in sorted(LAYOUTS, key=lambda each: each != released):
        hub_dialects = [name for name in family.dialects if name.startswith("hf")]
        preferred = [name for name in (HUB, LAYOUTS[layout], MEMORY) if name in (HUB, *hub_dialects)]
        kinds = {name: _layouts(family, name) for name in dict.fromkeys((*preferred, *hub_dialects))}
        fitting = [name for name, (decoder, _) in kinds.items() if decoder == {layout}]
        pure = [name for name in fitting if kinds[name][1] == {layout}]
        if fitting:
            layouts[layout] = (*pure, *fitting)[0]
    return layouts


def mixed_experts(names: Iterable[str]) -> list[str]:
    """The modules that have their experts both one by one and in one tensor, a layer's number as `%d`.

    >>> mixed_experts(["model.layers.0.mlp.experts.1.up_proj.weight", "model.layers.1.mlp.experts.gate_up_proj"])
    ['model.layers.%d.mlp.experts']
    """
    unfused_forms = set[str]()
    fused = dict[str, None]()
    for name in names:
        if match := _APART.fullmatch(name):
            unfused_forms.add(form_of(match[1])[0])
        elif match := _FUSED_NAME.fullmatch(name):
            fused[form_of(match[1])[0]] = None
    return [front for front in fused if front in unfused_forms]


def memory_dialect(family: Family) -> str:
    """The dialect that transformers 5 has in memory, whatever it reads or saves: by name where names differ, else that
    with fused experts, where the family has any.

    >>> from ckpt_tool.families.registry import by_name
    >>> [memory_dialect(by_name(name)) for name in ("llama", "qwen3_moe", "phimoe", "gpt_oss")]
    ['hf', 'hf-fused', 'hf-5', 'hf']
    """
    return MEMORY if MEMORY in family.dialects else expert_layouts(family).get(FUSED, HUB)


def _layouts(family: Family, dialect: str) -> tuple[set[str], set[str]]:
    """Layouts in which the dialect has experts of the decoder's layers, and all experts: by the first rule of each of the
    hub's tensors, the one that is written."""
    table = family.table(dialect)
    axes = _expert_axes(family.table(HUB)) | _expert_axes(table)
    decoder = set[str]()
    layouts = set[str]()
    for number in {spots[0].rule for spots in table.right.values()}:
        for term in (term for term in table.rules[number].left if term.name is not None):
            numbered = axes.intersection(term.axes)
            if numbered or (axes.intersection(term.pattern.axes) and len(term.pattern.dims) > 2):
                layout = SPLIT if numbered else FUSED
                layouts.add(layout)
                decoder |= {layout} if "i" in term.axes else set()
    return decoder, layouts


def _expert_axes(table: Table) -> set[str]:
    """The axes that count experts: `e`, and those whose number follows `experts` in a name."""
    names = (term.name.text for rule in table.rules for term in (*rule.left, *rule.right) if term.name is not None)
    return {"e", *(axis for name in names for axis in _NUMBERED.findall(name))}
