"""Saves that are cut off, torn, rotated: what a later start finds."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))

import made_states as made  # noqa: E402

from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, StorageError, UsageError  # noqa: E402
from ckpt_tool.harness.loading import Loader  # noqa: E402
from ckpt_tool.harness.saving.fault_point import POINTS, VARIABLE  # noqa: E402
from ckpt_tool.harness.saving.whole import assemble  # noqa: E402
from ckpt_tool.harness.store import COMPLETE, RankStore, clean, fault_of, latest, steps  # noqa: E402

SPEC = made.Spec(layers=2)
LAYOUT = made.layout(tp=2, dp=2, ep=2)


def states(step: int) -> list[made.RankState]:
    """The ranks' states with every value moved by the step."""
    values = {key: tensor + step for key, tensor in made.truth(SPEC).items()}
    every = made.ranks(SPEC, LAYOUT, values=values)
    return [replace(state, scalars={**state.scalars, "step": step}) for state in every]


def save(root: Path, at: int, run: str = "0", **options: int) -> None:
    """All ranks save, in one process."""
    every = states(at)
    stores = [
        RankStore(root, "sharded", rank=rank, world=len(every), run=run, durable=False, **options) for rank in range(4)
    ]
    for store, state in zip(stores, every, strict=True):
        store.save(state)
    for store in stores:
        store.close()


def value(path: Path) -> torch.Tensor:
    return Loader(path).read("model.norm.weight", "master", (0,), (12,))


def wanted(step: int) -> torch.Tensor:
    return made.truth(SPEC)["master", "model.norm.weight"] + step


def test_what_is_saved_is_found_and_old_ones_go(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0000004", "step_0000006"]
    good = latest(tmp_path)
    assert (good.step, good.notes) == (6, ())
    assert torch.equal(value(good.path), wanted(6))
    assert Loader(good.path).scalars["step"] == 6


def test_the_step_may_change_the_state_while_it_is_written(tmp_path: Path) -> None:
    every = states(3)
    stores = [RankStore(tmp_path, "sharded", rank=rank, world=4, durable=False) for rank in range(4)]
    for store, state in zip(stores, every, strict=True):
        store.save(state)
        for piece in state.pieces:
            piece.tensor.zero_()
    for store in stores:
        store.close()
    assert torch.equal(value(latest(tmp_path).path), wanted(3))


@pytest.mark.share(3)
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_leaves_the_last_good_one(tmp_path: Path, point: str) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    child = os.fork()
    if child == 0:
        os.environ[VARIABLE] = f"{point}:0:6"
        try:
            save(tmp_path, 6, run="1")
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    good = latest(tmp_path)
    assert good.step == (6 if point == "rotate" else 4)
    assert torch.equal(value(good.path), wanted(good.step))
    if point != "rotate":
        assert len(good.notes) == (point != "snapshot") and all("step 6 was cut off" in note for note in good.notes)
    clean(tmp_path)
    save(tmp_path, 6, run="2")
    assert latest(tmp_path).step == 6 and latest(tmp_path).notes == ()


def test_a_rank_that_never_writes_leaves_nothing_that_counts(tmp_path: Path) -> None:
    save(tmp_path, 2)
    child = os.fork()
    if child == 0:
        os.environ[VARIABLE] = "spool:3:4"
        try:
            save(tmp_path, 4, run="1")
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    good = latest(tmp_path)
    assert good.step == 2
    assert len(good.notes) == 1 and "step_0000002 is the last good one, and is taken" in good.notes[0]


@pytest.mark.share(2)
@pytest.mark.parametrize("damage", ["marker", "missing", "short", "changed"])
def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    newest = tmp_path / "step_0000004"
    file = next(newest.glob("exp_avg.*.safetensors"))
    if damage == "marker":
        (newest / COMPLETE).unlink()
    elif damage == "missing":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data[:-1] if damage == "short" else data)
    good = latest(tmp_path)
    assert good.step == 2
    assert len(good.notes) == 1 and good.notes[0].startswith("step_0000004 is torn: ")
    save(tmp_path, 4, run="3")  # the run goes on, and comes by step 4 again
    assert latest(tmp_path).step == 4


def test_rotation_counts_whole_checkpoints_only(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 4)
    for torn in (6, 8):
        shutil.copytree(tmp_path / "step_0000004", tmp_path / f"step_{torn:07d}")
        (tmp_path / f"step_{torn:07d}" / COMPLETE).unlink()
    save(tmp_path, 10, keep=2)
    good = [path.name for path in sorted(steps(tmp_path)) if fault_of(path) is None]
    assert good == ["step_0000004", "step_0000010"]


def test_nothing_good_is_said(tmp_path: Path) -> None:
    with pytest.raises(Incomplete, match="no whole checkpoint") as caught:
        latest(tmp_path)
    assert caught.value.code == "E1538"


def test_a_save_that_fails_is_told_at_the_next(tmp_path: Path) -> None:
    """Drifted replicas, a full disk: the thread's failure is the rank's, whatever it is."""
    one = made.ranks(SPEC, made.layout(zero=0))[0]
    store = RankStore(tmp_path, "sharded", rank=0, world=1)
    one.pieces.pop()
    store.save(one)
    with pytest.raises(Incomplete, match="no rank holds"):
        store.save(one)
    (tmp_path / ".step_0000007.0.partial").rename(tmp_path / "aside")
    (tmp_path / ".step_0000007.0.partial").write_text("in the way")
    store.save(made.ranks(SPEC, made.layout(zero=0))[0])
    with pytest.raises(StorageError, match="saving failed: ") as caught:
        store.close()
    assert caught.value.code == "E1539"


def test_an_unknown_format_is_said_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not write 'shraded'") as caught:
        RankStore(tmp_path, "shraded", rank=0, world=1)
    assert "sharded" in (caught.value.hint or "")


def test_replicas_that_drifted_are_refused() -> None:
    every = states(1)
    norm = next(piece for piece in every[3].pieces if (piece.name, piece.state) == ("model.norm.weight", "model"))
    norm.tensor[5] += 1
    with pytest.raises(InconsistentCheckpoint, match="rank 3 holds other values") as caught:
        assemble(every)
    assert caught.value.code == "E1520"


@pytest.mark.parametrize("ranks", [(2,), (2, 3)])  # of two that have half of it each
def test_a_lost_piece_is_named(ranks: tuple[int, ...]) -> None:
    every = states(1)
    for rank in ranks:
        every[rank].pieces[:] = [piece for piece in every[rank].pieces if ".experts.2.down" not in piece.name]
    with pytest.raises(Incomplete, match=r"model.layers.1.mlp.experts.2.down_proj.weight \[") as caught:
        assemble(every)
    assert caught.value.code == "E1521"
