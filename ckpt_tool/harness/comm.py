"""Communication between ranks: six operations with two implementations, threads here and processes in `comm_process`.

    all_gather(group, x)            -> [x of every rank of the group], in the group's order; equal shapes
    all_reduce(group, x)            -> their sum, as float as x is (native mode, and sums whose terms but one are 0)
    exchange(group, parts, shapes)  -> part i goes to rank i of the group, `shapes` are those of what comes; rows may
                                       be 0
    send(x, to, tag) / recv(shape, dtype, source, tag)
    barrier()

A group is a tuple of global ranks; operations in a group of one rank cost nothing. Empty tensors are never sent.

`SimComm` runs all ranks as threads of one process, which exchange tensors over one `Board`. `ProcessComm` uses gloo or
nccl between processes. In canonical mode all of them give the same bits.
"""

from __future__ import annotations

import datetime
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ckpt_tool.errors import InternalError
from ckpt_tool.harness.layout import Group

WAIT = 300.0  # seconds that a rank waits for another before it gives up


class Comm(ABC):
    """The six calls, and who this is: `rank` of `world`, tensors on `device`."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank = rank
        self.world = world
        self.device = device

    @property
    def everyone(self) -> Group:
        return tuple(range(self.world))

    @abstractmethod
    def all_gather(self, group: Group, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks of the group, in the group's order. All have one shape."""
        ...

    @abstractmethod
    def all_reduce(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the tensors of all ranks of the group, in their own precision."""
        ...

    @abstractmethod
    def exchange(
        self, group: Group, parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[torch.Tensor]: ...

    @abstractmethod
    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Send a tensor to a rank without waiting for it to be received."""
        ...

    @abstractmethod
    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int) -> torch.Tensor:
        """Wait for the next tensor that rank `source` sends to this rank with `tag`."""
        ...

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks of the job have called this."""
        ...


class Board:
    """The shared memory by which the threads of a simulation exchange values."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._slots: dict[object, dict[int, Any]] = {}
        self._readers: dict[object, int] = {}
        self._failed = False

    def fail(self) -> None:
        """A rank is gone: let all that wait for it go."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def put(self, key: object, rank: int, value: Any) -> None:
        """Leave a value of `rank` under `key`."""
        with self._changed:
            self._slots.setdefault(key, {})[rank] = value
            self._changed.notify_all()

    def take(self, key: object, writers: Group, readers: int) -> list[Any]:
        """What `writers` left under `key`, in their order; the last of `readers` clears it. Raises InternalError
        E1504."""
        with self._changed:
            is_complete = self._changed.wait_for(
                lambda: self._failed or all(rank in self._slots.get(key, {}) for rank in writers), WAIT
            )
            if self._failed or not is_complete:
                raise InternalError("another rank is gone", code="E1504", place=f"exchange {key}")
            values = [self._slots[key][rank] for rank in writers]
            self._readers[key] = self._readers.get(key, 0) + 1
            if self._readers[key] == readers:
                del self._slots[key], self._readers[key]
            return values


class SimComm(Comm):
    """A rank that is a thread. Values are cloned when sent, so that later changes of the sender are not seen."""

    def __init__(self, rank: int, world: int, board: Board, device: torch.device) -> None:
        super().__init__(rank, world, device)
        self._board = board
        self._turns: dict[object, int] = {}

    def _turn(self, *key: object) -> object:
        """A key of its own for each call in the same place: the ranks count alike."""
        self._turns[key] = self._turns.get(key, 0) + 1
        return (*key, self._turns[key])

    def all_gather(self, group: Group, tensor: torch.Tensor) -> list[torch.Tensor]:
        if len(group) == 1:
            return [tensor]
        key = self._turn("gather", group)
        self._board.put(key, self.rank, tensor.clone())
        return self._board.take(key, group, len(group))

    def all_reduce(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        parts = self.all_gather(group, tensor)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def exchange(
        self, group: Group, parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[torch.Tensor]:
        """As `Comm.exchange`."""
        if len(group) == 1:
            return [parts[0]]
        key = self._turn("exchange", group)
        position = group.index(self.rank)
        self._board.put(key, self.rank, [part.clone() for part in parts])
        return [rows[position] for rows in self._board.take(key, group, len(group))]

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        self._board.put(self._turn("send", self.rank, to, tag), self.rank, tensor.clone())

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int) -> torch.Tensor:
        tensor: torch.Tensor = self._board.take(self._turn("send", source, self.rank, tag), (source,), 1)[0]
        return tensor

    def barrier(self) -> None:
        self.all_gather(self.everyone, torch.zeros(1))


# ----------------------------------------------------------------------------------------------------
# Ranks that are processes: over gloo, with CUDA tensors staged through the CPU, or over nccl with one rank per GPU.
#
# Tensors are sent as bytes: every gather and exchange uses `uint8`, so that any dtype is possible and nothing is
# rounded. gloo offers no send, receive or gather for CUDA tensors, so they are copied to the CPU and back; this lets
# eight ranks share one GPU, which nccl refuses ("Duplicate GPU detected"). With nccl only gathers and sums use nccl;
# messages between two ranks stay on gloo, because nccl matches them by order alone, and the two ends of a pipeline
# order them differently.


Backend = Literal["gloo", "nccl"]
_EXCHANGE = 0  # the tag of exchanges; those of a pipeline start at 1


class ProcessComm(Comm):
    """One rank of a `torch.distributed` job. `meeting` is an empty file's path that all ranks know; `groups` in the
    same order."""

    def __init__(
        self, rank: int, world: int, meeting: str, groups: Sequence[Group], backend: Backend, device: torch.device
    ) -> None:
        super().__init__(rank, world, device)
        wait = datetime.timedelta(seconds=WAIT)
        dist.init_process_group("gloo", store=FileStore(meeting, world), rank=rank, world_size=world, timeout=wait)
        self._backend = backend
        self._carriers = {  # every rank makes every group: those of which it is no member come back as nothing
            group: dist.new_group(list(group), backend=backend, timeout=wait)
            for group in dict.fromkeys([*groups, self.everyone])
            if len(group) > 1
        }
        self._pending: list[tuple[dist.Work, torch.Tensor]] = []

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor's bytes where gloo can read them, however its owner goes on."""
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).to("cpu", copy=True)

    def _wire(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device) if self._backend == "nccl" else tensor.cpu()

    def _like(self, raw: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return raw.view(dtype).reshape(shape).to(self.device)

    def all_gather(self, group: Group, tensor: torch.Tensor) -> list[torch.Tensor]:
        if len(group) == 1 or not tensor.numel():
            return [tensor] * len(group)
        raw = self._wire(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        parts = [torch.empty_like(raw) for _ in group]
        dist.all_gather(parts, raw, group=self._carriers[group])
        return [self._like(part, tuple(tensor.shape), tensor.dtype) for part in parts]

    def all_reduce(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        if len(group) == 1 or not tensor.numel():
            return tensor
        total = self._wire(tensor.detach().contiguous().clone())
        dist.all_reduce(total, group=self._carriers[group])
        return total.to(tensor.device)

    def exchange(
        self, group: Group, parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> list[torch.Tensor]:
        """As `Comm.exchange`."""
        received: list[torch.Tensor] = []
        waiting: list[tuple[dist.Work, torch.Tensor]] = []
        raws: list[torch.Tensor | None] = []
        for peer, part, shape in zip(group, parts, shapes, strict=True):
            raw = None
            if peer != self.rank and torch.Size(shape).numel():
                raw = torch.empty(torch.Size(shape).numel() * part.element_size(), dtype=torch.uint8)
                waiting.append((self._work(dist.irecv(raw, src=peer, tag=_EXCHANGE)), raw))
            if peer != self.rank and part.numel():
                staged = self._stage(part)
                waiting.append((self._work(dist.isend(staged, dst=peer, tag=_EXCHANGE)), staged))
            raws.append(raw)
        for work, _ in waiting:
            work.wait()
        for peer, part, shape, raw in zip(group, parts, shapes, raws, strict=True):
            if peer == self.rank:
                received.append(part)
            elif raw is None:
                received.append(part.new_empty(shape))
            else:
                received.append(self._like(raw, shape, part.dtype))
        return received

    @staticmethod
    def _work(work: dist.Work | None) -> dist.Work:
        if work is None:
            raise RuntimeError("torch.distributed gave no handle: this rank is in no process group")
        return work

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        self._pending = [(work, tensors) for work, tensors in self._pending if not work.is_completed()]
        staged = self._stage(tensor)
        self._pending.append((self._work(dist.isend(staged, dst=to, tag=1 + tag)), staged))

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int) -> torch.Tensor:
        raw = torch.empty(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
        dist.recv(raw, src=source, tag=1 + tag)
        return self._like(raw, shape, dtype)

    def barrier(self) -> None:
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the job, after all have come so far."""
        self.barrier()
        dist.destroy_process_group()
