"""Time lost to claiming, where thousands of workers share out one plan into a store: the tool's own claims, simulated.

    python tests/bench/claims.py [--workers 2048] [--speed 250] [--latency 0.1] [--die 20] [--late 20] [--work DIR]

The plan is that of `scale.py`: 671 billion parameters with optimizer onto 2,048 ranks, 9.6 TB; its shares are derived
as a worker does it (`run/shares.py`). What is simulated is the clock, the store and the moving of bytes; who claims
what is decided by `storage/store_claims.StoreClaims` itself, one for each worker, in a thread of its own of which one
runs at a time. Heads are sparse files: no byte of a tensor is read.

The store: a request takes `--latency` seconds in the middle (log-normal, sigma 0.5; a listing that much for each page
of 1,000), and a prefix takes 3,500 writes and 5,500 reads a second; what comes too fast waits. Source of the rates and
of 0.1 s: Amazon S3 user guide, "Best practices design patterns: optimizing Amazon S3 performance". Workers are started
within ten seconds, and differ in speed (log-normal, sigma 0.1).

Lost: what a worker waits in `begin`, in a `take` that gave it a share, and in `finish`, to what it waits and works.
What it asks beside its work (signs of life, listings, the next share, records) costs requests and no time. Idle: from a
worker's last share to the last of all; that is what shares of one size leave, or a lease, and no cost of claims.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ckpt_tool.core.integers import ceil_div
from ckpt_tool.run import share_upload
from ckpt_tool.run.file_parts import FileParts
from ckpt_tool.storage.stores import store_claims
from ckpt_tool.storage.stores.multipart import ListedObject, StoreListing, md5, part_size
from ckpt_tool.storage.stores.store_claims import StoreClaims

T = TypeVar("T")
_SAMPLE = 40  # shares that are looked at closely
# a second, a second, keys
WRITES = 3500
READS = 5500
PAGE = 1000


class Dead(BaseException):
    """A simulated worker was killed."""


class Simulation:
    """Threads that take turns: each runs until it sleeps, and time is what they sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, threading.Lock]] = []
        self._count = 0
        self._back = threading.Lock()
        self._back.acquire()

    def spawn(self, job: Callable[[], None], at: float = 0.0) -> None:
        turn = threading.Lock()
        turn.acquire()

        def run() -> None:
            turn.acquire()
            try:
                job()
            except Dead:
                pass
            finally:
                self._back.release()

        threading.Thread(target=run, daemon=True).start()
        self._push(at, turn)

    def _push(self, at: float, turn: threading.Lock) -> None:
        self._count += 1
        heapq.heappush(self._due, (at, self._count, turn))

    def sleep(self, seconds: float) -> None:
        turn = threading.Lock()
        turn.acquire()
        self._push(self.now + seconds, turn)
        self._back.release()
        turn.acquire()

    def run(self) -> None:
        while self._due:
            self.now, _, turn = heapq.heappop(self._due)
            turn.release()
            self._back.acquire()


class SimulatedStore:
    """What `StoreClaims` asks of a store, in simulated time."""

    shown = "simulated"

    def __init__(self, simulation: Simulation, latency: float) -> None:
        self._sim = simulation
        self._latency = latency
        self._random = random.Random(0)
        self._free = {"writes": 0.0, "reads": 0.0}
        self.data: dict[str, tuple[bytes, float]] = {}
        self._listed: dict[str, ListedObject] = {}
        self.asked = Counter[str]()

    def _wait(self, kind: str, what: str, requests: int = 1) -> None:
        rate = WRITES if kind == "writes" else READS
        start = max(self._sim.now, self._free[kind])
        self._free[kind] = start + requests / rate
        self.asked[what] += requests
        took = sum(self._latency * self._random.lognormvariate(0, 0.5) for _ in range(requests))
        self._sim.sleep(start - self._sim.now + took)

    def put(self, key: str, data: bytes | bytearray, notes: Mapping[str, str], *, new: bool) -> None:
        self._wait("writes", "put")
        self._put(key, bytes(data))

    def _put(self, key: str, data: bytes) -> None:
        self.data[key] = data, self._sim.now
        self._listed[key] = ListedObject(len(data), float(int(self._sim.now)), md5(data).hex())

    def create(self, key: str, data: bytes) -> bool:
        self._wait("writes", "put")
        if key in self.data:
            self.asked["refused"] += 1
            return False
        self._put(key, data)
        return True

    def get(self, key: str) -> bytes | None:
        self._wait("reads", "get")
        return self.data.get(key, (None, 0.0))[0]

    def remove(self, key: str, *, etag: str = "") -> None:
        self._wait("writes", "delete")
        self.data.pop(key, None)
        self._listed.pop(key, None)

    def listing(self) -> StoreListing:
        self._wait("reads", "list", max(1, ceil_div(len(self.data), PAGE)))
        return StoreListing(self._sim.now, dict(self._listed))


