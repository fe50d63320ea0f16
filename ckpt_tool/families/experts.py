"""Experts: in which layouts the hub's files of a family may have them, and under which dialect each is.

    expert_layouts(QWEN3_MOE)     {"split": "hf", "fused": "hf-fused"}     released one by one, fused in memory
    expert_layouts(QWEN3_VL_MOE)  {"fused": "hf", "split": "hf-split"}     released fused
    expert_layouts(QWEN3)         {}                                       no experts

It goes by the family's tables alone, of the decoder's layers `{i}`: experts one by one have their number `{e}` in the
name, fused ones a dim `e`. Layers of multi-token prediction may have theirs otherwise (Qwen3.5).
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tool.families.base import HUB, Family

LAYOUTS: Mapping[str, str] = {"split": "hf-split", "fused": "hf-fused"}  # layout -> its dialect where it is not `hf`


def expert_layouts(family: Family) -> dict[str, str]:
    """{layout: its dialect}, the released one first; {} for a family without experts."""
    terms = [term for rule in family.table(HUB).rules for term in rule.left]
    decoder = [(term.name.axes, term.pattern) for term in terms if term.name is not None and "i" in term.name.axes]
    split = any("e" in numbers for numbers, _ in decoder)
    fused = any("e" in pattern.axes and len(pattern.dims) > 2 for _, pattern in decoder)
    if not split and not fused:
        return {}
    released = "split" if split else "fused"
    others = {layout: name for layout, name in LAYOUTS.items() if layout != released and name in family.dialects}
    return {released: HUB, **others}
