"""Which tests run when: some of many like cases, and the quick tier, which needs neither torch nor patience.

Like cases are those of one test function. Of them the ones are taken whose names have the lowest CRC-32, as many as
wanted: the choice does not depend on the order of the cases, and there is always one.

`python -m pytest -m quick` takes one of ONE_OF like cases of every test that is not marked slow, first, peers or crash,
lies in none of the SLOW_PLACES, and imports nothing but Python, the tool, its dependencies and the extra `quick`; of
what a file then has, one of ONE_OF_A_FILE. What a module imports is read from its source: a module that needs more is
not collected, and a test that imports more inside, or uses a function or fixture of its module that does, is left out.
"""

from __future__ import annotations

import ast
import math
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TESTS = Path(__file__).resolve().parent
ONE_OF = 32
ONE_OF_A_FILE = 3
FEW = 4  # like cases that all run by default; of more, half
MANY = 48  # of more like cases, a third: what the rest would find, the nightly run finds
# those that train, measure, kill or compile, those that read all sources for seconds, one whose cases take seconds
# to find in all fixtures, and one that starts a browser
SLOW_PLACES = frozenset(
    """
    acceptance bench compiled faults guide harness kernels packaging test_error_codes.py test_hints.py test_numbers.py
    test_plain_words.py test_readable.py report/test_in_a_browser.py
    """.split()
)

Case = TypeVar("Case")


def chosen(cases: Iterable[tuple[str, Case]], one_of: int, *, like: str = "[") -> list[Case]:
    """One of so many, rounded up, of the cases of each test. A case comes with its id, FILE::TEST[CASE]. like: what
    ends the part of the id that like cases share; with "::" they are all of a file."""
    tests: dict[str, list[tuple[int, str, Case]]] = defaultdict(list)
    for node, case in cases:
        own = node.rpartition("/")[2].partition("::")[2]  # a test that moves to another file keeps its choice
        tests[node.partition(like)[0]].append((zlib.crc32(own.encode()), own, case))
    taken = (sorted(like, key=lambda each: each[:2])[: math.ceil(len(like) / one_of)] for like in tests.values())
    return [case for like in taken for _, _, case in like]


# -- what needs more than the tool itself ------------------------------------------------------------------------------


def is_quick_module(path: Path) -> bool:
    """Whether the quick tier collects this file or folder of tests/; of a folder its conftest.py decides."""
    if path.is_file() and path.suffix != ".py":
        return False  # data
    read = path / "conftest.py" if path.is_dir() else path
    place = path.relative_to(TESTS)
    fast = not SLOW_PLACES.intersection((*place.parts[:1], place.as_posix()))
    return fast and not (read.exists() and "" in needing_more(read))


@cache
def needing_more(path: Path) -> frozenset[str]:
    """The functions of a module that need what the quick tier lacks; "" stands for the module itself."""
    source = path.read_text(encoding="utf-8")
    if not _may_need_more(source, path.stem):
        return frozenset()
    tree = ast.parse(source)
    functions: list[tuple[str, list[ast.AST]]] = []  # each with all nodes inside
    outside = _part(tree, functions)
    found = {name for name, inside in functions if any(map(_is_more, _imported(inside)))}
    if any(map(_is_more, (*_imported(outside), *_skipped_without(outside)))):
        found.add("")
    if not found:
        return frozenset()
    uses = {
        name: {node.id if isinstance(node, ast.Name) else node.arg for node in inside if isinstance(node, _USES)}
        for name, inside in functions
    }
    while more := {name for name, used in uses.items() if name not in found and used & found}:
        found |= more
    return frozenset(found)


_IMPORT_LINE = re.compile(
    r"^[ \t]*(?:import[ \t]+([^\n#]+)|from[ \t]+([\w.]+)[ \t]+import\b[ \t]*(\([^)]*\)|[^\n]*))", re.MULTILINE
)


def _may_need_more(source: str, own: str) -> bool:
    """Whether a text has lines that could import what the quick tier lacks. Most modules have none, and reading lines
    takes a twentieth of the time of a syntax tree. own: the module's name; a maker of fixtures can have the name of a
    library that it imports."""
    if "importorskip" in source:
        return True
    for match in _IMPORT_LINE.finditer(source):
        if "torch" in match[0] or "harness" in match[0]:
            return True
        modules = [name.split()[0].partition(".")[0] for name in (match[1] or match[2]).split(",") if name.strip()]
        if any(module == own or (module not in _light() and _is_more(module)) for module in modules):
            return True
    return False


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_USES = (ast.Name, ast.arg)
_LOOKED_AT = (ast.Import, ast.ImportFrom, ast.Call, *_USES)


def _part(node: ast.AST, functions: list[tuple[str, list[ast.AST]]]) -> list[ast.AST]:
    """What lies in a node, but in no function inside. functions: grows by those, each with all that lies in it."""
    own: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            within: list[tuple[str, list[ast.AST]]] = []
            inside = _part(child, within)
            functions += [(child.name, sum((nodes for _, nodes in within), inside)), *within]
        else:
            own += [child] if isinstance(child, _LOOKED_AT) else []
            own += _part(child, functions)
    return own


def _is_more(module: str) -> bool:
    top, *below = module.split(".")
    if top in _light():
        return "torch" in below or "harness" in below  # safetensors.torch, ckpt_tool.harness
    return top not in _helpers() or bool(needing_more(_helpers()[top]))


@cache
def _light() -> frozenset[str]:
    """Python's modules, the tool, its dependencies, and what runs the quick tier."""
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["quick"]]
    return frozenset({*sys.stdlib_module_names, "ckpt_tool", *(re.split(r"[^\w-]", name)[0] for name in named)})


@cache
def _helpers() -> dict[str, Path]:
    """What tests import from beside them, by name."""
    folders = (TESTS, TESTS.parent / "fixtures" / "make")
    return {path.stem: path for folder in folders for path in folder.rglob("*.py")}


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _skipped_without(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
            yield from (str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant))
