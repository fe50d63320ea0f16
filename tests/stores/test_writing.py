"""Outputs in an S3 store: the same objects as the files of a local output, all or nothing, resumed, cleaned up."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from s3_server import BUCKET, S3, Answer, Asked, refusal

from ckpt_tool.cli import run
from ckpt_tool.commands.clean import clean
from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.commands.diff import diff
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError, OutputExists, SourceChanged, StorageError, UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.run import upload
from ckpt_tool.storage.stores import multipart, store

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
INPUTS = ROOT / "tests/golden_outputs/inputs"
MODEL = FIXTURES / "safetensors/hf_llama_sharded"
TRAINING = FIXTURES / "dcp/tp2_dp2"
OUT = f"s3://{BUCKET}/out"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 4 KiB, so that small fixtures have many, and records' heads lie in other parts than their ends."""
    monkeypatch.setattr(multipart, "LEAST", 4096)
    monkeypatch.setattr(store, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(store, "UNANSWERED", 1.0)


def golden() -> dict[str, str]:
    """The commands of the golden outputs that write one output of fixtures."""
    rows = json.loads((ROOT / "tests/golden_outputs/golden.json").read_text())["cases"]
    return {
        name: row["command"]
        for name, row in rows.items()
        if "tree" in row
        and not row.get("exit")
        and "{out}" in row["command"]
        and not any(word in row["command"] for word in ("{made:", "--plan", "--ray", "--report", "apply"))
    }


def files(folder: Path) -> dict[str, bytes]:
    if folder.is_file():
        return {"": folder.read_bytes()}
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def objects(s3: S3, prefix: str) -> dict[str, bytes]:
    found = s3.content(prefix)
    try:
        found[""] = s3.client.get_object(Bucket=BUCKET, Key=prefix)["Body"].read()
    except s3.client.exceptions.NoSuchKey:
        pass
    return found


def pending(s3: S3) -> list[str]:
    return [each["Key"] for each in s3.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())]


def parts_sent(s3: S3) -> list[str]:
    return [f"{asked.path}?{asked.query['partNumber'][0]}" for asked in s3.proxy.asked if "partNumber" in asked.query]


def golden_command(name: str, root: Path) -> Callable[[str], list[str]]:
    """The words of a golden command by its output; its inputs are made below `root`."""
    inputs = root / "inputs"
    shutil.copytree(INPUTS, inputs)
    hub = inputs / "hub"
    shutil.copytree(FIXTURES / "convert/llama/hf", hub)
    for beside in (INPUTS / "beside").glob("*"):
        shutil.copy(beside, hub)
    for path in inputs.glob("*"):
        if path.is_file():
            text = path.read_text().replace("{fixtures}", str(FIXTURES)).replace("{inputs}", str(inputs))
            path.write_text(text)

    def filled(out: str) -> list[str]:
        return [
            word.replace("{fixtures}", str(FIXTURES)).replace("{inputs}", str(inputs)).replace("{out}", out)
            for word in shlex.split(GOLDEN[name])
        ]

    return filled


GOLDEN = golden()


