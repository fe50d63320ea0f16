"""The import rules of the package hold: imports fall, libraries stay where they are allowed, nothing runs code.

One table, `[tool.ckpt.import_rules]` in pyproject.toml, says what is allowed; `faults_of` reads a module's syntax tree
and tells what breaks it. That the checker sees anything at all is shown on planted bad modules below.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

from syntax import nodes_of, statements, tree_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ckpt_tool"
RULES: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ckpt"]["import_rules"]
MODULES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
# an absolute path of someone's machine, spelled so that this line is none itself
MACHINE_PATH = re.compile(r"(?<![\w./~-])/(?:(?:work|home|Users)/\w|root/\.|tmp/venvs|opt/pypi)[\w.-]*")
TEXT = {".py", ".toml", ".md", ".yml", ".yaml", ".txt", ".cfg", ".sh", ".cu", ".h", ".cpp", ""}


class Import(NamedTuple):
    line: int
    module: str  # "numpy", "ckpt_tool/core/box.py"
    lazy: bool


class Fault(NamedTuple):
    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"ckpt_tool/{self.file}:{self.line}: {self.what}"


# -- reading a module --------------------------------------------------------------------------------------------------


def imports_of(source: str, known: Mapping[str, str]) -> Iterator[Import]:
    """Every import, those under `if TYPE_CHECKING` aside; our own as the file that is meant."""
    yield from _imports_in(tree_of(source), known, lazy=False)


def _imports_in(tree: ast.AST, known: Mapping[str, str], *, lazy: bool) -> Iterator[Import]:
    for node in statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, _file(alias.name, known), lazy)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = _file(f"{node.module}.{alias.name}", known)
                yield Import(node.lineno, inner if inner in known else _file(node.module or "", known), lazy)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            inside_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imports_in(node, known, lazy=lazy or inside_function)


def _file(module: str, known: Mapping[str, str]) -> str:
    """`ckpt_tool.core.box` -> `core/box.py`; foreign modules by their top name."""
    if module != "ckpt_tool" and not module.startswith("ckpt_tool."):
        return module.split(".")[0]
    path = "/".join(module.split(".")[1:])
    for candidate in (f"{path}.py", f"{path}/__init__.py", "__init__.py" if not path else ""):
        if candidate in known:
            return candidate
    return f"{path}.py"


def package_of(file: str) -> str:
    """The package whose rules a file obeys: its top folder, or itself; what a system has of another layer belongs to
    that layer's package (`belongs_to`)."""
    joined = [package for pattern, package in RULES["belongs_to"].items() if matches(file, pattern)]
    return joined[0] if joined else file.split("/")[0]


def matches(file: str, pattern: str) -> bool:
    """Is the file what the pattern names, or in a folder that it names? `*` is any part of one name."""
    expression = re.escape(pattern).replace(r"\*", "[^/]*")
    return re.fullmatch(f"{expression}(/.*)?", file) is not None


def layer_of(file: str) -> int:
    """The layer of a file, by number. Raises LookupError for a package that the table does not have."""
    for number, packages in enumerate(RULES["layers"]):
        if package_of(file) in packages:
            return number
    raise LookupError(f"{file} lies on no layer of pyproject.toml [tool.ckpt.import_rules]")


def inside(file: str, places: Iterable[str]) -> bool:
    return any(file == place or file.startswith(f"{place}/") for place in places)


# -- the rules ---------------------------------------------------------------------------------------------------------


def faults_of(file: str, source: str, known: Mapping[str, str] = MODULES) -> list[Fault]:
    """Everything that breaks a rule in one module."""
    found = [*_import_faults(file, source, known), *_call_faults(file, source), *_catch_faults(file, source)]
    found += [
        Fault(file, node.lineno, "assert vanishes under -O: raise an error of ours")
        for node in nodes_of(source)
        if isinstance(node, ast.Assert)
    ]
    return found


