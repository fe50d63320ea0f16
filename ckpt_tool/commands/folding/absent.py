"""What an adapter's config speaks of and its file lacks: an adapter that was cut short folds without a fault, in part.

    target_modules: [q_proj], tensors of layers 0 and 1, a base of three     model.layers.2.self_attn.q_proj: no lora_A, lora_B
    modules_to_save: [lm_head], no lm_head.weight                            lm_head.weight: not there

Only what is sure is told: lists of endings (PEFT takes every module that has one), and modules whose namesakes in other
layers are there; so experts that are modules on disk and none in memory, or a pattern, raise no false alarm.
Source: PEFT 0.21.2 `tuners/tuners_utils.py` check_target_module_exists, `utils/other.py` ModulesToSaveWrapper.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ckpt_tool.commands.folding.settings import Settings

_NUMBER = re.compile(r"\d+")


def absent(base: Iterable[str], adapted: Collection[str], whole: Collection[str], settings: Settings) -> list[str]:
    """One line each. base: names of its tensors; adapted: its modules with a pair; whole: its tensors that are replaced."""
    out, targets = [], frozenset(settings.targets)
    kinds = {_NUMBER.sub("#", module) for module in adapted} if targets else set()
    for name in base:
        module, _, last = name.rpartition(".")
        if last == "weight" and module not in adapted and _NUMBER.sub("#", module) in kinds and _ends(module, targets):
            out.append(f"{module}: no lora_A and lora_B")
        elif name not in whole and any(f".{saved}." in f".{module}." for saved in settings.saved):
            out.append(f"{name}: not there, and it is of modules_to_save")
    return out


def _ends(module: str, endings: frozenset[str]) -> bool:
    parts = module.split(".")
    return any(".".join(parts[k:]) in endings for k in range(len(parts)))
