"""AdamW with an exponential moving average, on any slice of a parameter's line; Muon for matrices.

The one idea: every operation is one multiplication, addition, division or square root of an element, never a fused
pair, so the bits of an element don't depend on the slice it is in. Formulas as in torch's AdamW: decoupled decay
(before the step), bias correction; then ema = d * ema + (1 - d) * master.

On a GPU the step is the kernel `adamw_ema`, one pass over the buffers, by this formula to the bit. torch's operations
are that on a CPU alone, and with the square root taken in fp64: its fp32 one is a bit off in places, and on a GPU it
divides by a number by multiplying with the reciprocal.

Muon keeps one momentum and steps by the nearest orthogonal matrix to it, which only the whole matrix has: a job gathers
it first, and every rank computes it by the same products of the same shapes, so that all layouts have the same bits.
Source: NVIDIA-NeMo/Emerging-Optimizers 0.3.0 `orthogonalized_optimizers/` (`orthogonalized_optimizer.py` `step`,
`muon.py` `get_muon_scale_factor`, `muon_utils.py` `newton_schulz`), NVIDIA/Megatron-LM
`core/optimizer/emerging_optimizers.py` (`TensorParallelMuon`, `tp_mode` "duplicated"; q, k and v each by itself, as its
`split_qkv`). What it does not do: gate and up as one matrix, which Megatron's fused weight is to its Muon.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass

import torch

from ckpt_tool.device import adamw, choose
from ckpt_tool.device.library import Device


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate: linear over `warmup` steps to `peak`, then half a cosine to `floor` at `total`."""

    warmup: int = 4
    total: int = 100
    peak: float = 3e-3
    floor: float = 3e-4

    def rate(self, step: int) -> float:
        """For step number `step`, the first being 1."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class AdamW:
    """Constants of the update; `clip` bounds the global gradient norm, `ema` is the average's decay."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    ema: float = 0.99

    def scalars(self) -> dict[str, float]:
        """The hyperparameters as they are saved in a checkpoint."""
        return asdict(self)

    def scale(self, norm: float) -> float:
        """What gradients are multiplied with so that their norm is at most `clip`."""
        return min(1.0, self.clip / (norm + 1e-6))

    def update(
        self,
        slices: Slices,
        gradient: torch.Tensor,
        *,
        step: int,
        rate: float,
        decays: bool,
        device: Device | None = None,
    ) -> None:
        """One step in place; `gradient` is fp32 of the slice's length, already clipped. device: whose kernel does
        it."""
        if device is not None:
            self._step_by_kernel(device, slices, gradient, step=step, rate=rate, decays=decays)
            return
        slices.exp_avg.mul_(self.beta1).add_(gradient * (1 - self.beta1))
        slices.exp_avg_sq.mul_(self.beta2).add_(gradient.square() * (1 - self.beta2))
        mean = slices.exp_avg / (1 - self.beta1**step)
        spread = (slices.exp_avg_sq / (1 - self.beta2**step)).double().sqrt_().float().add_(self.eps)
        if decays:
            slices.master.mul_(1 - rate * self.weight_decay)
        slices.master.sub_((mean / spread).mul_(rate))
        slices.ema.mul_(self.ema).add_(slices.master * (1 - self.ema))

    def _step_by_kernel(
        self, device: Device, slices: Slices, gradient: torch.Tensor, *, step: int, rate: float, decays: bool
    ) -> None:
        constants = adamw.Constants.of(
            step=step,
            rate=rate,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            ema=self.ema,
            weight_decay=self.weight_decay if decays else 0.0,
        )
        buffers = (gradient, slices.master, slices.exp_avg, slices.exp_avg_sq, slices.ema)
        stream = torch.cuda.current_stream(gradient.device).cuda_stream if gradient.is_cuda else 0
        if gradient.numel():
            g, p, m, v, e = (buffer.data_ptr() for buffer in buffers)
            flat = adamw.Flat(gradient.numel(), g, p, m, v, e)
            adamw.step(device, constants, flat, stream=stream)


@dataclass(frozen=True, slots=True)
class Muon:
    """Constants of Muon's update; learning rate, decay of weights and of the average are the job's AdamW's."""

    momentum: float = 0.95
    scale: float = 0.2  # times the square root of the longer side, so that steps are as long as AdamW's
    # of the five Newton-Schulz iterations ("quintic")
    coefficients: tuple[tuple[float, float, float], ...] = (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    )

    def scalars(self) -> dict[str, float]:
        """The hyperparameters as they are saved in a checkpoint."""
        return {"momentum": self.momentum, "scale": self.scale}

    def ahead(self, slices: MuonSlices, gradient: torch.Tensor) -> torch.Tensor:
        """The momentum takes the gradient in; returns what Nesterov's looks ahead to, of the slice's length."""
        slices.momentum_buffer.mul_(self.momentum).add_(gradient * (1 - self.momentum))
        return gradient * (1 - self.momentum) + slices.momentum_buffer * self.momentum

    def orthogonal(self, matrix: torch.Tensor) -> torch.Tensor:
        """Near the orthogonal matrix that is nearest to it, scaled. matrix: fp32 (rows, columns), whole."""
        rows, columns = matrix.shape
        x = (matrix.mT if rows > columns else matrix).contiguous()
        x = x / x.square().sum().sqrt().clamp_min(1e-7)
        for a, b, c in self.coefficients:
            square = x @ x.mT
            x = x * a + (square * b + (square @ square) * c) @ x
        return (x.mT if rows > columns else x) * (math.sqrt(max(rows, columns)) * self.scale)

    def update(self, slices: MuonSlices, direction: torch.Tensor, adam: AdamW, *, rate: float) -> None:
        """One step in place along `direction`, the slice's part of what `orthogonal` gave."""
        slices.master.mul_(1 - rate * adam.weight_decay).sub_(direction * rate)
        slices.ema.mul_(adam.ema).add_(slices.master * (1 - adam.ema))


def kernels_for(device: torch.device) -> Device | None:
    """The kernels for tensors on `device`: the GPU's, where they can be had; on a CPU none, or their host shim where
    CKPT_KERNELS asks for it (for tests: the same bits, slower)."""
    choice = os.environ.get("CKPT_KERNELS")
    if choice == "host" if device.type == "cpu" else choose.choose_device().level != "numpy":
        return choose.open_device(device.index or 0)
    return None


@dataclass(frozen=True, slots=True)
class Slices:
    """The optimizer's state of one parameter on one rank: four 1-d fp32 tensors of one length."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    ema: torch.Tensor

    @classmethod
    def fresh(cls, master: torch.Tensor) -> Slices:
        """The state before the first step."""
        return cls(master.clone(), torch.zeros_like(master), torch.zeros_like(master), master.clone())


@dataclass(frozen=True, slots=True)
class MuonSlices:
    """The same of a matrix that Muon steps: three."""

    master: torch.Tensor
    momentum_buffer: torch.Tensor
    ema: torch.Tensor

    @classmethod
    def fresh(cls, master: torch.Tensor) -> MuonSlices:
        """The state before the first step."""
        return cls(master.clone(), torch.zeros_like(master), master.clone())
