"""Both READMEs say the same, so do the guide's pages, and every command block works as typed, in a copy of the tree,
from nothing.

The block that runs the tests is run with the selection narrowed (`PYTEST_ADDOPTS`), or it would run itself for ever.
`.ci/run` has typed that block itself when it comes here, and says so by CKPT_TESTS_INSTALLED: its packages are lent to
the others then.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import derive_tables
import pytest

from ckpt_tool import guide
from ckpt_tool.report.guide import page_of
from ckpt_tool.report.plain import Look, render

ROOT = Path(__file__).parents[1]
BOTH = ("README.md", "README_zh.md")
TOPICS = [topic.name for topic in guide.topics()]
PAIRS = [BOTH, *((f"ckpt_tool/guide/en/{topic}.md", f"ckpt_tool/guide/zh/{topic}.md") for topic in TOPICS)]
PAGES = [name for pair in PAIRS for name in pair]
ENGLISH = [pair[0] for pair in PAIRS]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)


def blocks(name, *languages):
    text = (ROOT / name).read_text(encoding="utf-8")
    return [(kind, body) for kind, body in FENCE.findall(text) if kind in languages]


def outline(name):
    text = FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    return [line.split(" ")[0] for line in text.splitlines() if line.startswith("#")]


def rows(name):
    return [line.count("|") for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if line.startswith("|")]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_both_say_the_same(pair):
    english, chinese = pair
    assert blocks(english, "bash", "python") == blocks(chinese, "bash", "python")
    assert outline(english) == outline(chinese)
    assert rows(english) == rows(chinese)
    names = [set(re.findall(r"`([^`\n]+)`", (ROOT / name).read_text(encoding="utf-8"))) for name in pair]
    assert names[0] == names[1]


def test_the_guide_has_the_same_pages_in_both_languages():
    assert TOPICS == [topic.name for topic in guide.topics("zh")]
    listed = [set(re.findall(r"ckpt_tool/guide/\w+/([\w-]+)\.md", (ROOT / name).read_text("utf-8"))) for name in BOTH]
    assert listed == [set(TOPICS)] * 2


def test_the_readmes_are_short():
    assert all(len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 200 for name in BOTH)


def test_tables_are_as_derived():
    assert not derive_tables.differences(), "python tests/derive_tables.py writes them"


def test_a_table_that_is_not_as_derived_is_seen():
    page = ["# x", "| family | y |", "|---|---|", "| `a` | – |", "", "| b |"]
    assert derive_tables.derived(page, "| family |", ["| `c` | ✓ |"]) == [*page[:3], "| `c` | ✓ |", "", "| b |"]
    with pytest.raises(ValueError, match="no table begins with"):
        derive_tables.derived(page, "| 家族 |", [])


@pytest.mark.parametrize("language", guide.LANGUAGES)
@pytest.mark.parametrize("topic", TOPICS)
def test_a_page_is_shown_whole(topic, language):
    """`ckpt help` leaves no word out, in a window of 60 columns too."""
    text = guide.text_of(topic, language)
    page = page_of({"topic": topic, "text": text})
    for width in (None, 60):
        shown = re.sub(r"\s", "", render(page, Look(width=width)))
        for word in re.findall(r"\w+", FENCE.sub(lambda match: match.group(2), text).replace("ckpt_tool/guide", "")):
            assert word in shown, word


def test_the_family_that_is_shown_is_all_of_it(tmp_path):
    """OLMo 2 as the guide shows it: a copy of the package without that file does not know the model; with the listing,
    it does."""
    (body,) = [body for _, body in blocks("ckpt_tool/guide/en/families.md", "python")]
    assert len(body.splitlines()) <= 60
    shutil.copytree(ROOT / "ckpt_tool", tmp_path / "ckpt_tool", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "ckpt_tool/families/models/olmo2.py"
    assert file.read_text() == body
    (tmp_path / "tests").mkdir()
    shutil.copy2(derive_tables.__file__, tmp_path / "tests")
    program = """if True:
        import derive_tables
        from ckpt_tool.families.registry import find
        found = find({"model_type": "olmo2"}, {"model.layers.0.self_attn.q_norm.weight": (24,)})
        print(found.family.name, found.dialect, any("`olmo2`" in row for row in derive_tables.families(0)))"""
    command = [sys.executable, "-P", "-c", program]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{tmp_path / 'tests'}"}
    file.unlink()
    without = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert "for which there is no family" in without.stderr
    file.write_text(body)
    known = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert known.stdout.split() == ["olmo2", "hf", "True"], known.stderr


def test_the_first_blocks_install_and_then_test():
    """Set-up is two commands of one line each: from nothing to a verified reshard, from nothing to the tests."""
    first, second = (body for _, body in blocks("README.md", "bash")[:2])
    assert first.count("\n") == second.count("\n") == 1
    assert "pip install -q ." in first and "ckpt reshard" in first and "ckpt diff" in first
    assert "pip install" in second and "pytest" in second


@pytest.mark.parametrize("name", [name for name in PAGES if blocks(name, "text")])
def test_outputs_that_are_shown_are_real(name):
    """Each `$ ckpt ...` of a text block prints what stands below it, in a terminal of 100 columns."""
    for folder in ("/tmp/ckpt-paddle", "/tmp/ckpt-pretrained"):
        Path(folder).mkdir(exist_ok=True)
    for _, body in blocks(name, "text"):
        for shown in re.split(r"^\$ ", body, flags=re.M)[1:]:
            line, _, output = shown.partition("\n")
            words = [sys.executable, "-m", "ckpt_tool", *line.split()[1:]]
            done = subprocess.run(words, cwd=ROOT, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip() == output.strip(), line


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The files that git knows, as a stranger would have them."""
    if os.environ.get("CKPT_INSIDE_README"):
        pytest.skip("this run was started by a README block")
    target = tmp_path_factory.mktemp("readme") / "ckpt"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: the files of a clone can't be listed")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


@pytest.mark.first
@pytest.mark.timeout(900)
def test_every_block_works_as_typed(clone):
    outside = clone.parent / "bin"
    outside.mkdir()
    (outside / "python3").symlink_to(Path(sys._base_executable).resolve())
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "PYTEST"))}
    environment |= {
        "CKPT_INSIDE_README": "1",
        "PIP_NO_COMPILE": "1",  # of what is installed little is imported
        "PYTEST_ADDOPTS": "tests/test_house.py",
        "PATH": f"{outside}{os.pathsep}{os.environ['PATH']}",
    }
    for number, (kind, body) in enumerate(block for name in ENGLISH for block in blocks(name, "bash", "python")):
        if number == 1 and os.environ.get("CKPT_TESTS_INSTALLED"):
            (inside,) = clone.glob(".venv/lib/python*/site-packages")
            (inside / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
            continue
        body = body.replace("/tmp/ckpt-", f"{clone.parent}/ckpt-")  # typed in a folder of its own: nothing is there yet
        command = ["bash", "-euo", "pipefail", "-c", body]
        if kind == "python":
            command = [str(clone / ".venv" / "bin" / "python"), "-c", body]
        done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, f"block {number}:\n{body}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        if number == 0:
            assert "equal" in done.stdout.lower()
            assert "torch" not in _installed(clone)


def _installed(clone):
    listing = subprocess.run(
        [clone / ".venv" / "bin" / "python", "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True
    )
    return {line.split("==")[0].lower() for line in listing.stdout.splitlines()}
