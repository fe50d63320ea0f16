"""A code has one meaning, one class and one exit code: every raise, every mention and `ckpt explain` against the
catalogue.

`sites_of` reads which class is built with which code from the syntax trees of the package: codes that are written out,
constants (imported ones too), and codes that are handed to a helper that builds the error. Codes that take another road
(tables, `error.code` of an error that is raised anew) are checked while tests run: see `conftest.py`. That the reader
sees anything at all is shown on planted modules below.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from ckpt_tool import cli, errors
from ckpt_tool.cli.verbs import VERBS
from ckpt_tool.commands.explain import explain
from ckpt_tool.errors import CkptError, UsageError, catalogue
from ckpt_tool.report.explanation import explanation
from ckpt_tool.report.plain import Look, render
from ckpt_tool.sources.sound import UNSOUND

sys.path.append(str(Path(__file__).resolve().parent))

from syntax import no_garbage, nodes_of, tree_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ckpt_tool"
TABLE = "ckpt_tool/error_codes.toml"
MODULES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
TEXTS = [*ROOT.glob("*.md"), *PACKAGE.rglob("*.md"), *(ROOT / "kernels").glob("*.md"), *(ROOT / "tests").rglob("*.py")]
CODE = re.compile(r"(?<![\w.+-])[AENW]\d{4}(?!\w)")  # A: of `ckpt audit`; N, W: of notes
WORDED = re.compile(r"[NW]-[a-z0-9]+(?:-[a-z0-9]+)*")  # notes: `N-tied`
CODES = catalogue()


class Site(NamedTuple):
    """A place where an error of class `kind` is built. code: None where none is given."""

    file: str
    line: int
    kind: str
    code: str | None


class Helper(NamedTuple):
    """A function that builds an error of class `kind` with the code that it gets as `parameter`, its argument
    `position`."""

    file: str
    kind: str
    parameter: str
    position: int


# -- reading the package -----------------------------------------------------------------------------------------------


class House:
    """The modules of a package: their classes of errors, their constants, and who imports what."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.trees = {file: tree_of(source) for file, source in sources.items()}
        every = [node for source in sources.values() for node in nodes_of(source) if isinstance(node, ast.ClassDef)]
        self.bases = {node.name: [ast.unparse(base) for base in node.bases] for node in every}
        self.classes = {name for name in self.bases if "CkptError" in self.above(name)}
        self.public = {node.name for node in self.trees["ckpt_tool/errors.py"].body if isinstance(node, ast.ClassDef)}
        self.own_code = {node.name for node in every if any(map(_names_default_code, node.body))} - {"CkptError"}
        self.names = {file: dict(_names(source)) for file, source in sources.items()}

    def above(self, name: str) -> set[str]:
        """The class and all that it is derived from."""
        return {name}.union(*(self.above(base) for base in self.bases.get(name, ())))

    def value(self, file: str, name: str) -> str | None:
        """What a name, or `module.NAME`, stands for: a text, or None."""
        for _ in range(8):
            head, _, rest = name.partition(".")
            found = self.names.get(file, {}).get(head)
            if found is None or isinstance(found, str):
                return None if rest else found
            module, inner = found
            if module is None:  # another name of this module
                name = inner
                continue
            below = _file(f"{module}.{inner}", self.trees)
            file, name = (below, rest) if below and rest else (_file(module, self.trees) or "", inner)
        return None


def _names_default_code(statement: ast.stmt) -> bool:
    """Whether a statement of a class gives it a code of its own."""
    target = statement.target if isinstance(statement, ast.AnnAssign) else None
    targets = statement.targets if isinstance(statement, ast.Assign) else [target]
    return any(isinstance(target, ast.Name) and target.id == "default_code" for target in targets)


def _names(source: str) -> Iterator[tuple[str, str | tuple[str | None, str]]]:
    """Constants with their text; imports and other names as (module, name there)."""
    for node in nodes_of(source):
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, (node.module or "", alias.name)) for alias in node.names)
        for target in node.targets if isinstance(node, ast.Assign) else ():
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for left, value in pairs:
                if isinstance(left, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield left.id, value.value
                elif isinstance(left, ast.Name) and isinstance(value, ast.Attribute | ast.Name):
                    yield left.id, (None, ast.unparse(value))


def _file(module: str, known: Mapping[str, object]) -> str | None:
    path = module.replace(".", "/")
    return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in known), None)


