"""The weights of an average over the checkpoints of a run, oldest first.

    uniform      1/n each
    linear       1/n each (the decay curve 1 - x sampled at equal distances)
    cosine       by the curve (1 + cos(pi x)) / 2
    minus-sqrt   by the curve 1 - sqrt(x)
    ema          D^(n-1), (1-D) D^(n-2), ..., (1-D): an exponential average that starts at the oldest

A decay curve s falls from s(0) = 1. It is sampled at x = i/n for checkpoint i of n:

    newest  c[n-1] = s((n-1)/n)      between  c[i] = s(i/n) - s((i+1)/n)      oldest  c[0] = 1 - all others

so that the average approximates a run whose learning rate had decayed along the curve. The weights depend only on the
position of a checkpoint and add up to 1. Source: Megatron-LM `tools/checkpoint/weighted_merge.py`, which has all of
them except cosine; cosine follows the same rule.

    >>> [round(weight, 6) for weight in weights_of("minus-sqrt", 4)]
    [0.5, 0.207107, 0.158919, 0.133975]
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi, sqrt

UNIFORM = "uniform"
EXPONENTIAL = "ema"
_CURVES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + cos(pi * x)) / 2,
    "minus-sqrt": lambda x: 1 - sqrt(x),
}
SCHEDULES = (UNIFORM, *_CURVES, EXPONENTIAL)


def weights_of(schedule: str, count: int, decay: float = 0.0) -> tuple[float, ...]:
    """The weight of each of `count` checkpoints, oldest first. decay: D of `ema`, from 0 to below 1."""
    if schedule == UNIFORM or count == 1:
        return (1 / count,) * count
    if schedule == EXPONENTIAL:
        newer = [(1 - decay) * decay ** (count - 1 - position) for position in range(1, count)]
        return (decay ** (count - 1), *newer)

    curve = _CURVES[schedule]
    samples = [curve(position / count) for position in range(count)]
    falls = [samples[position] - samples[position + 1] for position in range(1, count - 1)]
    newer = [*falls, samples[count - 1]]
    return (1 - sum(newer), *newer)
