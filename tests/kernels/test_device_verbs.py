"""`--device cuda`: the same documents, bytes and exit codes as on the CPU, whatever the checkpoint, sound or not.

The device is that of all these tests: the shim, or a GPU where CKPT_KERNELS says so.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from verb_cases import FIXTURES, both, hashes, model

import ckpt_tool as ckpt
from ckpt_tool.cli import run
from ckpt_tool.device import choose, station, windows
from ckpt_tool.device import walk as device_walk
from ckpt_tool.device.library import Device, Library
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.plan.plan import Move
from ckpt_tool.run import walk as cpu_walk

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
OPEN_DEVICE = choose.open_device


@pytest.fixture(autouse=True)
def chosen(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device cuda` is the device under test."""
    monkeypatch.setattr(choose, "open_device", lambda number=0: device)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of 1 MiB, so that a tensor of some MiB takes many windows."""
    monkeypatch.setattr(station, "LEAST", MIB)
    monkeypatch.setattr(station, "MOST", MIB)


@pytest.fixture
def no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that goes to the device may be walked by the CPU."""

    def refuse(job: object, move: Move, start: int, stop: int) -> None:
        raise AssertionError(f"{move.key} went by the CPU")

    monkeypatch.setattr(device_walk, "Walk", refuse)


def cases(every: int) -> list[Any]:
    """Every n-th checkpoint of the fixtures; the others are for the marker `slow`."""
    paths = sorted(
        path
        for folder in FIXTURES.iterdir()
        if folder.is_dir() and folder.name not in ("make", "hostile")
        for path in folder.iterdir()
        if path.suffix not in (".json", ".md") and ".truth" not in path.name
    )
    return [
        pytest.param(path, id=f"{path.parent.name}/{path.name}", marks=[pytest.mark.slow] if k % every else [])
        for k, path in enumerate(paths)
    ]


# -- the same on every checkpoint --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(12))
def test_verify_says_the_same(case: Path, tmp_path: Path) -> None:
    on_cpu, on_device = both("verify", case, tmp_path=tmp_path)
    assert on_device == on_cpu


@pytest.mark.parametrize("case", cases(10))
def test_the_same_bytes_are_written(case: Path, tmp_path: Path) -> None:
    on_cpu, on_device = both("convert", case, tmp_path=tmp_path, to="sharded", tp=2, dtype="bf16", allow_lossy=True)
    assert on_device == on_cpu


@pytest.mark.parametrize("case", cases(20))
def test_diff_says_the_same(case: Path, tmp_path: Path) -> None:
    truth = case.parent / f"{case.name}.truth.safetensors"
    on_cpu, on_device = both("diff", case, truth if truth.exists() else case, tmp_path=tmp_path)
    assert on_device == on_cpu


# -- large tensors, every type -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_windows", "no_cpu")
@pytest.mark.parametrize(
    "options",
    [
        {"to": "sharded", "tp": 3},
        {"to": "sharded", "tp": 2, "dtype": "bf16", "allow_lossy": True},
        {"to": "sharded", "dp": 3, "dtype": "fp16", "allow_lossy": True},
        {"to": "dcp", "dp": 2, "dtype": "F8_E4M3", "allow_lossy": True},
        {"to": "torch", "dtype": "F64", "threads": 1},
        {"to": "torch", "verify": "full", "max_shard_size": "1MB"},
        {"to": "sharded", "tp": 2, "verify": "off"},
    ],
    ids=str,
)
def test_windows_meet_where_leaves_do(tmp_path: Path, options: dict[str, Any]) -> None:
    source = model(tmp_path / "in", rows=600)  # 2.4 MB of fp32: three windows, the last with half a leaf
    on_cpu, on_device = both("convert", source, tmp_path=tmp_path, **options)
    assert on_device == on_cpu and on_cpu.files


@pytest.mark.usefixtures("small_windows", "no_cpu")
@pytest.mark.parametrize("dtype", ["fp16", "F64"])
def test_items_that_begin_and_end_inside_leaves(tmp_path: Path, dtype: str) -> None:
    """Tensors above 4 MiB go to the threads in the shares of their output files: here 400 rows each, no whole leaves,
    and a leaf of one side of the cast is several of the other, so that they end at other elements."""
    (tmp_path / "in").mkdir()
    values = np.random.default_rng(1).standard_normal((3 * 400, 1031), np.float32)
    values[400, 5] = 3e38  # begins the second share, and completes the last leaf of the first
    save_file({"w": values}, tmp_path / "in" / "model.safetensors")
    on_cpu, on_device = both(
        "convert", tmp_path / "in", tmp_path=tmp_path, to="sharded", dp=3, dtype=dtype, allow_lossy=True
    )
    assert on_device == on_cpu and len(on_cpu.files) == 4
    assert on_cpu.document.get("overflows") == ({"w": 1} if dtype == "fp16" else None)