def _import_faults(file: str, source: str, known: Mapping[str, str]) -> Iterator[Fault]:
    layer = layer_of(file)
    package = package_of(file)
    top = len(RULES["layers"]) - 1
    for line, module, lazy in imports_of(source, known):
        if module.endswith(".py") or module in known:
            below = layer_of(module)
            if below > layer:
                yield Fault(file, line, f"imports {module} from a higher layer")
            elif below == layer and package_of(module) != package and layer != top:
                yield Fault(file, line, f"imports {module}, another package of its own layer")
            elif package_of(module) in RULES["must_not_import"].get(package, []):
                yield Fault(file, line, f"{package} may not import {package_of(module)}")
            continue
        allowed = RULES["libraries"].get(module)
        if allowed is not None and not inside(file, allowed):
            yield Fault(file, line, f"imports {module}, which is allowed in {allowed or 'no file'}")
        if not lazy and inside(file, RULES["inside_functions"].get(module, [])):
            yield Fault(file, line, f"imports {module} when it is loaded: import it inside the function")


def _call_faults(file: str, source: str) -> Iterator[Fault]:
    for node in nodes_of(source):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in RULES["forbidden"]["calls"]:
            yield Fault(file, node.lineno, f"calls {name}")
        makers = RULES["may_create"].get(name)
        if makers is not None and not inside(file, makers):
            yield Fault(file, node.lineno, f"makes a {name} from nothing: derive it from the one that it is a view of")
        if name == "print" and not inside(file, RULES["forbidden"]["print"]):
            yield Fault(file, node.lineno, "prints: return a value, report/ shows it")


def _catch_faults(file: str, source: str) -> Iterator[Fault]:
    for node in nodes_of(source):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = ast.unparse(node.type) if node.type is not None else "everything"
        if not re.search(r"\b(Exception|BaseException|everything)\b", caught):
            continue
        again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        worker = caught == "BaseException" and inside(file, RULES["forbidden"]["catch_in_worker"])
        if not again and not worker and not inside(file, RULES["forbidden"]["catch_all"]):
            yield Fault(file, node.lineno, f"catches {caught}: only the rim may, others raise again")


def size_faults(file: str, source: str) -> tuple[list[Fault], list[Fault]]:
    """(over the limit, over what is good): functions by the statements in them."""
    sizes = RULES["sizes"]
    measured = []
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            statements = sum(isinstance(each, ast.stmt) for each in ast.walk(node)) - 1
            limits = sizes["function"], sizes["function_limit"]
            measured.append((f"{file}:{node.name}", node.lineno, statements, *limits))
    faults = []
    large = []
    for name, line, statements, good, limit in measured:
        limit = sizes["allowed"].get(name, limit)
        fault = Fault(file, line, f"{name.rpartition(':')[2]} has {statements} statements, the limit is {limit}")
        if statements > limit:
            faults.append(fault)
        elif statements > good and name not in sizes["allowed"]:
            large.append(fault)
    return faults, large


def circles(known: Mapping[str, str]) -> list[list[str]]:
    """Circles of imports, those inside functions too: a circle that is put off is one all the same."""
    graph = {
        file: {found for _, found, _ in imports_of(source, known) if found in known and found != file}
        for file, source in known.items()
    }
    done: set[str] = set()
    found: list[list[str]] = []

    def walk(file: str, trail: list[str]) -> None:
        if file in trail:
            found.append([*trail[trail.index(file) :], file])
        elif file not in done:
            for below in sorted(graph[file]):
                walk(below, [*trail, file])
            done.add(file)

    for file in graph:
        walk(file, [])
    return found


# -- the rules hold
# -----------------------------------------------------------------------------------------------------


def test_import_rules_hold() -> None:
    faults = [fault for file, source in MODULES.items() for fault in faults_of(file, source)]
    assert not faults, "\n".join(map(str, faults))


def test_files_and_functions_are_small() -> None:
    found = [size_faults(file, source) for file, source in MODULES.items()]
    for fault in (fault for _, large in found for fault in large):
        warnings.warn(f"a step with a name of its own? {fault}", stacklevel=1)
    faults = [fault for each, _ in found for fault in each]
    assert not faults, "\n".join(map(str, faults))


def test_no_module_needs_itself() -> None:
    assert not circles(MODULES)


def test_only_tables_of_families_are_laid_out_by_hand() -> None:
    assert not [file for file, source in MODULES.items() if "# fmt:" in source and package_of(file) != "families"]


def test_every_module_says_what_it_is() -> None:
    silent = [file for file, source in MODULES.items() if source.strip() and ast.get_docstring(tree_of(source)) is None]
    assert not silent, silent


