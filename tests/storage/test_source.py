"""The source tree against what a stranger may have put into it: paths, links, things that are no files, truncation."""

from __future__ import annotations

import gc
import os
import resource
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.core.inner_path import FOLDERS
from ckpt_tool.errors import (
    CkptError,
    CorruptFile,
    Incomplete,
    InconsistentCheckpoint,
    SourceChanged,
    StorageError,
    UnsafeInput,
)
from ckpt_tool.storage.source import Tree, safe_relative

# -- names out of a checkpoint's own files (safety.md B1-B3, B17) -------------------------------------------------

TRAVERSALS = [
    "/etc/passwd",
    "../other/model.safetensors",
    "a/../../x",
    "..\\x",
    "C:\\x",
    "C:x",
    "//host/x",
    "\\\\host\\x",
    "x\0y",
    "file:///x",
    "file:x",
    "http://x",
    "s3://bucket/x",
    "",
    ".",
    "..",
    "a//b",
    "a/",
    "./a",
    "a/./b",
    "a.",
    "a ",
    "b /a",
    "iter_5\n",
    "a\tb",
    "\x1b[31mred",
    "x\x7f",
    "\ud800.bin",
    "n" * 256,
    "é" * 128,
    "a/" * (FOLDERS + 1) + "b",
]


@pytest.mark.parametrize("path", TRAVERSALS, ids=ascii)
def test_a_path_that_is_not_plain_is_refused_with_exit_4(path: str) -> None:
    with pytest.raises(UnsafeInput) as info:
        safe_relative(path, named_in="model.safetensors.index.json", place="/weight_map/x")
    assert info.value.exit_code == 4
    assert info.value.code == "E0410"
    assert "model.safetensors.index.json" in info.value.where() and "/weight_map/x" in info.value.where()


@pytest.mark.parametrize(
    "path", ["a", "a/b/c", "model-00001-of-00002.safetensors", "..a", ".a", "日本/重み.bin", "a b", "n" * 255]
)
def test_a_plain_path_passes_unchanged(path: str) -> None:
    assert safe_relative(path, named_in="i") == path


@given(st.text(st.characters(codec=None), max_size=12) | st.text("./\\:~ab\0\n ", max_size=12))
def test_what_passes_stays_inside_and_can_be_named(path: str) -> None:
    try:
        safe_relative(path, named_in="i")
    except UnsafeInput:
        return
    joined = os.path.normpath(os.path.join(b"/root/ckpt", os.fsencode(path)))
    assert joined == b"/root/ckpt/" + os.fsencode(path)


# -- links --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A folder with two real files, beside a file that is none of its business."""
    folder = tmp_path / "ckpt"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.bin").write_bytes(bytes(range(100)))
    (folder / "sub" / "b.bin").write_bytes(bytes(range(100, 200)))
    (tmp_path / "secret").write_bytes(b"secret" * 10)
    return folder


def refused(tree: Tree, path: str, code: str) -> UnsafeInput:
    with pytest.raises(UnsafeInput) as info:
        tree.read(path, 0, 1)
    assert info.value.code == code
    assert info.value.path == tree.display(path)
    return info.value


ODD = {
    "../secret": "leaves the folder",
    "/dev/zero": "leaves the folder",
    "../missing": "leaves the folder",
    "link": "leads in a circle",
    ".": "leads in a circle",
    "..": "leads in a circle",
}


@pytest.mark.parametrize("target", ODD, ids=ascii)
def test_a_link_that_leaves_the_folder_is_refused_and_listed_as_what_it_is(ckpt: Path, target: str) -> None:
    (ckpt / "link").symlink_to(target)
    tree = Tree(ckpt)
    assert tree.listing()["link"] == -1 and tree.odd_links == {"link": ODD[target]}
    assert ODD[target] in refused(tree, "link", "E0412").message
    assert tree.seen(tree.names()) == ["a.bin"]


@pytest.mark.parametrize("follow", [False, True])
def test_a_link_that_leads_nowhere_is_a_missing_file(ckpt: Path, follow: bool) -> None:
    (ckpt / "link").symlink_to("missing")
    tree = Tree(ckpt, follow_symlinks=follow)
    assert tree.listing()["link"] == -1 and tree.odd_links == {"link": "leads nowhere"}
    with pytest.raises(Incomplete, match="leads nowhere"):
        tree.read("link", 0, 1)


