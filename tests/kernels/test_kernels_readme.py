"""kernels/README.md names every kernel, every file and only verbs that exist; the wheel carries the sources."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import machine_code
import pytest

from ckpt_tool.cli.verbs import VERBS
from ckpt_tool.device import build
from ckpt_tool.device.library import FUNCTIONS

ROOT = Path(__file__).parents[2]
README = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")


def rows() -> list[str]:
    return [line for line in README.splitlines() if line.startswith("| `")]


def test_every_kernel_has_its_row() -> None:
    called = {name.removeprefix("ck_") for name, types in FUNCTIONS.items() if len(types) >= 6}
    told = {name for line in rows() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert called <= told
    assert set(machine_code.kernels_in(build.sources(), build.KERNELS)) <= told


def test_every_file_has_its_row() -> None:
    files = {path.name for path in (ROOT / "kernels").iterdir() if path.suffix in (".cu", ".h", ".cpp")}
    assert files == {name for line in rows() for name in re.findall(r"`(\w+\.(?:cu|h|cpp))`", line.split("|")[1])}
    assert {f"{name}.cu" for name in (*build.KERNELS, "runtime")} == {name for name in files if name.endswith(".cu")}


def test_every_figure_says_where_it_comes_from() -> None:
    """Cells of the table of speeds are `not measured` or figures; card, driver, toolkit and date stand above them."""
    section = README[README.index("## Speed") : README.index("## Building")]
    head = section[: section.index("| kernel |")]
    assert re.search(r"One \w+ \([^)]*driver [\d.]+\), nvcc [\d.]+, torch [\d.]+, \d+ \w+ 20\d\d", head)
    table = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(table) >= 9 and all(len(line.split("|")) == 9 for line in table)
    figure = r"(\*\*)?[01]\.\d{3}(\*\*)?"
    for line in table:
        for cell in line.split("|")[4:6]:
            assert re.fullmatch(rf"not measured|{figure}(, {figure})*( ¹)?(; .*)?", cell.strip()), line


def test_the_commands_exist() -> None:
    shown = set(re.findall(r"ckpt kernels (\w+)", README))
    assert shown == {"build", "info", "check", "bench"}
    for line in re.findall(r"^ckpt kernels .*$", README, re.M):
        for option in re.findall(r"--(\w+)", line):
            assert option in VERBS["kernels"].options(), line
    for path in re.findall(r"python (tests/\S+\.py)", README):
        assert (ROOT / path).is_file(), path


@pytest.mark.slow
def test_the_wheel_carries_the_sources(tmp_path: Path) -> None:
    """Built, unpacked elsewhere, and asked where its sources are. Needs a package index for the build's own tools."""
    made = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
    )
    if made.returncode != 0 and "hatchling" in made.stderr:
        pytest.skip("no package index here: the wheel can't be built")
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("ckpt_tool/_kernels/")}
        archive.extractall(tmp_path / "site")
    ours = {path.name for path in (ROOT / "kernels").iterdir() if path.is_file()}
    assert {name.rpartition("/")[2] for name in names} == ours
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tool", "kernels", "info", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )
    document = json.loads(done.stdout)
    assert document["sources"] == str(tmp_path / "site" / "ckpt_tool" / "_kernels")
    assert document["source_sha256"] == build.source_digest()
