"""Where a run may write: no URL is ever a path, and what an option makes besides lies in no source and in no output."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_tool as ckpt
from ckpt_tool.cli import run
from ckpt_tool.errors import UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures"
MODEL = FIXTURES / "safetensors" / "llama_one_file"
URLS = (
    "s3://bucket/out",
    "gs://b/o",
    "hf://me/model",
    "memory://x",
    "zip://a::s3://b/c",
    "file:///tmp/x",
    "S3://B/out",
)
# every option and argument that names what is to be written: verb and the rest of its line, with URL in its place
WRITTEN: dict[str, tuple[str, ...]] = {
    "convert": ("convert", "{src}", "{url}", "--to", "safetensors"),
    "convert dry": ("convert", "{src}", "{url}", "--to", "dcp", "--dry-run"),
    "reshard": ("reshard", "{src}", "{url}"),
    "merge": ("merge", "{src}", "{url}"),
    "--plan": ("convert", "{src}", "out", "--to", "dcp", "--plan", "{url}"),
    "--report": ("inspect", "{src}", "--report", "{url}"),
    "--report of a writer": ("convert", "{src}", "out", "--to", "dcp", "--report", "{url}"),
    "validate --keep": ("validate", "--keep", "{url}"),
    "kernels --out": ("kernels", "build", "--out", "{url}"),
    "clean": ("clean", "{url}"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a source, where the command runs."""
    shutil.copytree(MODEL, tmp_path / "src")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


OUTPUTS = ("convert", "convert dry", "reshard", "merge", "clean")  # of these a place in a store with S3's protocol


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("line", WRITTEN)
def test_a_url_is_never_a_path(line: str, url: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if line in OUTPUTS and url.lower().startswith("s3:"):
        return  # tests/stores/test_writing.py
    before = files(place)
    words = [word.format(src="src", url=url) for word in WRITTEN[line]]
    assert run([*words, "--json"]) == 2
    error = json.loads(capsys.readouterr().err)["error"]
    assert "is a URL" in error["message"] and error["code"] in ("E1610", "E0280")
    if url.startswith("file"):
        assert "write it as a path: /tmp/x" in error["hint"]
    elif url.lower().startswith("s3:"):
        assert "a file of this machine" in error["message"] and "local path" in error["hint"]
    else:
        assert "S3's protocol" in error["message"] and "rclone" in error["hint"] and "mkdir" not in error["hint"]
    assert files(place) == before


@pytest.mark.parametrize("verb", [ckpt.convert, ckpt.reshard])
def test_nor_from_python(verb: Callable[..., Any], place: Path) -> None:
    to = {"to": "dcp"} if verb is ckpt.convert else {}
    with pytest.raises(UsageError, match="is a URL"):
        verb("src", "gs://bucket/out", **to)
    with pytest.raises(UsageError, match="is a URL"):
        verb("src", "out", plan="s3://bucket/p.json", **to)
    with pytest.raises(UsageError, match="is a URL"):
        ckpt.merge(["src"], "gs://bucket/out")
    assert files(place) == sorted(["src", *(f"src/{name}" for name in files(MODEL))])


def test_nor_one_that_lost_a_slash(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What pathlib makes of a URL would be a folder `s3:`, and was one."""
    (place / "s3:" / "bucket").mkdir(parents=True)
    before = files(place)
    with pytest.raises(UsageError, match="is a URL") as info:
        ckpt.convert("src", Path("s3://bucket/out"), to="dcp")
    assert "write s3://bucket/out" in str(info.value.hint) and "./s3:/bucket/out" in str(info.value.hint)
    assert run(["inspect", "gs:/bucket/run"]) == 2 and "write gs://bucket/run" in capsys.readouterr().err
    assert run(["apply", "s3://bucket/plan"]) == 2 and "s3://bucket/plan" in capsys.readouterr().err
    assert files(place) == before
    assert run(["convert", "src", "./s3:/bucket/out", "--to", "dcp"]) == 0  # said in words
    assert run(["inspect", "s3:/bucket/out"]) == 0  # which is there


# -- files beside the output -------------------------------------------------------------------------------------------

# every option whose file is made besides; a bad place must be refused by all of them in the same way
OPTIONS = ("--plan", "--report")
LINES = {
    "convert": ("convert", "src", "out", "--to", "dcp"),
    "reshard": ("reshard", "src", "out"),
    "merge": ("merge", "src", "out"),
}
PLACES: dict[str, str] = {
    "in the source": "src/x",
    "below it": "src/sub/x",
    "through a link": "link/x",
    "by dots": "other/../src/x",
    "in the output that is replaced": "out/x",
    "in place of the output": "out",
}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("option", OPTIONS)
def test_no_other_file_in_a_source_or_an_output(
    option: str, where: str, line: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "src" / "sub").mkdir()
    (place / "other").mkdir()
    (place / "link").symlink_to("src")
    if where == "in the output that is replaced":
        (place / "out").mkdir()
    before = files(place)
    assert run([*LINES[line], "--force", option, PLACES[where], "--json"]) == 5
    error = json.loads(capsys.readouterr().err)["error"]
    assert error["code"] == "E0510" and option in error["message"]
    assert ("source" if "out" not in PLACES[where] else "output") in error["message"]
    assert files(place) == before


@pytest.mark.parametrize("option", OPTIONS)
def test_a_file_elsewhere_is_made(option: str, place: Path) -> None:
    (place / "beside").mkdir()
    assert run(["convert", "src", "out", "--to", "dcp", "-q", option, "beside/x"]) == 0
    assert (place / "beside" / "x").is_file()


def test_a_run_with_its_folder_of_steps_is_one_source(place: Path) -> None:
    """The pointer file leads to a step; the folder that was given is the source too."""
    os.rename("src", "checkpoint-5")
    (place / "runs").mkdir()
    os.rename("checkpoint-5", "runs/checkpoint-5")
    for option in OPTIONS:
        assert run(["convert", "runs", "out", "--to", "dcp", option, "runs/x"]) == 5
    assert files(place / "runs") == ["checkpoint-5", *(f"checkpoint-5/{name}" for name in files(MODEL))]


def test_plan_and_report_are_two_files(place: Path) -> None:
    assert run(["convert", "src", "out", "--to", "dcp", "--plan", "p", "--report", "p"]) == 5
    assert not (place / "p").exists()


@pytest.mark.parametrize("quiet", [[], ["-q"], ["--json"]])
def test_what_only_the_plan_knows_is_asked_before_a_byte_moves(quiet: list[str], place: Path) -> None:
    """A saved plan names its sources, and a merge's config: their report lies in none of them either."""
    assert run(["convert", "src", "out", "--to", "dcp", "-q", "--plan", "p.json"]) == 0
    (place / "m.yaml").write_text("merge_method: linear\nmodels: [{model: src, parameters: {weight: 1}}]\n")
    before = files(place)
    assert run(["apply", "p.json", "--report", "src/r.html", *quiet]) == 5
    assert run(["merge", "out", "--config", "m.yaml", "--report", "src/r.html", *quiet]) == 5
    assert files(place) == before
