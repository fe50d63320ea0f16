"""The systems and their formats, found by their folders: what lists say of each before any is loaded.

    >>> list(entries())[:3]
    ['safetensors', 'torch', 'dcp']
    >>> load("safetensors").holds.dialect
    'hf'

A folder of `systems/` is a system. Its `__init__.py` holds a row, `SYSTEM`, and imports nothing else: its formats, the
dialects (the names of tensors that are at home there), the passes of a conversion that it alone needs, and the group of
options that it alone has. A format is a folder of its system; its `format.py` holds the `FORMAT`
(`formats.base.Format`).

Nothing else names a system or a format: `--from`, `--to`, `--dialect`, detection, help, the tables of the READMEs and
the guide (`tests/derive_tables.py`) and the conformance tests go by these rows. To add one: copy
`tests/formats/template_system`, and put fixtures under `fixtures/NAME/`.

Cost: 2 ms for the rows of ten systems; formats that read pickles take 20 ms each to load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from ckpt_tool.formats.base import Format
    from ckpt_tool.sources.chosen import Chosen, Conversion
    from ckpt_tool.storage.source import Tree

SYSTEMS = "ckpt_tool.systems"
# before or after names become those of the output; after states are as the format keeps them; last of all
Place = Literal["before names", "after names", "after fitting", "last"]


def _may_be(tree: Tree) -> bool:
    return True


class Entry(NamedTuple):
    """A format's row in the lists."""

    name: str
    folder: str  # the format's folder, in that of its system
    order: int  # its place in the lists, by number
    # en, zh: what it is, for the tables of formats, as Markdown
    en: str
    zh: str
    called: tuple[str, ...] = ()  # other words for it that people type; a hint leads from them to the name
    # a quick look at the names of a tree, False only where the format's `detect` would give None; it spares loading the
    # format
    may_be: Callable[[Tree], bool] = _may_be


class Dialect(NamedTuple):
    """Names of tensors that are at home in a system, for `--dialect`, and what the system has to say where tensors get
    these names or lose them: each a `module:function` in the system's folder, "" for nothing (`of_dialect`)."""

    name: str
    order: int  # its place in the lists, by number
    variant_of: str = ""  # another tool's or another form's version of the names of this dialect; "" for none
    # (config) -> (config, notes): from the words of the system's config.json to the hub's, and back
    hub_config: str = ""
    own_config: str = ""
    hints: str = ""  # (the hub's config, are names changed?) -> (hints for the system's writers, notes)
    extras: str = ""  # (wanted, chosen, format) -> (the output's extras with what the system's own would have, notes)
    leaving: str = ""  # (chosen, its FamilyMatch) -> the same two as they are where the names become others
    missing: str = ""  # (names) -> what to try where tensors of a whole model are missing, "" for nothing in particular


class SystemPass(NamedTuple):
    """A step of a conversion that one system needs (`conversion.passes`)."""

    name: str
    purpose: str  # in words, with the options that it carries out
    # has it anything to do with what was chosen, in this conversion? False means that its result would be its input
    asked: Callable[[Chosen, Conversion], bool]
    function: str  # `module:function`, the module in the system's folder
    place: Place  # when it runs


class System(NamedTuple):
    """A system's row. See the module."""

    formats: tuple[Entry, ...] = ()
    dialects: tuple[Dialect, ...] = ()
    passes: tuple[SystemPass, ...] = ()
    options: str = ""  # the class of the option group in `options.py` of the system's folder, "" for none
    # Each of the following is a `module:function` in the system's folder, "" for none (`offered`).
    # (opened) -> ModelConfig | None: what the system's files state of the model in words of their own, for a source
    # without a config.json
    config_reader: str = ""
    # (opened, config.json or None, family or None) -> ModelConfig | None: what a job says of its model, which counts
    # more than a config.json
    job_config: str = ""
    # (chosen) -> sources.source_names.SourceNames | None: whose names they are where a tool saved the source that
    # its format does not tell
    source_names: str = ""
    tokenizer: str = ""  # (opened) -> (name -> bytes, notes): the hub's files of the tokenizer that headers state
    # (parts, what the run says) -> why an adapter can't be one of whole weights, as its ranks have saved it
    adapter_faults: str = ""
    # a trainer's state next to the steps of its run: (run, step, catalog, reading) -> (catalog, does it hold the
    # state?), and (run, steps) -> the step that it goes on from, "" for none
    run_state: str = ""
    newest_step: str = ""


@cache
def systems() -> Mapping[str, System]:
    """The row of each system by its folder."""
    root = os.path.join(os.path.dirname(os.path.dirname(__file__)), "systems")
    folders = sorted(name for name in os.listdir(root) if os.path.isfile(os.path.join(root, name, "__init__.py")))
    return {folder: import_module(f"{SYSTEMS}.{folder}").SYSTEM for folder in folders}


@cache
def _found() -> dict[str, tuple[Entry, str]]:
    """name -> (its entry, its package), in the entries' order."""
    entries = [
        (entry, f"{SYSTEMS}.{folder}.{entry.folder}")
        for folder, system in systems().items()
        for entry in system.formats
    ]
    return {entry.name: (entry, package) for entry, package in sorted(entries, key=lambda pair: pair[0].order)}


@cache
def entries() -> Mapping[str, Entry]:
    """Every format's entry by its name, in their order."""
    return {name: entry for name, (entry, _) in _found().items()}


@cache
def dialects() -> Mapping[str, Dialect]:
    """Every dialect of a system by its name, in their order."""
    rows = [dialect for system in systems().values() for dialect in system.dialects]
    return {dialect.name: dialect for dialect in sorted(rows, key=lambda dialect: dialect.order)}


@cache
def option_groups() -> tuple[type, ...]:
    """The groups of the options that one system has, by the names of the systems."""
    return tuple(
        getattr(import_module(f"{SYSTEMS}.{folder}.options"), system.options)
        for folder, system in systems().items()
        if system.options
    )


Question = Literal[
    "config_reader", "job_config", "source_names", "tokenizer", "adapter_faults", "run_state", "newest_step"
]
DialectQuestion = Literal["hub_config", "own_config", "hints", "extras", "leaving", "missing"]


def offered(question: Question) -> Iterator[Callable[..., Any]]:
    """The function by which each system answers a question, of those that do (`System`)."""
    for folder, system in systems().items():
        function = getattr(system, question)
        if function:
            yield _function(folder, function)


def of_dialect(dialect: str, question: DialectQuestion) -> Callable[..., Any] | None:
    """The function by which the system of a dialect answers a question (`Dialect`), None where it does not.

    >>> of_dialect("megatron-swift", "leaving").__name__, of_dialect("hf", "leaving")
    ('leave_names', None)
    """
    for folder, system in systems().items():
        for row in system.dialects:
            is_meant = dialect == row.name or dialect.startswith(f"{row.name}-")
            function = getattr(row, question)
            if is_meant and function:
                return _function(folder, function)
    return None


def _function(folder: str, function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"{SYSTEMS}.{folder}.{module}"), name)
    return found


def passes_at(place: Place) -> Iterator[tuple[str, SystemPass]]:
    """Each system's passes of one place, with the module that the pass' function is below."""
    for folder, system in systems().items():
        yield from ((f"systems.{folder}", each) for each in system.passes if each.place == place)


def load(name: str) -> Format:
    """The format of that name. Raises KeyError."""
    fmt: Format = import_module(f"{_found()[name][1]}.format").FORMAT
    return fmt
