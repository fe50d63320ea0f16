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

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

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
