"""Start the ranks of a job, wait for what they return, and end them all when one dies.

    run_ranks(job.layout.world, entry, groups=..., backend="gloo")   -> [entry(comm) of rank 0, of rank 1, ...]

The one idea: import once, then fork. A new process would import torch's 900 modules, which takes seconds of CPU; a fork
has them. Results come back as JSON over a pipe, so they are plain values (floats survive to the bit). A rank that
raises sends its error and traceback and is gone; one that is killed just closes its pipe; either way the others are
killed at once and the parent raises: our own errors as themselves, all else as InternalError E1505 with the traceback
as its lines. If the parent dies, the ranks see the end of a pipe that only it held, and die too. `backend="sim"` runs
all ranks as threads of one fork.

The parent never computes: a fork can't use CUDA that is already begun, nor autograd where there is a GPU and it has run
before.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ckpt_tool import errors
from ckpt_tool.errors import CkptError, InternalError
from ckpt_tool.harness.comm import Board, Comm, SimComm
from ckpt_tool.harness.layout import Group

GRACE = 2.0  # seconds that the other ranks get to say what they died of
_PEER_LOST = ("Connection", "gloo/transport", "Broken pipe", "NCCL", "peer")
Entry = Callable[[Comm], Any]
How = Literal["gloo", "nccl", "sim"]


def preload() -> None:
    """Import what every rank will need, so that forks share it."""
    import torch._dynamo
    import torch.distributed
    import torch.distributed.nn
    import torch.nn.functional  # noqa: F401


def run_ranks(
    world: int,
    entry: Entry,
    *,
    groups: Sequence[Group] = (),
    backend: How = "gloo",
    device: str = "cpu",
    timeout: float = 600.0,
) -> list[Any]:
    """`entry(comm)` on every rank; the results, plain JSON values, by rank.

    Args:
        groups: of more than one rank, in the same order for all (`Layout.groups`).
        device: "cpu" or "cuda"; with nccl each rank takes the GPU of its number, else all share the first.
        timeout: seconds for the whole job.

    Raises the error of the first rank that died; InternalError E1505 if it was none of ours, E1506 after `timeout`.
    """
    preload()
    with tempfile.TemporaryDirectory(prefix="ckpt-ranks-") as folder:
        meeting = os.path.join(folder, "store")

        def work(rank: int) -> Any:
            if backend == "sim":
                return _threads(world, entry, device)
            return _process(rank, world, entry, meeting, groups, backend, device)

        life = os.pipe()  # never written to: ranks see its end when the parent, which alone holds it open, has ended
        ranks: list[_Rank] = []
        try:
            with _nothing_to_collect():
                for rank in range(1 if backend == "sim" else world):
                    ranks.append(_fork(rank, work, life))
            results = _collect(ranks, time.monotonic() + timeout)
        finally:
            _end(ranks)
            os.close(life[0])
            os.close(life[1])
    if backend != "sim":
        return results
    together: list[Any] = results[0]
    return together


@contextmanager
def _nothing_to_collect() -> Iterator[None]:
    """What this process has left for the garbage collector is never collected in a fork: a process group of the
    caller's would wait there for ever for threads that only the caller has."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(slots=True)
class _Rank:
    number: int
    pid: int
    pipe: int  # what the rank says, to read from
    output: bytes = b""


def _fork(rank: int, work: Callable[[int], Any], life: tuple[int, int]) -> _Rank:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return _Rank(rank, pid, read)
    status = 1
    try:
        os.close(read)
        os.close(life[1])
        threading.Thread(target=_die_with_parent, args=(life[0],), daemon=True).start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends the ranks
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic cuBLAS asks for
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        _say(write, {"result": work(rank)})
        status = 0
    except BaseException as error:  # a fork must never return into the caller's code: it says what happened and is gone
        _say(write, {"error": _as_json(error)})
    finally:
        os._exit(status)


def _process(
    rank: int, world: int, entry: Entry, meeting: str, groups: Sequence[Group], backend: How, device: str
) -> Any:
    """One rank of a job of processes."""
    from ckpt_tool.harness.comm_process import ProcessComm

    torch_device = torch.device(device, rank if backend == "nccl" else 0) if device == "cuda" else torch.device(device)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    comm = ProcessComm(rank, world, meeting, groups, "nccl" if backend == "nccl" else "gloo", torch_device)
    result = entry(comm)
    comm.close()
    return result


