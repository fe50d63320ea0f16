"""Files of an optimizer that lie beside a model, and what a reader says that can't take one: they number parameters.

    accelerator.save_state:  model.safetensors, optimizer.bin, scheduler.bin, random_states_0.pkl
    transformers' Trainer:   model.safetensors, optimizer.pt, scheduler.pt, rng_state.pth
    PaddleFormers' Trainer:  model-00001-of-00002.safetensors, optimizer.pdopt

`optimizer.state_dict()` knows parameters by number, in the order in which they were given to the optimizer: groups,
frozen weights and tied ones change it, and weights of one shape may stand for each other. Where one order alone fits
(`formats.torch.beside_model`) the states are read; else nothing is guessed.

Sources: accelerate 1.15.0 `checkpointing.py` (OPTIMIZER_NAME), transformers 5.23.0 `trainer.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

UNREAD = "N-optimizer-unread"  # the note on such a file
_OPTIMIZER = re.compile(r"optimizer(_\d{1,6})?\.(pt|pth|bin)|optimizer[\w.\-]*\.pdopt")


def optimizer_files(names: Iterable[str], taken: Iterable[str]) -> list[str]:
    """Those of `names`, files directly in the checkpoint's folder, that hold an optimizer's state and are not among
    `taken`."""
    return sorted({name for name in names if _OPTIMIZER.fullmatch(name)}.difference(taken))
