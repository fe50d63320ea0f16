"""The registry of systems and formats, found by their folders: names and descriptions, without loading any format.

    >>> list(entries())[:3]
    ['safetensors', 'torch', 'dcp']
    >>> load("safetensors").holds.dialect
    'hf'

A folder of `systems/` is a system. Its `__init__.py` holds a row, `SYSTEM`, and imports nothing else: its formats, the
dialects (the tensor names that it uses), the conversion passes that only it needs, and the option group that only it
has. A format is a folder of its system; its `format.py` holds the `FORMAT` (`formats.base.Format`).

Nothing else names a system or a format: `--from`, `--to`, `--dialect`, detection, help, the tables of the READMEs and
the guide (`tests/derive_tables.py`) and the conformance tests use these rows. To add one: copy
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
# When a pass runs: before or after tensor names become those of the output; after the states have the form that the
# format stores; or as the last pass.
Place = Literal["before names", "after names", "after fitting", "last"]


def _may_be(tree: Tree) -> bool:
    """Default of `Entry.may_be`: no quick check, so `detect` always runs."""
    return True


class Entry(NamedTuple):
    """A format's row in the lists."""

    name: str
    folder: str  # the format's folder, in that of its system
    order: int  # sort key: formats are listed and tried in ascending order
    # en, zh: a description in Markdown for the tables of formats, in English and Chinese
    en: str
    zh: str
    called: tuple[str, ...] = ()  # other words for it that people type; the error for them suggests the right name
    # A quick check of a tree's file names that avoids importing the format. It may return False only if the format's
    # `detect` would return None.
    may_be: Callable[[Tree], bool] = _may_be


class Dialect(NamedTuple):
    """The tensor names that a system uses, for `--dialect`, and hooks that run when tensors get or lose these names.

    A hook is a `module:function` in the system's folder, "" for none (`of_dialect`).
    """

    name: str
    order: int  # sort key of the lists, ascending
    variant_of: str = ""  # another tool's or another form's version of the names of this dialect; "" for none
    # (config) -> (config, notes): from the keys of the system's config.json to the hub's, and back
    hub_config: str = ""
    own_config: str = ""
    hints: str = ""  # (the hub's config, are names changed?) -> (hints for the system's writers, notes)
    # (wanted, chosen, format) -> (the output's extras, with what the system itself would add to them, notes)
    extras: str = ""
    leaving: str = ""  # (chosen, its FamilyMatch) -> both, adjusted for a conversion away from these names
    missing: str = ""  # (names) -> what to try where tensors of a whole model are missing, "" for nothing in particular


class SystemPass(NamedTuple):
    """A step of a conversion that one system needs (`conversion.passes`)."""

    name: str
    purpose: str  # in words, with the options that it implements
    # Does the pass apply to the chosen tensors in this conversion? False means that its result would equal its input.
    asked: Callable[[Chosen, Conversion], bool]
    function: str  # `module:function`, the module in the system's folder
    place: Place  # when it runs


class System(NamedTuple):
    """One training or inference system: its formats, dialects, passes and hooks (see the module's docstring)."""

    formats: tuple[Entry, ...] = ()
    dialects: tuple[Dialect, ...] = ()
    passes: tuple[SystemPass, ...] = ()
    options: str = ""  # the class of the option group in `options.py` of the system's folder, "" for none
    # Each of the following is a `module:function` in the system's folder, "" for none (`offered`).
    # (opened) -> ModelConfig | None: the model's config from the system's own files, for a source without a
    # config.json
    config_reader: str = ""
    # (opened, config.json or None, family or None) -> ModelConfig | None: the model's config from the files of a
    # training job, which takes precedence over a config.json
    job_config: str = ""
    # (chosen) -> sources.source_names.SourceNames | None: the naming scheme of the tensors, where it depends on the
    # tool that saved the source and cannot be concluded from the format
    source_names: str = ""
    tokenizer: str = ""  # (opened) -> (name -> bytes, notes): the hub's tokenizer files, rebuilt from headers
    # (parts, the run's settings) -> why the adapter, as its ranks saved it, cannot be one of unsharded weights
    adapter_faults: str = ""
    # (run, step, catalog, reading) -> (catalog, does it hold the state?): a trainer's state that is stored next to the
    # step folders of its run
    run_state: str = ""
    newest_step: str = ""  # (run, steps) -> the step from which the trainer resumes, "" for none


@cache
def systems() -> Mapping[str, System]:
    """The row of each system by its folder."""
    root = os.path.join(os.path.dirname(os.path.dirname(__file__)), "systems")
    folders = sorted(name for name in os.listdir(root) if os.path.isfile(os.path.join(root, name, "__init__.py")))
    return {folder: import_module(f"{SYSTEMS}.{folder}").SYSTEM for folder in folders}


@cache
def _found() -> dict[str, tuple[Entry, str]]:
    """Format name -> (its entry, its package), sorted by `Entry.order`."""
    entries = [
        (entry, f"{SYSTEMS}.{folder}.{entry.folder}")
        for folder, system in systems().items()
        for entry in system.formats
    ]
    return {entry.name: (entry, package) for entry, package in sorted(entries, key=lambda pair: pair[0].order)}


@cache
def entries() -> Mapping[str, Entry]:
    """Every format's entry by its name, sorted by `Entry.order`."""
    return {name: entry for name, (entry, _) in _found().items()}


@cache
def dialects() -> Mapping[str, Dialect]:
    """Every system's dialects by name, sorted by `Dialect.order`."""
    rows = [dialect for system in systems().values() for dialect in system.dialects]
    return {dialect.name: dialect for dialect in sorted(rows, key=lambda dialect: dialect.order)}


@cache
def option_groups() -> tuple[type, ...]:
    """The option groups that belong to one system each, in the order of the systems' names."""
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
    """The hooks of this name that the systems define (`System`)."""
    for folder, system in systems().items():
        function = getattr(system, question)
        if function:
            yield _function(folder, function)


def of_dialect(dialect: str, question: DialectQuestion) -> Callable[..., Any] | None:
    """The hook of this name that a dialect's system defines (`Dialect`), None if it defines none.

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
    """The passes of all systems that run at this point, each with the package that contains the pass' function."""
    for folder, system in systems().items():
        yield from ((f"systems.{folder}", each) for each in system.passes if each.place == place)


def load(name: str) -> Format:
    """Import and return the format of that name. Raises KeyError."""
    fmt: Format = import_module(f"{_found()[name][1]}.format").FORMAT
    return fmt
