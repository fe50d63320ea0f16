"""Azure's blobs, as its emulator has them: read as a folder, written as one, all or nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from azurite import ACCOUNT, KEY, Azurite, program
from s3_server import Answer, Asked, Proxy, refusal

from ckpt_tool.cli import run
from ckpt_tool.commands.clean import clean
from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.commands.diff import diff
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.commands.verify import verify
from ckpt_tool.core.integers import ceil_div
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError, OutputExists, StorageError, UsageError
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan import schedule
from ckpt_tool.run import executor, shares
from ckpt_tool.storage.stores import block_blobs, multipart, store, store_claims
from ckpt_tool.storage.stores.block_blobs import BLOCKS, Container

pytestmark = pytest.mark.server
ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
CONTAINER = "box"
PART = 64 << 10
OUT = f"az://{CONTAINER}/out"
WRITINGS: dict[str, dict[str, Any]] = {
    "safetensors": {"max_shard_size": 300_000},
    "dcp": {},
    "sharded": {"degrees": {"tp": 2}},
    "torch": {},
}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    if program() is None:
        pytest.skip("no azurite-blob, which comes with the npm package azurite")
    azurite = Azurite(tmp_path_factory.mktemp("azurite"))
    azurite.start()
    yield azurite
    azurite.kill()


class Blobs:
    """proxy: what the tool sees of the store. client: the tests' own, past the proxy."""

    def __init__(self, proxy: Proxy, client: Any) -> None:
        self.proxy = proxy
        self.client = client

    def upload(self, source: Path) -> str:
        for path in source.rglob("*"):
            if path.is_file():
                self.client.upload_blob(f"run/{path.relative_to(source)}", path.read_bytes())
        return f"az://{CONTAINER}/run"

    def content(self, prefix: str = "out") -> dict[str, bytes]:
        names = [each.name for each in self.client.list_blobs(name_starts_with=prefix)]
        return {
            name.removeprefix(prefix).lstrip("/"): self.client.download_blob(name, max_concurrency=1).readall()
            for name in names
        }

    def waiting(self) -> list[str]:
        """Names of blobs that have blocks and were never committed."""
        there = {each.name for each in self.client.list_blobs()}
        return [each.name for each in self.client.list_blobs(include=["uncommittedblobs"]) if each.name not in there]