def test_links_inside_the_folder_are_followed(ckpt: Path) -> None:
    (ckpt / "link").symlink_to("sub/b.bin")
    (ckpt / "rank").symlink_to("sub")
    (ckpt / "sub" / "up").symlink_to("../a.bin")
    (ckpt / "absolute").symlink_to(ckpt / "a.bin")
    (ckpt / "two").symlink_to("rank/up")
    tree = Tree(ckpt)
    assert tree.listing() == dict.fromkeys(
        ("a.bin", "absolute", "link", "rank/b.bin", "rank/up", "sub/b.bin", "sub/up", "two"), 100
    )
    assert [tree.read(path, 0, 1) for path in ("link", "rank/b.bin", "rank/up", "two")] == [b"d", b"d", b"\0", b"\0"]
    assert tree.below("rank").read("up", 1, 1) == b"\1", "it leaves rank, not what the user gave"
    assert Tree(ckpt / "a.bin").read("link", 0, 1) == b"d"
    assert Tree(ckpt / "sub").odd_links == {} and Tree(ckpt / "sub").listing()["up"] == -1


@pytest.mark.parametrize("follow", [False, True])
def test_folders_that_link_each_other_end(ckpt: Path, follow: bool) -> None:
    """Eight links a folder, each to the folder above it or beside: not eight to the power of the depth."""
    (ckpt / "other").mkdir()
    for n in range(8):
        (ckpt / "sub" / f"l{n}").symlink_to("../other")
        (ckpt / "other" / f"l{n}").symlink_to("../sub")
    tree = Tree(ckpt, follow_symlinks=follow)
    assert len(tree.listing()) < 300 and set(tree.odd_links.values()) == {"leads in a circle"}


def test_a_link_to_no_regular_file_is_said_to_be_one(ckpt: Path) -> None:
    os.mkfifo(ckpt / "pipe")
    (ckpt / "link").symlink_to("pipe")
    tree = Tree(ckpt)
    assert tree.listing()["link"] == -1 and tree.odd_links == {"link": "leads to no regular file"}
    refused(tree, "link", "E0413")


def test_a_link_that_is_followed_is_held_to_its_bounds_when_it_is_opened(ckpt: Path) -> None:
    (ckpt / "link").symlink_to("sub/b.bin")
    tree = Tree(ckpt)
    assert tree.listing()["link"] == 100
    (ckpt / "sub").rename(ckpt / "was")
    (ckpt / "sub").symlink_to("..")
    (ckpt.parent / "b.bin").write_bytes(b"secret")
    refused(tree, "link", "E0412")


def test_a_linked_folder_on_the_way_is_refused(ckpt: Path) -> None:
    (ckpt / "out").symlink_to(ckpt.parent)
    tree = Tree(ckpt)
    refused(tree, "out/secret", "E0412")
    assert not any(path.startswith("out/") for path in tree.listing())
    with pytest.raises(UnsafeInput) as info:
        tree.below("out")
    assert info.value.code == "E0412"


def test_a_link_swapped_in_after_the_listing_is_refused(ckpt: Path) -> None:
    tree = Tree(ckpt)
    assert tree.listing() == {"a.bin": 100, "sub/b.bin": 100}
    (ckpt / "a.bin").unlink()
    (ckpt / "a.bin").symlink_to("../secret")
    refused(tree, "a.bin", "E0412")


def test_links_are_followed_when_the_user_says_so(ckpt: Path) -> None:
    (ckpt / "link").symlink_to("../secret")
    tree = Tree(ckpt, follow_symlinks=True)
    assert tree.listing()["link"] == 60
    assert tree.read("link", 0, 6) == b"secret"


def test_a_file_that_the_user_named_may_be_a_link_but_its_siblings_may_not(ckpt: Path) -> None:
    (ckpt / "index.json").symlink_to("../secret")
    (ckpt / "shard").symlink_to("../secret")
    tree = Tree(ckpt / "index.json")
    assert tree.single == "index.json"
    assert tree.listing() == {"index.json": 60}
    assert tree.read("index.json", 0, 6) == b"secret"
    assert tree.read("a.bin", 3, 2) == b"\x03\x04"
    refused(tree, "shard", "E0412")


