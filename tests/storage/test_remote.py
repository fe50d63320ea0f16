"""Trees behind URLs, over fsspec's `memory://` and local file systems: no network, no store."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.core.installation import install_command
from ckpt_tool.errors import (
    CorruptFile,
    Incomplete,
    InconsistentCheckpoint,
    SourceChanged,
    StorageError,
    UnsafeInput,
    UsageError,
)
from ckpt_tool.storage.opening import open_tree
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.stores.fsspec_store import FsspecStore
from ckpt_tool.storage.stores.remote import FIRST_FETCH, LAST_FETCH, PIECES, RemoteTree

fsspec = pytest.importorskip("fsspec")

BIG = (bytes(i * 7 % 251 for i in range(251)) * (1 + (3 << 20) // 251))[: 3 << 20]


def far(url: str) -> RemoteTree:
    return RemoteTree(url, FsspecStore.at(url))


@pytest.fixture
def store() -> Iterator[Any]:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    memory.pipe({"/b/a.bin": bytes(range(100)), "/b/sub/big.bin": BIG, "/b/iter_5/x": b"x"})
    yield memory
    memory.store.clear()


@pytest.fixture(params=["memory", "local"])
def tree(request: pytest.FixtureRequest, store: Any, tmp_path: Path) -> Tree:
    """The same small tree in memory and on disk, both through fsspec."""
    if request.param == "memory":
        return open_tree("memory://b")
    for path in ("a.bin", "sub/big.bin", "iter_5/x"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(store.cat_file(f"/b/{path}"))
    return far(f"file://{tmp_path}")


def test_a_remote_tree_reads_like_a_local_one(tree: Tree) -> None:
    assert not tree.local and tree.single is None
    assert tree.listing() == {"a.bin": 100, "iter_5/x": 1, "sub/big.bin": len(BIG)}
    assert tree.names() == ["a.bin"] and tree.exists("sub/big.bin") and not tree.exists("nope")
    assert tree.read("a.bin", 3, 4) == bytes([3, 4, 5, 6])
    assert tree.read("a.bin", 100, 0) == b""
    assert tree.head("a.bin", 1000) == bytes(range(100))
    assert tree.read_whole("a.bin", limit=100) == bytes(range(100))
    assert tree.read("sub/big.bin", 1_000_000, 70_000) == BIG[1_000_000:1_070_000]
    assert tree.below("iter_5").read("x", 0, 1) == b"x"
    assert tree.display("sub/big.bin") == tree.shown + "/sub/big.bin"
    with pytest.raises(Incomplete) as info:
        tree.read("nope", 0, 1)
    assert info.value.path == tree.display("nope")
    with pytest.raises(Incomplete):
        tree.fd("nope")
    with pytest.raises(StorageError):
        tree.fd("a.bin")


def test_one_file_by_its_url(store: Any) -> None:
    tree = open_tree("memory://b/sub/big.bin")
    assert tree.single == "big.bin"
    assert tree.listing() == {"big.bin": len(BIG)}
    assert tree.read("big.bin", 5, 3) == BIG[5:8]
    assert tree.display("big.bin") == tree.display() == "memory://b/sub/big.bin"
    store.pipe("/b/sub/sibling", b"s")
    assert tree.read("sibling", 0, 1) == b"s"


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 101), (101, 0), (-1, 2), (0, -1), (0, 1 << 60)])
def test_a_range_outside_the_file_is_named_and_never_asked_for(tree: Tree, offset: int, nbytes: int) -> None:
    with pytest.raises(CorruptFile) as info:
        tree.read("a.bin", offset, nbytes)
    assert info.value.code == "E0311" and info.value.path == tree.display("a.bin")
    assert tree.bytes_read == 0


def test_small_reads_share_a_request_and_no_file_comes_whole(store: Any) -> None:
    tree = far("memory://b")
    for at in range(0, 60_000, 1000):
        assert tree.read("sub/big.bin", at, 900) == BIG[at : at + 900]
    assert (tree.requests, tree.bytes_read) == (1, FIRST_FETCH)
    tree.read("sub/big.bin", 2_000_000, 10)
    assert (tree.requests, tree.bytes_read) == (2, 2 * FIRST_FETCH)


def test_reading_on_asks_for_more_and_more_at_once(store: Any) -> None:
    tree = far("memory://b")
    step = 10_000
    got = b"".join(tree.read("sub/big.bin", at, min(step, len(BIG) - at)) for at in range(0, len(BIG), step))
    assert got == BIG
    assert tree.bytes_read == len(BIG), "no byte is fetched twice"
    assert tree.requests <= 8
    assert tree.read("sub/big.bin", 0, len(BIG)) == BIG  # longer than a piece
    assert LAST_FETCH < len(BIG)


def test_what_a_thread_keeps_is_bounded(store: Any) -> None:
    store.pipe({f"/b/many/{i}": bytes([i]) * 1000 for i in range(3 * PIECES)})
    tree = far("memory://b/many")
    for _ in range(2):
        for i in range(3 * PIECES):
            assert tree.read(str(i), 500, 10) == bytes([i]) * 10
    kept = tree._mine()._kept
    assert len(kept) == PIECES
    tree.close()
    assert not tree._mine()._kept


def test_threads_read_the_right_bytes(store: Any) -> None:
    tree = far("memory://b")
    wrong: list[int] = []

    def work(seed: int) -> None:
        for step in range(100):
            at = (seed * 999_983 + step * 77_777) % (len(BIG) - 5000)
            if tree.read("sub/big.bin", at, 5000) != BIG[at : at + 5000]:
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_identity_is_kept_at_first_sight_and_asked_again_by_name(tree: Tree, store: Any, tmp_path: Path) -> None:
    tree.listing()
    before = tree.identity("a.bin")
    assert before == tree.identity_by_name("a.bin") and before.size == 100
    assert before != tree.identity("iter_5/x")
    assert all(isinstance(part, int) and 0 <= part < 1 << 63 for part in before)
    if tree.shown.startswith("memory"):
        store.pipe("/b/a.bin", bytes(100))
    else:
        (tmp_path / "new").write_bytes(bytes(100))
        os.replace(tmp_path / "new", tmp_path / "a.bin")
    assert tree.identity("a.bin") == before
    assert tree.identity_by_name("a.bin") != before


def test_a_store_that_caches_its_listings_is_asked_afresh(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[object] = []
    monkeypatch.setattr(type(store), "invalidate_cache", lambda self, path=None: forgotten.append(path))
    far("memory://b").identity_by_name("a.bin")
    assert forgotten


def test_identity_is_the_same_in_another_process_or_tree(store: Any) -> None:
    one = far("memory://b")
    two = far("memory://b")
    one.listing()  # from a listing here, from a question there
    assert one.identity("a.bin") == two.identity("a.bin")


def test_a_file_that_changes_while_it_is_read_is_exit_6(store: Any) -> None:
    tree = far("memory://b")
    tree.size("sub/big.bin")
    store.pipe("/b/sub/big.bin", BIG[:1000])
    with pytest.raises(SourceChanged) as info:
        tree.read("sub/big.bin", 900, 1000)
    assert info.value.exit_code == 6 and info.value.path == "memory://b/sub/big.bin"
    store.rm("/b/sub/big.bin")
    with pytest.raises(SourceChanged):
        tree.read("sub/big.bin", 200_000, 1000)


def test_a_store_that_fails_is_exit_7_with_the_place(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden(Exception):
        """What botocore raises is no OSError."""

    module = type(sys)("botocore.exceptions")
    module.ClientError = Forbidden  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "botocore.exceptions", module)
    tree = far("memory://b")

    def refuse(*args: object, **kwargs: object) -> bytes:
        raise Forbidden("403 Forbidden: no credentials")

    monkeypatch.setattr(type(store), "cat_file", refuse)
    with pytest.raises(StorageError) as info:
        tree.read("a.bin", 4, 2)
    assert (info.value.exit_code, info.value.offset, info.value.path) == (7, 4, "memory://b/a.bin")
    assert "403" in info.value.message and "log in" in str(info.value.hint)

    def short(self: object, path: str, start: int, end: int) -> bytes:
        return bytes(end - start - 1)

    monkeypatch.setattr(type(store), "cat_file", short)
    with pytest.raises(StorageError) as info:
        tree.read("a.bin", 4, 2)
    assert info.value.code == "E0703"


def test_nothing_there(store: Any) -> None:
    with pytest.raises(StorageError) as info:
        open_tree("memory://nowhere")
    assert (info.value.exit_code, info.value.code, info.value.path) == (7, "E0702", "memory://nowhere")


def test_keys_that_would_leave_a_local_folder_are_refused(store: Any) -> None:
    store.store["/b/../evil"] = store.store["/b/a.bin"]
    with pytest.raises(UnsafeInput) as info:
        far("memory://b").listing()
    assert info.value.exit_code == 4


def test_names_that_differ_only_in_case_are_an_error(store: Any) -> None:
    store.pipe("/b/A.bin", b"")
    with pytest.raises(InconsistentCheckpoint):
        far("memory://b").listing()


def test_links_of_a_file_system_behind_a_url_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "link").symlink_to("../secret")
    tree = far(f"file://{tmp_path}/d")
    assert tree.listing() == {"link": -1}
    with pytest.raises(UnsafeInput):
        tree.read("link", 0, 1)


# -- opening ------------------------------------------------------------------------------------------------------


def test_paths_and_file_urls_are_local(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"f")
    for src in (str(tmp_path), f"file://{tmp_path}", f"FILE://{tmp_path}", tmp_path):
        tree = open_tree(src)
        assert tree.local and tree.read("f", 0, 1) == b"f"
    os.mkdir(tmp_path / "a:b")
    assert open_tree(tmp_path / "a:b").local


def test_a_missing_package_is_exit_2_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] in ("obstore", "fsspec", "s3fs"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError) as info:
        open_tree("s3://bucket/key")
    assert info.value.exit_code == 2 and info.value.code == "E0247"
    assert info.value.hint == install_command("remote")


def test_a_store_without_its_own_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UsageError) as info:
        open_tree("s3://bucket/key")
    assert "s3fs" in info.value.message and info.value.hint == install_command("remote")


def test_an_unknown_scheme_has_near_misses() -> None:
    with pytest.raises(UsageError) as info:
        open_tree("memry://b")
    assert info.value.exit_code == 2 and "memory" in str(info.value.hint)


def test_nothing_of_fsspec_is_imported_for_a_path(tmp_path: Path) -> None:
    code = (
        "import sys; from ckpt_tool.storage.opening import open_tree; open_tree(sys.argv[1]).listing();"
        "sys.exit(any(name.split('.')[0] in ('fsspec', 'obstore', 'asyncio', 'ssl', 'socket', 'numpy')"
        " for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=Path(__file__).parents[2])
