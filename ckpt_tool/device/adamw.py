"""One step of AdamW with an average over flat fp32 buffers on a device, and the swap of weights and average.

    step(device, Constants.of(step=7, rate=1e-3), Flat(n, g, p, m, v, e))

The bits are those of the formula in kernels/adamw_ema.cu, each operation rounded by itself in fp32: so a step over any
split of a buffer is the step over the whole. `harness/optimizer.py` has the same formula (torch's square root on a CPU
may be a bit off the nearest). NaN stays NaN, but a device may give it another payload. Elements are on their own size;
buffers on 16 bytes (8 for BF16) are fast. Nothing here knows torch: addresses are integers (`tensor.data_ptr()`).
"""

from __future__ import annotations

from ctypes import Structure, byref, c_float
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tool.device.library import Device
from ckpt_tool.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

KINDS = {"F32": 1, "BF16": 2}  # ck_kind (kernels/ck.h)


class Constants(NamedTuple):
    """What a step multiplies and divides by; see kernels/adamw_ema.cu. Rounded to fp32 on the way to the device."""

    scale: float
    beta1: float
    beta1_rest: float
    beta2: float
    beta2_rest: float
    correction1: float
    correction2: float
    eps: float
    decay: float
    rate: float
    average: float
    average_rest: float

    @classmethod
    def of(
        cls,
        *,
        step: int,
        rate: float,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        ema: float = 0.99,
        scale: float = 1.0,
    ) -> Self:
        """Those of step number `step` (the first is 1). scale: what gradients are multiplied with, to clip them."""
        if step < 1:
            raise UsageError(f"step {step} of AdamW, want 1 or more", code="E1574")
        return cls(
            scale,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            1 - beta1**step,
            1 - beta2**step,
            eps,
            1 - rate * weight_decay,
            rate,
            ema,
            1 - ema,
        )


class _Constants(Structure):
    _fields_ = [(name, c_float) for name in Constants._fields]


class Flat(NamedTuple):
    """Addresses of flat buffers of so many elements on the device."""

    elements: int
    gradient: int
    master: int
    exp_avg: int
    exp_avg_sq: int
    ema: int = 0  # 0 where there is none
    parameter: int = 0  # 0 where there is none
    gradient_kind: str = "F32"  # F32 or BF16; the others are F32
    parameter_kind: str = "BF16"  # F32 or BF16; the others are F32


def step(
    device: Device, constants: Constants, flat: Flat, *, blocks: int = 0, threads: int = 0, stream: int = 0
) -> None:
    """Update all buffers in place and write the parameter. Returns when the work is queued."""
    raw = _Constants(*constants)
    device.library.call(
        "adamw_ema",
        byref(raw),
        flat.elements,
        flat.gradient,
        _kind(flat.gradient_kind),
        flat.master,
        flat.exp_avg,
        flat.exp_avg_sq,
        flat.ema,
        flat.parameter,
        _kind(flat.parameter_kind),
        blocks,
        threads,
        stream,
    )


def swap(
    device: Device,
    count: int,
    master: int,
    ema: int,
    *,
    parameter: int = 0,
    parameter_kind: str = "BF16",
    blocks: int = 0,
    threads: int = 0,
    stream: int = 0,
) -> None:
    """Exchange two fp32 buffers in place and write the parameter from what `master` then is."""
    device.library.call("ema_swap", count, master, ema, parameter, _kind(parameter_kind), blocks, threads, stream)


def _kind(name: str) -> int:
    if name not in KINDS:
        raise UsageError(f"an optimizer's buffers of {name}, want F32 or BF16", code="E1575")
    return KINDS[name]
