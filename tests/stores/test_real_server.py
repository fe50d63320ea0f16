"""What moto can't judge: parts, conditions, listings and ranges of a real server, and kills of either side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from s3_server import BUCKET, S3, Answer, Asked
from seaweed import Seaweed

from ckpt_tool.commands.clean import clean
from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.commands.diff import diff
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.commands.verify import verify
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import OutputExists, StorageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.storage.stores import multipart, store
from ckpt_tool.storage.stores.multipart import WritableBucket

pytestmark = pytest.mark.server
ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
OUT = f"s3://{BUCKET}/out"
PART = 5 << 20  # bytes, the least that S3 takes
WRITINGS = {
    "safetensors": {"max_shard_size": 12 << 20},
    "dcp": {},
    "sharded": {"degrees": {"tp": 2}},
    "torch": {},
}


@pytest.fixture(autouse=True)
def least_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "LEAST", PART)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A shard of 24 MB and one of 3 MB."""
    folder = tmp_path / "model"
    random = np.random.default_rng(0)
    folder.mkdir()
    weights = {
        f"model.layers.{i}.mlp.up_proj.weight": random.integers(0, 1 << 32, (1536, 512), np.uint32).view(np.float32)
        for i in range(9)
    }
    names = list(weights)
    index = {}
    for number, part in enumerate((names[:8], names[8:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        safetensors.numpy.save_file({name: weights[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    text = {"metadata": {"total_size": sum(each.nbytes for each in weights.values())}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(repr(text).replace("'", '"'))
    return folder


def files(folder: Path) -> dict[str, bytes]:
    if folder.is_file():
        return {"": folder.read_bytes()}
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def objects(real: S3, prefix: str) -> dict[str, bytes]:
    """As `files` gives them, past the proxy."""
    found = real.content(prefix)
    if not found:
        found[""] = real.client.get_object(Bucket=BUCKET, Key=prefix)["Body"].read()
    return found


def pending(real: S3) -> list[str]:
    return [each["Key"] for each in real.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())]


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["dcp/tp2_dp2", "safetensors/hf_llama_sharded", "torch/training.pt"])
def test_it_reads_as_a_folder_does(real: S3, case: str) -> None:
    url = real.upload(FIXTURES / case)
    here, there = (inspect(each, Reading()) for each in (str(FIXTURES / case), url))
    assert here["format"] == there["format"] and here["total"] == there["total"]
    assert verify(url, Reading(), progress=Silent())["ok"]
    assert diff(url, str(FIXTURES / case), Reading(), progress=Silent())["equal"]


def test_an_inspect_costs_one_listing_and_two_ranges_a_shard(real: S3, model: Path) -> None:
    url = real.upload(model)
    inspect(url, Reading())
    asked = real.proxy.asked
    lists = [each for each in asked if each.lists]
    ranges = [each for each in asked if each.range]
    assert len(lists) == 1 and len(ranges) <= 2 * 2 + 1 and len(asked) == len(lists) + len(ranges)
    assert real.proxy.bytes_sent <= 5 * (64 << 10) + (64 << 10)


def test_a_listing_goes_on_and_ranges_are_those_of_the_object(real: S3) -> None:
    for number in range(1001):  # a page is 1000
        real.put(f"many/{number:04d}", b"%04d" % number)
    bucket = WritableBucket.at(f"s3://{BUCKET}/many")
    assert sorted(bucket.objects()) == [f"{number:04d}" for number in range(1001)]
    assert sum(each.lists for each in real.proxy.asked) == 2


# -- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", WRITINGS)
def test_objects_are_the_files_of_a_local_output(real: S3, model: Path, tmp_path: Path, to: str) -> None:
    name = "out.pt" if to == "torch" else "out"
    writing = Writing(to=to, **WRITINGS[to])
    convert(str(model), f"s3://{BUCKET}/{name}", Reading(), writing, Silent())
    convert(str(model), str(tmp_path / name), Reading(), writing, Silent())
    assert objects(real, name) == files(tmp_path / name) and not pending(real)
    assert sum("partNumber" in each.query for each in real.proxy.asked) >= 27 * 10**6 // PART
    with pytest.raises(OutputExists):
        convert(str(model), f"s3://{BUCKET}/{name}", Reading(), writing, Silent())


def test_what_is_noted_of_parts_and_wholes_is_what_the_server_has(real: S3) -> None:
    bucket = WritableBucket.at(OUT)
    parts = {2: bytearray(b"end"), 1: bytearray(os.urandom(PART))}
    upload = bucket.begin("big", {"note": "yes"})
    etags = {number: bucket.part("big", upload, number, data) for number, data in parts.items()}
    assert {number: each.etag for number, each in bucket.parts("big", upload).items()} == {
        number: multipart.md5(data).hex() for number, data in parts.items()
    }
    assert [each.key for each in bucket.pending()] == ["big"] and not bucket.objects()
    bucket.complete("big", upload, etags, {}, new=True)
    assert bucket._etag("big") == multipart.whole_etag(etags) and bucket.note("big", "note") == "yes"
    assert b"".join(bucket.read("big", PART + 3)) == bytes(parts[1] + parts[2])


def test_nothing_that_is_there_is_replaced(real: S3) -> None:
    """If-None-Match, of an object put whole and of one of parts; what the server refuses is not ours by its ETag."""
    bucket = WritableBucket.at(OUT)
    bucket.put("a", b"first", {}, new=True)
    bucket.put("a", b"first", {}, new=True)  # an answer that was lost: ours
    with pytest.raises(OutputExists):
        bucket.put("a", b"second", {}, new=True)
    upload = bucket.begin("a", {})
    data = bytearray(b"third")
    etag = bucket.part("a", upload, 1, data)
    with pytest.raises(OutputExists):
        bucket.complete("a", upload, {1: etag}, {}, new=True)
    assert real.content("out") == {"a": b"first"}
    bucket.abort("a", upload)
    bucket.abort("a", upload)  # twice is once
    assert not pending(real)


@pytest.mark.parametrize("by", ["crc32", "md5"])
def test_a_part_that_changed_on_its_way_is_refused(real: S3, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setattr(store, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(store, "UNANSWERED", 0.1)
    if by == "md5":
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    bucket = WritableBucket.at(OUT)
    upload = bucket.begin("a", {})
    with monkeypatch.context() as wrong:
        wrong.setattr(multipart, by, lambda data: {"crc32": 1, "md5": bytes(16)}[by])
        with pytest.raises(StorageError):
            bucket.part("a", upload, 1, bytearray(b"other"))
    assert not bucket.parts("a", upload)
    assert bucket.part("a", upload, 1, bytearray(b"other")) == multipart.md5(b"other").hex()


def test_clean_shows_and_aborts(real: S3) -> None:
    for key in ("out/a", "out/deep/b", "outer/c"):
        begun = real.client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
        real.client.upload_part(Bucket=BUCKET, Key=key, UploadId=begun, PartNumber=1, Body=bytes(5000))
    assert [(each["bytes"], each["removed"]) for each in clean(OUT)["leavings"]] == [(5000, False)] * 2
    assert len(pending(real)) == 3 and all(each["removed"] for each in clean(OUT, remove=True)["leavings"])
    assert pending(real) == ["outer/c"]


# -- kills -----------------------------------------------------------------------------------------------------------

PROGRAM = (
    "import sys; from ckpt_tool.storage.stores import multipart, store;"
    "multipart.LEAST = 5 << 20; store.UNANSWERED = 1.0;"
    "from ckpt_tool.cli import run; sys.exit(run(sys.argv[1:]))"
)


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 8 MB with AdamW's state, 25 MB in all, as torch's distributed checkpoint."""
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    folder = tmp_path_factory.mktemp("training") / "src"
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(640, 640) for _ in range(5)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 640)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.share(33)
@pytest.mark.parametrize("killed", ["worker", "server"])
@pytest.mark.parametrize("point", range(50))
def test_a_kill_of_either_side(
    real: S3, seaweed: Seaweed, training: Path, tmp_path: Path, killed: str, point: int
) -> None:
    """At a request of a reshard with its optimizer from bucket to bucket: nothing half-visible, the same command
    finishes, the bytes are those of the local output, `clean` leaves no part."""
    # of 89
    url = real.upload(training, "src")
    at = 1 + point * 7 // 4
    reshard(str(training), str(tmp_path / "out"), Reading(), Writing(degrees={"tp": 2}), Silent())
    wanted = files(tmp_path / "out")
    command = [sys.executable, "-c", PROGRAM, "reshard", url, OUT, "--tp", "2", "--progress", "none", "--threads", "2"]
    count, lock, dead, begun = [0], threading.Lock(), threading.Event(), threading.Event()
    processes = list[subprocess.Popen[bytes]]()

    def kill(asked: Asked) -> Answer | None:
        begun.wait()
        with lock:
            count[0] += 1
            if count[0] == at:
                os.kill(processes[0].pid, signal.SIGKILL) if killed == "worker" else seaweed.kill()
                dead.set()
        return None

    real.proxy.fault = kill
    processes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    begun.set()
    said = processes[0].communicate()[1].decode()
    real.proxy.fault = lambda asked: None
    assert dead.is_set(), f"no request {at}: {count[0]} in all"
    if killed == "server":
        seaweed.start()
        assert processes[0].returncode == 7 and "Traceback" not in said, said
    else:
        assert processes[0].returncode == -signal.SIGKILL
    there = real.content("out")
    assert all(wanted[name] == data for name, data in there.items())
    again = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert again.returncode == (5 if ".metadata" in there else 0), again.stderr.decode()
    assert real.content("out") == wanted
    clean(OUT, remove=True)
    assert not pending(real)
