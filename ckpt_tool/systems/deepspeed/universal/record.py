"""The record that `ckpt` adds to a universal checkpoint: the values that DeepSpeed has no key for, under `ckpt`.

The one idea: DeepSpeed ignores keys that it does not know, so everything that a conversion must not lose is stored in
one dict in `zero/optimizer_state.pt`, and DeepSpeed's own keys are made from it where possible. A reader that finds the
record takes the extras from it; one that does not (DeepSpeed wrote the folder) takes DeepSpeed's keys.

    {"version": 1, "extras": {...}, "made": ["global_steps", ...], "hints": {"roots": ...}, "step": "group",
     "repeats": ["w", ...], "folders": [[["fp32", "exp_avg", "exp_avg_sq", "step"], ["w", ...]]]}

extras: values whose keys DeepSpeed needs for itself. made: top-level keys of the module file that were made for
DeepSpeed and are no extras. step: `tensor` (the source had a `step` for each parameter) or `group` (it was made from
the extras). repeats: parameters without a master of their own, whose `fp32.pt` repeats the model. folders: the files of
each parameter, so that a lost one is noticed. The record is data of a checkpoint: values of a wrong type are ignored.
Cost:
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_tool.systems.deepspeed.files import LAYOUT_KEYS

KEY = "ckpt"
CUTS = (
    "cuts"  # in the extras under `deepspeed`: parameter -> values next to its tensor, unless that is only `cat_dim: 0`
)
# Keys in the module file: for extras that are tensors, and for states that get no folder.
TENSORS = "ckpt_tensors"
STATES = "ckpt_states"
# Keys of a module file that DeepSpeed lays out; a foreign source's values under these names go into the record.
OWN_KEYS = LAYOUT_KEYS | {"deepspeed", KEY, TENSORS, STATES}


@dataclass(frozen=True, slots=True)
class Recorded:
    """The record; the module's docstring explains the fields."""

    extras: Mapping[str, Any] = field(default_factory=dict)
    made: tuple[str, ...] = ()
    hints: Mapping[str, Any] = field(default_factory=dict)
    step: str = "tensor"
    repeats: frozenset[str] = frozenset()
    folders: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()

    def to_value(self) -> dict[str, Any]:
        """Return the record as plain values, for a pickle."""
        return {
            "version": 1,
            "extras": dict(self.extras),
            "made": list(self.made),
            "hints": dict(self.hints),
            "step": self.step,
            "repeats": sorted(self.repeats),
            "folders": [[list(states), list(names)] for states, names in self.folders],
        }

    @staticmethod
    def from_value(value: Any) -> Recorded | None:
        """Return the record that `to_value` made, None if `value` is not one of this version."""
        if not isinstance(value, Mapping) or value.get("version") != 1:
            return None
        extras = value.get("extras")
        hints = value.get("hints")
        made = _strings(value.get("made"))
        repeats = _strings(value.get("repeats"))
        step = value.get("step")
        if not isinstance(extras, Mapping) or not isinstance(hints, Mapping) or step not in ("tensor", "group"):
            return None
        folders = value.get("folders")
        pairs = (
            [pair for pair in folders if isinstance(pair, list | tuple) and len(pair) == 2]
            if isinstance(folders, list)
            else []
        )
        known = tuple((_strings(states), _strings(names)) for states, names in pairs)
        return Recorded(extras, made, hints, step, frozenset(repeats), known)


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list | tuple) else ()