@pytest.fixture
def blobs(server: Azurite, monkeypatch: pytest.MonkeyPatch) -> Iterator[Blobs]:
    """An empty container."""
    from azure.storage.blob import ContainerClient

    pytest.importorskip("obstore")
    url = f"http://127.0.0.1:{server.port}/{ACCOUNT}"
    client = ContainerClient(url, CONTAINER, credential={"account_name": ACCOUNT, "account_key": KEY})
    client.create_container()
    proxy = Proxy(server.port)
    threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{proxy.url}/{ACCOUNT}")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setattr(multipart, "LEAST", PART)
    yield Blobs(proxy, client)
    client.delete_container()
    client.close()
    proxy.shutdown()
    proxy.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 1 MB in one file."""
    random = np.random.default_rng(0)
    folder = tmp_path / "model"
    folder.mkdir()
    weights = {f"layers.{i}.weight": random.standard_normal((128, 256)).astype(np.float32) for i in range(8)}
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    return folder


def files(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def is_block(asked: Asked) -> bool:
    return asked.query.get("comp") == ["block"]


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["dcp/tp2_dp2", "safetensors/hf_llama_sharded"])
def test_it_reads_as_a_folder_does(blobs: Blobs, case: str) -> None:
    url = blobs.upload(FIXTURES / case)
    here, there = (inspect(each, Reading()) for each in (str(FIXTURES / case), url))
    assert here["format"] == there["format"] and here["total"] == there["total"]
    assert verify(url, Reading(), progress=Silent())["ok"]
    assert diff(url, str(FIXTURES / case), Reading(), progress=Silent())["equal"]


# -- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", WRITINGS)
def test_blobs_are_the_files_of_a_local_output(blobs: Blobs, model: Path, tmp_path: Path, to: str) -> None:
    name = "out.pt" if to == "torch" else "out"
    writing = Writing(to=to, **WRITINGS[to])
    convert(str(model), f"az://{CONTAINER}/{name}", Reading(), writing, Silent())
    convert(str(model), str(tmp_path / name), Reading(), writing, Silent())
    assert blobs.content(name) == files(tmp_path / name) and not blobs.waiting()
    assert sum(map(is_block, blobs.proxy.asked)) >= 10**6 // PART
    with pytest.raises(OutputExists):
        convert(str(model), f"az://{CONTAINER}/{name}", Reading(), writing, Silent())


def test_from_container_to_container_with_its_optimizer(blobs: Blobs, tmp_path: Path) -> None:
    url = blobs.upload(FIXTURES / "dcp/tp2_dp2")
    reshard(url, OUT, Reading(), Writing(degrees={"tp": 2}), Silent())
    reshard(str(FIXTURES / "dcp/tp2_dp2"), str(tmp_path / "out"), Reading(), Writing(degrees={"tp": 2}), Silent())
    assert blobs.content() == files(tmp_path / "out")


def test_what_is_there_is_replaced_by_force_alone(blobs: Blobs, model: Path, tmp_path: Path) -> None:
    convert(str(model), OUT, Reading(), Writing(to="dcp"), Silent())
    before = blobs.content()
    other = Writing(to="safetensors", max_shard_size=300_000)
    with pytest.raises(OutputExists):
        convert(str(model), OUT, Reading(), other, Silent())
    assert blobs.content() == before
    other = Writing(to="safetensors", max_shard_size=300_000, force=True)
    convert(str(model), OUT, Reading(), other, Silent())
    convert(str(model), str(tmp_path / "out"), Reading(), other, Silent())
    assert blobs.content() == files(tmp_path / "out")


def test_folders_of_an_account_with_a_hierarchy_are_no_objects(blobs: Blobs, model: Path, tmp_path: Path) -> None:
    folders = {"hdi_isfolder": "true"}
    for name in ("out", "out/deep"):
        blobs.client.upload_blob(name, b"", metadata=folders)
    convert(str(model), OUT, Reading(), Writing(to="dcp"), Silent())
    convert(str(model), str(tmp_path / "out"), Reading(), Writing(to="dcp"), Silent())
    assert {name: data for name, data in blobs.content().items() if data} == files(tmp_path / "out")


def test_nothing_that_is_there_is_replaced(blobs: Blobs) -> None:
    """A blob put whole and one of blocks; one of ours, whose answer was lost, is done."""
    place = Container.at(OUT)
    place.put("a", b"first", {}, new=True)
    place.put("a", b"first", {}, new=True)
    with pytest.raises(OutputExists):
        place.put("a", b"second", {}, new=True)
    etag = place.part("a", BLOCKS, 1, bytearray(b"third"))
    with pytest.raises(OutputExists):
        place.complete("a", BLOCKS, {1: etag}, {}, new=True)
    assert blobs.content() == {"a": b"first"}
    etag = place.part("b", BLOCKS, 1, bytearray(b"third"))
    for _ in range(2):
        place.complete("b", BLOCKS, {1: etag}, {"ckpt-plan": "7"}, new=True)
    assert blobs.content()["b"] == b"third" and place.note("b", "ckpt-plan") == "7"


def test_a_part_that_changed_on_its_way_is_refused(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(store, "UNANSWERED", 0.1)
    place = Container.at(OUT)
    monkeypatch.setattr(block_blobs, "md5", lambda data: bytes(16))
    with pytest.raises(StorageError):
        place.part("a", BLOCKS, 1, bytearray(b"other"))
    assert not place.parts("a", BLOCKS)


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [refusal(503, "ServerBusy"), refusal(500, "InternalError"), Answer(gone=True)])
def test_what_passes_is_tried_again(
    blobs: Blobs, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Answer
) -> None:
    monkeypatch.setattr(store, "FIRST_WAIT", 0.01)
    left, lock = [4], threading.Lock()

    def some(asked: Asked) -> Answer | None:
        with lock:
            left[0] -= is_block(asked)
            return fault if is_block(asked) and left[0] >= 0 else None

    blobs.proxy.fault = some
    convert(str(model), OUT, Reading(), Writing(to="dcp"), Silent())
    convert(str(model), str(tmp_path / "out"), Reading(), Writing(to="dcp"), Silent())
    assert left[0] < 0 and blobs.content() == files(tmp_path / "out")


def test_an_answer_that_was_lost_counts(blobs: Blobs, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of each blob is done, and its answer does not arrive."""
    monkeypatch.setattr(store, "FIRST_WAIT", 0.01)
    seen = set[str]()

    def lose(asked: Asked) -> Answer | None:
        first = asked.query.get("comp") == ["blocklist"] and asked.method == "PUT" and asked.path not in seen
        seen.update([asked.path] if first else [])
        return Answer(lost=True) if first else None

    blobs.proxy.fault = lose
    convert(str(model), OUT, Reading(), Writing(to="dcp"), Silent())
    assert seen and verify(OUT, Reading(), progress=Silent())["ok"]


