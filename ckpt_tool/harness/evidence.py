"""The evidence that a reshard is right: the run that was interrupted and resharded is the run that never was.

    gather(Case(Layout.parse("tp2,pp2,dp2,ep2"), Layout.parse("dp4,ep2"), "dcp"), folder)   -> one JSON document

What is done, for a job laid out as A, a format F and another layout B:

    reference  A trains N + M steps without a break
    kill       A trains N steps, saves as F, and the last rank gets SIGKILL in the next step
    reshard    `ckpt reshard` lays the checkpoint out for B: the digest of every logical tensor is as before
    resume     B goes on from there for M steps: loss and gradient norm as in the reference, and so the state at the end
    back       `ckpt reshard` lays it out for A again: every tensor as A saved it
    controls   faults are planted in the resharded checkpoint: each must be seen by one of the checks above

Canonical jobs must agree bit for bit. Native ones (all-reduces) must agree within a tolerance; the report also shows
the noise of a change of layout alone, from the same job run uninterrupted as B. Digests are the tool's
(`run/digest.py`), of the state in memory and of the files alike.

Cost: 3 (native: 4) short runs, four commands, one run of `CONTROL_STEPS` on one rank a fault.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_tool.errors import CkptError
from ckpt_tool.harness import faults, runs
from ckpt_tool.harness.launch import run_ranks
from ckpt_tool.harness.layout import HarnessLayout
from ckpt_tool.harness.loading import prepare_checkpoint, run_tool
from ckpt_tool.harness.optimizer import Muon
from ckpt_tool.harness.pieces import EVERY_STATE, STATES
from ckpt_tool.harness.runs import RunMachine, Saving
from ckpt_tool.harness.saving import formats
from ckpt_tool.harness.shape import ModelShape
from ckpt_tool.harness.store import latest
from ckpt_tool.harness.train import TrainingJob, TrainingStep

CONTROL_STEPS = 3
NATIVE_TOLERANCE = 2e-3  # relative difference of the loss, over at most 10 steps after the resume
NATIVE_NOISE = 3.0  # and no more than so many times what a change of layout alone makes
Say = Callable[[str], None]
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One pair."""

    source: HarnessLayout
    target: HarnessLayout
    fmt: str = "sharded"
    shape: ModelShape = field(default_factory=ModelShape.quick)
    canonical: bool = True
    # before, after: steps until the save, and after the resume; after 0 only asks whether the target can hold the state
    # (three data ranks can't share eight microbatches)
    before: int = 3
    after: int = 3
    seed: int = 1234
    machine: RunMachine = RunMachine()
    planted: tuple[str, ...] = ()  # faults of the negative controls
    reference: HarnessLayout | None = None  # the layout of the run without a break, None for the source's
    muon: bool = False  # does it step the matrices?

    @property
    def model(self) -> ModelShape:
        """The model as the format's system has it: DeepSpeed's bf16 engine casts every weight, the router too."""
        return self.shape.with_(router="bf16") if self.fmt == "deepspeed" else self.shape

    @property
    def unkept(self) -> frozenset[str]:
        """States that one of the layouts does not store: ZeRO 3 of DeepSpeed rounds its weights from the masters;
        Megatron-FSDP's model are the masters."""
        stages = {layout.zero for layout in (self.source, self.target) if layout.dp > 1}
        rounded = frozenset({"model"} if self.fmt == "deepspeed" and 3 in stages else ())
        return rounded | formats.WRITERS[self.fmt].unkept

    def job(self, layout: HarnessLayout) -> TrainingJob:
        return TrainingJob(
            self.model, layout, seed=self.seed, canonical=self.canonical, muon=Muon() if self.muon else None
        )

    @property
    def states(self) -> tuple[str, ...]:
        """The states that the job has."""
        return EVERY_STATE if self.muon else STATES


def check(case: Case) -> None:
    """Raise UsageError (E1501, E1534, E1535) for what the model or the format can't take, before anything runs."""
    for layout in (case.source, case.reference or case.source):
        layout.check(case.model, canonical=case.canonical, muon=case.muon)
    case.target.check(case.model, canonical=case.canonical, steps=case.after > 0, muon=case.muon)
    case.machine.check(max(case.source.world, case.target.world))
    formats.check(case.fmt, case.source, case.model, muon=case.muon)
    formats.check(case.fmt, case.target, case.model, muon=case.muon)


