"""Ranks: how they start, talk and die, on threads and on processes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ckpt_tool.errors import Incomplete, InternalError, UsageError  # noqa: E402
from ckpt_tool.harness.comm import Comm  # noqa: E402
from ckpt_tool.harness.launch import run_ranks  # noqa: E402
from ckpt_tool.harness.layout import HarnessLayout  # noqa: E402
from ckpt_tool.harness.shape import ModelShape  # noqa: E402
from ckpt_tool.harness.train import Trainer, TrainingJob  # noqa: E402

BOTH = pytest.mark.parametrize("backend", ["sim", "gloo"])
GROUPS = [(0, 1, 2), (0, 2)]


def on(backend: Any, entry: Any, world: int = 3) -> list[Any]:
    return run_ranks(world, entry, groups=[g for g in GROUPS if max(g) < world], backend=backend, timeout=60)


# -- talking -----------------------------------------------------------------------------------------------------------


@BOTH
def test_gather_and_reduce(backend: str) -> None:
    def entry(comm: Comm) -> Any:
        if comm.rank == 1:
            return None
        x = torch.arange(3, dtype=torch.bfloat16) + 10 * comm.rank
        gathered = [part.tolist() for part in comm.all_gather((0, 2), x)]
        number = comm.all_gather((0, 2), torch.tensor(comm.rank + 0.5))
        return gathered, comm.all_reduce((0, 2), x.double()).tolist(), [part.item() for part in number]

    want = [[[0, 1, 2], [20, 21, 22]], [20, 22, 24], [0.5, 2.5]]
    first, none, last = on(backend, entry)
    assert none is None and [list(first), list(last)] == [want, want]


@BOTH
def test_exchange_of_rows_some_of_which_are_none(backend: str) -> None:
    """Rank r sends (r + peer) % 3 rows, each of them 10 r + peer."""

    def entry(comm: Comm) -> Any:
        parts = [torch.full(((comm.rank + peer) % 3, 2), 10.0 * comm.rank + peer) for peer in range(3)]
        came = comm.exchange(GROUPS[0], parts, [((comm.rank + peer) % 3, 2) for peer in range(3)])
        nothing = comm.exchange(GROUPS[0], [torch.zeros(0, 2)] * 3, [(0, 2)] * 3)
        empty = comm.all_gather(GROUPS[0], torch.zeros(4, 0))
        reduced = comm.all_reduce(GROUPS[0], torch.zeros(0))
        shapes = [list(x.shape) for x in [*nothing, *empty, reduced]]
        return [x.tolist() for x in came], shapes

    for rank, (came, shapes) in enumerate(on(backend, entry)):
        assert came == [[[10.0 * peer + rank] * 2] * ((rank + peer) % 3) for peer in range(3)]
        assert shapes == [[0, 2]] * 3 + [[4, 0]] * 3 + [[0]]


@BOTH
def test_messages_find_their_tags(backend: str) -> None:
    """Sent 0..3, received 3..0; a sender's later changes don't show; a tag may be used again."""

    def entry(comm: Comm) -> Any:
        if comm.rank == 0:
            for turn in range(2):
                for tag in range(4):
                    x = torch.tensor([tag + 10 * turn], dtype=torch.bfloat16)
                    comm.send(x, 2, tag)
                    x.zero_()
        found = None
        if comm.rank == 2:
            found = [comm.recv((1,), torch.bfloat16, 0, tag).item() for tag in (3, 2, 1, 0)]
            found += [comm.recv((1,), torch.bfloat16, 0, tag).item() for tag in (0, 1, 2, 3)]
        comm.barrier()
        return found

    assert on(backend, entry)[2] == [3, 2, 1, 0, 10, 11, 12, 13]


@BOTH
def test_an_expert_without_tokens_has_a_gradient_of_zeros(backend: str) -> None:
    """A router that sends all to two experts of one rank: the other rank gets no rows, and training goes on."""

    def entry(comm: Comm) -> Any:
        shape = ModelShape.quick()
        trainer = Trainer(TrainingJob(shape, HarnessLayout.parse("dp2,ep2")), comm)
        trainer.weights._values["model.layers.1.mlp.gate.weight"].zero_()
        list(trainer.train(1))  # all experts alike: the same two win every tie
        return {name: bool(part.exp_avg.any()) for name, part in trainer.weights.slices.items() if ".experts." in name}

    groups = HarnessLayout.parse("dp2,ep2").groups(ModelShape.quick())
    first, second = run_ranks(2, entry, groups=groups, backend=backend, timeout=60)
    assert len(first) == len(second) == 6 and {*first.values()} ^ {*second.values()} == {False, True}


# -- dying -------------------------------------------------------------------------------------------------------------


@BOTH
def test_a_rank_that_raises_ends_the_run_with_its_traceback(backend: str) -> None:
    def entry(comm: Comm) -> None:
        if comm.rank == 1:
            raise ValueError("rank one is unwell")
        comm.barrier()  # the others wait for it

    begun = time.monotonic()
    with pytest.raises(InternalError, match="rank 1 died: ValueError: rank one is unwell") as e:
        on(backend, entry)
    assert e.value.code == "E1505" and any("in entry" in line for line in e.value.faults)
    assert time.monotonic() - begun < 30


@BOTH
def test_our_own_errors_come_as_themselves(backend: str) -> None:
    def entry(comm: Comm) -> None:
        if comm.rank == 2:
            raise Incomplete("no shard", code="E1521", path="a/b", key="w [ema]", hint="look", faults=("one", "two"))
        comm.barrier()

    with pytest.raises(Incomplete) as e:
        on(backend, entry)
    assert (
        e.value.to_json()
        == Incomplete("no shard", code="E1521", path="a/b", key="w [ema]", hint="look", faults=("one", "two")).to_json()
    )


def test_a_rank_that_is_killed_ends_the_run() -> None:
    def entry(comm: Comm) -> None:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    begun = time.monotonic()
    with pytest.raises(InternalError, match="rank 1 was killed by SIGKILL"):
        on("gloo", entry)
    assert time.monotonic() - begun < 30


def test_a_rank_that_leaves_without_a_word_ends_the_run() -> None:
    with pytest.raises(InternalError, match="ended with 3 without a result"):
        on("gloo", lambda comm: os._exit(3) if comm.rank == 0 else comm.barrier())


class _OfTheParent:
    """Like a process group that a caller has dropped: to finalise it in a fork is to wait for ever. It is part of a
    cycle."""

    def __init__(self) -> None:
        self.me = self
        self.pid = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            os._exit(77)


def test_a_rank_does_not_collect_what_its_parent_left() -> None:
    """Garbage of before the fork, and what becomes garbage after it."""
    held = [_OfTheParent()]
    gc.disable()  # the parent has not come round to it
    try:
        _OfTheParent()

        def entry(comm: Comm) -> int:
            held.clear()
            return gc.collect() and 0

        assert on("gloo", entry, 2) == [0, 0]
    finally:
        gc.enable()
    held[0].me = None  # type: ignore[assignment]


def test_a_rank_that_hangs_is_ended_after_the_limit() -> None:
    def entry(comm: Comm) -> None:
        if comm.rank == 1:
            time.sleep(600)

    begun = time.monotonic()
    with pytest.raises(InternalError, match=r"ranks \[0, 1\] did not come to an end"):
        run_ranks(2, entry, groups=[(0, 1)], timeout=3)
    assert time.monotonic() - begun < 20


def test_no_rank_outlives_its_parent(tmp_path: Path) -> None:
    """The parent is killed; its ranks, asleep, go with it."""
    script = f"""
        import os, pathlib, time
        from ckpt_tool.harness.launch import run_ranks
        def entry(comm):
            pathlib.Path({str(tmp_path)!r}, str(comm.rank)).write_text(str(os.getpid()))
            time.sleep(600)
        run_ranks(2, entry, groups=[(0, 1)])
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=Path(__file__).parents[2])
    until = time.monotonic() + 60
    while len([file for file in tmp_path.iterdir() if file.read_text()]) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    while any(_alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said", "near"),
    [
        ("tp3", "tp must divide 4", "tp4"),
        ("pp5", "5 stages, but the model has 4 layers", "pp4"),
        ("dp3", "dp must divide 8", "dp4"),
        ("dp4,ep3", "ep must divide dp", "dp4,ep4"),
        ("tp2,pp2,vpp3", "6 stages", "tp2,pp2,vpp2"),
        ("vpp2", "one pipeline stage can't be interleaved", "tp1"),
        ("dp2,zero5", "wanted 0, 1, 2 or 3", "dp2,zero3"),
        ("pp3,split=1-1-1", "not 3 numbers from 1 that add up to 4", "pp3"),
        ("tp0", "at least 1", "tp1"),
    ],
)
def test_a_layout_that_the_model_cannot_take_names_the_nearest(text: str, said: str, near: str) -> None:
    with pytest.raises(UsageError, match=said) as e:
        HarnessLayout.parse(text).check(ModelShape())
    assert e.value.code == "E1501" and e.value.exit_code == 2
    assert e.value.hint == f"the nearest layout that it can take is {near}"


