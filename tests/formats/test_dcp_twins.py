"""Twins: known by comparison, and never accepted where the long way would not accept them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loops import choice_of, opened_loops
from targets import bits, gather, ramp

from ckpt_tool.compiled import twins
from ckpt_tool.core.tensor import LogicalTensor, StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.dcp_container import dcp_items
from ckpt_tool.formats.dcp_container.dcp_items import DcpItems
from ckpt_tool.formats.dcp_container.dcp_metadata import DcpListing, pickled, read_listing
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.torch_files.torchzip import TorchZip

COUNT = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch.distributed.checkpoint as dcp

    out = tmp_path_factory.mktemp("twins")
    state = {f"w{i}": ramp((5, 7), start=100 * i) for i in range(COUNT)} | {
        "z": torch.zeros(5, 7),
        "s": torch.tensor(1.0),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=out, no_dist=True)
    return out


def arrays(tree: Tree, listing: DcpListing) -> dict[str, StoredArray]:
    return {fqn: array for fqn, (array,) in DcpItems(tree).arrays(listing.tensors.values()).items()}


def test_twins_are_found_and_have_the_right_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = TorchZip.open
    monkeypatch.setattr(dcp_items.TorchZip, "open", staticmethod(lambda *a, **k: opened.append(a[2]) or real(*a, **k)))
    tree = Tree(folder)
    listing = read_listing(tree, "", [".metadata"])
    found = arrays(tree, listing)
    assert len(opened) == 3, "two of the one kind, one of the other; all others are twins"
    for i in range(COUNT):
        tensor: LogicalTensor = simple_tensor(TensorKey("w"), found[f"w{i}"])
        assert (gather(tree, tensor) == bits(ramp((5, 7), start=100 * i))).all()
    monkeypatch.setattr(dcp_items, "twin_of", lambda *_: None)
    assert arrays(tree, listing) == found


def of_two_files(folder: Path, out: Path) -> None:
    """The save once more in a second file, under other names."""
    entries = read_listing(Tree(folder), "", [".metadata"]).tensors.values()
    for name in ("__0_0.distcp", "__1_0.distcp"):
        (out / name).write_bytes((folder / "__0_0.distcp").read_bytes())
    again = [
        replace(entry, fqn=f"again.{entry.fqn}", pieces=[entry.pieces[0]._replace(file="__1_0.distcp")])
        for entry in entries
    ]
    (out / ".metadata").write_bytes(pickled([*entries, *again], nested=False))


@pytest.fixture(scope="module")
def compare() -> twins.Compare:
    shelf = twins.TwinsShelf()
    shelf.decide(choice_of(opened_loops(), "baseline"))
    assert shelf.library is not None, "it would never be used"
    return shelf.library


@pytest.fixture(params=["one by one", "in one call"])
def compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many twins each call found; empty where twins are compared one by one."""
    counted: list[int] = []
    if request.param == "in one call":
        compare = request.getfixturevalue("compare")

        def counting(*given: object) -> tuple[list[int], int]:
            found: tuple[list[int], int] = compare(*given)
            counted.append(sum(crc >= 0 for crc in found[0]))
            return found

        monkeypatch.setattr(dcp_items, "_comparing", lambda tree, items: counting)
    return counted


def test_twins_of_a_file_are_compared_in_one_call(
    folder: Path, tmp_path: Path, compare: twins.Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_two_files(folder, tmp_path)
    found = []
    read = []
    for call in (None, compare):
        monkeypatch.setattr(dcp_items, "_comparing", lambda tree, items, call=call: call)
        tree = Tree(tmp_path)
        found.append(arrays(tree, read_listing(tree, "", [".metadata"])))
        read.append((tree.bytes_read, tree.met.zips("__1_0.distcp")))
    assert found[0] == found[1] and read[0][1] == read[1][1]
    assert 0.9 < read[1][0] / read[0][0] < 1.1, "heads and ends alone"


def test_no_flipped_byte_passes_that_the_long_way_refuses(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: list[int]
) -> None:
    of_two_files(folder, tmp_path)
    file = tmp_path / "__1_0.distcp"
    good = file.read_bytes()
    tree = Tree(tmp_path)
    listing = read_listing(tree, "", [".metadata"])
    pieces = sorted((piece.at, piece.length, fqn) for fqn, entry in listing.tensors.items() for piece in entry.pieces)
    at, length, fqn = [row for row in pieces if row[2].startswith("again.w")][3]
    data = arrays(tree, listing)[fqn]
    payload = range(data.offset, data.offset + 4 * data.numel)
    refused = 0
    for position in range(at, at + length, 2):
        if position in payload:
            continue
        bad = bytearray(good)
        bad[position] ^= 0x55
        file.write_bytes(bad)
        with_twins = outcome(listing, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(dcp_items, "twin_of", lambda *_: None)
            assert with_twins == outcome(listing, tmp_path), f"byte {position - at} of the item"
        refused += with_twins is not None
    assert not compared or (min(compared), max(compared)) == (COUNT, COUNT + 1), "with `z`"
    assert refused > 300, "padding, dates and the id are free; headers and directory are not"


def outcome(listing: DcpListing, folder: Path) -> str | None:
    """The error's code, None when the items read."""
    try:
        arrays(Tree(folder), listing)
    except CkptError as e:
        return e.code
    return None
