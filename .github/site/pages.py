"""The pages of the site, from the texts that exist: README, guide, the verbs' help and the catalogue of errors.

    write_pages("zh", folder)    the Markdown files of one language; returns its navigation for mkdocs

No text has a second copy here: a page is made from its source each time. What the guide's terminal form allows and
Python-Markdown does not (a list right below a sentence) is put right on the way. The order of the guide's pages is that
of the README's table. Help and catalogue are in English in both languages, as `ckpt` prints them.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this tree, not what is installed

from ckpt_tool import guide  # noqa: E402
from ckpt_tool.cli.verbs import VERBS, Verb  # noqa: E402
from ckpt_tool.errors import Code, catalogue  # noqa: E402
from ckpt_tool.option_kinds.statement import Option, ordered_headings  # noqa: E402
from ckpt_tool.report.explanation import EXITS  # noqa: E402

READMES = {"en": "README.md", "zh": "README_zh.md"}
WORDS = {
    "en": {
        "home": "Home",
        "tasks": "By task",
        "reference": "Reference",
        "commands": "Commands",
        "errors": "Error codes",
        "arguments": "Arguments",
        "examples": "Examples",
        "why": "Why",
        "do": "What to do",
        "exit": "Exit code",
        "about commands": "What `ckpt VERB --help` shows. `ckpt VERB -h` lists the everyday options alone.",
        "about errors": "What `ckpt explain CODE` shows, by exit code. Codes are stable: scripts may match on them.",
    },
    "zh": {
        "home": "首页",
        "tasks": "按任务",
        "reference": "参考",
        "commands": "命令",
        "errors": "错误码",
        "arguments": "参数",
        "examples": "示例",
        "why": "原因",
        "do": "怎么办",
        "exit": "退出码",
        "about commands": "即 `ckpt VERB --help` 显示的内容（英文）。`ckpt VERB -h` 只列出常用选项。",
        "about errors": "即 `ckpt explain CODE` 显示的内容（英文），按退出码排列。错误码不会改变，脚本可以依赖。",
    },
}
FENCE = "```"
NO_CONTENTS = "---\nhide:\n  - toc\n---\n\n"  # for pages with hundreds of headings


def write_pages(language: str, folder: Path) -> list[Any]:
    """Write every page of a language below `folder`. Returns the navigation, as mkdocs has it in its config."""
    words = WORDS[language]
    pages = {"index.md": home_page(language)}
    tasks, reference = guide_order(language)
    for topic in (*tasks, *reference):
        pages[f"{topic}.md"] = for_markdown(guide.text_of(topic, language))

    pages["commands/index.md"] = command_list(words)
    for verb in VERBS.values():
        pages[f"commands/{verb.name}.md"] = command_page(verb, words)

    codes = codes_by_exit()
    pages["errors/index.md"] = error_list(codes, words)
    for exit_code, rows in codes.items():
        pages[f"errors/{error_file(exit_code)}"] = error_page(exit_code, rows, words)

    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    command_pages = [f"commands/{name}.md" for name in VERBS]
    error_pages = [{exit_title(exit_code, words): f"errors/{error_file(exit_code)}"} for exit_code in codes]
    return [
        {words["home"]: "index.md"},
        {words["tasks"]: [f"{topic}.md" for topic in tasks]},
        {words["reference"]: [f"{topic}.md" for topic in reference]},
        {words["commands"]: ["commands/index.md", *command_pages]},
        {words["errors"]: ["errors/index.md", *error_pages]},
    ]


# -- README and guide --------------------------------------------------------------------------------------------------


def guide_order(language: str) -> tuple[list[str], list[str]]:
    """The guide's pages in the order of the README's table: its first row, which is by task, and the others.

    Raises ValueError where the table and the pages that exist are not the same.
    """
    linked = re.compile(rf"\(ckpt_tool/guide/{language}/([\w-]+)\.md\)")
    lines = (ROOT / READMES[language]).read_text(encoding="utf-8").splitlines()
    rows = [linked.findall(line) for line in lines if line.startswith("| [`")]
    listed = [topic for row in rows for topic in row]
    existing = [topic.name for topic in guide.topics(language)]
    if sorted(listed) != sorted(existing):
        odd = sorted(set(listed) ^ set(existing)) or sorted({name for name in listed if listed.count(name) > 1})
        raise ValueError(f"{READMES[language]}: its table of the guide is not the pages that exist: {', '.join(odd)}")
    return rows[0], listed[len(rows[0]) :]


def home_page(language: str) -> str:
    """The README, with links to the site's pages; a link to a file that is no page is the file's name."""
    text = (ROOT / READMES[language]).read_text(encoding="utf-8")
    others = "|".join(re.escape(name) for code, name in READMES.items() if code != language)
    text = re.sub(rf"^\[[^\]]+\]\((?:{others})\)\n", "", text, flags=re.MULTILINE)
    text = text.replace(f"](ckpt_tool/guide/{language}/", "](")
    return for_markdown(re.sub(r"\[([^\]]+)\]\((?!https?:)(?![\w-]+\.md[)#])[^)]+\)", r"\1", text))


def for_markdown(text: str) -> str:
    """The same text for Python-Markdown: an empty line before a list, and no line break between two Chinese
    characters, which a browser would show as a space."""
    lines: list[str] = []
    in_fence = False
    for line in text.splitlines():
        before = lines[-1] if lines else ""
        in_text = not in_fence and bool(before.strip()) and not before.startswith(("#", "|", FENCE))
        is_item = re.match(r"\s*(?:[-*]|\d+\.) ", line) is not None
        follows_item = re.match(r"\s*(?:[-*]|\d+\.) |\s", before) is not None
        if line.startswith(FENCE):
            in_fence = not in_fence
            lines.append(line)
        elif in_text and is_item and not follows_item:
            lines += ["", line]
        elif in_text and not is_item and line.strip() and not line.startswith(("#", "|")) and _joins(before, line):
            lines[-1] = before.rstrip() + line.strip()
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _joins(before: str, line: str) -> bool:
    """Whether two lines of a paragraph meet in Chinese text, which has no spaces."""
    return not before.rstrip()[-1].isascii() and not line.strip()[0].isascii()


# -- commands ----------------------------------------------------------------------------------------------------------


def command_list(words: dict[str, str]) -> str:
    rows = [f"[`ckpt {verb.name}`]({verb.name}.md)\n:   {_escaped(verb.summary)}\n" for verb in VERBS.values()]
    return f"# {words['commands']}\n\n{words['about commands']}\n\n" + "\n".join(rows)


def command_page(verb: Verb, words: dict[str, str]) -> str:
    """A verb: what it does, its line, its arguments, its options under the headings of its help, and examples."""
    usage = " ".join(("ckpt", verb.name, "[OPTIONS]", *(argument.metavar for argument in verb.arguments)))
    parts = [f"# ckpt {verb.name}", _escaped(" ".join(verb.about.split())), f"{FENCE}text\n{usage}\n{FENCE}"]
    if verb.arguments:
        parts.append(f"## {words['arguments']}")
        parts += [f"`{argument.metavar}`\n:   {_escaped(argument.help)}" for argument in verb.arguments]

    headings: dict[str, list[Option]] = defaultdict(list)
    for option in verb.options().values():
        headings[option.heading].append(option)
    for heading in ordered_headings(headings):
        parts.append(f"## {_escaped(heading)}")
        parts += [f"`{_option_names(option)}`\n:   {_escaped(option.help)}" for option in headings[heading]]

    examples = "\n".join(verb.examples)
    parts += [f"## {words['examples']}", f"{FENCE}sh\n{examples}\n{FENCE}"]
    return "\n\n".join(parts) + "\n"


def _option_names(option: Option) -> str:
    names = ", ".join(sorted(option.names, key=len))
    return f"{names} {option.metavar}".rstrip()


def _escaped(text: str) -> str:
    """Plain text as Markdown; what is between backticks stays code."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([\\`*_{}\[\]#|])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)


