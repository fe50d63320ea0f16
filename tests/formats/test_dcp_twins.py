"""Twins: known by comparison, and never accepted where the long way would not accept them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from targets import bits, gather, ramp

from ckpt_tool.core.tensor import LogicalTensor, StoredArray, TensorKey, simple_tensor
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.containers import dcp_items
from ckpt_tool.formats.containers.dcp_items import Items
from ckpt_tool.formats.containers.dcp_metadata import Listing, read_listing
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.torchzip import TorchZip

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


def arrays(tree: Tree, listing: Listing) -> dict[str, StoredArray]:
    return {fqn: array for fqn, (array,) in Items(tree).arrays(listing.tensors.values()).items()}


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


def test_no_flipped_byte_passes_that_the_long_way_refuses(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".metadata").write_bytes((folder / ".metadata").read_bytes())
    file = tmp_path / "__0_0.distcp"
    good = (folder / file.name).read_bytes()
    file.write_bytes(good)
    tree = Tree(tmp_path)
    listing = read_listing(tree, "", [".metadata"])
    pieces = sorted((piece.at, piece.length, fqn) for fqn, entry in listing.tensors.items() for piece in entry.pieces)
    at, length, fqn = [row for row in pieces if row[2].startswith("w")][3]
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
    assert refused > 300, "padding, dates and the id are free; headers and directory are not"


def outcome(listing: Listing, folder: Path) -> str | None:
    """The error's code, None when the items read."""
    try:
        arrays(Tree(folder), listing)
    except CkptError as e:
        return e.code
    return None
