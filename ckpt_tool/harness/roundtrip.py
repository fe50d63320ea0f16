"""A -> X -> A through `ckpt reshard`, in every format: each tensor comes back as it was, to the byte.

    gather(RoundTrip(Layout.parse("tp2,pp2,dp2,ep2"), Layout.parse("dp4,ep2")), folder)
          a document with a check a format

    train    once for all pairs: a few steps on one rank, so that moments and averages are a real run's
    save     a job of layout A holds that state, each rank its pieces, and saves it in every format
    reshard  A -> X and X -> A, two commands a format; the digest of every tensor, in every state, before and after

The one idea: canonical training gives every layout the same bits, so one training serves all; what differs is who holds
what. Formats whose systems can't have a layout are named, and not counted. Cost: three commands a format and pair, two
at a time. What it does not do: resume (`harness.evidence`).
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_tool.errors import CkptError, UsageError
from ckpt_tool.harness import runs
from ckpt_tool.harness.comm import Comm
from ckpt_tool.harness.launch import run_ranks
from ckpt_tool.harness.layout import HarnessLayout
from ckpt_tool.harness.loading import Loader, run_tool
from ckpt_tool.harness.matrix import ALONE, CROSS, MODELS, Pair
from ckpt_tool.harness.runs import Saving
from ckpt_tool.harness.saving import formats
from ckpt_tool.harness.shape import ModelShape
from ckpt_tool.harness.store import RankStore, latest, name_of
from ckpt_tool.harness.train import Trainer, TrainingJob

STEPS = 2
AT_ONCE = 2  # commands
Say = Callable[[str], None]
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """One pair."""

    source: HarnessLayout
    target: HarnessLayout
    fmt: str | None = None  # one format, None for all
    shape: ModelShape = field(default_factory=ModelShape.quick)
    seed: int = 1234

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats to test: the given one, else all."""
        return tuple(formats.WRITERS) if self.fmt is None else (self.fmt,)


def cases(*, fmt: str | None = None, seed: int = 1234) -> list[RoundTrip]:
    """Every pair of the full matrix once, in all formats or in one; without the pairs that no format has a place
    for."""
    edge_pairs = [pair for text in ALONE for pair in (Pair("tp1", text), Pair(text, "tp1"))]
    unique_trips = dict.fromkeys((pair.source, pair.target, pair.model or "full") for pair in (*edge_pairs, *CROSS))
    listed_cases = [
        RoundTrip(HarnessLayout.parse(a), HarnessLayout.parse(b), fmt, MODELS[model], seed)
        for a, b, model in unique_trips
    ]
    return [trip for trip in listed_cases if _fitting(trip)[0]]


def check(trip: RoundTrip) -> None:
    """Raise UsageError (E1501, E1534) for layouts that the model can't take, and formats that the harness does not
    write."""
    for layout in (trip.source, trip.target):
        layout.check(trip.shape, canonical=True, steps=False)
    for fmt in trip.formats:
        formats.check_name(fmt)


def gather(trip: RoundTrip, folder: Path, *, say: Say = lambda line: None) -> Document:
    """The document for all formats of one pair, run in `folder`. Pairs share the folder `round-trips` next to it."""
    check(trip)
    began = time.perf_counter()
    fitting, unfit = _fitting(trip)
    firsts = _save_source(trip, fitting, folder.parent / "round-trips", say)
    say(f"reshard: {trip.source} -> {trip.target} -> {trip.source}, {_count(fitting)}")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        checks = list(pool.map(lambda fmt: _there_and_back(trip, fmt, firsts[fmt], folder), fitting))
    return _document(trip, checks, unfit, began)


def make_failure(trip: RoundTrip, error: CkptError) -> Document:
    """The document of a pair that could not be carried out to its end."""
    failed_check = {"check": "the run", "ok": False, "text": f"{error.code}: {error.message}"}
    return _document(trip, [failed_check], list(error.faults or ()), time.perf_counter())


def _document(trip: RoundTrip, checks: list[Document], notes: list[str], began: float) -> Document:
    return {
        "ok": bool(checks) and all(check["ok"] for check in checks),
        "from": str(trip.source),
        "to": str(trip.target),
        "format": trip.fmt or _count([check["check"] for check in checks]),
        "mode": "round trip",
        "device": "cpu",
        "seed": trip.seed,
        "before": STEPS,
        "after": 0,
        "checks": checks,
        "states": [],
        "curve": [],
        "controls": [],
        "notes": notes,
        "elapsed_s": round(time.perf_counter() - began, 3),
    }


