"""Both READMEs say the same, and every command block of them works as typed, in a copy of the tree, from nothing.

The block that runs the tests is run with the selection narrowed (`PYTEST_ADDOPTS`), or it would run itself for ever. `.ci/run`
has typed that block itself when it comes here, and says so by CKPT_TESTS_INSTALLED: its packages are lent to the others then.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ckpt_tool.families import registry as families
from ckpt_tool.families import rewrite
from ckpt_tool.formats import capabilities, registry

ROOT = Path(__file__).parents[1]
BOTH = ("README.md", "README_zh.md")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)


def blocks(name, *languages):
    text = (ROOT / name).read_text(encoding="utf-8")
    return [(kind, body) for kind, body in FENCE.findall(text) if kind in languages]


def outline(name):
    text = FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    return [line.split(" ")[0] for line in text.splitlines() if line.startswith("#")]


def rows(name):
    return [line.count("|") for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if line.startswith("|")]


def test_both_say_the_same():
    english, chinese = BOTH
    assert blocks(english, "bash", "python") == blocks(chinese, "bash", "python")
    assert outline(english) == outline(chinese)
    assert rows(english) == rows(chinese)
    names = [set(re.findall(r"`([^`\n]+)`", (ROOT / name).read_text(encoding="utf-8"))) for name in BOTH]
    assert names[0] == names[1]


@pytest.mark.parametrize("name", BOTH)
def test_the_table_of_formats_is_the_registry(name):
    """Rows are equal; the Chinese file translates the column names of states alone."""
    text = (ROOT / name).read_text(encoding="utf-8")
    want = capabilities.markdown().splitlines()
    assert all(row in text.splitlines() for row in want[2:]), "put this into the README:\n" + capabilities.markdown()
    assert len(want[2:]) == len(registry.NAMES)


@pytest.mark.parametrize("name", BOTH)
def test_the_table_of_families_is_the_registry(name):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    missing = [row for row in families.markdown().splitlines()[1:] if row not in lines]
    assert not missing, "put this into the README:\n" + families.markdown()


def test_the_family_that_is_added_is_the_real_one(tmp_path):
    """OLMo 2's table, as the READMEs show it: transformers' names and shapes, and back from Megatron's."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers", minversion="5")
    (body,) = [body for _, body in blocks("README.md", "python") if "OLMo 2" in body]
    assert len(body.splitlines()) <= 60
    (tmp_path / "olmo2.py").write_text(body)
    spec = importlib.util.spec_from_file_location("olmo2", tmp_path / "olmo2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.Olmo2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=1)
    with torch.device("meta"):
        model = transformers.Olmo2ForCausalLM(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    made = rewrite.mapping(module.FAMILY, "hf", "megatron", shapes, config.to_dict())
    there = {tensor.name: tensor.shape for tensor in made.made}
    back = rewrite.mapping(module.FAMILY, "megatron", "hf", there, config.to_dict())
    assert {tensor.name: tensor.shape for tensor in back.made} == shapes and not made.dropped + back.dropped
    assert there["decoder.layers.1.self_attention.linear_qkv.weight"] == (32, 16)


def test_the_first_blocks_install_and_then_test():
    first, second = blocks("README.md", "bash")[:2]
    assert "pip install ." in first[1] and "ckpt reshard" in first[1]
    assert "pip install" in second[1] and "pytest" in second[1]


@pytest.mark.parametrize("name", BOTH)
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
        "PYTEST_ADDOPTS": "tests/test_house.py",
        "PATH": f"{outside}{os.pathsep}{os.environ['PATH']}",
    }
    for number, (kind, body) in enumerate(blocks("README.md", "bash", "python")):
        if number == 1 and os.environ.get("CKPT_TESTS_INSTALLED"):
            (inside,) = clone.glob(".venv/lib/python*/site-packages")
            (inside / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
            continue
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