def gather(case: Case, folder: Path, *, say: Say = lambda line: None) -> Document:
    """All checks of one pair, carried out in `folder`. say: takes a line about each stage as it begins."""
    check(case)
    began = time.perf_counter()
    announce = _Announced(say)
    base = case.reference or case.source
    announce(f"reference: {case.before + case.after} steps as {base}")
    final = Saving(folder / "reference", "sharded", (case.before + case.after,))
    want = runs.run(case.job(base), case.before + case.after, saving=final, machine=case.machine)
    announce(f"kill: {case.before} steps as {case.source}, saved as {case.fmt}, then SIGKILL")
    saving = Saving(folder / "run", case.fmt, (case.before,), run="killed")
    end = runs.run_and_kill(case.job(case.source), case.before, saving=saving, machine=case.machine)
    good = latest(folder / "run")
    announce(f"reshard: {case.source} -> {case.target}")
    command = _reshard(case, good.path, folder / "resharded", case.target)
    reshard_output = run_tool(*command)
    hub_folder = prepare_checkpoint(folder / "resharded", folder / "hub")
    states = [
        _digest_check(case, "reshard", _digests(case, good.path), _digests(case, folder / "resharded"), case.unkept)
    ]
    announce(f"resume: {case.after} steps as {case.target}")
    ends = Saving(folder / "resumed", "sharded", (case.before + case.after,))
    got = runs.run(case.job(case.target), case.after, start=hub_folder, saving=ends, machine=case.machine)
    curve = _curve(want, got, case)
    states.append(
        _digest_check(
            case, "end of the run", _digests(case, latest(final.root).path), _digests(case, latest(ends.root).path)
        )
    )
    if not case.canonical:
        states[-1]["counted"] = False  # other layouts round otherwise: the curve is what counts

    announce(f"back: {case.target} -> {case.source}")
    run_tool(*_reshard(case, folder / "resharded", folder / "back", case.source))
    states.append(
        _digest_check(case, "there and back", _digests(case, good.path), _digests(case, folder / "back"), case.unkept)
    )
    controls = _controls(case, hub_folder, folder, want, announce) if case.planted and case.after else []
    noise = _noise(case, want, folder, announce) if not case.canonical and case.after else None

    return _document(
        case,
        curve,
        states,
        controls,
        noise,
        {
            "killed": end,
            "taken": good.path.name,
            "notes": list(good.notes),
            "commands": [_format_command(command)],
            "reshard": {key: reshard_output[key] for key in ("plan", "fallbacks", "dropped") if key in reshard_output},
            "stages": announce.lines,
            "elapsed_s": round(time.perf_counter() - began, 3),
        },
    )