@pytest.mark.parametrize(
    "name, value, code, word",
    [
        ("AZURE_STORAGE_ACCOUNT_KEY", KEY.swapcase(), "E2504", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("AZURE_STORAGE_ACCOUNT_KEY", "no key", "E2508", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:9/x", "E2507", "AZURE_STORAGE_ENDPOINT"),
    ],
)
def test_errors_name_the_variable(
    blobs: Blobs, model: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, code: str, word: str
) -> None:
    monkeypatch.setattr(store, "UNANSWERED", 0.1)
    monkeypatch.setenv(name, value)
    with pytest.raises(CkptError) as found:
        convert(str(model), OUT, Reading(), Writing(to="dcp"), Silent())
    assert found.value.code == code and word in f"{found.value} {found.value.hint}"


def test_a_container_that_is_not_there(blobs: Blobs, model: Path) -> None:
    with pytest.raises(StorageError) as found:
        convert(str(model), "az://nobody/out", Reading(), Writing(to="dcp"), Silent())
    assert found.value.code == "E2505" and "container nobody" in str(found.value)
    with pytest.raises(UsageError, match="names no place in the container"):
        convert(str(model), "az://box/", Reading(), Writing(to="dcp"), Silent())


# -- kills -----------------------------------------------------------------------------------------------------------

RUN = (
    "import sys; from ckpt_tool.storage.stores import multipart; multipart.LEAST = 65536;"
    "from ckpt_tool.cli import run; sys.exit(run(sys.argv[1:]))"
)


@pytest.mark.share(3)
@pytest.mark.parametrize("point", [1, 8, 15])
def test_a_kill_leaves_nothing_half_visible(blobs: Blobs, model: Path, tmp_path: Path, point: int) -> None:
    """At one of its 17 blocks: the same command finishes, and sends again only what had not arrived."""
    count, lock, killed = [0], threading.Lock(), list[subprocess.Popen[bytes]]()

    def kill(asked: Asked) -> Answer | None:
        with lock:
            count[0] += is_block(asked)
            if count[0] >= point and killed and killed[0].returncode is None:
                os.kill(killed[0].pid, signal.SIGKILL)
        return None

    blobs.proxy.fault = kill
    command = [sys.executable, "-c", RUN, "convert", str(model), OUT, "--to", "safetensors", "--progress", "none"]
    killed.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL))
    assert killed[0].wait() == -signal.SIGKILL and not blobs.content()
    had = len(Container.at(OUT).parts("model.safetensors", BLOCKS))
    blobs.proxy.fault = lambda asked: None
    blobs.proxy.asked.clear()
    assert subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0
    convert(str(model), str(tmp_path / "out"), Reading(), Writing(to="safetensors"), Silent())
    assert blobs.content() == files(tmp_path / "out") and not blobs.waiting()
    sent = sum(map(is_block, blobs.proxy.asked))  # some were still on their way when `had` was counted
    assert sent <= ceil_div((model / "model.safetensors").stat().st_size, PART) - had