@pytest.mark.usefixtures("small_windows", "no_cpu")
@pytest.mark.parametrize("first", [{"tp": 4}, {"dp": 3}, {"tp": 2, "dp": 2}], ids=str)
def test_from_many_ranks_to_others(tmp_path: Path, first: dict[str, int]) -> None:
    ckpt.convert(model(tmp_path / "in", rows=500), tmp_path / "ranks", to="sharded", **first)
    on_cpu, on_device = both("reshard", tmp_path / "ranks", tmp_path=tmp_path, tp=3, dp=1)
    assert on_device == on_cpu and on_cpu.files
    again, same = both("verify", tmp_path / "cuda" / "out", tmp_path=tmp_path)
    assert same == again and again.document["digests"] == ckpt.verify(tmp_path / "in")["digests"]


@pytest.mark.usefixtures("no_cpu")
def test_what_is_computed_and_what_lies_the_other_way_round(tmp_path: Path) -> None:
    codes = next(path for path in sorted((FIXTURES / "quantized").iterdir()) if path.is_dir() and "fp8" in path.name)
    on_cpu, on_device = both("convert", codes, tmp_path=tmp_path, name="floats", to="safetensors", dequantize=True)
    assert on_device == on_cpu and on_cpu.files
    turned = FIXTURES / "paddle" / "llama_bf16_legacy_tp2"  # (inputs, outputs): the hub's matrices lie across
    on_cpu, on_device = both("convert", turned, tmp_path=tmp_path, name="hub", to="safetensors", family="llama")
    assert on_device == on_cpu and on_cpu.files
    hub = (tmp_path / "cpu" / "hub").rename(tmp_path / "hub")
    back = both("convert", hub, tmp_path=tmp_path, name="back", to="paddle", tp=2)
    assert back[0] == back[1] and back[0].files