class _Announced:
    """Passes lines on and keeps them with the seconds at which they came."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._began = time.perf_counter()
        self.lines: list[dict[str, Any]] = []

    def __call__(self, line: str) -> None:
        self.lines.append({"at_s": round(time.perf_counter() - self._began, 3), "what": line})
        self._say(line)


def _reshard(case: Case, path: Path, out: Path, layout: HarnessLayout) -> list[str | Path]:
    """The command that lays a checkpoint out for `layout`, as a user would write it."""
    words = formats.words(case.fmt, layout, [len(layers) for layers in layout.stage_layers(case.model)])
    return ["reshard", path, out, *words, "--verify", "full", *case.machine.words]


def _format_command(command: Sequence[object]) -> str:
    return " ".join(["ckpt", *(part.name if isinstance(part, Path) else str(part) for part in command)])


# -- states ------------------------------------------------------------------------------------------------------------


def _digests(case: Case, path: Path) -> dict[str, dict[str, str]]:
    """State -> tensor -> digest, by `ckpt verify`; what it finds fault with is a fault of the case too."""
    document = run_tool("verify", path, *case.machine.words)
    unsound = {f"finding {number}": f"{f['code']}: {f['message']}" for number, f in enumerate(document["findings"])}
    return {**document["digests"], **({"findings": unsound} if unsound else {})}


def _digest_check(
    case: Case,
    what: str,
    left: Mapping[str, Mapping[str, str]],
    right: Mapping[str, Mapping[str, str]],
    unkept: frozenset[str] = frozenset(),
) -> Document:
    """Tensor by tensor, state by state. unkept: states that may be missing as a whole on a side, and are no evidence
    then."""
    rows = []
    differ = []
    skipped = {state for state in unkept if state not in left or state not in right}
    for state in dict.fromkeys([*left, *right]):
        if state in skipped:
            continue
        left_digests = left.get(state, {})
        right_digests = right.get(state, {})
        names = dict.fromkeys([*left_digests, *right_digests])
        equal = sum(left_digests.get(name) == right_digests.get(name) for name in names)
        differ += [f"{name} [{state}]" for name in names if left_digests.get(name) != right_digests.get(name)]
        rows.append({"state": state, "tensors": len(names), "equal": equal})
    missing = [state for state in case.states if state not in left and state not in skipped]
    ok = not differ and not missing and "findings" not in left
    return {"what": what, "ok": ok, "states": rows, "differ": differ[:20], "missing": missing, "counted": True}


# -- the curve ---------------------------------------------------------------------------------------------------------


def _curve(want: Sequence[TrainingStep], got: Sequence[TrainingStep], case: Case) -> Document:
    """Loss and gradient norm of both runs, step by step."""
    resumed = {step.step: step for step in got}
    rows = []
    ok = True
    for step in want:
        twin = resumed.get(step.step)
        row: Document = {"step": step.step, "loss": step.loss, "norm": step.norm, "rate": step.rate}
        if twin is not None:
            row |= {"resumed_loss": twin.loss, "resumed_norm": twin.norm, "equal": twin == step}
            ok = ok and twin == step
        elif step.step > case.before:
            ok = False
        rows.append(row)
    worst = max((_relative(row["loss"], row["resumed_loss"]) for row in rows if "equal" in row), default=math.inf)
    return {"ok": ok, "bitwise": ok, "rows": rows, "worst": worst}


def _relative(want: float, got: float) -> float:
    return abs(want - got) / max(abs(want), 1e-12)


def _noise(case: Case, want: Sequence[TrainingStep], folder: Path, announce: _Announced) -> float:
    """The largest relative difference of the loss that a change of layout alone makes: B, uninterrupted, against A."""
    announce(f"noise: {case.before + case.after} steps as {case.target}, uninterrupted")
    second_run = runs.run(case.job(case.target), case.before + case.after, machine=case.machine)
    return max(_relative(a.loss, b.loss) for a, b in zip(want, second_run, strict=True))


# -- negative controls -------------------------------------------------------------------------------------------------


def _controls(
    case: Case, here: Path, folder: Path, want: Sequence[TrainingStep], announce: _Announced
) -> list[Document]:
    """A row a fault: which checks see it. The first row plants nothing, and no check may see anything."""
    clean = folder / "controls" / "clean"
    clean.parent.mkdir()
    run_tool("convert", here, clean, "--to", "sharded", "--dialect", "keep", "--force")
    steps = min(CONTROL_STEPS, case.after)
    truth = _fingerprint(case, clean, steps)
    rows = [_row("nothing", "nothing planted", case, truth, truth, want, steps)]
    for name in case.planted:
        fault = faults.FAULTS[name]
        announce(f"control: {fault.what}")
        broken = folder / "controls" / name
        shutil.copytree(clean, broken)
        faults.plant(fault, broken)
        rows.append(_row(name, fault.what, case, _fingerprint(case, broken, steps), truth, want, steps))
        shutil.rmtree(broken)
    return rows


@dataclass(frozen=True, slots=True)
class _Fingerprint:
    """What the checks see of a checkpoint: its values, its scalars, what a run makes of it."""

    digests: Mapping[str, str]
    scalars: Mapping[str, Any]
    steps: tuple[TrainingStep, ...]
    end: Mapping[str, str]


def _fingerprint(case: Case, folder: Path, steps: int) -> _Fingerprint:
    """Of a `sharded` checkpoint of one rank: digests now, and of the state after some steps of one rank."""
    from ckpt_tool.harness.loading import Loader
    from ckpt_tool.harness.saving.whole import WholeState, assemble
    from ckpt_tool.harness.train import Trainer

    job = case.job(HarnessLayout())

    def entry(comm: Any) -> dict[str, Any]:
        source = Loader(folder)
        trainer = Trainer(job, comm)
        trainer.load(source.read, source.scalars)
        state: WholeState = assemble([trainer.state()])
        before = _digest_memory(state)
        done = [list(step) for step in trainer.train(steps)]
        end = _digest_memory(assemble([trainer.state()]))
        return {"digests": before, "scalars": dict(source.scalars), "steps": done, "end": end}

    (result,) = run_ranks(1, entry, backend="sim", device=case.machine.device)
    return _Fingerprint(
        result["digests"], result["scalars"], tuple(TrainingStep(*row) for row in result["steps"]), result["end"]
    )


def _digest_memory(whole: Any) -> dict[str, str]:
    """Digests of a state in memory: what `ckpt verify` gives for its files."""
    import torch

    from ckpt_tool.run.digest import digest

    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}
    return {
        f"{name} [{state}]": digest(
            names[values.dtype], tuple(values.shape), values.contiguous().view(torch.uint8).numpy().tobytes()
        )
        for (state, name), values in whole.tensors.items()
    }


def _row(
    name: str, what: str, case: Case, found: _Fingerprint, truth: _Fingerprint, want: Sequence[TrainingStep], steps: int
) -> Document:
    """Which checks see it: digests and scalars of the checkpoint, bits of the curve, digests at the end."""
    reference = want[case.before : case.before + steps]
    pairs = list(zip(reference, found.steps, strict=True))
    losses = [abs(a.loss - b.loss) for a, b in pairs]
    checks = {
        "digests": found.digests != truth.digests,
        "scalars": found.scalars != truth.scalars,
        "curve": tuple(reference) != found.steps,
        "end": found.end != truth.end,
    }
    caught = any(checks.values())
    return {
        "fault": name,
        "what": what,
        "loss_first": losses[0],
        "loss_max": max(losses),
        "seen_by": checks,
        "caught": caught,
        "ok": caught == (name != "nothing"),
    }


# -- the document ------------------------------------------------------------------------------------------------------


def _document(
    case: Case, curve: Document, states: list[Document], controls: list[Document], noise: float | None, rest: Document
) -> Document:
    checks = [
        {"check": f"digests: {state['what']}", "ok": state["ok"], "text": _text(state)}
        for state in states
        if state["counted"]
    ]

    if not case.after:
        curve["worst"] = 0.0
    elif case.canonical:
        text = (
            "loss and gradient norm bit for bit"
            if curve["ok"]
            else f"loss differs, {curve['worst']:.1e} relative at most"
        )
        checks.append({"check": "curve", "ok": curve["ok"], "text": text})
    else:
        limit = min(NATIVE_TOLERANCE, NATIVE_NOISE * (noise or 0.0)) if noise else NATIVE_TOLERANCE
        curve["ok"] = curve["worst"] <= limit
        text = f"loss within {curve['worst']:.1e} relative (limit {limit:.1e}; layouts alone make {noise or 0.0:.1e})"
        checks.append({"check": "curve", "ok": curve["ok"], "text": text})

    if controls:
        caught = sum(row["caught"] for row in controls if row["fault"] != "nothing")
        ok = all(row["ok"] for row in controls)
        checks.append({"check": "controls", "ok": ok, "text": f"{caught} of {len(controls) - 1} planted faults caught"})

    return {
        "ok": all(check["ok"] for check in checks),
        **_what_was_run(case),
        "checks": checks,
        "states": states,
        "curve": curve["rows"],
        "worst": curve["worst"],
        "noise": noise,
        "controls": controls,
        "layouts": {"from": list_placement(case.source, case.model), "to": list_placement(case.target, case.model)},
        **rest,
    }


def _what_was_run(case: Case) -> Document:
    return {
        "from": str(case.source),
        "to": str(case.target),
        "format": case.fmt,
        "mode": "canonical" if case.canonical else "native",
        "device": case.machine.device,
        "seed": case.seed,
        "model": str(case.model),
        "optimizer": "muon" if case.muon else "adamw",
        "before": case.before,
        "after": case.after,
    }


def _text(state: Document) -> str:
    tensors = sum(row["tensors"] for row in state["states"])
    equal = sum(row["equal"] for row in state["states"])
    if state["missing"]:
        return f"states missing: {', '.join(state['missing'])}"
    return f"{equal} of {tensors} tensors bit for bit in {len(state['states'])} states"


def list_placement(layout: HarnessLayout, shape: ModelShape) -> list[Document]:
    """Who holds what: a row a rank."""
    rows = []
    for rank in range(layout.world):
        coordinates = layout.at(rank, shape)
        count = shape.experts // layout.ep
        rows.append(
            {
                "rank": rank,
                "tp": coordinates.tp,
                "pp": coordinates.pp,
                "dp": coordinates.dp,
                "layers": [list(chunk) for chunk in coordinates.chunks],
                "experts": list(range(coordinates.ep * count, (coordinates.ep + 1) * count)),
            }
        )
    return rows


def make_failure(case: Case, error: CkptError) -> Document:
    """The document of a case that could not be carried out to its end."""
    failed_check = {"check": "the run", "ok": False, "text": f"{error.code}: {error.message}"}
    return {
        "ok": False,
        **_what_was_run(case),
        "checks": [failed_check],
        "states": [],
        "curve": [],
        "controls": [],
        "notes": list(error.faults or ()),
        "elapsed_s": 0.0,
    }


def all_faults() -> tuple[str, ...]:
    """Names of every fault."""
    return tuple(faults.FAULTS)
