#!/usr/bin/env python3
"""How densely is a Python tree written? Prints one row per tree; with --examples, where the worst places are.

    readable.py ckpt_tool tests
    readable.py ckpt_tool --examples packed
    readable.py path/to/site-packages/huggingface_hub     # any other code base, to compare

Figures per 1,000 code lines (kLOC), or percentages. They measure habits, not correctness: a figure far above those of
well-liked code bases says that a reader has to unpack the code before understanding it. `test_readable.py` holds the
figures of this repository. Origin: the team's own tool, copied.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

LONG_FUNCTION = 25  # lines of body
MANY_LOCALS = 15
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

# Words of a private English, in comments, docstrings, messages and names. The field has a term for each.
PRIVATE_WORDS = re.compile(
    r"\b(?:lie|lies|lying|lay|told|tells?|hangs?|hung|stands?|stood|nobody|beside|anew|road|house|sound|parted|"
    r"held against|comes to|is of|are of|one behind the other|by (?:its|the) owner's word|whose are)\b",
    re.IGNORECASE,
)

# Locals that say nothing about the value's role.
GENERIC_NAMES = set(
    "found made of some each every own held kept wanted known mine theirs ours shown at here there given said apart "
    "whole odd left lost taken few many rest out what where how why one other both first last more most less it them "
    "those these stated listed placed moved turned parted joined told met seen old new way".split()
)

# Functions named by what was done to a value (`_placed`, `made`) in place of a verb and its object (`place_shards`).
PARTICIPLE_NAME = re.compile(
    r"_?(?:[a-z]+ed|made|held|kept|found|known|met|said|laid|sent|lost|built|gone|taken|left|told|written|given|"
    r"chosen|hidden|shown)"
)
PREPOSITION_NAME = re.compile(r"_?(?:of|at|within|apart|ahead|beside|by|in|on|under|over|from|to|for|with)(?:_\w+)?")


@dataclass
class Figures:
    """Counts over one tree, and an example place for each."""

    code_lines: int = 0
    comments: int = 0
    prose_words: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, what: str, place: str) -> None:
        self.counts[what] += 1
        self.places[what].append(place)

    def per_kloc(self, what: str) -> float:
        return 1000 * self.counts[what] / max(1, self.code_lines)

    def percent(self, part: str, whole: str) -> float:
        return 100 * self.counts[part] / max(1, self.counts[whole])


def measure(root: Path) -> Figures:
    """Figures of all Python files below `root` (or of one file)."""
    figures = Figures()
    paths = [root] if root.is_file() else sorted(root.rglob("*.py"))
    for path in paths:
        source = path.read_text(errors="replace")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        _measure_text(figures, path, source)
        _measure_tree(figures, path, tree, source.splitlines())
    return figures


def _measure_text(figures: Figures, path: Path, source: str) -> None:
    lines = source.splitlines()
    figures.code_lines += sum(1 for line in lines if line.strip() and not line.strip().startswith("#"))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            figures.comments += 1
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for match in PRIVATE_WORDS.finditer(token.string):
                line = token.start[0] + token.string[: match.start()].count("\n")
                figures.add("private words", f"{path}:{line} {match[0]}")
    if re.search(r"(?m)^# -{40,}\n# [A-Z]", source):
        figures.add("second module in a file", str(path))


def _measure_tree(figures: Figures, path: Path, tree: ast.Module, lines: list[str]) -> None:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        place = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _measure_function(figures, node, place, lines)
        elif isinstance(node, ast.ClassDef):
            _measure_class(figures, node, place)
        elif isinstance(node, ast.IfExp):
            inner = isinstance(node.body, ast.IfExp) or isinstance(node.orelse, ast.IfExp)
            if inner and not isinstance(parents.get(node), ast.IfExp):
                figures.add("chained ternary", place)
        elif isinstance(node, ast.NamedExpr):
            if not _is_plain_test(node, parents):
                figures.add("walrus in an expression", place)
        elif isinstance(node, COMPREHENSIONS):
            if any(isinstance(outer, COMPREHENSIONS) for outer in _expression_parents(node, parents)):
                figures.add("nested comprehension", place)
        elif isinstance(node, ast.Assign):
            if _is_packed(node):
                figures.add("packed assignment", place)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            if any(_is_bare_and(value, lines) for value in node.values):
                figures.add("or/and without parentheses", place)
        elif isinstance(node, ast.UnaryOp) and _is_negated_floor_division(node):
            figures.add("-(-a // b)", place)


def _measure_function(
    figures: Figures, node: ast.FunctionDef | ast.AsyncFunctionDef, place: str, lines: list[str]
) -> None:
    figures.counts["functions"] += 1
    place = f"{place} {node.name}"
    if PARTICIPLE_NAME.fullmatch(node.name) or PREPOSITION_NAME.fullmatch(node.name):
        figures.add("function that is no verb", place)
    is_public = not node.name.startswith("_")
    if is_public:
        figures.counts["public functions"] += 1
        if ast.get_docstring(node) is None:
            figures.add("public function without docstring", place)

    body = node.body[1:] if ast.get_docstring(node) else node.body
    if not body:
        return
    first, last = body[0].lineno, node.end_lineno or body[-1].lineno
    if last - first + 1 >= LONG_FUNCTION:
        figures.counts["long functions"] += 1
        if all(line.strip() for line in lines[first - 1 : last]):
            figures.add("long function without a paragraph", place)

    stores = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    figures.counts["locals"] += len(stores)
    figures.counts["generic locals"] += sum(name in GENERIC_NAMES for name in stores)
    if len(set(stores)) > MANY_LOCALS:
        figures.add("function with many locals", place)


def _measure_class(figures: Figures, node: ast.ClassDef, place: str) -> None:
    fields = [
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    if len(fields) < 4:
        return
    figures.counts["classes with fields"] += 1
    docstring = ast.get_docstring(node) or ""
    run_in = sum(bool(re.search(rf"\b{name}\b[^:\n]{{0,30}}: ", docstring)) for name in fields)
    has_a_line_each = sum(bool(re.search(rf"(?m)^\s*{name}\b[^:\n]{{0,30}}:", docstring)) for name in fields)
    if run_in >= 2 and has_a_line_each < run_in:
        figures.add("fields documented in one paragraph", f"{place} {node.name}")


def _expression_parents(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> list[ast.AST]:
    """The nodes around `node` up to its statement."""
    around = []
    outer = parents.get(node)
    while outer is not None and not isinstance(outer, ast.stmt):
        around.append(outer)
        outer = parents.get(outer)
    return around


def _is_plain_test(node: ast.NamedExpr, parents: dict[ast.AST, ast.AST]) -> bool:
    """Is it `if x := f():` or `while chunk := read():`, perhaps compared or negated?"""
    outer = parents.get(node)
    while isinstance(outer, ast.Compare | ast.UnaryOp):
        outer = parents.get(outer)
    return isinstance(outer, ast.If | ast.While)


def _is_packed(node: ast.Assign) -> bool:
    """Does one line assign two or more values that are not names or constants? Swaps and unpacking are fine."""
    if not isinstance(node.value, ast.Tuple) or not isinstance(node.targets[0], ast.Tuple):
        return False
    return sum(not isinstance(value, ast.Constant | ast.Name) for value in node.value.elts) >= 2


def _is_bare_and(value: ast.expr, lines: list[str]) -> bool:
    if not (isinstance(value, ast.BoolOp) and isinstance(value.op, ast.And)):
        return False
    before = lines[value.lineno - 1].encode()[: value.col_offset].decode(errors="ignore").rstrip()
    return not before.endswith("(")


def _is_negated_floor_division(node: ast.UnaryOp) -> bool:
    inner = node.operand
    return (
        isinstance(node.op, ast.USub)
        and isinstance(inner, ast.BinOp)
        and isinstance(inner.op, ast.FloorDiv)
        and isinstance(inner.left, ast.UnaryOp)
    )


# name, how it is stated, the goal
ROWS = (
    ("comments per 100 code lines", lambda f: 100 * f.comments / max(1, f.code_lines), ">= 5"),
    (
        "long functions without a paragraph, %",
        lambda f: f.percent("long function without a paragraph", "long functions"),
        "<= 15",
    ),
    ("functions with more than 15 locals", lambda f: f.counts["function with many locals"], "<= 40"),
    ("packed assignments per kLOC", lambda f: f.per_kloc("packed assignment"), "<= 1"),
    ("nested comprehensions per kLOC", lambda f: f.per_kloc("nested comprehension"), "<= 0.3"),
    ("chained ternaries", lambda f: f.counts["chained ternary"], "<= 10"),
    ("walrus in an expression", lambda f: f.counts["walrus in an expression"], "<= 10"),
    ("or/and without parentheses", lambda f: f.counts["or/and without parentheses"], "<= 10"),
    ("-(-a // b)", lambda f: f.counts["-(-a // b)"], "<= 1"),
    ("functions that are no verb, %", lambda f: f.percent("function that is no verb", "functions"), "<= 2"),
    ("generic locals, %", lambda f: f.percent("generic locals", "locals"), "<= 3"),
    ("fields documented in one paragraph", lambda f: f.counts["fields documented in one paragraph"], "<= 5"),
    (
        "public functions without docstring, %",
        lambda f: f.percent("public function without docstring", "public functions"),
        "<= 10",
    ),
    ("second module in a file", lambda f: f.counts["second module in a file"], "0"),
    ("private words per kLOC", lambda f: f.per_kloc("private words"), "<= 0.5"),
)


def meets(value: float, goal: str) -> bool:
    """Does a figure meet its goal, such as '<= 15', '>= 5' or '0'?"""
    if goal.startswith("<="):
        return value <= float(goal[2:])
    if goal.startswith(">="):
        return value >= float(goal[2:])
    return value == float(goal)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--examples", metavar="WORD", help="list the places of the figures whose name holds WORD")
    parser.add_argument("--strict", action="store_true", help="exit 1 if a figure of any tree misses its goal")
    arguments = parser.parse_args()

    measured = {tree: measure(tree) for tree in arguments.trees}
    width = max(len(name) for name, _, _ in ROWS)
    print(" " * width, *(f"{tree.name:>14}" for tree in measured), "  goal")
    missed = 0
    for name, value_of, goal in ROWS:
        values = [value_of(figures) for figures in measured.values()]
        missed += sum(not meets(value, goal) for value in values)
        print(f"{name:<{width}}", *(f"{value:>14.4g}" for value in values), f"  {goal}")

    if arguments.examples:
        for figures in measured.values():
            for what, places in figures.places.items():
                if arguments.examples in what:
                    print(f"\n{what}: {len(places)}")
                    print("\n".join(f"  {place}" for place in places))
    print(f"{missed} of {len(ROWS) * len(measured)} figures miss their goal")
    return 1 if arguments.strict and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