def misplaced(known: Mapping[str, str]) -> list[str]:
    """Formats and families are found by where they lie: what lies there without the name that it is found by, and what
    is made elsewhere."""
    found = []
    for file, source in known.items():
        wanted = {name for place, name in RULES["found_by_place"].items() if _is_at(file, place)}
        given = {
            ast.unparse(target).partition(":")[0]
            for node in tree_of(source).body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        }
        found += [f"{file} has no {name}" for name in sorted(wanted - given)]
        found += [f"{file} makes {name}, which nobody finds there" for name in sorted(_made(source) - wanted)]
    return found


def _is_at(file: str, place: str) -> bool:
    """Is it a file of that place? In `models/` what is no `__init__.py`."""
    is_there = re.fullmatch(place.replace("*", "[^/]+"), file) is not None
    return is_there and (place.startswith("systems/") or not file.endswith("/__init__.py"))


def _made(source: str) -> set[str]:
    """The names under which what a module makes would be found: `Entry(...)`, `Family(...)`, a class of a format."""
    made = set()
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes_of(source)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in nodes_of(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            whole = imported.get(node.func.id, "")
            made |= {"SYSTEM"} if whole == "ckpt_tool.formats.entry.System" else set()
            made |= {"FAMILY"} if whole == "ckpt_tool.families.base.Family" else set()
        elif isinstance(node, ast.ClassDef) and not any(ast.unparse(base) == "Protocol" for base in node.bases):
            methods = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            made |= {"FORMAT"} if {"detect", "read", "target"} <= methods else set()
    return made


def test_formats_and_families_lie_where_they_are_found() -> None:
    assert not misplaced(MODULES)


def test_a_misplaced_system_or_format_is_seen() -> None:
    row = "from ckpt_tool.formats.entry import System\nSYSTEM = System()\n"
    format_ = "FORMAT = Foo()\n"
    class_ = "class Foo:\n" + "".join(f"    def {name}(self): pass\n" for name in ("detect", "read", "target"))
    sound = {
        "systems/foo/__init__.py": row,
        "systems/foo/bar/__init__.py": "",
        "systems/foo/bar/format.py": class_ + format_,
    }
    assert not misplaced(sound)
    assert misplaced({**sound, "systems/foo/bar/format.py": class_}) == ["systems/foo/bar/format.py has no FORMAT"]
    assert misplaced({**sound, "systems/foo/__init__.py": ""}) == ["systems/foo/__init__.py has no SYSTEM"]
    seen = misplaced({**sound, "formats/bar.py": class_, "systems/foo/bar/__init__.py": row})
    assert [line.partition(",")[0] for line in seen] == [
        "systems/foo/bar/__init__.py makes SYSTEM",
        "formats/bar.py makes FORMAT",
    ]


def test_a_misplaced_family_is_seen() -> None:
    family = "from ckpt_tool.families.base import Family\nFAMILY = Family(name='x')\n"
    assert not misplaced({"families/models/x.py": family, "families/models/__init__.py": ""})
    assert misplaced({"families/models/x.py": "", "families/y.py": family}) == [
        "families/models/x.py has no FAMILY",
        "families/y.py makes FAMILY, which nobody finds there",
    ]


def test_all_have_the_names_that_they_are_found_by() -> None:
    from ckpt_tool.families.models import FAMILIES
    from ckpt_tool.formats.entry import dialects, entries, load, systems

    folders = {file for file in MODULES if matches(file, "systems/*/*/format.py")}
    stated = {f"systems/{name}/{each.folder}/format.py" for name, row in systems().items() for each in row.formats}
    assert stated == folders
    assert len(entries()) == len({entry.order for entry in entries().values()}) == len(folders)
    assert len(dialects()) == len({dialect.order for dialect in dialects().values()})
    assert all(load(name).name == name for name in entries())
    files = {file.split("/")[2] for file in MODULES if file.startswith("families/models/")}
    assert {f"{family.name}.py" for family in FAMILIES} == files - {"__init__.py"}


def formats_named(file: str, source: str, names: Mapping[str, str]) -> list[int]:
    """Lines that name a format other than the folder's own. names: {format: its folder}.

    Outside `formats/` names are words like others (options of a harness, of a report): it is what compares something's
    `name`, `format` or `source_format` with one that counts, or with a constant of the module that holds one. In there
    every literal does, but for names of systems.
    """
    constants = {
        ast.unparse(each.targets[0]): _literals(each) for each in tree_of(source).body if isinstance(each, ast.Assign)
    }
    others = {name for name, folder in names.items() if not file.startswith(f"{folder}/")}
    words = others - {*RULES["system_words"]} if package_of(file) in ("formats", "systems") else set()
    found = []
    for node in nodes_of(source):
        if isinstance(node, ast.Constant) and node.value in words:
            found.append(node.lineno)
        elif isinstance(node, ast.Compare):
            sides = [ast.unparse(each) for each in (node.left, *node.comparators)]
            held = _literals(node).union(*(constants.get(side, ()) for side in sides))
            if others & held and any(re.search(r"\.(name|(source_)?format)$", side) for side in sides):
                found.append(node.lineno)
    return sorted({*found})


def _literals(tree: ast.AST) -> set[Any]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def formats_by_folder() -> dict[str, str]:
    """Each format with the folder of its system, all files of which may name it."""
    from ckpt_tool.formats.entry import entries, load

    return {name: "/".join(type(load(name)).__module__.split(".")[1:3]) for name in entries()}


def test_no_format_is_named_by_others() -> None:
    """What a format needs of other packages it says itself (`formats.base.Holds`, `Hashing`, `Fitting`), and formats
    that
    share a file compare evidence (`formats.registry.settle`)."""
    names = formats_by_folder()
    others = {file: source for file, source in MODULES.items() if not inside(file, ["harness"])}
    found = {file: lines for file in others if (lines := formats_named(file, others[file], names))}
    assert not found


@pytest.mark.parametrize(
    ("file", "source", "lines"),
    [
        ("report/x.py", 'if catalog.format == "dcp" or fmt.name in ("torch", "hf"):\n    pass\n', [1]),
        ("systems/torch/torch_save/x.py", 'x = 1\nif wanted.source_format == "torch":\n    y = "dcp"\n', [3]),
        ("formats/beside.py", 'x = wanted.source_format != "torch"\n', [1]),
        ("systems/torch/dcp/x.py", 'import torch\nx = ("torch", "Size"), "dcp"\n', []),
        ("report/x.py", 'x = "dcp"\n', []),
        ("report/x.py", 'WHOLE = frozenset(("dcp", "x"))\ny = catalog.format in WHOLE\n', [2]),
    ],
)
def test_a_named_format_is_seen(file: str, source: str, lines: list[int]) -> None:
    assert formats_named(file, source, {"dcp": "systems/torch/dcp", "torch": "systems/torch/torch_save"}) == lines


def options_restated(source: str, known: Collection[str]) -> list[str]:
    """Parameters and texts of a module that are an option's keyword or its spelling."""
    nodes = nodes_of(source)
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = [node.arg for node in nodes if isinstance(node, ast.arg)]
    return [*(name for name in named if name in known), *(text for text in texts if text[:2] == "--" and text in known)]


@pytest.mark.parametrize("file", [file for file in MODULES if inside(file, ["cli", "api.py"])])
def test_an_option_is_stated_once(file: str) -> None:
    """A field of its group; the command line and the Python functions are made from that and name none themselves."""
    from ckpt_tool.cli.verbs import VERBS
    from ckpt_tool.option_kinds.statement import options_of
    from ckpt_tool.options.reading import Show

    options = {
        name: one for verb in VERBS.values() for name, one in verb.options().items() if name not in options_of(Show)
    }
    known = {*options, *(spelled for option in options.values() for spelled in option.names)}
    assert options_restated(MODULES[file], known) == {"api.py": ["from_format"]}.get(file, [])  # of `open`


def test_an_option_that_is_stated_twice_is_seen() -> None:
    source = 'def convert(src, *, tp=None, zeal=1):\n    given = {"--tp": tp, "-x": 1, "tp": 2}\n'
    assert options_restated(source, {"tp", "--tp"}) == ["tp", "--tp"]


EXTRAS = (
    "gguf",
    "torch",
    "remote",
    "ray",
    "sign",
    "delta",
)  # for verbs that not everybody runs: without them these say what to install


def test_every_library_is_a_dependency() -> None:
    """What an option needs comes with the tool, but for extras of large frameworks, stores and keys."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = (*project["dependencies"], *(row for name in EXTRAS for row in project["optional-dependencies"][name]))
    have = {re.split(r"[<>=\[; ]", row)[0].lower().replace("-", "_") for row in stated}
    libraries = {
        module
        for file, source in MODULES.items()
        for _, module, _ in imports_of(source, MODULES)
        if not (module.endswith(".py") or module in MODULES or module in sys.stdlib_module_names)
    }
    assert {{"yaml": "pyyaml", "azure": "azure_storage_blob"}.get(module, module) for module in libraries} <= have


def tracked() -> list[Path]:
    """The text files that git knows, or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in found if path.suffix in TEXT and path.is_file() and path.stat().st_size < 1 << 20]