def test_the_root_itself_may_be_a_link(ckpt: Path) -> None:
    (ckpt.parent / "latest").symlink_to("ckpt")
    assert Tree(ckpt.parent / "latest").read("sub/b.bin", 0, 1) == b"d"


def test_a_circle_of_links_as_the_root_is_an_error_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("y")
    (tmp_path / "y").symlink_to("x")
    with pytest.raises(StorageError) as info:
        Tree(tmp_path / "x")
    assert info.value.path == str(tmp_path / "x")


# -- a Hugging Face cache snapshot (B12) --------------------------------------------------------------------------


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    home = tmp_path / "models--org--tiny"
    revision = home / "snapshots" / "0123abc"
    (revision / "onnx").mkdir(parents=True)
    (home / "blobs").mkdir()
    (home / "blobs" / "feed").write_bytes(b"weights!")
    (revision / "model.safetensors").symlink_to("../../blobs/feed")
    (revision / "onnx" / "model.onnx").symlink_to("../../../blobs/feed")
    return revision


def test_a_cache_snapshot_reads_through_its_own_blobs(snapshot: Path) -> None:
    tree = Tree(snapshot)
    assert tree.listing() == {"model.safetensors": 8, "onnx/model.onnx": 8}
    assert tree.read("model.safetensors", 0, 8) == tree.read("onnx/model.onnx", 0, 8) == b"weights!"
    assert Tree(snapshot / "model.safetensors").read("model.safetensors", 0, 7) == b"weights"


@pytest.mark.parametrize(
    "target", ["../../../secret", "/etc/hostname", "../../blobs/../../secret", "circle", "../../blobs"]
)
def test_a_snapshot_link_that_leaves_the_blobs_is_refused(snapshot: Path, target: str) -> None:
    (snapshot.parents[2] / "secret").write_bytes(b"secret")
    (snapshot / "circle").symlink_to(target)
    tree = Tree(snapshot)
    tree.listing()
    assert refused(tree, "circle", "E0412").exit_code == 4


def test_blobs_that_are_themselves_a_link_are_no_cache(snapshot: Path) -> None:
    home = snapshot.parents[1]
    outside = home.parent / "outside"
    (home / "blobs").rename(outside)
    (home / "blobs").symlink_to(outside)
    refused(Tree(snapshot), "model.safetensors", "E0412")


def test_a_folder_of_a_snapshot_reads_through_the_same_blobs(snapshot: Path) -> None:
    """`unet/` of a pipeline is a checkpoint too."""
    assert Tree(snapshot / "onnx").read("model.onnx", 0, 8) == b"weights!"
    assert Tree(snapshot).below("onnx").read("model.onnx", 0, 8) == b"weights!"


def test_a_dangling_blob_is_a_missing_file(snapshot: Path) -> None:
    (snapshot.parents[1] / "blobs" / "feed").unlink()
    tree = Tree(snapshot)
    assert tree.listing()["model.safetensors"] == -1
    with pytest.raises(Incomplete):
        tree.read("model.safetensors", 0, 1)


# -- things that are no regular files (B10, B11) ------------------------------------------------------------------


def test_a_fifo_neither_blocks_nor_is_read(ckpt: Path) -> None:
    os.mkfifo(ckpt / "pipe")
    started = time.monotonic()
    tree = Tree(ckpt)
    assert tree.listing()["pipe"] == -1
    refused(tree, "pipe", "E0413")
    assert time.monotonic() - started < 2


def test_a_socket_is_refused(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ckpt)  # the name of a socket may not be longer than 107 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("door")
        tree = Tree(ckpt)
        assert tree.listing()["door"] == -1
        refused(tree, "door", "E0413")


def test_a_folder_in_place_of_a_file_is_refused(ckpt: Path) -> None:
    refused(Tree(ckpt), "sub", "E0413")


