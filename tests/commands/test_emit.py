"""Job files: what they hold is run here as the engine would run it, and comes to one output with the right bytes."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_tool.cli import run
from ckpt_tool.conversion import job_file
from ckpt_tool.conversion.plan_file import load_plan
from ckpt_tool.option_kinds.statement import RUN, values_of, words_of
from ckpt_tool.options.writing import ENGINES, Writing

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "fixtures" / "dcp" / "fsdp2_dp4"
NAMES = (
    "plain",
    "two words",
    'o\'clock "$(touch owned)" `x` #: {a}',
    "first\nexit 9\n#SBATCH --wrap=x",
    "模型 $$ $(JOB_COMPLETIONS) \U0001f600\x85",
)


class Place:
    """A folder with a plan that writes `out`, and what the same conversion writes at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = folder / "plan.json"
        self.out = folder / "out"
        self.bin = folder.parent / "bin"
        folder.mkdir(exist_ok=True)
        self.bin.mkdir(exist_ok=True)
        (self.bin / "ckpt").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ckpt_tool "$@"\n')
        (self.bin / "ckpt").chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **more}

    def line(self, *more: str) -> list[str]:
        return ["convert", str(SOURCE), str(self.out), "--to", "sharded", "--tp", "2", "-q", *more]

    def tasks(self, command: list[str], variable: str, first: int, **more: str) -> None:
        """Eight workers, one after the other, in a folder that is none of theirs."""
        for task in range(first, first + 8):
            environment = self.environment(**{variable: str(task)}, **more)
            ended = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
            assert ended.returncode == 0, ended.stderr


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=NAMES, ids=range(len(NAMES)))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    folder = tmp_path / request.param
    folder.mkdir()
    return Place(folder)


@pytest.fixture
def wanted(tmp_path: Path) -> dict[str, bytes]:
    out = tmp_path / "wanted"
    assert run(["convert", str(SOURCE), str(out), "--to", "sharded", "--tp", "2", "-q"]) == 0
    return files(out)


@pytest.mark.share(6)
@pytest.mark.parametrize("way", [[], ["--part", "auto"]], ids=["claim", "part"])
def test_an_array_of_slurm_comes_to_one_output(place: Place, wanted: dict[str, bytes], way: list[str]) -> None:
    job = place.folder / "job"
    assert run(place.line("--plan", str(place.plan))) == 0
    assert run(["apply", str(place.plan), *way, "--emit", "slurm", str(job), "-q"]) == 0
    lines = job.read_text().splitlines()
    assert "#SBATCH --array=1-8" in lines[: lines.index("set -eu")] and not place.out.exists()
    assert ("others may come later" in job.read_text()) == (not way)
    array = {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "8"}
    place.tasks(["bash", str(job)], "SLURM_ARRAY_TASK_ID", 1, **array)
    assert files(place.out) == wanted


