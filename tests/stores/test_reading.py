"""Sources in an S3 store: what is asked of it, what comes of its faults, which variable an error names."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from s3_server import BUCKET, S3, Answer, Asked, Proxy, refusal

from ckpt_tool.cli import run
from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.commands.verify import verify
from ckpt_tool.core.progress import Silent, listening
from ckpt_tool.errors import CkptError, SourceChanged, StorageError, UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan import schedule
from ckpt_tool.plan.plan import Move
from ckpt_tool.run import executor
from ckpt_tool.run.scan import Visit, digests_of
from ckpt_tool.sources.opening import open_source
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.storage.stores import object_store, read_ahead, store
from ckpt_tool.storage.stores.remote import RemoteTree

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = [
    "dcp/tp2_dp2",
    "gguf/llama3.gguf",
    "safetensors/hf_llama_sharded",
    "sharded/by_the_specification",
    "torch/training.pt",
]


class Noted(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(store, "UNANSWERED", 1.0)
    monkeypatch.setattr(store, "THROTTLED", 2.0)
    monkeypatch.setattr(store, "_said_at", 0.0)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Twelve shards of 1.5 MB."""
    folder = tmp_path / "shards"
    folder.mkdir()
    names = {}
    for i in range(12):
        file = f"model-{i + 1:05d}-of-00012.safetensors"
        weights = {f"model.layers.{i}.mlp.up_proj.weight": np.arange(3 << 17, dtype=np.float32).reshape(512, -1) + i}
        safetensors.numpy.save_file(weights, folder / file)
        names |= dict.fromkeys(weights, file)
    total = 12 * 4 * (3 << 17)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": names})
    )
    return folder


def ranges(proxy: Proxy) -> list[Asked]:
    return [asked for asked in proxy.asked if asked.range]


@pytest.mark.share(4)
@pytest.mark.parametrize("case", CASES)
def test_a_store_and_a_folder_give_the_same_bytes(s3: S3, tmp_path: Path, case: str) -> None:
    url = s3.upload(FIXTURES / case)
    writing = Writing(to="sharded", degrees={"tp": 2}, threads=2)
    convert(url, str(tmp_path / "remote"), Reading(), writing, Silent())
    convert(str(FIXTURES / case), str(tmp_path / "local"), Reading(), writing, Silent())
    assert {p.name: p.read_bytes() for p in (tmp_path / "remote").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "local").iterdir()
    }
    assert diff(url, str(FIXTURES / case), Reading(), progress=Silent())["equal"]


def test_an_inspect_is_one_listing_and_at_most_two_ranges_a_shard(s3: S3, shards: Path) -> None:
    url = s3.upload(shards)
    assert inspect(url, Reading())["total"]["tensors"] == 12
    lists = [asked for asked in s3.proxy.asked if asked.lists]
    got = ranges(s3.proxy)
    assert len(lists) == 1 and len(got) <= 2 * 12 + 1 and len(s3.proxy.asked) == len(lists) + len(got)
    assert s3.proxy.bytes_sent <= 13 * 2 * (64 << 10) + (64 << 10)


def test_headers_come_many_at_once(s3: S3, shards: Path) -> None:
    url = s3.upload(shards)
    s3.proxy.fault = lambda asked: Answer(wait=0.2) if asked.range else None
    began = time.monotonic()
    inspect(url, Reading())
    assert time.monotonic() - began < 12 * 0.2


def test_a_conversion_is_few_large_requests_many_at_once(s3: S3, shards: Path, tmp_path: Path) -> None:
    url = s3.upload(shards)
    at_once = [0]
    most = [0]
    lock = threading.Lock()

    def slow(asked: Asked) -> Answer | None:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        time.sleep(0.05)
        with lock:
            at_once[0] -= 1
        return None

    s3.proxy.fault = slow
    convert(url, str(tmp_path / "out"), Reading(), Writing(to="dcp", threads=1), Silent())
    total = sum(path.stat().st_size for path in shards.iterdir())
    assert s3.proxy.bytes_sent <= 1.2 * total + (1 << 20), "bytes fetched twice"
    assert len(ranges(s3.proxy)) <= 12 * 3 + 2
    assert most[0] >= 6, "requests one after another"


