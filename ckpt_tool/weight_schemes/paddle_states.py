"""Quantised optimizer states of Paddle (`ckpt_quant_stage` O1 and O2): what is stored, and the state names it gets.

The one idea: a quantised moment is unusable as a moment until it is dequantised, so it gets a state name of its own
that no trainer mistakes for a moment, and its scales are kept under the same parameter. Nothing is lost by moving them
as they are.

    file key                    dtype, shape        state                        stage
    K/moment1_0                 I8 as K             exp_avg@int8                 O1
    K/moment1_0@scales          F32 [columns]       exp_avg@scales               O1; O2: [rows / 32, columns]
    K/moment2_0                 U8 as K             exp_avg_sq@uint8             O1
    K/moment2_0@min_scales      F32 [columns]       exp_avg_sq@min_scales        O1; O2: [rows / 32, columns]
    K/moment2_0@max_scales      F32 [columns]       exp_avg_sq@max_scales        O1; O2: [rows / 32, columns]
    K/moment2_0                 I8 as K             exp_avg_exp_avg_sq@int4      O2 (two-dimensional parameters alone)

Arithmetic (b = 127, 255, 7, 15; rows of O2 in groups of 32 along axis 0; scales broadcast over the last axis; of a 1-d
parameter in O1 there is one scale, shape ()):

    O1   exp_avg = q / 127 * scale                        exp_avg_sq = (1 / r - 1e-8)^2, r = q / 255 * (max - min) + min
    O2   exp_avg = (q >> 4) * scale / 7                   r = (q & 15) / 15 * (max - min) + min

O2 stores no `K/moment1_0`, though the index still names it; `total_size` counts what was there before quantising.
Source: PaddleFormers 1.2.0 `quantization/unified_checkpoint_quantization.py`, `checkpoint_quantization_utils.py`
(`qdq_weight`, `asymmetry_qdq_weight`, `group_wise_quant_dequant`, `merge_int4`). The arithmetic is `quantised`.

A catalog that holds such states carries the hint `QuantisedStates("paddle", "O1", 0)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ckpt_tool.core.hints import Hint

SYMMETRIC = "@scales"
LOW = "@min_scales"
HIGH = "@max_scales"
SUFFIXES = (SYMMETRIC, LOW, HIGH)
FIRST8 = "exp_avg@int8"
FIRST_SCALES = "exp_avg@scales"
SECOND8 = "exp_avg_sq@uint8"
SECOND_LOW = "exp_avg_sq@min_scales"
SECOND_HIGH = "exp_avg_sq@max_scales"
PACKED = "exp_avg_exp_avg_sq@int4"
GROUP = 32  # rows of O2 that share a scale


@dataclass(frozen=True, slots=True)
class QuantisedStates(Hint):
    """A hint that a source holds quantised optimizer states of Paddle."""

    KEY: ClassVar[str] = "quantised"
    kind: str
    stage: str
    resume_times: int  # the index's `quant_ckpt_resume_times`: how often they were read and written since


class PaddleQuantised(NamedTuple):
    """How to make one state, `made` (F32, of the shape of `stored`), from `stored` and its scales. All belong to one
    parameter."""

    made: str
    stored: str
    scales: tuple[str, ...]


RECIPES: Mapping[str, Sequence[PaddleQuantised]] = {
    "O1": (
        PaddleQuantised("exp_avg", FIRST8, (FIRST_SCALES,)),
        PaddleQuantised("exp_avg_sq", SECOND8, (SECOND_LOW, SECOND_HIGH)),
    ),
    "O2": (
        PaddleQuantised("exp_avg", PACKED, (FIRST_SCALES,)),
        PaddleQuantised("exp_avg_sq", PACKED, (SECOND_LOW, SECOND_HIGH)),
    ),
}
STATES = frozenset((FIRST8, FIRST_SCALES, SECOND8, SECOND_LOW, SECOND_HIGH, PACKED))


def recipes_of(states: Sequence[str]) -> tuple[PaddleQuantised, ...]:
    """The recipes that the quantised states of one parameter allow; () if none of its states is quantised.

    >>> [recipe.made for recipe in recipes_of(["exp_avg@int8", "exp_avg@scales", "beta1_pow_acc"])]
    ['exp_avg']
    """
    have = frozenset(states)
    every = (*RECIPES["O1"], *RECIPES["O2"])
    return tuple(recipe for recipe in every if have.issuperset((recipe.stored, *recipe.scales)))