def _calls(tree: ast.AST) -> list[tuple[ast.Call, tuple[ast.FunctionDef, ...]]]:
    """Every call with the functions around it, outer calls first."""
    calls: list[tuple[ast.Call, tuple[ast.FunctionDef, ...]]] = []
    waiting: list[tuple[ast.AST, tuple[ast.FunctionDef, ...]]] = [(tree, ())]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, ast.Call):
            calls.append((node, inside))
        elif isinstance(node, ast.FunctionDef):
            inside = (*inside, node)
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]
    return calls


def _last(call: ast.Call) -> str:
    """The name of what is called, without what stands before its last dot."""
    return getattr(call.func, "id", None) or getattr(call.func, "attr", "")


def sites_of(house: House) -> list[Site]:
    """Every place where an error is built with a code that the text shows, or without one."""
    found = list[Site]()
    calls = [(file, call, inside) for file, tree in house.trees.items() for call, inside in _calls(tree)]
    by_name = defaultdict(list)
    for file, call, inside in calls:
        by_name[_last(call)].append((file, call, inside))
    helpers: list[tuple[str, Helper]] = []

    def take(file: str, line: int, kind: str, given: ast.expr, inside: Sequence[ast.FunctionDef]) -> None:
        for each in (given.body, given.orelse) if isinstance(given, ast.IfExp) else (given,):
            code = each.value if isinstance(each, ast.Constant) else house.value(file, ast.unparse(each))
            if isinstance(code, str) and CODE.fullmatch(code):
                found.append(Site(file, line, kind, code))
            for function in inside:
                arguments = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
                if isinstance(each, ast.Name) and each.id in arguments:
                    position = arguments.index(each.id) - (arguments[0] in ("self", "cls"))
                    if (function.name, helper := Helper(file, kind, each.id, position)) not in helpers:
                        helpers.append((function.name, helper))

    for file, call, inside in calls:
        if _last(call) in house.classes and any(word.arg == "code" for word in call.keywords):
            take(file, call.lineno, _last(call), next(w.value for w in call.keywords if w.arg == "code"), inside)
        elif _last(call) in house.classes and call.args and not any(word.arg is None for word in call.keywords):
            if _last(call) not in house.own_code | {"InternalError", "Interrupted"}:
                found.append(Site(file, call.lineno, _last(call), None))
    for name, helper in helpers:  # grows while it runs: a helper may call a helper
        for file, call, inside in by_name[name]:
            known = house.names[file].get(name)
            at_home = file == helper.file or (
                isinstance(known, tuple) and _file(known[0] or "", house.trees) == helper.file
            )
            if isinstance(call.func, ast.Attribute) or at_home:
                given = next((word.value for word in call.keywords if word.arg == helper.parameter), None)
                if given is None and helper.position < len(call.args):
                    given = call.args[helper.position]
                if given is not None:
                    take(file, call.lineno, helper.kind, given, inside)
    return found


@no_garbage()
def faults_of(sources: Mapping[str, str]) -> list[str]:
    """Every raise that is not as the catalogue has it."""
    house = House(sources)
    found = list[str]()
    for file, line, kind, code in sites_of(house):
        row = CODES.get(code or "")
        if code is None:
            found.append(f"{kind} is raised at {file}:{line} without a code")
        elif row is None:
            found.append(f"{code} raised at {file}:{line} has no entry in {TABLE}")
        elif kind != row.kind and (
            kind in house.public or row.kind not in house.above(kind)
        ):  # a private class counts as its base
            found.append(f"{code} raised at {file}:{line} is {kind}, its entry in {TABLE} has {row.kind}")
    return found


def constants(sources: Mapping[str, str]) -> Iterator[tuple[str, int, str]]:
    """Every text of the code that is a code: (file, line, code). Docstrings aside."""
    for file, source in sources.items():
        for node in nodes_of(source):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and (CODE.fullmatch(node.value) or WORDED.fullmatch(node.value)):
                yield file, node.lineno, node.value


# -- the catalogue holds -----------------------------------------------------------------------------------------------


def test_every_raise_has_its_entry_and_its_class() -> None:
    faults = faults_of(MODULES)
    assert not faults, "\n".join(faults)


def test_every_mention_has_an_entry() -> None:
    texts = {**MODULES, **{path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in TEXTS}}
    found = [
        f"{code} mentioned at {file}:{number} has no entry in {TABLE}"
        for file, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        for code in CODE.findall(line)
        if code not in CODES
    ]
    assert not found, "\n".join(found)


