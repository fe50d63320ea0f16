"""What the house weighs, room by room, as a Markdown table to compare two revisions by.

    python tests/house_figures.py            the rooms of ckpt_tool/
    python tests/house_figures.py --deep     their folders too
    python tests/house_figures.py REVISION   as of another commit of this repository

Columns: files; lines; arrows out (pairs of files, one here and one in another room that it imports, deferred imports
too) and how many rooms they lead to; arrows in; uses of `Any`; functions of more than 50 lines; `fmt: skip`.
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
    "room",
    "files",
    "lines",
    "arrows out",
    "to rooms",
    "arrows in",
    "`Any`",
    f"functions > {LONG}",
    "`fmt: skip`",
)


class Figures(NamedTuple):
    files: int = 0
    lines: int = 0
    out: int = 0
    rooms: int = 0
    into: int = 0
    anys: int = 0
    long: int = 0
    skips: int = 0


def room_of(file: str, *, deep: bool = False) -> str:
    """`formats/hub_folder/index.py` -> `formats` or, deep, `systems/hub/safetensors`; a file of the rim -> `.`."""
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
    """Each room's figures, by its name; `modules` is the source of each file below ckpt_tool/."""
    files: dict[str, list[str]] = defaultdict(list)
    arrows: set[tuple[str, str]] = set()
    for file, source in modules.items():
        files[room_of(file, deep=deep)].append(file)
        for _, found, _ in imports_of(source, modules):
            if found in modules and room_of(found, deep=deep) != room_of(file, deep=deep):
                arrows.add((file, found))
    out = Counter(room_of(file, deep=deep) for file, _ in arrows)
    into = Counter(room_of(found, deep=deep) for _, found in arrows)
    leads = Counter(a for a, _ in {(room_of(file, deep=deep), room_of(found, deep=deep)) for file, found in arrows})
    return {
        room: Figures(
            len(names),
            sum(modules[name].count("\n") for name in names),
            out[room],
            leads[room],
            into[room],
            sum(uses_of_any(modules[name]) for name in names),
            sum(long_functions(modules[name]) for name in names),
            sum(modules[name].count("# fmt: skip") for name in names),
        )
        for room, names in sorted(files.items())
    }


def markdown(rooms: Mapping[str, Figures]) -> str:
    """The table, with the whole in the last row."""

    def row(cells: Iterable[object]) -> str:
        return f"| {' | '.join(map(str, cells))} |"

    whole = Figures(*(sum(each) for each in zip(*rooms.values(), strict=True)))
    body = [row((f"`{room}`" if room != "." else "the rim", *found)) for room, found in rooms.items()]
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
