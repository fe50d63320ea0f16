"""Every fault can be planted in what any format comes to, and changes what it says and nothing else."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))

import made_states as made  # noqa: E402

from ckpt_tool.errors import Incomplete  # noqa: E402
from ckpt_tool.harness.faults import FAULTS, PlantedFault, plant  # noqa: E402
from ckpt_tool.harness.loading import Loader, prepare_checkpoint, run_tool  # noqa: E402
from ckpt_tool.harness.saving import formats  # noqa: E402
from ckpt_tool.harness.saving.whole import assemble  # noqa: E402

SCALARS = {"step", "samples", "rng"}


@pytest.fixture(scope="module", params=["dcp", "paddle-flex", "deepspeed"])
def clean(request, tmp_path_factory):
    """A checkpoint of one rank, as a control begins with it. dcp brings `step` tensors along, Paddle keeps scalars
    elsewhere and has no master of an fp32 parameter, DeepSpeed has no config beside it."""
    root = tmp_path_factory.mktemp("faults")
    (root / "saved").mkdir()
    formats.write(request.param, assemble(made.ranks(made.Spec(), made.layout(dp=2))), root / "saved")
    found = prepare_checkpoint(root / "saved", root / "hub")
    run_tool("convert", found, root / "clean", "--to", "sharded", "--dialect", "keep")
    return root / "clean"


def values(folder):
    loader = Loader(folder)
    names = {state: loader._states[state] for state in loader._states}
    return {(s, n): names[s][n].torch() for s in names for n in names[s]}, loader.scalars


@pytest.mark.share(6)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_what_it_says(clean, tmp_path, name):
    broken = tmp_path / "broken"
    shutil.copytree(clean, broken)
    plant(FAULTS[name], broken)
    before, said = values(clean)
    after, now = values(broken)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert before.keys() == after.keys() and (said != now) == (name in SCALARS) == (not changed)
    if name == "one-ulp":
        ((state, tensor),) = changed
        bits = before[state, tensor].view(torch.int32) - after[state, tensor].view(torch.int32)
        assert state == "master" and bits.abs().sum() == 1
    if name == "ema-reset":
        assert {state for state, _ in changed} == {"ema"}


def test_a_fault_without_effect_is_an_error(clean, tmp_path):
    shutil.copytree(clean, tmp_path / "broken")
    with pytest.raises(Incomplete) as error:
        plant(PlantedFault("nothing", lambda tensors, scalars: None), tmp_path / "broken")
    assert error.value.code == "E1508"
