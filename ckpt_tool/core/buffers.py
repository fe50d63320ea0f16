"""Buffers: tensors of a module that are no parameters, recognised by the names that libraries give them.

    model.rotary_emb.inv_freq                  derived: the config says its values, a loader makes it again
    encoder.bn1.running_mean                   gathered: it follows the training, and no optimizer has a state for it

No library finds a derived buffer missing, so it may stay behind where names change. A gathered one is a part of the
model, but averages of weights (EMA) leave it out. Sources: torch 2.13 `nn/modules/batchnorm.py`, transformers 4.20 to
5.23 `modeling_*.py` (`register_buffer`). Cost: one look at the end of a name.
"""

from __future__ import annotations

import re

_DERIVED = re.compile(
    r"(?:^|\.)(?:(?:rotary\w*\.)(?:original_)?inv_freq|(?:rotary\w*\.)(?:cos|sin|cos_sin)_cached?|position_ids)$"
)
_GATHERED = re.compile(r"(?:^|\.)(?:running_mean|running_var|num_batches_tracked)$")


def is_derived(name: str) -> bool:
    """Is it a buffer that a loader makes again from the config?

    >>> is_derived("model.rotary_emb.inv_freq"), is_derived("model.embed_positions.weight")
    (True, False)
    """
    return bool(_DERIVED.search(name))


def is_gathered(name: str) -> bool:
    """Is it a buffer that a normalisation gathers while it is trained?

    >>> is_gathered("bn1.running_var"), is_gathered("bn1.weight")
    (True, False)
    """
    return bool(_GATHERED.search(name))


def is_buffer(name: str) -> bool:
    """Is it no parameter, whatever kind of buffer it is?"""
    return is_derived(name) or is_gathered(name)
