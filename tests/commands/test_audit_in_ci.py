"""The GitHub Action and the hook of pre-commit, as far as they run without GitHub: with the shell and the tool."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from exports import release, whole_model

from ckpt_tool import pre_commit

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github/actions/audit"
STATED = yaml.safe_load((ACTION / "action.yml").read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`good`, and `bad model $(touch x)` without its last norm."""
    folder = tmp_path_factory.mktemp("models")
    config, tensors = whole_model("qwen3")
    release(folder / "good", config, tensors, 2)
    del tensors["model.norm.weight"]
    release(folder / "bad model $(touch x)", config, tensors, 2)
    return folder


def acted(step: int, inputs: dict[str, str], folder: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """(a step of the action, its outputs), with GitHub's expressions put in as its runner does."""
    given = {name: each.get("default", "") for name, each in STATED["inputs"].items()} | inputs
    known = STATED["runs"]["steps"][step]

    def put_in(text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: given[found[1]], text)

    tool = folder / "bin/ckpt"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -P -m ckpt_tool "$@"\n')
    tool.chmod(0o755)
    environment = {
        **os.environ,
        **{name: put_in(value) for name, value in known.get("env", {}).items()},
        "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_ACTION_PATH": str(ACTION),
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
    }
    assert "${{" not in known["run"], "an input in a script is a command of whoever gives it"
    line = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", known["run"]]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    outputs = (folder / "output").read_text() if (folder / "output").exists() else ""
    return done, dict(line.split("=", 1) for line in outputs.splitlines())


def test_the_action_audits_each_path(models: Path, tmp_path: Path) -> None:
    paths = "\n".join(f"  {path}" for path in sorted(models.iterdir()))
    done, outputs = acted(1, {"paths": f"{paths}\n\n", "options": "--values\n"}, tmp_path)
    assert done.returncode == 1 and outputs == {"ok": "false", "reports": "ckpt-audit"}, done.stderr
    assert sorted(os.listdir(tmp_path / "ckpt-audit")) == ["1.sarif", "1.xml", "2.sarif", "2.xml"]
    assert "model.norm.weight is not there" in done.stdout and "complete and plausible" in done.stdout
    assert "model.norm.weight is not there" in (tmp_path / "summary").read_text() and not (tmp_path / "x").exists()
    stated = {name: each["value"] for name, each in STATED["outputs"].items()}
    assert stated == {name: f"${{{{ steps.audit.outputs.{name} }}}}" for name in outputs}


@pytest.mark.parametrize(
    ("which", "more", "code", "ok"),
    [
        ("good", {}, 0, "true"),
        ("bad model $(touch x)", {"fail": "false"}, 0, "false"),
        ("nothing", {"fail": "false"}, 7, "false"),
        (None, {}, 2, "false"),
    ],
)
def test_the_action_fails_when_it_should(
    which: str | None, more: dict[str, str], code: int, ok: str, models: Path, tmp_path: Path
) -> None:
    done, outputs = acted(1, {"paths": str(models / which) if which else "", **more}, tmp_path)
    assert (done.returncode, outputs["ok"]) == (code, ok), done.stderr


def test_the_action_installs_nothing_where_the_tool_is(tmp_path: Path) -> None:
    assert acted(0, {}, tmp_path)[0].returncode == 0
    assert (ACTION / "../../..").resolve() == ROOT, "what it installs otherwise"


def test_which_checkpoints_files_are_of(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    bad = "bad model $(touch x)"
    files = [f"{bad}/config.json", f"{bad}/model-00001-of-00002.safetensors", "good/model.safetensors.index.json"]
    assert pre_commit.checkpoints_of(files) == [bad, "good"]
    assert pre_commit.main(files) == 1 and pre_commit.main(files[2:]) == 0 and pre_commit.main([]) == 0
    (tmp_path / "app").mkdir()
    (tmp_path / "app/config.json").write_text("{}")
    shutil.copy2(ROOT / "fixtures/torch/weights.pt", tmp_path / "weights.pt")
    monkeypatch.chdir(tmp_path)
    assert pre_commit.checkpoints_of(["app/config.json", "weights.pt"]) == ["weights.pt"]
    assert pre_commit.main(["--values", "app/config.json", "weights.pt"]) == 0


PLANTED = (
    *("json.py", "typer.py", "pip.py", "re.py", "numpy.py", "fsspec.py", "sitecustomize.py", "usercustomize.py"),
    *("ckpt_tool/__init__.py", "lib/python3/site-packages/sitecustomize.py"),
)
# Python and pip read these of a folder that they are told to look into.
CONFIGS = {
    "planted.pth": "import sitecustomize\n",
    "setup.cfg": "[install]\nprefix = planted\n",
    "pip.conf": "[global]\nindex-url = http://127.0.0.1:9/\n",
    "pyvenv.cfg": "home = .\n",
}


@pytest.fixture
def planted(models: Path, tmp_path: Path) -> Path:
    """A repository with a checkpoint, and files with the names of modules that the tool and pip import."""
    repository = tmp_path / "repository"
    shutil.copytree(models / "good", repository / "model")
    for name, text in CONFIGS.items():
        (repository / name).write_text(text)
    for name in PLANTED:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(f"open({str(tmp_path / 'canary')!r}, 'a').write({name!r})\n")
    return repository


def pointing_at(repository: Path) -> dict[str, str]:
    """Variables of a job that lead Python into the repository, as `PYTHONPATH: ${{ github.workspace }}` does."""
    return {
        "PYTHONPATH": str(repository),
        "PYTHONUSERBASE": str(repository),
        "PYTHONSTARTUP": str(repository / "json.py"),
        "PYTHONWARNINGS": "error::json.Planted",
    }


def test_the_hook_imports_nothing_of_the_repository(planted: Path, tmp_path: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    python, *words = hook["entry"].split()
    environment = {**os.environ, **pointing_at(planted)}
    line = [{"python": sys.executable}[python], *words, "model/model.safetensors.index.json"]
    done = subprocess.run(line, cwd=planted, env=environment, capture_output=True, text=True)
    assert not (tmp_path / "canary").exists(), (tmp_path / "canary").read_text()
    assert done.returncode == 0 and "complete and plausible" in done.stdout, done.stderr


def test_the_action_imports_nothing_of_the_repository(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while it audits, nor while pip installs the tool; the python of this step does everything but that."""
    for name, value in pointing_at(planted).items():
        monkeypatch.setenv(name, value)
    done, outputs = acted(1, {"paths": "model"}, planted)
    assert outputs["ok"] == "true", done.stdout + done.stderr

    shims = tmp_path / "shims"
    shims.mkdir()
    python = shims / "python"
    script = 'for word; do [ "$word" = install ] && break; words="$words $word"; done\n'
    # pip starts Pythons of its own, without -I: the second command stands for them.
    started = f"{sys.executable} -c 'import json, re'"
    python.write_text(f"#!/bin/sh\n{script}{sys.executable} $words --version && exec {started}\n")
    python.chmod(0o755)
    step = STATED["runs"]["steps"][0]
    environment = {"PATH": f"{shims}:/usr/bin:/bin", "GITHUB_ACTION_PATH": str(ACTION), **pointing_at(planted)}
    line = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    installed = subprocess.run(line, cwd=planted, env=environment, capture_output=True, text=True)
    assert installed.returncode == 0 and installed.stdout.startswith("pip "), installed.stderr
    assert not (tmp_path / "canary").exists(), (tmp_path / "canary").read_text()


def test_a_file_that_looks_like_an_option_is_a_file(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pre-commit passes names as they are, and a pull request can name a file as it likes."""
    monkeypatch.chdir(tmp_path)
    names = ["--sarif=written.pt", "-v.pt", "weights.pt"]
    for name in names:
        shutil.copy2(ROOT / "fixtures/torch/weights.pt", tmp_path / name)
    assert pre_commit.main(["--values", *names]) == 0
    assert sorted(os.listdir(tmp_path)) == names


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.timeout(900)
def test_pre_commit_runs_the_hook(models: Path, tmp_path: Path) -> None:
    """In a repository of its own, from this one: it builds an environment with the tool in it."""
    program = shutil.which("pre-commit")
    if program is None:
        pytest.skip("pre-commit is not installed")
    for name, folder in (("good", "good"), ("bad", "bad model $(touch x)")):
        repository = tmp_path / name
        shutil.copytree(models / folder, repository / "model")
        (repository / "config.json").write_text("{}")
        for line in (["init", "-q"], ["add", "."]):
            subprocess.run(["git", *line], cwd=repository, check=True)
        words = [program, "try-repo", str(ROOT), "ckpt-audit", "--all-files", "--verbose"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(words, cwd=repository, env=environment, capture_output=True, text=True)
        assert done.returncode == (0 if name == "good" else 1), done.stdout + done.stderr
        assert ("complete and plausible" if name == "good" else "model.norm.weight is not there") in done.stdout
