"""Ranks that are processes: over gloo, with CUDA tensors staged through the CPU, or over nccl with one rank per GPU.

Tensors are sent as bytes: every gather and exchange uses `uint8`, so that any dtype is possible and nothing is
rounded. gloo offers no send, receive or gather for CUDA tensors, so they are copied to the CPU and back; this lets
eight ranks share one GPU, which nccl refuses ("Duplicate GPU detected"). With nccl only gathers and sums use nccl;
messages between two ranks stay on gloo, because nccl matches them by order alone, and the two ends of a pipeline
order them differently.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from ckpt_tool.harness.comm import WAIT, Comm
from ckpt_tool.harness.layout import Group

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