def test_every_code_that_is_written_out_has_an_entry() -> None:
    """Codes of notes and findings are raised by nothing: each that the package writes can be explained all the same."""
    written = {code: f"{file}:{line}" for file, line, code in constants(MODULES)}
    assert len([code for code in written if WORDED.fullmatch(code)]) > 50, "the notes were not seen"
    assert {code: place for code, place in written.items() if code not in CODES} == {}


def test_notes_are_no_errors() -> None:
    """What `verify` counts as a finding has exit code 1; all other notes have none."""
    findings = {code for code in CODES if WORDED.fullmatch(code) and CODES[code].kind == "Finding"}
    assert findings == UNSOUND | {"W-master"}
    for code, row in CODES.items():
        if code[0] in "NW" and code not in findings:
            assert (row.kind, row.exit_code) == ("Note", None), code


def test_no_entry_is_unused() -> None:
    unused = sorted(set(CODES) - {code for _, _, code in constants(MODULES)})
    assert not unused, f"nothing raises or reports {', '.join(unused)}: remove them from {TABLE}"


def test_entries_are_whole() -> None:
    text = (ROOT / TABLE).read_text(encoding="utf-8")
    rows = tomllib.loads(text)
    assert list(rows) == sorted(rows), f"{TABLE} is ordered by code"
    for code, row in rows.items():
        assert (CODE.fullmatch(code) or WORDED.fullmatch(code)) and set(row) - {"exit"} == {
            "class",
            "title",
            "why",
            "do",
        }, code
        assert row["class"] in ("Finding", "Note") or issubclass(getattr(errors, row["class"]), CkptError), code
        assert row["title"] and row["title"][-1] not in ".:" and len(row["title"]) <= 100, code
        assert all(row[field][-1] == "." or "ckpt" in row[field] or "pip" in row[field] for field in ("why", "do")), (
            code
        )
        assert not re.search(r"\b(told|lies|lying|asked)\b", f"{row['title']} {row['why']} {row['do']}"), code
    titles = [row["title"] for row in rows.values()]
    twice = sorted({title for title in titles if titles.count(title) > 1})
    assert not twice, f"one meaning, two codes? {twice}"


def test_entries_name_options_that_exist() -> None:
    known = {name for verb in VERBS.values() for option in verb.options().values() for name in option.names}
    known |= {"--help", "--head", "--no-load-rng", "--dist-ckpt-optim-fully-reshardable"}  # of Ray, of Megatron
    named = {
        (row.code, word)
        for row in CODES.values()
        for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*", f"{row.title} {row.why} {row.do}")
    }
    assert not (wrong := sorted(pair for pair in named if pair[1] not in known)), wrong


# -- `ckpt explain` ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 100])
def test_every_code_is_explained(width: int) -> None:
    for code, row in CODES.items():
        document = explain(code)
        assert (document["code"], document["exit_code"], document["class"]) == (code, row.exit_code, row.kind)
        shown = render(explanation(document), Look(width=width))
        for text in (
            code,
            row.title,
            "why",
            row.why,
            "what to do",
            row.do,
            "unchanged" if row.kind == "Note" else str(row.exit_code or "that of the command"),
        ):
            assert "".join(text.split()) in "".join(shown.split()), code
        assert max(map(len, shown.splitlines())) <= width, code


def test_the_exit_code_is_that_of_the_class() -> None:
    for code, row in CODES.items():
        kind = getattr(errors, row.kind, None)
        if code not in ("E1430", "E1532"):
            of_reports = None if row.kind == "Note" else 1
            assert row.exit_code == (kind.exit_code if kind else of_reports), code
    assert (CODES["E1300"].exit_code, CODES["E1430"].exit_code, CODES["E1532"].exit_code) == (130, 143, None)


@pytest.mark.parametrize(
    "word", ["E0301", "e0301", "301", "0301", "error[E0301]", "error[E0301]:", "ERROR[e0301]", " E0301 "]
)
def test_a_code_in_any_spelling(word: str) -> None:
    assert explain(word)["code"] == "E0301"


@pytest.mark.parametrize(
    ("word", "code"),
    [("N-tied", "N-tied"), ("n-TIED", "N-tied"), ("W-header", "W-header"), ("n301", "N0301"), ("A0110", "A0110")],
)
def test_a_code_of_a_note_or_finding(word: str, code: str) -> None:
    document = explain(word)
    assert document["code"] == code and document["what_to_do"]


@pytest.mark.parametrize(("word", "near"), [("N-tide", "N-tied"), ("W-heder", "W-header"), ("N" + "0309", "N0305")])
def test_near_misses_of_notes(word: str, near: str) -> None:
    with pytest.raises(UsageError) as fault:
        explain(word)
    assert near in str(fault.value.hint)