class SimulatedClaims(StoreClaims):
    """The tool's claims; what it does beside its work is a thread of the simulation too."""

    def __init__(self, sim: Simulation, store: SimulatedStore, name: str, sizes: list[int]) -> None:
        super().__init__(store, "plan", name, sizes)  # type: ignore[arg-type]
        self._sim = sim

    def _aside(self, job: Callable[[], T]) -> Callable[[], T]:
        found = list[T]()
        self._sim.spawn(lambda: found.append(job()), self._sim.now)

        def wait() -> T:
            while not found:
                self._sim.sleep(0.005)
            return found[0]

        return wait


class Worker:
    """One worker: claims, works, says so, until nothing is left. dies: when it is killed."""

    def __init__(
        self, sim: Simulation, store: SimulatedStore, name: str, sizes: list[int], speed: float, dies: float
    ) -> None:
        self._sim = sim
        self._sizes = sizes
        self._speed = speed
        self._dies = dies
        self.claims = SimulatedClaims(sim, store, name, sizes)
        self.lost = self.worked = self.last = 0.0
        self.did = list[int]()
        self.over = 0
        self.commits = False
        self._ended = False

    def run(self) -> None:
        began = self._sim.now
        self.claims.begin()
        self._sim.spawn(self._beat, self._sim.now + random.Random(began).uniform(0, store_claims.BEAT / 3))
        self.lost += self._sim.now - began
        pause = 0.5
        try:
            while True:
                began = self._sim.now
                taken = self.claims.take()
                if taken is not None:
                    self._move(taken.number, began)
                    self.over += taken.over
                    pause = 0.5
                elif self.claims.left():
                    self._alive_sleep(pause)
                    pause = min(15.0, 1.5 * pause)
                else:
                    self.commits = self.claims.take_commit()
                    return
        finally:
            self._ended = True

    def _move(self, number: int, asked: float) -> None:
        claimed = self._sim.now
        self._alive_sleep(share_upload._MOST * self._sizes[number] / self._speed)
        self.claims.ahead()
        self._alive_sleep((1 - share_upload._MOST) * self._sizes[number] / self._speed)
        moved = self._sim.now
        self.claims.finish(number, {"plan": "plan"})
        self.lost += claimed - asked + self._sim.now - moved
        self.worked += moved - claimed
        self.last = self._sim.now
        self.did.append(number)

    def _alive_sleep(self, seconds: float) -> None:
        if self._sim.now + seconds > self._dies:
            self._sim.sleep(max(0.0, self._dies - self._sim.now))
            raise Dead
        self._sim.sleep(seconds)

    def _beat(self) -> None:
        while not self._ended:
            self.claims.beat()
            self.claims.look()
            self._sim.sleep(store_claims.BEAT)


def simulate(
    sizes: list[int], workers: int, *, speed: float, latency: float, die: int = 0, late: int = 0, seed: int = 0
) -> dict[str, Any]:
    """speed: bytes a second of a worker. die, late: so many are killed or come late, somewhere in the run's time."""
    rng = random.Random(seed)
    sim = Simulation()
    store = SimulatedStore(sim, latency)
    length = sum(sizes) / workers / speed
    dying = set(rng.sample(range(workers), die))
    coming = set(rng.sample(range(workers), late))
    crowd = []
    for number in range(workers):
        dies = rng.uniform(0, length) if number in dying else float("inf")
        worker = Worker(sim, store, f"w{number}", sizes, speed * rng.lognormvariate(0, 0.1), dies)
        crowd.append(worker)
        sim.spawn(worker.run, rng.uniform(0, length) if number in coming else rng.uniform(0, 10))
    began = time.process_time()
    sim.run()
    did = Counter(number for worker in crowd for number in worker.did)
    end = max(worker.last for worker in crowd)
    lost = sum(worker.lost for worker in crowd)
    worked = sum(worker.worked for worker in crowd)
    return {
        "workers": workers,
        "shares": len(sizes),
        "share_mb": round(sum(sizes) / len(sizes) / 1e6),
        "seconds": round(end, 1),
        "lost": round(lost / (lost + worked), 4),
        "lost_s_a_share": round(lost / sum(did.values()), 3),
        "idle": round(sum(end - worker.last for worker in crowd if worker.last) / end / workers, 3),
        "undone": len(sizes) - len(did),
        "done_twice": sum(did.values()) - len(did),
        "taken_over": sum(worker.over for worker in crowd),
        "committing": sum(worker.commits for worker in crowd),
        "requests": dict(store.asked),
        "requests_a_s": round(sum(store.asked.values()) / sim.now),
        "cpu_s": round(time.process_time() - began, 1),
    }


