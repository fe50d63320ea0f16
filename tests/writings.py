"""A Writing from the fields of its own group and of the systems' groups, by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ckpt_tool.formats.entry import option_groups
from ckpt_tool.options.writing import Writing


def writing_of(**given: Any) -> Writing:
    """`writing_of(to="megatron", spec="te")`: what is not given has its default."""
    values = []
    for group in option_groups():
        names = {each.name for each in fields(group)} & given.keys()
        values.append(group(**{name: given.pop(name) for name in names}))
    return Writing(of_systems=tuple(values), **given)
