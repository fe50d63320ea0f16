"""The tables of models, formats and families in the READMEs and the guide, derived from what each says of itself; the
family that the guide shows; and the types of the Python functions, derived from the statements of the options.

    python tests/derive_tables.py            write them
    python tests/derive_tables.py --check    write nothing; exit 1 with a diff where something is not as derived

A table is known by how its head begins; the head is its page's own, in its language, and the rows below are derived.
`tests/test_readme.py` checks them, and so `.ci/run` does.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this tree, not what is installed

import ckpt_tool  # noqa: E402
from ckpt_tool import api  # noqa: E402
from ckpt_tool.core.progress import SILENT  # noqa: E402
from ckpt_tool.families.base import Family  # noqa: E402
from ckpt_tool.families.config.translation import language_model  # noqa: E402
from ckpt_tool.families.experts import expert_layouts  # noqa: E402
from ckpt_tool.families.models import FAMILIES  # noqa: E402
from ckpt_tool.families.registry import find  # noqa: E402
from ckpt_tool.formats.entry import entries, load  # noqa: E402

# language -> (README, how the head of its table of models begins, those of the guide's tables of formats, those of the
# tables of families by `group_of`)
LANGUAGES = {
    "en": (
        "README.md",
        "| kind | models |",
        "| name | what it is |",
        "| format | read |",
        ("| dense |", "| with experts |", "| with recurrent layers |", "| with a tower |"),
    ),
    "zh": (
        "README_zh.md",
        "| 类别 | 模型 |",
        "| 名称 | 说明 |",
        "| 格式 | 读 |",
        ("| 稠密 |", "| 含专家 |", "| 含循环层 |", "| 含视觉或音频塔 |"),
    ),
}
# what only layers with a state of their own have: of Mamba, of gated delta rules, of short convolutions
RECURRENT = re.compile(r"\b(mamba\w*|mixer|linear_attn|A_log|(short_)?conv(1d)?)\b")
SHOWN = "ckpt_tool/families/models/olmo2.py"  # the family that the guide shows, whole


def row(name: str, *cells: str | bool) -> str:
    return f"| `{name}` | {' | '.join(cell if isinstance(cell, str) else '✓' if cell else '–' for cell in cells)} |"


def formats(language: str) -> list[str]:
    return [row(entry.name, getattr(entry, language)) for entry in entries().values()]


def capabilities() -> list[str]:
    """Columns: read, write, model, optimizer, master, EMA, experts, TP, PP, VPP, EP, ETP, DP."""
    states = ("model", "optimizer", "master", "ema")
    degrees = ("tp", "pp", "vpp", "ep", "etp", "dp")
    holds = {name: load(name).holds for name in entries()}
    return [
        row(name, True, True, *(each.has(state) for state in states), True, *(dim in each.mesh for dim in degrees))
        for name, each in holds.items()
    ]


def group_of(family: Family) -> int:
    """Which of the tables of families has it: 0 dense, 1 with experts, 2 with recurrent layers, 3 with a tower, whose
    first class is the whole."""
    if family.language and not family.classes[0].forms:
        return 3
    if any(map(RECURRENT.search, family.table("hf").left)):
        return 2
    return 1 if expert_layouts(family) else 0


def families(group: int) -> list[str]:
    """Columns: the model types, layouts of the experts in the hub's files, the systems whose names the family knows,
    (✓) where there are no Megatron arguments for it, swift where ms-swift lays it otherwise."""
    rows = []
    for family in FAMILIES:
        kinds, layouts = ([f"`{each}`" for each in words] for words in (family.model_types, expert_layouts(family)))
        megatron: bool | str = "megatron" in family.dialects
        known = {**family.tiny, "model_type": family.model_types[0]}
        if megatron and not any(each.forms for each in family.classes) and language_model(known)[0] is None:
            megatron = "(✓)"
        if "megatron-swift" in family.dialects:
            megatron = f"{megatron if isinstance(megatron, str) else '✓'} swift"
        others = (system in family.dialects for system in ("paddle", "meta", "gguf", "maxtext"))
        cells = (", ".join(kinds), ", ".join(layouts) or False, megatron, *others)
        rows += [row(family.name, *cells)] if group_of(family) == group else []
    return rows


def models(groups: tuple[str, ...]) -> list[str]:
    """Columns: a kind of models, the `model_type` of each. groups: how the heads of the tables of families begin, which
    name the kinds."""
    rows = []
    for number, head in enumerate(groups):
        families_of_kind = [family for family in FAMILIES if group_of(family) == number]
        names = sorted(name for family in families_of_kind for name in family.model_types)
        rows.append(f"{head} {', '.join(f'`{name}`' for name in names)} |")
    return rows


def bridges() -> list[str]:
    """Columns: the golden files of Megatron-Bridge and of mcore-bridge, what the latter makes too, and what was not run
    and why. Rows: families with a mapping to Megatron."""
    sys.path.append(str(ROOT / "tests" / "families"))
    import bridge_open

    made: dict[str, tuple[list[str], list[str]]] = {}
    for file in sorted((ROOT / "fixtures" / "bridge").glob("*.config.json")):
        case = file.name.removesuffix(".config.json")
        document = json.loads(file.with_name(f"{case}.json").read_text())
        config = json.loads(file.read_text())
        family = find(config, {name: tuple(shape) for name, shape in document["hub"].items()}).family.name
        made.setdefault(family, ([], []))[document["versions"].startswith("mcore")].append(case)
    rows = []
    for family in sorted({*made, *bridge_open.UNRUN}):
        nvidia, swift = made.get(family, ([], []))
        too = [
            f"`{case}` too{f': {but}' * bool(but)}"
            for case in nvidia
            if (but := bridge_open.ALIKE.get(case)) is not None
        ]
        why = bridge_open.UNRUN.get(family) or bridge_open.SWIFT_UNRUN.get(family, "")
        why = f"mcore-bridge: {why}" if family in bridge_open.SWIFT_UNRUN else why
        cells = [", ".join(f"`{case}`" for case in cases) for cases in (nvidia, swift)]
        rows.append(
            row(
                family, cells[0] or False, "; ".join([each for each in (cells[1], *too) if each]) or False, why or False
            )
        )
    return rows


def listing(lines: list[str], file: str) -> list[str]:
    """A page with the text of a file in the block of Python that begins as the file does."""
    text = (ROOT / file).read_text(encoding="utf-8").splitlines()
    first = next(at for at, line in enumerate(lines) if line == "```python" and lines[at + 1][:7] == text[0][:7]) + 1
    return [*lines[:first], *text, *lines[lines.index("```", first) :]]


STUB = """# The functions of `ckpt_tool.api` with their options, types and docstrings, by tests/derive_tables.py
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike

