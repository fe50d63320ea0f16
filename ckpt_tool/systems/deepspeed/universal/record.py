"""What `ckpt` itself notes in a universal checkpoint: the values that DeepSpeed has no key for, under `ckpt`.

The one idea: DeepSpeed ignores keys that it does not know, so everything that a conversion must not lose lies in one
dict in `zero/optimizer_state.pt`, while DeepSpeed's own keys are made from it where they can be. A reader that finds
the record takes the extras from it; one that does not (DeepSpeed wrote the folder) takes DeepSpeed's keys.

    {"version": 1, "extras": {...}, "made": ["global_steps", ...], "hints": {"roots": ...}, "step": "group",
     "repeats": ["w", ...], "folders": [[["fp32", "exp_avg", "exp_avg_sq", "step"], ["w", ...]]]}

extras: values whose keys DeepSpeed needs for itself. made: top-level keys of the module file that were made for
DeepSpeed and are no extras. step: `tensor` (a `step` a parameter came with the source) or `group` (it was made from the
extras).
repeats: parameters without a master of their own, whose `fp32.pt` repeats the model. folders: which parameters have
which files, so that a lost one is noticed. Data of a checkpoint: believed only as far as the types fit. Cost: nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_tool.systems.deepspeed.files import LAYOUT_KEYS

KEY = "ckpt"
CUTS = (
    "cuts"  # in the extras under `deepspeed`: parameter -> what stands beside its tensor, where not `cat_dim: 0` alone
)
# in the module file: extras that are tensors, states without a folder
TENSORS = "ckpt_tensors"
STATES = "ckpt_states"
# Keys of a module file that DeepSpeed lays out; a foreign source's values under these names go into the record.
OWN_KEYS = LAYOUT_KEYS | {"deepspeed", KEY, TENSORS, STATES}


@dataclass(frozen=True, slots=True)
class Recorded:
    """See the module."""

    extras: Mapping[str, Any] = field(default_factory=dict)
    made: tuple[str, ...] = ()
    hints: Mapping[str, Any] = field(default_factory=dict)
    step: str = "tensor"
    repeats: frozenset[str] = frozenset()
    folders: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()

    def to_value(self) -> dict[str, Any]:
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
        """The record; None where there is none of this version."""
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