def test_a_pointer_file_and_its_folder_share_a_listing(s3: S3) -> None:
    s3.put("run/latest", b"global_step3")
    s3.upload(FIXTURES / "dcp/tp2_dp2", "run/global_step3")
    assert inspect(f"s3://{BUCKET}/run", Reading())["format"] == "dcp"
    assert sum(asked.lists for asked in s3.proxy.asked) == 1


@pytest.mark.parametrize(
    "fault",
    [
        Answer(503, b"<Error><Code>SlowDown</Code></Error>"),
        Answer(500, b"<Error><Code>InternalError</Code></Error>"),
        Answer(cut=10),
        Answer(cut=0),
    ],
    ids=["slow-down", "500", "cut", "reset"],
)
def test_what_passes_is_tried_again(s3: S3, impatient: None, shards: Path, fault: Answer, tmp_path: Path) -> None:
    url, seen, lock = s3.upload(shards), set[tuple[str, str]](), threading.Lock()

    def first_time(asked: Asked) -> Answer | None:
        with lock:
            known = (asked.path, asked.range) in seen
            seen.add((asked.path, asked.range))
        return None if known else fault

    s3.proxy.fault = first_time
    convert(url, str(tmp_path / "out"), Reading(), Writing(to="dcp"), Silent())
    assert diff(str(tmp_path / "out"), str(shards), Reading(), progress=Silent())["equal"]


def test_a_store_that_has_died_is_told_soon_and_shown_while_it_lasts(s3: S3, impatient: None, shards: Path) -> None:
    url = s3.upload(shards)
    tree = open_tree(url)
    s3.proxy.fault = lambda asked: Answer(gone=True)
    noted = Noted()
    began = time.monotonic()
    with listening(noted), pytest.raises(StorageError) as info:
        tree.read("model-00001-of-00012.safetensors", 0, 100)
    assert time.monotonic() - began < 5
    assert (info.value.code, info.value.exit_code) == ("E2507", 7)
    assert str(info.value.path).endswith("model-00001-of-00012.safetensors")
    assert "AWS_ENDPOINT_URL=" in str(info.value.hint)
    assert noted.notes and "trying again in" in noted.notes[0]


