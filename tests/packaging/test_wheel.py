"""The wheel holds the package and its compiled loops and nothing else, with and without a compiler, from a clone and
from the sdist.

Marked slow, as most build a wheel (13 s of CPU for the loops); `.ci/run` runs them as a step of their own. They need
the extra `package` (hatchling, twine, check-wheel-contents) and most of them a C compiler. No network."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

hatchling = pytest.importorskip("hatchling", reason="the extra `package` is not installed: no wheel is built")

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
SOURCES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore", "ckpt_tool", "kernels")
LIBRARY = "ckpt_tool/compiled/libckpt_loops.so"
REASON = "ckpt_tool/compiled/no_library.txt"
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def build(source: Path, out: Path, target: str = "wheel", **variables: str) -> subprocess.CompletedProcess[str]:
    """What a frontend without isolation does. variables: of the environment."""
    environment = {name: text for name, text in os.environ.items() if name not in ("CC", "CFLAGS", "LDFLAGS")}
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)],
        cwd=source,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=280,
    )


def only(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as opened:
        return opened.namelist()


def installed(wheel: Path, folder: Path) -> Path:
    """The wheel's files in a folder for PYTHONPATH: what pip does with them, without its scripts."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    return folder


def ckpt(packages: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The verb by the package of that folder, with nothing on the PATH."""
    environment = {"PATH": "/nonexistent", "HOME": str(home), "PYTHONPATH": str(packages)}
    return subprocess.run(
        [sys.executable, "-m", "ckpt_tool", *arguments],
        cwd=home.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this tree."""
    out = tmp_path_factory.mktemp("from-tree")
    done = build(ROOT, out, CKPT_BUILD_COMPILED="required")
    assert done.returncode == 0, done.stdout + done.stderr
    return only(out)


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this tree where no compiler is on the PATH."""
    out = tmp_path_factory.mktemp("without-compiler")
    done = build(ROOT, out, PATH="/nonexistent")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "without compiled loops" in done.stdout + done.stderr
    return only(out)


@pytest.mark.slow
@needs_compiler
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = names_in(wheel)
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2 and all(top == "ckpt_tool" or top.endswith(".dist-info") for top in tops)
    assert LIBRARY in names and REASON not in names and "ckpt_tool/_kernels/ck.h" in names
    compiled = [name for name in names if name.startswith("ckpt_tool/compiled/")]
    assert not [name for name in compiled if name.endswith((".c", ".h", "build.py", "sources.py"))], (
        "what builds it stays out"
    )
    documents = [name for name in names if name.endswith(".md") and not name.startswith("ckpt_tool/guide/")]
    assert not documents
    assert wheel.name.split("-")[2:4] == ["py3", "none"] and "any" not in wheel.name
    with zipfile.ZipFile(wheel) as opened:
        about = next(name for name in names if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in opened.read(about).decode()


@pytest.mark.slow
@needs_compiler
def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "sdist", "sdist")
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(only(tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    done = build(only(tmp_path / "unpacked"), tmp_path / "wheel", CKPT_BUILD_COMPILED="required")
    assert done.returncode == 0, done.stdout + done.stderr
    again = only(tmp_path / "wheel")
    assert again.name == wheel.name and names_in(again) == names_in(wheel)
    assert again.read_bytes() == wheel.read_bytes()


@pytest.mark.slow
@needs_compiler
def test_the_checks_of_a_release_pass(wheel: Path) -> None:
    for module, command in (("twine", ("twine", "check", "--strict")), ("check_wheel_contents",) * 2):
        pytest.importorskip(module)
        words = [command] if isinstance(command, str) else [*command]
        done = subprocess.run([sys.executable, "-m", *words, str(wheel)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@needs_compiler
def test_the_wheel_runs_at_compiled_speed_without_a_compiler(wheel: Path, pure_wheel: Path, tmp_path: Path) -> None:
    """And the pure one by NumPy, and both say so, write the same files and leave nothing in HOME."""
    made: dict[str, bytes] = {}
    for built, is_compiled in ((wheel, True), (pure_wheel, False)):
        packages = installed(built, tmp_path / f"packages-{is_compiled}")
        home = tmp_path / f"home-{is_compiled}"
        home.mkdir(mode=0o555)
        done = ckpt(packages, home, "doctor", "--json")
        assert done.returncode == 0, done.stderr
        compiled: dict[str, Any] = json.loads(done.stdout)["compiled"]
        if is_compiled:
            assert compiled["uses"] in ("avx512", "avx2", "baseline") and compiled["compiler"]
        else:
            assert compiled["uses"] == "numpy" and "no C compiler" in compiled["reason"]

        out = tmp_path / f"out-{is_compiled}"
        gguf = str(FIXTURES / "gguf-made" / "quantised.gguf")
        done = ckpt(packages, home, "convert", gguf, str(out), "--to", "safetensors", "--dequantize", "-q")
        assert done.returncode == 0, done.stderr
        made[str(is_compiled)] = (out / "model.safetensors").read_bytes()
        assert not list(home.iterdir())
    assert made["True"] == made["False"]


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_for_any_platform_and_says_why(pure_wheel: Path) -> None:
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    assert LIBRARY not in names_in(pure_wheel)
    with zipfile.ZipFile(pure_wheel) as opened:
        assert "no C compiler" in opened.read(REASON).decode()


@pytest.mark.slow
def test_a_compiler_that_fails_means_numpy_or_an_error_where_the_library_is_required(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo cc 1 && exit\necho 'error: no stdio.h' >&2; exit 3\n"
    )
    compiler.chmod(0o755)
    done = build(ROOT, tmp_path / "wheel", CC=str(compiler))
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(only(tmp_path / "wheel")) as opened:
        assert "cc failed with exit code 3: error: no stdio.h" in opened.read(REASON).decode()

    done = build(ROOT, tmp_path / "required", CC=str(compiler), CKPT_BUILD_COMPILED="required")
    assert done.returncode != 0 and "can't be built: cc failed" in done.stdout + done.stderr
    assert not (tmp_path / "required").exists() or not list((tmp_path / "required").iterdir())


@pytest.mark.slow
def test_an_unknown_setting_builds_nothing(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "out", CKPT_BUILD_COMPILED="on")
    assert done.returncode != 0 and "CKPT_BUILD_COMPILED=on is unknown" in done.stdout + done.stderr


@pytest.mark.slow
@needs_compiler
def test_an_editable_install_gets_the_library_next_to_the_sources(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    (tree / LIBRARY).unlink(missing_ok=True)
    program = "import hatchling.build; hatchling.build.build_editable('.')"
    subprocess.run([sys.executable, "-c", program], cwd=tree, check=True, timeout=280)
    home = tmp_path / "home"
    home.mkdir()
    done = ckpt(tree, home, "doctor", "--json")
    assert json.loads(done.stdout)["compiled"]["uses"] in ("avx512", "avx2", "baseline"), done.stderr


# -- the tag -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "machine", "tag"),
    [
        ("linux-x86_64", "x86_64", "linux_x86_64"),
        ("linux-aarch64", "aarch64", "linux_aarch64"),
        ("macosx-11.0-arm64", "arm64", "macosx_11_0_arm64"),
        ("macosx-10.9-universal2", "arm64", "macosx_11_0_arm64"),
        ("macosx-10.13-universal2", "x86_64", "macosx_10_13_x86_64"),
    ],
)
def test_the_tag_names_what_the_compiler_makes(
    host: str, machine: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", host)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert hook._host_platform() == tag
    oldest = ".".join(tag.split("_")[1:3])
    assert hook._deployment_target(tag) == ({"MACOSX_DEPLOYMENT_TARGET": oldest} if "macosx" in tag else {})