@pytest.mark.share(96)
@pytest.mark.parametrize("name", GOLDEN)
def test_objects_are_the_files_of_a_local_output(
    s3: S3, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte for byte, each part sent once, for every format and whatever its holes."""
    filled = golden_command(name, tmp_path)
    local = run([*filled(str(tmp_path / "out")), "--json"])
    said = capsys.readouterr().out
    assert local == 0
    code = run([*filled(OUT), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    (made,) = (path for path in tmp_path.iterdir() if path.name.startswith("out"))
    assert objects(s3, made.name) == files(made)
    sent = parts_sent(s3)
    assert len(sent) == len(set(sent)) and not pending(s3)
    here = json.loads(said)
    there = json.loads(captured.out)
    assert there["plan"].pop("peak_memory") > here["plan"].pop("peak_memory")
    assert here["plan"] == there["plan"] and here["digest_checked"] == there["digest_checked"]


# -- all or nothing --------------------------------------------------------------------------------------------------


def dcp(**more: Any) -> Writing:
    return Writing(to="dcp", threads=2, **more)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Four shards of 64 KiB."""
    folder = tmp_path / "shards"
    names = {}
    folder.mkdir()
    for i in range(4):
        file = f"model-{i + 1:05d}-of-00004.safetensors"
        weights = {
            f"model.layers.{i}.mlp.{part}_proj.weight": np.arange(64 * 128, dtype=np.float32).reshape(64, 128) + i + k
            for k, part in enumerate(("up", "gate"))
        }
        safetensors.numpy.save_file(weights, folder / file)
        names |= dict.fromkeys(weights, file)
    index = {"metadata": {"total_size": 8 * 4 * 64 * 128}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def put_events(s3: S3) -> list[str]:
    """Keys in the order in which they became visible."""
    return [
        asked.path.removeprefix(f"/{BUCKET}/out/")
        for asked in s3.proxy.asked
        if (asked.method == "PUT" and "partNumber" not in asked.query)
        or (asked.method == "POST" and "uploadId" in asked.query)
    ]


def test_the_index_comes_last_and_only_where_nothing_is(s3: S3, shards: Path) -> None:
    headers: list[Asked] = []
    s3.proxy.fault = lambda asked: headers.append(asked)
    convert(str(shards), OUT, Reading(), Writing(to="safetensors", max_shard_size=1 << 17), Silent())
    seen = put_events(s3)
    assert seen[-1] == "model.safetensors.index.json" and seen[-2] == "config.json" and len(seen) > 3
    assert all(name.endswith(".safetensors") for name in seen[:-2])
    with pytest.raises(OutputExists) as info:
        convert(str(shards), OUT, Reading(), Writing(to="safetensors"), Silent())
    assert (info.value.code, info.value.exit_code, info.value.path) == ("E0501", 5, OUT)
    assert diff(OUT, str(shards), Reading(), progress=Silent())["equal"]


def test_one_object_appears_at_once(s3: S3, shards: Path, tmp_path: Path) -> None:
    convert(str(shards), f"{OUT}.safetensors", Reading(), Writing(to="safetensors"), Silent())
    convert(str(shards), str(tmp_path / "out.safetensors"), Reading(), Writing(to="safetensors"), Silent())
    assert objects(s3, "out.safetensors") == files(tmp_path / "out.safetensors")
    with pytest.raises(OutputExists):
        convert(str(shards), f"{OUT}.safetensors", Reading(), Writing(to="safetensors"), Silent())


def test_another_run_that_was_quicker_wins(s3: S3, shards: Path) -> None:
    """Both found nothing there; the second to come is told, and what the first has written stays."""
    index = "out/model.safetensors.index.json"

    def meanwhile(asked: Asked) -> Answer | None:
        if asked.method == "PUT" and asked.path.endswith(index):
            s3.put(index, b"theirs")
        return None

    s3.proxy.fault = meanwhile
    with pytest.raises(OutputExists) as info:
        convert(str(shards), OUT, Reading(), Writing(to="safetensors", max_shard_size=1 << 17), Silent())
    assert info.value.exit_code == 5 and objects(s3, "out")["model.safetensors.index.json"] == b"theirs"


def test_what_is_no_checkpoint_of_ours_is_not_touched(s3: S3, shards: Path) -> None:
    """Files of the same names and sizes, without an index: not ours, by what is noted on them."""
    convert(str(shards), OUT, Reading(), Writing(to="safetensors", max_shard_size=1 << 17), Silent())
    theirs = {name: bytes(len(data)) for name, data in objects(s3, "out").items() if name.endswith(".safetensors")}
    for name in objects(s3, "out"):
        s3.client.delete_object(Bucket=BUCKET, Key=f"out/{name}")
    for name, data in theirs.items():
        s3.put(f"out/{name}", data)
    with pytest.raises(OutputExists):
        convert(str(shards), OUT, Reading(), Writing(to="safetensors", max_shard_size=1 << 17), Silent())
    assert objects(s3, "out") == theirs


def test_force_replaces_what_is_there_and_shows_no_mixture(s3: S3, shards: Path) -> None:
    convert(str(shards), OUT, Reading(), Writing(to="safetensors", max_shard_size=1 << 17), Silent())
    before = objects(s3, "out")
    states = list[set[str]]()

    def look(asked: Asked) -> Answer | None:
        if (
            asked.method in ("POST", "DELETE", "PUT")
            and "partNumber" not in asked.query
            and "uploads" not in asked.query
        ):
            states.append({name for name, data in objects(s3, "out").items() if before.get(name) == data})
        return None

    s3.proxy.fault = look
    convert(str(TRAINING), OUT, Reading(), dcp(force=True), Silent())
    after = objects(s3, "out")
    assert diff(OUT, str(TRAINING), Reading(), progress=Silent())["equal"] and not set(after) & set(before) - {
        "config.json"
    }
    assert states[0] == set(before), "the old one is whole until the end"
    assert not pending(s3)
    s3.put("out/notes.txt", b"x")
    for name in after:
        s3.client.delete_object(Bucket=BUCKET, Key=f"out/{name}")
    with pytest.raises(OutputExists) as info:  # what is left is no checkpoint
        convert(str(TRAINING), OUT, Reading(), dcp(force=True), Silent())
    assert info.value.code == "E1604" and objects(s3, "out") == {"notes.txt": b"x"}


@pytest.mark.parametrize(
    "kept", ["notes.txt", "src/main.py", ".git/config", "deep/a/b/c/d/e/f/g/h", "run2/model.safetensors"]
)
def test_force_leaves_objects_that_are_no_part_of_the_old_checkpoint(s3: S3, shards: Path, kept: str) -> None:
    convert(str(shards), OUT, Reading(), Writing(to="safetensors", max_shard_size=1 << 17), Silent())
    s3.put(f"out/{kept}", b"mine")
    before = objects(s3, "out")
    for more in ({}, {"dry_run": True}):
        with pytest.raises(OutputExists) as info:
            convert(str(TRAINING), OUT, Reading(), dcp(force=True, **more), Silent())
        assert info.value.code == "E1604" and kept in info.value.message
        assert objects(s3, "out") == before and not pending(s3)


def test_what_comes_into_the_old_checkpoint_meanwhile_stays(s3: S3, shards: Path) -> None:
    convert(str(shards), OUT, Reading(), Writing(to="safetensors", max_shard_size=1 << 17), Silent())
    before = objects(s3, "out")

    def add(asked: Asked) -> Answer | None:
        if "partNumber" in asked.query:
            s3.put("out/notes.txt", b"mine")
        return None

    s3.proxy.fault = add
    with pytest.raises(OutputExists) as info:
        convert(str(TRAINING), OUT, Reading(), dcp(force=True), Silent())
    assert info.value.code == "E2830" and objects(s3, "out") == before | {"notes.txt": b"mine"}


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_run_that_dies_while_it_replaces_is_finished_by_the_same_command(s3: S3, shards: Path, at: int) -> None:
    """The old index is gone, some of the old objects too: the record beside the output says what may go."""
    convert(str(shards), OUT, Reading(), Writing(to="safetensors", max_shard_size=1 << 17), Silent())
    removed = list[str]()

    def die(asked: Asked) -> Answer | None:
        if asked.method == "DELETE" and "uploadId" not in asked.query and "/out/" in asked.path:
            removed.append(asked.path)
            if len(removed) >= at:
                return refusal(403, "AccessDenied")
        return None

    s3.proxy.fault = die
    with pytest.raises(CkptError):
        convert(str(TRAINING), OUT, Reading(), dcp(force=True), Silent())
    s3.proxy.fault = lambda asked: None
    convert(str(TRAINING), OUT, Reading(), dcp(force=True), Silent())
    assert diff(OUT, str(TRAINING), Reading(), progress=Silent())["equal"]
    assert not objects(s3, ".out.ckpt-partial") and not pending(s3)


@pytest.mark.parametrize("dst", ["run", "run/sub", "run/"])
def test_an_output_in_a_source_is_refused(s3: S3, dst: str) -> None:
    url = s3.upload(TRAINING)
    before = objects(s3, "run")
    with pytest.raises(OutputExists) as info:
        reshard(url, f"s3://{BUCKET}/{dst}", Reading(), Writing(degrees={"tp": 1}, force=True), Silent())
    assert info.value.code == "E0502" and objects(s3, "run") == before


@pytest.mark.parametrize("what", ["refuses", "knows those of parts alone"])
def test_a_server_without_checksums_of_objects_gets_md5s(
    s3: S3, shards: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As the uploads begin; nothing that was begun on the way is left."""
    request = multipart.WritableBucket._request
    checked = list[str]()

    def older(self: Any, operation: str, key: str, **more: Any) -> Any:
        answer = request(self, operation, key, **more)
        checked.extend(name for name in more if name in ("ContentMD5", "ChecksumCRC32") and operation == "upload_part")
        return {name: value for name, value in answer.items() if name != "ChecksumType"}

    monkeypatch.setattr(multipart.WritableBucket, "_request", older)
    refused = list[Asked]()

    def refuse(asked: Asked) -> Answer | None:
        if what != "refuses" or "uploads" not in asked.query or asked.method != "POST" or refused:
            return None
        refused.append(asked)
        return refusal(501, "NotImplemented")

    s3.proxy.fault = refuse
    convert(str(shards), OUT, Reading(), dcp(), Silent())
    assert len(refused) == (what == "refuses") and set(checked) == {"ContentMD5"} and not pending(s3)
    assert diff(OUT, str(shards), Reading(), progress=Silent())["equal"]


def test_from_bucket_to_bucket(s3: S3, tmp_path: Path) -> None:
    url = s3.upload(TRAINING)
    reshard(url, OUT, Reading(), Writing(degrees={"tp": 1}, verify="full"), Silent())
    reshard(str(TRAINING), str(tmp_path / "out"), Reading(), Writing(degrees={"tp": 1}), Silent())
    assert objects(s3, "out") == files(tmp_path / "out")


def test_a_source_that_changes_leaves_nothing(s3: S3, shards: Path) -> None:
    url = s3.upload(shards)
    key = "run/model-00003-of-00004.safetensors"

    def change(asked: Asked) -> Answer | None:
        if "partNumber" in asked.query:
            s3.put(key, bytes(len((shards / Path(key).name).read_bytes())))
        return None

    s3.proxy.fault = change
    with pytest.raises(SourceChanged) as info:
        convert(url, OUT, Reading(), dcp(), Silent())
    assert info.value.exit_code == 6 and not objects(s3, "out") and not pending(s3)


def test_memory_that_would_not_do_is_said_before_a_byte_moves(s3: S3, shards: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(multipart, "LEAST", 1 << 16)
    with pytest.raises(StorageError) as info:
        convert(str(shards), OUT, Reading(), Writing(to="sharded", degrees={"tp": 4}, memory=100_000), Silent())
    assert info.value.code == "E2711" and "--memory" in str(info.value.hint)
    assert not s3.proxy.asked or all(asked.method in ("GET", "HEAD") for asked in s3.proxy.asked)


@pytest.mark.parametrize("url", ["gs://bucket/out", "hf://org/name", "https://host/out"])
def test_other_stores_are_refused_by_name(url: str, shards: Path) -> None:
    with pytest.raises(UsageError) as info:
        convert(str(shards), url, Reading(), dcp(), Silent())
    assert info.value.code == "E1610" and url in info.value.message and "rclone" in str(info.value.hint)


def test_what_a_store_can_not_take_yet(s3: S3, shards: Path) -> None:
    with pytest.raises(CkptError) as info:
        convert(str(shards), OUT, Reading(), dcp(device="cuda"), Silent())
    assert (info.value.exit_code, info.value.code) == (2, "E2510") and not objects(s3, "out") and not pending(s3)


def test_a_plan_is_applied_into_a_store(s3: S3, shards: Path, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    assert run(["convert", str(shards), OUT, "--to", "dcp", "--plan", plan]) == 0 and not objects(s3, "out")
    assert b"secret" not in Path(plan).read_bytes()
    assert run(["apply", plan]) == 0
    assert diff(OUT, str(shards), Reading(), progress=Silent())["equal"]
    assert run(["apply", plan]) == 5


# -- faults, and going on --------------------------------------------------------------------------------------------


@pytest.mark.share(3)
@pytest.mark.parametrize("fault", [refusal(503, "SlowDown"), refusal(500, "InternalError"), Answer(gone=True)])
def test_every_request_may_fail_once(s3: S3, shards: Path, tmp_path: Path, fault: Answer) -> None:
    seen, lock = set[Any](), threading.Lock()

    def once(asked: Asked) -> Answer | None:
        what = (asked.method, asked.path, str(sorted(asked.query.items())), asked.range)
        with lock:
            known = what in seen
            seen.add(what)
        return None if known else fault

    s3.proxy.fault = once
    convert(str(shards), OUT, Reading(), dcp(), Silent())
    s3.proxy.fault = lambda asked: None
    convert(str(shards), str(tmp_path / "out"), Reading(), dcp(), Silent())
    assert objects(s3, "out") == files(tmp_path / "out") and not pending(s3)


def test_an_answer_that_is_lost_is_no_fault(s3: S3, shards: Path) -> None:
    """The store did what was wanted and the answer broke off: the second try finds its own work, and says so."""
    seen, lock = set[str](), threading.Lock()

    def lost(asked: Asked) -> Answer | None:
        completes = asked.method == "POST" and "uploadId" in asked.query
        if not completes and not (asked.method == "PUT" and not asked.query):
            return None
        with lock:
            known = asked.path in seen
            seen.add(asked.path)
        if known and completes:
            return refusal(404, "NoSuchUpload")  # moto would take it for the first
        return None if known else Answer(lost=True)

    s3.proxy.fault = lost
    convert(str(shards), OUT, Reading(), dcp(), Silent())
    s3.proxy.fault = lambda asked: None
    assert len(seen) > 2 and diff(OUT, str(shards), Reading(), progress=Silent())["equal"]


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (403, "ExpiredToken"), (404, "NoSuchBucket")])
def test_a_refusal_while_writing_names_what_to_set(s3: S3, shards: Path, status: int, code: str) -> None:
    s3.proxy.fault = lambda asked: refusal(status, code) if asked.method == "PUT" else None
    with pytest.raises(StorageError) as info:
        convert(str(shards), OUT, Reading(), dcp(), Silent())
    assert info.value.exit_code == 7 and info.value.code in ("E2504", "E2505") and "AWS_" in str(info.value.hint)
    assert not objects(s3, "out")


@pytest.mark.share(3)
@pytest.mark.parametrize("at", [3, 20, 40])
def test_an_interrupted_run_goes_on_with_what_was_sent(s3: S3, shards: Path, tmp_path: Path, at: int) -> None:
    sent, lock = [0], threading.Lock()

    def dies(asked: Asked) -> Answer | None:
        with lock:
            sent[0] += "partNumber" in asked.query
            return Answer(gone=True) if sent[0] > at else None

    s3.proxy.fault = dies
    with pytest.raises(StorageError) as info:
        convert(str(shards), OUT, Reading(), dcp(), Silent())
    s3.proxy.fault = lambda asked: None
    assert info.value.code == "E2507" and not objects(s3, "out") and pending(s3)
    (leaving,) = clean(OUT)["leavings"]
    assert leaving["bytes"] > 0 and not leaving["removed"] and "__0_0.distcp" in leaving["path"]
    s3.proxy.fault, s3.proxy.asked[:] = lambda asked: None, []
    convert(str(shards), OUT, Reading(), dcp(), Silent())
    convert(str(shards), str(tmp_path / "out"), Reading(), dcp(), Silent())
    made = files(tmp_path / "out")
    assert objects(s3, "out") == made and not pending(s3)
    assert len(parts_sent(s3)) <= ceil_div(len(made["__0_0.distcp"]), 4096) - at + 8, "what was there is sent again"


def test_parts_of_another_content_are_sent_again(s3: S3, shards: Path, tmp_path: Path) -> None:
    """Leavings of another plan, of the same names: trusted by their checksum, so not at all."""
    key = "out/__0_0.distcp"
    begun = s3.client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    for number in (1, 2, 900):
        s3.client.upload_part(Bucket=BUCKET, Key=key, UploadId=begun, PartNumber=number, Body=bytes(4096))
    convert(str(shards), OUT, Reading(), dcp(), Silent())
    convert(str(shards), str(tmp_path / "out"), Reading(), dcp(), Silent())
    assert objects(s3, "out") == files(tmp_path / "out") and not pending(s3)


def test_clean_aborts_what_was_left(s3: S3) -> None:
    for key in ("out/a", "out/deep/b", "outer/c"):
        begun = s3.client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
        s3.client.upload_part(Bucket=BUCKET, Key=key, UploadId=begun, PartNumber=1, Body=bytes(5000))
    shown = clean(OUT)["leavings"]
    assert [(each["bytes"], each["removed"]) for each in shown] == [(5000, False)] * 2 and len(pending(s3)) == 3
    assert all(each["removed"] for each in clean(OUT, remove=True)["leavings"])
    assert pending(s3) == ["outer/c"]


@pytest.mark.parametrize("moment", ["complete", "last"])
def test_a_kill_while_it_becomes_visible_is_gone_on_from(s3: S3, shards: Path, tmp_path: Path, moment: str) -> None:
    writing = Writing(to="safetensors", max_shard_size=1 << 17)
    seen = [0]

    def dies(asked: Asked) -> Answer | None:
        ends = asked.method == "POST" and "uploadId" in asked.query
        last = asked.method == "PUT" and asked.path.endswith("index.json")
        seen[0] += ends
        return Answer(gone=True) if (seen[0] > 1 if moment == "complete" else last) else None

    s3.proxy.fault = dies
    with pytest.raises(StorageError):
        convert(str(shards), OUT, Reading(), writing, Silent())
    there = set(objects(s3, "out"))
    assert there and "model.safetensors.index.json" not in there
    s3.proxy.fault = lambda asked: None
    convert(str(shards), OUT, Reading(), writing, Silent())
    convert(str(shards), str(tmp_path / "out"), Reading(), writing, Silent())
    assert objects(s3, "out") == files(tmp_path / "out") and not pending(s3)


@pytest.mark.share(3)
@pytest.mark.parametrize("after", [1, 5, 9])
def test_a_process_that_is_killed(s3: S3, shards: Path, tmp_path: Path, after: int) -> None:
    sent, lock, process = [0], threading.Lock(), list[subprocess.Popen[bytes]]()  # of the one to be killed

    def kill(asked: Asked) -> Answer | None:
        with lock:
            sent[0] += "partNumber" in asked.query
            if sent[0] >= after and process:
                os.kill(process.pop().pid, signal.SIGKILL)
        return None

    s3.proxy.fault = kill
    program = (
        "import sys; from ckpt_tool.storage.stores import multipart; multipart.LEAST = 4096;"
        "from ckpt_tool.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "convert", str(shards), OUT, "--to", "dcp", "--progress", "none"]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    process.append(first)
    assert first.wait() == -signal.SIGKILL and not objects(s3, "out")
    assert subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0
    convert(str(shards), str(tmp_path / "out"), Reading(), dcp(), Silent())
    assert objects(s3, "out") == files(tmp_path / "out")
    clean(OUT, remove=True)
    assert not pending(s3)


# -- what holds of parts ---------------------------------------------------------------------------------------------


def test_sizes_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for nbytes in (0, 1, 8 << 20, 100 << 30, 5 << 40):
        size = multipart.part_size(nbytes)
        assert size >= 5 << 20 and ceil_div(nbytes, size) <= 10_000 and size <= 5 << 30


def test_the_etag_of_a_whole_object_is_known(s3: S3) -> None:
    begun = s3.client.create_multipart_upload(Bucket=BUCKET, Key="x")["UploadId"]
    etags = {}
    for number in (1, 2):
        sent = s3.client.upload_part(
            Bucket=BUCKET, Key="x", UploadId=begun, PartNumber=number, Body=bytes([number]) * 9
        )
        etags[number] = sent["ETag"].strip('"')
    assert etags[1] == hashlib.md5(b"\1" * 9).hexdigest()
    parts = [{"PartNumber": number, "ETag": etag} for number, etag in etags.items()]
    done = s3.client.complete_multipart_upload(Bucket=BUCKET, Key="x", UploadId=begun, MultipartUpload={"Parts": parts})
    assert done["ETag"].strip('"') == multipart.whole_etag(etags) and multipart.whole_etag({1: "kms"}) is None


def test_what_is_open_at_once_is_known_before(s3: S3, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "QUEUE", 4096)
    said, most, lock = [0], [0], threading.Lock()
    counted: Callable[..., int] = upload.most_open
    begin = upload.Upload._begin_part

    def counting(self: upload.Upload, item: Any, number: int) -> Any:
        part = begin(self, item, number)
        with lock:
            most[0] = max(most[0], sum(len(each.data) for each in self._open.values()))
        return part

    def saying(*arguments: Any) -> int:
        said[0] = counted(*arguments)
        return said[0]

    monkeypatch.setattr(upload.Upload, "_begin_part", counting)
    monkeypatch.setattr(upload, "most_open", saying)
    convert(str(shards), OUT, Reading(), Writing(to="sharded", degrees={"tp": 4}, threads=1), Silent())
    assert 4096 <= most[0] <= said[0]