def test_patience_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    tries = [0]
    monkeypatch.setattr(store.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(store.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def ask() -> None:
        tries[0] += 1
        raise OSError("no")

    for throttled, limit in ((False, store.UNANSWERED), (True, store.THROTTLED)):
        now[0], tries[0] = 0.0, 0
        with pytest.raises(OSError):
            store.patiently(
                ask, shown="s3://b", faults=(OSError,), judge=lambda e, t=throttled: store.Again("it does not", t)
            )  # type: ignore[misc]
        assert limit / 2 < now[0] <= limit and tries[0] < 30
    tries[0] = 0
    with pytest.raises(OSError):
        store.patiently(ask, shown="s3://b", faults=(OSError,), judge=lambda e: None)
    assert tries[0] == 1


@pytest.mark.parametrize("how", ["rewritten", "other etag", "deleted"])
def test_an_object_that_changes_is_exit_6(s3: S3, shards: Path, tmp_path: Path, how: str) -> None:
    url, calls, lock = s3.upload(shards), [0], threading.Lock()
    key = "run/model-00007-of-00012.safetensors"

    def change(asked: Asked) -> Answer | None:
        if not (asked.range and asked.path.endswith(key)):
            return None
        with lock:
            calls[0] += 1
            now = calls[0] == 2  # its header is read
        if now and how == "rewritten":
            s3.put(key, (shards / Path(key).name).read_bytes()[:-1] + b"x")
        if now and how == "deleted":
            s3.client.delete_object(Bucket=BUCKET, Key=key)
        return Answer(etag="other") if how == "other etag" and calls[0] >= 2 else None

    s3.proxy.fault = change
    with pytest.raises(SourceChanged) as info:
        convert(url, str(tmp_path / "out"), Reading(), Writing(to="dcp", threads=1), Silent())
    assert info.value.exit_code == 6 and key in str(info.value.path)
    assert not (tmp_path / "out").exists()


REFUSALS = {
    "key": (refusal(403, "InvalidAccessKeyId"), "E2504", "AWS_ACCESS_KEY_ID"),
    "secret": (refusal(403, "SignatureDoesNotMatch"), "E2504", "AWS_SECRET_ACCESS_KEY"),
    "token": (refusal(400, "ExpiredToken"), "E2504", "AWS_SESSION_TOKEN"),
    "denied": (refusal(403, "AccessDenied"), "E2504", "AWS_PROFILE"),
    "bucket": (refusal(404, "NoSuchBucket"), "E2505", "AWS_ENDPOINT_URL"),
    "region": (refusal(301, "PermanentRedirect"), "E2506", "AWS_REGION"),
    "named": (refusal(400, "AuthorizationHeaderMalformed", "<Region>eu-west-3</Region>"), "E2506", "eu-west-3"),
}


@pytest.mark.parametrize("what", REFUSALS)
@pytest.mark.parametrize("name", ["run", "run/model-00001-of-00012.safetensors"])
def test_a_refusal_names_what_to_set(s3: S3, impatient: None, shards: Path, what: str, name: str) -> None:
    s3.upload(shards)
    answer, code, word = REFUSALS[what]
    s3.proxy.fault = lambda asked: answer
    with pytest.raises(StorageError) as info:
        inspect(f"s3://{BUCKET}/{name}", Reading())
    assert info.value.exit_code == 7 and "\n" not in info.value.message
    if "/" in name and what not in ("region",):  # a HEAD's answer has no body: only that it was refused is known
        assert info.value.code in ("E2504", "E2505", "E2506", "E0702")
        return
    assert info.value.code == code and word in f"{info.value.message} {info.value.hint}"
    assert len(s3.proxy.asked) <= 2, "what the store means is not asked again"


def test_no_credentials_at_all(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    error = object_store.fault_of(
        RuntimeError("Error performing PUT http://169.254.169.254/latest/api/token"),
        object_store.CLOUDS["s3"],
        BUCKET,
        "s3://bucket/run",
        "listing",
    )
    assert error.code == "E2504" and "AWS_PROFILE" in str(error.hint) and "AWS_SKIP_SIGNATURE" in str(error.hint)


def test_the_profile_of_the_aws_files_is_read(s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    s3.upload(FIXTURES / "dcp/tp2_dp2")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    folder = tmp_path / "home" / ".aws"
    folder.mkdir(parents=True)
    (folder / "credentials").write_text("[other]\naws_access_key_id = k\naws_secret_access_key = s\n")
    (folder / "config").write_text(f"[profile other]\nregion = eu-west-3\nendpoint_url = {s3.proxy.url}\n")
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert inspect(f"s3://{BUCKET}/run", Reading())["format"] == "dcp"
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(UsageError) as info:
        inspect(f"s3://{BUCKET}/run", Reading())
    assert info.value.code == "E2508" and "absent" in info.value.message


@pytest.mark.parametrize("url", ["s3://", "s3:///run", "gs://", "az:///x"])
def test_a_url_without_a_bucket(url: str) -> None:
    pytest.importorskip("obstore")
    with pytest.raises(UsageError) as info:
        open_tree(url)
    assert info.value.code == "E2502" and "://" in str(info.value.hint)


def test_nothing_there(s3: S3) -> None:
    for url in (f"s3://{BUCKET}/none", f"s3://{BUCKET}/none.safetensors"):
        with pytest.raises(CkptError) as info:
            open_tree(url)
        assert info.value.code == "E0702"
    with pytest.raises(StorageError) as info:
        open_tree("s3://nowhere/none")
    assert info.value.code == "E2505"


def test_odd_keys_and_a_file_by_its_url(s3: S3) -> None:
    s3.put("run/a b+é%41#.bin", bytes(range(100)))
    s3.put("run/empty", b"")
    tree = open_tree(f"s3://{BUCKET}/run")
    assert tree.listing() == {"a b+é%41#.bin": 100, "empty": 0} and tree.read("a b+é%41#.bin", 3, 2) == b"\3\4"
    one = open_tree(f"s3://{BUCKET}/run/a b+é%41#.bin")
    assert one.single == "a b+é%41#.bin" and one.read(one.single, 98, 2) == b"bc"
    assert one.identity(one.single) == one.identity_by_name(one.single)
    assert tree.identities_by_name(tree.listing()) == [tree.identity(name) for name in tree.listing()]


def test_verify_fetches_what_it_reads_twice_and_no_more(s3: S3, shards: Path) -> None:
    url = s3.upload(shards)
    assert verify(url, Reading(), progress=Silent())["ok"]
    assert s3.proxy.bytes_sent <= 2.2 * sum(path.stat().st_size for path in shards.iterdir())


# -- what is fetched ahead ------------------------------------------------------------------------------------------


class Bytes:
    """A file of which byte i is i % 251, fetched slowly. asked: the ranges."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def __call__(self, path: str, at: int, nbytes: int) -> list[memoryview]:
        self.asked.append((at, nbytes))
        time.sleep(0.005)
        data = memoryview(bytes(i % 251 for i in range(at, at + nbytes)))
        return [data[:77], data[77:]]


def taken(mine: read_ahead.Ahead, path: str, at: int, nbytes: int) -> None:
    """All of it is there, in parts, and right."""
    end = at + nbytes
    while at < end:
        part = b"".join(mine.take(path, at, end))
        assert part and part == bytes(i % 251 for i in range(at, at + len(part)))
        at += len(part)


def test_what_is_ahead_is_bounded_and_right_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "PIECE", 1000)
    monkeypatch.setattr(read_ahead, "SHORT", 10)
    monkeypatch.setattr(read_ahead, "NEAR", 10)
    monkeypatch.setattr(read_ahead, "WINDOW", 4000)
    monkeypatch.setattr(read_ahead, "SHARE", 2000)
    bytes_ = Bytes()
    held = list[int]()
    fetchers = read_ahead.Fetchers(bytes_)
    mine = read_ahead.Ahead(fetchers)
    mine.expect([("f", i * 700, 690) for i in range(30)])
    passed = 0
    for at in (0, 14_000, 3_500, 20_500, 9_999, 20_900):
        want = at
        while want < min(at + 600, 20_990):
            part = b"".join(mine.take("f", want, min(at + 600, 20_990)))
            if not part:
                assert want < passed, "what was not passed by is there"
                break
            assert part == bytes(i % 251 for i in range(want, want + len(part)))
            want += len(part)
            passed = max(passed, want)
            held.append(fetchers.held)
    assert max(held) <= 4000 + 2000
    assert sum(nbytes for _, nbytes in bytes_.asked) <= 21_000
    mine.expect([])
    assert fetchers.held == 0


def test_what_comes_then_is_begun_before_and_nothing_is_fetched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "PIECE", 1000)
    monkeypatch.setattr(read_ahead, "SHORT", 10)
    bytes_ = Bytes()
    fetchers = read_ahead.Fetchers(bytes_)
    mine = read_ahead.Ahead(fetchers)
    mine.expect([("f", 0, 3000)])
    mine.expect([("f", 3000, 3000), ("g", 0, 2000)], then=True)
    assert fetchers.held == 8000, "all of it is on its way"
    for path, length in (("f", 6000), ("g", 2000)):
        for at in range(0, length, 500):
            taken(mine, path, at, 500)
    assert sum(nbytes for _, nbytes in bytes_.asked) == 8000 and fetchers.held == 0


def test_what_comes_then_may_lie_before_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one file, as units of a plan do; the third that is expected ends the first."""
    monkeypatch.setattr(read_ahead, "PIECE", 1000)
    monkeypatch.setattr(read_ahead, "SHORT", 10)
    bytes_ = Bytes()
    fetchers = read_ahead.Fetchers(bytes_)
    mine = read_ahead.Ahead(fetchers)
    mine.expect([("f", 3000, 3000)])
    mine.expect([("f", 0, 3000)], then=True)
    for first in (3000, 0):
        for at in range(first, first + 3000, 500):
            taken(mine, "f", at, 500)
        if first:
            assert fetchers.held == 3000, "what comes then is still there"
    assert sum(nbytes for _, nbytes in bytes_.asked) == 6000 and fetchers.held == 0
    mine.expect([("f", 0, 1000)])
    mine.expect([("f", 1000, 1000)], then=True)
    mine.expect([("f", 2000, 1000)], then=True)
    assert fetchers.held == 2000 and not mine.take("f", 0, 10)


def test_the_next_unit_is_asked_for_before_one_is_written(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion keeps the store at work from unit to unit; what lies on a disk is taken when its turn comes."""
    size = 3 << 20
    taken = list[int]()
    safetensors.numpy.save_file({name: np.zeros(size, np.uint8) for name in "ab"}, tmp_path / "x.safetensors")
    monkeypatch.setattr(executor, "units", lambda moves: schedule.units(moves, size=size))
    next_ = executor.Executor._take_unit
    unit = executor.Executor._move_unit

    def noted(self: Any, *given: Any) -> Any:
        found = next_(self, *given)
        taken.extend([1] if found else [])
        return found

    def moved(self: Any, *given: Any) -> Any:
        line = unit(self, *given)
        taken.append(0)
        return line

    monkeypatch.setattr(executor.Executor, "_take_unit", noted)
    monkeypatch.setattr(executor.Executor, "_move_unit", moved)
    for number, source in enumerate((s3.upload(tmp_path / "x.safetensors"), str(tmp_path / "x.safetensors"))):
        line = ["convert", source, str(tmp_path / f"out{number}"), "--to", "dcp", "--threads", "1", "-q"]
        assert run(line) == 0
        assert taken == [[1, 1, 0, 0], [1, 0, 1, 0]][number]
        taken.clear()
    ranges = [each.range for each in s3.proxy.asked if each.range]
    assert len(ranges) == len(set(ranges)), "nothing is fetched twice"


def test_the_next_tensor_is_asked_for_before_one_is_read(s3: S3, tmp_path: Path) -> None:
    """Else the store is idle between any two."""
    size = 3 << 20
    seen = list[bool]()
    safetensors.numpy.save_file({name: np.zeros(size, np.uint8) for name in "ab"}, tmp_path / "x.safetensors")
    opened = open_source(s3.upload(tmp_path / "x.safetensors"), Reading())

    def visit(move: Move) -> Visit:
        def see(move: Move, at: int, data: object) -> None:
            until = time.monotonic() + 10
            while not seen and time.monotonic() < until:
                if any(int(each.range[6:].partition("-")[0]) > size for each in s3.proxy.asked if each.range):
                    seen.append(at < size // 2 and move.key.name == "a")
                time.sleep(0.01)

        return see

    assert len(digests_of(opened.catalog, opened.tree, threads=1, also=visit)) == 2
    assert seen == [True]


def test_a_failure_to_fetch_is_raised_where_it_is_read() -> None:
    def fail(path: str, at: int, nbytes: int) -> list[memoryview]:
        raise StorageError("no", code="E0700")

    mine = read_ahead.Ahead(read_ahead.Fetchers(fail))
    mine.expect([("f", 0, 10)])
    assert not mine.take("g", 0, 1) and not mine.take("f", 50, 60)
    with pytest.raises(StorageError):
        mine.take("f", 0, 10)


def test_local_runs_load_no_store() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from ckpt_tool.cli import run; run(['inspect', sys.argv[1], '--json']);"
        "sys.exit(any(n.split('.')[0] in ('obstore', 'fsspec', 'boto3') or 'storage.stores.store' in n"
        " or n.endswith(('object_store', 'storage.stores.remote')) for n in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code, FIXTURES / "dcp/tp2_dp2"], check=True, stdout=subprocess.DEVNULL)


def test_a_remote_tree_is_what_a_url_opens(s3: S3) -> None:
    s3.put("run/x", b"x")
    assert isinstance(open_tree(f"S3://{BUCKET}/run"), RemoteTree)
