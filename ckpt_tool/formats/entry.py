"""The formats, found by their folders: what lists say of each before any is loaded.

    >>> list(entries())[:3]
    ['safetensors', 'torch', 'dcp']
    >>> load("safetensors").holds.dialect
    'hf'

A folder `systems/SYSTEM/FORMAT` with a `format.py` is a format. Its `__init__.py` holds its `ENTRY` and imports nothing
else, its `format.py` the `FORMAT` (`formats.base.Format`). Nothing else names it: `--from` and `--to`, detection, the
tables of the READMEs and the guide (`tests/derive_tables.py`) and the conformance tests go by what lies there. To add
one: copy `tests/formats/template_format`, and put fixtures under `fixtures/NAME/`.

Cost: 1.5 ms for the entries of thirteen formats; those that read pickles take 20 ms each to load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ckpt_tool.formats.base import Format
    from ckpt_tool.storage.source import Tree


def _may_be(tree: Tree) -> bool:
    return True


class Entry(NamedTuple):
    """A format's row in the lists."""

    name: str
    order: int  # its place in them, by number
    # en, zh: what it is, for the tables of formats, as Markdown
    en: str
    zh: str
    called: tuple[str, ...] = ()  # other words for it that people type; a hint leads from them to the name
    # a quick look at the names of a tree, False only where the format's `detect` would give None; it spares loading the
    # format
    may_be: Callable[[Tree], bool] = _may_be


@cache
def _found() -> dict[str, tuple[Entry, str]]:
    """name -> (its entry, its package), in the entries' order."""
    root = os.path.join(os.path.dirname(os.path.dirname(__file__)), "systems")
    packages: list[str] = []
    for system in os.listdir(root):
        folder = os.path.join(root, system)
        if not os.path.isdir(folder):
            continue
        with_format = [name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name, "format.py"))]
        packages += [f"ckpt_tool.systems.{system}.{name}" for name in with_format]

    found: list[tuple[Entry, str]] = [(import_module(package).ENTRY, package) for package in packages]
    return {entry.name: (entry, package) for entry, package in sorted(found, key=lambda pair: pair[0][1::-1])}


@cache
def entries() -> Mapping[str, Entry]:
    """Every format's entry by its name, in their order."""
    return {name: entry for name, (entry, _) in _found().items()}


def load(name: str) -> Format:
    """The format of that name. Raises KeyError."""
    fmt: Format = import_module(f"{_found()[name][1]}.format").FORMAT
    return fmt
