"""The words under which a trainer's wrapper keeps the model: prefixes of every name, or words inside names.

    module.model.layers.0.mlp.up_proj.weight               DistributedDataParallel, DeepSpeed
    model.model.layers.0.mlp.up_proj.weight                a LightningModule with `self.model`
    layers.0._checkpoint_wrapped_module.mlp.up_proj.weight activation checkpointing, inside a name

`families.wrappers` decides whether such a prefix is taken off: here are the words alone, so that a look at them loads
no family.
Sources: torch 2.13 `nn/parallel/distributed.py` (`module.`), `_dynamo/eval_frame.py` (`_orig_mod.`),
`distributed/fsdp/_common_utils.py` (`_fsdp_wrapped_module.`), below `distributed/algorithms/_checkpoint/`
`checkpoint_wrapper.py` (`_checkpoint_wrapped_module.`); Lightning 2.6 `strategies/strategy.py` (`_forward_module.`);
peft 0.21 (`base_model.model.`). Cost: one look at each name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

# What wrappers also leave in the middle of names
INSIDE_NAMES = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
# Words that no model of a library has as its own root
CERTAIN = ("module", "_forward_module", *INSIDE_NAMES)
# `model` and `net` are what people call the model in a LightningModule, and may be the model's own root.
WRAPPERS = (*CERTAIN, "model", "net", "base_model")

DEEPEST = 6  # wrappers around one another: compiled, in FSDP, in a LightningModule, in DDP
# What follows a root that belongs to the model itself: `model.layers.0` needs no look at the families
_OWN = ("model.layers.", "model.embed_tokens.")
_IN_NAME = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(INSIDE_NAMES)})\.")


def clean(name: str) -> str:
    """The name without what wrappers put in.

    >>> clean("layers.0._checkpoint_wrapped_module.w"), clean("layers.0.w")
    ('layers.0.w', 'layers.0.w')
    """
    return _IN_NAME.sub("", name) if "_" in name else name


def shared_wrappers(names: Sequence[str]) -> list[str]:
    """The known words with which all names begin, outermost first.

    >>> shared_wrappers(["module.net.w", "module.net.b"]), shared_wrappers(["model.layers.0.w"])
    (['module', 'net'], [])
    """
    if not names:
        return []
    words: list[str] = []
    first_words = names[0].split(".")[:-1]
    for word in first_words[:DEEPEST]:
        # PEFT's wrapper is two words, of which the second is one of the list too.
        prefix = ".".join((*words, word)) + "."
        if word not in WRAPPERS or not all(name.startswith(prefix) for name in names):
            break
        words.append(word)
    if words == ["model"] and any(name.startswith(_OWN) for name in names):
        return []
    return words


def find_unwrapped(names: Sequence[str], others: Collection[str]) -> dict[str, str] | None:
    """{name: the same without wrappers' parts}, taking off as many words as make most of them names of `others`; None
    where nothing makes more of them match than do already, or two names would be one.

    >>> find_unwrapped(["module.net.w", "module.net.b"], {"net.w", "net.b"})
    {'module.net.w': 'net.w', 'module.net.b': 'net.b'}
    """
    best: dict[str, str] | None = None
    most = len(set(names).intersection(others))
    if 2 * most > len(names):
        return None

    cleaned = [clean(name) for name in names]
    words = shared_wrappers(cleaned)
    for count in range(len(words) + 1):
        prefix = "".join(f"{word}." for word in words[:count])
        bare = [name.removeprefix(prefix) for name in cleaned]
        matching = len(set(bare).intersection(others))
        if matching > most and len(set(bare)) == len(names):
            best = dict(zip(names, bare, strict=True))
            most = matching
    return best
