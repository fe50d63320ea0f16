"""FSDP1's sharded state dicts, a file a rank: read from the boxes that their ShardedTensors state, or refused.

The files are torch's own (`fixtures/torch/ranks_fsdp1_dp2`, two ranks of gloo); nothing in them is run.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch

from ckpt_tool.cli import run
from ckpt_tool.errors import CkptError, UnsafeInput
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.opening import open_source
from ckpt_tool.storage.pickles import pickle_reader as pickles

FILES = Path(__file__).parents[2] / "fixtures" / "torch" / "ranks_fsdp1_dp2"
TRUTH = FILES.with_name("ranks_fsdp1_dp2.truth.pt")
NAMES = {
    "dinov2": "model_final.rank_{}.pth",
    "verl": "model_world_size_2_rank_{}.pt",
    "short": "model_rank_{}.pt",
}


def named(folder: Path, form: str) -> Path:
    """The two files under the names that a trainer gives."""
    folder.mkdir()
    for rank in (0, 1):
        shutil.copy(FILES / NAMES["dinov2"].format(rank), folder / NAMES[form].format(rank))
    return folder


@pytest.mark.parametrize("form", NAMES)
def test_ranks_make_the_whole(form, tmp_path):
    source = named(tmp_path / "in", form)
    assert run(["convert", str(source), str(tmp_path / "out.pt"), "--to", "torch"]) == 0
    written = torch.load(tmp_path / "out.pt")
    model = written["model"]["model"] if form != "dinov2" else written["model"]
    truth = torch.load(TRUTH)
    assert model.keys() == truth.keys() and all(torch.equal(model[name], truth[name]) for name in truth)


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("change", ["lost", "renamed", "twice"])
def test_other_sets_of_files_are_refused(form, change, tmp_path, capfd):
    source = named(tmp_path / "in", form)
    first, second = (source / NAMES[form].format(rank) for rank in (0, 1))
    if change == "lost":
        second.unlink()
    elif change == "renamed":
        first.rename(source / "aside")
        second.rename(first)
        (source / "aside").rename(second)
    else:
        shutil.copy(first, second)
    code = run(["convert", str(source), str(tmp_path / "out.pt"), "--to", "torch"])
    error = capfd.readouterr().err
    assert code == 3 and ("E0380" in error or "E0354" in error), error
    assert not (tmp_path / "out.pt").exists()


def test_one_ranks_file_alone_is_incomplete(tmp_path):
    with pytest.raises(CkptError) as caught:
        open_source(str(FILES / "model_final.rank_0.pth"), Reading())
    assert caught.value.code == "E0380"


def test_getattr_takes_the_one_class_that_torch_pickles_so():
    group = b"cbuiltins\ngetattr\nctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n"
    good = pickles.load(b"\x80\x02" + group + b"X\x11\0\0\0ProcessGroupState\x86R.", path="x")
    assert not good.unsafe
    bad = pickles.load(b"\x80\x02" + group + b"X\x08\0\0\0__init__\x86R.", path="x")
    with pytest.raises(UnsafeInput):
        pickles.refuse_unsafe(bad, "x")


@pytest.mark.parametrize("protocol", [2, 4])
def test_annotations_of_types_are_no_code(protocol):
    import typing

    done = pickles.load(pickle.dumps({"a": typing.Any, "b": typing.Optional[int]}, protocol=protocol), path="x")  # noqa: UP045
    assert not done.unsafe
    bad = pickles.load(b"\x80\x02c_operator\ngetitem\ncos\nenviron\nX\x04\0\0\0HOME\x86R.", path="x")
    assert {str(use) for use in bad.unsafe} == {"_operator.getitem", "os.environ"}