# -- errors ------------------------------------------------------------------------------------------------------------


def codes_by_exit() -> dict[int | None, list[Code]]:
    """The catalogue under its exit codes, in the order in which `ckpt explain` lists them."""
    found = {exit_code: [row for row in catalogue().values() if row.exit_code == exit_code] for exit_code in EXITS}
    return {exit_code: rows for exit_code, rows in found.items() if rows}


def error_file(exit_code: int | None) -> str:
    return f"exit-{'other' if exit_code is None else exit_code}.md"


def exit_title(exit_code: int | None, words: dict[str, str]) -> str:
    meaning = EXITS[exit_code]
    return f"{words['exit']}: {meaning}" if exit_code is None else f"{words['exit']} {exit_code}: {meaning}"


def error_list(codes: dict[int | None, list[Code]], words: dict[str, str]) -> str:
    parts = [f"{NO_CONTENTS}# {words['errors']}", words["about errors"]]
    for exit_code, rows in codes.items():
        parts.append(f"## {exit_title(exit_code, words)}")
        links = (f"- [{row.code}]({error_file(exit_code)}#{row.code.lower()}) {_escaped(row.title)}" for row in rows)
        parts.append("\n".join(links))
    return "\n\n".join(parts) + "\n"


def error_page(exit_code: int | None, rows: list[Code], words: dict[str, str]) -> str:
    parts = [f"{NO_CONTENTS}# {exit_title(exit_code, words)}"]
    for row in rows:
        parts += [
            f"## {row.code}: {_escaped(row.title)} {{ #{row.code.lower()} }}",
            f"**{words['why']}**: {_escaped(row.why)}",
            f"**{words['do']}**: {_escaped(row.do)}",
        ]
    return "\n\n".join(parts) + "\n"
