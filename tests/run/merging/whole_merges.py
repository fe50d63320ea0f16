"""The methods stated again on whole tensors in torch, as mergekit 0.1.5 (LGPL; read, not copied) does them in fp32: the
oracle of `merging/`, which works by tiles. Where mergekit leaves the order of equal magnitudes to an unstable sort,
here it is stable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor
Trim = Callable[[int, Tensor], Tensor]  # (model, task vector) -> mask


def linear(models: Sequence[Tensor], weights: Sequence[float], *, normalize: bool = True) -> Tensor:
    factors = torch.tensor(weights)
    out = torch.zeros_like(models[0], dtype=torch.float32)
    for model, factor in zip(models, factors, strict=True):
        out.addcmul_(model, factor.reshape((1,) * model.ndim))
    return out / factors.sum() if normalize else out


def slerp(t: float, x: Tensor, y: Tensor) -> Tensor:
    a = x.float().flatten()
    b = y.float().flatten()
    na, nb = (n if n > 1e-8 else torch.tensor(1.0) for n in (a.norm(), b.norm()))
    cosine = ((a / na) * (b / nb)).sum().clamp(-1, 1)
    share = torch.tensor(t)
    if cosine.abs() > 0.9995:
        return ((1 - share) * a + share * b).reshape(x.shape)
    angle = torch.acos(cosine)
    return (
        torch.sin((1 - share) * angle) / torch.sin(angle) * a + torch.sin(share * angle) / torch.sin(angle) * b
    ).reshape(x.shape)


def nuslerp(t: float, x: Tensor, y: Tensor, base: Tensor | None = None, axis: int | None = None) -> Tensor:
    shape = x.shape
    origin = torch.zeros_like(x) if base is None else base
    a = x - origin if base is not None else x
    b = y - origin if base is not None else y
    if axis is None or a.ndim == 1:
        a = a.flatten()
        b = b.flatten()
        axis = 0
    ua, ub = (v / v.norm(dim=axis, keepdim=True).clamp(min=1e-7) for v in (a, b))
    cosine = (ua * ub).sum(dim=axis, keepdim=True).clamp(-1, 1)
    angle = torch.acos(cosine)
    mixed = (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(angle)
    mixed = torch.where(1 - cosine * cosine <= 1e-16, (1 - t) * a + t * b, mixed).reshape(shape)
    return mixed if base is None else base + mixed


def model_stock(base: Tensor, models: Sequence[Tensor], *, by_row: bool = False) -> Tensor:
    rows = [v.reshape(-1, v.shape[-1]) if by_row else v.reshape(1, -1) for v in (base, *models)]
    start = rows[0]
    ends = rows[1:]
    offsets = [end - start for end in ends]
    cosines = []
    for i, a in enumerate(offsets):
        for b in offsets[i + 1 :]:
            cosines.append(((a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp(min=1e-6)).clamp(-1, 1))
    cosine = torch.stack(cosines).mean(0).unsqueeze(-1)
    n = len(ends)
    below = 1 + (n - 1) * cosine
    t = torch.where(below.abs() < 1e-6, torch.zeros_like(below), n * cosine / below)
    return (t * (sum(ends) / n) + (1 - t) * start).reshape(base.shape)  # type: ignore[no-any-return]


def task_vectors(
    base: Tensor,
    models: Sequence[Tensor],
    weights: Sequence[float],
    trim: Trim | None = None,
    *,
    consensus: bool = False,
    normalize: bool = False,
    rescale: bool = False,
    factor: float = 1.0,
) -> Tensor:
    deltas = []
    for number, model in enumerate(models):
        delta = model - base
        if trim is not None:
            masked = delta * trim(number, delta)
            before = delta.abs().sum()
            after = masked.abs().sum()
            delta = masked * (before / after) if rescale and before >= 1e-7 and after >= 1e-7 else masked
        deltas.append(delta)
    stack = torch.stack(deltas)
    factors = torch.tensor(weights, dtype=torch.float32).reshape(-1, *(1,) * base.ndim)
    stack = stack * factors
    if consensus:
        majority = (stack.sum(0) >= 0).float() * 2 - 1
        mask = (stack.sign() == majority).float()
        mixed = (stack * mask).sum(0)
        divisor = (factors * mask).sum(0)
        divisor[divisor == 0] = 1
    else:
        mixed = stack.sum(0)
        divisor = factors.sum(0)
        divisor[divisor.abs() < 1e-8] = 1
    if normalize:
        mixed = mixed / divisor
    return base + mixed * factor


def largest(density: float) -> Trim:
    def mask(_: int, delta: Tensor) -> Tensor:
        order = torch.argsort(delta.abs().flatten(), descending=True, stable=True)
        out = torch.zeros(delta.numel())
        out[order[: max(1, int(density * delta.numel()))]] = 1
        return out.reshape(delta.shape)

    return mask


def crumbs(density: float, gamma: float) -> Trim:
    def mask(_: int, delta: Tensor) -> Tensor:
        n = delta.numel()
        left = int(density * n)
        bottom = max(0, n - left - int(gamma * n))
        order = torch.sort(delta.abs().flatten(), stable=True).indices
        out = torch.zeros(n)
        out[order[bottom : bottom + left]] = 1
        return out.reshape(delta.shape)

    return mask


def rank_limits(delta: Tensor, density: float, epsilon: float) -> Any:
    """DELLA's probability of each element, by its rank in its row."""
    rows = delta.abs().reshape(-1, delta.shape[-1])
    ranks = torch.argsort(torch.argsort(rows, dim=1, stable=True), dim=1).float()
    return ((density - epsilon) + ranks / (rows.shape[1] - 1) * 2 * epsilon).reshape(delta.shape)