@pytest.mark.usefixtures("small_windows", "no_cpu")
def test_merge_folds_on_the_device(tmp_path: Path) -> None:
    sources = [model(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    for source in sources:
        values = {key: value for key, value in load_file(source / "model.safetensors").items() if key[0] in "bnh"}
        values["big.weight"][0, :2] = 0
        save_file(values, source / "model.safetensors")
    on_cpu, on_device = both("merge", *sources, tmp_path=tmp_path, method="linear", weight=[0.25, 0.75])
    assert on_device == on_cpu and on_cpu.files, on_cpu.document


def test_casts_that_the_kernels_lack_are_named_and_done_by_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_walk, "can_cast_there", lambda source, target: False)
    source = model(tmp_path / "in")
    document = ckpt.convert(source, tmp_path / "out", to="sharded", dtype="fp32", device="cuda")
    told = sorted(document["device"]["left_to_cpu"], key=str)
    assert told == [{"tensors": 1, "from": "F16", "to": "F32"}, {"tensors": 1, "from": "F64", "to": "F32"}]
    ckpt.convert(source, tmp_path / "same", to="sharded", dtype="fp32")
    assert hashes(tmp_path / "out") == hashes(tmp_path / "same")


# -- what is wrong with a checkpoint -----------------------------------------------------------------------------------


def replicated(path: Path) -> Path:
    """Two ranks that hold all of every tensor."""
    ckpt.convert(model(path / "in"), path / "ranks", to="sharded", dp=2, zero=0)
    return path / "ranks"


@pytest.mark.parametrize("rank", [1, 2])
def test_each_of_three_replicas_is_compared(tmp_path: Path, rank: int) -> None:
    ckpt.convert(model(tmp_path / "in", rows=20), tmp_path / "ranks", to="sharded", dp=3, zero=0)
    damage(sorted((tmp_path / "ranks").glob("*dp*.safetensors"))[rank], -1)
    on_cpu, on_device = both("verify", tmp_path / "ranks", tmp_path=tmp_path)
    assert on_device == on_cpu and not on_cpu.document["ok"]


def damage(file: Path, at: int, mask: int = 0x40) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= mask
    file.write_bytes(data)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("at", [-1, -700_000])
def test_replicas_that_differ(tmp_path: Path, at: int) -> None:
    ranks = replicated(tmp_path)
    files = sorted(ranks.glob("*dp*1*.safetensors"))
    assert files, sorted(ranks.iterdir())
    damage(files[-1], at)
    on_cpu, on_device = both("verify", ranks, tmp_path=tmp_path)
    assert (on_device == on_cpu and "E0330" in str(on_cpu.document)) or "replica" in str(on_cpu.document)
    on_cpu, on_device = both("reshard", ranks, tmp_path=tmp_path, dp=1)
    assert on_device == on_cpu and on_cpu.document["exit"] == 3 and not on_cpu.files
    on_cpu, on_device = both("reshard", ranks, tmp_path=tmp_path, dp=1, replica_policy="first", verify="off")
    assert on_device == on_cpu
    on_cpu, on_device = both("diff", ranks, tmp_path / "in", tmp_path=tmp_path)
    assert on_device == on_cpu and on_cpu.document["exit"] == 3
    on_cpu, on_device = both("diff", tmp_path / "in", ranks, tmp_path=tmp_path)
    assert on_device == on_cpu and on_cpu.document["exit"] == 3


def test_records_with_a_wrong_checksum(tmp_path: Path) -> None:
    ckpt.convert(model(tmp_path / "in"), tmp_path / "m.pt", to="torch")
    whole = (tmp_path / "m.pt").read_bytes()
    damage(tmp_path / "m.pt", whole.index(np.float32(3e38).tobytes()) + 4000)
    for verb, options in (("verify", {}), ("convert", {"to": "sharded"})):
        on_cpu, on_device = both(verb, tmp_path / "m.pt", tmp_path=tmp_path, **options)
        assert on_device == on_cpu and "E0351" in str(on_cpu.document)


def test_values_beyond_the_range_of_a_cast(tmp_path: Path) -> None:
    on_cpu, on_device = both("convert", model(tmp_path / "in"), tmp_path=tmp_path, to="sharded", dtype="fp16")
    assert on_device == on_cpu and on_cpu.document["error"] == "E0350"
    assert both("convert", tmp_path / "in", tmp_path=tmp_path, to="sharded", dtype="fp16", allow_lossy=True)[1].files


@pytest.mark.parametrize("tolerance", [{}, {"rtol": 1e-3, "atol": 1e-6}], ids=str)
def test_diff_counts_what_differs(tmp_path: Path, tolerance: dict[str, float]) -> None:
    a = model(tmp_path / "a", rows=600)
    b = model(tmp_path / "b", rows=600)
    values = load_file(b / "model.safetensors")
    flat = values["big.weight"].reshape(-1)
    flat[[3, 299_999, 300_000, 618_599]] = [
        np.nan,
        flat[99] * 1.5,
        -flat[300_000],
        7,
    ]  # by block: no finite gap, two, one
    values["half"][7, 5] = np.float16(-1) * values["half"][7, 5]
    values["codes"][129, 65] ^= 3
    values["wide"][6, 5, 4] += 1 << 40
    values["flag"][3] ^= True
    save_file(values, b / "model.safetensors")
    on_cpu, on_device = both("diff", a, b, tmp_path=tmp_path, **tolerance)
    assert on_device == on_cpu and len(on_cpu.document["differences"]) >= 4
    on_cpu, on_device = both("verify", b, tmp_path=tmp_path)
    assert on_device == on_cpu and sum(on_cpu.document["nonfinite"].values()) >= 2
    ckpt.convert(b, tmp_path / "narrow", to="safetensors", dtype="bf16", allow_lossy=True)
    on_cpu, on_device = both("diff", a, tmp_path / "narrow", tmp_path=tmp_path, **tolerance)
    assert on_device == on_cpu


@pytest.mark.usefixtures("small_windows")
def test_a_difference_in_a_later_block_has_its_own_index(tmp_path: Path) -> None:
    a = model(tmp_path / "a", rows=600)
    b = model(tmp_path / "b", rows=600)
    values = load_file(b / "model.safetensors")
    values["big.weight"][599, 1030] += 1
    save_file(values, b / "model.safetensors")
    on_cpu, on_device = both("diff", a, b, tmp_path=tmp_path)
    assert on_device == on_cpu and on_cpu.document["differences"][0]["first_index"] == [599, 1030]


# -- runs that stop ----------------------------------------------------------------------------------------------------


def interrupted(source: Path, output: Path, device: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """A run that fails before its commit, with its journal left behind."""
    from ckpt_tool.conversion import carry_out

    def fail(*_: object, **__: object) -> None:
        raise StorageError("the machine went away", code="E0700")

    with monkeypatch.context() as patched, pytest.raises(StorageError):
        patched.setattr(carry_out, "_check_staged", fail)
        ckpt.convert(source, output, device=device, **options)


@pytest.mark.parametrize(("begun", "ended"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_is_gone_on_with_on_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str, ended: str
) -> None:
    source = model(tmp_path / "in", rows=400)
    options = {"to": "sharded", "tp": 2, "dtype": "bf16", "allow_lossy": True}
    ckpt.convert(source, tmp_path / "whole", **options)
    interrupted(source, tmp_path / "out", begun, monkeypatch, **options)
    moved: list[object] = []
    for walked in (cpu_walk.Walks, device_walk.DeviceMover):
        own = walked.move_unit
        monkeypatch.setattr(walked, "move_unit", lambda self, items, own=own: moved.append(items) or own(self, items))
    ckpt.convert(source, tmp_path / "out", device=ended, **options)
    assert not moved, "what the journal says is done was done again"
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_a_staged_byte_that_changed_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(tmp_path / "in")
    interrupted(source, tmp_path / "out", "cuda", monkeypatch, to="sharded", tp=2)
    staged = next(path for path in tmp_path.glob(".out*/*.safetensors") if path.stat().st_size > 100_000)
    damage(staged, -1)
    ckpt.convert(source, tmp_path / "out", to="sharded", tp=2, device="cuda")
    ckpt.convert(source, tmp_path / "whole", to="sharded", tp=2)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_shares_of_a_plan(tmp_path: Path) -> None:
    from ckpt_tool.commands.apply import apply
    from ckpt_tool.core.progress import SILENT
    from ckpt_tool.options.verbs import Share
    from ckpt_tool.options.writing import Writing

    source = model(tmp_path / "in", rows=400)
    ckpt.convert(source, tmp_path / "out", to="sharded", tp=2, plan=str(tmp_path / "plan.json"))
    for share, device in (((1, 2), "cuda"), ((2, 2), "cpu")):
        document = apply(str(tmp_path / "plan.json"), Share(share), Writing(device=device), SILENT)
    assert document["committed"]
    ckpt.convert(source, tmp_path / "whole", to="sharded", tp=2)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


def test_a_device_that_fails_stops_the_run_and_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(tmp_path / "in")
    calls = list[str]()
    own = Library.call

    def failing(self: Library, name: str, *arguments: Any) -> None:
        calls.append(name)
        if name == "box_copy" and calls.count(name) >= 2:
            raise StorageError("box_copy failed on the device", code="E1551")
        own(self, name, *arguments)

    monkeypatch.setattr(Library, "call", failing)
    monkeypatch.setattr(station, "MOST", MIB)
    monkeypatch.setattr(station, "LEAST", MIB)
    for verb, options in (("verify", {}), ("convert", {"to": "sharded"})):
        calls.clear()
        found = both(verb, source, tmp_path=tmp_path, **options)[1].document
        assert found.get("error") == "E1551" and found["exit"] == 7, found
    assert not (tmp_path / "cuda" / "out").exists()


@pytest.mark.parametrize("verify", ["quick", "full", "off"])
def test_a_way_back_that_loses_a_bit_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: str) -> None:
    own = station.Station.download
    calls = list[int]()

    def losing(self: station.Station, nbytes: int) -> None:
        own(self, nbytes)
        calls.append(nbytes)
        self.host.view[nbytes // 2] ^= 8

    monkeypatch.setattr(station.Station, "download", losing)
    source = model(tmp_path / "in")
    if verify == "off":  # as on the CPU: nothing was asked for, nothing is said
        ckpt.convert(source, tmp_path / "out", to="sharded", tp=2, device="cuda", verify=verify)
        return
    with pytest.raises(CkptError) as caught:
        ckpt.convert(source, tmp_path / "out", to="sharded", tp=2, device="cuda", verify=verify)
    assert caught.value.code == "E1567" and caught.value.exit_code == 7 and calls and not (tmp_path / "out").exists()
    monkeypatch.undo()
    ckpt.convert(source, tmp_path / "out", to="sharded", tp=2)
    ckpt.convert(source, tmp_path / "whole", to="sharded", tp=2)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


# -- what there is not -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["verify", "diff", "convert"])
def test_a_device_without_room_is_told_before_anything_is_written(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Library.info
    monkeypatch.setattr(Library, "info", lambda self, number=0: own(self, number)._replace(free_bytes=9 * MIB))
    source = model(tmp_path / "in")
    sources = (source, source) if verb == "diff" else (source,)
    found = both(verb, *sources, tmp_path=tmp_path, **({"to": "sharded"} if verb == "convert" else {}))[1].document
    assert found["error"] == "E1560" and found["exit"] == 2 and "the CPU does the same" in found["hint"]
    assert not any((tmp_path / "cuda").glob(".*")) if verb == "convert" else True


@pytest.mark.parametrize("free", [14 * MIB])
def test_a_small_device_takes_fewer_threads_and_smaller_windows(
    tmp_path: Path, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Library.info
    monkeypatch.setattr(Library, "info", lambda self, number=0: own(self, number)._replace(free_bytes=free))
    source = model(tmp_path / "in", rows=1500)
    document = ckpt.convert(source, tmp_path / "out", to="sharded", tp=2, device="cuda", threads=8)
    assert 0 < document["device"]["device_memory"] <= free
    ckpt.convert(source, tmp_path / "same", to="sharded", tp=2)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "same")


def test_the_bound_on_memory_holds(tmp_path: Path) -> None:
    source = model(tmp_path / "in", rows=1500)
    document = ckpt.convert(
        source, tmp_path / "out", to="sharded", device="cuda", threads=8, memory="6MiB", dtype="bf16", allow_lossy=True
    )
    assert document["device"]["pinned_memory"] <= 6 * MIB
    assert document["plan"]["peak_memory"] >= document["device"]["pinned_memory"]


def test_pinned_memory_is_set_aside_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    own = Library.call

    def seen(self: Library, name: str, *arguments: Any) -> None:
        if name == "host_alloc":
            asked.append(arguments[1])
        own(self, name, *arguments)

    monkeypatch.setattr(Library, "call", seen)
    ckpt.convert(model(tmp_path / "in"), tmp_path / "out", to="sharded", device="cuda", pinned="64MiB,4MiB")
    assert sorted(asked) == [4 * MIB, 64 * MIB], "two regions, and no more while it runs"
    with pytest.raises(CkptError) as caught:
        ckpt.convert(tmp_path / "in", tmp_path / "o", to="sharded", device="cuda", pinned="1MiB,2MiB,3MiB")
    assert caught.value.code == "E0280"


def test_ray_and_a_device_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(CkptError) as caught:
        ckpt.convert(model(tmp_path / "in"), tmp_path / "out", to="sharded", device="cuda", ray="auto")
    assert caught.value.code == "E1564" and caught.value.exit_code == 2


def test_the_command_line(tmp_path: Path, host_library: Path) -> None:
    library = shutil.copy(host_library, tmp_path / "libck.so")
    Path(library).chmod(0o555)
    model(tmp_path / "in", rows=9)
    line = [
        sys.executable,
        "-m",
        "ckpt_tool",
        "convert",
        "in",
        "out",
        "--to",
        "sharded",
        "--tp",
        "2",
        "--device",
        "cuda",
        "--json",
    ]
    environment = {**os.environ, "CKPT_KERNELS": f"path:{library}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and json.loads(done.stdout)["device"]["name"], done.stderr
    assert run(["diff", str(tmp_path / "in"), str(tmp_path / "out"), "--device=cuda"]) == 0
    assert run(["verify", str(tmp_path / "out"), "--device", "cuda"]) == 0
    values = load_file(tmp_path / "in" / "model.safetensors")
    values["scalar"] = np.array(4.5)
    save_file(values, tmp_path / "in" / "model.safetensors")
    assert run(["diff", str(tmp_path / "in"), str(tmp_path / "out"), "--device", "cuda"]) == 1


@pytest.mark.parametrize("words", [["verify", "in"], ["diff", "in", "in"], ["convert", "in", "out", "--to", "sharded"]])
def test_without_a_gpu_there_is_an_error_that_says_what_to_do(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choose, "open_device", OPEN_DEVICE)
    monkeypatch.setenv("CKPT_KERNELS", "off")
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "in", rows=9)
    assert run([*words, "--device", "cuda"]) == 2
    told = capsys.readouterr().err
    assert "E1553" in told and "--device cpu" in told and not (tmp_path / "out").exists()
    assert run([*words, "--device", "gpu"]) == 2
    told = capsys.readouterr().err
    assert "cpu" in told and "cuda" in told
    if words[0] == "convert":
        assert run([*words, "--device", "cuda", "--dry-run"]) == 0, "a dry run needs no device"


def test_windows_cover_the_line_and_end_where_leaves_do() -> None:
    from ckpt_tool.core.dtype import DTYPES
    from ckpt_tool.core.tensor import TensorKey
    from ckpt_tool.plan.plan import Move
    from ckpt_tool.run.digest import LEAF

    rng = np.random.default_rng(3)
    for _ in range(300):
        item, out = (int(n) for n in rng.choice([1, 2, 4, 8], 2))
        numel = int(rng.integers(1, 3_000_000))
        start = int(rng.integers(0, numel))
        stop = int(rng.integers(start + 1, numel + 1))
        until = min(numel, stop + int(rng.integers(0, 300_000)))
        move = Move(TensorKey("w"), (numel,), DTYPES["U8"], DTYPES["U8"], numel, item, out, (), ())
        found = list(windows.windows(move, start, stop, until, 4 * MIB))
        assert [found[0].start, found[-1].end] == [start, until]
        assert all(
            a.end == b.start and a.end * item % LEAF == 0 == a.end * out % LEAF
            for a, b in zip(found, found[1:], strict=False)
        )
        assert sum(window.stop - window.start for window in found) == stop - start
        assert all(window.start <= window.stop <= window.end and window.room <= 4 * MIB for window in found)
        for batch in windows.batches(iter(found), 4 * MIB):
            assert batch[-1].at + batch[-1].room <= 4 * MIB and all(window.at % 256 == 0 for window in batch)


@pytest.mark.usefixtures("small_windows")
def test_masters_that_do_not_round_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_tool.device import drifts

    torch = pytest.importorskip("torch")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("left to the CPU")

    monkeypatch.setattr(drifts, "drifts", refuse)
    rng = np.random.default_rng(5)
    values: dict[str, np.ndarray[Any, Any]] = {}
    masters: dict[str, np.ndarray[Any, Any]] = {}
    for number, rows in enumerate((3, 900, 40, 50)):
        masters[f"w{number}"] = rng.standard_normal((rows, 515), np.float32)
        values[f"w{number}"] = masters[f"w{number}"].astype(np.float16)
    values["w0"][2, 514] += np.float16(1)
    values["w1"][[1, 899], [7, 3]] *= np.float16(2)
    masters["w2"][3, 4], values["w2"].view(np.uint16)[3, 4] = np.nan, 0xFC07  # NaNs of other bits are equal
    masters["w3"][3, 4], values["w3"].view(np.uint16)[3, 4] = np.nan, 0xFC07
    values["w3"][9, 9] -= np.float16(3)
    joined = tmp_path / "m.pt"
    torch.save(
        {
            "model": {k: torch.from_numpy(v) for k, v in values.items()},
            "master": {k: torch.from_numpy(v) for k, v in masters.items()},
        },
        joined,
    )
    on_cpu, on_device = both("verify", joined, tmp_path=tmp_path)
    assert on_device == on_cpu
    told = {finding["tensor"]: finding["message"] for finding in on_cpu.document["findings"]}
    assert sorted(told) == ["w0", "w1", "w3"] and told["w1"].startswith("2 elements") and "[1, 7]" in told["w1"]


@pytest.mark.parametrize("verb", ["verify", "diff"])
def test_an_interruption_waits_for_the_threads_that_use_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Pinned memory is given back when nobody reads into it any more."""
    source = model(tmp_path / "in")
    at_work = threading.Event()
    after = list[str]()
    own = windows.BlockReader.pread
    closed = station.Pool.close

    def slow(self: windows.BlockReader, *words: Any, **more: Any) -> None:
        if not at_work.is_set():
            at_work.set()
            signal.raise_signal(signal.SIGINT)  # noticed by the main thread, which waits for this one
            time.sleep(0.5)
        after.append("read")
        own(self, *words, **more)

    def close(self: station.Pool, *, force: bool = False) -> None:
        after.append("closed")
        assert self.standing.lent == 0
        closed(self, force=force)

    monkeypatch.setattr(windows.BlockReader, "pread", slow)
    monkeypatch.setattr(station.Pool, "close", close)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            getattr(ckpt, verb)(*([source] * (2 if verb == "diff" else 1)), device="cuda")
    finally:
        signal.signal(signal.SIGINT, before)
    assert after and after[-1] == "closed"
