"""The evidence holds, and every part of it can fail.

One pair is carried out to its end with all faults planted; then a reshard is broken on purpose; then other models are
refused.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from ckpt_tool.errors import Incomplete, InconsistentCheckpoint, UsageError  # noqa: E402
from ckpt_tool.harness import evidence, matrix, runs  # noqa: E402
from ckpt_tool.harness.evidence import Case, check, gather  # noqa: E402
from ckpt_tool.harness.faults import FAULTS, plant  # noqa: E402
from ckpt_tool.harness.layout import HarnessLayout  # noqa: E402
from ckpt_tool.harness.runs import Saving  # noqa: E402
from ckpt_tool.harness.saving.formats import WRITERS  # noqa: E402
from ckpt_tool.harness.shape import ModelShape  # noqa: E402
from ckpt_tool.harness.train import TrainingJob  # noqa: E402

COUNTERS = {"step", "samples", "rng"}


def case(source: str, target: str, fmt: str = "sharded", **more: Any) -> Case:
    return Case(HarnessLayout.parse(source), HarnessLayout.parse(target), fmt, **{"before": 2, "after": 2, **more})


# One of each kind: seen by moments, by digests alone, by counters alone.
FEW = ("m-zeroed", "one-ulp", "step")


@pytest.fixture(scope="module", params=[FEW, pytest.param(tuple(FAULTS), marks=pytest.mark.slow)], ids=["few", "all"])
def proved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return gather(case("tp2", "dp2", planted=request.param), tmp_path_factory.mktemp("pair"))


def test_a_pair_is_proved(proved: dict[str, Any]) -> None:
    assert proved["ok"] and all(check["ok"] for check in proved["checks"])
    assert [check["check"] for check in proved["checks"]] == [
        "digests: reshard",
        "digests: end of the run",
        "digests: there and back",
        "curve",
        "controls",
    ]
    for state in proved["states"]:
        assert {row["state"] for row in state["states"]} == {"model", "master", "exp_avg", "exp_avg_sq", "ema"}
        assert all(row["tensors"] == row["equal"] == 34 for row in state["states"])
    resumed = [row for row in proved["curve"] if "resumed_loss" in row]
    assert [row["step"] for row in resumed] == [3, 4] and all(row["equal"] for row in resumed)
    assert "SIGKILL" in proved["killed"] and proved["commands"][0].startswith(
        "ckpt reshard step_0000002 resharded --tp 1"
    )


def test_every_planted_fault_is_caught(proved: dict[str, Any]) -> None:
    rows = {row["fault"]: row for row in proved["controls"]}
    assert {"nothing", *FEW} <= set(rows) <= {"nothing", *FAULTS} and len(FAULTS) >= 13
    assert not any(rows.pop("nothing")["seen_by"].values()), "the control without a fault"
    assert all(row["caught"] for row in rows.values())


def test_with_the_check_of_its_kind_switched_off_a_fault_is_not_caught(proved: dict[str, Any]) -> None:
    """Loss alone is blind to EMA and ulps; the first step's loss alone to moments and masters; state dicts alone to
    counters."""
    rows = {row["fault"]: row for row in proved["controls"]}

    def caught(name: str, *, without: set[str]) -> bool:
        return any(seen for check, seen in rows[name]["seen_by"].items() if check not in without)

    planted = set(rows) - {"nothing"}
    digests = {"digests", "end"}
    assert {name for name in planted if not caught(name, without=digests)} == {"ema-reset", "one-ulp"} & planted
    assert {name for name in planted if not caught(name, without={"scalars", "curve", "end"})} == COUNTERS & planted
    hidden = {"m-zeroed", "v-of-expert", "experts-moments", "master-rounded", "ema-reset", "one-ulp"}
    assert all(rows[name]["loss_first"] == 0 for name in hidden & planted)


def test_a_broken_reshard_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reshard that mixes up two experts' moments: no loss moves in the next step, and all checks fail."""
    tool = evidence.run_tool

    def breaking(*words: Any, **more: Any) -> dict[str, Any]:
        if words[0] == "reshard" and words[2].name == "resharded":
            mixed = tmp_path / "mixed"
            shutil.copytree(words[1], mixed)
            plant(FAULTS["experts-moments"], mixed)
            words = (words[0], mixed, *words[2:])
        return tool(*words, **more)

    monkeypatch.setattr(evidence, "run_tool", breaking)
    document = gather(case("tp1", "tp2"), tmp_path)
    failed = {check["check"] for check in document["checks"] if not check["ok"]}
    assert not document["ok"] and failed >= {"digests: reshard", "digests: end of the run", "curve"}
    reshard = next(state for state in document["states"] if state["what"] == "reshard")
    assert any("experts.0" in name and "[exp_avg]" in name for name in reshard["differ"])