class Object(FileParts):
    """As `run.store_objects.StoredObject`, without heads: to write 2,048 of them takes minutes, and no share depends on
    them."""

    def __init__(self, size: int) -> None:
        super().__init__(size, part_size(size))

    @property
    def valued(self) -> bool:
        return bool(self.moved)


def sizes_of_the_plan(work: Path) -> list[int]:
    """Bytes of the shares of the plan of `scale.py`, kept beside its sparse files."""
    import scale
    from measure import say

    kept = work / "shares.json"
    if kept.exists():
        return list(json.loads(kept.read_text()))
    from ckpt_tool.conversion.passes import selected
    from ckpt_tool.conversion.planning import make_plan
    from ckpt_tool.option_kinds.statement import value_of
    from ckpt_tool.options.reading import Reading
    from ckpt_tool.options.writing import Writing
    from ckpt_tool.plan.schedule import units
    from ckpt_tool.run.file_parts import in_order_of_files
    from ckpt_tool.run.shares import Shares
    from ckpt_tool.sources.chosen import Conversion
    from ckpt_tool.sources.opening import open_source
    from ckpt_tool.storage.output.destination import RemotePlace

    work.mkdir(parents=True, exist_ok=True)
    _, training = scale.sources(work)
    began = time.process_time()
    degrees = dict(zip((name[2:].replace("-", "_") for name in scale.DEGREES[::2]), scale.DEGREES[1::2], strict=True))
    writing = value_of({**degrees, "dry_run": True}, Writing)
    opened = open_source(str(training), Reading(from_format="sharded"))
    chosen = selected(opened, Conversion.of(opened, Reading(), writing))
    plan, _ = make_plan(chosen, RemotePlace("s3://bucket/out"), opened.format, writing)
    moves = plan.moves
    object.__setattr__(plan, "moves", tuple(moves))  # as a plan that was saved has them
    objects = [Object(file.size) for file in plan.outputs]
    for move in plan.moves:
        for region in move.outputs:
            objects[region.file].count(region, move.item_out)
    every = units(plan.moves)
    say(f"{len(objects)} objects, {len(every)} units, {time.process_time() - began:.0f} s of CPU so far")
    shares = Shares(plan, objects, in_order_of_files(plan, list(enumerate(every))))
    sizes = [share.nbytes for share in shares]
    say(f"{len(sizes)} shares; {time.process_time() - began:.0f} s of CPU")
    some = random.Random(0).sample(range(len(sizes)), min(_SAMPLE, len(sizes)))
    moved = sum(work.unit.nbytes for number in some for work in shares.work(number))
    whole = sum(unit.nbytes for unit in every) * sum(sizes[number] for number in some) / sum(sizes)
    say(f"{_SAMPLE} of them read {moved / whole:.3f} of what their parts hold: what stands at borders is read twice")
    kept.write_text(json.dumps(sizes))
    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2048)
    parser.add_argument("--speed", type=float, default=250, help="MB/s of a worker")
    parser.add_argument("--latency", type=float, default=0.1, help="seconds of a request, in the middle")
    parser.add_argument("--die", type=int, default=20)
    parser.add_argument("--late", type=int, default=20)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ckpt-bench")
    given = parser.parse_args()
    threading.stack_size(256 << 10)
    sizes = sizes_of_the_plan(given.work)
    found = simulate(
        sizes, given.workers, speed=given.speed * 1e6, latency=given.latency, die=given.die, late=given.late
    )
    print(json.dumps(found, indent=2))
    return 0 if found["lost"] < 0.02 and not found["undone"] and found["committing"] == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