"""
HOMES = {
    "ckpt_tool.core.documents": ckpt_tool._RESULTS,
    "ckpt_tool.core.progress": ckpt_tool._PROGRESS,
    "ckpt_tool.errors": ckpt_tool._ERRORS,
    "ckpt_tool.run.lazy": ckpt_tool._CATALOG,
}


def stub() -> list[str]:
    """The lines of `ckpt_tool/__init__.pyi`."""
    lines = STUB.splitlines()
    for home, names in HOMES.items():
        if home.endswith("progress"):
            lines.append(f"from {home} import SILENT")
        lines += [f"from {home} import {name} as {name}" for name in sorted(names)]
    lines += ["", "__version__: str", "StrPath = str | PathLike[str]", ""]

    for name in ["open", *sorted(ckpt_tool._FUNCTIONS - {"open"})]:
        lines += function_stub(getattr(api, name))
    return lines[:-1]


def function_stub(function: Callable[..., object]) -> list[str]:
    """A function with its options, their defaults and its docstring, for editors."""
    signature = inspect.signature(function)
    listed: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in listed:
            listed.append("*")
        default = ""
        if parameter.default is not inspect.Parameter.empty:
            is_silent = parameter.default is SILENT
            default = f" = {'SILENT' if is_silent else json.dumps(parameter.default)}"
            default = {" = null": " = None", " = true": " = True", " = false": " = False"}.get(default, default)
        listed.append(f"{parameter.name}: {parameter.annotation}{default}")

    body = inspect.cleandoc(function.__doc__ or "").splitlines()
    described = [f"    {line}".rstrip() for line in body]
    return [
        f"def {function.__name__}(",
        *(f"    {line}," for line in listed),
        f") -> {signature.return_annotation}:",
        f'    r"""{body[0]}',
        *described[1:],
        '    """',
        "",
    ]


def tables() -> Iterator[tuple[str, str, list[str]]]:
    """(file, how the table's head begins, the rows below)."""
    for language, (readme, kind, format_, capability, groups) in LANGUAGES.items():
        yield readme, kind, models(groups)
        yield f"ckpt_tool/guide/{language}/formats.md", format_, formats(language)
        yield f"ckpt_tool/guide/{language}/formats.md", capability, capabilities()
        for group, head in enumerate(groups):
            yield f"ckpt_tool/guide/{language}/families.md", head, families(group)
    yield "fixtures/README.md", "| family | Megatron-Bridge |", bridges()


def derived(lines: list[str], head: str, rows: list[str]) -> list[str]:
    """A page with `rows` below `head` and the line under it. Raises ValueError where no table begins so."""
    first = next((at + 2 for at, line in enumerate(lines) if line.startswith(head)), 0)
    if not first:
        raise ValueError(f"no table begins with {head}")
    behind = next((at for at in range(first, len(lines)) if not lines[at].startswith("|")), len(lines))
    return [*lines[:first], *rows, *lines[behind:]]


def pages() -> dict[str, tuple[list[str], list[str]]]:
    """file -> its lines, and its lines as they should be."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for file, head, rows in tables():
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        found[file] = lines, derived(found.get(file, (lines, lines))[1], head, rows)
    for language in LANGUAGES:
        file = f"ckpt_tool/guide/{language}/families.md"
        found[file] = found[file][0], listing(found[file][1], SHOWN)
    types = "ckpt_tool/__init__.pyi"
    return {**found, types: ((ROOT / types).read_text(encoding="utf-8").splitlines(), stub())}


def differences() -> str:
    """What `--check` prints: a diff, "" where all is as derived."""
    diffs = (difflib.unified_diff(have, want, file, "derived", lineterm="") for file, (have, want) in pages().items())
    return "".join(f"{line}\n" for diff in diffs for line in diff)


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        print(differences(), end="")
        sys.exit(1 if differences() else 0)
    for file, (have, want) in pages().items():
        if have != want:
            (ROOT / file).write_text("\n".join(want) + "\n", encoding="utf-8")
            print(f"wrote {file}")
