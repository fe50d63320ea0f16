"""CKPT_KERNELS and the ladder below it: decided once, with a reason; and what a driver answers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ckpt_tool.device import build, choose, driver
from ckpt_tool.errors import StorageError, UsageError

H100 = driver.Probe(13000, (driver.Card("NVIDIA H100", 90),), "")

# A driver as `driver.py` asks it: as many GPUs as CARDS, or an error on start.
DRIVER = """
extern "C" {
int cuInit(unsigned) { return START; }
int cuDriverGetVersion(int* v) { *v = 12040; return 0; }
int cuDeviceGetCount(int* n) { *n = CARDS; return 0; }
int cuDeviceGet(int* d, int n) { *d = n; return 0; }
int cuDeviceGetName(char* s, int, int d) { s[0] = 'A' + d; s[1] = 0; return 0; }
int cuDeviceGetAttribute(int* v, int a, int d) { *v = a == 75 ? 8 + d : a == 76 ? 0 : -1; return 0; }
int cuGetErrorName(int e, const char** s) { *s = e == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : "?"; return 0; }
}
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CKPT_KERNELS", raising=False)
    caches = (choose._decide, choose._load, build.version_of, build.known_architectures)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_without_a_driver_it_is_numpy_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "probe", lambda: driver.Probe(0, (), "no NVIDIA driver: ..."))
    assert choose.choose_device().level == "numpy" and "no NVIDIA driver" in choose.choose_device().reason
    for setting in ("", "cuda"):
        monkeypatch.setenv("CKPT_KERNELS", setting)
        with pytest.raises(UsageError, match="no NVIDIA driver") as caught:
            choose.open_device()
        assert caught.value.code == "E1556" and caught.value.exit_code == 2 and "--device cpu" in str(caught.value.hint)


def test_off_forbids_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "probe", lambda: H100)
    monkeypatch.setenv("CKPT_KERNELS", "off")
    with pytest.raises(UsageError, match="forbids") as caught:
        choose.open_device()
    assert caught.value.code == "E1553"


def test_a_gpu_whose_kernels_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "probe", lambda: H100)
    monkeypatch.setattr(build, "find_nvcc", lambda: "/bin/nvcc")
    assert choose.choose_device()[:4] == ("cuda", "NVIDIA H100, driver for CUDA 13.0", None, (90,))
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert choose.choose_device().level == "cuda", "decided once: no switch in the middle of a run"


def test_a_gpu_without_nvcc_and_without_a_built_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver, "probe", lambda: H100)
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setenv("CKPT_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="NVIDIA H100.*no nvcc") as caught:
        choose.open_device()
    assert caught.value.code == "E1554" and "CKPT_KERNELS=path:FILE" in str(caught.value.hint)


@pytest.mark.parametrize("setting", ["on", "gpu", "path:", "path", "cuda:0"])
def test_a_setting_that_is_unknown(setting: str) -> None:
    with pytest.raises(UsageError, match="CKPT_KERNELS") as caught:
        choose.choose_device(setting)
    assert caught.value.code == "E1553"


def test_a_library_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host_library: Path) -> None:
    mine = Path(shutil.copy(host_library, tmp_path / "mine.so"))
    mine.chmod(0o755)
    monkeypatch.setenv("CKPT_KERNELS", f"path:{mine}")
    assert choose.choose_device().level == "path" and choose.open_device().info.host
    for mode in (0o777, 0o775):
        mine.chmod(mode)
        choose._decide.cache_clear()
        with pytest.raises(StorageError, match="written by others") as caught:
            choose.choose_device()
        assert caught.value.code == "E1550" and caught.value.path == str(mine)
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setenv("CKPT_KERNELS", f"path:{broken}")
    with pytest.raises(StorageError, match="can't be loaded"):
        choose.open_device()
    with pytest.raises(StorageError, match="can't be read"):
        choose.choose_device(f"path:{tmp_path}/none.so")


@pytest.mark.parametrize(
    "start, cards, want",
    [
        (0, 2, driver.Probe(12040, (driver.Card("A", 80), driver.Card("B", 90)), "")),
        (100, 0, "sees no GPU"),
        (0, 0, "sees no GPU"),
        (803, 1, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    ],
)
def test_what_a_driver_answers(tmp_path: Path, start: int, cards: int, want: driver.Probe | str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here to make a driver that pretends")
    (tmp_path / "driver.cpp").write_text(DRIVER)
    subprocess.run(
        [
            "g++",
            "-shared",
            "-fPIC",
            f"-DSTART={start}",
            f"-DCARDS={cards}",
            str(tmp_path / "driver.cpp"),
            "-o",
            str(tmp_path / "libcuda.so.1"),
        ],
        check=True,
    )
    found = driver.probe(str(tmp_path / "libcuda.so.1"))
    if isinstance(want, str):
        assert want in found.reason and found[:2] == (12040, ())
    else:
        assert found == want


def test_no_driver_at_all(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    for name in (tmp_path / "none.so", tmp_path / "text.so"):
        assert driver.probe(str(name))[:2] == (0, ()) and "no NVIDIA driver" in driver.probe(str(name)).reason
    assert driver.spell_version(12040) == "12.4"