@pytest.mark.share(3)
@pytest.mark.parametrize("point", [2, 9, 18])
def test_a_kill_of_the_server(blobs: Blobs, server: Azurite, model: Path, tmp_path: Path, point: int) -> None:
    """At a request: an error that says so, and when the server is back, with what it still has, the same command
    finishes."""
    time.sleep(6)  # until it has written down that there is a container
    count, lock, dead = [0], threading.Lock(), threading.Event()

    def kill(asked: Asked) -> Answer | None:
        with lock:
            count[0] += 1
            if count[0] == point:
                server.kill()
                dead.set()
        return Answer(gone=True) if dead.is_set() else None

    blobs.proxy.fault = kill
    program = RUN.replace(
        "from ckpt_tool.cli", "from ckpt_tool.storage.stores import store; store.UNANSWERED = 1.0; from ckpt_tool.cli"
    )
    command = [sys.executable, "-c", program, "convert", str(model), OUT, "--to", "safetensors", "--progress", "none"]
    first = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert dead.is_set() and first.returncode == 7 and "E2507" in first.stderr, first.stderr
    blobs.proxy.fault = lambda asked: None
    server.start()
    assert not blobs.content()
    assert subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0
    convert(str(model), str(tmp_path / "out"), Reading(), Writing(to="safetensors"), Silent())
    assert blobs.content() == files(tmp_path / "out")


@pytest.mark.parametrize("to", ["dcp", "sharded"])
def test_workers_share_an_output_out(
    blobs: Blobs, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """A part, one that claims and dies, and one that takes over; again is no error, and nothing is left."""
    monkeypatch.setattr(shares, "SHARE", 100_000)
    monkeypatch.setattr(executor, "units", lambda moves: schedule.units(moves, size=1 << 16))
    plan = str(tmp_path / "plan.json")
    line = ["convert", str(model), "--to", to, "-q"] + ["--tp", "2"] * (to == "sharded")
    assert run([*line[:2], OUT, *line[2:], "--plan", plan]) == 0
    assert run([*line[:2], str(tmp_path / "out"), *line[2:]]) == 0
    assert run(["apply", plan, "--part", "1/4", "-q"]) == 0 and not blobs.content()
    sent = [0]

    def dies(asked: Asked) -> Answer | None:
        sent[0] += is_block(asked)
        return refusal(403, "AuthorizationFailure") if sent[0] > 5 else None

    blobs.proxy.fault = dies
    assert run(["apply", plan, "--claim", "-q"]) == 7 and not blobs.content()
    blobs.proxy.fault = lambda asked: None
    monkeypatch.setattr(store_claims, "LEASE", -60.0)  # it is dead, and what it had claimed is free
    assert run(["status", OUT, "-q"]) == 1
    assert run(["apply", plan, "--claim", "-q"]) == 0 and run(["apply", plan, "--part", "2/4", "-q"]) == 0
    assert blobs.content() == files(tmp_path / "out")
    assert not blobs.waiting() and not blobs.content(".out.ckpt-partial")


def test_clean_shows_and_removes(blobs: Blobs) -> None:
    place = Container.at(OUT)
    for key in ("a", "deep/b"):
        place.part(key, BLOCKS, 1, bytearray(5000))
    Container.at(f"az://{CONTAINER}/outer").part("c", BLOCKS, 1, bytearray(5000))
    assert [(each["bytes"], each["removed"]) for each in clean(OUT)["leavings"]] == [(5000, False)] * 2
    assert len(blobs.waiting()) == 3 and all(each["removed"] for each in clean(OUT, remove=True)["leavings"])
    assert blobs.waiting() == ["outer/c"] and not blobs.content()
