"""Suggests options that choose one of several averages (EMA) in a file, or give an average the model's names.

    ["emas.0.w", "emas.1.w"] next to ["w"]     --rename 'emas.0.*=*' --remove-keys 'emas.1.*'
    ["encoder.w"] next to ["w"]                --rename 'encoder.*=*'

EDM2's training state keeps one average for each width in a list, ema-pytorch's `PostHocEMA` one for each of its
`ema_models`; nothing in the file shows which is meant. A pattern applies to the names of all states: if it would match
the model too, nothing is suggested.

Sources: NVlabs/edm2 `training/phema.py` (`PowerFunctionEMA.state_dict`), ema-pytorch 0.7 `post_hoc_ema.py`. Cost: a few
lookups a name. What it does not do: rename anything, or say which average is the better one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence

LONG = 3  # patterns for what is left out; more are one expression
_SPECIAL = frozenset("*?[]{}=@!,\\")  # of patterns: names with these are not suggested as they are


def hint_for_averages(averages: Sequence[str], model: Sequence[str]) -> str | None:
    """What `--as-model ema` can be called with, None where no options are certain to work.

    Args:
        averages: the names of the averages, in their order. model: the names of the model's tensors.

    >>> hint_for_averages(["encoder.w", "encoder.b"], ["w", "b"])
    "--rename 'encoder.*=*' gives the averages the model's names"
    """
    leads = find_leads(averages, model)
    if not leads or any(_SPECIAL.intersection(lead) for lead in leads):
        return None

    # Both options match names in all states, and the model must keep its own.
    chosen = leads[0]
    if any(name.startswith(tuple(leads)) for name in model):
        return None
    named_as_model = {chosen + name for name in model}
    others = [name for name in averages if name not in named_as_model]
    removed = _patterns_of(others, chosen, leads, model)
    if removed is None:
        return None

    rename = f"--rename {shlex.quote(f'{chosen}*=*')}"
    options = " ".join([rename, *(f"--remove-keys {shlex.quote(pattern)}" for pattern in removed)])
    if len(leads) == 1:
        return f"{options} gives the averages the model's names"
    names = [lead.removesuffix(".") for lead in leads]
    more = f" and {len(names) - 1 - LONG} more" if len(names) > LONG + 1 else ""
    return (
        f"{len(leads)} averages are in the file: {options} writes {names[0]};"
        f" likewise {', '.join(names[1 : LONG + 1])}{more}"
    )


def find_leads(averages: Sequence[str], model: Collection[str]) -> list[str]:
    """What is before the model's names in those of the averages, one for each average.

    >>> find_leads(["emas.0.w", "emas.1.w", "emas.0.step"], ["w"])
    ['emas.0.', 'emas.1.']
    """
    # The longest name that has an average is hardly the end of another one.
    for name in sorted(model, key=len, reverse=True):
        leads = [average.removesuffix(name) for average in averages if average.endswith(f".{name}")]
        if leads:
            return leads
    return []


def _patterns_of(others: Sequence[str], chosen: str, leads: Sequence[str], model: Collection[str]) -> list[str] | None:
    """The patterns for `--remove-keys` that match all of `others`, and nothing of the model or of the chosen average;
    None where there are none."""
    if not others:
        return []
    strays = [name for name in others if not name.startswith(tuple(leads[1:]))]
    patterns = [*(f"{lead}*" for lead in leads[1:]), *strays]
    if len(patterns) <= LONG and not any(_SPECIAL.intersection(name) or name in model for name in strays):
        return patterns

    # All below the level that the averages share, but for the chosen one.
    if any(name.startswith(chosen) for name in others):
        return None
    shared = chosen.split(".")[0] + "."
    if all(name.startswith(shared) for name in others) and not any(name.startswith(shared) for name in model):
        return [f"re:^{re.escape(shared)}(?!{re.escape(chosen.removeprefix(shared))})"]
    return None