def _fitting(trip: RoundTrip) -> tuple[list[str], list[str]]:
    """The formats that have a place for both layouts; why the others have none."""
    fitting = []
    unfit = []
    for fmt in trip.formats:
        try:
            for layout in (trip.source, trip.target):
                formats.check(fmt, layout, trip.shape)
        except UsageError as e:
            unfit.append(e.message)
        else:
            fitting.append(fmt)
    return fitting, unfit


def _save_source(trip: RoundTrip, wanted: Sequence[str], shared: Path, say: Say) -> dict[str, Path]:
    """Format -> the source's checkpoint in it. What is there already is used again: pairs share their sources, and all
    the training. DeepSpeed's bf16 engine casts the router too, so its model is another one."""
    firsts: dict[str, Path] = {}
    models = {fmt: trip.shape.with_(router="bf16") if fmt == "deepspeed" else trip.shape for fmt in wanted}
    for shape in dict.fromkeys(models.values()):
        root = shared / f"{zlib.crc32(repr((shape, trip.seed)).encode()):08x}"
        if not root.exists():
            say(f"train: {STEPS} steps on one rank")
            job = TrainingJob(shape, HarnessLayout(), seed=trip.seed)
            runs.run(job, STEPS, saving=Saving(root / "trained", "sharded", (STEPS,)))
        saved = root / str(trip.source)
        firsts |= {fmt: saved / fmt / name_of(STEPS) for fmt, model in models.items() if model == shape}
        missing = [fmt for fmt, path in firsts.items() if path.is_relative_to(saved) and not path.exists()]
        if missing:
            say(f"save: as {trip.source} in {_count(missing)}")
            _save(TrainingJob(shape, trip.source, seed=trip.seed), root / "trained", saved, missing)
    return firsts


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} formats" if len(names) != 1 else names[0]


def _save(job: TrainingJob, trained: Path, root: Path, wanted: Sequence[str]) -> None:
    """A job takes the state up and saves it, in one format after the other."""
    start = latest(trained).path

    def entry(comm: Comm) -> None:
        trainer = Trainer(job, comm, steps=False)
        source = Loader(start)
        trainer.load(source.read, source.scalars)
        state = trainer.state()
        for fmt in wanted:
            store = RankStore(root / fmt, fmt, rank=comm.rank, world=job.layout.world, durable=False)
            store.save(state)
            store.close()

    run_ranks(job.layout.world, entry, groups=job.layout.groups(job.shape), backend="sim")


def _there_and_back(trip: RoundTrip, fmt: str, first: Path, folder: Path) -> Document:
    """One format's check. What the tool refuses is a check that failed, with the tool's words."""
    away = folder / fmt / "away"
    back = folder / fmt / "back"
    away.parent.mkdir(parents=True)
    try:
        run_tool("reshard", first, away, *_words(fmt, trip.target, trip.shape))
        run_tool("reshard", away, back, *_words(fmt, trip.source, trip.shape))
        return {"check": fmt, **_compare_answers(_kept_digests(first), _digests(back))}
    except CkptError as e:
        return {"check": fmt, "ok": False, "text": f"{e.code}: {e.message}"}


def _words(fmt: str, layout: HarnessLayout, shape: ModelShape) -> list[str]:
    return formats.words(fmt, layout, [len(layers) for layers in layout.stage_layers(shape)])


def _digests(path: Path) -> Mapping[str, str]:
    """`NAME [STATE]` -> digest, and what `verify` finds fault with."""
    document = run_tool("verify", path)
    faults = {f"finding {number}": str(finding["code"]) for number, finding in enumerate(document["findings"])}
    all_digests = {
        f"{name} [{state}]": digest for state, names in document["digests"].items() for name, digest in names.items()
    }
    return all_digests | faults


def _kept_digests(path: Path) -> Mapping[str, str]:
    """The same, looked up where another pair has looked it up already."""
    cache_file = path.with_name(f"{path.name}.digests.json")
    if not cache_file.exists():
        cache_file.write_text(json.dumps(_digests(path)))
    return dict(json.loads(cache_file.read_text()))


def _compare_answers(want: Mapping[str, str], got: Mapping[str, str]) -> Document:
    names = [*dict.fromkeys([*want, *got])]
    differ = [name for name in names if want.get(name) != got.get(name) or name.startswith("finding ")]
    text = f"{len(names) - len(differ)} of {len(names)} tensors byte for byte"
    return {"ok": not differ and bool(names), "text": text + (f"; not {', '.join(differ[:3])}" if differ else "")}
