"""`--device cuda`: the same plan, carried out by the kernels. Without the option nothing here is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tool.errors import UsageError
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.plan import Moves, Plan

if TYPE_CHECKING:
    from ckpt_tool.device.library import Device
    from ckpt_tool.device.walk import DeviceMovers

MEMORY = 1 << 30  # bytes of pinned memory at most for verbs that have no --memory


def device_of(name: str) -> Device | None:
    """The device that `--device` names, None for the CPU.

    Raises UsageError E1553 to E1558 where there is no such device and StorageError where its kernels can't be had.
    """
    if name == "cpu":
        return None
    from ckpt_tool.device.choose import open_device

    return open_device()


class Moving(NamedTuple):
    """Who moves a run's units, and what the document says of it."""

    movers: DeviceMovers
    about: dict[str, Any]


def movers_of(writing: Writing, plan: Plan) -> Moving | None:
    """The movers of `--device`, None for the CPU. Raises as `device_of`, and UsageError E1560 where the device has no
    room."""
    if writing.device == "cpu":
        return None
    if writing.ray:
        raise UsageError(
            "--ray runs shares on the machines' CPUs, --device cuda on this one's GPU",
            code="E1564",
            hint="leave one of the two out; ckpt apply --part I/N --device cuda runs a share by hand",
        )
    device = device_of(writing.device)
    if device is None:
        return None
    from ckpt_tool.device.walk import DeviceMovers, left_to_cpu

    work = max(plan.bytes_read, plan.bytes_written)
    movers = DeviceMovers(
        device, threads=threads_of(writing.threads), memory=writing.memory, work=work, pinned=writing.pinned
    )
    about: dict[str, Any] = {
        "name": device.info.name,
        "pinned_memory": movers.sizes.pinned,
        "device_memory": movers.sizes.on_device,
    }
    listed = not isinstance(
        plan.moves, Moves
    )  # moves that are made when looked at are so many that only a cast is worth it
    left = left_to_cpu(plan.moves) if listed or writing.dtypes else {}
    if left:
        about["left_to_cpu"] = [
            {"tensors": count, "from": source.name, "to": target.name} for (source, target), count in left.items()
        ]
    return Moving(movers, about)


def with_device(report: Mapping[str, Any], moving: Moving | None) -> dict[str, Any]:
    """A writer's document, with what the device adds to it."""
    document = dict(report)
    if moving:
        plan = document["plan"]
        document["plan"] = {**plan, "peak_memory": plan["peak_memory"] + moving.movers.sizes.pinned}
        document["device"] = moving.about
    return document


def threads_of(requested: int | None) -> int:
    """The number of threads that feed a device: as requested, else one per CPU and at most 8."""
    return requested or min(os.cpu_count() or 1, 8)