@pytest.mark.share(12)
@pytest.mark.parametrize("way", [[], ["--part", "auto"]], ids=["claim", "part"])
def test_a_job_of_kubernetes_comes_to_one_output(place: Place, wanted: dict[str, bytes], way: list[str]) -> None:
    yaml = pytest.importorskip("yaml")
    job = place.folder / "job.yaml"
    assert run(place.line("--plan", str(place.plan))) == 0
    assert run(["apply", str(place.plan), *way, "--emit", "k8s", str(job), "-q"]) == 0
    spec = yaml.safe_load(job.read_text())["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 8
    mounts = [Path(each["mountPath"]) for each in container["volumeMounts"]]
    for path in (place.plan, SOURCE, place.out):
        assert any(path.resolve().is_relative_to(mount) for mount in mounts)
    assert len(mounts) == len(spec["template"]["spec"]["volumes"])
    variables = {each["name"]: each["value"] for each in container["env"]}
    command = [
        re.sub(r"\$\$|\$\((\w+)\)", lambda at: variables.get(at[1], at[0]) if at[1] else "$", word)
        for word in container["command"]
    ]
    place.tasks(command, "JOB_COMPLETION_INDEX", 0, **variables)
    assert files(place.out) == wanted


def test_a_program_for_ray_submits_the_command(place: Place) -> None:
    """Against a stand-in of ray's client, which writes down what is submitted."""
    job = place.folder / "job.py"
    ray = place.folder.parent / "ray"
    assert run(place.line("--plan", str(place.plan), "--emit", "ray", str(job), "--threads", "3")) == 0
    ray.mkdir()
    (ray / "__init__.py").touch()
    (ray / "job_submission.py").write_text(
        "class JobSubmissionClient:\n"
        "    def __init__(self, address): assert address == 'http://head:8265'\n"
        "    def submit_job(self, *, entrypoint, metadata): open('asked', 'w').write(entrypoint); return 'job-1'\n"
    )
    environment = place.environment(RAY_DASHBOARD="http://head:8265", PYTHONPATH=str(ray.parent))
    said = subprocess.run(
        [sys.executable, str(job)], env=environment, cwd=ray.parent, capture_output=True, text=True, check=True
    ).stdout
    command = ["ckpt", "apply", str(place.plan), "--ray", "auto", "--threads", "3"]
    assert shlex.split((ray.parent / "asked").read_text()) == command and "job-1" in said
    ast.parse(job.read_text())
    assert not place.out.exists()


@pytest.fixture
def plain(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_that_is_there_stays(plain: Place, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = plain.folder / "job"
    job.write_text("mine")
    assert run(plain.line("--plan", str(plain.plan), "--emit", engine, str(job))) == 5
    assert "E0513" in capsys.readouterr().err and job.read_text() == "mine" and not plain.plan.exists()
    job.unlink()
    plain.plan.write_text("mine")
    assert run(plain.line("--plan", str(plain.plan), "--emit", engine, str(job))) == 5
    assert "E0506" in capsys.readouterr().err and not job.exists()


@pytest.mark.parametrize(
    "more, code",
    [
        (["--part", "2/8"], "E0266"),
        (["--ray", "auto"], "E0266"),
        (["--emit", "slurm", str(SOURCE / "job")], "E0510"),
        (["--emit", "slurm", "OUT/job"], "E0510"),
        (["--emit", "slrm", "job"], "E0280"),
        (["--emit", "slurm", "s3://b/job"], "E0280"),
        (["--emit", "slurm"], "E0283"),
        (["--emit", "slurm", "--claim"], "E0280"),
        (["--emit", "ray", "JOB", "--claim"], "E0266"),
        (["--emit", "ray", "JOB", "--part", "auto"], "E0266"),
    ],
)
def test_what_is_refused(plain: Place, more: list[str], code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plain.line("--plan", str(plain.plan))) == 0
    capsys.readouterr()
    job = ["--emit", "slurm", str(plain.folder / "job")] if "--emit" not in more else []
    more = [word.replace("OUT", str(plain.out)).replace("JOB", str(plain.folder / "job")) for word in more]
    assert run(["apply", str(plain.plan), *job, *more]) in (2, 5)
    assert code in capsys.readouterr().err
    assert not (plain.folder / "job").exists() and not (SOURCE / "job").exists()


def test_a_writer_wants_a_plan_to_run(plain: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plain.line("--emit", "slurm", str(plain.folder / "job"))) == 2
    assert "--plan FILE" in capsys.readouterr().err and not (plain.folder / "job").exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_output_in_a_store_is_shared_out_too(plain: Place, engine: str) -> None:
    """Nothing is asked of the store; the file says where its credentials come from."""
    job = plain.folder / "job"
    line = [word.replace(str(plain.out), "s3://bucket/run/out") for word in plain.line("--plan", str(plain.plan))]
    assert run([*line, "--emit", engine, str(job)]) == 0
    text = job.read_text()
    assert ("'--ray'" if engine == "ray" else "--claim") in text
    assert ("YOUR-SECRET" if engine == "k8s" else "Credentials of the store") in text


def test_a_relative_source_is_found_from_anywhere(
    tmp_path: Path, wanted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml = pytest.importorskip("yaml")
    place = Place(tmp_path / "it's here")
    shutil.copytree(SOURCE, place.folder / "source")
    monkeypatch.chdir(place.folder)
    assert run(["convert", "source", "out", "--to", "sharded", "--tp", "2", "--plan", "plan.json", "-q"]) == 0
    for engine in ("slurm", "k8s"):
        assert run(["apply", "plan.json", "--emit", engine, engine, "-q"]) == 0
    (container,) = yaml.safe_load(Path("k8s").read_text())["spec"]["template"]["spec"]["containers"]
    assert container["workingDir"] == str(place.folder)
    place.tasks(["bash", str(place.folder / "slurm")], "SLURM_ARRAY_TASK_ID", 1, SLURM_ARRAY_TASK_COUNT="8")
    assert files(place.out) == wanted
    capsys.readouterr()
    assert run(["apply", "plan.json", "--emit", "ray", "ray"]) == 2 and "E0278" in capsys.readouterr().err


def test_kubernetes_gets_no_name_that_it_can_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(tmp_path / os.fsdecode(b"\xff"))
    assert run(place.line("--plan", str(place.plan), "--emit", "k8s", str(tmp_path / "job"))) == 2
    assert "E0278" in capsys.readouterr().err
    assert not (tmp_path / "job").exists() and not place.plan.exists()


def test_a_worker_has_memory_for_the_plan_and_no_volume_lies_in_another(plain: Place) -> None:
    assert run(plain.line("--plan", str(plain.plan))) == 0
    plan = load_plan(str(plain.plan))
    work = job_file._work_of(plan, str(plain.plan), ["--claim"], Writing())
    os.truncate(plain.plan, 1 << 30)
    assert job_file._work_of(plan, str(plain.plan), ["--claim"], Writing()).memory == work.memory + 8
    assert job_file._above(["/a/plan", "/a/b/c/source", "/ab/c/out"]) == ["/a", "/ab/c"]


def test_options_come_along(plain: Place) -> None:
    job = plain.folder / "job"
    given = ["--no-fsync", "--memory", "300MiB", "--verify", "full", "--force", "--threads", "6"]
    assert run(plain.line("--plan", str(plain.plan), *given, "--emit", "slurm", str(job))) == 0
    *_, last = job.read_text().splitlines()
    words = shlex.split(last)[4:]
    assert words[0] == "--claim" and "#SBATCH --cpus-per-task=6" in job.read_text()
    assert {"--no-fsync", "--force"} < set(words) and words[words.index("--verify") + 1] == "full"
    assert words[words.index("--memory") + 1] == str(300 << 20)


@pytest.mark.parametrize("pinned", ["256MiB,4MiB", "256MiB"])
def test_words_of_options_are_read_back_as_they_were(pinned: str) -> None:
    given = {"force": True, "fsync": False, "memory": "2GiB", "threads": 3, "pinned": pinned, "verify": "off"}
    (writing,) = values_of(given, Writing)
    words = iter(words_of(writing, RUN))
    again = dict[str, object]()
    for word in words:
        name = word[2:].removeprefix("no-")
        again[name] = not word.startswith("--no-") if name in ("force", "fsync") else next(words)
    assert values_of(again, Writing) == [writing]


@pytest.mark.parametrize("engine", ["slurm", "k8s", "ray"])
def test_the_comments_name_the_files_themselves(engine: str, tmp_path: Path) -> None:
    """No placeholder: the first lines can be pasted. A path that would end the comment is not in it."""
    from ckpt_tool.conversion.job_file import _head

    plan, job = str(tmp_path / "my plan.json"), str(tmp_path / f"{engine}.job")
    lines = _head("sbatch", job, plan).splitlines()
    assert lines[0].endswith(f"sbatch {job}") and lines[1].endswith(f"ckpt status '{plan}' --watch")
    odd = _head("sbatch", "a\nrm x", plan).splitlines()
    assert len(odd) == len(lines) and all(line.startswith("#") for line in odd) and "rm x" not in "".join(odd)
