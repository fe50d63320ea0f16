"""`ckpt kernels` and the kernels' line of `ckpt doctor`, where there is no GPU and the shim stands in."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.commands import doctor, kernels
from ckpt_tool.device import build, choose, driver
from ckpt_tool.device import kernels as calls
from ckpt_tool.device.trial import bench
from ckpt_tool.device.trial import check as trial
from ckpt_tool.errors import OutputExists, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache of its own, no GPU, and nothing chosen yet."""
    monkeypatch.setenv("CKPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CKPT_KERNELS", raising=False)
    monkeypatch.setattr(driver, "probe", lambda: driver.Probe(0, (), "no NVIDIA driver: it was taken away"))
    for cached in (choose._decide, choose._load):
        cached.cache_clear()
    yield
    for cached in (choose._decide, choose._load):
        cached.cache_clear()


@pytest.fixture
def shim_at_hand(quick_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CKPT_KERNELS=host, compiled in no time."""
    monkeypatch.setenv("CKPT_KERNELS", "host")


def test_info_without_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    document = kernels.info()
    assert (document["uses"], document["nvcc"], document["gpus"], document["driver"]) == ("numpy", None, [], None)
    assert "taken away" in document["reason"] and document["kernels"] == list(build.KERNELS)
    assert (Path(document["sources"]) / "ck.h").is_file()
    json.dumps(document, allow_nan=False)


def test_info_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "probe", lambda: driver.Probe(13000, (driver.Card("NVIDIA H100", 90),), ""))
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(build, "found_for", lambda architectures: architectures == (90,) or None)
    document = kernels.info()
    assert (document["uses"], document["driver"]) == ("cuda", "13.0")
    assert document["gpus"] == [{"name": "NVIDIA H100", "architecture": "sm_90"}]


def test_no_device_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in (kernels.check, kernels.bench):
        with pytest.raises(UsageError) as caught:
            verb()
        assert caught.value.code == "E1556" and caught.value.hint


def test_build_and_where_it_goes(tmp_path: Path, quick_compiler: Path) -> None:
    document = kernels.build("host")
    assert document["path"].startswith(str(tmp_path / "cache")) and document["kind"] == "host" and document["compiled"]
    assert kernels.build("host")["compiled"] is False
    out = tmp_path / "libck.so"
    assert kernels.build("host", out=str(out))["path"] == str(out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o755 and out.read_bytes() == Path(document["path"]).read_bytes()
    with pytest.raises(OutputExists):
        kernels.build("host", out=str(out))
    kernels.build("host", out=str(out), force=True)
    library = out.read_bytes()
    out.write_bytes(b"")
    with pytest.raises(OutputExists):  # an empty file is somebody's too
        kernels.build("host", out=str(out), force=True)
    out.write_bytes(library)
    assert choose.library_of(choose.choose_device(f"path:{out}")).info().host
    listed = kernels.info()["libraries"]
    assert [(row["kind"], row["for"], row["current"]) for row in listed] == [("host", "CPU", True)]
    assert list(tmp_path.glob("libck*")) == [out]


@pytest.mark.parametrize("arch", ["x", "9", "90,", "sm_", "-90", "９０"])
def test_architectures_that_are_none(arch: str) -> None:
    with pytest.raises(UsageError) as caught:
        kernels.build(arch)
    assert caught.value.code == "E0283" and caught.value.place == "--arch"


def test_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels._wanted("100, sm_90,8.0,90") == (80, 90, 100)
    assert kernels._wanted(None) == build.ARCHITECTURES
    with pytest.raises(UsageError, match="taken away"):
        kernels._wanted("native")
    monkeypatch.setattr(driver, "probe", lambda: driver.Probe(13000, (driver.Card("A", 90), driver.Card("B", 80)), ""))
    assert kernels._wanted("native") == (80, 90)


def test_check_finds_nothing_and_finds_what_is_wrong(shim_at_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    document = kernels.check(cases=4, seed=3)
    assert document["ok"] and document["findings"] == [] and document["device"]["name"] == "host shim (CPU)"
    assert {row["kernel"] for row in document["kernels"]} == set(trial.TRIALS)
    assert all(row["cases"] == 4 for row in document["kernels"])

    real = calls.box_copy

    def wrong(device: Any, boxes: Any, **settings: Any) -> None:
        """A kernel that is one byte off where the alignment allows no wider access."""
        packed = boxes.packed.copy()
        packed["dst"] += packed["vlog"] == 0
        real(device, boxes._replace(packed=packed), **settings)

    monkeypatch.setattr(calls, "box_copy", wrong)
    document = kernels.check(cases=200, seed=3, only=("box_copy",))
    assert not document["ok"] and len(document["findings"]) == trial.MOST_FINDINGS
    assert (
        "of seed 3" in document["findings"][0]["message"]
        and "wrong, the first at" in document["findings"][0]["message"]
    )
    with pytest.raises(UsageError, match="no kernel 'box_cpoy'") as caught:
        kernels.check(only=("box_cpoy",))
    assert "box_copy" in str(caught.value.hint)


def test_bench(shim_at_hand: None, monkeypatch: pytest.MonkeyPatch) -> None:
    row = bench.BenchRow("box_copy", "one run", "ckpt", 1, 2 << 20, 0.45678, 4.6321, 0.13512, 0.00451)
    asked: dict[str, int] = {}
    monkeypatch.setattr(bench, "measure_kernels", lambda device, **given: asked.update(given) or [row])
    document = kernels.bench(quick=True)
    assert asked == {"payload": 1 << 20, "repeats": 2} and "mean nothing" in document["verdict"]
    assert document["rows"] == [
        {
            "kernel": "box_copy",
            "work": "one run",
            "who": "ckpt",
            "boxes": 1,
            "moved": 2 << 20,
            "milliseconds": 0.4568,
            "gbs": 4.63,
            "share": 0.135,
            "spread": 0.005,
        }
    ]


def test_the_verb_from_a_shell(shim_at_hand: None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tool", "kernels", "check", "--cases", "2", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"] and document["schema_version"] == 1


def test_doctor_says_what_the_kernels_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._kernels() == {"uses": "numpy", "reason": choose.choose_device().reason, "driver": None}
    monkeypatch.setenv("CKPT_KERNELS", "no such thing")
    assert doctor._kernels()["uses"] == "nothing"
