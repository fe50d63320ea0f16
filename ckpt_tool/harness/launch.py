"""Start the ranks of a job, wait for what they return, and end them all when one dies.

    run_ranks(job.layout.world, entry, groups=..., backend="gloo")   -> [entry(comm) of rank 0, of rank 1, ...]

The one idea: import once, then fork. A rank that starts anew imports torch's 900 modules, seconds of CPU each; a fork has them.
Results come back as JSON over a pipe, so they are plain values (floats survive to the bit). A rank that raises sends its error
and traceback and is gone; one that is killed just closes its pipe; either way the others are killed at once and the parent raises:
our own errors as themselves, all else as InternalError E1505 with the traceback as its lines. If the parent dies, the ranks see the
end of a pipe that only it held, and die too. `backend="sim"` runs the ranks as threads of this process instead.

No CUDA in the parent before this: a fork can't use it.
"""

from __future__ import annotations

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
    if backend == "sim":
        return _threads(world, entry, device)
    preload()
    with tempfile.TemporaryDirectory(prefix="ckpt-ranks-") as folder:
        meeting = os.path.join(folder, "store")
        held, kept = os.pipe()  # nobody writes: it ends when the parent does
        ranks: list[_Rank] = []
        try:
            for rank in range(world):
                ranks.append(_fork(rank, world, entry, meeting, groups, backend, device, (held, kept)))
            return _collected(ranks, time.monotonic() + timeout)
        finally:
            _end(ranks)
            os.close(held)
            os.close(kept)


@dataclass(slots=True)
class _Rank:
    number: int
    pid: int
    pipe: int  # what the rank says, to read from
    said: bytes = b""


def _fork(
    rank: int,
    world: int,
    entry: Entry,
    meeting: str,
    groups: Sequence[Group],
    backend: How,
    device: str,
    life: tuple[int, int],
) -> _Rank:
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
        _say(write, _child(rank, world, entry, meeting, groups, backend, device))
        status = 0
    except BaseException as error:  # a fork must never return into the caller's code: it says what happened and is gone
        _say(write, {"error": _as_json(error)})
    finally:
        os._exit(status)


def _child(
    rank: int, world: int, entry: Entry, meeting: str, groups: Sequence[Group], backend: How, device: str
) -> dict[str, Any]:
    from ckpt_tool.harness.comm_process import ProcessComm

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    where = torch.device(device, rank if backend == "nccl" else 0) if device == "cuda" else torch.device(device)
    comm = ProcessComm(rank, world, meeting, groups, "nccl" if backend == "nccl" else "gloo", where)
    result = entry(comm)
    comm.close()
    return {"result": result}


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


def _collected(ranks: Sequence[_Rank], until: float) -> list[Any]:
    """Read all pipes to their end; raise for the first rank that ended badly."""
    results: dict[int, Any] = {}
    with selectors.DefaultSelector() as waiting:
        for rank in ranks:
            waiting.register(rank.pipe, selectors.EVENT_READ, rank)
        while len(results) < len(ranks):
            ready = waiting.select(max(0.0, until - time.monotonic()))
            if not ready:
                late = [rank.number for rank in ranks if rank.number not in results]
                raise InternalError(f"ranks {late} did not come to an end in time", code="E1506")
            for key, _ in ready:
                rank = key.data
                raw = os.read(rank.pipe, 1 << 20)
                rank.said += raw
                if not raw:
                    waiting.unregister(rank.pipe)
                    results[rank.number] = _result(rank)
    return [results[rank.number] for rank in ranks]


def _result(rank: _Rank) -> Any:
    """What a rank said before its pipe ended. Raises what it died of."""
    _, status = os.waitpid(rank.pid, 0)
    rank.pid = 0
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        name = signal.Signals(-code).name
        raise InternalError(f"rank {rank.number} was killed by {name}", code="E1505", place=f"rank {rank.number}")
    if not rank.said:
        raise InternalError(f"rank {rank.number} ended with {code} and said nothing", code="E1505")
    document = json.loads(rank.said)
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


# -- all ranks in this process ------------------------------------------------------------------------------------------


@contextmanager
def _one_thread_each() -> Iterator[None]:
    threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(exact)


def _threads(world: int, entry: Entry, device: str) -> list[Any]:
    board, results = Board(), [None] * world
    first: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = entry(SimComm(rank, world, board, torch.device(device)))
        except BaseException as error:  # kept for the caller's thread, which raises it
            first.append((rank, error))
            board.fail()

    with _one_thread_each():
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if first:
        rank, error = first[0]
        raise error if isinstance(error, CkptError) else _as_error(rank, _as_json(error)) from error
    return results