def test_no_path_of_a_machine_is_in_the_repository() -> None:
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in MACHINE_PATH.finditer(text)]
    assert not found, "\n".join(found)


# -- the checker sees --------------------------------------------------------------------------------------------------

PLANTED = {
    "a higher layer": ("core/planted.py", "from ckpt_tool.run import executor\n"),
    "a higher layer, inside a function": ("storage/planted.py", "def f():\n    import ckpt_tool.commands.inspect\n"),
    "another package of its layer": ("storage/planted.py", "from ckpt_tool.algebra import piece\n"),
    "formats know no plan": ("formats/planted.py", "import ckpt_tool.plan.copy\n"),
    "formats know no families": ("formats/planted.py", "from ckpt_tool import families\n"),
    "families know no storage": ("families/planted.py", "from ckpt_tool.storage.source import Tree\n"),
    "plan knows no storage": ("plan/planted.py", "from ckpt_tool.storage.source import Tree\n"),
    "torch where it is not allowed": ("formats/planted.py", "def f():\n    import torch.nn as nn\n"),
    "rich outside report": ("commands/planted.py", "from rich.table import Table\n"),
    "typer outside the rim": ("commands/planted.py", "import typer\n"),
    "numpy in core": ("core/planted.py", "import numpy as np\n"),
    "numpy at load time": ("plan/planted.py", "import numpy as np\n"),
    "pickle": ("storage/planted.py", "def f(data):\n    import pickle\n"),
    "marshal": ("run/planted.py", "from marshal import loads\n"),
    "importlib": ("formats/planted.py", "import importlib.util\n"),
    "eval": ("algebra/planted.py", "x = eval('1')\n"),
    "exec": ("algebra/planted.py", "exec('1')\n"),
    "torch.load": ("run/compute.py", "def f(p):\n    import torch\n    return torch.load(p)\n"),
    "np.load": ("run/planted.py", "import numpy as np\nx = np.load('a', allow_pickle=True)\n"),
    "except Exception": ("run/planted.py", "try:\n    pass\nexcept Exception:\n    pass\n"),
    "except Exception among others": (
        "run/planted.py",
        "try:\n    pass\nexcept (OSError, Exception) as e:\n    pass\n",
    ),
    "bare except": ("run/planted.py", "try:\n    pass\nexcept:\n    pass\n"),
    "except BaseException": (
        "plan/planted.py",
        "try:\n    pass\nexcept BaseException as e:\n    raise ValueError from e\n",
    ),
    "assert": ("core/planted.py", "def f(n):\n    assert n\n"),
    "print": ("commands/planted.py", "print('done')\n"),
    "an array made of another's parts": (
        "formats/planted.py",
        "def f(a):\n    return StoredArray(a.path, 0, a.dtype, ())\n",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_seen(what: str) -> None:
    file, source = PLANTED[what]
    assert faults_of(file, source), f"the checker is blind to {what}"


SOUND = {
    "a lower layer": ("run/planted.py", "from ckpt_tool.core.box import Box\nimport numpy\n"),
    "its own folder": ("run/planted.py", "from ckpt_tool.run import digest\n"),
    "a type alone": (
        "core/planted.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ckpt_tool.run import executor\n",
    ),
    "cleaning up and raising again": (
        "storage/planted.py",
        "try:\n    pass\nexcept BaseException:\n    f()\n    raise\n",
    ),
    "numpy inside a function": ("plan/planted.py", "def f():\n    import numpy\n"),
    "a method called eval": ("run/planted.py", "model.eval()\n"),
}


@pytest.mark.parametrize("what", SOUND)
def test_sound_code_is_left_alone(what: str) -> None:
    file, source = SOUND[what]
    assert not faults_of(file, source)


def test_a_package_without_a_layer_is_a_fault() -> None:
    with pytest.raises(LookupError, match="lies on no layer"):
        faults_of("helpers/planted.py", "import os\n")


def test_a_planted_circle_is_seen() -> None:
    modules = {"core/a.py": "import ckpt_tool.core.b\n", "core/b.py": "def f():\n    from ckpt_tool.core import a\n"}
    assert circles(modules) == [["core/a.py", "core/b.py", "core/a.py"]]


def test_large_code_is_seen() -> None:
    """A function of too many statements is a fault, and one of many is told."""
    sizes = RULES["sizes"]
    body = "    x = 1\n"
    faults, _ = size_faults("core/planted.py", "def f():\n" + body * (sizes["function_limit"] + 1))
    assert [fault.what for fault in faults] == [f"f has {sizes['function_limit'] + 1} statements, the limit is 60"]
    faults, large = size_faults("core/planted.py", "def f():\n" + body * (sizes["function"] + 1))
    assert not faults
    assert len(large) == 1


def crowded_folders(files: Iterable[str]) -> list[str]:
    """Folders with more Python files than are found at a glance."""
    sizes = RULES["sizes"]
    count = Counter(file.rpartition("/")[0] for file in files)
    return [folder for folder, number in count.items() if number > sizes["folder"] and folder not in sizes["wide"]]


def test_no_folder_is_crowded() -> None:
    """Neither here, nor unseen: a planted folder of too many files is found."""
    assert not crowded_folders(MODULES)
    planted = [f"core/file{number}.py" for number in range(RULES["sizes"]["folder"] + 1)]
    assert crowded_folders(planted) == ["core"]


def classes_of_one_name(modules: Mapping[str, str]) -> dict[str, list[str]]:
    """Class names that several files define, with these files."""
    found: dict[str, list[str]] = {}
    for file, source in modules.items():
        for node in nodes_of(source):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(file)
    return {name: files for name, files in found.items() if len(files) > 1}


def test_a_class_name_has_one_meaning() -> None:
    """Few names are of several classes, and those that are would be seen."""
    several = classes_of_one_name(MODULES)
    assert len(several) <= RULES["sizes"]["classes"], several
    planted = {"a.py": "class Part: ...\n", "b.py": "class Part: ...\n"}
    assert classes_of_one_name(planted) == {"Part": ["a.py", "b.py"]}


def outsiders(modules: Mapping[str, str]) -> dict[str, list[str]]:
    """Files that import modules of a system that is not theirs, with these modules.

    The families' tables name every system's names: they are lists. A system's row (`systems/NAME/__init__.py`) is how
    it is found.
    """
    found: dict[str, list[str]] = {}
    for file, source in modules.items():
        if file.startswith("families/models/"):
            continue
        for _, module, _ in imports_of(source, modules):
            system = "/".join(module.split("/")[:2])
            is_inside = module.startswith("systems/") and module.count("/") > 1 and not module.endswith("/__init__.py")
            if is_inside and not file.startswith(f"{system}/"):
                found.setdefault(file, []).append(module)
    return found


def test_a_system_is_known_to_few_outside() -> None:
    """Few files know the inside of a system that is not theirs, and one that does is seen."""
    found = outsiders(MODULES)
    assert len(found) <= RULES["sizes"]["outsiders"], "\n".join(f"{file}: {names}" for file, names in found.items())
    planted = {"core/a.py": "from ckpt_tool.systems.x import names\n", "systems/x/names.py": "", "systems/x/b.py": ""}
    assert outsiders(planted) == {"core/a.py": ["systems/x/names.py"]}


@pytest.mark.parametrize("path", ["/".join(["", "home", "me", "x"]), "see /".rstrip("/") + "/".join(["", "work", "a"])])
def test_a_machine_path_is_seen(path: str) -> None:
    assert MACHINE_PATH.search(f'open("{path}")')


@pytest.mark.parametrize("text", ["a/home/b", "https://x.org/home/y", "runs/work/7", "~/work/x", "s3://b/root/c"])
def test_an_innocent_path_is_left_alone(text: str) -> None:
    assert not MACHINE_PATH.search(text)
