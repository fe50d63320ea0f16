"""One file a family: its rules, its sizes, what its configs say, a tiny model. A file that is here is a family of ours.

To add one: `NAME.py` with a `FAMILY` called NAME. Nothing else names it: the table of the guide, `--family` and the
tests go by `FAMILIES`. A family is loaded when it is looked at: whoever knows a `model_type` loads one file, found by
its name or because it states the word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import overload

from ckpt_tool.families.base import Family
from ckpt_tool.families.model_class import ENDS, ModelClass

NAMES: tuple[str, ...] = tuple(each.name for each in iter_modules(__path__))


@cache
def load(name: str) -> Family:
    """The family of that name. Raises ModuleNotFoundError where no file has it."""
    family: Family = import_module(f"{__name__}.{name}").FAMILY
    return family


class _Families(Sequence[Family]):
    """Every family in the order of names."""

    def __len__(self) -> int:
        return len(NAMES)

    @overload
    def __getitem__(self, at: int) -> Family: ...
    @overload
    def __getitem__(self, at: slice) -> list[Family]: ...
    def __getitem__(self, at: int | slice) -> Family | list[Family]:
        return [load(name) for name in NAMES[at]] if isinstance(at, slice) else load(NAMES[at])


class _Classes(Mapping[str, ModelClass]):
    """The classes whose configs have a translation, by model_type."""

    def __getitem__(self, kind: str) -> ModelClass:
        for each in family_of(kind).classes:
            if each.model_type == kind and each.forms:
                return each
        raise KeyError(kind)

    def __contains__(self, kind: object) -> bool:
        family = known_family(kind)
        return family is not None and any(each.model_type == kind and each.forms for each in family.classes)

    def __iter__(self) -> Iterator[str]:
        return (each.model_type for family in FAMILIES for each in family.classes if each.forms)

    def __len__(self) -> int:
        return sum(1 for _ in self)


FAMILIES: Sequence[Family] = _Families()
CLASSES: Mapping[str, ModelClass] = _Classes()


def family_of(model_type: str) -> Family:
    """The family that has the class. Raises KeyError."""
    family = known_family(model_type)
    if family is None:
        raise KeyError(model_type)
    return family


def language_classes(family: Family) -> tuple[ModelClass, ...]:
    """The classes that its language model may be, where it is a part: its own, and those of other families."""
    own = (each for each in family.classes if each.part and each.forms)
    others = (
        replace(CLASSES[kind], part=True, megatron={**CLASSES[kind].megatron, **otherwise})
        for kind, otherwise in family.parts.items()
    )
    return (*own, *others)


def known_family(model_type: object) -> Family | None:
    """The family that has a class of that model_type, None where none has, or it is no word."""
    return _known_family(model_type) if isinstance(model_type, str) else None


@lru_cache(maxsize=256)
def _known_family(model_type: str) -> Family | None:
    for family in _stating(f'"{model_type}"', model_type):
        if model_type in family.model_types:
            return family
    return None


@lru_cache(maxsize=256)
def family_of_class(architecture: str) -> Family | None:
    """The family that has a class of that name (`LlamaForCausalLM`, `LlamaModel`), None where none has."""
    stem = architecture
    for end in (*ENDS, "Model"):
        stem = stem.removesuffix(end)
    for family in _stating(f'"{stem}'):
        if any(architecture in known.architectures for known in family.classes):
            return family
    return None


def _stating(word: str, name: str = "") -> Iterator[Family]:
    """The families whose files have the word, that of the name first: no more are loaded than are looked at."""
    if name in NAMES:
        yield load(name)
    for each in NAMES:
        if each != name and word in _text(each, word):
            yield load(each)


def _text(name: str, otherwise: str) -> str:
    """The family's file, or `otherwise` where only its bytecode is there."""
    try:
        return Path(__path__[0], f"{name}.py").read_text(encoding="utf-8")
    except OSError:
        return otherwise
