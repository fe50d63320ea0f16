"""Plans that several workers carry out into a store: the same objects, one commit, whoever comes, goes or dies."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from s3_server import BUCKET, S3, Answer, Asked, refusal
from test_writing import FIXTURES, GOLDEN, OUT, files, golden_command, objects, pending

from ckpt_tool.cli import run
from ckpt_tool.conversion.plan_file import load_plan
from ckpt_tool.plan import schedule
from ckpt_tool.run import executor, share_upload, shares
from ckpt_tool.run.file_parts import in_order_of_files
from ckpt_tool.run.store_objects import objects_of
from ckpt_tool.storage.output.journal import parsed
from ckpt_tool.storage.stores import multipart, store, store_claims
from ckpt_tool.storage.stores.output_store import output_store, staging_url
from ckpt_tool.storage.stores.store_claims import StoreClaims

RECORDS = ".out.ckpt-partial"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 4 KiB, units of 16 KiB, shares of 12 KiB: a fixture has dozens, and none ends where another does."""
    monkeypatch.setattr(multipart, "LEAST", 4096)
    monkeypatch.setattr(store, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(store, "UNANSWERED", 10.0)  # on a busy machine one request alone takes a second
    monkeypatch.setattr(executor, "units", lambda moves: schedule.units(moves, size=1 << 14))
    monkeypatch.setattr(executor, "_PAUSE", 0.02)
    monkeypatch.setattr(shares, "SHARE", 12 << 10)
    monkeypatch.setattr(shares, "CELL", 2 << 10)


@pytest.mark.share(360)
@pytest.mark.parametrize("name", [name for name, line in GOLDEN.items() if "--allow-lossy" not in line])
def test_parts_make_the_files_of_a_local_output(
    s3: S3, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In three parts, the last first: byte for byte, for every format and whatever its holes."""
    filled = golden_command(name, tmp_path)
    plan = str(tmp_path / "plan.json")
    if run([*filled(OUT), "--plan", plan, "-q"]):  # values that are computed while it reads
        assert "E0264" in capsys.readouterr().err, GOLDEN[name]
        pytest.skip("it has no plan that can be saved")
    assert run([*filled(str(tmp_path / "out")), "-q"]) == 0
    capsys.readouterr()
    for number in (3, 1, 2):
        assert run(["apply", plan, "--part", f"{number}/3", "--json"]) == 0, capsys.readouterr().err
        document = json.loads(capsys.readouterr().out)
    assert document["committed"]
    (made,) = (path for path in tmp_path.iterdir() if path.name.startswith("out"))
    assert objects(s3, made.name) == files(made)
    assert not pending(s3) and not s3.content(f".{made.name}.ckpt-partial")


class Ground:
    """A source of 50 KiB, a plan that writes it as DCP (whose heads know the CRC of what follows), its output here."""

    def __init__(self, s3: S3, root: Path, *options: str, to: str = "dcp", rows: int = 32) -> None:
        self.s3 = s3
        self.root = root
        self.plan = str(root / "plan.json")
        numbers = np.random.default_rng(0)
        weights = {f"layers.{i}.up_proj.weight": numbers.random((rows, 100), np.float32) for i in range(4)}
        safetensors.numpy.save_file(weights, root / "in.safetensors")
        self.line = ["convert", str(root / "in.safetensors"), OUT, "--to", to, *options, "-q"]
        assert run([*self.line, "--plan", self.plan]) == 0
        assert run([word.replace(OUT, str(root / "out")) for word in self.line]) == 0
        self.good = files(root / "out")

    def apply(self, *how: str) -> int:
        return run(["apply", self.plan, *how, "-q", "--threads", "2"])

    def is_there(self) -> bool:
        """Is the output there, and no upload of it? A worker that lives may still put its signs of life beside it."""
        return objects(self.s3, "out") == self.good and not pending(self.s3)

    def is_whole(self) -> bool:
        """Is the output there, and nothing beside it?"""
        return self.is_there() and not self.s3.content(RECORDS)

    def records(self) -> Any:
        return output_store(staging_url(OUT))


@pytest.fixture
def ground(s3: S3, tmp_path: Path) -> Ground:
    return Ground(s3, tmp_path)


# -- as on a disk ------------------------------------------------------------------------------------------------------


def test_one_worker_does_it_all_and_again_is_no_error(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    assert ground.apply("--claim", "--json") == 0 and json.loads(capsys.readouterr().out)["committed"]
    assert ground.is_whole()
    asked = len(ground.s3.proxy.asked)
    for how in (["--claim"], ["--part", "2/3"]):
        assert ground.apply(*how, "--json") == 0
        assert json.loads(capsys.readouterr().out)["already_committed"]
    assert all(each.method in ("GET", "HEAD") for each in ground.s3.proxy.asked[asked:]) and ground.is_whole()
    assert ground.apply() == 5  # one run alone finds an output there


def test_parts_say_which_are_missing_and_status_does(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    assert ground.apply("--part", "2/3", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["committed"] is False and said["parts"] == {"done": [2], "missing": [1, 3]}
    for target in (ground.plan, OUT):
        assert run(["status", target, "--json"]) == 1  # nobody is at work
        found = json.loads(capsys.readouterr().out)
        assert (found["state"], found["missing"], found["running"]) == ("growing", [1, 3], 0)
        assert 0 < found["bytes"] < found["of_bytes"] and [part["state"] for part in found["parts"]] == ["done"]
    before = len(ground.s3.proxy.asked)
    assert ground.apply("--part", "2/3") == 0
    assert not any("partNumber" in each.query for each in ground.s3.proxy.asked[before:]), "it is done already"
    assert ground.apply("--part", "3/3") == ground.apply("--part", "1/3") == 0 and ground.is_whole()
    assert run(["status", OUT, "--json"]) == 0 and json.loads(capsys.readouterr().out)["state"] == "written"


def test_from_bucket_to_bucket_by_a_plan_file(s3: S3, tmp_path: Path) -> None:
    """The plan says which objects it saw, and is read where it is carried out."""
    case = FIXTURES / "dcp/fsdp2_dp4"
    plan = str(tmp_path / "plan.json")
    line = ["--to", "sharded", "--tp", "2", "-q"]
    assert run(["convert", s3.upload(case), OUT, *line, "--plan", plan]) == 0
    assert run(["convert", str(case), str(tmp_path / "out"), *line]) == 0
    assert run(["apply", plan, "--part", "1/2", "-q"]) == run(["apply", plan, "--claim", "-q"]) == 0
    assert objects(s3, "out") == files(tmp_path / "out")


@pytest.mark.slow
def test_parts_and_workers_that_claim_may_be_mixed(ground: Ground) -> None:
    assert ground.apply("--part", "2/5") == ground.apply("--part", "1/3") == ground.apply("--claim") == 0
    assert ground.is_whole()


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["off", "full"])
def test_with_and_without_digests(ground: Ground, verify: str) -> None:
    assert ground.apply("--part", "2/2", "--verify", verify) == ground.apply("--claim", "--verify", verify) == 0
    assert ground.is_whole()


@pytest.mark.slow
def test_the_launcher_says_which_part(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "10":
        monkeypatch.setenv("RANK", rank)
        assert ground.apply("--part", "auto") == 0
    assert ground.is_whole()


def test_what_is_there_stays(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    ground.s3.put("out/notes.txt", b"mine")
    assert ground.apply("--claim") == 5 and "E0501" in capsys.readouterr().err
    assert objects(ground.s3, "out") == {"notes.txt": b"mine"} and not ground.s3.content(RECORDS)


@pytest.mark.slow
def test_what_comes_meanwhile_stays(ground: Ground) -> None:
    """It came after the first worker had looked: If-None-Match."""
    assert ground.apply("--part", "1/2") == 0
    ground.s3.put("out/.metadata", b"theirs")
    assert ground.apply("--part", "2/2") == 5
    assert objects(ground.s3, "out")[".metadata"] == b"theirs"


@pytest.mark.slow
def test_force_replaces_an_older_checkpoint(s3: S3, tmp_path: Path) -> None:
    assert run(["convert", str(FIXTURES / "safetensors/hf_llama_sharded"), OUT, "--to", "safetensors", "-q"]) == 0
    old = objects(s3, "out")
    seen = list[bool]()
    ground = Ground(s3, tmp_path)
    s3.proxy.fault = lambda asked: seen.append(objects(s3, "out") == old) if "partNumber" in asked.query else None
    assert ground.apply("--part", "1/2", "--force") == 0 and seen and all(seen)
    assert ground.apply("--part", "2/2", "--force") == 0 and all(seen)
    s3.proxy.fault = lambda asked: None
    assert ground.is_whole()


@pytest.mark.slow
def test_other_plans_and_whole_runs_do_not_mix(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(ground.root / "other.json")
    assert run([*ground.line, "--dtype", "bf16", "--plan", other]) == 0
    assert ground.apply("--part", "1/2") == 0
    assert run(["apply", other, "--claim", "-q"]) == 6 and "E0611" in capsys.readouterr().err
    claims = StoreClaims(ground.records(), load_plan(ground.plan).identifier(), "alive", [1])
    claims.begin()
    claims.beat()
    assert ground.apply() == 5 and "E0503" in capsys.readouterr().err
    assert run(["clean", OUT, "--remove", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["leavings"]
    assert found["locked"] and not found["removed"] and ground.s3.content(RECORDS)
    claims.end()
    for place in (OUT, f"s3://{BUCKET}/other"):
        assert run(["clean", place, "--remove", "-q"]) == 0
        assert bool(ground.s3.content(RECORDS)) == bool(pending(ground.s3)) == (place != OUT)
        if place == OUT:
            assert ground.apply("--part", "1/2") == 0
    assert ground.apply() == 0 and ground.is_whole()  # what dead workers have left does not stop a whole run


def test_overflows_are_counted_once(s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where shares meet, both move the same cells."""
    weights = {"big": np.full((50, 300), 1e6, np.float32)}
    safetensors.numpy.save_file(weights, tmp_path / "in.safetensors")
    plan = str(tmp_path / "plan.json")
    line = ["convert", str(tmp_path / "in.safetensors"), OUT, "--to", "dcp", "--dtype", "fp16", "--plan", plan]
    assert run([*line, "-q"]) == 0 and run(["apply", plan, "--claim", "-q"]) == 3
    assert "15000 finite values overflow" in capsys.readouterr().err
    assert not objects(s3, "out") and not s3.content(RECORDS) and not pending(s3)


@pytest.mark.slow
def test_a_damaged_source_is_noticed_by_who_commits(s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CRCs of the records that workers read are joined from what each has seen; nothing is read again."""
    source = tmp_path / "training.pt"
    plan = str(tmp_path / "plan.json")
    data = bytearray((FIXTURES / "torch/training.pt").read_bytes())
    with zipfile.ZipFile(FIXTURES / "torch/training.pt") as archive:
        largest = max(
            (each for each in archive.infolist() if "/data/" in each.filename), key=lambda info: info.file_size
        )
    lengths = struct.unpack_from("<HH", data, largest.header_offset + 26)
    data[largest.header_offset + 30 + sum(lengths) + largest.file_size // 2] ^= 1
    source.write_bytes(data)
    assert run(["convert", str(source), OUT, "--to", "dcp", "--plan", plan, "-q"]) == 0
    codes = [run(["apply", plan, "--part", f"{number}/2", "-q"]) for number in (1, 2)]
    assert codes == [0, 3] and "E0351" in capsys.readouterr().err
    assert not objects(s3, "out") and not s3.content(RECORDS) and not pending(s3)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.share(48)
@pytest.mark.parametrize("at", range(48))
def test_a_worker_that_dies_anywhere_is_taken_over(ground: Ground, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """From a request on nothing of it reaches the store; the next does the rest, where it died committing too."""
    count = [0]

    def dies(asked: Asked) -> Answer | None:
        count[0] += 1
        return refusal(403, "AccessDenied") if count[0] > at else None

    ground.s3.proxy.fault = dies
    first = ground.apply("--claim")
    ground.s3.proxy.fault = lambda asked: None
    assert all(ground.good[name] == data for name, data in objects(ground.s3, "out").items())
    if first == 0:  # it was over by then
        assert ground.is_whole()
        return
    monkeypatch.setattr(store_claims, "LEASE", -60.0)  # whatever is claimed is free
    assert ground.apply("--claim") == 0
    assert run(["clean", OUT, "--remove", "-q"]) == 0
    assert ground.is_whole()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [refusal(503, "SlowDown"), Answer(lost=True)], ids=["slow down", "answer lost"])
def test_every_request_may_fail_once(ground: Ground, fault: Answer) -> None:
    """No lease is waited for: a claim whose answer was lost is this worker's."""
    seen = set[Any]()

    def once(asked: Asked) -> Answer | None:
        what = (asked.method, asked.path, str(sorted(asked.query.items())), asked.range)
        known = what in seen
        seen.add(what)
        return None if known else fault

    ground.s3.proxy.fault = once
    assert ground.apply("--claim") == 0
    ground.s3.proxy.fault = lambda asked: None
    assert ground.is_whole()


def test_a_claim_whose_answer_was_lost_is_known_by_its_bytes(ground: Ground) -> None:
    """The store has it, and refuses the same request when it is made again; another worker's claim is another's."""
    one, two = (StoreClaims(ground.records(), "plan", name, [1, 1]) for name in ("one", "two"))
    lost = set[str]()

    def loses(asked: Asked) -> Answer | None:
        if asked.method != "PUT" or asked.path in lost:
            return None
        lost.add(asked.path)
        return Answer(lost=True)

    ground.s3.proxy.fault = loses
    one.begin()
    assert one.first, "the records were begun by it"
    assert {taken.number for taken in (one.take(), one.take()) if taken} == {0, 1}
    assert sorted(key for key in ground.s3.content(RECORDS) if "claim" in key) == ["claim-0-1", "claim-1-1"]
    for key in ground.s3.content(RECORDS):
        lost.discard(f"/{BUCKET}/{RECORDS}/{key}")
    two.begin()
    assert not two._claim(two._view, 0, 1) and two.take() is None


@pytest.mark.share(3)
@pytest.mark.parametrize("what", ["a part", "a record", "a record's words"])
def test_what_is_lost_between_is_made_again(ground: Ground, what: str) -> None:
    assert ground.apply("--part", "1/2") == 0
    (number, *_) = sorted(int(key[6:]) for key in ground.s3.content(RECORDS) if key.startswith("share-"))
    record = ground.s3.content(RECORDS)[f"share-{number}"]
    if what == "a part":
        file, part, _ = parsed(record)[0]["parts"][0]
        key = f"out/{load_plan(ground.plan).outputs[file].path}"
        upload = ground.s3.content(RECORDS)[f"upload-{file}"].decode().removeprefix("crc32:")
        ground.s3.client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=part, Body=bytes(4096))
    else:
        ground.s3.put(f"{RECORDS}/share-{number}", record[:-20] + b"\n" if what == "a record" else b"none")
    assert ground.apply("--part", "2/2") == 0 and ground.is_whole()


@pytest.mark.share(2)
@pytest.mark.parametrize("etags", ["md5", "kms"])
def test_two_that_commit_at_once_do_no_harm(ground: Ground, monkeypatch: pytest.MonkeyPatch, etags: str) -> None:
    """The one was silent; the other took over, and is done before the first completes its last object. What is there is
    known by the plan's note where ETags tell nothing."""
    if etags == "kms":
        monkeypatch.setattr(multipart.WritableBucket, "_etag", lambda *_: "no MD5")
    finish = share_upload.ShareUpload.finish
    second = list[int]()

    def late(self: Any, *given: Any) -> None:
        if not second:
            second.append(0)
            monkeypatch.setattr(store_claims, "LEASE", -60.0)
            second[0] = ground.apply("--claim")
            assert ground.is_there()
        finish(self, *given)

    monkeypatch.setattr(share_upload.ShareUpload, "finish", late)
    assert ground.apply("--claim") == 0 and second == [0] and ground.is_whole()


def test_one_that_slept_through_the_commit_leaves_nothing(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes with its share moved, and finds neither records nor uploads."""
    end = share_upload.ShareUpload.end_share
    slept = list[int]()

    def late(self: Any) -> Any:
        if not slept:
            slept.append(0)
            self._drain()
            monkeypatch.setattr(store_claims, "LEASE", -60.0)
            slept[0] = ground.apply("--claim")
            assert ground.is_there()
        return end(self)

    monkeypatch.setattr(share_upload.ShareUpload, "end_share", late)
    assert ground.apply("--claim") == 0 and slept == [0] and ground.is_whole()


def test_no_sign_of_life_is_given_after_the_commit(ground: Ground) -> None:
    """Its heart goes on beating while it sleeps; what it puts then would stay if it died."""
    one, two = (StoreClaims(ground.records(), "plan", name, [1, 1]) for name in ("one", "two"))
    one.begin()
    two.begin()
    assert one.take() is not None and one._pulse() and len(ground.s3.content(RECORDS)) == 3
    two.clear()
    assert not one._pulse() and one.gone and not ground.s3.content(RECORDS)


# -- shares ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [("--to", "dcp"), ("--to", "sharded", "--tp", "8")], ids=["one file", "eight"])
def test_shares_tile_the_parts_and_move_little_twice(s3: S3, tmp_path: Path, options: tuple[str, ...]) -> None:
    plan = load_plan(Ground(s3, tmp_path, *options[2:], to=options[1], rows=128).plan)
    objects_ = objects_of(plan)
    every = executor.units(plan.moves)
    made = shares.Shares(plan, objects_, in_order_of_files(plan, list(enumerate(every))))
    owners = [made.owner(item.number, part) for item in objects_ for part in item.moved if item.valued]
    assert set(owners) == set(range(len(made))) and len(made) > 5
    moved = [work for number in range(len(made)) for work in made.work(number)]
    counted = [item for work in moved if work.counts for item in work.unit.items]
    assert sum((item.stop - item.start) * 4 for item in counted) == sum(move.nbytes for move in plan.moves)
    assert sum(work.unit.nbytes for work in moved) < 1.7 * sum(unit.nbytes for unit in every)


def test_a_view_that_changes_while_a_share_is_chosen_takes_nothing_over(ground: Ground) -> None:
    """A look beside the work may show claims that were not there when the free shares were counted."""
    records = ground.records()
    one, two = (StoreClaims(records, "plan", name, [1, 1, 1]) for name in ("one", "two"))
    one.begin()
    two.begin()
    create = two._create

    def meanwhile(key: str, line: Any) -> bool:
        if one._own != {0, 1, 2}:
            while one.take() is not None:
                pass
            two.look()
        return create(key, line)

    two._create = meanwhile  # type: ignore[method-assign]
    assert two.take() is None and one._own == {0, 1, 2}
