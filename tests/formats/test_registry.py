"""The registry's quick look at names may spare a format the question, never the answer."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.formats import registry
from ckpt_tool.storage.source import Tree

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
CASES = [path for name in registry.NAMES for path in sorted((FIXTURES / name).glob("*")) if ".truth." not in path.name]
NAMES = st.sampled_from(
    [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.tp00.safetensors",
        "exp_avg.tp01_dp00.safetensors",
        "ckpt.index.json",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "x.pt",
        ".metadata",
        ".metadata.tmp",
        "__0.metadata",
        "__0_0.distcp",
        "sub/.metadata",
        "sub/__0_0.distcp",
        "config.json",
        "sharded/shard-00001-model-00001-of-00001.safetensors",
        "common.pt",
        "metadata.json",
        "0.metadata",
        "no_suffix",
    ]
)
HEADS = st.sampled_from(
    [
        b"",
        b"{}",
        b'{"ckpt_format":"sharded"}',
        b"PK\x03\x04" + bytes(26) + b"x/data.pkl" + bytes(99),
        b"\x80\x02}q\x00.",
        (2).to_bytes(8, "little") + b"{}",
        (27).to_bytes(8, "little") + b'{"__metadata__":{"boxes":"{',
    ]
)


def check(tree: Tree) -> None:
    for name in registry.NAMES:
        if not registry.may_be(name, tree):
            assert registry.by_name(name).detect(tree) is None, f"{name} claims it, but was not asked"


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_fixture_is_claimed_as_before(path: Path) -> None:
    check(Tree(path))


@given(st.dictionaries(NAMES, HEADS, max_size=6), st.booleans())
def test_no_claim_is_lost(files: dict[str, bytes], one: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        check(Tree(Path(folder, next(iter(files))) if one and files else Path(folder)))