@pytest.mark.parametrize(
    ("source", "target", "fmt"),
    [
        ("dp2,zero0", "tp2", "megatron-dist"),  # two ranks: each of the others trains for seconds
        pytest.param("tp2,pp2,dp2,ep2", "dp4,ep2", "megatron-dist", marks=pytest.mark.slow),
        pytest.param("tp2,dp2,zero0", "pp2", "megatron", marks=pytest.mark.slow),
        pytest.param("tp2,dp2", "dp4,ep4,zero2", "dcp", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "faults",
    # one by default: each trains on from the fault, and this optimizer's own state is the momentum
    [("m-zeroed",), pytest.param(("m-zeroed", "v-of-expert", "experts-moments"), marks=pytest.mark.slow)],
    ids=["momentum", "all"],
)
def test_muon_goes_on_after_a_reshard(
    source: str, target: str, fmt: str, faults: tuple[str, ...], tmp_path: Path
) -> None:
    """Layer-wise, plain and flat jobs; and with momentum zeroed on the way everything is red."""
    document = gather(case(source, target, fmt, muon=True, planted=faults), tmp_path)
    assert document["ok"] and document["optimizer"] == "muon"
    reshard = next(state for state in document["states"] if state["what"] == "reshard")
    assert {"momentum_buffer", "exp_avg"} <= {row["state"] for row in reshard["states"]}
    rows = {row["fault"]: row["seen_by"] for row in document["controls"]}
    assert all(all(rows[name][check] for check in ("digests", "curve", "end")) for name in faults)


def test_a_lost_momentum_is_a_missing_state() -> None:
    held = {
        "model": {"a": "1"},
        "master": {"a": "1"},
        "exp_avg": {"b": "1"},
        "exp_avg_sq": {"b": "1"},
        "ema": {"a": "1"},
    }
    assert evidence._digest_check(case("tp1", "tp2"), "reshard", held, held)["ok"]
    found = evidence._digest_check(case("tp1", "tp2", muon=True), "reshard", held, held)
    assert not found["ok"] and found["missing"] == ["momentum_buffer"]


@pytest.mark.slow
def test_native_mode_is_held_to_a_tolerance(tmp_path: Path) -> None:
    document = gather(case("tp2", "dp2", canonical=False), tmp_path)
    assert document["ok"] and document["mode"] == "native" and 0 < document["noise"] < 2e-3
    assert document["worst"] <= min(evidence.NATIVE_TOLERANCE, evidence.NATIVE_NOISE * document["noise"])
    end = next(state for state in document["states"] if state["what"] == "end of the run")
    assert not end["counted"] and all(state["ok"] for state in document["states"] if state["counted"])


@pytest.mark.slow
def test_three_data_ranks_hold_what_they_cannot_train(tmp_path: Path) -> None:
    document = gather(case("dp2", "dp3,zero1", after=0), tmp_path)
    assert document["ok"] and [check["check"] for check in document["checks"]] == [
        "digests: reshard",
        "digests: end of the run",
        "digests: there and back",
    ]


def test_tied_and_untied_models_are_not_mixed_up(tmp_path: Path) -> None:
    """A head that the job doesn't have would be lost in silence; one that the checkpoint lacks can't be made up."""
    tied = TrainingJob(ModelShape.quick().with_(tied=True), HarnessLayout())
    untied = TrainingJob(ModelShape.quick(), HarnessLayout())
    for name, job in (("tied", tied), ("untied", untied)):
        runs.run(job, 1, saving=Saving(tmp_path / name, "sharded", (1,)))
    with pytest.raises(InconsistentCheckpoint, match="lm_head.weight") as e:
        runs.run(tied, 1, start=tmp_path / "untied" / "step_0000001")
    assert e.value.code == "E1509" and "not tied" in (e.value.hint or "")
    with pytest.raises(InconsistentCheckpoint, match="one of its own") as e:
        runs.run(untied, 1, start=tmp_path / "tied" / "step_0000001")
    assert e.value.code == "E1509"


def test_what_cannot_be_had_is_said_before_anything_runs() -> None:
    for bad, code in (
        (case("tp3", "dp2"), "E1501"),
        (case("tp2", "dp3"), "E1501"),
        (case("tp2", "dp2", "deepspeed"), "E1535"),
        (case("tp2", "dp2,zero3", "dcp", muon=True), "E1501"),
        (case("tp2", "dp2", "megatron-fsdp", muon=True), "E1535"),
        (case("dp2,zero0", "dp2,ep2,zero0", "megatron", muon=True), "E1535"),
    ):
        with pytest.raises(UsageError) as e:
            check(bad)
        assert e.value.code == code


def test_the_matrix_has_what_the_issue_names() -> None:
    """Both directions of every layout, uneven and interleaved pipelines, tied and indivisible models, all formats."""
    quick = matrix.cases("quick")
    full = matrix.cases("full", planted=("step",))
    for one in (*quick, *full):
        check(one)
    assert {one.fmt for one in full} == set(evidence.formats.WRITERS) and len({one.fmt for one in quick}) >= 2
    pairs = {(str(one.source), str(one.target)) for one in full}
    assert all((b, a) in pairs for a, b in pairs if a == "tp1")
    assert any(one.source.vpp == 2 for one in full) and any(one.target.vpp == 2 for one in full)
    assert any(one.model.tied for one in full) and any(one.model.rows == one.model.vocab for one in full)
    assert {one.fmt for one in full if one.muon} == {name for name, writer in WRITERS.items() if writer.muon}
    assert {one.after for one in full} == {3, 0} and [one.planted for one in full].count(("step",)) == 1
    with pytest.raises(UsageError, match="no matrix is called"):
        matrix.cases("half")


def test_a_fault_that_changes_nothing_is_no_control(tmp_path: Path) -> None:
    runs.run(TrainingJob(ModelShape.quick(), HarnessLayout()), 0, saving=Saving(tmp_path, "sharded", (0,)))
    folder = tmp_path / "broken"
    shutil.copytree(tmp_path / "step_0000000", folder)
    with pytest.raises(Incomplete) as e:  # before the first step the moments are zeros anyway
        plant(FAULTS["m-zeroed"], folder)
    assert e.value.code == "E1508"
