"""The package runs on the oldest Python that pyproject.toml states, whichever one runs this test: ruff finds newer
syntax, and here are what else broke on Python 3.10."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

from syntax import nodes_of, tree_of

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "ckpt_tool").rglob("*.py"))
PROJECT = (ROOT / "pyproject.toml").read_text()

# Module -> what it has from Python 3.11, 3.12 or 3.13 on. A module that is newer as a whole: *.
NEWER = {
    "tomllib": "*",
    "typing": "Self NotRequired Required Never LiteralString Unpack TypeVarTuple assert_never assert_type reveal_type "
    "get_overloads dataclass_transform override TypeAliasType TypeIs ReadOnly",
    "datetime": "UTC",
    "enum": "StrEnum ReprEnum EnumType verify member nonmember global_enum",
    "contextlib": "chdir",
    "asyncio": "TaskGroup Runner timeout Barrier",
    "hashlib": "file_digest",
    "itertools": "batched",
    "math": "cbrt exp2 sumprod fma",
    "operator": "call",
    "builtins": "ExceptionGroup BaseExceptionGroup PythonFinalizationError",
    "warnings": "deprecated",
    "copy": "replace",
    "locale": "getencoding",
}
POSSESSIVE = re.compile(r"(?<!\\)(?:[*+?]|\{[0-9,]+\})\+(?![^\[]*\])|\(\?>")
GENERIC_TUPLES = {"NamedTuple", "TypedDict"}


def newer_names(source: str) -> Iterator[str]:
    """Line and name of everything in a module that Python 3.10 does not have, outside `if sys.version_info`."""
    names = {module: set(words.split()) for module, words in NEWER.items()}
    guarded = {
        id(inner)
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.If) and "version_info" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in nodes_of(source):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            yield from (f"{node.lineno}: {alias.name}" for alias in node.names if names.get(alias.name) == {"*"})
        elif isinstance(node, ast.ImportFrom):
            newer = names.get(node.module or "", set())
            yield from (f"{node.lineno}: {alias.name}" for alias in node.names if newer & {"*", alias.name})
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in names.get(node.value.id, set()):
                yield f"{node.lineno}: {node.value.id}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id in names["builtins"]:
            yield f"{node.lineno}: {node.id}"
        elif isinstance(node, getattr(ast, "TryStar", ())):
            yield f"{node.lineno}: except*"
        elif isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
            if bases & GENERIC_TUPLES and "Generic" in bases:
                yield f"{node.lineno}: a generic NamedTuple or TypedDict"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
            patterns = [each for each in ast.walk(node) if isinstance(each, ast.Constant)]
            texts = [str(each.value) for each in patterns if isinstance(each.value, str | bytes)]
            yield from (f"{node.lineno}: possessive {text!r}" for text in texts if POSSESSIVE.search(text))


def test_nothing_needs_a_newer_python():
    found = {path.relative_to(ROOT).as_posix(): [*newer_names(path.read_text())] for path in FILES}
    assert not {file: names for file, names in found.items() if names}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the planted modules are of a newer Python")
@pytest.mark.parametrize(
    "line",
    [
        "import tomllib",
        "from typing import Any, Self",
        "from datetime import UTC",
        "when = datetime.UTC",
        "raise ExceptionGroup('a', [])",
        "class Pair(NamedTuple, Generic[T]): ...",
        "import re\nP = re.compile(rb'[a-z]*+x')",
        "import re\nP = re.compile('(?>ab)x')",
        "try: ...\nexcept* ValueError: ...",
    ],
)
def test_what_is_newer_is_found(line: str):
    assert [*newer_names(line)]


@pytest.mark.parametrize(
    "line",
    [
        "if sys.version_info >= (3, 11):\n    import tomllib\nelse:\n    import tomli as tomllib",
        "from typing import Any",
        "import re\nP = re.compile(r'[*+]+x|a\\*+|[A-Z+]+')",
    ],
)
def test_what_every_python_has_is_not(line: str):
    assert not [*newer_names(line)]


def test_one_oldest_and_one_newest_python():
    """What pyproject.toml requires, ruff checks, the README states and CI runs."""
    stated = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', PROJECT)
    minors = [int(minor) for minor in stated]
    assert minors == [*range(minors[0], minors[-1] + 1)]

    oldest = f"3.{minors[0]}"
    newest = f"3.{minors[-1]}"
    assert f'requires-python = ">={oldest}"' in PROJECT
    assert f'target-version = "py{oldest.replace(".", "")}"' in PROJECT
    assert f"Python {oldest} or newer" in (ROOT / "README.md").read_text()
    assert f"Python {oldest} 或更新版本" in (ROOT / "README_zh.md").read_text()

    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert f'"{oldest}"' in workflow and f'"{newest}"' in workflow