@pytest.mark.parametrize("word", ["E0399x", "9999", "E03011", "replicas", "E-301", "\x1b[31m"])
def test_an_unknown_code_is_a_usage_error(word: str) -> None:
    with pytest.raises(UsageError) as fault:
        explain(word)
    assert (fault.value.code, fault.value.exit_code) == ("E2703", 2) and fault.value.hint


def test_near_misses_of_a_code() -> None:
    with pytest.raises(UsageError, match="no code") as fault:
        explain("300")
    assert "E0301, E0302" in str(fault.value.hint)


def test_the_list_has_every_code_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["explain"]) == 0
    out = capsys.readouterr().out
    assert sorted(re.findall(r"^  ([AENW]-?[a-z0-9-]+)  ", out, re.M)) == list(CODES) and "exit code 2: usage" in out
    assert cli.run(["explain", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["code"] for row in document["codes"]] == list(CODES) and document["schema_version"] == 1


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["explain", "301"]) == 0
    out, err = capsys.readouterr()
    assert CODES["E0301"].title in out and not err
    assert cli.run(["explain", "E0301", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == explain("E0301")
    assert cli.run(["explain", "E03"]) == 2
    assert capsys.readouterr().err.startswith("error[E2703]")


# -- the reader sees ---------------------------------------------------------------------------------------------------

ERRORS = "class CkptError(Exception): pass\nclass UsageError(CkptError): pass\nclass CorruptFile(CkptError): pass\n"
NEW = "E" + "9" * 4  # a code that no catalogue has
PLANTED = {
    "no entry": (
        f'def f():\n    raise CorruptFile("x", code="{NEW}")\n',
        f"{NEW} raised at ckpt_tool/a.py:2 has no entry",
    ),
    "another class": ('def f():\n    raise UsageError("x", code="E0311")\n', "is UsageError, its entry"),
    "no code": ('def f():\n    return UsageError("x", hint="y")\n', "without a code"),
    "a constant": (
        'A, B = "E0311", "E0312"\ndef f():\n    raise UsageError("x", code=B)\n',
        "E0312 raised at ckpt_tool/a.py:3",
    ),
    "an imported constant": (
        "from ckpt_tool.b import B\ndef f():\n    raise UsageError('x', code=B)\n",
        "E0313 raised",
    ),
    "a module's constant": (
        "from ckpt_tool import b\nC = b.B\ndef f():\n    raise UsageError('x', code=C)\n",
        "E0313 raised",
    ),
    "a choice": ('def f(n):\n    raise UsageError("x", code="E0200" if n else "E0311")\n', "E0311 raised"),
    "a helper": (
        'def g(text, code):\n    return UsageError(text, code=code)\ndef f():\n    raise g("x", "E0311")\n',
        "ckpt_tool/a.py:4",
    ),
    "a helper's helper": (
        "class R:\n    def g(self, code, text):\n        return UsageError(text, code=code)\n"
        '    def h(self, *, code):\n        return self.g(code, "x")\n'
        'def f(r):\n    raise r.h(code="E0311")\n',
        "ckpt_tool/a.py:7",
    ),
    "an imported helper": (
        "from ckpt_tool.b import h\ndef f():\n    raise h('E0200')\n",
        "E0200 raised at ckpt_tool/a.py:3 is CorruptFile",
    ),
}
BESIDE = 'B = "E0313"\ndef h(code):\n    return CorruptFile("x", code=code)\n'


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_seen(what: str) -> None:
    source, wanted = PLANTED[what]
    house = {
        "ckpt_tool/errors.py": ERRORS,
        "ckpt_tool/a.py": source,
        "ckpt_tool/b.py": BESIDE,
        "ckpt_tool/__init__.py": "",
    }
    faults = faults_of(house)
    assert len(faults) == 1 and wanted in faults[0], faults


def test_sound_raises_are_left_alone() -> None:
    source = (
        'def f(e):\n    raise UsageError("x", code="E0200")\ndef g(e):\n    raise CorruptFile(e.message, code=e.code)\n'
    )
    assert faults_of({"ckpt_tool/errors.py": ERRORS, "ckpt_tool/a.py": source}) == []


def test_an_error_of_another_class_is_seen_while_tests_run() -> None:
    with pytest.raises(AssertionError, match="E0311 is CorruptFile"):
        UsageError("x", code="".join(("E03", "11")))