def test_a_device_is_refused(ckpt: Path) -> None:
    try:
        os.mknod(ckpt / "zero", 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("making a device node needs root")
    tree = Tree(ckpt)
    assert tree.listing()["zero"] == -1
    try:
        refused(tree, "zero", "E0413")
    except StorageError as e:  # a file system mounted nodev
        pytest.skip(str(e))
    with pytest.raises(UnsafeInput) as info:
        Tree("/dev/null")
    assert info.value.code == "E0411"


# -- names in the folder (B15) ------------------------------------------------------------------------------------


def test_a_name_that_is_not_utf8_is_listed_and_read(ckpt: Path) -> None:
    raw = os.fsencode(ckpt) + b"/w\xff\xfe.bin"
    with open(raw, "wb") as f:
        f.write(b"bytes")
    tree = Tree(ckpt)
    (name,) = [name for name in tree.names() if name.startswith("w")]
    assert os.fsencode(name) == b"w\xff\xfe.bin"
    assert tree.read(name, 0, 5) == b"bytes"


def test_names_that_differ_only_in_case_are_an_error(ckpt: Path) -> None:
    (ckpt / "A.bin").write_bytes(b"")
    if len(os.listdir(ckpt)) < 3:
        pytest.skip("this file system folds case")
    with pytest.raises(InconsistentCheckpoint) as info:
        Tree(ckpt).listing()
    assert info.value.exit_code == 3
    assert "A.bin" in info.value.message and "a.bin" in info.value.message


def test_the_listing_is_sorted_stops_at_a_depth_and_leaves_staging_out(tmp_path: Path) -> None:
    deep = tmp_path
    for level in range(FOLDERS + 3):
        (deep / "f").write_bytes(b"")
        deep = deep / f"d{level}"
        deep.mkdir()
    (tmp_path / ".out.ckpt-partial").mkdir()
    (tmp_path / ".out.ckpt-partial" / "half").write_bytes(b"")
    found = list(Tree(tmp_path).listing())
    assert found == sorted(found) and len(found) == FOLDERS + 1


def test_a_file_that_vanishes_while_listed_is_no_crash(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def scan_then_remove(path: Path) -> list[os.DirEntry[str]]:
        entries = list(scan(path))
        (ckpt / "a.bin").unlink(missing_ok=True)
        return entries

    monkeypatch.setattr(os, "scandir", scan_then_remove)
    assert Tree(ckpt).listing() == {"a.bin": -1, "sub/b.bin": 100}


# -- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 101), (100, 1), (101, 0), (-1, 2), (0, -1), (0, 1 << 60), (1 << 63, 8)]
)
def test_a_range_outside_the_file_is_named_and_costs_nothing(ckpt: Path, offset: int, nbytes: int) -> None:
    tree = Tree(ckpt)
    with pytest.raises(CorruptFile) as info:
        tree.read("a.bin", offset, nbytes)
    assert info.value.code == "E0311"
    assert info.value.path == str(ckpt / "a.bin")
    assert "100" in info.value.message
    assert tree.bytes_read == 0


def test_reading_counts_bytes_and_heads_stop_at_the_end(ckpt: Path) -> None:
    tree = Tree(ckpt)
    assert tree.read("a.bin", 97, 3) == bytes([97, 98, 99])
    assert tree.head("a.bin", 1000) == bytes(range(100))
    assert tree.bytes_read == 103
    with pytest.raises(CorruptFile) as info:
        tree.read_whole("a.bin", limit=99)
    assert info.value.code == "E0312"
    assert tree.bytes_read == 103


def test_short_reads_are_joined(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: real(fd, min(n, 7), at))
    assert Tree(ckpt).read("a.bin", 1, 90) == bytes(range(1, 91))


def test_truncation_while_reading_is_a_changed_source(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread

    def truncating(fd: int, n: int, at: int) -> bytes:
        data = real(fd, min(n, 10), at)
        os.truncate(ckpt / "a.bin", 10)
        return data

    monkeypatch.setattr(os, "pread", truncating)
    with pytest.raises(SourceChanged) as info:
        Tree(ckpt).read("a.bin", 0, 90)
    assert info.value.exit_code == 6
    assert info.value.offset == 10 and info.value.path == str(ckpt / "a.bin")


def test_a_device_that_ends_early_or_fails_is_an_io_error(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pread", lambda fd, n, at: b"")
    with pytest.raises(StorageError) as info:
        Tree(ckpt).read("a.bin", 5, 10)
    assert (info.value.exit_code, info.value.offset) == (7, 5)

    def failing(fd: int, n: int, at: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(StorageError) as info:
        Tree(ckpt).read("a.bin", 5, 10)
    assert (info.value.exit_code, info.value.offset, info.value.path) == (7, 5, str(ckpt / "a.bin"))


def test_identity_follows_the_open_file_and_the_name(ckpt: Path) -> None:
    tree = Tree(ckpt)
    before = tree.identity("a.bin")
    assert before == tree.identity_by_name("a.bin") and before.size == 100
    (ckpt / "new").write_bytes(bytes(100))
    (ckpt / "new").rename(ckpt / "a.bin")
    assert tree.identity_by_name("a.bin") != before


@pytest.mark.parametrize("how", ["replaced", "rewritten", "grown"])
def test_a_file_stays_the_one_that_was_first_seen(ckpt: Path, how: str) -> None:
    """A header of one save and the bytes of another must never be taken for one checkpoint."""
    for i in range(6):
        (ckpt / f"{i}.bin").write_bytes(b"x")
    tree = Tree(ckpt)
    assert tree.identity("a.bin").size == 100
    if how == "replaced":
        (ckpt / "new").write_bytes(bytes(100))
        (ckpt / "new").rename(ckpt / "a.bin")
    else:
        (ckpt / "a.bin").write_bytes(bytes(100 if how == "rewritten" else 101))
    for i in range(6):  # push it out of the cache of descriptors
        tree.read(f"{i}.bin", 0, 1)
    with pytest.raises(SourceChanged) as info:
        tree.identity("a.bin")
    assert (info.value.exit_code, info.value.path) == (6, str(ckpt / "a.bin"))


def test_missing_paths_and_missing_files(ckpt: Path) -> None:
    with pytest.raises(StorageError) as info:
        Tree(ckpt / "nowhere")
    assert (info.value.exit_code, info.value.code) == (7, "E0702")
    with pytest.raises(Incomplete) as missing:
        Tree(ckpt).read("nowhere", 0, 1)
    assert missing.value.path == str(ckpt / "nowhere")


def test_an_unreadable_file_is_exit_7(ckpt: Path) -> None:
    (ckpt / "a.bin").chmod(0)
    if os.access(ckpt / "a.bin", os.R_OK):
        pytest.skip("root reads everything")
    with pytest.raises(StorageError) as info:
        Tree(ckpt).read("a.bin", 0, 1)
    assert info.value.exit_code == 7


# -- descriptors and threads --------------------------------------------------------------------------------------


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_ten_files_fit_under_a_small_limit_of_descriptors(tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"{i}.bin").write_bytes(bytes([i]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 7, hard))
    try:
        tree = Tree(tmp_path)
        for _ in range(3):
            for i in range(10):
                assert tree.read(f"{i}.bin", 0, 1) == bytes([i])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptors_close_with_the_tree_the_thread_and_on_errors(tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"{i}.bin").write_bytes(bytes([i]))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path.parent)
    (tmp_path / "d").mkdir()
    gc.collect()  # trees of earlier tests close now, not while we count
    before = open_descriptors()
    tree = Tree(tmp_path)

    def work() -> None:
        for i in range(10):
            tree.read(f"{i}.bin", 0, 1)
        for bad in ("pipe", "link", "missing", "d", "d/missing", "d/x/y", "link/x"):
            with pytest.raises(CkptError):
                tree.read(bad, 0, 1)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert open_descriptors() == before, "a thread that ended left descriptors open"
    work()
    assert open_descriptors() == before + 4
    tree.close()
    assert open_descriptors() == before


def test_many_threads_read_the_right_bytes_and_are_all_counted(tmp_path: Path) -> None:
    for i in range(9):
        (tmp_path / f"{i}.bin").write_bytes(bytes((i * 31 + k) % 251 for k in range(5000)))
    tree = Tree(tmp_path)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for step in range(300):
            i = (seed * 7 + step * 5) % 9
            at = (seed * 131 + step * 17) % 4900
            if tree.read(f"{i}.bin", at, 100) != bytes((i * 31 + k) % 251 for k in range(at, at + 100)):
                wrong.append(f"{seed}/{step}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tree.bytes_read == 8 * 300 * 100
