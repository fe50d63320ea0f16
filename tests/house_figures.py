"""What each package weighs, as a Markdown table to compare two revisions by.

    python tests/house_figures.py            the packages of ckpt_tool/
    python tests/house_figures.py --deep     their folders too
    python tests/house_figures.py REVISION   as of another commit of this repository

Columns: files; lines; arrows out (pairs of files, one here and one in another package that it imports, deferred imports
too) and how many packages they lead to; arrows in; uses of `Any`; functions of more than 50 lines; `fmt: skip`.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_house import MODULES, ROOT, imports_of

LONG = 50  # lines of a function
COLUMNS = (
    "package",
    "files",
    "lines",
    "arrows out",
    "to packages",
    "arrows in",
    "`Any`",
    f"functions > {LONG}",
    "`fmt: skip`",
)


class Figures(NamedTuple):
    files: int = 0
    lines: int = 0
    out: int = 0
    packages: int = 0
    into: int = 0
    anys: int = 0
    long: int = 0
    skips: int = 0


def package_of(file: str, *, deep: bool = False) -> str:
    """`formats/hub_folder/index.py` -> `formats` or, deep, `systems/hub/safetensors`; a file of the top level ->
    `.`."""
    folders = file.split("/")[:-1]
    return "/".join(folders[: 2 if deep else 1]) or "."


def uses_of_any(source: str) -> int:
    """`Any` in code, imports aside."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.NAME]
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {line for node in imports for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return sum(t.string == "Any" and t.start[0] not in imported for t in tokens)


def long_functions(source: str) -> int:
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return sum((n.end_lineno or n.lineno) - n.lineno + 1 > LONG for n in functions)


def figures(modules: Mapping[str, str], *, deep: bool = False) -> dict[str, Figures]:
    """Each package's figures, by its name; `modules` is the source of each file below ckpt_tool/."""
    files: dict[str, list[str]] = defaultdict(list)
    arrows: set[tuple[str, str]] = set()
    for file, source in modules.items():
        files[package_of(file, deep=deep)].append(file)
        for _, found, _ in imports_of(source, modules):
            if found in modules and package_of(found, deep=deep) != package_of(file, deep=deep):
                arrows.add((file, found))
    out = Counter(package_of(file, deep=deep) for file, _ in arrows)
    into = Counter(package_of(found, deep=deep) for _, found in arrows)
    leads = Counter(
        a for a, _ in {(package_of(file, deep=deep), package_of(found, deep=deep)) for file, found in arrows}
    )
    return {
        package: Figures(
            len(names),
            sum(modules[name].count("\n") for name in names),
            out[package],
            leads[package],
            into[package],
            sum(uses_of_any(modules[name]) for name in names),
            sum(long_functions(modules[name]) for name in names),
            sum(modules[name].count("# fmt: skip") for name in names),
        )
        for package, names in sorted(files.items())
    }


def markdown(packages: Mapping[str, Figures]) -> str:
    """The table, with the whole in the last row."""

    def row(cells: Iterable[object]) -> str:
        return f"| {' | '.join(map(str, cells))} |"

    whole = Figures(*(sum(each) for each in zip(*packages.values(), strict=True)))
    body = [row((f"`{package}`" if package != "." else "top level", *found)) for package, found in packages.items()]
    rule = "|---|" + "---:|" * (len(COLUMNS) - 1)
    return "\n".join([row(COLUMNS), rule, *body, row(("**all**", *whole))])


def modules_of(revision: str) -> dict[str, str]:
    """The sources of ckpt_tool/ as of a commit."""
    packed = subprocess.run(["git", "archive", revision, "ckpt_tool"], cwd=ROOT, capture_output=True, check=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for member in tar.getmembers():
            if member.name.endswith(".py") and (opened := tar.extractfile(member)):
                found[member.name.removeprefix("ckpt_tool/")] = opened.read().decode()
    return dict(sorted(found.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", metavar="REVISION")
    parser.add_argument("--deep", action="store_true")
    given = parser.parse_args()
    print(markdown(figures(modules_of(given.revision) if given.revision else MODULES, deep=given.deep)))
