"""One file a family: its rules, its sizes, what its configs say, a tiny model. A file that is here is a family of ours.

To add one: `NAME.py` with a `FAMILY` called NAME. Nothing else names it: the table of the guide, `--family` and the
tests go by `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from ckpt_tool.families.base import Family
from ckpt_tool.families.model_class import ModelClass

FAMILIES: tuple[Family, ...] = tuple(import_module(f"{__name__}.{each.name}").FAMILY for each in iter_modules(__path__))
NAMES: tuple[str, ...] = tuple(family.name for family in FAMILIES)
# The classes whose configs have a translation, by model_type
CLASSES: Mapping[str, ModelClass] = {
    each.model_type: each for family in FAMILIES for each in family.classes if each.forms
}


def family_of(model_type: str) -> Family:
    """The family that has the class. Raises KeyError."""
    return {kind: family for family in FAMILIES for kind in family.model_types}[model_type]