def _die_with_parent(pipe: int) -> None:
    os.read(pipe, 1)
    os._exit(1)


def _say(pipe: int, document: dict[str, Any]) -> None:
    raw = json.dumps(document).encode()
    while raw:
        raw = raw[os.write(pipe, raw) :]
    os.close(pipe)


def _as_json(error: BaseException) -> dict[str, Any]:
    lines = traceback.format_exception(error)
    if not isinstance(error, CkptError):
        return {"class": "", "lines": "".join(lines).splitlines()}
    fields = {
        name: getattr(error, name) for name in ("message", "code", "path", "offset", "place", "key", "hint", "faults")
    }
    return {"class": type(error).__name__, "fields": fields, "lines": "".join(lines).splitlines()}


def _as_error(rank: int, document: dict[str, Any]) -> CkptError:
    kind = getattr(errors, document["class"] or "InternalError")
    if document["class"]:
        fields = document["fields"]
        error: CkptError = kind(fields.pop("message"), **fields)
        return error
    lines = document["lines"]
    return InternalError(f"rank {rank} died: {lines[-1]}", code="E1505", place=f"rank {rank}", faults=lines)


def _collect(ranks: Sequence[_Rank], until: float) -> list[Any]:
    """Read all pipes to their end; raise for the rank that died first: of those that end within GRACE seconds of a
    death the one that got a signal, else one that did not just lose its peer."""
    results: dict[int, Any] = {}
    deaths: list[tuple[int, CkptError]] = []
    with selectors.DefaultSelector() as waiting:
        for rank in ranks:
            waiting.register(rank.pipe, selectors.EVENT_READ, rank)
        while len(results) + len(deaths) < len(ranks):
            ready = waiting.select(max(0.0, until - time.monotonic()))
            if not ready:
                if deaths:
                    break
                late = [rank.number for rank in ranks if rank.number not in results]
                raise InternalError(f"ranks {late} did not come to an end in time", code="E1506")
            for key, _ in ready:
                rank = key.data
                raw = os.read(rank.pipe, 1 << 20)
                rank.output += raw
                if not raw:
                    waiting.unregister(rank.pipe)
                    try:
                        results[rank.number] = _result(rank)
                    except CkptError as error:
                        deaths.append((_guilt(error), error))
                        until = min(until, time.monotonic() + GRACE)

    if deaths:
        raise max(deaths, key=lambda death: death[0])[1]  # the first of the guiltiest
    return [results[rank.number] for rank in ranks]


def _guilt(error: CkptError) -> int:
    """How likely a rank's death is the cause of the others': a signal, its own error, a peer that it lost."""
    if error.code == "E1505" and "was killed by" in error.message:
        return 2
    return 0 if any(sign in error.message for sign in _PEER_LOST) else 1


def _result(rank: _Rank) -> Any:
    """What a rank wrote before its pipe ended. Raises what it died of."""
    _, status = os.waitpid(rank.pid, 0)
    rank.pid = 0
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        name = signal.Signals(-code).name
        raise InternalError(f"rank {rank.number} was killed by {name}", code="E1505", place=f"rank {rank.number}")
    if not rank.output:
        raise InternalError(f"rank {rank.number} ended with {code} without a result", code="E1505")
    document = json.loads(rank.output)
    if "error" in document:
        raise _as_error(rank.number, document["error"])
    return document["result"]


def _end(ranks: Sequence[_Rank]) -> None:
    """Kill what still runs, and close the pipes."""
    for rank in ranks:
        if rank.pid:
            os.kill(rank.pid, signal.SIGKILL)
            os.waitpid(rank.pid, 0)
        os.close(rank.pipe)


def _threads(world: int, entry: Entry, device: str) -> list[Any]:
    """All ranks of a simulation, in this process."""
    board = Board()
    results = [None] * world
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = entry(SimComm(rank, world, board, torch.device(device)))
        except BaseException as error:  # kept for the main thread, which raises it
            failures.append((rank, error))
            board.fail()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, error = failures[0]
        raise error if isinstance(error, CkptError) else _as_error(rank, _as_json(error)) from error
    return results