@pytest.mark.parametrize("text", ["xp2", "tp", "tp2,tp4", "2", "tp-1", "split=", "tp2;dp2"])
def test_a_layout_that_cannot_be_read_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError) as e:
        HarnessLayout.parse(text)
    assert e.value.code == "E1500"


@pytest.mark.parametrize("text", ["tp1", "tp2,pp2,dp2,ep2", "dp4,zero0", "dp2,zero3", "pp3,split=1-2-1", "pp2,vpp2"])
def test_a_layout_reads_what_it_prints(text: str) -> None:
    assert str(HarnessLayout.parse(text)) == text and HarnessLayout.parse(
        str(HarnessLayout.parse(text))
    ) == HarnessLayout.parse(text)


def test_who_sits_where() -> None:
    """Megatron's order tp, dp, pp; experts are carved out of the data ranks; chunks take turns."""
    layout = HarnessLayout.parse("tp2,pp2,dp4,ep2,vpp2")
    shape = ModelShape()
    at = layout.at(13, shape)  # 1 + 2 * (2 + 4 * 1)
    assert (at.tp, at.dp, at.pp, at.ep) == (1, 2, 1, 0) and at.chunks == ((1,), (3,))
    assert layout.tp_group(at) == (12, 13) and layout.dp_group(at) == (9, 11, 13, 15)
    assert layout.ep_group(at) == (13, 15) and layout.edp_group(at) == (9, 13) and layout.ends_group(at) == (5, 13)
    assert HarnessLayout.parse("pp3").stage_layers(shape) == [(0, 1), (2,), (3,)]


@pytest.mark.parametrize("sizes", [{"kv_heads": 2}, {"heads": 6}, {"head_dim": 7}, {"rows": 96}, {"top": 5}])
def test_sizes_that_the_model_cannot_have_are_usage_errors(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError) as e:
        ModelShape(**sizes)
    assert e.value.code == "E1502"
